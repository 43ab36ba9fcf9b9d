"""Trip counts of loops, derived from their counters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import isnan, nan

import pytest

from hespas.converters.stablehlo.trips import count_trips
from hespas.graph import Diagnostics, Workload

pytest.importorskip("jaxlib")

ReadText = Callable[..., tuple[Workload, Diagnostics]]


def test_trip_arithmetic_agrees_with_running_the_loop() -> None:
    tests: dict[str, Callable[[int, int], bool]] = {
        "LT": lambda i, n: i < n,
        "LE": lambda i, n: i <= n,
        "GT": lambda i, n: i > n,
        "GE": lambda i, n: i >= n,
        "NE": lambda i, n: i != n,
        "EQ": lambda i, n: i == n,
    }
    for values in (range(-8, 8), range(16)):
        for direction, holds in tests.items():
            for start, limit, step in product(values, values, range(-8, 16)):
                counter, trips = start, 0
                while trips < 16 and holds(counter, limit):
                    counter, trips = (counter + step - values[0]) % 16 + values[0], trips + 1
                expected = nan if trips == 16 else float(trips)
                found = count_trips(direction, start, limit, step, values)
                assert found == expected or (isnan(found) and isnan(expected)), (
                    direction,
                    start,
                    limit,
                    step,
                )


@pytest.mark.parametrize(
    ("element", "loop", "expected"),
    [
        ("i8", "0 LT 120 100", 14.0),
        ("i8", "0 LT 44 100", 1.0),
        ("i8", "0 LE 127 1", nan),
        ("ui8", "250 NE 3 1", 9.0),
        ("ui8", "0 LT 255 2", nan),
        ("ui8", "0 LT 255 5", 51.0),
        ("i32", "0 LT 10 -1", 2.0**31 + 1),
        ("ui64", f"{2**64 - 2} GT 5 1", 2.0),
        ("i64", "0 NE -1 3", float((2**64 - 1) // 3)),
    ],
)
def test_a_counter_wraps_as_its_type_does(
    read_text: ReadText, element: str, loop: str, expected: float
) -> None:
    workload, diagnostics = read_text(_counting(element, loop))
    trips = workload.classes[0].regions.trips.tolist()
    assert trips == [pytest.approx(expected, nan_ok=True)]
    assert diagnostics.counts() == ({"stablehlo.unknown-trips": 1} if isnan(expected) else {})


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("0 LT 100 10", 10.0),
        ("-100 LT 0 10", 10.0),
        ("0 LT 200 10", nan),
        ("0 LT 125 20", nan),
        ("0 LT -5 1", 0.0),
    ],
)
def test_a_counter_widened_for_the_comparison_counts_until_it_wraps(
    read_text: ReadText, loop: str, expected: float
) -> None:
    program = _counting("i8", loop, "%c = stablehlo.convert %i : (tensor<i8>) -> tensor<i32>", "i32")
    trips = read_text(program)[0].classes[0].regions.trips.tolist()
    assert trips == [pytest.approx(expected, nan_ok=True)]


@pytest.mark.parametrize(
    "prepared",
    [
        """%far = stablehlo.add %i, %step : tensor<i8>
        %c = stablehlo.convert %far : (tensor<i8>) -> tensor<i32>""",
        """%rounded = stablehlo.convert %i : (tensor<i8>) -> tensor<f8E5M2>
        %c = stablehlo.convert %rounded : (tensor<f8E5M2>) -> tensor<i32>""",
    ],
    ids=["a sum that may wrap before it is widened", "a number that may be rounded"],
)
def test_a_counter_that_is_not_what_is_compared_is_not_counted_on(read_text: ReadText, prepared: str) -> None:
    program = _counting("i8", "0 LT 100 3", prepared, "i32")
    assert isnan(read_text(program)[0].classes[0].regions.trips[0])


def _counting(element: str, loop: str, prepared: str = "", compared: str = "") -> str:
    """A loop ``START DIRECTION LIMIT STEP``; ``prepared`` makes ``%c``, of the type compared, of ``%i``."""
    start, direction, limit, step = loop.split()
    counter, kind = ("%c" if prepared else "%i"), compared or element
    return f"""func.func @main() -> tensor<{element}> {{
  %start = stablehlo.constant dense<{start}> : tensor<{element}>
  %limit = stablehlo.constant dense<{limit}> : tensor<{kind}>
  %step = stablehlo.constant dense<{step}> : tensor<{element}>
  %r = stablehlo.while(%i = %start) : tensor<{element}>
  cond {{
    {prepared}
    %p = stablehlo.compare {direction}, {counter}, %limit
      : (tensor<{kind}>, tensor<{kind}>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  }} do {{
    %n = stablehlo.add %i, %step : tensor<{element}>
    stablehlo.return %n : tensor<{element}>
  }}
  return %r : tensor<{element}>
}}"""
