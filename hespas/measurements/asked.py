"""Tables of operations to be estimated: the known tables, and plain lists of sizes without any time.

A list of products has columns ``m``, ``n``, ``k`` (``batch``, ``dtype`` where wanted), one of convolutions
those of SCALE-Sim's topology files. Names of columns may be in any case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hespas.graph.columns import BoolArray
from hespas.graph.errors import FormatError
from hespas.measurements.columns import Columns, column_batches
from hespas.measurements.made import check_sizes, scheme_of
from hespas.measurements.read import find_dialect
from hespas.measurements.tidy import tidy_operations
from hespas.operations import Labels, Operations, build
from hespas.operations.build import convolution_product

__all__ = ["DEFAULT_DTYPE", "AskedOperations", "read_asked"]

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
class AskedOperations:
    """One operation per row of a table. ``kept`` is false where a row stands for none; ``assumed_dtype`` is
    true where the table states no element type.
    """

    ops: Operations
    kept: BoolArray
    assumed_dtype: bool = False


def read_asked(path: str | os.PathLike[str]) -> Iterator[AskedOperations]:
    """The operations of a table (CSV, CSV.gz, Parquet), one per row and in its order; some rows at a time.

    Raises ``FormatError`` for a file that is none of the known tables or malformed.
    """
    for columns in column_batches(Path(path)):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # such sizes are refused below
            asked = _read(columns)
        check_sizes(asked.ops, columns)
        yield asked


def _read(columns: Columns) -> AskedOperations:
    if not len(columns):
        raise FormatError(
            "the table has no rows", path=str(columns.path), position="row 1", hint="was it cut off?"
        )
    if columns.names >= _TIDY:
        return _whole(tidy_operations(columns))
    dialect = find_dialect(columns)
    if dialect is not None:
        made = dialect.make(columns)
        return AskedOperations(ops=made.ops, kept=made.kept)
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


def _whole(ops: Operations, *, assumed_dtype: bool = False) -> AskedOperations:
    return AskedOperations(ops=ops, kept=np.ones(len(ops), np.bool_), assumed_dtype=assumed_dtype)


def _scheme(columns: Columns) -> tuple[Labels, bool]:
    """Element types, and whether they are assumed."""
    if "dtype" in columns.names:
        return scheme_of(columns), False
    return Labels.constant(DEFAULT_DTYPE, len(columns)), True


def _products(columns: Columns) -> AskedOperations:
    scheme, assumed = _scheme(columns)
    m, n, k = (columns.numbers(name) for name in "mnk")
    ops = build.matmuls(scheme, batch=columns.numbers("batch", 1.0), m=m, n=n, k=k)
    return _whole(ops, assumed_dtype=assumed)


def _convolutions(columns: Columns) -> AskedOperations:
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


_LISTS: Mapping[frozenset[str], Callable[[Columns], AskedOperations]] = {
    _PRODUCT: _products,
    frozenset(_CONVOLUTION.values()): _convolutions,
}
