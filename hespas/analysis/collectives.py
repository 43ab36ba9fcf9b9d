"""Collectives: bytes, bandwidths, exposed time, and across ranks skew, stragglers and transfer time.

Bandwidths are defined as in nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
the algorithm bandwidth is size / time, the bus bandwidth is the part of it that each link carries. The size
is the whole buffer: the result of an all-gather, the operand of a reduce-scatter. Clocks of ranks are
unrelated. They are aligned by the ends of collectives, which all ranks leave at the same time. The transfer
time is the shortest time on any rank, as in TraceLens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.operations import MeasuredOperations
from hespas.analysis.recording import DeviceEventKind, Recording
from hespas.analysis.table import AnalysisRow, GroupStatistics, RowTable, listed, table_from_rows, table_of
from hespas.converters.comm_matching import CommKey, clock_shifts, comm_key, match_comms
from hespas.files.documents import Count, Figure
from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.columns import FloatArray, IntArray

__all__ = [
    "InstanceRow",
    "MatchedCollectives",
    "MeasuredCollectiveRow",
    "StragglerRow",
    "bus_factor",
    "collectives",
    "collectives_of",
    "instances",
    "stragglers",
]


class MeasuredCollectiveRow(AnalysisRow, frozen=True, kw_only=True):
    """Collectives of one kind, group and size on all ranks.

    ``size_bytes`` is the whole buffer. ``exposed_ns`` is the time in which the rank did not compute.
    Bandwidths (10^9 bytes/s) are the bytes over ``transfer_mean_ns``, the time without waiting for late
    ranks. If only one rank was recorded, this time is NaN, and bandwidths are over ``mean_ns``.
    """

    kind: str
    group: str
    group_size: int
    size_bytes: Figure
    count: Count
    total_ns: Figure
    mean_ns: Figure
    min_ns: Figure
    max_ns: Figure
    std_ns: Figure
    exposed_ns: Figure
    exposed_share: Figure
    transfer_mean_ns: Figure
    algorithm_gbytes_per_s: Figure
    bus_gbytes_per_s: Figure


class InstanceRow(AnalysisRow, frozen=True, kw_only=True):
    """One collective that several ranks recorded. ``skew_ns`` is the time between the arrivals of the first
    and the last rank. Clocks of ranks are aligned by the ends of collectives. ``transfer_ns`` is the shortest
    time of the collective on any rank.
    """

    kind: str
    group: str
    sequence: int
    ranks: Count
    size_bytes: Figure
    skew_ns: Figure
    first_rank: int
    last_rank: int
    transfer_ns: Figure
    longest_ns: Figure
    algorithm_gbytes_per_s: Figure
    bus_gbytes_per_s: Figure


class StragglerRow(AnalysisRow, frozen=True, kw_only=True):
    """One rank in the collectives that it shares with other ranks.

    ``late_mean_ns`` is the mean time by which the rank arrives after the first rank. ``waited_ns`` is the
    time that it waits in collectives (their duration less the transfer time). A straggler has the shortest
    waiting time.
    """

    rank: int
    instances: Count
    last: Count
    last_share: Figure
    late_mean_ns: Figure
    late_max_ns: Figure
    waited_ns: Figure


_OTHER_PARTS = frozenset(
    {
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.REDUCE_SCATTER_BLOCK,
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.RAGGED_ALL_TO_ALL,
        CollectiveKind.GATHER,
        CollectiveKind.SCATTER,
    }
)
"""Collectives in which each link carries (n - 1) / n bytes per byte of the buffer, in a group of n ranks
(nccl-tests, PERFORMANCE.md).
"""
_WHOLE_BUFFER = frozenset({CollectiveKind.BROADCAST, CollectiveKind.REDUCE})
"""Collectives in which each link carries the whole buffer."""
_MESSAGE = "send/recv"
_MAX_DIGITS = 10
_MESSAGES = frozenset({"send", "recv", "sendrecv", "permute"})


def bus_factor(kind: str, ranks: FloatArray) -> FloatArray:
    """Return bus bandwidth / algorithm bandwidth, as defined by nccl-tests, for each number of ``ranks``.

    The ratio is NaN for a kind of collective without a defined ratio, and for an unknown number of ranks
    (below 1).
    """
    n = np.where(ranks >= 1, ranks, np.nan)
    if kind == _MESSAGE:
        return np.ones(len(n))
    code = next((code for code in CollectiveKind if code.name.lower() == kind), CollectiveKind.UNKNOWN)
    if code is CollectiveKind.ALL_REDUCE:
        return 2 * (n - 1) / n
    if code in _OTHER_PARTS:
        return (n - 1) / n
    return np.ones(len(n)) if code in _WHOLE_BUFFER else np.full(len(n), np.nan)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MatchedCollectives:
    """Communication events of all ranks, matched across ranks; columns of shape ``(events,)``.

    Events with the same ``instance`` are the same collective on different ranks (-1: not matched). ``kind``
    and ``group`` are names, ``members`` lists the ranks of the group as text. The time of an event plus
    ``shift_ns`` is on the common clock of all ranks.
    """

    rank: IntArray
    kind: list[str]
    group: list[str]
    members: list[str]
    group_size: IntArray
    sequence: IntArray
    size_bytes: FloatArray
    start_ns: FloatArray
    end_ns: FloatArray
    exposed_ns: FloatArray
    instance: IntArray
    shift_ns: Mapping[int, float]


def collectives_of(
    recordings: Sequence[Recording], measured: Sequence[MeasuredOperations], diagnostics: Diagnostics
) -> MatchedCollectives:
    """Return the communication events of all ranks, matched by group and sequence number.

    If a recording has no groups or sequence numbers, events of one kind are matched by their order, provided
    that all ranks ran the same number of them. ``diagnostics`` report which events were matched in this way.
    See :mod:`hespas.converters.comm_matching`.
    """
    clock_of = {id(operations.profile): row for row, operations in enumerate(measured)}
    columns = _CollectiveColumns()
    for recording in recordings:
        clock = clock_of[id(recording.profile)]
        _add_rank(columns, recording, measured[clock], clock)
    where = recordings[0].profile.name if recordings else ""
    message = "communication states neither its group nor its number of ranks"
    unstated = sum(size < 0 for size in columns.group_size)
    diagnostics.info("analysis.group-unstated", where, message, count=unstated)
    matched = match_comms(columns.rank, columns.key, columns.size_bytes)
    instance = matched.instance
    if matched.unlike:
        first, other = (
            f"{columns.kind[row]} of {columns.size_bytes[row]:,.0f} bytes on rank {columns.rank[row]}"
            for row in (matched.unlike[0], matched.others[0])
        )
        message = (
            "collectives with the same group and position differ between ranks in operation or size, as in "
            f"recordings of different steps ({first}, {other}): they are not matched, and not included in "
            "straggler statistics (record the same steps on all ranks)"
        )
        diagnostics.warning("analysis.unlike-collectives", where, message, count=len(matched.unlike))
    by_order = sum(
        number >= 0 and key.number < 0 and key.side < 0
        for number, key in zip(instance.tolist(), columns.key, strict=True)
    )
    message = "collectives are not numbered in the recording: ranks are matched by kind and order"
    diagnostics.info("analysis.matched-by-order", where, message, count=by_order)
    shifts = clock_shifts(columns.clock, instance, columns.end_ns, [0.0] * len(measured))
    return MatchedCollectives(
        rank=np.array(columns.rank, np.int64),
        kind=columns.kind,
        group=columns.group,
        members=columns.members,
        group_size=np.array(columns.group_size, np.int64),
        sequence=np.array(columns.sequence, np.int64),
        size_bytes=np.array(columns.size_bytes, np.float64),
        start_ns=np.array(columns.start_ns, np.float64),
        end_ns=np.array(columns.end_ns, np.float64),
        exposed_ns=np.array(columns.exposed_ns, np.float64),
        instance=instance,
        shift_ns={rank: shifts[clock] for rank, clock in zip(columns.rank, columns.clock, strict=True)},
    )


@dataclass(slots=True)
class _CollectiveColumns:
    """Columns of :class:`MatchedCollectives` as lists while ranks are added. ``clock`` is the index of the
    profile, because all events of a profile have the same clock.
    """

    rank: list[int] = field(default_factory=list[int])
    clock: list[int] = field(default_factory=list[int])
    kind: list[str] = field(default_factory=list[str])
    group: list[str] = field(default_factory=list[str])
    members: list[str] = field(default_factory=list[str])
    group_size: list[int] = field(default_factory=list[int])
    sequence: list[int] = field(default_factory=list[int])
    key: list[CommKey] = field(default_factory=list[CommKey])
    size_bytes: list[float] = field(default_factory=list[float])
    start_ns: list[float] = field(default_factory=list[float])
    end_ns: list[float] = field(default_factory=list[float])
    exposed_ns: list[float] = field(default_factory=list[float])


def _add_rank(
    columns: _CollectiveColumns, recording: Recording, measured: MeasuredOperations, clock: int
) -> None:
    """Append the communication events of one rank to ``columns``, in order of their starts."""
    profile, graph = recording.profile, measured.costed.graph
    events = np.flatnonzero(recording.kind == DeviceEventKind.COMMUNICATION)
    rows = recording.rows[events]
    comms, strings = profile.comms, profile.strings
    of_event = np.full(len(profile), -1, np.int64)
    of_event[comms.event] = np.arange(len(comms))
    node_kind = np.full(len(graph), int(CollectiveKind.UNKNOWN), np.int64)
    node_kind[graph.collectives.node] = graph.collectives.kind
    compute = recording.busy(DeviceEventKind.COMPUTE)
    start, end = recording.start_ns[events], recording.end_ns[events]
    columns.rank.extend([recording.rank] * len(rows))
    columns.clock.extend([clock] * len(rows))
    columns.start_ns.extend(start.tolist())
    columns.end_ns.extend(end.tolist())
    columns.exposed_ns.extend(((end - start) - compute.within_ns(start, end)).tolist())
    world = profile.metadata.get("world_size", "")
    job = int(world) if world.isdecimal() and len(world) < _MAX_DIGITS else -1
    for row, code in zip(
        of_event[rows].tolist(), node_kind[measured.costed.node[rows]].tolist(), strict=True
    ):
        word = strings[int(comms.kind_id[row])] if row >= 0 else ""
        is_message = code == CollectiveKind.UNKNOWN and word.lower() in _MESSAGES
        kind = _MESSAGE if is_message else CollectiveKind(code).name.lower()
        size = int(comms.group_size[row]) if row >= 0 else -1
        size = job if size < 0 else size
        sent = float(comms.operand_bytes[row]) if row >= 0 else np.nan
        received = float(comms.result_bytes[row]) if row >= 0 else np.nan
        if np.isnan(received) and kind == "all_gather" and size > 0:
            received = sent * size
        columns.kind.append(kind)
        columns.group.append(strings[int(comms.group_id[row])] if row >= 0 else "")
        columns.members.append(strings[int(comms.ranks_id[row])] if row >= 0 else "")
        columns.group_size.append(size)
        number = int(comms.sequence[row]) if row >= 0 else -1
        columns.sequence.append(number)
        sort = word if is_message else kind
        columns.key.append(comm_key(sort, columns.group[-1], columns.members[-1], recording.rank, number))
        columns.size_bytes.append(float(np.fmax(sent, received)))


def _least(values: FloatArray, group: IntArray, groups: int) -> FloatArray:
    """Return the minimum of ``values`` in each group; ``group`` has the group number of each value."""
    least = np.full(groups, np.inf)
    np.minimum.at(least, group, values)
    return least


def _bus_factors(kinds: Sequence[str], sizes: IntArray) -> FloatArray:
    """Return the factor from algorithm bandwidth to bus bandwidth (as defined by nccl-tests) for each row,
    from its kind of collective and number of ranks.
    """
    factors = np.full(len(kinds), np.nan)
    for kind in set(kinds):
        rows = np.array([row_kind == kind for row_kind in kinds])
        factors[rows] = bus_factor(kind, sizes[rows].astype(np.float64))
    return factors


def _transfer_ns(matched: MatchedCollectives) -> FloatArray:
    """Return for each event the shortest duration of its collective on any rank, which excludes waiting for
    late ranks. NaN for events that are not matched.
    """
    rows = np.flatnonzero(matched.instance >= 0)
    count = int(matched.instance.max(initial=-1)) + 1
    least = _least((matched.end_ns - matched.start_ns)[rows], matched.instance[rows], count)
    transfer = np.full(len(matched.kind), np.nan)
    transfer[rows] = least[matched.instance[rows]]
    return transfer


def collectives(matched: MatchedCollectives) -> RowTable[MeasuredCollectiveRow]:
    """Return total figures by kind, group and size of collectives, sorted by total time (longest first).
    O(events).
    """
    sizes: list[float] = np.where(np.isnan(matched.size_bytes), -1.0, matched.size_bytes).tolist()
    members: list[int] = matched.group_size.tolist()
    keys = list(zip(matched.kind, matched.group, matched.members, members, sizes, strict=True))
    if not keys:
        return table_from_rows(MeasuredCollectiveRow, [])
    rows: dict[tuple[object, ...], int] = {}
    group = np.array([rows.setdefault(key, len(rows)) for key in keys], np.int64)
    groups = len(rows)
    first = np.unique(group, return_index=True)[1].tolist()
    moments = GroupStatistics.of(matched.end_ns - matched.start_ns, group, groups)
    exposed = np.bincount(group, matched.exposed_ns, groups).astype(np.float64)
    transfer = np.bincount(group, _transfer_ns(matched), groups) / moments.count
    kinds: list[str] = [matched.kind[row] for row in first]
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = matched.size_bytes[first] / np.where(np.isnan(transfer), moments.mean, transfer)
        return table_of(
            MeasuredCollectiveRow,
            kind=kinds,
            group=[matched.group[row] for row in first],
            group_size=matched.group_size[first],
            size_bytes=matched.size_bytes[first],
            count=moments.count,
            total_ns=moments.total,
            mean_ns=moments.mean,
            min_ns=moments.least,
            max_ns=moments.most,
            std_ns=moments.deviation,
            exposed_ns=exposed,
            exposed_share=exposed / moments.total,
            transfer_mean_ns=transfer,
            algorithm_gbytes_per_s=rate,
            bus_gbytes_per_s=rate * _bus_factors(kinds, matched.group_size[first]),
        ).largest("total_ns")


def _arrivals(matched: MatchedCollectives) -> tuple[IntArray, FloatArray]:
    """Return the rows of matched collective events, and the time at which the rank of each event arrived at
    the collective. Times are on the common clock of all ranks.
    """
    rows = np.flatnonzero(matched.instance >= 0)
    shift = np.array([matched.shift_ns.get(rank, 0.0) for rank in matched.rank[rows].tolist()])
    return rows, matched.start_ns[rows] + shift


def instances(matched: MatchedCollectives) -> RowTable[InstanceRow]:
    """Return one row per collective that several ranks recorded, in the order of the first rank. O(events log
    events).
    """
    rows, arrived = _arrivals(matched)
    count = int(matched.instance.max(initial=-1)) + 1
    if not count:
        return table_from_rows(InstanceRow, [])
    instance = matched.instance[rows]
    order = np.lexsort((arrived, instance))
    starts = np.flatnonzero(np.diff(instance[order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    first, last = rows[order[starts]], rows[order[ends]]
    time = GroupStatistics.of((matched.end_ns - matched.start_ns)[rows], instance, count)
    kinds = [matched.kind[row] for row in listed(first)]
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = matched.size_bytes[first] / time.least
    return table_of(
        InstanceRow,
        kind=kinds,
        group=[matched.group[row] for row in listed(first)],
        sequence=matched.sequence[first],
        ranks=time.count,
        size_bytes=matched.size_bytes[first],
        skew_ns=arrived[order[ends]] - arrived[order[starts]],
        first_rank=matched.rank[first],
        last_rank=matched.rank[last],
        transfer_ns=time.least,
        longest_ns=time.most,
        algorithm_gbytes_per_s=rate,
        bus_gbytes_per_s=rate * _bus_factors(kinds, matched.group_size[first]),
    )


def stragglers(matched: MatchedCollectives) -> RowTable[StragglerRow]:
    """Return one row per rank, sorted by how often it was the last to arrive at a collective (most often
    first).
    """
    rows, arrived = _arrivals(matched)
    if not len(rows):
        return table_from_rows(StragglerRow, [])
    instance, count = matched.instance[rows], int(matched.instance.max()) + 1
    earliest = _least(arrived, instance, count)
    latest = -_least(-arrived, instance, count)
    late, is_last = arrived - earliest[instance], arrived == latest[instance]
    ranks, group = np.unique(matched.rank[rows], return_inverse=True)
    group = group.reshape(-1)
    moments = GroupStatistics.of(late, group, len(ranks))
    beyond = (matched.end_ns - matched.start_ns)[rows] - _transfer_ns(matched)[rows]
    last = np.bincount(group, is_last, len(ranks))
    return table_of(
        StragglerRow,
        rank=ranks,
        instances=moments.count,
        last=last,
        last_share=last / moments.count,
        late_mean_ns=moments.mean,
        late_max_ns=moments.most,
        waited_ns=np.bincount(group, beyond, len(ranks)),
    ).largest("last")
