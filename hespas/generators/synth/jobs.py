"""Synthetic jobs from the template of a real one: other numbers of layers, other costs, extents and names.

Ranks of a job change alike, so collectives and messages still match. A job has no text of its source except
names of public operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, nan

import numpy as np

from hespas.generators.obfuscate.keys import Key
from hespas.generators.obfuscate.layers import (
    Run,
    changeable_runs,
    shared_group_sets,
    signatures,
)
from hespas.generators.obfuscate.names import hide_names
from hespas.generators.spec import Account
from hespas.generators.synth.blocks import with_repeats
from hespas.generators.synth.job_costs import CostSamples, OperationTable, with_costs
from hespas.graph import (
    DONATED_TO,
    IN_PLACE,
    PROGRAM_BYTES,
    RETURNED,
    STEP_FACTS,
    Diagnostics,
    ExtraTable,
    OpGraph,
    RegionTable,
    StringTable,
    Workload,
    step_facts,
)
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError
from hespas.graph.passes import UnrollLoops, find_cycle, runtime_copies, take_nodes, topological_order

__all__ = [
    "JobSize",
    "Template",
    "TemplateJob",
    "plain_graph",
    "templates_of",
    "total_flops",
    "total_payload",
]

_SPREAD = 0.05
"""Largest change of the logarithm of the FLOPs and of the traffic of a job, unless they are given."""
_SPREAD_OF_NODES = 0.25
"""The same for the number of nodes."""
_FEWEST_REPEATS = 2
_MOST_GROWTH = 1e7
_HALVINGS = 60
_NODE_REFERENCES = frozenset({DONATED_TO, IN_PLACE, RETURNED})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Wanted size of a job. ``scale`` is its size relative to its source: nodes, FLOPs and communication.

    ``nodes`` is the mean number of nodes per rank, ``flops`` the sum over all ranks, and ``collective_bytes``
    the mean payload of collectives per rank. NaN: from ``scale``.
    """

    scale: float = 1.0
    nodes: float = nan
    flops: float = nan
    collective_bytes: float = nan


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Template:
    """Source of synthetic jobs. Each rank class has its operations (``tables``) and its repeated blocks
    (``runs``) whose number can change. ``layers`` is the number of layers of the model to which each run
    belongs. Runs with equal or neighbouring numbers of repeats change alike.
    """

    workload: Workload
    runs: tuple[tuple[Run, ...], ...]
    layers: tuple[tuple[int, ...], ...]
    tables: tuple[OperationTable, ...]

    @classmethod
    def of(cls, workload: Workload, diagnostics: Diagnostics) -> Template:
        """Return the template of a workload. Its loops are unrolled. Raises ``FormatError`` for a cycle."""
        unroll = UnrollLoops(unknown_trips=1)
        own = replace(workload, classes=tuple(unroll(graph, diagnostics) for graph in workload.classes))
        own = hide_names(own, Key(b"hespas template of a job"), Diagnostics())
        classes = tuple(
            plain_graph(graph, original.name)
            for graph, original in zip(own.classes, workload.classes, strict=True)
        )
        own = replace(own, classes=classes)
        codes = [signatures(graph) for graph in classes]
        numbers = dict[bytes, int]()
        alike = [numbers.setdefault(code.tobytes(), len(numbers)) for code in codes]
        foreign = shared_group_sets(own, alike)
        runs = [
            tuple(changeable_runs(graph, code, groups))
            for graph, code, groups in zip(classes, codes, foreign, strict=True)
        ]
        layers, last = dict[int, int](), -1  # number of repeats -> the largest one of its chain of neighbours
        for number in sorted({run.repeats for row in runs for run in row}, reverse=True):
            layers[number] = layers[last] if last - number == 1 else number
            last = number
        tables = (OperationTable.of(*row) for row in zip(classes, codes, runs, strict=True))
        return cls(
            workload=own,
            runs=tuple(runs),
            layers=tuple(tuple(layers[run.repeats] for run in row) for row in runs),
            tables=tuple(tables),
        )

    @property
    def nodes(self) -> float:
        """Mean number of nodes per rank."""
        return float(np.average([len(graph) for graph in self.workload.classes], weights=self._ranks))

    @property
    def flops(self) -> float:
        """Known FLOPs of a step of all ranks."""
        return total_flops(self.workload)

    @property
    def collective_bytes(self) -> float:
        """Mean payload of the collectives of a rank in a step."""
        return total_payload(self.workload) / self.workload.num_ranks

    @property
    def _ranks(self) -> IntArray:
        return np.array(self.workload.class_sizes, np.int64)

    def repeats(self, of_layers: dict[int, int]) -> list[list[int]]:
        """Return the new numbers of repeats of the runs of each class, from the new numbers of layers."""
        return [
            [
                max(run.repeats + of_layers[layers] - layers, _FEWEST_REPEATS)
                for run, layers in zip(runs, row, strict=True)
            ]
            for runs, row in zip(self.runs, self.layers, strict=True)
        ]

    def nodes_with(self, of_layers: dict[int, int]) -> float:
        """Return the mean number of nodes per rank with other numbers of layers."""
        counts = [
            len(graph) + sum((new - run.repeats) * run.period for run, new in zip(runs, row, strict=True))
            for graph, runs, row in zip(
                self.workload.classes, self.runs, self.repeats(of_layers), strict=True
            )
        ]
        return float(np.average(counts, weights=self._ranks))


def templates_of(workloads: Sequence[Workload], diagnostics: Diagnostics) -> tuple[Template, ...]:
    """Return the templates of workloads. Workloads without repeated layers are reported."""
    templates = tuple(Template.of(workload, diagnostics) for workload in workloads)
    for workload, template in zip(workloads, templates, strict=True):
        if not any(template.runs):
            message = "no repeated layers were found whose number can change; only costs change"
            diagnostics.warning("synth.no-layers", workload.name, message)
    return templates


def plain_graph(graph: OpGraph, name: str) -> OpGraph:
    """Return a graph in topological order, whose texts are names of public operators and numbers."""
    order = topological_order(graph)
    if len(order) < len(graph):
        nodes = ", ".join(map(str, find_cycle(graph)[:8]))
        raise FormatError(
            f"the dependencies of nodes {nodes} form a cycle", path=name, hint="hespas-validate check"
        )
    if (order != np.arange(len(graph))).any():
        number = np.empty(len(graph), np.int64)
        number[order] = np.arange(len(graph))
        data, control = (deps.take(order) for deps in (graph.data_deps, graph.control_deps))
        data, control = (
            replace(deps, values=number[deps.values].astype(np.int32)) for deps in (data, control)
        )
        graph = take_nodes(graph, order, data, control)
    copies = runtime_copies(graph)
    if not len(graph.regions) or (graph.executions == 1).all():
        graph = replace(graph, region=np.full(len(graph), -1, np.int32), regions=RegionTable.empty())
    table = graph.extra
    keys: list[int] = table.key.tolist()
    extra = ExtraTable.from_rows(
        [
            (int(table.node[row]), key, int(table.tag[row]), table.value(row))
            for row, key in enumerate(keys)
            if graph.strings[key] not in _NODE_REFERENCES
        ]
    )
    texts = list(graph.strings)
    renamed = dict[str, str]()
    for row, text in enumerate(texts):
        if Key.is_token(text):
            texts[row] = renamed.setdefault(text, f"custom_{len(renamed)}")
    first = len(texts)
    texts += ["Memcpy", *(f"op_{node}" for node in range(len(graph)))]
    named = first + 1 + np.arange(len(graph))
    return replace(
        graph,
        name="graph",
        name_id=np.where(copies, first, named).astype(np.int32),
        source_id=np.broadcast_to(np.int32(0), len(graph)),
        framework_id=np.broadcast_to(np.int32(0), len(graph)),
        strings=StringTable.from_strings(texts),
        extra=extra,
        attachments={},
    )


def total_flops(workload: Workload) -> float:
    """Return the known FLOPs of a step of all ranks."""
    pairs = zip(workload.classes, workload.class_sizes, strict=True)
    return float(sum(np.nansum(graph.flops * graph.executions) * ranks for graph, ranks in pairs))


def total_payload(workload: Workload) -> float:
    """Return the payload of all collectives of a step on all ranks."""
    total = 0.0
    for graph, ranks in zip(workload.classes, workload.class_sizes, strict=True):
        times = graph.executions[graph.collectives.node]
        total += float(np.nansum(graph.collectives.comm_bytes * times)) * ranks
    return total


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TemplateJob:
    """Generator of synthetic job ``number`` of a set. Equal settings make equal jobs.

    Its numbers of layers are drawn, or follow from the wanted number of nodes. The cost of each operation
    moves towards the cost of an operation of the same kind in ``samples``; sums are kept. ``cost_scale``
    multiplies all costs in addition, for a wanted step time.
    """

    template: Template
    samples: CostSamples
    seed: int = 0
    number: int = 0
    size: JobSize = JobSize()
    cost_scale: float = 1.0

    @property
    def name(self) -> str:
        """Name of the job."""
        return f"job_{self.number:03d}"

    @property
    def growth_of_nodes(self) -> float:
        """Wanted number of nodes relative to the source."""
        return self.size.scale if isnan(self.size.nodes) else self.size.nodes / self.template.nodes

    @property
    def growth_of_costs(self) -> float:
        """FLOPs and traffic relative to the source, without ``cost_scale``."""
        return self._sizes(self._key)[0] / self.cost_scale

    @property
    def growth_of_payload(self) -> float:
        """Payloads of collectives relative to the source, without ``cost_scale``."""
        return self._sizes(self._key)[1] / self.cost_scale

    @property
    def _key(self) -> Key:
        return Key(f"hespas synthesis {self.seed} {self.number}".encode())

    def account(self) -> Account:
        """Return the FLOPs of the job."""
        return Account(hardware_flops_per_step=total_flops(self.workload()))

    def workload(self) -> Workload:
        """Make the job. O(nodes)."""
        key, source = self._key, self.template.workload
        compute, payload = self._sizes(key)
        of_layers = self.new_layers()
        repeats = self.template.repeats(of_layers)
        factors = self._cost_factors(key)
        shares = [
            run.repeats / new
            for runs, row in zip(self.template.runs, repeats, strict=True)
            for run, new in zip(runs, row, strict=True)
        ]
        extent_scale = (compute * min(shares, default=1.0)) ** 0.5
        classes = list[OpGraph]()
        for index, graph in enumerate(source.classes):
            runs, table = self.template.runs[index], self.template.tables[index]
            factor = factors[index] * np.where(table.communicates, payload, compute)
            for run, new in zip(runs, repeats[index], strict=True):
                factor[run.start : run.start + run.period * run.repeats] *= run.repeats / new
            grown, rows = with_repeats(graph, runs, repeats[index])
            classes.append(with_costs(grown, key, factor[rows], extent_scale))
        job = replace(source, name=self.name, classes=tuple(classes))
        flops = total_flops(job)
        ratio = compute * self.template.flops / flops if flops > 0 else 1.0
        for index, graph in enumerate(classes):
            products = graph.contractions
            classes[index] = replace(
                graph,
                flops=graph.flops * ratio,
                useful_flops=graph.useful_flops * ratio,
                contractions=replace(
                    products, flops=products.flops * ratio, useful_flops=products.useful_flops * ratio
                ),
            )
        metadata = dict(source.metadata)
        facts = step_facts(metadata)
        if facts is not None:
            model_flops = facts.model_flops * compute
            metadata[STEP_FACTS] = replace(facts, tokens=nan, model_flops=model_flops).text()
        if PROGRAM_BYTES in metadata:
            metadata[PROGRAM_BYTES] = ";".join(
                " ".join(f"{float(number) * compute:.0f}" for number in text.split())
                for text in metadata[PROGRAM_BYTES].split(";")
            )
        return replace(job, classes=tuple(classes), metadata=metadata)

    def _sizes(self, key: Key) -> tuple[float, float]:
        """Return the costs of computation, and of communication, relative to the source."""
        spread = exp(_SPREAD * (2.0 * key.uniform("size") - 1.0))
        compute = payload = self.growth_of_nodes * spread
        if not isnan(self.size.flops) and self.template.flops > 0:
            compute = self.size.flops / self.template.flops
        if not isnan(self.size.collective_bytes) and self.template.collective_bytes > 0:
            payload = self.size.collective_bytes / self.template.collective_bytes
        return compute * self.cost_scale, payload * self.cost_scale

    def new_layers(self) -> dict[int, int]:
        """Return the new number of layers for each number of layers of the source."""
        key = self._key
        distinct = sorted({layers for row in self.template.layers for layers in row})
        wanted = self.growth_of_nodes * self.template.nodes
        if isnan(self.size.nodes):
            wanted *= exp(_SPREAD_OF_NODES * (2.0 * key.uniform("nodes") - 1.0))
        shares = [exp(0.2 * (2.0 * key.uniform(f"layers {layers}") - 1.0)) for layers in distinct]
        if len(distinct) == 1:
            shares = [1.0]

        def layers_at(growth: float) -> dict[int, int]:
            return {
                layers: max(round(layers * share * growth), _FEWEST_REPEATS)
                for layers, share in zip(distinct, shares, strict=True)
            }

        low, high = 0.0, _MOST_GROWTH
        for _ in range(_HALVINGS if distinct else 0):
            middle = (low + high) / 2.0
            low, high = (
                (middle, high) if self.template.nodes_with(layers_at(middle)) < wanted else (low, middle)
            )
        below, above = layers_at(low), layers_at(high)
        gaps = [abs(self.template.nodes_with(layers) - wanted) for layers in (below, above)]
        chosen = below if gaps[0] < gaps[1] else above
        if distinct and all(layers == new for layers, new in chosen.items()):  # not a copy of the source
            step = 1 if key.uniform("direction") < 0.5 or distinct[0] <= _FEWEST_REPEATS else -1
            chosen = {layers: layers + step for layers in distinct}
        return chosen

    def _cost_factors(self, key: Key) -> list[FloatArray]:
        """Return the factor by which the cost of each node of the source changes. Sums are kept: of each part
        of a rank class, and over all ranks of each kind of collective.
        """
        drawn = dict[str, float]()
        factors, kinds = list[FloatArray](), list[IntArray]()
        before, after = list[float](), list[float]()
        number_of = dict[str, int]()
        for index, (table, ranks) in enumerate(
            zip(self.template.tables, self.template.workload.class_sizes, strict=True)
        ):
            for operation in table.operations:
                if operation.text not in drawn:
                    drawn[operation.text] = self.samples.factor(operation, key)
            factor = np.array([drawn[operation.text] for operation in table.operations])[table.index]
            sorts = [number_of.setdefault(operation.sort, len(number_of)) for operation in table.operations]
            parts = [
                number_of.setdefault(f"part {index} {part}", len(number_of))
                for part in range(int(table.part.max(initial=0)) + 1)
            ]
            kind = np.where(table.communicates, np.array(sorts)[table.index], np.array(parts)[table.part])
            for sums, weight in ((before, table.weight), (after, table.weight * factor)):
                sums.extend([0.0] * (len(number_of) - len(sums)))
                for number, total in enumerate(np.bincount(kind, weight * ranks, len(number_of)).tolist()):
                    sums[number] += total
            factors.append(factor)
            kinds.append(kind)
        old, new = np.array(before), np.array(after)
        scale = np.divide(old, new, out=np.ones(len(old)), where=new > 0)
        return [factor * scale[kind] for factor, kind in zip(factors, kinds, strict=True)]
