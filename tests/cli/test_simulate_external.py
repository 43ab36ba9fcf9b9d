"""``hespas simulate --simulator astra-sim``: results of another simulator next to those of Hespas.

The program here is a script that prints what ASTRA-sim 518bd51 prints; runs of the real one are recorded in
``tests/simulator/astra/test_oracle.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli.main import app
from hespas.simulator.astra import external

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "fixtures" / "chakra" / "pipeline_2x2"
SYSTEMS = ROOT / "fixtures" / "astra_sim"
CONFIGS = ("--system-config", SYSTEMS / "system.json", "--network-config", SYSTEMS / "network.yml")

PROGRAM = """#!{python}
import json, os, sys, time
given = dict(each[2:].split("=", 1) for each in sys.argv[1:])
json.load(open(given["system-configuration"])), json.load(open(given["remote-memory-configuration"]))
json.load(open(given["comm-group-configuration"]))
assert given["num-queues-per-dim"] == "2" or given["num-queues-per-dim"] == "1"
prefix = given["workload-configuration"]
rank = 0
while os.path.exists(f"{{prefix}}.{{rank}}.et"):
    finish = {finishes}[rank]
    if finish:
        stamp = "[2026-03-25 12:00:00.000]"
        print(f"{{stamp}} [workload] [info] sys[{{rank}}] finished, {{finish}} cycles, "
              f"exposed communication {{finish - 600000}} cycles.")
        print(f"{{stamp}} [statistics] [info] sys[{{rank}}], Wall time: {{finish}}")
        print(f"{{stamp}} [statistics] [info] sys[{{rank}}], GPU time: 600000")
        print(f"{{stamp}} [statistics] [info] sys[{{rank}}], Average compute utilization: 12.500%")
    rank += 1
assert rank == 4, rank
print("a word before the end", file=sys.stderr)
{more}
"""


def program(folder: Path, finishes: list[int], more: str = "") -> Path:
    path = folder / "AstraSim_Analytical_Congestion_Unaware"
    path.write_text(PROGRAM.format(python=sys.executable, finishes=finishes, more=more), encoding="utf-8")
    path.chmod(0o755)
    return path


def run(binary: Path, *arguments: str | Path) -> Result:
    given = (TRACES, "--simulator", "astra-sim", "--astra-bin", binary, *CONFIGS, *arguments)
    return CliRunner().invoke(app, ["simulate", *(str(each) for each in given)])


def ours() -> list[int]:
    done = api.simulate(TRACES, mode="astra", system_config=CONFIGS[1], network_config=CONFIGS[3])
    assert done.astra_statistics is not None
    found: list[int] = done.astra_statistics.finish_ns.tolist()
    return found


def test_both_answers_stand_side_by_side(tmp_path: Path) -> None:
    finishes = ours()
    finishes[3] *= 2
    done = run(program(tmp_path, finishes), "--json", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "s.json").read_text())
    external = document["external"]
    assert [row["finish_ns"] for row in external["ranks"]] == finishes
    assert [row["exposed_comm_ns"] for row in external["ranks"]] == [each - 600_000 for each in finishes]
    assert [row["compute_ns"] for row in external["ranks"]] == [600_000] * 4
    assert [row["comm_ns"] for row in external["ranks"]] == [None] * 4
    assert (external["differing_ranks"], external["exit_code"]) == (1, 0)
    assert document["mode"] == "astra"
    told = next(line for line in done.stdout.splitlines() if line.startswith("ASTRA-sim"))
    assert "-37.02%" in told
    assert told.endswith("1 of 4")


def test_ranks_that_do_not_finish_are_counted_whatever_the_exit_code_says(tmp_path: Path) -> None:
    finishes = ours()
    finishes[2] = 0
    done = run(program(tmp_path, finishes))
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert "ASTRA-sim finished 3 of 4 ranks (exit code 0); its last output: a word before the end" in text


def test_a_crash_shows_what_it_said(tmp_path: Path) -> None:
    done = run(program(tmp_path, [0] * 4, 'sys.exit("terminate called: no key")'))
    assert done.exit_code == 1
    assert "finished 0 of 4 ranks (exit code 1)" in " ".join(done.output.split())
    assert "terminate called: no key" in " ".join(done.output.split())


def test_one_that_never_ends_is_stopped(tmp_path: Path) -> None:
    done = run(program(tmp_path, [0] * 4, "time.sleep(60)"), "--astra-timeout", "2")
    assert done.exit_code == 1
    assert "it was stopped after 2 s" in " ".join(done.output.split())


def test_one_that_never_stops_talking_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_MOST_LOG_BYTES", 100_000)
    done = run(program(tmp_path, [0] * 4, 'while True: print("on " * 100, flush=True)'))
    assert done.exit_code == 1
    assert "stopped when it had printed 100,000 bytes" in " ".join(done.output.split())


def test_figures_that_are_none_are_left_out(tmp_path: Path) -> None:
    more = (
        'print("sys[0], Comm time: 99999999999999999999")\n'
        'print("sys[1], Average memory utilization: ..%")\nprint("y" * 200_000)'
    )
    done = run(program(tmp_path, ours(), more), "--json", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    ranks = json.loads((tmp_path / "s.json").read_text())["external"]["ranks"]
    assert [row["comm_ns"] for row in ranks] == [None] * 4


def test_its_process_groups_are_those_of_the_trace(tmp_path: Path) -> None:
    """Queues and groups are passed on: the program asserts them."""
    done = run(program(tmp_path, ours()), "--queues-per-dim", "2")
    assert done.exit_code == 0, done.output


PYTHON = ("--simulator", "astra-sim", "--astra-bin", sys.executable)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--simulator", "astra-sim", *CONFIGS), "--simulator astra-sim requires --astra-bin"),
        (("--astra-bin", TRACES, *CONFIGS), "add --simulator astra-sim"),
        (("--simulator", "astra-sim", "--astra-bin", TRACES, *CONFIGS), "not an executable file"),
        ((*PYTHON, "--astra-timeout", "0", *CONFIGS), "--astra-timeout 0"),
        (PYTHON, "mode astra needs --system-config"),
    ],
)  # fmt: skip
def test_wrong_requests(arguments: tuple[str | Path, ...], told: str) -> None:
    done = CliRunner().invoke(app, ["simulate", str(TRACES), *(str(each) for each in arguments)])
    assert (done.exit_code, told in " ".join(done.output.split())) == (2, True), done.output
