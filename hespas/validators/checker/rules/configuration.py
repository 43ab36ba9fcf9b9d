"""Rules of ASTRA-sim's configuration: the system that it describes can run the workload."""

from __future__ import annotations

import re

import numpy as np

from hespas.converters.chakra.readiness import list_faults, raised_counts
from hespas.graph import CollectiveKind, GroupSet, NodeKind, Resource, Severity
from hespas.simulator.astra.configuration import NetworkConfig, SystemConfig
from hespas.validators.checker.job import CheckedJob, RuleReport
from hespas.validators.checker.rules.collectives import SIMULATED, collective_name
from hespas.validators.checker.rules.nodes import is_kind

__all__ = [
    "algorithms_fit",
    "as_many_ranks_as_network",
    "backend_fits_network",
    "chunks_not_empty",
    "few_groups_on_1d",
    "memory_lists",
    "remote_memory_there",
    "roofline_costs",
    "system_complete",
]

_ALGORITHM = re.compile(r"(one)?(ring|direct\d*|halvingDoubling)|doubleBinaryTree", re.IGNORECASE)
_DEFAULT_DIMENSIONS = 4


def _system(job: CheckedJob) -> SystemConfig:
    assert job.system is not None, "the table of rules requires it"
    return job.system


def _network(job: CheckedJob) -> NetworkConfig:
    assert job.network is not None, "the table of rules requires it"
    return job.network


def _used_collectives(job: CheckedJob) -> dict[CollectiveKind, set[GroupSet | None]]:
    """Return the collective kinds that ASTRA-sim simulates, with their group sets (None: all ranks)."""
    used: dict[CollectiveKind, set[GroupSet | None]] = {}
    for graph in job.classes:
        kinds: list[int] = graph.collectives.kind.tolist()
        rows: list[int] = graph.collectives.group_set.tolist()
        for code, row in set(zip(kinds, rows, strict=True)):
            kind = CollectiveKind(code)
            groups = graph.group_sets[row] if row >= 0 else None
            if kind in SIMULATED:
                world = groups is None or groups.is_world(job.num_ranks)
                used.setdefault(kind, set()).add(None if world else groups)
    return dict(sorted(used.items()))


def chunks_not_empty(job: CheckedJob, report: RuleReport) -> None:
    """ET013: no collective is cut into more pieces than it has bytes."""
    splits = _system(job).dataset_splits
    if splits is None:
        return
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        gathers = table.kind == int(CollectiveKind.ALL_GATHER)
        small = table.node[gathers & (table.comm_bytes < splits)]
        report.nodes(index, small, f"an all-gather of fewer bytes than {splits} splits never ends")
        simulated = np.isin(table.kind, [int(kind) for kind in SIMULATED])
        padded = simulated & ~gathers & (table.comm_bytes < splits * job.num_ranks)
        text = f"it is padded up to {splits} splits x {job.num_ranks:,} ranks bytes"
        report.nodes(index, table.node[padded], text, Severity.WARNING)


def as_many_ranks_as_network(job: CheckedJob, report: RuleReport) -> None:
    """ET022: all ranks of the job are given, and their number is that of the network."""
    if not job.complete and job.is_set:
        available, total = job.workload.num_available, job.workload.num_ranks
        text = (
            f"only {available:,} of {total:,} ranks are given"
            if available < total
            else "the other ranks are missing"
        )
        report.add(f"{text}: ASTRA-sim runs whole jobs only")
    if job.network is None:
        return
    expected, actual = job.network.num_ranks, job.workload.num_ranks
    if job.complete and actual != expected:
        effect = "ASTRA-sim exits" if actual < expected else "ASTRA-sim ignores the rest silently"
        report.add(f"{actual:,} traces for a network of {expected:,} ranks: {effect}")


def roofline_costs(job: CheckedJob, report: RuleReport) -> None:
    """ET024: in roofline mode every computation states FLOPs and bytes.

    Traces by Hespas state a count of 0 as 1; traces by other tools do not.
    """
    if not _system(job).roofline:
        return
    for index, graph in enumerate(job.classes):
        computes = is_kind(graph, NodeKind.COMPUTE) & (graph.resource == int(Resource.DEVICE))
        no_flops, no_bytes = raised_counts(graph)
        flops, moved = (graph.flops > 0) | no_flops, (graph.bytes_moved > 0) | no_bytes
        report.nodes(index, computes & ~flops, "no num_ops: in roofline mode it never finishes")
        report.nodes(index, computes & flops & ~moved, "no tensor_size: in roofline mode nothing follows it")


def memory_lists(job: CheckedJob, report: RuleReport) -> None:
    """ET033: if local memory is tracked, every node lists the tensors that it reads and writes."""
    if not _system(job).tracks_local_memory:
        return
    for index, graph in enumerate(job.classes):
        for mask, message, _ in list_faults(graph):
            report.nodes(index, mask, message)


def algorithms_fit(job: CheckedJob, report: RuleReport) -> None:
    """ET025: halving-doubling and double binary trees have sizes and collectives that they support."""
    network, system = _network(job), _system(job)
    for kind, group_sets in _used_collectives(job).items():
        names = system.implementations.get(kind, ())
        if kind in system.custom:
            continue
        for dimension, name in enumerate(names):
            extent = network.npus[dimension] if dimension < len(network.npus) else 1
            size = network.num_ranks if name.startswith("one") else extent
            what = f"{collective_name(kind)} by {name}"
            lowered = name.lower()
            if "halvingdoubling" in lowered or lowered == "doublebinarytree":
                if size & (size - 1):
                    report.add(f"{what} requires a power of two, its dimension has {size:,} ranks")
                if lowered == "doublebinarytree" and kind is not CollectiveKind.ALL_REDUCE:
                    report.add(
                        f"{what}: a double binary tree runs an all-reduce instead", severity=Severity.WARNING
                    )
                if "halvingdoubling" in lowered and kind is CollectiveKind.ALL_TO_ALL:
                    report.add(f"{what} is not implemented")
        if len(names) == 1:  # with several entries ASTRA-sim forces a ring on groups
            for groups in group_sets:
                if groups is not None:
                    _check_group_algorithm(report, kind, names[0], groups)


def _check_group_algorithm(report: RuleReport, kind: CollectiveKind, name: str, groups: GroupSet) -> None:
    lowered = name.lower()
    if lowered == "doublebinarytree":
        report.add(f"{collective_name(kind)} over groups by {name}: ASTRA-sim crashes in a sub-group")
    sizes = {groups.group_size} if groups.group_size > 0 else {len(members) for members in groups}
    odd = sorted(size for size in sizes if size & (size - 1))
    if "halvingdoubling" in lowered and odd:
        report.add(f"{collective_name(kind)} by {name} requires a power of two, a group has {odd[0]:,} ranks")


def system_complete(job: CheckedJob, report: RuleReport) -> None:
    """ET026: system.json has every entry that ASTRA-sim requires."""
    system = _system(job)
    if system.dataset_splits is None:
        report.add(f"{system.path}: preferred-dataset-splits is missing: ASTRA-sim crashes")
    if system.local_memory_gb_per_s is None:
        report.add(f"{system.path}: local-mem-bw is missing: reductions cost nothing and roofline fails")
    if system.roofline and not system.peak_tflops:
        report.add(f"{system.path}: roofline-enabled without peak-perf")
    for kind in _used_collectives(job):
        key = f"{collective_name(kind)}-implementation"
        names = system.implementations.get(kind, ())
        if not names and kind not in system.custom:
            report.add(f"{system.path}: {key} is missing and the workload uses it")
        for name in names:
            if not _ALGORITHM.fullmatch(name):
                report.add(f"{system.path}: {key} names the unknown algorithm {name!r}")
        flat = any(name.startswith("one") for name in names)
        dimensions = 0 if job.network is None else len(job.network.npus)
        if names and dimensions and not flat and len(names) != dimensions:
            report.add(f"{system.path}: {key} has {len(names)} entries, the network {dimensions} dimensions")


def remote_memory_there(job: CheckedJob, report: RuleReport) -> None:
    """ET027: nodes that access remote memory state their size, and the system has remote memory."""
    memory = job.memory
    for index, graph in enumerate(job.classes):
        nodes = is_kind(graph, NodeKind.MEM_LOAD, NodeKind.MEM_STORE)
        report.nodes(index, nodes & ~(graph.bytes_moved > 0), "a memory node does not state its tensor_size")
        if memory is None and nodes.any():
            report.note("memory nodes not checked: no remote memory file was given")
        elif memory is not None and not memory.has_remote_memory:
            report.nodes(index, nodes, f"{memory.path} has NO_MEMORY_EXPANSION")


def few_groups_on_1d(job: CheckedJob, report: RuleReport) -> None:
    """ET031: on a 1-D network at most one group uses a collective; with more, ASTRA-sim aborts at the end."""
    if len(_network(job).npus) != 1:
        return
    for kind, group_sets in _used_collectives(job).items():
        count = sum(groups.num_groups for groups in group_sets if groups is not None)
        if count > 1:
            what = f"{count:,} groups use {collective_name(kind)} on a 1-D network"
            report.add(f"{what}: ASTRA-sim prints its results and then aborts")


def backend_fits_network(job: CheckedJob, report: RuleReport) -> None:
    """ET032: the backend supports the network: one dimension if congestion-aware, four by default."""
    network = _network(job)
    dimensions = len(network.npus)
    if job.backend == "aware" and dimensions > 1:
        report.add(
            f"the congestion-aware backend supports 1-D networks, this one has {dimensions} dimensions"
        )
    is_ring_of_two = network.topology[0] == "Ring" and network.npus[0] == 2
    if job.backend == "aware" and dimensions == 1 and is_ring_of_two:
        report.add("the congestion-aware backend aborts on a ring of 2")
    has_involved_dim = all(
        (key := graph.strings.find("involved_dim")) >= 0 and bool((graph.extra.key == key).any())
        for graph in job.classes
    )
    if dimensions > _DEFAULT_DIMENSIONS and not has_involved_dim:
        report.add(f"{dimensions} dimensions require involved_dim on every collective; its default covers 4")
