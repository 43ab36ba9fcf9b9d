"""Host operations of a trace that our writer made, and the device work that arrows join to them."""

from __future__ import annotations

import numpy as np

from hespas.converters.chrome_trace.collect import Arrows, Collected
from hespas.converters.tracks.pairs import enclosing
from hespas.graph import HostOps, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray

__all__ = ["causes", "host_ops"]

_THREAD = "thread"


def host_ops(
    found: Collected, start_ns: FloatArray, duration_ns: FloatArray, strings: StringTableBuilder
) -> HostOps:
    """The slices as host operations; names of threads go to ``strings``."""
    names = [found.thread_names.get(track, "") for track in found.tracks]
    threads = np.array([strings.add(name.removeprefix(_THREAD).strip()) for name in names] or [0], np.int32)
    texts = found.arguments
    return HostOps(
        name_row=found.name_row,
        thread_row=threads[found.track],
        parent=enclosing(found.track, found.start_ns, found.duration_ns).astype(np.int32),
        start_ns=start_ns,
        duration_ns=duration_ns,
        sequence=np.full(len(found.track), -1, np.int64),
        shapes_row=texts["shapes"],
        dtype_row=texts["dtype"],
        strides_row=texts["strides"],
        values_row=texts["values"],
    )


def causes(arrows: Arrows, host: Collected, device: Collected) -> SmallIntArray:
    """The host operation of each device slice, -1 for none. Of slices that start where an arrow ends, the
    shortest is meant, as viewers take it.
    """
    source = _slice_at(host, arrows.source_track, arrows.source_ns)
    target = _slice_at(device, arrows.target_track, arrows.target_ns)
    joined = (source >= 0) & (target >= 0)
    cause = np.full(len(device.track), -1, np.int32)
    cause[target[joined]] = source[joined]
    return cause


def _slice_at(found: Collected, track: IntArray, at_ns: IntArray) -> IntArray:
    """The slice that starts at each place and time, -1 for none."""
    both_track, both_ns = np.concatenate([found.track, track]), np.concatenate([found.start_ns, at_ns])
    _, key = np.unique(np.stack([both_track, both_ns]), axis=1, return_inverse=True)
    key = key.reshape(-1)
    order = np.argsort(-found.duration_ns, kind="stable")
    slices = np.full(int(key.max(initial=-1)) + 1, -1, np.int64)
    slices[key[: len(found.track)][order]] = order
    return slices[key[len(found.track) :]]
