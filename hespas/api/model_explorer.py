"""Estimated times on the graphs of a program in Model Explorer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hespas.api.documents import write_json
from hespas.api.estimation import NodeEstimates
from hespas.converters.stablehlo.op_numbers import OpPosition, numbered_program
from hespas.files.documents import Count
from hespas.graph import OpClass, OpGraph
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.passes import FuseElementwise
from hespas.report.node_data import node_data_bytes

__all__ = ["NodeData", "node_data", "write_node_data"]

_PRODUCTS = (OpClass.CONTRACTION, OpClass.CONVOLUTION, OpClass.ATTENTION)


_DIGITS = 6
"""Significant digits of values, which Model Explorer shows as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeData:
    """Estimated times of the operations of a StableHLO program, for Model Explorer.

    ``values_us[function][number]`` is the time of an operation per rank and step, summed over its executions
    and over all calls of its function. The number is the node id of Model Explorer. A call has the time of
    the operations in the called function. ``operations`` counts the operations except calls. Of these,
    ``timed`` have a time, ``fused`` are fused into another operation, which has the time of both, ``unknown``
    have an unknown time, and ``free`` cost nothing or never run and were removed before the estimate.
    """

    title: str
    values_us: Mapping[str, Mapping[int, float]]
    operations: Count
    timed: Count
    fused: Count
    unknown: Count
    free: Count

    def to_json(self) -> bytes:
        """Return the node data file."""
        return node_data_bytes(self.title, self.values_us)


def node_data(done: NodeEstimates) -> NodeData:
    """Return the estimates of a StableHLO program by the node ids of Model Explorer.

    A fusion has its time on its matmul or convolution if it has exactly one, otherwise on its last operation.
    If the program was read with ``dims``, the ids are of the program with these extents. Raises
    ``UnsupportedError`` for other workloads, and ``UsageError`` for operations that are merged into regions.

    Examples:
        >>> estimates = hespas.estimate("samples/mlp.mlir", "H100-SXM")
        >>> data = hespas.api.node_data(estimates)
        >>> data.timed, data.operations
        (4, 26)
    """
    if done.granularity == "region":
        raise UsageError(
            "a region between collectives has no node in Model Explorer",
            hint="choose granularity fused or op",
        )
    program = numbered_program(done.workload)
    source, (graph,), (estimated,) = program.graph, done.workload.classes, done.estimates
    root = graph.id.astype(np.int64)
    if (graph.id >= len(source)).any() or _names(source, root) != _names(graph, np.arange(len(graph))):
        raise UnsupportedError(
            f"the operations of the workload {done.workload.name} differ from its StableHLO program",
            hint="estimate the program itself (.mlir or .mlirbc)",
        )
    nodes = np.arange(len(source))
    owner = FuseElementwise().owners(source) if done.granularity == "fused" else nodes
    timed_node = _timed_members(source, owner)[root]
    executions = graph.executions
    times_us = np.where(executions == 0, 0.0, estimated.duration_ns * executions / 1e3)
    is_known = np.isfinite(times_us)

    def per_path(members: IntArray, weights: FloatArray | None = None) -> list[float]:
        sums: list[float] = np.bincount(program.path[members], weights, len(program.paths)).tolist()
        return sums

    columns = (
        per_path(timed_node),
        per_path(timed_node[~is_known]),
        per_path(timed_node, np.where(is_known, times_us, 0.0)),
        per_path(nodes[np.isin(owner, root)]),
    )
    sums_us: dict[OpPosition, float] = {}
    fused: dict[OpPosition, bool] = {}
    unknown, calls = set[OpPosition](), set[OpPosition]()
    for positions, estimates, unknowns, known_us, members in zip(program.paths, *columns, strict=True):
        calls.update(positions[:-1])
        for position in positions[-1:]:
            fused[position] = fused.get(position, False) or members > 0
        for position in positions if estimates else ():
            sums_us[position] = sums_us.get(position, 0.0) + known_us
        unknown.update(positions if unknowns else ())
    values_us: dict[str, dict[int, float]] = {}
    for position, time_us in sums_us.items():
        if position not in unknown:
            values_us.setdefault(position.function, {})[position.number] = float(f"{time_us:.{_DIGITS}g}")
    states = Counter[str]()
    for position in fused.keys() - calls:
        if position in sums_us:
            states["unknown" if position in unknown else "timed"] += 1
        else:
            states["fused" if fused[position] else "free"] += 1
    return NodeData(
        title=f"estimated time (us) on {estimated.hardware}",
        values_us=values_us,
        operations=states.total(),
        timed=states["timed"],
        fused=states["fused"],
        unknown=states["unknown"],
        free=states["free"],
    )


def _names(graph: OpGraph, nodes: IntArray) -> list[str]:
    rows: list[int] = graph.name_id[nodes].tolist()
    return [graph.strings[row] for row in rows]


def _timed_members(graph: OpGraph, owner: IntArray) -> IntArray:
    """Return for each root the member of its group that has the time of the group: the only matmul or
    convolution, otherwise the root.
    """
    products = np.flatnonzero(np.isin(graph.op_class, _PRODUCTS))
    alone = products[np.bincount(owner[products], minlength=len(graph))[owner[products]] == 1]
    timed = np.arange(len(graph))
    timed[owner[alone]] = alone
    return timed


def write_node_data(done: NodeEstimates, path: str | Path, *, overwrite: bool = False) -> NodeData:
    """Write the estimates of a StableHLO program as a node data file of Model Explorer, and return its
    content. ``-`` is standard output.

    Raises the errors of :func:`node_data`, and ``OutputError`` if the file exists and ``overwrite`` is false.
    """
    data = node_data(done)
    write_json(data.to_json(), Path(path), overwrite=overwrite)
    return data
