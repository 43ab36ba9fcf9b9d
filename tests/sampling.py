"""Selection of the tests of a run by value per second.

``pytest`` runs everything, which takes hours. ``pytest --sample SECONDS`` runs the most valuable cases that
take so many seconds of one core. ``pytest --sample SECONDS --draw MORE --seed TEXT`` runs instead a part of
the others, about ``MORE`` seconds long; the seed, such as a commit, decides the draw, so that a failure
repeats.

The first case of a test function protects most, and each further case less: case ``k`` has the value
``1 / (1 + k) ** 2``. Its price is its time in ``tests/seconds.json``, or else the mean time of the function's
cases. ``python -m tests.sampling JUNIT.xml ...`` updates the file from runs with ``--junitxml``.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

__all__ = ["SECONDS", "Case", "Sampling", "cases_of", "drawn", "main", "sampled", "spread"]

ROOT = Path(__file__).parents[1]
SECONDS = ROOT / "tests" / "seconds.json"
"""Mean seconds per case of functions that take long, and the seconds of cases that differ much from it."""

_SHORT_S = 0.005
"""Price of a case of a function that is not in the file."""
_LONGEST_S = 2.0
"""Mean time above which a sample may leave a function out as a whole."""
_ALWAYS = ("tests/test_architecture.py", "tests/test_peer_traps.py", "tests/agreement/")
"""Modules of which every sample contains each function, however long it takes."""


@dataclass(frozen=True, slots=True)
class Case:
    """Case of a test function: its position among all tests, price and value."""

    index: int
    seconds: float
    value: float
    is_certain: bool
    """True for a case that every sample contains."""

    @property
    def worth(self) -> float:
        """Value per second."""
        return self.value / self.seconds


def spread(count: int) -> list[int]:
    """Return the numbers below ``count`` in an order whose beginnings are spread evenly."""
    bits = max(count - 1, 1).bit_length()
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in reversed_bits if number < count]


def cases_of(names: Sequence[str], seconds: Mapping[str, float]) -> list[Case]:
    """Return the cases of tests by their node ids. ``seconds`` are mean times by function."""
    by_function: defaultdict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        by_function[name.partition("[")[0]].append(index)
    cases: list[Case] = []
    for function, indices in by_function.items():
        mean_s = seconds.get(function, _SHORT_S)
        for rank, position in enumerate(spread(len(indices))):
            index = indices[position]
            price = seconds.get(names[index], mean_s)
            is_certain = not rank and (price <= _LONGEST_S or function.startswith(_ALWAYS))
            cases.append(Case(index, price, 1 / (1 + rank) ** 2, is_certain))
    return cases


def sampled(cases: Iterable[Case], seconds: float) -> set[int]:
    """Return the positions of a sample: all certain cases, and the others with most value per second until
    the sample takes ``seconds``.
    """
    chosen: set[int] = set()
    for case in sorted(cases, key=lambda case: (not case.is_certain, -case.worth, case.index)):
        if case.is_certain or case.seconds <= seconds:
            chosen.add(case.index)
            seconds -= case.seconds
    return chosen


def drawn(cases: Iterable[Case], seconds: float, seed: str) -> set[int]:
    """Return the positions of a random part of the cases that takes about ``seconds``. The probability of a
    case grows with its value per second. Source: P. Efraimidis, P. Spirakis, Weighted random sampling with a
    reservoir, 2006.
    """
    random = Random(seed)
    listed = sorted(cases, key=lambda case: case.index)
    # logarithms of the source's keys, which are 0 for most cases of little worth
    keys = {case.index: log(1.0 - random.random()) / case.worth for case in listed}
    chosen: set[int] = set()
    for case in sorted(listed, key=lambda case: -keys[case.index]):
        if seconds <= 0:
            break
        chosen.add(case.index)
        seconds -= case.seconds
    return chosen


@dataclass(frozen=True, slots=True)
class Sampling:
    """Plugin that keeps the chosen tests. ``draw`` is the time of a part of the tests outside the sample."""

    seconds: float
    draw: float | None
    seed: str

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the other tests."""
        cases = cases_of([item.nodeid for item in items], json.loads(SECONDS.read_text(encoding="utf-8")))
        chosen = sampled(cases, self.seconds)
        if self.draw is not None:
            chosen = drawn((case for case in cases if case.index not in chosen), self.draw, self.seed)
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index not in chosen])
        items[:] = [item for index, item in enumerate(items) if index in chosen]


def recorded_seconds(paths: Iterable[Path]) -> dict[str, dict[str, float]]:
    """Return the times in JUnit files by function and node id, without skipped cases."""
    times: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            if case.find("skipped") is None and "classname" in case.attrib:  # an interrupted run has none
                name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
                times[name.partition("[")[0]][name] = float(case.attrib["time"])
    return dict(times)


def prices(times: Mapping[str, float], function: str) -> dict[str, float]:
    """Return the entries of one function: its mean time if that is long, and the times of cases that take
    more than three times the mean, which leaves them out.
    """
    usual = sum(times.values()) / len(times)
    outliers = {name: seconds for name, seconds in times.items() if seconds > max(3 * usual, 2.0)}
    others = [seconds for name, seconds in times.items() if name not in outliers]
    mean = sum(others) / len(others) if others else usual
    is_long = mean > _SHORT_S and (mean * len(times) > 1 or mean > 10 * _SHORT_S)
    entries = ({function: mean} if is_long else {}) | outliers
    return {name: float(f"{seconds:.2g}") for name, seconds in entries.items()}


def main(recorded: Sequence[Path]) -> None:
    """Update the file with the recorded functions."""
    known: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.is_file() else {}
    times = recorded_seconds(recorded)
    known = {name: seconds for name, seconds in known.items() if name.partition("[")[0] not in times}
    for function, cases in times.items():
        known |= prices(cases, function)
    text = json.dumps(known, indent=2, sort_keys=True)
    SECONDS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
