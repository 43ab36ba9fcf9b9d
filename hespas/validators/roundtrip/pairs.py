"""Round trips of one file: every pair of formats A and B tried from A through B and back to A."""

from __future__ import annotations

import re
from collections import Counter
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
from hespas.files.streams import input_location
from hespas.graph import Diagnostics, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import HespasError, InvariantError, UnsupportedError, UsageError
from hespas.graph.passes import FoldFree, UnrollLoops
from hespas.validators.roundtrip.columns import ColumnResult, ColumnStatus, compare_columns

__all__ = ["FilePairs", "FormatPair", "PairStatus", "Trip", "TripRunner", "file_pairs"]

_MAX_RANK_FILES = 64
"""Larger sets of rank files are not written: their ranks differ in nothing that smaller sets lack."""
_OWN_FILE = ReadOptions()
"""Options to read a written file, without the assumptions that the user makes about the inputs."""


class PairStatus(Enum):
    """Outcome of converting a file through another format and back."""

    KEPT = "compared"
    ONE_WAY = "compared one way"
    """The first format cannot be written: the workload from the second one is compared."""
    WRITE_ONLY = "written"
    """The second format cannot be read: nothing is compared."""
    REFUSED = "refused"
    UNREADABLE = "written and not read"
    """The reader of the format refuses the written file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatPair:
    """Round trip from format ``source`` through format ``via`` and back. ``findings`` counts diagnostics by
    code.
    """

    source: str
    via: str
    status: PairStatus
    columns: tuple[ColumnResult, ...] = ()
    findings: dict[str, int] = field(default_factory=dict[str, int])
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePairs:
    """Round trips of one file, whose format is ``format``.

    ``findings`` counts the diagnostics of the reader by code. Facts that the reader reports as missing are
    not in the workload, so round trips do not count them as lost. ``skipped`` is the reason if a file in a
    folder was not tried.
    """

    path: str
    format: str
    pairs: tuple[FormatPair, ...]
    findings: dict[str, int] = field(default_factory=dict[str, int])
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Conversion of a workload to one format and back.

    ``ready`` is the workload that was written. Flat formats get it without zero-cost operations and loops.
    ``back`` is the workload that was read back. It is None if the format cannot be read, or cannot express
    the workload (``refused`` is the reason). ``is_unreadable`` is True if the reader refused the written
    file. ``findings`` counts the diagnostics of passes, writer and reader by code. ``path`` is the written
    file.
    """

    format: str
    ready: Workload
    back: Workload | None
    path: Path
    refused: str = ""
    is_unreadable: bool = False
    findings: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class TripRunner:
    """Conversions of workloads to files in ``folder`` and back, with a cache of results.

    Equal workloads share one cache entry. A format that loses nothing is therefore converted once, and not
    once per pair of formats.
    """

    folder: Path
    _workloads: list[Workload] = field(default_factory=list[Workload])
    _trips: dict[tuple[int, str, bool], Trip] = field(default_factory=dict[tuple[int, str, bool], Trip])

    def canonical(self, workload: Workload) -> Workload:
        """Return the first workload seen that equals this one, so that equal workloads are converted once."""
        for other in self._workloads:
            if other is workload or not workloads_equal(other, workload):
                return other
        self._workloads.append(workload)
        return workload

    def run(self, workload: Workload, target: str, *, folds: bool) -> Trip:
        """Write a workload from :meth:`canonical` in the format ``target``, and read it back.

        If ``folds`` is True, zero-cost operations are removed for flat formats, as in conversions.
        """
        chosen = load_format(target)
        key = (id(workload), target, folds and chosen.flat)
        if key not in self._trips:
            diagnostics = Diagnostics()
            if chosen.write is None:
                raise InvariantError(f"a round trip through {chosen.name}, which cannot be written")
            folder = self.folder / str(len(self._trips))
            folder.mkdir()
            # A number at the end of the name would be taken as the rank of a trace.
            stem = re.sub(r"\.(\d+)$", r"-\1", workload.name[:40].replace("/", "_")) or "job"
            path = folder / f"{stem}{chosen.suffixes[0]}"
            options = WriteOptions(name=path.name)
            ready, back, is_written, refused = workload, None, False, ""
            try:
                if chosen.flat:
                    fold, unroll = FoldFree(), UnrollLoops(unknown_trips=1)
                    graphs = (fold(graph, diagnostics) if folds else graph for graph in workload.classes)
                    classes = tuple(unroll(graph, diagnostics) for graph in graphs)
                    ready = self.canonical(replace(workload, classes=classes))
                if chosen.writes_directory(ready, options):
                    if ready.num_ranks > _MAX_RANK_FILES:
                        raise UnsupportedError(f"more than {_MAX_RANK_FILES} rank files are not tried")
                    path = path.with_suffix("")
                    options = replace(options, name=path.name, directory=True)
                chosen.write(ready, path, options, diagnostics)
                is_written = True
                if chosen.read is not None:
                    value = chosen.read(path, _OWN_FILE, diagnostics)
                    if not isinstance(value, Workload):
                        raise InvariantError(f"{chosen.name} wrote a workload but did not read one")
                    back = self.canonical(value)
            except InvariantError:  # a bug, not a refusal
                raise
            except HespasError as error:
                back, refused = None, error.message
            self._trips[key] = Trip(
                format=chosen.name,
                ready=ready,
                back=back,
                path=path,
                refused=refused,
                is_unreadable=is_written and bool(refused),
                findings=diagnostics.counts(),
            )
        return self._trips[key]

    def is_rewritten_exactly(self, trip: Trip) -> bool:
        """Return True if the workload that was read back is written as the same bytes again."""
        target = load_format(trip.format)
        folder = trip.path.parent / "again"
        folder.mkdir()
        path = folder / trip.path.name
        options = WriteOptions(name=path.name, directory=trip.path.is_dir())
        if target.read is None or target.write is None:
            raise InvariantError(f"no round trip through {target.name}: it cannot be both read and written")
        try:
            target.write(target.read(trip.path, _OWN_FILE, Diagnostics()), path, options, Diagnostics())
        except HespasError:
            return False
        return list(_contents(path)) == list(_contents(trip.path))


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        yield file.name, input_location(file).read_bytes()


def file_pairs(
    path: Path, formats: Sequence[str] = (), *, options: ReadOptions | None = None, in_folder: bool = False
) -> FilePairs:
    """Try every pair of ``formats`` (default: all that can be read and written) with one file.

    The first format of a pair is the format of the file, or another one to which the workload is converted
    first. ``options`` are for reading ``path``. Raises the errors of the reader, and ``UsageError`` for
    unknown names. A profile raises ``UnsupportedError``, or is skipped if ``in_folder``.
    """
    chosen = [load_format(name) for name in formats] or [
        entry for entry in usable_formats() if entry.read and entry.write and not entry.profiles
    ]
    origin = find_format(path, None)
    if origin.read is None:
        raise UsageError(
            f"format {origin.name!r} can only be written",
            path=str(path),
            hint="give a file of a format that can be read: hespas-convert --list-formats",
        )
    diagnostics = Diagnostics()
    note_unread_files(path, origin, diagnostics)
    value = origin.read(path, options or ReadOptions(), diagnostics)
    if not isinstance(value, Workload):
        if in_folder:
            return FilePairs(path=str(path), format=origin.name, pairs=(), skipped="a measured profile")
        raise UnsupportedError(
            "round trips require a workload, and this is a profile",
            path=str(path),
            hint="give a program or a trace",
        )
    with TemporaryDirectory(prefix="hespas-") as folder:
        runner = TripRunner(Path(folder))
        pairs = tuple(_try_pairs(runner.canonical(value), origin, chosen, runner))
    return FilePairs(path=str(path), format=origin.name, pairs=pairs, findings=diagnostics.counts())


def _try_pairs(
    workload: Workload, origin: Format, chosen: Sequence[Format], runner: TripRunner
) -> Iterator[FormatPair]:
    others = [entry for entry in chosen if entry.read and entry.write and entry.name != origin.name]
    for source in (origin, *others):
        start = workload
        if source.name != origin.name:
            trip = runner.run(workload, source.name, folds=not is_flat(workload.metadata, origin))
            if trip.back is None:
                status = _refusal(trip)
                yield from (
                    FormatPair(source=source.name, via=via.name, status=status, refused=trip.refused)
                    for via in chosen
                    if via.write
                )
                continue
            start = trip.back
        yield from (_try_pair(start, source, via, runner) for via in chosen if via.write)


def _refusal(trip: Trip) -> PairStatus:
    return PairStatus.UNREADABLE if trip.is_unreadable else PairStatus.REFUSED


def _try_pair(start: Workload, source: Format, via: Format, runner: TripRunner) -> FormatPair:
    """Convert a workload through the format ``via`` and back to ``source``, and compare the result with the
    workload. Steps that a format cannot read or write are left out.
    """
    there = runner.run(start, via.name, folds=not is_flat(start.metadata, source))
    trips, status, end = [there], PairStatus.KEPT, there.back
    if end is None:
        status = _refusal(there) if there.refused else PairStatus.WRITE_ONLY
    elif source.write is None:
        status = PairStatus.ONE_WAY
    else:
        home = runner.run(end, source.name, folds=not is_flat(end.metadata, via))
        trips.append(home)
        end = home.back
        status = _refusal(home) if end is None else PairStatus.KEPT
    columns = [] if end is None else compare_columns(there.ready, end)
    if status is PairStatus.KEPT and source.name == via.name:
        changed = int(not runner.is_rewritten_exactly(there))
        columns.append(
            ColumnResult("bytes", ColumnStatus.CHANGED if changed else ColumnStatus.EXACT, 1, changed)
        )
    findings = Counter[str]()
    for trip in trips:
        findings.update(trip.findings)
    return FormatPair(
        source=source.name,
        via=via.name,
        status=status,
        columns=tuple(columns),
        findings=findings,
        refused=trips[-1].refused,
    )
