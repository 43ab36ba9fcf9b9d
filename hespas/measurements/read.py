"""Reading a table: its columns tell which of the known tables it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import canonical_name
from hespas.measurements.columns import Columns, column_batches
from hespas.measurements.events import EVENTS
from hespas.measurements.model import LeftOut, Measurements, joined
from hespas.measurements.research import AICONFIGURATOR, RESEARCH
from hespas.measurements.tidy import (
    TIDY,
    Dialect,
    Made,
    check_sizes,
    scheme_of,
    size_faults,
    tidy_operations,
)
from hespas.operations import Labels, Operations, build

__all__ = [
    "DEFAULT_DTYPE",
    "OperationRows",
    "Product",
    "columns_measured",
    "convolution_product",
    "find_dialect",
    "read_measurements",
    "read_operations",
]

_LEAST_NS = 1e-6
_MOST_NS = 2.0**63

_DIALECTS: tuple[Dialect, ...] = (*TIDY, EVENTS, *RESEARCH, *AICONFIGURATOR)


def read_measurements(path: str | os.PathLike[str], *, split: str = "", hardware: str = "") -> Measurements:
    """The measured operations of a table (CSV, CSV.gz, Parquet), or those of one split or device.

    Rows are read some at a time: only what is kept of them grows with the table. Rows with a time or a size
    that none can have are left out and counted. Raises ``FormatError`` for a file that is none of
    the known tables or malformed, ``UsageError`` where ``split`` or ``hardware`` names nothing in it.
    """
    where = Path(path)
    wanted = _Wanted(split, hardware)
    return _some(joined((_measured(*part, where.name) for part in wanted.parts(where)), where.name), where)


def columns_measured(columns: Columns, *, name: str, provenance: str) -> Measurements:
    """The measured operations of columns that are called as in one of the known tables.

    Raises ``FormatError`` where they are of none.
    """
    dialect = replace(_dialect(columns), provenance=provenance)
    devices = _devices(columns.texts(dialect.hardware_column))
    return _some(_measured(columns, dialect, devices, name), columns.path)


@dataclass(slots=True)
class _Wanted:
    """Which rows are asked for (empty: all), and what was there instead."""

    split: str
    hardware: str
    found: int = 0
    splits: set[str] = field(default_factory=set[str])
    devices: set[str] = field(default_factory=set[str])

    def parts(self, path: Path) -> Iterator[tuple[Columns, Dialect, Labels]]:
        """The rows that are asked for, with their devices; part by part. Raises ``UsageError`` for none."""
        device = canonical_name(self.hardware) or self.hardware
        for columns in _parts(path):
            dialect = _dialect(columns)
            wanted = np.ones(len(columns), np.bool_)
            if self.split:
                labels = columns.texts("split", "")
                self.splits.update(labels.used())
                wanted &= _is(labels, self.split)
            devices = _devices(columns.texts(dialect.hardware_column))
            if self.hardware:
                self.devices.update(devices.take(np.flatnonzero(wanted)).used())
                wanted &= _is(devices, device)
            rows = np.flatnonzero(wanted)
            self.found += len(rows)
            if len(rows) or not len(columns):  # a table without rows is told by whoever reads it
                yield columns.take(rows), dialect, devices.take(rows)
        if not self.found:
            raise self._nothing(path)

    def _nothing(self, path: Path) -> UsageError:
        """The error where there is nothing of what was asked for."""
        if self.split and self.split not in self.splits:
            listed = clipped(", ".join(sorted(self.splits - {""}))) or "no such column"
            return UsageError(f"no row of {path.name} has split {self.split!r}", hint=f"it has {listed}")
        listed = clipped(", ".join(sorted(self.devices - {""}))) or "no device"
        return UsageError(f"no row of {path.name} is of {self.hardware}", hint=f"it has {listed}")


def _is(labels: Labels, text: str) -> BoolArray:
    found = np.zeros(len(labels), np.bool_)
    found[labels.where(text)] = True
    return found


def _measured(columns: Columns, dialect: Dialect, devices: Labels, name: str) -> Measurements:
    """The rows that are measured operations; none where there is none."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what comes of it is left out below
        made = dialect.make(columns)
        faults = list(_faults(made, dialect, columns))
    known = np.ones(len(columns), np.bool_)
    left_out: list[LeftOut] = []
    for reason, wrong in faults:  # a row is counted for the first of its faults
        rows = np.flatnonzero(wrong & known)
        if len(rows):
            left_out.append(LeftOut(reason, len(rows), columns.row(int(rows[0]))))
            known[rows] = False
    result = Measurements(
        name=name,
        provenance=dialect.provenance,
        ops=made.ops,
        duration_ns=made.duration_ns,
        spread_ns=made.spread_ns,
        hardware=devices,
        split=columns.texts("split", ""),
        left_out=tuple(left_out),
        recorded=dialect.is_recording,
    )
    return result if known.all() else result.take(np.flatnonzero(known))


def _faults(made: Made, dialect: Dialect, columns: Columns) -> Iterator[tuple[str, BoolArray]]:
    """Why rows are no measured operations, with the rows."""
    time = made.duration_ns
    yield dialect.left_out, ~made.kept
    yield "no duration, or NaN", np.isnan(time)
    yield "a duration of 0", time == 0
    yield "a negative duration", time < 0
    yield "an infinite duration", np.isinf(time)
    yield "a duration below 1 fs or beyond 292 years", (time < _LEAST_NS) | (time > _MOST_NS)
    if made.contradicts is not None:
        yield "columns of times that contradict each other", made.contradicts
    yield from size_faults(made.ops, columns.names)


def _some(found: Measurements, path: Path) -> Measurements:
    """The same. Raises ``FormatError`` where no row is left."""
    if len(found):
        return found
    told = "; ".join(f"{each}: {each.count:,}" for each in found.left_out) or "it has none"
    first = min((each.row for each in found.left_out), default=1)
    raise FormatError(
        f"no row is a measured operation ({told})",
        path=str(path),
        position=f"row {first}",
        hint="give a table with times above 0, and sizes of 1 or more",
    )


def _parts(path: Path) -> Iterator[Columns]:
    """The rows of a table, some at a time; of a recording, whose rows belong together, all at once."""
    batches = column_batches(path)
    for columns in batches:
        dialect = find_dialect(columns)
        is_recording = dialect is not None and dialect.is_recording
        yield columns.with_rows_of(batches) if is_recording else columns


def find_dialect(columns: Columns) -> Dialect | None:
    """The known table whose columns these are; None for none."""
    return next((dialect for dialect in _DIALECTS if dialect.marks <= columns.names), None)


def _dialect(columns: Columns) -> Dialect:
    dialect = find_dialect(columns)
    if dialect is not None:
        return dialect
    listed = "; ".join(f"{each.title}: {', '.join(sorted(each.marks))}" for each in _DIALECTS)
    raise FormatError(
        "the columns are those of no known table of measured operations",
        path=str(columns.path),
        position=f"columns {', '.join(sorted(columns.names)[:12])}",
        hint=f"known are {listed}",
    )


def _devices(labels: Labels) -> Labels:
    """The library's names of devices; the spelling itself where the library has none."""
    return Labels(labels.row, tuple(canonical_name(name) or name for name in labels.names))


# Tables of operations to be estimated: the known tables, and plain lists of sizes without any time.
#
# A list of products has columns ``m``, ``n``, ``k`` (``batch``, ``dtype`` where wanted), one of convolutions
# those of SCALE-Sim's topology files. Names of columns may be in any case.

DEFAULT_DTYPE = "bf16"
"""What a list that states no element type is taken to be in."""

_TIDY = frozenset({"kind", "dtype"})
_PRODUCT = frozenset({"m", "n", "k"})
_CONVOLUTION: Mapping[str, str] = {
    "height": "ifmap height",
    "width": "ifmap width",
    "kernel_height": "filter height",
    "kernel_width": "filter width",
    "channels": "channels",
    "filters": "num filter",
    "stride": "strides",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OperationRows:
    """One operation per row of a table. ``kept`` is false where a row stands for none; ``assumed_dtype`` is
    true where the table states no element type.
    """

    ops: Operations
    kept: BoolArray
    assumed_dtype: bool = False


def read_operations(path: str | os.PathLike[str]) -> Iterator[OperationRows]:
    """The operations of a table (CSV, CSV.gz, Parquet), one per row and in its order; some rows at a time.

    Raises ``FormatError`` for a file that is none of the known tables or malformed.
    """
    for columns in _parts(Path(path)):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # such sizes are refused below
            asked = _read(columns)
        check_sizes(asked.ops, columns)
        yield asked


def _read(columns: Columns) -> OperationRows:
    if not len(columns):
        raise FormatError(
            "the table has no rows", path=str(columns.path), position="row 1", hint="was it cut off?"
        )
    if columns.names >= _TIDY:
        return _whole(tidy_operations(columns))
    dialect = find_dialect(columns)
    if dialect is not None:
        made = dialect.make(columns)
        return OperationRows(ops=made.ops, kept=made.kept)
    folded = columns.folded()
    for marks, make in _LISTS.items():
        if folded.names >= marks:
            return make(folded)
    raise FormatError(
        "the columns are those of no known table of operations",
        path=str(columns.path),
        position=f"columns {', '.join(sorted(columns.names)[:12])}",
        hint="name them m, n, k, or kind, dtype and the sizes of the kind (docs/user-guide.md)",
    )


def _whole(ops: Operations, *, assumed_dtype: bool = False) -> OperationRows:
    return OperationRows(ops=ops, kept=np.ones(len(ops), np.bool_), assumed_dtype=assumed_dtype)


def _scheme(columns: Columns) -> tuple[Labels, bool]:
    """Element types, and whether they are assumed."""
    if "dtype" in columns.names:
        return scheme_of(columns), False
    return Labels.constant(DEFAULT_DTYPE, len(columns)), True


def _products(columns: Columns) -> OperationRows:
    scheme, assumed = _scheme(columns)
    m, n, k = (columns.numbers(name) for name in "mnk")
    ops = build.matmuls(scheme, batch=columns.numbers("batch", 1.0), m=m, n=n, k=k)
    return _whole(ops, assumed_dtype=assumed)


def _convolutions(columns: Columns) -> OperationRows:
    scheme, assumed = _scheme(columns)
    sizes = {name: columns.numbers(title) for name, title in _CONVOLUTION.items()}
    wrong = np.flatnonzero(sizes["stride"] <= 0)
    if len(wrong):
        raise FormatError(
            f"strides is {sizes['stride'][wrong[0]]:g}",
            path=str(columns.path),
            position=f"row {columns.row(int(wrong[0]))}",
            hint="strides are 1 or more",
        )
    product = convolution_product(**sizes)
    ops = build.matmuls(scheme, batch=product.batch, m=product.m, n=product.n, k=product.k)
    # Windows overlap: the input is moved once, not once per window.
    windows = product.m * product.k
    inputs = np.minimum(sizes["height"] * sizes["width"] * sizes["channels"], windows)
    others = product.k * product.n + product.m * product.n
    moved = ops.bytes_moved * (inputs + others) / np.maximum(windows + others, 1.0)
    kind = Labels.constant("convolution", len(ops))
    return _whole(replace(ops, kind=kind, bytes_moved=moved), assumed_dtype=assumed)


_LISTS: Mapping[frozenset[str], Callable[[Columns], OperationRows]] = {
    _PRODUCT: _products,
    frozenset(_CONVOLUTION.values()): _convolutions,
}


# Convolutions as the products that SCALE-Sim makes of them (im2col, every window read anew).


class Product(NamedTuple):
    """``batch`` products (m, k) by (k, n), one after another."""

    m: FloatArray
    n: FloatArray
    k: FloatArray
    batch: FloatArray


def convolution_product(
    *,
    height: FloatArray,
    width: FloatArray,
    kernel_height: FloatArray,
    kernel_width: FloatArray,
    channels: FloatArray,
    filters: FloatArray,
    stride: FloatArray,
    images: FloatArray | None = None,
    groups: FloatArray | None = None,
    dilation: FloatArray | None = None,
) -> Product:
    """Sizes of an input that is padded already, columns of one shape. ``m`` counts output places of all
    ``images``, ``k`` is a window; groups run one after another; dilation only changes the number of places.

    The simulator knows one image, one group and no dilation; the rest follows from what it does with those.
    """
    one = np.ones_like(height)
    spread, parts = one if dilation is None else dilation, one if groups is None else groups
    places = one if images is None else images
    for size, kernel in ((height, kernel_height), (width, kernel_width)):
        reach = spread * (kernel - 1) + 1
        places = places * np.maximum(np.ceil((size - reach + stride) / stride), 0.0)
    return Product(places, filters / parts, kernel_height * kernel_width * channels / parts, parts)
