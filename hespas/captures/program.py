"""A program for a whole mesh -> the workload of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hespas.captures.axes import CollectiveRow, axes_of, axis_of_shift
from hespas.captures.loop_reductions import moved_reductions
from hespas.captures.mesh import Mesh
from hespas.captures.partition import TIMEOUT_S, Partitioner, partition
from hespas.converters.format import ReadOptions
from hespas.converters.hlo.reader import read_module
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, StridedGroups, Workload

__all__ = ["Captured", "captured", "collective_rows"]


_OWN_LINES = 'source_file="-"'
"""Where operations of a text without locations come from: MLIR does not know its name."""


@dataclass(frozen=True, slots=True)
class Captured:
    """``program`` is StableHLO of the whole mesh as it came, ``partitioned`` the HLO that devices run."""

    workload: Workload
    program: bytes
    partitioned: str


def captured(
    program: bytes,
    path: str,
    *,
    mesh: Mesh | None = None,
    partitioner: Partitioner = "auto",
    timeout_s: float = TIMEOUT_S,
    metadata: Mapping[str, str] | None = None,
    diagnostics: Diagnostics,
) -> Captured:
    """Partition ``program`` and read what each device runs; ``path`` stands in messages.

    Raises what :func:`hespas.captures.partition.partition` does.
    """
    text = partition(program, axes=mesh, partitioner=partitioner, timeout_s=timeout_s)
    text = moved_reductions(text, path, diagnostics)
    own = f'source_file="{Path(path).name}"'.replace("\\", "/")
    text = text.replace(_OWN_LINES, own if '"' not in Path(path).name else _OWN_LINES)
    workload = read_module(text.encode(), path, ReadOptions(), diagnostics)
    stated = {"mesh": str(mesh)} if mesh is not None else {}
    described = {**workload.metadata, "partitioner": "xla", **stated, **(metadata or {})}
    return Captured(replace(workload, metadata=described), program, text)


def collective_rows(workload: Workload, mesh: Mesh) -> list[CollectiveRow]:
    """Collectives and messages of a rank of the first class by kind and axes, in order of first use."""
    graph = workload.classes[0]
    found = dict[tuple[str, str], CollectiveRow]()

    def add(node: int, kind: str, axes: str, groups: tuple[int, int], size_bytes: float) -> None:
        times = float(graph.multiplicity[node])
        before = found.get((kind, axes), CollectiveRow(kind, axes, *groups, 0.0, 0.0))
        found[kind, axes] = before._replace(
            times=before.times + times, size_bytes=before.size_bytes + times * size_bytes
        )

    everyone = StridedGroups.all_ranks(mesh.num_devices)
    table = graph.collectives
    for row in range(len(table)):
        number = int(table.group_set[row])
        groups = graph.group_sets[number] if number >= 0 else everyone
        sizes = groups.num_groups, groups.group_size
        name = CollectiveKind(int(table.kind[row])).name.lower()
        add(int(table.node[row]), name, axes_of(groups, mesh), sizes, float(table.comm_bytes[row]))
    messages = graph.p2p
    for row in range(len(messages)):
        node, number = int(messages.node[row]), int(messages.permutation[row])
        axes, ranks = "?", mesh.num_devices
        if number >= 0:
            axes, ranks = axis_of_shift(graph.permutations[number], mesh)
        name = NodeKind(int(graph.kind[node])).name.lower()
        add(node, name, axes, (mesh.num_devices // ranks, ranks), float(messages.comm_bytes[row]))
    return list(found.values())
