"""Sweeps and comparisons of ``hespas simulate``: ``--grid``, ``--compare`` and repeated options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import typer

from hespas.api.grid_rows import AXES, Grid
from hespas.api.what_if import simulate_grid
from hespas.cli.command import Call
from hespas.cli.terminal import emit, flagged, op_class_text, report_diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import options_of
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import counted, time_text

__all__ = ["print_columns", "print_comparison", "print_sweep"]

_RENAMED_AXES = {"on_unknown": "missing"}
_MAX_RANKS = 8
"""Ranks of a comparison that are printed; the JSON document has all."""


def _refuse_others(call: Call, allowed: Collection[str] = ()) -> None:
    """Raise ``UsageError`` for an option that applies to a single simulation only."""
    of_all = {*options_of(simulate_grid), "source", "estimator", "compare", *allowed}
    for name, declared in call.options.items():
        if name not in of_all and call.is_written(name):
            raise UsageError(
                f"{declared.flag} applies to one simulation only",
                hint="leave it out, or make it an axis of the grid",
            )


def print_comparison(call: Call, compared: tuple[Path, Path]) -> None:
    """Print the differences of two documents of ``--json``."""
    from hespas.api import compare_runs

    _refuse_others(call)
    if call["path"] is not None:
        raise UsageError("--grid and --compare exclude each other", hint="give one of them")
    if call["source"] is not None or call["folder"] is not None:
        raise UsageError("--compare excludes SRC and --report", hint="leave SRC and --report out")
    call.check_outputs()
    done = compare_runs(*compared, diagnostics=call.diagnostics)
    call.write_json(done.to_json())
    call.write_html(done)
    emit(done.headline())
    lines: list[tuple[object, ...]] = []
    ranks = 0
    for row in done.rows:
        ranks += row.part == "rank"
        if row.part == "rank" and ranks > _MAX_RANKS:
            continue
        share = row.difference_ns / row.before_ns if row.before_ns > 0 else nan
        lines.append((row.part, row.name, row.before_ns, row.after_ns, row.difference_ns, share))
    header = (
        *columns("text", "part", "name"),
        *columns("time", "before", "after", "difference"),
        *columns("share", "share", write="{:+.1%}".format, unknown=""),
    )
    emit(table_from_rows(header, lines).to_text())
    if ranks > _MAX_RANKS:
        emit(f"and {counted(ranks - _MAX_RANKS, 'rank')} more: --json writes all")


def print_columns(call: Call, columns: Mapping[str, Sequence[str]]) -> None:
    """Simulate every combination of the repeated options and print one column for each."""
    from hespas import api

    axes = {name: axis for name in call.options if (axis := _RENAMED_AXES.get(name, name)) in AXES}
    _refuse_others(call, axes)
    for name, values in columns.items():
        if len(set(values)) < len(values):
            raise UsageError(f"{call.options[name].flag} repeats a value", hint="give each value once")
        if not all(values):
            raise UsageError(f"{call.options[name].flag} has an empty value", hint="leave it out")
    shared: dict[str, Any] = {"source": str(call["source"])}
    for name, axis in axes.items():
        if name not in columns and call.is_written(name):
            value = call[name]
            shared[axis] = value if isinstance(value, int) else str(value)
    grid = Grid(shared["source"], {name: tuple(values) for name, values in columns.items()}, shared)
    done = call.run(api.simulate_grid, path=grid)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(call.diagnostics, shared["source"])

    def known(time_ns: float) -> str:
        return "-" if isnan(time_ns) else time_text(time_ns)

    heads = [" ".join(str(value) for value in row.settings.values()) for row in done.rows]
    classes = dict.fromkeys(name for row in done.rows for name in row.critical_ns)
    steps = (("at least " if row.is_lower_bound else "") + known(row.step_ns) for row in done.rows)
    lines: list[tuple[str, ...]] = [
        ("step", *steps),
        ("90 % interval: from", *(known(row.step_low_ns) for row in done.rows)),
        ("to", *(known(row.step_high_ns) for row in done.rows)),
        ("compute", *(known(row.compute_ns) for row in done.rows)),
        ("communication", *(known(row.comm_ns) for row in done.rows)),
        ("exposed", *(known(row.exposed_comm_ns) for row in done.rows)),
        *(
            (
                f"critical path: {op_class_text(name)}",
                *(known(row.critical_ns.get(name, nan)) for row in done.rows),
            )
            for name in classes
        ),
    ]
    header = (
        Column("what", " "),
        *(Column(str(place), head, "time", write=str) for place, head in enumerate(heads)),
    )
    emit(table_from_rows(header, lines).to_text())
    for head, row in zip(heads, done.rows, strict=True):
        if row.fault:
            emit(f"{head}: {flagged(row.fault)}")
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def print_sweep(call: Call, estimators: Sequence[str]) -> None:
    """Simulate the sweep points of a grid file and print one row for each."""
    from hespas import api

    _refuse_others(call)
    if len(estimators) > 1:
        raise UsageError(
            "--grid takes one --estimator", hint="list estimators in the grid and add --allow-programs"
        )
    estimator = call["estimator"] if call.is_written("estimator") else None
    done = call.run(api.simulate_grid, source=call["source"], estimator=estimator)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(call.diagnostics, call["path"])
    reused = f"; {counted(done.kept, 'row')} reused from an earlier run" if done.kept else ""
    emit(f"{done.headline()}{reused}")
    axes = list(done.grid.axes)
    lines: list[tuple[object, ...]] = []
    for row in done.rows:
        settings = [str(row.settings[axis]) for axis in axes]
        if row.fault:
            lines.append((*settings, None, "", None, None, flagged(row.fault)))
            continue
        interval = ""
        if not isnan(row.step_low_ns):
            interval = f"{time_text(row.step_low_ns)} to {time_text(row.step_high_ns)}"
        at_least = "at least " if row.is_lower_bound else ""
        step = f"{at_least}{time_text(row.step_ns)}"
        lines.append((*settings, step, interval, time_text(row.exposed_comm_ns), row.ranks, ""))
    header = [
        *(Column(axis, axis.replace("_", " ")) for axis in axes),
        *columns("number", "step", "90 % interval", "exposed", write=str, unknown=""),
        *columns("count", "ranks", unknown=""),
        *columns("text", *(("fault",) if any(line[-1] for line in lines) else ())),
    ]
    emit(table_from_rows(header, [line[: len(header)] for line in lines]).to_text())
    if call["folder"]:
        emit(f"report: {call['folder'] / 'index.html'}")
    if done.exit_code:
        raise typer.Exit(done.exit_code)
