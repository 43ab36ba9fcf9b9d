"""Communication of device events: collectives and messages of kernels, with sizes and process groups.

A kernel may state its collective in its arguments. Otherwise the host operation around its launch, the named
range around its launch, or its own name states it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import nan, prod
from typing import NamedTuple

import msgspec
import numpy as np

from hespas.converters.linking import EventNesting, around_launch, nearest
from hespas.converters.pytorch.communication import (
    C10D,
    UNKNOWN,
    CommunicationKind,
    TraceCommunication,
    is_communication_kernel,
    kernel_operation,
    kind_of_word,
    merged,
    states_communication,
)
from hespas.converters.pytorch.et_records import COMMUNICATION_RECORD
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.links import DeviceLinks, nesting_of, thread_key
from hespas.graph import MeasuredComms, NodeKind, StringTableBuilder, find_dtype
from hespas.graph.columns import IntArray, mapped

__all__ = [
    "KernelCommunications",
    "collective_names",
    "comm_columns",
    "host_communications",
    "kernel_communications",
    "range_bytes",
]

_MAX_RANKS = 1 << 20
_MAX_ELEMENTS = 1 << 60
_RANGE = re.compile(r"(?:nccl|rccl|xccl|ucc):")


class _CollectiveFacts(msgspec.Struct, frozen=True, gc=False):
    """Properties of a collective that the arguments of its kernel state. :mod:`.events` encodes them
    as JSON.
    """

    collective: str
    in_elements: int
    out_elements: int
    dtype: str
    group_size: int
    group_name: str
    group_ranks: str
    sequence: int
    splits: bool
    source: int
    target: int

    def bytes_of(self, elements: int) -> float:
        """Return the bytes of this number of elements, NaN if the number or the element type is unknown."""
        dtype = find_dtype(self.dtype)
        return float(dtype.storage_bytes(elements)) if dtype and 0 <= elements < _MAX_ELEMENTS else nan

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group; empty if the list is missing or truncated."""
        parts = [part.strip() for part in self.group_ranks.strip("[] ").split(",")]
        if not all(part.isdecimal() and len(part) < 10 for part in parts) or len(parts) > _MAX_RANKS:
            return ()
        return tuple(map(int, parts))

    def communication(self) -> TraceCommunication:
        """Return the communication that the arguments state."""
        kind = kind_of_word(self.collective) or UNKNOWN
        return TraceCommunication(
            kind=kind,
            operand_bytes=self.bytes_of(self.in_elements),
            result_bytes=self.bytes_of(self.out_elements),
            group=self.group_name,
            ranks=self.ranks,
            group_size=self.group_size,
            peer=self.target if kind.node is NodeKind.SEND else self.source,
            sequence=self.sequence,
            ragged=self.splits,
        )


_FACTS = msgspec.json.Decoder(_CollectiveFacts)


class _RangeCommunication(NamedTuple):
    """Communication that the name of a range states (``nccl:all_to_all``). ``operand_bytes`` is the size of
    the range's inputs (NaN: unknown).
    """

    kind: CommunicationKind
    operand_bytes: float


class KernelCommunications(NamedTuple):
    """Communication of each kernel, by device event. ``used`` are the host operations that issued these
    communications.
    """

    of_event: dict[int, TraceCommunication]
    used: set[int]


def range_bytes(trace: KinetoTrace, row: int) -> float:
    """Return the bytes of the tensors that a named range states as its inputs, NaN if it states none."""
    note, strings = trace.annotation, trace.strings
    try:
        shapes = msgspec.json.decode(strings[int(note.dims_id[row])] or "[]", type=list[list[int]])
        names = msgspec.json.decode(strings[int(note.types_id[row])] or "[]", type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return nan
    if not names or len(names) != len(shapes):
        return nan
    total = 0.0
    for shape, name in zip(shapes, names, strict=True):
        dtype, elements = find_dtype(name), prod(max(extent, 0) for extent in shape)
        if dtype is None or elements > _MAX_ELEMENTS:
            return nan
        total += float(dtype.storage_bytes(elements))
    return total


def host_communications(
    trace: KinetoTrace, nesting: EventNesting, find: Callable[[int], TraceCommunication | None]
) -> dict[int, TraceCommunication]:
    """Return the communications that host operations start, by operation.

    ``find`` returns the communication of an operation. If an operation is inside another one of the same
    kind, only the inner one is returned. Values that it lacks come from the outer one.
    """
    host = trace.host
    names = {row: trace.strings[row] for row in np.unique(host.name_id).tolist()}
    starting = [
        row
        for row, name in names.items()
        if name in C10D or name == COMMUNICATION_RECORD or states_communication(name)
    ]
    rows = np.flatnonzero(np.isin(host.name_id, starting))
    comms: dict[int, TraceCommunication] = {}
    for event in rows[np.lexsort((-host.duration_ns[rows], host.start_ns[rows]))].tolist():
        comm = find(event)
        if comm is None:
            continue
        outer = int(nesting.parent[event])
        while outer >= 0 and outer not in comms:
            outer = int(nesting.parent[outer])
        if outer >= 0 and comms[outer].kind == comm.kind:
            comm = merged(comm, comms.pop(outer))
        comms[event] = comm
    return comms


def kernel_communications(
    trace: KinetoTrace, nesting: EventNesting, links: DeviceLinks, host_comms: dict[int, TraceCommunication]
) -> KernelCommunications:
    """Return the communication of every communication kernel of a trace with a device.

    It is found from, in this order: the arguments of the kernel; the host operation around its launch (for a
    replayed graph: around its capture); the named range around its launch; and its name. A kernel without any
    of these belongs to the first call without a kernel, because one such kernel sends and receives for
    several calls. If one operation launches several kernels, the first kernel has the sizes of the operation.
    """
    device = trace.device
    by_name = mapped(device.name_id, lambda row: is_communication_kernel(trace.strings[row]), np.bool_)
    events = np.flatnonzero(by_name | (device.collective_id > 0))
    starts_comm = np.zeros(len(trace.host), np.bool_)
    starts_comm[list(host_comms)] = True
    causes: list[int] = nearest(starts_comm, nesting.parent, links.host[events]).tolist()
    calls_without_kernel = sorted(
        (
            event
            for event in set(host_comms) - set(causes)
            if not states_communication(trace.strings[int(trace.host.name_id[event])])
        ),
        key=lambda event: trace.host.start_ns[event],
    )
    comms: dict[int, TraceCommunication] = {}
    used: set[int] = set()
    rows = zip(events.tolist(), causes, _ranges_around(trace, links, events), strict=True)
    for event, enclosing_cause, named_range in rows:
        facts_row, launch = int(device.collective_id[event]), int(links.launch[event])
        facts = _FACTS.decode(trace.strings[facts_row]) if facts_row else None
        by_kernel_name = kernel_operation(trace.strings[int(device.name_id[event])])
        cause = enclosing_cause
        needs_call = cause < 0 and facts is None and by_kernel_name is None
        if needs_call and launch >= 0 and calls_without_kernel:
            called_ns = trace.host.start_ns[calls_without_kernel[0]]
            cause = calls_without_kernel.pop(0) if called_ns <= trace.launch.start_ns[launch] else -1
        recorded = host_comms.get(cause)
        if facts is not None:
            comm = merged(facts.communication(), recorded)
        else:
            kind = by_kernel_name or (named_range.kind if named_range else UNKNOWN)
            comm = recorded or TraceCommunication(kind=kind)
        comm = comm.with_size(named_range.operand_bytes) if named_range else comm
        if facts is None and cause in used:
            comm = replace(comm, operand_bytes=nan, result_bytes=nan)
        used.add(cause)
        comms[event] = comm
    return KernelCommunications(comms, used)


def _ranges_around(
    trace: KinetoTrace, links: DeviceLinks, events: IntArray
) -> list[_RangeCommunication | None]:
    """Return, for each device event, the communication that the name of the range around its launch states;
    None without such a range.
    """
    note, calls = trace.annotation, trace.launch
    texts = {row: trace.strings[row] for row in np.unique(note.name_id).tolist()}
    kinds = {row: kind_of_word(text.partition(":")[2]) for row, text in texts.items() if _RANGE.match(text)}
    if not kinds or not len(calls):
        return [None] * len(events)
    nesting = nesting_of(note)
    names: list[int] = note.name_id.tolist()
    parents: list[int] = nesting.parent.tolist()
    nearest_range = [-1] * (len(note) + 1)  # the last one is for events outside all ranges
    for row in nesting.order.tolist():
        nearest_range[row] = row if names[row] in kinds else nearest_range[parents[row]]
    launches = links.launch[events]
    around: list[int] = around_launch(nesting, launches, thread_key(calls), calls.start_ns).tolist()
    rows = [nearest_range[row] for row in around]
    comms: dict[int, _RangeCommunication | None] = {-1: None}
    for row in rows:
        if row not in comms:
            kind = kinds[names[row]]
            comms[row] = _RangeCommunication(kind, range_bytes(trace, row)) if kind else None
    return [comms[row] for row in rows]


def comm_columns(
    comms: Mapping[int, TraceCommunication],
    strings: StringTableBuilder,
    names: Mapping[int, str] | None = None,
) -> MeasuredComms:
    """Return communications, given by event, as columns. Texts are added to ``strings``.

    ``names`` are the recorded names of collectives, by event. Other events have the usual name of their kind,
    empty for an unknown kind.
    """
    events = sorted(comms)
    rows = [comms[event] for event in events]
    words: list[str] = []
    for event, comm in zip(events, rows, strict=True):
        kind = comm.kind.collective if comm.kind.node is NodeKind.COLLECTIVE else comm.kind.node
        usual = "" if comm.kind == UNKNOWN else kind.name.lower().replace("_", "")
        words.append((names or {}).get(event, "") or usual)

    def text_rows(texts: Iterable[str]) -> IntArray:
        return np.array([strings.add(text) for text in texts], np.int64)

    sizes = [comm.group_size if 0 < comm.group_size < 1 << 31 else -1 for comm in rows]
    return MeasuredComms.of(
        event=np.array(events, np.int64),
        kind_id=text_rows(words),
        group_id=text_rows(comm.group for comm in rows),
        ranks_id=text_rows(str(list(comm.ranks)) if comm.ranks else "" for comm in rows),
        operand_bytes=np.array([comm.operand_bytes for comm in rows], np.float64),
        result_bytes=np.array([comm.result_bytes for comm in rows], np.float64),
        group_size=np.array(sizes, np.int64),
        sequence=np.array([comm.sequence for comm in rows], np.int64),
    )


def collective_names(trace: KinetoTrace, events: Iterable[int]) -> dict[int, str]:
    """Return the names of the collectives in the arguments of kernels, by event."""
    rows = ((event, int(trace.device.collective_id[event])) for event in events)
    return {event: _FACTS.decode(trace.strings[row]).collective for event, row in rows if row}
