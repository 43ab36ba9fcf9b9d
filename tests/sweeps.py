"""Long lists of cases and long tests: a few in every run, all of them in the slow suite.

``python -m tests.sweeps JUNIT.xml`` writes `tests/few.json` anew from a run that was recorded with
``pytest -m "not slow" --junitxml JUNIT.xml``: a quarter of the cases, at least one, of a test that takes more
than a three-thousandth of all together stay in every run. No test is set aside as a whole: a single case that
takes more than a four-hundredth is printed, and needs a cheaper version. Tests that are there already get no
more cases than they have.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest

__all__ = ["FEW", "few_of", "long_ones", "main", "set_many_aside", "swept"]

ROOT = Path(__file__).parents[1]
FEW = ROOT / "tests" / "few.json"
"""How many cases of a test are in every run."""

_OF_SWEEPS, _OF_SINGLES = 1 / 3000, 1 / 400
_PART = 4
_ALWAYS = ("tests/test_architecture.py", "tests/test_peer_traps.py")
"""Modules whose tests are in every run as a whole, however long they take."""


def swept(cases: Iterable[Any], quick: int) -> list[Any]:
    """Parameters of a test: ``quick`` of the cases, evenly spread, and the others marked slow.

    A case that is a tuple holds a value for each argument.
    """
    listed = list(cases)
    chosen = _spread(len(listed), quick)
    return [
        pytest.param(
            *(case if isinstance(cast("object", case), tuple) else (case,)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place, case in enumerate(listed)
    ]


def set_many_aside(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what `tests/few.json` says is not in every run."""
    few: Mapping[str, int] = json.loads(FEW.read_text(encoding="utf-8"))
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in few and item.get_closest_marker("slow") is None:
            cases[name].append(item)
    for name, listed in cases.items():
        chosen = _spread(len(listed), few[name])
        for place, item in enumerate(listed):
            if place not in chosen:
                item.add_marker(pytest.mark.slow)


def _spread(count: int, chosen: int) -> set[int]:
    return {place * count // chosen for place in range(chosen)}


def few_of(times_s: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """Return the number of cases in every run, for tests whose cases take long [s]."""
    whole = sum(map(sum, times_s.values()))
    return {
        name: -(-len(times) // _PART)
        for name, times in times_s.items()
        if len(times) > 1 and sum(times) > whole * _OF_SWEEPS and not name.startswith(_ALWAYS)
    }


def long_ones(times_s: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the tests of one case that take too long for every run."""
    most_s = sum(map(sum, times_s.values())) * _OF_SINGLES
    return [
        name
        for name, times in times_s.items()
        if len(times) == 1 and sum(times) > most_s and not name.startswith(_ALWAYS)
    ]


def main(recorded: Path) -> None:
    """Write the file anew, and print the tests that want a cheaper version."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(recorded).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/")
        times[f"{path}.py::{case.attrib['name'].partition('[')[0]}"].append(float(case.attrib["time"]))
    known: dict[str, int] = json.loads(FEW.read_text(encoding="utf-8")) if FEW.is_file() else {}
    few = few_of(times)
    few |= {name: min(count, few.get(name, count)) for name, count in known.items()}
    text = json.dumps(few, indent=2, sort_keys=True)
    FEW.write_text(text + "\n", encoding="utf-8")
    for name in long_ones(times):
        sys.stdout.write(f"{name} takes {times[name][0]:.0f} s: write a cheaper version for every run\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
