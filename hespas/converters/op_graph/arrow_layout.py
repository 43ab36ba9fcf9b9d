"""The Arrow layout of an op graph, ``hespas.op-graph-arrow/1``.

An uncompressed Arrow IPC *file* (https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format) with one
record batch, of one row, per rank class. A column of the graph is one list-typed field, so every array of
the hub is one contiguous buffer of the file and is used where it lies::

    table = pyarrow.ipc.open_file(pyarrow.memory_map("step.opgraph")).read_all()
    table["flops"][0].as_py(), table["data_deps"][0], table["strings"][0]

* ``name`` is the class's name, ``nodes`` its number of nodes.
* A node column (``flops``) is ``large_list<T>``; a list of one item stands for that value at every node
  (``id`` is always in full).
* A ragged column (``data_deps``, ``types.dims``) is ``large_list<large_list<T>>``; of a node column, no rows
  say that no node has any. Dependencies are node numbers.
* ``strings``, ``extra.value`` and ``attachments.*`` are ``large_list<large_binary>``; text is UTF-8 in which
  lone surrogates are encoded too. ``*_row`` columns, ``label``, ``key``, ``reduction`` and ``encoding`` are
  rows of ``strings``, whose row 0 is empty.
* ``group_sets`` and ``permutations`` hold each entry as the JSON format spells it.
* Columns of a side table are called ``table.column`` and have one item per row of that table.
* The schema's metadata says ``schema`` (this version), ``hespas_version`` and ``workload``: a JSON object
  with ``name``, ``metadata`` and ``rank_class`` (runs of ``[class, how many ranks]``; class -1: not
  here).

Codes are those of :mod:`hespas.graph.opgraph` and :data:`hespas.graph.DTYPES`; -1 and NaN are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from msgspec import Struct

from hespas.converters.op_graph.document import Count, Row
from hespas.graph import CollectiveTable, ContractionTable, P2pTable
from hespas.graph.opgraph import NODE_DTYPES

__all__ = [
    "ARROW_SCHEMA_ID",
    "COLUMNS",
    "RAGGED_NODE_COLUMNS",
    "TABLE_DTYPES",
    "ColumnSpec",
    "Header",
    "Shape",
]

ARROW_SCHEMA_ID = "hespas.op-graph-arrow/1"


class Shape(Enum):
    """How a field of one class is stored."""

    TEXT = "large_binary"
    COUNT = "int64"
    FLAT = "large_list<T>"
    RAGGED = "large_list<large_list<T>>"
    BINARY = "large_list<large_binary>"


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One field of the schema; ``dtype`` is the NumPy type of its items (bytes where binary)."""

    name: str
    shape: Shape
    dtype: type[np.generic] = np.uint8


class Header(Struct, kw_only=True, forbid_unknown_fields=True):
    """The ``workload`` entry of the schema's metadata."""

    name: str
    metadata: dict[str, str]
    rank_class: tuple[tuple[Row, Count], ...]


TABLE_DTYPES: dict[str, Mapping[str, type[np.generic]]] = {
    "collectives": CollectiveTable.DTYPES,
    "p2p": {**P2pTable.DTYPES, "host": np.uint8},
    "contractions": ContractionTable.DTYPES,
    "regions": {"parent": np.int32, "kind": np.uint8, "trips": np.float64, "label": np.int32},
    "carried": {"region": np.int32, "producer": np.int32, "consumer": np.int32},
    "extra": {"node": np.int32, "key": np.int32, "tag": np.int16},
    "types": {"dtype": np.int16, "bytes": np.float64, "bounded": np.uint8, "encoding": np.int32},
}
"""The flat columns of each side table; all columns of a table have the same length."""

RAGGED_NODE_COLUMNS = ("data_deps", "control_deps", "operands", "results")

COLUMNS: tuple[ColumnSpec, ...] = (
    ColumnSpec("name", Shape.TEXT),
    ColumnSpec("nodes", Shape.COUNT, np.int64),
    *(ColumnSpec(name, Shape.FLAT, dtype) for name, dtype in NODE_DTYPES.items()),
    *(ColumnSpec(name, Shape.RAGGED, np.int32) for name in RAGGED_NODE_COLUMNS),
    *(
        ColumnSpec(f"{table}.{name}", Shape.FLAT, dtype)
        for table, columns in TABLE_DTYPES.items()
        for name, dtype in columns.items()
    ),
    ColumnSpec("types.dims", Shape.RAGGED, np.int64),
    ColumnSpec("extra.value", Shape.BINARY),
    ColumnSpec("strings", Shape.BINARY),
    ColumnSpec("group_sets", Shape.BINARY),
    ColumnSpec("permutations", Shape.BINARY),
    ColumnSpec("attachments.name", Shape.BINARY),
    ColumnSpec("attachments.content", Shape.BINARY),
)
"""All fields in file order."""
