"""Every stored form of a program, and files that are not programs."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hespas.converters.format import Head, ReadOptions
from hespas.converters.stablehlo import FORMAT, sniff
from hespas.converters.stablehlo.mlir import PINNED, load_bindings
from hespas.converters.stablehlo.program import nesting_depth
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import NODE_COLUMNS, Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError, MissingExtraError, UnsupportedError, UsageError
from hespas.graph.quantised import parse_quantised

ReadText = Callable[..., tuple[Workload, Diagnostics]]

PROGRAM = """// a comment first
module @forms attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func public @main(%arg0: tensor<8x16xf32>, %arg1: tensor<16x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0]
      : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
    %1 = "stablehlo.all_reduce"(%0) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.tanh %1 : tensor<8x4xf32>
    return %2 : tensor<8x4xf32>
  }
}
"""


def as_generic(program: str) -> str:
    module = load_bindings().parse(program)
    return str(getattr(module.operation, "get_asm")(print_generic_op_form=True))  # noqa: B009


def as_bytecode(program: str) -> bytes:
    bindings = load_bindings()
    return bindings.bytecode(bindings.parse(program))


def as_artifact(program: str, version: str) -> bytes:
    return bytes(load_bindings().stablehlo.serialize_portable_artifact_str(program, version))


def as_export(artifact: bytes) -> bytes:
    """A byte vector inside a larger file, as ``jax.export`` writes it."""
    return b"\0" * 300 + len(artifact).to_bytes(4, "little") + artifact + b"name and trees"


def same(left: OpGraph, right: OpGraph) -> None:
    for column in NODE_COLUMNS:
        if column not in {"source_id", "framework_id"}:
            np.testing.assert_array_equal(getattr(left, column), getattr(right, column), column)
    assert left.data_deps.equals(right.data_deps)
    assert left.operands.equals(right.operands)
    assert left.group_sets == right.group_sets


@pytest.mark.parametrize("form", ["generic", "bytecode", "artifact", "old artifact", "export", "vhlo text"])
def test_every_form_reads_alike(read_text: ReadText, form: str) -> None:
    forms: dict[str, Callable[[], str | bytes]] = {
        "generic": lambda: as_generic(PROGRAM),
        "bytecode": lambda: as_bytecode(PROGRAM),
        "artifact": lambda: as_artifact(PROGRAM, load_bindings().stablehlo.get_current_version()),
        "old artifact": lambda: as_artifact(PROGRAM, "1.0.0"),
        "export": lambda: as_export(as_artifact(PROGRAM, "1.8.0")),
        "vhlo text": lambda: str(load_bindings().parse(as_artifact(PROGRAM, "1.8.0"))),
    }
    expected, _ = read_text(PROGRAM)
    found, diagnostics = read_text(forms[form]())
    same(found.classes[0], expected.classes[0])
    assert found.num_ranks == 2
    assert diagnostics.counts() == {}


def test_the_form_and_the_program_itself_are_kept(read_text: ReadText) -> None:
    text, _ = read_text(PROGRAM)
    assert text.metadata["form"] == "text"
    assert text.classes[0].attachments["stablehlo"] == PROGRAM.encode()
    artifact = as_artifact(PROGRAM, "1.8.0")
    exported, _ = read_text(artifact)
    assert exported.metadata == {
        "format": "stablehlo",
        "form": "vhlo",
        "producer": "StableHLO_v1.8.0",
        "num_replicas": "2",
        "num_partitions": "1",
        "program_bytes": "768 128 0",
    }
    same(read_text(exported.classes[0].attachments["stablehlo"])[0].classes[0], text.classes[0])


def test_the_format_reads_a_gzipped_file(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "step.mlir.gz"
    path.write_bytes(gzip.compress(PROGRAM.encode()))
    assert FORMAT.read is not None
    workload = FORMAT.read(path, ReadOptions(), Diagnostics())
    assert isinstance(workload, Workload)
    assert len(workload.classes[0]) == 4


def head(data: bytes, name: str = "x.mlir") -> Head:
    return Head(Path(name), data, tuple(Path(name).suffixes))


@pytest.mark.parametrize(
    ("data", "score"),
    [
        (PROGRAM.encode(), 95),
        (b"// only\n// comments\n\nfunc.func @main() { return }", 95),
        (b'"builtin.module"() ({\n"func.func"() ({}) : () -> ()\n}) : () -> ()', 95),
        (b'#loc = loc("a")\nmodule { func.func @f() { return } }', 95),
        (b"module {\n}\n", 60),
        (b"ML\xefR\rMLIR23.0.0git\0", 100),
        (b"\x10\0\0\0" * 70 + b"\x08\x01\0\0ML\xefR\rStableHLO_v1.8.0\0", 90),
        (b"HloModule jit_step, is_scheduled=true\n", 0),
        (b'{"schema": "op-graph"}', 0),
        (b"", 0),
        (b"\x08\x01\x12\x04junk", 0),
    ],
)
def test_sniffing(data: bytes, score: int) -> None:
    assert sniff(head(data)) == score


def test_sniffing_and_listing_do_not_load_jaxlib() -> None:
    code = (
        "import sys; from hespas.converters.stablehlo import FORMAT;"
        "from hespas.converters.format import Head;"
        "from pathlib import Path; FORMAT.sniff(Head(Path('x'), b'module {}', ()));"
        "sys.exit(any(name.split('.')[0] in {'jax', 'jaxlib'} for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("program", "position", "message", "hint"),
    [
        ("", None, "no function", "check the export"),
        ("// nothing\nmodule {}", "line 2", "no function", "check the export"),
        ("func.func private @f() -> ()", None, "no function", "check the export"),
        ("this is not a program", "line 1:1", "is unknown", "`source_format`"),
        (
            "func.func @main(%x: tensor<f32>) -> tensor<f32> {\n %0 = stablehlo.fizz %x : tensor<f32>\n}",
            "line 2:7",
            "custom op 'stablehlo.fizz' is unknown, in: %0 = stablehlo.fizz",
            "portable artifact",
        ),
        (PROGRAM[:400], "line 6:55", "expected", "ends early"),
        ("func.func @a() { return }\nfunc.func @b() { return }", None, "2 public functions: @a, @b", "main"),
        ("func.func @main(%x: tensor<f32>) -> tensor<f16> { return %x : tensor<f32> }", "line 1", "type", ""),
        ("module {} \x01", "line 1:11", "unexpected character", ""),
        ("module attributes {mhlo.num_replicas = 0 : i32} {func.func @main() { return }}", None, "is 0", "1"),
        ('module attributes {mhlo.num_replicas = "x"} {func.func @main() { return }}', None, "integer", "1"),
    ],
)
def test_faults_name_file_position_and_remedy(  # noqa: PLR0917 - one column a field
    read_text: ReadText,
    program: str,
    position: str | None,
    message: str,
    hint: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(FormatError) as caught:
        read_text(program)
    assert caught.value.path == "test.mlir"
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert (caught.value.position or "").startswith(position or "")
    assert capfd.readouterr() == ("", "")


def test_broken_bytecode_is_refused_without_a_word_on_stderr(
    read_text: ReadText, capfd: pytest.CaptureFixture[str]
) -> None:
    bytecode, artifact = as_bytecode(PROGRAM), as_artifact(PROGRAM, "1.8.0")
    for data in (
        bytecode[:60],
        artifact[:80],
        as_export(artifact)[:500],
    ):
        with pytest.raises(FormatError, match=r"byte (0|304):") as caught:
            read_text(data)
        assert caught.value.hint
    with pytest.raises(UnsupportedError, match=r"StableHLO 99\.0\.0; the installed jaxlib reads up to"):
        read_text(b"ML\xefR\rStableHLO_v99.0.0\0\x01")
    assert capfd.readouterr() == ("", "")


def test_binary_junk_is_no_program(read_text: ReadText) -> None:
    with pytest.raises(FormatError, match="byte 1: neither MLIR text"):
        read_text(b"a\xff\xfe\0\0")


def test_nesting_is_bounded_before_the_parser_sees_it(read_text: ReadText) -> None:
    deep = "func.func @main(%i: tensor<i32>) {" + '"stablehlo.case"(%i) ({' * 5000
    with pytest.raises(FormatError, match="nest 10001 deep"):
        read_text(deep)
    with pytest.raises(FormatError, match="nest"):
        read_text("module attributes {a = " + "[" * 100_000)


def test_nesting_counts_brackets_of_code_only() -> None:
    assert nesting_depth(b"{ ( ) } [ < > ]") == 2
    assert nesting_depth(b'"((((" // {{{{ \n {') == 1
    assert nesting_depth(b'{ "}" { "\\"}" { // }\n {') == 4, "a closer in a string closes nothing"
    assert nesting_depth(b"(i32) -> (i32) {") == 1


def test_regions_nest_a_hundred_deep_at_most(read_text: ReadText) -> None:
    def nested(depth: int) -> str:
        opening = "".join(f'%r{n} = "stablehlo.case"(%i) ({{ ' for n in range(depth))
        values = [f"%r{n}" for n in range(1, depth)] + ["%x"]
        closing = "".join(
            f"stablehlo.return {value} : tensor<f32> }}) : (tensor<i32>) -> tensor<f32> "
            for value in reversed(values)
        )
        head = "func.func @main(%i: tensor<i32>, %x: tensor<f32>) -> tensor<f32> {"
        return f"{head} {opening} {closing} return %r0 : tensor<f32> }}"

    assert len(read_text(nested(90))[0].classes[0]) == 91
    with pytest.raises(FormatError, match="regions nest") as caught:
        read_text(nested(120))
    assert caught.value.position is not None
    assert caught.value.position.startswith("line 1:")


def test_device_counts_that_disagree_are_a_usage_error(read_text: ReadText) -> None:
    assert read_text(PROGRAM, ReadOptions(num_devices=2))[0].num_ranks == 2
    with pytest.raises(UsageError, match="2 replicas x 1 partitions"):
        read_text(PROGRAM, ReadOptions(num_devices=8))


def test_a_newer_or_older_jaxlib_is_refused_with_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    load_bindings.cache_clear()
    monkeypatch.setattr("jaxlib.version.__version__", "0.11.0")
    try:
        with pytest.raises(MissingExtraError, match=re.escape(PINNED)):
            load_bindings()
    finally:
        monkeypatch.undo()
        load_bindings.cache_clear()
    assert PINNED in (Path(__file__).parents[3] / "pyproject.toml").read_text()


def test_a_missing_jaxlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    load_bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "jaxlib.version", None)
    try:
        with pytest.raises(MissingExtraError) as caught:
            load_bindings()
    finally:
        monkeypatch.undo()
        load_bindings.cache_clear()
    assert caught.value.hint == "pip install 'hespas[stablehlo]'"


QUANTISED = """func.func @main(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %0 = stablehlo.uniform_quantize %x : (tensor<64x64xf32>) -> KIND
  %1 = stablehlo.add %0, %0 : KIND
  %2 = "stablehlo.uniform_dequantize"(%1) : (KIND) -> tensor<64x64xf32>
  return %2 : tensor<64x64xf32>
}""".replace("KIND", "tensor<64x64x!quant.uniform<i8:f32, 5.0e-01:-3>>")


@pytest.mark.parametrize("form", ["text", "bytecode", "artifact"])
def test_quantised_types_are_read_by_their_storage(read_text: ReadText, form: str) -> None:
    bindings = load_bindings()
    module = bindings.parse(QUANTISED, quantised=True)
    forms: dict[str, Callable[[], str | bytes]] = {
        "text": lambda: QUANTISED,
        "bytecode": lambda: bindings.bytecode(module),
        "artifact": lambda: bytes(
            bindings.stablehlo.serialize_portable_artifact(module, bindings.stablehlo.get_current_version())
        ),
    }
    workload, diagnostics = read_text(forms[form]())
    graph = workload.classes[0]
    assert [graph.op_name(node) for node in range(3)] == [
        "stablehlo.uniform_quantize",
        "stablehlo.add",
        "stablehlo.uniform_dequantize",
    ]
    assert graph.flops.tolist() == [8192, 4096, 8192, 0]
    assert graph.bytes_read.tolist() == [16384, 4096 + 5, 4096 + 5, 0], "one f32 scale, one i8 zero point"
    assert diagnostics.counts() == {}
    kind = int(graph.results.row(0)[0])
    element = graph.types.dtype_of(kind)
    assert element is not None
    assert element.name == "i8"
    assert graph.strings[int(graph.types.encoding[kind])] == "!quant.uniform<i8:f32, 5.000000e-01:-3>"


@pytest.mark.parametrize(
    ("text", "element", "extra_bytes"),
    [
        ("!quant.uniform<i8:f32, 1.0e-01>", "i8", 4 + 1),
        ("!quant.uniform<i8<-127:127>:f32:1, {1.0e-01:1,2.0e-01,3.0e-01}>", "i8", 3 * (4 + 1)),
        ("!quant.uniform<u8:bf16, 1.0e-01:8>", "ui8", 2 + 1),
        ("!quant.uniform<i4:f32:0, {1.0e-01,2.0e-01,3.0e-01}>", "i4", 3 * 4 + 2),
        ("!quant.uniform<i8:f32:{0:2, 1:1}, {{1.0e-01}, {2.0e-01:1}}>", "i8", 2 * (4 + 1)),
        ("!quant.uniform<f8E4M3FN:f32, 1.0e-01>", "f8e4m3fn", 4 + 1),
        ("!quant.any<i8<-8:7>:f32>", "i8", 0),
        ("!quant.uniform<i3:f32, 1.0e-01>", "i3", 4 + 1),
        ("!quant.calibrated<f32<-1.0e+00:1.0e+00>>", "f32", 0),
    ],
)
def test_quantised_types_say_their_storage_scales_and_zero_points(
    text: str, element: str | None, extra_bytes: int
) -> None:
    found = parse_quantised(text)
    assert found is not None
    assert found.parameter_bytes == extra_bytes
    assert (found.dtype and found.dtype.name.lower()) == element


def test_other_element_types_are_not_quantised() -> None:
    assert parse_quantised("f32") is None


HINTS = {
    "early": "the file ends early",
    "name": "not newer than jaxlib's",
    "invalid": "the program is invalid at this position",
    "generic": "in its generic form",
}


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("[[0, 1]]", "[[0, 0]]", "invalid"),
        ("[[0, 1]]", "[[0, 7]]", "invalid"),
        ("-> tensor<8x4xf32>\n    %1", "-> tensor<8x5xf32>\n    %1", "invalid"),
        ("tanh %1", "tanh %9", "invalid"),
        ("stablehlo.tanh", "stablehlo.fizz", "name"),
        ("stablehlo.tanh %1 :", '"stablehlo.fizz"(%1) : (tensor<8x4xf32>) ->', "name"),
        ("<[[0, 1]]> : tensor<1x2xi64>}>", "<[[0, 1]]> : tensor<1x2xi64>, x = #stablehlo.fizz<1>}>", "name"),
        ("stablehlo.tanh", "acme.tanh", "generic"),
        ("return %2 : tensor<8x4xf32>\n  }\n}\n", "return %2 : ten", "early"),
        ("return %2 : tensor<8x4xf32>\n  }\n}\n", "return %2 : tensor<8x4xf32>\n", "early"),
        ("stablehlo.tanh %1 : tensor<8x4xf32>", "stablehlo.tanh %1 : tensor<8x4xf32> loc(#loc7)", "early"),
    ],
)
def test_hints_tell_what_to_do_about_the_fault(read_text: ReadText, old: str, new: str, hint: str) -> None:
    assert old in PROGRAM
    with pytest.raises(FormatError) as caught:
        read_text(PROGRAM.replace(old, new))
    found = [name for name, text in HINTS.items() if text in (caught.value.hint or "")]
    assert found == [hint]
    assert "allow-unregistered" not in caught.value.message


def test_invalid_bytecode_says_where_and_not_that_it_is_broken(read_text: ReadText) -> None:
    data = as_bytecode(PROGRAM)
    groups = np.array([0, 1], np.int64).tobytes()
    assert data.count(groups) == 1
    with pytest.raises(FormatError, match=r"replica id #0 seen more than once \(line 6:") as caught:
        read_text(data.replace(groups, bytes(16)))
    assert HINTS["invalid"] in (caught.value.hint or "")


def text_fixtures() -> list[str]:
    folder = Path(__file__).parents[3] / "fixtures"
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("stablehlo/*.mlir"))


def binary_fixtures() -> list[str]:
    folder = Path(__file__).parents[3] / "fixtures" / "binary"
    kinds = {".mlirbc", ".jax_export"}
    return sorted(path.name for path in folder.iterdir() if path.suffix in kinds)


def refuse(data: bytes, name: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_program(data, name, ReadOptions(), Diagnostics())
    assert caught.value.path == name
    assert caught.value.hint


@pytest.mark.parametrize("name", text_fixtures())
def test_truncated_text_is_refused_with_its_position(repository: Path, name: str) -> None:
    data = (repository / "fixtures" / name).read_bytes().rstrip()
    chance = random.Random(name)
    end = data.rindex(b"}\n}") if b"}\n}" in data else len(data) - 1
    for cut in sorted(chance.sample(range(data.index(b"func.func") + 9, end), 6)):
        refuse(data[:cut], name)


@pytest.mark.parametrize("name", binary_fixtures())
def test_truncated_binaries_are_refused(repository: Path, name: str) -> None:
    data = (repository / "fixtures" / "binary" / name).read_bytes()
    chance = random.Random(name)
    for cut in sorted(chance.sample(range(40, len(data) - 4), 6)):
        refuse(data[:cut], name)


@pytest.mark.parametrize("name", binary_fixtures())
def test_damaged_binaries_never_end_the_process(
    repository: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = (repository / "fixtures" / "binary" / name).read_bytes()
    chance = random.Random(name)
    for _ in range(10):
        damaged = bytearray(data)
        damaged[chance.randrange(64, len(data))] ^= 1 << chance.randrange(8)
        # It may still be a program: a bit of a name or constant changed.
        with suppress(FormatError, UnsupportedError):
            read_program(bytes(damaged), name, ReadOptions(), Diagnostics())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("wrapped", [False, True], ids=["artifact", "export file"])
def test_an_artifact_of_a_later_version_says_so(read_text: ReadText, wrapped: bool) -> None:
    version = load_bindings().newest_version()
    later = f"{version.partition('.')[0]}.99.0".encode()
    data = as_artifact(PROGRAM, version).replace(f"StableHLO_v{version}".encode(), b"StableHLO_v" + later)
    assert later in data
    broken = data[: len(data) - 40]
    if wrapped:
        broken = b"\0" * 60 + len(broken).to_bytes(4, "little") + broken
    with pytest.raises(
        UnsupportedError, match=f"of StableHLO {later.decode()}; .* reads up to {version}"
    ) as caught:
        read_text(broken)
    assert "newer jaxlib" in (caught.value.hint or "")
    damaged = as_artifact(PROGRAM, version)[:-40]
    with pytest.raises(FormatError, match="broken bytecode"):
        read_text(damaged)
