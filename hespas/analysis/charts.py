"""Charts of measured and simulated steps, made from their tables: each shows the values of its table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite, nan
from typing import Any

import numpy as np

from hespas.analysis.device_use import IdleLengthRow, MemoryPointRow
from hespas.analysis.difference import RecordingDifference
from hespas.analysis.table import RowTable, listed
from hespas.graph.columns import FloatArray
from hespas.hardware import Device
from hespas.report.charts import (
    AreaChart,
    Axis,
    Chart,
    Histogram,
    Plot,
    Series,
    Waterfall,
    roof_lines,
)
from hespas.report.texts import bytes_text, counted, time_text
from hespas.report.timelines import FlameGraph
from hespas.simulator.memory import RankMemory

__all__ = [
    "bandwidth_chart",
    "difference_charts",
    "idle_chart",
    "memory_charts",
    "memory_point_charts",
    "present",
    "roofline_chart",
    "tree_chart",
]

_MOST_POINTS = 400
"""Operations of a roofline: those with the most time."""
_MOST_SERIES, _MOST_CHANGES = 7, 12
_MOST_CHARTS = 4
"""Charts of one kind: of the ranks or classes with the highest peaks."""


def tree_chart(table: RowTable[Any], time: str) -> FlameGraph | None:
    """Return the flame graph of a table of calls or modules in tree order, with the time of the column
    ``time``; None without rows.
    """
    if not len(table):
        return None
    return FlameGraph(
        name="flame-graph",
        title="Flame graph",
        table="tree" if time == "device_ns" else "modules",
        note="The width of a frame is its share of the time of all ranks. Callees are below their caller.",
        names=table["name"].tolist(),
        depths=listed(table["depth"]),
        total_ns=table[time].tolist(),
    )


def memory_charts(memories: Sequence[RankMemory], names: Sequence[str]) -> Iterator[AreaChart]:
    """Yield the memory of the rank classes with the highest peaks over the step, by content."""
    highest = sorted(memories, key=lambda memory: -memory.use.peak_bytes)[:_MOST_CHARTS]
    for memory in highest:
        use = memory.use
        layers = dict(use.contents)
        if len(layers) > _MOST_SERIES + 1:
            largest = sorted(layers, key=lambda name: -float(layers[name].max(initial=0.0)))[:_MOST_SERIES]
            others = np.sum([layer for name, layer in layers.items() if name not in largest], axis=0)
            layers = {name: layer for name, layer in layers.items() if name in largest} | {"others": others}
        in_time = len(use.held_ns) > 0
        # the last position is after the last start and end
        moments = use.held_ns[np.minimum(use.sample, len(use.held_ns) - 1)] if in_time else use.sample / 2.0
        capacity = memory.capacity_bytes
        job = ", of the whole job before partitioning" if memory.is_whole_job else ""
        least = "at least " if use.is_lower_bound else ""
        yield AreaChart(
            name=f"memory-{memory.rank_class}",
            title=f"Memory over the step: {names[memory.rank_class]}",
            table="memory",
            note=f"Peak {least}{bytes_text(use.peak_bytes)}{job}."
            + ("" if in_time else " In the order of the program, whose buffers were assigned before it ran."),
            moments=moments,
            layers=layers,
            axis=Axis("memory", "bytes"),
            x=Axis("time", "time") if in_time else Axis("operations of the program", "count"),
            limit=capacity if not memory.is_whole_job else nan,
            limit_text=f"memory of the device, {bytes_text(capacity)}" if isfinite(capacity) else "",
        )


def memory_point_charts(points: RowTable[MemoryPointRow]) -> Iterator[AreaChart]:
    """Yield the recorded memory over time of the allocators with the highest peaks: allocated, and reserved
    beyond that.
    """
    pairs = dict.fromkeys(zip(listed(points["rank"]), listed(points["device"]), strict=True))
    charts: list[tuple[float, AreaChart]] = []
    for rank, device in pairs:
        chosen = points.take((points["rank"] == rank) & (points["device"] == device))
        allocated, reserved = chosen["allocated_bytes"], chosen["reserved_bytes"]
        layers = {"allocated": allocated}
        if np.isfinite(reserved).any():
            layers["reserved and not allocated"] = np.maximum(np.nan_to_num(reserved - allocated), 0.0)
        where = "host" if device == -1 else f"device {device}"
        peak = float(np.nanmax(allocated, initial=0.0))
        chart = AreaChart(
            name=f"memory-{rank}-{where.replace(' ', '-')}",
            title=f"Memory over time: rank {rank}, {where}",
            table="memory",
            note=f"Peak allocated {bytes_text(peak)}.",
            moments=chosen["time_ns"],
            layers=layers,
            axis=Axis("memory", "bytes"),
        )
        charts.append((peak, chart))
    charts.sort(key=lambda pair: -pair[0])
    return (chart for _, chart in charts[:_MOST_CHARTS])


def roofline_chart(
    table: RowTable[Any], device: Device, intensity: FloatArray, dtype: str = ""
) -> Plot | None:
    """Return the roofline of a device with the operations of a table, which has ``tflops_per_s``; ``dtype``
    is the element type of most of the arithmetic (empty: unknown). None if no operation has FLOPs and bytes.
    """
    rate = table["tflops_per_s"]
    drawn = np.flatnonzero((rate > 0) & (intensity > 0) & np.isfinite(intensity))
    drawn = drawn[np.argsort(-table["total_ns"][drawn], kind="stable")][:_MOST_POINTS]
    if not len(drawn):
        return None
    bandwidth = device.main_memory.bandwidth_bytes_per_s / 1e12
    peaks: dict[str, float] = {}
    for unit in ("matrix", "vector"):
        rates = [peak for peak in device.peaks if peak.unit == unit and peak.density == "dense"]
        chosen = [peak for peak in rates if peak.dtype == dtype] or rates
        best = max(chosen, key=lambda peak: peak.flops_per_s, default=None)
        if best is not None:
            peaks[f"{unit} peak, {best.dtype}: {best.flops_per_s / 1e12:,.4g} TFLOP/s"] = (
                best.flops_per_s / 1e12
            )
    top = max(peaks.values(), default=float(rate[drawn].max()))
    low = float(intensity[drawn].min()) / 2
    high = max(float(intensity[drawn].max()), 2 * top / bandwidth)
    memory = f"{device.main_memory.name}: {bandwidth:,.4g} TB/s"
    lines = roof_lines(memory, bandwidth, peaks, low, high)
    classes = [str(text) for text in table["op_class"][drawn].tolist()]
    by_time: dict[str, float] = {}
    for name, time_ns in zip(classes, table["total_ns"][drawn].tolist(), strict=True):
        by_time[name] = by_time.get(name, 0.0) + time_ns
    listed_classes = sorted(by_time, key=lambda name: -by_time[name])[:5]
    points: list[Series] = []
    for tone, name in enumerate([*listed_classes, "other classes"]):
        rows = [
            int(row)
            for row, of_class in zip(drawn.tolist(), classes, strict=True)
            if of_class == name or (name == "other classes" and of_class not in listed_classes)
        ]
        if rows:
            texts = [
                f"{table['operation'][row]}: {rate[row]:,.4g} TFLOP/s at {intensity[row]:,.4g} FLOP/byte, "
                f"{time_text(float(table['total_ns'][row]))} in total"
                for row in rows
            ]
            points.append(Series(label=name, x=intensity[rows], y=rate[rows], texts=texts, tone=tone))
    return Plot(
        name="roofline",
        title=f"Roofline of {device.name}",
        table="operations",
        note="Rate of each operation over its FLOPs per byte of memory traffic. Lines: limits of the device.",
        x=Axis("FLOP/byte", "number", is_log=True),
        y=Axis("TFLOP/s", "number", is_log=True),
        series=[*lines, *points],
    )


def bandwidth_chart(table: RowTable[Any]) -> Plot | None:
    """Return the bus bandwidth of collectives over their size; None without a known bandwidth."""
    rows = np.flatnonzero((table["bus_gbytes_per_s"] > 0) & (table["size_bytes"] > 0))
    of_kind: dict[str, list[int]] = {}
    for row in rows.tolist():
        of_kind.setdefault(f"{table['kind'][row]}, {table['group_size'][row]:,} ranks", []).append(row)
    if not of_kind:
        return None
    most = sorted(of_kind, key=lambda label: -len(of_kind[label]))[: _MOST_SERIES + 1]
    series: list[Series] = []
    for label in most:
        chosen = sorted(of_kind[label], key=lambda row: float(table["size_bytes"][row]))
        size, bus = table["size_bytes"][chosen], table["bus_gbytes_per_s"][chosen]
        texts = [
            f"{label}, {bytes_text(float(size[at]))}: {bus[at]:,.4g} GB/s, {table['count'][row]:,} in "
            f"{time_text(float(table['mean_ns'][row]))} each"
            for at, row in enumerate(chosen)
        ]
        series.append(Series(label=label, x=size, y=bus, texts=texts, mark="curve"))
    return Plot(
        name="bus-bandwidth",
        title="Bus bandwidth over size",
        table="collectives",
        note="As defined by nccl-tests, without waiting for late ranks where that is known. Sizes are of the "
        "whole buffer.",
        x=Axis("size", "bytes", is_log=True),
        y=Axis("bus bandwidth, GB/s", "number"),
        series=series,
    )


def idle_chart(
    table: RowTable[IdleLengthRow],
    section: str = "idle",
    note: str = "Gaps in which no stream of the device runs, on all ranks together.",
) -> Histogram | None:
    """Return the idle time by the length of its gaps and by cause; None without gaps. ``section`` is the
    table of which pages show it.
    """
    if not len(table):
        return None
    first, last = max(float(table["from_ns"].min()), 1.0), float(table["to_ns"].max())
    digits = [digit * 10.0**power for power in range(13) for digit in (1, 2, 5)]
    edges = np.array([edge for edge in digits if first <= edge <= last])
    bin_of = np.maximum(np.searchsorted(edges, table["from_ns"], side="right") - 1, 0)
    causes = list(dict.fromkeys(table["cause"].tolist()))
    heights = {cause: np.zeros(len(edges) - 1) for cause in causes}
    count = np.zeros(len(edges) - 1, np.int64)
    for row, (cause, at) in enumerate(zip(table["cause"].tolist(), bin_of.tolist(), strict=True)):
        heights[cause][at] += table["total_ns"][row]
        count[at] += table["count"][row]
    return Histogram(
        name="idle-histogram",
        title="Idle time by length of the gap",
        table=section,
        note=note,
        edges=edges,
        heights=heights,
        x=Axis("length of the gap", "time", is_log=True),
        y=Axis("total idle time", "time"),
        texts=[counted(gaps, "gap") + " of all causes" for gaps in count.tolist()],
    )


def difference_charts(difference: RecordingDifference) -> Iterator[Waterfall]:
    """Yield the waterfalls from the baseline to the recording: of the parts of the span, and of the device
    time by operation.
    """
    rows = {row.part: row for row in difference.parts.rows()}
    total = rows.pop("span")
    yield Waterfall(
        name="waterfall",
        title="From the baseline to this recording",
        table="parts",
        before=total.before_ns,
        after=total.after_ns,
        changes={part: row.delta_ns for part, row in rows.items() if row.delta_ns},
        axis=Axis("time of all ranks", "time"),
    )
    table = difference.by_operation
    largest = np.argsort(-np.abs(table["delta_ns"]), kind="stable")[:_MOST_CHANGES]
    changes = {
        str(table["name"][row]): float(table["delta_ns"][row])
        for row in largest.tolist()
        if table["delta_ns"][row]
    }
    if changes:
        yield Waterfall(
            name="waterfall-by-operation",
            title="Device time by operation, from the baseline to this recording",
            table="by_operation",
            before=float(table["before_ns"].sum()),
            after=float(table["after_ns"].sum()),
            changes=changes,
            axis=Axis("device time of all ranks", "time"),
        )


def present(*charts: Chart | Iterable[Chart] | None) -> tuple[Chart, ...]:
    """Return the charts that exist, in order."""
    listed_charts: list[Chart] = []
    for chart in charts:
        if isinstance(chart, Chart):
            listed_charts.append(chart)
        elif chart is not None:
            listed_charts.extend(chart)
    return tuple(listed_charts)
