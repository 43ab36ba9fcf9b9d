"""A host execution trace as columns: operations in order of execution, their tensors, their communication."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.pytorch.communication import (
    GROUPS_NODE,
    Communication,
    ProcessGroup,
    communication_of,
    listed_groups,
    merged,
)
from hespas.converters.pytorch.et_records import (
    EtNode,
    Tensor,
    is_list,
    mutated_arguments,
    read_et,
    storages_of,
    tensors_of,
)
from hespas.costs.aten import find_aten_rule
from hespas.graph import Csr, HostOps, StringTableBuilder, TensorTypesBuilder, find_dtype
from hespas.graph.columns import BoolArray, IntArray, SmallIntArray, constant
from hespas.graph.errors import FormatError

__all__ = ["HostTrace", "read_host_trace"]

_NONE = "<None>"
_NUMBERS = (int, float, bool)
_PROCESS, _THREAD = "|process]", "|thread]"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostTrace:
    """Operations in order of their ids, which is that of their start; columns of shape ``(operations,)``.

    ``parent`` is the row of the call around each (-1: none). ``reads`` and ``writes`` hold storages, numbered
    densely; ``operands`` and ``results`` rows of ``types``. ``shapes_row``, ``types_row``, ``strides_row``
    and ``values_row`` are the inputs of operations of the cost table as JSON texts (row 0: none).
    ``structural`` marks what is no operation: roots of process and threads, lists of groups.
    ``communications`` are by row.
    """

    schema: str
    process: str
    strings: StringTableBuilder
    types: TensorTypesBuilder
    id: IntArray
    name_row: SmallIntArray
    parent: SmallIntArray
    thread: IntArray
    record_id: IntArray
    reads: Csr
    writes: Csr
    operands: Csr
    results: Csr
    shapes_row: SmallIntArray
    types_row: SmallIntArray
    strides_row: SmallIntArray
    values_row: SmallIntArray
    structural: BoolArray
    communications: dict[int, Communication]
    groups: tuple[ProcessGroup, ...]
    lost_parents: int

    def __len__(self) -> int:
        return len(self.id)

    def host_ops(self) -> HostOps:
        """The operations as those of a profile, whose times nobody knows."""
        unknown = constant(nan, len(self))
        return HostOps(
            name_row=self.name_row,
            thread_row=np.zeros(len(self), np.int32),
            parent=self.parent,
            start_ns=unknown,
            duration_ns=unknown,
            sequence=np.full(len(self), -1, np.int64),
            shapes_row=self.shapes_row,
            dtype_row=self.types_row,
            strides_row=self.strides_row,
            values_row=self.values_row,
        )


@dataclass(slots=True)
class _Ragged:
    lengths: array[int] = field(default_factory=lambda: array("i"))
    values: array[int] = field(default_factory=lambda: array("i"))

    def add(self, row: Sequence[int]) -> None:
        self.lengths.append(len(row))
        self.values.extend(row)

    def build(self, order: IntArray) -> Csr:
        return Csr.from_lengths(np.array(self.lengths, np.int64), np.array(self.values, np.int32)).take(order)


def read_host_trace(path: Path, max_bytes: int, strings: StringTableBuilder, version: str = "") -> HostTrace:
    """Read one rank's trace; names go to ``strings``. O(n log n).

    Raises ``FormatError`` for what is no such trace: broken JSON, an id that stands twice, calls that
    enclose each other. Raises ``UnsupportedError`` for an unknown schema.
    """
    file = read_et(path, max_bytes, version)
    collector = _Collector(strings)
    for node in file.nodes:
        collector.add(node)
    return collector.build(file.schema, file.process, str(path))


class _Collector:
    """Turns nodes into columns as they come."""

    def __init__(self, strings: StringTableBuilder) -> None:
        self.strings = strings
        self.types = TensorTypesBuilder()
        self.numbers = {name: array("q") for name in ("id", "parent", "thread", "record_id")}
        self.name_row = array("i")
        self.inputs = {name: array("i") for name in ("shapes", "types", "strides", "values")}
        self.structural = bytearray()
        self.reads, self.writes, self.operands, self.results = (_Ragged() for _ in range(4))
        self.communications: dict[int, Communication] = {}
        self.groups: list[ProcessGroup] = []
        self._storages: dict[int, int] = {}
        self._types: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, node: EtNode) -> None:
        """Take one node."""
        name = node.name
        row = len(self.name_row)
        numbers = self.numbers
        numbers["id"].append(node.id)
        numbers["parent"].append(node.parent)
        numbers["thread"].append(node.thread)
        numbers["record_id"].append(node.rf_id)
        self.name_row.append(self.strings.add(name))
        is_root = name.endswith((_PROCESS, _THREAD)) and name.startswith("[pytorch|")
        self.structural.append(is_root or name == GROUPS_NODE)
        if name == GROUPS_NODE:
            listed = node.inputs.values[0] if node.inputs.values else ""
            self.groups.extend(listed_groups(listed) if isinstance(listed, str) else ())
        self._describe(node)
        outputs = tensors_of(node.outputs)
        reads, writes = storages_of(node.inputs, outputs, mutated_arguments(node.op_schema, name))
        self.operands.add(self._type_rows(tensors_of(node.inputs)))
        self.results.add(self._type_rows(outputs))
        talk = communication_of(node)
        if talk is not None:
            self.communications[row] = talk
            reads, writes = list(talk.reads), list(talk.writes)
        self.reads.add(self._storage_rows(reads))
        self.writes.add(self._storage_rows(writes))

    def _describe(self, node: EtNode) -> None:
        """Keep the inputs of an operation whose cost depends on them."""
        texts: tuple[bytes, ...] = (b"",) * len(self.inputs)
        if find_aten_rule(node.name) is not None:
            inputs = node.inputs
            encoded = map(
                msgspec.json.encode, (inputs.shapes, inputs.types, list(map(_plain, inputs.values)))
            )
            shapes, types, values = encoded
            texts = shapes, types, bytes(inputs.strides), values
        for rows, text in zip(self.inputs.values(), texts, strict=True):
            rows.append(self.strings.add(text.decode("utf-8", "replace")) if text else 0)

    def _storage_rows(self, storages: list[int]) -> list[int]:
        """Dense numbers; storage 0 is that of no tensor."""
        known = self._storages
        return [known.setdefault(storage, len(known)) for storage in storages if storage]

    def _type_rows(self, tensors: list[Tensor]) -> list[int]:
        rows: list[int] = []
        for tensor in tensors:
            if tensor.shape is None:
                continue
            key = (tensor.dtype, tensor.shape)
            row = self._types.get(key)
            if row is None:
                row = self._types[key] = self.types.add(find_dtype(tensor.dtype), tensor.shape)
            rows.append(row)
        return rows

    def build(self, schema: str, process: str, path: str) -> HostTrace:
        """The columns, sorted by id."""
        ids = np.array(self.numbers["id"], np.int64)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        again = np.flatnonzero(ids[1:] == ids[:-1])
        if len(again):
            raise FormatError(
                "two operations have the same id", path=path, position=f"node {int(ids[again[0]])}",
                hint="export the trace again",
            )  # fmt: skip
        parent, lost = _parents(ids, np.array(self.numbers["parent"], np.int64)[order], path)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return HostTrace(
            schema=schema,
            process=process,
            strings=self.strings,
            types=self.types,
            id=ids,
            name_row=np.array(self.name_row, np.int32)[order],
            parent=parent,
            thread=np.array(self.numbers["thread"], np.int64)[order],
            record_id=np.array(self.numbers["record_id"], np.int64)[order],
            reads=self.reads.build(order),
            writes=self.writes.build(order),
            operands=self.operands.build(order),
            results=self.results.build(order),
            **{f"{name}_row": np.array(rows, np.int32)[order] for name, rows in self.inputs.items()},
            structural=np.frombuffer(bytes(self.structural), np.bool_)[order],
            communications=_innermost(
                {int(place[row]): talk for row, talk in self.communications.items()}, parent
            ),
            groups=tuple(self.groups),
            lost_parents=lost,
        )


def _plain(value: object) -> str:
    """A value as the profiler writes it: numbers, texts and flat lists of numbers; nothing of tensors."""
    if is_list(value):
        return str(value) if all(type(each) in _NUMBERS for each in value) else ""
    return "" if value == _NONE or type(value) not in {*_NUMBERS, str} else str(value)


def _parents(ids: IntArray, parent_ids: IntArray, path: str) -> tuple[SmallIntArray, int]:
    """Rows of parents, and how many are not in the file. The process is its own parent: it has none."""
    if not len(ids):
        return np.empty(0, np.int32), 0
    found = np.minimum(np.searchsorted(ids, parent_ids), len(ids) - 1)
    known = (ids[found] == parent_ids) & (parent_ids != ids)
    lost = int(((ids[found] != parent_ids) & (parent_ids != 0)).sum())
    parent = np.where(known, found, -1)
    above = parent
    for _ in range(len(ids).bit_length() + 1):
        above = np.where(above >= 0, above[np.maximum(above, 0)], -1)
        if (above < 0).all():
            return parent.astype(np.int32), lost
    stuck = int(ids[np.flatnonzero(above >= 0)[0]])
    raise FormatError(
        "calls enclose each other in a circle",
        path=path,
        position=f"node {stuck}",
        hint="export the trace again",
    )


def _innermost(talks: dict[int, Communication], parent: SmallIntArray) -> dict[int, Communication]:
    """One entry per communication: a record inside a dispatcher operation takes over what that one says."""
    above: list[int] = parent.tolist()
    outer: set[int] = set()
    found = dict(talks)
    for row in sorted(talks, reverse=True):
        at = above[row]
        while at >= 0 and at not in talks:
            at = above[at]
        if at >= 0 and talks[at].meaning == talks[row].meaning:
            found[row] = merged(found[row], talks[at])
            outer.add(at)
    return {row: talk for row, talk in sorted(found.items()) if row not in outer}
