"""Ranks that are run once end every node when they do in a run of all ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.chakra.assembly import simulated_ns
from hespas.converters.chakra.comm_groups import GroupIds
from hespas.graph import GroupSet, NodeKind, Permutation, StridedGroups, Workload
from hespas.simulator.astra import AstraOptions, NetworkConfig, SystemConfig
from hespas.simulator.astra.configuration import Optimization, Topology
from hespas.simulator.astra.engine import run_all
from hespas.simulator.astra.lockstep import run_alike
from hespas.simulator.astra.traces import JobTraces
from tests.simulator.astra.small_systems import KINDS, network, system
from tests.validators.checker.small_jobs import Steps


def traces_of(workload: Workload, machine: SystemConfig) -> JobTraces:
    ids = GroupIds.of(workload)

    def number(groups: GroupSet, rank: int) -> int:
        return int(ids.text(groups, rank) or b"0")

    return JobTraces.of(workload, machine, [simulated_ns(graph) for graph in workload.classes], number)


def kinds_and_equal(
    workload: Workload, wires: NetworkConfig, machine: SystemConfig, queues: int = 1
) -> int | None:
    """How many ranks were run in place of all, None where all have to be; the times of every node of every
    rank are those of a run of all ranks.
    """
    options = AstraOptions(system=machine, network=wires, queues_per_dim=queues)
    traces = traces_of(workload, machine)
    alike = run_alike(traces, options)
    if alike is None:
        return None
    ranks = run_all(traces.of_ranks(range(workload.num_ranks)), options)
    for rank, shown_by in zip(ranks, alike.shown_by.tolist(), strict=True):
        shown, full = alike.ranks[shown_by], rank.result()
        assert list(shown.start_ns) == list(full.start_ns)
        assert list(shown.end_ns) == list(full.end_ns)
        assert list(shown.cause) == list(full.cause)
        assert shown.finish_ns == full.finish_ns
    return len(alike.ranks)


TOPOLOGIES: tuple[Topology, ...] = ("Ring", "FullyConnected", "Switch")
ALGORITHMS = ("ring", "direct", "direct2", "halvingDoubling")
SIZES = (1, 1000, 4096, 1 << 20, 3145735)


@st.composite
def systems(draw: st.DrawFn) -> tuple[NetworkConfig, SystemConfig, int]:
    dims = draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3))
    wires = network(
        *((draw(st.sampled_from(TOPOLOGIES)), size) for size in dims),
        gib_per_s=draw(st.sampled_from([1.0, 50.0])), latency_ns=draw(st.sampled_from([0.0, 500.0, 10.0])),
    )  # fmt: skip
    optimization: Optimization = draw(st.sampled_from(["baseline", "localBWAware"]))
    machine = system(
        *(draw(st.sampled_from(ALGORITHMS)) for _ in dims),
        optimization=optimization,
        dataset_splits=draw(st.integers(1, 5)),
        active_chunks_per_dimension=draw(st.integers(1, 3)),
        endpoint_delay_ns=draw(st.sampled_from([1, 10, 1000])),
        local_memory_gb_per_s=draw(st.sampled_from([None, 1.0, 1600.0])),
    )
    return wires, machine, draw(st.sampled_from([1, 1, 2, 4]))


@st.composite
def jobs(draw: st.DrawFn, ranks: int) -> Workload:
    """A graph per stage: computations of the host and the device, collectives, messages between stages."""
    count = draw(st.sampled_from([each for each in (1, 1, 2, 4) if each <= ranks]))
    per_stage = ranks // count
    stages = tuple(Steps(ranks) for _ in range(count))
    sets: list[GroupSet | None] = [None] if count == 1 else []
    for inner in (2, 4, 8):
        if inner < per_stage:
            sets.append(StridedGroups(((ranks // inner, inner),), ((inner, 1),)))
            sets.append(StridedGroups(((count, per_stage), (inner, 1)), ((per_stage // inner, inner),)))
    ends = [[0] for _ in stages]
    for at in range(draw(st.integers(1, 7))):
        what = draw(st.sampled_from(["compute", "host", "collective", "message"]))
        microseconds = draw(st.integers(0, 3))
        chosen = draw(st.sampled_from(sets)) if sets else None
        kind, size = draw(st.sampled_from(KINDS)), draw(st.sampled_from(SIZES))
        back = draw(st.lists(st.integers(0, at), max_size=2, unique=True)) if at else []
        ahead = draw(st.booleans())
        for number, steps in enumerate(stages):
            deps = [ends[number][place] for place in back if place]
            if what == "collective" and sets:
                node = steps.coll(*deps, kind=kind, size=float(max(size, 8)), groups=chosen)
            elif what == "message" and count > 1:
                shift = 1 if ahead else -1
                hop = Permutation(ranks, (count, per_stage), shift, wraps=False)
                if 0 <= number - shift < count:
                    node = steps.message(NodeKind.RECV, deps, hop, size=float(size), tag=at)
                    deps = [node]
                if 0 <= number + shift < count:
                    node = steps.message(NodeKind.SEND, deps, hop, size=float(size), tag=at)
            else:
                node = steps.compute(*deps, ns=1000.0 * microseconds, host=what == "host")
            ends[number].append(node)
    rank_class = np.repeat(np.arange(count, dtype=np.int32), per_stage)
    return Workload(name="job", classes=tuple(each.build() for each in stages), rank_class=rank_class)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, NetworkConfig, SystemConfig, int]:
    wires, machine, queues = draw(systems())
    return draw(jobs(wires.num_ranks)), wires, machine, queues
