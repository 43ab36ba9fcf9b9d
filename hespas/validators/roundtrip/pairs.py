"""All pairs of formats for one file: A to B and back to A, and what each column has become."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

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
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import HespasError, InvariantError, UnsupportedError, UsageError
from hespas.graph.passes import FoldFree, UnrollLoops
from hespas.graph.workload import workloads_equal
from hespas.validators.roundtrip.columns import ColumnResult, Kept, columns_kept

__all__ = ["FilePairs", "Pair", "PairStatus", "Traveller", "file_pairs"]


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
    findings: dict[str, int] = {}
    for trip in trips:
        for code, count in trip.findings.items():
            findings[code] = findings.get(code, 0) + count
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
        ready, is_written = workload, False
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
            return _Trip(
                format=target.name,
                ready=ready,
                back=None,
                path=path,
                refused=error.message,
                is_unreadable=is_written,
                findings=found.counts(),
            )
        return _Trip(format=target.name, ready=ready, back=back, path=path, findings=found.counts())

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
        yield file.name, file.read_bytes()


def _refuse_many(workload: Workload) -> None:
    if workload.num_ranks > _MAX_RANK_FILES:
        raise UnsupportedError(f"more than {_MAX_RANK_FILES} rank files are not tried")


def _flattened(workload: Workload, found: Diagnostics, *, folds: bool) -> Workload:
    """What a conversion to a flat format writes."""
    fold, unroll = FoldFree(), UnrollLoops(unknown_trips=1)
    classes = tuple(unroll(fold(graph, found) if folds else graph, found) for graph in workload.classes)
    return replace(workload, classes=classes)
