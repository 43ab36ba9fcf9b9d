"""Tools on the kit: Hespas passes all cases, and the defects of other tools are found."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from hespas.files.limits import untrusted
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.validators.conformance import AdapterName, ConformanceRun, ForeignTool, Kit, make_kit, run_kit


@cache
def kit() -> Kit:
    return make_kit()


def program(folder: Path, text: str) -> str:
    path = folder / "tool.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def ran(command: str, adapter: AdapterName, *names: str, timeout_s: float = 20.0) -> ConformanceRun:
    return run_kit(kit(), ForeignTool(command, adapter, timeout_s, 4 << 30), names)


def problems(run: ConformanceRun) -> dict[str, list[str]]:
    return {result.case: result.problems for result in run.results if result.problems}


def test_hespas_passes_all_cases() -> None:
    run = run_kit(kit())
    assert problems(run) == {}
    assert (run.number("passed"), run.number("failed"), run.number("skipped")) == (200, 0, 0)


def test_a_tool_that_accepts_everything_fails_what_it_has_to_refuse(tmp_path: Path) -> None:
    run = ran(program(tmp_path, ""), "exit-code", "roofline/*")
    assert set(problems(run)) == {
        f"roofline/{name}" for name in ("instant", "no-flops", "no-bytes", "zero-flops", "zero-bytes")
    }
    assert problems(run)["roofline/no-flops"] == ["exit code 0, expected another one than 0"]
    assert run.number("passed", "roofline") == 3


def test_the_check_of_a_command_line_is_a_tool_of_its_own() -> None:
    script = "from hespas.cli.validate import main; main()"
    command = f"{sys.executable} -c '{script}' check {{folder}} --profile {{profile}} --quiet"
    run = ran(command, "exit-code", "graph/cycle", "graph/chain", timeout_s=120.0)
    assert problems(run) == {}


READER = """
import json, sys
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    print(json.dumps({"nodes": 4} if data else None))
"""


def test_counts_of_each_file_are_compared(tmp_path: Path) -> None:
    tool = program(tmp_path, READER)
    names = ("frames/empty-file", "frames/no-node", "frames/unknown-attribute", "graph/wide")
    found = problems(ran(tool, "counts", *names))
    assert found == {
        "frames/no-node": ["trace.1.et: read as 4 nodes, expected to be refused"],
        "graph/wide": ["trace.0.et: nodes 4 (expected 203)"],
    }
    assert problems(ran(f"{tool} {{file}}", "counts", *names)) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import time; time.sleep(60)", "no end within 0.5 s"),
        ("import os; os.kill(os.getpid(), 11)", "crashes with SIGSEGV"),
        ("print('{]')", "output: JSON is malformed"),
        ("", "trace.0.et: refused, expected 4 nodes"),
    ],
    ids=["hangs", "crashes", "prints no JSON", "prints nothing"],
)
def test_what_a_reader_does_instead_of_reading(text: str, problem: str, tmp_path: Path) -> None:
    limit_s = 0.5 if "sleep" in text else 20.0
    run = ran(program(tmp_path, text), "counts", "frames/id-*", "frames/field-order", timeout_s=limit_s)
    assert problems(run)["frames/field-order"][0].startswith(problem)


CHAKRA = {
    "schema/protobuf/et_def_pb2.py": """
class GlobalMetadata: pass
class Node: pass
""",
    "src/third_party/utils/protolib.py": """
def openFileRd(path):
    return [[]] + [4, 5] if b"later" not in open(path, "rb").read() else None
def decodeMessage(stream, message):
    message.data_deps = message.ctrl_deps = message.attr = []
    message.duration_micros = 5
    return bool(stream.pop() if stream else False)
""",
}


def test_the_reader_of_chakra_is_called_in_its_own_python(tmp_path: Path) -> None:
    for name, text in CHAKRA.items():
        path = tmp_path / "chakra" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    site = tmp_path / "python"
    site.write_text(
        f'#!/bin/sh\\nshift\\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\\n'.replace("\\n", "\n")
    )
    site.chmod(0o755)
    found = problems(ran(str(site), "chakra", "frames/field-order"))
    assert found["frames/field-order"][0].startswith("trace.0.et: nodes 1 (expected 4), dependencies 0")


ASTRA_SIM = """
import sys
options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
network = open(options["network-configuration"]).read()
assert options["comm-group-configuration"] == "empty"
for rank in range(2):
    print(f"[x] sys[{rank}] finished, 38620 cycles, exposed communication 1 cycles.")
"""


def test_times_and_deadlocks_of_astra_sim_are_found(tmp_path: Path) -> None:
    tool = program(tmp_path, ASTRA_SIM)
    names = ("frames/field-order", "messages/deadlock", "messages/pair", "schema/0.0.1-*")
    run = ran(tool, "astra-sim", *names)
    assert problems(run) == {
        "messages/deadlock": ["exit code 0, 2 of 2 ranks finish, expected a failure"],
        "messages/pair": ["rank 0 finishes at 38,620 ns, expected 6,076 ns"],
    }
    assert run.number("skipped") == 3
    aware = "algorithms/all-reduce-direct-switch-aware"
    assert ran(tool, "astra-sim", aware).number("skipped") == 1
    assert ran(tool.replace("tool.py", "{backend}.py"), "astra-sim", aware).number("failed") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/nowhere/tool", "does not start: No such file"),
        ("tool {fiel}", "unknown placeholder {fiel}"),
        ("''", "`tool` is empty"),
        (" ", "`tool` is empty"),
    ],
)
def test_a_tool_that_cannot_run_is_wrong_usage(command: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ran(command, "exit-code", "frames/empty-file")


def test_nothing_to_run_and_untrusted_inputs_are_refused() -> None:
    with pytest.raises(UsageError, match="no case has a name like x"):
        run_kit(kit(), names=["x*"])
    with untrusted(cpu_s=600), pytest.raises(UnsupportedError, match="not allowed for untrusted"):
        ran("true", "exit-code", "frames/empty-file")
