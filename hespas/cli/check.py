"""``hespas-validate check``, ``roundtrip`` and ``capture``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hespas.cli import options
from hespas.cli.destinations import check_reports, write_document
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, is_quiet, print_message, progress_bar, report_diagnostics
from hespas.cli.text import flagged
from hespas.graph.errors import UsageError
from hespas.report.tables import table_text
from hespas.report.texts import bytes_text, count_text, counted

if TYPE_CHECKING:
    from hespas.validators.capture import CaptureCheck

__all__ = ["capture", "check", "roundtrip"]

_Profile = Literal["chakra", "astra-sim"]
_Backend = Literal["unaware", "aware"]
"""Backends of :mod:`hespas.simulator`, which only some rules load."""
_MAX_DIFFERENCES = 10


def check(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH...", help="Files, or folders of NAME.{rank}.et files."),
    ] = None,
    profile: Annotated[
        _Profile | None,
        typer.Option(help="Add the rules of Chakra traces, or of traces that ASTRA-sim can run."),
    ] = None,
    source_format: options.SourceFormat = "",
    num_devices: options.NumDevices = None,
    num_replicas: options.NumReplicas = None,
    system_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read ASTRA-sim's system.json; adds the rules that require it."),
    ] = None,
    network_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read ASTRA-sim's network.yml; adds the rules that require it."),
    ] = None,
    memory_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read ASTRA-sim's remote memory file; adds the rules that require it."
        ),
    ] = None,
    backend: Annotated[
        _Backend | None,
        typer.Option(help="Use ASTRA-sim's congestion-unaware or -aware backend (default: unaware)."),
    ] = None,
    queues_per_dim: Annotated[
        int, typer.Option("--queues-per-dim", min=1, help="Set queues per network dimension of ASTRA-sim.")
    ] = 1,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="List the rules and exit.")] = False,
    comm_groups: options.CommGroups = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Check the structure of any workload: ids, dependencies, cycles, sizes, matching across ranks.

    hespas-validate check traces/ --profile astra-sim
    """
    reads = [*(paths or ()), system_config, network_config, memory_config]
    with command_line(debug, source=_names(paths), documents=[json_file], reads=reads):
        if list_rules:
            _list_rules(json_file, overwrite=overwrite)
            return
        if not paths:
            raise UsageError("PATH is required", hint="hespas-validate check traces/")
        configs = [path for path in (system_config, network_config, memory_config) if path]
        check_reports({"--json": json_file}, {"PATH": paths, "a configuration": configs}, overwrite=overwrite)
        from hespas.validators.checker import CheckOptions, check_json
        from hespas.validators.checker import check as run

        settings = CheckOptions(
            system_config=system_config,
            network_config=network_config,
            memory_config=memory_config,
            backend=backend,
            queues_per_dim=queues_per_dim,
            format=source_format or None,
            num_devices=num_devices,
            num_replicas=num_replicas,
        )
        result = run(paths, profile, settings)
        if json_file:
            write_document(check_json(result), json_file, overwrite=overwrite)
        for violation in result.violations:
            position = violation.path
            position += f": rank {violation.rank}" if violation.rank is not None else ""
            position += f": node {violation.node}" if violation.node is not None else ""
            emit(f"{violation.severity.value} {violation.code} {position}: {flagged(violation.message)}")
        for note in result.diagnostics:
            print_message(f"note: {note.message} [{note.code}]")
        listed = Counter(violation.code for violation in result.violations)
        for code, count in result.counts.items():
            if count > listed[code]:
                emit(f"{code}: {count_text(count)} in total, {count_text(listed[code])} printed")
        for error in result.unreadable:
            if error.hint:
                emit(f"  try: {flagged(error.hint)}")
        for checked in result.inputs:
            emit(
                f"{checked.path} ({checked.format}): {counted(checked.num_ranks, 'rank')} in "
                f"{counted(checked.num_classes, 'class')}, {counted(checked.num_nodes, 'node')}"
            )
        if result.valid:
            warnings = sum(result.counts.values())
            emit("valid" + (f", {counted(warnings, 'warning')}" if warnings else ""))
        elif {entry.code for entry in result.violations if entry.severity.value == "error"} != {
            "unsupported"
        }:
            emit("NOT valid")
        else:  # unsupported inputs may be valid
            emit("not all checked" if result.inputs else "not checked")
        if result.exit_code:
            raise typer.Exit(result.exit_code)


def roundtrip(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files, folders of rank files, or folders of many files."),
    ],
    formats: Annotated[
        str, typer.Option(metavar="A,B", help="Try only these formats (see hespas-convert --list-formats).")
    ] = "",
    json_file: options.Json = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE|-", help="Write the matrix as an HTML page.")
    ] = None,
    overwrite: options.Overwrite = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Run N processes.")] = 2,
    comm_groups: options.CommGroups = None,
    run_time_unit: options.RunTimeUnit = "",
    progress: options.Progress = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Convert files through every pair of formats and back; report what each pair keeps, as a matrix.

    hespas-validate roundtrip step.mlir --html kept.html
    """
    with command_line(debug, source=_names(paths), documents=[json_file, html_file], reads=paths):
        check_reports({"--json": json_file, "--html": html_file}, {"PATH": paths}, overwrite=overwrite)
        from hespas.validators.roundtrip import roundtrip as run
        from hespas.validators.roundtrip import roundtrip_html, roundtrip_json

        names = [name.strip() for name in formats.split(",") if name.strip()]
        with progress_bar("round trips", progress) as callback:
            done = run(paths, names, jobs=jobs, progress=callback)
        if json_file:
            write_document(roundtrip_json(done), json_file, overwrite=overwrite)
        if html_file:
            page = roundtrip_html(done).encode("utf-8", "replace")
            write_document(page, html_file, overwrite=overwrite)
        for file in done.skipped:
            print_message(f"note: {file.path} ({file.format}): skipped, it is {file.skipped}")
        for file in done.inputs:
            for code, count in file.findings.items():
                times = f" ({count:,} times)" if count > 1 else ""
                print_message(f"note: {file.path}: its reader reports {code}{times}")
        from hespas.validators.roundtrip import matrix_table

        emit(matrix_table(done).to_text())
        for cell in done.cells:
            for word, part in (("cannot express", cell.lost), ("changes", cell.changed)):
                if part:
                    listed = ", ".join(
                        f"{column.column} ({count_text(column.changed)}/{count_text(column.known)})"
                        + (" UNREPORTED" if column.column in cell.unreported else "")
                        for column in part
                    )
                    emit(f"{cell.source} -> {cell.via} {word}: {listed}")
            for message, count in cell.refused.items():
                emit(f"{cell.source} -> {cell.via} refuses {counted(count, 'file')}: {flagged(message)}")
            for message, count in cell.unreadable.items():
                problem = f"wrote {counted(count, 'file')} that cannot be read (UNREADABLE)"
                emit(f"{cell.source} -> {cell.via} {problem}: {flagged(message)}")
        if any(cell.unreadable for cell in done.cells):
            verdict = "some written files cannot be read back"
        else:
            verdict = "all losses are reported" if done.valid else "some losses are UNREPORTED"
        skipped = f", {counted(len(done.skipped), 'profile')} skipped" if done.skipped else ""
        emit(f"{counted(len(done.inputs), 'file')}{skipped}: {verdict}")
        if not done.valid:
            raise typer.Exit(1)


def _names(paths: Sequence[Path] | None) -> str:
    """Return the inputs for messages."""
    return ", ".join(map(str, paths or ()))


def capture(
    graph: Annotated[Path, typer.Argument(metavar="GRAPH", help="Captured program, in any readable format.")],
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Recorded run of it: profile, execution trace or Chakra trace.",
        ),
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
    """Verify a captured program against a trace of its run: operations, order, collectives and bytes.

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
        _print_capture(done.details)
        emit(done.headline())
        if not done.equal:
            raise typer.Exit(1)


def _print_capture(details: CaptureCheck) -> None:
    """Print a table of counts, the explained differences, and the first of the other differences."""
    if not is_quiet():
        unexplained = sum(not entry.explained for entry in details.operations)
        bytes_differ = "" if details.captured_bytes == details.measured_bytes else "yes"
        order = details.order
        dependencies = order.checked + order.inside + order.unknown
        captured, measured = map(count_text, (details.captured_operations, details.measured_operations))
        collectives = (f"{details.captured_collectives:,}", f"{details.measured_collectives:,}")
        rows = [
            ("operations", captured, measured, f"{unexplained:,}"),
            ("collectives", *collectives, f"{len(details.collectives):,}"),
            (
                "their bytes",
                bytes_text(details.captured_bytes),
                bytes_text(details.measured_bytes),
                bytes_differ,
            ),
            ("dependencies", f"{dependencies:,}", f"{order.checked:,}", f"{order.violated:,}"),
            ("device time", "", f"{details.joined:.1%}", "" if details.joined == 1.0 else "yes"),
        ]
        emit(table_text(("", "captured", "measured", "different"), rows, left=(0,)))
        reasons: dict[str, dict[str, None]] = {}
        for entry in details.operations:
            if entry.explained:
                reasons.setdefault(entry.explained, {})[entry.operation] = None
        for reason, names in reasons.items():
            shown = ", ".join(list(names)[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
            emit(f"{counted(len(names), 'operation')} differ in count ({shown}): {reason}")
        if details.combined:
            emit(
                f"{counted(details.combined, 'collective')} combined by the compiler, with the same kinds, "
                "groups and total bytes"
            )
        if details.reordered:
            emit(f"{counted(details.reordered, 'rank')} with the same collectives in another order")
        for note in details.notes:
            emit(f"note: {flagged(note)}")
    operations = [entry for entry in details.operations if not entry.explained]
    for entry in operations[:_MAX_DIFFERENCES]:
        emit(
            f"rank {entry.rank}: {entry.operation}: {entry.captured:g} captured, {entry.measured:g} measured"
        )
    for violation in details.order.violations[:_MAX_DIFFERENCES]:
        emit(
            f"rank {violation.rank}, run {violation.run}: {violation.after} began "
            f"{violation.early_ns / 1e3:,.3f} us before {violation.before}, on which it depends, ended"
        )
    for difference in details.collectives[:_MAX_DIFFERENCES]:
        texts = f"{difference.captured or 'none'} captured, {difference.measured or 'none'} measured"
        emit(f"rank {difference.rank}, collective {difference.place}: {texts}")
    listed = min(len(operations), _MAX_DIFFERENCES) + min(len(details.order.violations), _MAX_DIFFERENCES)
    listed += min(len(details.collectives), _MAX_DIFFERENCES)
    left = details.differences - listed - (details.joined < 1.0)
    if left > 0:
        emit(f"{counted(left, 'difference')} more")


def _list_rules(json_file: Path | None, *, overwrite: bool) -> None:
    from hespas.validators.checker import RULES

    if json_file:
        from hespas.api import write_json

        check_reports({"--json": json_file}, {}, overwrite=overwrite)
        listed = [{"code": rule.code, "title": rule.title} for rule in RULES]
        write_json(listed, json_file, overwrite=overwrite)
        return
    rows = [(rule.code, rule.title) for rule in RULES]
    emit(table_text(("code", "rule"), rows, left=(0, 1)))
