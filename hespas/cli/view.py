"""``hespas view``: what a file holds, as a summary and a tree."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli import options
from hespas.cli.session import check_reports, command_line, emit, progress_bar, say_diagnostics
from hespas.cli.text import (
    bytes_text,
    count_text,
    counted,
    flops_text,
    plain_text,
    ranks_text,
    table_text,
    time_text,
)
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import Summary
    from hespas.api.summary import ClassSummary, CollectiveRow, OpRow, ProductRow, ProfileSummary, RegionRow

__all__ = ["view"]

_LONGEST_NAME = 60


def view(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Any readable file or folder of rank files.")],
    source_format: options.SourceFormat = "",
    num_devices: options.NumDevices = None,
    num_replicas: options.NumReplicas = None,
    top: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many classes, operations and regions to list.")
    ] = 10,
    rank_class: Annotated[
        int, typer.Option("--class", min=0, metavar="N", help="Which rank class to show in full.")
    ] = 0,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    default_dtype: options.DefaultDtype = "",
    dim: options.Dim = None,
    comm_groups: options.CommGroups = None,
    run_time_unit: options.RunTimeUnit = "",
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """What a file holds: ranks, operations by class, communication by group, loops, depth and width.

    hespas view step.mlir
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    with command_line(debug, diagnostics, str(source), documents=[json_file], reads=[source]):
        from hespas import api
        from hespas.converters import ReadOptions

        check_reports({"--json": json_file}, {"SRC": [source]}, overwrite=overwrite)
        with progress_bar("reading", progress) as callback:
            reading = ReadOptions(
                num_devices=num_devices, num_replicas=num_replicas, progress=callback, lenient=False
            )
            found = api.view(source, format=source_format or None, options=reading, diagnostics=diagnostics)
        _check_class(found, rank_class)
        if json_file:
            api.write_json(found.to_json(), json_file, overwrite=overwrite)
        say_diagnostics(diagnostics, source)
        _show(found, top, rank_class)


def _check_class(found: Summary, rank_class: int) -> None:
    """Raise ``UsageError`` for a rank class that the job does not have."""
    most = max(len(found.classes) - 1, 0)
    if rank_class > most:
        raise UsageError(f"--class {rank_class}: the rank classes are 0 to {most}", hint=f"--class {most}")


def _show(found: Summary, top: int, rank_class: int) -> None:
    emit(f"{_shown(found.name)} ({found.format})")
    facts = ", ".join(f"{key} {_shown(value)}" for key, value in found.metadata.items() if key != "format")
    if facts:
        emit(facts)
    if found.profile is not None:
        _show_profile(found.profile, top)
        return
    here = sum(each.num_ranks for each in found.classes)
    emit(f"{ranks_text(here, found.num_ranks)} in {counted(len(found.classes), 'class')}")
    if len(found.classes) > 1:
        _show_classes(found.classes, top)
    for chosen in found.classes[rank_class : rank_class + 1]:
        _show_class(chosen, top)


def _show_classes(classes: Sequence[ClassSummary], top: int) -> None:
    """One line per rank class; ``--class`` shows one in full."""
    lines = [
        (
            f"{number} {_shown(each.name)}",
            count_text(each.num_ranks),
            count_text(each.first_rank) if each.num_ranks else "",
            count_text(each.nodes),
            flops_text(_known_sum([row.flops for row in each.by_class])),
            bytes_text(_known_sum([row.bytes_moved for row in each.by_class])),
            time_text(_known_sum([row.duration_ns for row in each.by_class])),
            count_text(sum(row.nodes for row in each.collectives)),
        )
        for number, each in enumerate(classes[:top])
    ]
    if not lines:
        return
    emit("")
    title = f"classes ({count_text(len(lines))} of {count_text(len(classes))})"
    columns = ("ranks", "first rank", "operations", "FLOPs", "bytes", "time", "collectives")
    emit(table_text((title, *columns), lines))


def _known_sum(figures: Sequence[float]) -> float:
    known = [figure for figure in figures if not isnan(figure)]
    return sum(known) if known or not figures else nan


def _shown(text: str) -> str:
    """A name of an input: control characters shown, a long one cut in the middle."""
    ends = text if len(text) <= 2 * _LONGEST_NAME else text[:_LONGEST_NAME] + text[-_LONGEST_NAME:]
    shown = plain_text(ends)
    half = _LONGEST_NAME // 2
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: half - 2]} .. {shown[-half + 2 :]}"


def _show_class(found: ClassSummary, top: int) -> None:
    ranks = f"rank {found.first_rank}"
    if found.num_ranks != 1:
        ranks = f"{counted(found.num_ranks, 'rank')}, {found.first_rank} to {found.last_rank}"
    emit("")
    emit(f"{_shown(found.name)}: {ranks}")
    shape = "there is a cycle: see hespas-validate check"
    if found.depth >= 0:
        shape = f"longest chain {count_text(found.depth)}, widest level {count_text(found.width)}"
    data = counted(found.data_edges, "data dependency", "dependencies")
    control = counted(found.control_edges, "control dependency", "dependencies")
    emit(f"  {counted(found.nodes, 'operation')}, {data}, {control}; {shape}")
    emit(
        f"  {counted(found.streams, 'stream')}, {counted(found.attributes, 'attribute')} kept verbatim"
        + "".join(f", {_shown(name)} {bytes_text(size)}" for name, size in found.attachments.items())
    )
    _table("by class", found.by_class, len(found.by_class))
    _table(f"by operation ({_some(top, len(found.by_op))})", found.by_op, top)
    _show_products(found.products)
    _show_collectives(found.collectives)
    _show_messages(found.messages)
    _show_regions(found.regions, top)


def _some(top: int, there_are: int) -> str:
    return "all" if there_are <= top else f"the first {top} of {there_are}"


def _table(title: str, rows: Sequence[OpRow], top: int) -> None:
    if not rows or not top:
        return
    lines = [
        (
            _shown(row.name) or "(unnamed)",
            count_text(row.nodes),
            count_text(row.executions),
            flops_text(row.flops),
            bytes_text(row.bytes_moved),
            time_text(row.duration_ns),
            count_text(row.unknown) if row.unknown else "",
        )
        for row in rows[:top]
    ]
    emit("")
    emit(table_text((title, "operations", "runs", "FLOPs", "bytes", "time", "unknown"), lines))


def _show_products(rows: Sequence[ProductRow]) -> None:
    """Number formats of products and convolutions: operands, accumulator, what the program states of both."""
    if not rows:
        return
    lines = [
        (
            f"{row.lhs or '?'} x {row.rhs or '?'}",
            row.accumulator or "?",
            _shown(row.accumulator_bits),
            _shown(row.mac_noise_sigma),
            count_text(row.nodes),
            count_text(row.executions),
            flops_text(row.flops),
        )
        for row in rows
    ]
    columns = ["matmuls", "accumulator", "bits", "noise", "operations", "runs", "FLOPs"]
    # Columns that say nothing anywhere are left out.
    kept = [place for place in range(len(columns)) if any(line[place] for line in lines)]
    emit("")
    emit(table_text([columns[place] for place in kept], [[line[place] for place in kept] for line in lines]))


def _show_collectives(rows: Sequence[CollectiveRow]) -> None:
    if not rows:
        return
    lines = [
        (
            row.kind,
            row.groups,
            count_text(row.nodes),
            count_text(row.executions),
            bytes_text(row.comm_bytes),
        )
        for row in rows
    ]
    emit("")
    emit(table_text(("collectives", "groups", "operations", "runs", "per rank"), lines, left=(0, 1)))


def _show_messages(rows: Sequence[OpRow]) -> None:
    if rows:
        emit("")
        emit("messages: " + ", ".join(f"{count_text(row.nodes)} {row.name}" for row in rows))


def _show_regions(rows: Sequence[RegionRow], top: int) -> None:
    if not rows or not top:
        return
    emit("")
    emit(f"regions ({count_text(min(top, len(rows)))} of {count_text(len(rows))})")
    for row in rows[:top]:
        trips = "unknown trips" if row.trips != row.trips else counted(row.trips, "trip")
        told = f", {trips}" if row.kind in {"loop body", "branch"} or row.trips != 1 else ""
        indent = "  " * (row.depth + 1)
        emit(f"{indent}{row.kind} {_shown(row.label)}{told}, {counted(row.nodes, 'operation')}")


def _show_profile(found: ProfileSummary, top: int) -> None:
    emit(
        f"{counted(found.events, 'device event')} on {_shown(found.device) or 'an unnamed device'}, "
        f"{counted(found.ranks, 'rank')}, {counted(found.streams, 'stream')}, "
        f"{counted(found.host_ops, 'host operation')}"
    )
    share = "" if isnan(found.linked_share) else f"; {found.linked_share:.1%} of it has a host operation"
    emit(f"{time_text(found.duration_ns)} of device time in {time_text(found.span_ns)}{share}")
    if found.negative_events:
        emit(f"{counted(found.negative_events, 'event')} of negative duration: no time is counted of them")
    for title, rows, limit in (
        ("by category", found.by_category, len(found.by_category)),
        (f"by operation ({_some(top, len(found.by_op))})", found.by_op, top),
    ):
        if rows and limit:
            lines = [
                (_shown(row.name), count_text(row.nodes), time_text(row.duration_ns)) for row in rows[:limit]
            ]
            emit("")
            emit(table_text((title, "events", "time"), lines))
