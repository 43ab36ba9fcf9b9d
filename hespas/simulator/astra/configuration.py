"""ASTRA-sim's configuration: system.json, network.yml and remote memory files, read and written, and options.

Keys and defaults: reference of ASTRA-sim 518bd51, https://astra-sim.github.io. Bandwidths of network.yml are
GiB/s, ``local-mem-bw`` is 10^9 B/s, ``remote-mem-bw`` bytes/ns. ``network.yml`` is read without YAML: keys
with lists, on one line (``key: [a, b]``) or one entry per line (``- a``); anything else raises an error. Keys
that do not affect the analytical simulator are listed in ``unread``.

Units of written files (518bd51): a bandwidth of network.yml is in GiB/s, for one link of a ring or of a
direct connection, or for all links of a device behind a switch. A message through a switch is charged the
latency twice, so half of it is written. Chunks go one way around a ring. ASTRA-sim has no oversubscription:
the bandwidth that each device gets is written.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, prod
from pathlib import Path
from typing import Literal, TypeGuard, cast, get_args

from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError, UsageError, clipped
from hespas.hardware import Dimension, System, host_payload, load_device

__all__ = [
    "FILE_NAMES",
    "IMPLEMENTATION_KEYS",
    "MAX_NPUS",
    "AstraOptions",
    "Backend",
    "MemoryConfig",
    "NetworkConfig",
    "Optimization",
    "SystemConfig",
    "Topology",
    "astra_sim_files",
    "read_memory_config",
    "read_network_config",
    "read_system_config",
]


Topology = Literal["Ring", "FullyConnected", "Switch"]

_TOPOLOGIES: Mapping[str, Topology] = {name: name for name in get_args(Topology)}

IMPLEMENTATION_KEYS: Mapping[CollectiveKind, str] = {
    CollectiveKind.ALL_REDUCE: "all-reduce-implementation",
    CollectiveKind.ALL_GATHER: "all-gather-implementation",
    CollectiveKind.REDUCE_SCATTER: "reduce-scatter-implementation",
    CollectiveKind.ALL_TO_ALL: "all-to-all-implementation",
}

_MEMORY_TYPES = (
    "NO_MEMORY_EXPANSION",
    "PER_NPU_MEMORY_EXPANSION",
    "PER_NODE_MEMORY_EXPANSION",
    "MEMORY_POOL",
)

_LARGEST = sys.float_info.max

_LINE = re.compile(r"^([A-Za-z_][\w-]*)\s*:\s*\[([^\[\]]*)\]\s*$")

_KEY = re.compile(r"^([A-Za-z_][\w-]*)\s*:\s*$")

_ENTRY = re.compile(r"^\s*-\s+(\S.*)$")

Optimization = Literal["baseline", "localBWAware"]

MAX_NPUS = 1 << 24
"""Limit on the ranks of a network; above it, their figures alone take gigabytes."""

_NETWORK_KEYS = ("topology", "npus_count", "bandwidth", "latency")

_MEMORY_KEYS = ("memory-type", "num-nodes", "num-npus-per-node", "remote-mem-latency", "remote-mem-bw")

_READ_KEYS = frozenset(
    {
        "collective-optimization", "active-chunks-per-dimension", "endpoint-delay", "model-shared-bus",
        "preferred-dataset-splits", "peak-perf", "local-mem-bw", "roofline-enabled", "replay-only",
        "per-node-custom-implementation",
        *IMPLEMENTATION_KEYS.values(),
        *(f"{key}-custom" for key in IMPLEMENTATION_KEYS.values()),
    }
)  # fmt: skip
"""Keys of system.json that change a time. ``scheduling-policy`` does not: a rank runs one collective at a
time, so chunks of different priority never wait in one queue.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """Contents of ``system.json``. A field is None if the file does not have its key.

    A collective of a ``custom`` kind runs a Chakra graph as its algorithm. ``unread`` lists the keys of the
    file that have no effect on simulated times.
    """

    path: str
    scheduling_policy: str
    dataset_splits: int | None
    active_chunks_per_dimension: int
    local_memory_gb_per_s: float | None
    peak_tflops: float
    roofline: bool
    tracks_local_memory: bool
    implementations: Mapping[CollectiveKind, tuple[str, ...]]
    custom: frozenset[CollectiveKind]
    endpoint_delay_ns: int = 10
    optimization: Optimization = "baseline"
    replays_only: bool = False
    models_shared_bus: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Contents of ASTRA-sim's ``network.yml``: one entry per dimension; dimension 0 is the innermost."""

    path: str
    topology: tuple[Topology, ...]
    npus: tuple[int, ...]
    bandwidth_gib_per_s: tuple[float, ...]
    latency_ns: tuple[float, ...]
    unread: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the whole network."""
        return prod(self.npus)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Contents of the remote memory file, from which load and store nodes take their times.

    A transaction takes ``latency_ns`` plus its bytes / ``bandwidth`` [bytes/ns]. If there is one memory per
    node (machine), ``nodes`` is the number of memories, and each serves ``npus_per_node`` ranks.
    """

    path: str
    memory_type: str
    latency_ns: int = 0
    bandwidth: int = 0
    nodes: int = 0
    npus_per_node: int = 0
    unread: tuple[str, ...] = ()

    @property
    def has_remote_memory(self) -> bool:
        """Return True if the system has a memory other than the device's own."""
        return self.memory_type != "NO_MEMORY_EXPANSION"


def _read(path: Path) -> str:
    data = read_document(path, limits().configuration_bytes, "a configuration file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(
            "not UTF-8 text", path=str(path), position=f"byte {error.start}", hint="save it as UTF-8"
        ) from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dictionary. Raises ``ValueError`` for a key that occurs twice, because its
    value is ambiguous.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {clipped(key)!r}")
    return values


class _JsonFile:
    """JSON object with typed access; every error names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        try:
            loaded: object = json.loads(_read(path), object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise FormatError(
                f"not JSON: {error.msg}",
                path=self.path,
                position=f"line {error.lineno}",
                hint="correct the JSON at this line",
            ) from error
        except ValueError as error:  # a duplicate key, or an integer of thousands of digits
            text = str(error).partition(";")[0]
            raise FormatError(
                text, path=self.path, hint="correct the value in the file, and give each key once"
            ) from error
        except RecursionError:
            raise FormatError(
                "nested too deeply for a configuration file", path=self.path, hint="check the path"
            ) from None
        if not isinstance(loaded, dict):
            raise FormatError("expected one JSON object", path=self.path, hint='write {"key": value, ...}')
        self.values = cast("dict[str, object]", loaded)

    def fault(self, key: str, expected: str) -> FormatError:
        return FormatError(
            f"{key} is {clipped(repr(self.values.get(key)))}",
            path=self.path,
            position=key,
            hint=f"use {expected}",
        )

    def real(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
            raise self.fault(key, "a number of at least 0")
        return float(value)

    def time(self, key: str) -> float | None:
        """Return the number of a key, which must be below 2^31; None if the key is missing."""
        value = self.real(key)
        if value is not None and value >= 1 << 31:
            raise self.fault(key, "a number from 0 to below 2^31")
        return value

    def count(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise self.fault(key, "a positive integer of 31 bits")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, 0)
        if not isinstance(value, int) or value not in (0, 1):
            raise self.fault(key, "0 or 1")
        return bool(value)

    def text(self, key: str, choices: tuple[str, ...], default: str | None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.fault(key, f"one of {', '.join(choices)}")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not _is_texts(value):
            raise self.fault(key, "a list of names")
        return tuple(value)


def _is_texts(value: object) -> TypeGuard[list[str]]:
    if not isinstance(value, list):
        return False
    return all(isinstance(entry, str) for entry in cast("list[object]", value))


def read_system_config(path: Path) -> SystemConfig:
    """Read ``system.json``. Raises ``FormatError`` that names the invalid key."""
    source = _JsonFile(path)
    splits = source.count("preferred-dataset-splits")
    implementations = {
        kind: names for kind, key in IMPLEMENTATION_KEYS.items() if (names := source.texts(key)) is not None
    }
    custom = {kind for kind, key in IMPLEMENTATION_KEYS.items() if f"{key}-custom" in source.values}
    delay = source.time("endpoint-delay")
    optimization = source.text("collective-optimization", get_args(Optimization), "baseline")
    return SystemConfig(
        path=str(path),
        scheduling_policy=source.text("scheduling-policy", ("LIFO", "FIFO", "EXPLICIT"), "LIFO"),
        dataset_splits=splits,
        active_chunks_per_dimension=source.count("active-chunks-per-dimension") or 1,
        local_memory_gb_per_s=source.real("local-mem-bw"),
        peak_tflops=source.real("peak-perf") or 0.0,
        roofline=source.flag("roofline-enabled"),
        tracks_local_memory=source.flag("track-local-mem"),
        implementations=implementations,
        custom=frozenset(IMPLEMENTATION_KEYS)
        if "per-node-custom-implementation" in source.values
        else frozenset(custom),
        endpoint_delay_ns=10 if delay is None else int(delay),
        optimization="localBWAware" if optimization == "localBWAware" else "baseline",
        replays_only=source.flag("replay-only"),
        models_shared_bus=source.flag("model-shared-bus"),
        unread=tuple(key for key in source.values if key not in _READ_KEYS),
    )


def read_memory_config(path: Path) -> MemoryConfig:
    """Read the remote memory file. Raises ``FormatError`` that names the invalid key."""
    source = _JsonFile(path)
    kind = source.text("memory-type", _MEMORY_TYPES, None)
    bandwidth = int(source.time("remote-mem-bw") or 0)
    if kind != "NO_MEMORY_EXPANSION" and "remote-mem-bw" in source.values and not bandwidth:
        raise source.fault("remote-mem-bw", "a whole number of bytes per ns, at least 1")
    return MemoryConfig(
        path=str(path),
        memory_type=kind,
        latency_ns=int(source.time("remote-mem-latency") or 0),
        bandwidth=bandwidth,
        nodes=source.count("num-nodes") or 0,
        npus_per_node=source.count("num-npus-per-node") or 0,
        unread=tuple(key for key in source.values if key not in _MEMORY_KEYS),
    )


def read_network_config(path: Path) -> NetworkConfig:
    """Read ``network.yml``. Raises ``FormatError`` with the invalid line."""
    lists: dict[str, list[str]] = {}
    open_list: list[str] | None = None
    for number, raw in enumerate(_read(path).splitlines(), 1):
        line = raw.split("#", 1)[0].rstrip()
        if not line or line == "---":
            continue
        entry = _ENTRY.match(line)
        if entry is not None and open_list is not None:
            open_list.append(_unquoted(entry[1]))
            continue
        match = _LINE.match(line) or _KEY.match(line)
        if match is None or match[1] in lists:
            what = "duplicate key" if match else "not of the form 'key: [a, b]'"
            raise FormatError(
                what,
                path=str(path),
                position=f"line {number}",
                hint="write each list on one line: npus_count: [8, 2]",
            )
        on_line = match[2].strip() if match.re is _LINE else ""
        lists[match[1]] = [_unquoted(entry_text) for entry_text in on_line.split(",")] if on_line else []
        open_list = lists[match[1]] if match.re is _KEY else None
    for key in _NETWORK_KEYS:
        if key not in lists:
            raise FormatError(f"{key} is missing", path=str(path), hint=f"add a line '{key}: [...]'")
    for name in lists["topology"]:
        if name not in _TOPOLOGIES:
            hint = f"use one of {', '.join(_TOPOLOGIES)}"
            raise FormatError(f"topology {name!r} is unknown", path=str(path), position="topology", hint=hint)
    topology: tuple[Topology, ...] = tuple(_TOPOLOGIES[name] for name in lists["topology"])
    npus = tuple(_integer(path, "npus_count", text) for text in lists["npus_count"])
    bandwidth = tuple(_real(path, "bandwidth", text) for text in lists["bandwidth"])
    latency = tuple(_real(path, "latency", text) for text in lists["latency"])
    if len({len(topology), len(npus), len(bandwidth), len(latency)}) != 1 or not topology:
        raise FormatError(
            f"the lists have different lengths, or none: topology {len(topology)}, npus_count {len(npus)}, "
            f"bandwidth {len(bandwidth)}, latency {len(latency)}",
            path=str(path),
            hint="give topology, npus_count, bandwidth and latency one entry per dimension",
        )
    if prod(npus) > MAX_NPUS:
        raise FormatError(
            f"{prod(npus):,} NPUs exceed the limit of {MAX_NPUS:,}", path=str(path), position="npus_count",
            hint="state fewer per dimension",
        )  # fmt: skip
    return NetworkConfig(
        path=str(path),
        topology=topology,
        npus=npus,
        bandwidth_gib_per_s=bandwidth,
        latency_ns=latency,
        unread=tuple(key for key in lists if key not in _NETWORK_KEYS),
    )


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")


def _integer(path: Path, key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        fault, hint = f"{text!r} is not a positive integer", "write it as 8, without a sign"
        raise FormatError(fault, path=str(path), position=key, hint=hint)
    return int(text)


def _real(path: Path, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        fault = f"{text!r} is not a number of at least 0"
        raise FormatError(fault, path=str(path), position=key, hint="write it as 50.0")
    return value


Backend = Literal["unaware", "aware"]
"""ASTRA-sim's analytical networks: congestion-unaware and congestion-aware."""

_MOST_QUEUES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AstraOptions:
    """Options of ASTRA-sim mode: the configuration files as read, the network backend, and the number of
    queues per dimension.
    """

    system: SystemConfig
    network: NetworkConfig
    memory: MemoryConfig | None = None
    backend: Backend = "unaware"
    queues_per_dim: int = 1

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.backend not in get_args(Backend):
            raise UsageError(f"unknown backend {self.backend!r}", hint="use one of: unaware, aware")
        if not 1 <= self.queues_per_dim <= _MOST_QUEUES:
            raise UsageError(
                f"invalid `queues_per_dim={self.queues_per_dim}`",
                hint=f"use a whole number from 1 to {_MOST_QUEUES}",
            )


FILE_NAMES = ("system.json", "network.yml", "remote_memory.json")

_GIB = 1 << 30

_BYTES_PER_GIGA = 1e9

_WRITTEN_TOPOLOGIES: Mapping[str, Topology] = {
    "ring": "Ring",
    "fully_connected": "FullyConnected",
    "switch": "Switch",
}

_HOPS = {"Ring": 1, "FullyConnected": 1, "Switch": 2}

_SPLITS = 4
"""Chunks of a collective, so that dimensions work on different chunks at once."""

_ENDPOINT_DELAY_NS = 10
"""ASTRA-sim's default."""


def astra_sim_files(system: System, diagnostics: Diagnostics) -> Mapping[str, str]:
    """Return the text of each ASTRA-sim configuration file (:data:`FILE_NAMES`) for a system with known
    sizes. Dimensions with a single device are omitted.

    Raises ``UsageError`` for a system of one device, and if the number of devices is not the product of the
    dimensions. Raises ``UnsupportedError`` for an unknown latency. Properties that ASTRA-sim cannot represent
    are reported.
    """
    capacity = prod(system.shape)
    if system.devices < 0:
        raise UsageError(f"{system.name} has no number of devices", hint="add `devices=64`, or their shape")
    if capacity != system.devices:
        full = prod(system.shape[:-1])
        raise UsageError(
            f"ASTRA-sim runs whole systems: {system.devices:,} devices do not fill "
            f"{'x'.join(map(str, system.shape))} of {system.name}",
            hint=f"use {system.devices // full * full or capacity:,} or {capacity:,} devices",
        )
    if system.devices == 1:
        raise UsageError(
            f"a job on one device of {system.name} has no network to simulate, and ASTRA-sim requires one",
            hint="use 2 or more devices, or simulate one with `mode=hespas`",
        )
    used = [dimension for dimension in system.dimensions if dimension.size > 1]
    for dimension in used:
        _check(dimension, system, diagnostics)
    link = load_device(system.device).link("pcie") if system.device else None
    settings: dict[str, object] = {"memory-type": "NO_MEMORY_EXPANSION"}
    if link is not None and link.bandwidth_bytes_per_s >= _BYTES_PER_GIGA:
        settings = {
            "memory-type": "PER_NPU_MEMORY_EXPANSION",
            "remote-mem-latency": 0 if isnan(link.latency_ns) else int(link.latency_ns),
            "remote-mem-bw": int(host_payload(link) * link.bandwidth_bytes_per_s / _BYTES_PER_GIGA),
        }
    topology = [_WRITTEN_TOPOLOGIES[dimension.topology] for dimension in used]
    latency = [dimension.latency_ns / _HOPS[name] for dimension, name in zip(used, topology, strict=True)]
    bandwidth: list[float] = []
    for dimension in used:
        whole = min(dimension.bandwidth_bytes_per_s, dimension.received_bytes_per_s)
        whole /= dimension.oversubscription
        links = 1 if dimension.topology == "switch" else dimension.links_per_device
        bandwidth.append(whole / links / _GIB)
    lists: Mapping[str, Sequence[object]] = {
        "topology": topology,
        "npus_count": [dimension.size for dimension in used],
        "bandwidth": bandwidth,
        "latency": latency,
    }
    lines = [
        f"# {system.name}, {system.devices:,} devices",
        *(f"# {dimension.name}: {system.source_text(dimension.source)}" for dimension in used),
        "# innermost first; GiB/s of a link (ring, fully connected) or a device (switch), ns per hop",
        *(f"{key}: [ {', '.join(map(str, values))} ]" for key, values in lists.items()),
    ]
    return {
        "system.json": _system_json(system, used),
        "network.yml": ("\n".join(lines) + "\n"),
        "remote_memory.json": (json.dumps(settings, indent=2) + "\n"),
    }


def _check(dimension: Dimension, system: System, diagnostics: Diagnostics) -> None:
    if isnan(dimension.latency_ns):
        raise UnsupportedError(
            f"the latency of {dimension.name} is unknown",
            position=system.name,
            hint="state one: `hespas hardware system NAME > my-system.toml`",
        )
    applies = {
        "system.line-as-ring": dimension.topology == "ring" and not dimension.is_closed(system.devices),
        "system.reduction-left-out": bool(dimension.reduction),
        "system.oversubscription-shared-out": dimension.oversubscription > 1,
        "system.slower-direction": dimension.received_bytes_per_s != dimension.bandwidth_bytes_per_s,
    }
    texts = {
        "system.line-as-ring": f"a line of {dimension.size} is written as a ring: ASTRA-sim has no lines",
        "system.reduction-left-out": f"ASTRA-sim has no reductions in the network ({dimension.reduction})",
        "system.oversubscription-shared-out": "each device gets its share of an oversubscribed level",
        "system.slower-direction": "both directions get the bandwidth of the slower one",
    }
    for code, applies_here in applies.items():
        if applies_here:
            diagnostics.info(code, f"{system.name}: {dimension.name}", texts[code])


def _system_json(system: System, used: Sequence[Dimension]) -> str:
    """Return the text of ``system.json``. Rings and switches get ring algorithms, direct links the direct
    algorithm.

    For an all-to-all through a switch, a rank sends one message at a time. ASTRA-sim without congestion would
    otherwise give the whole bandwidth to each of several simultaneous messages.
    """
    implementations = {
        key: ["direct" if dimension.topology == "fully_connected" else "ring" for dimension in used]
        for key in IMPLEMENTATION_KEYS.values()
    }
    implementations["all-to-all-implementation"] = [
        {"fully_connected": "direct", "switch": "direct1", "ring": "ring"}[dimension.topology]
        for dimension in used
    ]
    settings: dict[str, object] = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": _ENDPOINT_DELAY_NS,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": _SPLITS,
        "collective-optimization": "localBWAware",
        **implementations,
    }
    if system.device:
        device = load_device(system.device)
        rates = [
            peak.flops_per_s
            for peak in device.peaks
            if peak.dtype in ("bf16", "f16") and peak.unit == "matrix" and peak.density == "dense"
        ]
        peak = {"peak-perf": max(rates) / 1e12} if rates else {}
        settings |= {
            "local-mem-bw": device.main_memory.bandwidth_bytes_per_s / 1e9,
            **peak,
            "roofline-enabled": 0,
        }
    return json.dumps(settings, indent=2) + "\n"
