"""Operation classes have the same measured time in `analyze` and in `accuracy`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import hespas
from hespas.validators.accuracy.cases import Cases
from tests.agreement.cases import DEVICE, FIXTURES, RECORDINGS

WITHOUT_SHAPES = "profiles/nsys_sparse.sqlite.gz"
"""A profile of which `accuracy` has nothing to compare."""


def _analyzed_ns(name: str) -> dict[str, float]:
    rows = hespas.analyze(FIXTURES / name).to_dict()["classes"]
    return {row["op_class"]: row["total_ns"] for row in rows if row["total_ns"]}


def _compared(name: str) -> tuple[Cases, ...]:
    return hespas.accuracy(FIXTURES / name, hardware=DEVICE, estimator="roofline").details.cases


def _compared_ns(cases: tuple[Cases, ...]) -> dict[str, float]:
    """Return the time of all runs of all cases by class."""
    times = Counter[str]()
    for each in cases:
        mean_ns = each.measured_ns if each.mean_ns is None else each.mean_ns
        total_ns = np.nan_to_num(mean_ns) * each.repeats
        for code, time_ns in zip(each.op_class.tolist(), total_ns.tolist(), strict=True):
            times[each.classes[code]] += time_ns
    return {name: time_ns for name, time_ns in times.items() if time_ns}


@pytest.mark.parametrize(
    "name",
    [name for name in RECORDINGS if name != WITHOUT_SHAPES and not name.startswith("rescale/")],
)
def test_of_devices(name: str) -> None:
    assert _compared_ns(_compared(name)) == pytest.approx(_analyzed_ns(name), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in RECORDINGS if name.startswith("rescale/")])
def test_of_hosts(name: str) -> None:
    """Accuracy leaves out operations that it cannot compare, and states their time."""
    cases, analyzed = _compared(name), _analyzed_ns(name)
    compared = _compared_ns(cases)
    for op_class, time_ns in compared.items():
        assert time_ns <= analyzed[op_class] * (1 + 1e-9), op_class
    outside_ns = sum(each.outside_ns for each in cases)
    assert sum(analyzed.values()) - sum(compared.values()) == pytest.approx(outside_ns, rel=1e-6)
