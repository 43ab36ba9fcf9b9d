"""Differences between two recordings: every nanosecond is explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hespas
from hespas.analysis.difference import changes
from hespas.graph import Profile
from tests.analysis.raw import DATA, FIXTURE, absent, load
from tests.converters.pytorch.traces import kernel, write_kineto

_TABLES = ("by_operation", "by_shape", "by_kernel")
_KEYS = st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "[[8]]"]), st.just(""))
_SUMS = st.dictionaries(_KEYS, st.tuples(st.integers(1, 9), st.integers(0, 10**6).map(float)))


@given(_SUMS, _SUMS)
def test_differences_add_up(
    before: dict[tuple[str, str, str], tuple[int, float]],
    after: dict[tuple[str, str, str], tuple[int, float]],
) -> None:
    table = changes(before, after)
    whole = sum(total for _, total in after.values()) - sum(total for _, total in before.values())
    assert table["delta_ns"].sum() == whole
    np.testing.assert_allclose(table["count_delta_ns"] + table["mean_delta_ns"], table["delta_ns"], atol=1e-6)
    assert {(row.name, row.shapes, row.dtypes) for row in table.rows()} == before.keys() | after.keys()
    for row in table.rows():
        key = (row.name, row.shapes, row.dtypes)
        (old_count, old), (count, new) = before.get(key, (0, 0.0)), after.get(key, (0, 0.0))
        assert (row.before_count, row.after_count) == (old_count, count)
        assert row.delta_ns == new - old
        words = {"added": not old_count, "gone": not count}
        expected = next((word for word, holds in words.items() if holds), None)
        assert row.change == (expected or ("same" if new == old else "slower" if new > old else "faster"))
        if old_count and count:
            assert row.count_delta_ns == pytest.approx((count - old_count) * old / old_count, abs=1e-6)
            assert row.mean_delta_ns == pytest.approx((new / count - old / old_count) * count, abs=1e-6)
        if whole:
            assert row.share == pytest.approx(row.delta_ns / whole)


def test_what_changed_most_comes_first(tmp_path: Path) -> None:
    old = [kernel("same", 0, 10), kernel("twice", 20, 30), kernel("slower", 60, 20), kernel("gone", 90, 5)]
    new = [
        kernel("same", 0, 10), kernel("twice", 20, 30), kernel("twice", 60, 30), kernel("slower", 100, 60),
        kernel("added", 170, 2),
    ]  # fmt: skip
    before, after = (write_kineto(tmp_path / f"{name}.json", each) for name, each in (("a", old), ("b", new)))
    done = hespas.analyze(after, baseline=before)
    assert done.difference is not None
    rows = done.difference.by_kernel.rows()
    assert [(row.name, row.change, row.delta_ns) for row in rows] == [
        ("slower", "slower", 40_000),
        ("twice", "slower", 30_000),
        ("gone", "gone", -5_000),
        ("added", "added", 2_000),
        ("same", "same", 0),
    ]
    assert [(row.count_delta_ns, row.mean_delta_ns) for row in rows[:2]] == [(0, 40_000), (30_000, 0)]
    parts = {row.part: row.delta_ns for row in done.difference.parts.rows()}
    assert parts["compute"] == 67_000
    assert parts["span"] == 172_000 - 95_000 == sum(parts.values()) - parts["span"]
    assert "longer than before" in done.headline()
    assert done.to_pandas("by_kernel")["name"].tolist()[0] == "slower"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(FIXTURE, FIXTURE, id="itself"),
        pytest.param(
            DATA / "mi300x_qwen1.5-0.5b_inf.json.gz",
            DATA / "h100_qwen1.5-0.5b_inf.json.gz",
            id="qwen",
            marks=absent,
        ),
    ],
)
def test_real_recordings_add_up(before: Path, after: Path) -> None:
    done = hespas.analyze(hespas_profile(after), baseline=hespas_profile(before))
    assert done.difference is not None
    device_ns = [sum(event.ns for event in load(path).events) for path in (before, after)]
    for name in _TABLES:
        table = done.difference.tables()[name]
        assert table["before_ns"].sum() == device_ns[0]
        assert table["after_ns"].sum() == device_ns[1]
        assert table["delta_ns"].sum() == device_ns[1] - device_ns[0]
    parts = done.difference.parts
    assert parts["delta_ns"][:-1].sum() == parts["delta_ns"][-1]
    same = before == after
    assert ("as long as before" in done.headline()) == same
    assert ("analysis.devices-differ" in done.diagnostics.counts()) != same


def hespas_profile(path: Path) -> Profile:
    found = hespas.read(path)
    assert isinstance(found, Profile)
    return found
