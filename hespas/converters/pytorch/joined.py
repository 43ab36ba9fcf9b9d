"""Kineto traces joined with captures: replayed kernels get the operations in which they were captured.

Each replay has operations of its own, copied from the capture with names, shapes, types, strides, values and
their enclosing operations, so figures by operation count every replay. The host did not run these operations
in the replay. So they take no time, start when the graph is launched, and are on a thread of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.linking import EventNesting, nearest
from hespas.converters.pytorch.captured import (
    Capture,
    begins_captures,
    capture_of,
    launches_graphs,
    read_captures,
)
from hespas.converters.pytorch.events import HostEvents, KinetoTrace, TextRows
from hespas.converters.pytorch.links import DeviceLinks, LinkedBy, link_device_events, nesting_of
from hespas.converters.pytorch.replay import Alignment, aligned_replays, replays_of
from hespas.costs.aten import PARTS
from hespas.graph import CAPTURED_THREAD, Diagnostics, Findings, StringTableBuilder
from hespas.graph.columns import IntArray, at_rows, mapped
from hespas.measurements.consistency import report_shared_ids

__all__ = ["JoinedTrace", "join_captures"]

_MAX_NAMED = 10
_TEXT_COLUMNS = (
    *("name_id", "category_id", "dims_id", "types_id", "strides_id"),
    *("concrete_id", "stated_id"),
)


class JoinedTrace(NamedTuple):
    """Trace in which replays of CUDA graphs are linked to the operations of their captures. Host operations
    from row ``own_host`` on are copies of captured operations. ``facts`` are metadata: the number of events
    that were joined, by capture.
    """

    trace: KinetoTrace
    nesting: EventNesting
    links: DeviceLinks
    own_host: int
    facts: dict[str, str]


def join_captures(
    trace: KinetoTrace, options: ReadOptions, diagnostics: Diagnostics, path: str
) -> JoinedTrace:
    """Link the device events of a trace to the host, and join its graph replays with the captures in
    ``options``.

    Replayed events that match no launch of a capture keep the links that they have without captures, and are
    reported.
    Raises the errors of :func:`read_captures`.
    """
    nesting = nesting_of(trace.host)
    links = link_device_events(trace, nesting)
    calls = trace.launch
    report_shared_ids((calls.correlation,), calls.start_ns, calls.end_ns, links.launch, (diagnostics, path))
    not_joined = JoinedTrace(trace, nesting, links, len(trace.host), {})
    findings = diagnostics.about(path, "kineto")
    captures = read_captures(options.capture, options.max_bytes)
    replays = replays_of(trace, links)
    if replays and begins_captures(trace):  # the recording has captures and their replays
        num_graphs = sum(len(capture.graphs) for capture in captures)
        captures.append(capture_of(Path(path), trace, nesting, num_graphs))
    if not captures:
        replayed = at_rows(launches_graphs(trace), links.launch, False)
        ran_ns = np.maximum(trace.device.duration_ns, 0)
        share = float(ran_ns[replayed].sum()) / max(float(ran_ns.sum()), 1.0)
        message = (
            f"device events are replays of captured graphs, {share:.1%} of the device time: give the trace "
            "of the capture (`capture`) to add their operations"
        )
        findings.warning("replayed", message, int(replayed.sum()))
        return not_joined
    alignments = aligned_replays(trace, replays, captures)
    facts = _account(trace, captures, alignments, findings)
    if not any(alignment.capture >= 0 for alignment in alignments):
        return not_joined._replace(facts=facts)
    return _ReplayOperations(trace, nesting, links, captures).join(alignments, facts)


class _CapturedOperations(NamedTuple):
    """Operations that launched the events of one replay when its graph was captured, and the operations
    around them, outer ones first.

    ``rows`` are rows of the capture's host operations. ``parent`` is the index of the parent of each
    operation (-1: none). ``of_event`` is the index of the operation of each event (-1: none).
    """

    rows: IntArray
    parent: IntArray
    of_event: IntArray

    @classmethod
    def of(cls, capture: Capture, host: IntArray) -> _CapturedOperations:
        """Collect the operations that launched the events of a replay, and all operations around them.

        ``host`` is the innermost captured operation of each event (-1: none).
        """
        ops, strings, parents = capture.trace.host, capture.trace.strings, capture.nesting.parent
        rows = np.unique(host[host >= 0])
        while True:
            outer = np.unique(parents[rows])
            more = np.union1d(rows, outer[outer >= 0])
            if len(more) == len(rows):
                break
            rows = more
        # Cost rules of some operations read their inner operations, even if these launch nothing.
        has_parts = np.zeros(len(ops), np.bool_)
        has_parts[rows] = mapped(ops.name_id[rows], lambda row: strings[row] in PARTS, np.bool_)
        names = frozenset[str]().union(*PARTS.values()) if has_parts.any() else frozenset[str]()
        parts = np.flatnonzero(mapped(ops.name_id, lambda row: strings[row] in names, np.bool_))
        inside = nearest(has_parts, parents, parents[parts]) >= 0
        has_parent = np.isin(parents[parts], np.union1d(rows, parts[inside]))
        rows = np.union1d(rows, parts[inside & has_parent])
        rows = rows[np.lexsort((-ops.duration_ns[rows], ops.start_ns[rows]))]
        index = np.full(len(ops) + 1, -1, np.int64)  # the last one is for events without an operation
        index[rows] = np.arange(len(rows))
        return cls(rows, index[parents[rows]], index[host])


class _ReplayOperations:
    """Builder that copies captured operations into the trace with the replays. For each replay the operations
    are copied once.
    """

    def __init__(
        self, trace: KinetoTrace, nesting: EventNesting, links: DeviceLinks, captures: Sequence[Capture]
    ) -> None:
        self.trace, self.nesting, self.links, self.captures = trace, nesting, links, captures
        self.graphs = [graph for capture in captures for graph in capture.graphs]
        self.strings = StringTableBuilder(trace.strings)
        self.thread = self.strings.add(CAPTURED_THREAD)
        self.columns: dict[str, list[IntArray]] = {column.name: [] for column in fields(HostEvents)}
        self.parent: list[IntArray] = []
        self.count = len(trace.host)
        self.operations: dict[tuple[int, tuple[tuple[int, ...], ...]], _CapturedOperations] = {}
        self.text_rows = [self._text_rows(capture) for capture in captures]

    def _text_rows(self, capture: Capture) -> TextRows[int]:
        """Return a cache that maps text rows of the capture to text rows of the trace. It adds new texts to
        the trace.
        """
        strings, add = capture.trace.strings, self.strings.add
        return TextRows[int](lambda row: add(strings[row]))

    def join(self, alignments: Sequence[Alignment], facts: dict[str, str]) -> JoinedTrace:
        """Return the trace with the operations of all replays, and its links to them."""
        host, linked_by = self.links.host.copy(), self.links.linked_by.copy()
        for alignment in alignments:
            if alignment.capture < 0:
                continue
            replay = alignment.replay
            key = (alignment.graph, replay.signature)
            if key not in self.operations:
                captured = at_rows(self.graphs[alignment.graph].host, alignment.place, -1)
                self.operations[key] = _CapturedOperations.of(self.captures[alignment.capture], captured)
            operations = self.operations[key]
            first, rows = self.count, operations.rows
            ops, to_rows = self.captures[alignment.capture].trace.host, self.text_rows[alignment.capture]
            numbers = {
                "process": int(self.trace.launch.process[replay.launch]) if replay.launch >= 0 else 0,
                "thread": self.thread,
                "start_ns": replay.start_ns,
                "duration_ns": 0,
            }
            for name, parts in self.columns.items():
                if name in _TEXT_COLUMNS:
                    parts.append(np.array(to_rows.of(getattr(ops, name)[rows].tolist()), np.int64))
                else:
                    parts.append(np.full(len(rows), numbers.get(name, -1)))
            self.parent.append(np.where(operations.parent >= 0, operations.parent + first, -1))
            self.count += len(rows)
            aligned = np.flatnonzero(alignment.place >= 0)
            op = operations.of_event[aligned]
            host[replay.events[aligned]] = np.where(op >= 0, first + op, -1)
            linked_by[replay.events[aligned]] = np.where(op >= 0, LinkedBy.CAPTURE, LinkedBy.NOTHING)
        own = self.trace.host
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(own, name), *parts]).astype(getattr(own, name).dtype)
            for name, parts in self.columns.items()
        }
        trace = replace(self.trace, strings=self.strings.build(), host=HostEvents(**columns))
        parents = np.concatenate([np.empty(0, np.int64), *self.parent])
        nesting = self.nesting.with_parents(parents, trace.host.end_ns[len(own) :])
        links = DeviceLinks(self.links.launch, host, linked_by)
        return JoinedTrace(trace, nesting, links, len(own), facts)


def _account(
    trace: KinetoTrace, captures: Sequence[Capture], alignments: Sequence[Alignment], findings: Findings
) -> dict[str, str]:
    """Report the number of replayed events that were aligned with each capture, and the events that were not
    aligned.

    Return the same numbers as metadata. Every event of a replay counts once.
    """
    ran_ns = np.maximum(trace.device.duration_ns, 0)

    def count_and_ns(parts: Sequence[IntArray]) -> tuple[int, int]:
        return sum(map(len, parts)), sum(int(ran_ns[part].sum()) for part in parts)

    aligned_events = [alignment.replay.events[alignment.place >= 0] for alignment in alignments]
    used = {alignment.capture for alignment in alignments}
    unused = [capture.path.name for number, capture in enumerate(captures) if number not in used]
    report = findings.warning if len(unused) == len(captures) else findings.info
    names = ", ".join(unused[:_MAX_NAMED])
    report("capture-unused", f"captures whose graphs this trace does not replay: {names}", len(unused))
    for number, capture in enumerate(captures):
        own = [index for index, alignment in enumerate(alignments) if alignment.capture == number]
        events, time_ns = count_and_ns([aligned_events[index] for index in own])
        num_graphs = len({alignments[index].graph for index in own})
        message = (
            f"device events, {time_ns:,} ns, of {len(own):,} graph launches replay {num_graphs:,} of the "
            f"{len(capture.graphs):,} graphs captured in {capture.path.name}"
        )
        findings.info("captured", message, events)
    unchecked, unchecked_ns = count_and_ns(
        [alignment.replay.events[(alignment.place >= 0) & ~alignment.checked] for alignment in alignments]
    )
    message = (
        f"device events, {unchecked_ns:,} ns, are aligned by order and number alone: the launches of the "
        "capture state no kernel names to check"
    )
    findings.info("captured-by-order", message, unchecked)
    shared = [
        alignment.replay.events[(alignment.place >= 0) & alignment.replay.on_several_streams]
        for alignment in alignments
    ]
    message = (
        "device events are of kernels that run on several streams of one replay, without node numbers: their "
        "captured launches are assigned to the longest stream first"
    )
    findings.info("captured-several-streams", message, sum(map(len, shared)))
    _report_not_aligned(trace, alignments, findings)
    events, events_ns = count_and_ns([alignment.replay.events for alignment in alignments])
    aligned, aligned_ns = count_and_ns(aligned_events)
    message = "a capture is given, but the trace has no launch of a graph"
    findings.warning("no-replay", message, int(not alignments))
    facts = {
        "graph_launches": len(alignments),
        "replayed_events": events,
        "replayed_ns": events_ns,
        "captured_events": aligned,
        "captured_ns": aligned_ns,
        "captured_by_order_events": unchecked,
    }
    return {name: str(value) for name, value in facts.items()}


def _report_not_aligned(trace: KinetoTrace, alignments: Sequence[Alignment], findings: Findings) -> None:
    """Report replayed events that align with no captured launch, by name, and ambiguous ones."""
    ran_ns = np.maximum(trace.device.duration_ns, 0)
    not_captured, ambiguous = list[IntArray](), list[IntArray]()
    for alignment in alignments:
        if alignment.ambiguous:
            ambiguous.append(alignment.replay.events)
        else:
            not_captured.append(alignment.replay.events[alignment.place < 0])
    for parts, code, message in (
        (
            not_captured,
            "not-captured",
            "replayed device events align with no captured launch and keep their links",
        ),
        (
            ambiguous,
            "capture-ambiguous",
            "replayed device events fit captures of several shapes equally and keep their links",
        ),
    ):
        rows = np.concatenate([np.empty(0, np.int64), *parts])
        if not len(rows):
            continue
        name_rows: list[int] = trace.device.name_id[rows].tolist()
        times, counts = Counter[int](), Counter[int](name_rows)
        for row, time in zip(name_rows, ran_ns[rows].tolist(), strict=True):
            times[row] += time
        names = ", ".join(
            f"{trace.strings[row][:80]} {counts[row]:,} x, {time:,} ns"
            for row, time in times.most_common(_MAX_NAMED)
        )
        text = f"{message}: {int(ran_ns[rows].sum()):,} ns; {names}"
        findings.warning(code, text, len(rows))
