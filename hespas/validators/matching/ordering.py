"""Matching by what an operation is and the place it has in a run, for events that name no instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph import OpGraph, Profile
from hespas.graph.columns import IntArray
from hespas.validators.matching.groups import RULES, EventKey

__all__ = ["InOrder", "in_order"]

_SIGNATURE, _ORDER = RULES.index("signature"), RULES.index("order")


@dataclass(frozen=True, slots=True)
class InOrder:
    """``event_key`` numbers ``keys`` from the first free number on; -1 is unmatched."""

    event_key: IntArray
    keys: list[EventKey]


def in_order(graph: OpGraph, profile: Profile, waiting: IntArray, first_key: int) -> InOrder:
    """The k-th event of an operation in each rank and run is the k-th node of it, where all ranks and runs
    have as many as the program has nodes: first by operation and operand shapes, then by operation alone.

    ``waiting`` lists the events nobody matches yet. O(nodes + events log events).
    """
    event_key = np.full(len(profile), -1, np.int64)
    keys: list[EventKey] = []
    taken = np.zeros(len(graph), np.bool_)
    for rule in (_SIGNATURE, _ORDER):
        nodes = _nodes_by(graph, taken, with_shapes=rule == _SIGNATURE)
        for signature, events in _events_by(profile, waiting, with_shapes=rule == _SIGNATURE).items():
            candidates = nodes.get(signature, ())
            places = _places(profile, events, len(candidates)) if candidates else None
            if places is None:
                continue
            event_key[events] = first_key + len(keys) + places
            keys.extend(EventKey(module="", op=signature[0], nodes=(node,), rule=rule) for node in candidates)
            taken[list(candidates)] = True
        waiting = waiting[event_key[waiting] < 0]
    return InOrder(event_key, keys)


def _base(name: str) -> str:
    """``mm`` of ``aten::mm`` and of ``stablehlo.mm``."""
    return name.rpartition("::")[2].rpartition(".")[2]


def _nodes_by(
    graph: OpGraph, taken: np.ndarray[tuple[int], np.dtype[np.bool_]], *, with_shapes: bool
) -> dict[tuple[str, str], Sequence[int]]:
    strings, types = graph.strings, graph.types
    names = {row: _base(strings[row]) for row in np.unique(graph.op_row).tolist()}
    operands = graph.operands.to_lists() if with_shapes else []
    found: dict[tuple[str, str], list[int]] = {}
    for node, row in enumerate(graph.op_row.tolist()):
        if taken[node]:
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
    order = np.lexsort((profile.start_ns[waiting], profile.run[waiting], profile.rank[waiting], place))
    bounds = np.searchsorted(place[order], np.arange(len(keys) + 1))
    found: dict[tuple[str, str], IntArray] = {}
    for number, key in enumerate(keys.tolist()):
        name, shape = profile.strings[key >> 32], profile.strings[key & 0xFFFFFFFF]
        if name and (shape or not with_shapes):
            chosen = waiting[order[bounds[number] : bounds[number + 1]]]
            found[_base(name), shape.replace(" ", "")] = chosen
    return found


def _places(profile: Profile, events: IntArray, wanted: int) -> IntArray | None:
    """The place of each event within its rank and run; None where one has another number than wanted."""
    part = profile.rank[events].astype(np.int64) << 32 | profile.run[events].astype(np.int64) & 0xFFFFFFFF
    _, first, counts = np.unique(part, return_index=True, return_counts=True)
    if bool((counts != wanted).any()):
        return None
    starts: IntArray = np.repeat(np.sort(first), counts).astype(np.int64)
    return np.arange(len(events), dtype=np.int64) - starts


def _shape_text(shapes: Sequence[Sequence[int]]) -> str:
    """``[[4,8],[8,2]]``, as profilers write it."""
    return "[" + ",".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes) + "]" if shapes else ""
