"""The trace of a graph's capture: which launches went into which graph, and the operations behind them.

While a stream is captured its launches are recorded and nothing runs. What ran before (warm-up) has device
events of its own and is no part of a graph.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hespas.converters.linking import Nesting, around_launch
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace, read_events
from hespas.converters.pytorch.kernel_names import COPY, FILL, canonical_name
from hespas.converters.pytorch.kernels import link, nesting_of, thread_key
from hespas.converters.pytorch.records import is_profile
from hespas.files.streams import first_bytes
from hespas.graph.columns import BoolArray, IntArray, mapped
from hespas.graph.errors import FormatError, UsageError

__all__ = [
    "Capture",
    "Segment",
    "begins_captures",
    "capture_of",
    "is_capture",
    "launches_graphs",
    "numbers_in",
    "read_captures",
]

_HEAD_BYTES = 65_536
_DETAILS = "execution_details.json"
_MOST_DETAILS_BYTES = 1 << 24
_MOST_FILES = 4096
_BEGIN = re.compile(r"(?:cuda|hip|cu)StreamBeginCapture")
_END = re.compile(r"(?:cuda|hip|cu)StreamEndCapture")
_GRAPH_LAUNCH = re.compile(r"(?:cuda|hip|cu)GraphLaunch")
_KERNEL_LAUNCH = re.compile(r"(?:cuda|hip|cu)\w*Launch\w*Kernel")
_COPIES = re.compile(r"(?:cuda|hip|cu)Memcpy")
_FILLS = re.compile(r"(?:cuda|hip|cu)Memset")
_NUMBER = re.compile(r"\d{1,9}")
_MODULE = "nn.Module: "
_KERNEL, _OTHER = 2, -1
"""Kinds of calls, beside ``COPY`` and ``FILL``."""
_LEAST_RAN = 0.5
"""Of the launches of a run at least this share ran; one of a capture runs its warm-up."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One captured graph: ``launch`` are rows of the capture's calls in the order of the capture, ``host``
    the innermost operation around each (-1: none), ``kind`` and ``name`` what each launches: ``COPY``,
    ``FILL``, or a kernel, by its canonical name (empty: not stated). ``family`` numbers the graphs that were
    captured one after another for the same size; ``numbers`` are those in the names of that size.
    """

    launch: IntArray
    host: IntArray
    kind: list[int]
    name: list[str]
    family: int
    numbers: frozenset[int]

    def __len__(self) -> int:
        return len(self.launch)


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A trace of captures. ``segments`` are in the order of time."""

    path: Path
    trace: KinetoTrace
    nesting: Nesting
    segments: tuple[Segment, ...]

    def described(self, segment: Segment) -> tuple[tuple[str, ...], ...]:
        """What is recorded of the operations behind each launch: name, shapes and types. Modules count the
        layers in their names: they say nothing here.
        """
        host, strings = self.trace.host, self.trace.strings
        columns = (host.name_row, host.dims_row, host.types_row)
        modules = mapped(host.name_row, lambda row: strings[row].startswith(_MODULE), np.bool_)
        return tuple(
            tuple(strings[int(column[op])] for column in columns) if op >= 0 and not modules[op] else ()
            for op in segment.host.tolist()
        )


def launches_graphs(trace: KinetoTrace) -> BoolArray:
    """Which calls launch a captured graph."""
    rows = trace.launch.name_row
    return mapped(rows, lambda row: _GRAPH_LAUNCH.match(trace.strings[row]) is not None, np.bool_)


def numbers_in(text: str) -> frozenset[int]:
    """The whole numbers that a name states."""
    return frozenset(map(int, _NUMBER.findall(text)))


def _with_modules(trace: KinetoTrace) -> KinetoTrace:
    """A trace whose calls of modules (``nn.Module: Linear_3``) are operations of the host as well: operations
    of a capture have the modules around them.
    """
    calls, host = trace.function, trace.host
    is_module = mapped(calls.name_row, lambda row: trace.strings[row].startswith(_MODULE), np.bool_)
    rows = np.flatnonzero(is_module)
    if not len(rows):
        return trace
    common = {each.name for each in fields(Events)}
    columns: dict[str, Any] = {}
    for each in fields(HostEvents):
        before = getattr(host, each.name)
        unknown = np.full(len(rows), 0 if each.name.endswith("_row") else -1)
        more = getattr(calls, each.name)[rows] if each.name in common else unknown
        columns[each.name] = np.concatenate([before, more]).astype(before.dtype)
    return replace(trace, host=HostEvents(**columns))


class _Detail(msgspec.Struct):
    """What a serving engine's traces of captures are said to be, one entry a file."""

    file: str = ""
    batch_size: int | None = None


def _capture_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those in the folders named that are traces of PyTorch's profiler.

    Raises ``UsageError`` for a folder without any.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        entries = [each for each in sorted(path.iterdir()) if each.is_file() and ".json" in each.suffixes]
        files = [
            each
            for each in entries[:_MOST_FILES]
            if each.name != _DETAILS and is_profile(first_bytes(each, _HEAD_BYTES))
        ]
        if not files:
            raise UsageError("no trace of a capture in this folder", path=str(path), hint="name the files")
        found.extend(files)
    return list(dict.fromkeys(found))


def read_captures(paths: Sequence[Path], max_bytes: int) -> list[Capture]:
    """Read traces of captures, and of folders all in them. Raises what :func:`read_events` does."""
    captures: list[Capture] = []
    first_family = 0
    for path in _capture_files(paths):
        trace = _with_modules(read_events(path, max_bytes))
        capture = capture_of(path, trace, nesting_of(trace.host), first_family)
        first_family += 1 + max((segment.family for segment in capture.segments), default=0)
        captures.append(capture)
    return captures


def capture_of(path: Path, trace: KinetoTrace, nesting: Nesting, first_family: int = 0) -> Capture:
    """What a trace says of captures; ``nesting`` is that of its host operations."""
    return Capture(path, trace, nesting, tuple(_segments(path, trace, nesting, first_family)))


def is_capture(trace: KinetoTrace) -> bool:
    """Whether a trace is that of a capture and not of a run: it begins captures, or launches kernels and no
    graphs, and hardly anything ran.
    """
    calls, strings = trace.launch, trace.strings
    kind = mapped(calls.name_row, lambda row: _call_kind(strings[row]), np.int64)
    launches = int((kind != _OTHER).sum())
    if not launches or (launches_graphs(trace).any() and not begins_captures(trace)):
        return False
    return len(trace.device) < _LEAST_RAN * launches


def begins_captures(trace: KinetoTrace) -> bool:
    """Whether graphs were captured while this was recorded."""
    rows = np.unique(trace.launch.name_row).tolist()
    return any(_BEGIN.match(trace.strings[row]) for row in rows)


def _stated_numbers(path: Path) -> frozenset[int]:
    """The batch size of a capture's file by the ``execution_details.json`` beside it; none without."""
    details = path.parent / _DETAILS
    if not details.is_file() or details.stat().st_size > _MOST_DETAILS_BYTES:
        return frozenset()
    try:
        entries = msgspec.json.decode(details.read_bytes(), type=list[_Detail])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"it does not list captures: {error}",
            path=str(details),
            position="document",
            hint='expected [{"file": NAME, "batch_size": N}, ...]; remove it to do without',
        ) from error
    sizes = (each.batch_size for each in entries if each.file == path.name)
    return frozenset(size for size in sizes if size is not None)


def _call_kind(name: str) -> int:
    if _KERNEL_LAUNCH.match(name):
        return _KERNEL
    if _COPIES.match(name):
        return COPY
    return FILL if _FILLS.match(name) else _OTHER


def _segments(path: Path, trace: KinetoTrace, nesting: Nesting, first_family: int) -> list[Segment]:
    """The graphs of a trace: between the calls that begin and end a capture; without those all launches that
    ran nothing are one.
    """
    calls, strings = trace.launch, trace.strings
    kind = mapped(calls.name_row, lambda row: _call_kind(strings[row]), np.int64)
    silent = (kind != _OTHER) & ~np.isin(calls.correlation, trace.device.correlation)
    launches = np.flatnonzero(silent)
    launches = _outermost(trace, launches[np.argsort(calls.start_ns[launches], kind="stable")])
    host = around_launch(nesting, launches, thread_key(calls), calls.start_ns)
    names = _names(trace, nesting, launches, host)
    spans = _spans(trace)
    starts = calls.start_ns[launches]
    edges = [(int(np.searchsorted(starts, begin)), int(np.searchsorted(starts, end))) for begin, end in spans]
    bounds = [(first, last) for first, last in edges if last > first]
    if not spans and len(launches):
        bounds = [(0, len(launches))]
    kinds: list[int] = kind[launches].tolist()
    stated, told = _stated_numbers(path), _Labels(trace)
    signatures = [(tuple(kinds[first:last]), tuple(names[first:last])) for first, last in bounds]
    labels = [told.around(int(starts[first])) for first, _ in bounds]
    families = _families(signatures, labels, first_family)
    return [
        Segment(
            launch=launches[first:last],
            host=host[first:last],
            kind=kinds[first:last],
            name=names[first:last],
            family=family,
            numbers=stated or numbers_in(label),
        )
        for (first, last), family, label in zip(bounds, families, labels, strict=True)
    ]


def _outermost(trace: KinetoTrace, launches: IntArray) -> IntArray:
    """Calls, in order of start, without those made by another of them: one launch is one node."""
    calls = trace.launch
    inside = Nesting.of(thread_key(calls), calls.start_ns, calls.end_ns, launches).parent
    return launches[inside[launches] < 0]


def _spans(trace: KinetoTrace) -> list[tuple[int, int]]:
    """When each capture begins and ends [ns]; one that the trace does not end, at the end of time."""
    calls, strings = trace.launch, trace.strings
    begins = mapped(calls.name_row, lambda row: _BEGIN.match(strings[row]) is not None, np.bool_)
    ends = mapped(calls.name_row, lambda row: _END.match(strings[row]) is not None, np.bool_)
    thread = thread_key(calls)
    found: list[tuple[int, int]] = []
    for key in np.unique(thread[begins]).tolist():
        mine = thread == key
        closing = np.sort(calls.start_ns[ends & mine])
        opening: list[int] = np.sort(calls.start_ns[begins & mine]).tolist()
        for begin in opening:
            place = int(np.searchsorted(closing, begin))
            found.append((begin, int(closing[place]) if place < len(closing) else np.iinfo(np.int64).max))
    return sorted(found)


class _Labels:
    """Named ranges that say what is captured: ``capture_32_FULL``, ``graph_capture: batch=32 mode=FULL``."""

    def __init__(self, trace: KinetoTrace) -> None:
        note = trace.annotation
        told = mapped(note.name_row, lambda row: "capture" in trace.strings[row].lower(), np.bool_)
        order = np.flatnonzero(told)
        order = order[np.argsort(note.start_ns[order], kind="stable")]
        self.starts: IntArray = note.start_ns[order]
        self.ends: IntArray = note.end_ns[order]
        self.rows: list[int] = note.name_row[order].tolist()
        self.strings = trace.strings

    def around(self, at_ns: int) -> str:
        """Their names around a moment, outermost first."""
        last = int(np.searchsorted(self.starts, at_ns, side="right"))
        around = np.flatnonzero(self.ends[:last] >= at_ns).tolist()
        return "\n".join(self.strings[self.rows[place]] for place in around)


def _families(signatures: Sequence[object], labels: Sequence[str], first: int) -> list[int]:
    """Graphs captured for one size: until the name around them changes; without such names, until the first
    of them comes again.
    """
    families: list[int] = []
    number, head, label = first - 1, None, None
    for signature, mine in zip(signatures, labels, strict=True):
        if head is None or mine != label or (not mine and signature == head):
            number, head, label = number + 1, signature, mine
        families.append(number)
    return families


def _names(trace: KinetoTrace, nesting: Nesting, launches: IntArray, host: IntArray) -> list[str]:
    """The kernel of each captured launch. Where the call does not state it, that of a launch which ran (a
    warm-up) from the same place of an operation of the same name, shapes and types, if all such agree.
    """
    strings = trace.strings
    stated: list[int] = trace.launch.kernel_row[launches].tolist()
    texts = {row: canonical_name(strings[row]) for row in set(stated)}
    if all(stated):
        return [texts[row] for row in stated]
    ran = link(trace, nesting)
    of_launch = np.full(len(trace.launch), -1, np.int64)
    linked = np.flatnonzero(ran.launch >= 0)
    of_launch[ran.launch[linked]] = linked
    eager = np.flatnonzero(of_launch >= 0)
    eager = eager[np.argsort(trace.launch.start_ns[eager], kind="stable")]
    around = around_launch(nesting, eager, thread_key(trace.launch), trace.launch.start_ns)
    taught: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    kernels: list[int] = trace.device.name_row[of_launch[eager]].tolist()
    for place, kernel in zip(_places(trace, around), kernels, strict=True):
        taught[place].add(kernel)
    found: list[str] = []
    for row, place in zip(stated, _places(trace, host), strict=True):
        known = taught.get(place, set())
        lesson = next(iter(known)) if len(known) == 1 and place[0] >= 0 else 0
        found.append(texts[row] if row else canonical_name(strings[lesson]))
    return found


def _places(trace: KinetoTrace, host: IntArray) -> list[tuple[int, ...]]:
    """Name, shapes and types of the operation around each launch, and the launch's number in it."""
    ops = trace.host
    before: defaultdict[int, int] = defaultdict(int)
    found: list[tuple[int, ...]] = []
    columns: tuple[list[int], ...] = tuple(
        column.tolist() for column in (ops.name_row, ops.dims_row, ops.types_row)
    )
    around: list[int] = host.tolist()
    for op in around:
        found.append((*(column[op] if op >= 0 else -1 for column in columns), before[op]))
        before[op] += 1
    return found
