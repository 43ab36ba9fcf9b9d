"""A simulated run as rows, for tables: what ran where, from when, and for how long."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from hespas.converters.tracks.displayed import Simulated
from hespas.converters.tracks.scene import TextColumn
from hespas.converters.tracks.simulated import classes_of_spans, span_names
from hespas.graph import OpGraph, Profile, StringTableBuilder
from hespas.graph.columns import IntArray, SmallIntArray
from hespas.graph.tensors import DYNAMIC

__all__ = ["profile_of_run"]


def profile_of_run(run: Simulated, device: str) -> Profile:
    """One event per span, in the order of the timeline, as if ``device`` had been measured: its name should
    say that it was not. The stream is the number of the resource in ``run.timeline.resources``.

    Raises ``UsageError`` where the timeline does not fit its workload.
    """
    timeline = run.timeline
    strings = StringTableBuilder()
    strings.add("")
    op_row, shapes_row, dtype_row = (np.zeros(len(timeline), np.int32) for _ in range(3))
    op_class = np.zeros(len(timeline), np.int8)
    for graph, spans in classes_of_spans(timeline, run.workload):
        own = spans[timeline.node[spans] >= 0]
        node = timeline.node[own]
        op_row[spans] = _added(strings, span_names(timeline, graph, spans))
        op_class[own] = graph.op_class[node]
        shapes_row[own], dtype_row[own] = _operands(strings, graph, node)
    return Profile.of(
        run.workload.name,
        (device,),
        strings.build(),
        start_ns=timeline.start_ns,
        duration_ns=timeline.end_ns - timeline.start_ns,
        op_row=op_row,
        op_class=op_class,
        shapes_row=shapes_row,
        dtype_row=dtype_row,
        rank=timeline.rank.astype(np.int32, copy=False),
        stream=timeline.resource.astype(np.int64),
    )


def _added(strings: StringTableBuilder, column: TextColumn) -> SmallIntArray:
    """The texts of a column as rows of ``strings``."""
    used, place = np.unique(column.rows, return_inverse=True)
    listed: list[int] = used.tolist()
    rows = np.array([strings.add(column.texts[row]) for row in listed], np.int32)
    return rows[place.reshape(-1)]


def _operands(
    strings: StringTableBuilder, graph: OpGraph, node: IntArray | SmallIntArray
) -> tuple[SmallIntArray, SmallIntArray]:
    """Shapes and element types of the operands of each node, as JSON lists."""
    used, place = np.unique(node.astype(np.int64), return_inverse=True)
    operands = graph.operands.take(used.astype(np.int64)).to_lists()
    shapes = [strings.add(_shapes(graph, rows)) for rows in operands]
    dtypes = [strings.add(_dtypes(graph, rows)) for rows in operands]
    place = place.reshape(-1)
    return np.array(shapes, np.int32)[place], np.array(dtypes, np.int32)[place]


def _shapes(graph: OpGraph, rows: Sequence[int]) -> str:
    shapes = [[None if extent == DYNAMIC else extent for extent in graph.types.shape(row)] for row in rows]
    return json.dumps(shapes, separators=(",", ":")) if rows else ""


def _dtypes(graph: OpGraph, rows: Sequence[int]) -> str:
    found = [graph.types.dtype_of(row) for row in rows]
    names = [None if dtype is None else dtype.name for dtype in found]
    return json.dumps(names, separators=(",", ":")) if rows else ""
