"""ASTRA-sim's configuration files, read strictly: system.json, network.yml, remote memory.

Keys and defaults: reference of ASTRA-sim 518bd51, https://astra-sim.github.io. Bandwidths of network.yml are
GiB/s, ``local-mem-bw`` is 10^9 B/s, ``remote-mem-bw`` bytes/ns. ``network.yml`` is read without YAML: keys
with lists, on one line (``key: [a, b]``) or below each other (``- a``), and anything else is refused.
Keys that change nothing in the analytical simulator are listed in ``unread``.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Literal, TypeGuard, cast, get_args

from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph import CollectiveKind
from hespas.graph.errors import FormatError, clipped

__all__ = [
    "IMPLEMENTATION_KEYS",
    "MAX_NPUS",
    "MemoryConfig",
    "NetworkConfig",
    "Optimization",
    "SystemConfig",
    "Topology",
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
"""Ranks that a network may have: beyond, their figures alone take gigabytes."""
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
"""Keys of system.json that change a time. ``scheduling-policy`` is none of them: a rank has one collective
open at a time, so that chunks of different priority never wait in one queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """``system.json``. None where the file says nothing; ``custom`` kinds run a Chakra graph as algorithm.
    ``unread`` are keys that change no time.
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
    """``network.yml``: one entry per dimension, dimension 0 innermost."""

    path: str
    topology: tuple[Topology, ...]
    npus: tuple[int, ...]
    bandwidth_gib_per_s: tuple[float, ...]
    latency_ns: tuple[float, ...]
    unread: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole network."""
        return prod(self.npus)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The remote memory file: its kind, and whether load and store nodes have anywhere to go.

    A transaction takes ``latency_ns`` and its bytes over ``bandwidth`` [bytes/ns]; ``nodes`` memories serve
    ``npus_per_node`` ranks each where there is one per node.
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
        """Whether there is a memory beside the device's own."""
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
    """An object each of whose keys stands once: of two values nobody knows which one was meant."""
    values = dict(pairs)
    if len(values) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {clipped(key)!r} stands twice")
    return values


class _Json:
    """One JSON object with typed access; every fault names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        try:
            loaded: object = json.loads(_read(path), object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise FormatError(
                f"not JSON: {error.msg}",
                path=self.path,
                position=f"line {error.lineno}",
                hint="correct it there",
            ) from error
        except ValueError as error:  # a key that stands twice, an integer of thousands of digits
            text = str(error).partition(";")[0]
            raise FormatError(text, path=self.path, hint="correct it in the file") from error
        except RecursionError:
            raise FormatError(
                "nested too deeply for a configuration file", path=self.path, hint="check the path"
            ) from None
        if not _is_object(loaded):
            raise FormatError("expected one JSON object", path=self.path, hint='write {"key": value, ...}')
        self.values = loaded

    def fault(self, key: str, expected: str) -> FormatError:
        return FormatError(
            f"{key} is {clipped(repr(self.values.get(key)))}",
            path=self.path,
            position=key,
            hint=f"expected {expected}",
        )

    def real(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
            raise self.fault(key, "a number that is not negative")
        return float(value)

    def time(self, key: str) -> float | None:
        """A number below 2^31."""
        value = self.real(key)
        if value is not None and value >= 1 << 31:
            raise self.fault(key, "a number below 2^31 that is not negative")
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


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_texts(value: object) -> TypeGuard[list[str]]:
    if not isinstance(value, list):
        return False
    return all(isinstance(entry, str) for entry in cast("list[object]", value))


def read_system_config(path: Path) -> SystemConfig:
    """Read ``system.json``. Raises ``FormatError`` with the key at fault."""
    source = _Json(path)
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
    """Read the remote memory file. Raises ``FormatError`` with the key at fault."""
    source = _Json(path)
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
    """Read ``network.yml``. Raises ``FormatError`` with the line at fault."""
    lists = _lists(path)
    topology: tuple[Topology, ...] = tuple(_topology(path, name) for name in lists["topology"])
    npus = tuple(_integer(path, "npus_count", text) for text in lists["npus_count"])
    bandwidth = tuple(_real(path, "bandwidth", text) for text in lists["bandwidth"])
    latency = tuple(_real(path, "latency", text) for text in lists["latency"])
    if len({len(topology), len(npus), len(bandwidth), len(latency)}) != 1 or not topology:
        raise FormatError(
            "the lists have different lengths, or none",
            path=str(path),
            hint="topology, npus_count, bandwidth and latency have one entry per dimension",
        )
    if prod(npus) > MAX_NPUS:
        raise FormatError(
            f"{prod(npus):,} NPUs are more than {MAX_NPUS:,}", path=str(path), position="npus_count",
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


def _lists(path: Path) -> dict[str, list[str]]:
    """The lists of a file by their keys, comments and blank lines left out."""
    found: dict[str, list[str]] = {}
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
        if match is None or match[1] in found:
            what = "the key stands twice" if match else "not of the form 'key: [a, b]'"
            raise FormatError(
                what,
                path=str(path),
                position=f"line {number}",
                hint="write each list on one line: npus_count: [8, 2]",
            )
        on_line = match[2].strip() if match.re is _LINE else ""
        found[match[1]] = [_unquoted(each) for each in on_line.split(",")] if on_line else []
        open_list = found[match[1]] if match.re is _KEY else None
    for key in _NETWORK_KEYS:
        if key not in found:
            raise FormatError(f"{key} is missing", path=str(path), hint=f"add a line '{key}: [...]'")
    return found


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")


def _topology(path: Path, name: str) -> Topology:
    found = _TOPOLOGIES.get(name)
    if found is None:
        hint = f"one of {', '.join(_TOPOLOGIES)}"
        raise FormatError(f"topology {name!r} is unknown", path=str(path), position="topology", hint=hint)
    return found


def _integer(path: Path, key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        fault, hint = f"{text!r} is no positive integer", "write it as 8, without a sign"
        raise FormatError(fault, path=str(path), position=key, hint=hint)
    return int(text)


def _real(path: Path, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        fault = f"{text!r} is no number that is not negative"
        raise FormatError(fault, path=str(path), position=key, hint="write it as 50.0")
    return value
