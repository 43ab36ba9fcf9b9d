"""Small sound inputs of each reader: fixtures, and what our writers make of them."""

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
from tests.fuzzing.texts import ASTRA_TEXTS, CHAKRA_JSONS, KINETO

__all__ = ["READERS", "Reader", "seeds_of"]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
MAX_BYTES = 12_000
"""Larger seeds make for few inputs a second and no other paths through a reader."""


class _StableHlo(Protocol):
    """The part of jaxlib's bindings that is used here."""

    def get_minimum_version(self) -> str: ...
    def serialize_portable_artifact_str(self, text: str, version: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader to be fuzzed: the format it is asked for, the suffix of inputs, and where seeds come from."""

    format: str
    suffix: str
    patterns: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


READERS: dict[str, Reader] = {
    "stablehlo-text": Reader("stablehlo", ".mlir", ("stablehlo/*.mlir",)),
    "stablehlo-bytecode": Reader(
        "stablehlo", ".mlirbc", ("binary/*.mlirbc", "binary/*.jax_export"), ("mlp", "scan_nested")
    ),
    "hlo-text": Reader("hlo", ".hlo", ("hlo/*.hlo.txt",)),
    "hlo-proto": Reader("hlo", ".pb", ("binary/*.hlo.pb.gz",)),
    "op-graph": Reader("op-graph", ".json", (), ("mlp", "scan_nested", "top_k", "branches")),
    "op-graph-arrow": Reader("op-graph-arrow", ".arrow", (), ("mlp", "scan_nested", "top_k")),
    "chakra": Reader("chakra", ".et", (), ("mlp", "top_k", "scan_nested", "hand_collectives")),
    "chakra-old": Reader("chakra", ".et"),
    "chakra-json": Reader("chakra-json", ".json", (), ("mlp", "top_k", "scan_nested")),
    "astra-text": Reader("astra-text", ".txt"),
    "kineto": Reader("kineto", ".json"),
}
"""The readers by name."""


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
    if name == "chakra-old":
        for version in OLD_VERSIONS:
            yield encode(version, graph_nodes(), {"num": 1})
            if version != "0.0.1":
                yield encode(version, rich_nodes(version), None)


def _written(program: str, reader: Reader) -> Iterator[bytes]:
    """What our writer makes of a fixture; one rank where there are several."""
    source = FIXTURES / "stablehlo" / f"{program}.mlir"
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"x{reader.suffix}"
        if reader.format == "stablehlo":
            yield _bytecode(source)
            return
        ranks = range(1) if reader.format in {"chakra", "chakra-json"} else None
        api.convert(source, path, target_format=reader.format, ranks=ranks)
        yield path.read_bytes()


def _bytecode(source: Path) -> bytes:
    """A small program as a portable artifact."""
    stablehlo = cast("_StableHlo", import_module("jaxlib.mlir.dialects.stablehlo"))
    return stablehlo.serialize_portable_artifact_str(source.read_text(), stablehlo.get_minimum_version())
