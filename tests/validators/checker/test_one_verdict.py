"""Checker and simulation give the same verdict on Chakra traces for ASTRA-sim."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal, TypedDict

import pytest
from typer.testing import CliRunner

from hespas.api import simulate
from hespas.cli.validate import app
from hespas.converters import WriteOptions, load_format
from hespas.graph import Diagnostics, Severity, Workload
from hespas.graph.errors import HespasError
from hespas.simulator.astra import Backend
from hespas.validators.checker import RULES, CheckOptions, CheckResult, check
from tests.validators.checker.small_jobs import Steps, job_of

ORACLE = Path(__file__).parents[4] / "shared" / "data" / "astra_oracle_2"
CASES = sorted(path.parent for path in ORACLE.glob("*/run.json"))


class Recorded(TypedDict):
    backend: Backend
    num_queues_per_dim: int


class Expected(TypedDict):
    finished: bool
    finish_ns: list[int | None]


def checked(folder: Path, backend: Backend = "unaware", queues: int = 1) -> CheckResult:
    options = CheckOptions(
        system_config=folder / "system.json",
        network_config=folder / "network.yml",
        memory_config=folder / "memory.json",
        backend=backend,
        queues_per_dim=queues,
    )
    return check([folder], "astra-sim", options)


def finishes(folder: Path, backend: Backend = "unaware", queues: int = 1) -> list[int] | None:
    """Return the finish time of each rank [ns]; None if the simulation is rejected."""
    try:
        done = simulate(
            folder,
            mode="astra",
            system_config=folder / "system.json",
            network_config=folder / "network.yml",
            memory_config=folder / "memory.json",
            backend=backend,
            queues_per_dim=queues,
        )
    except HespasError:
        return None
    assert done.astra_statistics is not None
    found: list[int] = done.astra_statistics.finish_ns.tolist()
    return found


@pytest.mark.skipif(not CASES, reason="the second set of recorded runs of ASTRA-sim is not here")
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_recorded_runs_are_exact_and_have_one_verdict(case: Path) -> None:
    recorded: Recorded = json.loads((case / "run.json").read_text())
    expected: Expected = json.loads((case / "expected.json").read_text())
    backend, queues = recorded["backend"], recorded["num_queues_per_dim"]
    assert finishes(case, backend, queues) == (expected["finish_ns"] if expected["finished"] else None)
    assert checked(case, backend, queues).valid == expected["finished"]


SYSTEM = {
    "endpoint-delay": 10,
    "preferred-dataset-splits": 2,
    "local-mem-bw": 1600,
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter")},
}


def written(folder: Path, job: Workload, *, topology: str = "Ring", latency_ns: int = 500) -> Path:
    """Traces and configuration files of a job of two ranks."""
    entry = load_format("chakra")
    assert entry.write is not None
    entry.write(job, folder, WriteOptions(directory=True), Diagnostics())
    (folder / "system.json").write_text(json.dumps(SYSTEM))
    (folder / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
    network = f"topology: [{topology}]\nnpus_count: [2]\nbandwidth: [50]\nlatency: [{latency_ns}]\n"
    (folder / "network.yml").write_text(network)
    return folder


def unreceived() -> Workload:
    one, two = Steps(2), Steps(2)
    one.send(0, 1, size=4.0)
    two.compute()
    return job_of(one, two)


def talking() -> Workload:
    ranks = [Steps(2) for _ in range(2)]
    for steps in ranks:
        steps.coll(steps.compute())
    return job_of(*ranks)


def test_a_message_that_nobody_receives_is_a_warning_where_the_run_finishes(tmp_path: Path) -> None:
    folder = written(tmp_path / "job", unreceived())
    assert finishes(folder) == [500, 1000]
    result = checked(folder)
    assert result.valid
    [found] = [each for each in result.violations if each.code == "ET015"]
    assert found.severity is Severity.WARNING
    assert found.message.endswith("(ASTRA-sim finishes with this configuration)")
    assert any(each.code == "check.finishes" for each in result.diagnostics)
    assert not check([folder], "astra-sim").valid, "without a configuration the rules decide"


@pytest.mark.parametrize(
    ("code", "backend", "latency_ns", "topology"),
    [("ET035", "unaware", 0, "Ring"), ("ET032", "aware", 500, "Ring"), ("ET035", "aware", 500, "Switch")],
)
def test_what_stops_the_run_is_an_error(
    tmp_path: Path, code: str, backend: Backend, latency_ns: int, topology: Literal["Ring", "Switch"]
) -> None:
    folder = written(tmp_path / "job", unreceived(), topology=topology, latency_ns=latency_ns)
    assert finishes(folder, backend) is None
    result = checked(folder, backend)
    assert not result.valid
    assert code in {each.code for each in result.violations if each.severity is Severity.ERROR}


def test_backend_and_queues_are_options_of_the_command(tmp_path: Path) -> None:
    folder = written(tmp_path / "job", talking())
    command = [
        "check", str(folder), "--profile", "astra-sim", "--system-config", str(folder / "system.json"),
        "--network-config", str(folder / "network.yml"), "--queues-per-dim", "2",
    ]  # fmt: skip
    assert CliRunner().invoke(app, command).exit_code == 0
    refused = CliRunner().invoke(app, [*command, "--backend", "aware"])
    assert refused.exit_code == 1
    assert "error ET032" in refused.output


def test_a_folder_with_some_of_the_ranks_cannot_be_run(tmp_path: Path) -> None:
    entry, folder = load_format("chakra"), tmp_path / "job"
    assert entry.write is not None
    entry.write(talking(), folder, WriteOptions(ranks=range(1), directory=True), Diagnostics())
    result = check([folder], "astra-sim")
    assert not result.valid
    [found] = [each for each in result.violations if each.severity is Severity.ERROR]
    assert found.code == "ET022"
    assert found.message == "only 1 of 2 ranks are given: ASTRA-sim runs whole jobs only"
    assert check([folder], "chakra").valid


def test_codes_of_rules_are_unique() -> None:
    assert [code for code, count in Counter(rule.code for rule in RULES).items() if count > 1] == []
