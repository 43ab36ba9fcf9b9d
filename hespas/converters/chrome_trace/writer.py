"""Writes tracks as Chrome-trace JSON: metadata, then slices, then arrows. Times are decimal text, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from hespas.converters.format import Value, WriteOptions
from hespas.converters.packed import open_output
from hespas.converters.tracks import Displayed, Scene, scene_of, side_by_side
from hespas.converters.tracks.scene import Chunk, Label, shown
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError

__all__ = ["SCHEMA_ID", "write_chrome_trace", "write_displayed", "write_scene"]

SCHEMA_ID = "hespas.chrome-trace/1"
_CHUNK_ROWS = 1 << 15
_LARGEST_NS = float(1 << 53)
"""Above this a float holds no odd number of ns."""


def write_chrome_trace(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a profile. Raises ``UsageError`` for a workload, which has no times, ``OutputError`` where the
    disk refuses.
    """
    if not isinstance(value, Profile):
        raise UsageError(
            "a timeline shows when things ran, and a workload does not say", path=options.name or str(path),
            hint="run it first: hespas simulate SOURCE --timeline FILE",
        )  # fmt: skip
    write_scene(scene_of(value, diagnostics), path, options)


def write_displayed(
    values: Sequence[tuple[str, Displayed]],
    path: Path,
    options: WriteOptions,
    diagnostics: Diagnostics,
    *,
    arrows: bool = True,
) -> None:
    """Write measured and simulated values side by side, each under its label (empty: no label).

    Raises ``UsageError`` where a timeline does not fit its workload, ``OutputError`` where the disk refuses.
    """
    scenes = [(label, scene_of(value, diagnostics, arrows=arrows)) for label, value in values]
    write_scene(side_by_side(scenes), path, options)


def write_scene(scene: Scene, path: Path, options: WriteOptions) -> None:
    """Write tracks; memory beyond the scene is one chunk. Gzipped where the name ends in ``.gz``."""
    with open_output(path, packed=(options.name or path.name).endswith(".gz")) as stream:
        _Writer(stream, scene, options.progress).write()


class _Writer:
    """Processes have the numbers 1, 2, ...; tracks go on behind them, as viewers want distinct numbers."""

    def __init__(self, stream: BinaryIO, scene: Scene, progress: Callable[[int, int], None] | None) -> None:
        self._stream = stream
        self._scene = scene
        self._progress = progress
        processes = sum(len(part.processes) for part in scene.parts)
        self._identity: list[list[str]] = []
        for part, process, track in zip(scene.parts, scene.first_process, scene.first_track, strict=True):
            tracks = enumerate(part.track_process)
            base = 1 + processes + track
            self._identity.append(
                [f'"pid":{1 + process + owner},"tid":{base + row}' for row, owner in tracks]
            )

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
        """Names of processes and tracks, and their order."""
        scene = self._scene
        for part, first, identity in zip(scene.parts, scene.first_process, self._identity, strict=True):
            for row, name in enumerate(part.processes):
                pid = f'"pid":{1 + first + row},"tid":0'
                yield f'{{"ph":"M","name":"process_name",{pid},"args":{{"name":{_text(name)}}}}}'
                yield f'{{"ph":"M","name":"process_sort_index",{pid},"args":{{"sort_index":{first + row}}}}}'
            for row, (name, where) in enumerate(zip(part.track_name, identity, strict=True)):
                yield f'{{"ph":"M","name":"thread_name",{where},"args":{{"name":{_text(name)}}}}}'
                yield f'{{"ph":"M","name":"thread_sort_index",{where},"args":{{"sort_index":{row}}}}}'

    def _slices(self) -> Iterator[str]:
        total = len(self._scene)
        for chunk in self._scene.chunks(_CHUNK_ROWS):
            yield ",\n".join(_spelled_slices(chunk, self._identity[chunk.index]))
            if self._progress:
                self._progress(chunk.first + chunk.part.stop - chunk.part.start, total)

    def _flows(self) -> Iterator[str]:
        """Two events an arrow, bound to the slices that they stand in."""
        scene, flows = self._scene, self._scene.flows
        if not len(flows):
            return
        track = np.concatenate(
            [part.track + first for part, first in zip(scene.parts, scene.first_track, strict=True)]
        )
        start_ns = np.concatenate([part.start_ns for part in scene.parts])
        identity = [each for part in self._identity for each in part]
        for begin in range(0, len(flows), _CHUNK_ROWS):
            part = slice(begin, begin + _CHUNK_ROWS)
            lines: list[str] = []
            codes: list[int] = flows.kind[part].tolist()
            kinds = [flows.kinds[code] for code in codes]
            ends = [(flows.source[part], "s", ""), (flows.target[part], "f", ',"bp":"e"')]
            spelled = [
                (phase, tail, track[slices].tolist(), _microseconds(start_ns[slices]))
                for slices, phase, tail in ends
            ]
            for row, kind in enumerate(kinds):
                same = f'"id":{begin + row},"name":"{kind}","cat":"{kind}"'
                lines.extend(
                    f'{{"ph":"{phase}",{identity[where[row]]},"ts":{at[row]},{same}{tail}}}'
                    for phase, tail, where, at in spelled
                )
            yield ",\n".join(lines)


def _spelled_slices(chunk: Chunk, identity: list[str]) -> Iterator[str]:
    tracks, part = chunk.tracks, chunk.part
    labels = [_label(label) for label in chunk.labels]
    start, duration = _microseconds(tracks.start_ns[part]), _microseconds(tracks.duration_ns[part])
    rows = zip(tracks.track[part].tolist(), start, duration, chunk.label.tolist(), strict=True)
    for track, begin, length, label in rows:
        yield f'{{"ph":"X",{identity[track]},"ts":{begin},"dur":{length},{labels[label]}}}'


def _text(text: str) -> str:
    return msgspec.json.encode(shown(text)).decode()


def _label(label: Label) -> str:
    arguments = {key: _number(value) if isinstance(value, float) else value for key, value in label.arguments}
    told = f',"args":{msgspec.json.encode(arguments).decode()}' if arguments else ""
    category = f',"cat":{_text(label.category)}' if label.category else ""
    return f'"name":{_text(label.name)}{category}{told}'


def _number(value: float) -> int | float:
    """Whole numbers without a point."""
    return int(value) if value.is_integer() and abs(value) < _LARGEST_NS else value


def _microseconds(times_ns: FloatArray) -> list[str]:
    """Decimal texts of us with as many places as the ns have: 3 where they are whole, else 6 (ps).

    An unknown time is 0. Whole ns are exact at any size, ps below 2**53 of them.
    """
    known_ns = np.nan_to_num(times_ns, nan=0.0)
    whole_ns = np.rint(known_ns)
    if not (whole_ns == known_ns).all() or float(np.abs(whole_ns).max(initial=0)) > _LARGEST_NS:
        return [_fraction(value) for value in known_ns.tolist()]
    numbers: list[int] = whole_ns.astype(np.int64).tolist()
    if len(numbers) and min(numbers) < 0:
        return [f"-{-n // 1000}.{-n % 1000:03d}" if n < 0 else f"{n // 1000}.{n % 1000:03d}" for n in numbers]
    return [f"{n // 1000}.{n % 1000:03d}" for n in numbers]


def _fraction(time_ns: float) -> str:
    whole = time_ns.is_integer()
    steps = int(time_ns) if whole else round(time_ns * 1000)
    sign, steps = ("-", -steps) if steps < 0 else ("", steps)
    return (
        f"{sign}{steps // 1000}.{steps % 1000:03d}"
        if whole
        else f"{sign}{steps // 1000000}.{steps % 1000000:06d}"
    )
