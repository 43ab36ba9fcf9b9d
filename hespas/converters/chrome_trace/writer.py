"""Writer of tracks as Chrome-trace JSON: metadata, then slices, then flow arrows. Times are decimal text.

Viewers round start and length to whole ns separately, and drop slices that then overlap the next one. The
writer therefore writes whole ns that do not overlap. The arguments have the exact times of slices with
fractions of a ns; the reader of Hespas reads them. Slices that overlap others of their track get a lane of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from hespas.converters.format import Value, WriteOptions
from hespas.converters.tracks import TrackSet, tracks_of_measurement
from hespas.converters.tracks.slices import (
    SliceChunk,
    SliceLabel,
    Tracks,
    is_whole,
    lanes_of,
    shown,
    shown_ns,
)
from hespas.files.streams import open_output
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, SmallIntArray
from hespas.graph.progress import Progress

__all__ = ["SCHEMA_ID", "write_chrome_trace", "write_scene"]

SCHEMA_ID = "hespas.chrome-trace/1"
_EXACT = ("start_ns", "duration_ns")
"""Names of the arguments with the exact times of slices whose times are not whole ns."""
_CHUNK_ROWS = 1 << 15
_LARGEST_NS = float(1 << 53)
"""Largest time for which a float is exact to a ns."""


def write_chrome_trace(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a profile as a Chrome trace. Raises ``UsageError`` for a workload, which has no times,
    ``OutputError`` if the file cannot be written.
    """
    write_scene(tracks_of_measurement(value, path, options, diagnostics), path, options)


def write_scene(scene: TrackSet, path: Path, options: WriteOptions) -> None:
    """Write tracks as a Chrome trace, gzipped if the name ends in ``.gz``. Slices are encoded in chunks to
    save memory.
    """
    with open_output(path, packed=(options.name or path.name).endswith(".gz")) as stream:
        _ChromeWriter(stream, scene, options.progress).write()


@dataclass(frozen=True, slots=True, eq=False)
class _ThreadNames:
    """Lanes of the tracks in one part of a file. A lane is a thread of the file. Overlapping slices of a
    track are on different lanes.

    ``name`` and ``identity`` (ids of process and thread as JSON) have one entry per lane. ``lane`` is the
    lane of each slice.
    """

    name: tuple[str, ...]
    identity: tuple[str, ...]
    lane: SmallIntArray

    @classmethod
    def of(cls, tracks: Tracks, first_process: int, first: int) -> _ThreadNames:
        """Number the lanes of all tracks from ``first``, because viewers need a thread number for each lane.
        The lanes of a track share its name.
        """
        lane = lanes_of(tracks)
        counts = np.ones(len(tracks.track_name), np.int64)
        np.maximum.at(counts, tracks.track, lane + 1)
        begin = np.cumsum(counts) - counts
        owners = [track for track, count in enumerate(counts.tolist()) for _ in range(count)]
        return cls(
            tuple(tracks.track_name[track] for track in owners),
            tuple(
                f'"pid":{first_process + tracks.track_process[track]},"tid":{first + row}'
                for row, track in enumerate(owners)
            ),
            (begin[tracks.track] + lane).astype(np.int32),
        )


class _ChromeWriter:
    """Writer of one Chrome trace. Processes are numbered from 1; threads have the next numbers, because
    viewers need distinct ids.
    """

    def __init__(self, stream: BinaryIO, scene: TrackSet, progress: Progress | None) -> None:
        self._stream = stream
        self._scene = scene
        self._progress = progress
        first = 1 + sum(len(part.processes) for part in scene.parts)
        self._threads: list[_ThreadNames] = []
        for part, process in zip(scene.parts, scene.first_process, strict=True):
            self._threads.append(_ThreadNames.of(part, 1 + process, first))
            first += len(self._threads[-1].name)

    def write(self) -> None:
        facts = {shown(key): shown(text) for key, text in self._scene.metadata.items()}
        other = {"schema": SCHEMA_ID} | facts | {"schema": SCHEMA_ID, "name": shown(self._scene.name)}
        head = b'{"displayTimeUnit":"ns","otherData":%b,"traceEvents":[\n' % msgspec.json.encode(other)
        self._stream.write(head)
        named = ",\n".join(self._metadata())
        self._stream.write(named.encode())
        separator = b",\n" if named else b""
        for lines in chain(self._slices(), self._flows()):
            self._stream.write(separator + lines.encode())
            separator = b",\n"
        self._stream.write(b"\n]}\n")

    def _metadata(self) -> Iterator[str]:
        """Yield the names of processes and tracks, and their order."""
        scene = self._scene
        for part, first, threads in zip(scene.parts, scene.first_process, self._threads, strict=True):
            for row, name in enumerate(part.processes):
                pid = f'"pid":{1 + first + row},"tid":0'
                yield f'{{"ph":"M","name":"process_name",{pid},"args":{{"name":{_text(name)}}}}}'
                yield f'{{"ph":"M","name":"process_sort_index",{pid},"args":{{"sort_index":{first + row}}}}}'
            for row, (name, where) in enumerate(zip(threads.name, threads.identity, strict=True)):
                yield f'{{"ph":"M","name":"thread_name",{where},"args":{{"name":{_text(name)}}}}}'
                yield f'{{"ph":"M","name":"thread_sort_index",{where},"args":{{"sort_index":{row}}}}}'

    def _slices(self) -> Iterator[str]:
        total = len(self._scene)
        for chunk in self._scene.chunks(_CHUNK_ROWS):
            yield ",\n".join(_spelled_slices(chunk, self._threads[chunk.index]))
            if self._progress:
                self._progress(chunk.first + chunk.part.stop - chunk.part.start, total)

    def _flows(self) -> Iterator[str]:
        """Yield the JSON of flow arrows, two events each. Viewers bind an event to the slice around its
        time.
        """
        scene, flows = self._scene, self._scene.flows
        if not len(flows):
            return
        first = list(accumulate((len(threads.name) for threads in self._threads), initial=0))[:-1]
        lanes = zip(self._threads, first, strict=True)
        lane = np.concatenate([threads.lane + base for threads, base in lanes])
        start_ns = np.concatenate([shown_ns(part.start_ns, part.duration_ns)[0] for part in scene.parts])
        identity = [thread for threads in self._threads for thread in threads.identity]
        for begin in range(0, len(flows), _CHUNK_ROWS):
            part = slice(begin, begin + _CHUNK_ROWS)
            lines: list[str] = []
            codes: list[int] = flows.kind[part].tolist()
            kinds = [flows.kinds[code] for code in codes]
            ends = [(flows.source[part], "s", ""), (flows.target[part], "f", ',"bp":"e"')]
            spelled = [
                (phase, tail, lane[slices].tolist(), _microseconds(start_ns[slices]))
                for slices, phase, tail in ends
            ]
            for row, kind in enumerate(kinds):
                same = f'"id":{begin + row},"name":"{kind}","cat":"{kind}"'
                lines.extend(
                    f'{{"ph":"{phase}",{identity[where[row]]},"ts":{at[row]},{same}{tail}}}'
                    for phase, tail, where, at in spelled
                )
            yield ",\n".join(lines)


def _spelled_slices(chunk: SliceChunk, threads: _ThreadNames) -> Iterator[str]:
    tracks, part, identity = chunk.tracks, chunk.part, threads.identity
    exact_ns = tracks.start_ns[part], np.nan_to_num(tracks.duration_ns[part], nan=0.0)
    start, duration = map(_microseconds, shown_ns(*exact_ns))
    names = [
        f'"name":{_text(label.name)}' + (f',"cat":{_text(label.category)}' if label.category else "")
        for label in chunk.labels
    ]
    arguments = [_arguments(label) for label in chunk.labels]
    whole = is_whole(*exact_ns)
    exactly = [""] * len(whole)
    partial: list[int] = np.flatnonzero(~whole).tolist()
    for row in partial:
        begin, length = (float(column[row]) for column in exact_ns)
        exactly[row] = f'"{_EXACT[0]}":{begin!r},"{_EXACT[1]}":{length!r}'
    lanes: list[int] = threads.lane[part].tolist()
    places: list[int] = chunk.label.tolist()
    for lane, begin_us, length_us, label, times in zip(lanes, start, duration, places, exactly, strict=True):
        text = ",".join(filter(None, (times, arguments[label])))
        tail = f',"args":{{{text}}}' if text else ""
        yield f'{{"ph":"X",{identity[lane]},"ts":{begin_us},"dur":{length_us},{names[label]}{tail}}}'


def _text(text: str) -> str:
    return msgspec.json.encode(shown(text)).decode()


def _arguments(label: SliceLabel) -> str:
    """Return the arguments of a slice as JSON, without the braces."""
    text = {
        key: (int(value) if value.is_integer() and abs(value) < _LARGEST_NS else value)
        if isinstance(value, float)
        else value
        for key, value in label.arguments
    }
    return msgspec.json.encode(text).decode()[1:-1]


def _microseconds(times_ns: FloatArray) -> list[str]:
    """Format whole ns as decimal us with three digits, exact for any size."""
    if float(np.abs(times_ns).max(initial=0)) > _LARGEST_NS:
        numbers = [int(value) for value in times_ns.tolist()]
    else:
        numbers = times_ns.astype(np.int64).tolist()
    if len(numbers) and min(numbers) < 0:
        return [f"-{-n // 1000}.{-n % 1000:03d}" if n < 0 else f"{n // 1000}.{n % 1000:03d}" for n in numbers]
    return [f"{n // 1000}.{n % 1000:03d}" for n in numbers]
