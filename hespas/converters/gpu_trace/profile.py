"""From a recording to a :class:`Profile`: no device time is left out, and what is not linked is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np

from hespas.converters.gpu_trace.trace import DeviceWork, GpuTrace, GraphNodes, Launches, Ranges, listed
from hespas.converters.linking import Nesting, around_launch, match_rows, nearest
from hespas.graph import (
    Diagnostics,
    Findings,
    HostOps,
    MeasuredComms,
    OpClass,
    Profile,
    StepRanges,
    StringTableBuilder,
)
from hespas.graph.columns import (
    BoolArray,
    FloatArray,
    IntArray,
    SmallIntArray,
    at_rows,
    distinct_rows,
    mapped,
)
from hespas.graph.errors import FormatError
from hespas.measurements.consistency import report_shared_ids

__all__ = [
    "RangeText",
    "collective_in_kernel",
    "collective_in_range",
    "is_collective_kernel",
    "nesting_of",
    "parse_range_text",
    "to_profile",
]

_LARGEST_NS = 1 << 62
_OWN_BITS = (1 << 24) - 1
_SHOWN = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """What ranges say, a row for each range."""

    name_row: IntArray
    shapes_row: IntArray
    module_row: IntArray
    sequence: IntArray
    step: IntArray
    instruction: BoolArray

    @classmethod
    def of(cls, trace: GpuTrace) -> _Labels:
        """Parse each text once."""
        parsed = [parse_range_text(text) for text in trace.texts]
        add = trace.strings.add

        def column(values: list[int], missing: int = 0) -> IntArray:
            return at_rows(np.array(values, np.int64), trace.ranges.text, missing)

        return cls(
            column([add(each.name) for each in parsed]),
            column([add(each.shapes) for each in parsed]),
            column([add(each.module) for each in parsed]),
            column([each.sequence for each in parsed], missing=-1),
            column([each.step for each in parsed], missing=-1),
            column([bool(each.instruction) for each in parsed]).astype(np.bool_),
        )


def to_profile(
    path: Path, source: str, trace: GpuTrace, metadata: Mapping[str, str], diagnostics: Diagnostics
) -> Profile:
    """Link and convert. ``source`` is the format's name: diagnostics are called after it.

    The operation of an event is the innermost range around its cause that states shapes or is an instruction
    of XLA, else the innermost range at all. Ranks number the pairs of device and process, in order. Raises
    ``FormatError`` where nothing was recorded, and for times that do not fit.
    """
    if not len(trace.work) and not len(trace.ranges):
        raise FormatError(
            "the recording holds neither device work nor ranges on the host",
            path=str(path),
            position="all tables and records of work and ranges",
            hint="did the profiler record anything? trace CUDA or HIP, and ranges (NVTX, roctx)",
        )
    _check_times(trace, path)
    nesting, labels = nesting_of(trace.ranges), _Labels.of(trace)
    links = _link(trace, nesting)
    calls = trace.launches
    report_shared_ids(
        (calls.process, calls.correlation),
        calls.start_ns,
        calls.end_ns,
        links.launch,
        (diagnostics, str(path)),
    )
    strings, findings = trace.strings, diagnostics.about(str(path), source)
    specific = (labels.shapes_row > 0) | labels.instruction
    owner = nearest(specific, nesting.parent, links.cause)
    cause = np.where(owner >= 0, owner, links.cause)
    module = nearest(labels.module_row > 0, nesting.parent, cause)
    step = _steps(trace, links, nesting, labels)
    work, base_ns = trace.work, _first_ns(trace)
    op_row = np.where(cause >= 0, at_rows(labels.name_row, cause, 0), work.range_row)
    rank = _ranks(work, _processes(trace, links), findings)
    comms = _comms(trace, links.cause, nesting, labels)
    host = _host_ops(trace.ranges, nesting, labels, base_ns, strings)
    launch_start_ns, launch_end_ns, launch_thread_row = _launch_columns(trace, links, base_ns)
    _report(trace, links, findings)
    return Profile.of(
        path.name.removesuffix(".gz").rpartition(".")[0] or path.name,
        trace.devices or ("",),
        strings.build(),
        op_row=op_row,
        module_row=at_rows(labels.module_row, module, 0),
        kernel_row=work.name_row,
        category_row=work.category_row,
        shapes_row=at_rows(labels.shapes_row, cause, 0),
        op_class=_classes(work, comms, strings),
        device_index=work.device,
        rank=rank,
        stream=work.stream,
        run=at_rows(labels.step, step, -1),
        start_ns=work.start_ns - base_ns,
        duration_ns=work.end_ns - work.start_ns,
        bytes_moved=np.where(work.bytes_moved >= 0, work.bytes_moved.astype(np.float64), np.nan),
        host_event=cause,
        launch_start_ns=launch_start_ns,
        launch_end_ns=launch_end_ns,
        launch_thread_row=launch_thread_row,
        grid_row=work.grid_row,
        comms=comms,
        host=host,
        steps=_step_ranges(trace, labels, base_ns),
        metadata={"format": source, **metadata, "first_event_ns": str(base_ns)},
    )


def _check_times(trace: GpuTrace, path: Path) -> None:
    for what, times in {
        "start of device event": trace.work.start_ns,
        "end of device event": trace.work.end_ns,
        "start of range": trace.ranges.start_ns,
        "end of range": trace.ranges.end_ns,
        "start of launch": trace.launches.start_ns,
    }.items():
        wrong = np.flatnonzero((times <= -_LARGEST_NS) | (times >= _LARGEST_NS))
        if len(wrong):
            row = int(wrong[0])
            raise FormatError(
                f"{int(times[row])} does not fit 63 bits of nanoseconds",
                path=str(path),
                position=f"{what} {row}, in the order read",
                hint="record again",
            )


def _step_ranges(trace: GpuTrace, labels: _Labels, base_ns: int) -> StepRanges:
    """Return the ranges of steps, on a clock that begins at ``base_ns``."""
    rows, ranges = np.flatnonzero(labels.step >= 0), trace.ranges
    return StepRanges.of(
        number=labels.step[rows],
        start_ns=ranges.start_ns[rows] - base_ns,
        duration_ns=ranges.end_ns[rows] - ranges.start_ns[rows],
    )


def _steps(trace: GpuTrace, links: _Links, nesting: Nesting, labels: _Labels) -> IntArray:
    """The range of the step each event belongs to (-1: none): one around its launch on the same thread, else
    one of the same process that is running then, since backward passes have a thread of their own.
    """
    is_step = labels.step >= 0
    found = nearest(is_step, nesting.parent, links.launched_in)
    rest = np.flatnonzero((found < 0) & (links.launch >= 0))
    steps = np.flatnonzero(is_step & trace.ranges.nests)
    if not len(rest) or not len(steps):
        return found
    calls, at = trace.launches, links.launch[rest]
    running = nesting_of(trace.ranges.by_process(steps)).innermost(calls.process[at], calls.start_ns[at])
    found[rest] = at_rows(steps, running, -1)
    return found


def _first_ns(trace: GpuTrace) -> int:
    parts = (trace.work.start_ns, trace.ranges.start_ns, trace.launches.start_ns)
    return min(int(part.min()) for part in parts if len(part))


def _processes(trace: GpuTrace, links: _Links) -> IntArray:
    """The process of each event: as it says, else its launch's, else the only one there is (-1: unknown)."""
    work, launches = trace.work, trace.launches
    if not len(launches):
        return work.process
    process = np.where(work.process >= 0, work.process, at_rows(launches.process, links.launch, -1))
    every = np.unique(np.concatenate((process[process >= 0], launches.process)))
    return np.where((process < 0) & (len(every) == 1), every[0], process)


def _ranks(work: DeviceWork, process: IntArray, findings: Findings) -> IntArray:
    """The number of each event's pair of device and process. Work of no device is its process's first."""
    known = work.gpu >= 0
    pairs: IntArray = np.unique(np.stack((work.gpu[known], process[known])), axis=1)
    if not pairs.shape[1]:
        return np.zeros(len(work), np.int64)
    processes, first = np.unique(pairs[1], return_index=True)
    place = np.minimum(np.searchsorted(processes, process), len(processes) - 1)
    of_process = np.where(processes[place] == process, first[place], 0)
    rank = of_process.astype(np.int64)
    rank[known] = match_rows((pairs[1], pairs[0]), (process[known], work.gpu[known]))
    if pairs.shape[1] > 1:
        shown = [
            f"{number}: device {gpu} of process {owner & _OWN_BITS}"
            for number, (gpu, owner) in enumerate(zip(*map(listed, pairs[:, :_SHOWN]), strict=True))
        ]
        message = f"ranks number pairs of device and process in order: {', '.join(shown)}"
        findings.info("ranks", message, pairs.shape[1])
    return rank


def _host_ops(
    ranges: Ranges, nesting: Nesting, labels: _Labels, base_ns: int, strings: StringTableBuilder
) -> HostOps:
    return HostOps.of(
        name_row=labels.name_row,
        thread_row=_thread_rows(ranges.process, ranges.thread, strings),
        parent=nesting.parent,
        start_ns=ranges.start_ns - base_ns,
        duration_ns=ranges.end_ns - ranges.start_ns,
        sequence=labels.sequence,
        shapes_row=labels.shapes_row,
    )


def _thread_rows(process: IntArray, thread: IntArray, strings: StringTableBuilder) -> SmallIntArray:
    """The texts that name the threads, for each row."""
    threads, place = distinct_rows(process, thread)
    rows = [strings.add(f"{owner & _OWN_BITS}:{number & _OWN_BITS}") for owner, number in threads]
    return np.array(rows, np.int32)[place]


def _launch_columns(
    trace: GpuTrace, links: _Links, base_ns: int
) -> tuple[FloatArray, FloatArray, SmallIntArray]:
    """When the call that enqueued each event began and returned, and its thread; a range of the program that
    the recording names as cause is no such call.
    """
    calls = trace.launches
    launch = np.where(at_rows(calls.range_place, links.launch, -1) < 0, links.launch, -1)
    start_ns = at_rows((calls.start_ns - base_ns).astype(np.float64), launch, np.nan)
    returned = (calls.end_ns >= calls.start_ns) & (calls.end_ns < _LARGEST_NS)
    end_ns = np.where(returned, np.where(returned, calls.end_ns, base_ns) - base_ns, np.nan)
    threads = _thread_rows(calls.process, calls.thread, trace.strings)
    return start_ns, at_rows(end_ns, launch, np.nan), at_rows(threads, launch, 0)


def _comms(trace: GpuTrace, cause: IntArray, nesting: Nesting, labels: _Labels) -> MeasuredComms:
    """The kernels of NCCL and RCCL. Their kind is in the kernel's name, else in a range around the launch."""
    strings, name_row = trace.strings, trace.work.name_row
    event = np.flatnonzero(mapped(name_row, lambda row: is_collective_kernel(strings[row]), np.bool_))
    if not len(event):
        return MeasuredComms.empty()
    kind = mapped(name_row[event], lambda row: strings.add(collective_in_kernel(strings[row])), np.int64)
    of_range = mapped(labels.name_row, lambda row: strings.add(collective_in_range(strings[row])), np.int64)
    around = nearest(of_range > 0, nesting.parent, cause[event])
    return MeasuredComms.of(event=event, kind_row=np.where(kind > 0, kind, at_rows(of_range, around, 0)))


def _classes(work: DeviceWork, comms: MeasuredComms, strings: StringTableBuilder) -> IntArray:
    """What the recording itself tells of the class: copies, and kernels that communicate."""
    classes = work.op_class.copy()
    peers = {strings.add(kind) for kind in ("send", "recv", "sendrecv")}
    between_two = np.isin(comms.kind_row, sorted(peers))
    classes[comms.event] = np.where(between_two, OpClass.P2P, OpClass.COLLECTIVE)
    return classes


def _report(trace: GpuTrace, links: _Links, findings: Findings) -> None:
    """Say what is not linked, and what is odd."""
    work = trace.work
    duration_ns = work.end_ns - work.start_ns
    ran_ns = np.maximum(duration_ns, 0)
    total_ns = int(ran_ns.sum())
    unlinked = (links.cause < 0) & (work.range_row == 0)
    several = "device events fit launches of several processes, none is taken"
    for missing, code, message in (
        (links.launch < 0, "no-launch", "device events have no launch record"),
        (unlinked, "unlinked", "device events have no operation on the host"),
        (links.ambiguous, "ambiguous-launch", several),
    ):
        share = int(ran_ns[missing].sum()) / total_ns if total_ns else 0.0
        text = f"{message}: {share:.1%} of the device time, kept by kernel and stream"
        findings.warning(code, text, int(missing.sum()))
    by_text = int(((links.cause < 0) & (work.range_row > 0)).sum())
    made = "linked to where their graph node was made"
    findings.info("linked-by-graph-node", made, int(links.by_node.sum()))
    findings.info("linked-by-name", "the operation is known by name alone", by_text)
    text = "ranges that start and end anywhere are kept as host operations and own no device event"
    findings.info("start-end-ranges", text, int((~trace.ranges.nests).sum()))
    findings.warning("unnamed", "device events have no name", int((work.name_row == 0).sum()))
    negative = "device events end before they start"
    findings.warning("negative-duration", negative, int((duration_ns < 0).sum()))
    findings.warning("zero-duration", "device events of 0 ns", int((duration_ns == 0).sum()))


# Which kernels communicate, by what NCCL and RCCL call them and the ranges around their launch.

_KERNEL = re.compile(
    r"(?:void )?[nr]ccl(?:(?:Symk?)?(?:Dev)?Kernel(?:_([A-Za-z]+))?"
    r"|([A-Z][A-Za-z]{2,20})(?:Ring|Tree|CollNet)\w*Kernel)"
)
"""``ncclDevKernel_AllReduce_Sum_f32_RING_LL``; older ones write ``ncclKernel_AllReduce_RING_LL_Sum_float`` or
``ncclAllReduceRingLLKernel_sum_f32``.
"""
_WORDS = {
    "allreduce": "allreduce",
    "allgather": "allgather allgatherbase",
    "reduce_scatter": "reducescatter reducescatterbase",
    "all_to_all": "alltoall alltoallv alltoallpivot alltoallbase",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "sendrecv", "send", "recv")},
}
_KINDS = MappingProxyType({word: name for name, words in _WORDS.items() for word in words.split()})
"""The library's name without case and underscores -> the name used here; others do not tell (``generic``)."""

_RANGE = re.compile(r"(?:nccl:|rccl:|c10d::|nccl|rccl)_?([A-Za-z_]+)")


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel is one of NCCL or RCCL."""
    return _KERNEL.match(name) is not None


def collective_in_kernel(name: str) -> str:
    """``allreduce`` for ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``; "" where a kernel does not tell."""
    found = _KERNEL.match(name)
    return _KINDS.get((found[1] or found[2] or "").lower(), "") if found else ""


def collective_in_range(name: str) -> str:
    """``allreduce`` for ``ncclAllReduce``, ``nccl:all_reduce`` and ``c10d::allreduce_``; "" for the rest."""
    found = _RANGE.match(name)
    return _KINDS.get(found[1].replace("_", "").lower(), "") if found else ""


# Which range on the host caused a piece of device work.
#
# In this order: the graph node replayed was made inside a range (the capture is in the recording); the call
# that launches is a range, or stands inside ranges of its own thread, of which the innermost is the cause.

_MOST_CLONES = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Links:
    """Per piece of device work: its launch, the innermost range around that, and the range that caused it
    (-1: none); whether the cause was found by the graph node, and whether several processes could have
    launched it (it is then not linked).
    """

    launch: IntArray
    launched_in: IntArray
    cause: IntArray
    by_node: BoolArray
    ambiguous: BoolArray


def _link(trace: GpuTrace, nesting: Nesting) -> _Links:
    """Find the launch and the range of all device work."""
    launch, ambiguous = _launches(trace.launches, trace.work)
    calls = trace.launches
    inside = around_launch(nesting, launch, calls.thread, calls.start_ns)
    own = at_rows(calls.range_place, launch, -1)
    cause = np.where(own >= 0, own, inside)
    made = _made_in(trace.nodes, trace.work, nesting)
    return _Links(launch, cause, np.where(made >= 0, made, cause), made >= 0, ambiguous)


def nesting_of(ranges: Ranges) -> Nesting:
    """The ranges that nest, as a forest per thread."""
    return Nesting.of(ranges.thread, ranges.start_ns, ranges.end_ns, np.flatnonzero(ranges.nests))


def _launches(launches: Launches, work: DeviceWork) -> tuple[IntArray, BoolArray]:
    """The launch of each piece of work, by process and correlation.

    Work that does not tell its process finds a launch where only one process uses the correlation.
    """
    found = match_rows((launches.process, launches.correlation), (work.process, work.correlation))
    ambiguous = np.zeros(len(work), np.bool_)
    nameless = np.flatnonzero(work.process < 0)
    if not len(nameless) or not len(launches):
        return found, ambiguous
    wanted = (work.correlation[nameless],)
    first = match_rows((launches.correlation,), wanted)
    backwards = match_rows((launches.correlation[::-1],), wanted)
    last = np.where(backwards >= 0, len(launches) - 1 - backwards, -1)
    several = (first >= 0) & (launches.process[first] != launches.process[last])
    found[nameless] = np.where(several, -1, first)
    ambiguous[nameless] = several
    return found, ambiguous


def _made_in(nodes: GraphNodes, work: DeviceWork, nesting: Nesting) -> IntArray:
    """The range that each piece of work's graph node, or the one it was cloned from, was made in."""
    if not len(nodes) or not bool((work.node >= 0).any()):
        return np.full(len(work), -1, np.int64)
    clones, node = np.flatnonzero(nodes.original >= 0), work.node
    for _ in range(_MOST_CLONES):
        clone = match_rows((nodes.process[clones], nodes.node[clones]), (work.process, node))
        if not bool((clone >= 0).any()):
            break
        node = np.where(clone >= 0, at_rows(nodes.original[clones], clone, -1), node)
    at = match_rows((nodes.process, nodes.node), (work.process, node))
    return around_launch(nesting, at, nodes.thread, nodes.start_ns)


# What a range on the host says: an operation of PyTorch with its shapes, an instruction of XLA, or a name.
#
# PyTorch's ``emit_nvtx`` writes ``aten::mm, seq = 3, op_id = 7, sizes = [[4, 8], [8, 2]], input_op_ids =
# [..]`` with the parts it has (``torch/csrc/profiler/util.cpp``, ``getNvtxStr``; on ROCm the same goes to
# roctx). XLA writes ``Thunk:#hlo_op=fusion.1,hlo_module=jit_f#`` (``tsl/profiler/lib/traceme_encode.h``).

_MOST_DIGITS = 18
_STEP = re.compile(
    r"(?:ProfilerStep#|(?:step|iter|iteration)[ _#:=]{0,2})(\d{1,9})", re.ASCII | re.IGNORECASE
)
_MOST_SIZES = 1 << 20
_SIZES = msgspec.json.Decoder(list[list[int]])


@dataclass(frozen=True, slots=True)
class RangeText:
    """``shapes`` is a JSON text, ``sequence`` joins forward and backward; "" and -1 for what is not said.

    ``step`` is the number of a step of training or inference that the text names.
    """

    name: str
    shapes: str = ""
    sequence: int = -1
    module: str = ""
    instruction: str = ""
    step: int = -1


def parse_range_text(text: str) -> RangeText:
    """Read one text. What does not follow a known form is a name as a whole. O(len(text))."""
    if text.endswith("#") and "#" in text[:-1]:
        return _traceme(text)
    head, _, _ = text.partition(", input_op_ids = ")
    head, _, sizes = head.partition(", sizes = ")
    head, _, operation = head.partition(", op_id = ")
    name, _, sequence = head.partition(", seq = ")
    if not name or not _is_count(operation) or not _is_count(sequence):
        return RangeText(text)
    if sizes and not _are_sizes(sizes):
        return RangeText(text)
    step = _STEP.fullmatch(name)
    return RangeText(name, sizes, int(sequence) if sequence else -1, step=int(step[1]) if step else -1)


def _is_count(part: str) -> bool:
    return not part or (part.isdecimal() and part.isascii() and len(part) <= _MOST_DIGITS)


def _are_sizes(text: str) -> bool:
    if len(text) > _MOST_SIZES:
        return False
    try:
        _SIZES.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _traceme(text: str) -> RangeText:
    name, _, rest = text[:-1].partition("#")
    facts: dict[str, str] = {}
    for part in rest.split(","):
        key, found, value = part.partition("=")
        if found:
            facts.setdefault(key.strip(), value)
    instruction, module = facts.get("hlo_op", ""), facts.get("hlo_module", "")
    step = facts.get("step_num", "")
    return RangeText(
        instruction or facts.get("name", "") or name.rstrip(":") or text,
        module=module,
        instruction=instruction,
        step=int(step) if step and _is_count(step) and len(step) < 10 else -1,
    )
