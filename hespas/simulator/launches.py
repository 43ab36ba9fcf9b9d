"""Host launches of kernels, as host nodes for which device work waits.

A host that launches kernels one by one runs ahead of the device until it has to read a result. Each kernel
starts when the host has launched it, or later. Launches are nodes on the host's stream, so that timelines and
critical paths show them. A launch that cannot delay its kernel, because earlier work on the device takes
longer than all launches before it, does not get a node. Its time is added to the node of the next launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Diagnostics, NodeKind, OpClass, OpGraph, RaggedArray, Resource
from hespas.graph.columns import DTYPES, BoolArray, FloatArray, IntArray, StringTableBuilder
from hespas.graph.errors import UnsupportedError
from hespas.graph.opgraph import NODE_COLUMNS
from hespas.graph.passes import UnrollLoops, all_deps, take_nodes
from hespas.simulator.streams import COMPUTE, kinds_of, stream_codes

__all__ = ["EAGER_ISSUE_NS", "LAUNCH", "Launches", "launches_of", "unrolled"]

_MOST_UNROLLED = 200_000
"""Number of operations of a rank up to which loops are unrolled; longer loops get the launches of one
iteration.
"""

LAUNCH = "host launch"
"""Name and operation of launches."""
_COUNTED = "moe_permute"
"""Operation whose result the host reads before further launches: the number of tokens for each expert."""
EAGER_ISSUE_NS = 20_000.0
"""Host time of a kernel that PyTorch launches by itself: a round figure, chosen on the development rows of
docs/accuracy/training.md.
"""
_GROUPED, _GROUP_RANK = "aten::bmm", 3
"""Operation of the matmuls of several experts, and the dimensions of an operand that has one matrix for each
expert.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Launches:
    """Host launches that may delay kernels, in program order; columns of shape ``(launches,)``.

    ``kernel`` is the node that a launch starts. ``duration_ns`` is the host time since the previous launch in
    this table. ``reads`` is the node whose result the host reads before the launch (-1: none). ``follows`` is
    False for the first launch of a loop body that was run before. ``last`` has shape ``(nodes,)``: the index
    of the latest launch before each node of the graph (-1: none).
    """

    kernel: IntArray
    duration_ns: FloatArray
    reads: IntArray
    follows: BoolArray
    last: IntArray

    def __len__(self) -> int:
        return len(self.kernel)

    def rows(self) -> IntArray:
        """Return the order of nodes in the graph with launches: numbers of the original nodes, and ``nodes +
        i`` for launch ``i``.
        """
        nodes = len(self.last)
        return np.insert(np.arange(nodes), self.kernel, nodes + np.arange(len(self)))

    def added_to(self, graph: OpGraph) -> OpGraph:
        """Return the graph with a node for each launch, before its kernel. O(nodes + dependencies)."""
        nodes, rows = len(graph), self.rows()
        number = np.empty(len(rows), np.int64)
        number[rows] = np.arange(len(rows))
        launch, reads, launched = number[nodes:], self.reads >= 0, self.last >= 0
        after = np.flatnonzero(self.follows[1:]) + 1
        consumers = [number[:nodes][launched], launch[after], launch[reads]]
        producers = [launch[self.last[launched]], launch[after - 1], number[self.reads[reads]]]
        none = np.empty(0, np.int64)
        data = _moved(graph.data_deps, number, none, none)
        control = _moved(graph.control_deps, number, np.concatenate(consumers), np.concatenate(producers))
        strings = StringTableBuilder(graph.strings)
        name = strings.add(LAUNCH)
        new_columns: dict[str, object] = {
            "name_id": name, "op_id": name, "op_class": int(OpClass.FREE), "resource": int(Resource.HOST),
            "rate_dtype": -1, "duration_ns": self.duration_ns,
            "region": graph.region[self.kernel], "executions": graph.executions[self.kernel],
            "id": int(graph.id.max(initial=0)) + 1 + np.arange(len(self)),
        }  # fmt: skip
        columns: dict[str, Any] = {}
        for key in NODE_COLUMNS:
            column: NDArray[np.generic] = getattr(graph, key)
            more = np.broadcast_to(np.asarray(new_columns.get(key, 0)).astype(column.dtype), (len(self),))
            columns[key] = np.append(column, more)
        for key in ("data_deps", "control_deps", "operands", "results"):
            deps: RaggedArray = getattr(graph, key)
            ends = np.full(len(self), deps.offsets[-1], deps.offsets.dtype)
            columns[key] = RaggedArray(np.append(deps.offsets, ends), deps.values)
        return take_nodes(replace(graph, strings=strings.build(), **columns), rows, data, control)


def unrolled(graph: OpGraph, *, overlap_trips: bool) -> tuple[OpGraph, IntArray] | None:
    """Return the graph with all loops unrolled, and for each of its nodes the node in ``graph`` (-1: a marker
    of the end of an iteration, which takes no time).

    Loops are unrolled because the host launches kernels of later iterations while the device still runs
    earlier ones. Return None if the graph has no loops, too many operations, or loops that cannot be
    unrolled.
    """
    if not len(graph.regions):
        return None
    marked = replace(graph, duration_ns=np.arange(1.0, len(graph) + 1))
    try:
        flat = UnrollLoops(max_nodes=_MOST_UNROLLED, overlap_trips=overlap_trips)(marked, Diagnostics())
    except UnsupportedError:
        return None
    rows = np.where(flat.duration_ns > 0, flat.duration_ns, 0.0).astype(np.int64) - 1
    return flat, rows


def _moved(deps: RaggedArray, number: IntArray, consumers: IntArray, producers: IntArray) -> RaggedArray:
    """Return dependencies between renumbered nodes. ``number`` has the new number of each node. ``consumers``
    and ``producers`` are additional dependencies, as pairs of new numbers.
    """
    rows = np.concatenate([number[deps.row_ids], consumers])
    return RaggedArray.from_pairs(rows, np.concatenate([number[deps.values], producers]), len(number))


@dataclass(slots=True)
class _Host:
    """State of the host, which launches nodes in program order, and of the streams of the device.

    Times count from the start of the step. In a loop whose launches take longer than its device work, they
    count from the start of an iteration.
    """

    issued_ns: float = 0.0
    noted_ns: float = 0.0
    read: int = -1
    follows: bool = True
    free: dict[int, float] = field(default_factory=dict[int, float])
    launches: list[tuple[int, float, int, bool]] = field(default_factory=list[tuple[int, float, int, bool]])
    last: list[int] = field(default_factory=list[int])

    def enter(self, *, anew: bool, follows: bool) -> None:
        """Begin a region. ``anew`` states that the host is not ahead of the device there, so that its times
        start from 0 again.
        """
        self.follows = follows
        if anew:
            self.issued_ns = self.noted_ns = 0.0
            self.free = {}

    def launch(self, node: int, ready_ns: float, stream: int, duration_ns: float, issue_ns: float) -> float:
        """Launch a node whose inputs are ready at ``ready_ns``, and return the earliest time at which the
        node ends. The launch takes ``issue_ns`` (0: the node shares the launch of the previous node).
        """
        self.issued_ns += issue_ns
        start_ns = max(ready_ns, self.free.get(stream, 0.0)) if stream >= 0 else ready_ns
        if self.issued_ns > start_ns or self.read >= 0:
            self.launches.append((node, self.issued_ns - self.noted_ns, self.read, self.follows))
            self.noted_ns, self.read, self.follows = self.issued_ns, -1, True
            start_ns = max(start_ns, self.issued_ns)
        self.last.append(len(self.launches) - 1)
        end_ns = start_ns + duration_ns
        if stream >= 0:
            self.free[stream] = end_ns
        return end_ns

    def wait(self, node: int, end_ns: float) -> None:
        """Make the host read the result of a node before its next launch."""
        self.read = node
        self.issued_ns = self.noted_ns = max(self.issued_ns, end_ns)


def _launches_by_expert(graph: OpGraph, experts: int) -> IntArray:
    """Return the launches of each matmul or conversion with one matrix for each of ``experts`` experts; 0 for
    other nodes. Shape ``(nodes,)``. O(nodes).

    Before a matmul of block-scaled operands, a kernel for each operand brings the scales into the order that
    matrix units read.
    """
    launches = np.zeros(len(graph), np.int64)
    if experts == 1:
        return launches
    products = graph.contractions
    is_scaled = np.isin(products.lhs, [kind.code for kind in DTYPES if kind.block_elements])
    launches[products.node] = np.where(products.batch == experts, experts * np.where(is_scaled, 3, 1), 0)
    launches[graph.op_id != graph.strings.find(_GROUPED)] = 0
    converts = np.isin(graph.op_class, (int(OpClass.QUANTIZE), int(OpClass.REDUCTION)))
    nodes = np.flatnonzero(converts & (np.diff(graph.operands.offsets) > 0))
    first = graph.operands.values[graph.operands.offsets[nodes]]
    for row in np.unique(first).tolist():
        shape = graph.types.shape(row)
        if len(shape) == _GROUP_RANK and shape[0] == experts:
            launches[nodes[first == row]] = experts
    return launches


def launches_of(
    graph: OpGraph, issue_ns: float, *, reads_counts: bool, separate_experts: int = 0
) -> Launches:
    """Return the launches of a graph whose nodes have times. Each node takes one launch of ``issue_ns`` host
    time, in program order.

    A receive shares the launch of its send, as in one NCCL group. The two halves of a permute in a trace
    share one launch too. ``reads_counts`` is True if the host reads the number of tokens of each expert
    before it continues. ``separate_experts`` is the number of experts of a rank whose matmuls and
    conversions the host launches one by one, outside of CUDA graphs (0: as one kernel). O(nodes +
    dependencies).
    """
    deps, host = all_deps(graph), _Host()
    bounds: list[int] = deps.offsets.tolist()
    producers: list[int] = deps.values.tolist()
    times: list[float] = np.where(graph.duration_ns > 0, graph.duration_ns, 0.0).tolist()
    codes = stream_codes(graph)
    streams: list[int] = codes.tolist()
    regions: list[int] = graph.region.tolist()
    counted = graph.strings.find(_COUNTED) if reads_counts else -1
    counts: list[bool] = ((graph.op_id == counted) & (counted > 0)).tolist()
    kernels = (graph.kind != int(NodeKind.RECV)).astype(np.int64)
    issue_of = kernels * issue_ns
    if separate_experts:
        by_expert = _launches_by_expert(graph, separate_experts)
        issue_of = np.where(by_expert > 0, by_expert * EAGER_ISSUE_NS, issue_of)
    issues_ns: list[float] = issue_of.tolist()
    # The last entry, for the top level, is False.
    inside = graph.region >= 0
    works = inside & (kinds_of(codes) == COMPUTE)
    size = len(graph.regions)
    busy_ns = np.bincount(graph.region[works], graph.duration_ns[works], size)
    slow = [*(np.bincount(graph.region[inside], issue_of[inside], size) > busy_ns).tolist(), False]
    end_ns: list[float] = []
    entered = {-1}
    region, began = -1, 0
    for node, duration_ns in enumerate(times):
        if regions[node] != region:
            anew = slow[region] or slow[regions[node]]
            region = regions[node]
            began = node if anew else began
            host.enter(anew=anew, follows=region < 0 or region not in entered)
            entered.add(region)
        ready_ns = 0.0
        for producer in producers[bounds[node] : bounds[node + 1]]:
            if began <= producer < node and end_ns[producer] > ready_ns:
                ready_ns = end_ns[producer]
        end_ns.append(host.launch(node, ready_ns, streams[node], duration_ns, issues_ns[node]))
        if counts[node]:
            host.wait(node, end_ns[node])
    kernel, duration, reads, follows = zip(*host.launches, strict=True) if host.launches else ((), (), (), ())
    return Launches(
        kernel=np.array(kernel, np.int64),
        duration_ns=np.array(duration, np.float64),
        reads=np.array(reads, np.int64),
        follows=np.array(follows, np.bool_),
        last=np.array(host.last, np.int64),
    )
