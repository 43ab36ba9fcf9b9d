"""What a rule sees: one workload, how it was read, and the simulator it is meant for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal

import numpy as np

from hespas.graph import OpGraph, Severity, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.validators.checker.configuration import MemoryConfig, NetworkConfig, SystemConfig
from hespas.validators.checker.rank_equivalence import RankEquivalence, rank_equivalence_of
from hespas.validators.checker.replay import NodeProgram, Task, replay
from hespas.validators.checker.result import Findings, Violation

__all__ = ["Backend", "Job", "Profile", "Report", "Rule", "Scope"]

Profile = Literal["chakra", "astra-sim"]
"""What the input must be fit for, beyond being sound: a Chakra trace, or a trace ASTRA-sim can run."""

Backend = Literal["unaware", "aware"]
"""ASTRA-sim's analytical network without or with congestion."""


class Scope(Enum):
    """How much of the input a rule looks at."""

    FILE = "file"
    RANK = "rank"
    SET = "set"
    CONFIGURATION = "configuration"


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One input. Of a job that is not ``complete`` only some of the ranks are there."""

    path: str
    workload: Workload
    complete: bool = True
    profile: Profile | None = None
    replay_limit: int = 1_000_000
    system: SystemConfig | None = None
    network: NetworkConfig | None = None
    memory: MemoryConfig | None = None
    backend: Backend | None = None

    @property
    def classes(self) -> tuple[OpGraph, ...]:
        """The graphs of the rank classes."""
        return self.workload.classes

    @property
    def num_ranks(self) -> int:
        """Ranks of the job; where some are missing, those of the network, or -1: groups may not name all."""
        if not self.complete:
            return -1 if self.network is None else self.network.num_ranks
        return self.workload.num_ranks

    def ranks_of(self, index: int) -> IntArray:
        """The ranks that run one class."""
        return self.workload.ranks_of(index)

    @cached_property
    def equivalence(self) -> RankEquivalence:
        """Ranks that cannot be told apart, merged; only for complete jobs."""
        return rank_equivalence_of(self.workload)

    @cached_property
    def orders(self) -> tuple[_IssueOrder, ...]:
        """Per class, the order in which a rank issues its communication."""
        return tuple(map(_issue_order, self.classes))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all ranks run one graph in one situation: then they agree by construction."""
        return len(self.classes) == 1 and len(self.equivalence.representatives) == 1


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table. The three levels are its severity without a profile and under each profile.

    A level of None leaves the rule out. ``check`` is None for rules that the reader of a format checks.
    ``needs`` names what of the configuration the rule cannot do without.
    """

    code: str
    title: str
    scope: Scope
    plain: Severity | None
    chakra: Severity | None
    astra_sim: Severity | None
    check: Callable[[Job, Report], None] | None = None
    needs: tuple[Literal["system", "network", "memory", "backend"], ...] = ()

    def level(self, profile: Profile | None) -> Severity | None:
        """The severity under a profile, None where the rule does not apply."""
        return {None: self.plain, "chakra": self.chakra, "astra-sim": self.astra_sim}[profile]


@dataclass(frozen=True, slots=True)
class Report:
    """Where one rule puts what it finds in one job."""

    code: str
    severity: Severity
    job: Job
    findings: Findings

    def add(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: int | None = None,
        severity: Severity | None = None,
        count: int = 1,
    ) -> None:
        """A finding at a rank and a node id, or at neither."""
        level = severity or self.severity
        self.findings.add(Violation(self.code, level, self.job.path, rank, node, message), count)

    def nodes(
        self,
        index: int,
        mask: BoolArray,
        message: str,
        severity: Severity | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """A finding per marked node of one class, at the class's first rank, or at the one that is at fault
        where not all of the class are.
        """
        graph = self.job.classes[index]
        ranks = self.job.ranks_of(index)
        if not len(ranks):
            return
        where = int(ranks[0]) if rank is None else rank
        of_all = rank is None and len(ranks) > 1
        suffix = f" (and on the {len(ranks) - 1:,} other ranks of its class)" if of_all else ""
        marked = np.flatnonzero(mask)
        listed: list[int] = marked[: self.findings.keep].tolist()
        for node in listed:
            name = graph.node_name(node) or graph.op_name(node)
            told = f"{name}: {message}{suffix}" if name else f"{message}{suffix}"
            self.add(told, rank=where, node=int(graph.id[node]), severity=severity)
        rest = len(marked) - len(listed)
        if rest > 0:
            self.add(f"{rest:,} more nodes", rank=where, severity=severity, count=rest)

    def note(self, message: str) -> None:
        """Something worth knowing that is no violation, such as a check that was not possible."""
        self.findings.notes.info(self.code, self.job.path, message, path=self.job.path)

    def has(self, *codes: str) -> bool:
        """Whether an earlier rule found any of these codes in this job."""
        return any(map(self.findings.has, codes))


# The order in which one rank issues its communication, by ASTRA-sim's rule.
#
# One CPU operation, one device operation and one communication are in flight at a time, receives without
# limit; whenever something completes, ready nodes are issued in ascending id (network model, section 7).


@dataclass(frozen=True, slots=True)
class _IssueOrder:
    """Collective nodes of a class in the order in which a rank issues them when it never waits.

    ``by_time`` follows the slot rule with the durations the graph states, ``by_id`` the ids alone. They
    differ only where independent collectives race, and then the true order is a matter of timing.
    """

    by_time: tuple[int, ...]
    by_id: tuple[int, ...]


def _issue_order(graph: OpGraph) -> _IssueOrder:
    """Both orders of one graph. O(nodes log nodes)."""
    runs = graph.multiplicity != 0
    table = graph.collectives
    nodes = table.node[runs[table.node]]
    by_id: list[int] = nodes[np.argsort(graph.id[nodes], kind="stable")].tolist()
    if len(by_id) < 2:
        return _IssueOrder(tuple(by_id), tuple(by_id))
    alone = Task(NodeProgram.of(graph), dict.fromkeys(by_id, 0), {}, {})
    issued = replay([alone], [1], comm_ns=1).issued[0]
    return _IssueOrder(tuple(issued), tuple(by_id))
