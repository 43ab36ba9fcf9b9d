"""Slices on tracks of processes, with arrows between them: columns, whatever they were made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray, SmallIntArray, StringTable
from hespas.graph.errors import InvariantError

__all__ = ["Argument", "Chunk", "Flows", "Label", "Scene", "TextColumn", "Tracks", "shown", "side_by_side"]


@dataclass(frozen=True, slots=True, eq=False)
class TextColumn:
    """A text per slice: ``rows`` of ``texts``, whose row 0 is the empty text."""

    rows: SmallIntArray
    texts: StringTable | tuple[str, ...]


Argument = TextColumn | FloatArray
"""What is told of a slice beside its name: a text (empty: nothing) or a number (NaN: nothing)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tracks:
    """Slices as columns of shape ``(slices,)``, sorted by track, then by start, then the longest first.

    ``processes`` are names; ``track_process`` and ``track_name`` describe the tracks, ``track`` the track of
    each slice. Times are ns (they may have fractions and may be negative).
    """

    processes: tuple[str, ...]
    track_process: tuple[int, ...]
    track_name: tuple[str, ...]
    track: SmallIntArray
    name: TextColumn
    category: TextColumn
    start_ns: FloatArray
    duration_ns: FloatArray
    arguments: Mapping[str, Argument]

    def __post_init__(self) -> None:
        """Check that all columns have one row per slice."""
        columns: list[Argument] = [self.name, self.category, self.start_ns, self.duration_ns]
        columns += self.arguments.values()
        lengths = [len(each.rows) if isinstance(each, TextColumn) else len(each) for each in columns]
        if any(length != len(self.track) for length in lengths):
            raise InvariantError(f"tracks: a column does not have {len(self.track)} rows")

    def __len__(self) -> int:
        return len(self.track)


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Arrows of shape ``(flows,)`` between slices, which are numbered through all parts of a scene.

    ``kind`` indexes ``kinds`` (``launch``, ``data``, ``control``, ``collective``, ``message``).
    """

    kinds: tuple[str, ...]
    kind: NDArray[np.int8]
    source: IntArray
    target: IntArray

    @classmethod
    def none(cls) -> Flows:
        """No arrows."""
        return cls((), np.empty(0, np.int8), np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, ends: Sequence[tuple[str, IntArray, IntArray]]) -> Flows:
        """Arrows from sources and targets by kind."""
        if not ends:
            return cls.none()
        kinds = tuple(dict.fromkeys(kind for kind, _, _ in ends))
        counts = [len(source) for _, source, _ in ends]
        codes = np.array([kinds.index(kind) for kind, _, _ in ends], np.int8)
        return cls(
            kinds,
            np.repeat(codes, counts),
            np.concatenate([source for _, source, _ in ends]).astype(np.int64, copy=False),
            np.concatenate([target for _, _, target in ends]).astype(np.int64, copy=False),
        )

    def __len__(self) -> int:
        return len(self.kind)


class Label(NamedTuple):
    """What is told of a slice; only arguments that say something."""

    name: str
    category: str
    arguments: tuple[tuple[str, str | float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some slices of one part in order, with what is told of each spelled once per distinct combination.

    ``first`` is the number of the first slice in the scene, ``index`` that of the part they are of, ``part``
    the slice of its columns; ``label`` says which of ``labels`` each slice has.
    """

    first: int
    index: int
    tracks: Tracks
    part: slice
    labels: tuple[Label, ...]
    label: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Parts that are shown together, the arrows between them, and facts about all of it as text."""

    name: str
    parts: tuple[Tracks, ...]
    flows: Flows
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def first_slice(self) -> list[int]:
        """The number of the first slice of each part."""
        return list(accumulate(map(len, self.parts), initial=0))[:-1]

    @property
    def first_track(self) -> list[int]:
        """The number of the first track of each part, through all parts."""
        return list(accumulate((len(part.track_name) for part in self.parts), initial=0))[:-1]

    @property
    def first_process(self) -> list[int]:
        """The number of the first process of each part, through all parts."""
        return list(accumulate((len(part.processes) for part in self.parts), initial=0))[:-1]

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """All slices, at most ``rows`` at a time; memory is that of one chunk."""
        for index, (first, tracks) in enumerate(zip(self.first_slice, self.parts, strict=True)):
            for start in range(0, len(tracks), rows):
                part = slice(start, min(start + rows, len(tracks)))
                labels, label = _labels(tracks, part)
                yield Chunk(first + start, index, tracks, part, labels, label)


def _labels(tracks: Tracks, part: slice) -> tuple[tuple[Label, ...], IntArray]:
    """The distinct combinations of name, category and arguments, and which each slice of ``part`` has."""
    columns: list[Argument] = [tracks.name, tracks.category, *tracks.arguments.values()]
    key = np.zeros(part.stop - part.start, np.int64)
    for column in columns:
        values = column.rows[part] if isinstance(column, TextColumn) else column[part]
        if (values == values[0]).all():
            continue  # it tells no two slices apart
        _, code = np.unique(values, return_inverse=True)
        _, key = np.unique(key * (int(code.max()) + 1) + code, return_inverse=True)
    _, example = np.unique(key, return_index=True)
    spelled = [_spelled(column, example + part.start) for column in columns]
    keys = tuple(tracks.arguments)
    labels: list[Label] = []
    for name, category, *rest in zip(*spelled, strict=True):
        told = tuple((key, value) for key, value in zip(keys, rest, strict=True) if _told(value))
        labels.append(Label(str(name), str(category), told))
    return tuple(labels), key.astype(np.int64, copy=False)


def _told(value: str | float) -> bool:
    return value != "" and value == value  # noqa: PLR0124 # NaN says nothing


def _spelled(column: Argument, places: IntArray) -> list[str] | list[float]:
    if not isinstance(column, TextColumn):
        numbers: list[float] = column[places].tolist()
        return numbers
    rows: list[int] = column.rows[places].tolist()
    texts = {row: shown(column.texts[row]) for row in set(rows)}
    return [texts[row] for row in rows]


def shown(text: str) -> str:
    """A text that UTF-8 can hold: halves of surrogate pairs are replaced."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def side_by_side(scenes: Sequence[tuple[str, Scene]]) -> Scene:
    """One scene of several; the label of each stands before the names of its processes."""
    parts: list[Tracks] = []
    ends: list[tuple[str, IntArray, IntArray]] = []
    metadata: dict[str, str] = {}
    first = 0
    for label, scene in scenes:
        flows = scene.flows
        for code, kind in enumerate(flows.kinds):
            mine = flows.kind == code
            ends.append((kind, flows.source[mine] + first, flows.target[mine] + first))
        first += len(scene)
        parts.extend(_renamed(part, label) for part in scene.parts)
        metadata |= {f"{label}.{key}" if label else key: text for key, text in scene.metadata.items()}
    name = " and ".join(dict.fromkeys(scene.name for _, scene in scenes if scene.name))
    return Scene(name, tuple(parts), Flows.of(ends), metadata)


def _renamed(tracks: Tracks, label: str) -> Tracks:
    if not label:
        return tracks
    return Tracks(
        processes=tuple(f"{label} {name}" for name in tracks.processes),
        track_process=tracks.track_process,
        track_name=tracks.track_name,
        track=tracks.track,
        name=tracks.name,
        category=tracks.category,
        start_ns=tracks.start_ns,
        duration_ns=tracks.duration_ns,
        arguments=tracks.arguments,
    )
