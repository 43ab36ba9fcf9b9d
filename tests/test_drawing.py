"""The draw of the slow suite reaches every function before any function twice."""

from __future__ import annotations

from tests.drawing import drawn_order

NAMES = [f"tests/a.py::one[{case}]" for case in range(50)] + ["tests/a.py::two", "tests/b.py::three[x]"]


def test_each_function_has_one_case_before_any_has_two() -> None:
    order = drawn_order(NAMES, "seed")
    assert sorted(order) == list(range(len(NAMES)))
    assert {NAMES[index].partition("[")[0] for index in order[:3]} == {
        "tests/a.py::one",
        "tests/a.py::two",
        "tests/b.py::three",
    }


def test_the_seed_decides_the_draw() -> None:
    assert drawn_order(NAMES, "1") == drawn_order(NAMES, "1")
    assert drawn_order(NAMES, "1") != drawn_order(NAMES, "2")
