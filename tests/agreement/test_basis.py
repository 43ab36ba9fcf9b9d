"""Basis of estimates: equal shares from every command, and a message for devices without measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hespas
from hespas.api import Server
from hespas.cli.main import app
from hespas.estimators.step_intervals import RECORDED, basis_text
from hespas.graph import BEYOND_RANGE, DATA_SHEET, MEASURED_BASIS, Diagnostics, reference_basis
from hespas.hardware import device_names, load_device

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "stablehlo" / "cnn_train.mlir"
STEP = hespas.llm_step("llama-3-8b", dp=2, seq=1024, global_batch=2)
RECORDED_DEVICES = {"A100-SXM-40GB"}
"""Devices without tables of operations, of which programs were recorded."""
_TABLES = ("of_tokens", "of_rows", "of_decode", "of_prompts")
UNMEASURED = [
    name
    for name in device_names()
    if not load_device(name).fits and load_device(name).kind != "imc" and name not in RECORDED_DEVICES
]


def test_the_basis_of_a_program_is_the_same_from_estimate_and_simulate() -> None:
    estimated = json.loads(hespas.estimate(PROGRAM, "A100-SXM-80GB").to_json())["basis"]
    simulated = json.loads(hespas.simulate(PROGRAM, "A100-SXM-80GB").to_json())["basis"]
    assert estimated == simulated
    assert sum(row["share"] for row in estimated) == pytest.approx(1.0)
    assert {row["basis"] for row in estimated} <= {
        MEASURED_BASIS,
        BEYOND_RANGE,
        DATA_SHEET,
        reference_basis(("A100-SXM-40GB", "H100-SXM")),
        reference_basis(("A100-SXM-40GB",)),
    }


def test_the_basis_of_a_generated_step_is_that_of_its_simulation() -> None:
    made = hespas.generate(STEP, hardware="H100-SXM")
    assert made.step is not None
    simulated = hespas.simulate(made.workload, "H100-SXM")
    assert made.step.basis == pytest.approx(dict(simulated.basis))
    assert MEASURED_BASIS in simulated.basis


@pytest.mark.parametrize("name", UNMEASURED)
def test_devices_that_were_never_measured_name_their_basis(name: str) -> None:
    estimates = hespas.estimate(PROGRAM, name)
    (estimate,) = estimates.estimates
    shares = hespas.simulate(PROGRAM, name).basis
    assert MEASURED_BASIS not in shares
    assert BEYOND_RANGE not in shares
    timed = (estimate.duration_ns > 0) & (estimate.estimator >= 0)
    assert (estimate.basis[timed] >= 0).all()
    assert (estimate.basis[~timed] < 0).all()


def test_the_terminal_names_the_basis_after_the_step() -> None:
    done = CliRunner().invoke(app, ["estimate", str(PROGRAM), "--hardware", "MI355X"])
    line = done.stdout.splitlines()[1]
    assert line.startswith("basis: ")
    assert "reference devices" in line


def test_rows_of_a_table_have_their_own_basis(tmp_path: Path) -> None:
    table = tmp_path / "sizes.csv"
    table.write_text("kind,dtype,m,n,k\nmatmul,bf16,4096,4096,4096\nmatmul,bf16,400000,4096,4096\n")
    done = hespas.estimate_table(table, "A100-SXM-80GB")
    assert list(done.prediction.basis) == [MEASURED_BASIS, BEYOND_RANGE]
    assert list(done.table().columns["basis"]) == [MEASURED_BASIS, BEYOND_RANGE]
    assert sum(done.basis.values()) == pytest.approx(1.0)


def test_regions_have_the_basis_of_their_longest_part() -> None:
    by_operation = hespas.simulate(PROGRAM, "A100-SXM-80GB").basis
    merged = hespas.estimate(PROGRAM, "A100-SXM-80GB", granularity="region").estimates[0]
    assert merged.bases[int(merged.basis[np.argmax(merged.duration_ns)])] == max(
        by_operation, key=lambda name: by_operation[name]
    )


def test_the_basis_of_a_server_is_the_sum_over_its_steps() -> None:
    server = Server(model="Qwen3-30B-A3B", hardware="H100-SXM", tp=2, ep=2, engine_parameters="none")
    done = hespas.serve(server, "poisson:rate=20,prompt=700,output=40,ratio=0.2,requests=60")
    (run,) = done.runs
    longest = int((run.requests.prompt + run.requests.output).max())
    times = server.times(server.step(), longest, Diagnostics())
    expected: dict[str, float] = {}
    for number, basis in enumerate(times.bases):
        tables = dict(zip(_TABLES, (table[number] for table in times.by_basis), strict=True))
        part = replace(times, floors=(), **tables)
        for count, batch, context, prompts, new_tokens, before, sampled in run.steps.sizes().T.tolist():
            time_ns = part.step_ns(
                batch=int(batch), context=context, prompts=int(prompts), new_tokens=int(new_tokens),
                before=before, sampled=int(sampled),
            )  # fmt: skip
            expected[basis] = expected.get(basis, 0.0) + count * time_ns
    total_ns = float(run.steps.columns()[0].sum())
    assert sum(expected.values()) == pytest.approx(total_ns, rel=1e-6)
    assert done.basis == pytest.approx({name: ns / total_ns for name, ns in expected.items() if ns}, rel=1e-6)
    assert {MEASURED_BASIS, DATA_SHEET} <= set(done.basis)
    assert list(done.basis.values()) == sorted(done.basis.values(), reverse=True)


def test_every_form_of_a_served_result_has_its_basis(tmp_path: Path) -> None:
    document, rows, page = tmp_path / "run.json", tmp_path / "rows.csv", tmp_path / "run.html"
    arguments = ["Llama-3-8B", "--hardware", "MI355X", "--requests", "closed:requests=4,prompt=64,output=4"]
    files = ["--json", str(document), "--out", str(rows), "--html", str(page)]
    done = CliRunner().invoke(app, ["serve", *arguments, *files])
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("basis: "))
    assert "reference devices" in line
    content = json.loads(document.read_bytes())
    shares = {row["basis"]: row["share"] for row in content["basis"]}
    assert sum(shares.values()) == pytest.approx(1.0)
    text = f"{basis_text(shares)}; engine: {content['engine_evidence']}"
    assert line == f"basis: {text}"
    assert text in rows.read_text(encoding="utf-8")
    assert all(name in page.read_text(encoding="utf-8") for name in shares)


def test_the_text_unites_sets_of_reference_devices() -> None:
    shares = {MEASURED_BASIS: 0.5, reference_basis("AB"): 0.3, reference_basis("BCDEF"): 0.196, "": 0.004}
    assert basis_text(shares) == "50% measured; 50% reference devices A, B, C, D and 2 more"
    assert basis_text({MEASURED_BASIS: 1.0}) == MEASURED_BASIS
    assert not basis_text({RECORDED: 1.0})
    assert not basis_text({"": 0.5, RECORDED: 0.5})
