"""Partitioning of a program for a whole mesh, and the workload that its devices run.

XLA's SPMD partitioner runs in a child process (:mod:`hespas.captures.partition_child`). If it crashes, does
not finish or exhausts the memory, the parent raises an error with a hint.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from hespas.captures.loop_reductions import move_reductions
from hespas.captures.partition_child import PARTITIONED, REFUSED, PartitionSettings
from hespas.converters.format import ReadOptions
from hespas.converters.hlo.reader import read_module
from hespas.files.processes import clean_environment, decode_error, isolated_python, run
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, StridedGroups, Workload
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.mesh import Mesh, axes_of, axis_of_shift

__all__ = [
    "TIMEOUT_S",
    "CapturedProgram",
    "MeshCollectiveRow",
    "Partitioner",
    "capture_program",
    "collective_rows",
    "partition",
]

Partitioner = Literal["auto", "shardy", "gspmd"]
"""Partitioner that propagates shardings; ``auto`` follows the annotations of the program."""

TIMEOUT_S = 1800.0
"""Default time limit of the partitioner [s]."""

_MAX_MESSAGE = 400
_SUSPECTED = re.compile(r"(?:\\n|\s)*Suspected Python Code")
_SHARDY_MARKS = (b"sdy.", b"xla.sdy", b"sdy\0")
_WORKAROUNDS = (
    "find the operation by removing parts of the program, shard its operands differently "
    "(jax.lax.with_sharding_constraint), or write it with shard_map"
)
_UNNAMED_SOURCE = 'source_file="-"'
"""Source location of operations whose text has no locations: MLIR does not know the file name."""


class MeshCollectiveRow(NamedTuple):
    """Collectives of one kind over the same mesh axes. ``times`` is their number in a step of one rank, and
    ``size_bytes`` their total payload.
    """

    kind: str
    axes: str
    groups: int
    group_size: int
    times: float
    size_bytes: float


@dataclass(frozen=True, slots=True)
class CapturedProgram:
    """Captured workload and its programs. ``program`` is StableHLO for the whole mesh, and ``partitioned``
    the HLO that each device runs.
    """

    workload: Workload
    program: bytes
    partitioned: str


def capture_program(
    program: bytes,
    path: str,
    *,
    mesh: Mesh | None = None,
    partitioner: Partitioner = "auto",
    timeout_s: float = TIMEOUT_S,
    metadata: Mapping[str, str] | None = None,
    diagnostics: Diagnostics,
) -> CapturedProgram:
    """Partition ``program`` and return the program of each device as a workload. ``path`` names the program
    in messages.

    Raises the errors of :func:`partition`.
    """
    text = partition(program, axes=mesh, partitioner=partitioner, timeout_s=timeout_s)
    text = move_reductions(text, path, diagnostics)
    file_name = Path(path).name
    if '"' not in file_name:
        text = text.replace(_UNNAMED_SOURCE, f'source_file="{file_name}"'.replace("\\", "/"))
    workload = read_module(text.encode(), path, ReadOptions(), diagnostics)
    mesh_entry = {"mesh": str(mesh)} if mesh is not None else {}
    described = {**workload.metadata, "partitioner": "xla", **mesh_entry, **(metadata or {})}
    return CapturedProgram(replace(workload, metadata=described), program, text)


def collective_rows(workload: Workload, mesh: Mesh) -> list[MeshCollectiveRow]:
    """Return the collectives and messages of one rank of the first rank class, by kind and mesh axes, in
    order of first use.
    """
    graph = workload.classes[0]
    rows = dict[tuple[str, str], MeshCollectiveRow]()

    def add(node: int, kind: str, axes: str, groups: tuple[int, int], size_bytes: float) -> None:
        times = float(graph.executions[node])
        row = rows.get((kind, axes), MeshCollectiveRow(kind, axes, *groups, 0.0, 0.0))
        rows[kind, axes] = row._replace(
            times=row.times + times, size_bytes=row.size_bytes + times * size_bytes
        )

    all_ranks = StridedGroups.all_ranks(mesh.num_devices)
    table = graph.collectives
    for index in range(len(table)):
        group_set = int(table.group_set[index])
        groups = graph.group_sets[group_set] if group_set >= 0 else all_ranks
        sizes = groups.num_groups, groups.group_size
        name = CollectiveKind(int(table.kind[index])).name.lower()
        add(int(table.node[index]), name, axes_of(groups, mesh), sizes, float(table.comm_bytes[index]))
    messages = graph.p2p
    for index in range(len(messages)):
        node, permutation = int(messages.node[index]), int(messages.permutation[index])
        axes, ranks = "?", mesh.num_devices
        if permutation >= 0:
            axes, ranks = axis_of_shift(graph.permutations[permutation], mesh)
        name = NodeKind(int(graph.kind[node])).name.lower()
        add(node, name, axes, (mesh.num_devices // ranks, ranks), float(messages.comm_bytes[index]))
    return list(rows.values())


def partition(
    program: bytes,
    *,
    axes: Mapping[str, int] | str | Mesh | None = None,
    partitioner: Partitioner = "auto",
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Partition a program, and return the text of the HLO module that each device runs.

    ``program`` is StableHLO in any form, with shardings of Shardy or GSPMD. ``axes`` changes the sizes of its
    mesh axes. The result is the module directly after XLA's SPMD partitioner and its clean-up: collectives
    are not combined yet, nothing is fused, and the number formats of the program are unchanged.

    Raises ``FormatError`` if the input is not a program, ``UsageError`` if the program has other axes, and
    ``UnsupportedError`` if the partitioner refuses, crashes or does not finish.
    """
    new_axes = {} if axes is None else Mesh.of(axes).axes
    is_shardy = any(mark in program for mark in _SHARDY_MARKS)
    if is_shardy and partitioner == "gspmd":
        raise UsageError(
            "the program has Shardy annotations, which GSPMD does not read",
            hint="capture the function itself with `partitioner=gspmd`, or omit the option",
        )
    shardy = is_shardy or partitioner == "shardy"
    with tempfile.TemporaryDirectory(prefix="hespas-partition-") as scratch:
        source, folder = Path(scratch, "program"), Path(scratch, "out")
        source.write_bytes(program)
        folder.mkdir()
        settings = PartitionSettings(str(source), str(folder), new_axes, shardy)
        ended = run(
            isolated_python("hespas.captures.partition_child", json.dumps(settings._asdict())),
            time_s=timeout_s,
            environment=clean_environment({"TF_CPP_MIN_LOG_LEVEL": "2"}),
            is_done=lambda: _is_written(folder),
        )
        dump = next((path for _, path in sorted(_numbered_dumps(folder).items()) if _is_wanted(path)), None)
        if dump is not None and (_is_written(folder) or dump.read_bytes()[-8:].rstrip().endswith(b"}")):
            return dump.read_text(encoding="utf-8")
        # A program that is lowered already cannot change its annotations.
        hint = f"try `partitioner=gspmd`; else {_WORKAROUNDS}" if partitioner == "shardy" else _WORKAROUNDS
        refusal = folder / REFUSED
        if refusal.exists():
            fields = json.loads(refusal.read_text(encoding="utf-8"))
            if fields["kind"] != "XLA":
                raise decode_error(fields)
            reason = _SUSPECTED.split(fields["message"])[0].strip()[:_MAX_MESSAGE]
            raise UnsupportedError(f"XLA's partitioner refuses the program: {reason}", hint=hint)
        if ended.stopped == "time":
            raise UnsupportedError(
                f"XLA's partitioner does not finish within {timeout_s:g} s",
                hint=f"increase the time limit; else {hint}",
            )
        raise UnsupportedError(f"XLA's partitioner {ended.describe()}", hint=hint)


def _numbered_dumps(folder: Path) -> dict[int, Path]:
    """Return the files in a dump folder of XLA by the sequence number in their names."""
    matches = ((re.search(r"\.(\d{4,})\.", path.name), path) for path in folder.glob("*.txt"))
    return {int(match[1]): path for match, path in matches if match}


def _is_wanted(path: Path) -> bool:
    return any(mark in path.name for mark in PARTITIONED)


def _is_written(folder: Path) -> bool:
    """Return True if the dump file of the partitioned module is complete, because XLA has started to write
    the next one.
    """
    dumps = _numbered_dumps(folder)
    wanted = next((number for number, path in dumps.items() if _is_wanted(path)), None)
    return wanted is not None and max(dumps) > wanted
