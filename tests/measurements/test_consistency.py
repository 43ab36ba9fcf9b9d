"""Recordings that contradict themselves or each other are reported by every command that reads them."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import hespas
from hespas.graph import Diagnostics
from hespas.graph.errors import HespasError
from hespas.measurements.consistency import JOB_RULES, RECORDING_RULES
from hespas.validators.checker import RULES
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto
from tests.processes import run_command

FIXTURES = Path(__file__).parents[2] / "fixtures"
KERNELS, CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
FAULTS = {
    "PR001": [f"INSERT INTO {KERNELS} SELECT * FROM {KERNELS}"],
    "PR002": [f"UPDATE {KERNELS} SET start = -3000000000 WHERE correlationId = 102"],
    "PR003": [f"UPDATE {KERNELS} SET start = start - 150 WHERE correlationId = 106"],
    "PR004": [f"UPDATE {CALLS} SET start = start + 600, end = end + 600 WHERE correlationId = 105"],
    "PR005": [f"UPDATE {CALLS} SET correlationId = 102 WHERE correlationId = 101"],
}
"""By code: statements that make a recording of Nsight Systems contradict itself."""


def found_by(ask: Callable[[Diagnostics], object]) -> set[str]:
    """Return the codes of recordings that a function reports."""
    diagnostics = Diagnostics()
    with suppress(HespasError):  # a set that cannot run is refused after the report
        ask(diagnostics)
    return {code for code in diagnostics.counts() if code.startswith("PR")}


def ways(path: Path, out: Path) -> dict[str, Callable[[Diagnostics], object]]:
    """Return the functions of the commands that read a recording or a folder of them."""
    return {
        "analyze": lambda found: hespas.analyze(path, diagnostics=found),
        "convert": lambda found: hespas.convert(
            path, out / "out.json", target_format="op-graph", diagnostics=found, overwrite=True
        ),
        "simulate": lambda found: hespas.simulate(path, diagnostics=found),
        "read": lambda found: hespas.read(path, diagnostics=found),
    }


def checked_codes(path: Path) -> set[str]:
    """Return the codes of recordings among the violations of the checker."""
    return {each.code for each in hespas.check(path).details.violations if each.code.startswith("PR")}


@pytest.mark.parametrize("code", FAULTS)
def test_a_recording_that_contradicts_itself_is_reported_by_every_command(code: str, tmp_path: Path) -> None:
    path = tmp_path / "recording.sqlite"
    path.write_bytes(gzip.decompress((FIXTURES / "profiles" / "nsys_two_processes.sqlite.gz").read_bytes()))
    with closing(sqlite3.connect(path)) as connection:
        for statement in FAULTS[code]:
            connection.execute(statement)
        connection.commit()
    for name, ask in ways(path, tmp_path).items():
        assert code in found_by(ask), name
    assert code in checked_codes(path)
    shown = run_command("hespas", "view", path)
    assert code in shown.stderr, shown.stderr


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Recording of a rank: an all-reduce for each of ``elements``."""

    number: int
    world: int = 3
    elements: Sequence[int] = (4096, 4096, 4096)
    at_us: float = 0.0


def write_rank(folder: Path, rank: Rank) -> None:
    """Write a rank's recording of all-reduces over all ranks of the job."""
    events: list[Json] = []
    for place, elements in enumerate(rank.elements):
        start = rank.at_us + 100.0 * place
        stated: Json = {
            "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements,
            "dtype": "Float", "Group size": 3, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]",
        }  # fmt: skip
        events += [host("c10d::allreduce_", start, 9, place + 1), launch(start + 2, place)]
        events.append(kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", start + 20, 50, place, stated))
    info: Json = {"rank": rank.number, "world_size": rank.world, "backend": "nccl"}
    write_kineto(
        folder / f"rank{rank.number}.json",
        events,
        distributedInfo=info,
        baseTimeNanoseconds=1_700_000_000_000_000_000,
    )


SETS: dict[str, tuple[list[Rank], set[str]]] = {
    "sound": ([Rank(number=0), Rank(number=1), Rank(number=2)], set()),
    "a rank missing": ([Rank(number=0), Rank(number=2)], {"PR010"}),
    "other world sizes": (
        [Rank(number=0), Rank(number=1, world=2), Rank(number=2, world=8)],
        {"PR010", "PR011"},
    ),
    "other numbers": ([Rank(number=0), Rank(number=1, elements=[4096] * 2), Rank(number=2)], {"PR012"}),
    "other sizes": ([Rank(number=0), Rank(number=1), Rank(number=2, elements=[4096, 4096, 8])], {"PR012"}),
    "other order": (
        [Rank(number=0), Rank(number=1, elements=[1, 2, 3]), Rank(number=2, elements=[3, 2, 1])],
        {"PR012"},
    ),
    "clocks apart": ([Rank(number=0), Rank(number=1), Rank(number=2, at_us=11 * 86_400e6)], {"PR013"}),
}


@pytest.mark.parametrize("name", SETS)
def test_recordings_that_cannot_be_of_one_job_are_reported_by_every_command(
    name: str, tmp_path: Path
) -> None:
    ranks, expected = SETS[name]
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in ranks:
        write_rank(folder, rank)
    for way, ask in ways(folder, tmp_path).items():
        assert found_by(ask) == expected, way
    assert checked_codes(folder) == expected


@pytest.mark.parametrize(
    "name", ["rescale/gloo2", "graph_replay/decode_mi300x", "graph_replay/piecewise_h100"]
)
def test_recorded_folders_are_sound(name: str, tmp_path: Path) -> None:
    for way, ask in ways(FIXTURES / name, tmp_path).items():
        assert found_by(ask) == set(), way


@pytest.mark.parametrize("path", sorted((FIXTURES / "profiles").iterdir()), ids=lambda path: path.name)
def test_single_recordings_are_sound(path: Path) -> None:
    assert found_by(lambda found: hespas.read(path, diagnostics=found)) == set()


def test_rules_of_recordings_are_in_the_table() -> None:
    assert {rule.code for rule in RULES if rule.code.startswith("PR")} == {*RECORDING_RULES, *JOB_RULES}
