"""Trees for devices that were not measured, and what leaving measured ones out says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hespas.estimators.learned.stored import Interval, LeftOutError
from hespas.estimators.learned.trees import Forest
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.validators.calibration.learned_parts import Form, Part
from hespas.validators.calibration.learned_rows import Rows, family_name, rising, transferable
from hespas.validators.calibration.learned_trees import grow

__all__ = ["TRANSFER", "Transfer", "fit_transfer"]

TRANSFER = Form(trees=300, leaves=31, learning_rate=0.1)
_MOST_ROWS = 40_000
_MOST_ROWS_OF_DEVICE = 5000
_TAIL = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """``forest`` and ``interval`` are None where all rows are of one family, so that
    nothing says how far such a model would carry.
    """

    forest: Forest | None
    interval: Interval | None
    errors: tuple[LeftOutError, ...]


def fit_transfer(part: Part, rows: Rows, *, seed: int) -> Transfer:
    """Trees on columns that do not tell devices apart; the interval is of whole families left out."""
    names = transferable(part, rows.names)
    table, up = rows.columns(names), rising(part, names)
    everything = np.ones(len(rows.ratio), np.bool_)
    families = sorted({family_name(device) for device in rows.devices.values()})
    if len(families) < 2 or not table.shape[1]:
        return Transfer(None, None, ())
    errors: list[LeftOutError] = []
    rests: list[FloatArray] = []
    for out, siblings in _left_out(rows):
        test = rows.of_devices(out)
        fitted = _some(~test, _MOST_ROWS, seed)
        forest = grow(table[fitted], rows.ratio[fitted], TRANSFER, seed=seed, rising=up)
        tested = _some(test, _MOST_ROWS_OF_DEVICE * len(out), seed)
        rest = rows.ratio[tested] - forest.predict(table[tested])
        errors.append(_error(out, siblings, rest))
        if not siblings:
            rests.append(rest)
    # Each family counts the same, however many rows it has.
    low = float(np.mean([np.quantile(rest, _TAIL) for rest in rests]))
    high = float(np.mean([np.quantile(rest, 1 - _TAIL) for rest in rests]))
    interval = Interval(
        hardware="*",
        kind="*",
        scheme="*",
        low=round(min(low, 0.0), 6),
        high=round(max(high, 0.0), 6),
        n=len(families),
    )
    fitted = _some(everything, 2 * _MOST_ROWS, seed)
    return Transfer(
        grow(table[fitted], rows.ratio[fitted], TRANSFER, seed=seed, rising=up), interval, tuple(errors)
    )


def _left_out(rows: Rows) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Single devices whose siblings stay, then whole families."""
    families: dict[str, list[str]] = {}
    for name, device in sorted(rows.devices.items()):
        families.setdefault(family_name(device), []).append(name)
    for members in families.values():
        if len(members) > 1:
            yield from (((name,), True) for name in members)
    for members in families.values():
        yield tuple(members), False


def _some(mask: BoolArray, most: int, seed: int) -> IntArray:
    """At most so many of the rows, at random, in order."""
    rows = np.flatnonzero(mask)
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))


def _error(out: tuple[str, ...], siblings: bool, rest: FloatArray) -> LeftOutError:
    error = np.expm1(-rest)
    return LeftOutError(
        hardware=out,
        siblings=siblings,
        mape=round(float(np.abs(error).mean()), 6),
        median_ape=round(float(np.median(np.abs(error))), 6),
        bias=round(float(error.mean()), 6),
        n=len(rest),
    )
