"""Interpolation where no line leads through a query: a plane through the nearest measurements around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import numpy as np

from hespas.estimators.database.coordinates import Space
from hespas.estimators.database.lines import row_keys
from hespas.estimators.database.reference import start_and_rates
from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = ["Neighbours"]

_MOST = 24
_REACH = 1.0
"""Doublings of any size within which a measurement is near."""
_FEWEST = 6
_RIDGE = 1e-3


class _Tree(Protocol):
    def query(self, x: FloatArray, k: int, *, p: float) -> tuple[FloatArray, IntArray]: ...


class _Spatial(Protocol):
    def cKDTree(self, data: FloatArray) -> _Tree: ...  # noqa: N802


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The measurements of a class by what must be equal (``blocks``) and where they lie: ``points`` of shape
    ``(points, axes)`` in doublings, sorted by block; ``log_ratio`` is of the time to the reference.
    """

    axes: tuple[str, ...]
    equal: tuple[str, ...]
    blocks: IntArray
    starts: IntArray
    points: FloatArray
    log_ratio: FloatArray
    coefficients: FloatArray

    @classmethod
    def of(
        cls, space: Space, coordinates: Mapping[str, FloatArray], log_time: FloatArray, work: FloatArray
    ) -> Neighbours | None:
        """None where there are fewer measurements than a plane needs."""
        axes = tuple(dict.fromkeys(move.axis for move in space.moves))
        axes = tuple(name for name in axes if len(np.unique(coordinates[name])) > 1)
        if not axes or len(log_time) < _FEWEST:
            return None
        equal = tuple(name for name in space.names if name not in axes)
        coefficients = start_and_rates(work, np.exp(log_time))
        with np.errstate(divide="ignore"):
            points = np.log2(np.stack([coordinates[name] for name in axes], axis=1))
        key = row_keys([coordinates[name] for name in equal], len(log_time))
        order = np.argsort(key, kind="stable")
        blocks, starts = np.unique(key[order], return_index=True)
        return cls(
            axes=axes,
            equal=equal,
            blocks=blocks,
            starts=np.append(starts, len(order)),
            points=points[order],
            log_ratio=(log_time - np.log((work * coefficients).sum(axis=1)))[order],
            coefficients=coefficients,
        )

    def around(
        self, coordinates: Mapping[str, FloatArray], work: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The logarithm of the time of queries and the half width of its 90 % interval; NaN where
        measurements do not surround a query closely. Shape ``(queries,)`` each.
        """
        spatial = cast("_Spatial", import_module("scipy.spatial"))
        said, half = np.full(len(work), np.nan), np.full(len(work), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.log2(np.stack([coordinates[name] for name in self.axes], axis=1))
        key = row_keys([coordinates[name] for name in self.equal], len(work))
        number = np.minimum(np.searchsorted(self.blocks, key), len(self.blocks) - 1)
        usable = (self.blocks[number] == key) & np.isfinite(place).all(axis=1)
        for block in np.unique(number[usable]).tolist():
            rows = np.flatnonzero(usable & (number == block))
            mine = slice(int(self.starts[block]), int(self.starts[block + 1]))
            if mine.stop - mine.start < _FEWEST:
                continue
            tree = spatial.cKDTree(self.points[mine])
            said[rows], half[rows] = _planes(tree, place[rows], self.points[mine], self.log_ratio[mine])
        return said + np.log((work * self.coefficients).sum(axis=1)), half


def _planes(
    tree: _Tree, place: FloatArray, points: FloatArray, values: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """A plane through the nearest points of each place, weighted by nearness."""
    count = min(_MOST, len(points))
    distance, index = tree.query(place, k=count, p=np.inf)
    index = index.reshape(len(place), count)
    off = points[index] - place[:, None, :]
    near = distance.reshape(len(place), count) <= _REACH
    enough = _surrounded(off, near) & (near.sum(axis=1) >= _FEWEST)
    weight = near / (0.05 + (off**2).sum(axis=2))
    matrix = np.concatenate((np.ones((*off.shape[:2], 1)), off), axis=2)
    weighted = matrix * weight[..., None]
    normal = np.einsum("qki,qkj->qij", weighted, matrix)
    scale = np.maximum(weight.sum(axis=1), 1e-12)
    ridge = np.eye(matrix.shape[2]) * _RIDGE
    ridge[0, 0] = 1e-12
    normal += scale[:, None, None] * ridge
    right = np.einsum("qki,qk->qi", weighted, values[index])
    plane: FloatArray = np.asarray(np.linalg.solve(normal, right[..., None]), np.float64)[..., 0]
    left = values[index] - np.einsum("qki,qi->qk", matrix, plane)
    spread = np.sqrt((weight * left**2).sum(axis=1) / scale)
    said = np.where(enough, plane[:, 0], np.nan)
    return said, np.where(enough, 0.02 + 1.645 * spread, np.nan)


def _surrounded(off: FloatArray, near: BoolArray) -> BoolArray:
    """Whether some near point lies on either side of a place (or on it) along every axis."""
    below = ((off <= 1e-9) & near[..., None]).any(axis=1)
    above = ((off >= -1e-9) & near[..., None]).any(axis=1)
    surrounded: BoolArray = np.logical_and.reduce(below & above, axis=1)
    return surrounded
