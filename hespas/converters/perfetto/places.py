"""What tracks are: their names, the processes they belong to, and which of them are devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hespas.converters.perfetto.events import TrackKey
from hespas.converters.perfetto.packets import text
from hespas.files.wire import BYTES, VARINT, fields, signed
from hespas.schemas.perfetto.tables import (
    DescriptorField,
    GpuField,
    GpuInfoField,
    PacketField,
    ProcessField,
    ThreadField,
)

__all__ = ["Descriptions", "Place"]

_DEVICE = re.compile(
    r"(?<![a-z])(gpus?|tpus?|npus?|xpus?|cuda|hip|rocm|device|streams?|(hw )?queues?|nccl|rccl|kernels?"
    r"|memcpy|memset|compute|communication|copy)(?![a-z])"
)
_RANK = re.compile(r"(?:\A|\s)(?:rank (\d{1,9})|unknown rank)(?:: (.*))?\Z", re.DOTALL)
_STREAM = re.compile(r"(?i:\bstream) #?(\d{1,18})(?!\w)")
_NO_STREAM = "no stream"
_DEEPEST = 64
"""Tracks within tracks; more are a circle, or as good as one."""
_NAMES = frozenset({DescriptorField.NAME, DescriptorField.STATIC_NAME, DescriptorField.ATRACE_NAME})


@dataclass(frozen=True, slots=True)
class Place:
    """Where slices of one track ran. ``label`` names the track with all that it stands under."""

    label: str
    device: str
    rank: int
    stream: int
    is_device: bool
    is_host: bool = False


@dataclass(slots=True)
class _Track:
    name: str = ""
    parent: int = 0
    process: int | None = None
    thread_name: str = ""
    thread: bool = False


@dataclass(slots=True)
class Descriptions:
    """Descriptions of tracks, processes and GPUs, as they are met."""

    gpus: list[str] = field(default_factory=list[str])
    _tracks: dict[int, _Track] = field(default_factory=dict[int, _Track])
    _processes: dict[int, str] = field(default_factory=dict[int, str])

    def add(self, number: int, data: bytes, start: int, end: int) -> None:
        """Note a description; other messages say nothing of tracks."""
        match number:
            case PacketField.TRACK_DESCRIPTOR:
                self._track(data, start, end)
            case PacketField.PROCESS_DESCRIPTOR:
                self._process(data, start, end)
            case PacketField.GPU_INFO:
                self.gpus = [
                    _name(data, value, after, GpuField.NAME)
                    for inner, wire, value, after in fields(data, start, end)
                    if inner == GpuInfoField.GPUS and wire == BYTES
                ]
            case _:
                pass

    def _track(self, data: bytes, start: int, end: int) -> None:
        uuid, track = 0, _Track()
        for number, wire, value, after in fields(data, start, end):
            if wire == VARINT:
                if number == DescriptorField.UUID:
                    uuid = value
                elif number == DescriptorField.PARENT_UUID:
                    track.parent = value
            elif wire == BYTES:
                if number in _NAMES:
                    track.name = text(data, value, after)
                elif number == DescriptorField.PROCESS:
                    track.process = self._process(data, value, after)
                elif number == DescriptorField.THREAD:
                    track.thread = True
                    track.thread_name = _name(data, value, after, ThreadField.THREAD_NAME)
                    track.process = _number(data, value, after, ThreadField.PID)
        known = self._tracks.get(uuid)
        if known is None or track.name or track.thread_name or track.process is not None:
            self._tracks[uuid] = track

    def _process(self, data: bytes, start: int, end: int) -> int:
        pid = _number(data, start, end, ProcessField.PID)
        name = _name(data, start, end, ProcessField.PROCESS_NAME)
        if name or pid not in self._processes:
            self._processes[pid] = name
        return pid

    def place(self, key: TrackKey, number: int) -> Place:
        """What the names of a track tell; ``number`` serves as its stream where nothing else does."""
        kind, which, queue = key
        if kind == "gpu":
            name = self.gpus[which] if 0 <= which < len(self.gpus) else ""
            label = f"{name or f'GPU {which}'}/{queue}"
            return Place(label, name or f"GPU {which}", 0, _stream([str(queue)], number), is_device=True)
        names = list(self._names(which))
        process = names[-1] if names else ""
        told = next((found for found in map(_RANK.search, reversed(names)) if found), None)
        device = (told[2] or "") if told else (process or "")
        return Place(
            "/".join(reversed([name for name in names if name])) or f"track {which}",
            device,
            int(told[1] or -1) if told else 0,
            _stream(names, number),
            is_device=any(_DEVICE.search(name.lower()) for name in names) and not _host(names),
            is_host=_host(names),
        )

    def _names(self, uuid: int) -> Iterator[str]:
        """The names of a track and of what it stands under, inside out; the last is the process's."""
        for _ in range(_DEEPEST):
            track = self._tracks.get(uuid)
            if track is None:
                return
            yield track.thread_name or track.name
            if track.process is not None and (track.thread or not track.parent):
                process = self._processes.get(track.process, "")
                if process != track.name or track.thread:
                    yield process
                if track.thread:
                    return
            if not track.parent or track.parent == uuid:
                return
            uuid = track.parent


def _host(names: list[str]) -> bool:
    """Whether a process says that it is no device."""
    return bool(names) and re.search(r"(?<![a-z])(host|cpu)(?![a-z])", names[-1].lower()) is not None


def _stream(names: list[str], number: int) -> int:
    for name in names:
        if name == _NO_STREAM:
            return -1
        told = _STREAM.search(name)
        if told:
            return int(told[1])
    return number


def _name(data: bytes, start: int, end: int, which: int) -> str:
    """The last text of one field."""
    found = [
        (value, after)
        for number, wire, value, after in fields(data, start, end)
        if number == which and wire == BYTES
    ]
    return text(data, *found[-1]) if found else ""


def _number(data: bytes, start: int, end: int, which: int) -> int:
    """The last number of one field, 0 where there is none."""
    found = [
        value for number, wire, value, _ in fields(data, start, end) if number == which and wire == VARINT
    ]
    return signed(found[-1]) if found else 0
