"""Step factors: ``calibrate --end-to-end --out FILE.toml``, and the steps that the device file corrects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

import hespas
from hespas import api
from hespas.cli import main, validate
from hespas.graph import Diagnostics
from hespas.graph.errors import BoundaryError, FormatError, UsageError
from hespas.hardware import load_device
from tests.validators.small_tables import vectors, write_table

SCHEMAS = Path(__file__).parents[2] / "hespas" / "schemas"
HEAD = "device,framework,phase,workload,step_ns,predicted_ns"
RATIO = 1.2


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(app: Any, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def calibrate(table: Path, out: Path, *more: str | Path, device: str | Path = "H100-SXM") -> Result:
    options = ("--hardware", device, "--end-to-end", "--table", table, "--out", out)
    return run(validate.app, "calibrate", *options, *more)


def table(folder: Path, rows: Sequence[str], head: str = HEAD) -> Path:
    path = folder / "steps.csv"
    path.write_text("\n".join((head, *rows)) + "\n")
    return path


def measured(count: int, ratio: float = RATIO, cell: str = "torch,inference") -> list[str]:
    """Return rows of ``count`` workloads that take ``ratio`` times the prediction."""
    return [f"H100-SXM,{cell},model {number},{ratio * 1e6},1e6" for number in range(count)]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a generated forward pass of PyTorch."""
    path = tmp_path_factory.mktemp("step") / "step.json"
    hespas.generate(hespas.eager_step("bert-large", seq=64), path)
    return path


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a device file with a factor of four workloads, and one that two workloads do not justify."""
    folder = tmp_path_factory.mktemp("device")
    rows = [*measured(4), *measured(2, cell="torch,training")]
    api.calibrate_steps("H100-SXM", table(folder, rows)).write(folder / "mine.toml")
    return folder / "mine.toml"


def test_workloads_are_simulated_and_their_factor_is_shown(tmp_path: Path) -> None:
    rows: list[str] = []
    for model, seq in (("bert-large", 64), ("gpt2-large", 32), ("opt-1.3b", 32), ("bert-large", 32)):
        name = f"{model}-{seq}.json"
        hespas.generate(hespas.eager_step(model, seq=seq), tmp_path / name)
        step_ns = hespas.simulate(tmp_path / name, "H100-SXM").step_ns
        rows += [f"H100,torch,inference,{name},{RATIO * step_ns * factor}" for factor in (0.999, 1.001)]
    runs, out = table(tmp_path, rows, HEAD.removesuffix(",predicted_ns")), tmp_path / "mine.toml"
    done = calibrate(runs, out, "--json", tmp_path / "f.json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads((tmp_path / "f.json").read_text())
    schema = json.loads((SCHEMAS / "step_factors.schema.json").read_text())
    cast("_Validator", Draft202012Validator(schema)).validate(document)
    (factor,) = document["factors"]
    assert (factor["framework"], factor["phase"]) == ("torch", "inference")
    assert (factor["rows"], factor["workloads"], factor["share"]) == (8, 4, 1.0)
    assert 1.1 < factor["factor"] < RATIO
    assert factor["ratio"] == pytest.approx(RATIO, rel=1e-3)
    assert factor["after_mape"] < 0.05 < factor["before_mape"]
    assert "1 of 1 step factor applied, from 8 steps of 4 workloads" in done.stdout
    (stored,) = load_device(out).step_factors
    assert (stored.factor, stored.std_error) == (factor["factor"], factor["std_error"])
    shown = run(main.app, "simulate", tmp_path / "bert-large-64.json", "--hardware", out)
    assert shown.exit_code == 0, shown.output
    line = shown.stdout.splitlines()[1]
    assert line.startswith("sum of operations ")
    assert line.endswith(f", step factor {stored.factor:.2f} (torch:inference, 4 measured workloads)")
    again = calibrate(runs, tmp_path / "again.toml", device=out)  # fitted to times without the factor
    assert again.exit_code == 0, again.output
    assert load_device(tmp_path / "again.toml").step_factors[0].factor == stored.factor


@pytest.mark.parametrize("count", [1, 2])
def test_few_workloads_give_no_factor(tmp_path: Path, step: Path, count: int) -> None:
    out = tmp_path / "mine.toml"
    done = calibrate(table(tmp_path, measured(count) * 10), out)
    assert done.exit_code == 0, done.output
    assert "0 of 1 step factor applied" in done.stdout
    (stored,) = load_device(out).step_factors
    assert (stored.factor, stored.share, stored.workloads) == (1.0, 0.0, count)
    assert stored.ratio == pytest.approx(RATIO)
    found = Diagnostics()
    with_file = hespas.simulate(step, str(out), diagnostics=found)
    assert with_file.step_ns == hespas.simulate(step, "H100-SXM").step_ns
    assert with_file.step_factor is None
    assert found.counts()["simulate.no-step-factor"] == 1


def test_models_group_workloads_and_reserved_rows_are_not_fitted(tmp_path: Path) -> None:
    rows = [f"{row},one model,calib" for row in measured(5)]
    rows += [f"{row},model {number},devval" for number, row in enumerate(measured(5))]
    rows += [row.replace("H100-SXM", "A100-SXM-80GB") + ",other," for row in measured(5)]
    found = Diagnostics()
    report = api.calibrate_steps("H100-SXM", table(tmp_path, rows, f"{HEAD},model,split"), diagnostics=found)
    assert [(factor.rows, factor.workloads, factor.share) for factor in report.factors] == [(5, 1, 0.0)]
    assert (found.counts()["calibrate.other-devices"], found.counts()["calibrate.kept-rows"]) == (5, 5)


def test_all_commands_apply_the_factor_alike(tmp_path: Path, device: Path, step: Path) -> None:
    plain = hespas.simulate(step, "H100-SXM")
    done = hespas.simulate(step, str(device))
    factor = load_device(device).step_factors[0]
    assert done.operations_ns == plain.step_ns == done.timeline.step_ns
    assert done.step_ns == pytest.approx(plain.step_ns * factor.factor)
    assert done.step_factor == factor
    wide, narrow = done.interval_ns[1] / done.interval_ns[0], plain.interval_ns[1] / plain.interval_ns[0]
    assert wide > narrow
    assert done.interval_ns[0] < done.step_ns < done.interval_ns[1]
    assert done.throughput.tokens_per_s == pytest.approx(plain.throughput.tokens_per_s / factor.factor)
    estimated = hespas.estimate(step, str(device)).to_dict()
    simulated = done.to_dict()
    for key in ("step_ns", "step_low_ns", "step_high_ns", "operations_ns", "step_factor", "tokens_per_s"):
        assert estimated[key] == simulated[key], key
    made = hespas.generate(hespas.eager_step("bert-large", seq=64), tmp_path / "a.json", hardware=str(device))
    generated = made.to_dict()["step"]
    for key in ("step_ns", "step_low_ns", "step_high_ns", "operations_ns", "step_factor", "tokens_per_s"):
        assert generated[key] == simulated[key], key
    grid = tmp_path / "grid.toml"
    grid.write_text(f'step_factor = ["auto", "none"]\nhardware = "{device.name}"\n')
    (tmp_path / device.name).write_bytes(device.read_bytes())
    swept = api.simulate_grid(grid, step)
    assert [row.step_ns for row in swept.rows] == [done.step_ns, plain.step_ns]
    assert list(swept.table().columns["correction"]) == [factor.factor, 1]
    text = done.headline()
    assert "; sum of operations " in text
    assert f"step factor {factor.factor:.2f}" in text
    assert "sum of operations " in done.to_html()


def test_a_server_reports_that_it_applies_no_step_factor(device: Path) -> None:
    found, requests = Diagnostics(), "closed:concurrency=2,prompt=64,output=4,requests=2"
    done = api.serve(api.Server(model="Llama-3-8B", hardware=str(device)), requests, diagnostics=found)
    plain = api.serve(api.Server(model="Llama-3-8B", hardware="H100-SXM"), requests)
    assert done.makespan_ns == plain.makespan_ns
    assert [event.location for event in found if event.code == "serving.step-factors"] == ["H100-SXM"]


def test_the_factor_is_chosen_by_name_or_by_the_workload(device: Path, step: Path) -> None:
    plain_ns = hespas.simulate(step, "H100-SXM").step_ns
    assert hespas.simulate(step, str(device), step_factor="none").step_ns == plain_ns
    program = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
    found = Diagnostics()
    assert hespas.simulate(program, str(device), diagnostics=found).step_factor is None
    assert found.counts()["simulate.no-step-factor"] == 1
    found = Diagnostics()
    hespas.estimate(program, str(device), diagnostics=found)
    assert found.counts()["simulate.no-step-factor"] == 1
    named = hespas.simulate(program, str(device), step_factor="Torch:Inference")
    assert named.correction == pytest.approx(load_device(device).step_factors[0].factor)
    other = hespas.simulate(step, str(device), estimator="roofline", diagnostics=(found := Diagnostics()))
    assert other.correction == 1.0  # it was fitted to another estimator
    assert found.counts()["simulate.no-step-factor"] == 1
    with pytest.raises(UsageError, match="no step factor 'jax:training'"):
        hespas.simulate(step, str(device), step_factor="jax:training")
    with pytest.raises(UsageError, match="no step factor"):
        hespas.estimate(step, "H100-SXM", step_factor="torch:inference")
    with pytest.raises(UsageError, match="`step_factor` requires `hardware`"):
        hespas.simulate(step, step_factor="torch:inference")


def test_a_new_fit_of_operations_removes_the_factors(tmp_path: Path, device: Path) -> None:
    rows = vectors("H100-SXM", ("add", "tanh", "neg"), lambda flops, moved: 5 + moved / 1e6, split="calib")
    measured_operations, out = write_table(tmp_path / "table.csv", rows), tmp_path / "new.toml"
    done = run(
        validate.app, "calibrate", "--hardware", device, "--table", measured_operations, "--out", out
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "calibrate.step-factors-removed" in done.stderr
    assert load_device(out).step_factors == ()


def test_other_factors_of_the_device_are_kept(tmp_path: Path, device: Path) -> None:
    report = api.calibrate_steps(str(device), table(tmp_path, measured(3, 0.9, "torch,training")))
    report.write(tmp_path / "more.toml")
    first, second = load_device(tmp_path / "more.toml").step_factors
    assert first == load_device(device).step_factors[0]
    assert (second.name, second.share) == ("torch:training", 1.0)
    assert 0.9 < second.factor < 1.0


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (["A100-SXM-80GB,torch,inference,a,1,1"], UsageError, "no row of H100-SXM"),
        (["H100-SXM,torch,train,a,1,1"], FormatError, "phase is 'train'"),
        (["H100-SXM,torch,inference,a,0,1"], FormatError, "step_ns is '0'"),
        (["H100-SXM,torch,inference,../a.json,1,"], BoundaryError, "not within the folder"),
        (["H100-SXM,torch,inference,gone.json,1,"], FormatError, "does not exist"),
        (measured(4, 1e3), FormatError, "is 1e.03 times the predicted 1,000,000 ns"),
        (measured(4, 1e-3), FormatError, "is 0.001 times the predicted 1,000,000 ns"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, rows: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        api.calibrate_steps("H100-SXM", table(tmp_path, rows))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("share = 1.0", "share = 2.0", "expected a number from 0 to 1"),
        ("share = 1.0", "share = 0.0", "because the share is 0"),
        ('phase = "training"', 'phase = "inference"', "step_factors"),
        ('phase = "training"', 'phase = "train"', "phase"),
        ("workloads = 4", "workloads = 0", "a positive whole number"),
        ("workloads = 4", "loads = 4", "loads"),
    ],
)
def test_factors_in_files_are_checked(
    tmp_path: Path, device: Path, before: str, after: str, text: str
) -> None:
    content = device.read_text()
    assert before in content
    (tmp_path / "broken.toml").write_text(content.replace(before, after, 1))
    with pytest.raises(FormatError, match="step_factors") as caught:
        load_device(tmp_path / "broken.toml")
    assert text in str(caught.value) + str(caught.value.position)


def test_a_league_reports_that_it_does_not_apply_them(
    tmp_path: Path, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = device.read_text().replace('framework = "torch", phase = "inference"', _MEGATRON)
    (tmp_path / "mine.toml").write_text(text)
    head = "model,accelerator,num_accelerators,seq_len,global_batch,tp,step_time_ms"
    runs = tmp_path / "runs.csv"
    runs.write_text(f"{head}\nllama-3-8b,mine.toml,8,4096,16,8,2000\nllama-3-8b,H100-SXM,8,4096,16,8,2000\n")
    own, shipped = hespas.league(runs, jobs=1).details.rows
    assert own.predicted_ms == shipped.predicted_ms
    codes = {assumption.code for assumption in own.row.predicted.assumed}
    assert "league.step-factors" in codes
    assert "league.step-factors" not in {row.code for row in shipped.row.predicted.assumed}


_MEGATRON = 'framework = "megatron", phase = "training"'
