"""Times of collectives and messages on a system: measured times of its device, scaled to its links.

A device has fits of communication times (:class:`hespas.estimators.collectives.Collectives`: measured tables,
fits of reference devices, NCCL's model). They apply to the links in the file of the device. If the system has
the same links and equal numbers of ranks per node, they are used unchanged. For other links they are scaled
by the ratio of two times of :mod:`hespas.simulator.network.algorithms`: on the system's links and on the
device's links. Without measurements and models (TPUs, loopbacks) the algorithms are used alone. The links of
the system give a lower bound.

Ranks of a class run the same graph, but a group within one node is faster than one across two. Therefore rank
classes are split so that all ranks of a class have equal times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import nan, prod
from typing import NamedTuple

import numpy as np
from msgspec import structs

from hespas.estimators.collective_links import RankLayout, fill_ns
from hespas.estimators.collectives import Collectives
from hespas.estimators.interface import takes_no_time
from hespas.estimators.rates import COLLECTIVE_KINDS
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    Estimate,
    GroupSet,
    NodeKind,
    OpGraph,
    Permutation,
    StridedGroups,
    Workload,
)
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import InvariantError
from hespas.graph.passes import with_durations
from hespas.hardware import Device, Dimension, Link, System, load_device
from hespas.operations import Labels, Operations, between_ranks, element_types_of
from hespas.simulator.network.algorithms import fastest_ns, least_ns, levels_of, message_ns
from hespas.simulator.network.placement import (
    Footprint,
    PlacedGroups,
    footprint_of,
    place_groups,
    place_messages,
)

__all__ = ["Network", "collective_ns", "on_system"]


_MODEL_SPREAD = (0.6, 2.0)
"""Bounds of the interval of the algorithms alone, relative to the time; as for data sheets in the estimator
of collectives.
"""

_DATA_SHEET = "collectives.data-sheet"

_TUNED = "collectives.tuned"

_MESSAGE = "permute"


def collective_ns(
    system: System,
    kind: CollectiveKind,
    message_bytes: FloatArray,
    members: IntArray,
    device: Device | None = None,
) -> FloatArray:
    """Return the time [ns] of collectives in one group of ranks that has the network to itself, shape
    ``(messages,)``.

    ``message_bytes`` are sizes as Chakra counts them. ``device`` replaces the system's device.
    """
    named = load_device(system.device) if device is None and system.device else device
    network = Network(system, named)
    footprint = footprint_of(network.system, members)
    time_ns: FloatArray = network.collectives(kind.name.lower(), "", footprint, message_bytes)[0]
    return time_ns


class _CollectiveCase(NamedTuple):
    """Collective as the estimator of collectives describes it: operation, number format, ranks, and ranks per
    node.
    """

    op: str
    scheme: str
    ranks: int
    per_node: int

    def operations(self, message_bytes: FloatArray) -> Operations:
        """Return the operations to estimate for messages of this collective."""
        count = len(message_bytes)
        blank = np.full(count, nan)
        return Operations(
            kind=Labels.constant("collective", count),
            op=Labels.constant(self.op, count),
            scheme=Labels.constant(self.scheme, count),
            variant=Labels.constant("", count),
            dims={
                "ranks": np.full(count, float(self.ranks)),
                "message_bytes": message_bytes,
                "ranks_per_node": np.full(count, float(self.per_node)),
            },
            flops=blank,
            transcendentals=blank,
            bytes_moved=blank,
        )


class _MeasuredTimes(NamedTuple):
    """Times of collectives from the estimator of collectives, with their 90 % interval [ns], shape ``(3,
    messages)``. ``links`` are the links of the device that the estimator used.
    """

    times: FloatArray
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Network:
    """System with a known number of devices, and the device whose measured collective times are used (None:
    only formulas).

    ``library`` is the communication library whose measurements are used, such as ``nccl 2.29.2``. A part of
    the name is enough; empty selects the default of the device.
    """

    system: System
    device: Device | None = None
    library: str = ""

    def __post_init__(self) -> None:
        """Raise an error if the system does not have a number of devices."""
        if self.system.devices < 0:
            raise InvariantError(f"{self.system.name} has no size")

    def collectives(
        self,
        op: str,
        scheme: str,
        footprint: Footprint,
        message_bytes: FloatArray,
        diagnostics: Diagnostics | None = None,
    ) -> FloatArray:
        """Return times and their 90 % interval [ns], shape ``(3, messages)``, of one kind of collective on
        groups with one footprint.

        ``scheme`` is the number format. Times are NaN for operations without a formula.
        """
        if footprint.ranks <= 1:
            return np.zeros((3, len(message_bytes)))
        kind, levels = COLLECTIVE_KINDS.get(op, CollectiveKind.UNKNOWN), levels_of(self.system, footprint)
        own = _TimeParts.of(partial(fastest_ns, kind, levels), message_bytes)
        case = _CollectiveCase(op, scheme, footprint.ranks, footprint.members[0])
        measured = self._measured(case, message_bytes, diagnostics)
        if measured is None:
            # Nodes are units of a first dimension that is not a ring.
            times = self._alone(own.time_ns)
            inner = footprint.members[0]
            if not 1 < inner < footprint.ranks or not self._links:
                return times
            alone = (1,) * (len(footprint.members) - 1)
            part = Footprint(inner, (inner, *alone), footprint.stride, (footprint.sharers[0], *alone))
            more = footprint.ranks / inner if op == "all_gather" else 1.0
            rate = self.system.dimensions[1].bandwidth_bytes_per_s
            first = fill_ns(
                op, RankLayout(footprint.ranks, -(-footprint.ranks // inner)), message_bytes, rate
            )
            return np.fmax(times, self.collectives(op, scheme, part, message_bytes * more) + first)
        nodes = -(-case.ranks // case.per_node)
        whole = self._as_system(measured.links, nodes)
        counts = (case.per_node, nodes)[: len(whole.dimensions)]
        sharers = (1, whole.dimensions[0].size)[: len(whole.dimensions)]
        theirs = _TimeParts.of(
            partial(
                fastest_ns, kind, levels_of(whole, Footprint(case.ranks, counts, (1,) * len(counts), sharers))
            ),
            message_bytes,
        )
        return np.maximum(_scaled(measured.times, own, theirs), least_ns(kind, levels, message_bytes))

    def messages(
        self,
        scheme: str,
        away: Sequence[int],
        message_bytes: FloatArray,
        diagnostics: Diagnostics | None = None,
    ) -> FloatArray:
        """Return times and intervals like :meth:`collectives`, for messages from one rank to another at
        distance ``away`` along each dimension.
        """
        if not any(away):
            return np.zeros((3, len(message_bytes)))
        own = _TimeParts.of(partial(message_ns, self.system, away), message_bytes)
        case = _CollectiveCase(_MESSAGE, scheme, 2, 1 if any(away[1:]) else 2)
        measured = self._measured(case, message_bytes, diagnostics)
        if measured is None:
            return self._alone(own.time_ns)
        there = (0, 1) if case.per_node == 1 else (1, 0)
        theirs = _TimeParts.of(partial(message_ns, self._as_system(measured.links), there), message_bytes)
        return np.maximum(_scaled(measured.times, own, theirs), own.moved_ns)

    def _alone(self, time_ns: FloatArray) -> FloatArray:
        """Return the times of the algorithms plus the launch time of a kernel, for use without
        measurements.
        """
        launch_ns = 0.0 if self.device is None else float(np.nan_to_num(self.device.launch_overhead_ns))
        whole_ns = time_ns + launch_ns
        return np.stack((whole_ns, whole_ns * _MODEL_SPREAD[0], whole_ns * _MODEL_SPREAD[1]))

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        """Links of the measured device that correspond to the first two dimensions of the system. Bandwidth
        and latency are from the device, the number of devices per domain is at least the size of the system's
        first dimension. Empty if the device has no such links.
        """
        device, dimensions = self.device, self.system.dimensions
        if device is None or device.kind != "gpu" or dimensions[0].topology == "ring":
            return ()
        inside = device.link("scale_up") or device.link("pcie")
        if inside is None:
            return ()
        reach = structs.replace(inside, devices_per_domain=max(dimensions[0].size, inside.devices_per_domain))
        outside = device.link("scale_out") or (_as_link(dimensions[1]) if len(dimensions) > 1 else None)
        return (reach,) if outside is None else (reach, outside)

    def _measured(
        self, case: _CollectiveCase, message_bytes: FloatArray, diagnostics: Diagnostics | None
    ) -> _MeasuredTimes | None:
        """Return the times of the estimator of collectives on the links of the device; None if it has only
        data-sheet figures, or lacks some times.

        If the estimator modelled the algorithm of the library (NCCL's tuning model), the estimate is repeated
        with the bandwidth of the system's links, because the bandwidth determines the algorithm.
        """
        if self.device is None or not self._links or (len(self._links) == 1 and case.per_node < case.ranks):
            return None
        measured, messages = self._estimated(self._links, case, message_bytes)
        if _TUNED in messages.counts() and case.per_node < case.ranks and len(self.system.dimensions) > 1:
            inside, outside = self._links[0], self._links[-1]
            bandwidth = self.system.dimensions[1].bandwidth_bytes_per_s
            if bandwidth != outside.bandwidth_bytes_per_s:
                links = (inside, structs.replace(outside, bandwidth_bytes_per_s=bandwidth))
                measured, messages = self._estimated(links, case, message_bytes, clusters=False)
        if _DATA_SHEET in messages.counts() or np.isnan(measured.times).any():
            return None
        if diagnostics is not None:
            diagnostics.extend(messages)
        return measured

    def _estimated(
        self,
        links: tuple[Link, ...],
        case: _CollectiveCase,
        message_bytes: FloatArray,
        *,
        clusters: bool = True,
    ) -> tuple[_MeasuredTimes, Diagnostics]:
        """Return the times of the estimator of collectives for the device with the given links, and its
        diagnostics.
        """
        if self.device is None:
            raise InvariantError("no device for the estimate")
        kinds = {link.kind for link in links}
        others = (link for link in self.device.links if link.kind not in kinds)
        device, messages = replace(self.device, links=(*links, *others)), Diagnostics()
        model = Collectives(library=self.library, clusters=clusters)
        estimate = model.predict(case.operations(message_bytes), device, messages)
        return _MeasuredTimes(
            np.stack((estimate.duration_ns, estimate.low_ns, estimate.high_ns)), links
        ), messages

    def _as_system(self, links: tuple[Link, ...], nodes: int = 2) -> System:
        """Return a system of up to two dimensions that has the given links, with ``nodes`` nodes."""
        first, *rest = links
        inside = _as_dimension(first, self.system.dimensions[0], first.devices_per_domain)
        dimensions = (inside, *(_as_dimension(link, None, nodes) for link in rest))
        return replace(
            self.system, dimensions=dimensions, devices=prod(dimension.size for dimension in dimensions)
        )


def _as_link(dimension: Dimension) -> Link:
    return Link(
        name=dimension.name,
        kind="scale_out",
        bandwidth_bytes_per_s=dimension.bandwidth_bytes_per_s,
        latency_ns=dimension.latency_ns,
        topology="switch",
        links_per_device=dimension.links_per_device,
        devices_per_domain=-1,
        source=dimension.source,
        latency_source=dimension.latency_source,
    )


def _as_dimension(link: Link, like: Dimension | None, size: int) -> Dimension:
    """Return a link of the device as a network dimension of ``size`` devices.

    ``like`` is the corresponding dimension of the system. Its in-network reduction is copied to the result,
    because the measured times of the device include it.
    """
    return Dimension(
        name=link.name,
        topology="fully_connected" if link.topology == "fully_connected" else "switch",
        size=size,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_ns=link.latency_ns,
        links_per_device=max(link.links_per_device, 1),
        source=link.source,
        latency_source=link.latency_source,
        reduction="" if like is None else like.reduction,
        reduction_share=nan if like is None else like.reduction_share,
    )


class _TimeParts(NamedTuple):
    """Times of messages [ns], computed from bandwidths and latencies of links: ``latency_ns`` is the time of
    an empty message, ``moved_ns`` the additional time to transfer the bytes.
    """

    latency_ns: FloatArray
    moved_ns: FloatArray

    @classmethod
    def of(cls, model: Callable[[FloatArray], FloatArray], message_bytes: FloatArray) -> _TimeParts:
        """Return the parts of the times that ``model`` gives for messages."""
        latency_ns = model(np.zeros(len(message_bytes)))
        return cls(latency_ns, model(message_bytes) - latency_ns)

    @property
    def time_ns(self) -> FloatArray:
        """Return the sum of both parts."""
        return self.latency_ns + self.moved_ns


def _scaled(measured: FloatArray, own: _TimeParts, theirs: _TimeParts) -> FloatArray:
    """Return times that were measured on the links of a device, converted to the links of the system.

    ``own`` are formula times on the system's links, ``theirs`` on the device's links. The measured times are
    multiplied by the ratio of transfer times (system / device), and the difference of latencies is added.
    They stay unchanged if both links are equal or no formula exists.
    """
    later_ns = np.nan_to_num(own.latency_ns - theirs.latency_ns)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (own.moved_ns + theirs.latency_ns) / theirs.time_ns
    same = (own.moved_ns == theirs.moved_ns) | ~(theirs.time_ns > 0) | np.isnan(ratio)
    return np.maximum(measured * np.where(same, 1.0, ratio) + later_ns, 0.0)


_NAME = "network"
"""Name of the model in reports."""


def on_system(
    workload: Workload,
    estimates: Sequence[Estimate] | None,
    network: Network,
    diagnostics: Diagnostics | None = None,
) -> tuple[Workload, tuple[Estimate, ...] | None]:
    """Return the workload and its estimates with communication times on the system.

    Without estimates, the times of the graphs are replaced. Collectives without a formula keep their times.
    O(ranks log ranks) for each group set and permutation, and O(nodes) for each class.
    """
    reported = diagnostics if diagnostics is not None else Diagnostics()
    messages = reported if estimates is None else None  # estimates have already reported on their device
    placements = _Placements(network, workload.num_ranks, {}, {}, {})
    graphs, timed_estimates, rank_class = list[OpGraph](), list[Estimate](), workload.rank_class.copy()
    for index, graph in enumerate(workload.classes):
        ranks = np.flatnonzero(workload.rank_class == index)
        timed = _CommunicationTimes(graph, element_types_of(graph), network, placements, messages)
        for mine, times in timed.parts(ranks):
            rank_class[mine] = len(graphs)
            if estimates is None:
                durations = np.where(np.isnan(times[0]), graph.duration_ns, times[0])
                graphs.append(with_durations(graph, durations))
            else:
                graphs.append(graph)
                estimate = estimates[index]
                is_known = ~np.isnan(times[0])
                names = estimate.estimators if _NAME in estimate.estimators else (*estimate.estimators, _NAME)
                duration, low, high = (
                    np.where(is_known, new, old)
                    for new, old in zip(
                        times, (estimate.duration_ns, estimate.low_ns, estimate.high_ns), strict=True
                    )
                )
                timed_estimates.append(
                    replace(
                        estimate,
                        estimators=names,
                        duration_ns=duration,
                        low_ns=low,
                        high_ns=high,
                        estimator=np.where(is_known, names.index(_NAME), estimate.estimator).astype(np.int8),
                    )
                )
    reported.info(
        "simulate.network",
        network.system.name,
        "times of collectives and messages depend on the placement of their ranks in the system",
        count=sum(len(graph.collectives) + len(graph.p2p) for graph in workload.classes),
    )
    parted = replace(workload, classes=tuple(graphs), rank_class=rank_class)
    return parted, None if estimates is None else tuple(timed_estimates)


@dataclass(frozen=True, slots=True)
class _Placements:
    """Cache of the placements of groups and messages on the network."""

    network: Network
    num_ranks: int
    groups: dict[GroupSet, PlacedGroups]
    messages: dict[Permutation, tuple[IntArray, IntArray]]
    times: dict[tuple[object, ...], FloatArray]
    """Times of messages by all that they depend on; only without diagnostics, which count messages."""

    def of_groups(self, groups: GroupSet) -> PlacedGroups:
        if groups not in self.groups:
            self.groups[groups] = place_groups(groups, self.network.system, self.num_ranks)
        return self.groups[groups]

    def of_messages(self, permutation: Permutation) -> tuple[IntArray, IntArray]:
        if permutation not in self.messages:
            self.messages[permutation] = place_messages(permutation, self.network.system, self.num_ranks)
        return self.messages[permutation]


@dataclass(frozen=True, slots=True)
class _CommunicationTimes:
    """Communication times of one graph on a network. ``scheme`` is the number format of each node."""

    graph: OpGraph
    scheme: Labels
    network: Network
    placements: _Placements
    found: Diagnostics | None

    def _known(
        self,
        case: tuple[object, ...],
        message_bytes: FloatArray,
        times_of: Callable[[FloatArray], FloatArray],
    ) -> FloatArray:
        """Return the times of messages. They are cached for equal messages of other classes, unless
        diagnostics are collected.
        """
        if self.found is not None:
            return times_of(message_bytes)
        key, known = (*case, message_bytes.tobytes()), self.placements.times
        if key not in known:
            known[key] = times_of(message_bytes)
        return known[key]

    def parts(self, ranks: IntArray) -> list[tuple[IntArray, FloatArray]]:
        """Divide ``ranks`` into subsets of ranks with equal communication times.

        Return for each subset its ranks, and the times of all nodes [ns] with their intervals, shape ``(3,
        nodes)``. Nodes without a network time have NaN. If ``ranks`` is empty, return one empty subset.
        """
        used: list[int] = np.unique(self.graph.collectives.group_set).tolist()
        sets = self._sets()
        keys = [self.placements.of_groups(sets[row]).which[ranks][:, None] for row in used]
        permutations: list[int] = np.unique(self.graph.p2p.permutation).tolist()
        for row in permutations:
            if row >= 0:
                distances = self.placements.of_messages(self.graph.permutations[row])
                keys += [side[ranks] for side in distances]
        if not keys or not len(ranks):
            return [(ranks, np.full((3, len(self.graph)), np.nan))]
        distinct, row_of = np.unique(np.concatenate(keys, axis=1), axis=0, return_inverse=True)
        by_times: dict[bytes, tuple[list[IntArray], FloatArray]] = {}
        for number in range(len(distinct)):
            mine = ranks[row_of.reshape(-1) == number]
            rank = int(mine[0])
            times = np.full((3, len(self.graph)), np.nan)
            self._collectives(rank, times)
            self._messages(rank, times)
            times[:, takes_no_time(self.graph)] = np.nan
            by_times.setdefault(times.tobytes(), ([], times))[0].append(mine)
        return [(np.concatenate(parts), times) for parts, times in by_times.values()]

    def _sets(self) -> list[GroupSet]:
        """Return the group sets of the graph, and last the group of all ranks for collectives without a group
        set.
        """
        return [*self.graph.group_sets, StridedGroups.all_ranks(self.placements.num_ranks)]

    def _collectives(self, rank: int, times: FloatArray) -> None:
        table, sets = self.graph.collectives, self._sets()
        key = np.stack([table.kind.astype(np.int64), table.group_set, self.scheme.row[table.node]])
        distinct, key_of = np.unique(key, axis=1, return_inverse=True)
        keys: list[list[int]] = distinct.T.tolist()
        for number, (kind, row, name) in enumerate(keys):
            placed = self.placements.of_groups(sets[row])
            which = int(placed.which[rank])
            if which < 0:
                continue
            mine = np.flatnonzero(key_of.reshape(-1) == number)
            case = (CollectiveKind(kind).name.lower(), self.scheme.names[name], placed.footprints[which])
            times[:, table.node[mine]] = self._known(
                case,
                table.comm_bytes[mine],
                partial(self.network.collectives, *case, diagnostics=self.found),
            )

    def _messages(self, rank: int, times: FloatArray) -> None:
        table = self.graph.p2p
        rows = np.flatnonzero(between_ranks(self.graph) & (table.permutation >= 0))
        receives = self.graph.kind[table.node] == int(NodeKind.RECV)
        key = np.stack([table.permutation.astype(np.int64), receives, self.scheme.row[table.node]])[:, rows]
        distinct, key_of = np.unique(key, axis=1, return_inverse=True)
        keys: list[list[int]] = distinct.T.tolist()
        for number, (row, incoming, name) in enumerate(keys):
            away = self.placements.of_messages(self.graph.permutations[row])[incoming][rank]
            if not away.any():
                continue
            mine = rows[key_of.reshape(-1) == number]
            case = (self.scheme.names[name], tuple(away.tolist()))
            times[:, table.node[mine]] = self._known(
                case, table.comm_bytes[mine], partial(self.network.messages, *case, diagnostics=self.found)
            )
