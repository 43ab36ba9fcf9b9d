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
from hespas.generators.llm.published import row_of
from hespas.generators.llm.serving import ServingStep
from hespas.generators.llm.settings import recompute_of
from hespas.generators.llm.step import LlmStep
from hespas.generators.spec import Generator
from hespas.graph import PROGRAM_BYTES, Diagnostics
from hespas.hardware import load_device
from hespas.studies.league.predict import predicted_rows
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


@pytest.mark.parametrize("hardware", ["tpu-v6e", "H100-SXM"])
def test_only_gpus_need_memory_of_their_libraries(hardware: str) -> None:
    """Without the context, the communication library and blocks of PyTorch, a TPU must hold the tensors."""
    made = hespas.generate(hespas.llm_step("llama-3-8b", tp=4, seq=512, global_batch=2), hardware=hardware)
    assert made.step is not None
    parts = {part.counted_as for part in made.account.memory}
    (simulated,) = made.step.memory
    assert simulated.device_bytes == made.account.device_memory_bytes
    if hardware == "H100-SXM":
        assert parts == {"allocated", "reserved", "device"}
        assert made.account.device_memory_bytes > made.account.peak_memory_bytes
    else:
        assert parts == {"allocated"}
        assert made.account.device_memory_bytes == made.account.peak_memory_bytes


def test_every_command_reads_the_memory_of_the_board_in_a_row(tmp_path: Path) -> None:
    """The run fits the usual board of 80 GB, but not one of 16 GiB."""
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,accelerator,num_accelerators,tp,seq_len,global_batch,micro_batch,fsdp,precision,recompute,"
        "memory_gib\n"
        + "".join(f"Llama-3-8B,A100-SXM-80GB,8,8,2048,8,1,zero1,bf16,none,{size}\n" for size in ("16", ""))
    )
    for number, fits in enumerate((False, True)):
        made = hespas.generate(row_of(table, number, Diagnostics()).step(), hardware="A100-SXM-80GB")
        assert made.step is not None
        (rank,) = made.step.memory
        row = predicted_rows(table, jobs=1, cache=tmp_path / "cache")[number].predicted
        assert [made.fits, rank.fits, row.fits] == [fits] * 3
        assert made.capacity_bytes == rank.capacity_bytes == row.capacity_bytes
        assert (made.capacity_bytes == 16 * 2**30) is not fits
        assert made.account.device_memory_bytes == row.device_memory_bytes
        other = hespas.simulate(made.workload, "H100-SXM").memory[0]
        assert other.capacity_bytes == load_device("H100-SXM").main_memory.capacity_bytes
