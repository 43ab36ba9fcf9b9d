"""What of a profile a program accounts for, and by which evidence: all comparisons begin with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hespas.graph import Diagnostics, Profile, Workload
from hespas.validators.accuracy.coverage import RULES, Join
from hespas.validators.accuracy.programs import sources_of_program

__all__ = ["LEAST_JOINED", "Joined", "join_program"]

LEAST_JOINED = 0.5
"""Where less of the device time finds its operations, another program ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """``time_ns`` is all device time of the profile, ``joined_ns`` what of it finds its operations, and
    ``by_rule`` the latter by the evidence (:data:`RULES`, strongest first). ``inferred_ns`` is part of it: of
    instructions that the compiler made up, which have the operations that they serve. ``groups`` counts what
    can be compared; ``joins`` list every instruction that ran, most time first.
    """

    program: str
    profile: str
    time_ns: float
    joined_ns: float
    inferred_ns: float
    by_rule: Mapping[str, float]
    groups: int
    joins: tuple[Join, ...]

    @property
    def share(self) -> float:
        """The joined share of the device time, 0..1; 0 where there is none."""
        return self.joined_ns / self.time_ns if self.time_ns else 0.0

    @property
    def is_other_program(self) -> bool:
        """Whether so little is joined that another program ran."""
        return self.share < LEAST_JOINED


def join_program(workload: Workload, profile: Profile, diagnostics: Diagnostics) -> Joined:
    """Join the events of ``profile`` to the operations of ``workload``; ``diagnostics`` say what was joined
    by structure, what nothing tells of, and where another program ran. O(nodes + events + instructions).
    """
    sources = list(sources_of_program(profile, workload, "", diagnostics))
    covered = [source.coverage for source in sources if source.coverage is not None]
    by_rule = {rule: sum(each.by_rule.get(rule, 0.0) for each in covered) for rule in RULES}
    joins = sorted((join for source in sources for join in source.joins), key=lambda join: -join.time_ns)
    return Joined(
        program=workload.name,
        profile=profile.name,
        time_ns=sum(each.time_ns for each in covered),
        joined_ns=sum(each.matched_time_ns for each in covered),
        inferred_ns=sum(each.inferred_time_ns for each in covered),
        by_rule={rule: time for rule, time in by_rule.items() if time},
        groups=sum(len(source.node) for source in sources),
        joins=tuple(joins),
    )
