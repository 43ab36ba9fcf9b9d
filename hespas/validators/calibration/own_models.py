"""Learned models of a user's own rows: which there are, and whether there are rows enough for each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite

import numpy as np

from hespas.estimators.learned.ensemble import FAMILIES
from hespas.graph.columns import IntArray
from hespas.hardware import Device
from hespas.measurements import Measurements, joined
from hespas.operations import find_scheme
from hespas.validators.calibration.fit_device import may_be_fitted
from hespas.validators.calibration.learned import FEWEST_MARGINS, folds_of
from hespas.validators.calibration.learned_parts import (
    EXPERTS,
    FEW,
    HEADS,
    PARTS,
    ROBUST,
    SMALL,
    WEIGHTS,
    Part,
    Rows,
    rows_for,
    rows_of_part,
)

__all__ = ["FEWEST_ROWS", "OwnPart", "one_table", "own_parts", "unused_name"]

FEWEST_ROWS = 60
"""With fewer, neither trees nor their intervals rest on anything."""
_FEWEST_GROUPS = 10
"""With fewer layers, leaving some out tells of those layers alone: single sizes are left out instead."""
_LARGEST_GROUP = 0.2
"""Share of all rows that a single layer or size may have."""
_LAYERS: Mapping[str, tuple[str, ...]] = {
    "matmul": WEIGHTS,
    "convolution": WEIGHTS,
    "attention.context": HEADS,
    "attention.generation": HEADS,
    "attention.encoder": ("batch", "heads", "head_dim"),
    "moe": EXPERTS,
}
_BY_FORMAT = frozenset({"matmul", "convolution"})
"""Kinds whose kernels of one number format are none of another's."""
_START_NS = 3e3
"""What a launch takes where the device file does not say."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """A part with its rows; ``fault`` says why it cannot be fitted (empty: it can)."""

    part: Part
    rows: Rows
    fault: str


def own_parts(
    tables: Sequence[Measurements], devices: Mapping[str, Device], *, seed: int
) -> Iterator[OwnPart]:
    """The parts of some tables on ``devices``, by their names there. Rows kept for testing are left out.

    A part that ships for the table is taken as it is; other rows are parted by kind, and matmuls by number
    format. In a fixed order.
    """
    start_ns = min((each.launch_overhead_ns for each in devices.values()), default=np.nan)
    start_ns = start_ns if isfinite(start_ns) and start_ns > 0 else _START_NS
    names: set[str] = set()
    for part, measured in _parted([may_be_fitted(table) for table in tables], start_ns):
        name = unused_name(part.name, names)
        names.add(name)
        yield _checked(replace(part, name=name), rows_for(part, measured, devices), seed)


def unused_name(name: str, used: Collection[str]) -> str:
    """The name of a model, with the first number from 2 that makes it a new one if need be."""
    if name not in used:
        return name
    stem = re.sub(r"-\d+$", "", name)
    return next(each for number in count(2) if (each := f"{stem}-{number}") not in used)


def _parted(tables: Sequence[Measurements], start_ns: float) -> Iterator[tuple[Part, Measurements]]:
    for part in PARTS:
        if rows := one_table([table.take(rows_of_part(part, table)) for table in tables]):
            yield part, rows
    others = [table.take(_unnamed(table)) for table in tables]
    for kind in FAMILIES:
        if rows := one_table([each.take(each.ops.kind.where(kind)) for each in others]):
            yield from _by_format(kind, rows, start_ns)


def one_table(tables: Sequence[Measurements]) -> Measurements | None:
    """The rows of some tables as one; None where there are none."""
    some = [table for table in tables if len(table)]
    return joined(some, " ".join(table.name for table in some)) if len(some) > 1 else next(iter(some), None)


def _unnamed(table: Measurements) -> IntArray:
    """Numbers of the rows that no part covers that ships for the table."""
    left = np.ones(len(table), np.bool_)
    for part in PARTS:
        left[rows_of_part(part, table)] = False
    return np.flatnonzero(left)


def _by_format(kind: str, rows: Measurements, start_ns: float) -> Iterator[tuple[Part, Measurements]]:
    formats: dict[str, list[str]] = {}
    for name in sorted(rows.ops.scheme.used()):
        found = find_scheme(name)
        if found is not None:
            formats.setdefault(_format(kind, name), []).append(name)
    for name, schemes in sorted(formats.items()):
        part = Part(
            name="-".join(re.sub(r"[^\w]+", "-", text) for text in (kind, name) if text),
            table=rows.name,
            kinds=(kind,),
            schemes=tuple(schemes),
            overhead_ns=start_ns,
            forms=(FEW, ROBUST, SMALL),
            layer=_LAYERS.get(kind, ("columns",)),
        )
        yield part, rows.take(rows.ops.scheme.where(*schemes))


def _format(kind: str, scheme: str) -> str:
    """What number formats have in common that are fitted together; empty for all of a kind."""
    found = find_scheme(scheme)
    if kind not in _BY_FORMAT or found is None:
        return ""
    return "weight-only" if found.weight_bits < found.activation_bits else scheme


def _checked(part: Part, rows: Rows, seed: int) -> OwnPart:
    """The part with what is left out together: layers where there are many, single sizes otherwise."""
    count = len(rows.ratio)
    label = " ".join((*part.kinds, *part.schemes))
    if count < FEWEST_ROWS:
        text = (
            f"{label}: {count} rows with known sizes and a published peak, "
            f"{FEWEST_ROWS} are needed (12 of 5 sizes where the package has a model of related devices)"
        )
        return OwnPart(part, rows, text)
    sizes = 0
    for each in (part, replace(part, layer=())):
        group, fold = folds_of(each, rows, seed, even=True)
        of_group = np.bincount(group)
        halves = np.bincount(fold % 2, minlength=2)
        sizes = len(of_group)
        is_even = of_group.max() <= _LARGEST_GROUP * count and halves.min() >= FEWEST_MARGINS
        if sizes >= _FEWEST_GROUPS and is_even:
            return OwnPart(each, rows, "")
    text = f"{label}: {sizes} sizes, {_FEWEST_GROUPS} with about as many rows each are needed"
    return OwnPart(part, rows, text)
