"""Selection of the tests of a run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests import sampling
from tests.sampling import ROOT, SECONDS, Case, cases_of, drawn, main, sampled, spread

NAMES = [
    *(f"tests/a.py::many[{case}]" for case in range(50)),
    "tests/a.py::one",
    "tests/b.py::long",
    "tests/test_architecture.py::rule",
]
TIMES = {"tests/a.py::many": 2.0, "tests/b.py::long": 300.0, "tests/test_architecture.py::rule": 50.0}


def functions(chosen: set[int]) -> set[str]:
    return {NAMES[index].partition("[")[0] for index in chosen}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_the_order_of_cases_is_spread(count: int) -> None:
    order = spread(count)
    assert sorted(order) == list(range(count))
    beginning = sorted(order[: max(count // 4, 1)])
    assert all(after - before <= 8 for before, after in pairwise(beginning))


def test_each_function_is_in_the_sample_unless_it_takes_long() -> None:
    chosen = sampled(cases_of(NAMES, TIMES), 0.0)
    assert functions(chosen) == {"tests/a.py::many", "tests/a.py::one", "tests/test_architecture.py::rule"}
    assert len(chosen) == 3


def test_seconds_buy_further_cases() -> None:
    chosen = sampled(cases_of(NAMES, TIMES), 2 + 0.05 + 50 + 3 * 2)
    assert len(chosen) == 3 + 3
    assert "tests/b.py::long" in functions(sampled(cases_of(NAMES, TIMES), 1e4))


def test_a_draw_is_of_the_others_and_repeats_by_its_seed() -> None:
    cases = cases_of(NAMES, TIMES)
    inside = sampled(cases, 60.0)
    others = [case for case in cases if case.index not in inside]
    first = drawn(others, 20.0, "commit")
    assert first == drawn(reversed(others), 20.0, "commit")
    assert not first & inside
    assert any(drawn(others, 20.0, "commit") != drawn(others, 20.0, str(seed)) for seed in range(9))
    assert all(drawn(others, 20.0, str(seed)) for seed in range(9))


def test_everything_is_drawn_for_enough_seconds() -> None:
    cases = cases_of(NAMES, TIMES)
    assert drawn(cases, 1e6, "") == set(range(len(NAMES)))


def test_cases_of_little_worth_are_drawn() -> None:
    """Whatever their position among the others of little worth."""
    cases = [Case(index, 1.0, 1e-6, is_certain=False) for index in range(100)]
    positions = set[int]().union(*(drawn(cases, 10.0, str(seed)) for seed in range(50)))
    assert len(positions) > 90


def test_times_are_read_from_recorded_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function has its mean time; a case that takes much longer than the others has its own."""
    cases = [("a", f"many[{number}]", 2.0) for number in range(9)] + [("a", "many[z]", 61.0)]
    cases += [("b", "short", 0.01), ("b", "brief[x]", 0.02)]
    lines = [
        f'<testcase classname="tests.{module}" name="{name}" time="{time_s}"/>'
        for module, name, time_s in cases
    ]
    skipped = '<testcase classname="tests.a" name="many[s]" time="0.0"><skipped/></testcase>'
    recorded = tmp_path / "run.xml"
    recorded.write_text(f"<testsuites><testsuite>{''.join(lines)}{skipped}</testsuite></testsuites>")
    monkeypatch.setattr(sampling, "SECONDS", tmp_path / "seconds.json")
    (tmp_path / "seconds.json").write_text('{"tests/b.py::short": 9.0, "tests/c.py::other": 4.0}')
    main([recorded])
    assert json.loads((tmp_path / "seconds.json").read_text()) == {
        "tests/a.py::many": 2.0,
        "tests/a.py::many[z]": 61.0,
        "tests/c.py::other": 4.0,
    }


def test_functions_with_times_exist() -> None:
    for name in json.loads(SECONDS.read_text(encoding="utf-8")):
        path, _, function = name.partition("[")[0].partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name
