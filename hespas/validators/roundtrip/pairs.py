"""All pairs of formats for one file: A to B and back to A, and what each column has become.

Columns are those of :mod:`hespas.graph`: exact, changed (how many rows), or not expressible, so a line of the
matrix says what a reader of the graph will miss.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from hespas.converters import (
    Format,
    ReadOptions,
    WriteOptions,
    find_format,
    is_flat,
    load_format,
    note_unread_files,
    usable_formats,
)
from hespas.files.streams import located
from hespas.graph import ABSENT, Diagnostics, ExplicitGroups, OpGraph, Permutation, Workload
from hespas.graph.columns import BoolArray, IntArray, RaggedArray
from hespas.graph.errors import HespasError, InvariantError, UnsupportedError, UsageError
from hespas.graph.groups import GroupSet
from hespas.graph.passes import FoldFree, UnrollLoops, bypass, take_nodes
from hespas.graph.workload import COMPARED_COLUMNS, graphs_equal, workloads_equal

__all__ = [
    "JOB_COLUMNS",
    "ColumnResult",
    "FilePairs",
    "Kept",
    "Pair",
    "PairStatus",
    "Traveller",
    "columns_kept",
    "file_pairs",
    "summed",
]

JOB_COLUMNS = ("ranks", "metadata", "nodes")
"""What is compared beside the columns of a graph: rank classes, metadata of the job, the set of nodes."""

_PROVENANCE = frozenset({"format", "version", "form"})
"""Facts about a file itself, which are another file's after a conversion."""

_COLUMNS = tuple(name for name in COMPARED_COLUMNS if not name.startswith("extra.") and name != "attachments")
_TEXT_ROWS = frozenset(
    {"name_row", "op_row", "source_row", "framework_row", "collectives.reduction", "regions.label"}
)
_ALWAYS_KNOWN = frozenset({"id"})
_CODES = frozenset({"op_class"})
"""Integer columns in which 0 says unknown; in all others -1 does, or nothing."""


class Kept(Enum):
    """What became of a column. The order is from good to bad."""

    ABSENT = "absent"
    """The column says nothing on the way in, so there is nothing to keep."""
    EXACT = "exact"
    CHANGED = "changed"
    """Some rows say something else, or nothing."""
    LOST = "cannot express"
    """No row says anything any more."""


@dataclass(frozen=True, slots=True)
class ColumnResult:
    """``changed`` of the ``known`` rows of ``column`` that said something differ after the trip.

    ``changed_in_one`` are those of the rank class with the most: a class that a trip splits counts once for
    each part, in ``changed``.
    """

    column: str
    kept: Kept
    known: int
    changed: int
    changed_in_one: int = field(default=-1, compare=False)

    def __post_init__(self) -> None:
        """One class, unless told otherwise."""
        if self.changed_in_one < 0:
            object.__setattr__(self, "changed_in_one", self.changed)


def columns_kept(before: Workload, after: Workload) -> list[ColumnResult]:
    """Every column of a job before and after a trip. O(nodes).

    Where nodes were added or lost, the columns of those that both graphs name are compared.
    """
    results = [_ranks(before, after), _metadata(before, after)]
    pairs = list(_class_pairs(before, after))
    per_class = [_graph_columns(left, right) for left, right in pairs]
    return [*results, *map(summed, zip(*per_class, strict=True))]


def summed(results: Iterable[ColumnResult]) -> ColumnResult:
    """The results of one column over several graphs or files as one."""
    parts = list(results)
    known = sum(part.known for part in parts)
    changed = sum(part.changed for part in parts)
    told = [part.kept for part in parts if part.kept is not Kept.ABSENT]
    if not told:
        return ColumnResult(parts[0].column, Kept.ABSENT, 0, 0)
    if all(kept is Kept.LOST for kept in told):
        kept = Kept.LOST
    else:
        kept = Kept.EXACT if set(told) == {Kept.EXACT} else Kept.CHANGED
    return ColumnResult(parts[0].column, kept, known, changed, max(part.changed_in_one for part in parts))


def _result(column: str, known: int, changed: int, *, gone: bool = False) -> ColumnResult:
    if not known and not changed:
        return ColumnResult(column, Kept.ABSENT, 0, 0)
    if not changed:
        return ColumnResult(column, Kept.EXACT, known, 0)
    return ColumnResult(column, Kept.LOST if gone else Kept.CHANGED, known, changed)


def _ranks(before: Workload, after: Workload) -> ColumnResult:
    """Ranks whose class stands for other ranks than before."""
    if before.num_ranks != after.num_ranks:
        return _result("ranks", before.num_ranks, abs(before.num_ranks - after.num_ranks))
    left, right = _first_ranks(before), _first_ranks(after)
    return _result("ranks", before.num_ranks, int((left != right).sum()))


def _first_ranks(workload: Workload) -> IntArray:
    """For each rank the first rank of its class: the same for the same classes, however numbered."""
    first = np.full(len(workload.classes) + 1, workload.num_ranks, np.int64)  # the last: ABSENT leads there
    np.minimum.at(first, workload.rank_class, np.arange(workload.num_ranks))
    return first[workload.rank_class]


def _metadata(before: Workload, after: Workload) -> ColumnResult:
    facts = [item for item in before.metadata.items() if item[0] not in _PROVENANCE]
    lost = [key for key, value in facts if after.metadata.get(key) != value]
    return _result("metadata", len(facts), len(lost), gone=len(lost) == len(facts))


def _graph_columns(before: OpGraph, after: OpGraph) -> list[ColumnResult]:
    nodes, left, right = _common_nodes(before, after)
    differing = {entry.column: entry.count for entry in graphs_equal(left, right)}
    results = [nodes, _extra(left, right), _attachments(before, after)]
    for column in _COLUMNS:
        known = _known_rows(left, column)
        changed = differing.get(column, 0)
        # A shorter table has fewer rows in every column, of which only some said something.
        changed = min(changed, known) if known and "." in column else changed
        gone = changed > 0 and known > 0 and _known_rows(right, column) == 0
        results.append(_result(column, known, changed, gone=gone))
    return results


def _extra(before: OpGraph, after: OpGraph) -> ColumnResult:
    """Attributes verbatim: those that are no longer there. New ones are what the other format wants said."""
    lost = sum((_attributes(before) - _attributes(after)).values())
    return _result("extra", len(before.extra), lost, gone=lost == len(before.extra))


def _attributes(graph: OpGraph) -> Counter[tuple[int, str, bytes]]:
    extra = graph.extra
    nodes, keys = extra.node.tolist(), extra.key.tolist()
    return Counter((nodes[row], graph.strings[keys[row]], extra.value(row)) for row in range(len(extra)))


def _attachments(before: OpGraph, after: OpGraph) -> ColumnResult:
    lost = [name for name, content in before.attachments.items() if after.attachments.get(name) != content]
    known = len(before.attachments)
    return _result("attachments", known, len(lost), gone=len(lost) == known)


def _common_nodes(before: OpGraph, after: OpGraph) -> tuple[ColumnResult, OpGraph, OpGraph]:
    """The graphs as they are where they have as many nodes, else the nodes that both of them have."""
    if len(before) == len(after):
        return _result("nodes", len(before), 0), before, after
    left, right = _labels(before), _labels(after)
    gone, new = ~np.isin(left, right), ~np.isin(right, left)
    changed = max(int(gone.sum()) + int(new.sum()), 1)
    kept, found = bypass(before, gone), bypass(after, new)
    if len(kept) != int((~gone).sum()) or len(found) != int((~new).sum()):
        # Joins of very many edges stay, be it as many in both: compare without edges through the others.
        kept, found = _only(before, ~gone), _only(after, ~new)
    order = np.empty(len(found), np.int64)
    order[np.argsort(left[~gone])] = np.argsort(right[~new])
    return _result("nodes", len(before), changed), kept, _reordered(found, order)


def _only(graph: OpGraph, keep: BoolArray) -> OpGraph:
    """Some nodes, with the edges among them."""
    rows = np.flatnonzero(keep)
    place = np.full(len(graph), -1, np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    deps: list[RaggedArray] = []
    for taken in (graph.data_deps.take(rows), graph.control_deps.take(rows)):
        inside = place[taken.values] >= 0
        deps.append(RaggedArray.from_pairs(taken.row_ids[inside], place[taken.values[inside]], len(rows)))
    return take_nodes(graph, rows, deps[0], deps[1])


def _reordered(graph: OpGraph, rows: IntArray) -> OpGraph:
    """The graph with old node ``rows[i]`` as node ``i``."""
    place = np.empty(len(rows), np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    data, control = graph.data_deps.take(rows), graph.control_deps.take(rows)
    return take_nodes(
        graph,
        rows,
        RaggedArray(data.offsets, place[data.values]),
        RaggedArray(control.offsets, place[control.values]),
    )


def _labels(graph: OpGraph) -> NDArray[np.int64]:
    """What tells a node from others whatever its number: its name, and how often that came before."""
    names = np.array([hash(text) for text in graph.strings], np.int64)[graph.name_row]
    order = np.argsort(names, kind="stable")
    grouped = names[order]
    starts = np.flatnonzero(np.diff(grouped, prepend=grouped[:1] - 1))
    place = np.arange(len(names)) - np.repeat(starts, np.diff(np.append(starts, len(names))))
    labels = np.empty(len(names), np.int64)
    labels[order] = grouped + place * np.int64(0x9E3779B97F4A7C1 << 1 | 1)
    return labels


def _known_rows(graph: OpGraph, column: str) -> int:
    """How many rows of a column say something."""
    if column == "name":
        return int(bool(graph.name))
    table, _, part = column.partition(".")
    values = getattr(getattr(graph, table), part) if part else getattr(graph, column)
    if isinstance(values, RaggedArray):
        return int((values.lengths > 0).sum())
    return int(_known(graph, column, np.asarray(values)).sum())


def _known(graph: OpGraph, column: str, values: NDArray[np.generic]) -> BoolArray:
    if values.dtype.kind == "f":
        return ~np.isnan(values.astype(np.float64))
    if values.dtype.kind not in "iu" or column in _ALWAYS_KNOWN:
        return np.ones(len(values), np.bool_)
    numbers = values.astype(np.int64)
    if column in _TEXT_ROWS:
        empty = np.array([text == "" for text in graph.strings] + [True])
        return np.asarray(~empty[numbers], np.bool_)
    return np.greater(numbers, 0) if column in _CODES else np.greater_equal(numbers, 0)


# Rank classes before and after a trip, laid side by side.
#
# A trip may split a class (ranks at the end of a pipeline have no receive) and spell groups otherwise. What a
# rank sees is compared: its group, and whom its messages go to and come from.

_MOST_RANKS = 512
"""Of larger classes only the first ranks are looked at: groups repeat in a pattern."""


def _class_pairs(before: Workload, after: Workload) -> Iterator[tuple[OpGraph, OpGraph]]:
    """Each class of ``before`` with every class that its ranks have afterwards."""
    for index, graph in enumerate(before.classes):
        ranks = before.ranks_of(index)
        ranks = ranks[ranks < after.num_ranks]
        others: list[int] = np.unique(after.rank_class[ranks]).tolist()
        for other in others:
            if other == ABSENT:
                continue
            shared = ranks[after.rank_class[ranks] == other]
            then = after.classes[other]
            yield _seen_by(graph, shared, before.num_ranks), _seen_by(then, shared, after.num_ranks)


def _seen_by(graph: OpGraph, ranks: IntArray, num_ranks: int) -> OpGraph:
    """The graph with groups and peers as ``ranks`` see them; the group of all ranks is said by nothing."""
    chosen: list[int] = ranks[:_MOST_RANKS].tolist()
    collectives = graph.collectives
    if len(graph.group_sets):
        world = np.array([_is_unnamed(groups, num_ranks) for groups in graph.group_sets] + [True])
        rows = np.where(world[collectives.group_set], -1, collectives.group_set).astype(np.int32)
        collectives = replace(collectives, group_set=rows)
    return replace(
        graph,
        collectives=collectives,
        group_sets=tuple(_groups_of(groups, chosen, num_ranks) for groups in graph.group_sets),
        permutations=tuple(_peers_of(each, chosen, num_ranks) for each in graph.permutations),
    )


def _is_unnamed(groups: GroupSet, num_ranks: int) -> bool:
    return groups.is_world(num_ranks) and not groups.communicator


def _groups_of(groups: GroupSet, ranks: Sequence[int], num_ranks: int) -> GroupSet:
    """The groups of ``ranks``. One of all ranks in another order than theirs always has a name: the first."""
    is_ordered_anew = groups.num_groups == 1 and groups.max_group_size == num_ranks
    is_named = is_ordered_anew and not groups.is_world(num_ranks)
    numbers = dict.fromkeys(groups.group_of(rank) for rank in ranks)
    rows = [sorted(groups.members(number).tolist()) for number in numbers if number >= 0]
    return replace(ExplicitGroups.from_rows(rows), communicator=groups.communicator or int(is_named))


def _peers_of(permutation: Permutation, ranks: Sequence[int], num_ranks: int) -> Permutation:
    out = [(rank, permutation.target_of(rank)) for rank in ranks]
    back = [(permutation.source_of(rank), rank) for rank in ranks]
    pairs = {pair for pair in (*out, *back) if min(pair) >= 0}
    return Permutation.from_pairs(sorted(pairs), num_ranks)


class PairStatus(Enum):
    """How far a pair could be tried."""

    KEPT = "compared"
    ONE_WAY = "compared one way"
    """The first format cannot be written, so what was read from the second is compared."""
    WRITE_ONLY = "written"
    """The second format cannot be read back, so there is nothing to compare."""
    REFUSED = "refused"
    UNREADABLE = "written and not read"
    """What was written is refused by the reader of its own format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One trip from ``source`` through ``via`` and back. ``findings`` counts what was reported, by code."""

    source: str
    via: str
    status: PairStatus
    columns: tuple[ColumnResult, ...] = ()
    findings: dict[str, int] = field(default_factory=dict[str, int])
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePairs:
    """The pairs tried with one file, which was in ``format``.

    ``findings`` counts what its reader reported, by code: that is missing from the start. ``skipped`` says
    why no pair was tried with a file found in a folder.
    """

    path: str
    format: str
    pairs: tuple[Pair, ...]
    findings: dict[str, int] = field(default_factory=dict[str, int])
    skipped: str = ""


def file_pairs(
    path: Path, formats: Sequence[str] = (), *, options: ReadOptions | None = None, in_folder: bool = False
) -> FilePairs:
    """Try every pair of ``formats`` (default: all that can be read and written) with what ``path`` holds.

    The file's own format is the first of a pair as it is; any other that can be written and read is, with
    what the workload becomes in it. ``options`` say how to read ``path``. Raises what reading raises, and
    ``UsageError`` for unknown names. A profile has no pairs: ``UnsupportedError``, unless it was met
    ``in_folder``, where it is skipped.
    """
    chosen = [load_format(name) for name in formats] or [
        entry for entry in usable_formats() if entry.read and entry.write and not entry.profiles
    ]
    origin = find_format(path, None)
    if origin.read is None:
        raise UsageError(f"format {origin.name!r} cannot be read", path=str(path))
    found = Diagnostics()
    note_unread_files(path, origin, found)
    value = origin.read(path, options or ReadOptions(), found)
    if not isinstance(value, Workload):
        if in_folder:
            return FilePairs(path=str(path), format=origin.name, pairs=(), skipped="a measured profile")
        raise UnsupportedError(
            "round trips are of workloads, and this is a profile",
            path=str(path),
            hint="give a program or a trace",
        )
    with TemporaryDirectory(prefix="hespas-") as folder:
        traveller = Traveller(Path(folder))
        pairs = tuple(_pairs(traveller.settled(value), origin, chosen, traveller))
    return FilePairs(path=str(path), format=origin.name, pairs=pairs, findings=found.counts())


def _pairs(
    workload: Workload, origin: Format, chosen: Sequence[Format], traveller: Traveller
) -> Iterator[Pair]:
    for source in _sources(origin, chosen):
        begin = workload
        if source.name != origin.name:
            trip = traveller.travel(workload, source.name, folds=not is_flat(workload.metadata, origin))
            if trip.back is None:
                yield from (
                    Pair(source=source.name, via=via.name, status=_refusal(trip), refused=trip.refused)
                    for via in chosen
                    if via.write
                )
                continue
            begin = trip.back
        yield from (_pair(begin, source, via, traveller) for via in chosen if via.write)


def _sources(origin: Format, chosen: Sequence[Format]) -> Iterator[Format]:
    """The file's own format, then those that can hold it and give it back."""
    yield origin
    yield from (entry for entry in chosen if entry.read and entry.write and entry.name != origin.name)


def _pair(begin: Workload, source: Format, via: Format, traveller: Traveller) -> Pair:
    out = traveller.travel(begin, via.name, folds=not is_flat(begin.metadata, source))
    if out.back is None:
        status = _refusal(out) if out.refused else PairStatus.WRITE_ONLY
        return _told(source, via, status, [out])
    if source.write is None:
        return _told(source, via, PairStatus.ONE_WAY, [out], out.back)
    home = traveller.travel(out.back, source.name, folds=not is_flat(out.back.metadata, via))
    if home.back is None:
        return _told(source, via, _refusal(home), [out, home])
    told = _told(source, via, PairStatus.KEPT, [out, home], home.back)
    if source.name != via.name:
        return told
    changed = int(not traveller.is_written_alike(out))
    written = ColumnResult("bytes", Kept.CHANGED if changed else Kept.EXACT, 1, changed)
    return replace(told, columns=(*told.columns, written))


def _refusal(trip: _Trip) -> PairStatus:
    return PairStatus.UNREADABLE if trip.is_unreadable else PairStatus.REFUSED


def _told(
    source: Format, via: Format, status: PairStatus, trips: Sequence[_Trip], end: Workload | None = None
) -> Pair:
    findings = Counter[str]()
    for trip in trips:
        findings.update(trip.findings)
    return Pair(
        source=source.name,
        via=via.name,
        status=status,
        columns=() if end is None else tuple(columns_kept(trips[0].ready, end)),
        findings=findings,
        refused=trips[-1].refused,
    )


# One trip of a workload: made ready for a format, written, read back; each done once however often asked.

_MAX_RANK_FILES = 64
"""Larger sets of rank files are not written out: their ranks differ in nothing that smaller sets lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trip:
    """What became of a workload on the way through one format.

    ``ready`` is what was given to the writer: for a flat format without free operations and loops.
    ``back`` is None where the format cannot be read, and together with ``refused`` where it cannot express
    the workload. ``is_unreadable``: it was written, and its own reader refused it. ``findings`` counts what
    pass, writer and reader reported, by code. ``path`` is what was written.
    """

    format: str
    ready: Workload
    back: Workload | None
    path: Path
    refused: str = ""
    is_unreadable: bool = False
    findings: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class Traveller:
    """Sends workloads on trips through files in ``folder``.

    A workload that says the same as one met before is taken for that one, so lossless formats cost one
    trip and not one per pair.
    """

    folder: Path
    _known: list[Workload] = field(default_factory=list[Workload])
    _trips: dict[tuple[int, str, bool], _Trip] = field(default_factory=dict[tuple[int, str, bool], _Trip])

    def settled(self, workload: Workload) -> Workload:
        """The workload met before that says the same, else this one, remembered."""
        for known in self._known:
            if known is workload or not workloads_equal(known, workload):
                return known
        self._known.append(workload)
        return workload

    def travel(self, workload: Workload, target: str, *, folds: bool) -> _Trip:
        """Write ``workload`` as ``target`` and read it back. ``workload`` is one that :meth:`settled` gave.

        ``folds`` drops free operations on the way to a flat format, as conversion does.
        """
        chosen = load_format(target)
        key = (id(workload), target, folds and chosen.flat)
        if key not in self._trips:
            self._trips[key] = self._trip(workload, chosen, len(self._trips), folds=folds)
        return self._trips[key]

    def _trip(self, workload: Workload, target: Format, number: int, *, folds: bool) -> _Trip:
        found = Diagnostics()
        if target.write is None:
            raise InvariantError(f"a round trip through {target.name}, which cannot be written")
        place = self.folder / str(number)
        place.mkdir()
        path = place / f"{_stem(workload)}{target.suffixes[0]}"
        options = WriteOptions(name=path.name)
        ready, is_written, refused = workload, False, ""
        try:
            ready = self.settled(_flattened(workload, found, folds=folds)) if target.flat else workload
            if target.writes_directory(ready, options):
                _refuse_many(ready)
                path = path.with_suffix("")
                options = replace(options, name=path.name, directory=True)
            target.write(ready, path, options, found)
            is_written = True
            back = self._read(path, target, found)
        except InvariantError:  # no refusal: a fault of ours
            raise
        except HespasError as error:
            back, refused = None, error.message
        return _Trip(
            format=target.name,
            ready=ready,
            back=back,
            path=path,
            refused=refused,
            is_unreadable=is_written and bool(refused),
            findings=found.counts(),
        )

    def is_written_alike(self, trip: _Trip) -> bool:
        """Whether what is read from a trip's file is written as the same bytes again."""
        form = load_format(trip.format)
        place = trip.path.parent / "again"
        place.mkdir()
        path = place / trip.path.name
        options = WriteOptions(name=path.name, directory=trip.path.is_dir())
        if form.read is None or form.write is None:
            raise InvariantError(f"a round trip through {form.name}, which lacks a way")
        try:
            form.write(form.read(trip.path, _ours(), Diagnostics()), path, options, Diagnostics())
        except HespasError:
            return False
        return list(_contents(path)) == list(_contents(trip.path))

    def _read(self, path: Path, target: Format, found: Diagnostics) -> Workload | None:
        if target.read is None:
            return None
        value = target.read(path, _ours(), found)
        if not isinstance(value, Workload):
            raise InvariantError(f"{target.name} wrote a workload and read something else")
        return self.settled(value)


def _ours() -> ReadOptions:
    """How to read what was just written: whatever is said of the input, this says it itself."""
    return ReadOptions(comm_groups=None, run_time_unit="", dims={})


def _stem(workload: Workload) -> str:
    """A file name without a number at its end, which would say which rank a trace is of."""
    return re.sub(r"\.(\d+)$", r"-\1", workload.name[:40].replace("/", "_")) or "job"


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        yield file.name, located(file).read_bytes()


def _refuse_many(workload: Workload) -> None:
    if workload.num_ranks > _MAX_RANK_FILES:
        raise UnsupportedError(f"more than {_MAX_RANK_FILES} rank files are not tried")


def _flattened(workload: Workload, found: Diagnostics, *, folds: bool) -> Workload:
    """What a conversion to a flat format writes."""
    fold, unroll = FoldFree(), UnrollLoops(unknown_trips=1)
    classes = tuple(unroll(fold(graph, found) if folds else graph, found) for graph in workload.classes)
    return replace(workload, classes=classes)
