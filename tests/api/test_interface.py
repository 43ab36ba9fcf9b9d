"""Functions of the commands: paths or values as input, and the content of ``--json`` as result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

import hespas
from hespas.api import Result
from hespas.cli.convert import app as convert_app
from hespas.cli.main import app as hespas_app
from hespas.cli.validate import app as validate_app
from hespas.graph import Profile, Workload
from hespas.graph.errors import OutputError, UsageError
from tests.converters.tracks.samples import measured
from tests.validators.small_tables import vectors, write_table

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"
TABLE = "kind,m,n,k,dtype,hardware,duration_ns\n" + "".join(
    f"matmul,{2**size},{64 * size},256,bf16,H100-SXM,{4000 + 3000 * size + 7 * rest}\n"
    for size in range(1, 13)
    for rest in range(3)
)


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """A program with times on a device, which stands for what was measured."""
    hespas.convert(PROGRAM, tmp_path / "timed.json", hardware="H100-SXM", target_format="op-graph")
    return tmp_path / "timed.json"


def written(app: Typer, *arguments: object) -> dict[str, Any]:
    """The document that a command writes with ``--json`` (of a conversion: ``--log-json``)."""
    place = Path(str(arguments[-1]))
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(place.read_bytes())
    return document


def shown(result: Result) -> None:
    """A result tells itself in a line, as a table, and to a notebook."""
    assert len(repr(result)) <= 200
    assert repr(result).startswith(f"<{type(result).__name__}: ")
    page: Callable[[], str] = getattr(result, "_repr_html_")  # noqa: B009 # what notebooks call
    assert len(result.to_pandas()) > 0
    assert "<table" in page()
    assert "<Accuracy" not in page()


def test_the_package_lists_its_functions() -> None:
    commands = {
        "convert",
        "estimate",
        "simulate",
        "check",
        "roundtrip",
        "accuracy",
        "calibrate",
        "compare",
        "view",
    }
    assert commands | {"read", "write"} <= set(dir(hespas))
    for name in dir(hespas):
        assert getattr(hespas, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'validate'"):
        getattr(hespas, "validate")  # noqa: B009 # a name that the types do not know


def test_convert(tmp_path: Path) -> None:
    done = hespas.convert(PROGRAM, tmp_path / "out.et", hardware="H100-SXM")
    shown(done)
    log = tmp_path / "log.json"
    said = written(
        convert_app, PROGRAM, tmp_path / "out.et", "--hardware", "H100-SXM", "--overwrite", "--log-json", log
    )
    assert done.to_dict() == said
    value = hespas.read(PROGRAM)
    again = hespas.convert(value, tmp_path / "again.et", hardware="H100-SXM")
    assert again.to_dict()["conservation"] == said["conservation"]
    assert (tmp_path / "again.et").read_bytes() == (tmp_path / "out.et").read_bytes()


def test_estimate(tmp_path: Path) -> None:
    done = hespas.estimate(PROGRAM, "H100-SXM")
    shown(done)
    said = written(hespas_app, "estimate", PROGRAM, "--hardware", "H100-SXM", "--json", tmp_path / "e.json")
    assert done.to_dict() == said
    of_value = hespas.estimate(hespas.read(PROGRAM), "H100-SXM").to_dict()
    assert of_value["rank_classes"] == said["rank_classes"]
    assert len(done.to_pandas()) == sum(map(len, done.workload.classes))


def test_estimate_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(TABLE)
    done = hespas.estimate_table(table, "H100-SXM")
    shown(done)
    said = written(
        hespas_app, "estimate", "--table", table, "--hardware", "H100-SXM", "--json", tmp_path / "e.json"
    )
    assert done.to_dict() == said


def test_simulate(tmp_path: Path) -> None:
    done = hespas.simulate(str(PROGRAM), "H100-SXM")
    shown(done)
    said = written(hespas_app, "simulate", PROGRAM, "--hardware", "H100-SXM", "--json", tmp_path / "s.json")
    assert done.to_dict() == said
    assert hespas.simulate(hespas.read(PROGRAM), "H100-SXM").step_ns == done.step_ns == said["step_ns"]


def test_the_timeline_of_a_simulation(tmp_path: Path) -> None:
    drawn, same = tmp_path / "api.json", tmp_path / "command.json"
    profile = tmp_path / "measured.csv"
    hespas.write(measured(), profile)
    hespas.simulate(PROGRAM, "H100-SXM", timeline=str(drawn), overlay=profile)
    arguments = ["simulate", PROGRAM, "--hardware", "H100-SXM", "--timeline", same, "--overlay", profile]
    done = CliRunner().invoke(hespas_app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    assert drawn.read_bytes() == same.read_bytes()
    before = drawn.read_bytes()
    with pytest.raises(OutputError, match="exists"):
        hespas.simulate(PROGRAM, "L4", timeline=drawn)
    assert drawn.read_bytes() == before
    hespas.simulate(PROGRAM, "L4", timeline=drawn, overwrite=True)
    assert drawn.read_bytes() != before
    values = tmp_path / "values.json"
    hespas.simulate(PROGRAM, "H100-SXM", timeline=values, overlay=[measured(), profile])
    shown = hespas.read(values)
    assert isinstance(shown, Profile)
    simulated = len(hespas.simulate(PROGRAM, "H100-SXM").timeline)
    assert len(shown) == simulated + 2 * len(measured())


def test_a_timeline_that_cannot_be_is_refused_before_any_work(tmp_path: Path) -> None:
    absent = tmp_path / "absent.mlir"
    with pytest.raises(UsageError, match="`overlay` requires `timeline`"):
        hespas.simulate(absent, "L4", overlay=measured())
    with pytest.raises(UsageError, match="cannot hold an overlay"):
        hespas.simulate(absent, "L4", timeline=tmp_path / "t.csv", overlay=measured())
    with pytest.raises(UsageError, match="expected a measured profile"):
        hespas.simulate(PROGRAM, "L4", timeline=tmp_path / "t.json", overlay=PROGRAM)
    assert list(tmp_path.iterdir()) == []


def test_view(tmp_path: Path, timed: Path) -> None:
    done = hespas.view(PROGRAM)
    shown(done)
    assert done.to_dict() == written(hespas_app, "view", PROGRAM, "--json", tmp_path / "v.json")
    assert hespas.view(hespas.read(timed)).to_dict()["classes"] == hespas.view(timed).to_dict()["classes"]


def test_check(tmp_path: Path) -> None:
    done = hespas.check(str(PROGRAM))
    assert done.valid
    assert len(repr(done)) <= 200
    assert done.to_dict() == written(validate_app, "check", PROGRAM, "--json", tmp_path / "c.json")
    value = hespas.read(PROGRAM)
    assert isinstance(value, Workload)
    assert hespas.check(value).valid
    broken = tmp_path / "broken.mlir"
    broken.write_text("func.func @main() {")
    wrong = hespas.check([PROGRAM, broken])
    assert not wrong.valid
    assert list(wrong.to_pandas()["severity"]) == ["error"]
    shown(wrong)


def test_roundtrip(tmp_path: Path) -> None:
    done = hespas.roundtrip(PROGRAM, formats=["op-graph", "stablehlo"])
    shown(done)
    said = written(
        validate_app, "roundtrip", PROGRAM, "--formats", "op-graph,stablehlo", "--json", tmp_path / "r.json"
    )
    assert done.to_dict() == said
    assert "<html" in done.to_html()


def test_accuracy_and_compare(tmp_path: Path, timed: Path) -> None:
    done = hespas.accuracy(timed, hardware="H100-SXM", max_mape=0.5)
    shown(done)
    place = tmp_path / "a.json"
    arguments = ("--measured", timed, "--hardware", "H100-SXM", "--max-mape", 0.5, "--json", place)
    assert done.to_dict() == written(validate_app, "accuracy", *arguments)
    of_value = hespas.accuracy([hespas.read(timed)], hardware=["H100-SXM"], max_mape=0.5)
    assert of_value.to_dict()["summary"] == done.to_dict()["summary"]
    assert of_value.exceeded == done.exceeded == ()
    done.write(tmp_path / "report")
    assert (tmp_path / "report" / "report.md").is_file()
    base = hespas.accuracy(timed, hardware="H100-SXM", estimator="roofline")
    compared = hespas.compare(place, of_value, max_regression=0.1)
    shown(compared)
    assert compared.exceeded == ()
    (tmp_path / "b.json").write_bytes(base.to_json())
    said = written(validate_app, "compare", place, place, "--json", tmp_path / "d.json")
    assert hespas.compare(str(place), place).to_dict() == said


def test_accuracy_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(TABLE)
    done = hespas.accuracy(table=table, estimator=["roofline", "calibrated"])
    shown(done)
    arguments = ("--table", table, "--estimator", "roofline", "--estimator", "calibrated")
    assert done.to_dict() == written(validate_app, "accuracy", *arguments, "--json", tmp_path / "a.json")


def test_calibrate(tmp_path: Path) -> None:
    rows = vectors("H100-SXM", ("tanh",), lambda _, moved: 4 + moved / 2.01e6, split="calib", sizes=16)
    table = write_table(tmp_path / "table.csv", rows)
    done = hespas.calibrate("H100-SXM", table=table, date="2026-01-01")
    shown(done)
    done.write(tmp_path / "mine.toml")
    arguments = ("--table", table, "--date", "2026-01-01", "--out", tmp_path / "other.toml")
    said = written(
        validate_app, "calibrate", "--hardware", "H100-SXM", *arguments, "--json", tmp_path / "k.json"
    )
    assert done.to_dict() == said
    assert (tmp_path / "mine.toml").read_bytes() == (tmp_path / "other.toml").read_bytes()
    assert hespas.estimate(PROGRAM, str(tmp_path / "mine.toml")).hardware.endswith("mine.toml")


@pytest.mark.parametrize(
    ("call", "message", "flags", "on_screen"),
    [
        (hespas.accuracy, "give `profiles=PROFILE`", ["accuracy"], "give --measured PROFILE"),
        (
            lambda: hespas.accuracy("x", hardware="H100-SXM", max_mape=-1.0),
            "`max_mape=-1` is not a valid limit",
            ["accuracy", "--measured", "x", "--hardware", "H100-SXM", "--max-mape=-1"],
            "--max-mape -1 is not a valid limit",
        ),
    ],
)
def test_the_library_names_arguments_and_the_command_options(
    call: Callable[[], object], message: str, flags: list[str], on_screen: str
) -> None:
    with pytest.raises(UsageError, match=message):
        call()
    done = CliRunner().invoke(validate_app, flags)
    assert done.exit_code == 2
    assert "`" not in done.output
    assert on_screen in done.output
