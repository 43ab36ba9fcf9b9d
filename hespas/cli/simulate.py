"""``hespas simulate``: how long one step takes, and what it waits for."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli.session import (
    DebugOption,
    ProgressOption,
    command_line,
    emit,
    progress_bar,
    say_diagnostics,
)
from hespas.cli.text import counted, plain_text, table_text, time_text

if TYPE_CHECKING:
    from hespas.simulator import ClassResult, Simulation

__all__ = ["simulate"]


class _Missing(StrEnum):
    ERROR = "error"
    WARN = "warn"
    ZERO = "zero"


_MOST_CLASSES = 8
"""Rank classes told in full; the JSON document has all."""


def simulate(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Any readable workload.")],
    hardware: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Times of this device (default: those in SRC).")
    ] = "",
    estimator: Annotated[
        str, typer.Option(metavar="NAME", help="Which estimator says how long.")
    ] = "roofline",
    source_format: Annotated[
        str, typer.Option("--from", metavar="FORMAT", help="Read SRC as this format.")
    ] = "",
    num_devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of ranks where SRC does not say.")
    ] = None,
    missing: Annotated[
        _Missing, typer.Option(help="What to do where a time or a trip count is not known.")
    ] = _Missing.WARN,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON, rank by rank.")
    ] = None,
    progress: Annotated[bool | None, ProgressOption] = None,
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """How long one step takes: compute, communication and copies side by side, and the critical path.

    hespas simulate step.mlir --hardware H100-SXM
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    with command_line(debug, diagnostics, str(source)):
        from hespas import api
        from hespas.converters import ReadOptions

        with progress_bar("simulating", progress) as callback:
            options = ReadOptions(num_devices=num_devices, progress=callback)
            value = api.read(source, format=source_format or None, options=options, diagnostics=diagnostics)
            done = api.simulate(
                value,
                hardware or None,
                estimator=estimator,
                missing=missing.value,
                diagnostics=diagnostics,
                progress=callback,
            )
        if json_file:
            document = api.simulation_document(done, str(source), hardware, estimator, diagnostics)
            api.write_simulation_json(document, done.timeline, json_file)
        say_diagnostics(diagnostics, source)
        _show(done)


def _show(done: Simulation) -> None:
    least = "at least " if done.is_lower_bound else ""
    ranks = counted(len(done.timeline.finish_ns), "rank")
    emit(f"{least}{time_text(done.step_ns)} per step, {ranks} in {counted(len(done.classes), 'class')}")
    for found in done.classes[:_MOST_CLASSES]:
        _show_class(found)
    left = len(done.classes) - _MOST_CLASSES
    if left > 0:
        emit(f"\nand {counted(left, 'class')} more: --json writes all")


def _show_class(found: ClassResult) -> None:
    emit("")
    least = "at least " if found.unknown else ""
    emit(
        f"{plain_text(found.name)}: {counted(found.num_ranks, 'rank')}, {least}{time_text(found.finish_ns)}, "
        f"communication exposed {time_text(found.exposed_comm_ns)}{_share(found.exposed_comm_ns, found)}"
    )
    rows = [
        (
            name,
            time_text(busy_ns),
            time_text(max(found.finish_ns - busy_ns, 0.0)),
            time_text(found.critical_path.resource_ns[name]),
        )
        for name, busy_ns in found.busy_ns.items()
        if busy_ns
    ]
    if not rows:
        return
    emit(table_text(("resource", "busy", "idle", "on the critical path"), rows))
    path = found.critical_path
    emit("")
    emit(
        f"critical path: {counted(path.spans, 'operation')}, "
        f"{path.after_resource:,} of them waited for a busy resource"
    )
    lines = [
        (name, time_text(spent_ns), _share(spent_ns, found).strip(" ()"))
        for name, spent_ns in path.class_ns.items()
    ]
    emit(table_text(("class", "time", "share"), lines))


def _share(part_ns: float, found: ClassResult) -> str:
    return f" ({part_ns / found.finish_ns:.1%})" if found.finish_ns else ""
