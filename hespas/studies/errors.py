"""Errors of predictions against published figures: error figures of a set of rows, and groups of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from hespas.files.documents import Count, Figure
from hespas.fitting.statistics import error_figures
from hespas.graph.columns import FloatArray

__all__ = ["ErrorFigures", "GroupErrors", "finite", "grouped", "grouped_by"]

_Row = TypeVar("_Row")
_Key = TypeVar("_Key")


class ErrorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of ``n`` predictions: mean, median and 90th percentile of their sizes, and their
    mean.
    """

    n: Count
    mean_ape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Figure

    @classmethod
    def of(cls, errors: Iterable[float], **fields: Any) -> Self:
        """Return the figures of relative errors, of which NaN are skipped, with the other ``fields``."""
        known = finite(errors)
        figures = error_figures(known)
        mean_ape = figures.pop("mape")
        return cls(n=len(known), mean_ape=mean_ape, **figures, **fields)


class GroupErrors(ErrorFigures, frozen=True, kw_only=True):
    """Errors of the rows whose ``by`` is ``value``. ``interval_coverage`` is the share of published figures
    inside the 90 % intervals of the predictions.
    """

    by: str
    value: str
    interval_coverage: Figure


def finite(values: Iterable[float]) -> FloatArray:
    """Return the finite values, in order."""
    column = np.fromiter(values, np.float64)
    return np.asarray(column[np.isfinite(column)], np.float64)


def grouped_by(rows: Iterable[_Row], key: Callable[[_Row], _Key]) -> dict[_Key, list[_Row]]:
    """Return the rows by their key, in order of appearance."""
    groups: defaultdict[_Key, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def grouped(
    rows: Sequence[_Row], groupings: Mapping[str, Callable[[_Row], str]]
) -> Iterator[tuple[str, str, list[_Row]]]:
    """Yield each group of each grouping: the name of the grouping, the value of the group, and its rows."""
    for by, value_of in groupings.items():
        for value, members in sorted(grouped_by(rows, value_of).items()):
            yield by, value, members
