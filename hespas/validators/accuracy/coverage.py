"""A matching as columns, and how many-to-many links become groups that can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.files.documents import Count, Figure
from hespas.graph import OpGraph, Profile
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import InvariantError
from hespas.graph.passes import is_free

__all__ = [
    "RULES",
    "Coverage",
    "EventKey",
    "Join",
    "Matching",
    "Unmatched",
    "coverage_of",
    "group_keys",
    "joins_of",
    "node_text",
]

RULES: tuple[str, ...] = ("instruction", "op-name", "source-line", "structure", "signature", "order")
"""How an event was matched, strongest first: by the name of the compiled instruction; by the framework's name
of the operation; by source line; by what the compiled module and the program are made of; by operation and
shapes, in order; by operation alone, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKey:
    """What equal events have in common: an instruction of a module, or a place in a run. ``nodes`` are those
    it carries out, all or in part; ``rule`` indexes :data:`RULES`. ``inferred`` says that the compiler made
    the instruction up and that the nodes are those it serves; ``communicates`` that it talks to other ranks.
    """

    module: str
    op: str
    nodes: tuple[int, ...] = ()
    rule: int = -1
    inferred: bool = False
    communicates: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Matching:
    """Which nodes each event carries out, and groups of both that can be compared: a fusion is one event for
    many nodes, a node that was split is several events.

    ``event_key`` has shape ``(events,)`` and indexes ``keys`` (-1: the event names nothing). ``node_group``
    has shape ``(nodes,)``, ``event_group`` ``(events,)``; -1 is in no group.
    """

    keys: tuple[EventKey, ...]
    event_key: IntArray
    event_group: IntArray
    node_group: IntArray
    num_groups: int

    def __post_init__(self) -> None:
        """Check that groups are numbered from 0."""
        for column in (self.node_group, self.event_group):
            if len(column) and int(column.max()) >= self.num_groups:
                raise InvariantError("Matching: a group has no number")

    def __len__(self) -> int:
        return self.num_groups

    @property
    def matched(self) -> BoolArray:
        """Events that carry out some node, shape ``(events,)``."""
        has_nodes = np.array([*(bool(key.nodes) for key in self.keys), False], np.bool_)
        return has_nodes[self.event_key]


def group_keys(keys: Sequence[EventKey], shared: BoolArray, talks: BoolArray) -> tuple[IntArray, IntArray]:
    """Groups of keys, shape ``(keys,)``, and of nodes, shape ``(nodes,)``; -1 is in none.

    Keys that carry out the same node form one group, unless compilers copy such nodes freely: those that are
    ``shared`` go to one key, rather one that does nothing else, and hold no keys together that have work of
    their own. A key that communicates is in a group only with nodes that do (``talks``): the partitioner's
    collectives are no part of a program that has none. Other keys leave such nodes alone where they have any
    else. Nearly O(links).
    """
    forest = _Forest(len(keys), len(shared))
    is_shared, is_talk = shared.tolist(), talks.tolist()
    usable = [_usable(key, is_talk) for key in keys]
    for number, nodes in enumerate(usable):
        for node in nodes:
            if not is_shared[node]:
                forest.join(number, node)
    owner: dict[int, int] = {}
    for number in sorted(range(len(keys)), key=forest.holds.__getitem__):
        for node in usable[number]:
            if is_shared[node]:
                owner.setdefault(node, number)
    for node, number in owner.items():
        forest.join(number, node)
    for number, nodes in enumerate(usable):
        if nodes and not forest.holds[number]:
            forest.join(number, nodes[0])
    groups = forest.groups()
    return groups[: len(keys)], groups[len(keys) :]


def _usable(key: EventKey, is_talk: Sequence[bool]) -> Sequence[int]:
    """The nodes that a key may share a group with."""
    same = [node for node in key.nodes if is_talk[node] == key.communicates]
    return same or ([] if key.communicates else key.nodes)


class _Forest:
    """Keys and nodes joined into trees (union-find with path halving); ``holds`` marks keys that were."""

    def __init__(self, num_keys: int, num_nodes: int) -> None:
        self.holds = [False] * num_keys
        self._parent = list(range(num_keys + num_nodes))

    def root(self, item: int) -> int:
        """What stands for the tree of a key or, past the keys, of a node."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, key: int, node: int) -> None:
        """Put a key and a node into one tree."""
        one, two = self.root(key), self.root(len(self.holds) + node)
        self._parent[max(one, two)] = min(one, two)
        self.holds[key] = True

    def groups(self) -> IntArray:
        """The group of each key, then of each node, numbered by first key; -1 for trees without keys."""
        roots = [self.root(item) for item in range(len(self._parent))]
        used = sorted({roots[key] for key, holds in enumerate(self.holds) if holds})
        place = {item: number for number, item in enumerate(used)}
        return np.array([place.get(item, -1) for item in roots], np.int64)


_LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """One kind of event or node that nobody matches; ``total_ns`` is NaN for nodes."""

    name: str
    count: Count
    total_ns: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares are 0..1; negative durations count as 0. ``nodes`` counts those that cost something. ``by_rule``
    is matched time [ns]; ``compared_time_ns`` that of events in groups: an estimate of the same work stands
    against it. ``unlisted_events`` and ``unlisted_nodes`` count the kinds that are not listed.
    """

    events: int
    matched_events: int
    time_ns: float
    matched_time_ns: float
    compared_time_ns: float
    nodes: int
    matched_nodes: int
    by_rule: dict[str, float]
    inferred_time_ns: float
    unmatched_events: tuple[Unmatched, ...]
    unmatched_nodes: tuple[Unmatched, ...]
    unlisted_events: int = 0
    unlisted_nodes: int = 0

    @property
    def time_share(self) -> float:
        """Matched share of the device time; 1 where there is none."""
        return self.matched_time_ns / self.time_ns if self.time_ns else 1.0

    @property
    def count_share(self) -> float:
        """Matched share of the events."""
        return self.matched_events / self.events if self.events else 1.0


def coverage_of(graph: OpGraph, profile: Profile, matching: Matching) -> Coverage:
    """What a matching covers, by count and by time. O(nodes + events)."""
    matched = matching.matched
    costs = ~is_free(graph) & (graph.multiplicity != 0)
    listed = np.zeros(len(graph), np.bool_)
    listed[[node for key in matching.keys for node in key.nodes]] = True
    missed = costs & ~listed
    time = np.maximum(np.nan_to_num(profile.duration_ns), 0.0)
    keys = matching.event_key[matched]
    rules = np.array([key.rule for key in matching.keys], np.int64)[keys]
    inferred = np.array([key.inferred for key in matching.keys], np.bool_)[keys]
    events, nodes = _events(profile, ~matched), _nodes(graph, missed)
    return Coverage(
        events=len(profile),
        matched_events=int(matched.sum()),
        time_ns=float(time.sum()),
        matched_time_ns=float(time[matched].sum()),
        compared_time_ns=float(time[matching.event_group >= 0].sum()),
        nodes=int(costs.sum()),
        matched_nodes=int(costs.sum()) - int(missed.sum()),
        by_rule={
            name: float(time[matched][rules == code].sum())
            for code, name in enumerate(RULES)
            if bool((rules == code).any())
        },
        inferred_time_ns=float(time[matched][inferred].sum()),
        unmatched_events=events[:_LISTED],
        unmatched_nodes=nodes[:_LISTED],
        unlisted_events=max(len(events) - _LISTED, 0),
        unlisted_nodes=max(len(nodes) - _LISTED, 0),
    )


def _events(profile: Profile, chosen: BoolArray) -> tuple[Unmatched, ...]:
    """The kinds of events chosen, longest first."""
    rows = np.where(profile.op_row > 0, profile.op_row, profile.kernel_row)[chosen]
    distinct, place, counts = np.unique(rows, return_inverse=True, return_counts=True)
    time = np.maximum(np.nan_to_num(profile.duration_ns[chosen]), 0.0)
    total = np.bincount(place, time, len(distinct))
    order = np.argsort(-total, kind="stable")
    return tuple(
        Unmatched(
            name=profile.strings[int(distinct[row])] or "(unnamed)",
            count=int(counts[row]),
            total_ns=float(total[row]),
        )
        for row in order.tolist()
    )


def _nodes(graph: OpGraph, chosen: BoolArray) -> tuple[Unmatched, ...]:
    """The operations chosen, most frequent first."""
    counts = Counter[int](graph.op_row[chosen].tolist()).most_common()
    return tuple(
        Unmatched(name=graph.strings[row] or "(unnamed)", count=count, total_ns=float("nan"))
        for row, count in counts
    )


# Which operations of the program each compiled instruction carries out, by name: a matching for people.


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
