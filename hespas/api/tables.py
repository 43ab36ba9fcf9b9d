"""Estimates as a table, one row per operation."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from hespas.api.estimation import NodeEstimates
from hespas.api.io import put
from hespas.files.cells import inert_cell
from hespas.graph import Estimate, OpClass, OpGraph

__all__ = ["write_estimates_csv"]

_HEADER = (
    "rank_class",
    "node",
    "name",
    "op",
    "op_class",
    "executions",
    "flops",
    "useful_flops",
    "transcendentals",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "low_ns",
    "high_ns",
    "estimator",
    "bound",
    "framework_op",
    "source",
)


def write_estimates_csv(done: NodeEstimates, path: Path, *, overwrite: bool = False) -> None:
    """Write all nodes of all rank classes, at once or not at all; unknown is an empty field, ``-`` is
    standard output. Raises ``OutputError`` where the file exists already, without ``overwrite``.
    """

    def fill(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8", errors="replace") as stream:
            writer = csv.writer(stream)
            writer.writerow(_HEADER)
            pairs = zip(done.workload.classes, done.estimates, strict=True)
            rows = chain.from_iterable(_rows(index, *pair) for index, pair in enumerate(pairs))
            writer.writerows([inert_cell(cell) for cell in row] for row in rows)

    put(path, fill, overwrite=overwrite)


def _rows(index: int, graph: OpGraph, estimated: Estimate) -> Iterator[tuple[object, ...]]:
    strings = list(graph.strings)
    names: list[str] = [strings[row] for row in graph.name_row.tolist()]
    ops: list[str] = [strings[row] for row in graph.op_row.tolist()]
    classes = [OpClass(code).name.lower() for code in graph.op_class.tolist()]
    numbers = (
        graph.multiplicity,
        graph.flops,
        graph.useful_flops,
        graph.transcendentals,
        graph.bytes_read,
        graph.bytes_written,
        estimated.duration_ns,
        estimated.low_ns,
        estimated.high_ns,
    )
    figures = [[_cell(value) for value in column.tolist()] for column in numbers]
    said = _named(estimated.said_by.tolist(), estimated.estimators)
    bound = _named(estimated.bound.tolist(), estimated.bounds)
    frameworks: list[str] = [strings[row] for row in graph.framework_row.tolist()]
    sources: list[str] = [strings[row] for row in graph.source_row.tolist()]
    for node, row in enumerate(
        zip(names, ops, classes, *figures, said, bound, frameworks, sources, strict=True)
    ):
        yield (index, node, *row)


def _named(codes: list[int], names: tuple[str, ...]) -> list[str]:
    return [names[code] if code >= 0 else "" for code in codes]


def _cell(value: float) -> float | str:
    return value if value == value else ""  # noqa: PLR0124 # NaN is the only number unlike itself
