"""Binary programs are tried in a child first: what its parser may take, and what it may not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import pytest

from hespas import api
from hespas.converters.stablehlo.trial import attempt
from hespas.files.sandbox import OUT_OF_MEMORY
from hespas.graph import Workload
from hespas.graph.errors import FormatError

FOUND = Path(__file__).parents[2] / "fuzzing" / "found"
LEVELS, CALLS = 5, 12
VECTOR = "tensor<8xf32>"


class _StableHlo(Protocol):
    def get_minimum_version(self) -> str: ...
    def serialize_portable_artifact_str(self, text: str, version: str) -> bytes: ...


def _calling() -> str:
    """A few hundred bytes that are 12**5 operations: each function calls the one before it 12 times."""
    lines = [f"func.func private @f0(%v0: {VECTOR}) -> {VECTOR} {{", f"%v1 = stablehlo.tanh %v0 : {VECTOR}"]
    lines.append(f"return %v1 : {VECTOR} }}")
    for level in range(1, LEVELS + 1):
        name = "@main" if level == LEVELS else f"private @f{level}"
        lines.append(f"func.func {name}(%v0: {VECTOR}) -> {VECTOR} {{")
        lines += [
            f"%v{turn + 1} = func.call @f{level - 1}(%v{turn}) : ({VECTOR}) -> {VECTOR}"
            for turn in range(CALLS)
        ]
        lines.append(f"return %v{CALLS} : {VECTOR} }}")
    return "module {\n" + "\n".join(lines) + "\n}"


def test_a_small_program_may_be_a_large_graph(tmp_path: Path) -> None:
    stablehlo = cast("_StableHlo", import_module("jaxlib.mlir.dialects.stablehlo"))
    data = stablehlo.serialize_portable_artifact_str(_calling(), stablehlo.get_minimum_version())
    path = tmp_path / "calls.mlirbc"
    path.write_bytes(data)
    assert len(data) < 2_000
    assert attempt(data) == 0
    workload = api.read(path)
    assert isinstance(workload, Workload)
    assert len(workload.classes[0].kind) == CALLS**LEVELS + 1


@pytest.mark.parametrize("name", ["stablehlo-bytecode-12499", "stablehlo-bytecode-53772"])
def test_a_parser_that_asks_for_gigabytes_is_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.mlirbc"
    path.write_bytes((FOUND / name).read_bytes())
    with pytest.raises(FormatError, match="makes jaxlib's parser ask for more than 157,"):
        api.read(path, format="stablehlo")


def test_what_else_is_wrong_is_told_by_whoever_reads() -> None:
    assert attempt(b"ML\xefR") == 0
    assert OUT_OF_MEMORY not in (0, 1)
