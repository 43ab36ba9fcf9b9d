"""Simulation of Chakra traces as ASTRA-sim runs them, shared by ``simulate`` and the checker."""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.comm_groups import FILE_NAME, GroupIds, parse_groups
from hespas.converters.chakra.preserve import simulated_ns
from hespas.converters.chakra.readiness import list_faults, raised_counts
from hespas.graph import Diagnostics, GroupSet, OpGraph, Workload
from hespas.graph.errors import UnsupportedError
from hespas.simulator.astra import AstraOptions, AstraSimulation, StatedCosts, simulate_astra

__all__ = ["run_traces", "stated_costs"]

_MAX_ID = (1 << 31) - 1


def run_traces(workload: Workload, options: AstraOptions, diagnostics: Diagnostics) -> AstraSimulation:
    """Simulate a workload that was read from Chakra traces in mode ``astra``.

    Raises the errors of :func:`hespas.simulator.astra.simulate_astra`, and ``UnsupportedError`` for process
    groups whose names, or tensor lists, ASTRA-sim cannot read.
    """
    for graph in workload.classes if options.system.tracks_local_memory else ():
        for mask, message, is_fatal in list_faults(graph):
            if is_fatal and mask.any():
                raise UnsupportedError(
                    f"node {int(graph.id[int(mask.argmax())])}: {message}", code="ET033",
                    path=options.system.path, hint="set track-local-mem to 0, or write the lists",
                )  # fmt: skip
    documents = {graph.attachments.get(FILE_NAME, b"") for graph in workload.classes} - {b""}
    for document in sorted(documents):
        names = parse_groups(document, Faults(FILE_NAME, None, Diagnostics(), lenient=True)).names
        if names:
            shown = ", ".join(repr(name) for name in list(names)[:4])
            raise UnsupportedError(
                f"process groups are named {shown}: ASTRA-sim requires integers from 1 on",
                code="ET018", path=FILE_NAME,
                hint="run hespas-convert TRACES NEW, which writes the same traces with numbered groups",
            )  # fmt: skip
    ids = GroupIds.of(workload)

    def number(groups: GroupSet, rank: int) -> int:
        group_id = int(ids.text(groups, rank) or b"0")
        if group_id > _MAX_ID:
            raise UnsupportedError(
                f"process group {group_id} exceeds the 32 bits of ASTRA-sim", code="ET028",
                hint="number process groups from 1",
            )  # fmt: skip
        return group_id

    stated = [stated_costs(graph) for graph in workload.classes]
    return simulate_astra(workload, options, stated, number, diagnostics)


def stated_costs(graph: OpGraph) -> StatedCosts:
    """Return the costs of a graph as its Chakra trace states them. In traces that Hespas writes, a count of 0
    is stated as 1.
    """
    no_flops, no_bytes = raised_counts(graph)
    return StatedCosts(
        simulated_ns(graph),
        np.where(no_flops, 1.0, graph.flops),
        np.where(no_bytes, 1.0, graph.bytes_moved),
    )
