"""One rank's profile joined with its execution trace: what graphs of devices and of hosts are made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from hespas.converters.pytorch.communication import Communication, communication_of, merged
from hespas.converters.pytorch.et_records import COMMUNICATION_RECORD, EtNode, Values, is_list
from hespas.converters.pytorch.events import HostEvents, KinetoTrace
from hespas.converters.pytorch.host_trace import HostTrace
from hespas.converters.pytorch.join import HostColumns, Join
from hespas.converters.pytorch.linking import Links, Nesting
from hespas.converters.pytorch.names import C10D
from hespas.converters.pytorch.profile import profile_of
from hespas.graph import (
    MeasuredComms,
    Profile,
    StringTableBuilder,
    TensorTypes,
    TensorTypesBuilder,
    find_dtype,
)
from hespas.graph.columns import IntArray

__all__ = ["LinkedTrace", "climb"]

_LIST = msgspec.json.Decoder(list[Any])


def climb(start: IntArray, parent: IntArray, good: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> IntArray:
    """From each row (-1: none) outwards along ``parent`` to the first that is good, -1 for none."""
    found = start.copy()
    while True:
        on_the_way = (
            (found >= 0) & ~good[np.maximum(found, 0)] if len(good) else np.zeros(len(found), np.bool_)
        )
        if not on_the_way.any():
            return found
        found = np.where(on_the_way, parent[np.maximum(found, 0)], found)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinkedTrace:
    """``events`` are the operations of the host followed by its named ranges; ``join`` finds their rows in
    ``trace``, which is None where there is a profile only.
    """

    kineto: KinetoTrace
    nesting: Nesting
    links: Links
    events: HostColumns
    trace: HostTrace | None
    join: Join | None
    strings: StringTableBuilder

    @property
    def types(self) -> TensorTypes:
        """Tensor types of the execution trace, or none."""
        return (self.trace.types if self.trace else TensorTypesBuilder()).build()

    @property
    def rows(self) -> IntArray:
        """The row of the execution trace of each event, -1 for none."""
        return self.join.row if self.join else np.full(len(self.events.name_row), -1, np.int64)

    def profile(self, name: str) -> Profile:
        """The profile of the device work, without what it communicates. Inputs of operations are those of the
        execution trace, which spells out more, where it has the operation.
        """
        found = profile_of(name, self.kineto, self.nesting, self.links)
        if self.trace is None:
            return replace(found, comms=MeasuredComms.empty())
        trace, host = self.trace, found.host
        rows = self.rows[: len(host)]
        known = (rows >= 0) & (trace.shapes_row[rows] > 0) if len(trace) else np.zeros(len(rows), np.bool_)
        if not known.any():
            return replace(found, comms=MeasuredComms.empty())
        at = np.where(known, rows, 0)
        strides = np.where(known, trace.strides_row[at], 0)
        host = replace(
            host,
            shapes_row=np.where(known, trace.shapes_row[at], host.shapes_row).astype(np.int32),
            dtype_row=np.where(known, trace.types_row[at], host.dtype_row).astype(np.int32),
            values_row=np.where(known, trace.values_row[at], host.values_row).astype(np.int32),
            strides_row=np.where(strides > 0, strides, host.strides_row).astype(np.int32),
        )
        return replace(found, comms=MeasuredComms.empty(), strings=self.strings.build(), host=host)

    def communications(self) -> dict[int, Communication]:
        """By operation of the host: what starts a communication. An operation inside another one of the same
        kind speaks for both.
        """
        host = self.kineto.host
        names = {row: self.kineto.strings[row] for row in np.unique(host.name_row).tolist()}
        wanted = [row for row, name in names.items() if name in C10D or name == COMMUNICATION_RECORD]
        rows = np.flatnonzero(np.isin(host.name_row, wanted))
        found: dict[int, Communication] = {}
        for event in rows[np.lexsort((-host.duration_ns[rows], host.start_ns[rows]))].tolist():
            talk = self._stated(event, names[int(host.name_row[event])])
            if talk is None:
                continue
            outer = int(self.nesting.parent[event])
            while outer >= 0 and outer not in found:
                outer = int(self.nesting.parent[outer])
            if outer >= 0 and found[outer].meaning == talk.meaning:
                talk = merged(talk, found.pop(outer))
            found[event] = talk
        return found

    def _stated(self, event: int, name: str) -> Communication | None:
        """What the execution trace says of a communication, else what the profile does."""
        row = int(self.rows[event])
        if self.trace is not None and row in self.trace.communications:
            return self.trace.communications[row]
        return communication_of(_as_node(self.kineto, self.kineto.host, event, name))


def _as_node(kineto: KinetoTrace, host: HostEvents, event: int, name: str) -> EtNode:
    """An operation as an execution trace would have it, as far as the profile tells."""
    dims = _decoded(kineto.strings[int(host.dims_row[event])])
    kinds = _decoded(kineto.strings[int(host.types_row[event])])
    concrete = _decoded(kineto.strings[int(host.concrete_row[event])])
    inputs = Values()
    for place in range(max(len(dims), len(concrete))):
        kind = str(kinds[place]) if place < len(kinds) else ""
        shape: object = dims[place] if place < len(dims) else []
        tensor = _tensor(shape, kind)
        text = concrete[place] if place < len(concrete) else ""
        inputs.values.append(_literal(text) if tensor is None else tensor)
        inputs.shapes.append(shape)
        inputs.types.append("" if tensor is None else f"Tensor({kind})")
    schema = "(bool async_op) ->" if name not in C10D else ""
    return EtNode(event, name, -1, -1, 0, -1, schema, inputs, Values(), {})


def _decoded(text: str) -> list[Any]:
    if not text:
        return []
    try:
        return _LIST.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return []


def _tensor(shape: object, kind: str) -> list[Any] | None:
    """The six fields of a tensor, of which only size and type are known."""
    element = find_dtype(kind) if kind else None
    if element is None or not is_list(shape):
        return None
    elements = 1
    for extent in shape:
        if type(extent) is not int or extent < 0:
            return None
        elements *= extent
    return [0, 0, 0, elements, element.storage_bytes(1), ""] if elements < 1 << 60 else None


def _literal(text: object) -> object:
    """A recorded scalar: Python writes ``True``, and numbers in decimal."""
    if not isinstance(text, str):
        return text
    if text in ("True", "False"):
        return text == "True"
    digits = text.removeprefix("-")
    return int(text) if digits.isdecimal() and len(digits) < 19 else text
