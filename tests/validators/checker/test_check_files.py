"""Checks of files: partial sets, unreadable inputs, the JSON document, and ASTRA-sim's own cases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from hespas.cli.validate import app
from hespas.converters import WriteOptions, load_format
from hespas.graph import Diagnostics, StridedGroups, Workload
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.checker import CheckOptions, check, check_json, check_workload
from tests.validators.checker.small_jobs import Steps, job_of

REPOSITORY = Path(__file__).parents[3]
ORACLE = REPOSITORY.parent / "shared" / "data" / "astra_oracle"
SCHEMA = json.loads((REPOSITORY / "hespas" / "schemas" / "check.schema.json").read_text())
CASES = sorted(path.parent for path in ORACLE.glob("*/w.0.et"))


def tensor_parallel() -> Workload:
    """Four ranks in two groups with a message around the ring."""
    ranks = [Steps(4) for _ in range(4)]
    for rank, steps in enumerate(ranks):
        first = steps.compute()
        steps.coll(first, groups=StridedGroups.from_mesh((2, 2), (1,)))
        steps.send(rank, (rank + 1) % 4, first, tag=3)
        steps.recv((rank - 1) % 4, rank, first, tag=3)
    return job_of(*ranks)


def written(job: Workload, folder: Path) -> Path:
    entry = load_format("chakra")
    assert entry.write is not None
    entry.write(job, folder, WriteOptions(), Diagnostics())
    return folder


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return written(tensor_parallel(), tmp_path / "job")


def test_written_traces_pass(traces: Path) -> None:
    result = check([traces], "astra-sim")
    assert result.violations == ()
    assert [(entry.format, entry.num_ranks, entry.complete) for entry in result.inputs] == [
        ("chakra", 4, True)
    ]


def rank_file(traces: Path, rank: int) -> Path:
    return next(traces.glob(f"*.{rank}.et"))


def test_one_file_of_a_set_is_one_rank(traces: Path) -> None:
    result = check([rank_file(traces, 2)], "astra-sim")
    assert result.valid
    assert not result.inputs[0].complete
    note = next(entry for entry in result.diagnostics if entry.code == "check.single-rank")
    assert "ET015" in note.message
    assert "ET020" in note.message


def test_a_file_without_a_rank_in_its_name_says_its_rank_itself(tmp_path: Path) -> None:
    entry = load_format("chakra")
    assert entry.write is not None
    job = tensor_parallel()
    entry.write(job, tmp_path / "lone.et", WriteOptions(ranks=range(2, 3)), Diagnostics())
    result = check([tmp_path / "lone.et"], "astra-sim")
    assert not result.inputs[0].complete
    # As rank 0 it would send another rank's messages: ET014.
    assert [each.code for each in result.violations] == ["ET022"]
    assert check([tmp_path / "lone.et"], "chakra").violations == ()


def test_each_path_is_checked_by_itself(traces: Path) -> None:
    result = check([rank_file(traces, 0), rank_file(traces, 1), traces])
    assert [entry.complete for entry in result.inputs] == [False, False, True]


def test_missing_rank_file(traces: Path) -> None:
    rank_file(traces, 1).unlink()
    result = check([traces], "astra-sim")
    assert "ET022" in result.counts
    assert result.exit_code == 1


def test_truncated_file_is_told_with_its_code_and_place(traces: Path) -> None:
    file = rank_file(traces, 3)
    file.write_bytes(file.read_bytes()[:-3])
    result = check([traces], "chakra")
    assert not result.valid
    broken = [violation for violation in result.violations if violation.code == "ET001"]
    assert broken
    assert "byte" in broken[0].message
    assert broken[0].path.endswith(".3.et")


@pytest.mark.parametrize("content", [b"", b"\x00junk" * 30])
def test_unreadable_input_is_a_violation_and_exit_code_3(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.0.et"
    file.write_bytes(content)
    result = check([file])
    assert not result.valid
    assert result.exit_code in (1, 3)
    assert len(result.violations) >= 1


def test_the_remedy_names_the_options_of_commands(tmp_path: Path) -> None:
    unknown = tmp_path / "notes.txt"
    unknown.write_text("hello\n")
    done = CliRunner().invoke(app, ["check", str(unknown)])
    assert done.exit_code == 3
    assert "state the format to see what is wrong: --from astra-text" in " ".join(done.stdout.split())


def test_unreadable_input_does_not_hide_the_others(tmp_path: Path, traces: Path) -> None:
    result = check([tmp_path / "missing.et", traces])
    assert result.exit_code == 3
    assert len(result.inputs) == 1
    assert "missing.et" in result.violations[0].path


PROFILE = Path(__file__).parents[3] / "fixtures" / "recorded" / "train-small.xplane.pb.gz"


def test_a_profile_is_checked_as_the_work_that_was_measured() -> None:
    done = check([PROFILE])
    assert (done.valid, done.inputs[0].format) == (True, "xplane")
    assert done.inputs[0].num_nodes > 1000


def test_what_is_unsupported_is_not_checked_and_not_said_to_be_wrong(tmp_path: Path, traces: Path) -> None:
    table = tmp_path / "table.csv"  # without starts
    table.write_text("hardware,op,op_class,kernel,rank,stream,duration_ns\nH100-SXM,mm,contraction,k,0,7,9\n")
    for paths, verdict in (([table], "not checked"), ([traces, table], "not all checked")):
        done = CliRunner().invoke(app, ["check", *map(str, paths)])
        assert done.exit_code == 4
        assert "unreadable" not in done.output
        assert "a table needs columns start_ns" in done.stdout
        assert done.stdout.splitlines()[-1] == verdict


def test_nothing_to_check_is_wrong_usage() -> None:
    with pytest.raises(UsageError):
        check([])


def test_rules_that_need_a_configuration_say_that_they_were_skipped(traces: Path) -> None:
    notes = {entry.code: entry.message for entry in check([traces], "astra-sim").diagnostics}
    assert "ET013" in notes["check.no-configuration"]
    assert "ET025" in notes["check.no-configuration"]
    assert "check.no-configuration" not in {entry.code for entry in check([traces], "chakra").diagnostics}


def test_reader_and_rules_report_a_fault_once(tmp_path: Path) -> None:
    steps = Steps()
    for place in range(3):
        steps.compute(*([place - 1] if place else []))
    file = written(Workload.spmd(steps.build(), 1), tmp_path / "one.0.et")
    data = file.read_bytes()
    # Field 1 of the last node: its id 2 becomes another 1, which its dependency then names as well.
    at = data.index(b"\x08\x02\x12\x07compute")
    file.write_bytes(data[: at + 1] + b"\x01" + data[at + 2 :])
    result = check([file], "chakra")
    assert result.counts == {"ET005": 1, "ET007": 1}


def test_document_follows_its_schema(tmp_path: Path, traces: Path) -> None:
    steps = Steps()
    steps.builder.set_id(steps.compute(ns=0), 2**64 - 1)
    steps.coll(steps.compute(), groups=[[0, 7]])
    broken = check_workload(Workload.spmd(steps.build(), 2), "astra-sim")
    for result in (broken, check([traces, tmp_path / "missing"], "astra-sim")):
        document = json.loads(check_json(result))
        jsonschema.validate(document, SCHEMA)
        assert document["schema"] == "hespas.check/1"
        assert document["valid"] is result.valid
    assert {entry["code"] for entry in json.loads(check_json(broken))["violations"]} >= {"ET019"}


@pytest.mark.skipif(not CASES, reason="the ASTRA-sim cases are not beside this checkout")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_astra_sim_finished_has_no_error(case: Path) -> None:
    run = json.loads((case / "run.json").read_text())
    options = CheckOptions(
        system_config=case / "system.json",
        network_config=case / "network.yml",
        backend="aware" if run["backend"] == "aware" else "unaware",
    )
    result = check([case], "astra-sim", options)
    assert result.valid, result.violations
    assert result.inputs[0].complete
    codes = {violation.code for violation in result.violations}
    assert codes <= {"ET010", "ET013", "ET023", "ET030", "ET031"}


@pytest.mark.skipif(not CASES, reason="the ASTRA-sim cases are not beside this checkout")
def test_case_with_a_swapped_rank_is_caught(tmp_path: Path) -> None:
    """Two ranks of a pipeline exchanged: messages no longer fit."""
    copy = tmp_path / "pp"
    shutil.copytree(ORACLE / "pp-8", copy)
    one, other = copy / "w.2.et", copy / "w.5.et"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    result = check([copy], "astra-sim")
    assert not result.valid
    assert "ET014" in result.counts


def test_broken_configuration_is_an_error_of_its_own(tmp_path: Path, traces: Path) -> None:
    file = tmp_path / "system.json"
    file.write_text("{")
    with pytest.raises(FormatError, match=r"system\.json"):
        check([traces], "astra-sim", CheckOptions(system_config=file))
