"""``hespas-validate``: whether something is right, and by how much not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hespas.cli import options
from hespas.cli.accuracy import accuracy, compare
from hespas.cli.calibrate import calibrate
from hespas.cli.capture_check import capture
from hespas.cli.destinations import check_reports, write_document
from hespas.cli.league import league
from hespas.cli.serving_accuracy import serving
from hespas.cli.session import command_line, redirect_commands
from hespas.cli.session import run as run_app
from hespas.cli.terminal import emit, print_message, progress_bar
from hespas.cli.text import count_text, counted, flagged, table_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.validators.checker import CheckResult
    from hespas.validators.roundtrip import ColumnResult, MatrixCell, RoundTrips

__all__ = ["app", "check", "common", "main", "roundtrip"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Check workloads. See also hespas-convert and hespas.",
)


app.command()(accuracy)
app.command()(calibrate)
app.command(epilog="Exit codes: 0 it is what ran, 1 it is not, 2 wrong usage, 3 malformed input.")(capture)
app.command()(compare)
app.command()(league)
app.command()(serving)
redirect_commands(
    app,
    "hespas-validate",
    {"convert": "hespas-convert", "validate": "hespas-validate check"}
    | {name: f"hespas {name}" for name in ("estimate", "simulate", "view", "hardware", "estimators")},
)


_Profile = Literal["chakra", "astra-sim"]
_Backend = Literal["unaware", "aware"]
"""The backends of :mod:`hespas.simulator`, which is loaded only where rules need it."""


@app.callback()
def common(
    show_version: options.Version = False,
) -> None:
    """Options that stand before any command."""


@app.command(
    epilog="Exit codes: 0 valid, 1 not valid, 2 wrong usage, 3 malformed input, 4 understood but unsupported."
)
def check(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH...", help="Files, or directories of NAME.{rank}.et files."),
    ] = None,
    profile: Annotated[
        _Profile | None, typer.Option(help="Also the rules of Chakra traces, or of those ASTRA-sim can run.")
    ] = None,
    source_format: options.SourceFormat = "",
    num_devices: options.NumDevices = None,
    num_replicas: options.NumReplicas = None,
    system_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ASTRA-sim's system.json: adds rules that need it.")
    ] = None,
    network_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ASTRA-sim's network.yml: adds rules that need it.")
    ] = None,
    memory_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ASTRA-sim's remote memory: adds rules that need it.")
    ] = None,
    backend: Annotated[
        _Backend | None,
        typer.Option(help="ASTRA-sim's network without or with congestion. [default: unaware]"),
    ] = None,
    queues_per_dim: Annotated[
        int, typer.Option("--queues-per-dim", min=1, help="Queues of each network dimension of ASTRA-sim.")
    ] = 1,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="List the rules and leave.")] = False,
    comm_groups: options.CommGroups = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Structure and rank rules of any file: ids, dependencies, cycles, sizes, matching across ranks.

    hespas-validate check traces/ --profile astra-sim
    """
    reads = [*(paths or ()), system_config, network_config, memory_config]
    with command_line(debug, source=_named(paths), documents=[json_file], reads=reads):
        if list_rules:
            _list_rules(json_file, overwrite=overwrite)
            return
        if not paths:
            raise UsageError("nothing to check", hint="hespas-validate check traces/")
        configs = [path for path in (system_config, network_config, memory_config) if path]
        check_reports({"--json": json_file}, {"PATH": paths, "a configuration": configs}, overwrite=overwrite)
        from hespas.validators.checker import CheckOptions, check_json
        from hespas.validators.checker import check as run

        asked = CheckOptions(
            system_config=system_config,
            network_config=network_config,
            memory_config=memory_config,
            backend=backend,
            queues_per_dim=queues_per_dim,
            format=source_format or None,
            num_devices=num_devices,
            num_replicas=num_replicas,
        )
        result = run(paths, profile, asked)
        if json_file:
            write_document(check_json(result), json_file, overwrite=overwrite)
        _show(result)
        if result.exit_code:
            raise typer.Exit(result.exit_code)


def _show(result: CheckResult) -> None:
    """Findings on standard output, one a line; then one verdict."""
    for violation in result.violations:
        place = violation.path
        place += f": rank {violation.rank}" if violation.rank is not None else ""
        place += f": node {violation.node}" if violation.node is not None else ""
        emit(f"{violation.severity.value} {violation.code} {place}: {flagged(violation.message)}")
    for note in result.diagnostics:
        print_message(f"note: {note.message} [{note.code}]")
    listed: dict[str, int] = {}
    for violation in result.violations:
        listed[violation.code] = listed.get(violation.code, 0) + 1
    for code, count in result.counts.items():
        if count > listed.get(code, 0):
            emit(f"{code}: {count_text(count)} in all, {count_text(listed.get(code, 0))} shown")
    for error in result.unreadable:
        if error.hint:
            emit(f"  try: {flagged(error.hint)}")
    for checked in result.inputs:
        emit(
            f"{checked.path} ({checked.format}): {counted(checked.num_ranks, 'rank')} in "
            f"{counted(checked.num_classes, 'class')}, {counted(checked.num_nodes, 'node')}"
        )
    emit(_check_verdict(result))


def _check_verdict(result: CheckResult) -> str:
    """Inputs that this version does not check are not said to be wrong."""
    if result.valid:
        found = sum(result.counts.values())
        return "valid" + (f", {counted(found, 'warning')}" if found else "")
    if {each.code for each in result.violations if each.severity.value == "error"} != {"unsupported"}:
        return "NOT valid"
    return "not all checked" if result.inputs else "not checked"


@app.command(
    epilog="Exit codes: 0 all that is lost is reported, 1 something is not, 2 wrong usage, 3 malformed input."
)
def roundtrip(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files, folders of rank files, or folders of many files."),
    ],
    formats: Annotated[
        str, typer.Option(metavar="A,B", help="Try only these formats: see hespas-convert --list-formats.")
    ] = "",
    json_file: options.Json = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE|-", help="Write the matrix as an HTML page.")
    ] = None,
    overwrite: options.Overwrite = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Processes.")] = 2,
    comm_groups: options.CommGroups = None,
    run_time_unit: options.RunTimeUnit = "",
    progress: options.Progress = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Take files through every pair of formats and back: what each pair keeps, as a matrix.

    hespas-validate roundtrip step.mlir --html kept.html
    """
    with command_line(debug, source=_named(paths), documents=[json_file, html_file], reads=paths):
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
        _tell_inputs(done)
        _show_matrix(done)
        if not done.valid:
            raise typer.Exit(1)


def _named(paths: Sequence[Path] | None) -> str:
    """The inputs that are named where memory runs out."""
    return ", ".join(map(str, paths or ()))


def _tell_inputs(done: RoundTrips) -> None:
    """What was skipped, and what readers left out before any pair was tried, on standard error."""
    for file in done.skipped:
        print_message(f"note: {file.path} ({file.format}): skipped, it is {file.skipped}")
    for file in done.inputs:
        for code, count in file.findings.items():
            print_message(
                f"note: {file.path}: its reader reports {code}{f' ({count:,} times)' if count > 1 else ''}"
            )


def _show_matrix(done: RoundTrips) -> None:
    """The matrix on standard output, then what the lossy pairs do not keep, then one verdict."""
    from hespas.validators.roundtrip import cell_text

    texts = {(cell.source, cell.via): cell_text(cell).text for cell in done.cells}
    sources = list(dict.fromkeys(source for source, _ in texts))
    targets = list(dict.fromkeys(via for _, via in texts))
    rows = [(source, *(texts.get((source, via), "") for via in targets)) for source in sources]
    emit(table_text(("from \\ through", *targets), rows, left=range(len(targets) + 1)))
    for cell in done.cells:
        for word, part in (("cannot express", cell.lost), ("changes", cell.changed)):
            if part:
                listed = ", ".join(_column_text(column, cell) for column in part)
                emit(f"{cell.source} -> {cell.via} {word}: {listed}")
        for message, count in cell.refused.items():
            emit(f"{cell.source} -> {cell.via} refuses {counted(count, 'file')}: {flagged(message)}")
        for message, count in cell.unreadable.items():
            what = f"wrote {counted(count, 'file')} that is UNREADABLE"
            emit(f"{cell.source} -> {cell.via} {what}: {flagged(message)}")
    emit(
        f"{counted(len(done.inputs), 'file')}"
        + (f", {counted(len(done.skipped), 'profile')} skipped: " if done.skipped else ": ")
        + _verdict(done)
    )


def _verdict(done: RoundTrips) -> str:
    if any(cell.unreadable for cell in done.cells):
        return "what was written cannot be read back"
    return "everything that is not kept is reported" if done.valid else "something is lost UNREPORTED"


def _column_text(column: ColumnResult, cell: MatrixCell) -> str:
    told = "" if column.column not in cell.unreported else " UNREPORTED"
    return f"{column.column} ({count_text(column.changed)}/{count_text(column.known)}){told}"


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


def main() -> None:
    """Entry point."""
    run_app(app)
