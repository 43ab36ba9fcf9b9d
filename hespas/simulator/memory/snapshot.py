"""Memory snapshot in the format of PyTorch's ``torch.cuda.memory._dump_snapshot``, for its viewer
(pytorch.org/memory_viz) and for the scripts that read it.

A snapshot is a pickle of dicts, lists, texts and numbers. ``device_traces`` lists the allocations and frees
of each device in their order, ``segments`` the memory that is reserved at the end. Source of the keys:
``torch/cuda/_memory_viz.py`` and ``torch/utils/viz/MemoryViz.js`` of PyTorch 2.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from math import ceil, isfinite
from pickle import PROTO, dumps

import numpy as np

from hespas.graph import OpGraph, Workload
from hespas.simulator.memory.use import RankMemory

__all__ = ["PICKLE_START", "FreeParts", "snapshot_bytes"]

_PROTOCOL = 4
"""Newest protocol of pickles that the viewer reads."""
PICKLE_START = PROTO
"""First byte of a snapshot."""
_BASE_ADDRESS = 0x7F00_0000_0000
_SOURCE_LINE = re.compile(r"(.*?):(\d{1,9})(?::\d+)?")
_Entry = dict[str, object]


def snapshot_bytes(memories: Sequence[RankMemory], workload: Workload) -> bytes:
    """Return the snapshot of rank classes; device number ``i`` is a rank of the class of ``memories[i]``.

    Sizes are rounded up to whole bytes. Each device has one segment, in which a buffer takes the smallest gap
    that holds it, so that addresses are not those of PyTorch's allocator. ``time_us`` counts from the start
    of the step, and is absent if times are unknown. The frames of an allocation are the source line and the
    framework's name of its operation. O(allocations log allocations) per class.
    """
    segments: list[_Entry] = []
    traces: list[list[_Entry]] = []
    for device, memory in enumerate(memories):
        trace, segment = _device_trace(memory, workload.classes[memory.rank_class], device)
        traces.append(trace)
        segments.append(segment)
    return dumps({"segments": segments, "device_traces": traces}, protocol=_PROTOCOL)


class FreeParts:
    """Free parts of a segment that grows at its end."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int]] = []
        self.size_at: dict[int, int] = {}
        self.start_before: dict[int, int] = {}
        self.top = 0

    def take(self, size: int) -> int:
        """Return the offset of ``size`` bytes, in the smallest gap that holds them or at the end."""
        row = bisect_left(self.by_size, (size, -1))
        if row == len(self.by_size):
            self.top += size
            return self.top - size
        room, offset = self.by_size[row]
        self._remove(offset, room)
        if room > size:
            self._add(offset + size, room - size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free ``size`` bytes, and join them with the gaps before and after them."""
        if offset in self.start_before:
            before = self.start_before[offset]
            self._remove(before, offset - before)
            offset, size = before, size + offset - before
        after = self.size_at.get(offset + size, 0)
        if after:
            self._remove(offset + size, after)
        self._add(offset, size + after)

    def _add(self, offset: int, size: int) -> None:
        insort(self.by_size, (size, offset))
        self.size_at[offset] = size
        self.start_before[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self.by_size[bisect_left(self.by_size, (size, offset))]
        del self.size_at[offset], self.start_before[offset + size]


def _device_trace(memory: RankMemory, graph: OpGraph, device: int) -> tuple[list[_Entry], _Entry]:
    """Return the events of one device and its segment."""
    use, parts = memory.use, FreeParts()
    made, places = use.allocations, len(use.held_bytes)
    sizes = [ceil(size) for size in made.size_bytes.tolist()]
    offsets = [0] * len(sizes)
    frames = [_frames(graph, node, made.others) for node in made.node.tolist()]
    trace: list[_Entry] = []

    def record(action: str, row: int, position: int) -> None:
        entry: _Entry = {
            "action": action, "addr": _BASE_ADDRESS + offsets[row], "size": sizes[row], "stream": 0,
            "frames": frames[row],
        }  # fmt: skip
        if position < len(use.held_ns) and isfinite(use.held_ns[position]):
            entry["time_us"] = round(float(use.held_ns[position]) / 1e3)
        trace.append(entry)

    freed = np.flatnonzero(made.end < places)
    rows = np.concatenate([freed, np.arange(len(sizes))])
    positions = np.concatenate([made.end[freed], made.first])
    for event in np.argsort(positions, kind="stable").tolist():  # at one position, frees are before
        row, position = int(rows[event]), int(positions[event])
        if event < len(freed):
            parts.give(offsets[row], sizes[row])
            record("free_requested", row, position)
            record("free_completed", row, position)
        else:
            offsets[row] = parts.take(sizes[row])
            record("alloc", row, position)
    never_freed = sorted((offsets[row], row) for row in np.flatnonzero(made.end >= places).tolist())
    blocks: list[_Entry] = []
    offset = 0
    for start, row in [*never_freed, (parts.top, -1)]:
        if start > offset:
            blocks.append(_block(offset, start - offset, "inactive", []))
        if row >= 0:
            blocks.append(_block(start, sizes[row], "active_allocated", frames[row]))
            offset = start + sizes[row]
    held = sum(sizes[row] for _, row in never_freed)
    segment: _Entry = {
        "device": device, "address": _BASE_ADDRESS, "total_size": parts.top, "stream": 0,
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "allocated_size": held, "active_size": held, "requested_size": held, "blocks": blocks,
    }  # fmt: skip
    return trace, segment


def _block(offset: int, size: int, state: str, frames: list[_Entry]) -> _Entry:
    address = _BASE_ADDRESS + offset
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _frames(graph: OpGraph, node: int, others: Sequence[str]) -> list[_Entry]:
    """Return the source line of a node, then the name that the framework gave it."""
    if node < 0:
        return [{"name": others[-1 - node], "filename": "", "line": 0}]
    source = graph.strings[int(graph.source_id[node])]
    line = _SOURCE_LINE.fullmatch(source)
    filename, number = (source, 0) if line is None else (line[1], int(line[2]))
    frames: list[_Entry] = [{"name": graph.node_name(node), "filename": filename, "line": number}]
    if framework := graph.strings[int(graph.framework_id[node])]:
        frames.append({"name": framework, "filename": "", "line": 0})
    return frames
