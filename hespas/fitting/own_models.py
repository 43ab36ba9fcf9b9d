"""Learned models of a user's own rows: their parts, and the rows that each part needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite

import numpy as np

from hespas.estimators.learned.ensemble import FAMILIES
from hespas.fitting.learned import FEWEST_MARGINS, layer_folds
from hespas.fitting.learned_parts import (
    EXPERTS,
    FEW,
    HEADS,
    PARTS,
    ROBUST,
    SMALL,
    WEIGHTS,
    LearnedPart,
    TrainingRows,
    rows_for,
    rows_of_part,
)
from hespas.fitting.rows import may_be_fitted, one_table
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import find_scheme

__all__ = ["FEWEST_ROWS", "OwnPart", "own_parts", "unused_name"]

FEWEST_ROWS = 60
"""Least rows of a part, for its trees and their intervals."""
_FEWEST_GROUPS = 10
"""Least layers that are held out as a whole; with fewer, single sizes are held out."""
_LARGEST_GROUP = 0.2
"""Largest share of all rows in a single layer or size."""
_LAYERS: Mapping[str, tuple[str, ...]] = {
    "matmul": WEIGHTS,
    "convolution": WEIGHTS,
    "attention.context": HEADS,
    "attention.generation": HEADS,
    "attention.encoder": ("batch", "heads", "head_dim"),
    "moe": EXPERTS,
}
_BY_FORMAT = frozenset({"matmul", "convolution"})
"""Kinds with different kernels for each number format."""
_START_NS = 3e3
"""Launch time of a device file without one."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """Part with its rows; ``fault`` is the reason that it cannot be fitted (empty: it can)."""

    part: LearnedPart
    rows: TrainingRows
    fault: str


def own_parts(
    tables: Sequence[Measurements], devices: Mapping[str, Device], *, seed: int
) -> Iterator[OwnPart]:
    """Yield the parts of some tables on ``devices`` (by their names there), without rows reserved for
    testing.

    Parts that ship for the table are used unchanged; other rows are divided by kind, and matmuls by number
    format. The order is fixed.
    """
    start_ns = min((device.launch_overhead_ns for device in devices.values()), default=np.nan)
    start_ns = start_ns if isfinite(start_ns) and start_ns > 0 else _START_NS
    tables = [may_be_fitted(table) for table in tables]
    parts: list[tuple[LearnedPart, Measurements]] = []
    has_part = [np.zeros(len(table), np.bool_) for table in tables]
    for part in PARTS:
        numbers = [rows_of_part(part, table) for table in tables]
        for mask, of_part in zip(has_part, numbers, strict=True):
            mask[of_part] = True
        rows = one_table([table.take(of_part) for table, of_part in zip(tables, numbers, strict=True)])
        if rows:
            parts.append((part, rows))
    others = [table.take(np.flatnonzero(~mask)) for table, mask in zip(tables, has_part, strict=True)]
    for kind in FAMILIES:
        if rows := one_table([table.take(table.ops.kind.where(kind)) for table in others]):
            parts.extend(_parts_by_format(kind, rows, start_ns))
    names: set[str] = set()
    for part, measured in parts:
        name = unused_name(part.name, names)
        names.add(name)
        yield _checked_part(replace(part, name=name), rows_for(part, measured, devices), seed)


def unused_name(name: str, used: Collection[str]) -> str:
    """Return the name of a model, with the first number from 2 on that makes it unused if necessary."""
    if name not in used:
        return name
    stem = re.sub(r"-\d+$", "", name)
    return next(other for number in count(2) if (other := f"{stem}-{number}") not in used)


def _parts_by_format(
    kind: str, rows: Measurements, start_ns: float
) -> Iterator[tuple[LearnedPart, Measurements]]:
    """Yield the parts of one kind: one per number format for matmuls, otherwise one for all formats."""
    formats: dict[str, list[str]] = {}
    for name in sorted(rows.ops.scheme.used()):
        scheme = find_scheme(name)
        if scheme is not None:
            family = ""
            if kind in _BY_FORMAT:
                family = "weight-only" if scheme.weight_bits < scheme.activation_bits else name
            formats.setdefault(family, []).append(name)
    for name, schemes in sorted(formats.items()):
        part = LearnedPart(
            name="-".join(re.sub(r"[^\w]+", "-", text) for text in (kind, name) if text),
            table=rows.name,
            kinds=(kind,),
            schemes=tuple(schemes),
            overhead_ns=start_ns,
            forms=(FEW, ROBUST, SMALL),
            layer=_LAYERS.get(kind, ("columns",)),
        )
        yield part, rows.take(rows.ops.scheme.where(*schemes))


def _checked_part(part: LearnedPart, rows: TrainingRows, seed: int) -> OwnPart:
    """Return a part that is held out by layers if there are many, otherwise by single sizes."""
    count = len(rows.ratio)
    label = " ".join((*part.kinds, *part.schemes))
    if count < FEWEST_ROWS:
        text = (
            f"{label}: {count} rows with known sizes and a published peak, "
            f"{FEWEST_ROWS} are needed (12 of 5 sizes where the package has a model of related devices)"
        )
        return OwnPart(part, rows, text)
    sizes = 0
    for option in (part, replace(part, layer=())):
        group, fold = layer_folds(option, rows, seed, even=True)
        of_group = np.bincount(group)
        halves = np.bincount(fold % 2, minlength=2)
        sizes = len(of_group)
        is_even = of_group.max() <= _LARGEST_GROUP * count and halves.min() >= FEWEST_MARGINS
        if sizes >= _FEWEST_GROUPS and is_even:
            return OwnPart(option, rows, "")
    text = f"{label}: {sizes} sizes, {_FEWEST_GROUPS} with about as many rows each are needed"
    return OwnPart(part, rows, text)
