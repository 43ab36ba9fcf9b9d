"""Reads an op graph from an Arrow IPC file; layout in :mod:`.arrow_layout`.

The file is read once and its buffers become the graph's columns without a copy, so a million nodes cost what
the file has. What happens to the file later does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.op_graph.arrow_checks import check_columns
from hespas.converters.op_graph.arrow_io import ArrowColumns, ArrowSource
from hespas.converters.op_graph.arrow_layout import ARROW_SCHEMA_ID, Header
from hespas.converters.op_graph.document import GroupSpec, PermutationSpec
from hespas.converters.op_graph.legality import check_values
from hespas.converters.op_graph.ranks import decode_ranks
from hespas.converters.op_graph.spelling import parse_groups, parse_permutation, unescape_text
from hespas.converters.op_graph.structure import Fault, check_cycle, check_ids
from hespas.graph import (
    CollectiveTable,
    ContractionTable,
    Csr,
    Diagnostics,
    ExtraTable,
    GroupSet,
    OpGraph,
    P2pTable,
    Permutation,
    RegionTable,
    StringTable,
    TensorTypes,
    Workload,
)
from hespas.graph.columns import SmallIntArray
from hespas.graph.errors import FormatError, InvariantError, UnsupportedError

__all__ = ["read_arrow"]

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Decoded = TypeVar("_Decoded")
_HEADER = msgspec.json.Decoder(Header)
_GROUPS = msgspec.json.Decoder(GroupSpec)
_PERMUTATION = msgspec.json.Decoder(PermutationSpec)
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, InvariantError)
_REWRITE_HINT = "write the file again from its source"


def read_arrow(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """The workload of an Arrow file.

    Raises ``FormatError`` for a broken file or reference, and, unless ``options.lenient``, for duplicate ids
    and cycles; ``UnsupportedError`` for another version or compressed buffers.
    """
    source = ArrowSource(path, options.max_bytes)
    _check_version(source, str(path))
    source.check_fields()
    fault = Fault(str(path), options.lenient, diagnostics)
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
    return Workload(name=name, classes=graphs, rank_class=ranks, metadata=metadata)


def _check_version(source: ArrowSource, path: str) -> None:
    stated = source.metadata.get(b"schema", b"").decode("utf-8", "replace")[:80]
    if not stated.startswith(ARROW_SCHEMA_ID.partition("/")[0] + "/"):
        raise FormatError(
            "an Arrow file, but no op graph: its metadata names no schema of ours",
            path=path,
            position="schema metadata",
            hint="files of this format are written by hespas-convert --to op-graph-arrow",
        )
    if stated != ARROW_SCHEMA_ID:
        raise UnsupportedError(
            f"the file says schema {stated!r}, this version reads {ARROW_SCHEMA_ID!r}",
            path=path,
            hint="write it again with a matching version of hespas",
        )


def _groups(item: bytes) -> GroupSet:
    return parse_groups(_GROUPS.decode(item))


def _permutation(item: bytes) -> Permutation:
    return parse_permutation(_PERMUTATION.decode(item))


class _ClassReader:
    """Makes the graph of one class of checked columns."""

    def __init__(self, columns: ArrowColumns, path: str) -> None:
        check_columns(columns, path)
        self._columns = columns
        self._path = path
        self._nodes = columns.counts["nodes"]

    def graph(self, fault: Fault, num_ranks: int) -> OpGraph:
        check_ids(self._flat("id", np.uint64), fault)
        try:
            graph = self._build()
        except InvariantError as error:
            raise FormatError(
                error.message, path=self._path, position="field 'id' and the others", hint=_REWRITE_HINT
            ) from error
        check_cycle(graph, fault)
        check_values(graph, num_ranks, fault, "field ")
        return graph

    def _flat(self, name: str, dtype: type[_Scalar]) -> NDArray[_Scalar]:
        return self._columns.flat[name].astype(dtype, copy=False)

    def _node(self, name: str, dtype: type[_Scalar]) -> NDArray[_Scalar]:
        column = self._flat(name, dtype)
        if len(column) == self._nodes:
            return column
        return np.broadcast_to(column[0], (self._nodes,))

    def _rows(self, name: str) -> Csr:
        rows = self._columns.ragged[name]
        if len(rows.offsets) == 1:
            return Csr.empty(self._nodes)
        return Csr(rows.offsets, rows.values.astype(np.int32, copy=False))

    def _build(self) -> OpGraph:
        strings = self._columns.binary["strings"]
        return OpGraph(
            name=self._text(self._columns.texts["name"]),
            strings=StringTable(strings.data, strings.offsets),
            types=self._types(),
            group_sets=self._group_sets(),
            permutations=self._permutations(),
            id=self._node("id", np.uint64),
            name_row=self._node("name_row", np.int32),
            op_row=self._node("op_row", np.int32),
            kind=self._node("kind", np.uint8),
            op_class=self._node("op_class", np.uint8),
            resource=self._node("resource", np.uint8),
            stream=self._node("stream", np.int32),
            region=self._node("region", np.int32),
            rate_dtype=self._node("rate_dtype", np.int16),
            source_row=self._node("source_row", np.int32),
            framework_row=self._node("framework_row", np.int32),
            flops=self._node("flops", np.float64),
            useful_flops=self._node("useful_flops", np.float64),
            transcendentals=self._node("transcendentals", np.float64),
            bytes_read=self._node("bytes_read", np.float64),
            bytes_written=self._node("bytes_written", np.float64),
            duration_ns=self._node("duration_ns", np.float64),
            multiplicity=self._node("multiplicity", np.float64),
            data_deps=self._rows("data_deps"),
            control_deps=self._rows("control_deps"),
            operands=self._rows("operands"),
            results=self._rows("results"),
            collectives=self._collectives(),
            p2p=self._p2p(),
            contractions=self._contractions(),
            regions=self._regions(),
            extra=self._extra(),
            attachments=self._attachments(),
        )

    def _ints(self, name: str) -> SmallIntArray:
        return self._flat(name, np.int32)

    def _types(self) -> TensorTypes:
        dims = self._columns.ragged["types.dims"]
        return TensorTypes(
            dtype=self._flat("types.dtype", np.int16),
            dim_offsets=dims.offsets,
            dims=dims.values.astype(np.int64, copy=False),
            bytes=self._flat("types.bytes", np.float64),
            bounded=self._flat("types.bounded", np.uint8).view(np.bool_),
            encoding=self._ints("types.encoding"),
        )

    def _collectives(self) -> CollectiveTable:
        return CollectiveTable(
            node=self._ints("collectives.node"),
            kind=self._flat("collectives.kind", np.uint8),
            group_set=self._ints("collectives.group_set"),
            comm_bytes=self._flat("collectives.comm_bytes", np.float64),
            operand_bytes=self._flat("collectives.operand_bytes", np.float64),
            result_bytes=self._flat("collectives.result_bytes", np.float64),
            channel=self._flat("collectives.channel", np.int64),
            reduction=self._ints("collectives.reduction"),
        )

    def _p2p(self) -> P2pTable:
        return P2pTable(
            node=self._ints("p2p.node"),
            permutation=self._ints("p2p.permutation"),
            comm_bytes=self._flat("p2p.comm_bytes", np.float64),
            tag=self._flat("p2p.tag", np.int64),
            host=self._flat("p2p.host", np.uint8).view(np.bool_),
        )

    def _contractions(self) -> ContractionTable:
        return ContractionTable(
            node=self._ints("contractions.node"),
            batch=self._flat("contractions.batch", np.int64),
            m=self._flat("contractions.m", np.int64),
            n=self._flat("contractions.n", np.int64),
            k=self._flat("contractions.k", np.int64),
            flops=self._flat("contractions.flops", np.float64),
            useful_flops=self._flat("contractions.useful_flops", np.float64),
            lhs=self._flat("contractions.lhs", np.int16),
            rhs=self._flat("contractions.rhs", np.int16),
            accumulator=self._flat("contractions.accumulator", np.int16),
            products=self._flat("contractions.products", np.uint8),
        )

    def _regions(self) -> RegionTable:
        return RegionTable(
            parent=self._ints("regions.parent"),
            kind=self._flat("regions.kind", np.uint8),
            trips=self._flat("regions.trips", np.float64),
            label=self._ints("regions.label"),
            carried_region=self._ints("carried.region"),
            carried_producer=self._ints("carried.producer"),
            carried_consumer=self._ints("carried.consumer"),
        )

    def _extra(self) -> ExtraTable:
        values = self._columns.binary["extra.value"]
        return ExtraTable(
            node=self._ints("extra.node"),
            key=self._ints("extra.key"),
            tag=self._flat("extra.tag", np.int16),
            offsets=values.offsets,
            values=values.data,
        )

    def _attachments(self) -> dict[str, bytes]:
        names = map(self._text, self._columns.binary["attachments.name"].items())
        return dict(zip(names, self._columns.binary["attachments.content"].items(), strict=True))

    def _group_sets(self) -> tuple[GroupSet, ...]:
        items = self._columns.binary["group_sets"].items()
        return tuple(self._decoded("group_sets", row, item, _groups) for row, item in enumerate(items))

    def _permutations(self) -> tuple[Permutation, ...]:
        items = self._columns.binary["permutations"].items()
        return tuple(self._decoded("permutations", row, item, _permutation) for row, item in enumerate(items))

    def _decoded(self, table: str, row: int, item: bytes, decode: Callable[[bytes], _Decoded]) -> _Decoded:
        try:
            return decode(item)
        except _DECODE_ERRORS as error:
            raise FormatError(
                f"broken entry: {error}",
                path=self._path,
                position=f"field {table!r}, item {row}",
                hint=_REWRITE_HINT,
            ) from error

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
