"""``hespas-validate league`` and ``calibrate --end-to-end``: a small table of runs through the commands."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.validate import app
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, MissingExtraError, OutputError, UnsupportedError, UsageError
from hespas.hardware import device_to_toml, load_device, load_system, system_to_toml
from hespas.studies.league import predict
from hespas.studies.league.evaluation import CalibrateBy
from hespas.studies.league.rows import StepPrediction

SCHEMAS = Path(__file__).parents[2] / "hespas" / "schemas"
ROW = {
    "source": "here", "framework": "MaxText", "accelerator": "TPU-v5e", "num_accelerators": "8",
    "model": "Llama-3-8B", "seq_len": "2048", "global_batch": "8", "micro_batch": "1", "dp": "8", "tp": "1",
    "pp": "1", "vp": "1", "cp": "1", "fsdp": "fsdp", "recompute": "remat_policy full", "precision": "bf16",
    "precision_class": "16bit", "step_time_ms": "1500", "mfu_pct": "40",
}  # fmt: skip


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def table(folder: Path, *rows: dict[str, str], columns: Sequence[str] = tuple(ROW)) -> Path:
    path = folder / "runs.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(ROW | row for row in rows)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def valid(path: Path, schema: str) -> dict[str, object]:
    document: dict[str, object] = json.loads(path.read_text())
    text = json.loads((SCHEMAS / f"{schema}.schema.json").read_text())
    cast("_Validator", Draft202012Validator(text)).validate(document)
    return document


def test_a_table_is_predicted_and_judged(tmp_path: Path) -> None:
    runs = table(tmp_path, {}, {"dp": "4", "tp": "2", "recompute": ""}, {"model": "no such model"})
    done = run(
        "league", "--table", runs, "--json", tmp_path / "l.json", "--report", tmp_path / "r", "--jobs", "1"
    )
    assert done.exit_code == 0, done.output
    assert (
        "1 row not predicted (row 2, column model): the configuration of model 'no such model' is not known"
        in done.stderr
    )
    assert "1 row with assumptions, because the table lacks settings" in done.stderr
    assert "layout with the best prediction within 3% of the fastest one: 1 of 1 set" in done.stdout
    document = valid(tmp_path / "l.json", "league")
    rows = cast("list[dict[str, object]]", document["rows"])
    assert [row["status"] for row in rows] == ["predicted", "assumed", "refused"]
    assert rows[1]["assumptions"] == ["row.recompute", "row.sequence-parallel"]
    first = rows[0]
    predicted, published = cast("float", first["predicted_ms"]), cast("float", first["published_ms"])
    assert first["relative_error"] == pytest.approx(predicted / published - 1)
    assert cast("float", first["low_ms"]) < predicted < cast("float", first["high_ms"])
    assert 1 < cast("float", first["peak_memory_gib"]) < 100
    assert sum(cast("dict[str, float]", first["parts"]).values()) == pytest.approx(1.0)
    page = (tmp_path / "r" / "league.html").read_text()
    assert "<svg" in page
    assert "://" not in page
    lines = (tmp_path / "r" / "league.csv").read_text().splitlines()
    assert len(lines) == 4
    assert (rows[2]["reason"], rows[2]["position"]) == (
        "the configuration of model 'no such model' is not known", "row 2, column model",
    )  # fmt: skip
    assert json.loads((tmp_path / "r" / "league.json").read_text()) == document


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    of_row = predict._predicted  # pyright: ignore[reportPrivateUsage]

    def counted(task: predict.PredictionTask) -> StepPrediction:
        asked.append(task.number)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return of_row(task)

    monkeypatch.setattr(predict, "_predicted", counted)
    runs = table(tmp_path, {}, {"seq_len": "1024"}, {"seq_len": "512"})
    with pytest.raises(KeyboardInterrupt):
        hespas.league(runs, jobs=1)
    assert len(hespas.league(runs, jobs=1).details.rows) == 3
    assert asked == [0, 1, 1, 2]
    hespas.league(runs, jobs=1)
    assert asked == [0, 1, 1, 2]


def step_ms(runs: Path, estimator: str = "roofline") -> float:
    return hespas.league(runs, estimator=estimator, jobs=1).details.rows[0].predicted_ms


def with_bandwidth(text: str, share: float) -> str:
    """A device or system file with a share of its bandwidths."""
    pattern = r"(?<=bandwidth_bytes_per_s = )[0-9.e+]+"
    return re.sub(pattern, lambda found: repr(float(found[0]) * share), text)


def own_device(path: Path, name: str = "TPU-v5e") -> Path:
    """A device file of a site, with half of the bandwidths each time that it is asked for."""
    text = path.read_text() if path.exists() else device_to_toml(load_device("TPU-v5e"))
    named = re.sub(r"^name = .*$", f'name = "{name}"', text, count=1, flags=re.MULTILINE)
    path.write_text(with_bandwidth(named, 0.5))
    return path


def test_an_edited_device_file_changes_what_was_kept(tmp_path: Path) -> None:
    runs = table(tmp_path, {"accelerator": own_device(tmp_path / "my.toml").name})
    before = step_ms(runs)
    assert step_ms(runs) == before
    own_device(tmp_path / "my.toml")
    assert step_ms(runs) > before


def test_an_edited_table_of_models_changes_what_was_kept(tmp_path: Path) -> None:
    runs, models = table(tmp_path, {"model": "mine"}), tmp_path / "models.csv"
    head = "model,layers,hidden,ffn,heads,vocab\n"
    models.write_text(f"{head}mine,2,1024,4096,8,1000\n")
    before = step_ms(runs)
    models.write_text(f"{head}mine,4,1024,4096,8,1000\n")
    assert step_ms(runs) > before


def test_an_edited_file_of_an_estimator_changes_what_was_kept(tmp_path: Path) -> None:
    measured = tmp_path / "measured.csv"
    spelling = f"database:path={measured}"
    keys: list[str] = []
    for text in ("a", "b"):
        measured.write_text(text)
        keys.append(predict.estimator_digest(spelling))
    assert keys[0] != keys[1]
    assert predict.estimator_digest(f"training:base={spelling}") == keys[1]


@pytest.mark.parametrize(
    "edit", [{"time_ns": 5.0}, {"time_ns": -5.0, "parts": {}}, {"parts": {}}, {"refusal": {"message": "no"}}]
)
def test_what_is_kept_and_is_no_prediction_is_made_again(tmp_path: Path, edit: dict[str, object]) -> None:
    runs = table(tmp_path, {})
    first = hespas.league(runs, jobs=1).to_dict()
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text(json.dumps(json.loads(kept.read_bytes()) | edit))
    assert hespas.league(runs, jobs=1).to_dict() == first


def test_rows_are_kept_as_soon_as_they_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others_are_kept = Event()

    def predicted(task: predict.PredictionTask) -> StepPrediction:
        if task.number == 0:
            assert others_are_kept.wait(10)
        return StepPrediction(time_ns=1.0)

    def pool(*_: object) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2)

    def progress(done: int, _: int) -> None:
        if done == 2:
            others_are_kept.set()

    monkeypatch.setattr(predict, "_predicted", predicted)
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", pool)
    runs = table(tmp_path, {}, {"seq_len": "1024"}, {"seq_len": "512"})
    assert len(predict.predicted_rows(runs, jobs=2, progress=progress)) == 3


def test_a_refusal_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise MissingExtraError("an estimator", "extra")

    runs = table(tmp_path, {})
    with monkeypatch.context() as patched:
        patched.setattr(predict, "timed_run", without)
        with pytest.raises(UnsupportedError, match="needs the optional 'extra'"):
            hespas.league(runs, jobs=1)
    assert len(hespas.league(runs, jobs=1).details.rows) == 1


def test_what_was_measured_does_not_change_what_is_predicted(tmp_path: Path) -> None:
    first = hespas.league(table(tmp_path, {}), jobs=1).details.rows[0]
    second = hespas.league(table(tmp_path, {"step_time_ms": "3000", "mfu_pct": "20"}), jobs=1).details.rows[0]
    assert first.predicted_ms == second.predicted_ms
    assert second.relative_error == pytest.approx((first.relative_error + 1) / 2 - 1)


def test_factors_of_a_device(tmp_path: Path) -> None:
    runs = table(tmp_path, {}, {"seq_len": "1024", "step_time_ms": "900"})
    out = tmp_path / "factors.json"
    asked = ["calibrate", "--hardware", "TPU-v5e", "--end-to-end", "--table", str(runs), "--out", str(out)]
    done = run(*asked)
    assert done.exit_code == 0, done.output
    assert "products" in done.stdout
    factors = cast("list[dict[str, object]]", valid(out, "league_factors")["factors"])
    assert {each["accelerator"] for each in factors} == {"TPU-v5e"}
    assert all(cast("float", each["std_error"]) < cast("float", each["prior_std"]) for each in factors)
    other = run(*["H100-SXM" if each == "TPU-v5e" else each for each in asked], "--overwrite")
    assert other.exit_code == 2
    assert "no factors for H100-SXM" in other.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [("--kind", "matmul"), ("--dtype", "bf16"), ("--seed", "0"), ("--default-dtype", "bf16"),
     ("--comm-groups", "groups.json"), ("--run-time-unit", "ns"), ("--suggest", "5"), ("--json", "l.json"),
     ("--split", "a"), ("--report", "r")],
)  # fmt: skip
def test_options_that_factors_have_no_use_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = table(tmp_path, {})
    Path("groups.json").write_text("{}")
    more = ["--hardware", "TPU-v5e", "--table", str(runs), "--out", "f.json", option, value]
    done = run("calibrate", "--end-to-end", *more)
    assert done.exit_code == 2, done.output
    assert f"--end-to-end excludes {option}" in done.stderr


def test_factors_are_of_an_estimator(tmp_path: Path) -> None:
    runs, factors = table(tmp_path, {}), tmp_path / "f.json"
    asked = [
        "calibrate",
        "--end-to-end",
        "--hardware",
        "TPU-v5e",
        "--table",
        str(runs),
        "--out",
        str(factors),
    ]
    many = run(*asked, "--estimator", "roofline", "--estimator", "composite")
    assert (many.exit_code, "takes one --estimator" in many.stderr) == (2, True)
    done = run(*asked, "--estimator", "roofline", "--max-input-bytes", "100000")
    assert done.exit_code == 0, done.output
    assert valid(factors, "league_factors")["estimator"] == "roofline"
    with_them = ["league", "--table", str(runs), "--factors", str(factors), "--jobs", "1"]
    other = run(*with_them)
    assert other.exit_code == 2
    assert "the factors are for the estimator roofline, not for composite" in other.stderr
    assert "try: set --estimator roofline, or fit them again" in other.stderr
    assert run(*with_them, "--estimator", "roofline").exit_code == 0


_CALIBRATE = ("calibrate", "--hardware", "TPU-v5e", "--end-to-end")


def test_factors_that_are_edited_are_refused(tmp_path: Path) -> None:
    runs, path = table(tmp_path, {}), tmp_path / "f.json"
    assert run(*_CALIBRATE, "--table", runs, "--out", path).exit_code == 0
    document = valid(path, "league_factors")
    good = cast("list[dict[str, object]]", document["factors"])
    edits: list[tuple[dict[str, object], str]] = [
        ({"schema": "hespas.league_factors/2"}, "schema"),
        ({"factors": [*good, good[0]]}, "duplicate factor of here, TPU-v5e"),
        ({"factors": [good[0] | {"factor": 1e308}]}, r"factor 1e\+308"),
        ({"factors": [good[0] | {"factor": 1e-308}]}, "factor 1e-308"),
        ({"factors": [good[0] | {"std_error": 1e308}]}, r"std_error 1e\+308"),
    ]
    for edit, match in edits:
        path.write_text(json.dumps(document | edit))
        with pytest.raises(FormatError, match=match):
            hespas.league(runs, factors=path, jobs=1)


@pytest.mark.parametrize("cell", ["tpu v5 lite", "mine.toml"])
def test_factors_go_by_the_name_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own_device(Path("mine.toml"), "Mine")
    name = "Mine" if cell == "mine.toml" else "TPU-v5e"
    rows = [{"accelerator": cell}, {"accelerator": cell, "seq_len": "1024", "step_time_ms": "900"}]
    runs = table(tmp_path, *rows)
    done = run("calibrate", "--hardware", cell, "--end-to-end", "--table", runs, "--out", "f.json")
    assert done.exit_code == 0, done.output
    stated = valid(Path("f.json"), "league_factors")
    assert stated["hardware"] == name
    assert {each["accelerator"] for each in cast("list[dict[str, str]]", stated["factors"])} == {name}
    plain, own = (
        hespas.league(runs, jobs=1, factors=factors).details.rows[0] for factors in (None, "f.json")
    )
    assert own.row.cells["accelerator"] == name
    assert own.predicted_ms != pytest.approx(plain.predicted_ms, rel=1e-3)


def test_a_row_that_stands_twice_is_reported(tmp_path: Path) -> None:
    for cells, count in (([{}, {}, {"step_time_ms": "1600"}], 1), ([{}, {"step_time_ms": "1600"}], 0)):
        found = Diagnostics()
        hespas.league(table(tmp_path, *cells), jobs=1, diagnostics=found)
        assert found.counts().get("league.repeated-row", 0) == count


def test_a_row_stands_in_the_network_that_it_names(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    text = system_to_toml(load_system("tpu-v5e"))
    columns = [*ROW, "network"]
    cells: list[dict[str, str]] = [{}, *({"network": each} for each in ("tpu-v5e", mine.name, "no such"))]
    found: list[list[float]] = []
    for share in (1.0, 0.5):
        mine.write_text(with_bandwidth(text, share))
        rows = hespas.league(table(tmp_path, *cells, columns=columns), jobs=1).details.rows
        found.append([row.predicted_ms for row in rows])
        assert "no system 'no such'" in rows[3].row.predicted.refused
    assert found[0][0] == found[0][1] == found[0][2] == found[1][1]
    assert found[1][2] > found[0][2]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["league", "--table", "gone.csv"], 3, "No such file"),
        (
            ["calibrate", "--hardware", "H100-SXM", "--end-to-end", "--out", "f.json"],
            2,
            "requires one --table of runs",
        ),
        (
            ["calibrate", "--hardware", "H100-SXM", "--end-to-end", "--table", "t", "--out", "f.csv"],
            2,
            "expected a .toml or .json file",
        ),
        (
            [
                "calibrate",
                "--hardware",
                "H100-SXM",
                "--end-to-end",
                "--seed",
                "1",
                "--split",
                "a",
                "--out",
                "f.json",
            ],
            2,
            "--end-to-end excludes --split",
        ),
    ],
)
def test_wrong_usage(arguments: list[str], code: int, text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert text in done.stderr


def test_a_table_without_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    done = run("league", "--table", path)
    assert done.exit_code == 3
    assert "missing column accelerator, global_batch, model, num_accelerators, seq_len" in done.stderr
    table(tmp_path, columns=[each for each in ROW if each != "accelerator"])
    done = run("league", "--table", path)
    assert done.exit_code == 3
    assert "header: missing column accelerator\n" in done.stderr


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        ([{"model": "no such"}], 4, "row 0, column model: the configuration of model 'no such' is not known"),
        ([{"dp": "3"}, {"accelerator": "no such"}], 3, "row 0: none of 2 rows can be predicted: dp x tp"),
        ([{"accelerator": "no such"}], 3, "row 0: no device 'no such'"),
        ([], 3, "no row below the header"),
    ],
)
def test_a_table_of_which_no_row_is_predicted_is_an_error(
    tmp_path: Path, rows: list[dict[str, str]], code: int, said: str
) -> None:
    runs, out = table(tmp_path, *rows), tmp_path / "f.json"
    for arguments in (
        ["league", "--jobs", "1", "--json", str(out)],
        ["calibrate", "--end-to-end", "--hardware", "TPU-v5e", "--out", str(out)],
    ):
        done = run(*arguments, "--table", runs)
        assert done.exit_code == code, done.output
        assert f"error: {runs}: " in done.stderr
        assert said in done.stderr
        assert "  try: " in done.stderr
        assert not out.exists()


def test_an_estimator_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    done = run("league", "--table", table(tmp_path, {}), "--estimator", "nobody", "--jobs", "1")
    assert done.exit_code == 2, done.output


def test_peaks_of_memory_stand_beside_those_that_were_published(tmp_path: Path) -> None:
    columns = [*ROW, "peak_memory_gib"]
    runs, report = table(tmp_path, {"peak_memory_gib": "10"}, {}, columns=columns), tmp_path / "r"
    done = run("league", "--table", runs, "--jobs", "1", "--report", report)
    assert done.exit_code == 0, done.output
    document = valid(report / "league.json", "league")
    peak = cast("list[dict[str, float]]", document["rows"])[0]["peak_memory_gib"]
    error = cast("dict[str, float]", document["peak_memory"])
    assert error == {
        "n": 1, "mean_ape": pytest.approx(abs(peak / 10 - 1)),
        "median_ape": pytest.approx(abs(peak / 10 - 1)),
        "bias": pytest.approx(peak / 10 - 1),
    }  # fmt: skip
    assert f"peak memory of 1 row: mean error {error['median_ape']:.1%}" in done.stdout
    assert "peak memory of 1 rows" in (report / "league.html").read_text()
    with (report / "league.csv").open() as stream:
        assert [row["published_memory_gib"] for row in csv.DictReader(stream)] == ["10", ""]
    assert document["noise_floor"] is None


def test_the_noise_floor_is_that_of_submissions(tmp_path: Path) -> None:
    out = tmp_path / "l.json"
    done = run(
        "league", "--table", table(tmp_path, {"source": "MLPerf-Training"}), "--jobs", "1", "--json", out
    )
    assert done.exit_code == 0, done.output
    assert valid(out, "league")["noise_floor"] == 0.028


def test_no_baseline_without_a_published_rate(tmp_path: Path) -> None:
    done = run("league", "--table", table(tmp_path, {"mfu_pct": ""}), "--jobs", "1")
    assert done.exit_code == 0, done.output
    assert "nan" not in done.stdout
    assert "baseline" not in done.stdout


def test_rows_are_predicted_where_none_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    runs, out = table(tmp_path, {}, {"seq_len": "1024"}), tmp_path / "f.json"
    asked = ["--end-to-end", "--hardware", "TPU-v5e", "--out", str(out)]
    for done in (run("league", "--table", runs, "--jobs", "1"), run("calibrate", "--table", runs, *asked)):
        assert done.exit_code == 0, done.output
        assert done.stderr.count("results cannot be saved") == 1
        assert "set XDG_CACHE_HOME" in done.stderr


def test_a_table_is_as_large_as_is_trusted(tmp_path: Path) -> None:
    runs = table(tmp_path, {})
    with runs.open("ab") as stream:
        stream.truncate(65 << 20)
    done = run("league", "--table", runs)
    assert (done.exit_code, "more than the limit" in done.stderr) == (3, True)
    assert "--max-input-bytes" in done.stderr or "HESPAS_MAX_INPUT_BYTES" in done.stderr
    trusted = run("league", "--table", runs, "--max-input-bytes", "70000000")
    assert (trusted.exit_code, "more than the limit" in trusted.stderr) == (3, False)


def test_what_an_estimator_assumes_and_leaves_out_is_told(tmp_path: Path) -> None:
    runs, out = table(tmp_path, {}, {"recompute": ""}), tmp_path / "l.json"
    asked = ["league", "--table", str(runs), "--jobs", "1", "--json", str(out), "--overwrite"]
    assert run(*asked, "--estimator", "calibrated").exit_code == 0
    found = cast("list[dict[str, object]]", valid(out, "league")["diagnostics"])
    assert {str(each["code"]): each["count"] for each in found} == {
        "calibrated.not-covered": 2,
        "league.row.recompute": 1,
        "memory.beyond-device": 2,
    }
    done = run(*asked, "--estimator", "systolic")
    assert "warning: 2 rows with kernels of unknown duration, counted as 0" in done.stderr
    document = valid(out, "league")
    assert "league.row.untimed" in {
        each["code"] for each in cast("list[dict[str, object]]", document["diagnostics"])
    }
    rows = cast("list[dict[str, object]]", document["rows"])
    assert (rows[0]["status"], rows[0]["assumptions"]) == ("assumed", ["row.untimed"])


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"step_time_ms": "0"}, "row 1, column step_time_ms: step_time_ms is '0'"),
        ({"step_time_ms": "-5"}, "row 1, column step_time_ms: step_time_ms is '-5'"),
        ({"step_time_ms": "nan"}, "row 1, column step_time_ms: step_time_ms is 'nan'"),
        ({"step_time_ms": "1e300"}, "row 1, column step_time_ms: step_time_ms is '1e300'"),
        ({"step_time_ms": "abc"}, "row 1, column step_time_ms: step_time_ms is 'abc'"),
        ({"mfu_pct": "40%"}, "row 1, column mfu_pct: mfu_pct is '40%'"),
        ({"step_time_lo_ms": "1600"}, "column step_time_ms: step_time_ms is 1500, below step_time_lo_ms"),
        ({"step_time_hi_ms": "1400"}, "column step_time_hi_ms: step_time_hi_ms is 1400, below step_time_ms"),
    ],
)
@pytest.mark.parametrize("command", ["league", "calibrate"])
def test_measurements_that_cannot_be_end_it_before_anything_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, cells: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(predict, "_predicted", None)
    runs, out = (
        table(tmp_path, {}, cells, columns=[*ROW, "step_time_lo_ms", "step_time_hi_ms"]),
        tmp_path / "f.json",
    )
    more = (
        ["--end-to-end", "--hardware", "TPU-v5e", "--out", str(out)]
        if command == "calibrate"
        else ["--jobs", "1"]
    )
    done = run(command, "--table", runs, *more)
    assert done.exit_code == 3, done.output
    assert f"{runs}: row 1" in done.stderr
    assert said in done.stderr
    assert "try: write " in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("column", ["seq_len", "global_batch", "num_accelerators"])
def test_a_row_without_a_size_is_not_predicted(tmp_path: Path, column: str) -> None:
    done = run(
        "league", "--table", table(tmp_path, {}, {column: ""}), "--jobs", "1", "--json", tmp_path / "l"
    )
    assert done.exit_code == 0, done.output
    assert "1 row not predicted" in done.stderr


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    runs, folder, precious = table(tmp_path, {}), tmp_path / "r", tmp_path / "precious.csv"
    folder.mkdir()
    precious.write_text("mine")
    (folder / "league.csv").symlink_to(precious)
    done = run("league", "--table", runs, "--jobs", "1", "--report", folder, "--overwrite")
    assert done.exit_code == 2, done.output
    assert "league.csv: is a link" in done.stderr
    with pytest.raises(OutputError, match="is a link"):
        hespas.league(runs, jobs=1, estimator="roofline").write(folder, overwrite=True)
    assert precious.read_text() == "mine"
    assert sorted(folder.iterdir()) == [folder / "league.csv"]


def test_a_report_does_not_replace_its_table(tmp_path: Path) -> None:
    runs = table(tmp_path, {}).rename(tmp_path / "league.csv")
    done = run("league", "--table", runs, "--jobs", "1", "--report", tmp_path, "--overwrite")
    assert done.exit_code == 2, done.output
    assert "--report names the same file as --table" in done.stderr


def test_the_interface_refuses_another_word(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`calibrate=all`: 'all' is not one of 'none', "):
        hespas.league(table(tmp_path, {}), calibrate=cast("CalibrateBy", "all"))


def test_factors_of_a_site_are_applied_to_runs_that_nobody_measured(tmp_path: Path) -> None:
    runs, factors = table(tmp_path, {}, {"dp": "4", "tp": "2"}), tmp_path / "factors.json"
    fitted = run("calibrate", "--hardware", "TPU-v5e", "--end-to-end", "--table", runs, "--out", factors)
    assert fitted.exit_code == 0, fitted.output
    folder = tmp_path / "new"
    folder.mkdir()
    new = table(folder, {"step_time_ms": ""}, {"step_time_ms": "", "source": "elsewhere"})
    plain, own = tmp_path / "plain.json", tmp_path / "own.json"
    assert run("league", "--table", new, "--json", plain, "--jobs", "1").exit_code == 0
    done = run("league", "--table", new, "--factors", factors, "--json", own, "--jobs", "1")
    assert done.exit_code == 0, done.output
    assert "no correction factor for this source and accelerator" in done.stderr
    before, after = (cast("list[dict[str, float]]", valid(path, "league")["rows"]) for path in (plain, own))
    stated = cast("list[dict[str, float]]", json.loads(factors.read_text())["factors"])
    products = next(each for each in stated if cast("str", each["component"]) == "products")
    ratio = after[0]["predicted_ms"] / before[0]["predicted_ms"]
    assert ratio != pytest.approx(1.0, abs=0.01)
    assert (ratio > 1) == (products["factor"] > 1)
    assert after[0]["low_ms"] < after[0]["predicted_ms"] < after[0]["high_ms"]
    # Of another stack nothing is known: as predicted, with a wider interval.
    assert after[1]["predicted_ms"] == pytest.approx(before[1]["predicted_ms"])
    assert after[1]["high_ms"] / after[1]["predicted_ms"] > after[0]["high_ms"] / after[0]["predicted_ms"]


MAGIC: dict[str, str | int] = {
    "source": "a", "accelerator": "b", "component": "magic", "factor": 1, "std_error": 0, "prior_std": 0,
    "share": 0, "n": 1,
}  # fmt: skip


_SCHEMA = {"schema": "hespas.league_factors/1"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "not a factors file"),
        (json.dumps(_SCHEMA | {"factors": []}), "the file has no factors"),
        (json.dumps(_SCHEMA | {"factors": [MAGIC]}), "component 'magic'"),
    ],
)
def test_files_without_factors_are_refused(tmp_path: Path, text: str, said: str) -> None:
    runs, factors = table(tmp_path, {}), tmp_path / "factors.json"
    factors.write_text(text)
    done = run("league", "--table", runs, "--factors", factors, "--jobs", "1")
    assert done.exit_code == 3
    assert said in done.stderr
    assert "--end-to-end" in done.stderr


def test_factors_and_a_calibration_contradict_each_other(tmp_path: Path) -> None:
    runs, factors = table(tmp_path, {}), tmp_path / "factors.json"
    done = run("league", "--table", runs, "--factors", factors, "--calibrate", "leave-group-out")
    assert done.exit_code == 2
    assert "--factors cannot be combined with --calibrate leave-group-out" in done.stderr


def test_without_a_table_the_folder_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("league")
    assert done.exit_code == 3
    assert "published_training.csv" in done.stderr
    table(tmp_path, {}).rename(tmp_path / "published_training.csv")
    assert run("league", "--jobs", "1").exit_code == 0
