"""Conversion of a graph to a StableHLO program that does the same work in the same order (a *replay*).

A replay is not the graph's original program. Every node becomes operations on tensors of its types. Its
dependencies become data dependencies of its operands (:mod:`.replay_emit`), and operations are added until
the FLOPs reach the graph's count (:mod:`.replay_recipes`). Values that nothing uses are results of ``@main``,
so that no compiler removes them. The graph has no loops. All ranks run the program as replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from math import isnan

import numpy as np

from hespas.converters.stablehlo import OPERAND_TYPES, RESULT_TYPES
from hespas.converters.stablehlo.replay_collectives import (
    SUBSTITUTES,
    ReplayCollective,
    ReplayGroups,
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
    MatmulShape,
    OperandBinder,
    ReplayEmitter,
    ReplayNode,
    ReplayTypes,
    quoted_text,
    too_large,
)
from hespas.converters.stablehlo.replay_recipes import (
    MOST_PASSES,
    RECIPES,
    WRITTEN_AS,
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
from hespas.files.limits import limits
from hespas.graph import (
    ACCUMULATOR_BITS,
    MAC_NOISE_SIGMA,
    CollectiveKind,
    Diagnostics,
    NodeKind,
    OpClass,
    OpGraph,
)
from hespas.graph.columns import FloatArray
from hespas.graph.errors import FormatError, HespasError
from hespas.graph.passes import all_deps, known_sum, topological_order
from hespas.graph.quantised import parse_quantised
from hespas.programs.text import Tensor, Value

__all__ = ["ProgramReplay", "compare", "replay"]

_VIEWS = {int(OpClass.FREE), int(OpClass.CONTROL)}
_NO_WORK = {NodeKind.METADATA, NodeKind.INVALID}
_LONGEST_ROW = 1 << 28
_LAST_CHANNEL = 2**63 - 1
_WHOLE_GRAPH = "the graph as a whole"


@dataclass(slots=True)
class ProgramReplay:
    """Body of a replay, a program that repeats the work of a graph, and its differences from the graph.
    ``kept_extra`` is the number of attributes of nodes that it states. ``changes`` maps the code of each kind
    of difference to examples with their number of nodes.
    """

    emitter: ReplayEmitter
    outputs: list[Value]
    num_ranks: int
    flops: float = 0.0
    kept_extra: int = 0
    changes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])

    def note(self, code: str, what: str = "") -> None:
        """Count a node with a property that the replay does not have. ``what`` describes an example."""
        self.changes.setdefault(code, Counter())[what] += 1


def replay(graph: OpGraph, num_ranks: int) -> ProgramReplay:
    """Convert a graph without loops to a program that repeats its work on ``num_ranks`` replicas, or on more
    if the graph refers to higher ranks. O(nodes + edges).

    Raises ``FormatError`` for a cycle or for groups that do not fit the job, and ``UnsupportedError`` for a
    graph that is too large. The numbers of nodes and edges are checked first.
    """
    most = limits()
    if len(graph) > most.replayed_operations:
        raise too_large(
            f"{len(graph):,} operations at least, more than {most.replayed_operations:,}", _WHOLE_GRAPH
        )
    tables = (graph.data_deps, graph.control_deps, graph.operands, graph.results)
    edges = sum(len(table.values) for table in tables)
    if edges > most.replayed_edges:
        raise too_large(f"{edges:,} operands at least, more than {most.replayed_edges:,}", _WHOLE_GRAPH)
    order: list[int] = topological_order(graph).tolist()
    if len(order) < len(graph):
        first = min(set(range(len(graph))) - set(order))
        raise FormatError(
            f"{graph.name or 'the graph'}: dependencies form a cycle, so that {len(graph) - len(order):,} "
            "operations never start",
            position=f"node {int(graph.id[first])}, which is in the cycle or depends on it",
            hint="run `hespas-validate check` to see the cycle",
        )
    writer = _ReplayWriter(graph, num_ranks)
    for node in order:
        try:
            writer.emit(node)
        except HespasError as error:
            error.position = error.position or f"node {node}"
            raise
    return writer.finish()


class _ReplayWriter:
    """Writer of a graph as a StableHLO program, node by node. The values of each node are stored for its
    users.
    """

    def __init__(self, graph: OpGraph, num_ranks: int) -> None:
        self.graph = graph
        self.emitter = ReplayEmitter()
        self.binder = OperandBinder(self.emitter)
        self.replay = ProgramReplay(self.emitter, [], devices_for(graph, num_ranks))
        self.types = ReplayTypes(graph)
        self.deps = all_deps(graph).to_lists()
        self.operands, self.results = graph.operands.to_lists(), graph.results.to_lists()
        self.moved: list[float] = graph.bytes_moved.tolist()
        self.values: list[list[Value]] = [[] for _ in range(len(graph))]
        table = graph.contractions
        columns = (table.batch, table.m, table.n, table.k, table.lhs, table.rhs)
        by_node: dict[int, tuple[MatmulShape, ...]] = {}
        for owner, *values in zip(table.node.tolist(), *(column.tolist() for column in columns), strict=True):
            by_node[owner] = (*by_node.get(owner, ()), MatmulShape(*values))
        self.contractions = by_node
        self.accumulators: dict[int, dict[str, str]] = defaultdict(dict)
        extra = graph.extra
        for row in np.flatnonzero(extra.node >= 0).tolist():
            key, owner = graph.strings[int(extra.key[row])], int(extra.node[row])
            if key in {ACCUMULATOR_BITS, MAC_NOISE_SIGMA} and owner in by_node:
                self.accumulators[owner][key] = bytes(extra.value(row)).decode("utf-8", "replace")
        self.links: dict[int, int] = {node: row for row, node in enumerate(graph.collectives.node.tolist())}
        self.messages: dict[int, int] = {node: row for row, node in enumerate(graph.p2p.node.tolist())}
        self.groups: dict[int, ReplayGroups] = {}
        self.pairs: dict[int, str] = {}
        self.channels: set[int] = set()
        taken = set(graph.collectives.channel.tolist())
        past = range(max(taken, default=0) + 1, _LAST_CHANNEL + 1)
        self.free_channels = (
            channel for channel in chain(past, count(1)) if channel > 0 and channel not in taken
        )
        self.sent: dict[tuple[int, float, int], list[tuple[NodeKind, list[Value]]]] = {}

    def emit(self, number: int) -> None:
        """Emit the operations of one node; the nodes that it depends on come first."""
        emitter = self.emitter
        graph = self.graph
        names = (graph.node_name(number), graph.strings[int(graph.framework_id[number])])
        location = ""
        for scope_name in (names[1], names[0]):
            if scope_name:
                location = f"{quoted_text(scope_name)}({location})" if location else quoted_text(scope_name)
        emitter.location = f" loc({location})" if location else ""
        before, first = (emitter.flops, emitter.transcendentals), len(emitter.lines)
        operands, results = self.types.of(self.operands[number]), self.types.of(self.results[number])
        flops, moved = float(graph.flops[number]), self.moved[number]
        if isnan(flops):
            self.replay.note("unknown-flops")
        if not operands and not results and number not in self.links and number not in self.messages:
            operands = results = (_row(moved, flops),)
        producers = [self.values[dep] for dep in dict.fromkeys(self.deps[number])]
        node = ReplayNode(
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
        kind = NodeKind(int(self.graph.kind[number]))
        if number in self.links:
            made = self._collective(node, self.links[number])
        elif number in self.messages:
            made = self._message(node, self.messages[number], kind)
        else:
            made = self._computation(node, kind, number)
        self._annotate(number, first, node.op, made)
        if number not in self.links and number not in self.messages:
            spent = (emitter.flops - before[0], emitter.transcendentals - before[1])
            made = complete(node, made, *spent)
        self.binder.whole.difference_update(value.name for value in made)
        self.values[number] = made

    def _annotate(self, number: int, first: int, op: str, made: Sequence[Value]) -> None:
        """State quantised types and accumulators, which a replay computes without, as attributes.

        They belong to the operation that stands for the node, among the lines from ``first`` on. If other
        operations replace it, the last one states the types of the results.
        """
        emitter, graph = self.emitter, self.graph
        attributes = {f"hespas.{key}": quoted_text(text) for key, text in self.accumulators[number].items()}
        for name, rows in ((OPERAND_TYPES, self.operands[number]), (RESULT_TYPES, self.results[number])):
            texts = [graph.strings[int(graph.types.encoding[row])] for row in rows]
            texts = ["" if parse_quantised(text) is None else text for text in texts]
            if any(texts):
                attributes[name] = f"[{', '.join(map(quoted_text, texts))}]"
        if not attributes:
            return
        line = emitter.find_line(first, WRITTEN_AS.get(op, op))
        if line >= 0:
            self.replay.kept_extra += len(self.accumulators[number])
        else:
            results = attributes.get(RESULT_TYPES, "")
            lost = self.operands[number] if OPERAND_TYPES in attributes else ()
            attributes = {RESULT_TYPES: results} if results else {}
            names = {value.name for value in made}
            own = (line for line in range(len(emitter.lines) - 1, first - 1, -1))
            line = next((line for line in own if emitter.lines[line].split(maxsplit=1)[0] in names), -1)
            if lost or (results and line < 0):
                self.replay.note("types", "quantised types of replaced operations")
        if line >= 0 and attributes:
            emitter.annotate(line, attributes)

    def finish(self) -> ProgramReplay:
        """Return the finished replay. Values with elements that no operation uses become results of the
        program, so that a compiler cannot remove their computation.
        """
        whole = self.binder.whole
        loose = {value.name: value for made in self.values for value in made if value.name not in whole}
        self.replay.outputs = list(loose.values())
        self.replay.flops = self.emitter.flops
        self.replay.changes.setdefault("types", Counter()).update(self.types.changed)
        return self.replay

    def _computation(self, node: ReplayNode, kind: NodeKind, number: int) -> list[Value]:
        recipe = RECIPES.get(node.op)
        made = recipe(node) if recipe else None
        if made is None and node.contractions:
            made = single_matmul(node) or convolution(node)
        if made is not None:
            return made
        if int(self.graph.op_class[number]) in _VIEWS or kind in _NO_WORK:
            return passed_on(node)
        self.replay.note("synthesised", node.op or "operations without name")
        if isnan(node.flops):
            return unknown_work(node, self.graph.op_name(number))
        return fused_matmuls(node) or synthesised(node)

    def _collective(self, node: ReplayNode, row: int) -> list[Value]:
        table = self.graph.collectives
        kind = CollectiveKind(int(table.kind[row]))
        meant = SUBSTITUTES.get(kind, kind)
        group_set = int(table.group_set[row])
        if group_set not in self.groups:
            members = self.graph.group_sets[group_set] if group_set >= 0 else None
            try:
                self.groups[group_set] = ranks_of(members, self.replay.num_ranks, self.emitter)
            except ValueError as error:
                hint = "list the operations with `hespas-validate check`"
                raise FormatError(f"{self.graph.name}: {error}", hint=hint) from None
        groups = self.groups[group_set]
        reduction = self.graph.strings[int(table.reduction[row])]
        # XLA merges collectives that share a channel, and cannot lay out a channel of several operands.
        channel, is_single = int(table.channel[row]), len(node.operands) == 1
        if channel <= 0:
            channel = -1
        elif is_single and channel not in self.channels:
            self.channels.add(channel)
        else:
            self.replay.note("channels")
            channel = next(self.free_channels) if is_single else -1
        link = ReplayCollective(meant, groups, float(table.comm_bytes[row]), channel, reduction)
        if not groups.even and meant not in {CollectiveKind.ALL_REDUCE, CollectiveKind.BARRIER}:
            self.replay.note("substituted", f"{kind.name.lower()} of unequal groups as all_reduce")
        elif kind is not meant:
            self.replay.note("substituted", f"{kind.name.lower()} as {meant.name.lower()}")
        made = collective(node, link)
        self._note_bytes(kind.name.lower(), link.comm_bytes, payload_bytes(link, made))
        changed = applied_reduction(link, made)
        if changed:
            self.replay.note("reduction", changed)
        return _viewed(node, made)

    def _note_bytes(self, what: str, expected: float, made: float) -> None:
        """Record a message or collective in the replay whose size (``made``) differs from the size in the
        graph (``expected``).
        """
        if made != expected:
            before = "unknown" if isnan(expected) else f"{expected:,.15g} B"
            self.replay.note("comm-bytes", f"{what} of {before} as {made:,.15g} B")

    def _message(self, node: ReplayNode, row: int, kind: NodeKind) -> list[Value]:
        """Emit a permute, send or receive. The first of a matching send and receive becomes a permute; the
        second waits for it.
        """
        table = self.graph.p2p
        number = int(table.permutation[row])
        if number < 0:
            self.replay.note("unknown-peer")
            own = node.operands or node.results or (_row(2 * float(table.comm_bytes[row]), 0.0),)
            return synthesised(node._replace(operands=own, results=node.results or own))
        key = (number, float(table.comm_bytes[row]), int(table.tag[row]))
        waiting = self.sent.setdefault(key, [])
        if kind is not NodeKind.PERMUTE and waiting and waiting[0][0] is not kind:
            _, sent = waiting.pop(0)
            if kind is NodeKind.SEND:
                self.replay.note("message-order")
            return passed_on(node._replace(producers=[sent, *node.producers]))
        if number not in self.pairs:
            self.pairs[number] = pairs_of(self.graph.permutations[number], self.emitter)
        made = permute(node, self.pairs[number], key[1])
        self._note_bytes("message", key[1], float(made[0].type.size_bytes))
        if kind is not NodeKind.PERMUTE:
            waiting.append((kind, made))
        return _viewed(node, made)


def _viewed(node: ReplayNode, made: list[Value]) -> list[Value]:
    """Return the values ``made`` for a node. If their types differ from the node's result types, prepend
    views of them that have the result types.
    """
    if [value.type for value in made] == list(node.results):
        return made
    return [*made_from(node, made, node.results, copies=False), *made]


def _row(moved: float, flops: float) -> Tensor:
    """Return the type of a one-dimensional tensor for a node without types. Reading and writing the tensor
    moves as many bytes (``moved``) as the graph states.

    It has one element if the node's FLOPs are too many for operations on the elements. The FLOPs then become
    a matmul.
    """
    elements = 0.0 if isnan(moved) else moved / (2 * F32.storage_bytes(1))
    is_product = flops > MOST_PASSES * elements
    return Tensor(F32, (1 if is_product else int(min(max(elements, 1.0), _LONGEST_ROW)),))


_FLOPS_TOLERANCE = 0.01
_BYTES_TOLERANCE = 0.01


def compare(flat: OpGraph, replayed: ProgramReplay, written: OpGraph, diagnostics: Diagnostics) -> None:
    """Report noticeable differences in work between ``flat``, the replayed graph, and ``written``, the graph
    that a reader gets from the replay.
    """
    flops = np.where(np.isnan(flat.useful_flops), flat.flops, flat.useful_flops)
    wanted = known_sum(flops)
    if not abs(replayed.flops - wanted) <= _FLOPS_TOLERANCE * wanted and (replayed.flops or wanted > 0):
        message = (
            f"replays in which XLA counts {replayed.flops:,.0f} FLOPs where the graph has {_sum(flops)}: "
            "they include the sums of all-reduce and the operations that add dependencies"
        )
        diagnostics.warning("stablehlo.replay-flops", flat.name, message)
    else:
        # FLOPs of the specification include products with padding and dilation holes.
        before, after = (known_sum(np.array(graph.flops * graph.executions)) for graph in (flat, written))
        if before and abs(after - before) > _FLOPS_TOLERANCE * before:
            message = (
                f"replays of {after:,.0f} FLOPs by the specification where the graph has {before:,.0f}: "
                "convolutions are replayed without the products with padding and dilation holes"
            )
            diagnostics.warning("stablehlo.replay-flops", flat.name, message)
    bytes_before, bytes_after = _local_bytes(flat), _local_bytes(written)
    wanted_bytes, made_bytes = known_sum(bytes_before), known_sum(bytes_after)
    if np.isnan(wanted_bytes) or abs(made_bytes - wanted_bytes) <= _BYTES_TOLERANCE * wanted_bytes:
        return
    message = (
        f"replays that move {made_bytes:,.0f} bytes where the graph has {_sum(bytes_before)}: added "
        "dependencies move some, and operations are replaced by one or several others of the same types"
    )
    diagnostics.warning("stablehlo.replay-bytes", flat.name, message)


def _local_bytes(graph: OpGraph) -> FloatArray:
    """Return the bytes that each node moves per step, 0 for collectives and messages.

    The payloads of communication are compared separately.
    """
    moved = np.array(graph.bytes_moved * graph.executions)
    moved[graph.collectives.node] = 0.0
    moved[graph.p2p.node] = 0.0
    return moved


def _sum(column: FloatArray) -> str:
    """Return the sum of a cost column as text, with the number of nodes whose value is unknown."""
    unknown = int(np.isnan(column).sum())
    if unknown == len(column):
        return f"unknown figures of {unknown:,} operations"
    rest = f", without {unknown:,} operations of unknown figures" if unknown else ""
    return f"{known_sum(column):,.0f}{rest}"
