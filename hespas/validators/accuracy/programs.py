"""Cases of a profile, matched with a program: a program that a user gives, or the compiled programs in the
profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.converters import ReadOptions, load_format
from hespas.graph import Diagnostics, GraphBuilder, OpGraph, Profile, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import HespasError, MissingExtraError
from hespas.validators.accuracy.cases import (
    LEAST_NS,
    CaseMembers,
    CaseSource,
    cases_of,
    events_of,
    grouped_graph,
    leading_nodes,
    measured_groups,
)
from hespas.validators.accuracy.coverage import (
    RULES,
    InstructionJoin,
    Matching,
    coverage_of,
    joins_of,
    node_text,
)
from hespas.validators.accuracy.matching import check_program, match_program
from hespas.validators.accuracy.structure import ProgramSizes

__all__ = [
    "Joined",
    "join_program",
    "program_sizes",
    "sources_of_attached",
    "sources_of_program",
    "step_rows",
]

_LEAST_JOINED = 0.5
"""Least joined share of the device time; below it, another program ran."""
_ATTACHED = "hlo/"
_MATCHED_NS = 1e-9
"""Weight of a matched event of 0 ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Device time of a profile, and the part of it whose events are joined to (matched with) operations of a
    program.

    ``time_ns`` is all device time of the profile, ``joined_ns`` the joined part, and ``by_rule`` the joined
    part by rule (:data:`RULES`, strongest first). ``inferred_ns`` is the part of ``joined_ns`` in
    instructions that the compiler created. They are joined to the operations of the instructions that use or
    produce their data. ``groups`` is the number of comparison groups. ``joins`` lists all instructions that
    ran, longest time first.
    """

    program: str
    profile: str
    time_ns: float
    joined_ns: float
    inferred_ns: float
    by_rule: Mapping[str, float]
    groups: int
    joins: tuple[InstructionJoin, ...]

    @property
    def share(self) -> float:
        """Return the matched share of the device time, 0..1; 0 without device time."""
        return self.joined_ns / self.time_ns if self.time_ns else 0.0

    @property
    def is_other_program(self) -> bool:
        """Return True if the matched share is so small that another program ran."""
        return self.share < _LEAST_JOINED


def join_program(workload: Workload, profile: Profile, diagnostics: Diagnostics) -> Joined:
    """Join the events of ``profile`` to the operations of ``workload``. O(nodes + events +
    instructions).

    ``diagnostics`` report joins by structure, events without a match, and modules of other programs.
    """
    sources = list(sources_of_program(profile, workload, "", diagnostics))
    coverages = [source.coverage for source in sources if source.coverage is not None]
    by_rule = {rule: sum(coverage.by_rule.get(rule, 0.0) for coverage in coverages) for rule in RULES}
    joins = sorted((join for source in sources for join in source.joins), key=lambda join: -join.time_ns)
    return Joined(
        program=workload.name,
        profile=profile.name,
        time_ns=sum(coverage.time_ns for coverage in coverages),
        joined_ns=sum(coverage.matched_time_ns for coverage in coverages),
        inferred_ns=sum(coverage.inferred_time_ns for coverage in coverages),
        by_rule={rule: time for rule, time in by_rule.items() if time},
        groups=sum(len(source.node) for source in sources),
        joins=tuple(joins),
    )


def sources_of_attached(profile: Profile, hardware: str, diagnostics: Diagnostics) -> list[CaseSource]:
    """Return the cases of a profile, matched with the compiled programs that the profile contains: one source
    for each rank class of each program that ran. Empty if no program ran.

    Events that belong to no program are an additional source, without cases.
    """
    sources: list[CaseSource] = []
    has_program = np.zeros(len(profile), np.bool_)
    programs = list(_attached_programs(profile, diagnostics))
    for module, program in programs:
        rows = [row for row in np.unique(profile.module_id).tolist() if profile.strings[row] == module]
        is_of_module = np.isin(profile.module_id, rows)
        has_program |= is_of_module
        part = events_of(profile, np.flatnonzero(is_of_module), f"{profile.name}:{module}")
        sources += sources_of_program(part, program, hardware, diagnostics, is_own=True)
    if programs:
        sources += _without_program(profile, ~has_program, hardware, diagnostics)
    return sources


def _attached_programs(profile: Profile, diagnostics: Diagnostics) -> Iterator[tuple[str, Workload]]:
    """Yield name and program of the compiled modules of a profile that ran in it.

    A module that cannot be read is skipped with a warning. Raises ``MissingExtraError`` without the bindings
    that read modules.
    """
    ran = {profile.strings[row] for row in np.unique(profile.module_id).tolist()}
    read = load_format("hlo").read
    for name, data in profile.attachments.items():
        module = name.removeprefix(_ATTACHED)
        if not name.startswith(_ATTACHED) or module not in ran or read is None:
            continue
        with TemporaryDirectory(prefix="hespas-") as folder:
            path = Path(folder) / "module.pb"
            path.write_bytes(data)
            module_diagnostics = Diagnostics()
            try:
                program = read(path, ReadOptions(), module_diagnostics)
            except MissingExtraError:
                raise  # without its program, no operation of the profile has a cost
            except HespasError as error:
                diagnostics.warning(
                    "accuracy.unreadable-module",
                    profile.name,
                    f"module {module} is skipped: {error.message}",
                )
                continue
        # Report under the name of the module: the path of the temporary file is meaningless to users.
        counts = module_diagnostics.counts()
        first = {diagnostic.code: diagnostic for diagnostic in reversed(list(module_diagnostics))}
        for code, diagnostic in first.items():
            diagnostics.add(code, diagnostic.severity, module, diagnostic.message, count=counts[code])
        if isinstance(program, Workload):
            yield module, replace(program, name=module)


def sources_of_program(
    profile: Profile, workload: Workload, hardware: str, diagnostics: Diagnostics, *, is_own: bool = False
) -> Iterator[CaseSource]:
    """Yield the cases of each rank class as one source per class. Only the first source has the program and
    its events on all ranks.

    ``is_own`` is True if the program was read from the profile.
    """
    if not len(profile):
        return
    several = len(workload.classes) > 1
    class_of_event = np.zeros(len(profile), np.int64)
    if several:
        num_ranks = len(workload.rank_class)
        is_known = (profile.rank >= 0) & (profile.rank < num_ranks)
        diagnostics.warning(
            "match.unknown-rank",
            profile.name,
            f"events are of ranks outside of the program, which has {num_ranks:,} ranks",
            count=int((~is_known).sum()),
        )
        ranks = np.where(is_known, profile.rank, 0)
        class_of_event = np.where(is_known, workload.rank_class[ranks], -1).astype(np.int64)
    matched = np.zeros(len(profile), np.bool_)
    sources: list[CaseSource] = []
    for number, graph in enumerate(workload.classes):
        rows = np.flatnonzero(class_of_event == number)
        if not len(rows):
            continue
        part = events_of(profile, rows, f"{profile.name}, class {number}") if several else profile
        sizes = program_sizes(workload, number)
        matching = match_program(graph, part, diagnostics, is_own=is_own, sizes=sizes)
        matched[rows] = matching.matched
        source = _source_of_matching(part, workload, graph, matching, hardware)
        coverage = source.coverage
        if coverage is not None:
            diagnostics.warning(
                "match.unmatched-events",
                part.name,
                f"events do not match the program: {1 - coverage.time_share:.1%} of the device time",
                count=coverage.events - coverage.matched_events,
            )
            diagnostics.warning(
                "match.negative-duration",
                part.name,
                "events end before they start: they and their runs are excluded from the comparison",
                count=int((part.duration_ns < 0).sum()),
            )
            diagnostics.info(
                "match.unmatched-nodes",
                part.name,
                "operations with a cost match no event: the compiler removed or merged them",
                count=coverage.nodes - coverage.matched_nodes,
            )
        sources.append(source)
    step = step_rows(profile, matched)
    if len(step) and sources:
        ran = events_of(profile, step, profile.name)
        if not is_own:
            check_program(workload, ran, diagnostics)
        sources[0] = replace(sources[0], profile=ran, program=workload)
    yield from sources
    if several:
        yield from _without_program(profile, class_of_event < 0, hardware, diagnostics)


def program_sizes(workload: Workload, number: int) -> ProgramSizes | None:
    """Return the sizes that a program declares for its rank class ``number``; None if it declares none."""
    parts = workload.program_bytes[number].split()
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return None
    return ProgramSizes(float(parts[0]), float(parts[1]), workload.num_ranks)


def _without_program(
    profile: Profile, chosen: BoolArray, hardware: str, diagnostics: Diagnostics
) -> Iterator[CaseSource]:
    """Yield a source without cases for the events in ``chosen``, which belong to no program, so that their
    time counts as not covered.
    """
    if not chosen.any():
        return
    part = events_of(profile, np.flatnonzero(chosen), f"{profile.name}, no program")
    graph = GraphBuilder("no program").build()
    matching = match_program(graph, part, diagnostics, is_own=True)
    total = float(np.maximum(np.nan_to_num(profile.duration_ns), 0.0).sum())
    time = float(np.maximum(np.nan_to_num(part.duration_ns), 0.0).sum())
    diagnostics.warning(
        "match.no-program",
        profile.name,
        f"events belong to no program: {time / total if total else 0.0:.1%} of the device time",
        count=len(part),
    )
    yield _source_of_matching(part, Workload.spmd(graph, 1), graph, matching, hardware)


def _source_of_matching(
    profile: Profile, workload: Workload, graph: OpGraph, matching: Matching, hardware: str
) -> CaseSource:
    """Return the source of one rank class: its cases and their coverage."""
    coverage = coverage_of(graph, profile, matching)
    grouped, times = _grouped_with_times(graph, matching)
    measured = measured_groups(profile, matching)
    node = measured.group
    leading = leading_nodes(graph, matching.node_group, len(matching))
    joins = joins_of(graph, profile, matching)
    outside = profile.duration_ns[matching.event_group < 0]
    takes_time = measured.measured_ns >= LEAST_NS
    cases = replace(
        cases_of(grouped, node, times[node], (profile.name, workload.name, hardware)),
        op_class=graph.op_class[leading[node]].astype(np.int8),
        measured_ns=np.where(takes_time, measured.measured_ns, 0.0),
        mean_ns=np.where(takes_time, measured.mean_ns, 0.0),
        spread_ns=measured.spread_ns,
        repeats=measured.repeats,
        steps=1.0,
        inside_ns=coverage.compared_time_ns,
        outside_ns=float(np.maximum(np.nan_to_num(outside), 0.0).sum()),
        members=_case_members(graph, matching, joins, node),
    )
    return CaseSource(
        profile=profile,
        graph=grouped,
        node=node,
        times=times[node],
        cases=cases,
        coverage=coverage,
        program=None,
        joins=joins,
        num_ranks=workload.num_ranks,
    )


def _case_members(
    graph: OpGraph, matching: Matching, joins: Sequence[InstructionJoin], groups: IntArray
) -> tuple[CaseMembers, ...]:
    """Return the instructions and operations of each group in ``groups``."""
    joins_of_group: dict[int, list[InstructionJoin]] = {}
    for join in joins:
        joins_of_group.setdefault(join.group, []).append(join)
    order = np.argsort(matching.node_group, kind="stable")
    bounds = np.searchsorted(matching.node_group[order], np.stack((groups, groups + 1)))
    nodes: list[int] = order.tolist()
    members: list[CaseMembers] = []
    numbers: list[int] = groups.tolist()
    for number, first, last in zip(numbers, bounds[0].tolist(), bounds[1].tolist(), strict=True):
        own = joins_of_group.get(number, [])
        members.append(
            CaseMembers(
                instructions=tuple(dict.fromkeys(join.instruction for join in own)),
                operations=tuple(dict.fromkeys(node_text(graph, node) for node in nodes[first:last])),
                events=sum(join.events for join in own),
            )
        )
    return tuple(members)


def _grouped_with_times(graph: OpGraph, matching: Matching) -> tuple[OpGraph, FloatArray]:
    """Return the graph with one node per group, and the number of times that a step runs each group.

    A group runs as often as its most frequent member. The costs of other members are first multiplied by the
    ratio of their number of executions to the number of the group.
    """
    groups = len(matching)
    inside = np.flatnonzero(matching.node_group >= 0)
    runs = graph.executions[inside]
    most = np.zeros(groups)
    np.maximum.at(most, matching.node_group[inside], np.nan_to_num(runs, nan=1.0))
    times = np.where(most > 0, most, 1.0)
    scale = np.ones(len(graph))
    scale[inside] = runs / times[matching.node_group[inside]]
    if bool((scale != 1.0).any()):
        names = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")
        matmuls, collectives, p2p = graph.contractions, graph.collectives, graph.p2p
        graph = replace(
            graph,
            contractions=replace(
                matmuls,
                flops=matmuls.flops * scale[matmuls.node],
                useful_flops=matmuls.useful_flops * scale[matmuls.node],
            ),
            collectives=replace(collectives, comm_bytes=collectives.comm_bytes * scale[collectives.node]),
            p2p=replace(p2p, comm_bytes=p2p.comm_bytes * scale[p2p.node]),
            **{name: getattr(graph, name) * scale for name in names},
        )
    return grouped_graph(graph, matching.node_group, groups), times


def step_rows(profile: Profile, matched: BoolArray) -> IntArray:
    """Return the events of the module that ran the program. On each rank it is the module with the most
    matched time.

    Other modules may run in the same recording. ``matched`` has shape ``(events,)``. Runs are counted per
    module, so runs of two modules are never one step. Ranks without matched events have no events in the
    result. O(events log events).
    """
    time = np.where(matched, np.maximum(np.nan_to_num(profile.duration_ns), 0.0) + _MATCHED_NS, 0.0)
    keys, index = np.unique(
        profile.rank.astype(np.int64) << 32 | profile.module_id.astype(np.int64), return_inverse=True
    )
    total = np.bincount(index, time, len(keys))
    order = np.lexsort((total, keys >> 32))
    last = np.append(np.diff(keys[order] >> 32) != 0, np.ones(min(len(keys), 1), np.bool_))
    is_step = np.zeros(len(keys), np.bool_)
    is_step[order[last]] = True
    is_step &= total > 0
    return np.flatnonzero(is_step[index])
