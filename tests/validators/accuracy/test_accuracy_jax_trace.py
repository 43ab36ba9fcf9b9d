"""trace.json.gz of JAX has no program: it joins with optimised HLO, and failures are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hespas import api
from hespas.graph import Profile, Workload
from hespas.graph.errors import UsageError
from hespas.validators.accuracy import accuracy

HLO = """HloModule jit_f

ENTRY e {
  x = f32[64,64]{1,0} parameter(0)
  dot.1 = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT add.2 = f32[64,64]{1,0} add(dot.1, x)
}
"""
STABLEHLO = """module @jit_f {
  func.func public @main(%arg0: tensor<64x64xf32>) -> tensor<64x64xf32> {
    %0 = stablehlo.dot_general %arg0, %arg0, contracting_dims = [1] x [0] : (tensor<64x64xf32>,
    tensor<64x64xf32>) -> tensor<64x64xf32> %1 = stablehlo.add %0, %arg0 : tensor<64x64xf32>
    return %1 : tensor<64x64xf32>
  }
}
"""


def _trace(path: Path) -> Profile:
    """Two runs on a CPU, as ``jax.profiler`` writes them."""
    names = [
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "M", "pid": 7, "tid": 3, "name": "thread_name", "args": {"name": "tf_XLAEigen/3"}},
    ]
    events = [
        {
            "ph": "X", "pid": 7, "tid": 3, "name": op, "ts": start, "dur": 5,
            "args": {"hlo_module": "jit_f", "hlo_op": op, "run_id": str(run), "program_id": "1"},
        }
        for run in range(2)
        for op, start in (("dot.1", 100 * run), ("add.2", 100 * run + 10))
    ]  # fmt: skip
    path.write_text(json.dumps({"displayTimeUnit": "ns", "metadata": {}, "traceEvents": names + events}))
    value = api.read(path, format="jax-trace")
    assert isinstance(value, Profile)
    return value


def _program(path: Path, text: str) -> Workload:
    path.write_text(text)
    value = api.read(path)
    assert isinstance(value, Workload)
    return value


def test_a_trace_joins_with_the_optimised_hlo_by_name(tmp_path: Path) -> None:
    profile = _trace(tmp_path / "vm.trace.json")
    done = accuracy([profile], ["H100-SXM"], workload=_program(tmp_path / "f.hlo.txt", HLO))
    [found] = done.coverage.values()
    assert (found.matched_events, found.events, found.time_share) == (4, 4, 1.0)
    assert "match.no-module" not in done.diagnostics.counts()
    assert {run.basis for run in done.end_to_end} == {"span", "busy", "sum of operations"}


@pytest.mark.parametrize("has_program", [True, False])
def test_against_stablehlo_it_is_told_what_is_missing(has_program: bool, tmp_path: Path) -> None:
    profile = _trace(tmp_path / "vm.trace.json")
    program = _program(tmp_path / "f.mlir", STABLEHLO) if has_program else None
    with pytest.raises(UsageError) as told:
        accuracy([profile], ["H100-SXM"], workload=program)
    assert told.value.hint is not None
    assert "give the .xplane.pb of the same recording" in told.value.hint
    assert "or the optimised HLO" in told.value.hint
