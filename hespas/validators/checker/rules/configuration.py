"""Rules that need ASTRA-sim's configuration: does the system it describes run this workload?"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from hespas.converters.chakra.readiness import list_faults, stand_ins
from hespas.graph import CollectiveKind, GroupSet, NodeKind, Resource, Severity
from hespas.simulator.astra.configuration import NetworkConfig, SystemConfig
from hespas.validators.checker.job import Job, Report
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


def _system(job: Job) -> SystemConfig:
    assert job.system is not None, "the table asks for it"
    return job.system


def _network(job: Job) -> NetworkConfig:
    assert job.network is not None, "the table asks for it"
    return job.network


def _used(job: Job) -> dict[CollectiveKind, set[GroupSet | None]]:
    """Collective kinds that ASTRA-sim runs itself, with the group sets they run over (None: all ranks)."""
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


def chunks_not_empty(job: Job, report: Report) -> None:
    """ET013: no collective is cut into more pieces than it has bytes."""
    splits = _system(job).dataset_splits
    if splits is None:
        return
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        gathers = table.kind == int(CollectiveKind.ALL_GATHER)
        small = table.node[gathers & (table.comm_bytes < splits)]
        report.nodes(index, small, f"an all-gather of fewer bytes than {splits} splits loops for ever")
        simulated = np.isin(table.kind, [int(kind) for kind in SIMULATED])
        padded = simulated & ~gathers & (table.comm_bytes < splits * job.num_ranks)
        text = f"it is padded up to {splits} splits x {job.num_ranks:,} ranks bytes"
        report.nodes(index, table.node[padded], text, Severity.WARNING)


def as_many_ranks_as_network(job: Job, report: Report) -> None:
    """ET022: all ranks of the job are there, and as many as the network has."""
    if not job.complete and job.is_set:
        here, total = job.workload.num_available, job.workload.num_ranks
        what = f"{here:,} of {total:,} ranks are here" if here < total else "the other ranks are not here"
        report.add(f"{what}: ASTRA-sim runs whole jobs only")
    if job.network is None:
        return
    expected, found = job.network.num_ranks, job.workload.num_ranks
    if job.complete and found != expected:
        effect = "ASTRA-sim exits" if found < expected else "ASTRA-sim ignores the rest silently"
        report.add(f"{found:,} traces for a network of {expected:,} ranks: {effect}")


def roofline_costs(job: Job, report: Report) -> None:
    """ET024: in roofline mode every computation states FLOPs and bytes. One that counts none of them states 1
    in a trace that is written here, but not in one that another tool wrote.
    """
    if not _system(job).roofline:
        return
    for index, graph in enumerate(job.classes):
        computes = is_kind(graph, NodeKind.COMPUTE) & (graph.resource == int(Resource.DEVICE))
        no_flops, no_bytes = stand_ins(graph)
        flops, moved = (graph.flops > 0) | no_flops, (graph.bytes_moved > 0) | no_bytes
        report.nodes(index, computes & ~flops, "no num_ops: in roofline mode it never finishes")
        report.nodes(index, computes & flops & ~moved, "no tensor_size: in roofline mode nothing follows it")


def memory_lists(job: Job, report: Report) -> None:
    """ET033: where local memory is tracked, every node lists what it reads and writes."""
    if not _system(job).tracks_local_memory:
        return
    for index, graph in enumerate(job.classes):
        for mask, message in list_faults(graph):
            report.nodes(index, mask, message)


def algorithms_fit(job: Job, report: Report) -> None:
    """ET025: halving-doubling and double binary trees get the sizes and collectives they are made for."""
    network, system = _network(job), _system(job)
    for kind, group_sets in _used(job).items():
        names = system.implementations.get(kind, ())
        if kind in system.custom:
            continue
        for dimension, name in enumerate(names):
            size = network.num_ranks if name.startswith("one") else _extent(network, dimension)
            _algorithm(report, kind, name, size)
        if len(names) == 1:  # with several entries ASTRA-sim forces a ring on groups
            for groups in group_sets - {None}:
                _group_algorithm(report, kind, names[0], groups)


def _extent(network: NetworkConfig, dimension: int) -> int:
    return network.npus[dimension] if dimension < len(network.npus) else 1


def _algorithm(report: Report, kind: CollectiveKind, name: str, size: int) -> None:
    what = f"{collective_name(kind)} by {name}"
    lowered = name.lower()
    if "halvingdoubling" not in lowered and lowered != "doublebinarytree":
        return
    if size & (size - 1):
        report.add(f"{what} needs a power of two, its dimension has {size:,} ranks")
    if lowered == "doublebinarytree" and kind is not CollectiveKind.ALL_REDUCE:
        report.add(f"{what}: a double binary tree runs an all-reduce instead", severity=Severity.WARNING)
    if "halvingdoubling" in lowered and kind is CollectiveKind.ALL_TO_ALL:
        report.add(f"{what} is not implemented")


def _group_algorithm(report: Report, kind: CollectiveKind, name: str, groups: GroupSet | None) -> None:
    if groups is None:
        return
    lowered = name.lower()
    if lowered == "doublebinarytree":
        report.add(f"{collective_name(kind)} over groups by {name}: ASTRA-sim crashes in a sub-group")
    sizes = {groups.group_size} if groups.group_size > 0 else {len(members) for members in groups}
    odd = sorted(size for size in sizes if size & (size - 1))
    if "halvingdoubling" in lowered and odd:
        report.add(f"{collective_name(kind)} by {name} needs a power of two, a group has {odd[0]:,} ranks")


def system_complete(job: Job, report: Report) -> None:
    """ET026: system.json says what ASTRA-sim cannot do without."""
    system = _system(job)
    if system.dataset_splits is None:
        report.add(f"{system.path}: preferred-dataset-splits is missing, on which ASTRA-sim crashes")
    if system.local_memory_gb_per_s is None:
        report.add(f"{system.path}: local-mem-bw is missing: reductions cost nothing and roofline fails")
    if system.roofline and not system.peak_tflops:
        report.add(f"{system.path}: roofline-enabled without peak-perf")
    for kind in _used(job):
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


def remote_memory_there(job: Job, report: Report) -> None:
    """ET027: nodes that load and store remote memory have one, and state their size."""
    memory = job.memory
    for index, graph in enumerate(job.classes):
        nodes = is_kind(graph, NodeKind.MEM_LOAD, NodeKind.MEM_STORE)
        report.nodes(index, nodes & ~(graph.bytes_moved > 0), "a memory node does not state its tensor_size")
        if memory is None and nodes.any():
            report.note("not checked: no remote memory file was given, and the workload has memory nodes")
        elif memory is not None and not memory.has_remote_memory:
            report.nodes(index, nodes, f"{memory.path} has NO_MEMORY_EXPANSION")


def few_groups_on_1d(job: Job, report: Report) -> None:
    """ET031: on a 1-D network at most one group uses a collective, or ASTRA-sim aborts when it ends."""
    if len(_network(job).npus) != 1:
        return
    for kind, group_sets in _used(job).items():
        count = sum(groups.num_groups for groups in group_sets if groups is not None)
        if count > 1:
            what = f"{count:,} groups use {collective_name(kind)} on a 1-D network"
            report.add(f"{what}: ASTRA-sim prints its results and then aborts")


def backend_fits_network(job: Job, report: Report) -> None:
    """ET032: the congestion-aware backend takes one dimension, default attributes four."""
    dimensions = len(_network(job).npus)
    if job.backend == "aware" and dimensions > 1:
        report.add(f"the congestion-aware backend takes 1-D networks, this one has {dimensions} dimensions")
    if job.backend == "aware" and dimensions == 1 and _is_ring_of_two(_network(job)):
        report.add("the congestion-aware backend aborts on a ring of 2")
    if dimensions > _DEFAULT_DIMENSIONS and not _has_involved_dim(job):
        report.add(f"{dimensions} dimensions need involved_dim on every collective; the default covers 4")


def _is_ring_of_two(network: NetworkConfig) -> bool:
    return network.topology[0] == "Ring" and network.npus[0] == 2


def _has_involved_dim(job: Job) -> bool:
    keys: Mapping[int, int] = {
        index: graph.strings.find("involved_dim") for index, graph in enumerate(job.classes)
    }
    return all(key >= 0 and bool((job.classes[index].extra.key == key).any()) for index, key in keys.items())
