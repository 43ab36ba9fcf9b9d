"""One trip of a workload: made ready for a format, written, read back; each done once however often asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hespas.converters import Format, ReadOptions, WriteOptions, load_format
from hespas.graph import Diagnostics, Workload
from hespas.graph.compare import workloads_equal
from hespas.graph.errors import HespasError, InvariantError, UnsupportedError
from hespas.graph.passes import FoldFree, UnrollLoops

__all__ = ["MAX_RANK_FILES", "Traveller", "Trip"]

MAX_RANK_FILES = 64
"""Larger sets of rank files are not written out: their ranks differ in nothing that smaller sets lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
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
    _trips: dict[tuple[int, str, bool], Trip] = field(default_factory=dict[tuple[int, str, bool], Trip])

    def settled(self, workload: Workload) -> Workload:
        """The workload met before that says the same, else this one, remembered."""
        for known in self._known:
            if known is workload or not workloads_equal(known, workload):
                return known
        self._known.append(workload)
        return workload

    def travel(self, workload: Workload, target: str, *, folds: bool) -> Trip:
        """Write ``workload`` as ``target`` and read it back. ``workload`` is one that :meth:`settled` gave.

        ``folds`` drops free operations on the way to a flat format, as conversion does.
        """
        chosen = load_format(target)
        key = (id(workload), target, folds and chosen.flat)
        if key not in self._trips:
            self._trips[key] = self._trip(workload, chosen, len(self._trips), folds=folds)
        return self._trips[key]

    def _trip(self, workload: Workload, target: Format, number: int, *, folds: bool) -> Trip:
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
            return Trip(
                format=target.name,
                ready=ready,
                back=None,
                path=path,
                refused=error.message,
                is_unreadable=is_written,
                findings=found.counts(),
            )
        return Trip(format=target.name, ready=ready, back=back, path=path, findings=found.counts())

    def is_written_alike(self, trip: Trip) -> bool:
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
    if workload.num_ranks > MAX_RANK_FILES:
        raise UnsupportedError(f"more than {MAX_RANK_FILES} rank files are not tried")


def _flattened(workload: Workload, found: Diagnostics, *, folds: bool) -> Workload:
    """What a conversion to a flat format writes."""
    fold, unroll = FoldFree(), UnrollLoops(unknown_trips=1)
    classes = tuple(unroll(fold(graph, found) if folds else graph, found) for graph in workload.classes)
    return replace(workload, classes=classes)
