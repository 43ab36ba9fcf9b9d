"""Reader of the Chrome-trace JSON that JAX writes next to its XSpace.

Processes are planes and threads are lines. The file has neither HLO nor program ids. Times are in
microseconds; picoseconds of a device's own clock are used instead where the events have them.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    LineEvents,
    LineKind,
    TraceLine,
    device_clock,
    device_rows,
    has_devices,
    line_kind,
    truth_of,
)
from hespas.converters.xplane.profile import RecordedTrace, profile_of
from hespas.converters.xplane.space import SpaceFacts, to_integer
from hespas.graph import Diagnostics, Profile, StringTableBuilder
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError
from hespas.schemas.xplane import CPU_PLANE

__all__ = ["read_jax_trace"]

_LARGEST_NS = (1 << 61) // 1000
_MOST_EVENTS = 1_000_000
"""Maximum number of events that the profiler writes; it drops the shortest ones."""
_HINT = "record again, or read the .xplane.pb in the same folder"

_Value = str | int | float | bool | None


_KEPT = frozenset((*NUMBERS, *TEXTS))
_FACTS = (*NUMBERS, *TEXTS, *CLOCK)
_NUMERIC = frozenset((*NUMBERS, *CLOCK))


class _JaxEventArgs(msgspec.Struct, gc=False):
    """Fields in the ``args`` of an event that the reader uses, except those about the operation. Numbers may
    be written as texts.
    """

    name: _Value = None


_Facts = msgspec.defstruct(
    "_Facts", [(name, _Value, None) for name in _FACTS], bases=(_JaxEventArgs,), gc=False
)
_DECODER = msgspec.json.Decoder(cast("type[_JaxEventArgs]", _Facts))
_EMPTY = (b"{}", b"null")
_Key = tuple[int | str | None, int | str | None]


@dataclass(slots=True)
class _Thread:
    """Events of one thread while the file is read block by block. ``rows`` lists the events with arguments,
    and ``args`` has the values of these events.
    """

    names: list[int] = field(default_factory=list[int])
    start_ns: list[int] = field(default_factory=list[int])
    duration_ns: list[int] = field(default_factory=list[int])
    rows: list[int] = field(default_factory=list[int])
    args: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class _JaxTraceReader:
    """Reader of JAX's Chrome-trace JSON, which groups events by thread."""

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
        """Add one block of events."""
        chosen: list[int] = []
        for index, event in enumerate(events):
            if event.ph == "X":
                chosen.append(index)
            elif event.ph == "M":
                if event.name in ("process_name", "thread_name"):
                    text = str(self._args(event).name)
                    if event.name == "process_name":
                        at = max(text.rfind(" /device:"), text.rfind(" /host:"))
                        self.process[event.pid] = text[at + 1 :]
                    else:
                        self.thread_name[event.pid, event.tid] = text
            elif event.ph:
                self.skipped[event.ph] = self.skipped.get(event.ph, 0) + 1
        times = event_times(events, array, chosen, path=self.path, before=self.seen)
        start_ns, duration_ns = times.start_ns, times.duration_ns
        self.overflowed += len(times.overflowed)
        self.seen += len(events)
        self.count += len(chosen)
        rows = zip(chosen, start_ns.tolist(), duration_ns.tolist(), strict=True)
        for index, start, duration in rows:
            event = events[index]
            key = (event.pid, event.tid)
            thread = self.threads.get(key)
            if thread is None:
                thread = self.threads[key] = _Thread()
            raw = bytes(event.args)
            if raw not in _EMPTY:
                args = self._args(event)
                facts = [(name, value) for name in _FACTS if (value := getattr(args, name)) is not None]
                if facts:
                    for name, value in facts:
                        column = thread.args.setdefault(name, [])
                        missing = ABSENT if name in _NUMERIC else 0
                        column.extend([missing] * (len(thread.rows) - len(column)))
                        column.append(_number(value) if name in _NUMERIC else self.strings.add(str(value)))
                    thread.rows.append(len(thread.names))
            thread.names.append(self.strings.add(event.name))
            thread.start_ns.append(start)
            thread.duration_ns.append(duration)

    def _args(self, event: TraceEvent) -> _JaxEventArgs:
        try:
            return _DECODER.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error(f"malformed args of an event: {error}", "field 'args'") from error

    def _error(self, message: str, position: str) -> FormatError:
        return FormatError(message, path=self.path, position=position, hint=_HINT)

    def lines(self, facts: SpaceFacts) -> Iterator[LineEvents]:
        """Yield the lines of all threads with device work or host operations."""
        named = {
            key: (self.process.get(key[0], CPU_PLANE), self.thread_name.get(key, "")) for key in self.threads
        }
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
            line = TraceLine(plane, name, tid, kind)
            count, rows_with_facts = len(thread.names), np.array(thread.rows, np.int64)
            relative = np.array(thread.start_ns, np.int64) - base_ns
            duration_ns = np.array(thread.duration_ns, np.int64)
            latest_ns = max(thread.start_ns, default=base_ns) - base_ns  # Python integers cannot overflow
            beyond = (duration_ns > _LARGEST_NS) | (duration_ns < -_LARGEST_NS)
            if latest_ns > _LARGEST_NS or bool(beyond.any()):
                raise self._error("an event lies more than 26 days from the others", "field 'ts'")
            columns: dict[str, IntArray] = {}
            for fact, values in thread.args.items():
                columns[fact] = np.full(count, ABSENT if fact in _NUMERIC else 0, np.int64)
                columns[fact][rows_with_facts[: len(values)]] = values
            start_ps, duration_ps = device_clock(
                relative * 1000, duration_ns * 1000, columns, self.shifts_ps, line.plane
            )
            device = device_rows(line, columns, count, has_devices=launches)
            yield LineEvents(
                line=line,
                name_id=np.array(thread.names, np.int32),
                start_ps=start_ps,
                duration_ps=duration_ps,
                device=device,
                stats={name: column[device] for name, column in columns.items() if name in _KEPT},
                launch=columns.get("correlation_id", np.full(count, ABSENT, np.int64)),
            )


def read_jax_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a trace. Raises ``FormatError`` with the byte position if the file is not a trace."""
    stream = EventStream(path, options.max_bytes, recover=options.recover)
    reader = _JaxTraceReader(str(path))
    for events, array in stream.blocks():
        reader.add(events, array)
    stream.repairs["overflowed-duration"] = reader.overflowed
    facts = SpaceFacts()
    findings = diagnostics.about(str(path), "jax-trace")
    report_repairs(stream.repairs, findings)
    listed = ", ".join(f"{phase[:20]} {count:,}" for phase, count in sorted(reader.skipped.items())[:12])
    message = f"events of phases without a duration are left out: {listed}"
    findings.info("other-events", message, sum(reader.skipped.values()))
    capped = f"the profiler writes at most {_MOST_EVENTS:,} events and drops the rest: read the .xplane.pb"
    findings.warning("capped", capped, int(reader.count >= _MOST_EVENTS))
    recorded = RecordedTrace("jax-trace", collect(reader.lines(facts)), facts, reader.strings)
    return profile_of(recorded, path, options, diagnostics)


def _number(value: _Value) -> int:
    if isinstance(value, str):
        return to_integer(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else ABSENT
    return int(value) if value is not None and abs(value) < 1 << 62 else ABSENT
