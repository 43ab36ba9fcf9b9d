"""``hespas-validate capture``: a captured program against the trace of its run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli import options
from hespas.cli.destinations import check_reports, write_document
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, is_quiet, report_diagnostics
from hespas.cli.text import bytes_text, count_text, counted, flagged, table_text

if TYPE_CHECKING:
    from hespas.api import CaptureCheckReport
    from hespas.validators.capture import CaptureCheck

__all__ = ["capture"]

_MOST_SHOWN = 10


def capture(
    graph: Annotated[Path, typer.Argument(metavar="GRAPH", help="The captured program: any workload.")],
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A profile of its run, or an execution or Chakra trace.")
    ],
    source_format: options.SourceFormat = "",
    num_devices: options.NumDevices = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Whether a captured program is what ran: operations, their order, collectives and bytes, exactly.

    hespas-validate capture step.mlir step.xplane.pb
    """
    with command_line(debug, source=f"{graph}, {trace}", documents=[json_file], reads=[graph, trace]):
        check_reports({"--json": json_file}, {"GRAPH": [graph], "TRACE": [trace]}, overwrite=overwrite)
        from hespas.api import validate_capture
        from hespas.converters import ReadOptions

        done = validate_capture(
            graph, trace, format=source_format or None, options=ReadOptions(num_devices=num_devices)
        )
        if json_file:
            write_document(done.to_json(), json_file, overwrite=overwrite)
        report_diagnostics(done.diagnostics, trace)
        _show(done)
        if not done.equal:
            raise typer.Exit(1)


def _show(report: CaptureCheckReport) -> None:
    """A table of what was counted, then each difference, then one verdict."""
    done = report.details
    if not is_quiet():
        emit(table_text(("", "captured", "measured", "different"), _rows(done), left=(0,)))
        _show_explained(done)
        for note in done.notes:
            emit(f"note: {flagged(note)}")
    unlike = [each for each in done.operations if not each.explained]
    for each in unlike[:_MOST_SHOWN]:
        emit(f"rank {each.rank}: {each.operation}: {each.captured:g} captured, {each.measured:g} measured")
    for violation in done.order.violations[:_MOST_SHOWN]:
        emit(
            f"rank {violation.rank}, run {violation.run}: {violation.after} began "
            f"{violation.early_ns / 1e3:,.3f} us before {violation.before}, which it needs, was done"
        )
    for place in done.collectives[:_MOST_SHOWN]:
        emit(
            f"rank {place.rank}, collective {place.place}: {place.captured or 'none'} captured, "
            f"{place.measured or 'none'} measured"
        )
    listed = min(len(unlike), _MOST_SHOWN) + min(len(done.order.violations), _MOST_SHOWN)
    listed += min(len(done.collectives), _MOST_SHOWN)
    left = done.differences - listed - (done.joined < 1.0)
    if left > 0:
        emit(f"{counted(left, 'difference')} more")
    emit(report.headline())


def _rows(done: CaptureCheck) -> list[tuple[str, str, str, str]]:
    """What was counted, over all ranks of the trace."""
    unlike = sum(not each.explained for each in done.operations)
    bytes_unlike = "" if done.captured_bytes == done.measured_bytes else "yes"
    order = done.order
    known = order.checked + order.inside + order.unknown
    asked, did = count_text(done.captured_operations), count_text(done.measured_operations)
    calls, made = f"{done.captured_collectives:,}", f"{done.measured_collectives:,}"
    return [
        ("operations", asked, did, f"{unlike:,}"),
        ("collectives", calls, made, f"{len(done.collectives):,}"),
        ("their bytes", bytes_text(done.captured_bytes), bytes_text(done.measured_bytes), bytes_unlike),
        ("dependencies", f"{known:,}", f"{order.checked:,}", f"{order.violated:,}"),
        ("device time", "", f"{done.joined:.1%}", "" if done.joined == 1.0 else "yes"),
    ]


def _show_explained(done: CaptureCheck) -> None:
    """Numbers that differ for a reason that is known, by reason."""
    reasons: dict[str, dict[str, None]] = {}
    for each in done.operations:
        if each.explained:
            reasons.setdefault(each.explained, {})[each.operation] = None
    for reason, names in reasons.items():
        shown = ", ".join(list(names)[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
        emit(f"{counted(len(names), 'operation')} in another number ({shown}): {reason}")
    if done.combined:
        emit(
            f"{counted(done.combined, 'collective')} combined by the compiler: fewer ran, of the same kinds "
            "over the same groups and with the same bytes in all"
        )
    if done.reordered:
        emit(f"{counted(done.reordered, 'rank')} with the same collectives in another order")
