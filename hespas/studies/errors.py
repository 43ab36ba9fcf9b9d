"""Errors of predictions against published figures: error figures of a set of rows, and grouping of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from hespas.files.documents import Count, Figure
from hespas.fitting.statistics import error_figures
from hespas.graph.columns import FloatArray

__all__ = ["ErrorFigures", "ErrorSizes", "GroupErrors", "finite", "grouped", "grouped_by"]

_Row = TypeVar("_Row")
_Key = TypeVar("_Key")


class ErrorSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the relative errors of ``n`` predictions: the mean and the median of their absolute values."""

    n: Count
    mean_ape: Figure
    median_ape: Figure

    @classmethod
    def of(cls, errors: Iterable[float], **others: Any) -> Self:
        """Return the error figures of ``errors`` (relative errors; NaN are skipped). ``others`` are the
        values of further fields.
        """
        known = finite(errors)
        figures = error_figures(known)
        figures["mean_ape"] = figures.pop("mape")
        own = {name: figure for name, figure in figures.items() if name in cls.__struct_fields__}
        return cls(n=len(known), **own, **others)


class ErrorFigures(ErrorSizes, frozen=True, kw_only=True):
    """Relative errors of predictions, with the 90th percentile of their sizes, and their mean."""

    p90_ape: Figure
    bias: Figure


class GroupErrors(ErrorFigures, frozen=True, kw_only=True):
    """Errors of a group of rows, in which the setting ``by`` has the value ``value``. ``interval_coverage``
    is the share of published figures inside the 90 % intervals of the predictions.
    """

    by: str
    value: str
    interval_coverage: Figure


def finite(values: Iterable[float]) -> FloatArray:
    """Return the finite values as an array, in order."""
    column = np.fromiter(values, np.float64)
    return np.asarray(column[np.isfinite(column)], np.float64)


def grouped_by(rows: Iterable[_Row], key: Callable[[_Row], _Key]) -> dict[_Key, list[_Row]]:
    """Return the rows grouped by their key. Groups are in the order in which their keys first appear."""
    groups: defaultdict[_Key, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def grouped(
    rows: Sequence[_Row], groupings: Mapping[str, Callable[[_Row], str]]
) -> Iterator[tuple[str, str, list[_Row]]]:
    """Yield every group of each of several groupings: the name of the grouping, the value of the group, and
    its rows.
    """
    for by, value_of in groupings.items():
        for value, members in sorted(grouped_by(rows, value_of).items()):
            yield by, value, members
