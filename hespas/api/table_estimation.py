"""Estimated times of the operations in a table, one per row (``hespas estimate --table``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from hespas.api.arguments import Array, ComparedEstimator, Dataflow, EstimatedOn, checked, with_array
from hespas.api.documents import BasisShare, Document, Result, basis_of, findings, put
from hespas.api.lowering import STEP_ESTIMATOR
from hespas.estimators import load_estimator
from hespas.estimators.configuration import operation_estimator
from hespas.estimators.interface import OperationModel, Prediction, predict_with
from hespas.estimators.registry import estimator_factory, list_estimators
from hespas.estimators.step_intervals import basis_text
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.hints import INPUT, Option
from hespas.graph.passes import known_sum
from hespas.hardware import Device, load_device
from hespas.operations import LabelColumn, Operations
from hespas.report.tables import Column, Kind, Table, Values, column_of, write_tables

if TYPE_CHECKING:
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
    """Estimates of the rows of a table; columns of shape ``(rows,)``. ``totals`` has one entry per kind of
    operation and element type, in the order of the table. ``cycles`` is None for estimators that do not count
    cycles.
    """

    path: Path
    hardware: str
    totals: tuple[KindTotals, ...]
    prediction: Prediction
    cycles: FloatArray | None
    estimator: str
    diagnostics: Diagnostics

    def headline(self) -> str:
        """Return the summary line: table, device, estimator, number of operations and total time."""
        total_ns = known_sum(np.array([row.duration_ns for row in self.totals]))
        rows = len(self.prediction.duration_ns)
        by = f"{self.path} on {self.hardware} by {self.estimator}"
        return f"{by}, {rows:,} operations, {total_ns / 1e6:,.3f} ms"

    @property
    def basis(self) -> Mapping[str, float]:
        """Return the share of each basis of estimates in the total time, the largest first."""
        labels = self.prediction.basis
        time_ns = np.nan_to_num(self.prediction.duration_ns, posinf=0.0)
        sums = np.bincount(labels.row, time_ns, len(labels.names))
        order = [number for number in np.argsort(-sums).tolist() if sums[number] > 0]
        return {labels.names[number]: float(sums[number] / sums.sum()) for number in order}

    @property
    def basis_text(self) -> str:
        """Return the shares of :attr:`basis` as text; empty if no estimate states its basis."""
        return basis_text(self.basis)

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.estimate_table/1``."""
        return document_bytes(table_estimate_document(self))

    def table(self) -> Table:
        """Return the result as a table with one row per row of the table, with the columns that
        ``--out`` adds to it.
        """
        return _estimate_table(self, slice(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotals:
    """Totals of one kind of operation and element type over the rows with a time. ``unknown`` counts the rows
    without a time. ``estimators`` lists the estimators of the times.
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


_Table = Annotated[
    str | Path,
    Option(
        "Read a table of operations (CSV or Parquet) instead of SRC.",
        flag="table",
        metavar="FILE",
        panel=INPUT,
        is_required=False,
    ),
]


@checked()
def estimate_table(
    path: _Table,
    hardware: EstimatedOn,
    *,
    estimator: ComparedEstimator = STEP_ESTIMATOR,
    array: Array = "",
    dataflow: Dataflow = "",
    diagnostics: Diagnostics | None = None,
) -> TableEstimates:
    """Estimate the time of each operation of a table (CSV, CSV.gz, Parquet) on ``hardware``.

    The table has a layout of :mod:`hespas.measurements`, or lists sizes. Its times and devices are ignored.
    Raises ``FormatError`` for another table, ``UsageError`` for an unknown name, ``UnsupportedError`` for an
    estimator of programs only.

    Examples:
        >>> from pathlib import Path
        >>> size = Path("sizes.csv").write_text("kind,dtype,m,n,k\\nmatmul,bf16,4096,4096,4096\\n")
        >>> hespas.estimate_table("sizes.csv", "H100-SXM")
        <TableEstimates: sizes.csv on H100-SXM by composite, 1 operations, 0.180 ms>
    """
    from hespas.measurements.read import DEFAULT_DTYPE, read_operations

    device, estimator = load_device(hardware), operation_estimator(with_array(estimator, array, dataflow))
    model = load_estimator(estimator)
    candidate: object = model
    if not isinstance(candidate, OperationModel):
        usable = (listed.name for listed in list_estimators() if listed.available)
        names = [name for name in usable if callable(getattr(estimator_factory(name), "predict", None))]
        raise UnsupportedError(
            f"estimator {model.name!r} takes programs, not tables",
            hint=f"use one of: {', '.join(names)}",
        )
    sink = diagnostics if diagnostics is not None else Diagnostics()
    job = _TableJob(Path(path))
    for batch in read_operations(path):
        job.add(batch, candidate, device, sink)
    if job.assumed_dtype:
        text = f"no column dtype: {DEFAULT_DTYPE} is assumed"
        sink.warning("table.no-dtype", job.path.name, text, count=job.rows)
    return job.result(device, estimator, sink)


@dataclass(slots=True)
class _KindSums:
    """Sums over those rows of a table, of one kind and element type, that have been estimated so far."""

    operations: int = 0
    unknown: int = 0
    parts: list[tuple[float, float, float, float]] = field(
        default_factory=list[tuple[float, float, float, float]]
    )
    estimators: dict[str, None] = field(default_factory=dict[str, None])


@dataclass(slots=True)
class _TableJob:
    """Estimation of a table in batches: the times and sums of the rows so far. The operations themselves are
    not stored.
    """

    path: Path
    rows: int = 0
    assumed_dtype: bool = False
    sums: dict[tuple[str, str], _KindSums] = field(default_factory=dict[tuple[str, str], _KindSums])
    models: dict[str, int] = field(default_factory=dict[str, int])
    times: list[Prediction] = field(default_factory=list[Prediction])
    cycles: list[FloatArray] = field(default_factory=list[FloatArray])

    def add(
        self, batch: OperationRows, model: OperationModel, device: Device, diagnostics: Diagnostics
    ) -> None:
        """Estimate a batch of rows and add their times to the sums."""
        count = len(batch.ops)
        rows = np.flatnonzero(batch.kept)
        text = "rows are not operations: no duration"
        diagnostics.warning("table.no-operation", self.path.name, text, count=count - len(rows))
        ops = batch.ops.take(rows)
        distinct, index = ops.distinct()
        index_of_row = np.full(count, -1, np.int64)
        index_of_row[rows] = index
        prediction = predict_with(model, distinct, device, diagnostics).take(index_of_row)
        cycles = None
        if isinstance(model, _CountsCycles):
            cycles = np.full(count, np.nan)
            cycles[rows] = model.cycles(ops, device)
        self.rows += count
        self.assumed_dtype = batch.assumed_dtype
        all_ops = batch.ops
        key = all_ops.kind.row.astype(np.int64) * len(all_ops.scheme.names) + all_ops.scheme.row
        _, first = np.unique(key, return_index=True)
        for start in sorted(first.tolist()):
            members = np.flatnonzero(key == key[start])
            sums = self.sums.setdefault((all_ops.kind[start], all_ops.scheme[start]), _KindSums())
            duration = prediction.duration_ns[members]
            codes: list[int] = np.unique(prediction.estimator[members]).tolist()
            sums.operations += len(members)
            sums.unknown += int(np.isnan(duration).sum())
            sums.estimators.update(
                dict.fromkeys(prediction.models[number] for number in codes if number >= 0)
            )
            columns = (all_ops.flops[members], all_ops.bytes_moved[members], duration)
            counted = np.nan if cycles is None else known_sum(cycles[members])
            flops, moved, time = (known_sum(column) for column in columns)
            sums.parts.append((flops, moved, time, counted))
        numbers = np.array(
            [self.models.setdefault(name, len(self.models)) for name in prediction.models], np.int8
        )
        estimator = np.where(prediction.estimator < 0, -1, numbers[prediction.estimator]).astype(np.int8)
        self.times.append(replace(prediction, estimator=estimator))
        if cycles is not None:
            self.cycles.append(cycles)

    def result(self, device: Device, estimator: str, diagnostics: Diagnostics) -> TableEstimates:
        """Return the estimates of all rows."""
        basis, end = LabelColumn(self.rows), 0
        for batch in self.times:
            start, end = end, end + len(batch.basis)
            basis.fill(np.arange(start, end), batch.basis)
        totals: list[KindTotals] = []
        for (kind, dtype), sums in self.sums.items():
            flops, moved, time, cycles = (
                known_sum(np.array(column)) for column in zip(*sums.parts, strict=True)
            )
            totals.append(
                KindTotals(
                    kind=kind,
                    dtype=dtype,
                    operations=sums.operations,
                    unknown=sums.unknown,
                    flops=flops,
                    bytes_moved=moved,
                    duration_ns=time,
                    cycles=cycles,
                    estimators=tuple(sums.estimators),
                )
            )
        return TableEstimates(
            path=self.path,
            hardware=device.name,
            totals=tuple(totals),
            prediction=Prediction(
                duration_ns=np.concatenate([batch.duration_ns for batch in self.times]),
                low_ns=np.concatenate([batch.low_ns for batch in self.times]),
                high_ns=np.concatenate([batch.high_ns for batch in self.times]),
                models=tuple(self.models),
                estimator=np.concatenate([batch.estimator for batch in self.times]),
                basis=basis.labels(),
            ),
            cycles=np.concatenate(self.cycles) if self.cycles else None,
            estimator=estimator,
            diagnostics=diagnostics,
        )


class TableDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas estimate --table --json``."""

    schema: Literal["hespas.estimate_table/1"] = "hespas.estimate_table/1"
    hardware: str
    estimator: str
    operations: Count
    unknown: Count
    duration_ns: Figure
    basis: list[BasisShare]
    kinds: tuple[KindTotals, ...]


def table_estimate_document(done: TableEstimates) -> msgspec.Struct:
    """Return totals per kind of operation: ``hespas.estimate_table/1``."""
    return TableDocument(
        inputs=[str(done.path)],
        diagnostics=findings(done.diagnostics),
        hardware=done.hardware,
        estimator=done.estimator,
        operations=len(done.prediction.duration_ns),
        unknown=sum(row.unknown for row in done.totals),
        duration_ns=known_sum(np.array([row.duration_ns for row in done.totals])),
        basis=basis_of(done.basis),
        kinds=tuple(done.totals),
    )


def write_table_estimates(
    done: TableEstimates, path: Path, diagnostics: Diagnostics | None = None, *, overwrite: bool = False
) -> None:
    """Write the table as Parquet if the name ends in ``.parquet``, else as CSV, with the columns
    ``duration_ns``, ``low_ns``, ``high_ns``, ``estimator``, ``basis`` and, for estimators that count them,
    ``cycles``. Unknown figures are empty. The file is written atomically; ``-`` is standard output. Raises
    ``OutputError`` if the file exists and ``overwrite`` is false.

    If the table has a column with one of these names, it is renamed to ``table_NAME``, with a warning. Texts
    that a spreadsheet would calculate get an apostrophe in front.
    """
    from hespas.measurements import text_batches

    renamed_columns: list[str] = []

    def fill(temporary: Path) -> None:
        # a trailing comma makes empty columns without a name, which are left out
        columns: list[str] = []
        used: set[str] = set()
        for frame in text_batches(done.path):
            columns = [str(name) for name in frame.columns]
            nameless = [name for name in columns if name.startswith("Unnamed:") and name not in used]
            if not nameless or done.path.suffix == ".parquet":
                used.update(columns)
                break
            used.update(name for name in nameless if bool((frame[name] != "").any()))
        columns = [name for name in columns if not name.startswith("Unnamed:") or name in used]

        def tables() -> Iterator[Table]:
            start = 0
            for frame in text_batches(done.path):
                rows = slice(start, start + len(frame))
                added = _estimate_table(done, rows)
                renamed_columns[:] = sorted(set(added.columns) & set(columns))
                own = {
                    f"table_{name}" if name in renamed_columns else name: frame[name].tolist()
                    for name in columns
                }
                yield Table((*map(Column, own), *added.header), {**own, **added.columns})
                start = rows.stop

        write_tables(tables(), temporary, is_parquet=path.suffix == ".parquet")

    put(path, fill, overwrite=overwrite)
    if renamed_columns and diagnostics is not None:
        listed = ", ".join(f"{name} as table_{name}" for name in renamed_columns)
        text = f"the table's own columns are written under other names: {listed}"
        diagnostics.warning("table.renamed-column", done.path.name, text, count=len(renamed_columns))


def _estimate_table(done: TableEstimates, rows: slice) -> Table:
    """Return the columns that are added to the table."""
    prediction = done.prediction
    numbers: list[int] = prediction.estimator[rows].tolist()
    evidence: list[int] = prediction.basis.row[rows].tolist()
    columns: dict[str, Values] = {
        "duration_ns": prediction.duration_ns[rows],
        "low_ns": prediction.low_ns[rows],
        "high_ns": prediction.high_ns[rows],
        "estimator": [prediction.models[number] if number >= 0 else "" for number in numbers],
        "basis": [
            prediction.basis.names[row] if number >= 0 else ""
            for row, number in zip(evidence, numbers, strict=True)
        ],
    }
    if done.cycles is not None:
        cycles: list[float] = done.cycles[rows].tolist()
        columns["cycles"] = [None if isnan(value) else int(value) for value in cycles]
    kinds: dict[str, Kind] = {"estimator": "text", "basis": "text", "cycles": "count"}
    return Table(tuple(column_of(name, kinds.get(name, "number")) for name in columns), columns)
