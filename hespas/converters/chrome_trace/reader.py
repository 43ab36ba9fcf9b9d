"""Any Chrome trace as a profile: each slice, on whatever track it stands, is an event.

Complete events (``X``) and pairs of begin and end (``B``, ``E``) are slices. A track is a thread of a
process; the process names the device, or rank and device as our writer does (``rank 3: H100``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.chrome_events import EventStream
from hespas.converters.chrome_trace.collect import Arrows, Collected, Collector
from hespas.converters.chrome_trace.writer import SCHEMA_ID
from hespas.converters.format import ReadOptions
from hespas.converters.linking import enclosing, overlapping
from hespas.converters.tracks.measured import HOST_CATEGORY
from hespas.graph import Diagnostics, HostOps, Profile, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["read_chrome_trace"]


class _Header(msgspec.Struct):
    """What stands beside the events."""

    otherData: msgspec.Raw = msgspec.Raw(b"{}")  # noqa: N815 # the format's own name


def read_chrome_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a trace block by block. Raises ``FormatError`` naming the byte or field of what makes no sense.

    Nothing that has a duration is left out; slices that our own writer marked are host operations. Slices
    inside others count like any, and ``diagnostics`` tell how much time is therefore counted twice.
    """
    stream = EventStream(path, options.max_bytes)
    collector = Collector(str(path))
    for events, array in stream.blocks():
        collector.add(events, array)
    facts = _facts(stream.header, str(path))
    ours = facts.pop("schema", "") == SCHEMA_ID
    everything = collector.finish()
    on_host = everything.category_row == everything.strings.find(HOST_CATEGORY)
    collected, host = everything.only(~on_host), everything.only(on_host)
    if not len(collected.name_row):
        raise FormatError(
            "the trace holds no slices: no event 'X', no pair 'B' and 'E'",
            path=str(path),
            position="list 'traceEvents'",
            hint="was the profiler stopped before anything ran?",
        )
    diagnostics.warning(
        "chrome-trace.invalid-utf8", str(path), "blocks with text that is not Unicode, which was replaced",
        count=stream.repaired_blocks,
    )  # fmt: skip
    _report(collected, diagnostics, str(path))
    return _profile(path, collected, host, facts, ours=ours)


def _facts(header: bytes, path: str) -> dict[str, str]:
    """The texts of ``otherData``; whatever else stands there is a viewer's."""
    try:
        other = msgspec.json.decode(header, type=_Header).otherData
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"what stands beside the events is no JSON object: {error}", path=path, position="header",
            hint="was the file cut off? export the trace again",
        ) from error  # fmt: skip
    try:
        found = msgspec.json.decode(other, type=dict[str, str | int | float | bool | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {key: text for key, text in found.items() if isinstance(text, str)}


def _profile(path: Path, found: Collected, host: Collected, facts: dict[str, str], *, ours: bool) -> Profile:
    places = _Places.of(found)
    base_ns = 0 if ours else int(found.start_ns.min())  # ours count from the first event already
    name = facts.pop("name", "") if ours else ""
    metadata = facts if ours else {"format": "chrome-trace"}
    if not ours:
        metadata["first_event_ns"] = str(base_ns)
    op_row, kernel_row = _names(found, ours=ours)
    start_ns, duration_ns = _times(found, base_ns, ours=ours)
    strings = StringTableBuilder(found.strings)
    host_times = _times(host, base_ns, ours=ours)
    operations = _host_ops(host, *host_times, strings)
    return Profile.of(
        name or path.name.removesuffix(".gz").removesuffix(".json"),
        places.devices,
        strings.build(),
        start_ns=start_ns,
        duration_ns=duration_ns,
        op_row=op_row,
        kernel_row=kernel_row,
        module_row=found.arguments["module"],
        shapes_row=found.arguments["shapes"],
        dtype_row=found.arguments["dtype"],
        category_row=found.category_row,
        op_class=found.op_class,
        device_index=places.device_index,
        rank=places.rank,
        stream=places.stream,
        run=found.run,
        bytes_moved=found.bytes_moved,
        host_event=_causes(found.arrows, host, found),
        host=operations,
        metadata=metadata,
    )


def _times(found: Collected, base_ns: int, *, ours: bool) -> tuple[FloatArray, FloatArray]:
    """Starts and durations [ns]."""
    start_ns = _joined(found.start_ns - base_ns, found.start_part_ns)
    duration_ns = _joined(found.duration_ns, found.duration_part_ns)
    if not ours:
        return start_ns, duration_ns
    return _exactly(start_ns, found.told_start_ns), _exactly(duration_ns, found.told_duration_ns)


def _joined(whole_ns: IntArray, part_ns: FloatArray) -> FloatArray:
    """Times in ns; fractions are whole ps, added as integers so that the nearest float comes out."""
    if not part_ns.any():
        return whole_ns.astype(np.float64)
    steps = whole_ns * 1000 + np.rint(part_ns * 1000).astype(np.int64)
    return np.where(part_ns != 0, steps / 1000.0, whole_ns.astype(np.float64))


def _exactly(shown_ns: FloatArray, told_ns: FloatArray) -> FloatArray:
    """What is told, where it agrees with what is shown: an edited trace does not contradict itself."""
    return np.where(np.abs(told_ns - shown_ns) < 2.0, told_ns, shown_ns)


def _names(found: Collected, *, ours: bool) -> tuple[SmallIntArray, SmallIntArray]:
    """Operations and kernels. A slice of ours is named by its kernel, else by its operation; of a slice of
    others nothing tells whether its name is the one or the other, so it is both.
    """
    op, kernel, name = found.arguments["op"], found.arguments["kernel"], found.name_row
    if not ours:
        return np.where(op > 0, op, name), np.where(kernel > 0, kernel, name)
    return op, np.where(kernel > 0, kernel, np.where(op == name, 0, name)).astype(np.int32)


def _report(found: Collected, diagnostics: Diagnostics, path: str) -> None:
    listed = ", ".join(f"{what} {count:,}" for what, count in sorted(found.skipped.items()))
    diagnostics.info(
        "chrome-trace.other-events", path, f"events without time on a device are left out: {listed}",
        count=sum(found.skipped.values()),
    )  # fmt: skip
    diagnostics.warning(
        "chrome-trace.unfinished", path, "events that do not end are counted to the end of the trace",
        count=found.unfinished,
    )  # fmt: skip
    diagnostics.warning(
        "chrome-trace.end-without-begin", path, "events end that did not begin, and are left out",
        count=found.orphans,
    )  # fmt: skip
    negative = int((found.duration_ns < 0).sum())
    diagnostics.warning(
        "chrome-trace.negative-duration", path, "events end before they start", count=negative
    )
    inside = overlapping(found.track, found.start_ns, found.duration_ns)
    twice_ns = int(np.maximum(found.duration_ns[inside], 0).sum())
    diagnostics.warning(
        "chrome-trace.nested", path,
        f"slices run inside or over others of their track: {twice_ns:,} ns are counted more than once",
        count=int(inside.sum()),
    )  # fmt: skip


# Host operations of a trace that our writer made, and the device work that arrows join to them.

_THREAD = "thread"


def _host_ops(
    found: Collected, start_ns: FloatArray, duration_ns: FloatArray, strings: StringTableBuilder
) -> HostOps:
    """The slices as host operations; names of threads go to ``strings``."""
    names = [found.thread_names.get(track, "") for track in found.tracks]
    threads = np.array([strings.add(name.removeprefix(_THREAD).strip()) for name in names] or [0], np.int32)
    texts = found.arguments
    return HostOps(
        name_row=found.name_row,
        thread_row=threads[found.track],
        parent=enclosing(found.track, found.start_ns, found.duration_ns)[0].astype(np.int32),
        start_ns=start_ns,
        duration_ns=duration_ns,
        sequence=np.full(len(found.track), -1, np.int64),
        shapes_row=texts["shapes"],
        dtype_row=texts["dtype"],
        strides_row=texts["strides"],
        values_row=texts["values"],
    )


def _causes(arrows: Arrows, host: Collected, device: Collected) -> SmallIntArray:
    """The host operation of each device slice, -1 for none. Of slices that start where an arrow ends, the
    shortest is meant, as viewers take it.
    """
    source = _slice_at(host, arrows.source_track, arrows.source_ns)
    target = _slice_at(device, arrows.target_track, arrows.target_ns)
    joined = (source >= 0) & (target >= 0)
    cause = np.full(len(device.track), -1, np.int32)
    cause[target[joined]] = source[joined]
    return cause


def _slice_at(found: Collected, track: IntArray, at_ns: IntArray) -> IntArray:
    """The slice that starts at each place and time, -1 for none."""
    both_track, both_ns = np.concatenate([found.track, track]), np.concatenate([found.start_ns, at_ns])
    _, key = np.unique(np.stack([both_track, both_ns]), axis=1, return_inverse=True)
    key = key.reshape(-1)
    order = np.argsort(-found.duration_ns, kind="stable")
    slices = np.full(int(key.max(initial=-1)) + 1, -1, np.int64)
    slices[key[: len(found.track)][order]] = order
    return slices[key[len(found.track) :]]


# Where slices ran: rank, device and stream, as far as names and numbers of processes and threads tell.

_RANK = re.compile(r"(?:\A|\s)(?:rank (\d{1,9})|unknown rank)(?:: (.*))?\Z", re.DOTALL)
_STREAM = re.compile(r"(?i:\bstream) #?(\d{1,18})(?!\w)")
_NO_STREAM = "no stream"


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Columns of shape ``(slices,)``, and the names of the devices."""

    devices: tuple[str, ...]
    device_index: SmallIntArray
    rank: SmallIntArray
    stream: IntArray

    @classmethod
    def of(cls, found: Collected) -> _Places:
        """Tell rank and device by the name of the process, the stream by that of the thread or its number."""
        devices: dict[str, int] = {}
        rank: list[int] = []
        device: list[int] = []
        stream: list[int] = []
        used = set(np.unique(found.track).tolist())
        for number, (pid, tid) in enumerate(found.tracks):
            known = found.process_names.get(pid, "")
            told = _RANK.search(known)
            if told:
                rank.append(int(told[1]) if told[1] else -1)
                name = told[2] or ""
            else:
                rank.append(0)
                name = known or f"process {pid}"
            device.append(devices.setdefault(name, len(devices)) if number in used else 0)
            stream.append(_stream(found.thread_names.get((pid, tid), ""), tid, number))
        at = found.track
        return cls(
            tuple(devices),
            np.array(device, np.int32)[at],
            np.array(rank, np.int32)[at],
            np.array(stream, np.int64)[at],
        )


def _stream(name: str, tid: int | str, number: int) -> int:
    if name == _NO_STREAM:
        return -1
    told = _STREAM.search(name)
    if told:
        return int(told[1])
    return tid if isinstance(tid, int) and 0 <= tid < 1 << 63 else number
