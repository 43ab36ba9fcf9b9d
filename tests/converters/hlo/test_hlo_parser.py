"""HLO text: every spelling the printer has had, and what is said of text that is not HLO."""

from __future__ import annotations

import pytest

from hespas.converters.hlo.module import HloModule
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.scan import Source, unquote
from hespas.converters.hlo.shapes import parse_shape
from hespas.graph import DYNAMIC
from hespas.graph.errors import FormatError

LONG_STYLE = """// a comment
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=4

FileNames
1 "model/step.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%helper (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(f32[8]{0} %p.1)
}, execution_thread="host"

ENTRY %main.3 (x: f32[8], y: (f32[8], s32[])) -> (f32[8], f32[8]) {
  %x = f32[8]{0:T(8,128)(2,1)S(1)} parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
  %y = (f32[8]{0}, /*index=1*/s32[]) parameter(1)
  %g = f32[8]{0} get-tuple-element((f32[8]{0}, s32[]) %y), index=0,
      metadata={op_name="a\\"b{" stack_frame_id=1}
  %call = f32[8]{0} call(f32[8]{0} %g), to_apply=%helper, backend_config={"a":{"b":["}",")"]},"c":"{"}
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(f32[8]{0} %x, /*index=1*/f32[8]{0} %call)
}
"""

SHORT_STYLE = """HloModule jit_step, is_scheduled=true,
    input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=4

helper {
  p.1 = f32[8] parameter(0)
  ROOT n = f32[8]{0}   negate( p.1 )
}, execution_thread="host"

ENTRY main.3 {
  x=f32[8]{0:T(8,128)(2,1)S(1)} parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
  y = (f32[8]{0}, s32[]) parameter(1)
  g = f32[8]{0} get-tuple-element(y), index=0,
      metadata={op_name='a"b{' source_file="model/step.py" source_line=42}
  call = f32[8]{0} call(g), to_apply=helper /* c */, backend_config={"a":{"b":["}",")"]},"c":"{"} // the end
  t = (f32[8]{0}, f32[8]{0}) tuple(x, call)
}
"""


def _parse(text: str) -> HloModule:
    return parse_module(Source(text, "test.hlo"))


@pytest.mark.parametrize("text", [LONG_STYLE, SHORT_STYLE, LONG_STYLE.replace("\n", "\r\n")])
def test_both_printer_styles_say_the_same(text: str) -> None:
    module = _parse(text)
    entry = module.entry
    assert module.name == "jit_step"
    assert module.attributes["num_partitions"] == "4"
    assert list(module.computations) == ["helper", "main.3"]
    assert module.computations["helper"].thread == "host"
    assert entry.names == ["x", "y", "g", "call", "t"]
    assert entry.opcodes == ["parameter", "parameter", "get-tuple-element", "call", "tuple"]
    assert entry.operands == [(), (), (1,), (2,), (0, 3)]
    assert entry.payloads[:2] == ["0", "1"]
    assert entry.root == 4
    assert entry.attributes[3]["backend_config"] == '{"a":{"b":["}",")"]},"c":"{"}'
    assert module.shape_of(entry, 0).leaves[0].layout == "0:T(8,128)(2,1)S(1)"
    assert [leaf.element for leaf in module.shape_of(entry, 1).leaves] == ["f32", "s32"]


def test_stack_frames_lead_to_the_source() -> None:
    assert _parse(LONG_STYLE).frames.source(1) == "model/step.py:42"
    assert _parse(LONG_STYLE).frames.source(7) == ""


def test_line_numbers_are_those_of_the_text() -> None:
    module = _parse(LONG_STYLE)
    assert module.line_of(module.entry, 0) == LONG_STYLE[: LONG_STYLE.index("%x = ")].count("\n") + 1


def test_literals_are_skipped_whatever_they_hold() -> None:
    rows = ", ".join("{ " + ", ".join(["1.5"] * 50) + " }" for _ in range(200))
    module = _parse(
        f"HloModule m\nENTRY e {{\n  c = f32[200,50] constant({{ {rows} }})\n  s = s32[] constant(-7)\n}}"
    )
    assert module.entry.payloads == ["", "-7"]
    assert module.entry.root == 1


def test_a_mesh_with_device_ids_is_one_value() -> None:
    text = "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}"
    module = _parse(
        f"HloModule m\nENTRY e {{\n  x = f32[] parameter(0), replica_groups={text}, channel_id=1\n}}"
    )
    assert module.entry.attributes[0] == {"replica_groups": text, "channel_id": "1"}


@pytest.mark.parametrize(
    ("text", "dims", "bounded"),
    [
        ("f32[]", (), False),
        ("bf16[4,128]{1,0:T(8,128)(2,1)S(1)}", (4, 128), False),
        ("f32[<=32,8]{1,0}", (32, 8), True),
        ("f32[?,8]", (DYNAMIC, 8), False),
        ("s4[16]{0:E(4)}", (16,), False),
        ("f8e4m3fn[2, 3]{1, 0}", (2, 3), False),
        ("token[]", (), False),
        ("b(f32[7]{0})", (7,), False),
    ],
)
def test_shapes(text: str, dims: tuple[int, ...], bounded: bool) -> None:
    leaf = parse_shape(text).leaves[0]
    assert (leaf.dims, leaf.bounded) == (dims, bounded)
    assert leaf.dtype is not None


def test_nested_tuples_keep_their_elements() -> None:
    shape = parse_shape("((f32[2]{0}, /*index=1*/s8[3]{0}), (), u32[]{:S(2)})")
    assert [leaf.element for leaf in shape.leaves] == ["f32", "s8", "u32"]
    assert [leaf.dims for leaf in shape.element(0).leaves] == [(2,), (3,)]
    assert shape.element(1).leaves == ()
    assert shape.element(2).elements is None


@pytest.mark.parametrize(
    "text", ["", "f32", "f32[x]", "f32[2,]", "(f32[]", "f32[])", "f32[] f32[]", "[2]", "f32[-1]"]
)
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_shape(text)


def test_escapes() -> None:
    assert unquote(r'"a\"b\\c\x41\101\n"') == 'a"b\\cAA\n'
    assert unquote("plain") == "plain"


HEAD = "HloModule m\nENTRY e {\n  x = f32[2] parameter(0)\n"


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "'HloModule'"),
        ("module @jit_f {}", 1, "'HloModule'"),
        ("HloModules m", 1, "'HloModule'"),
        ("HloModule m", 1, "an ENTRY computation"),
        ("HloModule m\nf {\n  x = f32[] parameter(0)\n}\n", 5, "an ENTRY computation"),
        ("HloModule m\nENTRY e {\n}\n", 3, "an instruction in 'e'"),
        ("HloModule m\nENTRY e (x: f32[2]) f32[2] {", 2, "'->'"),
        ("HloModule m\nENTRY e\n", 3, "'{' to open the computation 'e'"),
        (HEAD, 4, "an instruction"),
        (HEAD + "  y = add(x, x)\n}", 4, "a shape"),
        (HEAD + "  y = f32[2x] add(x, x)\n}", 4, "an extent"),
        (HEAD + "  y = f32[2] (x, x)\n}", 4, "an opcode"),
        (HEAD + "  y = f32[2] add(x, x\n}", 5, "the ')' for the '(' of line 4"),
        (HEAD + "  y = f32[2] add(x, z)\n}", 4, "operands defined above; 'z' is not"),
        (HEAD + "  y = f32[2] add(f32[2] x, f32[2]{0} z)\n}", 4, "operands defined above; 'z' is not"),
        (HEAD + "  y = f32[2] add(x,, x)\n}", 4, "operands defined above"),
        (HEAD + "  x = f32[2] negate(x)\n}", 4, "a name no other instruction has"),
        (HEAD + "  y = f32[2] negate(x), a=\n}", 4, "a value for 'a'"),
        (HEAD + '  y = f32[2] negate(x), a="b\n}', 4, "a string that ends"),
        (HEAD + "  y = f32[2] negate(x) /* open\n}", 4, "an instruction"),
        (HEAD + "  ?\n}", 4, "an instruction"),
        (HEAD + "}\nENTRY f {\n  x = f32[] parameter(0)\n}", 5, "one ENTRY computation"),
        (HEAD + "}\ne {\n  x = f32[] parameter(0)\n}", 5, "a name no other computation has"),
    ],
)
def test_errors_name_line_and_expectation(text: str, line: int, expected: str) -> None:
    with pytest.raises(FormatError) as caught:
        _parse(text)
    error = caught.value
    assert error.path == "test.hlo"
    assert error.position is not None
    assert error.position.startswith(f"line {line}, column ")
    assert f"expected {expected}" in error.message
    assert error.hint or "found" in error.message
