"""All-reduces accumulated in a loop move behind the loop if this is provably equal."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from hespas.captures.loop_reductions import move_reductions
from hespas.converters.format import ReadOptions
from hespas.converters.hlo.reader import read_module
from hespas.graph import Diagnostics, Workload

_PROGRAM = """HloModule m, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[8,4], f32[4,8])) -> (s32[], f32[8,4], f32[4,8]) {
  %p = (s32[], f32[8,4]{1,0}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %buffer = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %batch = f32[4,8]{1,0} get-tuple-element(%p), index=2
  %local = f32[4,8]{1,0} multiply(%batch, %batch)
  %reduced = f32[4,8]{1,0} all-reduce(%local), channel_id=1, replica_groups=[1,4]<=[4], IDS, to_apply=%add
  %turned = f32[8,4]{1,0} transpose(%reduced), dimensions={1,0}
  %total = f32[8,4]{1,0} add(%buffer, %turned)
  ROOT %out = (s32[], f32[8,4]{1,0}, f32[4,8]{1,0}) tuple(%next, %total, %batch)
}

%condition (q: (s32[], f32[8,4], f32[4,8])) -> pred[] {
  %q = (s32[], f32[8,4]{1,0}, f32[4,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] constant(16)
  ROOT %less = pred[] compare(%j, %end), direction=LT
}

ENTRY %main (a: f32[8,4], b: f32[4,8]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %nothing = f32[] constant(0)
  %first = f32[8,4]{1,0} broadcast(%nothing), dimensions={}
  %start = (s32[], f32[8,4]{1,0}, f32[4,8]{1,0}) tuple(%zero, %first, %b)
  %loop = (s32[], f32[8,4]{1,0}, f32[4,8]{1,0}) while(%start), condition=%condition, body=%body
  %result = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %scaled = f32[8,4]{1,0} multiply(%result, %a)
}
""".replace("IDS", "use_global_device_ids=true")


def reductions(text: str) -> list[tuple[float, float]]:
    """Return how often each all-reduce runs, and its payload."""
    graph = read(text).classes[0]
    table = graph.collectives
    return list(zip(graph.executions[table.node].tolist(), table.comm_bytes.tolist(), strict=True))


def read(text: str) -> Workload:
    return read_module(text.encode(), "m", ReadOptions(), Diagnostics())


def moved(text: str) -> tuple[str, dict[str, int]]:
    found = Diagnostics()
    return move_reductions(text, "m", found), found.counts()


def test_an_accumulated_all_reduce_runs_once() -> None:
    assert reductions(_PROGRAM) == [(16.0, 128.0)]
    text, counts = moved(_PROGRAM)
    assert reductions(text) == [(1.0, 128.0)]
    assert counts == {"capture.moved-reductions": 1}
    body = text.partition("%body (")[2].partition("\n}")[0]
    assert "all-reduce" not in body
    assert "%turned = f32[8,4]{1,0} transpose(%local)" in body


def test_a_first_value_is_added_once_and_not_once_a_rank() -> None:
    program = _PROGRAM.replace("tuple(%zero, %first, %b)", "tuple(%zero, %a, %b)")
    text, _ = moved(program)
    assert reductions(text) == [(1.0, 128.0)]
    assert "%result = f32[8,4]{1,0} add(%a, %result.total)" in text
    assert "tuple(%zero, %loop.zeros.1, %b)" in text


def test_numbers_of_both_programs_agree() -> None:
    """On one partition, where an all-reduce changes nothing: what one process can run."""
    np, jax = pytest.importorskip("numpy"), pytest.importorskip("jax")
    program = _PROGRAM.replace("tuple(%zero, %first, %b)", "tuple(%zero, %a, %b)")
    arguments = [np.arange(32, dtype=np.float32).reshape(8, 4), np.full((4, 8), 0.5, np.float32)]
    before, after = (_run(jax, text, arguments) for text in (program, moved(program)[0]))
    assert np.array_equal(before, after)
    assert np.array_equal(after, arguments[0] * (arguments[0] + 16 * 0.25))


def _run(jax: Any, text: str, arguments: list[Any]) -> Any:
    """Compile and run a program for one CPU."""
    hlo: Any = import_module("jaxlib._hlo")
    xla: Any = import_module("jaxlib._jax")
    if not hasattr(hlo, "hlo_module_from_text"):
        pytest.skip("this jaxlib reads no text of HLO")
    alone = text.replace("num_partitions=4", "num_partitions=1").replace("[1,4]<=[4]", "[1,1]<=[1]")
    module = hlo.hlo_module_from_text(alone)
    computation = hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    program = xla.mlir.xla_computation_to_mlir_module(computation)
    device = jax.devices("cpu")[0]
    compiled = device.client.compile_and_load(program, xla.DeviceList((device,)), xla.CompileOptions())
    (result,) = compiled.execute([jax.device_put(each, device) for each in arguments])
    return import_module("numpy").asarray(result)


_STAYS = {
    "read for something else": ("tuple(%next, %total, %batch)", "tuple(%next, %total, %reduced)"),
    "the buffer is read": ("multiply(%batch, %batch)", "transpose(%buffer), dimensions={1,0}"),
    "another element": ("tuple(%next, %total, %batch)", "tuple(%next, %buffer, %batch)"),
    "subtracted": ("add(%buffer, %turned)", "subtract(%buffer, %turned)"),
    "the maximum": ("ROOT %sum = f32[] add(%x, %y)", "ROOT %sum = f32[] maximum(%x, %y)"),
    "added to itself": ("add(%buffer, %turned)", "add(%turned, %turned)"),
}


@pytest.mark.parametrize("why", _STAYS)
def test_what_cannot_be_proven_stays(why: str) -> None:
    program = _PROGRAM.replace(*_STAYS[why])
    assert program != _PROGRAM
    text, counts = moved(program)
    assert text == program
    assert "capture.moved-reductions" not in counts


def test_an_accumulation_that_cannot_be_proven_is_warned_of() -> None:
    program = _PROGRAM.replace("tuple(%next, %total, %batch)", "tuple(%next, %total, %reduced)")
    assert moved(program)[1] == {"capture.accumulated-reductions": 1}


def test_the_result_as_a_whole_is_left() -> None:
    program = _PROGRAM.replace(
        "%result = f32[8,4]{1,0} get-tuple-element(%loop), index=1",
        "%same = (s32[], f32[8,4]{1,0}, f32[4,8]{1,0}) copy(%loop)\\n"
        "  %result = f32[8,4]{1,0} get-tuple-element(%same), index=1".replace("\\n", "\n"),
    )
    assert moved(program)[0] == program
