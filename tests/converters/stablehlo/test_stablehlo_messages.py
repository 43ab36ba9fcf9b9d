"""Messages about faulty programs: position, limited length, no control sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.replica_groups import IdMode, highest_id, normalise_groups
from hespas.converters.stablehlo.mlir import int_array, load_bindings, place_of, quoted
from hespas.converters.stablehlo.program import excerpt, shortened
from hespas.graph import Diagnostics, ExplicitGroups, Workload
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError

pytest.importorskip("jaxlib")  # reads the programs

ReadText = Callable[..., tuple[Workload, Diagnostics]]


def _permute(pairs: str, header: str = "", channel: int = 0) -> str:
    handle = f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>, " if channel else ""
    return (
        f"module {header} {{\nfunc.func @main(%a: tensor<f32>) -> tensor<f32> {{\n"
        f'%0 = "stablehlo.collective_permute"(%a) {{{handle}source_target_pairs = {pairs}}} : '
        "(tensor<f32>) -> tensor<f32>\nreturn %0 : tensor<f32>\n}\n}"
    )


def _refusal(read_text: ReadText, program: str | bytes, options: ReadOptions | None = None) -> HespasError:
    with pytest.raises(HespasError) as caught:
        read_text(program, options)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("identity", [1 << 24, 1 << 40, (1 << 63) - 1])
def test_a_huge_device_id_is_out_of_range(read_text: ReadText, identity: int) -> None:
    error = _refusal(read_text, _permute(f"dense<[[0, {identity}]]> : tensor<1x2xi64>"))
    assert isinstance(error, FormatError)
    assert f"device id {identity:,} is out of range" in error.message
    assert (error.path, error.position) == ("test.mlir", "line 3:6")


def test_a_large_device_id_is_read(read_text: ReadText) -> None:
    workload, _ = read_text(_permute("dense<[[0, 1000000]]> : tensor<1x2xi64>"))
    assert workload.num_ranks == 1_000_001


def test_a_short_text_does_not_fill_memory() -> None:
    bindings = load_bindings()
    attribute = bindings.ir.Attribute.parse("dense<0> : tensor<1000000x1000000xi64>", bindings.context())
    with pytest.raises(ValueError, match="1,000,000,000,000 elements"):
        int_array(attribute)


@pytest.mark.parametrize(
    "shape", ["2147483648x2147483648x4x", "0x4611686018427387904x2x", "4611686018427387904x" * 20]
)
def test_tensors_that_no_op_graph_can_state_are_not_read(read_text: ReadText, shape: str) -> None:
    kind = f"tensor<{shape}f64>"
    error = _refusal(read_text, f"func.func @main(%a: {kind}) -> {kind} {{ return %a : {kind} }}")
    assert isinstance(error, UnsupportedError)
    assert error.message.startswith("a tensor of more than 2**63 elements: tensor<")
    assert error.path == "test.mlir"


def test_more_devices_than_are_read(read_text: ReadText) -> None:
    header = "attributes {mhlo.num_replicas = 65536 : i32, mhlo.num_partitions = 65536 : i32}"
    error = _refusal(read_text, _permute("dense<0> : tensor<1x2xi64>", header))
    assert isinstance(error, UnsupportedError)
    assert (error.message, error.position) == ("4,294,967,296 devices (limit 16,777,216)", "module header")
    asked = _refusal(read_text, _permute("dense<0> : tensor<1x2xi64>"), ReadOptions(num_devices=1 << 25))
    assert isinstance(asked, UsageError)


def test_pairs_are_not_written_out_a_million_times(read_text: ReadText) -> None:
    header = "attributes {mhlo.num_replicas = 2000000 : i32, mhlo.num_partitions = 8 : i32}"
    error = _refusal(read_text, _permute("dense<[[0, 3], [3, 5], [5, 0]]> : tensor<3x2xi64>", header, 1))
    assert isinstance(error, FormatError)
    assert "list 6,000,000 ids" in error.message


def test_groups_are_not_written_out_a_million_times() -> None:
    groups = ExplicitGroups.from_rows([[0, 3, 5], [1]])
    for mode, counts in ((IdMode.CROSS_REPLICA, (8, 2_000_000)), (IdMode.CROSS_PARTITION, (2_000_000, 8))):
        with pytest.raises(ValueError, match="list 8,000,000 ids"):
            normalise_groups(groups, mode, *counts)
    assert highest_id(groups) == 5


def test_several_modules_in_a_file(read_text: ReadText) -> None:
    part = "module {\n  func.func @main() {return}\n}\n"
    error = _refusal(read_text, f"{part}// -----\n{part}")
    assert (error.message, error.position) == ("the file holds 2 modules", "line 8")
    assert "one file per module" in (error.hint or "")


def test_no_replicas_stand_in_the_header(read_text: ReadText) -> None:
    error = _refusal(
        read_text, "// one\nmodule attributes {mhlo.num_replicas = 0 : i32} {func.func @main() {return}}"
    )
    assert (error.message, error.position) == (
        "mhlo.num_replicas is 0, but must be at least 1",
        "module header (line 2:1)",
    )


@pytest.mark.parametrize(
    ("program", "place"),
    [
        ("(" * 600, "line 1:501"),
        ('module {\n// "((" {{{\n  ' + "{" * 600, "line 3:502"),
        ('"\\"(((" -> <>\n' + "[" * 501, "line 2:501"),
    ],
)
def test_nesting_is_refused_where_it_is_too_deep(read_text: ReadText, program: str, place: str) -> None:
    error = _refusal(read_text, program)
    assert "at most 500" in error.message
    assert error.position == place


def test_lines_are_shown_without_control_characters(read_text: ReadText) -> None:
    error = _refusal(read_text, "func.func @main() {\n\x1b]0;title\x07\n return }")
    assert r"\x1b]0;title\x07" in error.message
    assert str(error).replace("\n", "").isprintable()


def test_long_names_are_cut(read_text: ReadText) -> None:
    error = _refusal(read_text, "func.func @main() {\n" + "x" * 1_000_000 + "\n return }")
    assert error.message.startswith("custom op 'xxxx")
    assert "is unknown" in error.message
    assert len(str(error)) < 1000


def test_a_producer_that_is_no_name_is_not_quoted(read_text: ReadText) -> None:
    error = _refusal(read_text, b"ML\xefR\xff\xff\x1b[2J\x07\0" + bytes(range(256)))
    assert "an unknown producer" in str(error)
    assert str(error).replace("\n", "").isprintable()


def test_quoting() -> None:
    assert quoted("a\x1b\u202e中") == "a\\x1b\\u202e中"
    assert quoted("x" * 200) == "x" * 117 + "..."
    assert shortened("op '" + "y" * 500 + "' is\nunknown").endswith("... is unknown")
    assert excerpt("  short \n", 3) == "short"
    long = "a" * 500 + "FAULT" + "b" * 500
    assert "FAULT" in excerpt(long, 501)
    assert len(excerpt(long, 501)) <= 120
    assert place_of('loc("-":7:9)') == "line 7:9"
    assert place_of('loc("f"("model.py":7:9))') == 'loc("f"("model.py":7:9))'
