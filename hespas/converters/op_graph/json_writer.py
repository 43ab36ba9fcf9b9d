"""Writer of op graphs as JSON: header and tables with indentation, one line per node, streamed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from hespas._version import __version__
from hespas.converters.format import Value, WriteOptions
from hespas.converters.op_graph.document import (
    SCHEMA_ID,
    ContractionEntry,
    DocumentCollective,
    ExtraEntry,
    GroupSpec,
    NodeEntry,
    Number,
    P2pEntry,
    PermutationSpec,
    RegionEntry,
    TensorTypeEntry,
    default_type_bytes,
    escape_text,
    inferred_kind,
    spell_dtype,
    spell_groups,
    spell_number,
    spell_permutation,
    spell_type,
)
from hespas.converters.op_graph.legality import encode_ranks, oversized_type, repeated_ids
from hespas.files.streams import open_output
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    NodeKind,
    OpClass,
    OpGraph,
    RaggedArray,
    RegionKind,
    Resource,
    StringTable,
    Workload,
)
from hespas.graph.builder import region_executions
from hespas.graph.columns import ColumnTable, FloatArray, SmallIntArray
from hespas.graph.errors import InvariantError, UnsupportedError, UsageError
from hespas.graph.progress import Progress

__all__ = ["check_writable", "write_json"]

_ENCODER = msgspec.json.Encoder()
_REGIONS = {member.value: member.name.lower() for member in RegionKind}

_Entry = (
    int
    | str
    | GroupSpec
    | TensorTypeEntry
    | PermutationSpec
    | RegionEntry
    | ExtraEntry
    | NodeEntry
    | dict[str, str]
    | tuple[int, int]
    | tuple[int, int, int]
)


def check_writable(value: Value, path: Path, options: WriteOptions) -> Workload:
    """Return ``value`` as a workload that can be written.

    Raises ``UsageError`` for a profile or a subset of ranks, and ``UnsupportedError`` for a tensor type that
    the readers reject.
    """
    if not isinstance(value, Workload):
        raise UsageError(
            "an op graph holds a workload, not a profile",
            path=str(path),
            hint="choose another `target_format`",
        )
    if options.ranks is not None and options.ranks != range(value.num_ranks):
        raise UsageError(
            "an op graph holds all ranks in one file: groups and peers refer to them",
            path=str(path),
            hint="omit `ranks`: rank classes make a file of 65,536 ranks as small as one of 8",
        )
    for graph in value.classes:
        row = oversized_type(graph.types)
        if row >= 0:
            types = graph.types
            shown = spell_type(int(types.dtype[row]), types.shape(row), bool(types.bounded[row]))
            raise UnsupportedError(
                f"{graph.name}: a tensor of more than 2**63 elements: {shown}", hint="correct the shape"
            )
    return value


def write_json(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a workload as an op graph in JSON. Memory: one chunk of nodes. If the name ends in ``.gz``, the
    file is compressed.

    Raises the errors of :func:`check_writable`, and ``OutputError`` for a failed write.
    """
    del diagnostics  # every column has a field, so nothing is lost
    workload = check_writable(value, path, options)
    with open_output(path, packed=options.name.endswith(".gz")) as stream:
        _JsonGraphWriter(stream, options.progress).workload(workload)


class _JsonGraphWriter:
    """Writer of an op graph as JSON: it writes the structure, and msgspec encodes the values."""

    def __init__(self, stream: BinaryIO, progress: Progress | None) -> None:
        self._stream = stream
        self._progress = progress
        self._done, self._total = 0, 0

    def workload(self, workload: Workload) -> None:
        self._total = sum(map(len, workload.classes))
        metadata = {escape_text(key): escape_text(text) for key, text in workload.metadata.items()}
        self._stream.write(b"{\n")
        self._field(2, "schema", SCHEMA_ID)
        self._field(2, "hespas_version", __version__)
        self._field(2, "name", escape_text(workload.name))
        self._field(2, "num_ranks", workload.num_ranks)
        self._field(2, "metadata", metadata)
        self._list(2, "rank_class", encode_ranks(workload.rank_class))
        self._stream.write(b'  "rank_classes": [')
        for index, graph in enumerate(workload.classes):
            self._stream.write(b",\n    {\n" if index else b"\n    {\n")
            self._graph(graph)
            self._stream.write(b"    }")
        self._stream.write(b"\n  ]\n}\n")

    def _graph(self, graph: OpGraph) -> None:
        speller = _NodeSpeller(graph)
        self._field(6, "name", escape_text(graph.name))
        self._list(6, "types", _types(graph))
        self._list(6, "group_sets", [spell_groups(groups) for groups in graph.group_sets])
        self._list(6, "permutations", [spell_permutation(entry) for entry in graph.permutations])
        table = graph.regions
        self._list(
            6,
            "regions",
            [
                RegionEntry(
                    kind=_REGIONS[int(table.kind[row])],
                    parent=int(table.parent[row]),
                    trips=spell_number(float(table.trips[row])),
                    label=escape_text(graph.strings[int(table.label[row])]),
                )
                for row in range(len(table))
            ],
        )
        regions = graph.regions
        producers = speller.identity(regions.carried_producer)
        consumers = speller.identity(regions.carried_consumer)
        self._list(
            6, "carried", list(zip(regions.carried_region.tolist(), producers, consumers, strict=True))
        )
        self._list(6, "extra", speller.extras(-1, 0)[0])
        if graph.attachments:
            self._stream.write(b'      "attachments": {')
            for index, (name, content) in enumerate(graph.attachments.items()):
                key = _ENCODER.encode(escape_text(name))
                self._stream.write(b",\n        " if index else b"\n        ")
                self._stream.write(key + b": " + _ENCODER.encode(content))
            self._stream.write(b"\n      },\n")
        if speller.by_position:
            self._field(6, "deps_by", "position")
        self._stream.write(b'      "nodes": [')
        for number, chunk in enumerate(speller.chunks()):
            self._stream.write(b",\n" if number else b"\n")
            self._items(8, chunk)
            self._done += len(chunk)
            if self._progress:
                self._progress(self._done, self._total)
        self._stream.write(b"\n      ]\n")

    def _field(self, indent: int, name: str, value: _Entry) -> None:
        self._stream.write(b'%*s"%s": %s,\n' % (indent, b"", name.encode(), _ENCODER.encode(value)))

    def _list(self, indent: int, name: str, items: Sequence[_Entry]) -> None:
        """Write a list with one item per line; write nothing for an empty list."""
        if not items:
            return
        self._stream.write(b'%*s"%s": [\n' % (indent, b"", name.encode()))
        self._items(indent + 2, items)
        self._stream.write(b"\n%*s],\n" % (indent, b""))

    def _items(self, indent: int, items: Iterable[_Entry]) -> None:
        pad = b" " * indent
        self._stream.write(b",\n".join(pad + _ENCODER.encode(item) for item in items))


def _types(graph: OpGraph) -> list[str | TensorTypeEntry]:
    types = graph.types
    entries: list[str | TensorTypeEntry] = []
    for row, reference in enumerate(_type_spellings(graph)):
        spelling = reference.partition("#")[0]
        size, encoding = float(types.bytes[row]), graph.strings[int(types.encoding[row])]
        expected = default_type_bytes(int(types.dtype[row]), types.shape(row))
        same = size == expected or bool(np.isnan(size) and np.isnan(expected))
        if same and not encoding:
            entries.append(spelling)
            continue
        stated_bytes = msgspec.UNSET if same else spell_number(size)
        entries.append(TensorTypeEntry(type=spelling, encoding=escape_text(encoding), bytes=stated_bytes))
    return entries


_Item = TypeVar("_Item")

_CHUNK_NODES = 4096
_LINE_BREAKS = str.maketrans("", "", "\t\n\r")
"""Characters of readable text that are not printable."""

_KINDS = {member.value: member.name.lower() for member in NodeKind}
_CLASSES = {member.value: member.name.lower() for member in OpClass}
_RESOURCES = {member.value: "" if member is Resource.DEVICE else member.name.lower() for member in Resource}
"""Names of resources; the device is the default and is omitted."""
_COLLECTIVES = {member.value: member.name.lower() for member in CollectiveKind}


def _type_spellings(graph: OpGraph) -> list[str]:
    """Return the text of each tensor type in the type table, by which nodes refer to it. If several rows have
    the same text, ``#`` and the row are appended.
    """
    types = graph.types
    spelled = [
        spell_type(int(types.dtype[row]), types.shape(row), bool(types.bounded[row]))
        for row in range(len(types))
    ]
    counts: dict[str, int] = {}
    for spelling in spelled:
        counts[spelling] = counts.get(spelling, 0) + 1
    return [f"{spelling}#{row}" if counts[spelling] > 1 else spelling for row, spelling in enumerate(spelled)]


class _TextDecoder:
    """Decoder of string table rows to escaped texts. Each distinct string of a chunk is escaped once."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings

    def column(self, rows: SmallIntArray) -> list[str]:
        distinct, positions = np.unique(rows, return_inverse=True)
        texts = [escape_text(self._strings[row]) for row in distinct.tolist()]
        return [texts[position] for position in positions.tolist()]


@dataclass(frozen=True, slots=True)
class _DefaultedColumn:
    """Cost column with default values ``expected``. Only values that differ from their default are
    written.
    """

    column: FloatArray
    expected: FloatArray

    def spelled(self, part: slice) -> list[Number | UnsetType]:
        values, expected = self.column[part], self.expected[part]
        same = (values == expected) | (np.isnan(values) & np.isnan(expected))
        return [
            UNSET if is_expected else spell_number(value)
            for value, is_expected in zip(values.tolist(), same.tolist(), strict=True)
        ]


def _spelled(column: FloatArray, part: slice) -> list[Number]:
    return [spell_number(value) for value in column[part].tolist()]


def _names(codes: NDArray[np.integer], names: dict[int, str]) -> list[str]:
    return [names[code] for code in codes.tolist()]


class _NodeSpeller:
    """Converter of a graph's nodes to the structs that are encoded as JSON, a few thousand nodes at a
    time.
    """

    def __init__(self, graph: OpGraph) -> None:
        """Prepare the data of the graph that all chunks need."""
        self._graph = graph
        self._texts = _TextDecoder(graph.strings)
        self._types = _type_spellings(graph)
        self._useful_flops = _DefaultedColumn(graph.useful_flops, graph.flops)
        self._executions = _DefaultedColumn(graph.executions, region_executions(graph.regions, graph.region))
        self.by_position = bool(len(repeated_ids(graph.id)))

    def identity(self, nodes: NDArray[np.integer]) -> list[int]:
        """Return the numbers by which the document refers to ``nodes``: their positions if ids are not
        unique, else their ids.
        """
        if self.by_position:
            return [int(node) for node in nodes.tolist()]
        return [int(value) for value in self._graph.id[nodes].tolist()]

    def chunks(self) -> Iterator[list[NodeEntry]]:
        """Yield all nodes in order, as lists of a few thousand structs."""
        for start in range(0, len(self._graph), _CHUNK_NODES):
            part = slice(start, min(start + _CHUNK_NODES, len(self._graph)))
            graph, texts = self._graph, self._texts
            columns: dict[str, Iterable[object]] = {
                "id": graph.id[part].tolist(),
                "name": texts.column(graph.name_id[part]),
                "op": texts.column(graph.op_id[part]),
                "op_class": _names(graph.op_class[part], _CLASSES),
                "kind": _names(graph.kind[part], _KINDS),
                "deps": self._references(graph.data_deps, part),
                "control_deps": self._references(graph.control_deps, part),
                "operands": self._type_rows(graph.operands, part),
                "results": self._type_rows(graph.results, part),
                "rate_dtype": map(spell_dtype, graph.rate_dtype[part].tolist()),
                "flops": _spelled(graph.flops, part),
                "useful_flops": self._useful_flops.spelled(part),
                "transcendentals": _spelled(graph.transcendentals, part),
                "bytes_read": _spelled(graph.bytes_read, part),
                "bytes_written": _spelled(graph.bytes_written, part),
                "duration_ns": _spelled(graph.duration_ns, part),
                "multiplicity": self._executions.spelled(part),
                "region": graph.region[part].tolist(),
                "stream": graph.stream[part].tolist(),
                "resource": _names(graph.resource[part], _RESOURCES),
                "source": texts.column(graph.source_id[part]),
                "framework_op": texts.column(graph.framework_id[part]),
            }
            names = tuple(columns)
            make = cast("Callable[..., NodeEntry]", NodeEntry)
            rows = zip(*columns.values(), strict=True)
            nodes = [make(**dict(zip(names, row, strict=True))) for row in rows]
            self._add_collectives(part, nodes)
            self._add_p2p(part, nodes)
            self._add_contractions(part, nodes)
            for node, entries in zip(nodes, self.extras(part.start, part.stop), strict=True):
                node.extra = entries
                kind, op_class = inferred_kind(
                    collective=node.collective is not None,
                    p2p=node.p2p is not None,
                    contraction=bool(node.contractions),
                )
                if node.kind == _KINDS[kind]:
                    node.kind = ""
                if node.op_class == _CLASSES[op_class]:
                    node.op_class = ""
            yield nodes

    def _references(self, deps: RaggedArray, part: slice) -> list[tuple[int, ...]]:
        bounds = deps.offsets[part.start : part.stop + 1]
        return _rows(self.identity(deps.values[bounds[0] : bounds[-1]]), bounds)

    def _type_rows(self, rows: RaggedArray, part: slice) -> list[tuple[str, ...]]:
        bounds = rows.offsets[part.start : part.stop + 1]
        flat: list[int] = rows.values[bounds[0] : bounds[-1]].tolist()
        return _rows([self._types[row] for row in flat], bounds)

    def _add_collectives(self, part: slice, nodes: list[NodeEntry]) -> None:
        for node, values in _side_rows(self._graph.collectives, part, nodes):
            kind, group_set, comm_bytes, operand_bytes, result_bytes, channel, reduction = values
            if node.collective is not None:
                raise InvariantError(f"node {node.id} has two rows in collectives")
            node.collective = DocumentCollective(
                kind=_COLLECTIVES[kind],
                group_set=None if group_set < 0 else group_set,
                comm_bytes=spell_number(comm_bytes),
                operand_bytes=spell_number(operand_bytes),
                result_bytes=spell_number(result_bytes),
                channel=channel,
                reduction=escape_text(self._graph.strings[reduction]),
            )

    def _add_p2p(self, part: slice, nodes: list[NodeEntry]) -> None:
        for entry, (permutation, comm_bytes, tag, host) in _side_rows(self._graph.p2p, part, nodes):
            if entry.p2p is not None:
                raise InvariantError(f"node {entry.id} has two rows in p2p")
            shown = None if permutation < 0 else permutation
            entry.p2p = P2pEntry(permutation=shown, comm_bytes=spell_number(comm_bytes), tag=tag, host=host)

    def _add_contractions(self, part: slice, nodes: list[NodeEntry]) -> None:
        for node, values in _side_rows(self._graph.contractions, part, nodes):
            batch, m, n, k, flops, useful_flops, *types, products, window = values
            same = flops == useful_flops or (isnan(flops) and isnan(useful_flops))
            lhs, rhs, accumulator = map(spell_dtype, types)
            entry = ContractionEntry(
                batch=batch,
                m=m,
                n=n,
                k=k,
                flops=spell_number(flops),
                useful_flops=UNSET if same else spell_number(useful_flops),
                lhs=lhs,
                rhs=rhs,
                accumulator=accumulator,
                products=products,
                window=window,
            )
            node.contractions = (*node.contractions, entry)

    def extras(self, start: int, end: int) -> list[tuple[ExtraEntry, ...]]:
        """Return the preserved attributes of nodes ``start .. end - 1``, one tuple per node. Node -1 is the
        file itself.
        """
        table = self._graph.extra
        bounds = np.searchsorted(table.node, np.arange(start, end + 1))
        rows = range(int(bounds[0]), int(bounds[-1]))
        entries: list[ExtraEntry] = []
        for row in rows:
            key = escape_text(self._graph.strings[int(table.key[row])])
            entry = ExtraEntry(key=key, tag=int(table.tag[row]))
            value = table.value(row)
            with suppress(UnicodeDecodeError):
                text = value.decode()
                if text.translate(_LINE_BREAKS).isprintable():
                    entry.text, value = text, b""
            entry.value = value
            entries.append(entry)
        return _rows(entries, bounds)


def _rows(flat: Sequence[_Item], bounds: NDArray[np.integer]) -> list[tuple[_Item, ...]]:
    first = int(bounds[0])
    return [tuple(flat[start - first : end - first]) for start, end in pairwise(bounds.tolist())]


def _side_rows(
    table: ColumnTable, part: slice, nodes: list[NodeEntry]
) -> Iterator[tuple[NodeEntry, list[Any]]]:
    """Yield the rows of a side table (such as collectives) for the nodes in ``part``. Each row is the entry
    of its node and the values of all columns except ``node``.
    """
    columns = [getattr(table, name) for name in table.DTYPES]
    rows = slice(*np.searchsorted(columns[0], [part.start, part.stop]).tolist())
    for node, *values in zip(*(column[rows].tolist() for column in columns), strict=True):
        yield nodes[node - part.start], values
