"""Small valid inputs of each reader: fixtures, and files that the writers make of them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, cast

from hespas import api
from tests.converters.chakra.historic_protos import OLD_VERSIONS, encode, graph_nodes, rich_nodes
from tests.converters.pytorch.traces import flat_node, groups_node, node, recorded, tensor, write_et
from tests.fuzzing.texts import ASTRA_TEXTS, CHAKRA_JSONS, KINETO

__all__ = ["READERS", "Reader", "seeds_of"]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
MAX_BYTES = 8_500
"""Larger seeds make for few inputs a second and no other paths through a reader."""


class _StableHlo(Protocol):
    """The part of jaxlib's bindings that is used here."""

    def get_minimum_version(self) -> str: ...
    def serialize_portable_artifact_str(self, text: str, version: str) -> bytes: ...


class _HloModule(Protocol):
    def as_serialized_hlo_module_proto(self) -> bytes: ...


class _Hlo(Protocol):
    """The part of jaxlib's bindings of HLO that is used here."""

    def hlo_module_from_text(self, text: str) -> _HloModule: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader to test: the requested format, the suffix of inputs, and the source of seeds."""

    format: str
    suffix: str
    patterns: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


PROFILES = ("profiles/h100_streams.xplane.pb", "profiles/tpu_v4_megacore.xplane.pb")
"""What writers of profiles are given."""

READERS: dict[str, Reader] = {
    "stablehlo-text": Reader("stablehlo", ".mlir", ("stablehlo/*.mlir",)),
    "stablehlo-bytecode": Reader(
        "stablehlo", ".mlirbc", ("binary/*.mlirbc", "binary/*.jax_export"), ("mlp", "scan_nested")
    ),
    "hlo-text": Reader("hlo", ".hlo", ("hlo/*.hlo.txt",)),
    "hlo-proto": Reader(
        "hlo",
        ".pb",
        ("binary/*.hlo.pb.gz",),
        tuple(f"hlo/{name}.hlo.txt" for name in ("top_k", "hand_control", "dot_int", "hand_gpu_async")),
    ),
    "op-graph": Reader("op-graph", ".json", (), ("mlp", "scan_nested", "top_k", "branches")),
    "op-graph-arrow": Reader("op-graph-arrow", ".arrow", (), ("mlp", "scan_nested", "top_k")),
    "chakra": Reader("chakra", ".et", (), ("mlp", "top_k", "scan_nested", "hand_collectives")),
    "chakra-old": Reader("chakra", ".et"),
    "chakra-json": Reader("chakra-json", ".json", (), ("mlp", "top_k", "scan_nested")),
    "astra-text": Reader("astra-text", ".txt"),
    "kineto": Reader("kineto", ".json"),
    "pytorch-et": Reader("pytorch-et", ".et.json"),
    "xplane": Reader("xplane", ".xplane.pb", ("profiles/*.xplane.pb",)),
    "jax-trace": Reader("jax-trace", ".trace.json", ("profiles/*.trace.json.gz",)),
    "nsys": Reader("nsys", ".sqlite", ("profiles/nsys_*.sqlite.gz",)),
    "rocpd": Reader("rocpd", ".db", ("profiles/rocpd_*.db.gz",)),
    "rocprofv3": Reader("rocprofv3", ".json", ("profiles/rocprofv3_*.json",)),
    "ops-table": Reader("ops-table", ".csv", (), PROFILES),
    "ops-table-parquet": Reader("ops-table", ".parquet", (), PROFILES),
    "chrome-trace": Reader("chrome-trace", ".chrome.json", (), PROFILES),
    "perfetto": Reader("perfetto", ".pftrace", (), PROFILES),
}
"""The readers by name."""

NOT_FUZZED = {"pytorch": "a folder of files: a subject of its own"}
"""Formats without a reader of their own above, and why."""


@cache
def seeds_of(name: str) -> tuple[bytes, ...]:
    """The seeds of a reader, smallest first; at least one."""
    found = sorted(_seeds(name, READERS[name]), key=len)
    small = [seed for seed in found if len(seed) <= MAX_BYTES]
    return tuple(small or found[:1])


def _seeds(name: str, reader: Reader) -> Iterator[bytes]:
    yield from _foreign(name)
    for pattern in reader.patterns:
        for path in FIXTURES.glob(pattern):
            data = path.read_bytes()
            yield gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    for program in reader.written:
        yield from _written(program, reader)


def _foreign(name: str) -> Iterator[bytes]:
    """Files as other tools write them."""
    yield from {"kineto": (KINETO,), "astra-text": ASTRA_TEXTS, "chakra-json": CHAKRA_JSONS}.get(name, ())
    if name == "pytorch-et":
        yield from _execution_traces()
    if name == "chakra-old":
        for version in OLD_VERSIONS:
            yield encode(version, graph_nodes(), {"num": 1})
            if version != "0.0.1":
                yield encode(version, rich_nodes(version), None)


def _execution_traces() -> Iterator[bytes]:
    """Records of the oldest and the newest schema."""
    one, two = tensor(1, 4, 8), tensor(2, 8, 2)
    out = tensor(3, 4, 2)
    old = [
        flat_node(10, "aten::mm", 2, 1, [one, two], [out]),
        flat_node(11, "aten::relu", 2, 2, [out], [one]),
    ]
    facts: dict[str, object] = {"collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 8}
    new = [
        groups_node({"pg_name": "0", "ranks": [0, 1], "group_size": 2, "group_count": 1}),
        node(10, "aten::mm", 2, 2, [one, two], [out], schema="aten::mm(Tensor self, Tensor mat2) -> Tensor"),
        node(11, "Optimizer.step#SGD.step", 2, 3),
        recorded(12, (11, 4), [out], [out], facts | {"pg_name": "0", "group_size": 2}),
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        for nodes, schema in ((old, "1.0.1"), (new, "1.1.1-chakra.0.0.4")):
            yield write_et(path, nodes, schema).read_bytes()


def _written(program: str, reader: Reader) -> Iterator[bytes]:
    """Yield the files that the writer makes of a fixture; of several ranks only one."""
    source = FIXTURES / (program if "/" in program else f"stablehlo/{program}.mlir")
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"x{reader.suffix}"
        if reader.format in _NATIVE:
            yield _NATIVE[reader.format](source)
            return
        ranks = range(1) if reader.format in {"chakra", "chakra-json"} else None
        api.convert(source, path, target_format=reader.format, ranks=ranks)
        yield path.read_bytes()


def _bytecode(source: Path) -> bytes:
    """A small program as a portable artifact."""
    stablehlo = cast("_StableHlo", import_module("jaxlib.mlir.dialects.stablehlo"))
    return stablehlo.serialize_portable_artifact_str(source.read_text(), stablehlo.get_minimum_version())


def _proto(source: Path) -> bytes:
    """A small module of XLA as protobuf."""
    hlo = cast("_Hlo", import_module("jaxlib._hlo"))
    return hlo.hlo_module_from_text(source.read_text()).as_serialized_hlo_module_proto()


_NATIVE = {"stablehlo": _bytecode, "hlo": _proto}
