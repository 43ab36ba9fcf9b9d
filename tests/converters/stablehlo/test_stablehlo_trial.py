"""Programs are parsed in a child process first, with limits for the parser."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import pytest

from hespas import api
from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import parse_program
from hespas.converters.stablehlo.program_graph import read_parsed
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import Diagnostics, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError

ROOT = Path(__file__).parents[3]
FOUND = Path(__file__).parents[2] / "fuzzing" / "found"
LEVELS, CALLS = 5, 12
VECTOR = "tensor<8xf32>"
_CALL = f"  %R = stablehlo.custom_call @x(%a) : ({VECTOR}) -> {VECTOR}\n"
_UNKNOWN = (
    f"func.func @main(%a: {VECTOR}) -> {VECTOR} {{\n"
    + "".join(_CALL.replace("R", str(number)) for number in range(5))
    + f"  return %4 : {VECTOR}\n}}"
)


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
    workload = api.read(path)
    assert isinstance(workload, Workload)
    assert len(workload.classes[0].kind) == CALLS**LEVELS + 1


@pytest.mark.parametrize("name", ["stablehlo-bytecode-12499", "stablehlo-bytecode-53772"])
def test_a_parser_that_asks_for_gigabytes_is_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.mlirbc"
    path.write_bytes((FOUND / name).read_bytes())
    with pytest.raises(FormatError, match="makes jaxlib's parser ask for more than 157,"):
        api.read(path, format="stablehlo")


def test_errors_of_the_parser_and_of_the_reader_name_the_file() -> None:
    with pytest.raises(FormatError, match=r"x.mlirbc: .*bytecode"):
        read_program(b"ML\xefR", "x.mlirbc", ReadOptions(), Diagnostics())
    with pytest.raises(FormatError, match=r"x.mlir: .*no function"):
        read_program(b"module {}", "x.mlir", ReadOptions(), Diagnostics())


def test_a_child_reads_what_this_process_would_read() -> None:
    """Graph, findings and their counts of a program with findings of several codes."""
    path = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"
    programs = [path.read_bytes(), _UNKNOWN.encode(), _UNKNOWN.encode().replace(b"@x", b'@"\xc3\xa9"')]
    for data in programs:
        here, there, bindings = Diagnostics(2), Diagnostics(2), load_bindings()
        parsed = parse_program(data, bindings)
        expected = read_parsed(
            data, parsed, bindings, path="x\udcff.mlir", options=ReadOptions(), diagnostics=here
        )
        workload = read_program(data, "x\udcff.mlir", ReadOptions(), there)
        assert workloads_equal(workload, expected) == []
        assert list(workload.classes[0].strings) == list(expected.classes[0].strings)
        assert workload.metadata == expected.metadata
        assert workload.classes[0].attachments == expected.classes[0].attachments
        assert (list(there), there.counts()) == (list(here), here.counts())
        assert here.counts().get("stablehlo.unknown-custom-call", 0) == (0 if data == programs[0] else 5)


VALUE = "tensor<4xf32>"
MAIN = f"func.func @main(%a: {VALUE}) -> {VALUE}"


def module(operation: str) -> str:
    return f"module {{ {MAIN} {{ %0 = {operation}\n return %0 : {VALUE} }} }}\n"


def doubled(prefix: str, first: str, row: str, levels: int = 40) -> str:
    """Aliases of which each names the one before it twice."""
    rows = [row.replace("X", f"{prefix}{level}") for level in range(levels)]
    return "".join(f"{prefix}{level} = {text}\n" for level, text in enumerate([first, *rows]))


def located(row: str, file: str = "a.py") -> str:
    tanh = module(f"stablehlo.tanh %a : {VALUE} loc(#l40)")
    return tanh + doubled("#l", f'loc("{file}":1:1)', row)


def tuples(levels: int) -> str:
    name = f"!t{levels}"
    program = f"module {{ func.func @main(%a: {name}) -> {name} {{ return %a : {name} }} }}"
    return doubled("!t", VALUE, "tuple<X, X>", levels) + program


def attribute(name: str, row: str) -> str:
    call = module(f"stablehlo.custom_call @x(%a) {{{name} = #a40}} : ({VALUE}) -> {VALUE}")
    return doubled("#a", '"x"', row) + call


CONVOLUTION = """module {
  func.func @main(%a: tensor<1x8x8x4xf32>, %b: tensor<3x3x4x8xf32>) -> tensor<1x8x8x8xf32> {
    %0 = stablehlo.convolution(%a, %b) dim_numbers = [b, 0, 1, f]x[0, 2147483648, i, o]->[b, 0, 1, f],
      window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
      : (tensor<1x8x8x4xf32>, tensor<3x3x4x8xf32>) -> tensor<1x8x8x8xf32>
    return %0 : tensor<1x8x8x8xf32> } }"""
CALLSITE = located("loc(callsite(X at X))")
MUCH_MEMORY = "a damaged program: "
BOMBS = {
    "callsite": (CALLSITE, False, 3, MUCH_MEMORY),  # in a frame of the bindings, or of Python
    "callsite-bytecode": (CALLSITE, True, 3, MUCH_MEMORY),
    "tuple-24": (tuples(24), False, 4, "a tuple of 2,097,152 values"),
    "tuple-bytecode": (tuples(40), True, 4, "a tuple of 2,097,152 values"),
    "printed-in-a-message": (
        attribute("backend_config", "{a = X, b = X}"),
        False,
        3,
        "makes jaxlib's parser ask for more than 157,",
    ),
    "dimension-number": (CONVOLUTION, False, 3, "makes jaxlib's parser ask for more than 157,"),
    "fused": (located('loc(fused<"x">[X, X])'), False, 0, ""),
    "array": (attribute("mhlo.x", "[X, X]"), False, 0, ""),
    "splat": (
        module(f"stablehlo.constant dense<1.0> : {VALUE}").replace("4xf32", "99999999999xf32"),
        True,
        0,
        "",
    ),
}
HUNGRY = {
    **{
        f"callsite of {file}": located("loc(callsite(X at X))", file)
        for file in ("a", "f", "abc", "abcde", "model.py")
    },
    "sharding of arrays": attribute("mhlo.sharding", "[X, X]"),
    "sharding of dictionaries": attribute("mhlo.sharding", "{a = X, b = X}"),
    "encoding": doubled("#e", '"x"', "[X, X]")
    + "module { func.func @main(%a: tensor<4xf32, #e40>) -> tensor<4xf32, #e40> { "
    "return %a : tensor<4xf32, #e40> } }",
    "function type": doubled("!f", "() -> ()", "(X) -> X")
    + "module { func.func @main(%a: !f40) -> !f40 { return %a : !f40 } }",
}
"""Their memory ends within the bindings, each somewhere else."""
_COMMAND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (12 * 10**8, 12 * 10**8))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
from hespas.cli.main import main
sys.argv[0] = "hespas"
main()
"""


def refuse(path: Path, status: int, message: str) -> None:
    """Check status and message of a program with limits of 1.2 GB and ten CPU seconds per process."""
    command = [sys.executable, "-c", _COMMAND, "view", str(path)]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=one_thread)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert status == 0 or (done.stderr.startswith(f"error: {path}: ") and "\n  try: " in done.stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds address space")
@pytest.mark.parametrize(
    ("text", "is_bytecode", "status", "message"),
    [pytest.param(*bomb, id=name) for name, bomb in BOMBS.items()],
)
def test_a_small_program_takes_neither_gigabytes_nor_minutes(
    text: str, is_bytecode: bool, status: int, message: str, tmp_path: Path
) -> None:
    bindings = load_bindings()
    program = bindings.bytecode(bindings.parse(text)) if is_bytecode else text.encode()
    path = tmp_path / "bomb.mlir"
    path.write_bytes(program)
    assert len(program) < 2_500
    refuse(path, status, message)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds address space")
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=name) for name, text in HUNGRY.items()],
)
def test_memory_that_ends_anywhere_within_the_bindings_is_the_fault_of_the_program(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.mlir"
    path.write_text(text)
    refuse(path, 3, MUCH_MEMORY)


def test_a_number_of_many_digits_takes_no_minutes(tmp_path: Path) -> None:
    path = tmp_path / "digits.mlir"
    digits = "9" * 200_000
    path.write_text(
        f"func.func @main() -> tensor<i64> {{ %0 = stablehlo.constant dense<{digits}> : tensor<i64>\n"
        " return %0 : tensor<i64> }"
    )
    refuse(path, 3, "keeps jaxlib's parser busy for more than 2.5 s")
