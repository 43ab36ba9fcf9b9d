"""Shapes that do not fit are rejected for every wrong extent; shapes that XLA accepts are not."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hespas.converters.hlo.inference import same_extents
from hespas.converters.hlo.inference_calls import check_shapes
from hespas.converters.hlo.module import Computation, HloModule, Shape, parse_shape, shown_shape
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.program import HloProgram
from hespas.converters.hlo.reader import callees_first
from hespas.converters.hlo.scan import HloText
from hespas.graph.errors import FormatError
from tests.converters.hlo.conftest import ReadText

FIXTURES = sorted(Path("fixtures/hlo").glob("*.hlo.txt*"))
TRIED = 60
"""Corruptions of each file."""

_FREE = {"custom-call"}
"""Results that operands do not settle; nothing else reads what is changed here."""


def _changed(shape: Shape) -> Iterator[Shape]:
    """A shape with each of its extents one longer."""
    if shape.elements is None:
        leaf = shape.leaves[0]
        for place, extent in enumerate(leaf.dims):
            dims = (*leaf.dims[:place], extent + 1, *leaf.dims[place + 1 :])
            yield Shape(replace(leaf, dims=dims))
        return
    for place, element in enumerate(shape.elements):
        for other in _changed(element):
            parts = (*shape.elements[:place], other, *shape.elements[place + 1 :])
            yield Shape(None, parts)


def _fits(module: HloModule, ordered: list[Computation]) -> bool:
    try:
        check_shapes(HloProgram(module), ordered)
    except FormatError:
        return False
    return True


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.partition(".")[0])
def test_any_extent_changed_by_one_is_refused(path: Path) -> None:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    module = parse_module(HloText(text, path.name))
    ordered = callees_first(module)
    check_shapes(HloProgram(module), ordered)
    places = [(body, index) for body in ordered for index in range(len(body)) if module.shape_of(body, index)]
    draw = random.Random(path.name)
    accepted: Counter[str] = Counter()
    for body, index in draw.sample(places, min(TRIED, len(places))):
        row = body.shapes[index]
        for shape in _changed(module.shapes[row]):
            module.shapes.append(shape)
            body.shapes[index] = len(module.shapes) - 1
            if _fits(module, ordered):
                accepted[body.opcodes[index]] += 1
            body.shapes[index] = row
            module.shapes.pop()
    assert set(accepted) <= _FREE


PRELUDE = """HloModule m, num_partitions=4
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
less {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT
}
double {
  p = f32[8,512] parameter(0)
  ROOT q = f32[8,512] add(p, p)
}
more {
  p = f32[8,512] parameter(0)
  ROOT q = pred[] constant(false)
}
ENTRY e {
  x = f32[8,512] parameter(0)
  w = f32[512,64] parameter(1)
  z = f32[] parameter(2)
  i = s32[] parameter(3)
  t = s32[5,1] parameter(4)
  v = f32[2,16,16,8] parameter(5)
  k = f32[3,3,8,32] parameter(6)
  h = bf16[8,512] parameter(7)
  g = s32[4] parameter(8)
  ROOT y = LINE
}
"""
GLOBAL = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"


def _module(line: str) -> str:
    return PRELUDE.replace("LINE", line.replace("GLOBAL", GLOBAL))


GATHER = (
    "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,512}"
)
SCATTER = (
    "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, "
    "to_apply=sum"
)
FITTING = [
    "f32[8,64] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "f32[2,16,16,32] convolution(v, k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
    "f32[2,7,7,32] convolution(v, k), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f",
    "f32[8] reduce(x, z), dimensions={1}, to_apply=sum",
    "f32[8,171] reduce-window(x, z), window={size=1x3 stride=1x3 pad=0_0x1_1}, to_apply=sum",
    "f32[512,8] transpose(x), dimensions={1,0}",
    "f32[8,512,64] broadcast(w), dimensions={1,2}",
    "f32[4096] reshape(x)",
    "bf16[8192]{0} bitcast(x)",
    "f32[8,1024] concatenate(x, x), dimensions={1}",
    "f32[4,256] slice(x), slice={[0:8:2], [256:512]}",
    "f32[2,512] dynamic-slice(x, i, i), dynamic_slice_sizes={2,512}",
    "f32[10,1023] pad(x, z), padding=1_1x0_0_1",
    f"f32[5,512] gather(x, t), {GATHER}",
    "(f32[8,512], s32[]) tuple(x, i)",
    "f32[8,512] add(x, h)",
    "pred[8,512] compare(x, x), direction=LT",
    "f32[8,512] clamp(z, x, z)",
    "s32[8,512] convert(x)",
    "u8[8,512,4] bitcast-convert(x)",
    "f32[8,512] while(x), condition=more, body=double",
    "f32[8,512] call(x), to_apply=double",
    "f32[8,512] fusion(x), kind=kLoop, calls=double",
    "f32[32,512] all-gather(x), dimensions={0}, channel_id=1, GLOBAL",
    "f32[2,512] reduce-scatter(x), dimensions={0}, channel_id=1, GLOBAL, to_apply=sum",
    "f32[8,512] all-to-all(x), dimensions={1}, channel_id=1, replica_groups=[1,4]<=[4]",
    "(f32[8,512], f32[8,512], u32[]) copy-start(x)",
    "((f32[8,512]), f32[512,8], s32[]) transpose-start(x), dimensions={1,0}",
    "f32[8,512] sort(x), dimensions={1}, to_apply=less",
    "f32[8,512] custom-call(x), custom_call_target=\"anything\"",
    "c64[8,257] fft(x), fft_type=RFFT, fft_length={512}",
    "(f32[8,16], s32[8,16]) topk(x), k=16, largest=true",
    "f32[8,512] iota(), iota_dimension=1",
]  # fmt: skip


@pytest.mark.parametrize("line", FITTING)
def test_what_fits_is_read_and_the_same_with_one_extent_changed_is_not(line: str) -> None:
    module = parse_module(HloText(_module(line), "t.hlo"))
    ordered = callees_first(module)
    check_shapes(HloProgram(module), ordered)
    entry = module.entry
    if any(opcode in line for opcode in ("custom-call", "iota", "broadcast")):
        return
    row = entry.shapes[entry.root]
    for shape in _changed(module.shapes[row]):
        module.shapes.append(shape)
        entry.shapes[entry.root] = len(module.shapes) - 1
        with pytest.raises(FormatError, match="%y"):
            check_shapes(HloProgram(module), ordered)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "f32[8,64] dot(x, w), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
            "dot %y: expected equal extents in contracting dimensions 0 and 0, found f32[8,512] and f32[",
        ),
        ("f32[8,512] add(x, w)", "expected operands of the same shape, found f32[8,512] and f32[512,64]"),
        ("f32[8,64] reshape(x)", "expected as many elements as the operand has"),
        (
            "f32[8,512] transpose(x), dimensions={1,0}",
            "expected the result f32[512,8], which its operands and attributes make, found f32[8,512]",
        ),
        ("f32[9,512] call(x), to_apply=double", "expected the result f32[8,512]"),
        ("f32[512,64] call(w), to_apply=double", "expected parameter 0 of the computation"),
        ("f32[8] reduce(x, z), dimensions={1}, to_apply=double", "expected a computation of 2 parameters"),
        ("s32[8,512] add(x, x)", "expected the result f32[8,512]"),
        (
            "f32[16,512] all-gather(x), dimensions={0}, channel_id=1, GLOBAL",
            "expected 4 shards along dimension 0",
        ),
    ],
)
def test_what_does_not_fit_says_what_was_expected(line: str, message: str) -> None:
    module = parse_module(HloText(_module(line), "t.hlo"))
    with pytest.raises(FormatError) as caught:
        check_shapes(HloProgram(module), callees_first(module))
    error = caught.value
    assert message in error.message
    assert error.position == "line 30"
    assert error.path == "t.hlo"
    assert error.hint


def test_shards_that_are_not_one_per_device_may_be_a_fault_of_the_groups() -> None:
    line = "f32[16,512] all-gather(x), dimensions={0}, channel_id=1, GLOBAL"
    module = parse_module(HloText(_module(line), "t.hlo"))
    with pytest.raises(FormatError) as caught:
        check_shapes(HloProgram(module), callees_first(module))
    assert "replica_groups, replica_count or num_partitions" in str(caught.value.hint)


def test_a_wrong_contraction_is_refused_by_the_reader(read_text: ReadText) -> None:
    text = PRELUDE.replace("LINE", "f32[8,64] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}")
    read_text(text)
    with pytest.raises(FormatError, match="equal extents in contracting dimensions 1 and 0"):
        read_text(text.replace("f32[8,512] parameter(0)\n  w", "f32[8,1537] parameter(0)\n  w"))


def test_the_header_and_the_entry_say_the_same(read_text: ReadText) -> None:
    text = "HloModule m, entry_computation_layout={(f32[8]{0}, s32[])->f32[8]{0}}\nENTRY e {\n"
    body = "  a = f32[8] parameter(0)\n  b = s32[] parameter(1)\n  ROOT c = f32[8] negate(a)\n}\n"
    read_text(text + body)
    with pytest.raises(FormatError, match=r"parameter 0 to be f32\[8\], as the header says"):
        read_text(text + body.replace("f32[8]", "f32[9]"))
    with pytest.raises(FormatError, match="expected 2 parameters, as the header says, found 1"):
        read_text(text + body.replace("  b = s32[] parameter(1)\n", ""))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y = f32[2] add(f32[2] x, f32[3] x)", "an operand of shape f32[2]"),
        ("y = f32[3] constant({1, 2})", "3 values for f32[3], not 2"),
        ("y = f32[2,2] constant({{1, 2}, {3}})", "4 values for f32[2,2], not 3"),
    ],
)
def test_shapes_that_the_text_repeats_agree(line: str, expected: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_module(HloText(f"HloModule m\nENTRY e {{\n  x = f32[2] parameter(0)\n  {line}\n}}\n", "t.hlo"))
    assert expected in caught.value.message
    assert caught.value.position is not None
    assert caught.value.position.startswith("line 4")


def test_a_signature_and_its_root_agree() -> None:
    text = "HloModule m\nENTRY %e (x: f32[2]) -> f32[3] {\n  ROOT x = f32[2] parameter(0)\n}\n"
    with pytest.raises(FormatError, match=r"'e' to make f32\[2\]"):
        parse_module(HloText(text, "t.hlo"))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("f32[2,3]{1,0}", "f32[2,3]{0,1:T(8,128)}", True),
        ("f32[2]", "bf16[2]", True),
        ("f32[2]", "s32[2]", False),
        ("f32[?,3]", "f32[7,3]", True),
        ("f32[<=8]", "f32[8]", True),
        ("(f32[2], (s32[], f32[3]))", "(f32[2], (s32[], f32[3]{0}))", True),
        ("(f32[2], (s32[], f32[3]))", "(f32[2], (s32[], f32[4]))", False),
        ("(f32[2])", "f32[2]", False),
    ],
)
def test_same_extents(left: str, right: str, *, same: bool) -> None:
    assert same_extents(parse_shape(left), parse_shape(right)) is same


def test_shapes_in_messages_are_short() -> None:
    assert shown_shape(parse_shape("(f32[2,3]{1,0}, (s32[], pred[<=4]))")) == "(f32[2,3], (s32[], pred[4]))"
    assert len(shown_shape(parse_shape(f"({', '.join(['f32[1024]'] * 500)})"))) < 130
