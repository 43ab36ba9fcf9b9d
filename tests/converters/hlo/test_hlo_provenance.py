"""Operations of the source program for the instructions of a compiled module."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hespas.converters.hlo.provenance import Origin, Provenance, module_provenance, read_provenance
from hespas.graph.errors import FormatError, HespasError

DATA = Path(__file__).parents[3].parent / "shared" / "data" / "workloads"

MODULE = """HloModule m, is_scheduled=true

add {
  p = f32[] parameter(0)
  q = f32[] parameter(1)
  ROOT s = f32[] add(p, q), metadata={op_name="jit(f)/reduce_sum" source_file="f.py" source_line=9}
}

fused {
  a = f32[8]{0} parameter(0), metadata={op_name="x"}
  m = f32[8]{0} multiply(a, a), metadata={op_name="jit(f)/mul" source_file="f.py" source_line=3}
  zero = f32[] constant(0), metadata={op_name="jit(f)/zero"}
  ROOT r = f32[] reduce(m, zero), dimensions={0}, to_apply=add, metadata={op_name="jit(f)/reduce_sum"}
}

cond {
  c = (s32[], f32[8]{0}) parameter(0)
  ci = s32[] get-tuple-element(c), index=0
  n = s32[] constant(4)
  ROOT lt = pred[] compare(ci, n), direction=LT, metadata={op_name="jit(f)/while/cond/lt"}
}

body {
  b = (s32[], f32[8]{0}) parameter(0)
  i = s32[] get-tuple-element(b), index=0
  v = f32[8]{0} get-tuple-element(b), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one), metadata={op_name="jit(f)/while/body/add"}
  sine = f32[8]{0} sine(v), metadata={op_name="jit(f)/while/body/(sin:checkpoint/cos)"}
  ROOT out = (s32[], f32[8]{0}) tuple(next, sine)
}

ENTRY e {
  x = f32[8]{0} parameter(0), metadata={op_name="x"}
  made = f32[8]{0} copy(x)
  named = f32[8]{0} copy(x), metadata={op_name="x"}
  sum = f32[] fusion(made), kind=kLoop, calls=fused, metadata={op_name="jit(f)/sum" source_file="f.py"
  source_line=5} start = s32[] constant(0)
  state = (s32[], f32[8]{0}) tuple(start, named)
  loop = (s32[], f32[8]{0}) while(state), condition=cond, body=body, metadata={op_name="jit(f)/while"}
  last = f32[8]{0} get-tuple-element(loop), index=1
  ROOT done = f32[8]{0} bitcast(last)
}
"""


def _names(found: Provenance) -> list[str]:
    return [origin.name for origin in found.origins]


def test_a_fusion_carries_out_itself_and_all_it_calls() -> None:
    found = module_provenance(MODULE.encode(), "m")["sum"]
    assert not found.inferred
    assert found.origins == (
        Origin("jit(f)/sum", "f.py:5"),
        Origin("jit(f)/mul", "f.py:3"),
        Origin("jit(f)/reduce_sum", ""),
        Origin("jit(f)/reduce_sum", "f.py:9"),
    )


def test_instructions_inside_a_fusion_are_no_events() -> None:
    found = module_provenance(MODULE.encode(), "m")
    assert set(found) >= {"sum", "loop", "next", "sine", "lt", "done"}
    assert not {"m", "r", "s"} & set(found)


def test_a_loop_is_not_what_runs_inside_of_it() -> None:
    found = module_provenance(MODULE.encode(), "m")
    assert _names(found["loop"]) == ["jit(f)/while"]
    assert _names(found["next"]) == ["jit(f)/while/body/add"]


def test_combined_names_are_taken_apart() -> None:
    assert _names(module_provenance(MODULE.encode(), "m")["sine"]) == [
        "jit(f)/while/body/sin",
        "jit(f)/while/body/checkpoint/cos",
    ]


def test_what_the_compiler_made_serves_its_users_else_its_operands() -> None:
    found = module_provenance(MODULE.encode(), "m")
    assert (found["made"].inferred, found["made"].origins) == (True, found["sum"].origins)
    assert (found["done"].inferred, _names(found["done"])) == (True, ["jit(f)/while"])
    assert found["named"].inferred, "the name of an argument is none of an operation"
    assert _names(found["named"]) == ["jit(f)/while"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("jit(f)/(a/add:b/mul)", ["jit(f)/a/add", "jit(f)/b/mul"]),
        ("(a:b)", ["(a:b)"]),
        ("jit(f)/(a:b(c:d):e)", ["jit(f)/a", "jit(f)/b(c:d)", "jit(f)/e"]),
        ("jit(f)/(a:b)/add", ["jit(f)/(a:b)/add"]),
        ("jit(f)/(a)/jit(g)", ["jit(f)/(a)/jit(g)"]),
        ("jit(f)/(a:b", ["jit(f)/(a:b"]),
        ("jit(f)/add", ["jit(f)/add"]),
    ],
)
def test_combined_names(name: str, parts: list[str]) -> None:
    text = f"""HloModule m
    ENTRY e {{
      x = f32[8]{{0}} parameter(0)
      ROOT y = f32[8]{{0}} all-reduce(x), metadata={{op_name="{name}"}}
    }}"""
    found = module_provenance(text.encode(), "m")["y"]
    assert _names(found) == parts


def test_an_argument_without_a_name_hides_nothing() -> None:
    text = """HloModule m
    ENTRY e {
      x = f32[8]{0} parameter(0), metadata={source_file="f.py" source_line=1}
      ROOT y = f32[8]{0} negate(x), metadata={source_file="f.py" source_line=2}
    }"""
    assert module_provenance(text.encode(), "m")["y"] == Provenance((Origin("", "f.py:2"),), inferred=False)


@pytest.mark.parametrize(
    ("calls", "message"),
    [("calls=absent", "absent"), ("calls=c", "itself"), ("calls={c, d", "")],
)
def test_a_module_that_is_wrong_is_refused(calls: str, message: str) -> None:
    text = f"""HloModule m
    c {{
      p = f32[8]{{0}} parameter(0)
      ROOT q = f32[8]{{0}} fusion(p), kind=kLoop, {calls}
    }}
    ENTRY e {{
      x = f32[8]{{0}} parameter(0)
      ROOT y = f32[8]{{0}} fusion(x), kind=kLoop, calls=c
    }}"""
    with pytest.raises(FormatError) as caught:
        module_provenance(text.encode(), "m")
    assert message in str(caught.value)


def test_only_errors_of_this_package_leave(tmp_path: Path) -> None:
    data = MODULE.encode()
    chance = random.Random(7)
    inputs = [data[:stop] for stop in range(0, len(data), 11)]
    for _ in range(300):
        flipped = bytearray(data)
        for _ in range(3):
            flipped[chance.randrange(len(data))] = chance.randrange(256)
        inputs.append(bytes(flipped))
    refused = 0
    for each in inputs:
        try:
            module_provenance(each, "m")
        except HespasError:
            refused += 1
    assert 0 < refused < len(inputs)


def test_many_callers_of_one_large_computation() -> None:
    inner = "\n".join(
        f'  i{number} = f32[8]{{0}} negate(p), metadata={{op_name="jit(f)/n{number}"}}'
        for number in range(200)
    )
    calls = "\n".join(f"  y{number} = f32[8]{{0}} fusion(x), kind=kLoop, calls=c" for number in range(200))
    text = (
        f"HloModule m\nc {{\n  p = f32[8]{{0}} parameter(0)\n{inner}\n  ROOT r = f32[8]{{0}} negate(p)\n}}\n"
        f"ENTRY e {{\n  x = f32[8]{{0}} parameter(0)\n{calls}\n  ROOT r = f32[8]{{0}} negate(x)\n}}\n"
    )
    found = module_provenance(text.encode(), "m")
    assert all(len(found[f"y{number}"].origins) == 200 for number in range(200))


@pytest.mark.parametrize(
    ("instruction", "multiplies"),
    [
        ("dot(x, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}", True),
        ('custom-call(x), custom_call_target="__cublas$gemm"', True),
        ('custom-call(x), custom_call_target="TopK"', False),
        ("negate(x)", False),
    ],
)
def test_products_are_told_apart(instruction: str, multiplies: bool) -> None:
    text = f"""HloModule m
    ENTRY e {{
      x = f32[8]{{0}} parameter(0)
      ROOT y = f32[8]{{0}} {instruction}, metadata={{op_name="n"}}
    }}"""
    assert module_provenance(text.encode(), "m")["y"].origins == (Origin("n", "", multiplies),)


@pytest.mark.skipif(not DATA.exists(), reason="the shared data are not here")
def test_a_real_module_names_operations_for_all_but_what_has_none() -> None:
    found = read_provenance(DATA / "llama1.opt.hlo.txt.gz", 1 << 28)
    told = [each for each in found.values() if each.origins]
    assert len(told) > 200
    assert all(origin.name or origin.source for each in told for origin in each.origins)
    assert sum(not each.inferred for each in told) > len(told) / 2
