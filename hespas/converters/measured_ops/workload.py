"""Workloads of measurements alone: the device work of a profile, in its recorded order and time.

Only the profile is needed. Events of a queue follow each other and their launches, and delays keep the time
between them (:mod:`.waits`), so a simulation with recorded times takes as long as the recording. Data
dependencies between streams are unknown without the program; a diagnostic reports that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import isnan, nan
from types import MappingProxyType

import numpy as np

from hespas.converters.measured_ops.build import kind_of_communication, stated_group
from hespas.converters.measured_ops.costs import EventCosts, event_costs
from hespas.converters.measured_ops.device_events import EventRole, event_roles
from hespas.converters.measured_ops.steps import recorded_steps, steps_since
from hespas.converters.measured_ops.waits import LaunchTimes, clock_ns, lanes_of, report_waits, with_waits
from hespas.graph import (
    ABSENT,
    RECORDED_STEPS,
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

_MISSING_INPUT = MappingProxyType(
    {
        "nsys": "the program (StableHLO, HLO or a PyTorch execution trace), and --cuda-event-trace",
        "rocpd": "the program, and with PyTorch its own trace (torch.profiler with record_shapes=True)",
        "rocprofv3": "a rocpd database of the same run (the default output), and the program",
        "xplane": "the program before it was compiled (StableHLO), or its HLO text, read as the workload",
        "jax-trace": "the .xplane.pb of the same run, and the program (StableHLO or HLO)",
        "perfetto": "the profiler's own recording, and the program",
        "chrome-trace": "the profiler's own recording, and the program",
        "ops-table": "the recording that the table was made from, and the program",
    }
)
"""Input that would add data dependencies to a profile, by format of the profile."""


def measured_workload(profile: Profile, diagnostics: Diagnostics) -> Workload:
    """Return one graph per rank, with one node per device event, in recorded order and time.

    Host threads have nodes if launches are recorded. Delays represent the remaining time in which a queue
    waited. Ranks with equal graphs are one class. Costs come from :func:`.event_costs`. Raises
    ``UnsupportedError`` for a profile without device events, or without their starts. O(events log events).
    """
    findings = diagnostics.about(profile.name, "measured-workload")
    has_times = np.isfinite(profile.start_ns) & np.isfinite(profile.duration_ns)
    if not has_times.any():
        missing = "starts and durations of its device events" if len(profile) else "device events"
        raise UnsupportedError(
            f"the profile lacks {missing}, so the order of work is unknown",
            path=profile.name,
            hint="record what the device does; a table needs columns start_ns and duration_ns",
        )
    message = "device events without a start or a duration are skipped"
    findings.warning("no-start", message, int((~has_times).sum()))
    rows = np.flatnonzero(has_times)
    rows = rows[np.lexsort((profile.stream[rows], profile.start_ns[rows]))]
    costs = event_costs(profile, diagnostics)
    collectives = _CollectiveRows(profile)
    first_ns = float(profile.start_ns[rows[0]])
    recording = _MeasuredRecording(profile, first_ns, costs, collectives, findings)
    ranks = np.unique(profile.rank[rows])
    graphs: dict[bytes, OpGraph] = {}
    class_of_rank: list[int] = []
    for rank in ranks.tolist():
        graph = recording.graph(rows[profile.rank[rows] == rank])
        # Graphs of one profile differ by names, times and order only.
        content = hashlib.blake2b(digest_size=16)
        for column in (
            graph.name_id,
            graph.op_id,
            graph.stream,
            graph.duration_ns,
            graph.collectives.group_set,
        ):
            content.update(np.ascontiguousarray(column).tobytes())
            content.update(b"|")
        for deps in (graph.control_deps.offsets, graph.control_deps.values):
            content.update(np.ascontiguousarray(deps).tobytes())
        key = content.digest()
        graphs.setdefault(key, graph)
        class_of_rank.append(list(graphs).index(key))
    collectives.report(findings)
    classes = tuple(graphs.values())
    for graph in classes:
        report_waits(graph, findings)
    missing_input = _MISSING_INPUT.get(profile.metadata.get("format", ""))
    if missing_input:
        text = "order and times come from the profile alone; data dependencies would come from"
        findings.info("profile-alone", f"{text} {missing_input}")
    metadata = dict(profile.metadata)
    if profile.device:
        metadata["device"] = profile.device
    # The job has all ranks that are measured or members of a group. A single rank without groups is rank 0.
    groups = [group_set for graph in classes for group_set in graph.group_sets]
    world = max([int(ranks.max()), *(int(group_set.members(0).max()) for group_set in groups)]) + 1
    if (not groups and len(ranks) == 1) or world > _MAX_RANKS:
        rank_class = np.array(class_of_rank, np.int32)
    else:
        rank_class = np.full(world, ABSENT, np.int32)
        rank_class[ranks] = class_of_rank
    return Workload(name=profile.name, classes=classes, rank_class=rank_class, metadata=metadata)


_MAX_RANKS = 1 << 20


class _CollectiveRows:
    """Reader of the collectives in a profile: kind, sizes and group, as far as they are recorded."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.is_collective = event_roles(profile) == EventRole.COMMUNICATION
        self.is_collective &= profile.op_class != int(OpClass.P2P)
        self.row_of = {event: row for row, event in enumerate(profile.comms.event.tolist())}
        self.groups: dict[int, GroupSet | None] = {}
        self.kinds: dict[tuple[int, int, int], CollectiveKind] = {}
        self.without_kind = self.without_size = self.without_group = 0

    def table(self, events: IntArray) -> tuple[CollectiveTable, tuple[GroupSet, ...]]:
        """Return the collectives of a graph whose nodes are ``events``, in this order, and their group
        sets.
        """
        profile, comms = self.profile, self.profile.comms
        sets: dict[GroupSet, int] = {}
        rows: list[tuple[float, ...]] = []
        nodes = np.flatnonzero(self.is_collective[events])
        for node, event in zip(nodes.tolist(), events[nodes].tolist(), strict=True):
            row = self.row_of.get(event, -1)
            word_row = int(comms.kind_id[row]) if row >= 0 else 0
            key = word_row, int(profile.op_id[event]), int(profile.kernel_id[event])
            if key not in self.kinds:
                word, op, kernel = (profile.strings[text] for text in key)
                self.kinds[key] = kind_of_communication([word, op], kernel)
            ranks_id = int(comms.ranks_id[row]) if row >= 0 else 0
            if ranks_id not in self.groups:
                self.groups[ranks_id] = stated_group(profile.strings[ranks_id])
            kind, group = self.kinds[key], self.groups[ranks_id]
            operand = float(comms.operand_bytes[row]) if row >= 0 else nan
            result = float(comms.result_bytes[row]) if row >= 0 else nan
            group_row = -1 if group is None else sets.setdefault(group, len(sets))
            rows.append((node, kind, group_row, operand, operand, result, -1, 0))
            self.without_kind += kind is CollectiveKind.UNKNOWN
            self.without_size += isnan(operand)
            self.without_group += group is None
        return CollectiveTable.from_rows(rows), tuple(sets)

    def report(self, findings: Findings) -> None:
        """Report the collectives whose kind, size or group is not recorded."""
        message = "collectives whose size is not recorded keep their measured time on any network"
        findings.warning("collective-without-size", message, self.without_size)
        message = "collectives whose operation is not recorded"
        findings.warning("unknown-collective", message, self.without_kind)
        message = "collectives whose process group is not recorded are assumed to span all ranks"
        findings.info("group-not-stated", message, self.without_group)


@dataclass(frozen=True, slots=True, eq=False)
class _MeasuredRecording:
    """Profile with the costs and collectives of its events, from which the graphs of its ranks are made.
    ``first_ns`` is the start of the first event.
    """

    profile: Profile
    first_ns: float
    costs: EventCosts
    collectives: _CollectiveRows
    findings: Findings

    def graph(self, rows: IntArray) -> OpGraph:
        """Return the graph of one rank, with host time and waits. ``rows`` are its events in order of
        start.
        """
        profile = self.profile
        start_ns = profile.start_ns[rows] - self.first_ns
        duration_ns = np.maximum(profile.duration_ns[rows], 0.0)
        queues, queue = distinct_rows(profile.device_index[rows], profile.stream[rows])
        end_ns = start_ns + duration_ns
        lanes = lanes_of(queue, start_ns, end_ns, clock_ns(start_ns, end_ns))
        message = "device events overlap the one before them on their stream and get streams of their own"
        self.findings.warning("overlap-on-stream", message, int((lanes >= len(queues)).sum()))
        launch_ns = profile.launch_start_ns[rows] - self.first_ns
        thread = np.unique(profile.launch_thread_id[rows], return_inverse=True)[1].reshape(-1)
        message = "launches after the start of their device event are ignored: two clocks"
        self.findings.warning("launch-after-start", message, int((launch_ns > start_ns).sum()))
        launches = LaunchTimes.recorded(launch_ns, thread, start_ns)
        numbers = np.array([stream for _, stream in queues], np.int64)
        is_one_device = len({device for device, _ in queues}) == 1
        if is_one_device and int(numbers.max()) < 1 << 30 and int(numbers.min()) >= 0:
            first_free = int(numbers.max()) + 1  # streams keep their numbers; lanes of overlaps get new ones
            num_added = int(lanes.max()) + 1 - len(numbers)
            stream = np.concatenate([numbers, first_free + np.arange(num_added)])[lanes].astype(np.int32)
        else:
            stream = lanes.astype(np.int32)
        graph = with_waits(self._device_work(rows, lanes, stream), start_ns, launches)
        ranges = steps_since(profile, rows)
        steps = recorded_steps(start_ns, duration_ns, profile.run[rows], ranges)
        if steps is None:
            return graph
        return replace(graph, attachments={RECORDED_STEPS: steps.of(graph).document()})

    def _device_work(self, rows: IntArray, lanes: IntArray, stream: SmallIntArray) -> OpGraph:
        """Return the graph of the device work alone; each event waits for the previous one on its stream."""
        profile, count = self.profile, len(rows)
        costs = self.costs.placed(rows, np.arange(count), count)
        collectives, groups = self.collectives.table(rows)
        kind = np.zeros(count, np.uint8)
        kind[collectives.node] = int(NodeKind.COLLECTIVE)
        own_class = profile.op_class[rows].astype(np.uint8)
        op_class = np.where(costs.op_class == int(OpClass.UNKNOWN), own_class, costs.op_class)
        op_class[collectives.node] = int(OpClass.COLLECTIVE)
        host = at_rows(profile.host.name_id, profile.host_event[rows], 0)
        kernel, op, category = (
            column[rows] for column in (profile.kernel_id, profile.op_id, profile.category_id)
        )
        name_id = np.where(kernel > 0, kernel, op)
        op_id = np.where(op > 0, op, np.where(host > 0, host, np.where(category > 0, category, kernel)))
        order = np.argsort(lanes, kind="stable")
        same = lanes[order[1:]] == lanes[order[:-1]]
        return OpGraph(
            name=profile.name,
            strings=profile.strings,
            types=costs.types,
            group_sets=groups,
            permutations=(),
            id=np.arange(count, dtype=np.uint64),
            name_id=name_id.astype(np.int32),
            op_id=op_id.astype(np.int32),
            kind=kind,
            op_class=op_class.astype(np.uint8),
            resource=np.broadcast_to(np.uint8(Resource.DEVICE), (count,)),
            stream=stream,
            region=np.broadcast_to(np.int32(-1), (count,)),
            rate_dtype=costs.rate_dtype,
            source_id=np.broadcast_to(np.int32(0), (count,)),
            framework_id=host.astype(np.int32),
            flops=costs.flops,
            useful_flops=costs.useful_flops,
            transcendentals=costs.transcendentals,
            bytes_read=costs.bytes_read,
            bytes_written=costs.bytes_written,
            duration_ns=np.maximum(profile.duration_ns[rows], 0.0),
            executions=constant(1.0, count),
            data_deps=RaggedArray.empty(count),
            control_deps=RaggedArray.from_pairs(order[1:][same], order[:-1][same], count),
            operands=costs.operands,
            results=costs.results,
            collectives=collectives,
            p2p=P2pTable.empty(),
            contractions=costs.contractions,
            regions=RegionTable.empty(),
            extra=ExtraTable.empty(),
        )
