"""Times for the operations of a table, one per row: what ``hespas estimate --table`` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hespas.api.documents import Json, diagnostics_rows, finite, header
from hespas.api.streams import put
from hespas.estimators import load_estimator
from hespas.estimators.by_operation import OperationModel, Prediction
from hespas.estimators.listing import list_estimators
from hespas.estimators.operations import Operations
from hespas.estimators.registry import estimator_factory
from hespas.files.cells import inert, inert_cell
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import known_sum
from hespas.hardware import Device, load_device

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "KindTotals",
    "TableEstimates",
    "estimate_table",
    "kind_totals",
    "table_estimate_document",
    "write_table_estimates",
]

_TEXT_SUFFIXES = (".csv", ".gz")


@runtime_checkable
class _Predicts(Protocol):
    def predict(
        self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None
    ) -> Prediction: ...


@runtime_checkable
class _CountsCycles(Protocol):
    def cycles(self, ops: Operations, device: Device) -> FloatArray: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableEstimates:
    """What a model says of each row of a table; columns of shape ``(rows,)``. ``cycles`` is None for models
    that count none.
    """

    path: Path
    hardware: str
    ops: Operations
    prediction: Prediction
    cycles: FloatArray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotals:
    """Rows of one kind of operation and element type: sums over those with a time. ``unknown`` have none;
    ``estimators`` says who spoke.
    """

    kind: str
    dtype: str
    operations: int
    unknown: int
    flops: float
    bytes_moved: float
    duration_ns: float
    cycles: float
    estimators: tuple[str, ...]


def estimate_table(
    path: str | Path,
    hardware: str,
    *,
    estimator: str = "roofline",
    diagnostics: Diagnostics | None = None,
) -> TableEstimates:
    """What ``estimator`` says of each operation of a table (CSV, CSV.gz, Parquet) on ``hardware``.

    The table is one that :mod:`hespas.estimators.measurements` knows, or lists sizes; times in it and the
    devices it names play no part. Raises ``FormatError`` for another, ``UsageError`` for an unknown name,
    ``UnsupportedError`` for an estimator that takes programs only.
    """
    from hespas.estimators.measurements.asked import DEFAULT_DTYPE, read_asked

    device, model = load_device(hardware), load_estimator(estimator)
    candidate: object = model
    if not isinstance(candidate, _Predicts):
        raise UnsupportedError(
            f"estimator {model.name!r} takes programs, not tables",
            hint=f"one of: {', '.join(_names_for_tables())}",
        )
    found = diagnostics if diagnostics is not None else Diagnostics()
    asked = read_asked(path)
    where = Path(path).name
    if asked.assumed_dtype:
        text = f"no column dtype: taken to be {DEFAULT_DTYPE}"
        found.warning("table.no-dtype", where, text, count=len(asked.ops))
    left_out = int((~asked.kept).sum())
    found.warning("table.no-operation", where, "rows stand for no operation: no duration", count=left_out)
    rows = np.flatnonzero(asked.kept)
    said = _asked_once(candidate, asked.ops.take(rows), device, found)
    cycles: FloatArray | None = None
    if isinstance(candidate, _CountsCycles):
        cycles = _spread(candidate.cycles(asked.ops.take(rows), device), rows, len(asked.ops))
    return TableEstimates(
        path=Path(path),
        hardware=device.name,
        ops=asked.ops,
        prediction=_of_all(said, rows, len(asked.ops)),
        cycles=cycles,
    )


def _names_for_tables() -> list[str]:
    """Registered estimators that can be used here and take operations one by one."""
    usable = (listed.name for listed in list_estimators() if listed.available)
    return [name for name in usable if callable(getattr(estimator_factory(name), "predict", None))]


def _asked_once(
    model: OperationModel | _Predicts, ops: Operations, device: Device, diagnostics: Diagnostics
) -> Prediction:
    """What a model says of operations, equal ones asked once."""
    distinct, place = ops.distinct()
    said = model.predict(distinct, device, diagnostics)
    return Prediction(
        duration_ns=said.duration_ns[place],
        low_ns=said.low_ns[place],
        high_ns=said.high_ns[place],
        models=said.models,
        said_by=said.said_by[place],
    )


def _spread(values: FloatArray, rows: IntArray, count: int) -> FloatArray:
    found = np.full(count, np.nan)
    found[rows] = values
    return found


def _of_all(said: Prediction, rows: IntArray, count: int) -> Prediction:
    """A prediction of some rows as one of all."""
    said_by = np.full(count, -1, np.int8)
    said_by[rows] = said.said_by
    return Prediction(
        duration_ns=_spread(said.duration_ns, rows, count),
        low_ns=_spread(said.low_ns, rows, count),
        high_ns=_spread(said.high_ns, rows, count),
        models=said.models,
        said_by=said_by,
    )


def kind_totals(done: TableEstimates) -> tuple[KindTotals, ...]:
    """Sums per kind and element type, in the order of the table."""
    ops, said = done.ops, done.prediction
    key = ops.kind.row.astype(np.int64) * len(ops.scheme.names) + ops.scheme.row
    _, first = np.unique(key, return_index=True)
    found: list[KindTotals] = []
    for start in sorted(first.tolist()):
        rows = np.flatnonzero(key == key[start])
        duration = said.duration_ns[rows]
        speakers: list[int] = np.unique(said.said_by[rows]).tolist()
        found.append(
            KindTotals(
                kind=ops.kind[start],
                dtype=ops.scheme[start],
                operations=len(rows),
                unknown=int(np.isnan(duration).sum()),
                flops=known_sum(ops.flops[rows]),
                bytes_moved=known_sum(ops.bytes_moved[rows]),
                duration_ns=known_sum(duration),
                cycles=np.nan if done.cycles is None else known_sum(done.cycles[rows]),
                estimators=tuple(said.models[number] for number in speakers if number >= 0),
            )
        )
    return tuple(found)


def table_estimate_document(
    done: TableEstimates, estimator: str, diagnostics: Diagnostics
) -> Mapping[str, Json]:
    """Sums of the table per kind: ``hespas.estimate_table/1``."""
    document = header("estimate_table", [str(done.path)])
    totals = kind_totals(done)
    document["hardware"] = done.hardware
    document["estimator"] = estimator
    document["diagnostics"] = diagnostics_rows(diagnostics)
    document["operations"] = len(done.ops)
    document["unknown"] = sum(row.unknown for row in totals)
    document["duration_ns"] = finite(known_sum(np.array([row.duration_ns for row in totals])))
    document["kinds"] = [
        {name: finite(value) if isinstance(value, float) else value for name, value in asdict(row).items()}
        for row in totals
    ]
    return document


def write_table_estimates(
    done: TableEstimates, path: Path, diagnostics: Diagnostics | None = None, *, overwrite: bool = False
) -> None:
    """Write the table as CSV, row by row as it is, with the columns ``duration_ns``, ``low_ns``, ``high_ns``,
    ``estimator`` and where the model counts them ``cycles``. Unknown is an empty field. At once or not at
    all; ``-`` is standard output. Raises ``OutputError`` where the file exists, without ``overwrite``.

    A column of the table that has one of these names is written as ``table_NAME``, and said so. Texts that a
    spreadsheet would calculate get an apostrophe before them.
    """
    frame = _texts_of(done.path)
    gained = dict(_gained(done))
    taken = sorted(set(gained) & {str(name) for name in frame.columns})
    renamed = frame.rename(columns={name: f"table_{name}" for name in taken})
    if taken and diagnostics is not None:
        listed = ", ".join(f"{name} as table_{name}" for name in taken)
        text = f"the table's own columns are written under other names: {listed}"
        diagnostics.warning("table.renamed-column", done.path.name, text, count=len(taken))
    texts = renamed.select_dtypes(exclude="number").map(inert_cell)
    safe = renamed.assign(**{str(name): column for name, column in texts.items()})
    whole = safe.rename(columns=lambda name: inert(str(name))).assign(**gained)
    put(path, lambda temporary: whole.to_csv(temporary, index=False, errors="replace"), overwrite=overwrite)


def _texts_of(path: Path) -> pd.DataFrame:
    """The table as it is written: texts of a CSV are not read as numbers and back."""
    import pandas as pd

    if path.suffix not in _TEXT_SUFFIXES:
        return pd.read_parquet(path)
    frame = pd.read_csv(path, dtype=str, keep_default_na=False, na_filter=False)
    # A trailing comma makes a column without a name or content.
    nameless = [
        name for name in frame.columns if str(name).startswith("Unnamed:") and (frame[name] == "").all()
    ]
    return frame.drop(columns=nameless)


def _gained(done: TableEstimates) -> Iterator[tuple[str, list[float | str]]]:
    said = done.prediction
    for name, column in (
        ("duration_ns", said.duration_ns),
        ("low_ns", said.low_ns),
        ("high_ns", said.high_ns),
    ):
        yield name, _cells(column)
    speakers: list[int] = said.said_by.tolist()
    yield "estimator", [said.models[number] if number >= 0 else "" for number in speakers]
    if done.cycles is not None:
        yield "cycles", [int(each) if isinstance(each, float) else each for each in _cells(done.cycles)]


def _cells(column: FloatArray) -> list[float | str]:
    values: list[float] = column.tolist()
    return ["" if isnan(value) else value for value in values]
