"""Rules, their input and their result: a checked workload with its configuration, and violations with
codes.
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
from hespas.simulator.astra.configuration import Backend, MemoryConfig, NetworkConfig, SystemConfig
from hespas.validators.checker.rank_equivalence import RankEquivalence, rank_equivalence_of
from hespas.validators.checker.replay import IssueOrder, issue_order

__all__ = [
    "SCHEMA_ID",
    "Check",
    "CheckDocument",
    "CheckFindings",
    "CheckResult",
    "CheckRule",
    "CheckedInput",
    "CheckedJob",
    "Need",
    "Profile",
    "RuleReport",
    "Scope",
    "Violation",
    "check_json",
]


Profile = Literal["chakra", "astra-sim"]
"""Target of the check besides soundness: a Chakra trace, or a trace that ASTRA-sim can run."""


_Id = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of a checker rule. ``rank`` and ``node`` (the id in the file) are None if it concerns
    several.
    """

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
    """Checked input. ``complete`` is True if it has all ranks of the job, so that rules across ranks were
    checked.
    """

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
    """Result of a check. ``counts`` is exact per code; ``violations`` has only the first ones of each code.

    ``unreadable`` are the errors of inputs that could not be read; their violations are listed too.
    """

    profile: Profile | None
    inputs: tuple[CheckedInput, ...]
    violations: tuple[Violation, ...]
    counts: Mapping[str, int]
    diagnostics: tuple[Diagnostic, ...]
    unreadable: tuple[HespasError, ...] = ()

    @property
    def valid(self) -> bool:
        """Return True if every input was read and no violation is an error."""
        errors = any(violation.severity is Severity.ERROR for violation in self.violations)
        return not errors and not self.unreadable

    @property
    def exit_code(self) -> int:
        """Return 0 if valid, 1 if not valid, 3 or 4 if an input could not be read."""
        if self.unreadable:
            return max(map(exit_code, self.unreadable))
        return 0 if self.valid else 1


@dataclass(slots=True)
class CheckFindings:
    """Violations of one input: the first ``keep`` of each code and severity, and the exact counts.

    A reader and a rule may report the same fault. It counts once per code, severity, rank and node.
    """

    keep: int
    violations: list[Violation] = field(default_factory=list[Violation])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    notes: Diagnostics = field(default_factory=Diagnostics)
    _num_listed: dict[tuple[str, Severity], int] = field(default_factory=dict[tuple[str, Severity], int])
    _locations: set[tuple[str, bool, int | None, int]] = field(
        default_factory=set[tuple[str, bool, int | None, int]]
    )

    def add(self, violation: Violation, count: int = 1) -> None:
        """Record ``count`` violations. ``violation`` describes one of them."""
        if violation.node is not None and count == 1:
            location = (violation.code, violation.severity is Severity.ERROR, violation.rank, violation.node)
            if location in self._locations:
                return
            self._locations.add(location)
        self.counts[violation.code] = self.counts.get(violation.code, 0) + count
        key = (violation.code, violation.severity)
        listed = self._num_listed.get(key, 0)
        if listed < self.keep:
            self._num_listed[key] = listed + 1
            self.violations.append(violation)

    @property
    def has_errors(self) -> bool:
        """Return True if a violation is an error."""
        return any(violation.severity is Severity.ERROR for violation in self.violations)

    def lower_errors(self, reason: str) -> None:
        """Turn all errors that were recorded so far into warnings, with a reason."""
        self.violations = [
            replace(entry, severity=Severity.WARNING, message=f"{entry.message} ({reason})")
            if entry.severity is Severity.ERROR
            else entry
            for entry in self.violations
        ]

    def has(self, code: str) -> bool:
        """Return True if a violation has this code, at any severity."""
        return code in self.counts


SCHEMA_ID: Final = "hespas.check/1"
"""Value of ``schema`` in documents of this version."""


class CheckDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate check."""

    schema: Literal["hespas.check/1"] = SCHEMA_ID
    hespas_version: str = __version__
    profile: Annotated[
        Profile | None, Meta(description="Rule set that was requested in addition to soundness.")
    ]
    valid: Annotated[bool, Meta(description="Every input was read and no violation is an error.")]
    inputs: tuple[CheckedInput, ...]
    counts: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(description="Exact number of findings per code; violations lists the first ones of each."),
    ]
    violations: tuple[Violation, ...]
    diagnostics: tuple[Diagnostic, ...]


def check_json(result: CheckResult) -> bytes:
    """Return the document as indented UTF-8 JSON that ends in a newline."""
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
"""Part of ASTRA-sim's configuration that a rule can require."""

Check = Callable[["CheckedJob", "RuleReport"], None]
"""Function of a rule, which adds the violations in a job to a report."""


class Scope(Enum):
    """Part of the input that a rule of the checker looks at."""

    FILE = "file"
    RANK = "rank"
    SET = "set"
    CONFIGURATION = "configuration"


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedJob:
    """Workload whose rules are checked. ``complete`` is False if ranks of the job are missing. ``is_set`` is
    False for a single file of a set.
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
        """Return the graphs of the rank classes."""
        return self.workload.classes

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks. For an incomplete job it is the number of ranks of the network (-1: no
        network).
        """
        if not self.complete:
            return -1 if self.network is None else self.network.num_ranks
        return self.workload.num_ranks

    def ranks_of(self, index: int) -> IntArray:
        """Return the ranks of one class."""
        return self.workload.ranks_of(index)

    @cached_property
    def class_sizes(self) -> tuple[int, ...]:
        """Return the number of ranks of each class."""
        return self.workload.class_sizes

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """Return the first rank of each class, -1 if it has no rank."""
        return self.workload.first_ranks

    @cached_property
    def equivalence(self) -> RankEquivalence:
        """Return the classes of ranks that no rule can distinguish. For complete jobs only."""
        return rank_equivalence_of(self.workload, self.path)

    @cached_property
    def orders(self) -> tuple[IssueOrder, ...]:
        """Return the issue order of the collectives of each class."""
        return tuple(map(issue_order, self.classes))

    @cached_property
    def is_uniform(self) -> bool:
        """Return True if all ranks are equivalent, so that rules across ranks hold by construction."""
        return len(self.classes) == 1 and len(self.equivalence.representatives) == 1


@dataclass(frozen=True, slots=True)
class CheckRule:
    """Rule of the checker, with its severity without a profile and under each profile.

    The rule does not apply if the severity is None. If ``check`` is None, the reader of a format checks the
    rule. ``needs`` lists the configuration files that the rule requires.
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
        """Return the severity under a profile, None if the rule does not apply."""
        return {None: self.plain, "chakra": self.chakra, "astra-sim": self.astra_sim}[profile]


@dataclass(frozen=True, slots=True)
class RuleReport:
    """Collector of the violations of one checker rule in one job."""

    code: str
    severity: Severity
    job: CheckedJob
    findings: CheckFindings

    def add(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: int | None = None,
        severity: Severity | None = None,
        count: int = 1,
    ) -> None:
        """Add ``count`` violations, with a rank and a node id if they are known."""
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
        """Add a violation for each of some nodes of a class, given as a mask or as numbers.

        ``rank`` is the rank that violates the rule. None means all ranks of the class; the first one is then
        reported.
        """
        graph = self.job.classes[index]
        ranks = self.job.class_sizes[index]
        if not ranks or not len(nodes):
            return
        at_rank = self.job.first_ranks[index] if rank is None else rank
        is_shared = rank is None and ranks > 1
        suffix = f" (also on the {ranks - 1:,} other ranks of its class)" if is_shared else ""
        marked = np.flatnonzero(nodes) if nodes.dtype == np.bool_ else np.unique(nodes)
        listed: list[int] = marked[: self.findings.keep].tolist()
        for node in listed:
            name = graph.node_name(node) or graph.op_name(node)
            text = f"{name}: {message}{suffix}" if name else f"{message}{suffix}"
            self.add(text, rank=at_rank, node=int(graph.id[node]), severity=severity)
        rest = len(marked) - len(listed)
        if rest > 0:
            self.add(f"{rest:,} more nodes", rank=at_rank, severity=severity, count=rest)

    def note(self, message: str) -> None:
        """Add a note that is not a violation, such as a check that was not possible."""
        self.findings.notes.info(self.code, self.job.path, message, path=self.job.path)

    def has(self, *codes: str) -> bool:
        """Return True if the job already has a violation of any of these codes."""
        return any(map(self.findings.has, codes))
