"""Readers of traces that use only the standard library, and figures computed from them by brute force."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DATA", "FIXTURE", "TRACES", "Event", "Trace", "absent", "covered", "load", "traces"]

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "profiles"
FIXTURE = ROOT / "fixtures" / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")
TRACES = (
    "a100-40_recsys_train_rank3of8.json.gz",
    "h100_bert-small_inf.json.gz",
    "h100_qwen1.5-0.5b_inf.json.gz",
    "mi300x_timesformer_inf.json.gz",
    "mi300x_sglang_qwen3-8b_prefill.json.gz",
)
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver"}


def traces() -> list[Any]:
    """The fixture, and real traces where they are."""
    return [pytest.param(FIXTURE, id="fixture")] + [
        pytest.param(DATA / name, id=name.partition(".")[0], marks=absent) for name in TRACES
    ]


@dataclass
class Event:
    """A device event; times in ns on the clock of the profile."""

    name: str
    kind: str
    start: float
    end: float
    stream: int
    launch: tuple[float, float] | None
    step: int = -1
    args: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ns(self) -> float:
        return self.end - self.start


@dataclass
class Trace:
    """Device events of one file in order of start, and all events in the order of the file."""

    events: list[Event]
    raw: list[dict[str, Any]]
    base_us: Decimal


def _ns(event: dict[str, Any], base_us: Decimal) -> tuple[float, float]:
    start = round((Decimal(event["ts"]) - base_us) * 1000)
    return start, start + round(Decimal(event.get("dur", 0)) * 1000)


def load(path: Path) -> Trace:
    """Read a trace; the clock begins with its first device event, call or operation."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    every = json.loads(text.decode("utf-8", "replace"), parse_float=Decimal)["traceEvents"]
    raw = [each for each in every if each.get("ph") == "X"]
    timed = [each for each in raw if each["cat"] in {*_DEVICE, *_CALLS, "cpu_op"}]
    base = min(Decimal(each["ts"]) for each in timed)
    calls: dict[int, tuple[float, float]] = {}
    for each in raw:
        if each["cat"] in _CALLS:
            calls.setdefault(each["args"].get("correlation", -1), _ns(each, base))
    steps = [
        (*_ns(each, base), int(each["name"].partition("#")[2]))
        for each in raw
        if each["cat"] == "user_annotation" and each["name"].startswith("ProfilerStep#")
    ]
    found: list[Event] = []
    for each in raw:
        if each["cat"] not in _DEVICE:
            continue
        start, end = _ns(each, base)
        launch = calls.get(each["args"].get("correlation", -1))
        inside = [number for first, last, number in steps if launch and first <= launch[0] <= last]
        found.append(
            Event(
                each["name"],
                _kind(each),
                start,
                end,
                int(each["args"].get("stream", -1)),
                launch,
                inside[0] if inside else -1,
                each["args"],
            )
        )
    return Trace(sorted(found, key=lambda event: event.start), raw, base)


def _kind(event: dict[str, Any]) -> str:
    if event["cat"] != "kernel":
        return "memory"
    name = event["name"].lower()
    return "communication" if "nccl" in name or "Collective name" in event["args"] else "compute"


def covered(events: Iterable[Event]) -> float:
    """Return the time in which at least one event ran, summed over the moments at which this changes."""
    changes: dict[float, int] = defaultdict(int)
    for each in events:
        changes[each.start] += 1
        changes[each.end] -= 1
    total, running, before = 0.0, 0, 0.0
    for at in sorted(changes):
        total += at - before if running else 0.0
        running += changes[at]
        before = at
    return total
