"""HLO text: every spelling of the printer, and messages for text that is not HLO."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hespas.converters.hlo.module import HloModule, parse_shape
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.scan import HloText, is_text, unquote
from hespas.graph import DYNAMIC
from hespas.graph.errors import FormatError
from tests.limits import SAFETY_S

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
    return parse_module(HloText(text, "test.hlo"))


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


@pytest.mark.parametrize("value", ["f32[] 0.5", "s32[2]{0} {1, 2}", "/*scalar*/ 3", "f32[]"])
def test_a_literal_follows_its_shape(value: str) -> None:
    line = f'ROOT y = f32[] custom-call(x), custom_call_target="t", literal={value}, channel_id=1'
    module = _parse(f"HloModule m\nENTRY e {{\n  x = f32[] parameter(0)\n  {line}\n}}")
    assert list(module.entry.attributes[1]) == ["custom_call_target", "literal", "channel_id"]


def test_comments_stand_in_front_of_names_and_shapes() -> None:
    module = _parse("HloModule m\nENTRY /*the step*/ e /**/ {\n  x = /*in*/ f32[2] parameter(0)\n}")
    assert (module.entry.name, module.marked, module.entry.names) == ("e", True, ["x"])


@pytest.mark.parametrize(
    "text",
    [
        "// why\nadd {\n  // what\n  a = f32[] parameter(0)\n}\nENTRY e {\n  x = f32[] parameter(0)\n}\n",
        "/* why */ ENTRY // what\n  e { /**/ ROOT x = f32[] parameter(0)\n}\n",
    ],
)
def test_a_module_without_header_begins_with_comments(text: str) -> None:
    assert is_text(text.encode())
    assert _parse(text).name == "module_e"


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
        ("HloModule m", 1, "a computation"),
        ("HloModule m\nENTRY e {\n}\n", 3, "an instruction in 'e'"),
        ("HloModule m\nENTRY e (x: f32[2]) f32[2] {", 2, "'->'"),
        ("HloModule m\nENTRY e\n", 3, "'{' to open the computation 'e'"),
        (HEAD, 4, "an instruction"),
        (HEAD + "  y = iota()\n}", 4, "a result shape"),
        (HEAD + "  y = f32[2x] add(x, x)\n}", 4, "an extent"),
        (HEAD + "  y = f32[2] (x, x)\n}", 4, "an opcode"),
        (HEAD + "  y = f32[2] add(x, x\n}", 5, "the ')' for the '(' of line 4"),
        (HEAD + "  y = f32[2] add(x, z)\n}", 4, "operands defined above; 'z' is not"),
        (HEAD + "  y = f32[2] add(f32[2] x, f32[2]{0} z)\n}", 4, "operands defined above; 'z' is not"),
        (HEAD + "  y = f32[2] add(x,, x)\n}", 4, "operands defined above"),
        (HEAD + "  x = f32[2] negate(x)\n}", 4, "a unique name: instruction"),
        (HEAD + "  y = f32[2] negate(x), a=\n}", 4, "a value for 'a'"),
        (HEAD + '  y = f32[2] negate(x), a="b\n}', 4, "a string that ends"),
        (HEAD + "  y = f32[2] negate(x) /* open\n}", 4, "an instruction"),
        (HEAD + "  ?\n}", 4, "an instruction"),
        (HEAD + "}\nENTRY f {\n  x = f32[] parameter(0)\n}", 5, "one ENTRY computation"),
        (HEAD + "}\ne {\n  x = f32[] parameter(0)\n}", 5, "a unique name: computation"),
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


OMITTED = """max {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = maximum(a, b)
}
ENTRY e {
  x = f32[2,3] parameter(0)
  w = f32[3,4] parameter(1)
  d = dot(x, w), lhs_contracting_dims=
      {1}, rhs_contracting_dims={0} n = exponential(add(multiply(d, d), f32[2,4] negate(d))) // one line
  z = f32[] constant(0)
  m = reduce(n, z), /* along */ dimensions={1}, to_apply={
    p = f32[] parameter(0)
    q = f32[] parameter(1)
    ROOT r = add(p, q)
  }
  k = compare(m, m), direction=LT
  b = conditional(s32[] constant(1), m, m), branch_computations={
    { p = f32[2] parameter(0) ROOT q = negate(p) }, { p = f32[2] parameter(0) ROOT q = abs(p) } }
  ROOT t = tuple(k, b)
}
"""


def test_what_xla_reads_beside_what_it_prints() -> None:
    module = _parse(OMITTED)
    entry = module.entry
    shapes = {
        name: [(leaf.element, leaf.dims) for leaf in module.shape_of(entry, index).leaves]
        for index, name in enumerate(entry.names)
    }
    assert module.name == "module_e"
    assert shapes["d"] == shapes["multiply.anon"] == shapes["n"] == [("f32", (2, 4))]
    assert shapes["m"] == [("f32", (2,))]
    assert shapes["k"] == [("pred", (2,))]
    assert shapes["t"] == [("pred", (2,)), ("f32", (2,))]
    assert entry.operands[entry.names.index("add.anon")] == (
        entry.names.index("multiply.anon"),
        entry.names.index("negate.anon"),
    )
    assert entry.attributes[entry.names.index("m")] == {"dimensions": "{1}", "to_apply": "_"}
    assert entry.attributes[entry.names.index("b")]["branch_computations"] == "{_.3, _.4}"
    assert [module.computations[name].opcodes[-1] for name in ("_", "_.3", "_.4")] == ["add", "negate", "abs"]


def test_the_last_computation_is_the_entry_where_none_says_so() -> None:
    module = _parse("HloModule m\na {\n  x = f32[] parameter(0)\n}\nb {\n  x = f32[2] parameter(0)\n}\n")
    assert module.entry.name == "b"
    assert not module.marked


def test_a_printed_module_without_its_entry_is_cut() -> None:
    with pytest.raises(FormatError, match="expected an ENTRY computation") as caught:
        _parse("HloModule m, entry_computation_layout={()->f32[]}\na {\n  x = f32[] parameter(0)\n}\n")
    assert caught.value.hint == "copy or dump the file again; the text ends early"


def test_a_splat_constant_and_a_listed_one() -> None:
    module = _parse(
        "HloModule m\nENTRY e {\n  a = f32[9] constant(0)\n  b = c64[2] constant({(1, 2), (3, 4)})\n"
        "  c = s32[2,3] constant({ { 1, 2, 3 }, { 4, 5, 6 } })\n  d = f32[9] constant({...})\n"
        "  e = f32[0] constant({})\n}\n"
    )
    assert module.entry.opcodes == ["constant"] * 5


@pytest.mark.parametrize(
    ("opener", "closer"),
    [("negate(", ")"), ("map(x), to_apply={ x = f32[2] parameter(0) q = f32[2] ", " }")],
)
def test_operations_inside_operations_have_a_limit(opener: str, closer: str) -> None:
    nested = f"{opener * 60}abs(x){closer * 60}"
    with pytest.raises(FormatError, match="operands and bodies nested at most"):
        _parse(f"HloModule m\nENTRY e {{\n  x = f32[2] parameter(0)\n  y = f32[2] {nested}\n}}\n")


PIECES = [
    *("a", '"', "'", "/", "/*", "{", "}", "(", "[", "\\", "=", ",", "a=", "a={", 'a="', "{}", "{ {", "/**/"),
    *(
        "//\n",
        " ",
        "\n",
        "%",
        "x,",
        "f32[",
        "f32[2]",
        "f32[2]{",
        "(f32[",
        "add(x, ",
        "0",
        "{}:(0,{}",
        " ROOT",
    ),
    *("#sdy.mesh<[", "a=#sdy.mesh<[", "1 {a=", '1 "x" '),
]
PLACES = [
    "HloModule m, a=@\nENTRY e {\n  x = f32[2] parameter(0)\n}\n",
    'HloModule m, frontend_attributes={xla.sdy.meshes="@"}\nENTRY e {\n  x = f32[2] parameter(0)\n}\n',
    "HloModule m, input_output_alias={@}\nENTRY e {\n  x = f32[2] parameter(0)\n}\n",
    "HloModule m\n\nFileLocations\n1 {@}\nENTRY e {\n  x = f32[2] parameter(0)\n}\n",
    'HloModule m\n\nFileNames\n1 "@"\nENTRY e {\n  x = f32[2] parameter(0)\n}\n',
    "HloModule m\nENTRY e (@) -> f32[2] {\n  x = f32[2] parameter(0)\n}\n",
    *(
        f"HloModule m\nENTRY e {{\n  x = f32[2] parameter(0)\n  y = {line}\n}}\n"
        for line in (
            "@ negate(x)",
            "f32[2] add(@)",
            "f32[9] constant({@})",
            "f32[2] negate(x), @",
            "f32[2] negate(x), metadata={@}",
            "f32[2] negate(x), control-predecessors={@}",
            "f32[2] all-reduce(x), to_apply=e, replica_groups={@}",
            "f32[2] map(x), to_apply={@}",
        )
    ),
    "@",
]


def test_time_grows_with_the_text_whatever_it_holds() -> None:
    """Each piece repeated over 20 kB in each place: quadratic steps would take minutes together."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, json.dumps([PIECES, PLACES])],
        capture_output=True, text=True, check=False, timeout=SAFETY_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == len(PIECES) * len(PLACES)


GROWTH = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from hespas.converters.format import ReadOptions
from hespas.converters.hlo.reader import source_of, workload_of
from hespas.converters.hlo.parser import parse_module
from hespas.graph import Diagnostics
from hespas.graph.errors import HespasError
pieces, places = json.loads(sys.argv[1])
tried = 0
for place in places:
    for piece in pieces:
        text = place.replace("@", piece * (20_000 // len(piece)), 1)
        try:
            workload_of(parse_module(source_of(text.encode(), "t")), ReadOptions(), Diagnostics())
        except HespasError:
            pass
        tried += 1
print(tried)
"""
