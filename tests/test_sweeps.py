"""What is in every run of the tests, and what in the slow suite alone."""

from __future__ import annotations

import json

from tests.sweeps import FEW, ROOT, few_of, long_ones, swept

_FEW: dict[str, int] = json.loads(FEW.read_text(encoding="utf-8"))


def test_tests_that_are_set_aside_are_there() -> None:
    for name in _FEW:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_no_test_is_set_aside_as_a_whole() -> None:
    """A cheaper version, which judges the same, stays in every run."""
    assert [name for name, count in _FEW.items() if count < 1] == []


def test_cases_of_long_ones_are_set_aside_and_short_ones_stay() -> None:
    times_s = {
        "tests/test_a.py::others": [0.01] * 99_000,
        "tests/test_a.py::sweep": [1.0] * 10,
        "tests/test_a.py::pair": [2.0, 2.0],
        "tests/test_a.py::long": [5.0],
        "tests/test_a.py::short": [2.0],
        "tests/test_architecture.py::long": [300.0],
    }
    few = few_of(times_s)
    assert few == {
        "tests/test_a.py::others": 24_750,
        "tests/test_a.py::sweep": 3,
        "tests/test_a.py::pair": 1,
    }
    assert long_ones(times_s) == ["tests/test_a.py::long"]


def test_cases_are_spread_evenly() -> None:
    slow = [bool(each.marks) for each in swept(range(7), 3)]
    assert slow == [False, True, False, True, False, True, True]
