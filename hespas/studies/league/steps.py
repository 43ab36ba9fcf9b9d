"""Simulated step of a published run, and its time by component.

A component is a part of the step that one physical figure scales, such as the efficiency of one class of
kernels or the bandwidth of one kind of communication. The time of a step is the sum over its critical path,
and therefore a sum over components.

Once the pipeline is full, each further group of microbatches adds the same time to a step. So steps with few
microbatches are simulated, and longer steps are extrapolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hespas.estimators.configuration import default_configuration
from hespas.estimators.step_intervals import NO_FACTOR
from hespas.fitting.effects import COMPONENTS
from hespas.graph import Diagnostics, NodeKind, OpClass, OpGraph
from hespas.graph.columns import DTYPES, FloatArray, IntArray
from hespas.graph.timeline import Intervals, united
from hespas.simulator import Simulation, Simulator, simulate
from hespas.simulator.launches import LAUNCH
from hespas.simulator.streams import COMPUTE
from hespas.studies.league.runs import TimedRun

__all__ = ["BUBBLE", "HOST", "OVERLAP", "StepTime", "components_of", "simulated_step"]

_NUMBER_OF = {name: number for number, name in enumerate(COMPONENTS)}
HOST, OVERLAP, BUBBLE = _NUMBER_OF["host"], _NUMBER_OF["overlap"], _NUMBER_OF["bubble"]

_BY_OP_CLASS: Mapping[int, str] = {
    int(OpClass.ATTENTION): "attention",
    int(OpClass.QUANTIZE): "quantize",
}
_BY_BITS: Mapping[int, str] = {8: "products of 8 bits", 4: "products of 4 bits"}
_BY_OP: Mapping[str, str] = {
    "aten::bmm": "experts",
    "aten::_grouped_mm": "experts",
    "absmax": "quantize",
    "aten::_fused_adamw_": "optimizer",
    "cpu_adam": "optimizer",
}
_BY_WORD: Sequence[tuple[str, str]] = (
    ("pipeline.", "pipeline"),
    ("dispatch", "expert"),
    ("combine", "expert"),
    ("weights", "data"),
    ("gradients", "data"),
    ("grad_norm", "data"),
    ("ends.", "data"),
    (".kv.", "context"),
    ("attention.core.", "context"),
    ("qkv.all_to_all", "context"),
    ("qkv.grad.all_to_all", "context"),
)
"""Words in the names of communication nodes. Names without one of them belong to tensor parallelism."""
_COMMUNICATION = frozenset(
    (int(NodeKind.COLLECTIVE), int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE))
)
_COPIES = frozenset((int(NodeKind.MEM_LOAD), int(NodeKind.MEM_STORE)))
_FEW_MICRO_BATCHES = 4
"""Microbatches of a step without a pipeline after which each further one adds the same time."""
_ROUNDING = 1e-6
"""Limit of relative differences between times that are rounding errors."""


def components_of(graph: OpGraph) -> IntArray:
    """Return the component of each node as an index in :data:`COMPONENTS`, shape ``(nodes,)``. O(nodes log
    nodes).
    """
    operand = np.full(len(graph), -1, np.int64)
    operand[graph.contractions.node] = graph.contractions.lhs
    key = graph.name_id.astype(np.int64) * len(graph.strings) + graph.op_id
    for column, largest in (
        (graph.kind, max(NodeKind)),
        (graph.op_class, max(OpClass)),
        (operand, len(DTYPES)),
    ):
        key = key * (int(largest) + 2) + column + 1
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    numbers: list[int] = []
    for node in first.tolist():
        kind, op, dtype_code = int(graph.kind[node]), graph.op_name(node), int(operand[node])
        if op == LAUNCH:
            name = "host"
        elif kind in _COPIES:
            name = "copies"
        elif kind in _COMMUNICATION:
            node_name = graph.node_name(node)
            name = next((component for word, component in _BY_WORD if word in node_name), "tensor")
        elif op in _BY_OP:
            name = _BY_OP[op]
        elif dtype_code >= 0:
            name = _BY_BITS.get(DTYPES[dtype_code].bits, "products")
        else:
            name = _BY_OP_CLASS.get(int(graph.op_class[node]), "vector")
        numbers.append(_NUMBER_OF[name])
    return np.asarray(np.array(numbers, np.int64)[group.reshape(-1)], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """Time of a step [ns], and two splits of this time by component [ns], each of shape ``(components,)``.

    ``path_ns`` splits the critical path, which crosses pipeline stages. ``spent_ns`` splits the time of the
    last rank to finish; its idle time is the component "bubble". No entry is negative, and each split sums to
    the time.
    """

    time_ns: float
    path_ns: FloatArray
    spent_ns: FloatArray


def simulated_step(timed: TimedRun, diagnostics: Diagnostics, simulator: Simulator | None = None) -> StepTime:
    """Simulate the step of a run (:func:`hespas.simulator.simulate`) and return its time by component. To
    save time, only a few microbatches are simulated: O(nodes of few microbatches).
    """

    def simulation(micro_batches: int) -> Simulation:
        workload, device = timed.workload(micro_batches), timed.settings.device
        # the league evaluates, and fits its own factors to, the times without step factors
        configuration = default_configuration(workload, device, step_factor=NO_FACTOR)
        return simulate(
            workload,
            device=device,
            configuration=configuration,
            simulator=simulator,
            diagnostics=diagnostics,
        )

    count, pp = timed.micro_batches, timed.settings.layout.pp
    fewer = _FEW_MICRO_BATCHES if pp == 1 else pp + count % pp
    more = fewer + pp
    if count <= more + pp:
        return _step_time(simulation(count))
    longer = simulation(more)
    last_rank = int(np.argmax(longer.timeline.finish_ns))
    high = _step_time(longer, last_rank)
    low = _step_time(simulation(fewer), last_rank)
    groups = (count - more) / pp
    time_ns = high.time_ns + groups * (high.time_ns - low.time_ns)
    return StepTime(
        time_ns,
        _normalized(high.path_ns + groups * (high.path_ns - low.path_ns), time_ns),
        _normalized(high.spent_ns + groups * (high.spent_ns - low.spent_ns), time_ns),
    )


def _normalized(parts_ns: FloatArray, time_ns: float) -> FloatArray:
    """Return ``parts_ns`` scaled to the sum ``time_ns``, with negative values set to 0. Negative values arise
    because they are differences of two simulated steps.
    """
    positive_ns = np.maximum(parts_ns, 0.0)
    total_ns = float(positive_ns.sum())
    return positive_ns * (time_ns / total_ns) if total_ns > 0 else positive_ns


def _step_time(result: Simulation, rank: int = -1) -> StepTime:
    """Return the time of a simulated step by component. ``spent_ns`` is for ``rank`` (-1: the last rank to
    finish).
    """
    timeline, workload = result.timeline, result.workload
    if rank < 0:
        rank = int(np.argmax(timeline.finish_ns))
    component = np.full(len(timeline.node), BUBBLE, np.int64)
    alone_ns = np.zeros(len(timeline.node))
    classes = workload.rank_class[timeline.rank]
    for number, graph in enumerate(workload.classes):
        spans = np.flatnonzero(classes == number)
        node = timeline.node[spans]
        component[spans] = components_of(graph)[node]
        alone_ns[spans] = graph.duration_ns[node]
    # the critical path, from the start of a span to the start of the next
    path = result.critical_path
    path_start_ns = timeline.start_ns[path]
    spent_ns = np.diff(np.append(path_start_ns, result.step_ns))
    is_kernel = timeline.resource[path] == COMPUTE
    own_ns = np.where(is_kernel, _uncontended(spent_ns, alone_ns[path]), spent_ns)
    path_ns = _sums(component[path], own_ns)
    path_ns[OVERLAP] += float((spent_ns - own_ns).sum())
    path_ns[BUBBLE] += float(path_start_ns[0]) if len(path) else result.step_ns
    spans_of_rank = np.flatnonzero(timeline.rank == timeline.shown_by[rank])
    timeline = result.timeline
    start_ns, end_ns = timeline.start_ns + timeline.wait_ns, timeline.end_ns
    is_kernel = timeline.resource[spans_of_rank] == COMPUTE
    kernels = spans_of_rank[is_kernel]
    duration_ns = end_ns[kernels] - start_ns[kernels]
    own_ns = _uncontended(duration_ns, alone_ns[kernels])
    rank_ns = _sums(component[kernels], own_ns)
    rank_ns[OVERLAP] += float((duration_ns - own_ns).sum())
    transfers = spans_of_rank[~is_kernel & (component[spans_of_rank] != HOST)]
    transfers = transfers[np.argsort(start_ns[transfers], kind="stable")]
    until_ns = end_ns[transfers]
    before_ns = np.maximum.accumulate(np.append(0.0, until_ns))[:-1]
    from_ns = np.minimum(np.maximum(start_ns[transfers], before_ns), until_ns)
    kernel_busy = Intervals(*united(start_ns[kernels], end_ns[kernels]))
    hidden_ns = kernel_busy.elapsed_ns(until_ns) - kernel_busy.elapsed_ns(from_ns)
    rank_ns += _sums(component[transfers], np.maximum(until_ns - from_ns - hidden_ns, 0.0))
    # idle time before work that starts when the host has launched it
    work = np.concatenate([kernels, transfers])
    busy_from_ns, busy_until_ns = united(start_ns[work], end_ns[work])
    idle_ns = busy_from_ns - np.append(0.0, busy_until_ns[:-1])[: len(busy_from_ns)]
    cause = timeline.cause[work]
    is_launched = (cause >= 0) & (component[cause] == HOST)
    launched_ns = np.unique(timeline.start_ns[work[is_launched]])
    rank_ns[HOST] += float(idle_ns[np.isin(busy_from_ns, launched_ns)].sum())
    rank_ns[BUBBLE] += max(result.step_ns - float(rank_ns.sum()), 0.0)
    return StepTime(result.step_ns, path_ns, _normalized(rank_ns, result.step_ns))


def _sums(component: IntArray, time_ns: FloatArray) -> FloatArray:
    return np.bincount(component, time_ns, len(COMPONENTS)).astype(np.float64)


def _uncontended(duration_ns: FloatArray, alone_ns: FloatArray) -> FloatArray:
    """Return the times of kernels without the slowdown by concurrent communication: ``alone_ns`` if a kernel
    takes longer than that, else its duration.

    Durations are differences of sums. A duration that is longer only by rounding is returned unchanged.
    """
    return np.where(duration_ns <= alone_ns * (1.0 + _ROUNDING), duration_ns, alone_ns)
