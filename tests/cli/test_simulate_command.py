"""``hespas simulate``: the document agrees with its schema and the timeline; wrong requests, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli.main import app
from hespas.graph import OpGraph, Workload
from hespas.report.texts import time_text
from hespas.simulator import JobScheduler
from tests.simulator.small_programs import Sketch

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
STEP = FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"
UNKNOWN_TRIPS = FIXTURES / "stablehlo" / "while_unknown.mlir"
UNKNOWN_OP = FIXTURES / "stablehlo" / "custom_call_unknown.mlir"
SCHEMA = json.loads((ROOT / "hespas" / "schemas" / "simulate.schema.json").read_text())


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *(str(each) for each in arguments)])


def validated(path: Path) -> dict[str, object]:
    document = cast("dict[str, object]", json.loads(path.read_text()))
    Draft202012Validator.check_schema(SCHEMA)
    cast("_Validator", Draft202012Validator(SCHEMA)).validate(document)
    return document


def test_a_step_with_its_document(tmp_path: Path) -> None:
    done = run(STEP, "--hardware", "H100-SXM", "--json", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    document = validated(tmp_path / "s.json")
    workload = api.read(STEP)
    expected = api.simulate(workload, "H100-SXM")
    [found] = expected.classes
    assert document["step_ns"] == expected.step_ns
    assert document["inputs"] == [str(STEP)]
    assert (document["hardware"], document["estimator"]) == ("H100-SXM", "composite")
    rows = cast("list[dict[str, float]]", document["ranks"])
    assert [row["rank"] for row in rows] == list(range(8))
    assert rows[5] == {
        "rank": 5,
        "finish_ns": found.finish_ns,
        "exposed_comm_ns": found.exposed_comm_ns,
        "compute_ns": found.busy_ns["compute"],
        "comm_ns": found.busy_ns["communication"],
        "collective_wait_ns": 0.0,
        "message_wait_ns": 0.0,
        "interference_ns": found.interference_ns,
    }
    assert found.interference_ns > 0
    assert "contention between kernels and collectives: +" in done.stdout
    plain = run(STEP, "--hardware", "H100-SXM", "--no-interference")
    assert "contention" not in plain.stdout
    without = api.simulate(workload, "H100-SXM", simulator=JobScheduler(interference=False))
    assert without.step_ns < expected.step_ns
    assert plain.stdout.startswith(time_text(without.step_ns))
    low_ns, high_ns = (cast("float", document[f"step_{end}_ns"]) for end in ("low", "high"))
    assert low_ns < expected.step_ns < high_ns
    assert re.search(r"per step on H100-SXM \(90 % interval: .*\), 8 ranks in 1 class", done.stdout)
    assert re.search(r"^communication +\d", done.stdout, re.MULTILINE)
    assert re.search(r"^matmul +\d", done.stdout, re.MULTILINE)


SOURCES = [STEP, FIXTURES / "stablehlo" / "scan_nested.mlir", FIXTURES / "hlo" / "moe_all_to_all.hlo.txt"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_command_gives_one_answer(source: Path, tmp_path: Path) -> None:
    """The step of a program is the same by estimate, by simulate, and by simulate of what convert made."""
    device = ("--hardware", "H100-SXM")
    assert run(source, *device, "--json", tmp_path / "simulate.json").exit_code == 0
    asked = ["estimate", source, *device, "--json", tmp_path / "estimate.json"]
    assert CliRunner().invoke(app, [str(each) for each in asked]).exit_code == 0
    simulated, estimated = (
        json.loads((tmp_path / f"{command}.json").read_text()) for command in ("simulate", "estimate")
    )
    ends = ("step_ns", "step_low_ns", "step_high_ns")
    assert [simulated[end] for end in ends] == [estimated[end] for end in ends]
    for name, tolerance in (("graph.json", 1e-12), ("traces", 1e-3)):
        api.convert(source, tmp_path / name, hardware="H100-SXM")
        again = api.simulate(api.read(tmp_path / name))
        assert again.step_ns == pytest.approx(simulated["step_ns"], rel=tolerance)


def test_a_compiled_program_stays_as_it_stands(tmp_path: Path) -> None:
    """What a compiler has scheduled is not fused again; a program kept as a graph still is."""
    compiled = api.estimate(api.read(FIXTURES / "hlo" / "moe_all_to_all.hlo.txt"), "H100-SXM")
    assert compiled.granularity is None
    api.convert(STEP, tmp_path / "plain.json")
    kept = api.estimate(api.read(tmp_path / "plain.json"), "H100-SXM")
    assert kept.granularity == "fused"
    api.convert(STEP, tmp_path / "fused.json", granularity="fused")
    assert api.estimate(api.read(tmp_path / "fused.json"), "H100-SXM").granularity is None
    done = api.convert(STEP, tmp_path / "same.mlir", hardware="H100-SXM")
    assert done.conservation is not None
    assert done.conservation.before.ops == done.conservation.after.ops


def test_times_of_the_file_itself(tmp_path: Path) -> None:
    s = Sketch()
    first = s.add("compute", 2000)
    s.add("compute", 500, s.add("comm", 1000, first))
    api.write(Workload.spmd(s.build(), 4), tmp_path / "g.json")
    done = run(tmp_path / "g.json", "--json", tmp_path / "s.json", "--missing", "error")
    assert done.exit_code == 0, done.output
    document = validated(tmp_path / "s.json")
    assert (document["step_ns"], document["is_lower_bound"]) == (3500, False)
    assert (document["hardware"], document["estimator"]) == ("", "")
    assert "3.500 us per step, 4 ranks in 1 class" in done.stdout
    assert "communication exposed 1.000 us (28.6%)" in done.stdout


def test_missing_times_are_told_by_policy(tmp_path: Path) -> None:
    warned = run(UNKNOWN_TRIPS, "--hardware", "H100-SXM", "--json", tmp_path / "s.json")
    assert warned.exit_code == 0
    assert warned.stdout.startswith("at least ")
    assert "[simulate.assumed-trips]" in warned.stderr
    assert validated(tmp_path / "s.json")["is_lower_bound"] is True
    zero = run(UNKNOWN_TRIPS, "--hardware", "H100-SXM", "--missing", "zero")
    assert zero.exit_code == 0
    assert "at least" not in zero.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([UNKNOWN_TRIPS, "--hardware", "L4", "--missing", "error"], 4, "trip count known at run time only"),
        ([STEP, "--missing", "error"], 4, "no duration for"),
        ([UNKNOWN_OP, "--hardware", "L4", "--missing", "error"], 4, "no duration for"),
        (["absent.mlir"], 3, "no such file"),
        ([STEP, "--hardware", "H900"], 2, "H900"),
        ([STEP, "--hardware", "L4", "--estimator", "guess"], 2, "unknown estimator 'guess'"),
        ([STEP, "--from", "hlo"], 3, "hlo"),
        ([STEP, "--missing", "guess"], 2, "guess"),
        ([STEP, "--json", "absent/s.json"], 2, "absent"),
        ([], 2, "Missing argument"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(
    arguments: list[str | Path],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert message in re.sub(r"[\s│]+", " ", done.stderr)
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_many_ranks_are_one_row_each(tmp_path: Path) -> None:
    s = Sketch()
    s.add("compute", 5)
    done = api.simulate(Workload.spmd(s.build(), 10_000))
    api.write_simulation_json(done, tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_bytes()) == done.to_dict()
    rows = cast("list[dict[str, float]]", validated(tmp_path / "s.json")["ranks"])
    assert [row["rank"] for row in rows] == list(range(10_000))
    assert {row["finish_ns"] for row in rows} == {5}


def test_classes_that_do_not_wait_for_each_other_are_told(tmp_path: Path) -> None:
    graphs: list[OpGraph] = []
    for duration in (2000, 3000):
        s = Sketch()
        s.add("compute", duration)
        graphs.append(s.build())
    workload = Workload(name="two", classes=tuple(graphs), rank_class=np.array([0, 1], np.int32))
    done = api.simulate(workload)
    api.write_simulation_json(done, tmp_path / "s.json")
    rows = cast("list[dict[str, float]]", validated(tmp_path / "s.json")["ranks"])
    assert [row["finish_ns"] for row in rows] == [2000, 3000]


def test_a_profile_alone_takes_as_long_as_it_was_measured(tmp_path: Path) -> None:
    profile = FIXTURES / "profiles" / "nsys_two_processes.sqlite.gz"
    done = run(profile, "--json", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    first = "711 ns per step (3 recorded steps, a step every 1.000 us, span 3.296 us)"
    assert done.stdout.startswith(first)
    assert "host overhead" in done.stdout
    document = validated(tmp_path / "s.json")
    assert document["step_ns"] == pytest.approx(3296)  # two ranks, begun 1 ns apart
    codes = {each["code"] for each in cast("list[dict[str, str]]", document["diagnostics"])}
    assert codes >= {"measured-workload.delays", "measured-workload.profile-alone"}
    estimated = run(profile, "--hardware", "H100-SXM", "--json", tmp_path / "e.json")
    assert estimated.exit_code == 0, estimated.output
    told = cast("list[dict[str, str]]", validated(tmp_path / "e.json")["diagnostics"])
    assert "estimate.recorded-waits" in {each["code"] for each in told}


def test_ranks_that_differ_wait_and_that_is_told(tmp_path: Path) -> None:
    pipeline = FIXTURES / "chakra" / "pipeline_2x2"
    done = run(pipeline, "--json", tmp_path / "s.json")
    assert "waits for other ranks in messages: 300.000 us (33.3%)" in done.stdout
    assert "critical path of the job, through 3 ranks in sequence" in done.stdout
    document = cast("dict[str, Any]", validated(tmp_path / "s.json"))
    assert [(part["rank"], part["last_node"]) for part in document["critical_path"]] == [
        (0, "forward 1"), (2, "backward 1"), (0, "backward 1"),
    ]  # fmt: skip
    assert [rank["message_wait_ns"] for rank in document["ranks"]] == [300_000, 300_000, 100_000, 100_000]
    slow = run(pipeline, "--straggler", "3=2", "--jitter", "0.01", "--seed", "1")
    assert slow.exit_code == 0, slow.output
    assert "2 distinct rank behaviours; rank 0 finishes last" in slow.stdout
    alone = run(pipeline, "--alone")
    assert "waits for other ranks" not in alone.stdout
    assert run(pipeline, "--messages", "rendezvous").exit_code == 0


@pytest.mark.parametrize(
    "words",
    [["--straggler", "3=2", "--straggler", "3=4"], ["--straggler", "3=1e308"], ["--alone", "--seed", "3"],
     ["--straggler", "x=2"], ["--straggler", "9=2"], ["--alone", "--jitter", "0.1"], ["--seed", "3"],
     ["--jitter", "0.1", "--mode", "astra", "--system-config", "a", "--network-config", "b"],
     ["--alone", "--mode", "astra", "--system", "dgx-h100"]],
)  # fmt: skip
def test_options_of_ranks_that_make_no_sense_are_refused(words: list[str]) -> None:
    assert run(FIXTURES / "chakra" / "pipeline_2x2", *words).exit_code == 2


def test_help_lists_options_under_headings() -> None:
    shown = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    headings = re.findall(r"╭─ ([\w -]+?) ─+╮", shown.output)
    assert headings == [
        "Arguments", "Options", "Device and estimate", "System and network", "Ranks and order", "What if",
        "Output", "Input", "ASTRA-sim",
    ]  # fmt: skip
    loose = shown.output.split("─ Options ─")[1].split("─ Device and estimate ─")[0]
    assert re.findall(r"--[\w-]+", loose) == ["--help"]
