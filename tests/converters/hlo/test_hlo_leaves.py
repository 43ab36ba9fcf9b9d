"""Operations in fusions and calls: the work of each timed instruction, and the origin of its values."""

from __future__ import annotations

from math import isnan

import pytest

from hespas.converters.hlo.leaves import Leaves, kind_of, module_leaves
from hespas.graph.errors import FormatError

MODULE = """HloModule jit_f

add_them {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

fused {
  p = f32[4,8]{1,0} parameter(0)
  q = f32[4,8]{1,0} parameter(1)
  t = f32[4,8]{1,0} tanh(p), metadata={op_name="jit(f)/tanh" stack_frame_id=2}
  w = f32[8,4]{0,1} transpose(t), dimensions={1,0}
  back = f32[4,8]{1,0} bitcast(w)
  ROOT m = f32[4,8]{1,0} multiply(back, q), metadata={op_name="jit(f)/mul"}
}

body {
  state = (s32[], f32[4,8]{1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[4,8]{1,0} get-tuple-element(state), index=1
  e = f32[4,8]{1,0} exponential(x)
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT again = (s32[], f32[4,8]{1,0}) tuple(next, e)
}

condition {
  state.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  j = s32[] get-tuple-element(state.1), index=0
  limit = s32[] constant(3)
  ROOT less = pred[] compare(j, limit), direction=LT
}

ENTRY main {
  u = f32[4,8]{1,0} parameter(0)
  v = f32[4,8]{1,0} parameter(1)
  n = f32[4,8]{1,0} negate(u)
  fusion.1 = f32[4,8]{1,0} fusion(n, v), kind=kLoop, calls=fused
  zero = s32[] constant(0)
  begin = (s32[], f32[4,8]{1,0}) tuple(zero, fusion.1)
  loop = (s32[], f32[4,8]{1,0}) while(begin), condition=condition, body=body
  done = f32[4,8]{1,0} get-tuple-element(loop), index=1
  nil = f32[] constant(0)
  r = f32[4]{0} reduce(done, nil), dimensions={1}, to_apply=add_them
  ROOT all = f32[4]{0} all-reduce(r), replica_groups={{0,1}}, to_apply=add_them
}
"""


def _leaves() -> Leaves:
    return module_leaves(MODULE.encode(), "module")


def _place(leaves: Leaves, kind: str) -> int:
    (found,) = [number for number, leaf in enumerate(leaves.leaves) if leaf.kind == kind]
    return found


def test_a_fusion_carries_out_what_it_holds() -> None:
    leaves = _leaves()
    kinds = [leaves.leaves[leaf].kind for leaf in leaves.carried["fusion.1"]]
    assert kinds == ["tanh", "transpose", "bitcast", "multiply"]
    tanh = leaves.leaves[_place(leaves, "tanh")]
    assert (tanh.made, tanh.name, tanh.frame) == ((("f32", (4, 8)),), "jit(f)/tanh", "2")


def test_what_reductions_apply_stays_closed() -> None:
    leaves = _leaves()
    assert [leaves.leaves[leaf].kind for leaf in leaves.carried["r"]] == ["reduce"]
    assert "sum" not in leaves.carried
    assert [leaf.kind for leaf in leaves.leaves].count("add") == 1, "the one that counts the trips"


def test_values_are_followed_through_fusions_loops_and_what_passes_them_on() -> None:
    leaves = _leaves()
    tanh, multiply, exponential = (_place(leaves, kind) for kind in ("tanh", "multiply", "exponential"))
    assert leaves.operands[tanh] == (_place(leaves, "negate"),)
    parameters = [number for number, leaf in enumerate(leaves.leaves) if leaf.kind == "parameter"]
    assert leaves.operands[multiply] == (tanh, parameters[1])
    assert leaves.operands[exponential] == (multiply,), "a loop begins with it"
    assert leaves.operands[_place(leaves, "reduce")] == (exponential,), "and ends with that"


def test_loops_around_and_sizes() -> None:
    leaves = _leaves()
    assert leaves.depth[_place(leaves, "exponential")] == leaves.depth[_place(leaves, "compare")] == 1
    assert leaves.depth[_place(leaves, "tanh")] == leaves.depth[_place(leaves, "all_reduce")] == 0
    assert (leaves.devices, leaves.argument_bytes, leaves.result_bytes) == (2, 256.0, 16.0)
    assert leaves.uses["loop"] == ("begin", "less", "again")


def test_unknown_sizes_are_not_zero() -> None:
    text = "HloModule m\n\nENTRY e {\n  x = f32[?]{0} parameter(0)\n  ROOT n = f32[?]{0} negate(x)\n}\n"
    leaves = module_leaves(text.encode(), "m")
    assert isnan(leaves.argument_bytes)
    assert isnan(leaves.result_bytes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dot", "dot_general"),
        ("stablehlo.dot_general", "dot_general"),
        ("all-reduce-start", "all_reduce"),
        ("broadcast", "broadcast_in_dim"),
        ("chlo.top_k", "top_k"),
        ("copy-start", "copy_start"),
    ],
)
def test_kinds_of_all_dialects(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_computation_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FormatError):
        module_leaves(MODULE.replace("calls=fused", "calls=gone").encode(), "module")
