"""A program for a whole mesh -> the workload of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hespas.captures.axes import CollectiveRow, axes_of
from hespas.captures.mesh import Mesh
from hespas.captures.partition import TIMEOUT_S, Partitioner, partition
from hespas.converters.format import ReadOptions
from hespas.converters.hlo.reader import read_module
from hespas.graph import CollectiveKind, Diagnostics, Workload

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
    own = f'source_file="{Path(path).name}"'.replace("\\", "/")
    text = text.replace(_OWN_LINES, own if '"' not in Path(path).name else _OWN_LINES)
    workload = read_module(text.encode(), path, ReadOptions(), diagnostics)
    stated = {"mesh": str(mesh)} if mesh is not None else {}
    described = {**workload.metadata, "partitioner": "xla", **stated, **(metadata or {})}
    return Captured(replace(workload, metadata=described), program, text)


def collective_rows(workload: Workload, mesh: Mesh) -> list[CollectiveRow]:
    """Collectives of a rank of the first class by kind and axes, in order of first use."""
    graph = workload.classes[0]
    table, found = graph.collectives, dict[tuple[str, str], CollectiveRow]()
    for row in range(len(table.node)):
        node = int(table.node[row])
        groups = graph.group_sets[int(table.group_set[row])]
        kind, axes = CollectiveKind(int(table.kind[row])).name.lower(), axes_of(groups, mesh)
        times = float(graph.multiplicity[node])
        before = found.get(
            (kind, axes), CollectiveRow(kind, axes, groups.num_groups, groups.group_size, 0.0, 0.0)
        )
        found[kind, axes] = before._replace(
            times=before.times + times, size_bytes=before.size_bytes + times * float(table.comm_bytes[row])
        )
    return list(found.values())
