"""A few damaged inputs of each reader; ``make fuzz`` tries many. What was once found stays here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hespas import api
from tests.fuzzing.mutate import mutated
from tests.fuzzing.seeds import READERS, seeds_of
from tests.fuzzing.worker import fuzz, judge

FEW, MANY = 150, 5_000
FOUND = Path(__file__).parent / "found"


@pytest.mark.parametrize("name", [name for name in READERS if name != "stablehlo-bytecode"])
def test_damage_ends_in_a_message(name: str) -> None:
    outcome = fuzz(READERS[name], seeds_of(name), range(FEW), 0)
    assert [(failure.number, failure.what) for failure in outcome.failures] == []
    assert outcome.answers.total() == FEW


@pytest.mark.slow
@pytest.mark.parametrize("name", list(READERS))
def test_much_damage_ends_in_messages(name: str) -> None:
    count = MANY if name != "stablehlo-bytecode" else 200
    outcome = fuzz(READERS[name], seeds_of(name), range(count), 2)
    assert [(failure.number, failure.what) for failure in outcome.failures] == []


@pytest.mark.parametrize("name", list(READERS))
def test_seeds_are_read(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    path = tmp_path / f"seed{reader.suffix}"
    for seed in seeds_of(name)[:5]:
        path.write_bytes(seed)
        api.read(path, format=reader.format)


def test_damage_is_the_same_every_time_and_mostly_new() -> None:
    seeds = seeds_of("op-graph")
    made = [mutated(seeds, number, 3) for number in range(50)]
    assert made == [mutated(seeds, number, 3) for number in range(50)]
    assert len({*made} - {*seeds}) > 45


@pytest.mark.parametrize("path", sorted(FOUND.glob("*")), ids=lambda path: path.name)
def test_what_was_found_ends_in_a_message(path: Path, tmp_path: Path) -> None:
    name = path.name.rpartition("-")[0]
    answer = judge(path.read_bytes(), READERS[name], tmp_path)
    assert not answer.startswith("FAILURE"), answer
