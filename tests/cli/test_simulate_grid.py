"""``hespas simulate --grid`` and ``--compare``: rows, faults, saved rows and differences."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from hespas import api
from hespas.api import grid_rows
from hespas.cli.main import app
from hespas.graph.errors import MissingExtraError
from hespas.hardware import device_to_toml, load_device, load_system, system_to_toml

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
PROGRAM = FIXTURES / "stablehlo" / "mlp.mlir"
RING = FIXTURES / "hlo" / "pipeline_ring.hlo.txt"
TRACES, SYSTEMS = FIXTURES / "chakra" / "pipeline_2x2", FIXTURES / "astra_sim"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *(str(each) for each in arguments)])


def grid(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text, encoding="utf-8")
    return path


def document(path: Path, schema: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    stated = json.loads((ROOT / "hespas" / "schemas" / f"{schema}.schema.json").read_text())
    cast("_Validator", Draft202012Validator(stated)).validate(found)
    return found


TWO = 'hardware = ["A100-SXM-80GB", "H100-SXM"]\nestimator = ["roofline", "composite"]\n'


def test_every_combination_is_the_simulation_of_its_settings(tmp_path: Path) -> None:
    done = run(PROGRAM, "--grid", grid(tmp_path, TWO), "--json", tmp_path / "g.json")
    assert done.exit_code == 0, done.output
    rows = document(tmp_path / "g.json", "grid")["rows"]
    assert [tuple(row["settings"].values()) for row in rows] == [
        ("A100-SXM-80GB", "roofline"), ("A100-SXM-80GB", "composite"),
        ("H100-SXM", "roofline"), ("H100-SXM", "composite"),
    ]  # fmt: skip
    for row in rows:
        alone = api.simulate(PROGRAM, row["settings"]["hardware"], estimator=row["settings"]["estimator"])
        assert row["step_ns"] == alone.step_ns
        assert row["exposed_comm_ns"] == 0.0
    assert done.stdout.startswith("4 rows, 0 without a time; shortest step")


def test_a_row_that_fails_says_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    done = run(
        PROGRAM, "--grid", grid(tmp_path, 'hardware = ["No-Such", "H100-SXM"]'), "--report", tmp_path / "out"
    )
    assert done.exit_code == 0, done.output
    [missing, there] = csv.DictReader((tmp_path / "out" / "grid.csv").read_text().splitlines())
    assert "no device 'No-Such'" in missing["fault"]
    assert missing["step_ns"] == ""
    assert float(there["step_ns"]) > 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "no device &#39;No-Such&#39;" in page
    assert page.count('class="bar"') == 1


def test_a_grid_in_which_all_rows_fail_ends_as_they_do(tmp_path: Path) -> None:
    cut = tmp_path / "cut.mlir"
    cut.write_text(PROGRAM.read_text()[:300], encoding="utf-8")
    out = tmp_path / "g.json"
    nowhere = 'hardware = ["No-Such", "Neither"]\n'
    done = run(PROGRAM, "--grid", grid(tmp_path, nowhere), "--json", out)
    assert done.exit_code == 2, done.output
    assert "2 rows, 2 without a time" in done.output
    assert [row["exit_code"] for row in document(out, "grid")["rows"]] == [2, 2]
    shutil.copy(PROGRAM, tmp_path / "whole.mlir")
    sources = 'source = ["whole.mlir", "cut.mlir"]\n'
    mixed = api.simulate_grid(grid(tmp_path, f'{sources}hardware = "No-Such"\n'))
    assert ([row.exit_code for row in mixed.rows], mixed.exit_code) == ([2, 3], 3)
    some = api.simulate_grid(grid(tmp_path, f'{sources}hardware = "H100-SXM"\n'))
    assert ([row.exit_code for row in some.rows], some.exit_code) == ([0, 3], 0)
    columns = run(PROGRAM, "--hardware", "No-Such", "--hardware", "Neither")
    assert columns.exit_code == 2, columns.output


def test_finished_rows_are_kept(tmp_path: Path) -> None:
    path, out = grid(tmp_path, TWO), tmp_path / "out"
    first = api.simulate_grid(path, PROGRAM, folder=out)
    files = sorted((out / "rows").iterdir())
    assert (len(files), first.kept) == (4, 0)
    files[0].unlink()
    files[1].write_text("cut", encoding="utf-8")
    again = run(PROGRAM, "--grid", path, "--report", out)
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    second = api.simulate_grid(path, PROGRAM, folder=out, overwrite=True)
    assert second.kept == 2
    assert second.to_csv() == first.to_csv()
    assert sorted((out / "rows").iterdir()) == files
    assert api.simulate_grid(path, PROGRAM, folder=out, overwrite=True).kept == 4


def test_rows_over_processes_are_the_same(tmp_path: Path) -> None:
    path = grid(tmp_path, TWO)
    two, one = (api.simulate_grid(path, PROGRAM, jobs=jobs) for jobs in (2, 1))
    assert two.to_csv() == one.to_csv()


def test_precision_and_links(tmp_path: Path) -> None:
    """Half the bytes of f32 where memory and links decide; links of 4 times the bandwidth."""
    text = 'hardware = "H100-SXM"\nestimator = "roofline"\nprecision = ["f32", "bf16"]\n'
    done = api.simulate_grid(grid(tmp_path, f"{text}link_bandwidth = [1, 4.0]\n"), RING)
    slow, fast, narrow, narrow_fast = (row.comm_ns for row in done.rows)
    assert fast < slow
    assert narrow < slow
    assert narrow_fast < narrow
    assert done.to_pandas()["link_bandwidth"].tolist() == [1, 4.0, 1, 4.0]


def test_links_of_a_device_by_the_command(tmp_path: Path) -> None:
    """The command puts its files in place at its end; the device of a row is read before that."""
    out = tmp_path / "out.json"
    done = run(
        RING, "--grid", grid(tmp_path, 'hardware = "H100-SXM"\nlink_bandwidth = [0.01, 4]\n'), "--json", out
    )
    assert done.exit_code == 0, done.output
    slow, fast = document(out, "grid")["rows"]
    assert (slow["fault"], fast["fault"]) == ("", "")
    assert fast["comm_ns"] < slow["comm_ns"]


def test_the_command_prints_warnings_of_rows(tmp_path: Path) -> None:
    done = run(RING, "--grid", grid(tmp_path, 'hardware = "H100-SXM"\nlink_bandwidth = [1, 4]\n'))
    assert "[grid.link-estimates]" in done.stderr
    done = run(PROGRAM, "--hardware", "A100-SXM-80GB", "--hardware", "H100-SXM")
    assert "[composite.unseen-device]" in done.stderr


def test_files_of_systems_and_devices_are_beside_the_grid(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "mine.toml").write_text(system_to_toml(load_system("dgx-h100")), encoding="utf-8")
    (folder / "chip").write_text(device_to_toml(load_device("A100-SXM-80GB")), encoding="utf-8")
    text = 'system = "mine.toml"\nhardware = ["./chip", "A100-SXM-80GB"]\n'
    one, two = api.simulate_grid(grid(folder, text), RING).rows
    assert (one.fault, two.fault) == ("", "")
    assert one.comm_ns == two.comm_ns > 0


def test_modes_and_configurations_of_astra_sim(tmp_path: Path) -> None:
    """Paths are those beside the grid; a network of half the bandwidth takes longer."""
    for name in ("system.json", "network.yml"):
        (tmp_path / name).write_bytes((SYSTEMS / name).read_bytes())
    text = (
        'mode = "astra"\nsystem_config = "system.json"\nnetwork_config = "network.yml"\n'
        "link_bandwidth = [1.0, 0.5]\nqueues_per_dim = [1, 2]\n"
    )
    rows = api.simulate_grid(grid(tmp_path, text), TRACES).rows
    alone = api.simulate(
        TRACES, mode="astra", system_config=SYSTEMS / "system.json", network_config=SYSTEMS / "network.yml"
    )
    assert rows[0].step_ns == alone.step_ns
    assert rows[2].step_ns > rows[0].step_ns


@pytest.mark.parametrize("mode", ["hespas", "astra"])
def test_systems_and_their_links(mode: str, tmp_path: Path) -> None:
    text = f'mode = "{mode}"\nsystem = ["dgx-a100", "dgx-h100"]\nhardware = "H100-SXM"\n'
    one, two = api.simulate_grid(grid(tmp_path, text), RING).rows
    assert (one.fault, two.fault, one.ranks) == ("", "", 8)
    assert two.comm_ns < one.comm_ns
    half, same = api.simulate_grid(grid(tmp_path, f"{text}link_bandwidth = [0.01, 1.0]"), RING).rows[2:]
    assert half.comm_ns > same.comm_ns


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("device = ['H100-SXM']", "unknown axis 'device'"),
        ("hardware = []", "hardware has an empty list"),
        ("hardware = ['A100', 'A100']", "hardware lists 'A100' twice"),
        ("mode = ['fast']", "mode has the value 'fast'"),
        ("link_bandwidth = [0]", "link_bandwidth has the value 0"),
        ("link_bandwidth = [1e-308]", "write a factor from 1e-9 to 1e9"),
        ("link_bandwidth = [nan]", "link_bandwidth has the value nan"),
        ("precision = ['i8']", "precision has the value 'i8'"),
        ("num_devices = [true]", "num_devices has the value True"),
        ("hardware = [", "not TOML"),
        ("num_devices = " + str(list(range(1, 10_002))), "10,001 combinations, more than"),
    ],
)
def test_a_grid_that_is_none(tmp_path: Path, text: str, told: str) -> None:
    done = run(PROGRAM, "--grid", grid(tmp_path, text))
    assert (done.exit_code, told in " ".join(done.output.split())) == (3, True), done.output


def test_settings_of_one_simulation_do_not_stand_beside_a_grid(tmp_path: Path) -> None:
    done = run(PROGRAM, "--grid", grid(tmp_path, TWO), "--hardware", "A100")
    assert done.exit_code == 2
    assert "--hardware applies to one simulation only" in done.output
    assert run().exit_code == 2
    assert "the grid names no workload" in run("--grid", grid(tmp_path, TWO)).output


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    for name in ("A100-SXM-80GB", "H100-SXM"):
        run(RING, "--hardware", name, "--json", tmp_path / f"{name}.json")
    paths = (tmp_path / "A100-SXM-80GB.json", tmp_path / "H100-SXM.json")
    done = run("--compare", *paths, "--json", tmp_path / "d.json")
    assert done.exit_code == 0, done.output
    rows = document(tmp_path / "d.json", "run_difference")["rows"]
    before, after = (json.loads(path.read_text()) for path in paths)
    assert (rows[0]["before_ns"], rows[0]["after_ns"]) == (before["step_ns"], after["step_ns"])
    assert {row["part"] for row in rows} == {
        "step", "critical path by class", "critical path by resource", "busy", "rank",
    }  # fmt: skip
    of_class = [row for row in rows if row["part"] == "critical path by class"]
    # A critical path is all of the step.
    assert sum(row["after_ns"] or 0.0 for row in of_class) == pytest.approx(after["step_ns"])
    differences = [abs(row["after_ns"] - row["before_ns"]) for row in of_class]
    assert differences == sorted(differences, reverse=True)
    assert "rank" in done.stdout


def test_a_step_that_is_not_known_is_compared_as_such(tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    assert run(PROGRAM, "--hardware", "H100-SXM", "--json", known).exit_code == 0
    unknown, simulated = tmp_path / "unknown.json", json.loads(known.read_text())
    unknown.write_text(json.dumps(simulated | {"step_ns": None}), encoding="utf-8")
    done = run("--compare", known, unknown)
    step = f"step {simulated['step_ns'] / 1e6:.3f} ms -> unknown"
    assert done.stdout.splitlines()[0] == step, done.output


def test_what_is_no_simulation(tmp_path: Path) -> None:
    other = tmp_path / "o.json"
    other.write_text('{"schema": "hespas.estimate/1"}', encoding="utf-8")
    done = run("--compare", other, other)
    assert (done.exit_code, "not a simulation document" in done.output) == (3, True)
    other.write_text("[]", encoding="utf-8")
    done = run("--compare", other, other)
    assert (done.exit_code, "Expected `object`, got `array`" in done.output) == (3, True)


def test_compared_documents_are_inputs(tmp_path: Path) -> None:
    """They are never replaced, and ``-`` is standard input."""
    known = tmp_path / "known.json"
    assert run(PROGRAM, "--hardware", "H100-SXM", "--json", known).exit_code == 0
    done = run("--compare", known, known, "--json", known, "--overwrite")
    assert (done.exit_code, "--json names the same file as --compare" in done.output) == (2, True)
    done = CliRunner().invoke(app, ["simulate", "--compare", str(known), "-"], input=known.read_bytes())
    assert (done.exit_code, done.output[:4]) == (0, "step"), done.output


def test_an_empty_column_is_refused() -> None:
    done = run(PROGRAM, "--hardware", "H100-SXM", "--hardware", "")
    assert (done.exit_code, "--hardware has an empty value" in done.output) == (2, True)


@pytest.mark.parametrize("command", ["simulate", "estimate"])
def test_several_settings_are_columns_of_one_table(command: str, tmp_path: Path) -> None:
    names = ("A100-SXM-80GB", "H100-SXM")
    given = ["--hardware", names[0], "--hardware", names[1], "--granularity", "op"]
    arguments = [command, str(PROGRAM), *given, "--json", str(tmp_path / "c.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = document(tmp_path / "c.json", "grid")["rows"]
    alone = [api.simulate(PROGRAM, name, granularity="op") for name in names]
    assert [row["step_ns"] for row in rows] == [each.step_ns for each in alone]
    assert [row["step_low_ns"] for row in rows] == [each.interval_ns[0] for each in alone]
    heads, step, interval, *_ = done.stdout.splitlines()
    assert heads.split() == list(names)
    assert step.startswith("step ")
    assert interval.startswith("90 % interval: from ")
    for row in rows:
        assert sum(row["critical_ns"].values()) == pytest.approx(row["step_ns"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["estimate", str(PROGRAM), "--out", "x.csv"], "--out applies to one simulation only"),
        (["simulate", str(PROGRAM), "--timeline", "t.json"], "--timeline applies to one simulation only"),
        (["estimate", "--table", "t.csv"], "--table takes one --hardware"),
        (["simulate", str(PROGRAM), "--hardware", "H100-SXM"], "--hardware repeats a value"),
    ],
)
def test_what_columns_do_not_go_with(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(app, [*arguments, "--hardware", "H100-SXM", "--hardware", "A100-SXM-80GB"])
    assert (done.exit_code, told in done.output) == (2, True), done.output


@pytest.mark.parametrize("command", ["simulate", "estimate"])
def test_one_preparation_and_one_default(command: str) -> None:
    """The same first line, which is the step and its interval."""
    done = CliRunner().invoke(app, [command, str(PROGRAM), "--hardware", "H100-SXM"])
    step = api.simulate(PROGRAM, "H100-SXM", estimator="composite")
    low_us = step.interval_ns[0] / 1e3
    expected = f"{step.step_ns / 1e3:,.3f} us per step on H100-SXM (90 % interval: {low_us:,.3f} us to "
    assert done.stdout.startswith(expected), done.stdout


def test_a_fault_names_the_file_of_the_setting_with_scaled_links_too() -> None:
    sweep = api.simulate_grid(SYSTEMS / "what_if.toml", TRACES)
    faults = {row.fault for row in sweep.rows if row.settings["backend"] == "aware"}
    [fault] = faults
    assert fault.startswith(f"{SYSTEMS / 'network.yml'}: ET032")


def test_a_fault_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise MissingExtraError("reading StableHLO", "stablehlo")

    monkeypatch.setattr(grid_rows, "opened_program", missing)
    done = run(PROGRAM, "--hardware", "A100-SXM-80GB,H100-SXM")
    for device in ("A100-SXM-80GB", "H100-SXM"):
        assert (
            f"{device}: reading StableHLO needs the optional 'stablehlo' dependencies: "
            "pip install 'hespas[stablehlo]'"
        ) in done.output
