"""What a rule sees: one workload, how it was read, the simulator it is meant for; and what a check says:
violations of coded rules, as values and as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from hespas._version import __version__
from hespas.files.documents import Count, document_bytes
from hespas.graph import Diagnostic, Diagnostics, OpGraph, Severity, Workload
from hespas.graph.columns import BoolArray, IntArray, SmallIntArray
from hespas.graph.errors import HespasError, exit_code
from hespas.simulator.astra.configuration import MemoryConfig, NetworkConfig, SystemConfig
from hespas.simulator.astra.options import Backend
from hespas.validators.checker.rank_equivalence import RankEquivalence, rank_equivalence_of
from hespas.validators.checker.replay import NodeProgram, Task, replay

__all__ = [
    "SCHEMA_ID",
    "Check",
    "CheckDocument",
    "CheckResult",
    "CheckedInput",
    "Findings",
    "Job",
    "Need",
    "Profile",
    "Report",
    "Rule",
    "Scope",
    "Violation",
    "check_json",
]


Profile = Literal["chakra", "astra-sim"]
"""What the input must be fit for, beyond being sound: a Chakra trace, or a trace ASTRA-sim can run."""


_Id = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule. ``rank`` and ``node`` (the format's own id) are None where it has no single place."""

    code: Annotated[
        str,
        Meta(description="Rule: ETnnn of the Chakra contract, GRnnn of any graph, else the reader's own."),
    ]
    severity: Annotated[Severity, Meta(extra_json_schema={"enum": ["warning", "error"]})]
    path: str
    rank: Count | None
    node: Annotated[_Id | None, Meta(description="The format's own node id.")]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInput:
    """One input: ``complete`` says whether all ranks of the job were there to be checked together."""

    path: str
    format: str
    num_ranks: Annotated[int, Meta(ge=1)]
    num_classes: Annotated[
        int, Meta(ge=1, description="Distinct graphs; ranks of one class run the same one.")
    ]
    num_nodes: Annotated[Count, Meta(description="Nodes of all classes together.")]
    complete: Annotated[
        bool,
        Meta(description="False for one file of a per-rank set: rules across ranks were not checked."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The outcome. ``counts`` is exact per code; ``violations`` holds the first findings of each code only.

    ``unreadable`` are the errors of inputs that could not be read at all (their violation is listed too).
    """

    profile: Profile | None
    inputs: tuple[CheckedInput, ...]
    violations: tuple[Violation, ...]
    counts: Mapping[str, int]
    diagnostics: tuple[Diagnostic, ...]
    unreadable: tuple[HespasError, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether every input was read and no violation is an error."""
        errors = any(violation.severity is Severity.ERROR for violation in self.violations)
        return not errors and not self.unreadable

    @property
    def exit_code(self) -> int:
        """0 valid, 1 not valid, 3 or 4 where an input could not be read."""
        if self.unreadable:
            return max(map(exit_code, self.unreadable))
        return 0 if self.valid else 1


@dataclass(slots=True)
class Findings:
    """Violations of one input: the first ``keep`` of each code and severity, exact counts, no place twice.

    A rule over hub values and the reader may both see a fault; the place (code, rank, node) tells.
    """

    keep: int
    violations: list[Violation] = field(default_factory=list[Violation])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    notes: Diagnostics = field(default_factory=Diagnostics)
    _kept: dict[tuple[str, Severity], int] = field(default_factory=dict[tuple[str, Severity], int])
    _places: set[tuple[str, bool, int | None, int]] = field(
        default_factory=set[tuple[str, bool, int | None, int]]
    )

    def add(self, violation: Violation, count: int = 1) -> None:
        """Record ``count`` findings, of which ``violation`` describes one."""
        if violation.node is not None and count == 1:
            place = (violation.code, violation.severity is Severity.ERROR, violation.rank, violation.node)
            if place in self._places:
                return
            self._places.add(place)
        self.counts[violation.code] = self.counts.get(violation.code, 0) + count
        key = (violation.code, violation.severity)
        kept = self._kept.get(key, 0)
        if kept < self.keep:
            self._kept[key] = kept + 1
            self.violations.append(violation)

    @property
    def has_errors(self) -> bool:
        """True where a violation is an error."""
        return any(each.severity is Severity.ERROR for each in self.violations)

    def lower_errors(self, reason: str) -> None:
        """Turn the errors so far into warnings that state the reason."""
        self.violations = [
            replace(each, severity=Severity.WARNING, message=f"{each.message} ({reason})")
            if each.severity is Severity.ERROR
            else each
            for each in self.violations
        ]

    def has(self, code: str) -> bool:
        """Whether a code was found, at any severity."""
        return code in self.counts


SCHEMA_ID: Final = "hespas.check/1"
"""What a document of this version says in ``schema``."""


class CheckDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate check."""

    schema: Literal["hespas.check/1"] = SCHEMA_ID
    hespas_version: str = __version__
    profile: Annotated[Profile | None, Meta(description="Rule set that was asked for beyond soundness.")]
    valid: Annotated[bool, Meta(description="Every input was read and no violation is an error.")]
    inputs: tuple[CheckedInput, ...]
    counts: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(description="Exact number of findings per code; violations lists the first ones of each."),
    ]
    violations: tuple[Violation, ...]
    diagnostics: tuple[Diagnostic, ...]


def check_json(result: CheckResult) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline."""
    document = CheckDocument(
        profile=result.profile,
        valid=result.valid,
        inputs=result.inputs,
        counts=dict(result.counts),
        violations=result.violations,
        diagnostics=result.diagnostics,
    )
    return document_bytes(document)


Need = Literal["system", "network", "memory", "backend"]
"""What of ASTRA-sim's configuration a rule may ask for."""

Check = Callable[["Job", "Report"], None]
"""A rule's function: what it finds in a job goes into the report."""


class Scope(Enum):
    """How much of the input a rule looks at."""

    FILE = "file"
    RANK = "rank"
    SET = "set"
    CONFIGURATION = "configuration"


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One input. Of a job that is not ``complete`` only some of the ranks are there. ``is_set`` is False for
    one file of a set of per-rank files.
    """

    path: str
    workload: Workload
    complete: bool = True
    profile: Profile | None = None
    replay_limit: int = 1_000_000
    system: SystemConfig | None = None
    network: NetworkConfig | None = None
    memory: MemoryConfig | None = None
    backend: Backend | None = None
    queues_per_dim: int = 1
    is_set: bool = True

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
    def class_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each class."""
        return self.workload.class_sizes

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each class, -1 where no rank runs it."""
        return self.workload.first_ranks

    @cached_property
    def equivalence(self) -> RankEquivalence:
        """Ranks that cannot be told apart, merged; only for complete jobs."""
        return rank_equivalence_of(self.workload, self.path)

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
    check: Check | None = None
    needs: tuple[Need, ...] = ()

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
        nodes: BoolArray | IntArray | SmallIntArray,
        message: str,
        severity: Severity | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """A finding per node of one class (those of a mask, or by number), at the class's first rank, or at
        the one that is at fault where not all of the class are.
        """
        graph = self.job.classes[index]
        ranks = self.job.class_sizes[index]
        if not ranks or not len(nodes):
            return
        where = self.job.first_ranks[index] if rank is None else rank
        of_all = rank is None and ranks > 1
        suffix = f" (and on the {ranks - 1:,} other ranks of its class)" if of_all else ""
        marked = np.flatnonzero(nodes) if nodes.dtype == np.bool_ else np.unique(nodes)
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
