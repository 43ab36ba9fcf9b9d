"""What collectives moved and how fast, and across ranks: who came late, and what was left to the network.

Bandwidths are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the
algorithm bandwidth is the size over the time, the bus bandwidth what each link carries of it. The size is the
whole buffer: what an all-gather makes, what a reduce-scatter takes. Clocks of ranks are unrelated: all leave
a collective together, so its ends align them; the network's own time is the least over the ranks, as in
TraceLens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.operations import Measured
from hespas.analysis.recording import Kind, Recording
from hespas.analysis.table import Moments, Row, Table, listed, table_from_rows, table_of
from hespas.converters.comm_matching import CommKey, CommMatches, clock_shifts, comm_key, match_comms
from hespas.files.documents import Count, Figure
from hespas.graph import CollectiveKind, Diagnostics, Findings
from hespas.graph.columns import FloatArray, IntArray

__all__ = [
    "CollectiveRow",
    "Collectives",
    "InstanceRow",
    "StragglerRow",
    "bus_factor",
    "collectives",
    "collectives_of",
    "instances",
    "stragglers",
]


class CollectiveRow(Row, frozen=True, kw_only=True):
    """Collectives of one kind, group and size on all ranks. ``size_bytes`` is the whole buffer;
    ``exposed_ns`` is when nothing computed. Bandwidths (10^9 bytes/s) are by ``transfer_mean_ns``, the time
    without waiting for late ranks, where several ranks were recorded (NaN: by ``mean_ns``).
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


class InstanceRow(Row, frozen=True, kw_only=True):
    """One collective that several ranks took part in. ``skew_ns`` is from the first arrival to the last, on
    clocks aligned by the ends of collectives; ``transfer_ns`` the least time over the ranks.
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


class StragglerRow(Row, frozen=True, kw_only=True):
    """One rank in the collectives it shares with others. ``late_mean_ns`` is its arrival after the first,
    ``waited_ns`` the time it spent in collectives beyond their transfer: the least of a straggler.
    """

    rank: int
    instances: Count
    last: Count
    last_share: Figure
    late_mean_ns: Figure
    late_max_ns: Figure
    waited_ns: Figure


# Bytes over each link for each byte of the buffer, in a group of n ranks (nccl-tests, PERFORMANCE.md).
_PART = frozenset(
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
_WHOLE = frozenset({CollectiveKind.BROADCAST, CollectiveKind.REDUCE})
_MESSAGE = "send/recv"
_MOST_DIGITS = 10
_MESSAGES = frozenset({"send", "recv", "sendrecv", "permute"})


def bus_factor(kind: str, ranks: FloatArray) -> FloatArray:
    """Bus bandwidth over algorithm bandwidth; NaN for a kind without one, and for unknown ``ranks`` (< 1)."""
    n = np.where(ranks >= 1, ranks, np.nan)
    if kind == _MESSAGE:
        return np.ones(len(n))
    found = next((each for each in CollectiveKind if each.name.lower() == kind), CollectiveKind.UNKNOWN)
    if found is CollectiveKind.ALL_REDUCE:
        return 2 * (n - 1) / n
    if found in _PART:
        return (n - 1) / n
    return np.ones(len(n)) if found in _WHOLE else np.full(len(n), np.nan)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Collectives:
    """The communication of all ranks; columns of shape ``(events,)``. ``kind``, ``group`` are texts;
    ``members`` the text of a group's ranks; ``instance`` numbers what ranks did together (-1: not matched),
    ``shift_ns`` is what is added to a rank's clock.
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
    recordings: Sequence[Recording], measured: Sequence[Measured], diagnostics: Diagnostics
) -> Collectives:
    """Gather the communication of all ranks and match it: by group and number in it; where those are not
    recorded, by order within a kind, if all ranks did the same (which ``diagnostics`` tell). See
    :mod:`hespas.converters.comm_matching`.
    """
    place = {id(each.profile): row for row, each in enumerate(measured)}
    found = _Columns()
    for recording in recordings:
        clock = place[id(recording.profile)]
        _add_rank(found, recording, measured[clock], clock)
    where = recordings[0].profile.name if recordings else ""
    message = "communication states neither its group nor how many ranks it has"
    unstated = sum(size < 0 for size in found.group_size)
    diagnostics.info("analysis.group-unstated", where, message, count=unstated)
    matched = match_comms(found.rank, found.key, found.size_bytes)
    instance = matched.instance
    _report_unlike(found, matched, diagnostics.about(where, "analysis"))
    by_order = sum(
        of >= 0 and key.number < 0 and key.side < 0
        for of, key in zip(instance.tolist(), found.key, strict=True)
    )
    message = "collectives are not numbered in the recording: ranks are matched by kind and order"
    diagnostics.info("analysis.matched-by-order", where, message, count=by_order)
    shifts = clock_shifts(found.clock, instance, found.end_ns, [0.0] * len(measured))
    return Collectives(
        rank=np.array(found.rank, np.int64),
        kind=found.kind,
        group=found.group,
        members=found.members,
        group_size=np.array(found.group_size, np.int64),
        sequence=np.array(found.sequence, np.int64),
        size_bytes=np.array(found.size_bytes, np.float64),
        start_ns=np.array(found.start_ns, np.float64),
        end_ns=np.array(found.end_ns, np.float64),
        exposed_ns=np.array(found.exposed_ns, np.float64),
        instance=instance,
        shift_ns={rank: shifts[clock] for rank, clock in zip(found.rank, found.clock, strict=True)},
    )


def _report_unlike(found: _Columns, matched: CommMatches, findings: Findings) -> None:
    """Report what has one group and place on several ranks and is not the same."""
    if not matched.unlike:
        return

    def told(row: int) -> str:
        return f"{found.kind[row]} of {found.size_bytes[row]:,.0f} bytes on rank {found.rank[row]}"

    message = (
        "collectives of one group and place differ between ranks in operation or size, as those of different "
        f"steps do ({told(matched.unlike[0])}, {told(matched.others[0])}): they are not matched, and say "
        "nothing of stragglers (record the same steps on all ranks)"
    )
    findings.warning("unlike-collectives", message, len(matched.unlike))


@dataclass(slots=True)
class _Columns:
    """The columns of :class:`Collectives` while ranks are added; ``clock`` is the place of the profile."""

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


def _add_rank(found: _Columns, recording: Recording, measured: Measured, clock: int) -> None:
    """The communication of one rank, in order of start."""
    profile, graph = recording.profile, measured.costed.graph
    places = np.flatnonzero(recording.kind == Kind.COMMUNICATION)
    rows = recording.rows[places]
    comms, strings = profile.comms, profile.strings
    of_event = np.full(len(profile), -1, np.int64)
    of_event[comms.event] = np.arange(len(comms))
    node_kind = np.full(len(graph), int(CollectiveKind.UNKNOWN), np.int64)
    node_kind[graph.collectives.node] = graph.collectives.kind
    compute = recording.busy(Kind.COMPUTE)
    start, end = recording.start_ns[places], recording.end_ns[places]
    found.rank.extend([recording.rank] * len(rows))
    found.clock.extend([clock] * len(rows))
    found.start_ns.extend(start.tolist())
    found.end_ns.extend(end.tolist())
    found.exposed_ns.extend(((end - start) - compute.within_ns(start, end)).tolist())
    world = profile.metadata.get("world_size", "")
    job = int(world) if world.isdecimal() and len(world) < _MOST_DIGITS else -1
    for row, code in zip(
        of_event[rows].tolist(), node_kind[measured.costed.node[rows]].tolist(), strict=True
    ):
        word = strings[int(comms.kind_row[row])] if row >= 0 else ""
        is_message = code == CollectiveKind.UNKNOWN and word.lower() in _MESSAGES
        kind = _MESSAGE if is_message else CollectiveKind(code).name.lower()
        size = int(comms.group_size[row]) if row >= 0 else -1
        size = job if size < 0 else size
        sent = float(comms.operand_bytes[row]) if row >= 0 else np.nan
        made = float(comms.result_bytes[row]) if row >= 0 else np.nan
        if np.isnan(made) and kind == "all_gather" and size > 0:
            made = sent * size
        found.kind.append(kind)
        found.group.append(strings[int(comms.group_row[row])] if row >= 0 else "")
        found.members.append(strings[int(comms.ranks_row[row])] if row >= 0 else "")
        found.group_size.append(size)
        number = int(comms.sequence[row]) if row >= 0 else -1
        found.sequence.append(number)
        sort = word if is_message else kind
        found.key.append(comm_key(sort, found.group[-1], found.members[-1], recording.rank, number))
        found.size_bytes.append(float(np.fmax(sent, made)))


# --- What is told of them


def _grouped(keys: Sequence[tuple[object, ...]]) -> tuple[list[int], IntArray]:
    """The first row of each distinct key, and the group of each row."""
    rows: dict[tuple[object, ...], int] = {}
    place = np.array([rows.setdefault(key, len(rows)) for key in keys], np.int64)
    first: dict[int, int] = {}
    for row, group in enumerate(place.tolist()):
        first.setdefault(group, row)
    return [first[group] for group in range(len(rows))], place


def _least(values: FloatArray, group: IntArray, groups: int) -> FloatArray:
    least = np.full(groups, np.inf)
    np.minimum.at(least, group, values)
    return least


def _bus(kinds: Sequence[str], sizes: IntArray) -> FloatArray:
    """The factor of each row."""
    found = np.full(len(kinds), np.nan)
    for kind in set(kinds):
        rows = np.array([each == kind for each in kinds])
        found[rows] = bus_factor(kind, sizes[rows].astype(np.float64))
    return found


def _transfer_ns(found: Collectives) -> FloatArray:
    """The least time over the ranks of each event's instance, NaN where it was seen on one rank."""
    matched = found.instance >= 0
    count = int(found.instance.max(initial=-1)) + 1
    least = _least((found.end_ns - found.start_ns)[matched], found.instance[matched], count)
    transfer = np.full(len(found.kind), np.nan)
    transfer[matched] = least[found.instance[matched]]
    return transfer


def collectives(found: Collectives) -> Table[CollectiveRow]:
    """Collectives by kind, group and size, most time first. O(events)."""
    sizes: list[float] = np.where(np.isnan(found.size_bytes), -1.0, found.size_bytes).tolist()
    members: list[int] = found.group_size.tolist()
    keys = list(zip(found.kind, found.group, found.members, members, sizes, strict=True))
    if not keys:
        return table_from_rows(CollectiveRow, [])
    first, place = _grouped(keys)
    groups = len(first)
    moments = Moments.of(found.end_ns - found.start_ns, place, groups)
    exposed = np.bincount(place, found.exposed_ns, groups).astype(np.float64)
    transfer = np.bincount(place, _transfer_ns(found), groups) / moments.count
    kinds = [found.kind[row] for row in first]
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = found.size_bytes[first] / np.where(np.isnan(transfer), moments.mean, transfer)
        return table_of(
            CollectiveRow,
            kind=kinds,
            group=[found.group[row] for row in first],
            group_size=found.group_size[first],
            size_bytes=found.size_bytes[first],
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
            bus_gbytes_per_s=rate * _bus(kinds, found.group_size[first]),
        ).largest("total_ns")


def _arrivals(found: Collectives) -> tuple[IntArray, FloatArray]:
    """The rows that are matched, and when they arrived on the common clock."""
    rows = np.flatnonzero(found.instance >= 0)
    shift = np.array([found.shift_ns.get(rank, 0.0) for rank in found.rank[rows].tolist()])
    return rows, found.start_ns[rows] + shift


def instances(found: Collectives) -> Table[InstanceRow]:
    """What several ranks did together, in the order of the first rank. O(events log events)."""
    rows, arrived = _arrivals(found)
    count = int(found.instance.max(initial=-1)) + 1
    if not count:
        return table_from_rows(InstanceRow, [])
    of = found.instance[rows]
    order = np.lexsort((arrived, of))
    starts = np.flatnonzero(np.diff(of[order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    first, last = rows[order[starts]], rows[order[ends]]
    time = Moments.of((found.end_ns - found.start_ns)[rows], of, count)
    kinds = [found.kind[row] for row in listed(first)]
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = found.size_bytes[first] / time.least
    return table_of(
        InstanceRow,
        kind=kinds,
        group=[found.group[row] for row in listed(first)],
        sequence=found.sequence[first],
        ranks=time.count,
        size_bytes=found.size_bytes[first],
        skew_ns=arrived[order[ends]] - arrived[order[starts]],
        first_rank=found.rank[first],
        last_rank=found.rank[last],
        transfer_ns=time.least,
        longest_ns=time.most,
        algorithm_gbytes_per_s=rate,
        bus_gbytes_per_s=rate * _bus(kinds, found.group_size[first]),
    )


def stragglers(found: Collectives) -> Table[StragglerRow]:
    """Ranks by how long the others waited for them: the one that arrived last most often first."""
    rows, arrived = _arrivals(found)
    if not len(rows):
        return table_from_rows(StragglerRow, [])
    of, count = found.instance[rows], int(found.instance.max()) + 1
    earliest = _least(arrived, of, count)
    latest = -_least(-arrived, of, count)
    late, is_last = arrived - earliest[of], arrived == latest[of]
    ranks, place = np.unique(found.rank[rows], return_inverse=True)
    moments = Moments.of(late, place.reshape(-1), len(ranks))
    beyond = (found.end_ns - found.start_ns)[rows] - _transfer_ns(found)[rows]
    last = np.bincount(place.reshape(-1), is_last, len(ranks))
    return table_of(
        StragglerRow,
        rank=ranks,
        instances=moments.count,
        last=last,
        last_share=last / moments.count,
        late_mean_ns=moments.mean,
        late_max_ns=moments.most,
        waited_ns=np.bincount(place.reshape(-1), beyond, len(ranks)),
    ).largest("last")
