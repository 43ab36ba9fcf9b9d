"""Matching by what an operation is and the place it has in a run, for events that name no instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph import OpGraph, Profile
from hespas.graph.columns import IntArray
from hespas.validators.matching.groups import RULES, EventKey

__all__ = ["InOrder", "in_order"]

_NAMESPACES = frozenset({"aten", "prims"})
_SIGNATURE, _ORDER = RULES.index("signature"), RULES.index("order")


@dataclass(frozen=True, slots=True)
class InOrder:
    """``event_key`` numbers ``keys`` from the first free number on; -1 is unmatched."""

    event_key: IntArray
    keys: list[EventKey]


def in_order(graph: OpGraph, profile: Profile, waiting: IntArray, first_key: int) -> InOrder:
    """The k-th event of an operation in each rank and run is the k-th node of it, where all ranks and runs
    have as many as the program has nodes: first by operation and operand shapes, then by operation alone.
    In a loop of m trips the nodes of its body come round m times.

    ``waiting`` lists the events nobody matches yet. O(nodes + events log events).
    """
    event_key = np.full(len(profile), -1, np.int64)
    keys: list[EventKey] = []
    taken = np.zeros(len(graph), np.bool_)
    for rule in (_SIGNATURE, _ORDER):
        nodes = _nodes_by(graph, taken, with_shapes=rule == _SIGNATURE)
        for signature, events in _events_by(profile, waiting, with_shapes=rule == _SIGNATURE).items():
            candidates = nodes.get(signature, ())
            places = _places(graph, profile, events, candidates) if candidates else None
            if places is None:
                continue
            event_key[events] = first_key + len(keys) + places
            keys.extend(EventKey(module="", op=signature[0], nodes=(node,), rule=rule) for node in candidates)
            taken[list(candidates)] = True
        waiting = waiting[event_key[waiting] < 0]
    return InOrder(event_key, keys)


def _base(name: str) -> str:
    """``mm`` of ``aten::mm``, ``aten::mm.out``, ``aten.mm.default`` and ``stablehlo.mm``; the number of an
    instruction (``dot.3``) belongs to its name.
    """
    space, colons, rest = name.rpartition("::")
    if colons:
        return rest.partition(".")[0] or space
    first, _, rest = name.partition(".")
    if first in _NAMESPACES and rest:
        return rest.partition(".")[0]
    last = name.rpartition(".")[2]
    return name if last.isdigit() else last


def _nodes_by(
    graph: OpGraph, taken: np.ndarray[tuple[int], np.dtype[np.bool_]], *, with_shapes: bool
) -> dict[tuple[str, str], Sequence[int]]:
    strings, types = graph.strings, graph.types
    names = {row: _base(strings[row]) for row in np.unique(graph.op_row).tolist()}
    operands = graph.operands.to_lists() if with_shapes else []
    found: dict[tuple[str, str], list[int]] = {}
    runs = graph.multiplicity != 0
    for node, row in enumerate(graph.op_row.tolist()):
        if taken[node] or not runs[node]:
            continue
        shapes = _shape_text([types.shape(kind) for kind in operands[node]]) if with_shapes else ""
        if shapes or not with_shapes:
            found.setdefault((names[row], shapes), []).append(node)
    return dict(found)


def _events_by(profile: Profile, waiting: IntArray, *, with_shapes: bool) -> dict[tuple[str, str], IntArray]:
    """The waiting events of each signature, by rank, run and start."""
    rows = profile.op_row[waiting].astype(np.int64)
    shapes = profile.shapes_row[waiting].astype(np.int64) if with_shapes else np.zeros_like(rows)
    keys, place = np.unique(rows << 32 | shapes, return_inverse=True)
    numbers: dict[tuple[str, str], int] = {}  # several spellings may be the same operation
    same = np.full(len(keys), -1, np.int64)
    for row, key in enumerate(keys.tolist()):
        name, shape = profile.strings[key >> 32], profile.strings[key & 0xFFFFFFFF]
        if name and (shape or not with_shapes):
            same[row] = numbers.setdefault((_base(name), shape.replace(" ", "")), len(numbers))
    place = same[place]
    order = np.lexsort((profile.start_ns[waiting], profile.run[waiting], profile.rank[waiting], place))
    bounds = np.searchsorted(place[order], np.arange(len(numbers) + 1))
    return {
        signature: waiting[order[bounds[number] : bounds[number + 1]]]
        for signature, number in numbers.items()
    }


def _places(graph: OpGraph, profile: Profile, events: IntArray, nodes: Sequence[int]) -> IntArray | None:
    """The place among ``nodes`` of each event within its rank and run; None where one has another number of
    events than the nodes have, or the nodes stand in different loops.
    """
    rows = list(nodes)
    trips = graph.multiplicity[rows]
    if len(set(graph.region[rows].tolist())) > 1 and bool((trips != 1).any()):
        return None
    wanted = float(trips.sum())
    part = profile.rank[events].astype(np.int64) << 32 | profile.run[events].astype(np.int64) & 0xFFFFFFFF
    _, first, counts = np.unique(part, return_index=True, return_counts=True)
    if bool((counts != wanted).any()):
        return None
    starts: IntArray = np.repeat(np.sort(first), counts).astype(np.int64)
    return (np.arange(len(events), dtype=np.int64) - starts) % len(nodes)


def _shape_text(shapes: Sequence[Sequence[int]]) -> str:
    """``[[4,8],[8,2]]``, as profilers write it."""
    return "[" + ",".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes) + "]" if shapes else ""
