"""Device events that communicate: NCCL's and RCCL's kernels, and what they state of themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from math import isnan, nan, prod
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import Nesting, around_launch, match_rows, nearest
from hespas.converters.pytorch.communication import (
    C10D,
    Communication,
    Named,
    is_communication_kernel,
    kernel_operation,
    named,
)
from hespas.converters.pytorch.et_records import COMMUNICATION_RECORD
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace
from hespas.converters.pytorch.recorded_comms import recorded_communication
from hespas.graph import CollectiveKind, MeasuredComms, NodeKind, StringTableBuilder, find_dtype
from hespas.graph.columns import IntArray, SmallIntArray, at_rows, mapped

__all__ = [
    "LinkedBy",
    "Links",
    "batches_of",
    "communication_kernels",
    "host_steps_of",
    "link",
    "measured_comms",
    "nesting_of",
    "owner_with_shapes",
    "range_bytes",
    "ranges_around",
    "stated_communication",
    "steps_of",
    "thread_key",
]

# --- Which operation on the host caused a piece of device work: by correlation, then by time on the thread.
#
# The rules, in order: the correlation id names the launching call of the same trace; the launch stands inside
# operations of its own thread, of which the innermost is the cause; where there is no launch record, the
# ``External id`` names the operation. Work without any of these stays, unlinked.


class LinkedBy(IntEnum):
    """How a piece of device work found its operation."""

    NOTHING = 0
    CORRELATION = 1
    EXTERNAL_ID = 2
    CAPTURE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Per device event: its launch and its innermost host operation (-1: none), and how that was found."""

    launch: IntArray
    host: IntArray
    linked_by: NDArray[np.uint8]


def thread_key(events: Events) -> IntArray:
    """One number per (process, thread)."""
    return (events.process.astype(np.int64) << 32) | events.thread


def nesting_of(events: Events) -> Nesting:
    """The events of each thread as a forest."""
    return Nesting.of(thread_key(events), events.start_ns, events.end_ns)


def link(trace: KinetoTrace, nesting: Nesting) -> Links:
    """Find the launch and the operation of every device event; ``nesting`` is that of the host's."""
    device, calls = trace.device, trace.launch
    launch = match_rows((calls.correlation,), (device.correlation,))
    host = around_launch(nesting, launch, thread_key(calls), calls.start_ns)
    by_id = match_rows((trace.host.external_id,), (device.external_id,))
    fallback = (host < 0) & (by_id >= 0)
    linked_by = np.where(host >= 0, LinkedBy.CORRELATION, LinkedBy.NOTHING).astype(np.uint8)
    linked_by[fallback] = LinkedBy.EXTERNAL_ID
    return Links(launch, np.where(fallback, by_id, host), linked_by)


def owner_with_shapes(host: HostEvents, nesting: Nesting, of: IntArray) -> IntArray:
    """From each operation (-1: none) outwards to the first whose input shapes are recorded, -1 for none."""
    return nearest(host.dims_row > 0, nesting.parent, of)


# Which step of the training loop an event is part of: ranges that the profiler names ``ProfilerStep#N``.

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_BATCH = "execute_"


def steps_of(trace: KinetoTrace, links: Links) -> SmallIntArray:
    """The number of the step that launched each device event; -1 where none did, or nobody knows."""
    return host_steps_of(trace, at_rows(trace.launch.start_ns, links.launch, np.iinfo(np.int64).min))


def host_steps_of(trace: KinetoTrace, start_ns: IntArray) -> SmallIntArray:
    """The number of the step that runs when something of the host starts; -1 for none."""

    def number(row: int) -> int:
        found = _STEP.fullmatch(trace.strings[row])
        return int(found[1]) if found else -1

    numbers = mapped(trace.annotation.name_row, number, np.int32)
    return at_rows(numbers, _running(trace, numbers, start_ns), -1)


def batches_of(trace: KinetoTrace, links: Links) -> SmallIntArray:
    """The name of the range that states the batch of a step (``execute_32_context_0(...)``), row 0 for none,
    for each device event: the range that runs when the event is launched.
    """
    names = trace.annotation.name_row
    states = mapped(names, lambda row: trace.strings[row].startswith(_BATCH), np.bool_)
    numbers = np.where(states, names, -1).astype(np.int32)
    start_ns = at_rows(trace.launch.start_ns, links.launch, np.iinfo(np.int64).min)
    return at_rows(numbers, _running(trace, numbers, start_ns), 0)


def _running(trace: KinetoTrace, numbers: SmallIntArray, start_ns: IntArray) -> IntArray:
    """Which annotation of those with a number from 0 on is running at each moment; -1 for none."""
    note = trace.annotation
    steps = np.flatnonzero(numbers >= 0)
    steps = steps[np.lexsort((numbers[steps], note.end_ns[steps], note.start_ns[steps]))]
    place = np.searchsorted(note.start_ns[steps], start_ns, side="right") - 1
    inside = start_ns <= at_rows(note.end_ns[steps], place, np.iinfo(np.int64).min)
    return at_rows(steps, np.where(inside, place, -1), -1)


_MOST_RANKS = 1 << 20
_MOST_ELEMENTS = 1 << 60
_RANGE = re.compile(r"(?:nccl|rccl|xccl|ucc):")


class _KernelFacts(msgspec.Struct, frozen=True, gc=False):
    """What a kernel's arguments say, in the spelling of :mod:`.events`."""

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
        """Bytes of that many elements, NaN where number or type is not stated."""
        element = find_dtype(self.dtype)
        return float(element.storage_bytes(elements)) if element and 0 <= elements < _MOST_ELEMENTS else nan

    @property
    def ranks(self) -> tuple[int, ...]:
        """Members of the group; none where the list is cut or absent."""
        parts = [part.strip() for part in self.group_ranks.strip("[] ").split(",")]
        if not all(part.isdecimal() and len(part) < 10 for part in parts) or len(parts) > _MOST_RANKS:
            return ()
        return tuple(map(int, parts))


_FACTS = msgspec.json.Decoder(_KernelFacts)


class _Kernels(NamedTuple):
    """Rows of device events that communicate, and what their names say."""

    event: IntArray
    meaning: list[Named | None]


def communication_kernels(trace: KinetoTrace) -> _Kernels:
    """Which device events communicate: by their facts, or by the kernel's name."""
    device = trace.device
    by_name = mapped(device.name_row, lambda row: is_communication_kernel(trace.strings[row]), np.bool_)
    events = np.flatnonzero(by_name | (device.collective_row > 0))
    names: list[int] = device.name_row[events].tolist()
    meaning = {row: kernel_operation(trace.strings[row]) for row in set(names)}
    return _Kernels(events, [meaning[row] for row in names])


def stated_communication(trace: KinetoTrace, event: int) -> Communication | None:
    """What a kernel states of its collective; None where it states none."""
    row = int(trace.device.collective_row[event])
    if not row:
        return None
    facts = _FACTS.decode(trace.strings[row])
    meaning = named(facts.collective) or Named(NodeKind.COLLECTIVE, CollectiveKind.UNKNOWN)
    return Communication(
        meaning=meaning,
        operand_bytes=facts.bytes_of(facts.in_elements),
        result_bytes=facts.bytes_of(facts.out_elements),
        group=facts.group_name,
        ranks=facts.ranks,
        group_size=facts.group_size,
        peer=facts.target if meaning.node is NodeKind.SEND else facts.source,
        sequence=facts.sequence,
        ragged=facts.splits,
    )


class _NamedRange(NamedTuple):
    """What a named range says of the communication in it; bytes of its inputs, NaN where it states none."""

    meaning: Named
    operand_bytes: float


def range_bytes(trace: KinetoTrace, place: int) -> float:
    """Bytes of the tensors that a named range states as its inputs, NaN where it states none."""
    note, strings = trace.annotation, trace.strings
    try:
        dims = msgspec.json.decode(strings[int(note.dims_row[place])] or "[]", type=list[list[int]])
        kinds = msgspec.json.decode(strings[int(note.types_row[place])] or "[]", type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return nan
    if not kinds or len(kinds) != len(dims):
        return nan
    total = 0.0
    for shape, kind in zip(dims, kinds, strict=True):
        element, elements = find_dtype(kind), prod(max(extent, 0) for extent in shape)
        if element is None or elements > _MOST_ELEMENTS:
            return nan
        total += float(element.storage_bytes(elements))
    return total


def ranges_around(trace: KinetoTrace, links: Links, events: IntArray) -> list[_NamedRange | None]:
    """What the named range around the launch of each device event says (``nccl:all_to_all``)."""
    note, launch = trace.annotation, links.launch[events]
    texts = {row: trace.strings[row] for row in np.unique(note.name_row).tolist()}
    meanings = {row: named(text.partition(":")[2]) for row, text in texts.items() if _RANGE.match(text)}
    if not meanings or not len(trace.launch):
        return [None] * len(events)
    nesting = nesting_of(note)
    names: list[int] = note.name_row.tolist()
    parents: list[int] = nesting.parent.tolist()
    source = [-1] * (len(note) + 1)  # the last is that of no range
    for place in nesting.order.tolist():
        source[place] = place if names[place] in meanings else source[parents[place]]
    calls = trace.launch
    around: list[int] = around_launch(nesting, launch, thread_key(calls), calls.start_ns).tolist()
    places = [source[place] for place in around]
    ranges: dict[int, _NamedRange | None] = {-1: None}
    for place in places:
        if place not in ranges:
            meaning = meanings[names[place]]
            ranges[place] = _NamedRange(meaning, range_bytes(trace, place)) if meaning else None
    return [ranges[place] for place in places]


def measured_comms(
    trace: KinetoTrace, nesting: Nesting, links: Links, strings: StringTableBuilder
) -> MeasuredComms:
    """What is known of all device events that communicate; texts go to ``strings``. Replays of captured
    graphs state nothing themselves: sizes and groups are those of the captured operations.
    """
    kernels = communication_kernels(trace)
    around = ranges_around(trace, links, kernels.event)
    captured = _captured(trace, nesting, links, kernels.event)
    meaning = [
        name or (outer.meaning if outer else None)
        for name, outer in zip(kernels.meaning, around, strict=True)
    ]
    rows = [int(trace.device.collective_row[event]) for event in kernels.event.tolist()]
    facts = [_FACTS.decode(trace.strings[row]) if row else None for row in rows]
    names = [
        each.collective if each else _word(meaning) for each, meaning in zip(facts, meaning, strict=True)
    ]
    sent = [each.bytes_of(each.in_elements) if each else nan for each in facts]
    sizes = [
        outer.operand_bytes if outer and isnan(size) else size
        for size, outer in zip(sent, around, strict=True)
    ]
    received = [each.bytes_of(each.out_elements) if each else nan for each in facts]
    groups = [each.group_name if each else "" for each in facts]
    ranks = [str(list(each.ranks)) if each and each.ranks else "" for each in facts]
    group_size = [each.group_size if each and 0 < each.group_size < 1 << 31 else -1 for each in facts]
    for place, talk in captured.items():
        sizes[place], received[place] = talk.operand_bytes, talk.result_bytes
        groups[place], group_size[place] = talk.group, talk.group_size
        ranks[place] = str(list(talk.ranks)) if talk.ranks else ""
        names[place] = names[place] or _word(talk.meaning)
    rows_of = {"kind_row": names, "group_row": groups, "ranks_row": ranks}
    return MeasuredComms.of(
        event=kernels.event,
        operand_bytes=np.array(sizes),
        result_bytes=np.array(received),
        group_size=np.array(group_size),
        sequence=np.array([each.sequence if each else -1 for each in facts]),
        **{name: np.array([strings.add(text) for text in texts]) for name, texts in rows_of.items()},
    )


def _captured(
    trace: KinetoTrace, nesting: Nesting, links: Links, events: IntArray
) -> dict[int, Communication]:
    """The communications that some device events were captured in, by their places."""
    places = np.flatnonzero(links.linked_by[events] == LinkedBy.CAPTURE)
    if not len(places):
        return {}
    rows = np.unique(trace.host.name_row).tolist()
    talking = [
        row for row in rows if trace.strings[row] in C10D or trace.strings[row] == COMMUNICATION_RECORD
    ]
    calls = nearest(np.isin(trace.host.name_row, talking), nesting.parent, links.host[events[places]])
    found: dict[int, Communication] = {}
    for place, call in zip(places.tolist(), calls.tolist(), strict=True):
        talk = recorded_communication(trace, call) if call >= 0 else None
        if talk is not None:
            found[place] = talk
    return found


def _word(meaning: Named | None) -> str:
    """The usual spelling of what a kernel's name says."""
    if meaning is None:
        return ""
    kind = meaning.collective if meaning.node is NodeKind.COLLECTIVE else meaning.node
    return kind.name.lower().replace("_", "")
