"""Sweeps and comparisons of ``hespas simulate``: ``--grid``, ``--compare`` and repeated options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import cast

import typer

from hespas.cli.destinations import check_reports
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics
from hespas.cli.text import flagged, op_class_text
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.report.tables import table_text
from hespas.report.texts import count_text, counted, time_text

__all__ = ["WhatIf"]

_SWEEP_OPTIONS = frozenset(
    {
        "source", "grid", "estimator", "allow_programs", "compare", "jobs", "json_file", "report",
        "overwrite", "progress", "loudness", "debug", "max_input_bytes", "comm_groups", "default_dtype",
        "dim", "run_time_unit", "untrusted", "limit",
    }
)  # fmt: skip
"""Parameters that are allowed with a grid or a comparison."""
_AXES = frozenset(
    {
        "hardware", "system", "estimator", "granularity", "num_devices", "num_replicas", "missing", "mode",
        "system_config", "network_config", "memory_config", "backend", "queues_per_dim",
    }
)  # fmt: skip
"""Options that all columns share, with the names of grid axes."""
_MAX_RANKS = 8
"""Ranks of a comparison that are printed; the JSON document has all."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Options that replace one simulation by a sweep, a comparison or columns."""

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
        """Run the sweep, comparison or columns and return None; else return the source of one simulation.

        ``several`` are the repeatable options: each value is a column if there are two or more. Raises
        ``BadParameter`` without a source.
        """
        columns = {name: values for name, values in several.items() if len(values) > 1}
        if self.grid is None and self.compare is None:
            if source is None:
                raise typer.BadParameter("Missing argument 'SRC'.")
            if not columns:
                return source
        diagnostics = Diagnostics()
        reads = [source, self.grid, *(self.compare or ())]
        first_file = str(self.grid or (self.compare or ("",))[0])
        with command_line(
            self.debug, diagnostics, first_file, documents=[self.json_file], reads=reads, writes=[self.report]
        ):
            allowed: frozenset[str] = _AXES if columns and self.grid is None else frozenset()
            for parameter in context.command.params:
                name = parameter.name or ""
                if name not in _SWEEP_OPTIONS | allowed and _is_given(context, name):
                    raise UsageError(
                        f"{parameter.opts[0]} applies to one simulation only",
                        hint="leave it out, or make it an axis of the grid",
                    )
            if self.grid is not None and self.compare is not None:
                raise UsageError("--grid and --compare exclude each other", hint="give one of them")
            if self.compare is not None and (source is not None or self.report is not None):
                raise UsageError("--compare excludes SRC and --report", hint="leave SRC and --report out")
            inputs = [path for path in (source, self.grid, *(self.compare or ())) if path]
            check_reports({"--json": self.json_file}, {"an input": inputs}, overwrite=self.overwrite)
            if self.grid is not None:
                self._sweep(self.grid, source, several["estimator"], context, diagnostics)
            elif self.compare is not None:
                from hespas import api

                done = api.compare_runs(*self.compare, diagnostics=diagnostics)
                if self.json_file:
                    api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
                emit(done.headline())
                lines: list[tuple[str, ...]] = []
                ranks = 0
                for row in done.rows:
                    ranks += row.part == "rank"
                    if row.part == "rank" and ranks > _MAX_RANKS:
                        continue
                    share = row.difference_ns / row.before_ns if row.before_ns > 0 else nan
                    times = (time_text(time) for time in (row.before_ns, row.after_ns, row.difference_ns))
                    lines.append((row.part, row.name, *times, "" if isnan(share) else f"{share:+.1%}"))
                emit(
                    table_text(("part", "name", "before", "after", "difference", "share"), lines, left=(0, 1))
                )
                if ranks > _MAX_RANKS:
                    emit(f"and {counted(ranks - _MAX_RANKS, 'rank')} more: --json writes all")
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
        """Simulate every combination of the repeated options and print one column for each."""
        from hespas import api
        from hespas.api.grid_rows import Grid

        for name, values in columns.items():
            if len(set(values)) < len(values):
                raise UsageError(f"--{name} repeats a value", hint="give each value once")
        shared: dict[str, str | int] = {"source": str(source)}
        for name, value in context.params.items():
            if name in _AXES and name not in columns and _is_given(context, name):
                shared[name] = _shared_value(value)
        grid = Grid(str(source), {name: tuple(values) for name, values in columns.items()}, shared)
        with progress_bar("simulating", self.progress) as callback:
            done = api.simulate_grid(
                grid, folder=self.report, jobs=self.jobs, overwrite=self.overwrite, diagnostics=diagnostics,
                progress=callback,
            )  # fmt: skip
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)

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
        emit(table_text(("", *heads), lines))
        for head, row in zip(heads, done.rows, strict=True):
            if row.fault:
                emit(f"{head}: {flagged(row.fault)}")
        if done.exit_code:
            raise typer.Exit(done.exit_code)

    def _sweep(
        self,
        path: Path,
        source: Path | None,
        estimators: Sequence[str],
        context: typer.Context,
        diagnostics: Diagnostics,
    ) -> None:
        """Simulate the sweep points of a grid file and print one row for each."""
        from hespas import api

        if len(estimators) > 1:
            raise UsageError(
                "--grid takes one --estimator", hint="list estimators in the grid and add --allow-programs"
            )
        with progress_bar("simulating", self.progress) as callback:
            done = api.simulate_grid(
                path,
                source,
                folder=self.report,
                estimator=estimators[0] if _is_given(context, "estimator") else None,
                jobs=self.jobs,
                overwrite=self.overwrite,
                diagnostics=diagnostics,
                progress=callback,
            )
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
        report_diagnostics(diagnostics, path)
        reused = f"; {counted(done.kept, 'row')} reused from an earlier run" if done.kept else ""
        emit(f"{done.headline()}{reused}")
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
            at_least = "at least " if row.is_lower_bound else ""
            exposed = time_text(row.exposed_comm_ns)
            lines.append(
                (
                    *settings,
                    f"{at_least}{time_text(row.step_ns)}",
                    interval,
                    exposed,
                    count_text(row.ranks),
                    "",
                )
            )
        heads = [
            *(axis.replace("_", " ") for axis in axes),
            "step",
            "90 % interval",
            "exposed",
            "ranks",
            "fault",
        ]
        if not any(line[-1] for line in lines):
            heads, lines = heads[:-1], [line[:-1] for line in lines]
        emit(table_text(heads, lines, left=(*range(len(axes)), len(axes) + 4)))
        if self.report:
            emit(f"report: {self.report / 'index.html'}")
        if done.exit_code:
            raise typer.Exit(done.exit_code)


def _shared_value(value: object) -> str | int:
    """Return the value of an option, or the first one of an option that can be repeated."""
    if isinstance(value, list):
        entries = cast("list[object]", value)
        return _shared_value(entries[0]) if entries else ""
    return value if isinstance(value, int) else str(value)


def _is_given(context: typer.Context, name: str) -> bool:
    """Return True if the user wrote the option on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
