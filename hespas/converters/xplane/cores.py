"""The two cores of a TPU chip that work as one device ("megacore"), and which device an event is of.

Each core records its own half of an operation at the same time, so the time of an operation is the larger of
the two, never their sum, while bytes and FLOPs add up. Cores ``2k`` and ``2k + 1`` are merged to rank ``k``
where both planes say ``has_megacore`` (or, in a file whose planes say nothing, events of both cores that they
use it), no event says that it does not use it, and both ran the same programs; or where the user states half
as many devices as there are cores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hespas.converters.xplane.collect import Collected, DeviceTable
from hespas.converters.xplane.lines import ABSENT, LineKind
from hespas.graph.columns import IntArray
from hespas.schemas.xplane import CPU_PLANE, TPU_PREFIX

__all__ = ["Ranked", "ranked"]

_ORDINAL = re.compile(r"/device:[A-Za-z_]+:(\d{1,9})")
_ADDED = ("bytes_accessed", "bytes_transferred", "model_flops", "flops")


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Device events with the rank of each. ``merged`` events of second cores went into those of first ones;
    they had taken ``merged_ps``. ``alone`` operations of such cores found no partner and stay; transfers are
    often recorded by one core only. ``undecided`` counts pairs of cores that ran the same programs while
    nothing says whether they are one device.
    """

    device: DeviceTable
    rank: IntArray
    merged: int = 0
    merged_ps: int = 0
    alone: int = 0
    undecided: int = 0


def ranked(collected: Collected, planes: Mapping[str, Mapping[str, str]], num_devices: int | None) -> Ranked:
    """Tell the device of each event, and merge the cores of a megacore."""
    device = collected.device
    ordinals = np.array([_ordinal(line.plane) for line in collected.lines], np.int64)
    on_cpu = np.array([line.plane == CPU_PLANE for line in collected.lines], np.bool_)
    if not len(device):
        return Ranked(device, np.empty(0, np.int64))
    stated = np.clip(device.stats["device_ordinal"], 0, np.iinfo(np.int32).max)
    rank = np.where(on_cpu[device.line], stated, ordinals[device.line])
    cores = _merged_cores(collected, planes, num_devices)
    if cores:
        return _merged(collected, rank, cores)
    return Ranked(device, rank, undecided=_undecided(collected, planes) if num_devices is None else 0)


def _ordinal(plane: str) -> int:
    found = _ORDINAL.match(plane)
    return int(found[1]) if found else 0


def _merged_cores(
    collected: Collected, planes: Mapping[str, Mapping[str, str]], num_devices: int | None
) -> list[int]:
    """The ordinals of all cores of chips that work as one."""
    cores = {_ordinal(line.plane) for line in collected.lines if line.plane.startswith(TPU_PREFIX)}
    by_ordinal = {_ordinal(plane): plane for plane in planes if re.fullmatch(r"/device:TPU:\d{1,9}", plane)}
    asked = num_devices is not None and 2 * num_devices == len(cores)
    uses = collected.device.stats["uses_megacore"]
    if not asked and bool((uses == 0).any()):
        return []
    found: list[int] = []
    for first in sorted(cores):
        if first % 2 or first + 1 not in cores:
            continue
        both = (first, first + 1)
        flags = [planes.get(by_ordinal.get(core, ""), {}).get("has_megacore", "0") for core in both]
        told = all(flag not in ("", "0", "False") for flag in flags)
        if not any("has_megacore" in facts for facts in planes.values()):
            told = all(_uses(collected, by_ordinal.get(core, "")) for core in both)
        if asked or (told and _same_programs(collected, *(by_ordinal[core] for core in both))):
            found.extend(both)
    return found


def _uses(collected: Collected, plane: str) -> bool:
    """Whether events of a core say that they use both cores of their chip."""
    rows = collected.rows_by_plane().get(plane, np.empty(0, np.int64))
    return bool((collected.device.stats["uses_megacore"][rows] > 0).any())


def _undecided(collected: Collected, planes: Mapping[str, Mapping[str, str]]) -> int:
    """Pairs of cores that may be a megacore: no plane and no event says whether they are."""
    if any("has_megacore" in facts for facts in planes.values()):
        return 0
    if bool((collected.device.stats["uses_megacore"] == 0).any()):
        return 0
    cores = {_ordinal(plane): plane for plane in planes if re.fullmatch(r"/device:TPU:\d{1,9}", plane)}
    pairs = [(plane, cores.get(core + 1, "")) for core, plane in cores.items() if core % 2 == 0]
    return sum(
        first in collected.modules and bool(second) and _same_programs(collected, first, second)
        for first, second in pairs
    )


def _same_programs(collected: Collected, first: str, second: str) -> bool:
    """Whether two planes ran the same programs in the same order."""
    one, other = collected.modules.get(first), collected.modules.get(second)
    if one is None or other is None:
        return one is other
    return np.array_equal(one.name_row, other.name_row) and np.array_equal(one.run_id, other.run_id)


def _merged(collected: Collected, rank: IntArray, cores: list[int]) -> Ranked:
    device = collected.device
    is_tpu = np.array([line.plane.startswith(TPU_PREFIX) for line in collected.lines], np.bool_)[device.line]
    paired = is_tpu & np.isin(rank, np.array(cores, np.int64))
    second = paired & (rank % 2 == 1)
    new_rank = np.where(paired, rank // 2, rank)
    rows = np.flatnonzero(paired)
    key = _occurrence_keys(collected, new_rank, second, rows)
    order = np.lexsort((second[rows], key))
    same = np.flatnonzero(
        (key[order][1:] == key[order][:-1]) & ~second[rows][order][:-1] & second[rows][order][1:]
    )
    kept, gone = rows[order[same]], rows[order[same + 1]]
    result = _combined(device, kept, gone)
    stay = np.ones(len(device), np.bool_)
    stay[gone] = False
    left = np.flatnonzero(stay)
    of_ops = np.array([line.kind is LineKind.OPS for line in collected.lines], np.bool_)[device.line]
    return Ranked(
        result.take(left),
        new_rank[left],
        merged=len(gone),
        merged_ps=int(device.exclusive_ps[gone].sum()),
        alone=int(of_ops[rows].sum()) - int(of_ops[kept].sum()) - int(of_ops[gone].sum()),
    )


def _occurrence_keys(collected: Collected, chip: IntArray, second: IntArray, rows: IntArray) -> IntArray:
    """One number for the same occurrence of the same operation on both cores of a chip: by chip, name of the
    line, run of the program, operation, and how often that came before.
    """
    device = collected.device
    names: dict[str, int] = {}
    line_name = np.array([names.setdefault(line.name, len(names)) for line in collected.lines], np.int64)
    run = np.full(len(device), -1, np.int64)
    rows_by_plane = collected.rows_by_plane()
    for plane, runs in collected.modules.items():
        of_plane = rows_by_plane.get(plane, np.empty(0, np.int64))
        run[of_plane] = runs.at(device.start_ps[of_plane])
    parts = np.stack([chip[rows], line_name[device.line[rows]], run[rows], device.name_row[rows]])
    _, what = np.unique(parts, axis=1, return_inverse=True)
    what = what.reshape(-1)
    order = np.lexsort((device.start_ps[rows], second[rows], what))
    group = np.stack([what[order], second[rows][order]])
    begins = np.flatnonzero(np.append(True, (group[:, 1:] != group[:, :-1]).any(axis=0)))
    nth = np.empty(len(rows), np.int64)
    nth[order] = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))
    _, key = np.unique(np.stack([what, nth]), axis=1, return_inverse=True)
    return key.reshape(-1)


def _combined(device: DeviceTable, kept: IntArray, gone: IntArray) -> DeviceTable:
    """The table with events of second cores added to those of first ones."""
    result = device.take(np.arange(len(device)))
    start_ps, duration_ps, exclusive_ps = result.start_ps, result.duration_ps, result.exclusive_ps
    start_ps[kept] = np.minimum(start_ps[kept], device.start_ps[gone])
    duration_ps[kept] = np.maximum(duration_ps[kept], device.duration_ps[gone])
    exclusive_ps[kept] = np.maximum(exclusive_ps[kept], device.exclusive_ps[gone])
    for name in _ADDED:
        column, other = result.stats[name], device.stats[name][gone]
        both = (column[kept] != ABSENT) & (other != ABSENT)
        column[kept] = np.where(both, column[kept] + np.where(both, other, 0), column[kept])
    return result
