"""Growing trees with scikit-learn, and taking them out of it as plain columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.ensemble import Forest
from hespas.graph.columns import FloatArray
from hespas.graph.errors import MissingExtraError
from hespas.validators.calibration.learned_parts import Form

__all__ = ["grow", "library_version"]

_LARGEST_LEAF = 32767
_FEW_ROWS = 20_000


class _Predictor(Protocol):
    nodes: NDArray[np.void]


class _Threads(Protocol):
    def threadpool_limits(self, *, limits: int, user_api: str) -> AbstractContextManager[object]: ...


class _Grown(Protocol):
    _predictors: list[list[_Predictor]]
    _baseline_prediction: NDArray[np.float64]

    def __init__(self, **options: object) -> None: ...

    def fit(self, table: NDArray[np.float32], target: FloatArray) -> _Grown: ...


def library_version() -> str:
    """The name and version of the library that grows trees."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"scikit-learn {version('scikit-learn')}"
    except PackageNotFoundError as error:
        raise MissingExtraError("growing trees", "learned") from error


def grow(
    table: NDArray[np.float32],
    target: FloatArray,
    form: Form,
    *,
    seed: int,
    quantile: float | None = None,
    rising: Sequence[int] = (),
) -> Forest:
    """Boosted trees of ``target`` on ``table``: the form's loss, or pinball loss for a ``quantile``.

    The sum never falls with a column of ``rising``.
    """
    try:
        module = import_module("sklearn.ensemble")
    except ImportError as error:
        raise MissingExtraError("growing trees", "learned") from error
    model = cast("type[_Grown]", module.HistGradientBoostingRegressor)(
        loss=form.loss if quantile is None else "quantile",
        quantile=quantile,
        max_iter=form.trees,
        max_leaf_nodes=form.leaves,
        learning_rate=form.learning_rate,
        min_samples_leaf=form.least_rows,
        l2_regularization=1.0,
        max_features=form.columns,
        monotonic_cst=[int(each in rising) for each in range(table.shape[1])],
        early_stopping=False,
        random_state=seed,
    )
    with _threads(len(table)):
        grown = model.fit(table, target)
    return _forest(grown, table.shape[1])


def _threads(rows: int) -> AbstractContextManager[object]:
    """One thread where there are few rows: threads that wait for each other take longer than the work, many
    times so on a machine with other work. The trees are the same.
    """
    if rows > _FEW_ROWS:
        return nullcontext()
    limits = cast("_Threads", import_module("threadpoolctl"))
    return limits.threadpool_limits(limits=1, user_api="openmp")


def _forest(grown: _Grown, columns: int) -> Forest:
    """The grown trees as columns; splits become numbers of the edges that any tree uses."""
    trees = [_Tree(predictor[0].nodes) for predictor in grown._predictors]  # pyright: ignore[reportPrivateUsage]
    baseline = float(grown._baseline_prediction.reshape(-1)[0])  # pyright: ignore[reportPrivateUsage]
    column = np.concatenate([tree.column for tree in trees])
    threshold = np.concatenate([tree.threshold for tree in trees])
    edges = [np.unique(threshold[column == each]) for each in range(columns)]
    split = np.zeros(len(column), np.uint8)
    for each, mine in enumerate(edges):
        found = column == each
        split[found] = np.searchsorted(mine, threshold[found])
    leaf = np.concatenate([tree.leaf for tree in trees])
    scale = max(float(np.abs(leaf).max()), 1e-30) / _LARGEST_LEAF
    return Forest(
        column=column.astype(np.uint8),
        split=split,
        first=np.concatenate([tree.first for tree in trees]).astype(np.uint8),
        last=np.concatenate([tree.last for tree in trees]).astype(np.uint8),
        node_offsets=_offsets([len(tree.column) for tree in trees]),
        leaf=np.round(leaf / scale).astype(np.int16),
        leaf_offsets=_offsets([len(tree.leaf) for tree in trees]),
        edges=np.concatenate(edges).astype(np.float32),
        edge_offsets=_offsets([len(each) for each in edges]),
        scale=scale,
        baseline=baseline,
    )


def _offsets(lengths: list[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


class _Tree:
    """One tree: inner nodes from the root down, leaves from left to right."""

    def __init__(self, nodes: NDArray[np.void]) -> None:
        is_leaf: list[bool] = (nodes["is_leaf"] > 0).tolist()
        left: list[int] = nodes["left"].tolist()
        right: list[int] = nodes["right"].tolist()
        inner: list[int] = []
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        leaves: list[int] = []
        # (node, whose left side ends when this one is reached)
        waiting: list[tuple[int, int]] = [(0, -1)]
        while waiting:
            node, owner = waiting.pop()
            if owner >= 0:
                last[owner] = len(leaves)
            if is_leaf[node]:
                leaves.append(node)
                continue
            inner.append(node)
            first[node] = len(leaves)
            waiting += [(right[node], node), (left[node], -1)]
        self.column = nodes["feature_idx"][inner].astype(np.int64)
        self.threshold = nodes["num_threshold"][inner].astype(np.float32)
        self.first = np.array([first[node] for node in inner], np.int64)
        self.last = np.array([last[node] for node in inner], np.int64)
        self.leaf = nodes["value"][leaves].astype(np.float64)
