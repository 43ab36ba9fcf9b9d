"""Schedules of passes: their known closed forms, and the simulator on the same times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hespas import api
from hespas.generators.llm.assemble import Need, Part
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.settings import Overlap, ScheduleName, Training, precision_of
from hespas.generators.llm.step import training_workload
from hespas.graph import Diagnostics
from hespas.hardware import load_device, load_system
from hespas.validators.league import runs
from hespas.validators.league.parts import StageNodes
from hespas.validators.league.pipeline import Schedule, step_span
from hespas.validators.league.predict import start_scale
from tests.sweeps import swept
from tests.validators.league.small_stages import (
    BUBBLE,
    DATA,
    PIPELINE,
    PRODUCTS,
    Node,
    plain_stage,
    scale,
    stage,
)

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


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 16)])
def test_the_bubble_is_a_part_of_its_own(stages: int, micro_batches: int) -> None:
    done = step_span([plain_stage(F, B)], schedule(stages, micro_batches), scale())
    assert done.spent_ns[BUBBLE] == (stages - 1) * (F + B)
    assert done.spent_ns[PRODUCTS] == micro_batches * (F + B)
    assert done.spent_ns.sum() == done.time_ns


def reducing_stage(gradients_ns: float) -> StageNodes:
    """A stage whose step ends with a reduction of what its backward pass made."""
    nodes: list[Node] = [(F, PRODUCTS, 0, ()), (B, PRODUCTS, 0, ()), (gradients_ns, DATA, 1, ())]
    parts = [
        Part("forward", 0, 0, 1),
        Part("backward", 0, 1, 2, ports={"done": 1}),
        Part("end", 0, 2, 3, needs=[Need(2, "backward", 0, "done")]),
    ]
    return stage(nodes, parts, {("forward", 0, True): 0, ("backward", 0, True): 1})


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 32])
@pytest.mark.parametrize("gradients_ns", [1.0, 95.0, 1e4])
def test_gradients_are_reduced_after_the_last_backward_pass(micro_batches: int, gradients_ns: float) -> None:
    """They waited for nothing, and parts of a long step were negative: the times are linear instead."""
    done = step_span([reducing_stage(gradients_ns)], schedule(1, micro_batches), scale())
    assert done.time_ns == pytest.approx(micro_batches * (F + B) + gradients_ns)
    assert done.spent_ns[DATA] == pytest.approx(gradients_ns)
    assert done.spent_ns[PRODUCTS] == pytest.approx(micro_batches * (F + B))


@pytest.mark.parametrize("pp", [1, 2])
def test_parts_of_generated_steps_sum_to_them_and_are_never_negative(pp: int) -> None:
    device = load_device("H100-SXM")
    times: list[float] = []
    for micro_batches in (4, 5, 16):
        training = Training(seq=512, global_batch=micro_batches * 2, overlap=Overlap.none())
        layout = Layout(dp=2, pp=pp, zero=1)
        row = {"framework": "Megatron-LM (2026)", "source": "Megatron-Bridge"}
        model = load_model("GPT-2")
        run = PublishedRun(model=model, layout=layout, training=training, row=row, place="here")
        timed = runs.timed_run(run, device, "roofline", Diagnostics())
        factors = start_scale(run, device)
        done = step_span(timed.stages, timed.schedule, factors)
        for parts in (done.spent_ns, done.parts * factors):
            assert (parts >= 0).all()
            assert parts.sum() == pytest.approx(done.time_ns)
        assert (done.spent_ns[BUBBLE] > 0) == (pp > 1)
        times.append(done.time_ns)
    assert times[2] - times[0] == pytest.approx(12 * (times[1] - times[0]), rel=1e-6)


def test_messages_cost_where_they_are_waited_for() -> None:
    stage = plain_stage(F, B, message_ns=2.0)
    done = step_span([stage], schedule(2, 1), scale())
    assert done.time_ns == 2 * (F + B) + 2 * 2.0
    assert done.parts[PIPELINE] == 4.0
    assert (
        step_span([stage], schedule(2, 8, overlaps=False), scale()).time_ns
        > step_span([stage], schedule(2, 8), scale()).time_ns
    )


_CLOSE = 4e-3
"""Of several stages the simulator puts gathers of updated weights in other places beside the first passes."""
_NEAR = 5e-4
"""The league adds micro-batches up, and stretches one kernel where communication runs beside several."""


@pytest.mark.parametrize(
    ("name", "layout", "more", "most"),
    swept(
        [
            ("Llama-3-8B", Layout(dp=8, zero=3), {}, _NEAR),
            ("Llama-3-8B", Layout(dp=8, zero=1), {"precision": precision_of("fp8-current")}, _NEAR),
            ("Llama-3-8B", Layout(dp=4, tp=2, zero=1), {}, _NEAR),
            ("Llama-3-8B", Layout(tp=8, zero=1), {}, _NEAR),
            ("Llama-3-8B", Layout(dp=2, tp=2, cp=2, zero=1), {}, _NEAR),
            ("Llama-3-8B", Layout(dp=2, pp=4, zero=0), {}, _NEAR),
            ("Llama-3-8B", Layout(dp=2, pp=4, zero=1), {}, _CLOSE),
            ("Llama-3-8B", Layout(dp=2, tp=2, pp=2, zero=1), {}, _CLOSE),
            ("Llama-3-8B", Layout(dp=2, tp=2, pp=2, vp=2, zero=1), {"schedule": "interleaved"}, _CLOSE),
            ("Qwen3-30B-A3B", Layout(dp=8, ep=8, zero=1), {}, _NEAR),
            ("Qwen3-30B-A3B", Layout(dp=4, ep=4, pp=2, zero=1), {}, _CLOSE),
        ],
        4,
    ),
)
def test_the_simulator_says_the_same_of_the_job(
    name: str, layout: Layout, more: dict[str, Any], most: float
) -> None:
    """``hespas simulate`` of the job by default: estimator, launches of the host and contention are one."""
    whole = load_model(name)
    model = replace(whole, layers=whole.layers[:4])
    training = Training(seq=4096, global_batch=16, **more)
    run = PublishedRun(
        model=model, layout=layout, training=training, row={"accelerator": "H100-SXM"}, place="here"
    )
    timed = runs.timed_run(run, load_device("H100-SXM"), "composite", Diagnostics())
    done = step_span(timed.stages, timed.schedule, start_scale(run, load_device("H100-SXM")))
    system = load_system("dgx-h100").sized(layout.ranks)
    workload = training_workload(model, layout, training)
    simulated = api.simulate(workload, system=system)
    assert done.time_ns == pytest.approx(simulated.step_ns, rel=most)


def test_files_of_the_job_say_what_the_job_does(tmp_path: Path) -> None:
    whole = load_model("Llama-3-8B")
    model = replace(whole, layers=whole.layers[:2])
    training = Training(seq=4096, global_batch=4, precision=precision_of("fp8-current"))
    workload = training_workload(model, Layout(dp=2, tp=2, pp=2, zero=1), training)
    api.convert(workload, tmp_path / "job", target_format="chakra")
    steps = [api.simulate(each, system="dgx-h100").step_ns for each in (workload, tmp_path / "job")]
    assert steps[1] == pytest.approx(steps[0], rel=1e-4)
