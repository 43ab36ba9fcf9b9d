"""``hespas view``: summary of a workload or profile."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, Annotated

from hespas.api.summary import view as view_file
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, op_class_text, ranks_text, report_diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import AtLeast, Option
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import bytes_text, count_text, counted, plain_text, time_text

if TYPE_CHECKING:
    from hespas.api.summary import ClassSummary, OpRow, ProfileSummary

__all__ = ["view"]

_MAX_NAME = 60


_Top = Annotated[int, AtLeast(0), Option("Print at most N classes, operations and regions.", metavar="N")]
_RankClass = Annotated[int, AtLeast(0), Option("Print rank class N in full.", flag="class", metavar="N")]


@command(view_file, progress="reading")
def view(call: Call, *, top: _Top = 10, rank_class: _RankClass = 0) -> None:
    """Summarize a file: ranks, operations by class, communication by group, loops, depth and width.

    hespas view step.mlir
    """
    from hespas import api

    summary = call.run(api.view)
    last = max(len(summary.classes) - 1, 0)
    if rank_class > last:
        raise UsageError(
            f"--class {rank_class}: expected a rank class from 0 to {last}", hint=f"--class {last}"
        )
    call.write_json(summary.to_json())
    report_diagnostics(call.diagnostics, call["source"])
    emit(f"{_name_text(summary.name)} ({summary.format})")
    facts = [f"{key} {_name_text(value)}" for key, value in summary.metadata.items() if key != "format"]
    if facts:
        emit(", ".join(facts))
    if summary.profile is not None:
        _print_profile(summary.profile, top)
    else:
        classes = summary.classes
        available = sum(entry.num_ranks for entry in classes)
        emit(f"{ranks_text(available, summary.num_ranks)} in {counted(len(classes), 'class')}")
        if len(classes) > 1 and top:
            lines = [
                (
                    f"{number} {_name_text(entry.name)}",
                    entry.num_ranks,
                    entry.first_rank if entry.num_ranks else None,
                    entry.nodes,
                    _known_sum([row.flops for row in entry.by_class]),
                    _known_sum([row.bytes_moved for row in entry.by_class]),
                    _known_sum([row.duration_ns for row in entry.by_class]),
                    sum(row.nodes for row in entry.collectives),
                )
                for number, entry in enumerate(classes[:top])
            ]
            emit("")
            title = f"classes ({count_text(len(lines))} of {count_text(len(classes))})"
            header = (
                Column(title),
                *columns("count", "ranks"),
                *columns("count", "first rank", unknown=""),
                *columns("count", "operations"),
                *_COST_COLUMNS,
                *columns("count", "collectives"),
            )
            emit(table_from_rows(header, lines).to_text())
        for chosen in classes[rank_class : rank_class + 1]:
            _print_class(chosen, top)


_COST_COLUMNS = (*columns("flops", "FLOPs"), *columns("bytes", "bytes"), *columns("time", "time"))


def _known_sum(figures: Sequence[float]) -> float:
    known = [figure for figure in figures if not isnan(figure)]
    return sum(known) if known or not figures else nan


def _name_text(text: str) -> str:
    """Return a name from the input with control characters escaped and a long middle cut out."""
    ends = text if len(text) <= 2 * _MAX_NAME else text[:_MAX_NAME] + text[-_MAX_NAME:]
    name = plain_text(ends)
    half = _MAX_NAME // 2
    return name if len(name) <= _MAX_NAME else f"{name[: half - 2]} .. {name[-half + 2 :]}"


def _print_class(summary: ClassSummary, top: int) -> None:
    """Print the operations, communication and regions of a rank class."""
    ranks = f"rank {summary.first_rank}"
    if summary.num_ranks != 1:
        ranks = f"{counted(summary.num_ranks, 'rank')}, {summary.first_rank} to {summary.last_rank}"
    emit("")
    emit(f"{_name_text(summary.name)}: {ranks}")
    shape = "it has a cycle: see hespas-validate check"
    if summary.depth >= 0:
        shape = f"longest chain {count_text(summary.depth)}, widest level {count_text(summary.width)}"
    data = counted(summary.data_edges, "data dependency", "dependencies")
    control = counted(summary.control_edges, "control dependency", "dependencies")
    emit(f"  {counted(summary.nodes, 'operation')}, {data}, {control}; {shape}")
    emit(
        f"  {counted(summary.streams, 'stream')}, {counted(summary.attributes, 'attribute')} kept verbatim"
        + "".join(f", {_name_text(name)} {bytes_text(size)}" for name, size in summary.attachments.items())
    )
    by_class = [(op_class_text(row.name), row) for row in summary.by_class]
    _print_ops("by class", by_class, len(by_class))
    by_op = [(_name_text(row.name) or "(unnamed)", row) for row in summary.by_op]
    _print_ops(f"by operation ({_top_text(top, len(by_op))})", by_op, top)
    if summary.products:
        matmuls = table_from_rows(
            (
                Column("matmuls"),
                *columns("number", "accumulator", "bits", "noise", write=str),
                *columns("count", "operations", "runs"),
                *columns("flops", "FLOPs"),
            ),
            [
                (
                    f"{row.lhs or '?'} x {row.rhs or '?'}",
                    row.accumulator or "?",
                    _name_text(row.accumulator_bits),
                    _name_text(row.mac_noise_sigma),
                    row.nodes,
                    row.executions,
                    row.flops,
                )
                for row in summary.products
            ],
        )
        filled = [name for name, cells in matmuls.columns.items() if any(cell != "" for cell in cells)]
        emit("")
        emit(matmuls.select({name: name for name in filled}).to_text())
    if summary.collectives:
        lines = [
            (
                row.kind,
                row.groups,
                row.nodes,
                row.executions,
                row.comm_bytes,
            )
            for row in summary.collectives
        ]
        header = (
            *columns("text", "collectives", "groups"),
            *columns("count", "operations", "runs"),
            *columns("bytes", "per rank"),
        )
        emit("")
        emit(table_from_rows(header, lines).to_text())
    if summary.messages:
        emit("")
        emit("messages: " + ", ".join(f"{count_text(row.nodes)} {row.name}" for row in summary.messages))
    if not summary.regions or not top:
        return
    emit("")
    emit(f"regions ({count_text(min(top, len(summary.regions)))} of {count_text(len(summary.regions))})")
    for row in summary.regions[:top]:
        trips = "unknown iterations" if isnan(row.trips) else counted(row.trips, "iteration")
        suffix = f", {trips}" if row.kind in {"loop body", "branch"} or row.trips != 1 else ""
        indent = "  " * (row.depth + 1)
        emit(f"{indent}{row.kind} {_name_text(row.label)}{suffix}, {counted(row.nodes, 'operation')}")


def _top_text(top: int, total: int) -> str:
    return "all" if total <= top else f"the first {top} of {total}"


def _print_ops(title: str, rows: Sequence[tuple[str, OpRow]], top: int) -> None:
    """Print the first ``top`` rows of operations, each with its name."""
    if not rows or not top:
        return
    lines = [
        (
            name,
            row.nodes,
            row.executions,
            row.flops,
            row.bytes_moved,
            row.duration_ns,
            row.unknown or None,
        )
        for name, row in rows[:top]
    ]
    header = (
        Column(title),
        *columns("count", "operations", "runs"),
        *_COST_COLUMNS,
        *columns("count", "unknown", unknown=""),
    )
    emit("")
    emit(table_from_rows(header, lines).to_text())


def _print_profile(summary: ProfileSummary, top: int) -> None:
    """Print the events of a profile, by category and by operation."""
    emit(
        f"{counted(summary.events, 'device event')} on {_name_text(summary.device) or 'an unnamed device'}, "
        f"{counted(summary.ranks, 'rank')}, {counted(summary.streams, 'stream')}, "
        f"{counted(summary.host_ops, 'host operation')}"
    )
    share = "" if isnan(summary.linked_share) else f"; {summary.linked_share:.1%} linked to host operations"
    emit(f"{time_text(summary.duration_ns)} of device time in {time_text(summary.span_ns)}{share}")
    if summary.negative_events:
        emit(f"{counted(summary.negative_events, 'event')} of negative duration not included in times")
    for title, rows, limit in (
        ("by category", summary.by_category, len(summary.by_category)),
        (f"by operation ({_top_text(top, len(summary.by_op))})", summary.by_op, top),
    ):
        lines = [(_name_text(row.name), row.nodes, row.duration_ns) for row in rows[:limit]]
        if lines:
            header = (Column(title), *columns("count", "events"), *columns("time", "time"))
            emit("")
            emit(table_from_rows(header, lines).to_text())
