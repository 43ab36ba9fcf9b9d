"""Reads a table of measured operations as a profile; layout in :mod:`.layout`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.ops_table.batches import csv_batches, parquet_batches
from hespas.converters.ops_table.layout import COLUMNS, DURATIONS, EXPECTED
from hespas.converters.ops_table.operations import operations_of
from hespas.converters.ops_table.rows import Collected
from hespas.files.cells import original
from hespas.files.limits import limits
from hespas.files.packed import open_input
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import FloatArray
from hespas.graph.errors import FormatError

__all__ = ["Chosen", "choose_columns", "read_ops_table"]

_PARQUET = b"PAR1"
_LARGEST_NS = float(1 << 61)
"""73 years; sums of two such times fit 64 bits."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The columns of a table that are read; ``duration`` is the one that holds durations."""

    names: tuple[str, ...]
    duration: str


def read_ops_table(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a table, which may be of several devices. Columns that say nothing of ours are reported.

    Raises ``FormatError`` with the line (CSV) or column (Parquet) of what makes no sense, and where no column
    tells durations or operations.
    """
    chosen: list[Chosen] = []

    def choose(names: Sequence[str]) -> tuple[str, ...]:
        chosen.append(choose_columns(names, str(path), diagnostics))
        return chosen[0].names

    is_parquet = _is_parquet(path)
    collected = Collected(str(path), str if is_parquet else original)
    batches = parquet_batches if is_parquet else csv_batches
    for batch in batches(path, options, choose):
        collected.add(batch)
    return _profile(path, chosen[0], collected, diagnostics)


def _is_parquet(path: Path) -> bool:
    try:
        with open_input(path) as stream:
            return stream.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error


def choose_columns(names: Sequence[str], path: str, diagnostics: Diagnostics) -> Chosen:
    """Which columns to read. Raises ``FormatError`` where a table does not tell what it must, or twice."""
    durations = [name for name in DURATIONS if name in names]
    shown = ", ".join(name[:40] for name in names[:20]) + (", ..." if len(names) > 20 else "")
    if len(names) > limits().table_columns:
        problem = f"{len(names):,} columns or more, at most {limits().table_columns:,} are read"
        raise _refused(problem, path, "leave out what is not needed")
    if len(set(names)) < len(names):
        counts = Counter(names)
        twice = next(name for name in names if counts[name] > 1)
        raise _refused(f"column {twice[:80]!r} stands twice", path, "rename one of them")
    if len(durations) != 1:
        problem = f"several columns tell durations: {', '.join(durations)}" if durations else (
            f"no column tells durations; the columns are {shown}"
        )  # fmt: skip
        raise _refused(problem, path, f"name the columns as expected: {EXPECTED}")
    if not {"op", "kernel"} & set(names):
        raise _refused(
            f"no column tells what was measured; the columns are {shown}", path,
            f"name the columns as expected: {EXPECTED}",
        )  # fmt: skip
    read = [name for name in names if name in COLUMNS or name in DURATIONS]
    others = [name for name in names if name not in read]
    listed = ", ".join(name[:40] for name in others[:20])
    diagnostics.warning(
        "ops-table.unknown-column", path,
        f"columns that are not understood are left out: {listed}; expected are {EXPECTED}", count=len(others),
    )  # fmt: skip
    return Chosen(tuple(read), durations[0])


def _refused(message: str, path: str, hint: str) -> FormatError:
    return FormatError(message, path=path, position="column names", hint=hint)


def _profile(path: Path, chosen: Chosen, found: Collected, diagnostics: Diagnostics) -> Profile:
    rows = found.rows
    if not rows:
        raise FormatError(
            "the table has no rows", path=str(path), position="row 1", hint="was the measurement interrupted?"
        )
    duration_ns = _nanoseconds(found.number(chosen.duration), DURATIONS[chosen.duration])
    start_ns = found.number("start_ns")
    for name, column in ((chosen.duration, duration_ns), ("start_ns", start_ns)):
        _check_times(name, column, str(path))
    devices, device_index = found.devices()
    op_class, unknown = found.op_class()
    _report(duration_ns, unknown, diagnostics, str(path))
    operations = operations_of(found, chosen.names)
    rank = found.whole("rank") if "rank" in chosen.names else np.zeros(rows, np.int64)
    return Profile.of(
        path.name.removesuffix(".gz").rsplit(".", 1)[0],
        devices,
        found.strings.build(),
        start_ns=start_ns,
        duration_ns=duration_ns,
        op_row=found.text("op"),
        kernel_row=found.text("kernel"),
        dtype_row=found.text("dtype"),
        shapes_row=found.text("shapes"),
        op_class=op_class,
        device_index=device_index,
        rank=_small(rank, str(path)),
        stream=found.whole("stream"),
        host_event=operations.of_row,
        host=operations.host,
        metadata={"format": "ops-table"},
    )


def _nanoseconds(column: FloatArray, factor: float) -> FloatArray:
    """Decimal units to ns without the last bits that the product of two floats makes up."""
    if factor == 1:
        return column
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large is refused by name
        return np.round(column * factor, 6)


def _check_times(name: str, times_ns: FloatArray, path: str) -> None:
    wrong = np.flatnonzero(np.abs(times_ns) > _LARGEST_NS)
    if len(wrong):
        raise FormatError(
            f"column {name} holds a time too large for 64 bits of nanoseconds", path=path,
            position=f"row {int(wrong[0]) + 1}", hint="is the unit of the column as its name says?",
        )  # fmt: skip


def _small(rank: NDArray[np.int64], path: str) -> NDArray[np.int32]:
    if int(rank.max()) >= 1 << 31:
        raise FormatError(
            f"rank {int(rank.max())} is too large",
            path=path,
            position="column 'rank'",
            hint="ranks count from 0",
        )
    return rank.astype(np.int32)


def _report(duration_ns: FloatArray, unknown: int, diagnostics: Diagnostics, path: str) -> None:
    missing, negative = int(np.isnan(duration_ns).sum()), int((duration_ns < 0).sum())
    diagnostics.warning("ops-table.no-duration", path, "rows without a duration", count=missing)
    diagnostics.warning("ops-table.negative-duration", path, "rows of less than no time", count=negative)
    diagnostics.warning(
        "ops-table.unknown-class", path, "rows of an op_class that is none of ours; it is left out",
        count=unknown,
    )  # fmt: skip
