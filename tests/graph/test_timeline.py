"""Timelines with absent columns, and columns that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.graph import Timeline
from hespas.graph.errors import InvariantError


def timeline(*, cause: tuple[int, ...] = (), shown_by: tuple[int, ...] = ()) -> Timeline:
    return Timeline(
        resources=("compute", "communication"),
        node=np.array([0, 1], np.int32),
        rank=np.zeros(2, np.int32),
        resource=np.array([0, 1], np.int8),
        start_ns=np.array([0.0, 4.0]),
        end_ns=np.array([4.0, 9.0]),
        critical=np.array([True, True]),
        finish_ns=np.array([9.0, 8.0, 9.0]),
        exposed_comm_ns=np.zeros(3),
        cause=np.array(cause, np.int32),
        shown_by=np.array(shown_by, np.int32),
    )


def test_columns_left_out_say_that_nothing_is_known() -> None:
    found = timeline()
    assert found.step_ns == 9
    assert found.cause.tolist() == found.region.tolist() == [-1, -1]
    assert found.trips.tolist() == [1, 1]
    assert found.by_resource.tolist() == [False, False]
    assert found.shown_by.tolist() == [0, 1, 2]
    assert np.isnan(found.resource_ns("communication")).tolist() == [True] * 3


def test_columns_given_are_kept_and_must_fit() -> None:
    found = timeline(cause=(-1, 0), shown_by=(0, 1, 0))
    assert (found.cause.tolist(), found.shown_by.tolist()) == ([-1, 0], [0, 1, 0])
    with pytest.raises(InvariantError, match="cause"):
        timeline(cause=(-1, 0, 1))
    with pytest.raises(InvariantError, match="shown_by"):
        timeline(shown_by=(0, 0))
