"""Reader and writer of op graphs as Arrow IPC files; the layout is in :mod:`.arrow_layout`.

A file is read once and its buffers become the graph's columns without a copy, so that a million nodes need
the memory of the file. Later changes of the file have no effect on the graph. Row numbers that refer to other
tables are checked before the graph is built. Writing copies no columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas._version import __version__
from hespas.converters.format import ReadOptions, Value, WriteOptions, warn_of_whole_job
from hespas.converters.op_graph.arrow_layout import (
    ARROW_SCHEMA_ID,
    NODE_FIELDS,
    RAGGED_NODE_COLUMNS,
    TABLE_DTYPES,
    ArrowColumns,
    ArrowHeader,
    ArrowSource,
    BinaryColumn,
    RaggedColumn,
    save_arrow,
)
from hespas.converters.op_graph.document import (
    GroupSpec,
    PermutationSpec,
    escape_text,
    parse_groups,
    parse_permutation,
    spell_groups,
    spell_permutation,
    unescape_text,
)
from hespas.converters.op_graph.json_writer import check_writable
from hespas.converters.op_graph.legality import (
    FaultReporter,
    check_cycle,
    check_ids,
    check_values,
    decode_ranks,
    encode_ranks,
)
from hespas.graph import (
    DTYPES,
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    Diagnostics,
    ExtraTable,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    RaggedArray,
    RegionKind,
    RegionTable,
    Resource,
    StringTable,
    TensorTypes,
    Workload,
)
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, InvariantError, OutputError, UnsupportedError, UsageError
from hespas.graph.opgraph import NODE_DTYPES

__all__ = ["check_columns", "read_arrow", "write_arrow"]

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Decoded = TypeVar("_Decoded")
_HEADER = msgspec.json.Decoder(ArrowHeader)
_GROUPS = msgspec.json.Decoder(GroupSpec)
_PERMUTATION = msgspec.json.Decoder(PermutationSpec)
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, InvariantError)
_REWRITE_HINT = "write the file again from its source"


def read_arrow(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Return the workload of an op graph in an Arrow file.

    Raises ``FormatError`` for a damaged file or an invalid reference and, unless ``options.lenient``, for
    duplicate ids and cycles. Raises ``UnsupportedError`` for another version or compressed buffers.
    """
    source = ArrowSource(path, options.max_bytes)
    stated_schema = source.metadata.get(b"schema", b"").decode("utf-8", "replace")[:80]
    if not stated_schema.startswith(ARROW_SCHEMA_ID.partition("/")[0] + "/"):
        raise FormatError(
            "an Arrow file, but not an op graph: its metadata has no op-graph schema",
            path=str(path),
            position="schema metadata",
            hint="write an op graph with hespas-convert --to op-graph-arrow",
        )
    if stated_schema != ARROW_SCHEMA_ID:
        raise UnsupportedError(
            f"the file has schema {stated_schema!r}, but this version reads {ARROW_SCHEMA_ID!r}",
            path=str(path),
            hint="write it again with a matching version of hespas",
        )
    source.check_fields()
    fault = FaultReporter(str(path), options.lenient, diagnostics)
    if not source.num_classes:
        raise FormatError(
            "the file has no record batch", path=str(path), position="footer", hint=_REWRITE_HINT
        )
    try:
        header = _HEADER.decode(source.metadata.get(b"workload", b""))
        ranks = decode_ranks(header.rank_class, None, source.num_classes)
        name = unescape_text(header.name)
        metadata = {unescape_text(key): unescape_text(text) for key, text in header.metadata.items()}
    except _DECODE_ERRORS as error:
        raise FormatError(
            str(error), path=str(path), position="schema metadata 'workload'", hint=_REWRITE_HINT
        ) from error
    graphs = tuple(_ClassReader(columns, str(path)).graph(fault, len(ranks)) for columns in source.classes())
    workload = Workload(name=name, classes=graphs, rank_class=ranks, metadata=metadata)
    return warn_of_whole_job(workload, "op-graph", path, diagnostics)


class _ClassReader:
    """Reader of one rank class from Arrow columns that :func:`check_columns` has checked."""

    def __init__(self, columns: ArrowColumns, path: str) -> None:
        check_columns(columns, path)
        self._columns = columns
        self._path = path
        self._nodes = columns.counts["nodes"]

    def graph(self, fault: FaultReporter, num_ranks: int) -> OpGraph:
        check_ids(self._flat("id", np.uint64), fault)
        try:
            strings = self._columns.binary["strings"]
            names = map(self._text, self._columns.binary["attachments.name"].items())
            values = self._columns.binary["extra.value"]
            dims = self._columns.ragged["types.dims"]
            graph = OpGraph(
                name=self._text(self._columns.texts["name"]),
                strings=StringTable(strings.data, strings.offsets),
                types=TensorTypes(
                    **self._table("types"),
                    dim_offsets=dims.offsets,
                    dims=dims.values.astype(np.int64, copy=False),
                ),
                group_sets=self._entries("group_sets", lambda item: parse_groups(_GROUPS.decode(item))),
                permutations=self._entries(
                    "permutations", lambda item: parse_permutation(_PERMUTATION.decode(item))
                ),
                **{column: self._node(name, NODE_DTYPES[column]) for name, column in NODE_FIELDS.items()},
                data_deps=self._rows("data_deps"),
                control_deps=self._rows("control_deps"),
                operands=self._rows("operands"),
                results=self._rows("results"),
                collectives=CollectiveTable(**self._table("collectives")),
                p2p=P2pTable(**self._table("p2p")),
                contractions=ContractionTable(**self._table("contractions")),
                regions=RegionTable(
                    **self._table("regions"),
                    **{f"carried_{name}": column for name, column in self._table("carried").items()},
                ),
                extra=ExtraTable(**self._table("extra"), offsets=values.offsets, values=values.data),
                attachments=dict(
                    zip(names, self._columns.binary["attachments.content"].items(), strict=True)
                ),
            )
        except InvariantError as error:
            raise FormatError(
                error.message, path=self._path, position="field 'id' and the others", hint=_REWRITE_HINT
            ) from error
        check_cycle(graph, fault)
        check_values(graph, num_ranks, fault, "field ")
        return graph

    def _flat(self, name: str, dtype: type[_Scalar]) -> NDArray[_Scalar]:
        return self._columns.flat[name].astype(dtype, copy=False)

    def _node(self, column_name: str, dtype: type[np.generic]) -> NDArray[Any]:
        values = self._flat(column_name, dtype)
        if len(values) == self._nodes:
            return values
        return np.broadcast_to(values[0], (self._nodes,))

    def _rows(self, name: str) -> RaggedArray:
        rows = self._columns.ragged[name]
        if len(rows.offsets) == 1:
            return RaggedArray.empty(self._nodes)
        return RaggedArray(rows.offsets, rows.values.astype(np.int32, copy=False))

    def _table(self, table: str) -> dict[str, NDArray[Any]]:
        """Return the columns of a side table (such as collectives) by name, with the types that a graph
        uses.
        """
        return {
            name: self._flat(f"{table}.{name}", np.bool_ if f"{table}.{name}" in _TRUTHS else dtype)
            for name, dtype in TABLE_DTYPES[table].items()
        }

    def _entries(self, table: str, decode: Callable[[bytes], _Decoded]) -> tuple[_Decoded, ...]:
        """Return the decoded entries of a table whose entries the file stores as JSON."""
        entries: list[_Decoded] = []
        for row, item in enumerate(self._columns.binary[table].items()):
            try:
                entries.append(decode(item))
            except _DECODE_ERRORS as error:
                raise FormatError(
                    f"broken entry: {error}",
                    path=self._path,
                    position=f"field {table!r}, item {row}",
                    hint=_REWRITE_HINT,
                ) from error
        return tuple(entries)

    def _text(self, encoded: bytes) -> str:
        try:
            return encoded.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FormatError(
                f"a name is not UTF-8: {error.reason}",
                path=self._path,
                position="field 'name' or 'attachments.name'",
                hint=_REWRITE_HINT,
            ) from error


_MAX_NODES = 2**31 - 1
_TEXT_CHUNK_BYTES = 1 << 20

_TRUTHS = ("types.bounded", "p2p.host")
_CODES = {
    "kind": len(NodeKind),
    "op_class": len(OpClass),
    "resource": len(Resource),
    "collectives.kind": len(CollectiveKind),
    "regions.kind": len(RegionKind),
    **dict.fromkeys(_TRUTHS, 2),
}
"""Columns of codes 0 .. n - 1."""

_MAY_BE_UNKNOWN = {
    "region": "regions.parent",
    "collectives.group_set": "group_sets",
    "p2p.permutation": "permutations",
}
"""Columns with rows of another column, or -1."""

_TEXT_ROWS = (
    "name_row",
    "op_row",
    "source_row",
    "framework_row",
    "collectives.reduction",
    "regions.label",
    "extra.key",
    "types.encoding",
)
_ELEMENT_TYPES = (
    "rate_dtype",
    "contractions.lhs",
    "contractions.rhs",
    "contractions.accumulator",
    "types.dtype",
)
_NODE_NUMBERS = {
    "collectives.node": 0,
    "p2p.node": 0,
    "contractions.node": 0,
    "extra.node": -1,
    "carried.producer": 0,
    "carried.consumer": 0,
}
"""Columns of node numbers, and their least value."""

_SORTED = ("collectives.node", "p2p.node", "contractions.node", "extra.node")


def check_columns(columns: ArrowColumns, path: str) -> None:
    """Check lengths, ranges, order and texts of one class. Raises ``FormatError``. O(size), little memory."""
    checks = _ColumnChecks(columns, path)
    checks.lengths()
    checks.references()
    checks.order()
    checks.texts()


@dataclass(frozen=True, slots=True)
class _ColumnChecks:
    columns: ArrowColumns
    path: str

    @property
    def nodes(self) -> int:
        return self.columns.counts["nodes"]

    def lengths(self) -> None:
        flat, nodes = self.columns.flat, self.nodes
        if not 0 <= nodes <= _MAX_NODES or len(flat["id"]) != nodes:
            raise self._error(f"{nodes} nodes have {len(flat['id'])} ids", "field 'nodes'")
        for name in NODE_FIELDS:
            if len(flat[name]) not in {1, nodes}:
                raise self._error(f"{name} has {len(flat[name])} rows, expected {nodes}", f"field {name!r}")
        for name in RAGGED_NODE_COLUMNS:
            rows = len(self.columns.ragged[name].offsets) - 1
            if rows not in {0, nodes}:
                raise self._error(f"{name} has {rows} rows, expected {nodes}", f"field {name!r}")
        for table, dtypes in TABLE_DTYPES.items():
            first, *others = (f"{table}.{name}" for name in dtypes)
            for other in others:
                self._same(other, len(flat[other]), first)
        self._same("types.dims", len(self.columns.ragged["types.dims"].offsets) - 1, "types.dtype")
        self._same("extra.value", len(self.columns.binary["extra.value"].offsets) - 1, "extra.node")
        names, contents = (self.columns.binary[f"attachments.{part}"].offsets for part in ("name", "content"))
        if len(names) != len(contents):
            raise self._error(
                f"attachments have {len(names) - 1} names and {len(contents) - 1} contents",
                "field 'attachments.name'",
            )

    def _same(self, name: str, rows: int, other: str) -> None:
        if rows != len(self.columns.flat[other]):
            raise self._error(
                f"{name} has {rows} rows, {other} has {len(self.columns.flat[other])}", f"field {name!r}"
            )

    def references(self) -> None:
        columns = self.columns
        strings = len(columns.binary["strings"].offsets) - 1
        types = len(columns.flat["types.dtype"])
        for name, count in _CODES.items():
            self._within(name, columns.flat[name], 0, count)
        for name, target in _MAY_BE_UNKNOWN.items():
            self._within(name, columns.flat[name], -1, self._rows(target))
        for name in _TEXT_ROWS:
            self._within(name, columns.flat[name], 0, strings)
        for name in _ELEMENT_TYPES:
            self._within(name, columns.flat[name], -1, len(DTYPES))
        for name, low in _NODE_NUMBERS.items():
            self._within(name, columns.flat[name], low, self.nodes)
        self._within("carried.region", columns.flat["carried.region"], 0, self._rows("regions.parent"))
        for name in RAGGED_NODE_COLUMNS:
            high = types if name in {"operands", "results"} else self.nodes
            ragged = columns.ragged[name]
            index = _first_outside(ragged.values, 0, high)
            if index >= 0:
                node = int(np.searchsorted(ragged.offsets, index, side="right")) - 1
                raise self._error(
                    f"{name} {ragged.values[index]} is outside 0..{high - 1}",
                    position=f"node {columns.flat['id'][node]}",
                )
        self._within("types.dims", columns.ragged["types.dims"].values, -1, 2**63 - 1)

    def _rows(self, column: str) -> int:
        binary = self.columns.binary.get(column)
        return len(self.columns.flat[column]) if binary is None else len(binary.offsets) - 1

    def _within(self, name: str, values: NDArray[np.generic], low: int, high: int) -> None:
        row = _first_outside(values, low, high)
        if row < 0:
            return
        owner_table = name.partition(".")[0] if "." in name else ""
        owners = self.columns.flat.get(f"{owner_table}.node") if owner_table else None
        number = row if not owner_table else -1 if owners is None else int(owners.astype(np.int64)[row])
        if 0 <= number < self.nodes:
            owner = f"node {self.columns.flat['id'][number]}"
        else:
            owner = f"field {name!r}, row {row}"
        raise self._error(f"{name} {values[row]} is outside {low}..{high - 1}", position=owner)

    def order(self) -> None:
        flat = self.columns.flat
        for name in _SORTED:
            whole = flat[name].astype(np.int64, copy=False)
            falls = np.flatnonzero(whole[1:] < whole[:-1])
            if len(falls):
                row = int(falls[0]) + 1
                text = f"{name} is not sorted: {whole[row]} follows {whole[row - 1]}"
                raise self._error(text, f"field {name!r}, row {row}")
        for table in ("collectives", "p2p"):
            owners, counts = np.unique(flat[f"{table}.node"], return_counts=True)
            if bool((counts > 1).any()):
                node = int(owners[np.argmax(counts > 1)])
                raise self._error(f"node {node} has two rows in {table}", f"field '{table}.node'")
        parent = flat["regions.parent"].astype(np.int64)
        wrong = np.flatnonzero((parent < -1) | (parent >= np.arange(len(parent))))
        if len(wrong):
            raise self._error(
                f"region {int(wrong[0])} has parent {int(parent[wrong[0]])}, expected an earlier one",
                "field 'regions.parent'",
            )

    def texts(self) -> None:
        strings = self.columns.binary["strings"]
        if len(strings.offsets) < 2 or strings.offsets[1] != 0:
            raise self._error("row 0 of strings is not empty", "field 'strings'")
        row = _first_bad_text(strings)
        if row >= 0:
            raise self._error("the string is not UTF-8", position=f"field 'strings', row {row}")

    def _error(self, message: str, position: str) -> FormatError:
        return FormatError(message, path=self.path, position=position, hint=_REWRITE_HINT)


def _first_outside(values: NDArray[np.generic], low: int, high: int) -> int:
    """Return the first index with a value outside ``low <= value < high``, -1 for none."""
    if not len(values) or (int(np.min(values)) >= low and int(np.max(values)) < high):
        return -1
    whole = values.astype(np.int64, copy=False)
    return int(np.flatnonzero((whole < low) | (whole >= high))[0])


def _first_bad_text(strings: BinaryColumn) -> int:
    """Return a row close to the first text that is not UTF-8 (surrogates are allowed); -1 if all texts are
    valid. Texts are decoded in pieces to save memory.
    """
    bounds: IntArray = strings.offsets
    row, rows = 0, len(bounds) - 1
    while row < rows:
        limit = int(bounds[row]) + _TEXT_CHUNK_BYTES
        end = max(int(np.searchsorted(bounds, limit, side="right")) - 1, row + 1)
        piece = bytes(strings.data[int(bounds[row]) : int(bounds[end])])
        try:
            piece.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            position = int(bounds[row]) + error.start
            return int(np.searchsorted(bounds, position, side="right")) - 1
        starts = bounds[row:end] - bounds[row]
        inside = starts[starts < len(piece)]
        first_bytes = np.frombuffer(piece, np.uint8)[inside]
        cut = np.flatnonzero((first_bytes & 0xC0) == 0x80)
        if len(cut):
            return row + int(cut[0])
        row = end
    return -1


_ENCODER = msgspec.json.Encoder()


def write_arrow(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a workload as an op graph in an Arrow file. The extra memory is small for any number of nodes.

    Raises the errors of :func:`check_writable`, and ``OutputError`` for a failed write.
    """
    del diagnostics  # every column has a field, so nothing is lost
    workload = check_writable(value, path, options)
    if options.name.endswith(".gz"):
        raise UsageError(
            "other programs can map an Arrow op graph into memory, so it is not compressed",
            path=options.name,
            hint="drop .gz, or write JSON: .json.gz",
        )
    header = ArrowHeader(
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
    for name, column in NODE_FIELDS.items():
        values = getattr(graph, column)
        columns.flat[name] = values[:1] if 0 in values.strides else values
    columns.flat["id"] = graph.id
    for name in RAGGED_NODE_COLUMNS:
        rows = getattr(graph, name)
        if not len(rows.values):
            columns.ragged[name] = RaggedColumn(np.zeros(1, np.int64), rows.values)
        else:
            columns.ragged[name] = RaggedColumn(rows.offsets, rows.values)
    for table in ("collectives", "p2p", "contractions", "regions", "extra", "types"):
        for name in TABLE_DTYPES[table]:
            columns.flat[f"{table}.{name}"] = getattr(getattr(graph, table), name)
    for name in TABLE_DTYPES["carried"]:
        columns.flat[f"carried.{name}"] = getattr(graph.regions, f"carried_{name}")
    columns.ragged["types.dims"] = RaggedColumn(graph.types.dim_offsets, graph.types.dims)
    columns.binary["extra.value"] = BinaryColumn(graph.extra.offsets, graph.extra.values)
    columns.binary["strings"] = BinaryColumn(graph.strings.offsets, graph.strings.buffer)
    groups = [_ENCODER.encode(spell_groups(entry)) for entry in graph.group_sets]
    permutations = [_ENCODER.encode(spell_permutation(entry)) for entry in graph.permutations]
    columns.binary["group_sets"] = BinaryColumn.from_items(groups)
    columns.binary["permutations"] = BinaryColumn.from_items(permutations)
    columns.binary["attachments.name"] = BinaryColumn.from_items(map(_utf8, graph.attachments))
    columns.binary["attachments.content"] = BinaryColumn.from_items(graph.attachments.values())
    return columns


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
