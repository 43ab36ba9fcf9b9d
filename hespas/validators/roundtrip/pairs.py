"""All pairs of formats for one file: A to B and back to A, and what each column has become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from hespas.converters import (
    Format,
    ReadOptions,
    find_format,
    is_flat,
    load_format,
    note_left_out,
    usable_formats,
)
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.validators.roundtrip.columns import ColumnResult, Kept, columns_kept
from hespas.validators.roundtrip.trips import Traveller, Trip

__all__ = ["FilePairs", "Pair", "PairStatus", "file_pairs"]


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
    note_left_out(path, origin, found)
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


def _refusal(trip: Trip) -> PairStatus:
    return PairStatus.UNREADABLE if trip.is_unreadable else PairStatus.REFUSED


def _told(
    source: Format, via: Format, status: PairStatus, trips: Sequence[Trip], end: Workload | None = None
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
