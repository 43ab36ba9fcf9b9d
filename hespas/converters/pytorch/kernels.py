"""Device events and the host: which operation launched each, and what those that communicate do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from math import nan, prod
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import Nesting, around_launch, match_rows, nearest
from hespas.converters.pytorch.communication import (
    C10D,
    UNKNOWN,
    Communication,
    Named,
    is_communication_kernel,
    kernel_operation,
    merged,
    named,
    states_communication,
)
from hespas.converters.pytorch.et_records import COMMUNICATION_RECORD
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace
from hespas.graph import MeasuredComms, NodeKind, StepRanges, StringTableBuilder, find_dtype
from hespas.graph.columns import IntArray, SmallIntArray, at_rows, mapped

__all__ = [
    "KernelTalks",
    "LinkedBy",
    "Links",
    "batches_of",
    "communication_kernels",
    "host_communications",
    "host_steps_of",
    "kernel_talks",
    "link",
    "measured_comms",
    "nesting_of",
    "owner_with_shapes",
    "range_bytes",
    "ranges_around",
    "stated_communication",
    "stated_words",
    "step_ranges",
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


def step_ranges(trace: KinetoTrace, base_ns: int) -> StepRanges:
    """Return the ranges of steps, on a clock that begins at ``base_ns``."""
    note, numbers = trace.annotation, _numbers(trace)
    rows = np.flatnonzero(numbers >= 0)
    return StepRanges.of(
        number=numbers[rows], start_ns=note.start_ns[rows] - base_ns, duration_ns=note.duration_ns[rows]
    )


def host_steps_of(trace: KinetoTrace, start_ns: IntArray) -> SmallIntArray:
    """The number of the step that runs when something of the host starts; -1 for none."""
    numbers = _numbers(trace)
    return at_rows(numbers, _running(trace, numbers, start_ns), -1)


def _numbers(trace: KinetoTrace) -> SmallIntArray:
    """Return the number of the step that each named range states, -1 for another range."""

    def number(row: int) -> int:
        found = _STEP.fullmatch(trace.strings[row])
        return int(found[1]) if found else -1

    return mapped(trace.annotation.name_row, number, np.int32)


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
    meaning = named(facts.collective) or UNKNOWN
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


def host_communications(
    trace: KinetoTrace, nesting: Nesting, stated: Callable[[int], Communication | None]
) -> dict[int, Communication]:
    """By operation of the host: what starts a communication, as ``stated`` says of an operation. An operation
    inside another one of the same kind speaks for both.
    """
    host = trace.host
    names = {row: trace.strings[row] for row in np.unique(host.name_row).tolist()}
    wanted = [row for row, name in names.items() if _starts_communication(name)]
    rows = np.flatnonzero(np.isin(host.name_row, wanted))
    found: dict[int, Communication] = {}
    for event in rows[np.lexsort((-host.duration_ns[rows], host.start_ns[rows]))].tolist():
        talk = stated(event)
        if talk is None:
            continue
        outer = int(nesting.parent[event])
        while outer >= 0 and outer not in found:
            outer = int(nesting.parent[outer])
        if outer >= 0 and found[outer].meaning == talk.meaning:
            talk = merged(talk, found.pop(outer))
        found[event] = talk
    return found


def _starts_communication(name: str) -> bool:
    return name in C10D or name == COMMUNICATION_RECORD or states_communication(name)


class KernelTalks(NamedTuple):
    """Communication of each kernel, by device event, and the host operations that issued it."""

    of_event: dict[int, Communication]
    used: set[int]


def kernel_talks(
    trace: KinetoTrace, nesting: Nesting, links: Links, of_host: dict[int, Communication]
) -> KernelTalks:
    """Find what every kernel that communicates does: THE account of communication of a trace with a device.

    Facts of the kernel come first, then those of the host's operation around its launch (of a replayed graph:
    of its capture), of the named range there, and the kernel's name. A kernel that sends and receives for
    several calls stands for the first of them that none stands for. Of several kernels of one operation the
    first has its sizes.
    """
    kernels = communication_kernels(trace)
    is_talk = np.zeros(len(trace.host), np.bool_)
    is_talk[list(of_host)] = True
    causes = nearest(is_talk, nesting.parent, links.host[kernels.event])
    waiting = sorted(
        (
            event
            for event in set(of_host) - set(causes.tolist())
            if not states_communication(trace.strings[int(trace.host.name_row[event])])
        ),
        key=lambda event: trace.host.start_ns[event],
    )
    found: dict[int, Communication] = {}
    used: set[int] = set()
    around = ranges_around(trace, links, kernels.event)
    rows = zip(kernels.event.tolist(), causes.tolist(), kernels.meaning, around, strict=True)
    for event, inside, meaning, outer in rows:
        stated = stated_communication(trace, event)
        cause = inside
        if inside < 0 and stated is None and meaning is None:
            cause = _waiting_cause(trace, links, event, waiting)
        recorded = of_host.get(cause)
        again = stated is None and cause in used
        used.add(cause)
        if stated is not None:
            talk = merged(stated, recorded)
        else:
            talk = recorded or Communication(meaning=meaning or (outer.meaning if outer else UNKNOWN))
        talk = talk.with_size(outer.operand_bytes) if outer else talk
        found[event] = replace(talk, operand_bytes=nan, result_bytes=nan) if again else talk
    return KernelTalks(found, used)


def _waiting_cause(trace: KinetoTrace, links: Links, event: int, waiting: list[int]) -> int:
    """The first communication without a kernel that was called before this one was launched; -1 for none."""
    launch = int(links.launch[event])
    if launch < 0 or not waiting:
        return -1
    called_ns, launched_ns = trace.host.start_ns[waiting[0]], trace.launch.start_ns[launch]
    return waiting.pop(0) if called_ns <= launched_ns else -1


def measured_comms(
    talks: Mapping[int, Communication], strings: StringTableBuilder, words: Mapping[int, str] | None = None
) -> MeasuredComms:
    """Communications by event as columns; texts go to ``strings``. ``words`` are names of their own."""
    events = sorted(talks)
    found = [talks[event] for event in events]
    named_so = words or {}
    texts = {
        "kind_row": [named_so.get(event, "") or _word(talks[event].meaning) for event in events],
        "group_row": [talk.group for talk in found],
        "ranks_row": [str(list(talk.ranks)) if talk.ranks else "" for talk in found],
    }
    return MeasuredComms.of(
        event=np.array(events, np.int64),
        operand_bytes=np.array([talk.operand_bytes for talk in found], np.float64),
        result_bytes=np.array([talk.result_bytes for talk in found], np.float64),
        group_size=np.array(
            [talk.group_size if 0 < talk.group_size < 1 << 31 else -1 for talk in found], np.int64
        ),
        sequence=np.array([talk.sequence for talk in found], np.int64),
        **{name: np.array([strings.add(text) for text in each], np.int64) for name, each in texts.items()},
    )


def stated_words(trace: KinetoTrace, events: Iterable[int]) -> dict[int, str]:
    """The names of their collectives that kernels state."""
    rows = ((event, int(trace.device.collective_row[event])) for event in events)
    return {event: _FACTS.decode(trace.strings[row]).collective for event, row in rows if row}


def _word(meaning: Named) -> str:
    """The usual spelling of a kind of communication, empty for an unknown one."""
    if meaning == UNKNOWN:
        return ""
    kind = meaning.collective if meaning.node is NodeKind.COLLECTIVE else meaning.node
    return kind.name.lower().replace("_", "")
