"""Consistency checks of a recording, and of the recordings of one job.

All commands that read recordings run the checks. A finding is a warning with a rule code (``PR...``): the
times of such a recording do not describe a run. Findings do not change results.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan, nan
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np

from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.profile import Profile

__all__ = [
    "JOB_RULES",
    "RECORDING_RULES",
    "RecordingFacts",
    "check_job",
    "check_recording",
    "facts_of",
    "report_shared_ids",
]

RECORDING_RULES: Mapping[str, str] = MappingProxyType({
    "PR001": "device events are stored once",
    "PR002": "events start within the recording",
    "PR003": "kernels of a stream follow each other",
    "PR004": "kernels start after their launch",
    "PR005": "a correlation id belongs to one launch",
})  # fmt: skip
"""Rules of a single recording, by code."""

JOB_RULES: Mapping[str, str] = MappingProxyType({
    "PR010": "every rank of the job is recorded, once",
    "PR011": "all recordings state one number of ranks",
    "PR012": "ranks of a group record the same collectives",
    "PR013": "recordings of a job overlap in time",
})  # fmt: skip
"""Rules of several recordings of a job, by code."""

_ROUNDED_NS, _ROUNDED_SHARE = 1e3, 0.25
"""Overlap of kernels from rounding of their times, and its largest share of the shorter kernel: ROCm's
profiler has up to 0.57 us and 12 % on an MI350X.
"""
_GPU_FORMATS = frozenset({"kineto", "nsys", "rocpd", "rocprofv3"})
"""Formats whose streams run kernels in order; lines of XLA profiles also have asynchronous work."""
_DEPENDENT_LAUNCH_NS, _DEPENDENT_LAUNCH_SHARE = 20e3, 0.5
"""Longest overlap with the kernel before that programmatic dependent launch explains, and its largest share
of that kernel: a kernel starts its prologue while the one before it drains (CUDA programming guide).
"""
_WITH_DEPENDENT_LAUNCH = re.compile(r"\b(?:G?[HB]\d{2,3}|RTX (?:PRO|50\d\d))")
"""Names of devices of compute capability 9.0 and above."""
_LEAST_GAP_NS = 60e9
"""Time between recordings above which they are of different runs or clocks: the profilers of one job start
within seconds.
"""
_RAGGED = frozenset({"all_to_allv", "alltoallv", "all_to_all", "alltoall", "alltoall_base"})
"""Collectives whose sizes may differ between ranks."""


def check_recording(profile: Profile, diagnostics: Diagnostics, path: str) -> None:
    """Report contradictions within one recording. O(events log events).

    Rows that aggregate several runs and events without a time are not checked.
    """
    timed = np.isfinite(profile.start_ns) & (profile.duration_ns > 0) & (profile.repeats <= 1)
    rows = np.flatnonzero(timed & (profile.stream >= 0))
    columns = (
        profile.rank, profile.device_index, profile.stream, profile.start_ns, profile.duration_ns,
        profile.kernel_id, profile.op_id,
    )  # fmt: skip
    order = rows[np.lexsort([column[rows] for column in columns])]
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for column in columns:
        same &= np.diff(column[order]) == 0
    twice = np.zeros(len(profile), np.bool_)
    twice[order[1:][same]] = True
    if np.any(twice):
        share = float(profile.duration_ns[twice].sum() / profile.duration_ns[timed].sum())
        text = (
            f"device events are stored twice, with the same stream and times: {share:.1%} of the device time"
        )
        _warn(diagnostics, "PR001", path, text, int(twice.sum()))
    first_ns = _number(profile.metadata.get("first_event_ns", ""))
    if first_ns is not None and first_ns < 0:
        text = f"the first event starts {-first_ns / 1e9:,.3f} s before the clock of the recording starts"
        _warn(diagnostics, "PR002", path, text)
    _report_overlaps(profile, timed & ~twice, diagnostics, path)
    early_ns = profile.launch_start_ns - profile.start_ns
    with np.errstate(invalid="ignore"):
        before = timed & (early_ns > 0)
    if np.any(before):
        most = float(early_ns[before].max())
        text = f"kernels start before the call that launches them, by up to {most / 1e3:,.1f} us"
        _warn(diagnostics, "PR004", path, text, int(before.sum()))


def _report_overlaps(profile: Profile, timed: BoolArray, diagnostics: Diagnostics, path: str) -> None:
    """Report kernels of one stream that overlap in time."""
    if profile.metadata.get("format") not in _GPU_FORMATS:
        return
    rows = np.flatnonzero(timed & (profile.stream >= 0) & (profile.kernel_id > 0))
    start = profile.start_ns
    order = rows[
        np.lexsort((start[rows], profile.stream[rows], profile.device_index[rows], profile.rank[rows]))
    ]
    if len(order) < 2:
        return
    stream = np.stack([profile.rank[order], profile.device_index[order], profile.stream[order]])
    first = np.r_[True, np.any(np.diff(stream, axis=1) != 0, axis=0)]
    end = start[order] + profile.duration_ns[order]
    # For each kernel: the latest end of all earlier kernels of its stream but the last, and of all earlier
    # ones.
    earlier, latest = np.full(len(end), -np.inf), np.full(len(end), -np.inf)
    second_last = last = -np.inf
    highest = -np.inf
    for row, (is_first, ends) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        if is_first:
            second_last = last = highest = -np.inf
        earlier[row], latest[row] = second_last, highest
        second_last = max(second_last, last)
        last, highest = ends, max(highest, ends)
    overlap = np.where(first, 0.0, np.minimum(latest, end) - start[order])
    before_ns = np.r_[0.0, profile.duration_ns[order][:-1]]
    can_depend = np.array([bool(_WITH_DEPENDENT_LAUNCH.search(name)) for name in profile.devices or ("",)])
    is_explained = (
        can_depend[np.clip(profile.device_index[order], 0, len(can_depend) - 1)]
        & (overlap <= np.minimum(_DEPENDENT_LAUNCH_NS, before_ns * _DEPENDENT_LAUNCH_SHARE))
        & (start[order] >= earlier - _ROUNDED_NS)
    )
    shorter_ns = np.minimum(before_ns, profile.duration_ns[order])
    wrong = (overlap > np.minimum(_ROUNDED_NS, shorter_ns * _ROUNDED_SHARE)) & ~is_explained
    if np.any(wrong):
        text = f"kernels of one stream overlap, by up to {float(overlap[wrong].max()) / 1e3:,.1f} us"
        _warn(diagnostics, "PR003", path, text, int(wrong.sum()))


def report_shared_ids(
    keys: Sequence[IntArray],
    start_ns: IntArray,
    end_ns: IntArray,
    used: IntArray,
    findings: tuple[Diagnostics, str],
) -> None:
    """Report launches that have the same correlation id although one starts after the other has ended.

    Nested calls may share an id. ``keys`` are the columns of the id, with one row per launch. ``used`` are
    the rows of launches that started device work (-1: none). ``findings`` are diagnostics and the path of the
    recording.
    """
    rows = np.flatnonzero(keys[-1] >= 0)
    order = rows[np.lexsort([start_ns[rows], *(key[rows] for key in keys)])]
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for key in keys:
        same &= np.diff(key[order]) == 0
    apart = same & (start_ns[order[1:]] >= end_ns[order[:-1]])
    has_work = np.zeros(len(start_ns), np.bool_)
    has_work[used[used >= 0]] = True
    shared = apart & (has_work[order[1:]] | has_work[order[:-1]])
    if np.any(shared):
        text = "launches share a correlation id: their kernels are attributed to the first of them"
        _warn(findings[0], "PR005", findings[1], text, int(shared.sum()))


class _RecordedCollective(NamedTuple):
    """Recorded collective. ``size_bytes`` is -1 if it is unknown or may differ between ranks. ``number`` is
    the sequence number (-1: none).
    """

    kind: str
    size_bytes: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingFacts:
    """Facts of one recording that have to agree between the recordings of a job.

    ``start_ns`` and ``end_ns`` are on the clock that all recordings share (NaN: unknown). ``collectives``
    lists the collectives of each process group in order of start. Its keys are the ranks of the group in the
    spelling of the profiler.
    """

    path: str
    ranks: tuple[int, ...]
    world_size: int | None
    start_ns: float = nan
    end_ns: float = nan
    collectives: Mapping[str, list[_RecordedCollective]] = field(
        default_factory=dict[str, "list[_RecordedCollective]"]
    )


def facts_of(profile: Profile, path: str) -> RecordingFacts:
    """Return the facts of a recording that must agree with the other recordings of its job."""
    bases = [
        profile.metadata.get(name, "") for name in ("first_event_ns", "base_time_ns", "session_start_ns")
    ]
    first_ns, *offsets = map(_number, bases)
    start_ns = float(sum(filter(None, offsets), first_ns)) if first_ns is not None and any(offsets) else nan
    ends = profile.start_ns + profile.duration_ns
    span_ns = float(np.nanmax(ends)) if len(profile) and not np.all(np.isnan(ends)) else 0.0
    comms, strings = profile.comms, profile.strings
    collectives: dict[str, list[_RecordedCollective]] = {}
    order = np.argsort(profile.start_ns[comms.event], kind="stable")
    sizes = np.nan_to_num(np.fmax(comms.operand_bytes, comms.result_bytes), nan=-1.0)
    columns = (comms.ranks_id, comms.kind_id, sizes, comms.sequence)
    for ranks_id, kind_id, size, number in zip(*(column[order].tolist() for column in columns), strict=True):
        if ranks_id:
            kind = strings[kind_id]
            collective = _RecordedCollective(kind, -1.0 if kind in _RAGGED else size, number)
            collectives.setdefault(strings[ranks_id], []).append(collective)
    return RecordingFacts(
        path=path,
        ranks=tuple(np.unique(profile.rank).tolist()),
        world_size=_number(profile.metadata.get("world_size", "")),
        start_ns=start_ns,
        end_ns=start_ns + span_ns,
        collectives=collectives,
    )


def check_job(
    recordings: Sequence[RecordingFacts], diagnostics: Diagnostics, path: str, *, world: int = 0
) -> None:
    """Report contradictions that show that recordings are not from one job of at least ``world`` ranks.

    A single recording is not checked.
    """
    if len(recordings) < 2:
        return
    sizes = sorted({facts.world_size for facts in recordings if facts.world_size})
    if len(sizes) > 1:
        text = f"recordings state different numbers of ranks: {', '.join(f'{size:,}' for size in sizes)}"
        _warn(diagnostics, "PR011", path, text)
    if sizes or world:  # other formats number ranks by file
        _report_ranks(recordings, max([*sizes, world]), diagnostics, path)
    _report_collectives(recordings, diagnostics, path)
    timed = [facts for facts in recordings if not isnan(facts.start_ns)]
    timed.sort(key=lambda facts: facts.start_ns)
    gaps = [(after.start_ns - before.end_ns, before, after) for before, after in pairwise(timed)]
    gap_ns, before, after = max(gaps, key=lambda gap: gap[0], default=(0.0, recordings[0], recordings[0]))
    if gap_ns > _LEAST_GAP_NS:
        days = gap_ns / 86_400e9
        gap = f"{days:,.1f} days" if days >= 1 else f"{gap_ns / 1e9:,.0f} s"
        text = f"{after.path} starts {gap} after the end of {before.path}"
        _warn(diagnostics, "PR013", path, f"recordings of the job do not overlap in time: {text}")


def _report_ranks(
    recordings: Sequence[RecordingFacts], world: int, diagnostics: Diagnostics, path: str
) -> None:
    counts = Counter(rank for facts in recordings for rank in facts.ranks)
    repeated = sorted(rank for rank, count in counts.items() if count > 1)
    if repeated:
        shown = ", ".join(map(str, repeated[:5])) + (", ..." if len(repeated) > 5 else "")
        text = f"more than one recording is of rank {shown}"
        _warn(diagnostics, "PR010", path, text, len(repeated))
    absent = world - sum(1 for rank in counts if 0 <= rank < world)
    if absent:
        first = next(rank for rank in range(world) if rank not in counts)
        text = f"{absent:,} of {world:,} ranks of the job are not recorded (the first: rank {first})"
        _warn(diagnostics, "PR010", path, text, absent)


def _report_collectives(recordings: Sequence[RecordingFacts], diagnostics: Diagnostics, path: str) -> None:
    """Report process groups whose members recorded different collectives.

    Recordings may start and end at different collectives. Where the profiler numbers collectives, only
    numbers that all members recorded are compared.
    """
    for group in sorted({group for facts in recordings for group in facts.collectives}):
        try:
            listed: object = json.loads(group)
        except (ValueError, RecursionError):
            continue
        members = cast("list[object]", listed) if isinstance(listed, list) else []
        ranks = frozenset(rank for rank in members if isinstance(rank, int))
        in_group = [facts for facts in recordings if ranks.intersection(facts.ranks)]
        compared = _comparable_collectives([facts.collectives.get(group, []) for facts in in_group])
        if len(in_group) < 2 or all(collectives == compared[0] for collectives in compared):
            continue
        totals = sorted(set(map(len, compared)))
        difference = (
            f"{totals[0]:,} to {totals[-1]:,} collectives"
            if len(totals) > 1
            else "collectives of other kinds or sizes, or in another order"
        )
        text = f"ranks of the process group {group[:60]} recorded {difference}"
        _warn(diagnostics, "PR012", path, text)


def _comparable_collectives(
    recorded: Sequence[list[_RecordedCollective]],
) -> list[list[_RecordedCollective]]:
    """Return, for each recording, the collectives that can be compared with the other recordings, in order.

    If the profiler numbers collectives, only numbers within the range of every recording are included.
    """
    numbers = [[call.number for call in collectives if call.number >= 0] for collectives in recorded]
    if not all(numbers):
        return [[call for call in collectives if call.number < 0] for collectives in recorded]
    low, high = max(map(min, numbers), default=0), min(map(max, numbers), default=0)
    shared = [[call for call in collectives if low <= call.number <= high] for collectives in recorded]
    return [sorted(collectives, key=lambda call: call.number) for collectives in shared]


def _number(text: str) -> int | None:
    try:
        return int(text) if len(text) < 24 else None
    except ValueError:
        return None


def _warn(diagnostics: Diagnostics, code: str, path: str, text: str, count: int = 1) -> None:
    diagnostics.add(code, Severity.WARNING, path, text, path=path, count=count)
