"""What a recording lacks for more to be said, and how to record it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.analysis.recording import Recording
from hespas.graph import Profile

__all__ = ["notes_of"]

_MANY = 0.2
_MOST_DIGITS = 10


def notes_of(profiles: Sequence[Profile], recordings: Sequence[Recording]) -> list[str]:
    """One sentence per thing that is missing, what matters most first."""
    if not any(map(len, recordings)):
        return []
    found = [
        *_of_host(profiles),
        *_of_replays(recordings),
        *_of_launches(recordings),
        *_of_ranks(profiles, len(recordings)),
        *_of_options(profiles),
    ]
    return [text for text in found if text]


def _of_host(profiles: Sequence[Profile]) -> list[str]:
    if not any(len(each.host) for each in profiles):
        text = (
            "no operation of the host was recorded: kernels have no operation, shapes or calls around them "
        )
        return [f"{text}(PyTorch: activities=[CPU, CUDA]; others: ranges of NVTX or roctx)"]
    if not any(bool((each.host.shapes_row > 0).any()) for each in profiles):
        return ["no shapes were recorded: FLOPs, bytes and roofs are unknown (PyTorch: record_shapes=True)"]
    return []


def _of_replays(recordings: Sequence[Recording]) -> list[str]:
    """Kernels that share a launch are those of a graph; without shapes, its capture was not given."""
    replayed, whole = 0.0, 0.0
    for each in recordings:
        profile, rows, time = each.profile, each.rows, each.duration_ns
        launch = profile.launch_start_ns[rows]
        known = np.flatnonzero(~np.isnan(launch))
        _, place, count = np.unique(launch[known], return_inverse=True, return_counts=True)
        alone = (count[place.reshape(-1)] < 3) | (profile.shapes_row[rows[known]] > 0)
        replayed += float(time[known][~alone].sum())
        whole += float(time.sum())
    if not whole or replayed < _MANY * whole:
        return []
    text = f"{_percent(replayed / whole)} of the device time was replayed from captured graphs: "
    return [f"{text}the trace of their capture names operations and shapes (`capture`)"]


def _of_launches(recordings: Sequence[Recording]) -> list[str]:
    events = sum(map(len, recordings))
    unknown = sum(int(np.isnan(each.profile.launch_start_ns[each.rows]).sum()) for each in recordings)
    if unknown < _MANY * events:
        return []
    text = f"of {_percent(unknown / events)} of the device events the launch is not recorded: "
    return [f"{text}why nothing ran before them is unknown (record the runtime, from the first launch on)"]


def _of_ranks(profiles: Sequence[Profile], ranks: int) -> list[str]:
    sizes = [each.metadata.get("world_size", "") for each in profiles]
    known = [int(size) for size in sizes if size.isdecimal() and len(size) < _MOST_DIGITS]
    if ranks > 1 or not known or max(known) < 2:
        return []
    return [f"one of {max(known):,} ranks: with the files of others, late ranks and transfer times are told"]


def _of_options(profiles: Sequence[Profile]) -> list[str]:
    """Of recordings of PyTorch's profiler alone."""
    if not any(each.metadata.get("format") == "kineto" for each in profiles):
        return []
    has_functions = any(
        any(each.strings[row].startswith("nn.Module: ") for row in np.unique(each.ranges.name_row).tolist())
        for each in profiles
    )
    lacking = [
        "" if has_functions else "modules and functions (with_stack=True)",
        "" if any(len(each.memory) for each in profiles) else "memory (profile_memory=True)",
    ]
    told = " and ".join(each for each in lacking if each)
    return [f"not recorded: {told}"] if told else []


def _percent(share: float) -> str:
    return f"{share:.1%}"
