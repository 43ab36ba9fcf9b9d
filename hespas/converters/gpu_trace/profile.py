"""GPU recordings linked and converted to a :class:`Profile`.

A range on the host causes device work. If the work replays a graph node, it is the range in which the node
was created (the capture is in the recording). Otherwise it is the launch call, if that is a range itself, or
the innermost range around the call on its thread. No device time is dropped; work without a cause is
reported.

PyTorch's ``emit_nvtx`` writes ranges as ``aten::mm, seq = 3, op_id = 7, sizes = [[4, 8], [8, 2]],
input_op_ids = [..]``, with the parts that it has (``torch/csrc/profiler/util.cpp``, ``getNvtxStr``; on ROCm
it writes the same to roctx). XLA writes ``Thunk:#hlo_op=fusion.1,hlo_module=jit_f#``
(``tsl/profiler/lib/traceme_encode.h``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np

from hespas.converters.gpu_trace import GpuRanges, GpuTrace, listed
from hespas.converters.linking import EventNesting, around_launch, match_rows, nearest
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
_SYSTEM_BITS = (1 << 24) - 1
_MAX_SHOWN = 16


@dataclass(frozen=True, slots=True, eq=False)
class _RangeLabels:
    """Information from the texts of ranges, one row per range. Columns that end in ``_id`` are rows of the
    string table.
    """

    name_id: IntArray
    shapes_id: IntArray
    module_id: IntArray
    sequence: IntArray
    step: IntArray
    instruction: BoolArray

    @classmethod
    def of(cls, trace: GpuTrace) -> _RangeLabels:
        """Return the labels of all ranges of a recording; a text that several ranges share is parsed once."""
        parsed = [parse_range_text(text) for text in trace.texts]
        add = trace.strings.add

        def column(values: list[int], missing: int = 0) -> IntArray:
            return at_rows(np.array(values, np.int64), trace.ranges.text, missing)

        return cls(
            column([add(text.name) for text in parsed]),
            column([add(text.shapes) for text in parsed]),
            column([add(text.module) for text in parsed]),
            column([text.sequence for text in parsed], missing=-1),
            column([text.step for text in parsed], missing=-1),
            column([bool(text.instruction) for text in parsed]).astype(np.bool_),
        )


def to_profile(
    path: Path, source: str, trace: GpuTrace, metadata: Mapping[str, str], diagnostics: Diagnostics
) -> Profile:
    """Convert a GPU recording to a profile. Diagnostic codes begin with ``source``, the name of the format.

    The operation of an event is the innermost range around its cause that states shapes or is an instruction
    of XLA, else the innermost range. Raises ``FormatError`` for an empty recording and for wrong times.
    """
    work, calls, ranges, strings = trace.work, trace.launches, trace.ranges, trace.strings
    _check_recording(trace, path)
    nesting, labels = nesting_of(ranges), _RangeLabels.of(trace)
    links = _GpuLinks.of(trace, nesting)
    ids = (calls.process, calls.correlation)
    report_shared_ids(ids, calls.start_ns, calls.end_ns, links.launch, (diagnostics, str(path)))
    findings = diagnostics.about(str(path), source)
    owner = nearest((labels.shapes_id > 0) | labels.instruction, nesting.parent, links.cause)
    cause = np.where(owner >= 0, owner, links.cause)
    module = nearest(labels.module_id > 0, nesting.parent, cause)
    step = _steps(trace, links, nesting, labels)
    steps = np.flatnonzero(labels.step >= 0)
    base_ns = min(int(part.start_ns.min()) for part in (work, ranges, calls) if len(part))
    comms = _communications(trace, links.cause, nesting, labels)
    op_class = work.op_class.copy()
    is_message = np.isin(comms.kind_id, [strings.add(kind) for kind in _MESSAGE_KINDS])
    op_class[comms.event] = np.where(is_message, OpClass.P2P, OpClass.COLLECTIVE)
    host = HostOps.of(
        name_id=labels.name_id,
        thread_id=_thread_rows(ranges.process, ranges.thread, strings),
        parent=nesting.parent,
        start_ns=ranges.start_ns - base_ns,
        duration_ns=ranges.end_ns - ranges.start_ns,
        sequence=labels.sequence,
        shapes_id=labels.shapes_id,
    )
    # A range of the program that the recording names as cause is not a launch call.
    launch = np.where(at_rows(calls.range_place, links.launch, -1) < 0, links.launch, -1)
    returned = (calls.end_ns >= calls.start_ns) & (calls.end_ns < _LARGEST_NS)
    call_end_ns = np.where(returned, np.where(returned, calls.end_ns, base_ns) - base_ns, np.nan)
    call_threads = _thread_rows(calls.process, calls.thread, strings)
    rank = _ranks(trace, links, findings)
    _report(trace, links, findings)
    return Profile.of(
        path.name.removesuffix(".gz").rpartition(".")[0] or path.name,
        trace.devices or ("",),
        strings.build(),
        op_id=np.where(cause >= 0, at_rows(labels.name_id, cause, 0), work.range_id),
        module_id=at_rows(labels.module_id, module, 0),
        kernel_id=work.name_id,
        category_id=work.category_id,
        shapes_id=at_rows(labels.shapes_id, cause, 0),
        op_class=op_class,
        device_index=work.device,
        rank=rank,
        stream=work.stream,
        run=at_rows(labels.step, step, -1),
        start_ns=work.start_ns - base_ns,
        duration_ns=work.end_ns - work.start_ns,
        bytes_moved=np.where(work.bytes_moved >= 0, work.bytes_moved.astype(np.float64), np.nan),
        host_event=cause,
        launch_start_ns=at_rows((calls.start_ns - base_ns).astype(np.float64), launch, np.nan),
        launch_end_ns=at_rows(call_end_ns, launch, np.nan),
        launch_thread_id=at_rows(call_threads, launch, 0),
        grid_id=work.grid_id,
        comms=comms,
        host=host,
        steps=StepRanges.of(
            number=labels.step[steps],
            start_ns=ranges.start_ns[steps] - base_ns,
            duration_ns=ranges.end_ns[steps] - ranges.start_ns[steps],
        ),
        metadata={"format": source, **metadata, "first_event_ns": str(base_ns)},
    )


def _check_recording(trace: GpuTrace, path: Path) -> None:
    """Raise ``FormatError`` for a recording without events, and for times beyond 63 bits."""
    if not len(trace.work) and not len(trace.ranges):
        raise FormatError(
            "the recording has neither device work nor ranges on the host",
            path=str(path),
            position="all tables and records of work and ranges",
            hint="record again, with traces of CUDA or HIP and of ranges (NVTX, roctx)",
        )
    for name, times in {
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
                f"the time {int(times[row])} does not fit 63 bits of nanoseconds",
                path=str(path),
                position=f"{name} {row}, in the order read",
                hint="record again",
            )


def _steps(trace: GpuTrace, links: _GpuLinks, nesting: EventNesting, labels: _RangeLabels) -> IntArray:
    """Return, for each event, the range of the training or inference step that it belongs to (-1: none).

    It is the step range around the launch on the same thread. Without one, it is the step range of the same
    process that runs at the time of the launch, because backward passes have a thread of their own.
    """
    is_step = labels.step >= 0
    step = nearest(is_step, nesting.parent, links.launched_in)
    rest = np.flatnonzero((step < 0) & (links.launch >= 0))
    steps = np.flatnonzero(is_step & trace.ranges.nests)
    if not len(rest) or not len(steps):
        return step
    calls, launch = trace.launches, links.launch[rest]
    of_process = nesting_of(trace.ranges.by_process(steps))
    running = of_process.innermost(calls.process[launch], calls.start_ns[launch])
    step[rest] = at_rows(steps, running, -1)
    return step


def _ranks(trace: GpuTrace, links: _GpuLinks, findings: Findings) -> IntArray:
    """Return the rank of each event. Ranks number the pairs of device and process.

    Work without a device has the first rank of its process. The process is stated by the event, or else by
    its launch, or else it is the only process (-1: unknown).
    """
    work, calls = trace.work, trace.launches
    process = work.process
    if len(calls):
        process = np.where(process >= 0, process, at_rows(calls.process, links.launch, -1))
        every = np.unique(np.concatenate((process[process >= 0], calls.process)))
        process = np.where((process < 0) & (len(every) == 1), every[0], process)
    has_gpu = work.gpu >= 0
    pairs: IntArray = np.unique(np.stack((work.gpu[has_gpu], process[has_gpu])), axis=1)
    if not pairs.shape[1]:
        return np.zeros(len(work), np.int64)
    processes, first = np.unique(pairs[1], return_index=True)
    index = np.minimum(np.searchsorted(processes, process), len(processes) - 1)
    rank = np.where(processes[index] == process, first[index], 0).astype(np.int64)
    rank[has_gpu] = match_rows((pairs[1], pairs[0]), (process[has_gpu], work.gpu[has_gpu]))
    if pairs.shape[1] > 1:
        shown = [
            f"{number}: device {gpu} of process {owner & _SYSTEM_BITS}"
            for number, (gpu, owner) in enumerate(zip(*map(listed, pairs[:, :_MAX_SHOWN]), strict=True))
        ]
        message = f"ranks number pairs of device and process in order: {', '.join(shown)}"
        findings.info("ranks", message, pairs.shape[1])
    return rank


def _communications(
    trace: GpuTrace, cause: IntArray, nesting: EventNesting, labels: _RangeLabels
) -> MeasuredComms:
    """Return the communication kernels (NCCL, RCCL) with the kinds of their collectives.

    The name of the kernel states the kind, or else the name of a range around its launch.
    """
    strings, name_id = trace.strings, trace.work.name_id
    event = np.flatnonzero(mapped(name_id, lambda row: is_collective_kernel(strings[row]), np.bool_))
    if not len(event):
        return MeasuredComms.empty()
    kind = mapped(name_id[event], lambda row: strings.add(collective_in_kernel(strings[row])), np.int64)
    of_range = mapped(labels.name_id, lambda row: strings.add(collective_in_range(strings[row])), np.int64)
    around = nearest(of_range > 0, nesting.parent, cause[event])
    return MeasuredComms.of(event=event, kind_id=np.where(kind > 0, kind, at_rows(of_range, around, 0)))


def _thread_rows(process: IntArray, thread: IntArray, strings: StringTableBuilder) -> SmallIntArray:
    """Return the text row that names the thread of each row."""
    threads, place = distinct_rows(process, thread)
    rows = [strings.add(f"{owner & _SYSTEM_BITS}:{number & _SYSTEM_BITS}") for owner, number in threads]
    return np.array(rows, np.int32)[place]


def _report(trace: GpuTrace, links: _GpuLinks, findings: Findings) -> None:
    """Report device work that is not linked to host operations, and irregular work such as kernels of 0
    ns.
    """
    work = trace.work
    duration_ns = work.end_ns - work.start_ns
    ran_ns = np.maximum(duration_ns, 0)
    total_ns = int(ran_ns.sum())
    unlinked = (links.cause < 0) & (work.range_id == 0)
    ambiguous = "device events match launches of several processes and are not linked"
    for mask, code, message in (
        (links.launch < 0, "no-launch", "device events have no launch record"),
        (unlinked, "unlinked", "device events have no operation on the host"),
        (links.ambiguous, "ambiguous-launch", ambiguous),
    ):
        share = int(ran_ns[mask].sum()) / total_ns if total_ns else 0.0
        text = f"{message}: {share:.1%} of the device time, identified by kernel and stream only"
        findings.warning(code, text, int(mask.sum()))
    by_name = int(((links.cause < 0) & (work.range_id > 0)).sum())
    message = "device events linked to the range in which their graph node was created"
    findings.info("linked-by-graph-node", message, int(links.by_node.sum()))
    findings.info("linked-by-name", "device events whose operation is known by name only", by_name)
    message = "ranges that start and end anywhere are host operations and own no device event"
    findings.info("start-end-ranges", message, int((~trace.ranges.nests).sum()))
    findings.warning("unnamed", "device events have no name", int((work.name_id == 0).sum()))
    negative = "device events end before they start"
    findings.warning("negative-duration", negative, int((duration_ns < 0).sum()))
    findings.warning("zero-duration", "device events of 0 ns", int((duration_ns == 0).sum()))


_COLLECTIVE_KERNEL = re.compile(
    r"(?:void )?[nr]ccl(?:(?:Symk?)?(?:Dev)?Kernel(?:_([A-Za-z]+))?"
    r"|([A-Z][A-Za-z]{2,20})(?:Ring|Tree|CollNet)\w*Kernel)"
)
"""Pattern of the kernel names of NCCL and RCCL, such as ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``. Older
versions write ``ncclKernel_AllReduce_RING_LL_Sum_float`` or ``ncclAllReduceRingLLKernel_sum_f32``.
"""
_COLLECTIVE_WORDS = {
    "allreduce": "allreduce",
    "allgather": "allgather allgatherbase",
    "reduce_scatter": "reducescatter reducescatterbase",
    "all_to_all": "alltoall alltoallv alltoallpivot alltoallbase",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "sendrecv", "send", "recv")},
}
_KIND_OF_WORD = MappingProxyType(
    {word: name for name, words in _COLLECTIVE_WORDS.items() for word in words.split()}
)
"""Name of the collective for each word of a library, in lower case without underscores. Other words, such
as ``generic``, name no collective.
"""

_COLLECTIVE_RANGE = re.compile(r"(?:nccl:|rccl:|c10d::|nccl|rccl)_?([A-Za-z_]+)")


def is_collective_kernel(name: str) -> bool:
    """Return True if the name of a kernel is that of a kernel of NCCL or RCCL."""
    return _COLLECTIVE_KERNEL.match(name) is not None


def collective_in_kernel(name: str) -> str:
    """Return ``allreduce`` for ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``; "" if the name states no
    collective.
    """
    match = _COLLECTIVE_KERNEL.match(name)
    return _KIND_OF_WORD.get((match[1] or match[2] or "").lower(), "") if match else ""


def collective_in_range(name: str) -> str:
    """Return ``allreduce`` for ``ncclAllReduce``, ``nccl:all_reduce`` and ``c10d::allreduce_``; "" for other
    names.
    """
    match = _COLLECTIVE_RANGE.match(name)
    return _KIND_OF_WORD.get(match[1].replace("_", "").lower(), "") if match else ""


_MAX_CLONES = 16
_MESSAGE_KINDS = ("send", "recv", "sendrecv")


@dataclass(frozen=True, slots=True, eq=False)
class _GpuLinks:
    """Links of device work to the host, one row per kernel, copy or fill (-1: none).

    ``launch`` is the launch call, ``launched_in`` the innermost range around it, and ``cause`` the range that
    caused the work. ``by_node`` marks causes that were found by the node of a CUDA graph. ``ambiguous`` marks
    work that several processes could have launched; it is not linked.
    """

    launch: IntArray
    launched_in: IntArray
    cause: IntArray
    by_node: BoolArray
    ambiguous: BoolArray

    @classmethod
    def of(cls, trace: GpuTrace, nesting: EventNesting) -> _GpuLinks:
        """Find the launch and the cause of all device work.

        A launch and its work have the same process and correlation id. Work of unknown process is linked only
        if one process uses its correlation id. The cause of replayed work is the range in which the node of
        its CUDA graph was created; the node may be a clone.
        """
        calls, work, nodes = trace.launches, trace.work, trace.nodes
        launch = match_rows((calls.process, calls.correlation), (work.process, work.correlation))
        is_ambiguous = np.zeros(len(work), np.bool_)
        no_process = np.flatnonzero(work.process < 0)
        if len(no_process) and len(calls):
            correlation = (work.correlation[no_process],)
            first = match_rows((calls.correlation,), correlation)
            backwards = match_rows((calls.correlation[::-1],), correlation)
            last = np.where(backwards >= 0, len(calls) - 1 - backwards, -1)
            of_several = (first >= 0) & (calls.process[first] != calls.process[last])
            launch[no_process] = np.where(of_several, -1, first)
            is_ambiguous[no_process] = of_several
        launched_in = around_launch(nesting, launch, calls.thread, calls.start_ns)
        own_range = at_rows(calls.range_place, launch, -1)
        cause = np.where(own_range >= 0, own_range, launched_in)
        created_in = np.full(len(work), -1, np.int64)
        if len(nodes) and bool((work.node >= 0).any()):
            clones, node = np.flatnonzero(nodes.original >= 0), work.node
            for _ in range(_MAX_CLONES):
                clone = match_rows((nodes.process[clones], nodes.node[clones]), (work.process, node))
                if not bool((clone >= 0).any()):
                    break
                node = np.where(clone >= 0, at_rows(nodes.original[clones], clone, -1), node)
            creation = match_rows((nodes.process, nodes.node), (work.process, node))
            created_in = around_launch(nesting, creation, nodes.thread, nodes.start_ns)
        by_node = created_in >= 0
        return cls(launch, launched_in, np.where(by_node, created_in, cause), by_node, is_ambiguous)


def nesting_of(ranges: GpuRanges) -> EventNesting:
    """Return the nesting of the ranges that were pushed and popped, per thread."""
    return EventNesting.of(ranges.thread, ranges.start_ns, ranges.end_ns, np.flatnonzero(ranges.nests))


_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_STEP = re.compile(
    r"(?:ProfilerStep#|(?:step|iter|iteration)[ _#:=]{0,2})(\d{1,9})", re.ASCII | re.IGNORECASE
)
_MAX_SIZES = 1 << 20
_SIZES = msgspec.json.Decoder(list[list[int]])


@dataclass(frozen=True, slots=True)
class RangeText:
    """Information in the text of a range; "" and -1 for unknown.

    ``shapes`` is a JSON text of the operand shapes. ``sequence`` is the number that a forward operation and
    its backward operation share. ``step`` is the number of a training or inference step that the text names.
    """

    name: str
    shapes: str = ""
    sequence: int = -1
    module: str = ""
    instruction: str = ""
    step: int = -1


def parse_range_text(text: str) -> RangeText:
    """Parse the text of an NVTX or roctx range. A text in no known form is a name. O(len(text))."""
    if text.endswith("#") and "#" in text[:-1]:  # XLA's TraceMe
        name, _, rest = text[:-1].partition("#")
        facts: dict[str, str] = {}
        for part in rest.split(","):
            key, separator, value = part.partition("=")
            if separator:
                facts.setdefault(key.strip(), value)
        instruction, step_text = facts.get("hlo_op", ""), facts.get("step_num", "")
        return RangeText(
            instruction or facts.get("name", "") or name.rstrip(":") or text,
            module=facts.get("hlo_module", ""),
            instruction=instruction,
            step=int(step_text) if _COUNT.fullmatch(step_text) and len(step_text) < 10 else -1,
        )
    head, _, _ = text.partition(", input_op_ids = ")
    head, _, sizes = head.partition(", sizes = ")
    head, _, operation = head.partition(", op_id = ")
    name, _, sequence = head.partition(", seq = ")
    is_operation = bool(name) and all(not part or _COUNT.fullmatch(part) for part in (operation, sequence))
    is_operation = is_operation and len(sizes) <= _MAX_SIZES
    if is_operation and sizes:
        try:
            _SIZES.decode(sizes)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            is_operation = False
    if not is_operation:
        return RangeText(text)
    step = _STEP.fullmatch(name)
    return RangeText(name, sizes, int(sequence) if sequence else -1, step=int(step[1]) if step else -1)
