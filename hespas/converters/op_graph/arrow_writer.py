"""Writes an op graph as an Arrow IPC file; layout in :mod:`.arrow_layout`. Columns are not copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas._version import __version__
from hespas.converters.format import Value, WriteOptions
from hespas.converters.op_graph.arrow_io import ArrowColumns, Binary, Ragged, save_arrow
from hespas.converters.op_graph.arrow_layout import (
    ARROW_SCHEMA_ID,
    RAGGED_NODE_COLUMNS,
    TABLE_DTYPES,
    Header,
)
from hespas.converters.op_graph.json_writer import check_writable
from hespas.converters.op_graph.ranks import encode_ranks
from hespas.converters.op_graph.spelling import escape_text, spell_groups, spell_permutation
from hespas.graph import Csr, Diagnostics, OpGraph, Workload
from hespas.graph.errors import OutputError, UsageError
from hespas.graph.opgraph import NODE_DTYPES

__all__ = ["write_arrow"]

_ENCODER = msgspec.json.Encoder()


def write_arrow(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a workload; extra memory is small whatever the number of nodes.

    Raises as :func:`check_writable` does, and ``OutputError`` where the disk refuses.
    """
    del diagnostics  # nothing is lost: every column has a field
    workload = check_writable(value, path, options)
    if options.name.endswith(".gz"):
        raise UsageError(
            "an Arrow op graph can be mapped into memory by other programs, so it is not compressed",
            path=options.name,
            hint="drop .gz, or write JSON: .json.gz",
        )
    header = Header(
        name=escape_text(workload.name),
        metadata={escape_text(key): escape_text(text) for key, text in workload.metadata.items()},
        rank_class=encode_ranks(workload.rank_class),
    )
    metadata = {
        "schema": ARROW_SCHEMA_ID,
        "hespas_version": __version__,
        "workload": _ENCODER.encode(header).decode(),
    }
    try:
        save_arrow(path, metadata, _classes(workload, options))
    except OSError as error:
        raise OutputError(error.strerror or str(error), path=str(path), hint="check the disk") from error


def _classes(workload: Workload, options: WriteOptions) -> Iterator[ArrowColumns]:
    total, done = sum(map(len, workload.classes)), 0
    for graph in workload.classes:
        yield _columns(graph)
        done += len(graph)
        if options.progress:
            options.progress(done, total)


def _columns(graph: OpGraph) -> ArrowColumns:
    columns = ArrowColumns()
    columns.texts["name"] = _utf8(graph.name)
    columns.counts["nodes"] = len(graph)
    for name in NODE_DTYPES:
        columns.flat[name] = _once_if_constant(getattr(graph, name))
    columns.flat["id"] = graph.id
    for name in RAGGED_NODE_COLUMNS:
        columns.ragged[name] = _ragged(getattr(graph, name))
    for table in ("collectives", "p2p", "contractions", "regions", "extra", "types"):
        for name in TABLE_DTYPES[table]:
            columns.flat[f"{table}.{name}"] = getattr(getattr(graph, table), name)
    for name in TABLE_DTYPES["carried"]:
        columns.flat[f"carried.{name}"] = getattr(graph.regions, f"carried_{name}")
    columns.ragged["types.dims"] = Ragged(graph.types.dim_offsets, graph.types.dims)
    columns.binary["extra.value"] = Binary(graph.extra.offsets, graph.extra.values)
    columns.binary["strings"] = Binary(graph.strings.offsets, graph.strings.buffer)
    groups = [_ENCODER.encode(spell_groups(entry)) for entry in graph.group_sets]
    permutations = [_ENCODER.encode(spell_permutation(entry)) for entry in graph.permutations]
    columns.binary["group_sets"] = Binary.from_items(groups)
    columns.binary["permutations"] = Binary.from_items(permutations)
    columns.binary["attachments.name"] = Binary.from_items(map(_utf8, graph.attachments))
    columns.binary["attachments.content"] = Binary.from_items(graph.attachments.values())
    return columns


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _once_if_constant(column: NDArray[np.generic]) -> NDArray[np.generic]:
    return column[:1] if 0 in column.strides else column


def _ragged(rows: Csr) -> Ragged:
    if not len(rows.values):
        return Ragged(np.zeros(1, np.int64), rows.values)
    return Ragged(rows.offsets, rows.values)
