"""Figures of a Kineto trace, computed with the standard library alone from unions of event intervals.

An oracle for tests of agreement: it shares no code with the package, and decides by categories, stated facts
and the fragments of names below what an event does.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from math import nan, prod
from pathlib import Path
from typing import Any, cast

__all__ = ["RawKineto", "length_ns", "read_raw", "union"]

Span = tuple[int, int]

_TALKING = (
    "nccl", "rccl", "multimem", "one_shot_all", "two_shot_all", "cross_device_reduce", "internode::",
    "internode_ll::", "intranode::", "all_reduce", "allreduce", "all_gather", "reduce_scatter", "all_to_all",
)  # fmt: skip
_NOT_TALKING = ("get_dispatch_layout", "clean_low_latency", "triton_")
_WIDTH = {
    "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "BFloat16": 2, "Float": 4, "Half": 2, "double": 8,
    "long int": 8, "int": 4, "Byte": 1, "unsigned char": 1,
}  # fmt: skip


@dataclass(frozen=True)
class RawKineto:
    """Spans [ns] by kind; ``bytes`` of the operands of each communication that states them or is inside an
    operation of the host that does (NaN: neither).
    """

    compute: list[Span]
    communication: list[Span]
    memory: list[Span]
    bytes: list[float]

    @property
    def compute_ns(self) -> int:
        """Time during which anything computed."""
        return length_ns(self.compute)

    @property
    def communication_ns(self) -> int:
        """Time during which anything communicated."""
        return length_ns(self.communication)

    @property
    def memory_ns(self) -> int:
        """Time during which anything was copied or filled."""
        return length_ns(self.memory)

    @property
    def exposed_ns(self) -> int:
        """Time during which something communicated and nothing computed."""
        return length_ns([*self.compute, *self.communication]) - self.compute_ns

    @property
    def span_ns(self) -> int:
        """Time from the first start to the last end."""
        spans = [*self.compute, *self.communication, *self.memory]
        return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0


def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans that overlap or touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def length_ns(spans: Iterable[Span]) -> int:
    """Length of the union of some spans."""
    return sum(end - start for start, end in union(spans))


def read_raw(path: Path) -> RawKineto:
    """Read a trace of one rank; without a device, the operations of the host are the work."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    found: Any = json.loads(text.decode("utf-8", "replace"), parse_float=Decimal)
    listed = cast("list[dict[str, Any]]", found if isinstance(found, list) else found["traceEvents"])
    events = [event for event in listed if event.get("ph") == "X"]
    base = min((Decimal(event["ts"]) for event in events), default=Decimal(0))
    device = [event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    return _of_device(events, device, base) if device else _of_host(events, base)


def _span(event: dict[str, Any], base: Decimal) -> Span:
    start = round((Decimal(event["ts"]) - base) * 1000)
    return start, start + max(round(Decimal(event.get("dur", 0)) * 1000), 0)


def _talks(event: dict[str, Any]) -> bool:
    name = event["name"].lower()
    by_name = any(part in name for part in _TALKING) and not any(part in name for part in _NOT_TALKING)
    return event["cat"] == "kernel" and ("Collective name" in event.get("args", {}) or by_name)


def _of_device(events: list[dict[str, Any]], device: list[dict[str, Any]], base: Decimal) -> RawKineto:
    talks = [event for event in device if _talks(event)]
    kernels = [event for event in device if event["cat"] == "kernel" and not _talks(event)]
    copies = [event for event in device if event["cat"] != "kernel"]
    return RawKineto(
        [_span(event, base) for event in kernels],
        [_span(event, base) for event in talks],
        [_span(event, base) for event in copies],
        [_bytes(event, events, base) for event in talks],
    )


def _bytes(event: dict[str, Any], events: list[dict[str, Any]], base: Decimal) -> float:
    args = event.get("args", {})
    if "In msg nelems" in args:
        return float(args["In msg nelems"]) * _WIDTH.get(args.get("dtype", ""), nan)
    launches = [
        each
        for each in events
        if each.get("cat") in {"cuda_runtime", "cuda_driver"}
        and each.get("args", {}).get("correlation") == args.get("correlation")
    ]
    if not launches:
        return nan
    start, _ = _span(launches[0], base)
    around = [
        each
        for each in events
        if each.get("cat") == "cpu_op"
        and each["tid"] == launches[0]["tid"]
        and _span(each, base)[0] <= start <= _span(each, base)[1]
        and "::" in each["name"]
        and any(part in each["name"] for part in ("all_reduce", "allreduce", "all_gather", "reduce_scatter"))
    ]
    if not around:
        return nan
    inside = min(around, key=lambda each: _span(each, base)[1] - _span(each, base)[0]).get("args", {})
    dims, types = inside.get("Input Dims", []), inside.get("Input type", [])
    sizes = [
        float(prod(shape)) * _WIDTH[kind] for shape, kind in zip(dims, types, strict=False) if kind in _WIDTH
    ]
    return sizes[0] if sizes else nan


def _of_host(events: list[dict[str, Any]], base: Decimal) -> RawKineto:
    """Works of Gloo communicate, and with them calls on their thread that overlap them: those block."""
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    works = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("gloo:")
    ]
    blocking = [
        call
        for call in operations
        if call["name"].startswith("c10d::")
        and any(
            call["tid"] == work["tid"] and _overlap(_span(call, base), _span(work, base)) for work in works
        )
    ]
    return RawKineto(
        [_span(event, base) for event in operations if event not in blocking],
        [_span(event, base) for event in (*works, *blocking)],
        [],
        [nan] * len(works),
    )


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
