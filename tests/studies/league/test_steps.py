"""Steps of published runs and their parts: sums, signs, growth with microbatches, host, bubble."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hespas import api
from hespas.fitting.effects import COMPONENTS
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.settings import Overlap, Training, precision_of
from hespas.generators.llm.step import training_workload
from hespas.graph import Diagnostics
from hespas.hardware import load_device
from hespas.simulator import simulate
from hespas.studies.league.runs import TimedRun, settings_of, timed_run
from hespas.studies.league.steps import BUBBLE, HOST, StepTime, simulated_step


def timed(layout: Layout, micro_batches: int, **settings: Any) -> TimedRun:
    """Return a run of a small model with so many micro-batches."""
    settings.setdefault("seq", 512)
    training = Training(global_batch=micro_batches * layout.dp, **settings)
    whole = load_model("GPT-2")
    run = PublishedRun(
        model=replace(whole, layers=whole.layers[:4], vocab=64),
        layout=layout,
        training=training,
        row={"accelerator": "H100-SXM"},
        place="here",
    )
    return timed_run(settings_of(run, load_device("H100-SXM"), "roofline"), Diagnostics())


def step(layout: Layout, micro_batches: int, **settings: Any) -> StepTime:
    return simulated_step(timed(layout, micro_batches, **settings), Diagnostics())


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(dp=2, pp=2, zero=1), Layout(dp=2, pp=2, vp=2)],
    ids=str,
)
def test_parts_sum_to_the_step_are_never_negative_and_grow_evenly(layout: Layout) -> None:
    """With overlap off, reductions of gradients waited for nothing, and parts of long steps were negative."""
    name = "interleaved" if layout.vp > 1 else "1f1b"
    counts = (4, 6, 16)
    steps = [step(layout, count, overlap=Overlap.none(), schedule=name, launch="whole") for count in counts]
    for done in steps:
        for parts in (done.spent_ns, done.path_ns):
            assert (parts >= 0).all()
            assert parts.sum() == pytest.approx(done.time_ns)
        assert (done.spent_ns[BUBBLE] > 1e-3 * done.time_ns) == (layout.pp > 1)
    products = COMPONENTS.index("products")
    for values in ([done.time_ns for done in steps], [float(done.spent_ns[products]) for done in steps]):
        few, more, many = values
        assert many - few == pytest.approx(6 * (more - few), rel=1e-6)


def test_the_bubble_is_the_idle_time_of_the_stages_before_and_behind() -> None:
    """(p - 1) passes forward and backward (arXiv 2104.04473, section 2.2.1), and waits for messages."""
    done = step(Layout(pp=4), 8, launch="whole", seq=1024, micro_batch=1)
    share = done.spent_ns[BUBBLE] / done.time_ns
    assert share == pytest.approx(3 / (8 + 3), rel=0.25)
    assert done.path_ns[BUBBLE] == pytest.approx(0.0, abs=1e-3 * done.time_ns)


def test_a_host_that_is_slower_than_kernels_is_a_part() -> None:
    slow, whole = step(Layout(), 4, seq=16), step(Layout(), 4, seq=16, launch="whole")
    assert slow.spent_ns[HOST] > 0.5 * slow.time_ns
    assert whole.spent_ns[HOST] == whole.path_ns[HOST] == 0.0
    assert slow.path_ns[HOST] > 0.5 * slow.time_ns


def test_steps_of_many_micro_batches_are_extrapolated_exactly() -> None:
    run = timed(Layout(dp=2, pp=2, zero=1), 23)
    simulated = simulate(run.workload(23), device=run.settings.device)
    assert simulated_step(run, Diagnostics()).time_ns == pytest.approx(simulated.step_ns, rel=1e-6)


def test_files_of_the_job_say_what_the_job_does(tmp_path: Path) -> None:
    whole = load_model("Llama-3-8B")
    model = replace(whole, layers=whole.layers[:2])
    training = Training(seq=4096, global_batch=4, precision=precision_of("fp8-current"))
    workload = training_workload(model, Layout(dp=2, tp=2, pp=2, zero=1), training)
    api.convert(workload, tmp_path / "job", target_format="chakra")
    steps = [api.simulate(each, system="dgx-h100").step_ns for each in (workload, tmp_path / "job")]
    assert steps[1] == pytest.approx(steps[0], rel=1e-4)
