"""Where slices ran: rank, device and stream, as far as names and numbers of processes and threads tell."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from hespas.converters.chrome_trace.collect import Collected
from hespas.graph.columns import IntArray, SmallIntArray

__all__ = ["Places"]

_RANK = re.compile(r"(?:\A|\s)(?:rank (\d{1,9})|unknown rank)(?:: (.*))?\Z", re.DOTALL)
_STREAM = re.compile(r"(?i:\bstream) #?(\d{1,18})(?!\w)")
_NO_STREAM = "no stream"


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Columns of shape ``(slices,)``, and the names of the devices."""

    devices: tuple[str, ...]
    device_index: SmallIntArray
    rank: SmallIntArray
    stream: IntArray

    @classmethod
    def of(cls, found: Collected) -> Places:
        """Tell rank and device by the name of the process, the stream by that of the thread or its number."""
        devices: dict[str, int] = {}
        rank: list[int] = []
        device: list[int] = []
        stream: list[int] = []
        used = set(np.unique(found.track).tolist())
        for number, (pid, tid) in enumerate(found.tracks):
            known = found.process_names.get(pid, "")
            told = _RANK.search(known)
            if told:
                rank.append(int(told[1]) if told[1] else -1)
                name = told[2] or ""
            else:
                rank.append(0)
                name = known or f"process {pid}"
            device.append(devices.setdefault(name, len(devices)) if number in used else 0)
            stream.append(_stream(found.thread_names.get((pid, tid), ""), tid, number))
        at = found.track
        return cls(
            tuple(devices),
            np.array(device, np.int32)[at],
            np.array(rank, np.int32)[at],
            np.array(stream, np.int64)[at],
        )


def _stream(name: str, tid: int | str, number: int) -> int:
    if name == _NO_STREAM:
        return -1
    told = _STREAM.search(name)
    if told:
        return int(told[1])
    return tid if isinstance(tid, int) and 0 <= tid < 1 << 63 else number
