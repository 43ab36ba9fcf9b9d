"""Inputs that readers accept are written or rejected, and written files read back."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from random import Random

import pytest

from hespas import api
from hespas.converters import WriteOptions, load_format
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import HespasError, InvariantError
from tests.fuzzing.law import (
    WRITTEN,
    Json,
    Place,
    broken_laws,
    document_of,
    flattened,
    mutated_document,
    mutated_workload,
    places,
    read_document,
    read_strictly,
    used,
)
from tests.fuzzing.stages import DEVICES, ESTIMATORS

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOUND = Path(__file__).parent / "found"
FEW, MANY = 12, 4_000
EVERY = 8
"""Of so many workloads one is written as StableHLO too, which takes as long as all else together."""
SMALL = (
    "hlo/while_unknown.hlo.txt", "hlo/hand_control.hlo.txt", "hlo/hand_groups.hlo.txt",
    "hlo/scan_nested.hlo.txt",
    "hlo/pipeline_ring.hlo.txt", "hlo/branches.hlo.txt", "hlo/collectives_shard_map.hlo.txt",
    "hlo/dot_fp8.hlo.txt", "hlo/hand_gpu_async.hlo.txt", "stablehlo/hand_loops.mlir",
    "stablehlo/hand_async.mlir", "stablehlo/hand_host.mlir",
)  # fmt: skip


@lru_cache(maxsize=1)
def _programs() -> tuple[Workload, ...]:
    found = (api.read(FIXTURES / name) for name in SMALL)
    return tuple(each for each in found if isinstance(each, Workload))


def _documents(name: str, folder: Path) -> list[Json]:
    flat = load_format(name).flat
    return [document_of(flattened(each) if flat else each, name, folder) for each in _programs()]


def _accepted(kind: str, number: int, seeds: tuple[list[Json], list[Place]], folder: Path) -> Workload | None:
    """Return the workload in the changed seed of a number; None if the reader rejects it."""
    rng = Random(number)
    documents, others = seeds
    if kind != "op-graph-arrow":
        return read_document(mutated_document(rng.choice(documents), rng, others), kind, folder)
    changed = mutated_workload(rng.choice(_programs()), rng)
    form = load_format(kind)
    assert form.write is not None
    if changed is None:
        return None
    path = folder / "mutant.arrow"
    try:
        form.write(changed, path, WriteOptions(name=path.name), Diagnostics())
    except InvariantError:
        raise
    except HespasError:
        return None
    return read_strictly(path, kind)


def _broken(kind: str, numbers: range, folder: Path, targets: tuple[str, ...]) -> tuple[list[str], int]:
    documents = [] if kind == "op-graph-arrow" else _documents(kind, folder)
    seeds = (documents, [place for each in documents for place in places(each) if isinstance(place[1], str)])
    broken: list[str] = []
    accepted = 0
    for number in numbers:
        place = folder / str(number)
        (place / "trips").mkdir(parents=True)
        workload = _accepted(kind, number, seeds, place)
        if workload is not None:
            accepted += 1
            used(workload, number)
            all_targets = (*targets, "stablehlo") if accepted % EVERY == 1 else targets
            broken += [
                f"{number}: {law}" for law in broken_laws(workload, kind, place / "trips", all_targets)
            ]
    return broken, accepted


@pytest.mark.parametrize("kind", ["op-graph", "op-graph-arrow", "chakra-json"])
def test_what_is_accepted_comes_back(kind: str, tmp_path: Path) -> None:
    broken, accepted = _broken(kind, range(FEW), tmp_path, WRITTEN)
    assert broken == []
    assert accepted > FEW // 10


@pytest.mark.parametrize(
    "name",
    [
        "op-graph-493",
        "op-graph-10243",
        "op-graph-arrow-163",
        "op-graph-arrow-1686",
        "op-graph-arrow-10167",
        "op-graph-arrow-10266",
        "chakra-json-331",
    ],
)
def test_what_was_found_comes_back(name: str, tmp_path: Path) -> None:
    """Each once broke the law. It is asked of every estimator, with and without a simulation by its times."""
    kind, _, _ = name.rpartition("-")
    workload = read_strictly(FOUND / name, kind)
    assert workload is not None
    for turn in range(2 * len(ESTIMATORS)):
        used(workload, turn * len(DEVICES) + turn % len(DEVICES))
    assert list(broken_laws(workload, kind, tmp_path, (*WRITTEN, "stablehlo"))) == []


@pytest.mark.parametrize("kind", ["op-graph", "op-graph-arrow", "chakra-json"])
def test_much_of_what_is_accepted_comes_back(kind: str, tmp_path: Path) -> None:
    assert _broken(kind, range(FEW, MANY), tmp_path, WRITTEN)[0] == []


@pytest.mark.parametrize("name", SMALL)
def test_programs_come_back(name: str, tmp_path: Path) -> None:
    workload = api.read(FIXTURES / name)
    assert isinstance(workload, Workload)
    origin = "stablehlo" if name.endswith(".mlir") else "hlo"
    assert list(broken_laws(workload, origin, tmp_path, (*WRITTEN, "stablehlo"))) == []
