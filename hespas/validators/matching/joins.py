"""Which operations of the program each compiled instruction carries out, by name: a matching for people."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import OpGraph, Profile
from hespas.validators.matching.groups import RULES, Matching

__all__ = ["Join", "joins_of", "node_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """One instruction of ``module`` that ran, and the ``operations`` of the program that it carries out, all
    or in part (none: nobody matches it; ``rule`` is empty). ``inferred`` says that the compiler made it up
    and that they are those it serves. ``events`` took ``time_ns`` together; ``group`` is what it is compared
    in (-1: in nothing).
    """

    module: str
    instruction: str
    rule: str
    inferred: bool
    operations: tuple[str, ...]
    events: int
    time_ns: float
    group: int


def joins_of(graph: OpGraph, profile: Profile, matching: Matching) -> tuple[Join, ...]:
    """Every instruction that ran, most time first. O(events + links)."""
    count = len(matching.keys)
    named = np.flatnonzero(matching.event_key >= 0)
    key = matching.event_key[named]
    events = np.bincount(key, minlength=count)
    time = np.bincount(key, np.maximum(np.nan_to_num(profile.duration_ns[named]), 0.0), count)
    group = np.full(count, -1, np.int64)
    group[key] = matching.event_group[named]
    order: list[int] = np.argsort(-time, kind="stable").tolist()
    names: dict[int, str] = {}
    found: list[Join] = []
    for number in order:
        each = matching.keys[number]
        if not events[number]:
            continue
        for node in each.nodes:
            names.setdefault(node, node_text(graph, node))
        found.append(
            Join(
                module=each.module,
                instruction=each.op,
                rule=RULES[each.rule] if each.rule >= 0 else "",
                inferred=each.inferred,
                operations=tuple(dict.fromkeys(names[node] for node in each.nodes)),
                events=int(events[number]),
                time_ns=float(time[number]),
                group=int(group[number]),
            )
        )
    return tuple(found)


def node_text(graph: OpGraph, node: int) -> str:
    """The name of a node; of one without, its operation."""
    return graph.node_name(node) or graph.strings[int(graph.op_row[node])]
