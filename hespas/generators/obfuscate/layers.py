"""Change of the number of repeated layers, and of the distribution of costs over the operations of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hespas.generators.obfuscate.keys import Key
from hespas.graph import Diagnostics, NodeKind, OpClass, OpGraph, TensorTypesBuilder, Workload
from hespas.graph.columns import FloatArray, IntArray, RaggedArray
from hespas.graph.opgraph import ContractionTable
from hespas.graph.passes import regions_between_communications, take_nodes, topological_order

__all__ = [
    "Run",
    "change_layers",
    "changeable_runs",
    "repeated_runs",
    "scaled_costs",
    "shared_group_sets",
    "signatures",
]

_FEWEST_REPEATS = 3
_LONGEST_PERIOD = 4096
_CANDIDATES = 24
"""Number of periods that are tried, the most frequent distances between equal nodes first."""
_SPREAD, _SPREAD_OF_SIZES = 0.4, 0.5
"""Half width of the logarithm of the factors by which costs of computation, and sizes of communication,
change.
"""
_SPREAD_OF_SUMS = 0.02
"""Half width of the logarithm of the factors by which the sums of computation, collectives and messages
change.
"""
_FEWEST_KEPT, _MOST_KEPT = 0.35, 0.95
"""Share of the repeats of a layer that are kept; the key chooses it within these limits."""


@dataclass(frozen=True, slots=True)
class Run:
    """Nodes ``start`` to ``start + period * repeats`` that repeat the same ``period`` nodes."""

    start: int
    period: int
    repeats: int


def signatures(graph: OpGraph) -> IntArray:
    """Return for each node a number that is equal for nodes with equal kind, class, costs, sizes and groups.

    Durations are not compared, because recorded ones differ from layer to layer.
    """
    columns: list[FloatArray | IntArray] = [
        graph.kind.astype(np.int64),
        graph.op_class.astype(np.int64),
        graph.stream.astype(np.int64),
        graph.flops,
        graph.bytes_read,
        graph.bytes_written,
    ]
    for table, names in ((graph.collectives, ("kind", "group_set", "comm_bytes")), (graph.p2p, ("tag",))):
        for name in names:
            column = np.full(len(graph), -1.0)
            column[table.node] = getattr(table, name)
            columns.append(column)
    index = np.zeros(len(graph), np.int64)
    for column in columns:
        values = np.unique(column, return_inverse=True)[1].reshape(-1)
        index = np.unique(index * (int(values.max(initial=0)) + 1) + values, return_inverse=True)[1]
    return index.reshape(-1).astype(np.int64)


def repeated_runs(codes: IntArray) -> list[Run]:
    """Return the runs of at least three equal blocks in a sequence of node signatures, in order, without
    overlap. Of several periods, the shortest one counts. O(nodes x candidate periods).
    """
    previous = dict[int, int]()
    distances = dict[int, int]()
    for position, code in enumerate(codes.tolist()):
        if code in previous:
            distance = position - previous[code]
            distances[distance] = distances.get(distance, 0) + 1
        previous[code] = position
    likely = sorted(distances, key=lambda distance: -distances[distance] * distance)[:_CANDIDATES]
    used = np.zeros(len(codes), np.bool_)
    runs = list[Run]()
    for period in sorted(period for period in likely if 1 < period <= _LONGEST_PERIOD):
        same = np.zeros(len(codes) + 1, np.bool_)
        same[: len(codes) - period] = codes[period:] == codes[:-period]
        edges = np.flatnonzero(np.diff(same, prepend=False))
        for start, end in pairwise(edges.tolist()):
            repeats = (end - start) // period + 1
            last = start + repeats * period
            if not same[start] or repeats < _FEWEST_REPEATS or used[start:last].any():
                continue
            runs.append(Run(start, period, repeats))
            used[start:last] = True
    return sorted(runs, key=lambda run: run.start)


def change_layers(
    workload: Workload, key: Key, diagnostics: Diagnostics, *, keeps_layers: bool = False
) -> Workload:
    """Return a workload with fewer repeats of its layers, and with costs moved between operations.

    First, all computations between two communications get equal costs, if they have durations. Of every run
    of equal layers, a share that the key determines is kept, and the remaining ones take over the costs of
    the others. Costs of operations then change by factors between 0.7 and 1.5; their sums per layer and kind
    of operation, and per kind of collective, change by at most 2 %. All ranks change alike, so collectives
    still match. Layers with messages, and with collectives whose ranks run different programs, are not
    changed. With ``keeps_layers``, no repeat is removed.
    """
    classes = tuple(_levelled(graph, diagnostics) for graph in workload.classes)
    codes = [signatures(graph) for graph in classes]
    numbers = dict[bytes, int]()
    alike = [numbers.setdefault(code.tobytes(), len(numbers)) for code in codes]
    shared = shared_group_sets(replace(workload, classes=classes), alike)
    changed, removed = list[OpGraph](), 0
    for graph, code, foreign in zip(classes, codes, shared, strict=True):
        fewer = graph if keeps_layers else _with_fewer_repeats(graph, code, foreign, key)
        removed += len(graph) - len(fewer)
        changed.append(fewer)
    if removed:
        message = "operations of repeated layers removed"
        diagnostics.info("obfuscate.layers", workload.name, message, count=removed)
    elif not keeps_layers:
        diagnostics.warning(
            "obfuscate.layers",
            workload.name,
            "no repeated layers were found whose number can change; the number of layers may be visible",
        )
    return _with_moved_costs(replace(workload, classes=tuple(changed)), key)


def _levelled(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    """Return a graph in which all computations between two communications have equal costs and times, and no
    names, classes, types and extents; the graph itself, with a warning, if a computation has no duration.

    The number of operations stays, because each of them is launched, which takes time on the host.
    """
    compute = graph.kind == int(NodeKind.COMPUTE)
    untimed = compute & np.isnan(graph.duration_ns)
    if untimed.any():
        diagnostics.warning(
            "obfuscate.untimed",
            graph.name,
            "operations without a duration keep their costs and classes, so their sequence stays visible; "
            "estimate durations with `hardware`",
            count=int(untimed.sum()),
        )
        return graph
    region = regions_between_communications(graph)
    members = np.bincount(region, minlength=len(graph))

    def mean(column: FloatArray) -> FloatArray:
        return (np.bincount(region, column, minlength=len(graph)) / np.maximum(members, 1))[region]

    plain = compute & ~np.isin(graph.op_class, [int(OpClass.FREE), int(OpClass.HOST)])
    return replace(
        graph,
        op_id=np.where(plain | ~compute, 0, graph.op_id).astype(np.int32),
        op_class=np.where(plain, np.uint8(OpClass.UNKNOWN), graph.op_class).astype(np.uint8),
        flops=mean(graph.flops),
        useful_flops=mean(graph.useful_flops),
        transcendentals=mean(graph.transcendentals),
        bytes_read=mean(graph.bytes_read),
        bytes_written=mean(graph.bytes_written),
        duration_ns=mean(graph.duration_ns),
        operands=RaggedArray.empty(len(graph)),
        results=RaggedArray.empty(len(graph)),
        types=TensorTypesBuilder().build(),
        contractions=ContractionTable.empty(),
    )


_PRODUCTS = (int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION), int(OpClass.ATTENTION))


def shared_group_sets(workload: Workload, alike: list[int]) -> list[set[int]]:
    """Return for each class the group sets in which its ranks meet ranks of classes of another structure."""
    if len(set(alike)) == 1:
        return [set() for _ in alike]
    structure = np.array([*alike, -1], np.int64)[workload.rank_class]
    result = list[set[int]]()
    for number, graph in enumerate(workload.classes):
        foreign = set[int]()
        ranks = workload.ranks_of(number)
        for row, groups in enumerate(graph.group_sets):
            for group in np.unique(groups.groups_of(ranks)).tolist():
                members = np.asarray(groups.members(group)) if group >= 0 else np.empty(0, np.int64)
                members = members[members < workload.num_ranks]
                if (structure[members] != alike[number]).any():
                    foreign.add(row)
                    break
        foreign.add(-1)  # all ranks
        result.append(foreign)
    return result


def changeable_runs(graph: OpGraph, codes: IntArray, foreign: set[int]) -> list[Run]:
    """Return the runs whose number of repeats can change without a change of other ranks: those without
    messages, and without collectives in the group sets ``foreign``.
    """
    fixed = np.zeros(len(graph), np.bool_)
    fixed[graph.p2p.node] = True
    table = graph.collectives
    fixed[table.node[np.isin(table.group_set, list(foreign))]] = True
    return [
        run
        for run in repeated_runs(codes)
        if not fixed[run.start : run.start + run.period * run.repeats].any()
    ]


def _with_fewer_repeats(graph: OpGraph, codes: IntArray, foreign: set[int], key: Key) -> OpGraph:
    replacement = np.arange(len(graph))
    factor = np.ones(len(graph))
    for run in changeable_runs(graph, codes, foreign):
        nodes = run.start + np.arange(run.period * run.repeats)
        share = _FEWEST_KEPT + (_MOST_KEPT - _FEWEST_KEPT) * key.uniform(f"layers {run.repeats}")
        repeats = max(2, min(round(run.repeats * share), run.repeats - 1))
        last = run.start + (repeats - 1) * run.period
        dropped = nodes[repeats * run.period :]
        replacement[dropped] = last + (dropped - run.start) % run.period
        factor[nodes] = run.repeats / repeats
    keep = replacement == np.arange(len(graph))
    if keep.all():
        return graph
    rows, number = np.flatnonzero(keep), np.cumsum(keep) - 1
    position = np.empty(len(graph), np.int64)
    position[topological_order(graph)] = np.arange(len(graph))

    def renumbered(deps: RaggedArray) -> RaggedArray:
        """Return the dependencies of kept nodes; those on a dropped node become ones on its replacement."""
        consumer, producer = deps.row_ids, replacement[deps.values]
        good = keep[consumer] & (position[producer] < position[consumer])
        pairs = np.stack([number[consumer[good]], number[producer[good]]], axis=1)
        first = np.sort(np.unique(pairs, axis=0, return_index=True)[1])
        return RaggedArray.from_pairs(pairs[first, 0], pairs[first, 1], len(rows))

    fewer = take_nodes(graph, rows, renumbered(graph.data_deps), renumbered(graph.control_deps))
    return scaled_costs(fewer, factor[keep])


def scaled_costs(graph: OpGraph, factor: FloatArray) -> OpGraph:
    """Return the graph with all costs of each node multiplied by a factor, shape ``(nodes,)``."""
    collectives, p2p, contractions = graph.collectives, graph.p2p, graph.contractions
    rows = factor[contractions.node]
    return replace(
        graph,
        flops=graph.flops * factor,
        useful_flops=graph.useful_flops * factor,
        transcendentals=graph.transcendentals * factor,
        bytes_read=graph.bytes_read * factor,
        bytes_written=graph.bytes_written * factor,
        duration_ns=graph.duration_ns * factor,
        collectives=replace(
            collectives,
            comm_bytes=collectives.comm_bytes * factor[collectives.node],
            operand_bytes=collectives.operand_bytes * factor[collectives.node],
            result_bytes=collectives.result_bytes * factor[collectives.node],
        ),
        p2p=replace(p2p, comm_bytes=p2p.comm_bytes * factor[p2p.node]),
        contractions=replace(
            contractions,
            m=np.maximum(np.rint(contractions.m * rows), 1).astype(np.int64),
            flops=contractions.flops * rows,
            useful_flops=contractions.useful_flops * rows,
        ),
    )


def _with_moved_costs(workload: Workload, key: Key) -> Workload:
    """Return a workload in which equal operations get an equal random factor, and sums change by at most 2 %:
    per layer of computation in each rank class, and per kind and groups of collectives over all ranks.
    """
    factors, weights, kinds = list[FloatArray](), list[FloatArray](), list[list[str]]()
    for graph, ranks in zip(workload.classes, workload.class_sizes, strict=True):
        texts, kind, weight = _described(graph)
        of_text = dict[str, float]()
        for text in set(texts):
            spread = _SPREAD if text.startswith("compute") else _SPREAD_OF_SIZES
            of_text[text] = float(np.exp(spread * (2.0 * key.uniform(text) - 1.0)))
        factors.append(np.array([of_text[text] for text in texts]))
        weights.append(weight * max(ranks, 1))
        kinds.append(kind)
    before, after = dict[str, float](), dict[str, float]()
    for factor, weight, kind in zip(factors, weights, kinds, strict=True):
        for name, old, new in zip(kind, weight.tolist(), (weight * factor).tolist(), strict=True):
            before[name] = before.get(name, 0.0) + old
            after[name] = after.get(name, 0.0) + new
    scale = dict[str, float]()
    for name, total in before.items():
        noise = np.exp(_SPREAD_OF_SUMS * (2.0 * key.uniform("sum of " + name.partition(" ")[0]) - 1.0))
        scale[name] = float(noise) * (total / after[name] if after[name] else 1.0)
    classes = tuple(
        scaled_costs(graph, factor * np.array([scale[name] for name in kind]))
        for graph, factor, kind in zip(workload.classes, factors, kinds, strict=True)
    )
    return replace(workload, classes=classes)


def _described(graph: OpGraph) -> tuple[list[str], list[str], FloatArray]:
    """Return for each node a text that is equal for equal operations on all ranks, the kind of node over
    which a sum is kept, and the node's share in it.
    """
    count = len(graph)
    sizes = np.zeros(count)
    sizes[graph.collectives.node] = graph.collectives.comm_bytes
    sizes[graph.p2p.node] = graph.p2p.comm_bytes
    collective = np.full(count, -1, np.int64)
    collective[graph.collectives.node] = graph.collectives.kind
    members = np.zeros(count, np.int64)
    widths = [len(np.asarray(groups.members(0))) if groups.num_groups else 0 for groups in graph.group_sets]
    members[graph.collectives.node] = np.array([*widths, 0])[graph.collectives.group_set]
    times = np.where(graph.executions > 0, graph.executions, 1.0)
    is_product = np.isin(graph.op_class, _PRODUCTS)
    work = np.where(is_product, graph.flops, graph.bytes_moved)
    work = np.where(np.isnan(graph.duration_ns), work, graph.duration_ns)
    communicates = (collective >= 0) | (sizes > 0)
    weight = np.nan_to_num(np.where(communicates, sizes, work)) * times
    codes = signatures(graph)
    layer, blocks = np.zeros(count, np.int64), dict[bytes, int]()
    for run in repeated_runs(codes):
        block = codes[run.start : run.start + run.period].tobytes()
        layer[run.start : run.start + run.period * run.repeats] = 1 + blocks.setdefault(block, len(blocks))
    texts, kinds = list[str](), list[str]()
    rows = zip(
        layer.tolist(),
        graph.kind.tolist(),
        graph.op_class.tolist(),
        collective.tolist(),
        members.tolist(),
        sizes.tolist(),
        graph.flops.tolist(),
        graph.bytes_moved.tolist(),
        communicates.tolist(),
        is_product.tolist(),
        strict=True,
    )
    for block, kind, op_class, shape, width, size, flops, moved, communicating, product in rows:
        if communicating:
            texts.append(f"{shape} {width} {size}" if shape >= 0 else f"message {size}")
            kinds.append(f"collective {shape} {width}" if shape >= 0 else "message")
        else:
            texts.append(f"compute {kind} {op_class} {flops} {moved}")
            kinds.append(f"compute {id(graph)} {product} {block}")
    return texts, kinds, weight
