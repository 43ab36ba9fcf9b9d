"""Reader that converts a Perfetto trace to a profile of device slices and GPU render stages.

A track belongs to a device if its name or the name of a parent track contains a word such as ``GPU``,
``stream`` or ``queue``, and its process is not named ``host``. The other tracks hold host operations. If no
track belongs to a device, all tracks are treated as device tracks. Times are ns of the trace's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.linking import enclosing, pair
from hespas.converters.perfetto.events import Descriptions, TrackEventColumns, TrackEventKind, TrackOwner
from hespas.converters.perfetto.packets import (
    MOVED_BY,
    SCHEMA_ID,
    Clocks,
    Packet,
    PacketSequence,
    WireMessage,
    messages,
    packets,
)
from hespas.converters.tracks.reading import (
    OP_CLASSES,
    agreeing,
    ops_and_kernels,
    report_halves,
    report_nested,
)
from hespas.converters.tracks.slices import HOST_CATEGORY
from hespas.files.streams import read_bytes
from hespas.files.wire import WireError, signed
from hespas.graph import Diagnostics, Findings, HostOps, Profile, StringTableBuilder
from hespas.graph.columns import BoolArray, ColumnTable, FloatArray, IntArray, SmallIntArray, at_rows
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.perfetto import AttributeField, PacketField, ThreadField

__all__ = ["read_perfetto"]

_ATTRIBUTE = 1
_EVERY = 1 << 14


def read_perfetto(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a Perfetto trace. Raises ``FormatError`` with the malformed byte, ``UnsupportedError`` for packets
    compressed with zstd. Memory: the file and its columns.
    """
    data = read_bytes(path, options.max_bytes)
    reader = _PerfettoReader()
    try:
        for count, packet in enumerate(packets(data)):
            reader.take(packet)
            if options.progress and not count % _EVERY:
                options.progress(packet.start, len(data))
    except WireError as error:
        raise FormatError(
            f"not a Perfetto trace: {error}",
            path=str(path),
            position=f"byte {error.position}",
            hint="record the trace again; it may be incomplete",
        ) from error
    except UnsupportedError as error:
        error.path = str(path)
        raise
    facts = _TraceFacts(path, reader.columns, reader.descriptions, reader.attributes)
    findings = diagnostics.about(str(path), "perfetto")
    reader.report(findings)
    return _profile_of(facts, findings)


class _PerfettoReader:
    """Reader of a Perfetto trace: it reads each packet by the type of its message."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.columns = TrackEventColumns(self.clocks)
        self.descriptions = Descriptions()
        self.attributes: dict[str, str] = {}
        self.lost = 0
        self._sequences: dict[int, PacketSequence] = {}

    def take(self, packet: Packet) -> None:
        """Read one packet and store its events or descriptions."""
        number = packet.number(PacketField.TRUSTED_PACKET_SEQUENCE_ID)
        sequence = self._sequences.get(number)
        if sequence is None:
            sequence = self._sequences[number] = PacketSequence(number)
        usable = sequence.take(packet)
        for kind, start, end in packet.messages:
            match kind:
                case PacketField.CLOCK_SNAPSHOT:
                    self.clocks.snapshot(number, packet.data, start, end)
                case PacketField.TRACK_EVENT | PacketField.GPU_RENDER_STAGE_EVENT if not usable:
                    self.lost += 1
                case PacketField.TRACK_EVENT:
                    self.columns.track_event(packet, sequence, start, end)
                case PacketField.GPU_RENDER_STAGE_EVENT:
                    self.columns.stage(packet, sequence, start, end)
                case PacketField.TRACE_ATTRIBUTES:
                    for _, attribute in messages(packet.data, start, end, _ATTRIBUTE):
                        key = attribute.text(AttributeField.KEY)
                        self.attributes[key] = attribute.text(AttributeField.STRING_VALUE)
                case PacketField.THREAD_DESCRIPTOR:  # the time origin of older traces
                    thread = WireMessage.of(packet.data, start, end)
                    origin_us = thread.numbers.get(ThreadField.REFERENCE_TIMESTAMP_US)
                    sequence.delta_us = sequence.delta_us if origin_us is None else signed(origin_us)
                case _:
                    self.descriptions.add(kind, packet.data, start, end)

    def report(self, findings: Findings) -> None:
        """Report events and texts that could not be used."""
        lost = "events refer to packets that the recorder dropped; they are left out"
        findings.warning("lost-packets", lost, self.lost)
        unresolved = "interned texts of events are missing in the trace; they are left empty"
        findings.warning("unresolved-name", unresolved, self.columns.unresolved)
        clock = "times of clocks without a snapshot are read as times of the trace's clock"
        findings.warning("unknown-clock", clock, self.clocks.unknown)
        other = "counters and other events without a duration are left out"
        findings.info("other-events", other, self.columns.other)


_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True)
class _TraceFacts:
    """Contents of a Perfetto trace after all packets were read: events, descriptions of tracks, and metadata
    texts.
    """

    path: Path
    columns: TrackEventColumns
    descriptions: Descriptions
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _TrackSlices(ColumnTable):
    """Slices (begin and end events that were paired) as columns; ``event`` is the row of the event that began
    each slice.
    """

    event: IntArray
    track: IntArray
    start_ns: IntArray
    duration_ns: IntArray


def _profile_of(facts: _TraceFacts, findings: Findings) -> Profile:
    """Convert slices on device tracks to device events, and all others to host operations. Flows link them.
    Raises ``FormatError`` if the trace has no slices.
    """
    # Collect pairs of begin and end, complete events, and instant events (0 ns).
    kind, track = _column(facts.columns.kind), _column(facts.columns.track)
    time_ns, duration_ns = _column(facts.columns.time_ns), _column(facts.columns.duration_ns)
    halves = np.flatnonzero((kind == TrackEventKind.BEGIN) | (kind == TrackEventKind.END))
    whole = np.flatnonzero((kind == TrackEventKind.COMPLETE) | (kind == TrackEventKind.INSTANT))
    pairs = pair(track, time_ns, kind == TrackEventKind.BEGIN, halves)
    last_ns = int((time_ns + duration_ns).max()) if len(kind) else 0
    report_halves(findings, "slices", int((pairs.end < 0).sum()), pairs.orphans)
    event = np.concatenate([pairs.begin, whole])
    ran_ns = at_rows(time_ns, pairs.end, last_ns) - time_ns[pairs.begin]
    slices = _TrackSlices(
        event=event,
        track=track[event],
        start_ns=time_ns[event],
        duration_ns=np.concatenate([ran_ns, duration_ns[whole]]),
    )
    if not len(slices):
        raise FormatError(
            "the trace holds neither slices nor stages of a GPU",
            path=str(facts.path),
            position="all packets",
            hint="record a source of track events or of GPU render stages",
        )
    owners = [facts.descriptions.owner(key, number) for number, key in enumerate(facts.columns.tracks)]
    strings, category = facts.columns.strings, _column(facts.columns.category_id)[slices.event]
    if facts.attributes.get("schema") == SCHEMA_ID:
        is_device: BoolArray = category != strings.add(HOST_CATEGORY)
    else:
        by_track = np.array([owner.is_device for owner in owners], np.bool_)[slices.track]
        rows = [strings.add(name) for name in sorted(_DEVICE_CATEGORIES)]
        is_device = by_track | np.isin(category, rows)
        if not is_device.any():
            other = ~np.array([owner.is_host for owner in owners], np.bool_)[slices.track]
            is_device = other if other.any() else np.ones(len(slices), np.bool_)
            message = (
                "no track is named as a device track; slices outside host processes are read as device events"
            )
            findings.warning("no-device-track", message, int(is_device.sum()))
    device, host = slices.take(is_device), slices.take(~is_device)
    moments = _column(facts.columns.kind)[host.event] == TrackEventKind.INSTANT
    message = "instant events on the host have no duration and are left out"
    findings.info("host-moments", message, int(moments.sum()))
    report_nested(findings, device.track, device.start_ns, device.duration_ns)
    return _profile(facts, device, host.take(~moments), owners)


def _column(values: object) -> IntArray:
    return np.array(values, np.int64)


def _profile(
    facts: _TraceFacts, device: _TrackSlices, host: _TrackSlices, owners: list[TrackOwner]
) -> Profile:
    columns, attributes = facts.columns, dict(facts.attributes)
    ours = attributes.pop("schema", "") == SCHEMA_ID
    # Count times from the first event, or undo the shift that the writer of Hespas applied.
    if not ours:
        base_ns = int(np.concatenate([device.start_ns, host.start_ns]).min())
    else:
        moved = attributes.pop(MOVED_BY, "0")
        base_ns = int(moved) if moved.isascii() and moved.isdigit() and len(moved) <= 18 else 0
    name = attributes.pop("name", "") if ours else ""
    annotations = _StatedFacts.of(columns, device.event)
    names: dict[str, int] = {}
    index = np.zeros(len(owners), np.int32)
    used: list[int] = np.unique(device.track).tolist()
    for track in used:
        index[track] = names.setdefault(owners[track].device, len(names))
    name_id = _column(columns.name_id)[device.event]
    op_id, kernel_id = ops_and_kernels(name_id, annotations.text("op"), annotations.text("kernel"), ours=ours)
    module_id, shapes_id, dtype_id = (annotations.text(key) for key in ("module", "shapes", "dtype"))
    host_ops = _host_ops(columns, host, owners, base_ns)
    # Find the host operation that a flow links to each device slice: the last to begin before it (-1: none).
    cause = np.full(len(device), -1, np.int32)
    if len(columns.flow) and len(host):
        flow, event = np.array(columns.flow, np.uint64), _column(columns.flow_event)
        events = len(columns.kind)
        device_of, host_of = np.full(events, -1, np.int64), np.full(events, -1, np.int64)
        device_of[device.event], host_of[host.event] = np.arange(len(device)), np.arange(len(host))
        host_at, device_at = np.flatnonzero(host_of[event] >= 0), np.flatnonzero(device_of[event] >= 0)
        time_ns = _column(columns.time_ns)[event]
        _, number = np.unique(flow, return_inverse=True)
        _, moment = np.unique(time_ns, return_inverse=True)
        key = number.reshape(-1).astype(np.int64) * (len(event) + 1) + moment.reshape(-1)
        order = host_at[np.argsort(key[host_at], kind="stable")]
        if len(order):
            last = np.searchsorted(key[order], key[device_at], side="right") - 1
            source = order[np.maximum(last, 0)]
            joined = (last >= 0) & (number.reshape(-1)[source] == number.reshape(-1)[device_at])
            cause[device_of[event[device_at[joined]]]] = host_of[event[source[joined]]]
    return Profile.of(
        name or facts.path.name.removesuffix(".gz").rsplit(".", 1)[0],
        tuple(names),
        columns.strings.build(),
        start_ns=annotations.start_ns(device.start_ns - base_ns),
        duration_ns=annotations.duration_ns(device.duration_ns),
        op_id=op_id,
        kernel_id=kernel_id,
        module_id=module_id,
        shapes_id=shapes_id,
        dtype_id=dtype_id,
        category_id=_column(columns.category_id)[device.event],
        op_class=annotations.op_class(),
        device_index=index[device.track],
        rank=np.array([owner.rank for owner in owners], np.int32)[device.track],
        stream=np.array([owner.stream for owner in owners], np.int64)[device.track],
        run=annotations.run(),
        bytes_moved=annotations.exact("bytes", np.full(len(device), np.nan)),
        host_event=cause,
        host=host_ops,
        metadata=attributes if ours else {"format": "perfetto", "first_event_ns": str(base_ns)},
    )


def _host_ops(
    columns: TrackEventColumns, host: _TrackSlices, owners: list[TrackOwner], base_ns: int
) -> HostOps:
    annotations = _StatedFacts.of(columns, host.event)
    labels = np.array([columns.strings.add(owner.label) for owner in owners], np.int32)
    return HostOps.of(
        name_id=_column(columns.name_id)[host.event],
        thread_id=labels[host.track],
        parent=enclosing(host.track, host.start_ns, host.duration_ns)[0],
        start_ns=annotations.start_ns(host.start_ns - base_ns),
        duration_ns=annotations.duration_ns(host.duration_ns),
        shapes_id=annotations.text("shapes"),
        dtype_id=annotations.text("dtype"),
    )


_LARGEST = float((1 << 31) - 1)
_TOO_LARGE = 1e300


@dataclass(frozen=True, slots=True, eq=False)
class _StatedFacts:
    """Annotations of the chosen events, in the spelling of Hespas or of other tools. ``rows`` is the index of
    each event's annotations in ``arguments``.
    """

    arguments: tuple[dict[str, str | float], ...]
    rows: IntArray
    strings: StringTableBuilder

    @classmethod
    def of(cls, columns: TrackEventColumns, event: IntArray) -> _StatedFacts:
        """Collect the annotations of the given events."""
        rows = np.array(columns.argument, np.int64)[event]
        return cls(tuple(dict(pairs) for pairs in columns.arguments), rows, columns.strings)

    def text(self, key: str) -> SmallIntArray:
        """Return a text annotation as string rows, 0 for events without it."""
        texts = [arguments.get(key, "") for arguments in self.arguments]
        rows = [self.strings.add(text) if isinstance(text, str) else 0 for text in texts]
        return np.array(rows, np.int32)[self.rows]

    def exact(self, key: str, otherwise: FloatArray) -> FloatArray:
        """Return a numeric annotation, ``otherwise`` for events where it is missing or invalid."""
        numbers = self._numbers(key)
        return np.where(np.abs(numbers) < _TOO_LARGE, numbers, otherwise)

    def start_ns(self, shown_ns: IntArray) -> FloatArray:
        """Return the exact starts in the annotations. If the annotation of an event disagrees with
        ``shown_ns``, the start of the slice, the trace was edited, and the start of the slice is used.
        """
        exact_ns = self._numbers("start_ns")
        return np.where(agreeing(exact_ns, shown_ns), exact_ns, shown_ns)

    def duration_ns(self, shown_ns: IntArray) -> FloatArray:
        """Return the exact durations in the annotations, or the durations of the slices (``shown_ns``) where
        the two disagree.

        A slice whose exact duration is unknown or negative is shown with 0 ns.
        """
        exact_ns = self._numbers("duration_ns", nothing=np.inf)
        agrees = agreeing(np.maximum(np.nan_to_num(exact_ns, posinf=np.inf), 0.0), shown_ns)
        return np.where(agrees & ~np.isinf(exact_ns), exact_ns, shown_ns)

    def _numbers(self, key: str, nothing: float = np.nan) -> FloatArray:
        values = [arguments.get(key) for arguments in self.arguments]
        numbers = [value if isinstance(value, float) else nothing for value in values]
        return np.array(numbers, np.float64)[self.rows]

    def run(self) -> SmallIntArray:
        """Return the run number of each event, from its annotation; -1 for events without one."""
        numbers = np.nan_to_num(self.exact("run", np.full(len(self.rows), -1.0)), nan=-1.0)
        return np.clip(numbers, -1.0, _LARGEST).astype(np.int32)

    def op_class(self) -> NDArray[np.int8]:
        """Return the codes of operation classes of the events, from annotations; 0 for unknown ones."""
        codes = [OP_CLASSES.get(str(arguments.get("op_class", "")), 0) for arguments in self.arguments]
        return np.array(codes, np.int8)[self.rows]
