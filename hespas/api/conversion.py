"""The main job: read, rewrite, estimate, write, and account for everything that went in and came out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from hespas.api.io import read, write
from hespas.converters import ReadOptions, Value, WriteOptions, find_format, format_for_output
from hespas.converters.output import check_destination
from hespas.graph import Diagnostics, OpGraph, Profile, Workload
from hespas.graph.errors import UsageError
from hespas.graph.passes import FoldFree, FuseElementwise, GroupRegions, Pass, Totals, UnrollLoops, totals

__all__ = ["Conservation", "Conversion", "Granularity", "Missing", "convert"]

Granularity = Literal["op", "fused", "region"]
Missing = Literal["error", "warn", "zero"]
_STANDARD_STREAM = "-"


@dataclass(frozen=True, slots=True)
class Conservation:
    """Sums over all ranks of the job before and after, and why they differ."""

    num_ranks: int
    rank_classes: int
    before: Totals
    after: Totals
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did. ``value`` is what was written; ``bytes_written`` counts all its files."""

    source: str
    destination: str
    source_format: str
    target_format: str
    value: Value
    bytes_written: int
    conservation: Conservation | None
    hardware: str = ""
    estimator: str = ""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The options of :func:`convert` that the passes need."""

    granularity: Granularity | None
    missing: Missing
    hardware: str | None
    estimator: str
    flat: bool


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    hardware: str | None = None,
    estimator: str = "roofline",
    ranks: range | None = None,
    num_devices: int | None = None,
    granularity: Granularity | None = None,
    missing: Missing = "warn",
    overwrite: bool = False,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
    diagnostics: Diagnostics | None = None,
) -> Conversion:
    """Convert ``source`` to ``destination``; ``-`` is standard input or output.

    With ``hardware``, operations get the time that ``estimator`` gives them there. ``granularity`` merges
    operations before that (``op``: only free ones are folded; default for flat formats). ``missing`` says
    what to do about operations whose time or trip count nobody knows. ``diagnostics`` collects findings
    also where an error ends the conversion. Raises what
    :func:`hespas.api.read` and :func:`hespas.api.write` raise; nothing is written on an error.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    target = format_for_output(Path(str(destination)), target_format)
    if str(destination) != _STANDARD_STREAM:
        check_destination(Path(destination), overwrite=overwrite)
    with ExitStack() as stack:
        path = _spooled(source, stack)
        origin = find_format(path, source_format)
        reading = ReadOptions(num_devices=num_devices, progress=progress)
        value = read(path, format=origin.name, options=reading, diagnostics=found)
        request = _Request(
            granularity=granularity, missing=missing, hardware=hardware, estimator=estimator, flat=target.flat
        )
        value, conservation = _prepare(value, request, found)
        _check_ranks(value, ranks)
        standard_output = str(destination) == _STANDARD_STREAM
        place = _scratch(stack) / "stdout" if standard_output else Path(destination)
        options = WriteOptions(ranks=ranks, jobs=jobs, progress=progress)
        written = write(
            value, place, format=target.name, overwrite=overwrite, options=options, diagnostics=found
        )
        if standard_output:
            _copy_out(place)
    return Conversion(
        source=str(source),
        destination=str(destination),
        source_format=origin.name,
        target_format=target.name,
        value=value,
        bytes_written=written,
        conservation=conservation,
        hardware=hardware or "",
        estimator=estimator if hardware else "",
        diagnostics=found,
    )


def _scratch(stack: ExitStack) -> Path:
    """A folder that goes when the conversion ends."""
    import tempfile

    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hespas-")))


def _spooled(source: str | Path, stack: ExitStack) -> Path:
    """The path to read: standard input is copied to a file first, since formats are told by content."""
    if str(source) != _STANDARD_STREAM:
        return Path(source)
    import shutil
    import sys

    spool = _scratch(stack) / "stdin"
    with spool.open("wb") as stream:
        shutil.copyfileobj(sys.stdin.buffer, stream)
    return spool


def _copy_out(spool: Path) -> None:
    """A finished file to standard output."""
    if spool.is_dir():
        raise UsageError(
            "this makes several files, which standard output cannot hold",
            hint="name a directory, or one rank with --ranks",
        )
    import shutil
    import sys

    with spool.open("rb") as stream:
        shutil.copyfileobj(stream, sys.stdout.buffer)


def _check_ranks(value: Value, ranks: range | None) -> None:
    if ranks is None or not isinstance(value, Workload):
        return
    if ranks.start < 0 or ranks.stop > value.num_ranks or not len(ranks):
        raise UsageError(
            f"--ranks {ranks.start}-{ranks.stop - 1} is outside the job's ranks 0-{value.num_ranks - 1}",
            hint="--num-devices states the number of ranks where the program does not",
        )


def _prepare(value: Value, request: _Request, diagnostics: Diagnostics) -> tuple[Value, Conservation | None]:
    """Passes and estimates over each rank class, and the account of it."""
    if isinstance(value, Profile):
        return value, None
    classes = tuple(_prepare_graph(graph, request, diagnostics) for graph in value.classes)
    counts = np.bincount(value.rank_class, minlength=len(classes)).tolist()
    prepared = replace(value, classes=classes)
    dropped = {code: count for code, count in diagnostics.counts().items() if code.startswith("pass.")}
    return prepared, Conservation(
        value.num_ranks,
        len(classes),
        _job_totals(value.classes, counts),
        _job_totals(classes, counts),
        dropped,
    )


def _prepare_graph(graph: OpGraph, request: _Request, diagnostics: Diagnostics) -> OpGraph:
    passes: list[Pass] = []
    if request.flat or request.granularity:
        passes.append(FoldFree())
    if request.granularity in {"fused", "region"}:
        passes.append(FuseElementwise())
    if request.granularity == "region":
        passes.append(GroupRegions())
    for rewrite in passes:
        graph = rewrite(graph, diagnostics)
    if request.hardware:
        from hespas.api.estimation import estimate_graph

        graph = estimate_graph(graph, request.hardware, request.estimator, request.missing, diagnostics)
    if not request.flat:
        return graph
    trips = {"error": None, "warn": 1, "zero": 0}[request.missing]
    return UnrollLoops(unknown_trips=trips)(graph, diagnostics)


def _job_totals(classes: tuple[OpGraph, ...], ranks: list[int]) -> Totals:
    """Sums over all ranks; ``unknown_ops`` counts each class once."""
    rows = [(asdict(totals(graph)), count) for graph, count in zip(classes, ranks, strict=True)]
    summed = {
        name: sum(row[name] * (1 if name == "unknown_ops" else count) for row, count in rows)
        for name in rows[0][0]
    }
    return Totals(**summed)
