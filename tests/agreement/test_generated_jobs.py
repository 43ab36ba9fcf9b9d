"""The same job has the same step time with every command and function."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas import api
from hespas.api.lowering import STEP_ESTIMATOR
from hespas.cli.main import app
from hespas.estimators.configuration import AUTO, default_configuration
from hespas.generators.dlrm import DlrmStep
from hespas.generators.eager import EagerStep, eager_model
from hespas.generators.llm import Layout, LlmStep, ServingStep, Training, load_model, row_of
from hespas.generators.llm.model import Model
from hespas.generators.spec import Generator
from hespas.graph import Diagnostics, Workload
from hespas.graph.workload import Launch
from hespas.hardware import load_device
from hespas.simulator import JobScheduler

LAYERS = 2


def small() -> Model:
    whole = load_model("Llama-3-8B")
    return replace(whole, layers=whole.layers[:LAYERS])


def step(layout: Layout, launch: Launch = "kernels", batch: int = 4, seq: int = 2048) -> LlmStep:
    training = Training(seq=seq, global_batch=batch, launch=launch)
    return LlmStep(model=small(), layout=layout, training=training)


GENERATORS: dict[str, Generator] = {
    "training": step(Layout(dp=2, tp=2, zero=1)),
    "pipeline": step(Layout(dp=1, tp=2, pp=2, zero=1)),
    "graphs": step(Layout(tp=2), "whole"),
    "serving": ServingStep(model=small(), layout=Layout(tp=2), batch=4),
    "eager": EagerStep(model=replace(eager_model("gpt2-large"), layers=2), batch=1, length=128),
    "recommendation": DlrmStep(ranks=2, batch=64, tables=4),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_commands_and_functions_agree_exactly(name: str, tmp_path: Path) -> None:
    workload = GENERATORS[name].workload()
    ours = api.simulate(workload, "H100-SXM")
    graph = tmp_path / "job.json"
    api.convert(workload, graph, target_format="op-graph")
    documents: dict[str, dict[str, float]] = {}
    for command in ("simulate", "estimate"):
        out = tmp_path / f"{command}.json"
        words = [command, str(graph), "--hardware", "H100-SXM", "--json", str(out), "-q"]
        assert CliRunner().invoke(app, words).exit_code == 0
        documents[command] = json.loads(out.read_bytes())
    generated = api.generate(GENERATORS[name], hardware="H100-SXM").document().step
    assert generated is not None
    step = api.simulated_step(api.estimate(workload, "H100-SXM"))
    assert step is not None
    answers = [(each["step_ns"], each["step_low_ns"], each["step_high_ns"]) for each in documents.values()]
    answers += [(each.step_ns, *each.interval_ns) for each in (ours, step)]
    answers.append((generated.step_ns, generated.step_low_ns, generated.step_high_ns))
    assert len({json.dumps(each) for each in answers}) == 1
    rates = {(each["mfu"], each["tokens_per_s"]) for each in documents.values()}
    assert len(rates) == 1
    assert documents["simulate"]["mfu"] == pytest.approx(ours.throughput.mfu)


@pytest.mark.parametrize("form", ["chakra", "op-graph"])
def test_facts_of_a_step_survive_files(form: str, tmp_path: Path) -> None:
    workload = step(Layout(dp=2, tp=2, zero=1)).workload()
    destination = tmp_path / ("traces" if form == "chakra" else "job.json")
    api.convert(workload, destination, target_format=form)
    done = api.simulate(destination, system="dgx-h100")
    assert done.estimator == "training:attention=cudnn"
    assert done.throughput == api.simulate(workload, system="dgx-h100").throughput
    assert done.throughput.tokens == 4 * 2048


def test_mfu_is_model_flops_over_the_peak() -> None:
    made = step(Layout(dp=2, tp=2, zero=1))
    done = api.simulate(made.workload(), "H100-SXM")
    flops = made.account().model_flops_per_step
    expected = flops / (done.step_ns / 1e9) / (4 * 989.4e12)
    assert done.throughput.mfu == pytest.approx(expected, rel=1e-3)
    assert done.throughput.tokens_per_s == pytest.approx(4 * 2048 / (done.step_ns / 1e9))
    assert "MFU" in done.headline()
    assert "tokens/s" in done.headline()


def test_a_captured_program_is_no_training_step() -> None:
    workload = replace(step(Layout(tp=2)).workload(), metadata={})
    done = default_configuration(workload, load_device("H100-SXM"))
    assert (done.kind, done.estimator, done.host_issue_ns) == ("program", "composite", 0.0)
    assert AUTO == STEP_ESTIMATOR


def test_a_named_estimator_replaces_the_default_one() -> None:
    workload, device = step(Layout(tp=2)).workload(), load_device("H100-SXM")
    assert default_configuration(workload, device, "composite").estimator == "composite"
    named = default_configuration(workload, device, "training:attention=flash1").estimator
    assert named == "training:attention=flash1"
    assert default_configuration(workload, load_device("TPU-v5p")).estimator == "training:attention=splash"


def host_ns(workload: Workload) -> list[float]:
    """Return the step with and without launches, and the host's part of the critical path."""
    runs = [
        api.simulate(workload, "H100-SXM", simulator=JobScheduler(launches=each, interference=False))
        for each in (True, False)
    ]
    return [
        *(done.step_ns for done in runs),
        runs[0].classes[0].critical_path.class_ns.get("host overhead", 0.0),
    ]


def test_launches_bound_a_step_of_short_kernels() -> None:
    """All kernels take less than a launch, so that launches take most of the step."""
    workload = step(Layout(), batch=1, seq=16).workload()
    with_launches, without, host = host_ns(workload)
    kernels = sum(len(graph) for graph in workload.classes)
    assert with_launches > without
    assert host <= kernels * 20_000.0
    whole = step(Layout(), "whole", batch=1, seq=16).workload()
    assert host_ns(whole)[0] == host_ns(whole)[1] == pytest.approx(without)


@pytest.mark.parametrize("batch", [1, 5, 9])
def test_launches_that_cannot_delay_kernels_have_no_nodes(batch: int) -> None:
    """One launch delays the first kernel, however many micro-batches, which a loop stands for, follow."""
    workload = step(Layout(), batch=batch, seq=8192).workload()
    with_launches, without, host = host_ns(workload)
    assert with_launches == pytest.approx(without + host)
    assert host <= 5 * 20_000.0


def test_a_row_and_its_generated_job_state_one_step(tmp_path: Path) -> None:
    """What a row states of kernels, board and launches goes with the generated job."""
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,accelerator,num_accelerators,seq_len,global_batch,framework,cuda_graphs,power_limit_w\n"
        "Llama-3-8B,H100-SXM,8,2048,8,llm-foundry,parts,500\n"
    )
    run = row_of(table, 0, Diagnostics())
    done = default_configuration(run.step().workload(), load_device("H100-SXM"))
    assert done.host_issue_ns == 10_000.0
    assert done.estimator == "training:attention=flash1,power_w=500.0"
