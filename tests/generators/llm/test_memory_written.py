"""Memory is equal in the generator, in simulations of its traces, and in the league."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hespas
from hespas.api import SimulationResult, generate
from hespas.cli.main import app
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.serving import ServingStep
from hespas.generators.llm.settings import recompute_of
from hespas.generators.llm.step import LlmStep
from hespas.generators.spec import Generator
from hespas.graph import PROGRAM_BYTES
from hespas.studies.league.rows import StepPrediction
from tests.generators.llm.small_models import DENSE, MIXTURE, training

SHORT = replace(DENSE, layers=DENSE.layers[:4])
EXPERTS = replace(MIXTURE, layers=MIXTURE.layers[:2])
JOBS: dict[str, Generator] = {
    "tensor": LlmStep(model=SHORT, layout=Layout(tp=2), training=training(global_batch=5)),
    "fsdp": LlmStep(model=SHORT, layout=Layout(dp=2, zero=3), training=training()),
    "pipeline": LlmStep(model=SHORT, layout=Layout(pp=4), training=training()),
    "recomputed": LlmStep(
        model=SHORT, layout=Layout(), training=training(recompute=recompute_of("full"), style="torchtitan")
    ),
    "experts": LlmStep(model=EXPERTS, layout=Layout(dp=2, ep=2), training=training()),
    "decode": ServingStep(model=SHORT, layout=Layout(tp=2), phase="decode", batch=4, context=512),
    "stages": ServingStep(model=SHORT, layout=Layout(pp=2), phase="prefill", prompt=128),
    "pools": ServingStep(model=SHORT, layout=Layout(), phase="disaggregated", batch=4),
}


def simulated(path: Path) -> SimulationResult:
    return hespas.simulate(path, "H100-SXM", estimator="roofline")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [*((name, "") for name in JOBS), *((name, ".json") for name in JOBS), ("pools", ".arrow")],
)
def test_a_simulation_has_the_memory_that_its_generator_states(
    name: str, suffix: str, tmp_path: Path
) -> None:
    told = generate(JOBS[name], tmp_path / f"job{suffix}").account.peak_memory_bytes
    found = simulated(tmp_path / f"job{suffix}").memory
    assert max(each.use.peak_bytes for each in found) == pytest.approx(told, rel=1e-9)
    assert all(each.fits and not each.use.is_lower_bound for each in found)
    for each in found:
        use = each.use
        parts = (use.parameters_bytes, use.constants_bytes, use.outputs_bytes, use.temporaries_bytes)
        assert sum(parts) + use.unlisted_bytes == pytest.approx(use.peak_bytes)
        assert float(use.held_bytes.max()) == pytest.approx(use.peak_bytes)


def test_each_stage_keeps_its_own(tmp_path: Path) -> None:
    job = JOBS["pipeline"].workload()
    hespas.write(job, tmp_path / "job")
    again = hespas.read(tmp_path / "job")
    assert again.metadata[PROGRAM_BYTES] == job.metadata[PROGRAM_BYTES]
    assert len(set(job.metadata[PROGRAM_BYTES].split(";"))) > 1


def test_capacity_is_compared_wherever_memory_is_told(tmp_path: Path) -> None:
    runner, large = CliRunner(), ["--dp", "1", "--tp", "8", "--global-batch", "8", "--seq", "4096"]
    command = ["generate", "llm", "llama-3-70b", *large, "--dry-run", "--json", str(tmp_path / "g.json")]
    done = runner.invoke(app, [*command, "--hardware", "H100-SXM"])
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "g.json").read_text())
    assert document["fits"] is False
    assert document["capacity_bytes"] == 85899345920
    codes = [each["code"] for each in document["diagnostics"]]
    assert [code for code in codes if "memory" in code] == ["simulate.beyond-memory"]
    assert "does not fit" in done.output
    done = runner.invoke(app, [*command, "--hardware", "MI355X", "--overwrite"])
    assert json.loads((tmp_path / "g.json").read_text())["fits"] is True


def test_a_simulation_beyond_the_memory_warns() -> None:
    step = LlmStep(
        model=SHORT, layout=Layout(tp=2), training=training(seq=8192, micro_batch=64, global_batch=64)
    )
    result = hespas.simulate(step.workload(), "T4", estimator="roofline")
    assert result.diagnostics.counts()["simulate.beyond-memory"] == 2
    assert [each.fits for each in result.memory] == [False]


@pytest.mark.parametrize(("peak", "capacity", "fits"), [(2.0, 1.0, False), (1.0, 1.0, True)])
def test_a_league_row_says_whether_it_fits(peak: float, capacity: float, fits: bool) -> None:
    assert StepPrediction(device_memory_bytes=peak, capacity_bytes=capacity).fits is fits
    assert StepPrediction(device_memory_bytes=peak).fits is None
    assert StepPrediction(peak_memory_bytes=peak, capacity_bytes=capacity).fits is None


def test_every_command_compares_the_same_bytes_with_the_device() -> None:
    step = hespas.llm_step("llama-3-8b", tp=2, pp=2, dp=2, seq=1024, global_batch=4)
    made = hespas.generate(step, hardware="H100-SXM")
    account = made.account
    assert made.step is not None
    fullest = max(made.step.memory, key=lambda memory: memory.device_bytes)
    assert fullest.device_bytes == account.device_memory_bytes
    assert fullest.use.peak_bytes == account.peak_memory_bytes
    # A device between both figures holds the tensors, but not the run.
    between_bytes = (account.peak_memory_bytes + account.device_memory_bytes) / 2
    assert replace(made, capacity_bytes=between_bytes).fits is False
    assert replace(fullest, capacity_bytes=between_bytes).fits is False
    assert replace(made, capacity_bytes=account.device_memory_bytes).fits is True
    assert replace(fullest, capacity_bytes=account.device_memory_bytes).fits is True
