"""``hespas-validate accuracy`` and ``compare``: text, documents that agree with their schemas, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli import main
from hespas.cli.validate import app
from hespas.graph import OpClass, Workload
from tests.validators.accuracy.small_profiles import Program, Recording

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "hespas" / "schemas"
PROGRAM = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"
SQUARE = [(512, 512), (512, 512)]


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(command: str, *arguments: str | Path) -> Result:
    asks = command == "accuracy" and "--estimator" not in arguments
    model = ["--estimator", "roofline"] if asks else []
    return CliRunner().invoke(app, [command, *(str(each) for each in arguments), *model])


def told(text: str) -> str:
    """The words of an error, without the frame drawn around it."""
    return re.sub(r"[\s│]+", " ", text)


def validated(path: Path, schema: str) -> dict[str, object]:
    document = cast("dict[str, object]", json.loads(path.read_text()))
    rules = json.loads((SCHEMAS / f"{schema}.schema.json").read_text())
    Draft202012Validator.check_schema(rules)
    cast("_Validator", Draft202012Validator(rules)).validate(document)
    return document


def rows(document: dict[str, object], name: str) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", document[name])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    made = Program()
    dot = made.add("dot.1", "dot", takes=SQUARE, makes=[(512, 512)], flops=2.0 * 512**3, moved=3e6)
    made.add("add.2", "add", OpClass.ELEMENTWISE, dot, takes=SQUARE, makes=[(512, 512)], moved=3e6)
    path = tmp_path / "program.json"
    api.write(Workload.spmd(made.build(), 1), path)
    return path


def recorded(path: Path, slower: float = 1.0) -> Path:
    made = Recording()
    for run_number in range(3):
        for op, duration_ns in (("dot.1", 9000.5), ("add.2", 2000.5), ("gap\x1b[31m", 1000.5)):
            made.event(op, duration_ns * slower, run=run_number)
    api.write(made.build(), path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return recorded(tmp_path / "trace.csv")


def compared(trace: Path, program: Path, *more: str | Path) -> Result:
    return run("accuracy", "--measured", trace, "--hardware", "H100-SXM", "--workload", program, *more)


def test_a_recording_with_its_program(trace: Path, program: Path, tmp_path: Path) -> None:
    done = compared(trace, program, "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    document = validated(tmp_path / "a.json", "accuracy")
    assert document["inputs"] == [str(program), str(trace)]
    assert document["estimators"] == ["roofline"]
    assert document["exceeded"] == []
    [coverage] = rows(document, "coverage")
    assert (coverage["events"], coverage["matched_events"]) == (9, 6)
    assert {row["estimator"] for row in rows(document, "summary")} == {
        "roofline",
        "datasheet-roofline",
        "one-efficiency",
        "overhead+two-efficiencies",
    }
    assert {row["basis"] for row in rows(document, "end_to_end")} == {"span", "busy", "sum of operations"}
    warnings = {
        row["code"]: row["count"] for row in rows(document, "diagnostics") if row["severity"] == "warning"
    }
    assert warnings == {"match.unmatched-events": 3, "match.runs-unknown": 2, "match.other-program": 1}
    assert "91.7% of the device time and 6 of 9 events matched; 2 of 2 operations" in done.stdout
    assert re.search(r"^device +estimator +class +n +shapes +coverage +MAPE", done.stdout, re.MULTILINE)
    for start in (
        "roofline +all",
        "roofline +matmul",
        "datasheet-roofline +all",
        "one-efficiency +all",
        r"overhead\+two-efficiencies +all",
    ):
        assert re.search(rf"^H100-SXM +{start} ", done.stdout, re.MULTILINE)
    assert re.search(r"^trace +H100-SXM +roofline +span +\d", done.stdout, re.MULTILINE)
    assert "noise floor of H100-SXM: not repeated" in done.stdout
    assert "[match.unmatched-events] (3 times)" in done.stderr
    assert "\x1b" not in done.output


def test_figures_of_the_text_are_those_of_the_document(trace: Path, program: Path, tmp_path: Path) -> None:
    done = compared(trace, program, "--json", tmp_path / "a.json")
    document = validated(tmp_path / "a.json", "accuracy")
    [row] = [
        row
        for row in rows(document, "summary")
        if (row["estimator"], row["level"], row["op_class"], row["size"])
        == ("roofline", "shape", "all", "all")
    ]
    [line] = re.findall(r"^H100-SXM +roofline +all +(.*)$", done.stdout, re.MULTILINE)
    mape, bias = cast("float", row["mape"]), cast("float", row["bias"])
    assert line.split()[:4] == [str(row["n"]), str(row["shapes"]), "91.7%", f"{mape:.1%}"]
    assert f"{bias:+.1%}" in line.split()


def test_without_a_program_operations_are_costed_by_their_shapes(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(4):
        made.event("aten::relu", 20_000.0, shapes="[[4096, 4096]]", dtypes="float")
    api.write(made.build(), tmp_path / "trace.csv")
    done = run(
        "accuracy",
        "--measured",
        tmp_path / "trace.csv",
        "--hardware",
        "H100-SXM",
        "--json",
        tmp_path / "a.json",
    )
    assert done.exit_code == 0, done.output
    [source] = rows(validated(tmp_path / "a.json", "accuracy"), "sources")
    assert (source["cases"], source["shapes"], source["measured_ns"]) == (4, 1, 80_000.0)
    assert (
        "data: trace: all times are whole microseconds: 4, 100.0% of the time [clock-resolution]"
        in done.stdout
    )


def test_two_devices_are_compared(tmp_path: Path) -> None:
    for name, device in (("h", "H100-SXM"), ("m", "MI300X")):
        made = Recording(name)
        for place, extent in enumerate((1024, 2048, 4096)):
            made.event("aten::relu", 1e4 * (place + 1), shapes=f"[[{extent}, {extent}]]", dtypes="float")
        api.write(made.build(devices=(device,)), tmp_path / f"{name}.csv")
    files: list[str | Path] = ["--measured", tmp_path / "h.csv", "--measured", tmp_path / "m.csv"]
    done = run(
        "accuracy", *files, "--hardware", "MI300X", "--hardware", "H100-SXM", "--json", tmp_path / "a.json"
    )
    assert done.exit_code == 0, done.output
    document = validated(tmp_path / "a.json", "accuracy")
    assert [row["hardware"] for row in rows(document, "sources")] == ["H100-SXM", "MI300X"]
    assert {row["n"] for row in rows(document, "speed_ups")} == {3}
    assert "roofline: faster device of H100-SXM and MI300X correct for " in done.stdout


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("--max-mape=0.01", "MAPE of roofline on H100-SXM is"),
        ("--max-e2e=0.01", "end to end (span) of trace, roofline on H100-SXM:"),
    ],
)
def test_past_a_threshold(limit: str, message: str, trace: Path, program: Path, tmp_path: Path) -> None:
    done = compared(trace, program, limit, "--json", tmp_path / "a.json")
    assert done.exit_code == 1, done.output
    assert f"threshold exceeded: {message}" in done.stdout
    exceeded = cast("list[str]", validated(tmp_path / "a.json", "accuracy")["exceeded"])
    assert any(message in sentence for sentence in exceeded)


def test_within_all_thresholds(trace: Path, program: Path) -> None:
    done = compared(trace, program, "--max-mape", "5", "--max-e2e", "5", "--min-coverage", "0.9")
    assert done.exit_code == 0, done.output
    assert "threshold exceeded" not in done.stdout


def test_a_folder_of_reports(trace: Path, program: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = compared(trace, program, "--report", out)
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in out.iterdir()) == [
        "report.csv", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    validated(out / "report.json", "accuracy")
    again = compared(trace, program, "--report", out)
    assert again.exit_code == 2
    assert "--overwrite" in told(again.stderr)
    assert compared(trace, program, "--report", out, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--measured", "absent.csv", "--hardware", "L4"], 3, "no such file"),
        (["--measured", "broken.csv", "--hardware", "L4"], 3, "broken.csv"),
        (["--measured", "trace.csv", "--hardware", "H900"], 2, "H900"),
        (["--measured", "trace.csv", "--hardware", "L4"], 2, "no operations with shapes"),
        (["--measured", "trace.csv", "--hardware", "L4", "--workload", "trace.csv"], 2, "is not a program"),
        (["--measured", "trace.csv", "--hardware", "L4", "--workload", "absent"], 3, "no such file"),
        (["--measured", "trace.csv", "--hardware", "L4", "--workload", str(PROGRAM)], 2, "no event of the"),
        (["--measured", "trace.csv", "--hardware", "L4", "--estimator", "guess"], 2, "guess"),
        (
            [
                "--measured",
                "trace.csv",
                "--hardware",
                "L4",
                "--workload",
                "program.json",
                "--json",
                "no/a.json",
            ],
            2,
            "no",
        ),
        (["--measured", "trace.csv", "--hardware", "L4", "--max-mape", "few"], 2, "a valid float"),
        (["--measured", "trace.csv"], 2, "the device that the profiles were recorded on is not named"),
        (["--hardware", "L4"], 2, "give --measured PROFILE or --table TABLE"),
    ],
)
@pytest.mark.usefixtures("trace", "program")
def test_a_wrong_request_says_what_is_wrong(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.csv").write_bytes(b"\x00\xff\x01")
    before = sorted(tmp_path.iterdir())
    done = run("accuracy", *arguments)
    assert done.exit_code == code, done.output
    assert message in told(done.stderr)
    assert "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == before


def _reports(program: Path, folder: Path, slower: float) -> tuple[Path, Path]:
    """Two reports of one program, the second with measurements that take longer: larger errors."""
    found: list[Path] = []
    for name, factor in (("base", 1.0), ("new", slower)):
        (folder / name).mkdir()
        trace = recorded(folder / name / "trace.csv", factor)
        assert compared(trace, program, "--json", folder / f"{name}.json").exit_code == 0
        found.append(folder / f"{name}.json")
    return found[0], found[1]


def test_two_reports_side_by_side(program: Path, tmp_path: Path) -> None:
    base, new = _reports(program, tmp_path, 1.5)
    done = run("compare", base, new, "--json", tmp_path / "c.json")
    assert done.exit_code == 0, done.output
    document = validated(tmp_path / "c.json", "compare")
    assert document["inputs"] == [str(base), str(new)]
    assert (document["max_regression"], document["regressions"]) == (None, [])
    worse = [row for row in rows(document, "changes") if cast("float", row["difference"]) > 0]
    assert worse
    assert re.search(
        r"^roofline on H100-SXM, all, each shape +MAPE +\S+% +\S+% +\+", done.stdout, re.MULTILINE
    )
    assert f"{len(rows(document, 'changes')):,} figures compared: " in done.stdout


def test_an_error_that_grew_too_much(program: Path, tmp_path: Path) -> None:
    base, new = _reports(program, tmp_path, 1.5)
    done = run("compare", base, new, "--max-regression", "0.01", "--json", tmp_path / "c.json")
    assert done.exit_code == 1
    assert "threshold exceeded: MAPE of roofline on H100-SXM, all, each shape grew by" in done.stdout
    document = validated(tmp_path / "c.json", "compare")
    assert document["max_regression"] == 0.01
    assert rows(document, "regressions")
    assert run("compare", base, new, "--max-regression", "9").exit_code == 0


def test_figures_that_the_new_report_lacks_are_named(program: Path, tmp_path: Path) -> None:
    base, _ = _reports(program, tmp_path, 1.0)
    document = json.loads(base.read_text())
    document["summary"] = [row for row in document["summary"] if row["estimator"] != "roofline"]
    document["end_to_end"] = []
    (tmp_path / "less.json").write_text(json.dumps(document))
    done = run("compare", base, tmp_path / "less.json", "--max-regression", "9")
    assert done.exit_code == 1
    lacking = "threshold exceeded: MAPE of roofline on H100-SXM, all, each shape is not in the second report"
    assert lacking in done.stdout
    assert run("compare", base, tmp_path / "less.json").exit_code == 0
    assert run("compare", tmp_path / "less.json", base, "--max-regression", "9").exit_code == 0


def test_a_report_is_no_worse_than_itself(program: Path, tmp_path: Path) -> None:
    base, new = _reports(program, tmp_path, 1.0)
    done = run("compare", base, new, "--max-regression", "0")
    assert done.exit_code == 0, done.output
    assert "0 better, 0 worse; 0 only in the first, 0 only in the second" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.json", "absent.json"], 3, "no such file"),
        (["good.json", "bad.json"], 3, "expected an accuracy report"),
        (["other.json", "other.json"], 3, "expected schema 'hespas.accuracy/1'"),
        (["league.json", "league.json"], 3, "found 'hespas.league/1'"),
        (["league.json", "league.json"], 3, "give two files written by hespas-validate accuracy"),
        (["odd.json", "odd.json"], 3, "missing required field `estimator`"),
        (["good.json", "empty.json"], 2, "no figure in common"),
        (["good.json"], 2, "Missing argument"),
        (["good.json", "good.json", "--json", "no/c.json"], 2, "no"),
    ],
)
def test_what_cannot_be_compared(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {
        "estimator": "e", "hardware": "h", "level": "shape", "op_class": "all", "size": "all",
        "mape": 0.5, "median_ape": 0.5, "coverage": 1.0,
    }  # fmt: skip
    for name, schema, summary in (
        ("good", "hespas.accuracy/1", [row]),
        ("empty", "hespas.accuracy/1", []),
        ("other", "hespas.simulate/1", []),
        ("league", "hespas.league/1", [{"by": "all"}]),
        ("odd", "hespas.accuracy/1", [{"by": "all"}]),
    ):
        document = {"schema": schema, "summary": summary, "end_to_end": []}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "bad.json").write_text("{")
    done = run("compare", *arguments)
    assert done.exit_code == code, done.output
    assert message in told(done.stderr)
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("accuracy", ["--measured", "--hardware", "--workload", "--report", "--json", "--max-mape"]),
        ("compare", ["BASE.json", "NEW.json", "--max-regression", "--json"]),
    ],
)
def test_help(command: str, words: list[str]) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert all(word in done.stdout for word in words)


def test_a_recording_of_another_device_says_so_wherever_it_is_named(tmp_path: Path) -> None:
    profile = ROOT / "fixtures" / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"
    folder = tmp_path / "et"
    api.convert(profile, f"{folder}/")
    for measured in (profile, folder):
        document, report = tmp_path / f"{measured.name}.json", tmp_path / f"{measured.name}.report"
        common: list[str | Path] = ["--measured", measured, "--quiet"]
        done = run("accuracy", *common, "--hardware", "MI300X", "--json", document, "--report", report)
        assert done.exit_code == 0, done.output
        assert "(recorded on NVIDIA H100 80GB HBM3) on MI300X: " in done.stdout
        text = document.read_text()
        sources = [each["source"] for each in json.loads(text)["end_to_end"]]
        assert all("recorded on NVIDIA H100" in source for source in sources)
        assert "accuracy.other-device" in text
        for name in ("report.html", "report.csv", "report.md"):
            assert "recorded on NVIDIA H100" in (report / name).read_text()
        own = run("accuracy", *common, "--hardware", "H100-SXM")
        assert "recorded on" not in own.output
    ran = CliRunner().invoke(main.app, ["simulate", str(folder)])
    assert " as recorded on NVIDIA H100 80GB HBM3, " in ran.stdout
