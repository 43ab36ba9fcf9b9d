"""The Chrome-trace JSON that JAX writes beside its XSpace: processes are planes, threads are lines.

It holds neither HLO nor ids of programs. Times are microseconds; where a device also states picoseconds of
its own clock, those count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from hespas.converters.chrome_events import EventStream, TraceEvent, event_times, report_repairs
from hespas.converters.format import ReadOptions
from hespas.converters.xplane.collect import collect
from hespas.converters.xplane.lines import (
    ABSENT,
    CLOCK,
    NUMBERS,
    TEXTS,
    Line,
    LineEvents,
    LineKind,
    device_clock,
    device_rows,
    has_devices,
    line_kind,
    truth_of,
)
from hespas.converters.xplane.profile import Recorded, profile_of
from hespas.converters.xplane.space import SpaceFacts, to_integer
from hespas.graph import Diagnostics, Findings, Profile, StringTableBuilder
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError
from hespas.schemas.xplane import CPU_PLANE

__all__ = ["read_jax_trace"]

_LARGEST_NS = (1 << 61) // 1000
_MOST_EVENTS = 1_000_000
"""The profiler writes no more events than this, and leaves out the shortest."""
_HINT = "record again, or read the .xplane.pb beside it"

_Value = str | int | float | bool | None


_KEPT = frozenset((*NUMBERS, *TEXTS))
_FACTS = (*NUMBERS, *TEXTS, *CLOCK)
_NUMERIC = frozenset((*NUMBERS, *CLOCK))


class _Args(msgspec.Struct, gc=False):
    """What is kept of an event's ``args``: its facts, too. The writer makes everything a text."""

    name: _Value = None


_Facts = msgspec.defstruct("_Facts", [(name, _Value, None) for name in _FACTS], bases=(_Args,), gc=False)
_DECODER = msgspec.json.Decoder(cast("type[_Args]", _Facts))
_EMPTY = (b"{}", b"null")
_Key = tuple[int | str | None, int | str | None]


@dataclass(slots=True)
class _Thread:
    """The events of one thread while blocks are read; facts stand by the rows that have any."""

    names: list[int] = field(default_factory=list[int])
    start_ns: list[int] = field(default_factory=list[int])
    duration_ns: list[int] = field(default_factory=list[int])
    rows: list[int] = field(default_factory=list[int])
    args: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class _Reader:
    """Sorts events by thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.strings = StringTableBuilder()
        self.threads: dict[_Key, _Thread] = {}
        self.process: dict[int | str | None, str] = {}
        self.thread_name: dict[_Key, str] = {}
        self.skipped: dict[str, int] = {}
        self.shifts_ps: dict[str, int] = {}
        self.count = self.seen = self.overflowed = 0

    def add(self, events: list[TraceEvent], array: bytes) -> None:
        """Take one block."""
        chosen: list[int] = []
        for place, event in enumerate(events):
            if event.ph == "X":
                chosen.append(place)
            elif event.ph == "M":
                self._describe(event)
            elif event.ph:
                self.skipped[event.ph] = self.skipped.get(event.ph, 0) + 1
        times = event_times(events, array, chosen, path=self.path, before=self.seen)
        start_ns, duration_ns = times.start_ns, times.duration_ns
        self.overflowed += len(times.overflowed)
        self.seen += len(events)
        self.count += len(chosen)
        rows = zip(chosen, start_ns.tolist(), duration_ns.tolist(), strict=True)
        for place, start, duration in rows:
            self._event(events[place], start, duration)

    def _describe(self, event: TraceEvent) -> None:
        if event.name not in ("process_name", "thread_name"):
            return
        text = str(self._args(event).name)
        if event.name == "process_name":
            self.process[event.pid] = _plane_of(text)
        else:
            self.thread_name[event.pid, event.tid] = text

    def _event(self, event: TraceEvent, start_ns: int, duration_ns: int) -> None:
        key = (event.pid, event.tid)
        thread = self.threads.get(key)
        if thread is None:
            thread = self.threads[key] = _Thread()
        raw = bytes(event.args)
        if raw not in _EMPTY:
            self._facts(thread, self._args(event))
        thread.names.append(self.strings.add(event.name))
        thread.start_ns.append(start_ns)
        thread.duration_ns.append(duration_ns)

    def _facts(self, thread: _Thread, args: _Args) -> None:
        stated = [(name, value) for name in _FACTS if (value := getattr(args, name)) is not None]
        if not stated:
            return
        for name, value in stated:
            column = thread.args.setdefault(name, [])
            missing = ABSENT if name in _NUMERIC else 0
            column.extend([missing] * (len(thread.rows) - len(column)))
            column.append(_number(value) if name in _NUMERIC else self.strings.add(str(value)))
        thread.rows.append(len(thread.names))

    def _args(self, event: TraceEvent) -> _Args:
        try:
            return _DECODER.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error(f"the args of an event make no sense: {error}", "field 'args'") from error

    def _error(self, message: str, position: str) -> FormatError:
        return FormatError(message, path=self.path, position=position, hint=_HINT)

    def lines(self, facts: SpaceFacts) -> Iterator[LineEvents]:
        """All threads that hold something of ours."""
        named = {key: self._line_name(key) for key in self.threads}
        names_of: dict[str, list[str]] = {}
        for plane, name in named.values():
            names_of.setdefault(plane, []).append(name)
        truths = {plane: truth_of(plane, names) for plane, names in names_of.items()}
        base_ns = min((min(thread.start_ns) for thread in self.threads.values()), default=0)
        facts.base_ns = base_ns
        facts.planes = {plane: {} for plane in truths}
        launches = has_devices(self.process.values())
        for number, (key, (plane, name)) in enumerate(named.items()):
            thread = self.threads.pop(key)
            kind = line_kind(plane, name, truths[plane])
            if kind is LineKind.OTHER:
                facts.other_lines[name] = facts.other_lines.get(name, 0) + len(thread.names)
                continue
            tid = key[1] if isinstance(key[1], int) else number
            yield self._line(Line(plane, name, tid, kind), thread, base_ns, launches)

    def _line_name(self, key: _Key) -> tuple[str, str]:
        return self.process.get(key[0], CPU_PLANE), self.thread_name.get(key, "")

    def _line(self, line: Line, thread: _Thread, base_ns: int, launches: bool) -> LineEvents:
        count, stated = len(thread.names), np.array(thread.rows, np.int64)
        relative = np.array(thread.start_ns, np.int64) - base_ns
        duration_ns = np.array(thread.duration_ns, np.int64)
        latest_ns = max(thread.start_ns, default=base_ns) - base_ns  # of whole numbers without bounds
        beyond = (duration_ns > _LARGEST_NS) | (duration_ns < -_LARGEST_NS)
        if latest_ns > _LARGEST_NS or bool(beyond.any()):
            raise self._error("an event lies more than 26 days from the others", "field 'ts'")
        columns = {name: _spread(values, stated, count, name) for name, values in thread.args.items()}
        start_ps, duration_ps = device_clock(
            relative * 1000, duration_ns * 1000, columns, self.shifts_ps, line.plane
        )
        device = device_rows(line, columns, count, has_devices=launches)
        return LineEvents(
            line=line,
            name_row=np.array(thread.names, np.int32),
            start_ps=start_ps,
            duration_ps=duration_ps,
            device=device,
            stats={name: column[device] for name, column in columns.items() if name in _KEPT},
            launch=columns.get("correlation_id", np.full(count, ABSENT, np.int64)),
        )


def read_jax_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a trace. Raises ``FormatError`` for what is none, naming the byte."""
    stream = EventStream(path, options.max_bytes, recover=options.recover)
    reader = _Reader(str(path))
    for events, array in stream.blocks():
        reader.add(events, array)
    stream.repairs["overflowed-duration"] = reader.overflowed
    facts = SpaceFacts()
    findings = diagnostics.about(str(path), "jax-trace")
    report_repairs(stream.repairs, findings)
    _report(reader, findings)
    recorded = Recorded("jax-trace", collect(reader.lines(facts)), facts, reader.strings)
    return profile_of(recorded, path, options, diagnostics)


def _report(reader: _Reader, findings: Findings) -> None:
    listed = ", ".join(f"{phase[:20]} {count:,}" for phase, count in sorted(reader.skipped.items())[:12])
    message = f"events of phases that carry no time are left out: {listed}"
    findings.info("other-events", message, sum(reader.skipped.values()))
    capped = f"the profiler writes at most {_MOST_EVENTS:,} events and drops the rest: read the .xplane.pb"
    findings.warning("capped", capped, int(reader.count >= _MOST_EVENTS))


def _plane_of(process: str) -> str:
    """``/device:TPU:0``; of several hosts each process begins with the name of its host."""
    at = max(process.rfind(" /device:"), process.rfind(" /host:"))
    return process[at + 1 :]


def _number(value: _Value) -> int:
    if isinstance(value, str):
        return to_integer(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else ABSENT
    return int(value) if value is not None and abs(value) < 1 << 62 else ABSENT


def _spread(values: Sequence[int], rows: IntArray, count: int, name: str) -> IntArray:
    """A column of all events from the values of those that say something."""
    column = np.full(count, ABSENT if name in _NUMERIC else 0, np.int64)
    column[rows[: len(values)]] = values
    return column
