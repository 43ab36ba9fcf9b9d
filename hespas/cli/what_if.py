"""``hespas simulate --grid`` and ``--compare``: many runs in one table, and two of them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from hespas.cli.session import check_reports, command_line, emit, progress_bar, say_diagnostics
from hespas.cli.text import count_text, counted, flagged, table_text, time_text
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import GridResult, RunDifference
    from hespas.api.grid_row import GridRow

__all__ = ["WhatIf"]

_OWN = frozenset(
    {
        "source", "grid", "estimator", "allow_programs", "compare", "jobs", "json_file", "report",
        "overwrite", "progress", "loudness", "debug", "max_input_bytes", "comm_groups", "default_dtype",
        "dim", "run_time_unit", "untrusted", "limit",
    }
)  # fmt: skip
"""What may stand beside a grid or a comparison."""
_SHARED = frozenset(
    {
        "hardware", "system", "estimator", "granularity", "num_devices", "num_replicas", "missing", "mode",
        "system_config", "network_config", "memory_config", "backend", "queues_per_dim",
    }
)  # fmt: skip
"""Options that all columns share: axes of a grid by the same names."""
_MOST_RANKS = 8
"""Ranks of a comparison that are told; the document has all."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What is asked for in place of one simulation."""

    grid: Path | None
    compare: tuple[Path, Path] | None
    jobs: int
    report: Path | None
    json_file: Path | None
    overwrite: bool
    progress: bool | None
    debug: bool

    def run(
        self, source: Path | None, context: typer.Context, several: Mapping[str, Sequence[str]]
    ) -> Path | None:
        """Do it; the source where it is one run that is asked for. ``several`` are options of which each
        value is a column where there are more than one. Raises ``BadParameter`` without a source.
        """
        columns = {name: values for name, values in several.items() if len(values) > 1}
        if self.grid is None and self.compare is None:
            if source is None:
                raise typer.BadParameter("Missing argument 'SRC'.")
            if not columns:
                return source
        diagnostics = Diagnostics()
        reads = [source, self.grid, *(self.compare or ())]
        named = str(self.grid or (self.compare or ("",))[0])
        with command_line(
            self.debug, diagnostics, named, documents=[self.json_file], reads=reads, writes=[self.report]
        ):
            _refuse_others(context, _SHARED if columns and self.grid is None else frozenset())
            if self.grid is not None and self.compare is not None:
                raise UsageError("--grid and --compare exclude each other", hint="give one of them")
            taken: Mapping[str, Sequence[str | Path]] = {"an input": [each for each in reads if each]}
            check_reports({"--json": self.json_file}, taken, overwrite=self.overwrite)
            if self.grid is not None:
                self._grid(self.grid, source, several["estimator"], context, diagnostics)
            elif self.compare is not None:
                self._compare(self.compare, source, diagnostics)
            elif source is not None:
                self._columns(source, columns, context, diagnostics)
        return None

    def _columns(
        self,
        source: Path,
        columns: Mapping[str, Sequence[str]],
        context: typer.Context,
        diagnostics: Diagnostics,
    ) -> None:
        from hespas import api
        from hespas.api.grid_file import Grid

        for name, values in columns.items():
            if len(set(values)) < len(values):
                raise UsageError(f"--{name} names one twice", hint="give each once")
        shared = {name: _plain(value) for name, value in context.params.items() if _is_shared(context, name)}
        shared = {name: value for name, value in shared.items() if name not in columns}
        axes = {name: tuple(values) for name, values in columns.items()}
        grid = Grid(str(source), axes, shared | {"source": str(source)})
        with progress_bar("simulating", self.progress) as callback:
            done = api.simulate_grid(
                grid, folder=self.report, jobs=self.jobs, overwrite=self.overwrite, diagnostics=diagnostics,
                progress=callback,
            )  # fmt: skip
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
        _show_columns(done)
        _end(done)

    def _grid(
        self,
        path: Path,
        source: Path | None,
        estimators: Sequence[str],
        context: typer.Context,
        diagnostics: Diagnostics,
    ) -> None:
        from hespas import api

        if len(estimators) > 1:
            raise UsageError(
                "--grid takes one --estimator", hint="list them in the grid and --allow-programs"
            )
        is_typed = _is_shared(context, "estimator")

        with progress_bar("simulating", self.progress) as callback:
            done = api.simulate_grid(
                path,
                source,
                folder=self.report,
                estimator=estimators[0] if is_typed else None,
                jobs=self.jobs,
                overwrite=self.overwrite,
                diagnostics=diagnostics,
                progress=callback,
            )
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
        say_diagnostics(diagnostics, path)
        _show_grid(done)
        if self.report:
            emit(f"report: {self.report / 'index.html'}")
        _end(done)

    def _compare(self, paths: tuple[Path, Path], source: Path | None, diagnostics: Diagnostics) -> None:
        from hespas import api

        if source is not None or self.report is not None:
            raise UsageError("--compare takes two documents", hint="leave SRC and --report out")
        done = api.compare_runs(*paths, diagnostics=diagnostics)
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
        _show_comparison(done)


def _end(done: GridResult) -> None:
    """Leave where no row has a time."""
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def _is_shared(context: typer.Context, name: str) -> bool:
    given = context.get_parameter_source(name)
    return name in _SHARED and given is not None and given.name == "COMMANDLINE"


def _plain(value: object) -> str | int:
    """An option's value as one of a grid."""
    only = value
    if isinstance(value, list) and value:
        only = cast("list[object]", value)[0]
    return only if isinstance(only, int) else str(only)


def _refuse_others(context: typer.Context, shared: frozenset[str]) -> None:
    """Settings of one simulation are not those of a grid's rows."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name)
        if name in _OWN | shared or given is None or given.name != "COMMANDLINE":
            continue
        raise UsageError(
            f"{parameter.opts[0]} is of one simulation",
            hint="leave it out, or state it in a grid: every key is an axis",
        )


def _show_grid(done: GridResult) -> None:
    kept = f"; {counted(done.kept, 'row')} kept from before" if done.kept else ""
    emit(f"{done.headline()}{kept}")
    axes = list(done.grid.axes)
    lines: list[tuple[str, ...]] = []
    for row in done.rows:
        settings = [str(row.settings[axis]) for axis in axes]
        if row.fault:
            lines.append((*settings, "", "", "", "", flagged(row.fault)))
            continue
        interval = ""
        if not isnan(row.step_low_ns):
            interval = f"{time_text(row.step_low_ns)} to {time_text(row.step_high_ns)}"
        least = "at least " if row.is_lower_bound else ""
        exposed = time_text(row.exposed_comm_ns)
        lines.append(
            (*settings, f"{least}{time_text(row.step_ns)}", interval, exposed, count_text(row.ranks), "")
        )
    heads = [*(axis.replace("_", " ") for axis in axes), "step", "90 % interval", "exposed", "ranks", "fault"]
    if not any(line[-1] for line in lines):
        heads, lines = heads[:-1], [line[:-1] for line in lines]
    emit(table_text(heads, lines, left=(*range(len(axes)), len(axes) + 4)))


def _show_columns(done: GridResult) -> None:
    """A column per setting: the step first, then what it is made of."""
    heads = [" ".join(str(value) for value in row.settings.values()) for row in done.rows]
    classes = dict.fromkeys(name for row in done.rows for name in row.critical_ns)
    lines: list[tuple[str, ...]] = [
        ("step", *(_step_cell(row) for row in done.rows)),
        ("90 % interval: from", *(_known(row.step_low_ns) for row in done.rows)),
        ("to", *(_known(row.step_high_ns) for row in done.rows)),
        ("compute", *(_known(row.compute_ns) for row in done.rows)),
        ("communication", *(_known(row.comm_ns) for row in done.rows)),
        ("exposed", *(_known(row.exposed_comm_ns) for row in done.rows)),
        *((f"critical path: {name}", *(_known(row.critical_ns.get(name, nan)) for row in done.rows))
          for name in classes),
    ]  # fmt: skip
    emit(table_text(("", *heads), lines))
    for head, row in zip(heads, done.rows, strict=True):
        if row.fault:
            emit(f"{head}: {flagged(row.fault)}")


def _step_cell(row: GridRow) -> str:
    return ("at least " if row.is_lower_bound else "") + _known(row.step_ns)


def _known(time_ns: float) -> str:
    return "-" if isnan(time_ns) else time_text(time_ns)


def _show_comparison(done: RunDifference) -> None:
    emit(done.headline())
    lines: list[tuple[str, ...]] = []
    ranks = 0
    for row in done.rows:
        ranks += row.part == "rank"
        if row.part == "rank" and ranks > _MOST_RANKS:
            continue
        share = row.difference_ns / row.before_ns if row.before_ns > 0 else nan
        times = (time_text(each) for each in (row.before_ns, row.after_ns, row.difference_ns))
        lines.append((row.part, row.name, *times, "" if isnan(share) else f"{share:+.1%}"))
    emit(table_text(("part", "name", "before", "after", "difference", "share"), lines, left=(0, 1)))
    if ranks > _MOST_RANKS:
        emit(f"and {counted(ranks - _MOST_RANKS, 'rank')} more: --json writes all")
