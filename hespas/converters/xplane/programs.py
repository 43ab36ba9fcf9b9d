"""To which program and which run of it a device event belongs.

The program is the one the event names, else, for operations, the one whose run encloses it on the plane's
``XLA Modules``; what else runs on a stream at that time may be somebody else's.
The run is told by, in this order: the event's ``run_id``; the enclosing run of its program; its
``group_id``; else by counting: a new run begins with each repetition of the first operation among those the
program repeats least often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hespas.converters.xplane.collect import Collected, ModuleRuns
from hespas.converters.xplane.lines import ABSENT, LineKind, Program, split_module_name
from hespas.converters.xplane.texts import Texts
from hespas.graph.columns import IntArray

__all__ = ["Membership", "Modules", "membership", "run_numbers"]

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Modules:
    """How programs are called: by name, and with their id where several share the name."""

    ids: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, int]]) -> Modules:
        """Of all programs that events or HLO speak of, as name and id (-1: not known)."""
        ids: dict[str, set[int]] = {}
        for name, number in pairs:
            known = ids.setdefault(name, set())
            if number != -1:
                known.add(number)
        return cls({name: frozenset(known) for name, known in ids.items()})

    def label(self, name: str, number: int) -> str:
        """``jit_step``, or ``jit_step(42)`` where that is not enough."""
        if number == -1 or len(self.ids.get(name, ())) < 2:
            return name
        return f"{name}({number & _MASK64})"


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """Per device event: string rows of its program's name and of its label (0: unknown), and ids of its
    run (:data:`ABSENT`: not told).
    """

    modules: Modules
    label_row: IntArray
    run_id: IntArray


def membership(collected: Collected, programs: list[Program], strings: Texts) -> Membership:
    """Find the program of every device event."""
    told = _stated(collected, strings)
    rows_by_plane = collected.rows_by_plane() if collected.modules else {}
    of_program = np.array([line.kind is LineKind.OPS for line in collected.lines], np.bool_)
    for plane, runs in collected.modules.items():
        rows = rows_by_plane.get(plane, np.empty(0, np.int64))
        rows = rows[(told.name_row[rows] > 0) | of_program[collected.device.line[rows]]]
        _by_window(runs, collected.device.start_ps[rows], rows, told, strings)
    group_id = collected.device.stats["group_id"]
    told.run_id = np.where(told.run_id == ABSENT, group_id, told.run_id)
    return _labelled(told, programs, strings)


@dataclass(slots=True, eq=False)
class _Told:
    """What is known of each event while it is found: the name of its program, its id (-1: none), its run."""

    name_row: IntArray
    program_id: IntArray
    run_id: IntArray


def _stated(collected: Collected, strings: Texts) -> _Told:
    """What events say themselves; the id of a program may be part of its name."""
    stats = collected.device.stats
    rows, inverse = np.unique(stats["hlo_module"], return_inverse=True)
    names = [split_module_name(strings[row]) for row in rows.tolist()]
    name_row = np.array([strings.add(name) for name, _ in names], np.int64)[inverse]
    in_name = np.array([number for _, number in names], np.int64)[inverse]
    program_id = np.where(stats["program_id"] == ABSENT, in_name, stats["program_id"])
    return _Told(name_row, program_id, stats["run_id"].copy())


def _by_window(runs: ModuleRuns, start_ps: IntArray, rows: IntArray, told: _Told, strings: Texts) -> None:
    """Fill in, for the events ``rows`` of a plane, what the runs of programs around them tell."""
    at = runs.at(start_ps)
    names = [split_module_name(strings[row]) for row in runs.name_row.tolist()]
    run_name = np.array([strings.add(name) for name, _ in names], np.int64)
    in_name = np.array([number for _, number in names], np.int64)
    run_program = np.where(runs.program_id == ABSENT, in_name, runs.program_id)
    identity = np.where(runs.run_id == ABSENT, np.arange(len(runs.run_id)), runs.run_id)
    found = at >= 0
    rows, at = rows[found], at[found]
    fits = (told.name_row[rows] == 0) | (told.name_row[rows] == run_name[at])
    rows, at = rows[fits], at[fits]
    told.name_row[rows] = run_name[at]
    told.program_id[rows] = np.where(told.program_id[rows] == -1, run_program[at], told.program_id[rows])
    told.run_id[rows] = np.where(told.run_id[rows] == ABSENT, identity[at], told.run_id[rows])


def _labelled(told: _Told, programs: list[Program], strings: Texts) -> Membership:
    both = np.stack([told.name_row, told.program_id])
    keys, inverse = np.unique(both, axis=1, return_inverse=True)
    pairs = [(strings[row], number) for row, number in zip(*keys.tolist(), strict=True)]
    modules = Modules.of([*pairs, *((each.name, each.number) for each in programs)])
    labels = np.array([strings.add(modules.label(*pair)) for pair in pairs], np.int64)
    return Membership(modules, labels[inverse.reshape(-1)], told.run_id)


def run_numbers(
    label_row: IntArray, op_row: IntArray, rank: IntArray, run_id: IntArray, start_ps: IntArray
) -> IntArray:
    """Count the runs of each program from 0; -1 for events of none. A run that several ranks name by one id
    has one number on all of them.
    """
    numbers = np.full(len(label_row), -1, np.int64)
    told = np.flatnonzero((label_row > 0) & (run_id != ABSENT))
    if len(told):
        shared = _is_shared(run_id[told], rank[told])
        group = label_row[told] if shared else _paired(label_row[told], rank[told])
        numbers[told] = _ordinals(group, run_id[told], start_ps[told])
    rest = np.flatnonzero((label_row > 0) & (run_id == ABSENT))
    group = _paired(label_row[rest], rank[rest])
    order = np.argsort(group, kind="stable")
    for rows in np.split(rest[order], np.flatnonzero(np.diff(group[order])) + 1):
        if len(rows):
            numbers[rows] = _counted(op_row[rows], start_ps[rows])
    return numbers


def _paired(first: IntArray, second: IntArray) -> IntArray:
    """One number for each pair."""
    if not len(first):
        return first
    _, inverse = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
    return inverse.reshape(-1).astype(np.int64)


def _is_shared(run_id: IntArray, rank: IntArray) -> bool:
    """Whether several ranks name a run by the same id."""
    pairs = np.unique(np.stack([run_id, rank]), axis=1)
    return int(pairs.shape[1]) > len(np.unique(run_id))


def _ordinals(group: IntArray, member: IntArray, start_ps: IntArray) -> IntArray:
    """For each event, the place of its member among those of its group, by their first starts."""
    pair = _paired(group, member)
    count = int(pair.max()) + 1
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, pair, start_ps)
    group_of = np.zeros(count, np.int64)
    group_of[pair] = group
    order = np.lexsort((first, group_of))
    ordered = group_of[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    lengths = np.diff(np.append(begins, count))
    ordinal = np.zeros(count, np.int64)
    ordinal[order] = np.arange(count) - np.repeat(begins, lengths)
    return ordinal[pair]


def _counted(op_row: IntArray, start_ps: IntArray) -> IntArray:
    """Runs by the repetitions of one operation; what stands before the first is of a run of its own."""
    _, code, counts = np.unique(op_row, return_inverse=True, return_counts=True)
    rare = np.flatnonzero(counts[code] == counts.min())
    anchor = code[rare[int(start_ps[rare].argmin())]]
    begins = np.sort(start_ps[code == anchor])
    place = np.searchsorted(begins, start_ps, side="right") - 1
    return place - int(place.min())
