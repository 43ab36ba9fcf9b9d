"""Times for the operations of a table, one per row: what ``hespas estimate --table`` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings, put
from hespas.api.preparation import DEFAULT_ESTIMATOR
from hespas.estimators import load_estimator
from hespas.estimators.configuration import operation_estimator
from hespas.estimators.registry import (
    OperationModel,
    Prediction,
    estimator_factory,
    list_estimators,
    predict_with,
)
from hespas.files.documents import Count, Figure, document_bytes, inert, inert_cell
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import known_sum
from hespas.hardware import Device, load_device
from hespas.operations import Operations

if TYPE_CHECKING:
    import pandas

    from hespas.measurements.read import OperationRows

__all__ = [
    "KindTotals",
    "TableDocument",
    "TableEstimates",
    "estimate_table",
    "table_estimate_document",
    "write_table_estimates",
]


@runtime_checkable
class _CountsCycles(Protocol):
    def cycles(self, ops: Operations, device: Device) -> FloatArray: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class TableEstimates(Result):
    """What a model says of each row of a table; columns of shape ``(rows,)``. ``totals`` are sums per kind
    and element type, in the order of the table; ``cycles`` is None for models that count none.
    """

    path: Path
    hardware: str
    totals: tuple[KindTotals, ...]
    prediction: Prediction
    cycles: FloatArray | None
    estimator: str
    diagnostics: Diagnostics

    def headline(self) -> str:
        """Of what, on what, and how long one after another."""
        total_ns = known_sum(np.array([row.duration_ns for row in self.totals]))
        rows = len(self.prediction.duration_ns)
        by = f"{self.path} on {self.hardware} by {self.estimator}"
        return f"{by}, {rows:,} operations, {total_ns / 1e6:,.3f} ms"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.estimate_table/1``."""
        return document_bytes(table_estimate_document(self))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per row of the table: the columns that ``--out`` adds to it."""
        import pandas as pd

        return pd.DataFrame(dict(_gained(self, slice(None))))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotals:
    """Rows of one kind of operation and element type: sums over those with a time. ``unknown`` have none;
    ``estimators`` says who spoke.
    """

    kind: str
    dtype: str
    operations: Count
    unknown: Count
    flops: Figure
    bytes_moved: Figure
    duration_ns: Figure
    cycles: Figure
    estimators: tuple[str, ...]


@checked()
def estimate_table(
    path: str | Path,
    hardware: str,
    *,
    estimator: str = DEFAULT_ESTIMATOR,
    diagnostics: Diagnostics | None = None,
) -> TableEstimates:
    """What ``estimator`` says of each operation of a table (CSV, CSV.gz, Parquet) on ``hardware``.

    The table is one that :mod:`hespas.measurements` knows, or lists sizes; times in it and the
    devices it names play no part. Raises ``FormatError`` for another, ``UsageError`` for an unknown name,
    ``UnsupportedError`` for an estimator that takes programs only.
    """
    from hespas.measurements.read import DEFAULT_DTYPE, read_operations

    device, estimator = load_device(hardware), operation_estimator(estimator)
    model = load_estimator(estimator)
    candidate: object = model
    if not isinstance(candidate, OperationModel):
        raise UnsupportedError(
            f"estimator {model.name!r} takes programs, not tables",
            hint=f"one of: {', '.join(_names_for_tables())}",
        )
    found = diagnostics if diagnostics is not None else Diagnostics()
    collected = _Collected(Path(path))
    for asked in read_operations(path):
        collected.add(asked, candidate, device, found)
    if collected.assumed_dtype:
        text = f"no column dtype: taken to be {DEFAULT_DTYPE}"
        found.warning("table.no-dtype", collected.path.name, text, count=collected.rows)
    return collected.done(device, estimator, found)


def _names_for_tables() -> list[str]:
    """Registered estimators that can be used here and take operations one by one."""
    usable = (listed.name for listed in list_estimators() if listed.available)
    return [name for name in usable if callable(getattr(estimator_factory(name), "predict", None))]


@dataclass(slots=True)
class _Sums:
    """Rows of one kind and element type so far."""

    operations: int = 0
    unknown: int = 0
    parts: list[tuple[float, float, float, float]] = field(
        default_factory=list[tuple[float, float, float, float]]
    )
    speakers: dict[str, None] = field(default_factory=dict[str, None])


@dataclass(slots=True)
class _Collected:
    """What is kept of the rows that were asked: their times, and sums. Operations themselves are let go."""

    path: Path
    rows: int = 0
    assumed_dtype: bool = False
    sums: dict[tuple[str, str], _Sums] = field(default_factory=dict[tuple[str, str], _Sums])
    models: dict[str, int] = field(default_factory=dict[str, int])
    times: list[Prediction] = field(default_factory=list[Prediction])
    cycles: list[FloatArray] = field(default_factory=list[FloatArray])

    def add(self, asked: OperationRows, model: OperationModel, device: Device, found: Diagnostics) -> None:
        """Ask about some rows."""
        count = len(asked.ops)
        rows = np.flatnonzero(asked.kept)
        text = "rows stand for no operation: no duration"
        found.warning("table.no-operation", self.path.name, text, count=count - len(rows))
        ops = asked.ops.take(rows)
        distinct, place = ops.distinct()
        of_row = np.full(count, -1, np.int64)
        of_row[rows] = place
        said = predict_with(model, distinct, device, found).take(of_row)
        cycles = None
        if isinstance(model, _CountsCycles):
            cycles = np.full(count, np.nan)
            cycles[rows] = model.cycles(ops, device)
        self.rows += count
        self.assumed_dtype = asked.assumed_dtype
        self._sum(asked.ops, said, cycles)
        place = np.array([self.models.setdefault(name, len(self.models)) for name in said.models], np.int8)
        said_by = np.where(said.estimator < 0, -1, place[said.estimator]).astype(np.int8)
        self.times.append(replace(said, estimator=said_by))
        if cycles is not None:
            self.cycles.append(cycles)

    def _sum(self, ops: Operations, said: Prediction, cycles: FloatArray | None) -> None:
        key = ops.kind.row.astype(np.int64) * len(ops.scheme.names) + ops.scheme.row
        _, first = np.unique(key, return_index=True)
        for start in sorted(first.tolist()):
            rows = np.flatnonzero(key == key[start])
            sums = self.sums.setdefault((ops.kind[start], ops.scheme[start]), _Sums())
            duration = said.duration_ns[rows]
            speakers: list[int] = np.unique(said.estimator[rows]).tolist()
            sums.operations += len(rows)
            sums.unknown += int(np.isnan(duration).sum())
            sums.speakers.update(dict.fromkeys(said.models[number] for number in speakers if number >= 0))
            columns = (ops.flops[rows], ops.bytes_moved[rows], duration)
            counted = np.nan if cycles is None else known_sum(cycles[rows])
            flops, moved, time = (known_sum(column) for column in columns)
            sums.parts.append((flops, moved, time, counted))

    def done(self, device: Device, estimator: str, diagnostics: Diagnostics) -> TableEstimates:
        """The answer."""
        return TableEstimates(
            path=self.path,
            hardware=device.name,
            totals=tuple(_total(kind, dtype, sums) for (kind, dtype), sums in self.sums.items()),
            prediction=Prediction(
                duration_ns=np.concatenate([each.duration_ns for each in self.times]),
                low_ns=np.concatenate([each.low_ns for each in self.times]),
                high_ns=np.concatenate([each.high_ns for each in self.times]),
                models=tuple(self.models),
                estimator=np.concatenate([each.estimator for each in self.times]),
            ),
            cycles=np.concatenate(self.cycles) if self.cycles else None,
            estimator=estimator,
            diagnostics=diagnostics,
        )


def _total(kind: str, dtype: str, sums: _Sums) -> KindTotals:
    flops, moved, time, cycles = (known_sum(np.array(column)) for column in zip(*sums.parts, strict=True))
    return KindTotals(
        kind=kind,
        dtype=dtype,
        operations=sums.operations,
        unknown=sums.unknown,
        flops=flops,
        bytes_moved=moved,
        duration_ns=time,
        cycles=cycles,
        estimators=tuple(sums.speakers),
    )


class TableDocument(Document, frozen=True, kw_only=True):
    """What hespas estimate --table --json writes."""

    schema: Literal["hespas.estimate_table/1"] = "hespas.estimate_table/1"
    hardware: str
    estimator: str
    operations: Count
    unknown: Count
    duration_ns: Figure
    kinds: tuple[KindTotals, ...]


def table_estimate_document(done: TableEstimates) -> msgspec.Struct:
    """Sums per kind of operation: ``hespas.estimate_table/1``."""
    return TableDocument(
        inputs=[str(done.path)],
        diagnostics=findings(done.diagnostics),
        hardware=done.hardware,
        estimator=done.estimator,
        operations=len(done.prediction.duration_ns),
        unknown=sum(row.unknown for row in done.totals),
        duration_ns=known_sum(np.array([row.duration_ns for row in done.totals])),
        kinds=tuple(done.totals),
    )


def write_table_estimates(
    done: TableEstimates, path: Path, diagnostics: Diagnostics | None = None, *, overwrite: bool = False
) -> None:
    """Write the table as CSV, row by row as it is, with the columns ``duration_ns``, ``low_ns``, ``high_ns``,
    ``estimator`` and where the model counts them ``cycles``. Unknown is an empty field. At once or not at
    all; ``-`` is standard output. Raises ``OutputError`` where the file exists, without ``overwrite``.

    A column of the table that has one of these names is written as ``table_NAME``, and said so. Texts that a
    spreadsheet would calculate get an apostrophe before them.
    """
    writer = _Rows(done)
    put(path, writer.fill, overwrite=overwrite)
    if writer.taken and diagnostics is not None:
        listed = ", ".join(f"{name} as table_{name}" for name in writer.taken)
        text = f"the table's own columns are written under other names: {listed}"
        diagnostics.warning("table.renamed-column", done.path.name, text, count=len(writer.taken))


@dataclass(slots=True)
class _Rows:
    """The table read again and written with what was said of it, some rows at a time."""

    done: TableEstimates
    taken: list[str] = field(default_factory=list[str])

    def fill(self, temporary: Path) -> None:
        """Write all of it."""
        from hespas.measurements import text_batches

        kept = _named_columns(self.done.path)
        at = 0
        with temporary.open("w", encoding="utf-8", errors="replace", newline="") as stream:
            for frame in text_batches(self.done.path):
                rows = slice(at, at + len(frame))
                gained = dict(_gained(self.done, rows))
                self.taken = sorted(set(gained) & set(kept))
                renamed = frame[kept].rename(columns={name: f"table_{name}" for name in self.taken})
                texts = renamed.select_dtypes(exclude="number").map(inert_cell)
                safe = renamed.assign(**{str(name): column for name, column in texts.items()})
                whole = safe.rename(columns={name: inert(str(name)) for name in safe.columns}).assign(
                    **gained
                )
                whole.to_csv(stream, index=False, header=not at)
                at = rows.stop


def _named_columns(path: Path) -> list[str]:
    """The columns of a table, but for those that a trailing comma makes: without a name or content."""
    from hespas.measurements import text_batches

    names: list[str] = []
    used: set[str] = set()
    for frame in text_batches(path):
        names = [str(name) for name in frame.columns]
        nameless = [name for name in names if name.startswith("Unnamed:") and name not in used]
        if not nameless or path.suffix == ".parquet":
            return names
        used.update(name for name in nameless if bool((frame[name] != "").any()))
    return [name for name in names if not name.startswith("Unnamed:") or name in used]


def _gained(done: TableEstimates, rows: slice) -> Iterator[tuple[str, list[float | str]]]:
    said = done.prediction
    for name, column in (
        ("duration_ns", said.duration_ns),
        ("low_ns", said.low_ns),
        ("high_ns", said.high_ns),
    ):
        yield name, _cells(column[rows])
    speakers: list[int] = said.estimator[rows].tolist()
    yield "estimator", [said.models[number] if number >= 0 else "" for number in speakers]
    if done.cycles is not None:
        cells = _cells(done.cycles[rows])
        yield "cycles", [int(each) if isinstance(each, float) else each for each in cells]


def _cells(column: FloatArray) -> list[float | str]:
    values: list[float] = column.tolist()
    return ["" if isnan(value) else value for value in values]
