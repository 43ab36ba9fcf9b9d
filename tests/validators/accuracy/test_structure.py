"""Structural join of programs without names with compiled modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from hespas import api
from hespas.converters.hlo.leaves import module_leaves
from hespas.graph import OpGraph, Workload
from hespas.validators.accuracy.structure import ProgramSizes, Structure, by_structure

PROGRAM = """HloModule jit_f

ENTRY main {
  x = f32[4,8]{1,0} parameter(0)
  w = f32[8,16]{1,0} parameter(1)
  v = f32[16,8]{1,0} parameter(2)
  first = f32[4,16]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  curved = f32[4,16]{1,0} tanh(first)
  second = f32[4,8]{1,0} dot(curved, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  bent = f32[4,8]{1,0} tanh(second)
  third = f32[4,16]{1,0} dot(bent, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT end = f32[4,16]{1,0} exponential(third)
}
"""
COMPILED = """HloModule jit_f, is_scheduled=true

inner {
  p = f32[4,16]{1,0} parameter(0)
  ROOT t = f32[4,16]{1,0} tanh(p), metadata={op_name="jit(f)/tanh" stack_frame_id=1}
}

outer {
  p.1 = f32[4,16]{1,0} parameter(0)
  ROOT x.1 = f32[4,16]{1,0} exponential(p.1), metadata={op_name="jit(f)/exp" stack_frame_id=4}
}

ENTRY main {
  a = f32[4,8]{1,0} parameter(0)
  b = f32[8,16]{1,0} parameter(1)
  c = f32[16,8]{1,0} parameter(2)
  dot.1 = f32[4,16]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  fusion.1 = f32[4,16]{1,0} fusion(dot.1), kind=kLoop, calls=inner
  dot.2 = f32[4,8]{1,0} dot(fusion.1, c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  tanh.9 = f32[4,8]{1,0} tanh(dot.2), metadata={op_name="jit(f)/tanh" stack_frame_id=2}
  copy.3 = f32[4,8]{0,1} copy(tanh.9)
  dot.3 = f32[4,16]{1,0} dot(copy.3, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT fusion.2 = f32[4,16]{1,0} fusion(dot.3), kind=kLoop, calls=outer
}
"""
_ARGUMENTS = {"a", "b", "c"}
SIZES = ProgramSizes(argument_bytes=1152.0, result_bytes=256.0, devices=1)


def _graph(tmp_path: Path, text: str = PROGRAM) -> OpGraph:
    path = tmp_path / "program.hlo.txt"
    path.write_text(text)
    program = api.read(path)
    assert isinstance(program, Workload)
    return program.classes[0]


def _joined(graph: OpGraph, text: str = COMPILED, sizes: ProgramSizes | None = SIZES) -> Structure:
    return by_structure(graph, module_leaves(text.encode(), "module"), sizes)


def _names(graph: OpGraph, found: Structure) -> dict[str, list[str]]:
    return {op: [graph.node_name(node) for node in nodes] for op, nodes in found.nodes.items() if nodes}


def test_each_instruction_finds_its_operation(tmp_path: Path) -> None:
    """Two products of equal shape are told apart by what takes them."""
    graph = _graph(tmp_path)
    found = _joined(graph)
    names = {op: nodes for op, nodes in _names(graph, found).items() if op not in _ARGUMENTS}
    assert names == {
        "dot.1": ["first"],
        "fusion.1": ["curved"],
        "dot.2": ["second"],
        "tanh.9": ["bent"],
        "copy.3": ["third"],
        "dot.3": ["third"],
        "fusion.2": ["end"],
    }
    assert found.inferred - _ARGUMENTS == {"copy.3"}
    assert (found.share, found.fits, found.is_other) == (1.0, True, False)


def test_what_nothing_tells_apart_stays_together(tmp_path: Path) -> None:
    """Two equal branches: no guess says which of them an instruction is."""
    text = """HloModule m

ENTRY main {
  x = f32[4]{0} parameter(0)
  y = f32[4]{0} parameter(1)
  one = f32[4]{0} tanh(x)
  two = f32[4]{0} tanh(y)
  ROOT both = f32[4]{0} add(one, two)
}
"""
    graph = _graph(tmp_path, text)
    found = _joined(graph, text, sizes=None)
    names = _names(graph, found)
    assert names["one"] == names["two"] == ["one", "two"]
    assert names["both"] == ["both"]


def test_products_with_a_folded_transpose_are_told_by_what_they_take(tmp_path: Path) -> None:
    """XLA makes the transposed product, whose shape is that of another one."""
    graph = _graph(
        tmp_path,
        """HloModule m

ENTRY main {
  x = f32[4,8]{1,0} parameter(0)
  y = f32[4,16]{1,0} parameter(1)
  t = f32[4,16]{1,0} tanh(y)
  e = f32[4,16]{1,0} exponential(y)
  one = f32[8,16]{1,0} dot(x, t), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  turned = f32[16,8]{1,0} transpose(one), dimensions={1,0}
  two = f32[16,8]{1,0} dot(e, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT both = (f32[16,8]{1,0}, f32[16,8]{1,0}) tuple(turned, two)
}
""",
    )
    compiled = """HloModule m

ENTRY main {
  x = f32[4,8]{1,0} parameter(0)
  y = f32[4,16]{1,0} parameter(1)
  t = f32[4,16]{1,0} tanh(y)
  e = f32[4,16]{1,0} exponential(y)
  dot.1 = f32[16,8]{1,0} dot(t, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  dot.2 = f32[8,16]{1,0} dot(x, e), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  turned = f32[16,8]{1,0} transpose(dot.2), dimensions={1,0}
  ROOT both = (f32[16,8]{1,0}, f32[16,8]{1,0}) tuple(dot.1, turned)
}
"""
    names = _names(graph, _joined(graph, compiled, sizes=None))
    assert (names["dot.1"], names["dot.2"]) == (["one"], ["two"])


@pytest.mark.parametrize(
    ("sizes", "is_other"),
    [
        (SIZES, False),
        (None, False),
        (SIZES._replace(argument_bytes=1156.0), True),
        (SIZES._replace(result_bytes=4.0), True),
        (SIZES._replace(devices=2), True),
    ],
)
def test_other_sizes_are_another_program(
    tmp_path: Path, sizes: ProgramSizes | None, *, is_other: bool
) -> None:
    assert _joined(_graph(tmp_path), sizes=sizes).is_other is is_other


def test_other_operations_are_another_program(tmp_path: Path) -> None:
    """Of equal sizes outside: of its six operations three are left."""
    graph = _graph(tmp_path, PROGRAM.replace("tanh", "cosine").replace("exponential", "sine"))
    found = _joined(graph)
    assert found.share == 0.5
    assert not found.is_other, "half is enough where sizes are equal"
    assert _joined(graph, sizes=None).is_other, "and too little where nobody knows them"


def test_a_share_of_each_device_is_joined(tmp_path: Path) -> None:
    """A program as all devices see it, against the module of one of two."""
    graph = _graph(tmp_path)
    halved = COMPILED.replace("f32[4,", "f32[2,").replace("is_scheduled=true", "num_partitions=2")
    found = _joined(graph, halved, SIZES._replace(devices=2))
    names = _names(graph, found)
    assert not found.is_other
    assert set(names["dot.1"]) == {"first", "third"}, "what partitioning changes tells nothing"
    assert names["fusion.2"] == ["end"]
