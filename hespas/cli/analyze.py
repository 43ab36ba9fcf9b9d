"""``hespas analyze``: time breakdown, kernels, critical path and opportunities of measured profiles."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from hespas.api.analysis import analyze as analyze_profiles
from hespas.cli.command import Call, command
from hespas.cli.destinations import check_once
from hespas.cli.terminal import emit, op_class_text, print_info, report_diagnostics
from hespas.graph.hints import OUTPUT, AtLeast, Option
from hespas.report.tables import table_text
from hespas.report.texts import bytes_text, count_text, time_text

if TYPE_CHECKING:
    from hespas.analysis.difference import RecordingDifference
    from hespas.analysis.run import AnalysisTables
    from hespas.analysis.tree import TreeRow

__all__ = ["analyze"]

_Top = Annotated[
    int,
    AtLeast(1),
    Option("Print at most N rows per table; --json has all.", metavar="N", panel=OUTPUT),
]
_Report = Annotated[
    Path | None,
    Option(
        "Write a report: index.html, one CSV file per table and analysis.json.",
        metavar="DIR",
        panel=OUTPUT,
        access="folder",
    ),
]

_NAME_WIDTH = 30
_MAX_STEPS = 16
_MAX_DEPTH = 12
_MODULE_PREFIX = "nn.Module: "
_SHAPES_DECODER = msgspec.json.Decoder(list[list[int]])


@command(analyze_profiles, progress="reading")
def analyze(call: Call, *, top: _Top = 10, report: _Report = None) -> None:
    """Analyze measured profiles: time breakdown, operations, kernels, critical path and opportunities."""
    from hespas import api

    for name in ("source", "baseline"):
        check_once(call.several(name))
    call.check_report(("index.html", "analysis.json"))
    done = call.run(api.analyze)
    if call.json_file:
        call.write_json(api.analysis_document(done))
    if report:
        done.write(report, overwrite=call.overwrite)
    report_diagnostics(call.diagnostics, call.several("source")[0])
    emit(done.headline())
    print_info(f"note: {text}" for text in done.tables.notes)
    if done.difference:
        _print_difference(done.difference, top)
        return
    _print_device_time(done.tables, top)
    _print_collectives(done.tables, top)
    if len(done.tables.operations):
        _print_operations(done.tables, top)
        _print_calls(done.tables, top)
        _print_path_and_memory(done.tables, top)
        rows = [row for row in done.tables.wins.rows() if row.win_ns > 0]
        lines = [
            (
                _clipped(row.operation, 26),
                _clipped(_shapes(row.shapes), 20),
                time_text(row.win_ns),
                _percent(row.win_share),
                _percent(row.cumulative_share),
                row.bound,
            )
            for row in rows[:top]
        ]
        if lines:
            heads = ("operation", "shapes", "above roof", "share", "cumulative", "bound")
            title = f"optimization opportunities: time above the {done.tables.hardware} roofline"
            _print_table(title, heads, lines, len(rows), left=(0, 1, 5))


def _print_difference(changed: RecordingDifference, top: int) -> None:
    """Print the changes by part of the time, then by operation, shape and kernel."""
    emit(("", "difference by part of the step"))
    lines = [
        (row.part, time_text(row.before_ns), time_text(row.after_ns), _signed(row.delta_ns))
        for row in changed.parts.rows()
    ]
    emit(table_text(("part", "before", "after", "difference"), lines))
    for kind, table in (
        ("operations", changed.by_operation),
        ("operations by shape", changed.by_shape),
        ("kernels", changed.by_kernel),
    ):
        rows = table.rows()[:top]
        with_shapes = kind == "operations by shape"
        listed = [
            (
                _clipped(row.name, 26),
                *((_clipped(_shapes(row.shapes), 18),) if with_shapes else ()),
                row.change,
                f"{row.before_count:,}>{row.after_count:,}",
                _signed(row.delta_ns),
                _signed(row.count_delta_ns),
                _signed(row.mean_delta_ns),
            )
            for row in rows
        ]
        shapes = ("shapes",) if with_shapes else ()
        heads = ("name", *shapes, "change", "n", "difference", "by count", "by mean")
        title = f"changed {kind}: by number of calls, and by mean time"
        _print_table(title, heads, listed, len(table), left=range(3 if with_shapes else 2))


def _print_table(
    title: str,
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    total: int,
    *,
    left: Sequence[int] = (0,),
) -> None:
    """Print a table with a title, which states how many of ``total`` rows are printed."""
    part = f" ({len(lines)} of {count_text(total)})" if total > len(lines) else ""
    emit(("", f"{title}{part}"))
    emit(table_text(heads, lines, left=left))


def _signed(duration_ns: float) -> str:
    return f"+{time_text(duration_ns)}" if duration_ns > 0 else time_text(duration_ns)


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{share:.1%}"


def _known(text: str, figure: float) -> str:
    """Return the text of a figure, or a dash if the figure is unknown."""
    return "-" if isnan(figure) else text


def _clipped(name: str, width: int = _NAME_WIDTH) -> str:
    """Shorten a name in the middle, because its end is as significant as its beginning."""
    if len(name) <= width:
        return name
    head = (width - 2) * 2 // 3
    return f"{name[:head]}..{name[head + 2 - width :]}"


def _shapes(text: str) -> str:
    """Convert JSON extents to ``4096x1024,1024x4096``, without scalars."""
    try:
        shapes = _SHAPES_DECODER.decode(text)
    except msgspec.DecodeError:
        return text or "-"
    return ",".join("x".join(map(str, shape)) for shape in shapes if shape) or "-"


def _print_device_time(tables: AnalysisTables, top: int) -> None:
    """Print the time breakdown of ranks and steps, causes of idle time, and launch queues."""
    rows = tables.breakdown.rows()
    ranks = [row for row in rows if row.step < 0]
    lines: list[tuple[str, ...]] = [
        (
            f"{row.rank}" + (f" step {row.step}" if row.step >= 0 else ""),
            time_text(row.span_ns),
            *(
                _percent(part_ns / row.span_ns if row.span_ns else 0.0)
                for part_ns in (
                    row.compute_ns,
                    row.exposed_communication_ns,
                    row.exposed_memory_ns,
                    row.idle_ns,
                )
            ),
            time_text(row.communication_ns) if row.communication_ns else "-",
            _percent(row.overlap),
        )
        for row in (rows if len(ranks) == 1 else ranks)[:_MAX_STEPS]
    ]
    if lines:
        heads: tuple[str, ...] = ("rank", "span", "compute", "exp. comm", "copies", "idle", "comm", "hidden")
        _print_table("time breakdown by rank and step", heads, lines, len(rows))
    idle = sorted(tables.idle.rows(), key=lambda row: (row.stream >= 0, -row.total_ns * (row.stream >= 0)))
    lines = [
        (
            f"{row.rank} " + (f"stream {row.stream}" if row.stream >= 0 else "device"),
            row.cause,
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
            time_text(row.mean_ns),
            time_text(row.max_ns),
        )
        for row in idle[:top]
    ]
    if lines:
        heads = ("rank", "cause", "gaps", "time", "share", "mean", "longest")
        _print_table("idle time by cause", heads, lines, len(idle), left=(0, 1))
    queues = tables.queues.largest("count")
    lines = [
        (
            f"{row.rank} stream {row.stream}",
            count_text(row.count),
            _known(f"{row.mean_length:,.1f}", row.mean_length),
            _known(f"{row.median_length:,.0f}", row.median_length),
            count_text(row.max_length),
            _percent(row.empty_share),
        )
        for row in queues.rows()[:top]
    ]
    if lines:
        heads = ("rank", "launches", "queue (mean)", "median", "longest", "empty")
        _print_table("launch queue depth", heads, lines, len(queues))


def _print_collectives(tables: AnalysisTables, top: int) -> None:
    """Print collectives with their bus bandwidth, and the ranks that arrive late."""
    lines: list[tuple[str, ...]] = [
        (
            row.kind,
            count_text(row.group_size) if row.group_size > 0 else "-",
            _known(bytes_text(row.size_bytes), row.size_bytes),
            count_text(row.count),
            time_text(row.mean_ns),
            _known(time_text(row.transfer_mean_ns), row.transfer_mean_ns),
            _known(f"{row.bus_gbytes_per_s:,.1f}", row.bus_gbytes_per_s),
            _percent(row.exposed_share),
        )
        for row in tables.collectives.rows()[:top]
    ]
    if not lines:
        return
    heads: tuple[str, ...] = ("collective", "ranks", "size", "n", "mean", "transfer", "GB/s", "exposed")
    title = "collectives; GB/s is bus bandwidth as in nccl-tests"
    _print_table(title, heads, lines, len(tables.collectives))
    lines = [
        (
            str(row.rank),
            f"{row.last:,} of {row.instances:,}",
            time_text(row.late_mean_ns),
            time_text(row.late_max_ns),
            time_text(row.waited_ns),
        )
        for row in tables.stragglers.rows()[:top]
    ]
    if lines:
        heads = ("rank", "last", "late by (mean)", "late by (max)", "waited for others")
        title = "stragglers; clocks are aligned at the ends of collectives"
        _print_table(title, heads, lines, len(tables.stragglers))


def _print_operations(tables: AnalysisTables, top: int) -> None:
    """Print operation classes, operations by shape, and kernels."""
    lines: list[tuple[str, ...]] = [
        (
            op_class_text(row.op_class),
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
            _percent(row.costed_share),
            _percent(row.roof_ns / row.total_ns if row.total_ns else float("nan")),
        )
        for row in tables.classes.rows()[:top]
    ]
    heads: tuple[str, ...] = ("class", "operations", "time", "share", "costed", "of roof")
    _print_table("operation classes", heads, lines, len(tables.classes))
    lines = [
        (
            _clipped(row.operation, 26),
            _clipped(_shapes(row.shapes), 20),
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
            _known(f"{row.tflops_per_s:,.1f}", row.tflops_per_s),
            _known(f"{row.gbytes_per_s:,.0f}", row.gbytes_per_s),
            _percent(row.roof_share),
        )
        for row in tables.operations.rows()[:top]
    ]
    heads = ("operation", "shapes", "n", "time", "share", "TFLOP/s", "GB/s", "roof")
    title = f"operations by shape{f'; roofline of {tables.hardware}' if tables.hardware else ''}"
    _print_table(title, heads, lines, len(tables.operations), left=(0, 1))
    lines = [
        (
            _clipped(row.kernel, 36),
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
            time_text(row.mean_ns),
            _known(time_text(row.std_ns), row.std_ns),
        )
        for row in tables.kernels.rows()[:top]
    ]
    heads = ("kernel", "n", "time", "share", "mean", "std")
    _print_table("kernels", heads, lines, len(tables.kernels))


def _print_calls(tables: AnalysisTables, top: int) -> None:
    """Print the calls with most device time.

    If a call only makes one other call, just the last call of this chain is printed, with the name of the
    innermost module in the chain.
    """
    rows = tables.tree.rows()
    largest_child_ns: dict[int, float] = {}
    for row in rows:
        largest_child_ns[row.parent] = max(largest_child_ns.get(row.parent, 0.0), row.device_ns)
    chain_ends = [row for row in rows if largest_child_ns.get(row.node, 0.0) < row.device_ns]
    chosen = {row.node for row in sorted(chain_ends, key=lambda row: -row.device_ns)[: 2 * top]}

    def module_or_name(row: TreeRow) -> str:
        """Return the innermost module of the calls that only lead to this one, else its own name."""
        node = row.node
        while not rows[node].name.startswith(_MODULE_PREFIX):
            node = rows[node].parent
            if node < 0 or largest_child_ns.get(node, 0.0) < rows[node].device_ns:
                return row.name
        return rows[node].name.removeprefix(_MODULE_PREFIX)

    level = {-1: -1}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        level[row.node] = level[row.parent] + (row.node in chosen)
        if row.node in chosen:
            name = "  " * min(level[row.node], _MAX_DEPTH) + module_or_name(row)
            calls = (count_text(row.calls), count_text(row.events))
            figures = (time_text(row.device_ns), _percent(row.share), time_text(row.own_device_ns))
            lines.append((_clipped(name, 44), *calls, *figures))
    heads = ("call", "calls", "events", "time", "share", "own")
    _print_table("device time by call tree", heads, lines, len(rows))


def _print_path_and_memory(tables: AnalysisTables, top: int) -> None:
    """Print the critical path of each rank, and peak memory."""
    path = tables.critical_path.largest("total_ns")
    with_rank = len(set(tables.critical_path["rank"].tolist())) > 1
    lines = [
        (
            *((str(row.rank),) if with_rank else ()),
            row.kind,
            _clipped(row.name or "-", 36),
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
        )
        for row in path.rows()[:top]
    ]
    heads = (*(("rank",) if with_rank else ()), "kind", "name", "n", "time", "share")
    title = "critical path, backwards from the last device event"
    _print_table(title, heads, lines, len(path), left=(with_rank, 1 + with_rank))
    lines = [
        (
            f"{row.rank} " + (f"device {row.device}" if row.device >= 0 else "host"),
            bytes_text(row.peak_allocated_bytes),
            time_text(row.peak_time_ns),
            bytes_text(row.peak_reserved_bytes),
            bytes_text(row.last_allocated_bytes),
        )
        for row in tables.memory.rows()
    ]
    if lines:
        heads = ("rank", "peak allocated", "at", "peak reserved", "at the end")
        _print_table("memory", heads, lines, len(lines))
