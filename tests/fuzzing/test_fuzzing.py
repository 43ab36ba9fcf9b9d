"""A few damaged inputs of each reader; ``make fuzz`` tries many. What was once found stays here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import pytest

from hespas import api
from hespas.converters import format_names, load_format
from hespas.converters.registry import BUILTIN
from tests.fuzzing import worker
from tests.fuzzing.mutate import mutated
from tests.fuzzing.seeds import NOT_FUZZED, READERS, seeds_of
from tests.fuzzing.worker import fuzz, judge

FEW, MANY = 150, 5_000
FOUND = Path(__file__).parent / "found"


@pytest.mark.parametrize("name", list(READERS))
def test_damage_ends_in_a_message(name: str) -> None:
    outcome = fuzz(READERS[name], seeds_of(name), range(FEW), 0)
    assert [(failure.number, failure.what) for failure in outcome.failures] == []
    assert outcome.answers.total() == FEW


@pytest.mark.slow
@pytest.mark.parametrize("name", list(READERS))
def test_much_damage_ends_in_messages(name: str) -> None:
    outcome = fuzz(READERS[name], seeds_of(name), range(MANY), 2)
    assert [(failure.number, failure.what) for failure in outcome.failures] == []


@pytest.mark.parametrize("name", list(READERS))
def test_seeds_are_read(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    path = tmp_path / f"seed{reader.suffix}"
    for seed in seeds_of(name)[:5]:
        path.write_bytes(seed)
        api.read(path, format=reader.format)


def test_every_readable_format_is_fuzzed_or_has_a_reason_not_to_be() -> None:
    readable = {name for name in format_names() if name in BUILTIN and load_format(name).read}
    fuzzed = {reader.format for reader in READERS.values()}
    assert readable - fuzzed == set(NOT_FUZZED)
    assert not fuzzed & set(NOT_FUZZED)


def _busy(path: Path, **_: object) -> None:
    del path
    while True:
        try:
            sum(range(1_000))
        except Exception:  # as careless code does
            continue


def _crash(path: Path, **_: object) -> None:
    del path
    os.kill(os.getpid(), signal.SIGSEGV)


def _killed(path: Path, **_: object) -> None:
    del path
    os.kill(os.getpid(), signal.SIGKILL)


def _native_hang(path: Path, **_: object) -> None:
    del path
    sum(repeat(0))  # never looks for signals


@pytest.mark.parametrize(
    ("what", "name", "fails"),
    [
        (_busy, "stablehlo-bytecode", True),
        (_crash, "stablehlo-bytecode", False),
        (_killed, "stablehlo-bytecode", True),
        (_native_hang, "stablehlo-bytecode", False),
        (_crash, "hlo-text", True),
    ],
)
def test_only_what_the_trial_process_contains_is_excused(
    what: Callable[..., None], name: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "read", what)
    if what is _native_hang:
        monkeypatch.setattr(worker, "HARD_LIMIT_S", 2.0)
    outcome = fuzz(READERS[name], (b"seed",), range(1), 0)
    assert bool(outcome.failures) == fails, outcome


def test_what_is_read_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(value: object, name: str) -> None:
        raise ZeroDivisionError(f"{name} {value is None}")

    monkeypatch.setattr(api, "summarise", fail)
    answer = judge(seeds_of("chakra")[0], READERS["chakra"], tmp_path)
    assert answer == "FAILURE: ZeroDivisionError: chakra False"


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
