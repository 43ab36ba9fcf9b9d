"""``hespas analyze``: where the time of measured profiles went, and where it would be won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from hespas.cli import options
from hespas.cli.session import (
    check_once,
    check_report_folder,
    check_reports,
    command_line,
    emit,
    hardware_files,
    progress_bar,
    report_folder,
    say_diagnostics,
    tell,
)
from hespas.cli.text import bytes_text, count_text, table_text, time_text

if TYPE_CHECKING:
    from hespas.analysis.breakdown import BreakdownRow
    from hespas.analysis.difference import Difference
    from hespas.analysis.run import Analyses
    from hespas.analysis.table import Table
    from hespas.analysis.tree import TreeRow

__all__ = ["analyze"]

_Profiles = Annotated[
    list[Path], typer.Argument(metavar="PROFILE...", help="Profiles, one per rank, or a folder of them.")
]
_Top = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", help="Rows of each table; --json has all.", rich_help_panel=options.OUTPUT
    ),
]

_Report = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=report_folder,
        help="Write index.html, a CSV file per table and analysis.json.",
        rich_help_panel=options.OUTPUT,
    ),
]

_NAME = 30
"""Characters of a name in a table of 80 columns."""
_MOST_STEPS = 16
_DEEPEST = 12
_MODULE = "nn.Module: "


def analyze(
    profiles: _Profiles,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PROFILE",
            help="An earlier recording: what changed; one per rank.",
            rich_help_panel=options.INPUT,
        ),
    ] = None,
    hardware: Annotated[
        str, options.hardware_option("The device whose peaks are the roof (default: the one measured on).")
    ] = "",
    tokens: options.Tokens = None,
    model_flops: options.ModelFlops = None,
    capture: options.Capture = None,
    top: _Top = 10,
    source_format: options.SourceFormat = "",
    recover: options.Recover = False,
    report: _Report = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Where the time of measured profiles went: busy and idle, operations, kernels, what there is to win."""
    from hespas.graph import Diagnostics

    diagnostics = Diagnostics()
    source = str(profiles[0])
    before = against or []
    reads: list[Path | str | None] = [*profiles, *before, *(capture or ()), hardware]
    with command_line(debug, diagnostics, source, documents=[json_file], reads=reads, writes=[report]):
        from hespas import api
        from hespas.converters import ReadOptions

        taken = {"PROFILE": profiles, "--against": before, "--capture": capture or []}
        taken["--hardware"] = hardware_files(hardware)
        _check(taken, report, json_file, overwrite=overwrite)
        with progress_bar("reading", progress) as callback:
            done = api.analyze(
                profiles,
                against=before or None,
                capture=capture,
                hardware=hardware,
                tokens=tokens,
                model_flops=model_flops,
                format=source_format or None,
                options=ReadOptions(recover=recover, progress=callback),
                diagnostics=diagnostics,
            )
        if json_file:
            api.write_json(api.analysis_document(done), json_file, overwrite=overwrite)
        if report:
            done.write(report, overwrite=overwrite)
        say_diagnostics(diagnostics, source)
        emit(done.headline())
        tell(f"note: {text}" for text in done.found.notes)
        if done.difference:
            _show_difference(done.difference, top)
            return
        _show(done.found, top)


def _check(
    taken: Mapping[str, Sequence[Path]], report: Path | None, json_file: Path | None, *, overwrite: bool
) -> None:
    """Refuse recordings that are given twice, and outputs that would replace what is read."""
    for name in ("PROFILE", "--against"):
        check_once(taken[name])
    check_reports({"--json": json_file}, taken, overwrite=overwrite)
    check_report_folder(report, "analysis.json", json_file, taken, overwrite=overwrite)


def _show(found: Analyses, top: int) -> None:
    """All tables, each with a line that says what it is."""
    _show_breakdown(found.breakdown)
    _show_idle(found, top)
    _show_queues(found, top)
    _show_collectives(found, top)
    if not len(found.operations):
        return
    _show_classes(found, top)
    _show_operations(found, top)
    _show_kernels(found, top)
    _show_tree(found, top)
    _show_path(found, top)
    _show_memory(found)
    _show_wins(found, top)


def _show_difference(changed: Difference, top: int) -> None:
    """What changed, by part of the time, then by operation, shape and kernel."""
    emit(("", "where the difference lies"))
    lines = [
        (row.part, time_text(row.before_ns), time_text(row.after_ns), _signed(row.delta_ns))
        for row in changed.parts.rows()
    ]
    emit(table_text(("part", "before", "after", "difference"), lines))
    for what, table in (
        ("operations", changed.by_operation),
        ("operations by shape", changed.by_shape),
        ("kernels", changed.by_kernel),
    ):
        rows = table.rows()[:top]
        _title(f"{what} that changed: by count, and by mean time", len(rows), len(table))
        listed = [
            (
                _clipped(row.name, 26),
                *((_clipped(_shapes(row.shapes), 18),) if what == "operations by shape" else ()),
                row.change,
                f"{row.before_count:,}>{row.after_count:,}",
                _signed(row.delta_ns),
                _signed(row.count_delta_ns),
                _signed(row.mean_delta_ns),
            )
            for row in rows
        ]
        heads = ["name", "change", "n", "difference", "by count", "by mean"]
        left: tuple[int, ...] = (0, 1)
        if what == "operations by shape":
            heads.insert(1, "shapes")
            left = (0, 1, 2)
        emit(table_text(heads, listed, left=left))


def _signed(duration_ns: float) -> str:
    return f"+{time_text(duration_ns)}" if duration_ns > 0 else time_text(duration_ns)


def _title(text: str, shown: int, rows: int) -> None:
    more = f" ({shown} of {count_text(rows)})" if rows > shown else ""
    emit(("", f"{text}{more}"))


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{share:.1%}"


def _known(text: str, figure: float) -> str:
    """A figure in a table, where there is one."""
    return "-" if isnan(figure) else text


def _clipped(name: str, most: int = _NAME) -> str:
    """A name with dots for what there is no room for: the end tells as much as the beginning."""
    if len(name) <= most:
        return name
    head = (most - 2) * 2 // 3
    return f"{name[:head]}..{name[head + 2 - most :]}"


_LISTS = msgspec.json.Decoder(list[list[int]])


def _shapes(text: str) -> str:
    """``4096x1024,1024x4096`` for a JSON text of extents, without inputs that have none."""
    try:
        shapes = _LISTS.decode(text)
    except msgspec.DecodeError:
        return text or "-"
    return ",".join("x".join(map(str, shape)) for shape in shapes if shape) or "-"


def _show_breakdown(table: Table[BreakdownRow]) -> None:
    rows = table.rows()
    whole = [row for row in rows if row.step < 0]
    shown = (rows if len(whole) == 1 else whole)[:_MOST_STEPS]
    if not shown:
        return
    _title("where the time of each rank and step went", len(shown), len(table))
    lines = [
        (
            f"{row.rank}" + (f" step {row.step}" if row.step >= 0 else ""),
            time_text(row.span_ns),
            _percent(row.compute_ns / row.span_ns if row.span_ns else 0.0),
            _percent(row.exposed_communication_ns / row.span_ns if row.span_ns else 0.0),
            _percent(row.exposed_memory_ns / row.span_ns if row.span_ns else 0.0),
            _percent(row.idle_ns / row.span_ns if row.span_ns else 0.0),
            time_text(row.communication_ns) if row.communication_ns else "-",
            _percent(row.overlap),
        )
        for row in shown
    ]
    heads = ("rank", "span", "compute", "exp. comm", "copies", "idle", "comm", "hidden")
    emit(table_text(heads, lines))


def _show_idle(found: Analyses, top: int) -> None:
    """Gaps of the device, and of the streams that have most."""
    rows = found.idle.rows()
    if not rows:
        return
    shown = [row for row in rows if row.stream < 0] + sorted(
        (row for row in rows if row.stream >= 0), key=lambda row: -row.total_ns
    )
    _title("why nothing ran", len(shown[:top]), len(rows))
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
        for row in shown[:top]
    ]
    emit(table_text(("rank", "cause", "gaps", "time", "share", "mean", "longest"), lines, left=(0, 1)))


def _show_queues(found: Analyses, top: int) -> None:
    """The streams to which most was launched."""
    table = found.queues.largest("count")
    rows = table.rows()[:top]
    if not rows:
        return
    _title("launched and not started", len(rows), len(table))
    lines = [
        (
            f"{row.rank} stream {row.stream}",
            count_text(row.count),
            _known(f"{row.mean_length:,.1f}", row.mean_length),
            _known(f"{row.median_length:,.0f}", row.median_length),
            count_text(row.max_length),
            _percent(row.empty_share),
        )
        for row in rows
    ]
    emit(table_text(("rank", "launches", "queue (mean)", "median", "longest", "empty"), lines))


def _show_collectives(found: Analyses, top: int) -> None:
    rows = found.collectives.rows()
    if not rows:
        return
    _title("collectives; GB/s on the bus as nccl-tests has it", len(rows[:top]), len(rows))
    lines = [
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
        for row in rows[:top]
    ]
    heads = ("collective", "ranks", "size", "n", "mean", "transfer", "GB/s", "exposed")
    emit(table_text(heads, lines))
    late = found.stragglers.rows()
    if not late:
        return
    _title("who came last, on clocks aligned by the ends of collectives", len(late[:top]), len(late))
    table = [
        (
            str(row.rank),
            f"{row.last:,} of {row.instances:,}",
            time_text(row.late_mean_ns),
            time_text(row.late_max_ns),
            time_text(row.waited_ns),
        )
        for row in late[:top]
    ]
    emit(table_text(("rank", "last", "late by (mean)", "at most", "waited for others"), table))


def _show_classes(found: Analyses, top: int) -> None:
    rows = found.classes.rows()[:top]
    _title("operation classes", len(rows), len(found.classes))
    lines = [
        (
            row.op_class,
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
            _percent(row.costed_share),
            _percent(row.roof_ns / row.total_ns if row.total_ns else float("nan")),
        )
        for row in rows
    ]
    emit(table_text(("class", "operations", "time", "share", "costed", "of roof"), lines))


def _show_operations(found: Analyses, top: int) -> None:
    rows = found.operations.rows()[:top]
    _title(f"operations by shape{_of_roof(found)}", len(rows), len(found.operations))
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
        for row in rows
    ]
    heads = ("operation", "shapes", "n", "time", "share", "TFLOP/s", "GB/s", "roof")
    emit(table_text(heads, lines, left=(0, 1)))


def _of_roof(found: Analyses) -> str:
    return f"; roof: {found.hardware}" if found.hardware else ""


def _show_kernels(found: Analyses, top: int) -> None:
    rows = found.kernels.rows()[:top]
    _title("kernels", len(rows), len(found.kernels))
    lines = [
        (
            _clipped(row.kernel, 36),
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
            time_text(row.mean_ns),
            _known(time_text(row.std_ns), row.std_ns),
        )
        for row in rows
    ]
    emit(table_text(("kernel", "n", "time", "share", "mean", "std"), lines))


def _show_tree(found: Analyses, top: int) -> None:
    """The calls with most device time. Of calls that only pass it on to one other, the last is shown, by the
    module of the model among them.
    """
    rows = found.tree.rows()
    inside: dict[int, float] = {}
    for row in rows:
        inside[row.parent] = max(inside.get(row.parent, 0.0), row.device_ns)
    told = [row for row in rows if inside.get(row.node, 0.0) < row.device_ns]
    chosen = {row.node for row in sorted(told, key=lambda row: -row.device_ns)[: 2 * top]}
    level = {-1: -1}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        level[row.node] = level[row.parent] + (row.node in chosen)
        if row.node in chosen:
            name = "  " * min(level[row.node], _DEEPEST) + _module(rows, row, inside)
            calls = (count_text(row.calls), count_text(row.events))
            figures = (time_text(row.device_ns), _percent(row.share), time_text(row.own_device_ns))
            lines.append((_clipped(name, 44), *calls, *figures))
    _title("device time by calls, from the top", len(lines), len(rows))
    emit(table_text(("call", "calls", "events", "time", "share", "own"), lines))


def _module(rows: list[TreeRow], row: TreeRow, inside: dict[int, float]) -> str:
    """The innermost module of the calls that only lead to this one; its own name where there is none."""
    name, place = row.name, row.node
    while not rows[place].name.startswith(_MODULE):
        place = rows[place].parent
        if place < 0 or inside.get(place, 0.0) < rows[place].device_ns:
            return name
    return rows[place].name.removeprefix(_MODULE)


def _show_path(found: Analyses, top: int) -> None:
    table = found.critical_path.largest("total_ns")
    rows = table.rows()[:top]
    ranks = len(set(found.critical_path["rank"].tolist()))
    _title("critical path, from the last device event back", len(rows), len(table))
    lines = [
        (
            *((str(row.rank),) if ranks > 1 else ()),
            row.kind,
            _clipped(row.name or "-", 36),
            count_text(row.count),
            time_text(row.total_ns),
            _percent(row.share),
        )
        for row in rows
    ]
    heads = (*(("rank",) if ranks > 1 else ()), "kind", "name", "n", "time", "share")
    emit(table_text(heads, lines, left=(ranks > 1, 1 + (ranks > 1))))


def _show_memory(found: Analyses) -> None:
    rows = found.memory.rows()
    if not rows:
        return
    _title("memory", len(rows), len(rows))
    lines = [
        (
            f"{row.rank} " + (f"device {row.device}" if row.device >= 0 else "host"),
            bytes_text(row.peak_allocated_bytes),
            time_text(row.peak_time_ns),
            bytes_text(row.peak_reserved_bytes),
            bytes_text(row.last_allocated_bytes),
        )
        for row in rows
    ]
    emit(table_text(("rank", "most in use", "at", "most held", "left"), lines))


def _show_wins(found: Analyses, top: int) -> None:
    every = [row for row in found.wins.rows() if row.win_ns > 0]
    rows = every[:top]
    if not rows:
        return
    _title(f"where time would be won: beyond the roof of {found.hardware}", len(rows), len(every))
    lines = [
        (
            _clipped(row.operation, 26),
            _clipped(_shapes(row.shapes), 20),
            time_text(row.win_ns),
            _percent(row.win_share),
            _percent(row.cumulative_share),
            row.bound,
        )
        for row in rows
    ]
    heads = ("operation", "shapes", "to win", "share", "with above", "bound")
    emit(table_text(heads, lines, left=(0, 1, 5)))
