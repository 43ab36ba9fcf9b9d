"""A profile's trace joined with captures: replayed kernels get the operations that they were captured in.

Each replay has operations of its own, copied from the capture with names, shapes, types, strides, values and
the operations around them: what is told by operation counts every replay. The host did not run them in the
replay, so that they take no time, at the moment of the graph's launch, on a thread of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.linking import Nesting, nearest
from hespas.converters.pytorch.captured import (
    Capture,
    begins_captures,
    capture_of,
    launches_graphs,
    read_captures,
)
from hespas.converters.pytorch.events import HostEvents, KinetoTrace, Rows
from hespas.converters.pytorch.kernels import LinkedBy, Links, link, nesting_of
from hespas.converters.pytorch.replay import Alignment, aligned_replays, replays_of
from hespas.costs.aten import PARTS
from hespas.graph import CAPTURED_THREAD, Diagnostics, Findings, StringTableBuilder
from hespas.graph.columns import IntArray, at_rows, mapped
from hespas.measurements.consistency import report_shared_ids

__all__ = ["JoinedTrace", "joined"]

_MOST_NAMED = 10
_TEXTS = (
    *("name_row", "category_row", "dims_row", "types_row", "strides_row"),
    *("concrete_row", "stated_row"),
)


class JoinedTrace(NamedTuple):
    """A trace with its links. Host operations behind ``own_host`` are copies of captured ones; ``facts`` are
    an account for the metadata.
    """

    trace: KinetoTrace
    nesting: Nesting
    links: Links
    own_host: int
    facts: dict[str, str]


def joined(trace: KinetoTrace, options: ReadOptions, diagnostics: Diagnostics, path: str) -> JoinedTrace:
    """Link a trace, and what it replays with the captures of ``options``. Events that align with nothing
    keep the links they have without a capture, and are reported. Raises what :func:`read_captures` does.
    """
    nesting = nesting_of(trace.host)
    links = link(trace, nesting)
    calls = trace.launch
    report_shared_ids((calls.correlation,), calls.start_ns, calls.end_ns, links.launch, (diagnostics, path))
    plain = JoinedTrace(trace, nesting, links, len(trace.host), {})
    findings = diagnostics.about(path, "kineto")
    captures = read_captures(options.capture, options.max_bytes)
    replays = replays_of(trace, links)
    if replays and begins_captures(trace):  # what is captured and replayed in one recording
        families = sum(len(capture.segments) for capture in captures)
        captures.append(capture_of(Path(path), trace, nesting, families))
    if not captures:
        _report_replays(trace, links, findings)
        return plain
    found = aligned_replays(trace, replays, captures)
    facts = _account(trace, captures, found, findings)
    if not any(each.capture >= 0 for each in found):
        return plain._replace(facts=facts)
    return _Copies(trace, nesting, links, captures).joined(found, facts)


class _Template(NamedTuple):
    """Captured operations that stand behind one alignment, an outer one before those in it: rows of the
    capture's host operations, the place of the parent of each (-1: none), and the place of the operation of
    each event (-1: none).
    """

    rows: IntArray
    parent: IntArray
    of_event: IntArray


def _template(capture: Capture, host: IntArray) -> _Template:
    """What stands behind events with these operations of the capture (-1: none)."""
    parents = capture.nesting.parent
    rows = np.unique(host[host >= 0])
    while True:
        outer = np.unique(parents[rows])
        more = np.union1d(rows, outer[outer >= 0])
        if len(more) == len(rows):
            break
        rows = more
    rows = np.union1d(rows, _parts(capture, rows))
    ops = capture.trace.host
    rows = rows[np.lexsort((-ops.duration_ns[rows], ops.start_ns[rows]))]
    place = np.full(len(ops) + 1, -1, np.int64)  # the last is that of no operation
    place[rows] = np.arange(len(rows))
    return _Template(rows, place[parents[rows]], place[host])


def _parts(capture: Capture, rows: IntArray) -> IntArray:
    """The operations that rules of these ones read, though they launch nothing."""
    host, strings, parents = capture.trace.host, capture.trace.strings, capture.nesting.parent
    asking = np.zeros(len(host), np.bool_)
    asking[rows] = mapped(host.name_row[rows], lambda row: strings[row] in PARTS, np.bool_)
    names = frozenset[str]().union(*PARTS.values()) if asking.any() else frozenset[str]()
    parts = np.flatnonzero(mapped(host.name_row, lambda row: strings[row] in names, np.bool_))
    # Their parents are copied already, or are parts themselves: others would hang in the air.
    inside = nearest(asking, parents, parents[parts]) >= 0
    known = np.isin(parents[parts], np.union1d(rows, parts[inside]))
    return parts[inside & known]


class _Copies:
    """Adds captured operations to a trace, replay by replay."""

    def __init__(
        self, trace: KinetoTrace, nesting: Nesting, links: Links, captures: Sequence[Capture]
    ) -> None:
        self.trace, self.nesting, self.links, self.captures = trace, nesting, links, captures
        self.strings = StringTableBuilder(trace.strings)
        self.thread = self.strings.add(CAPTURED_THREAD)
        self.columns: dict[str, list[IntArray]] = {each.name: [] for each in fields(HostEvents)}
        self.parent: list[IntArray] = []
        self.count = len(trace.host)
        self.known: dict[tuple[int, tuple[tuple[int, ...], ...]], _Template] = {}
        self.texts = [self._rows_of(capture) for capture in captures]

    def _rows_of(self, capture: Capture) -> Rows[int]:
        """Rows of the capture's texts among those of the trace."""
        strings, add = capture.trace.strings, self.strings.add
        return Rows[int](lambda row: add(strings[row]))

    def joined(self, found: Sequence[Alignment], facts: dict[str, str]) -> JoinedTrace:
        """The trace with the operations of all replays, and its links with them."""
        host, linked_by = self.links.host.copy(), self.links.linked_by.copy()
        for each in found:
            if each.capture < 0:
                continue
            aligned = np.flatnonzero(each.place >= 0)
            template = self._template_of(each)
            first = self.count
            self._append(each, template)
            ops = template.of_event[aligned]
            host[each.replay.events[aligned]] = np.where(ops >= 0, first + ops, -1)
            linked_by[each.replay.events[aligned]] = np.where(ops >= 0, LinkedBy.CAPTURE, LinkedBy.NOTHING)
        trace = replace(self.trace, strings=self.strings.build(), host=self._host())
        parents = np.concatenate([np.empty(0, np.int64), *self.parent])
        nesting = self.nesting.with_parents(parents, trace.host.end_ns[len(self.trace.host) :])
        links = Links(self.links.launch, host, linked_by)
        return JoinedTrace(trace, nesting, links, len(self.trace.host), facts)

    def _template_of(self, each: Alignment) -> _Template:
        key = (each.segment, each.replay.signature)
        if key not in self.known:
            segments = [segment for capture in self.captures for segment in capture.segments]
            host = at_rows(segments[each.segment].host, each.place, -1)
            self.known[key] = _template(self.captures[each.capture], host)
        return self.known[key]

    def _append(self, each: Alignment, template: _Template) -> None:
        ops, rows, count = self.captures[each.capture].trace.host, template.rows, len(template.rows)
        launch = each.replay.launch
        stated: dict[str, IntArray] = {
            name: np.array(self.texts[each.capture].of(getattr(ops, name)[rows].tolist()), np.int64)
            for name in _TEXTS
        }
        process = int(self.trace.launch.process[launch]) if launch >= 0 else 0
        numbers = {"process": process, "thread": self.thread, "start_ns": each.replay.start_ns}
        numbers |= {"duration_ns": 0}
        for name, parts in self.columns.items():
            parts.append(stated[name] if name in stated else np.full(count, numbers.get(name, -1)))
        self.parent.append(np.where(template.parent >= 0, template.parent + self.count, -1))
        self.count += count

    def _host(self) -> HostEvents:
        host = self.trace.host
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(host, name), *parts]).astype(getattr(host, name).dtype)
            for name, parts in self.columns.items()
        }
        return HostEvents(**columns)


# What is said of it: every event of a replay is counted once.


def _report_replays(trace: KinetoTrace, links: Links, findings: Findings) -> None:
    """Say what of the device time is replayed, where there is no capture to join it with."""
    replayed = at_rows(launches_graphs(trace), links.launch, False)
    ran_ns = np.maximum(trace.device.duration_ns, 0)
    share = float(ran_ns[replayed].sum()) / max(float(ran_ns.sum()), 1.0)
    message = (
        f"device events are replays of captured graphs, {share:.1%} of the device time: the trace of the "
        "capture (`capture`) has the operations behind them"
    )
    findings.warning("replayed", message, int(replayed.sum()))


def _account(
    trace: KinetoTrace, captures: Sequence[Capture], found: Sequence[Alignment], findings: Findings
) -> dict[str, str]:
    """Report what aligned, with which capture, and what did not; the same as facts."""
    ran_ns = np.maximum(trace.device.duration_ns, 0)
    parts = [(each.replay.events[each.place >= 0], each) for each in found]
    used = {each.capture for each in found}
    unused = [capture.path.name for number, capture in enumerate(captures) if number not in used]
    listed = ", ".join(unused[:_MOST_NAMED])
    report = findings.warning if len(unused) == len(captures) else findings.info
    report("capture-unused", f"captures of graphs that nothing here replays: {listed}", len(unused))
    for number, capture in enumerate(captures):
        mine = [(events, each) for events, each in parts if each.capture == number]
        events, time_ns = _sums([events for events, _ in mine], ran_ns)
        graphs = len({each.segment for _, each in mine})
        message = (
            f"device events, {time_ns:,} ns, of {len(mine):,} graph launches follow {graphs:,} of the "
            f"{len(capture.segments):,} graphs captured in {capture.path.name}"
        )
        findings.info("captured", message, events)
    unchecked, unchecked_ns = _sums(
        [each.replay.events[(each.place >= 0) & ~each.checked] for each in found], ran_ns
    )
    message = (
        f"device events, {unchecked_ns:,} ns, are aligned by their order and number alone: the launches of "
        "the capture state no kernel names to check"
    )
    findings.info("captured-by-order", message, unchecked)
    shared = [each.replay.events[(each.place >= 0) & each.replay.on_several_streams] for each in found]
    message = (
        "device events are of kernels that run on several streams of one replay, without the numbers of the "
        "graph's nodes: which of the captured launches each is follows the longest stream"
    )
    findings.info("captured-several-streams", message, sum(map(len, shared)))
    _report_missing(trace, found, ran_ns, findings)
    events, events_ns = _sums([each.replay.events for each in found], ran_ns)
    aligned, aligned_ns = _sums([events for events, _ in parts], ran_ns)
    message = "a capture is given, and the trace has no launch of a graph"
    findings.warning("no-replay", message, int(not found))
    facts = {
        "graph_launches": len(found),
        "replayed_events": events,
        "replayed_ns": events_ns,
        "captured_events": aligned,
        "captured_ns": aligned_ns,
        "captured_by_order_events": unchecked,
    }
    return {name: str(value) for name, value in facts.items()}


def _sums(parts: Sequence[IntArray], ran_ns: IntArray) -> tuple[int, int]:
    """How many events, and their time [ns]."""
    return sum(map(len, parts)), sum(int(ran_ns[part].sum()) for part in parts)


def _report_missing(
    trace: KinetoTrace, found: Sequence[Alignment], ran_ns: IntArray, findings: Findings
) -> None:
    """What is replayed and aligned with nothing, by name; and which launches could be of several graphs."""
    left = [each.replay.events[each.place < 0] for each in found if not each.ambiguous]
    several = [each.replay.events for each in found if each.ambiguous]
    for parts, code, message in (
        (left, "not-captured", "replayed device events align with no captured launch and keep their links"),
        (
            several,
            "capture-ambiguous",
            "replayed device events fit captures of several shapes alike and keep their links",
        ),
    ):
        count, time_ns = _sums(parts, ran_ns)
        if not count:
            continue
        rows = np.concatenate(parts)
        times, counts = Counter[int](), Counter[int](trace.device.name_row[rows].tolist())
        for row, time in zip(trace.device.name_row[rows].tolist(), ran_ns[rows].tolist(), strict=True):
            times[row] += time
        names = ", ".join(
            f"{trace.strings[row][:80]} {counts[row]:,} x, {time:,} ns"
            for row, time in times.most_common(_MOST_NAMED)
        )
        findings.warning(code, f"{message}: {time_ns:,} ns; {names}", count)
