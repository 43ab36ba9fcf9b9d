"""A graph of operations that ran, as a profile: its nodes are events in the order of the graph."""

from __future__ import annotations

import numpy as np

from hespas.graph import Profile, Workload
from hespas.graph.columns import StringTableBuilder

__all__ = ["base_name", "listed_profile"]


def base_name(name: str) -> str:
    """``aten::mm`` of ``aten::mm``, ``aten::mm.out`` and ``aten.mm.default``: overloads are one operation."""
    space, colons, rest = name.partition("::")
    if colons:
        return f"{space}::{rest.partition('.')[0]}" if space.islower() else name
    parts = name.split(".")
    return f"{parts[0]}::{parts[1]}" if parts[0] in {"aten", "prims", "c10d"} and len(parts) > 1 else name


def listed_profile(workload: Workload) -> Profile:
    """Every node of every rank of a trace as an event that takes one tick, one after the other: the order in
    which a trace lists what ran is that in which it began.
    """
    strings = StringTableBuilder()
    names: list[int] = []
    ranks: list[int] = []
    starts: list[int] = []
    classes: list[int] = workload.rank_class.tolist()
    for rank, number in enumerate(classes):
        if number < 0:
            continue
        graph = workload.classes[number]
        own: list[int] = graph.op_row.tolist()
        rows = {row: strings.add(graph.strings[row]) for row in set(own)}
        for place, row in enumerate(own):
            names.append(rows[row])
            ranks.append(rank)
            starts.append(place)
    start = np.array(starts, np.float64) * 1e6
    return Profile.of(
        workload.name,
        (),
        strings.build(),
        start_ns=start,
        duration_ns=np.full(len(start), 5e5),
        op_row=np.array(names, np.int32),
        rank=np.array(ranks, np.int32),
    )
