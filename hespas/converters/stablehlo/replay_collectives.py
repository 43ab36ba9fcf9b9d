"""Collectives and messages of a replay, with the kind, groups and bytes of the graph.

Every rank is a replica of the program. Group members and peers are global device ids, which equal replica ids
if there is one partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hespas.converters.replica_groups import highest_id
from hespas.converters.stablehlo.replay_emit import F32, ReplayEmitter, ReplayNode
from hespas.graph import CollectiveKind, GroupSet, OpGraph, Permutation
from hespas.graph.columns import IntArray, dtype
from hespas.graph.errors import UnsupportedError
from hespas.programs.collectives import exchanged_axes, scaled_axis
from hespas.programs.text import Tensor, Value

__all__ = [
    "SUBSTITUTES",
    "ReplayCollective",
    "ReplayGroups",
    "applied_reduction",
    "collective",
    "devices_for",
    "pairs_of",
    "payload_bytes",
    "permute",
    "ranks_of",
]

SUBSTITUTES: dict[CollectiveKind, CollectiveKind] = {
    CollectiveKind.REDUCE: CollectiveKind.ALL_REDUCE,
    CollectiveKind.GATHER: CollectiveKind.ALL_GATHER,
    CollectiveKind.SCATTER: CollectiveKind.ALL_TO_ALL,
    CollectiveKind.RAGGED_ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
    CollectiveKind.REDUCE_SCATTER_BLOCK: CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.UNKNOWN: CollectiveKind.ALL_REDUCE,
}
"""Replacements of kinds that StableHLO does not have, or that a rank does not run alone."""

_WITH_GLOBAL_IDS = {CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}
"""Kinds whose channel does not change replica ids to partition ids."""

_REDUCING = {CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER}

_REDUCTIONS = {
    "add": "add",
    "sum": "add",
    "multiply": "multiply",
    "mul": "multiply",
    "maximum": "maximum",
    "max": "maximum",
    "minimum": "minimum",
    "min": "minimum",
    "and": "and",
    "or": "or",
    "xor": "xor",
}
_MOST_LISTED = 1 << 24
_BYTE = dtype("ui8")


class ReplayGroups(NamedTuple):
    """Device groups as a StableHLO attribute. ``size`` is the largest group size; ``even`` is True if all
    groups have it.
    """

    attribute: str
    size: int
    even: bool


class ReplayCollective(NamedTuple):
    """Properties of a graph's collective that a replay needs. ``comm_bytes`` is NaN and ``channel`` -1 if
    unknown.
    """

    kind: CollectiveKind
    groups: ReplayGroups
    comm_bytes: float
    channel: int
    reduction: str


def devices_for(graph: OpGraph, num_ranks: int) -> int:
    """Return the number of devices of a replay: the ranks of the job, or more if groups or messages refer to
    higher ranks.

    For example, a graph that was read from the trace of one rank refers to other ranks. Raises
    ``UnsupportedError`` if the lists of groups and messages would have more than 2**24 ids.
    """
    named = [1 + highest_id(groups) for groups in graph.group_sets]
    devices = max([num_ranks, *named, *(way.num_ranks for way in graph.permutations)])
    lists = 1 + len(graph.group_sets) + len(graph.permutations)
    if devices * lists > _MOST_LISTED:
        raise UnsupportedError(
            f"{graph.name}: groups and messages of {devices:,} devices are too many to list {lists:,} times",
            position="all group sets and permutations",
            hint="write jobs of this size as op graphs: StableHLO lists groups rank by rank",
        )
    return devices


def ranks_of(groups: GroupSet | None, num_ranks: int, emitter: ReplayEmitter) -> ReplayGroups:
    """Return groups that cover all ranks. Ranks that are not in ``groups`` form additional groups.

    Raises ``ValueError`` if a rank is outside the job or in two groups.
    """
    rows = [list(range(num_ranks))] if groups is None else [row.tolist() for row in groups if len(row)]
    listed = [rank for row in rows for rank in row]
    if listed and not 0 <= min(listed) <= max(listed) < num_ranks:
        wrong = min(listed) if min(listed) < 0 else max(listed)
        raise ValueError(f"groups name rank {wrong}, but the job has ranks 0..{num_ranks - 1}")
    if len(set(listed)) < len(listed):
        repeated = next(rank for rank, count in Counter(listed).items() if count > 1)
        raise ValueError(f"rank {repeated} is in two groups")
    present = set(listed)
    rest = [rank for rank in range(num_ranks) if rank not in present]
    size = max(map(len, rows), default=1)
    step = size if len(rest) % size == 0 else 1
    rows += [rest[start : start + step] for start in range(0, len(rest), step)]
    table = np.full((len(rows), size), -1, np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    attribute = emitter.alias("groups", _dense(table))
    return ReplayGroups(attribute, size, all(len(row) == size for row in rows))


def _dense(table: IntArray) -> str:
    rows = ", ".join(f"[{', '.join(map(str, row))}]" for row in table.tolist())
    return f"dense<[{rows}]> : tensor<{'x'.join(map(str, table.shape))}xi64>"


def collective(node: ReplayNode, link: ReplayCollective) -> list[Value]:
    """Emit a collective. Its tensors have the node's types if these are valid for the kind of collective.
    Otherwise it has one-dimensional tensors of the same size.
    """
    if link.kind is CollectiveKind.BARRIER:
        return _all_reduce(node, link, (Tensor(F32, ()),)) or []
    operands = node.operands[: len(node.results)] if node.results else node.operands
    made = _typed(node, link, operands) if operands else None
    return _sized(node, link) if made is None else made


def _typed(node: ReplayNode, link: ReplayCollective, operands: tuple[Tensor, ...]) -> list[Value] | None:
    """Emit a collective on the given operands with the node's types; return None if these are not valid for
    its kind.
    """
    results = node.results
    if link.kind is CollectiveKind.ALL_REDUCE:
        return _all_reduce(node, link, operands) if results == operands else None
    pairs = [
        pair for pair in zip(operands, results, strict=False) if pair[0].elements and not pair[0].is_complex
    ]
    if not link.groups.even or not pairs or len(pairs) != max(len(operands), len(results)):
        return None
    if link.kind is CollectiveKind.ALL_GATHER:
        axes = [scaled_axis(*pair, link.groups.size) for pair in zip(operands, results, strict=True)]
        if axes[0] is None or set(axes) != {axes[0]}:
            return None
        return _written(node, link, "all_gather", operands, results, f"all_gather_dim = {axes[0]} : i64")
    return _single(node, link, *pairs[0]) if len(pairs) == 1 else None


def _single(node: ReplayNode, link: ReplayCollective, operand: Tensor, result: Tensor) -> list[Value] | None:
    """Emit a collective with one operand and one result; return None if their types are not valid for its
    kind.
    """
    if link.kind is CollectiveKind.ALL_TO_ALL:
        return _all_to_all(node, link, operand, result)
    if link.kind is CollectiveKind.REDUCE_SCATTER:
        axis = scaled_axis(result, operand, link.groups.size)
        return None if axis is None else _reduce_scatter(node, link, operand, axis)
    if link.kind is CollectiveKind.BROADCAST and operand == result:
        return _written(node, link, "collective_broadcast", [operand], [result])
    return None


def _written(
    node: ReplayNode,
    link: ReplayCollective,
    op: str,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    *attributes: str,
) -> list[Value]:
    """Emit the text of one collective operation with the given operand and result types."""
    bound = node.bound(operands)
    reducer = ""
    if op in {"all_reduce", "reduce_scatter"}:
        combine, scalar = _reduction(link, operands[0]), operands[0].scalar
        reducer = (
            f" ({{\n    ^bb0(%x: {scalar}, %y: {scalar}):\n      %z = stablehlo.{combine} %x, %y : {scalar}\n"
            f"      stablehlo.return %z : {scalar}\n    }})"
        )
        node.emitter.work(flops=sum(tensor.elements for tensor in results))
    names, kinds, made = (", ".join(map(str, items)) for items in (bound, operands, results))
    parts = [f"replica_groups = {link.groups.attribute}", *attributes]
    if link.channel > 0 and link.kind in _WITH_GLOBAL_IDS:
        parts.append(f"channel_handle = #stablehlo.channel_handle<handle = {link.channel}, type = 1>")
        parts.append("use_global_device_ids")
    properties = ", ".join(sorted(parts))  # MLIR prints properties sorted by name
    text = f'"stablehlo.{op}"({names}) <{{{properties}}}>{reducer} : ({kinds}) -> '
    if len(results) == 1:
        return [node.emitter.add(f"{text}{made}", results[0])]
    return node.emitter.add_many(f"{text}({made})", results)


def payload_bytes(link: ReplayCollective, made: Sequence[Value]) -> float:
    """Return the payload size of a written collective: the bytes of its operands, derived from its
    results.
    """
    results = float(sum(value.type.size_bytes for value in made))
    if not link.groups.even:  # written as an all-reduce
        return results
    if link.kind is CollectiveKind.ALL_GATHER:
        return results / link.groups.size
    if link.kind is CollectiveKind.REDUCE_SCATTER:
        return results * link.groups.size
    return results


def applied_reduction(link: ReplayCollective, made: Sequence[Value]) -> str:
    """Return a description of the change that the replay makes to the reduction of a collective, empty
    without a change.

    An unknown reduction, or one that the type does not support, is replaced by a sum.
    """
    if link.kind not in _REDUCING or not made:
        return ""
    requested = link.reduction.rpartition(".")[2]
    used = _reduction(link, made[0].type)
    if _REDUCTIONS.get(requested) == used:
        return ""
    return f"{requested or 'unknown'} as {used}"


def _reduction(link: ReplayCollective, element: Tensor) -> str:
    op = _REDUCTIONS.get(link.reduction.rpartition(".")[2], "add")
    logical = element.is_integer or element.is_bool
    if (op in {"and", "or", "xor"} and not logical) or (op in {"maximum", "minimum"} and element.is_complex):
        return "add"
    return op


def _all_reduce(node: ReplayNode, link: ReplayCollective, operands: tuple[Tensor, ...]) -> list[Value] | None:
    """Emit an all-reduce; return None for tensors of several element types, because they would need several
    reducers.
    """
    if len({tensor.element for tensor in operands}) > 1:
        return None
    return _written(node, link, "all_reduce", operands, operands)


def _reduce_scatter(node: ReplayNode, link: ReplayCollective, operand: Tensor, axis: int) -> list[Value]:
    shape = list(operand.shape)
    shape[axis] //= link.groups.size
    attribute = f"scatter_dimension = {axis} : i64"
    return _written(node, link, "reduce_scatter", [operand], [operand.reshaped(shape)], attribute)


def _all_to_all(
    node: ReplayNode, link: ReplayCollective, operand: Tensor, result: Tensor
) -> list[Value] | None:
    axes = exchanged_axes(operand, result, link.groups.size)
    if axes is None:
        return None
    attributes = (
        f"split_dimension = {axes[0]} : i64",
        f"concat_dimension = {axes[1]} : i64",
        f"split_count = {link.groups.size} : i64",
    )
    return _written(node, link, "all_to_all", [operand], [result], *attributes)


def _sized(node: ReplayNode, link: ReplayCollective) -> list[Value]:
    """Emit a collective on a one-dimensional tensor of ``comm_bytes`` or, if that is unknown, of the
    operands' size.
    """
    size = link.groups.size
    operand_bytes = sum(tensor.size_bytes for tensor in node.operands) or F32.storage_bytes(1)
    count = int(link.comm_bytes) if link.comm_bytes > 0 else operand_bytes
    is_whole = link.kind in {CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST}
    parts = 1 if is_whole else size
    element = F32 if count % (F32.storage_bytes(1) * parts) == 0 else _BYTE
    length = -(-max(1, count // element.storage_bytes(1)) // parts) * parts
    row = Tensor(element, (length,))
    if link.kind is CollectiveKind.ALL_REDUCE or not link.groups.even:
        return _all_reduce(node, link, (row,)) or []
    if link.kind is CollectiveKind.ALL_GATHER:
        whole = row.reshaped((length * size,))
        return _written(node, link, "all_gather", [row], [whole], "all_gather_dim = 0 : i64")
    if link.kind is CollectiveKind.BROADCAST:
        return _written(node, link, "collective_broadcast", [row], [row])
    if link.kind is CollectiveKind.REDUCE_SCATTER:
        return _reduce_scatter(node, link, row, 0)
    return _all_to_all(node, link, row, row) or []


def pairs_of(permutation: Permutation, emitter: ReplayEmitter) -> str:
    """Return the source-target pairs of a permutation as an attribute."""
    pairs = np.array(list(permutation), np.int64).reshape(-1, 2)
    return emitter.alias("pairs", _dense(pairs) if len(pairs) else "dense<> : tensor<0x2xi64>")


def permute(node: ReplayNode, pairs: str, comm_bytes: float) -> list[Value]:
    """Emit a permute on the node's tensor if it has one operand of its result type, else on a tensor of
    ``comm_bytes``.
    """
    operand = node.operands[0] if len(node.operands) == 1 and node.operands == node.results else None
    if operand is None:
        count = max(1, int(comm_bytes)) if comm_bytes > 0 else 1
        element = F32 if count % F32.storage_bytes(1) == 0 else _BYTE
        operand = Tensor(element, (count // element.storage_bytes(1),))
    value = node.bound([operand])[0]
    text = f'"stablehlo.collective_permute"({value}) <{{source_target_pairs = {pairs}}}>'
    return [node.emitter.add(f"{text} : ({operand}) -> {operand}", operand)]
