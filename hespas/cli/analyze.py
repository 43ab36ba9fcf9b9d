"""``hespas analyze``: time breakdown, kernels, critical path and opportunities of measured profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from hespas.api.analysis import analyze as analyze_profiles
from hespas.api.io import check_once
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, op_class_text, print_info, report_diagnostics
from hespas.graph.hints import OUTPUT, AtLeast, Option
from hespas.report.tables import Column, Table, columns, table_from_rows
from hespas.report.texts import count_text, time_text

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


@command(analyze_profiles, progress="reading", has_page=True)
def analyze(call: Call, *, top: _Top = 10, report: _Report = None) -> None:
    """Analyze measured profiles: time breakdown, operations, kernels, critical path and opportunities."""
    from hespas import api
    from hespas.analysis.report import REPORT_FILES

    for name in ("source", "baseline"):
        check_once(call.several(name))
    call.check_report(REPORT_FILES)
    done = call.run(api.analyze)
    if call.json_file:
        call.write_json(api.analysis_document(done))
    call.write_html(done)
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
        wins = done.tables.wins.take(done.tables.wins["win_ns"] > 0)
        title = f"optimization opportunities: time above the {done.tables.hardware} roofline"
        titles: dict[str, str | Column] = {
            "operation": Column("operation", write=_clipped_to(26)),
            "shapes": Column("shapes", write=_shapes_to(20)),
            "win_ns": "above roof",
            "win_share": "share",
            "cumulative_share": "cumulative",
            "bound": "bound",
        }
        _print_table(title, wins.head(top).select(titles), len(wins))


def _print_difference(changed: RecordingDifference, top: int) -> None:
    """Print the changes by part of the time, then by operation, shape and kernel."""
    delta = Column("difference", kind="time", write=_signed)
    parts = changed.parts.select(
        {"part": "part", "before_ns": "before", "after_ns": "after", "delta_ns": delta}
    )
    _print_table("difference by part of the step", parts)
    for kind, table in (
        ("operations", changed.by_operation),
        ("operations by shape", changed.by_shape),
        ("kernels", changed.by_kernel),
    ):
        with_shapes = kind == "operations by shape"
        header = (
            *columns("text", "name", write=_clipped_to(26)),
            *(columns("text", "shapes", write=_shapes_to(18)) if with_shapes else ()),
            Column("change"),
            *columns("number", "n", write=str),
            *columns("time", "difference", "by count", "by mean", write=_signed),
        )
        listed = [
            (
                row.name,
                *((row.shapes,) if with_shapes else ()),
                row.change,
                f"{row.before_count:,}>{row.after_count:,}",
                row.delta_ns,
                row.count_delta_ns,
                row.mean_delta_ns,
            )
            for row in table.rows()[:top]
        ]
        _print_table(
            f"changed {kind}: by number of calls, and by mean time",
            table_from_rows(header, listed),
            len(table),
        )


def _print_table(title: str, table: Table, total: int = 0) -> None:
    """Print a table with rows under a title, which states how many of ``total`` rows are printed."""
    if len(table):
        part = f" ({len(table)} of {count_text(total)})" if total > len(table) else ""
        emit(("", f"{title}{part}"))
        emit(table.to_text(unknown="-"))


def _signed(duration_ns: float) -> str:
    return f"+{time_text(duration_ns)}" if duration_ns > 0 else time_text(duration_ns)


def _clipped_to(width: int) -> Callable[[str], str]:
    """Return a function that shortens a name in the middle to ``width`` characters, because its end is as
    significant as its beginning.
    """
    head = (width - 2) * 2 // 3
    return lambda name: name if len(name) <= width else f"{name[:head]}..{name[head + 2 - width :]}"


def _shapes_to(width: int) -> Callable[[str], str]:
    """Return a function that converts JSON extents to ``4096x1024,1024x4096``, without scalars."""
    clipped = _clipped_to(width)

    def write(text: str) -> str:
        try:
            shapes = _SHAPES_DECODER.decode(text)
        except msgspec.DecodeError:
            return clipped(text or "-")
        return clipped(",".join("x".join(map(str, shape)) for shape in shapes if shape) or "-")

    return write


def _print_device_time(tables: AnalysisTables, top: int) -> None:
    """Print the time breakdown of ranks and steps, causes of idle time, and launch queues."""
    steps = tables.breakdown.rows()
    ranks = [row for row in steps if row.step < 0]
    rows: list[Sequence[object]] = [
        (
            f"{row.rank}" + (f" step {row.step}" if row.step >= 0 else ""),
            row.span_ns,
            *(
                part_ns / row.span_ns if row.span_ns else 0.0
                for part_ns in (
                    row.compute_ns,
                    row.exposed_communication_ns,
                    row.exposed_memory_ns,
                    row.idle_ns,
                )
            ),
            row.communication_ns or nan,
            row.overlap,
        )
        for row in (steps if len(ranks) == 1 else ranks)[:_MAX_STEPS]
    ]
    if rows:
        header = (
            Column("rank"),
            *columns("time", "span"),
            *columns("share", "compute", "exp. comm", "copies", "idle"),
            *columns("time", "comm"),
            *columns("share", "hidden"),
        )
        _print_table("time breakdown by rank and step", table_from_rows(header, rows), len(steps))
    idle = sorted(tables.idle.rows(), key=lambda row: (row.stream >= 0, -row.total_ns * (row.stream >= 0)))
    rows = [
        (
            f"{row.rank} " + (f"stream {row.stream}" if row.stream >= 0 else "device"),
            row.cause,
            row.count,
            row.total_ns,
            row.share,
            row.mean_ns,
            row.max_ns,
        )
        for row in idle[:top]
    ]
    if rows:
        header = (
            *columns("text", "rank", "cause"),
            *columns("count", "gaps"),
            *columns("time", "time"),
            *columns("share", "share"),
            *columns("time", "mean", "longest"),
        )
        _print_table("idle time by cause", table_from_rows(header, rows), len(idle))
    queues = tables.queues.largest("count")
    rows = [
        (
            f"{row.rank} stream {row.stream}",
            row.count,
            row.mean_length,
            row.median_length,
            row.max_length,
            row.empty_share,
        )
        for row in queues.rows()[:top]
    ]
    if rows:
        header = (
            Column("rank"),
            *columns("count", "launches"),
            *columns("number", "queue (mean)", write="{:,.1f}".format),
            *columns("number", "median", write="{:,.0f}".format),
            *columns("count", "longest"),
            *columns("share", "empty"),
        )
        _print_table("launch queue depth", table_from_rows(header, rows), len(queues))


def _print_collectives(tables: AnalysisTables, top: int) -> None:
    """Print collectives with their bus bandwidth, and the ranks that arrive late."""
    if not len(tables.collectives):
        return
    titles: dict[str, str | Column] = {
        "kind": "collective",
        "group_size": Column("ranks", kind="count", write=lambda size: count_text(size) if size > 0 else "-"),
        "size_bytes": "size",
        "count": "n",
        "mean_ns": "mean",
        "transfer_mean_ns": "transfer",
        "bus_gbytes_per_s": Column("GB/s", kind="number", write="{:,.1f}".format),
        "exposed_share": "exposed",
    }
    title = "collectives; GB/s is bus bandwidth as in nccl-tests"
    _print_table(title, tables.collectives.head(top).select(titles), len(tables.collectives))
    rows = [
        (
            str(row.rank),
            f"{row.last:,} of {row.instances:,}",
            row.late_mean_ns,
            row.late_max_ns,
            row.waited_ns,
        )
        for row in tables.stragglers.rows()[:top]
    ]
    if rows:
        late = (
            Column("rank"),
            *columns("number", "last", write=str),
            *columns("time", "late by (mean)", "late by (max)", "waited for others"),
        )
        title = "stragglers; clocks are aligned at the ends of collectives"
        _print_table(title, table_from_rows(late, rows), len(tables.stragglers))


def _print_operations(tables: AnalysisTables, top: int) -> None:
    """Print operation classes, operations by shape, and kernels."""
    classes = (
        *columns("text", "class", write=op_class_text),
        *columns("count", "operations"),
        *columns("time", "time"),
        *columns("share", "share", "costed", "of roof"),
    )
    rows: list[Sequence[object]] = [
        (
            row.op_class,
            row.count,
            row.total_ns,
            row.share,
            row.costed_share,
            row.roof_ns / row.total_ns if row.total_ns else nan,
        )
        for row in tables.classes.rows()[:top]
    ]
    _print_table("operation classes", table_from_rows(classes, rows), len(tables.classes))
    operations: dict[str, str | Column] = {
        "operation": Column("operation", write=_clipped_to(26)),
        "shapes": Column("shapes", write=_shapes_to(20)),
        "count": "n",
        "total_ns": "time",
        "share": "share",
        "tflops_per_s": Column("TFLOP/s", kind="number", write="{:,.1f}".format),
        "gbytes_per_s": Column("GB/s", kind="number", write="{:,.0f}".format),
        "roof_share": "roof",
    }
    title = f"operations by shape{f'; roofline of {tables.hardware}' if tables.hardware else ''}"
    _print_table(title, tables.operations.head(top).select(operations), len(tables.operations))
    kernels: dict[str, str | Column] = {
        "kernel": Column("kernel", write=_clipped_to(36)),
        "count": "n",
        "total_ns": "time",
        "share": "share",
        "mean_ns": "mean",
        "std_ns": "std",
    }
    _print_table("kernels", tables.kernels.head(top).select(kernels), len(tables.kernels))


def _print_calls(tables: AnalysisTables, top: int) -> None:
    """Print the calls with most device time.

    If a call has a single callee, only the last call of the chain is printed, with the name of the innermost
    module in the chain.
    """
    rows = tables.tree.rows()
    largest_child_ns: dict[int, float] = {}
    for row in rows:
        largest_child_ns[row.parent] = max(largest_child_ns.get(row.parent, 0.0), row.device_ns)
    chain_ends = [row for row in rows if largest_child_ns.get(row.node, 0.0) < row.device_ns]
    chosen = {row.node for row in sorted(chain_ends, key=lambda row: -row.device_ns)[: 2 * top]}

    def module_or_name(row: TreeRow) -> str:
        """Return the name of the innermost module if the calls above only lead to this call, else its own
        name.
        """
        node = row.node
        while not rows[node].name.startswith(_MODULE_PREFIX):
            node = rows[node].parent
            if node < 0 or largest_child_ns.get(node, 0.0) < rows[node].device_ns:
                return row.name
        return rows[node].name.removeprefix(_MODULE_PREFIX)

    level = {-1: -1}
    lines: list[Sequence[object]] = []
    for row in rows:
        level[row.node] = level[row.parent] + (row.node in chosen)
        if row.node in chosen:
            name = "  " * min(level[row.node], _MAX_DEPTH) + module_or_name(row)
            lines.append((name, row.calls, row.events, row.device_ns, row.share, row.own_device_ns))
    header = (
        *columns("text", "call", write=_clipped_to(44)),
        *columns("count", "calls", "events"),
        *columns("time", "time"),
        *columns("share", "share"),
        *columns("time", "own"),
    )
    _print_table("device time by call tree", table_from_rows(header, lines), len(rows))


def _print_path_and_memory(tables: AnalysisTables, top: int) -> None:
    """Print the critical path of each rank, and peak memory."""
    path, clipped = tables.critical_path.largest("total_ns"), _clipped_to(36)
    titles: dict[str, str | Column] = {"rank": "rank"} if len(set(path["rank"].tolist())) > 1 else {}
    titles |= {
        "kind": "kind",
        "name": Column("name", write=lambda name: clipped(name or "-")),
        "count": "n",
        "total_ns": "time",
        "share": "share",
    }
    shown = path.head(top).select(titles)
    _print_table("critical path, backwards from the last device event", shown, len(path))
    rows = [
        (
            f"{row.rank} " + (f"device {row.device}" if row.device >= 0 else "host"),
            row.peak_allocated_bytes,
            row.peak_time_ns,
            row.peak_reserved_bytes,
            row.last_allocated_bytes,
        )
        for row in tables.memory.rows()
    ]
    if rows:
        memory = (
            Column("rank"),
            *columns("bytes", "peak allocated"),
            *columns("time", "at"),
            *columns("bytes", "peak reserved", "at the end"),
        )
        _print_table("memory", table_from_rows(memory, rows))
