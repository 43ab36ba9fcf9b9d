"""A graph as a StableHLO program that does the same work in the same order: a replay, not the program.

Every node becomes operations on tensors of its types; what a node waits for flows into its operands
(:mod:`.replay_emit`), FLOPs are made up to what the graph says (:mod:`.replay_recipes`), and results that
nothing uses are results of ``@main``. The graph is flat. All ranks run the program as replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from math import isnan

import numpy as np

from hespas.converters.stablehlo.replay_collectives import (
    SUBSTITUTES,
    Groups,
    Link,
    applied_reduction,
    collective,
    devices_for,
    pairs_of,
    payload_bytes,
    permute,
    ranks_of,
)
from hespas.converters.stablehlo.replay_emit import (
    F32,
    Binder,
    Contraction,
    Emitter,
    Node,
    TensorList,
    quoted_text,
    too_large,
)
from hespas.converters.stablehlo.replay_recipes import (
    MOST_PASSES,
    RECIPES,
    complete,
    convolution,
    fused_matmuls,
    made_from,
    passed_on,
    single_matmul,
    synthesised,
    unknown_work,
)
from hespas.costs.table import canonical_name
from hespas.files.streams import limits
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, OpGraph
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, HespasError
from hespas.graph.passes import all_deps, known_sum, topological_order
from hespas.programs.text import Tensor, Value

__all__ = ["Replayed", "compare", "replay"]

_VIEWS = {int(OpClass.FREE), int(OpClass.CONTROL)}
_NO_WORK = {NodeKind.METADATA, NodeKind.INVALID}
_LONGEST_ROW = 1 << 28
_LAST_CHANNEL = 2**63 - 1
_WHOLE = "the graph as a whole"


@dataclass(slots=True)
class Replayed:
    """The body of a replay, and what it does in another way: by code, examples with how many nodes each."""

    emitter: Emitter
    outputs: list[Value]
    num_ranks: int
    flops: float = 0.0
    changes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])

    def note(self, code: str, what: str = "") -> None:
        """Count a node of which something is not kept; ``what`` is an example."""
        self.changes.setdefault(code, Counter())[what] += 1


def replay(graph: OpGraph, num_ranks: int) -> Replayed:
    """Emit a flat graph for ``num_ranks`` replicas, or for as many as it names. O(nodes + edges).

    Raises ``FormatError`` for a cycle or groups that do not fit the job, ``UnsupportedError`` for a graph
    that is too large: before anything is emitted where its nodes and edges alone are too many.
    """
    _refuse_large(graph)
    order: list[int] = topological_order(graph).tolist()
    if len(order) < len(graph):
        first = min(set(range(len(graph))) - set(order))
        raise FormatError(
            f"{graph.name}: {len(graph) - len(order)} operations wait for each other in a circle",
            position=f"node {first} and those that wait for it",
            hint="`hespas-validate check` names them",
        )
    writer = _Writer(graph, num_ranks)
    for node in order:
        try:
            writer.emit(node)
        except HespasError as error:
            error.position = error.position or f"node {node}"
            raise
    return writer.finish()


def _refuse_large(graph: OpGraph) -> None:
    """Each node becomes an operation at least, each edge and type an operand of one."""
    most = limits()
    if len(graph) > most.replayed_operations:
        raise too_large(f"{len(graph):,} operations at least, more than {most.replayed_operations:,}", _WHOLE)
    tables = (graph.data_deps, graph.control_deps, graph.operands, graph.results)
    edges = sum(len(table.values) for table in tables)
    if edges > most.replayed_edges:
        raise too_large(f"{edges:,} operands at least, more than {most.replayed_edges:,}", _WHOLE)


class _Writer:
    """Emits node by node; keeps the values each made until the end."""

    def __init__(self, graph: OpGraph, num_ranks: int) -> None:
        self.graph = graph
        self.emitter = Emitter()
        self.binder = Binder(self.emitter)
        self.done = Replayed(self.emitter, [], devices_for(graph, num_ranks))
        self.types = TensorList(graph)
        self.deps = all_deps(graph).to_lists()
        self.operands, self.results = graph.operands.to_lists(), graph.results.to_lists()
        self.moved: list[float] = graph.bytes_moved.tolist()
        self.values: list[list[Value]] = [[] for _ in range(len(graph))]
        self.contractions = _contractions(graph)
        self.links: dict[int, int] = {node: row for row, node in enumerate(graph.collectives.node.tolist())}
        self.messages: dict[int, int] = {node: row for row, node in enumerate(graph.p2p.node.tolist())}
        self.groups: dict[int, Groups] = {}
        self.pairs: dict[int, str] = {}
        self.channels: set[int] = set()
        self.free_channels = _free_channels(graph.collectives.channel)
        self.sent: dict[tuple[int, float, int], list[tuple[NodeKind, list[Value]]]] = {}

    def emit(self, number: int) -> None:
        """One node, its producers emitted before."""
        emitter = self.emitter
        emitter.location = self._location(number)
        before = (emitter.flops, emitter.transcendentals)
        node = self._node(number)
        kind = NodeKind(int(self.graph.kind[number]))
        if number in self.links:
            made = self._collective(node, self.links[number])
        elif number in self.messages:
            made = self._message(node, self.messages[number], kind)
        else:
            made = self._computation(node, kind, number)
            spent = (emitter.flops - before[0], emitter.transcendentals - before[1])
            made = complete(node, made, *spent)
        self.binder.whole.difference_update(value.name for value in made)
        self.values[number] = made

    def finish(self) -> Replayed:
        """The whole, with what nothing uses as results."""
        whole = self.binder.whole
        loose = {value.name: value for made in self.values for value in made if value.name not in whole}
        self.done.outputs = list(loose.values())
        self.done.flops = self.emitter.flops
        self.done.changes["types"] = self.types.changed
        return self.done

    def _node(self, number: int) -> Node:
        graph = self.graph
        operands, results = self.types.of(self.operands[number]), self.types.of(self.results[number])
        flops, moved = float(graph.flops[number]), self.moved[number]
        if isnan(flops):
            self.done.note("unknown-flops")
        if not operands and not results and number not in self.links and number not in self.messages:
            operands = results = (_row(moved, flops),)
        producers = [self.values[dep] for dep in dict.fromkeys(self.deps[number])]
        return Node(
            op=canonical_name(graph.op_name(number)),
            operands=operands,
            results=results,
            producers=producers,
            contractions=self.contractions.get(number, ()),
            flops=flops,
            useful_flops=float(graph.useful_flops[number]),
            transcendentals=float(graph.transcendentals[number]),
            bytes_moved=moved,
            binder=self.binder,
        )

    def _location(self, number: int) -> str:
        graph = self.graph
        names = (graph.node_name(number), graph.strings[int(graph.framework_row[number])])
        place = ""
        for name in (names[1], names[0]):
            if name:
                place = f"{quoted_text(name)}({place})" if place else quoted_text(name)
        return f" loc({place})" if place else ""

    def _computation(self, node: Node, kind: NodeKind, number: int) -> list[Value]:
        recipe = RECIPES.get(node.op)
        made = recipe(node) if recipe else None
        if made is None and node.contractions:
            made = single_matmul(node) or convolution(node)
        if made is not None:
            return made
        if int(self.graph.op_class[number]) in _VIEWS or kind in _NO_WORK:
            return passed_on(node)
        self.done.note("synthesised", node.op or "operations without name")
        if isnan(node.flops):
            return unknown_work(node, self.graph.op_name(number))
        return fused_matmuls(node) or synthesised(node)

    def _collective(self, node: Node, row: int) -> list[Value]:
        table = self.graph.collectives
        kind = CollectiveKind(int(table.kind[row]))
        meant = SUBSTITUTES.get(kind, kind)
        group_set = int(table.group_set[row])
        groups = self._groups(group_set)
        reduction = self.graph.strings[int(table.reduction[row])]
        channel = self._channel(int(table.channel[row]), len(node.operands))
        link = Link(meant, groups, float(table.comm_bytes[row]), channel, reduction)
        if not groups.even and meant not in {CollectiveKind.ALL_REDUCE, CollectiveKind.BARRIER}:
            self.done.note("substituted", f"{kind.name.lower()} of unequal groups as all_reduce")
        elif kind is not meant:
            self.done.note("substituted", f"{kind.name.lower()} as {meant.name.lower()}")
        made = collective(node, link)
        self._note_bytes(kind.name.lower(), link.comm_bytes, payload_bytes(link, made))
        changed = applied_reduction(link, made)
        if changed:
            self.done.note("reduction", changed)
        return _viewed(node, made)

    def _note_bytes(self, what: str, stated: float, made: float) -> None:
        """Note a payload that is not the one stated."""
        if made != stated:
            before = "unknown" if isnan(stated) else f"{stated:,.15g} B"
            self.done.note("comm-bytes", f"{what} of {before} as {made:,.15g} B")

    def _groups(self, row: int) -> Groups:
        """A group set in the program's words, spelled out once."""
        if row not in self.groups:
            stated = self.graph.group_sets[row] if row >= 0 else None
            try:
                self.groups[row] = ranks_of(stated, self.done.num_ranks, self.emitter)
            except ValueError as error:
                hint = "`hespas-validate check` names the operations"
                raise FormatError(f"{self.graph.name}: {error}", hint=hint) from None
        return self.groups[row]

    def _channel(self, stated: int, operands: int) -> int:
        """A channel of its own: where replicas share one, XLA takes all its collectives for the same. None
        with several operands, which XLA then cannot lay out.
        """
        if stated <= 0:
            return -1
        if operands == 1 and stated not in self.channels:
            self.channels.add(stated)
            return stated
        self.done.note("channels")
        return next(self.free_channels) if operands == 1 else -1

    def _message(self, node: Node, row: int, kind: NodeKind) -> list[Value]:
        """A permute; of a send and a receive of one message the first is the permute, the second waits."""
        table = self.graph.p2p
        number = int(table.permutation[row])
        if number < 0:
            self.done.note("unknown-peer")
            own = node.operands or node.results or (_row(2 * float(table.comm_bytes[row]), 0.0),)
            return synthesised(node._replace(operands=own, results=node.results or own))
        key = (number, float(table.comm_bytes[row]), int(table.tag[row]))
        waiting = self.sent.setdefault(key, [])
        if kind is not NodeKind.PERMUTE and waiting and waiting[0][0] is not kind:
            _, sent = waiting.pop(0)
            if kind is NodeKind.SEND:
                self.done.note("message-order")
            return passed_on(node._replace(producers=[sent, *node.producers]))
        if number not in self.pairs:
            self.pairs[number] = pairs_of(self.graph.permutations[number], self.emitter)
        made = permute(node, self.pairs[number], key[1])
        self._note_bytes("message", key[1], float(made[0].type.size_bytes))
        if kind is not NodeKind.PERMUTE:
            waiting.append((kind, made))
        return _viewed(node, made)


def _viewed(node: Node, made: list[Value]) -> list[Value]:
    """What was made, behind views of it in the types the node states where these are others."""
    if [each.type for each in made] == list(node.results):
        return made
    return [*made_from(node, made, node.results, copies=False), *made]


def _free_channels(stated: IntArray) -> Iterator[int]:
    """Channels that no collective states: past the largest, and from 1 on where a program has none there."""
    taken = set(stated.tolist())
    past = range(max(taken, default=0) + 1, _LAST_CHANNEL + 1)
    return (channel for channel in chain(past, count(1)) if channel > 0 and channel not in taken)


def _contractions(graph: OpGraph) -> dict[int, tuple[Contraction, ...]]:
    table = graph.contractions
    columns = (table.batch, table.m, table.n, table.k, table.lhs, table.rhs)
    found: dict[int, tuple[Contraction, ...]] = {}
    for node, *values in zip(table.node.tolist(), *(column.tolist() for column in columns), strict=True):
        found[node] = (*found.get(node, ()), Contraction(*values))
    return found


def _row(moved: float, flops: float) -> Tensor:
    """What a node without types works on: it reads and writes as many bytes as the graph says. One number
    where a matrix product will, since there is more work than elements.
    """
    each = 0.0 if isnan(moved) else moved / (2 * F32.storage_bytes(1))
    is_product = flops > MOST_PASSES * each
    return Tensor(F32, (1 if is_product else int(min(max(each, 1.0), _LONGEST_ROW)),))


# Whether a replay is as much work as its graph: its file is read again and compared.

_FLOPS_TOLERANCE = 0.01
_BYTES_TOLERANCE = 0.01


def compare(flat: OpGraph, replayed: Replayed, written: OpGraph, diagnostics: Diagnostics) -> None:
    """Report where ``written``, the graph of a replay, noticeably is more or less work than ``flat``."""
    stated = np.where(np.isnan(flat.useful_flops), flat.flops, flat.useful_flops)
    wanted = known_sum(stated)
    if not abs(replayed.flops - wanted) <= _FLOPS_TOLERANCE * wanted and (replayed.flops or wanted > 0):
        message = (
            f"replays in which XLA counts {replayed.flops:,.0f} FLOPs where the graph says {_sum(stated)}: "
            "sums of all-reduce count there, and so does what ties operations together"
        )
        diagnostics.warning("stablehlo.replay-flops", flat.name, message)
    else:
        _compare_specified(flat, written, diagnostics)
    _compare_bytes(flat, written, diagnostics)


def _compare_specified(flat: OpGraph, written: OpGraph, diagnostics: Diagnostics) -> None:
    """FLOPs as the specification counts them, products with padding and holes among them."""
    before, after = (known_sum(np.array(graph.flops * graph.multiplicity)) for graph in (flat, written))
    if not before or abs(after - before) <= _FLOPS_TOLERANCE * before or np.isnan(after - before):
        return
    message = (
        f"replays of {after:,.0f} FLOPs by the specification where the graph says {before:,.0f}: "
        "convolutions are replayed without the products with padding and dilation holes"
    )
    diagnostics.warning("stablehlo.replay-flops", flat.name, message)


def _compare_bytes(flat: OpGraph, written: OpGraph, diagnostics: Diagnostics) -> None:
    before, after = _local_bytes(flat), _local_bytes(written)
    wanted, made = known_sum(before), known_sum(after)
    if np.isnan(wanted) or abs(made - wanted) <= _BYTES_TOLERANCE * wanted:
        return
    message = (
        f"replays that move {made:,.0f} bytes where the graph says {_sum(before)}: what ties operations "
        "together moves some, and others of the same types, or several, stand for an operation"
    )
    diagnostics.warning("stablehlo.replay-bytes", flat.name, message)


def _local_bytes(graph: OpGraph) -> FloatArray:
    """Bytes moved per step by operations other than collectives and messages, whose payloads are compared
    one by one.
    """
    moved = np.array(graph.bytes_moved * graph.multiplicity)
    moved[graph.collectives.node] = 0.0
    moved[graph.p2p.node] = 0.0
    return moved


def _sum(column: FloatArray) -> str:
    """What a graph says of one figure: an unknown sum is not zero."""
    unknown = int(np.isnan(column).sum())
    if unknown == len(column):
        return f"nothing of its {unknown:,} operations"
    beside = f", and nothing of {unknown:,} operations" if unknown else ""
    return f"{known_sum(column):,.0f}{beside}"
