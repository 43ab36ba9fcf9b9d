"""Matching of events to program nodes as columns, the groups of both that are compared, and the coverage."""

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
    "InstructionJoin",
    "Matching",
    "UnmatchedName",
    "coverage_of",
    "group_keys",
    "joins_of",
    "node_text",
]

RULES: tuple[str, ...] = ("instruction", "op-name", "source-line", "structure", "signature", "order")
"""Matching rules, strongest first: by the name of the compiled instruction; by the framework's name of the
operation; by source line; by the structure of the compiled module and of the program; by operation and
shapes, in order; by operation alone, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKey:
    """Key of equal events: an instruction of a module, or a position in a run. Events with this key are
    matched to the same program nodes.

    The events carry out ``nodes``, completely or in part. ``rule`` is an index in :data:`RULES` (-1:
    unmatched). ``inferred`` is True if the compiler created the instruction; ``nodes`` are then the nodes of
    the instructions that use or produce its data. ``communicates`` is True if the instruction exchanges data
    with other ranks.
    """

    module: str
    op: str
    nodes: tuple[int, ...] = ()
    rule: int = -1
    inferred: bool = False
    communicates: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Matching:
    """Program nodes that each event carries out, and groups of events and nodes whose times can be compared.

    A fusion is one event for many nodes, and a node that the compiler divided is several events.
    ``event_key`` is the index in ``keys`` of each event, shape ``(events,)`` (-1: the event has no operation
    name). ``event_group``, of shape ``(events,)``, and ``node_group``, of shape ``(nodes,)``, are the group
    of each event and node; -1 means no group.
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
        """Mask of the events that carry out at least one node, shape ``(events,)``."""
        has_nodes = np.array([*(bool(key.nodes) for key in self.keys), False], np.bool_)
        return has_nodes[self.event_key]


def group_keys(
    keys: Sequence[EventKey], shared: BoolArray, communicates: BoolArray
) -> tuple[IntArray, IntArray]:
    """Return the comparison group of each key, shape ``(keys,)``, and of each node, shape ``(nodes,)``; -1
    means no group.

    Keys that carry out the same node are in one group, except for ``shared`` nodes, which compilers copy
    freely. A shared node belongs to one key only, preferably a key without other nodes. It does not connect
    keys that have other nodes. A key that communicates is grouped only with nodes that communicate, because
    the partitioner adds collectives that the program does not contain. Other keys skip communicating nodes if
    they have any other node. The time is nearly O(links).
    """
    forest = _KeyForest(len(keys), len(shared))
    is_shared, is_communication = shared.tolist(), communicates.tolist()
    usable: list[Sequence[int]] = []
    for key in keys:
        same = [node for node in key.nodes if is_communication[node] == key.communicates]
        usable.append(same or ([] if key.communicates else key.nodes))
    for number, nodes in enumerate(usable):
        for node in (node for node in nodes if not is_shared[node]):
            forest.join(number, node)
    owner: dict[int, int] = {}
    for number in sorted(range(len(keys)), key=forest.is_joined.__getitem__):
        for node in usable[number]:
            if is_shared[node]:
                owner.setdefault(node, number)
    for node, number in owner.items():
        forest.join(number, node)
    for number, nodes in enumerate(usable):
        if nodes and not forest.is_joined[number]:
            forest.join(number, nodes[0])
    groups = forest.groups()
    return groups[: len(keys)], groups[len(keys) :]


class _KeyForest:
    """Union-find forest that joins keys of events with the nodes they carry out. ``is_joined`` is True for
    keys that have a node.
    """

    def __init__(self, num_keys: int, num_nodes: int) -> None:
        self.is_joined = [False] * num_keys
        self._parent = list(range(num_keys + num_nodes))

    def root(self, item: int) -> int:
        """Return the root of the tree of a key, or of a node (nodes are numbered after the keys)."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, key: int, node: int) -> None:
        """Merge the trees of a key and of a node."""
        left, right = self.root(key), self.root(len(self.is_joined) + node)
        self._parent[max(left, right)] = min(left, right)
        self.is_joined[key] = True

    def groups(self) -> IntArray:
        """Return the group of each key, then of each node. Groups are numbered in order of their first keys;
        -1 for keys without nodes and for nodes without a key.
        """
        roots = [self.root(item) for item in range(len(self._parent))]
        used = sorted({roots[key] for key, is_joined in enumerate(self.is_joined) if is_joined})
        number = {root: group for group, root in enumerate(used)}
        return np.array([number.get(root, -1) for root in roots], np.int64)


_MOST_LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmatchedName:
    """Name of events or nodes without a match, with their number. ``total_ns`` is NaN for nodes."""

    name: str
    count: Count
    total_ns: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Share of a profile and of a program that was matched, by count and by time.

    Shares are 0 to 1; negative durations count as 0. ``nodes`` counts the nodes with a cost. ``by_rule`` is
    the matched time [ns] by rule. ``compared_time_ns`` is the time of the events in comparison groups.
    ``unlisted_events`` and ``unlisted_nodes`` are the numbers of names that the lists omit.
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
    unmatched_events: tuple[UnmatchedName, ...]
    unmatched_nodes: tuple[UnmatchedName, ...]
    unlisted_events: int = 0
    unlisted_nodes: int = 0

    @property
    def time_share(self) -> float:
        """Return the matched share of the device time; 1 without device time."""
        return self.matched_time_ns / self.time_ns if self.time_ns else 1.0

    @property
    def count_share(self) -> float:
        """Return the matched share of the events."""
        return self.matched_events / self.events if self.events else 1.0


def coverage_of(graph: OpGraph, profile: Profile, matching: Matching) -> Coverage:
    """Return how much of a profile and a program was matched, by count and by time. O(nodes + events)."""
    matched = matching.matched
    costs = ~is_free(graph) & (graph.executions != 0)
    listed = np.zeros(len(graph), np.bool_)
    listed[[node for key in matching.keys for node in key.nodes]] = True
    unmatched = costs & ~listed
    time = np.maximum(np.nan_to_num(profile.duration_ns), 0.0)
    keys = matching.event_key[matched]
    rules = np.array([key.rule for key in matching.keys], np.int64)[keys]
    inferred = np.array([key.inferred for key in matching.keys], np.bool_)[keys]
    event_rows = np.where(profile.op_id > 0, profile.op_id, profile.kernel_id)[~matched]
    distinct, index, counts = np.unique(event_rows, return_inverse=True, return_counts=True)
    total = np.bincount(index, time[~matched], len(distinct))
    unmatched_events = [
        UnmatchedName(
            name=profile.strings[int(distinct[row])] or "(unnamed)",
            count=int(counts[row]),
            total_ns=float(total[row]),
        )
        for row in np.argsort(-total, kind="stable").tolist()
    ]
    unmatched_nodes = [
        UnmatchedName(name=graph.strings[row] or "(unnamed)", count=count, total_ns=float("nan"))
        for row, count in Counter[int](graph.op_id[unmatched].tolist()).most_common()
    ]
    return Coverage(
        events=len(profile),
        matched_events=int(matched.sum()),
        time_ns=float(time.sum()),
        matched_time_ns=float(time[matched].sum()),
        compared_time_ns=float(time[matching.event_group >= 0].sum()),
        nodes=int(costs.sum()),
        matched_nodes=int(costs.sum()) - int(unmatched.sum()),
        by_rule={
            name: float(time[matched][rules == code].sum())
            for code, name in enumerate(RULES)
            if bool((rules == code).any())
        },
        inferred_time_ns=float(time[matched][inferred].sum()),
        unmatched_events=tuple(unmatched_events[:_MOST_LISTED]),
        unmatched_nodes=tuple(unmatched_nodes[:_MOST_LISTED]),
        unlisted_events=max(len(unmatched_events) - _MOST_LISTED, 0),
        unlisted_nodes=max(len(unmatched_nodes) - _MOST_LISTED, 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionJoin:
    """Instruction of ``module`` that ran, with the names of the program ``operations`` that it carries out.

    The instruction carries out the operations completely or in part. If it has none, ``rule`` is empty.
    ``inferred`` is True if the compiler created the instruction; ``operations`` are then the operations of
    the instructions that use or produce its data. Its ``events`` took ``time_ns`` in total. ``group`` is its
    comparison group (-1: none).
    """

    module: str
    instruction: str
    rule: str
    inferred: bool
    operations: tuple[str, ...]
    events: int
    time_ns: float
    group: int


def joins_of(graph: OpGraph, profile: Profile, matching: Matching) -> tuple[InstructionJoin, ...]:
    """Return all compiled instructions that ran with the operations they carry out, most time first. O(events
    + links).
    """
    count = len(matching.keys)
    named = np.flatnonzero(matching.event_key >= 0)
    key = matching.event_key[named]
    events = np.bincount(key, minlength=count)
    time = np.bincount(key, np.maximum(np.nan_to_num(profile.duration_ns[named]), 0.0), count)
    group = np.full(count, -1, np.int64)
    group[key] = matching.event_group[named]
    order: list[int] = np.argsort(-time, kind="stable").tolist()
    names: dict[int, str] = {}
    joins: list[InstructionJoin] = []
    for number in order:
        event_key = matching.keys[number]
        if not events[number]:
            continue
        for node in event_key.nodes:
            names.setdefault(node, node_text(graph, node))
        joins.append(
            InstructionJoin(
                module=event_key.module,
                instruction=event_key.op,
                rule=RULES[event_key.rule] if event_key.rule >= 0 else "",
                inferred=event_key.inferred,
                operations=tuple(dict.fromkeys(names[node] for node in event_key.nodes)),
                events=int(events[number]),
                time_ns=float(time[number]),
                group=int(group[number]),
            )
        )
    return tuple(joins)


def node_text(graph: OpGraph, node: int) -> str:
    """Return the name of a node, or its operation if it has no name."""
    return graph.node_name(node) or graph.strings[int(graph.op_id[node])]
