"""Ranks of a workload: each has a class, and large numbers of ranks cost nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hespas.graph import GraphBuilder, Workload
from hespas.graph.errors import InvariantError

LOOKED_AT: list[int] = []


class _Watched(np.ndarray[Any, np.dtype[np.int32]]):
    """Ranks that count how many of them are read."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **_: object) -> object:
        LOOKED_AT.append(self.size)
        [ranks] = (np.asarray(each)[:1] for each in inputs)
        return getattr(ufunc, method)(ranks)


def test_of_ranks_that_all_do_the_same_one_is_looked_at() -> None:
    graph = GraphBuilder("g").build()
    ranks = np.broadcast_to(np.int32(0), (1 << 40,)).view(_Watched)
    LOOKED_AT.clear()
    assert Workload(name="w", classes=(graph,), rank_class=ranks).num_ranks == 1 << 40
    assert LOOKED_AT == [1, 1]


@pytest.mark.parametrize("ranks", [np.array([0, 1], np.int32), np.broadcast_to(np.int32(1), (4,))])
def test_a_rank_without_a_class_is_refused(ranks: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    with pytest.raises(InvariantError, match="has no class"):
        Workload(name="w", classes=(GraphBuilder("g").build(),), rank_class=ranks)
