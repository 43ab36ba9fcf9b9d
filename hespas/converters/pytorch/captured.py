"""Captured graphs: the launches of each graph, the operations that made them, and the names of their kernels.

While a stream is captured, its launches are recorded and nothing runs. Work that ran before (a warm-up) has
device events and is not part of a graph.

A kernel name may be mangled in one recording and not in the other. A mangled name is read up to the end of
the function's own name: https://itanium-cxx-abi.github.io/cxx-abi/abi.html (5.1, Mangling).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hespas.converters.linking import EventNesting, around_launch
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace, is_text_column, read_events
from hespas.converters.pytorch.links import link_device_events, nesting_of, thread_key
from hespas.converters.pytorch.recognition import is_profile
from hespas.files.streams import first_bytes
from hespas.graph.columns import BoolArray, IntArray, mapped
from hespas.graph.errors import FormatError, UsageError

__all__ = [
    "COPY",
    "FILL",
    "UNNAMED",
    "Capture",
    "CapturedGraph",
    "begins_captures",
    "canonical_name",
    "capture_of",
    "function_name",
    "is_capture",
    "kernel_symbols",
    "launches_graphs",
    "numbers_in",
    "read_captures",
    "runtime_symbol",
]

UNNAMED = -1
"""Symbol of a launch that does not state its kernel. It differs from all other symbols.

A symbol is a number for a kernel: equal symbols in a replay and in a capture mean the same kernel.
"""
COPY, FILL = 0, 1
"""Symbols of all copies and of all fills, whichever kernel implements them."""


_HEAD_BYTES = 65_536
_DETAILS_FILE = "execution_details.json"
_MAX_DETAILS_BYTES = 1 << 24
_MAX_FILES = 4096
_BEGIN = re.compile(r"(?:cuda|hip|cu)StreamBeginCapture")
_END = re.compile(r"(?:cuda|hip|cu)StreamEndCapture")
_GRAPH_LAUNCH = re.compile(r"(?:cuda|hip|cu)GraphLaunch")
_KERNEL_LAUNCH = re.compile(r"(?:cuda|hip|cu)\w*Launch\w*Kernel")
_COPIES = re.compile(r"(?:cuda|hip|cu)Memcpy")
_FILLS = re.compile(r"(?:cuda|hip|cu)Memset")
_NUMBER = re.compile(r"\d{1,9}")
_MODULE_PREFIX = "nn.Module: "
_KERNEL, _OTHER = 2, -1
"""Kinds of calls besides ``COPY`` and ``FILL``."""
_MIN_SHARE_RUN = 0.5
"""Minimum share of launches that run in a trace of a run; in a capture only the warm-up runs."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """Captured CUDA graph.

    ``launch`` are rows of the capture's launch calls in order of capture; ``host`` is the innermost operation
    around each launch (-1: none). The next two have one entry per launch. ``kind`` is ``COPY``, ``FILL`` or a
    kernel. ``name`` is the canonical name of the kernel (empty: not stated). Graphs with the same ``family``
    were captured one after another for the same batch size. ``numbers`` is the batch size, or all numbers in
    the name of the range around the capture.
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
    """Trace that was recorded while CUDA or HIP graphs were captured. ``graphs`` are these graphs in order of
    time.
    """

    path: Path
    trace: KinetoTrace
    nesting: EventNesting
    graphs: tuple[CapturedGraph, ...]

    def described(self, graph: CapturedGraph) -> tuple[tuple[str, ...], ...]:
        """Return name, shapes and types of the operation that made each launch of a graph. The entry is empty
        if that operation is a call of a module, because names of modules contain the number of the layer.
        """
        host, strings = self.trace.host, self.trace.strings
        columns = (host.name_id, host.dims_id, host.types_id)
        modules = mapped(host.name_id, lambda row: strings[row].startswith(_MODULE_PREFIX), np.bool_)
        return tuple(
            tuple(strings[int(column[op])] for column in columns) if op >= 0 and not modules[op] else ()
            for op in graph.host.tolist()
        )


def launches_graphs(trace: KinetoTrace) -> BoolArray:
    """Return a mask of the calls that launch a captured graph."""
    rows = trace.launch.name_id
    return mapped(rows, lambda row: _GRAPH_LAUNCH.match(trace.strings[row]) is not None, np.bool_)


def numbers_in(text: str) -> frozenset[int]:
    """Return the whole numbers in a name."""
    return frozenset(map(int, _NUMBER.findall(text)))


def _with_modules(trace: KinetoTrace) -> KinetoTrace:
    """Add calls of modules (``nn.Module: Linear_3``) to the host operations of a trace.

    The nesting of the host operations then has the module around each captured operation.
    """
    calls, host = trace.function, trace.host
    is_module = mapped(calls.name_id, lambda row: trace.strings[row].startswith(_MODULE_PREFIX), np.bool_)
    rows = np.flatnonzero(is_module)
    if not len(rows):
        return trace
    common = {column.name for column in fields(Events)}
    columns: dict[str, Any] = {}
    for column in fields(HostEvents):
        before = getattr(host, column.name)
        unknown = np.full(len(rows), 0 if is_text_column(column.name) else -1)
        more = getattr(calls, column.name)[rows] if column.name in common else unknown
        columns[column.name] = np.concatenate([before, more]).astype(before.dtype)
    return replace(trace, host=HostEvents(**columns))


class _CaptureDetail(msgspec.Struct):
    """Entry of ``execution_details.json``, in which a serving engine describes the graphs that it
    captured.
    """

    file: str = ""
    batch_size: int | None = None


def read_captures(paths: Sequence[Path], max_bytes: int) -> list[Capture]:
    """Read traces in which CUDA graphs were captured. A path may be a folder of such traces.

    Raises the errors of :func:`read_events`, and ``UsageError`` for a folder without a trace.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        entries = [entry for entry in sorted(path.iterdir()) if entry.is_file() and ".json" in entry.suffixes]
        traces = [
            entry
            for entry in entries[:_MAX_FILES]
            if entry.name != _DETAILS_FILE and is_profile(first_bytes(entry, _HEAD_BYTES))
        ]
        if not traces:
            message = "the folder has no trace of a capture"
            raise UsageError(message, path=str(path), hint="name the files")
        files.extend(traces)
    captures: list[Capture] = []
    first_family = 0
    for path in dict.fromkeys(files):
        trace = _with_modules(read_events(path, max_bytes))
        capture = capture_of(path, trace, nesting_of(trace.host), first_family)
        first_family += 1 + max((graph.family for graph in capture.graphs), default=0)
        captures.append(capture)
    return captures


def capture_of(path: Path, trace: KinetoTrace, nesting: EventNesting, first_family: int = 0) -> Capture:
    """Return the captured graphs of a trace; ``nesting`` is the nesting of its host operations.

    A graph has the launches between the calls that begin and end a capture. Without such calls, all launches
    without device work are one graph. Graphs of one family are captured for one size. A family ends when the
    named range around the captures changes or, without such ranges, when the first graph of the family occurs
    again.
    """
    calls = trace.launch
    kind = _call_kinds(trace)
    did_not_run = (kind != _OTHER) & ~np.isin(calls.correlation, trace.device.correlation)
    launches = np.flatnonzero(did_not_run)
    launches = launches[np.argsort(calls.start_ns[launches], kind="stable")]
    enclosing = EventNesting.of(thread_key(calls), calls.start_ns, calls.end_ns, launches).parent
    launches = launches[enclosing[launches] < 0]  # a call inside another one is the same node
    host = around_launch(nesting, launches, thread_key(calls), calls.start_ns)
    names = _kernel_names(trace, nesting, launches, host)
    kinds: list[int] = kind[launches].tolist()
    starts = calls.start_ns[launches]
    # Start and end of each capture [ns]; one without an end lasts to the end of the trace.
    thread = thread_key(calls)
    is_begin, is_end = (_matching_calls(trace, pattern) for pattern in (_BEGIN, _END))
    spans: list[tuple[int, int]] = []
    for key in np.unique(thread[is_begin]).tolist():
        end_ns = np.sort(calls.start_ns[is_end & (thread == key)])
        begin_ns: list[int] = np.sort(calls.start_ns[is_begin & (thread == key)]).tolist()
        for begin in begin_ns:
            index = int(np.searchsorted(end_ns, begin))
            spans.append((begin, int(end_ns[index]) if index < len(end_ns) else np.iinfo(np.int64).max))
    spans.sort()
    ends = [(int(np.searchsorted(starts, begin)), int(np.searchsorted(starts, end))) for begin, end in spans]
    bounds = [(first, last) for first, last in ends if last > first]
    if not spans and len(launches):
        bounds = [(0, len(launches))]
    sizes = _listed_sizes(path)
    labels = _range_labels(trace, [int(starts[first]) for first, _ in bounds])
    graphs: list[CapturedGraph] = []
    family, head, head_label = first_family - 1, None, None
    for (first, last), label in zip(bounds, labels, strict=True):
        content = kinds[first:last], names[first:last]
        if head is None or label != head_label or (not label and content == head):
            family, head, head_label = family + 1, content, label
        graphs.append(
            CapturedGraph(
                launch=launches[first:last],
                host=host[first:last],
                kind=kinds[first:last],
                name=names[first:last],
                family=family,
                numbers=sizes or numbers_in(label),
            )
        )
    return Capture(path, trace, nesting, tuple(graphs))


def _listed_sizes(path: Path) -> frozenset[int]:
    """Return the batch sizes that ``execution_details.json`` in the folder of a trace lists for that trace.

    Serving engines write this file. Without it the result is empty.
    """
    details = path.parent / _DETAILS_FILE
    if not details.is_file() or details.stat().st_size > _MAX_DETAILS_BYTES:
        return frozenset()
    try:
        entries = msgspec.json.decode(details.read_bytes(), type=list[_CaptureDetail])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"malformed list of captures: {error}",
            path=str(details),
            position="document",
            hint='write [{"file": NAME, "batch_size": N}, ...], or remove the file',
        ) from error
    sizes = (entry.batch_size for entry in entries if entry.file == path.name)
    return frozenset(size for size in sizes if size is not None)


def _range_labels(trace: KinetoTrace, times_ns: list[int]) -> list[str]:
    """Return, for each time, the names of the enclosing ranges that mention a capture, one per line."""
    note, strings = trace.annotation, trace.strings
    rows = np.flatnonzero(mapped(note.name_id, lambda row: "capture" in strings[row].lower(), np.bool_))
    rows = rows[np.argsort(note.start_ns[rows], kind="stable")]
    start_ns, end_ns = note.start_ns[rows], note.end_ns[rows]
    names: list[int] = note.name_id[rows].tolist()
    labels: list[str] = []
    for at_ns in times_ns:
        last = int(np.searchsorted(start_ns, at_ns, side="right"))
        around = np.flatnonzero(end_ns[:last] >= at_ns).tolist()
        labels.append("\n".join(strings[names[index]] for index in around))
    return labels


def is_capture(trace: KinetoTrace) -> bool:
    """Return True if a trace recorded the capture of graphs and not a run.

    Such a trace begins captures, or it launches kernels and no graphs. Few of its launches ran on the device.
    """
    kind = _call_kinds(trace)
    launches = int((kind != _OTHER).sum())
    if not launches or (launches_graphs(trace).any() and not begins_captures(trace)):
        return False
    return len(trace.device) < _MIN_SHARE_RUN * launches


def begins_captures(trace: KinetoTrace) -> bool:
    """Return True if graphs were captured during the recording of this trace."""
    rows = np.unique(trace.launch.name_id).tolist()
    return any(_BEGIN.match(trace.strings[row]) for row in rows)


def _matching_calls(trace: KinetoTrace, pattern: re.Pattern[str]) -> BoolArray:
    """Return a mask of the launch calls whose name begins with a pattern."""

    def matches(row: int) -> bool:
        return pattern.match(trace.strings[row]) is not None

    return mapped(trace.launch.name_id, matches, np.bool_)


def _call_kinds(trace: KinetoTrace) -> IntArray:
    """Return the kind of each launch call: ``COPY``, ``FILL``, ``_KERNEL`` or ``_OTHER``, by its name."""

    def kind_of(row: int) -> int:
        name = trace.strings[row]
        if _KERNEL_LAUNCH.match(name):
            return _KERNEL
        if _COPIES.match(name):
            return COPY
        return FILL if _FILLS.match(name) else _OTHER

    return mapped(trace.launch.name_id, kind_of, np.int64)


def _kernel_names(trace: KinetoTrace, nesting: EventNesting, launches: IntArray, host: IntArray) -> list[str]:
    """Return the kernel name of each captured launch (empty: unknown).

    If the launch call does not state a name, the name comes from launches at the same site that ran on the
    device, such as a warm-up. Two launches have the same site if they are the same launch within operations
    of equal name, shapes and types. All launches of a site that ran must have the same kernel name.
    """
    strings = trace.strings
    stated: list[int] = trace.launch.kernel_id[launches].tolist()
    texts = {row: canonical_name(strings[row]) for row in set(stated)}
    if all(stated):
        return [texts[row] for row in stated]
    links = link_device_events(trace, nesting)
    event_of_launch = np.full(len(trace.launch), -1, np.int64)
    linked = np.flatnonzero(links.launch >= 0)
    event_of_launch[links.launch[linked]] = linked
    eager = np.flatnonzero(event_of_launch >= 0)
    eager = eager[np.argsort(trace.launch.start_ns[eager], kind="stable")]
    around = around_launch(nesting, eager, thread_key(trace.launch), trace.launch.start_ns)
    kernels_at: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    kernels: list[int] = trace.device.name_id[event_of_launch[eager]].tolist()
    for site, kernel in zip(_launch_sites(trace, around), kernels, strict=True):
        kernels_at[site].add(kernel)
    names: list[str] = []
    for row, site in zip(stated, _launch_sites(trace, host), strict=True):
        candidates = kernels_at.get(site, set())
        kernel = next(iter(candidates)) if len(candidates) == 1 and site[0] >= 0 else 0
        names.append(texts[row] if row else canonical_name(strings[kernel]))
    return names


def _launch_sites(trace: KinetoTrace, host: IntArray) -> list[tuple[int, ...]]:
    """Return the site of each launch: name, shapes and types of the operation that made it, and the number of
    the launch within that operation.
    """
    ops = trace.host
    num_before: defaultdict[int, int] = defaultdict(int)
    sites: list[tuple[int, ...]] = []
    columns: tuple[list[int], ...] = tuple(
        column.tolist() for column in (ops.name_id, ops.dims_id, ops.types_id)
    )
    op_of_launch: list[int] = host.tolist()
    for op in op_of_launch:
        sites.append((*(column[op] if op >= 0 else -1 for column in columns), num_before[op]))
        num_before[op] += 1
    return sites


_FIRST_KERNEL = 2
_RUNTIME_KERNELS = (("__amd_rocclr_copy", COPY), ("__amd_rocclr_fill", FILL))
_LOADER_SUFFIX = re.compile(r"(?: \[clone [^\]]*\]|\.kd)+$")
_LENGTH = re.compile(r"\d{1,4}")
_ANONYMOUS = "(anonymous namespace)"
_MANGLED = "_Z"


def runtime_symbol(name: str) -> int:
    """Return ``COPY`` or ``FILL`` for a kernel with which the CUDA or HIP runtime copies or fills memory,
    else ``UNNAMED``.
    """
    return next((symbol for prefix, symbol in _RUNTIME_KERNELS if name.startswith(prefix)), UNNAMED)


def canonical_name(name: str) -> str:
    """Return a kernel name without the suffixes of the loader (``.kd``, ``[clone .kd]``)."""
    return _LOADER_SUFFIX.sub("", name.strip())


def function_name(name: str) -> tuple[str, ...]:
    """Return the name of a kernel's function, split into namespaces, classes and function, without template
    arguments.

    For a member of a class template, the result ends before the arguments of the class. The result is empty
    for a malformed name.
    """
    if name.startswith(_MANGLED):
        offset = len(_MANGLED)
        parts: list[str] = []
        nested = name[offset : offset + 1] == "N"
        if nested:
            offset += 1
            while name[offset : offset + 1] in {"r", "V", "K", "R", "O"}:
                offset += 1
        while offset < len(name):
            if name.startswith("St", offset):  # std
                parts.append("std")
                offset += 2
                continue
            offset += name[offset] == "L"  # internal linkage
            length = _LENGTH.match(name, offset)
            if length is None:
                break
            offset = length.end() + int(length[0])
            part = name[length.end() : offset]
            if part and not part.startswith("_GLOBAL__N"):
                parts.append(part)
            if not nested and part != "std":
                break
        return tuple(parts)
    # A demangled instance of a function template begins with the type of its result.
    text = name.replace(_ANONYMOUS, "")
    ends = [end for end in (text.find("<"), text.find("(")) if end >= 0]
    words = text[: min(ends, default=len(text))].split()
    return tuple(part for part in words[-1].split("::") if part) if words else ()


def kernel_symbols(replayed: Iterable[str], captured: Iterable[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return a number (symbol) for each kernel name, for the replayed and for the captured kernels. Equal
    symbols mean the same kernel.

    A name that occurs on both sides is compared as it is. A name that occurs on one side only is compared by
    its function name, and only with a name of the other form (mangled or not), because two different names of
    the same form are two kernels. The symbol of the empty name is ``UNNAMED``.
    """
    sides = [dict.fromkeys(replayed), dict.fromkeys(captured)]
    one_sided = [{name for name in sides[side] if name not in sides[1 - side]} for side in (0, 1)]
    mangled, demangled = (
        [{function_name(name) for name in names if name.startswith(_MANGLED) is form} for names in one_sided]
        for form in (True, False)
    )
    shared = ((mangled[0] & demangled[1]) | (demangled[0] & mangled[1])) - {()}
    numbers: dict[str | tuple[str, ...], int] = {}
    symbols: list[dict[str, int]] = []
    for side, names in zip(sides, one_sided, strict=True):
        symbol_of: dict[str, int] = {}
        for name in side:
            function = function_name(name) if name in names else ()
            key = function if function in shared else name
            runtime = runtime_symbol(name)
            number = runtime if runtime >= 0 else numbers.setdefault(key, len(numbers) + _FIRST_KERNEL)
            symbol_of[name] = number if name else UNNAMED
        symbols.append(symbol_of)
    return symbols[0], symbols[1]
