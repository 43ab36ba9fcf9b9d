"""Schedules of passes: their known closed forms, and the simulator on the same times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hespas.estimators import load_estimator
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.settings import ScheduleName, Training
from hespas.generators.llm.step import training_workload
from hespas.graph import Diagnostics, OpGraph
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device, load_system
from hespas.simulator import simulate
from hespas.simulator.job import JobScheduler
from hespas.simulator.network import Network, on_system
from hespas.validators.league import runs
from hespas.validators.league.pipeline import Schedule, step_span
from tests.validators.league.small_stages import PIPELINE, PRODUCTS, plain_stage, scale

F, B = 10.0, 20.0


def schedule(stages: int, micro_batches: int, chunks: int = 1, *, overlaps: bool = True) -> Schedule:
    layout = Layout(pp=stages, vp=chunks)
    name: ScheduleName = "interleaved" if chunks > 1 else "1f1b"
    return Schedule(name, layout, micro_batches, [0] * stages, overlaps)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_one_stage_runs_every_micro_batch(micro_batches: int) -> None:
    done = step_span([plain_stage(F, B)], schedule(1, micro_batches), scale())
    assert done.time_ns == micro_batches * (F + B)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 16)])
def test_the_bubble_of_1f1b_is_that_of_all_stages_but_one(stages: int, micro_batches: int) -> None:
    """arXiv 2104.04473, section 2.2.1."""
    done = step_span([plain_stage(F, B)], schedule(stages, micro_batches), scale())
    assert done.time_ns == (micro_batches + stages - 1) * (F + B)
    assert done.parts[PRODUCTS] == done.time_ns


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    """arXiv 2104.04473, section 2.2.2."""
    stage = plain_stage(F / chunks, B / chunks, chunks=chunks)
    done = step_span([stage], schedule(4, 8, chunks), scale())
    assert done.time_ns == pytest.approx(8 * (F + B) + 3 * (F + B) / chunks)


def test_messages_cost_where_they_are_waited_for() -> None:
    stage = plain_stage(F, B, message_ns=2.0)
    done = step_span([stage], schedule(2, 1), scale())
    assert done.time_ns == 2 * (F + B) + 2 * 2.0
    assert done.parts[PIPELINE] == 4.0
    assert (
        step_span([stage], schedule(2, 8, overlaps=False), scale()).time_ns
        > step_span([stage], schedule(2, 8), scale()).time_ns
    )


def _as_it_is(graph: OpGraph, *_: object) -> OpGraph:
    return graph


def _times_as_they_are(
    _graph: OpGraph, _device: object, _library: object, time_ns: FloatArray, *_: object, **__: object
) -> FloatArray:
    return time_ns


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (Layout(dp=8, zero=3), 1e-9),
        (Layout(dp=8, zero=1), 1e-9),
        # of several stages the simulator has collectives and messages of a rank in one queue
        (Layout(dp=2, pp=4, zero=1), 0.04),
        (Layout(dp=2, tp=2, pp=2, zero=1), 0.06),
    ],
)
def test_the_simulator_says_the_same_of_the_same_times(
    layout: Layout, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "in_16_bits", _as_it_is)
    monkeypatch.setattr(runs, "trained_times", _times_as_they_are)
    whole = load_model("Llama-3-8B")
    model = replace(whole, layers=whole.layers[:4])
    training = Training(seq=4096, global_batch=16)
    run = PublishedRun(
        model=model, layout=layout, training=training, row={"accelerator": "H100-SXM"}, place="here"
    )
    timed = runs.timed_run(run, "composite", Diagnostics())
    done = step_span(timed.stages, timed.schedule, scale())
    device, told = load_device("H100-SXM"), Diagnostics()
    workload = training_workload(model, layout, training)
    estimates = [load_estimator("composite").estimate(graph, device, told) for graph in workload.classes]
    network = Network(load_system("dgx-h100").sized(layout.ranks), device)
    placed, timings = on_system(workload, estimates, network, told)
    simulated = simulate(placed, timings, simulator=JobScheduler(interference=False), device=device)
    assert done.time_ns == pytest.approx(simulated.step_ns, rel=most)
