"""Lower bounds of the step times of layouts, from the times of the parts that layouts share.

Layouts that differ only in data, pipeline or virtual parallelism run the same kernels in a layer. The engine
simulates the layers of each combination of the other settings once, in a step of a few layers without
data-parallel communication (:class:`LayerTimes`). The collectives, messages and optimizer kernels of all
layouts are estimated together, each distinct one once (:class:`SharedCosts`).

The bound of a layout is the longest of several chains, each of which the step contains: the passes of a stage
after the pipeline has filled and before it drains, with communication that has no work to overlap; the
communication of one communicator; and the launches of the host. Waits between stages, contention between
stages and overheads only add to a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hespas.api.simulation_job import StepJob
from hespas.estimators.configuration import beside_share, host_issue_ns
from hespas.generators.llm.kernels import KernelWriter, TensorSpec
from hespas.generators.llm.layers import ModelEnds
from hespas.generators.llm.layout import Layout, layers_of_stages, micro_batches
from hespas.generators.llm.model import Experts, Layer
from hespas.generators.llm.rank import ModelRank, keeps_weights
from hespas.generators.llm.schedule import PassTemplate
from hespas.generators.llm.settings import Recompute
from hespas.generators.llm.space import Candidate
from hespas.generators.llm.step import LlmStep, frees_weights, training_facts, weight_shares
from hespas.generators.llm.weights import RankWeights, weights_of_layer, weights_of_rest
from hespas.graph import CollectiveKind, NodeKind, Resource, Workload
from hespas.graph.builder import GraphBuilder
from hespas.graph.groups import GroupSet
from hespas.hardware import Device
from hespas.simulator import JobScheduler
from hespas.simulator.results import MATMULS

__all__ = ["Bound", "LayerTimes", "LayoutBounds", "SharedCosts"]

_REPEATS = 3
"""Layers of each kind in the simulated step: the middle one follows and precedes a layer of its kind."""
_TOLERANCE = 0.995
"""Share of the bound that counts: times of a layer differ by its neighbours, such as a fused addition."""
_MOST_UNROLLED = 200_000
"""Operations up to which the engine launches every iteration of a loop (:mod:`hespas.simulator.launches`)."""


class _PassTimes(NamedTuple):
    """Times of a layer in one direction, or of an end of the model: from the end of the layer before to its
    own end (``span_ns``), all kernels (``busy_ns``), matmuls and attention (``matmul_ns``), gradients of
    weights (``weights_ns``), and the number of launches.
    """

    span_ns: float
    busy_ns: float
    matmul_ns: float
    weights_ns: float
    launches: int


@dataclass(frozen=True)
class LayerTimes:
    """Times of the layers of a model by kind, for one combination of the settings that change its kernels."""

    forward: Mapping[Layer, _PassTimes]
    backward: Mapping[Layer, _PassTimes]
    embedding: _PassTimes
    embedding_backward: _PassTimes
    head: _PassTimes
    """Last norm, head and loss in both directions, with layers of multi-token prediction."""

    @classmethod
    def simulated(cls, job: StepJob, step: LlmStep, devices: int, *, launches: bool) -> LayerTimes:
        """Return the times of the layers of ``step``, whose layout has one stage on ``devices`` ranks. With
        ``launches``, kernels wait for the host.
        """
        kinds = list(dict.fromkeys(step.model.layers))
        layers = tuple(kind for kind in kinds for _ in range(_REPEATS))
        overlap = replace(step.training.overlap, gradients=False, parameters=False)
        layout = replace(step.layout, pp=1, vp=1, dp=devices // (step.layout.tp * step.layout.cp), zero=0)
        training = replace(
            step.training,
            overlap=overlap,
            optimizer_offload=False,
            global_batch=layout.dp * step.training.micro_batch,
        )
        small = replace(step, model=replace(step.model, layers=layers), layout=layout, training=training)
        done = job.run(small.workload(), JobScheduler(launches=launches))
        graph, line = done.workload.classes[int(done.workload.rank_class[0])], done.timeline
        mine = (line.rank == line.shown_by[0]) & (line.node >= 0)
        mine &= graph.resource[np.maximum(line.node, 0)] != int(Resource.HOST)
        mine &= line.resource == line.resources.index("compute")
        names = [graph.strings[int(row)] for row in graph.framework_id[line.node[mine]].tolist()]
        are_matmuls = np.isin(graph.op_class[line.node[mine]], MATMULS).tolist()
        ends, durations = line.end_ns[mine].tolist(), (line.end_ns - line.start_ns)[mine].tolist()
        # A part ends with its last kernel: recomputed kernels may start while the part before communicates.
        over: dict[tuple[str, str], float] = {}
        busy: dict[tuple[str, str], float] = {}
        matmuls: dict[tuple[str, str], float] = {}
        weights: dict[tuple[str, str], float] = {}
        for name, end, duration, is_matmul in zip(names, ends, durations, are_matmuls, strict=True):
            key = _part_of(name)
            over[key] = max(over.get(key, end), end)
            busy[key] = busy.get(key, 0.0) + duration
            matmuls[key] = matmuls.get(key, 0.0) + duration * is_matmul
            if name.endswith("wgrad"):
                weights[key] = weights.get(key, 0.0) + duration
        counts: dict[tuple[str, str], int] = {}
        launched = (graph.kind != int(NodeKind.RECV)) & (graph.resource != int(Resource.HOST))
        for row in graph.framework_id[launched].tolist():
            key = _part_of(graph.strings[int(row)])
            counts[key] = counts.get(key, 0) + 1
        order = sorted(over, key=lambda key: over[key])
        before = {key: over[previous] for previous, key in pairwise(order)}

        def times(key: tuple[str, str]) -> _PassTimes:
            span_ns = over.get(key, 0.0) - before.get(key, 0.0)
            return _PassTimes(
                span_ns,
                busy.get(key, 0.0),
                matmuls.get(key, 0.0),
                weights.get(key, 0.0),
                counts.get(key, 0),
            )

        middle = {kind: str(_REPEATS * index + 1) for index, kind in enumerate(kinds)}
        last = str(len(layers) - 1)
        passed, returned = over["forward", last], over["backward", last]
        inside = [key for key in order if passed < over[key] < returned]
        head = _PassTimes(
            max((over[key] for key in inside), default=passed) - passed,
            sum(busy[key] for key in inside),
            sum(matmuls[key] for key in inside),
            sum(weights.get(key, 0.0) for key in inside),
            sum(counts.get(key, 0) for key in inside),
        )
        embedding = times(("backward", "embedding"))
        return cls(
            forward={kind: times(("forward", number)) for kind, number in middle.items()},
            backward={kind: times(("backward", number)) for kind, number in middle.items()},
            embedding=times(("forward", "embedding")),
            embedding_backward=embedding._replace(span_ns=embedding.busy_ns),
            head=head,
        )


def _part_of(name: str) -> tuple[str, str]:
    """Return the pass and the layer number (or ``embedding``, or another module) of a kernel."""
    direction, _, rest = name.partition("/")
    module, _, inner = rest.partition("/")
    return direction, inner.partition("/")[0] if module == "layers" else module


@dataclass
class SharedCosts:
    """Times of the collectives, messages and optimizer kernels of many layouts, each estimated once.

    Each method returns the row of a time in :attr:`times_ns`, which is available when all are registered.
    """

    job: StepJob
    step: LlmStep
    devices: int
    device: Device
    writer: KernelWriter = field(init=False)
    rows: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])

    def __post_init__(self) -> None:
        """Start the graph that collects the operations."""
        builder = GraphBuilder("plan")
        builder.strings.add("plan")
        precision = self.step.training.precision
        self.writer = KernelWriter(builder, PassTemplate("end", 0, 0), queues=True, tf32=precision.tf32)
        self.row(("nothing",), lambda writer: writer.vector("nothing", "copy", [], [TensorSpec((1,), "i8")]))

    def row(self, key: tuple[object, ...], write: Callable[[KernelWriter], int]) -> int:
        """Return the row of an operation that ``write`` adds unless the ``key`` is known."""
        if key not in self.rows:
            self.rows[key] = write(self.writer)
        return self.rows[key]

    def collective(self, kind: CollectiveKind, groups: GroupSet, elements: int, element: str) -> int:
        """Return the row of a collective over a buffer of ``elements``."""
        tensor = TensorSpec((elements,), element)
        return self.row(
            (kind, groups, elements, element),
            lambda writer: writer.collective("collective", kind, groups, tensor, in_place=True),
        )

    def message(self, rank: ModelRank) -> int:
        """Return the row of the message from a pipeline stage to the next one."""
        messages, tensor = rank.groups.to_stage(1), rank.stream
        return self.row(
            (messages, tensor), lambda writer: writer.message("send", messages, tensor, 0, sends=True)
        )

    def optimizer(self, rank: ModelRank, weights: RankWeights) -> tuple[int, ...]:
        """Return the rows of the end of a step, which run one after another."""
        layout, training = rank.layout, rank.training
        shards = (layout.sharded, layout.expert_sharded) if layout.zero else (1, 1)
        key = ("optimizer", weights.dense, weights.experts, shards, training.optimizer_offload)
        first = len(self.writer.builder)

        def write(writer: KernelWriter) -> int:
            ModelEnds(rank).finish(writer, weights, [], lambda _writer, _value: None)
            return len(writer.builder)

        end = self.row(key, write)
        if end > first:  # it was written now
            self.rows["from", *key] = first
        return tuple(range(self.rows["from", *key], end))

    @cached_property
    def times_ns(self) -> list[float]:
        """Shortest time of each registered operation on a rank; 0 if it is unknown."""
        graph = self.writer.builder.build()
        facts = replace(training_facts(self.step.model, self.step.training), ranks=self.devices)
        workload = Workload.spmd(graph, self.devices, facts.metadata())
        _, estimates = self.job.timed(workload, self.device)
        assert estimates is not None
        columns = np.array([estimate.duration_ns for estimate in estimates])
        shortest: list[float] = np.nan_to_num(columns.min(axis=0)).tolist()
        shortest[0] = 0.0
        return shortest


class _Communication(NamedTuple):
    """Rows of the data-parallel communication of a layer, or of the weights outside of layers.

    ``reduce`` has the rows of the reduction of gradients for each communicator (dense weights and experts),
    ``gather`` the rows of the gathers of weights.
    """

    reduce: tuple[tuple[int, ...], ...] = ()
    gather: tuple[tuple[int, ...], ...] = ()


class _StageSums(NamedTuple):
    """Sums over the layers of each pipeline stage [ns], in lists with one entry per stage.

    ``fill`` and ``drain`` are the times that the first forward pass and the last backward pass spend on the
    stages before, ``drained_weights`` the gradients of weights in the latter. ``last_backward`` is the
    backward pass of the first chunk. ``forward`` and ``span`` are the passes of a micro-batch, forward and in
    both directions; ``busy``, ``matmul``, ``weights`` and ``launches`` are of the kernels in the latter.
    """

    fill: list[float]
    drain: list[float]
    drained_weights: list[float]
    last_backward: list[float]
    forward: list[float]
    span: list[float]
    busy: list[float]
    matmul: list[float]
    weights: list[float]
    launches: list[int]
    embedding: list[float]
    head: float


class _Reduction(NamedTuple):
    """Times of the data-parallel communication of a stage [ns].

    ``last_layer`` is the reduction of the layer whose backward pass is last, ``last_chunk`` of its chunk; of
    the communicator that takes longest. ``reduce`` and ``gather`` are of all layers, ``first_gather`` and
    ``last_gather`` of the first and the last layer of each chunk; one entry per communicator, first of dense
    weights. ``rest_reduce`` and ``rest_gather`` are of the weights outside of layers, which use the first
    communicator. ``end`` is the update of weights.
    """

    last_layer: float
    last_chunk: float
    reduce: tuple[float, ...]
    gather: tuple[float, ...]
    first_gather: tuple[float, ...]
    last_gather: tuple[float, ...]
    rest_reduce: float
    rest_gather: float
    end: float


class Bound(NamedTuple):
    """Lower bounds of a step: its time, and the times of all kernels and of matmuls with attention (means of
    devices).
    """

    step_ns: float
    busy_ns: float
    matmul_ns: float


_Key = tuple[object, ...]
_Chunks = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass
class LayoutBounds:
    """Lower bounds of the step times of the layouts of a space on one machine.

    All candidates are registered before the first bound is computed.
    """

    job: StepJob
    step: LlmStep
    devices: int
    device: Device
    _layers: dict[_Key, LayerTimes] = field(default_factory=dict[_Key, LayerTimes])
    _sums: dict[_Key, _StageSums] = field(default_factory=dict[_Key, _StageSums])
    _chunks: dict[_Key, _Chunks] = field(default_factory=dict[_Key, _Chunks])
    _rows: dict[_Key, _Communication] = field(default_factory=dict[_Key, _Communication])
    _ends: dict[_Key, tuple[int, ...]] = field(default_factory=dict[_Key, tuple[int, ...]])
    _reductions: dict[_Key, list[_Reduction]] = field(default_factory=dict[_Key, list[_Reduction]])

    @cached_property
    def _costs(self) -> SharedCosts:
        return SharedCosts(self.job, self.step, self.devices, self.device)

    @cached_property
    def _issue_ns(self) -> float:
        return host_issue_ns(training_facts(self.step.model, self.step.training), self.device)

    @cached_property
    def _slowdown(self) -> float:
        share = beside_share(self.device)
        return share / (1.0 + share)

    @cached_property
    def _kinds(self) -> list[Layer]:
        return list(dict.fromkeys(self.step.model.layers))

    def _chunks_of(self, layout: Layout) -> _Chunks:
        key = layout.pp, layout.vp
        if key not in self._chunks:
            self._chunks[key] = layers_of_stages(self.step.model, layout)
        return self._chunks[key]

    def register(self, candidate: Candidate) -> None:
        """Register the operations of a layout, so that all are estimated together."""
        layout, training = candidate.layout, candidate.training
        key = _communication_key(candidate)
        rank = ModelRank(self.step.model, layout, training)
        parts: list[tuple[object, RankWeights]] = []
        if (key, self._kinds[0]) not in self._rows:
            parts += [
                (kind, weights_of_layer(self.step.model, layout, training, kind)) for kind in self._kinds
            ]
            parts += [(ends, self._rest(candidate, *ends)) for ends in self._ends_of(layout)]
            for name, weights in parts:
                self._rows[key, name] = self._communication(rank, weights)
            if layout.pp > 1:
                self._rows[key, "message"] = _Communication(((self._costs.message(rank),),))
        key = (*key, layout.vp, training.optimizer_offload)
        if key not in self._ends:
            self._ends[key] = ()
            for stage in range(layout.pp):
                self._ends[*key, stage] = self._costs.optimizer(rank, self._weights(candidate, stage))

    def _ends_of(self, layout: Layout) -> list[tuple[bool, bool]]:
        """Return, for the distinct stages, whether they are the first and the last one."""
        return [(True, True)] if layout.pp == 1 else [(True, False), (False, True)]

    def _rest(self, candidate: Candidate, first: bool, last: bool) -> RankWeights:
        return weights_of_rest(self.step.model, candidate.layout, candidate.training, first=first, last=last)

    def _weights(self, candidate: Candidate, stage: int) -> RankWeights:
        """Return the weights of a stage."""
        layout = candidate.layout
        total = self._rest(candidate, stage == 0, stage == layout.pp - 1)
        layers = self.step.model.all_layers
        counts: dict[Layer, int] = {}
        for chunk in self._chunks_of(layout)[stage]:
            for number in chunk:
                counts[layers[number]] = counts.get(layers[number], 0) + 1
        for layer, count in counts.items():
            of_layer = weights_of_layer(self.step.model, layout, candidate.training, layer)
            total = sum((of_layer for _ in range(count)), total)
        return total

    def _communication(self, rank: ModelRank, weights: RankWeights) -> _Communication:
        layout, costs = rank.layout, self._costs
        reduce: list[tuple[int, ...]] = []
        gather: list[tuple[int, ...]] = []
        for share in weight_shares(layout, rank.groups, weights):
            rows: list[int] = []
            left = share.trained
            if share.shards.group_size > 1 and left:
                kind = CollectiveKind.REDUCE_SCATTER
                rows.append(costs.collective(kind, share.shards, left, rank.gradient))
                left = -(-left // share.shards.group_size)
            if share.copies.group_size > 1 and left:
                kind = CollectiveKind.ALL_REDUCE
                rows.append(costs.collective(kind, share.copies, left, rank.gradient))
            reduce.append(tuple(rows))
            elements = share.trained + (share.frozen if frees_weights(layout, rank.training) else 0)
            if layout.zero and elements and share.shards.group_size > 1:
                kind, element = CollectiveKind.ALL_GATHER, rank.precision.compute
                gather.append((costs.collective(kind, share.shards, elements, element),))
            else:
                gather.append(())
        return _Communication(tuple(reduce), tuple(gather))

    def bound(self, candidate: Candidate, *, recomputes: bool = True) -> Bound:
        """Return the bounds of a registered layout; without ``recomputes``, of the layout that recomputes
        nothing, which is not slower.
        """
        if not recomputes:
            offloaded = candidate.training.recompute.offloaded
            plain = replace(candidate.training, recompute=Recompute(offloaded=offloaded))
            candidate = candidate._replace(training=plain)
        layout, training = candidate.layout, candidate.training
        count = micro_batches(layout, training)
        sums, reductions = self._stage_sums(candidate), self._stage_reductions(candidate)
        splits = training.schedule == "zero-bubble" and layout.pp > 1
        overlap, zero = training.overlap, layout.zero
        if keeps_weights(layout, training):  # as with whole copies of the weights, which is not slower
            zero = 0
        frees = frees_weights(layout, training)
        longest = 0.0
        over_ns = reductions[0].end  # what follows the last pass of the first stage
        if zero < 2 and not overlap.gradients:
            over_ns += max(reductions[0].reduce, default=0.0)
        elif zero < 2:
            over_ns += max(reductions[0].last_layer, reductions[0].rest_reduce)
        for stage, times in enumerate(reductions):
            # A pass that gathers weights waits for those of its first layer and those outside of layers.
            embedding_ns, head_ns = sums.embedding[stage], sums.head if stage == layout.pp - 1 else 0.0
            rest_ns = times.rest_gather if frees else 0.0
            forward_ns, backward_ns = sums.forward[stage], sums.span[stage] - sums.forward[stage]
            first_ns = streamed_f_ns = streamed_b_ns = 0.0
            if frees:
                first_ns = _with_rest(times.first_gather, rest_ns)
                forward_ns += max(rest_ns, first_ns - embedding_ns)
                streamed_f_ns = _with_rest(times.gather, rest_ns)
            if zero == 3:
                last_ns = _with_rest(times.last_gather, rest_ns if head_ns else 0.0)
                backward_ns += max(rest_ns if head_ns else 0.0, last_ns - head_ns)
                streamed_b_ns = _with_rest(times.gather, rest_ns)
            early_ns = first_ns if layout.pp > 1 else 0.0  # may run while the pipeline fills
            computed_ns = count * (forward_ns + backward_ns) - early_ns
            passed_ns = count * (max(forward_ns, streamed_f_ns) + max(backward_ns, streamed_b_ns)) - early_ns
            if zero in {1, 2} and not frees and overlap.parameters and stage == 0:
                computed_ns += max(times.first_gather, default=0.0)
            # Communication of one communicator that runs during the passes, which slows kernels down.
            gathers = count * (frees + (zero == 3))
            reductions_ns = [(count if zero >= 2 else 1.0) * reduce_ns for reduce_ns in times.reduce]
            streams_ns = [
                reduce_ns + gathers * gather_ns
                for reduce_ns, gather_ns in zip(reductions_ns, times.gather, strict=True)
            ]
            streamed_ns = _with_rest(
                streams_ns, (count * times.rest_reduce if zero >= 2 else 0.0) + gathers * times.rest_gather
            )
            hidden_ns = streamed_ns - computed_ns + count * sums.busy[stage] - times.last_layer
            if zero >= 2 or overlap.gradients:
                computed_ns += self._slowdown * max(min(hidden_ns, count * sums.busy[stage]), 0.0)
            base_ns = sums.fill[stage] + max(computed_ns, passed_ns)
            reduced_ns = times.last_layer if zero >= 2 else max(times.last_layer, times.rest_reduce)
            if zero < 2 and not overlap.gradients:
                reduced_ns = max(times.reduce, default=0.0)
            chains = [base_ns + reduced_ns + times.end, streamed_ns + times.end]
            if splits:
                # While the pipeline drains, the stage may compute gradients of weights.
                drain_ns = sums.drain[stage] - sums.drained_weights[stage]
                chains.append(base_ns - count * sums.weights[stage] + drain_ns + sums.weights[0] + over_ns)
            else:
                chains.append(base_ns + sums.drain[stage] + over_ns)
                late_ns = times.last_chunk - sums.last_backward[stage]
                chains.append(base_ns + late_ns + times.end)
            if zero in {1, 2} and not frees and not overlap.parameters:
                gather_ns = _with_rest(times.gather, times.rest_gather)
                chains = [chain_ns + gather_ns for chain_ns in chains]
            longest = max(longest, *chains)
        launches = count * max(sums.launches)
        if layout.pp > 1 or launches <= _MOST_UNROLLED:
            longest = max(longest, launches * self._issue_ns)
        busy_ns, matmul_ns = (
            _TOLERANCE * count * sum(column) / layout.pp for column in (sums.busy, sums.matmul)
        )
        return Bound(_TOLERANCE * longest, busy_ns, matmul_ns)

    def _layer_times(self, candidate: Candidate, *, recomputes: bool = True) -> LayerTimes:
        layout, training = candidate.layout, candidate.training
        recompute = training.recompute
        is_partial = recompute.layers >= 0 or recompute.every != 1  # counts as none
        if is_partial or not recomputes:
            recompute = Recompute(offloaded=recompute.offloaded)
        key = layout.tp, layout.cp, layout.ep, layout.etp, training.micro_batch, recompute
        if key not in self._layers:
            step = replace(
                self.step, layout=layout, training=replace(training, recompute=recompute, schedule="1f1b")
            )
            waits = training_facts(self.step.model, training).reads_counts and self._issue_ns > 0
            has_experts = any(isinstance(block, Experts) for block in self.step.model.blocks())
            self._layers[key] = LayerTimes.simulated(
                self.job, step, self.devices, launches=waits and has_experts
            )
        return self._layers[key]

    def _stage_sums(self, candidate: Candidate) -> _StageSums:
        layout = candidate.layout
        times = self._layer_times(candidate)
        key = id(times), layout.pp, layout.vp
        if key in self._sums:
            return self._sums[key]
        layers = self.step.model.layers
        chunks = self._chunks_of(layout)
        message_ns = 0.0
        if layout.pp > 1:
            message_ns = self._ns(self._rows[_communication_key(candidate), "message"].reduce[0])
        forward = [
            [[times.forward[layers[number]] for number in chunk if number < len(layers)] for chunk in stage]
            for stage in chunks
        ]
        backward = [
            [[times.backward[layers[number]] for number in chunk if number < len(layers)] for chunk in stage]
            for stage in chunks
        ]
        forward[0][0].append(times.embedding)
        backward[0][0].append(times.embedding_backward)
        backward[-1][-1].append(times.head)

        def spans(passes: Sequence[_PassTimes]) -> float:
            return sum(one.span_ns for one in passes)

        first = [spans(stage[0]) for stage in forward]
        last = [spans(stage[0]) for stage in backward]
        # Kernels are recomputed while the stage waits for its gradients.
        waited = last
        if layout.pp > 1 and candidate.training.recompute.modules:
            plain = self._layer_times(candidate, recomputes=False).backward
            waited = [
                sum(plain[layers[number]].span_ns for number in stage[0] if number < len(layers))
                for stage in chunks
            ]
        both = [
            [one for chunk in (*ahead, *back) for one in chunk]
            for ahead, back in zip(forward, backward, strict=True)
        ]
        self._sums[key] = _StageSums(
            fill=[0.0, *accumulate(time_ns + message_ns for time_ns in first[:-1])],
            drain=[0.0, *accumulate(time_ns + message_ns for time_ns in waited[:-1])],
            drained_weights=[
                0.0,
                *accumulate(sum(one.weights_ns for one in stage[0]) for stage in backward[:-1]),
            ],
            last_backward=last,
            forward=[sum(map(spans, stage)) for stage in forward],
            span=[spans(passes) for passes in both],
            busy=[sum(one.busy_ns for one in passes) for passes in both],
            matmul=[sum(one.matmul_ns for one in passes) for passes in both],
            weights=[sum(one.weights_ns for one in passes) for passes in both],
            launches=[sum(one.launches for one in passes) for passes in both],
            embedding=[times.embedding.span_ns, *[0.0] * (layout.pp - 1)],
            head=times.head.span_ns,
        )
        return self._sums[key]

    def _ns(self, rows: Sequence[int]) -> float:
        times = self._costs.times_ns
        return sum(times[row] for row in rows)

    def _stage_reductions(self, candidate: Candidate) -> list[_Reduction]:
        layout, training = candidate.layout, candidate.training
        own = _communication_key(candidate)
        key = (*own, layout.vp, training.optimizer_offload)
        if key in self._reductions:
            return self._reductions[key]
        layers = self.step.model.all_layers
        reduce = {kind: tuple(map(self._ns, self._rows[own, kind].reduce)) for kind in self._kinds}
        gather = {kind: tuple(map(self._ns, self._rows[own, kind].gather)) for kind in self._kinds}
        stages: list[_Reduction] = []
        for stage, chunks in enumerate(self._chunks_of(layout)):
            numbers = [number for chunk in chunks for number in chunk]
            ends = stage == 0, stage == layout.pp - 1
            rest = self._rows.get((own, ends), _Communication())
            rows = self._ends[*key, stage]
            end_ns = self._ns(rows)
            if training.optimizer_offload and rows:
                stored = rows[-3:-2]
                end_ns -= min(self._ns(stored), self._ns(rows[:-3]))
            stages.append(
                _Reduction(
                    last_layer=max(_sums(reduce, [layers[number] for number in chunks[0][:1]]), default=0.0),
                    last_chunk=max(_sums(reduce, [layers[number] for number in chunks[0]]), default=0.0),
                    reduce=_sums(reduce, [layers[number] for number in numbers]),
                    gather=_sums(gather, [layers[number] for number in numbers]),
                    first_gather=_sums(gather, [layers[chunk[0]] for chunk in chunks if chunk]),
                    last_gather=_sums(gather, [layers[chunk[-1]] for chunk in chunks if chunk]),
                    rest_reduce=max(map(self._ns, rest.reduce), default=0.0),
                    rest_gather=max(map(self._ns, rest.gather), default=0.0),
                    end=end_ns,
                )
            )
        self._reductions[key] = stages
        return stages


def _sums(times_ns: Mapping[Layer, Sequence[float]], layers: Sequence[Layer]) -> tuple[float, ...]:
    """Return the sums over layers for each communicator."""
    columns = [times_ns[layer] for layer in layers]
    return tuple(
        sum(column[index] for column in columns if index < len(column))
        for index in range(max(map(len, columns), default=0))
    )


def _with_rest(times_ns: Sequence[float], rest_ns: float) -> float:
    """Return the time of the communicator that takes longest, if the first one also has the rest."""
    if not times_ns:
        return rest_ns
    return max([times_ns[0] + rest_ns, *times_ns[1:]])


def _communication_key(candidate: Candidate) -> _Key:
    """Return the settings on which data-parallel communication and messages depend."""
    layout = candidate.layout
    degrees = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.zero
    return (*degrees, candidate.training.micro_batch if layout.pp > 1 else 0)
