"""Which ranks of a job must behave alike, told by structure alone.

Ranks are alike where they run the same graph, where the ranks they exchange messages with are alike and
equally far, and where all ranks of each of their collectives are alike and see the same network from their
place in it. Kinds are refined until that holds. O(ranks x relations), in columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind, GroupSet
from hespas.graph.columns import IntArray
from hespas.simulator.astra.network import UnawareNetwork
from hespas.simulator.astra.options import AstraOptions
from hespas.simulator.astra.plans import CollectivePlan, Planner
from hespas.simulator.astra.traces import Action, JobTraces, Trace

__all__ = ["alike"]


class _Unlike(Exception):  # noqa: N818 # no error: all ranks are run then
    """What this module cannot prove."""


class _Relation(NamedTuple):
    """Ranks and the other end of a message of each."""

    ranks: IntArray
    peers: IntArray


def alike(
    traces: JobTraces, options: AstraOptions, planner: Planner, wires: UnawareNetwork
) -> IntArray | None:
    """The kind of each rank, counted from 0; None where ranks are not proved alike, or few are."""
    if not options.system.endpoint_delay_ns or not _is_lonely(options):
        return None
    is_aware = options.backend == "aware"
    if is_aware and not _sends_one_at_a_time(traces, options):
        return None
    try:
        return _Kinds(traces, planner, wires, is_aware).refined()
    except _Unlike:
        return None


def _is_lonely(options: AstraOptions) -> bool:
    """Whether no rank waits for the memory of another."""
    kinds = {"NO_MEMORY_EXPANSION", "PER_NPU_MEMORY_EXPANSION"}
    return options.memory is None or options.memory.memory_type in kinds


def _sends_one_at_a_time(traces: JobTraces, options: AstraOptions) -> bool:
    """Whether ranks have one chunk under way, and nothing else that they send."""
    is_single = options.queues_per_dim == options.system.active_chunks_per_dimension == 1
    talks = any(trace.messages for trace in traces.classes.values())
    return is_single and not talks and len(options.network.npus) == 1


@dataclass(slots=True)
class _Kinds:
    traces: JobTraces
    planner: Planner
    wires: UnawareNetwork
    is_aware: bool

    def refined(self) -> IntArray:
        workload = self.traces.workload
        kinds = workload.rank_class.astype(np.int64)
        groups: list[IntArray] = []
        relations: list[_Relation] = []
        for index, trace in self.traces.classes.items():
            ranks = workload.ranks_of(index)
            for table, numbers in self._groups(trace, ranks):
                groups.append(table)
                kinds = _split(kinds, numbers)
            for relation in self._messages(trace, ranks):
                relations.append(relation)
                paths = np.full(len(kinds), -1, np.int64)
                paths[relation.ranks] = self._paths(*relation)
                kinds = _split(kinds, paths)
        self._check_mutual()
        count = -1
        while count != (count := int(kinds.max()) + 1):
            for relation in relations:
                others = np.full(len(kinds), -1, np.int64)
                others[relation.ranks] = kinds[relation.peers]
                kinds = _split(kinds, others)
        for table in groups:
            if (kinds[table] != kinds[table[:, :1]]).any():
                raise _Unlike
        self._check_single(kinds)
        return kinds

    def _groups(self, trace: Trace, ranks: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """The groups of ranks that meet, ``(groups, size)``, and by rank a number of how they see the
        network, -1 for others.
        """
        seen: set[tuple[int, str]] = set()
        for stated in trace.collectives.values():
            if stated.kind is CollectiveKind.BROADCAST:
                continue
            sets = trace.graph.group_sets
            groups = sets[stated.row] if stated.row >= 0 else None
            number = self.traces.group_number(groups, int(ranks[0])) if groups is not None else 0
            members = groups.members(groups.group_of(int(ranks[0]))) if groups is not None else None
            plan = self.planner.plan(
                stated.kind, stated.size, tuple(members.tolist()) if number and members is not None else None,
                stated.involved,
            )  # fmt: skip
            family = self._family(plan)
            row = -1 if plan.group is None else stated.row
            if (row, family) in seen:
                continue
            seen.add((row, family))
            if plan.group is None or groups is None:
                world = np.arange(self.traces.workload.num_ranks, dtype=np.int64)
                yield world[None], np.zeros(len(world), np.int64)
                continue
            yield from self._subgroups(groups, ranks, family)

    def _family(self, plan: CollectivePlan) -> str:
        """The algorithm of a group. Places in trees, and in rings over several dimensions, differ."""
        families = {phase.algorithm.family for phase in plan.phases}
        flat = any(phase.algorithm.flat for phase in plan.phases) and len(self.planner.network.npus) > 1
        if "tree" in families or (flat and plan.group is None):
            raise _Unlike
        if self.is_aware and "direct" in families:
            raise _Unlike  # all messages of a rank at once
        if self.is_aware and plan.group is None and "halving" in families:
            self._views(np.arange(self._ranks, dtype=np.int64)[None], "halving")
        return plan.phases[0].algorithm.family if plan.group is not None else ""

    def _subgroups(
        self, groups: GroupSet, ranks: IntArray, family: str
    ) -> Iterator[tuple[IntArray, IntArray]]:
        places = groups.groups_of(ranks)
        if (places < 0).any():
            raise _Unlike
        rows = [groups.members(place) for place in np.unique(places).tolist()]
        if len({len(row) for row in rows}) > 1 or max(int(row.max()) for row in rows) >= self._ranks:
            raise _Unlike
        table = np.stack(rows)
        here = groups.groups_of(table.reshape(-1)).reshape(table.shape)
        if (here != np.unique(places)[:, None]).any():
            raise _Unlike
        numbers = np.full(self._ranks, -1, np.int64)
        numbers[table] = self._views(table, family)[:, None]
        yield table, numbers

    def _may_meet(self, paths: IntArray) -> bool:
        """Whether messages pass links that those of other ranks pass too: behind the first hop of a ring."""
        return self.planner.network.topology[0] == "Ring" and bool((paths > 1).any())

    @property
    def _ranks(self) -> int:
        return self.traces.workload.num_ranks

    def _views(self, table: IntArray, family: str) -> IntArray:
        """A number per group for how its ranks see each other: the path to each rank they send to, which is
        that of all of them.
        """
        size = table.shape[1]
        if family == "halving" and size & (size - 1):
            raise _Unlike
        columns: list[IntArray] = []
        for step in _steps(family, size):
            others = table[:, np.arange(size) ^ step] if family == "halving" else np.roll(table, -step, 1)
            paths = self._paths(table.reshape(-1), others.reshape(-1)).reshape(table.shape)
            if (paths != paths[:, :1]).any() or (self.is_aware and self._may_meet(paths)):
                raise _Unlike
            columns.append(paths[:, 0])
        return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)

    def _paths(self, ranks: IntArray, peers: IntArray) -> IntArray:
        """A number for the dimension and hops between ranks."""
        if (ranks == peers).any():
            raise _Unlike
        return self.wires.paths(ranks, peers)

    def _messages(self, trace: Trace, ranks: IntArray) -> Iterator[_Relation]:
        """Whom the ranks of a class send to and receive from."""
        for row, sends in sorted(_message_rows(trace)):
            peers = self._peers(trace, row, ranks, sends=sends)
            yield _Relation(ranks, peers)

    def _peers(self, trace: Trace, row: int, ranks: IntArray, *, sends: bool) -> IntArray:
        if row < 0:
            raise _Unlike
        permutation = trace.graph.permutations[row]
        peers = permutation.targets_of(ranks) if sends else permutation.sources_of(ranks)
        if (peers < 0).any() or (peers >= self._ranks).any():
            raise _Unlike
        return peers

    def _listed(self, *, sends: bool) -> IntArray:
        """Distinct rows of (source, target, tag, size)."""
        wanted = Action.SEND if sends else Action.RECEIVE
        parts: list[IntArray] = [np.empty((0, 4), np.int64)]
        for index, trace in self.traces.classes.items():
            ranks = self.traces.workload.ranks_of(index)
            stated = {
                (message.row, message.tag, message.size)
                for place, message in trace.messages.items()
                if trace.action[place] == wanted
            }
            for row, tag, size in sorted(stated):
                peers = self._peers(trace, row, ranks, sends=sends)
                ends = (ranks, peers) if sends else (peers, ranks)
                parts.append(np.stack([*ends, np.full_like(ranks, tag), np.full_like(ranks, size)], 1))
        return np.unique(np.concatenate(parts), axis=0)

    def _check_mutual(self) -> None:
        """Whoever sends is asked for it."""
        if not any(trace.messages for trace in self.traces.classes.values()):
            return
        if not np.array_equal(self._listed(sends=True), self._listed(sends=False)):
            raise _Unlike

    def _check_single(self, kinds: IntArray) -> None:
        """Of the ranks of a kind, a rank exchanges messages of one tag and size with one."""
        if not any(trace.messages for trace in self.traces.classes.values()):
            return
        listed = self._listed(sends=True)
        for end, other in ((0, 1), (1, 0)):
            keys = np.stack([listed[:, end], kinds[listed[:, other]], listed[:, 2], listed[:, 3]], 1)
            if len(np.unique(keys, axis=0)) < len(keys):
                raise _Unlike


def _message_rows(trace: Trace) -> set[tuple[int, bool]]:
    return {(message.row, trace.action[place] == Action.SEND) for place, message in trace.messages.items()}


def _steps(family: str, size: int) -> range | list[int]:
    """How far the ranks are apart to which a rank sends."""
    if family == "ring":
        return range(1, 2)
    if family == "direct":
        return range(1, size)
    return [1 << bit for bit in range(size.bit_length() - 1)]


def _split(kinds: IntArray, numbers: IntArray) -> IntArray:
    """Kinds whose ranks differ in a number are several."""
    pairs = np.stack([kinds, numbers], 1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
