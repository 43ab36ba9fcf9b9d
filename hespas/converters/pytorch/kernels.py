"""Device events that communicate: NCCL's and RCCL's kernels, and what they state of themselves."""

from __future__ import annotations

import re
from math import isnan, nan, prod
from typing import NamedTuple

import msgspec
import numpy as np

from hespas.converters.linking import around_launch
from hespas.converters.pytorch.communication import (
    Communication,
    Named,
    is_communication_kernel,
    kernel_operation,
    named,
)
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.linking import Links, nesting_of, thread_key
from hespas.graph import CollectiveKind, MeasuredComms, NodeKind, StringTableBuilder, find_dtype
from hespas.graph.columns import IntArray

__all__ = [
    "KernelFacts",
    "Said",
    "communication_kernels",
    "measured_comms",
    "range_bytes",
    "said_around",
    "stated_communication",
]

_MOST_RANKS = 1 << 20
_MOST_ELEMENTS = 1 << 60
_RANGE = re.compile(r"(?:nccl|rccl|xccl|ucc):")


class KernelFacts(msgspec.Struct, frozen=True, gc=False):
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


_FACTS = msgspec.json.Decoder(KernelFacts)


class _Kernels(NamedTuple):
    """Rows of device events that communicate, and what their names say."""

    event: IntArray
    said: list[Named | None]


def communication_kernels(trace: KinetoTrace) -> _Kernels:
    """Which device events communicate: by their facts, or by the kernel's name."""
    device = trace.device
    rows, inverse = np.unique(device.name_row, return_inverse=True)
    texts = [trace.strings[row] for row in rows.tolist()]
    by_name = np.array([is_communication_kernel(text) for text in texts], np.bool_)
    said = [kernel_operation(text) for text in texts]
    if not len(device):
        return _Kernels(np.empty(0, np.int64), [])
    events = np.flatnonzero(by_name[inverse] | (device.collective_row > 0))
    return _Kernels(events, [said[place] for place in inverse[events].tolist()])


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


class Said(NamedTuple):
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


def said_around(trace: KinetoTrace, links: Links, events: IntArray) -> list[Said | None]:
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
    said: dict[int, Said | None] = {-1: None}
    for place in places:
        if place not in said:
            meaning = meanings[names[place]]
            said[place] = Said(meaning, range_bytes(trace, place)) if meaning else None
    return [said[place] for place in places]


def measured_comms(trace: KinetoTrace, links: Links, strings: StringTableBuilder) -> MeasuredComms:
    """What is known of all device events that communicate; texts go to ``strings``."""
    kernels = communication_kernels(trace)
    around = said_around(trace, links, kernels.event)
    said = [
        name or (outer.meaning if outer else None) for name, outer in zip(kernels.said, around, strict=True)
    ]
    rows = [int(trace.device.collective_row[event]) for event in kernels.event.tolist()]
    facts = [_FACTS.decode(trace.strings[row]) if row else None for row in rows]
    names = [each.collective if each else _word(said) for each, said in zip(facts, said, strict=True)]
    sent = [each.bytes_of(each.in_elements) if each else nan for each in facts]
    sizes = [
        outer.operand_bytes if outer and isnan(size) else size
        for size, outer in zip(sent, around, strict=True)
    ]
    return MeasuredComms(
        event=kernels.event.astype(np.int32),
        kind_row=np.array([strings.add(name) for name in names], np.int32),
        operand_bytes=np.array(sizes, np.float64),
        result_bytes=np.array(
            [each.bytes_of(each.out_elements) if each else nan for each in facts], np.float64
        ),
        group_row=np.array([strings.add(each.group_name if each else "") for each in facts], np.int32),
        ranks_row=np.array(
            [strings.add(str(list(each.ranks)) if each and each.ranks else "") for each in facts], np.int32
        ),
        group_size=np.array(
            [each.group_size if each and 0 < each.group_size < 1 << 31 else -1 for each in facts], np.int32
        ),
        sequence=np.array([each.sequence if each else -1 for each in facts], np.int64),
    )


def _word(said: Named | None) -> str:
    """The usual spelling of what a kernel's name says."""
    if said is None:
        return ""
    return (said.collective if said.node is NodeKind.COLLECTIVE else said.node).name.lower().replace("_", "")
