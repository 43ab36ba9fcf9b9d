"""Products of 16-bit values that XLA widens for CPUs are distinguished from f32 products of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hespas import api
from hespas.estimators import as_run_on
from hespas.graph import SOURCE_DTYPE, Diagnostics, OpClass, OpGraph, Workload, dtype
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device

ReadText = Callable[..., tuple[Workload, Diagnostics]]

_MODULE = """HloModule m, is_scheduled=true
widen {
  p = bf16[4096,4096]{1,0} parameter(0)
  ROOT c = f32[4096,4096]{1,0} convert(p)META
}
relu {
  p = f32[4096,4096]{1,0} parameter(0)
  n = bf16[4096,4096]{1,0} convert(p)
  w = f32[4096,4096]{1,0} convert(n)
  a = f32[4096,4096]{1,0} abs(w)
  b = bf16[4096,4096]{1,0} convert(a)
  ROOT c = f32[4096,4096]{1,0} convert(b)META
}
product {
  x = f32[4096,4096]{1,0} parameter(0)
  y = f32[4096,4096]{1,0} parameter(1)
  ROOT d = f32[4096,4096]{1,0} dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY e {
  x = bf16[4096,4096]{1,0} parameter(0)
  w = bf16[4096,4096]{1,0} parameter(1)
  wx = f32[4096,4096]{1,0} fusion(x), kind=kLoop, calls=widen
  ww = f32[4096,4096]{1,0} convert(w)META
  t = f32[4096,4096]{0,1} transpose(ww), dimensions={1,0}
  one = f32[4096,4096]{1,0} dot(wx, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  r = f32[4096,4096]{1,0} fusion(one), kind=kLoop, calls=relu
  two = f32[4096,4096]{1,0} fusion(r, ww), kind=kCustom, calls=product
  ROOT out = bf16[4096,4096]{1,0} convert(two)
}
"""
_WANTED = ', metadata={op_name="jit(f)/convert_element_type"}'


def _stated(graph: OpGraph) -> dict[str, str]:
    extra = graph.extra
    return {
        graph.node_name(int(extra.node[row])): extra.value(row).decode()
        for row in range(len(extra))
        if graph.strings[int(extra.key[row])] == SOURCE_DTYPE
    }


def test_widened_products_and_their_conversions_are_told(read_text: ReadText) -> None:
    workload, findings = read_text(_MODULE.replace("META", ""))
    assert _stated(workload.classes[0]) == {
        "wx": "convert",
        "ww": "convert",
        "one": "bf16",
        "two": "bf16",
        "out": "convert",
    }
    assert findings.counts() == {"hlo.widened-product": 2}
    wanted, none = read_text(_MODULE.replace("META", _WANTED))
    assert _stated(wanted.classes[0]) == {"out": "convert"}
    assert none.counts() == {}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("bf16[4096,4096]{1,0} parameter(1)", "f16[4096,4096]{1,0} parameter(1)", {"bf16,f16"}),
        ("bf16[4096,4096]{1,0} parameter(1)", "f64[4096,4096]{1,0} parameter(1)", set[str]()),
        ("ww = f32[4096,4096]{1,0} convert(w)META", "ww = f32[4096,4096]{1,0} parameter(2)", set[str]()),
    ],
    ids=["two types", "narrowed", "f32 itself"],
)
def test_products_of_what_the_compiler_widened_only(
    read_text: ReadText, old: str, new: str, told: set[str]
) -> None:
    workload, _ = read_text(_MODULE.replace(old, new).replace("META", ""))
    assert set(_stated(workload.classes[0]).values()) - {"convert"} == told


def test_products_of_narrow_values_themselves_stay(read_text: ReadText) -> None:
    workload, found = read_text(
        """HloModule m, is_scheduled=true
ENTRY e {
  x = f32[64,64]{1,0} parameter(0)
  c = bf16[64,64]{1,0} convert(x)
  ROOT d = bf16[64,64]{1,0} dot(c, c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    )
    assert set(_stated(workload.classes[0]).values()) == {"convert"}
    assert found.counts() == {}


def test_another_device_multiplies_the_values_as_they_were(read_text: ReadText) -> None:
    workload, _ = read_text(_MODULE.replace("META", ""))
    wanted, _ = read_text(_MODULE.replace("META", _WANTED))
    (graph,) = workload.classes
    assert graph.contractions.lhs.tolist() == [dtype("f32").code] * 2, "the program is what it is"
    products = graph.op_class == OpClass.CONTRACTION
    times: dict[str, FloatArray] = {}
    for name, program in (("widened", workload), ("wanted", wanted)):
        found = Diagnostics()
        (said,) = api.estimate(program, "H100-SXM", estimator="roofline", diagnostics=found).estimates
        times[name] = said.duration_ns
        assert found.counts().get("estimate.widened", 0) == (2 if name == "widened" else 0)
    # Half of it by the peaks of bf16 and tf32; launches and the shares of them that fits know add to it.
    assert max(times["widened"][products] / times["wanted"][products]) < 0.67
    converts = [node for node in range(len(graph)) if graph.node_name(node) in {"wx", "ww", "out"}]
    assert times["widened"][converts].tolist() == [0.0] * 3
    products_only = replace(graph, extra=type(graph.extra).empty())
    assert as_run_on(products_only, load_device("H100-SXM"), Diagnostics()) is products_only
    cpu = replace(load_device("H100-SXM"), kind="cpu")
    assert as_run_on(graph, cpu, Diagnostics()) is graph, "a CPU runs what was compiled for it"
