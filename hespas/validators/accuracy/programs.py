"""Cases of a profile against a program: one that a user gives, or the compiled ones that came with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.converters import ReadOptions, load_format
from hespas.graph import Diagnostics, GraphBuilder, OpGraph, Profile, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import HespasError
from hespas.graph.workload import PROGRAM_BYTES
from hespas.validators.accuracy.cases import (
    LEAST_NS,
    Members,
    grouped_graph,
    leading_nodes,
    measured_groups,
)
from hespas.validators.accuracy.coverage import Coverage, Join, Matching, coverage_of, joins_of, node_text
from hespas.validators.accuracy.matching import check_program, match_program
from hespas.validators.accuracy.sources import Source, cases_of, events_of
from hespas.validators.accuracy.structure import Stated

__all__ = ["sources_of_attached", "sources_of_program", "stated_of", "step_rows"]


def sources_of_attached(profile: Profile, hardware: str, diagnostics: Diagnostics) -> list[Source]:
    """The cases of a profile against the compiled programs it brings along; none where none of them ran.

    Events that belong to none of the programs are a source without cases: nobody matches them.
    """
    found: list[Source] = []
    in_some = np.zeros(len(profile), np.bool_)
    programs = list(_attached_programs(profile, diagnostics))
    for module, program in programs:
        chosen = _of_module(profile, module)
        in_some |= chosen
        part = events_of(profile, np.flatnonzero(chosen), f"{profile.name}:{module}")
        found += sources_of_program(part, program, hardware, diagnostics, is_own=True)
    if programs:
        found += _left_over(profile, ~in_some, hardware, diagnostics)
    return found


def sources_of_program(
    profile: Profile, workload: Workload, hardware: str, diagnostics: Diagnostics, *, is_own: bool = False
) -> Iterator[Source]:
    """Cases of each rank class; the first carries the program and what was recorded of it on all ranks.
    ``is_own`` says that the profile brought the program along.
    """
    if not len(profile):
        return
    several = len(workload.classes) > 1
    of_class = _class_of_events(profile, workload, diagnostics) if several else np.zeros(len(profile), int)
    matched = np.zeros(len(profile), np.bool_)
    found: list[Source] = []
    for number, graph in enumerate(workload.classes):
        rows = np.flatnonzero(of_class == number)
        if not len(rows):
            continue
        part = events_of(profile, rows, f"{profile.name}, class {number}") if several else profile
        stated = stated_of(workload, number)
        matching = match_program(graph, part, diagnostics, is_own=is_own, stated=stated)
        matched[rows] = matching.matched
        coverage = coverage_of(graph, part, matching)
        _tell(coverage, part, diagnostics)
        found.append(_matched(part, workload, graph, (matching, coverage), hardware))
    step = step_rows(profile, matched)
    if len(step) and found:
        ran = events_of(profile, step, profile.name)
        if not is_own:
            check_program(workload, ran, diagnostics)
        found[0] = replace(found[0], profile=ran, program=workload)
    yield from found
    if several:
        yield from _left_over(profile, of_class < 0, hardware, diagnostics)


def stated_of(workload: Workload, number: int) -> Stated | None:
    """What a program says of its rank class ``number``; None where it says nothing."""
    classes = workload.metadata.get(PROGRAM_BYTES, "").split(";")
    parts = classes[number].split() if len(classes) == len(workload.classes) else []
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return None
    return Stated(float(parts[0]), float(parts[1]), workload.num_ranks)


def _class_of_events(profile: Profile, workload: Workload, diagnostics: Diagnostics) -> IntArray:
    """The rank class of each event; -1 for a rank that the program has not."""
    known = (profile.rank >= 0) & (profile.rank < len(workload.rank_class))
    diagnostics.warning(
        "match.unknown-rank",
        profile.name,
        f"events are of ranks that the program has not: it has {len(workload.rank_class):,}",
        count=int((~known).sum()),
    )
    return np.where(known, workload.rank_class[np.where(known, profile.rank, 0)], -1).astype(np.int64)


def _left_over(
    profile: Profile, chosen: BoolArray, hardware: str, diagnostics: Diagnostics
) -> Iterator[Source]:
    """The events that are of no program, if there are any: a source without cases, so that their time counts
    as not covered.
    """
    if not chosen.any():
        return
    part = events_of(profile, np.flatnonzero(chosen), f"{profile.name}, no program")
    graph = GraphBuilder("no program").build()
    matching = match_program(graph, part, diagnostics, is_own=True)
    coverage = coverage_of(graph, part, matching)
    total = float(np.maximum(np.nan_to_num(profile.duration_ns), 0.0).sum())
    diagnostics.warning(
        "match.no-program",
        profile.name,
        f"events belong to no program: {coverage.time_ns / total if total else 0.0:.1%} of the device time",
        count=len(part),
    )
    yield _matched(part, Workload.spmd(graph, 1), graph, (matching, coverage), hardware)


def _matched(
    profile: Profile, workload: Workload, graph: OpGraph, told: tuple[Matching, Coverage], hardware: str
) -> Source:
    """The cases of one class of ranks, from what was matched."""
    matching, coverage = told
    grouped, times = _grouped(graph, matching)
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
        members=_members(graph, matching, joins, node),
    )
    return Source(
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


def _members(
    graph: OpGraph, matching: Matching, joins: Sequence[Join], groups: IntArray
) -> tuple[Members, ...]:
    """What each of some groups is made of."""
    ran: dict[int, list[Join]] = {}
    for join in joins:
        ran.setdefault(join.group, []).append(join)
    order = np.argsort(matching.node_group, kind="stable")
    bounds = np.searchsorted(matching.node_group[order], np.stack((groups, groups + 1)))
    nodes: list[int] = order.tolist()
    found: list[Members] = []
    numbers: list[int] = groups.tolist()
    for number, first, last in zip(numbers, bounds[0].tolist(), bounds[1].tolist(), strict=True):
        own = ran.get(number, [])
        found.append(
            Members(
                instructions=tuple(dict.fromkeys(join.instruction for join in own)),
                operations=tuple(dict.fromkeys(node_text(graph, node) for node in nodes[first:last])),
                events=sum(join.events for join in own),
            )
        )
    return tuple(found)


def _grouped(graph: OpGraph, matching: Matching) -> tuple[OpGraph, FloatArray]:
    """The graph with one node per group, and how often a step runs each.

    Members that run another number of times than the group's leading node count that much more or less: their
    costs are scaled before they are added.
    """
    groups = len(matching)
    inside = np.flatnonzero(matching.node_group >= 0)
    runs = graph.multiplicity[inside]
    most = np.zeros(groups)
    np.maximum.at(most, matching.node_group[inside], np.nan_to_num(runs, nan=1.0))
    lead = np.where(most > 0, most, 1.0)
    scale = np.ones(len(graph))
    scale[inside] = runs / lead[matching.node_group[inside]]
    if bool((scale != 1.0).any()):
        graph = _scaled(graph, scale)
    return grouped_graph(graph, matching.node_group, groups), lead


def _scaled(graph: OpGraph, scale: FloatArray) -> OpGraph:
    """The same graph with all that its nodes cost times ``scale``, shape ``(nodes,)``."""
    names = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")
    matmuls, collectives, p2p = graph.contractions, graph.collectives, graph.p2p
    return replace(
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


def _tell(coverage: Coverage, profile: Profile, diagnostics: Diagnostics) -> None:
    missed = coverage.events - coverage.matched_events
    if missed:
        share = 1 - coverage.time_share
        diagnostics.warning(
            "match.unmatched-events",
            profile.name,
            f"events match nothing of the program: {share:.1%} of the device time",
            count=missed,
        )
    diagnostics.warning(
        "match.negative-duration",
        profile.name,
        "events end before they start: they and their runs are left out of what is compared",
        count=int((profile.duration_ns < 0).sum()),
    )
    diagnostics.info(
        "match.unmatched-nodes",
        profile.name,
        "operations that cost something match no event: the compiler removed or merged them",
        count=coverage.nodes - coverage.matched_nodes,
    )


# Which events of a profile are the step of a program: other programs run beside it.

_MATCHED_NS = 1e-9
"""What a matched event of no time weighs."""


def step_rows(profile: Profile, matched: BoolArray) -> IntArray:
    """Numbers of all events of the module that ran the program: on each rank, that with most matched time.
    ``matched`` has shape ``(events,)``. Runs are counted per module, so those of two are never one step; of
    a rank where nothing is matched, no event is in it. O(events log events).
    """
    time = np.where(matched, np.maximum(np.nan_to_num(profile.duration_ns), 0.0) + _MATCHED_NS, 0.0)
    keys, place = np.unique(
        profile.rank.astype(np.int64) << 32 | profile.module_row.astype(np.int64), return_inverse=True
    )
    total = np.bincount(place, time, len(keys))
    order = np.lexsort((total, keys >> 32))
    last = np.append(np.diff(keys[order] >> 32) != 0, np.ones(min(len(keys), 1), np.bool_))
    is_step = np.zeros(len(keys), np.bool_)
    is_step[order[last]] = True
    is_step &= total > 0
    return np.flatnonzero(is_step[place])


# The programs that a profile brings along.

_ATTACHED = "hlo/"


def _attached_programs(profile: Profile, diagnostics: Diagnostics) -> Iterator[tuple[str, Workload]]:
    """The compiled programs of a profile that ran in it."""
    ran = {profile.strings[row] for row in np.unique(profile.module_row).tolist()}
    read = load_format("hlo").read
    for name, data in profile.attachments.items():
        module = name.removeprefix(_ATTACHED)
        if not name.startswith(_ATTACHED) or module not in ran or read is None:
            continue
        with TemporaryDirectory(prefix="hespas-") as folder:
            path = Path(folder) / "module.pb"
            path.write_bytes(data)
            found = Diagnostics()
            try:
                value = read(path, ReadOptions(), found)
            except HespasError as error:
                diagnostics.warning(
                    "accuracy.unreadable-module",
                    profile.name,
                    f"module {module} is left out: {error.message}",
                )
                continue
        _tell_attached(found, module, diagnostics)
        if isinstance(value, Workload):
            yield module, replace(value, name=module)


def _of_module(profile: Profile, module: str) -> BoolArray:
    """The events of one module, shape ``(events,)``."""
    rows = [row for row in np.unique(profile.module_row).tolist() if profile.strings[row] == module]
    return np.isin(profile.module_row, rows)


def _tell_attached(found: Diagnostics, module: str, diagnostics: Diagnostics) -> None:
    """What is found in a module, under its name: nobody knows the file it was read from."""
    counts = found.counts()
    first = {each.code: each for each in reversed(list(found))}
    for code, each in first.items():
        diagnostics.add(code, each.severity, module, each.message, count=counts[code])
