"""A workload of what was measured alone: the device work of a profile, in the order and time it ran.

Nothing but the profile is needed. Events of a queue follow each other and their launches, and delays keep
the time between them (:mod:`.waits`), so that a simulation of the recorded times takes as long as the
recording. What only a program could tell (which value depends on which, on other streams) is not there, and
that is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from types import MappingProxyType

import numpy as np

from hespas.converters.measured_ops.build import Role, communication_kind, event_roles, stated_group
from hespas.converters.measured_ops.costs import EventCosts, event_costs
from hespas.converters.measured_ops.steps import RECORDED_STEPS, recorded_steps, steps_since
from hespas.converters.measured_ops.waits import Launches, clock_ns, lanes_of, tell_waits, with_waits
from hespas.graph import (
    ABSENT,
    CollectiveKind,
    CollectiveTable,
    Diagnostics,
    ExtraTable,
    Findings,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    Profile,
    RaggedArray,
    RegionTable,
    Resource,
    Workload,
)
from hespas.graph.columns import IntArray, SmallIntArray, at_rows, constant, distinct_rows
from hespas.graph.errors import UnsupportedError

__all__ = ["measured_workload"]

_MORE = MappingProxyType(
    {
        "nsys": "the program (StableHLO, HLO or an execution trace of PyTorch), and --cuda-event-trace",
        "rocpd": "the program, and with PyTorch its own trace (torch.profiler with record_shapes=True)",
        "rocprofv3": "a rocpd database of the same run (its default output), and the program",
        "xplane": "the program before it was compiled (StableHLO), or its HLO text, read as the workload",
        "jax-trace": "the .xplane.pb beside it, and the program (StableHLO or HLO)",
        "perfetto": "the profiler's own recording, and the program",
        "chrome-trace": "the profiler's own recording, and the program",
        "ops-table": "the recording that the table was made of, and the program",
    }
)
"""What would say more than a profile of each format does."""


def measured_workload(profile: Profile, diagnostics: Diagnostics) -> Workload:
    """One graph per rank: a node per device event with its time, nodes of the host's threads where launches
    are recorded, and delays for the rest of the time in which a queue waited. Ranks with equal graphs are one
    class. Costs are those that :func:`.event_costs` finds.

    Raises ``UnsupportedError`` for a profile without device events, or without their starts.
    O(events log events).
    """
    findings = diagnostics.about(profile.name, "measured-workload")
    known = np.isfinite(profile.start_ns) & np.isfinite(profile.duration_ns)
    if not known.any():
        what = "starts and durations of its device events" if len(profile) else "a device event"
        raise UnsupportedError(
            f"the profile does not hold {what}, without which there is no order of work",
            path=profile.name,
            hint="record what the device does; a table needs columns start_ns and duration_ns",
        )
    message = "device events without a start or a duration have no place and are left out"
    findings.warning("no-start", message, int((~known).sum()))
    rows = np.flatnonzero(known)
    rows = rows[np.lexsort((profile.stream[rows], profile.start_ns[rows]))]
    costs = event_costs(profile, diagnostics)
    talks = _Talks(profile)
    first_ns = float(profile.start_ns[rows[0]])
    recording = _Recording(profile, first_ns, costs, talks, findings)
    ranks = np.unique(profile.rank[rows])
    graphs: dict[bytes, OpGraph] = {}
    found: list[int] = []
    for rank in ranks.tolist():
        mine = rows[profile.rank[rows] == rank]
        graph = recording.graph(mine)
        key = _digest(graph)
        graphs.setdefault(key, graph)
        found.append(list(graphs).index(key))
    talks.report(findings)
    classes = tuple(graphs.values())
    _tell(profile, classes, findings)
    metadata = dict(profile.metadata)
    if profile.device:
        metadata["device"] = profile.device
    rank_class = _rank_classes(ranks, found, classes)
    return Workload(name=profile.name, classes=classes, rank_class=rank_class, metadata=metadata)


_MOST_RANKS = 1 << 20


def _rank_classes(
    ranks: IntArray | SmallIntArray, found: list[int], classes: Sequence[OpGraph]
) -> SmallIntArray:
    """The class of each rank of the job, which has all ranks that are measured or members of a group. Ranks
    whose numbers say nothing are counted.
    """
    groups = [each for graph in classes for each in graph.group_sets]
    world = max([int(ranks.max()), *(int(each.members(0).max()) for each in groups)]) + 1
    if (not groups and len(ranks) == 1) or world > _MOST_RANKS:
        ranks, world = np.arange(len(ranks)), len(ranks)
    rank_class = np.full(world, ABSENT, np.int32)
    rank_class[ranks] = found
    return rank_class


def _digest(graph: OpGraph) -> bytes:
    """What tells graphs of measured work of one profile apart: names, times, order."""
    found = hashlib.blake2b(digest_size=16)
    for column in (
        graph.name_row,
        graph.op_row,
        graph.stream,
        graph.duration_ns,
        graph.collectives.group_set,
    ):
        found.update(np.ascontiguousarray(column).tobytes())
        found.update(b"|")
    for deps in (graph.control_deps.offsets, graph.control_deps.values):
        found.update(np.ascontiguousarray(deps).tobytes())
    return found.digest()


class _Talks:
    """What each event of a profile communicates: collectives with kind, sizes and group as far as known."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.is_collective = event_roles(profile) == Role.COMMUNICATION
        self.is_collective &= profile.op_class != int(OpClass.P2P)
        self.row_of = {event: row for row, event in enumerate(profile.comms.event.tolist())}
        self.groups: dict[int, GroupSet | None] = {}
        self.kinds: dict[tuple[int, int, int], CollectiveKind] = {}
        self.without_kind = self.without_size = self.without_group = 0

    def _kind(self, event: int, row: int) -> CollectiveKind:
        profile = self.profile
        stated = int(profile.comms.kind_row[row]) if row >= 0 else 0
        key = stated, int(profile.op_row[event]), int(profile.kernel_row[event])
        if key not in self.kinds:
            stated_word, op, kernel = (profile.strings[text] for text in key)
            self.kinds[key] = communication_kind([stated_word, op], kernel)
        return self.kinds[key]

    def _group(self, row: int) -> GroupSet | None:
        """The group set of a list of ranks written as JSON; None: unknown."""
        listed = int(self.profile.comms.ranks_row[row]) if row >= 0 else 0
        if listed not in self.groups:
            self.groups[listed] = stated_group(self.profile.strings[listed])
        return self.groups[listed]

    def table(self, events: IntArray) -> tuple[CollectiveTable, tuple[GroupSet, ...]]:
        """The rows of nodes that are ``events``, in this order."""
        comms = self.profile.comms
        sets: dict[GroupSet, int] = {}
        rows: list[tuple[float, ...]] = []
        nodes = np.flatnonzero(self.is_collective[events])
        for node, event in zip(nodes.tolist(), events[nodes].tolist(), strict=True):
            row = self.row_of.get(event, -1)
            kind, group = self._kind(event, row), self._group(row)
            operand = float(comms.operand_bytes[row]) if row >= 0 else nan
            result = float(comms.result_bytes[row]) if row >= 0 else nan
            place = -1 if group is None else sets.setdefault(group, len(sets))
            rows.append((node, kind, place, operand, operand, result, -1, 0))
            self.without_kind += kind is CollectiveKind.UNKNOWN
            self.without_size += isnan(operand)
            self.without_group += group is None
        return CollectiveTable.from_rows(rows), tuple(sets)

    def report(self, findings: Findings) -> None:
        """Say what is not known of collectives."""
        size = "collectives whose size is not recorded have their measured time, and no other network's"
        findings.warning("collective-without-size", size, self.without_size)
        findings.warning(
            "unknown-collective", "collectives whose operation is not recorded", self.without_kind
        )
        group = "collectives whose process group is not recorded are taken for those of all ranks"
        findings.info("group-not-stated", group, self.without_group)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """A profile with what its events cost and communicate; ``first_ns`` is when the first of them starts."""

    profile: Profile
    first_ns: float
    costs: EventCosts
    talks: _Talks
    findings: Findings

    def graph(self, rows: IntArray) -> OpGraph:
        """The graph of one rank's events, which are ``rows`` in order of start."""
        profile = self.profile
        start_ns = profile.start_ns[rows] - self.first_ns
        duration_ns = np.maximum(profile.duration_ns[rows], 0.0)
        queues, queue = distinct_rows(profile.device_index[rows], profile.stream[rows])
        end_ns = start_ns + duration_ns
        lanes = lanes_of(queue, start_ns, end_ns, clock_ns(start_ns, end_ns))
        message = "device events overlap the one before them on their stream and get streams of their own"
        self.findings.warning("overlap-on-stream", message, int((lanes >= len(queues)).sum()))
        launch_ns = profile.launch_start_ns[rows] - self.first_ns
        thread = np.unique(profile.launch_thread_row[rows], return_inverse=True)[1].reshape(-1)
        message = "device events start before their launch does, which is left out: two clocks"
        self.findings.warning("launch-after-start", message, int((launch_ns > start_ns).sum()))
        launches = Launches.recorded(launch_ns, thread, start_ns)
        graph = with_waits(self._work(rows, lanes, _streams(queues, lanes)), start_ns, launches)
        ranges = steps_since(profile, rows)
        steps = recorded_steps(start_ns, duration_ns, profile.run[rows], ranges)
        if steps is None:
            return graph
        return replace(graph, attachments={RECORDED_STEPS: steps.of(graph).document()})

    def _work(self, rows: IntArray, lanes: IntArray, stream: SmallIntArray) -> OpGraph:
        """The device work alone."""
        profile, count = self.profile, len(rows)
        costs = self.costs.placed(rows, np.arange(count), count)
        collectives, groups = self.talks.table(rows)
        kind = np.zeros(count, np.uint8)
        kind[collectives.node] = int(NodeKind.COLLECTIVE)
        stated = profile.op_class[rows].astype(np.uint8)
        op_class = np.where(costs.op_class == int(OpClass.UNKNOWN), stated, costs.op_class)
        op_class[collectives.node] = int(OpClass.COLLECTIVE)
        host = at_rows(profile.host.name_row, profile.host_event[rows], 0)
        kernel, op, category = (
            column[rows] for column in (profile.kernel_row, profile.op_row, profile.category_row)
        )
        return OpGraph(
            name=profile.name,
            strings=profile.strings,
            types=costs.types,
            group_sets=groups,
            permutations=(),
            id=np.arange(count, dtype=np.uint64),
            name_row=_first_known(kernel, op),
            op_row=_first_known(op, host, category, kernel),
            kind=kind,
            op_class=op_class.astype(np.uint8),
            resource=np.broadcast_to(np.uint8(Resource.DEVICE), (count,)),
            stream=stream,
            region=np.broadcast_to(np.int32(-1), (count,)),
            rate_dtype=costs.rate_dtype,
            source_row=np.broadcast_to(np.int32(0), (count,)),
            framework_row=host.astype(np.int32),
            flops=costs.flops,
            useful_flops=costs.useful_flops,
            transcendentals=costs.transcendentals,
            bytes_read=costs.bytes_read,
            bytes_written=costs.bytes_written,
            duration_ns=np.maximum(profile.duration_ns[rows], 0.0),
            multiplicity=constant(1.0, count),
            data_deps=RaggedArray.empty(count),
            control_deps=_stream_order(lanes),
            operands=costs.operands,
            results=costs.results,
            collectives=collectives,
            p2p=P2pTable.empty(),
            contractions=costs.contractions,
            regions=RegionTable.empty(),
            extra=ExtraTable.empty(),
        )


def _first_known(*rows: IntArray | SmallIntArray) -> SmallIntArray:
    """Of several texts for each event the first that is there."""
    found = rows[-1]
    for each in rows[-2::-1]:
        found = np.where(each > 0, each, found)
    return found.astype(np.int32)


def _streams(queues: list[list[int]], lanes: IntArray) -> SmallIntArray:
    """The stream of each event, as the profile numbers them where that fits; else queues are counted."""
    numbers = np.array([stream for _, stream in queues], np.int64)
    distinct = len({device for device, _ in queues}) == 1 and int(numbers.max()) < 1 << 30
    if not distinct or int(numbers.min()) < 0:
        return lanes.astype(np.int32)
    own = np.concatenate([numbers, int(numbers.max()) + 1 + np.arange(int(lanes.max()) + 1 - len(numbers))])
    return own[lanes].astype(np.int32)


def _stream_order(lanes: IntArray) -> RaggedArray:
    """Each event waits for the one before it on its stream."""
    rows = np.argsort(lanes, kind="stable")
    same = lanes[rows[1:]] == lanes[rows[:-1]]
    return RaggedArray.from_pairs(rows[1:][same], rows[:-1][same], len(lanes))


def _tell(profile: Profile, graphs: Sequence[OpGraph], findings: Findings) -> None:
    """How much was waiting, and what another file would have added."""
    for graph in graphs:
        tell_waits(graph, findings)
    more = _MORE.get(profile.metadata.get("format", ""))
    if more:
        text = f"order and times are of the profile alone; what depends on what would come from {more}"
        findings.info("profile-alone", text)
