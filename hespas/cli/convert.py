"""``hespas-convert``: a workload from one format into another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.preparation import STEP_ESTIMATOR, Dropped
from hespas.cli import options
from hespas.cli.session import (
    check_reports,
    command_line,
    emit,
    is_verbose,
    list_file,
    progress_bar,
    say_diagnostics,
    tell,
)
from hespas.cli.session import run as run_app
from hespas.cli.text import bytes_text, count_text, counted, flops_text, table_text, time_text
from hespas.files.streams import STANDARD_STREAM
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hespas.api import Conversion
    from hespas.api.event_account import EventConservation
    from hespas.api.rescaling import Rescaling

__all__ = ["app", "convert", "main"]

_EXAMPLE = "hespas-convert step.mlir traces/ --hardware H100-SXM"

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A file, a directory of NAME.{rank}.et files, or -.")
]
_Destination = Annotated[str, typer.Argument(metavar="DST", help="A file, a directory, or -.")]
_To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="Write DST in this format.",
        autocompletion=options.format_names,
        rich_help_panel=options.OUTPUT,
    ),
]
_FromVersion = Annotated[
    str,
    typer.Option(
        metavar="VERSION",
        help="The version of SRC's format, where SRC itself cannot tell.",
        rich_help_panel=options.INPUT,
    ),
]
_ToVersion = Annotated[
    str,
    typer.Option(
        metavar="VERSION",
        help="Which version of DST's format to write: see --list-formats.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Hardware = Annotated[
    str,
    options.hardware_option("Give operations the time they take on this device."),
]
_Rescale = Annotated[
    str,
    typer.Option(
        metavar="AXIS=N,...",
        help="Write the job with these sizes of its mesh axes, where that is provable.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Mesh = Annotated[
    str,
    typer.Option(
        metavar="AXIS=N,...",
        help="Partition a program with shardings over this mesh; with --rescale: the axes of SRC's own mesh.",
        rich_help_panel=options.OUTPUT,
    ),
]
_With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with",
        metavar="TRACE",
        help="With --rescale: the same program at another size of one axis, as proof.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Ranks = Annotated[
    str, typer.Option(metavar="N|A-B", help="Write only this rank, or these.", rich_help_panel=options.OUTPUT)
]
_Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace DST, and the file of --log-json, where it exists.",
        rich_help_panel=options.OUTPUT,
    ),
]
_LogJson = Annotated[
    Path | None,
    typer.Option(
        "--log-json", metavar="FILE|-", help="Write what was done, as JSON.", rich_help_panel=options.OUTPUT
    ),
]
_ListFormats = Annotated[bool, typer.Option("--list-formats", help="List the formats and leave.")]
_AsJson = Annotated[
    bool, typer.Option("--json", help="With --list-formats: as JSON, to standard output or a FILE behind it.")
]


@app.command(
    epilog="Exit codes: 0 done, 2 wrong usage, 3 malformed input, 4 understood but unsupported, 70 our bug."
)
def convert(
    source: _Source = "",
    destination: _Destination = "",
    source_format: options.SourceFormat = "",
    target_format: _To = "",
    from_version: _FromVersion = "",
    to_version: _ToVersion = "",
    recover: options.Recover = False,
    hardware: _Hardware = "",
    estimator: options.Estimator = STEP_ESTIMATOR,
    allow_programs: options.AllowPrograms = False,
    ranks: _Ranks = "",
    num_devices: options.NumDevices = None,
    num_replicas: options.NumReplicas = None,
    rescale: _Rescale = "",
    mesh: _Mesh = "",
    with_trace: _With = None,
    granularity: options.Granularity = None,
    missing: options.Missing = "warn",
    overwrite: _Overwrite = False,
    jobs: options.Jobs = 2,
    only_classes: options.OnlyClasses = False,
    shard: options.Shard = "",
    resume: options.Resume = False,
    cluster: options.Cluster = "",
    progress: options.Progress = None,
    log_json: _LogJson = None,
    list_formats: _ListFormats = False,
    as_json: _AsJson = False,
    default_dtype: options.DefaultDtype = "",
    dim: options.Dim = None,
    comm_groups: options.CommGroups = None,
    capture: options.Capture = None,
    run_time_unit: options.RunTimeUnit = "",
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
    show_version: options.Version = False,
) -> None:
    """Convert a workload between StableHLO, HLO, op graphs, Chakra traces and drawings.

    hespas-convert step.mlir traces/ --hardware H100-SXM
    """
    diagnostics, reads = Diagnostics(), [source, hardware, estimator, *(capture or ()), *(with_trace or ())]
    named = [each for each in reads if str(each) != STANDARD_STREAM]  # the source is read as it comes
    with command_line(debug, diagnostics, source, documents=[log_json], reads=named, writes=[destination]):
        if list_formats:
            _list_formats(source, destination, as_json=as_json, overwrite=overwrite)
            return
        _check(source, destination, log_json, capture or [], overwrite=overwrite)
        from hespas import api

        with progress_bar("converting", progress) as callback:
            done = api.convert(
                source,
                destination,
                source_format=source_format or None,
                target_format=target_format or None,
                source_version=from_version,
                target_version=to_version,
                recover=recover,
                hardware=hardware or None,
                estimator=estimator,
                ranks=_parse_ranks(ranks),
                num_devices=num_devices,
                num_replicas=num_replicas,
                capture=capture or (),
                rescale=_rescaling(rescale, mesh, with_trace or []),
                mesh=mesh if mesh and not rescale else None,
                granularity=granularity,
                missing=missing,
                overwrite=overwrite,
                jobs=jobs,
                parts=options.parts_of(shard, cluster, only_classes=only_classes, resume=resume),
                progress=callback,
                diagnostics=diagnostics,
            )
        _tell(done, log_json, overwrite=overwrite)


def _rescaling(sizes: str, mesh: str, others: list[Path]) -> Rescaling | None:
    """What --rescale and what belongs to it say."""
    from hespas.api.rescaling import Rescaling

    if sizes:
        return Rescaling(sizes=sizes, mesh=mesh, others=others)
    if others:
        raise UsageError("--with says nothing without --rescale", hint="--rescale dp=512")
    return None


def _tell(done: Conversion, log_json: Path | None, *, overwrite: bool) -> None:
    from hespas import api

    if log_json:
        api.write_json(done.to_json(), log_json, overwrite=overwrite)
    _report(done)


def _check(
    source: str, destination: str, log_json: Path | None, captures: list[Path], *, overwrite: bool
) -> None:
    """Refuse what is not said, and a log that cannot be written, before any work is done."""
    if not source or not destination:
        raise UsageError("SRC and DST are needed", hint=_EXAMPLE)
    others: dict[str, list[str] | list[Path]] = {"SRC": [source], "DST": [destination], "--capture": captures}
    check_reports({"--log-json": log_json}, others, overwrite=overwrite)


def _parse_ranks(text: str) -> range | None:
    """``5`` is that rank, ``2-7`` are both ends and all between."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not first.isascii() or not first.isdigit() or (dash and not (last.isascii() and last.isdigit())):
        raise UsageError(f"--ranks {text!r} is neither a rank nor a range", hint="--ranks 0 or --ranks 0-7")
    low, high = int(first), int(last or first)
    if high < low:
        raise UsageError(f"--ranks {text!r} ends before it starts", hint=f"--ranks {high}-{low}")
    return range(low, high + 1)


def _list_formats(source: str, destination: str, *, as_json: bool, overwrite: bool) -> None:
    """Print the table, or write it as JSON: SRC is then the file behind ``--json``."""
    from hespas.converters import usable_formats

    if destination:
        raise UsageError("--list-formats converts nothing", hint="leave SRC and DST out")
    json_file = list_file(Path(source) if source else None, as_json=as_json, overwrite=overwrite)
    formats = list(usable_formats())
    if json_file:
        rows = [
            {
                "name": entry.name,
                "title": entry.title,
                "suffixes": list(entry.suffixes),
                "read": entry.read is not None,
                "write": entry.write is not None,
                "read_versions": list(entry.read_versions),
                "write_versions": list(entry.write_versions),
                "extra": entry.extra,
                "specification": entry.specification,
            }
            for entry in formats
        ]
        from hespas.api import write_json

        write_json(rows, json_file, overwrite=overwrite)
        return
    lines = [
        (
            entry.name,
            entry.title,
            " ".join(entry.suffixes),
            "/".join(verb for verb, can in (("read", entry.read), ("write", entry.write)) if can),
        )
        for entry in formats
    ]
    emit(table_text(("format", "what", "suffixes", "can"), lines, left=range(4)))


def _report(done: Conversion) -> None:
    """Findings and account of a conversion on standard error: standard output may carry the result."""
    say_diagnostics(done.diagnostics, done.source)
    tell(
        f"{done.source} ({done.source_format}) -> "
        f"{done.destination} ({done.target_format}, {bytes_text(done.bytes_written)})"
    )
    if done.events is not None:
        _report_events(done.events, done.target_format)
    account = done.conservation
    if account is None:
        return
    before, after = account.before, account.after
    tell(f"{counted(account.num_ranks, 'rank')} in {counted(account.rank_classes, 'class')}; sums over them:")
    rows = [
        ("operations", count_text(before.ops), count_text(after.ops)),
        ("device time", time_text(before.device_time_ns), time_text(after.device_time_ns)),
        ("FLOPs", flops_text(before.flops), flops_text(after.flops)),
        ("useful FLOPs", flops_text(before.useful_flops), flops_text(after.useful_flops)),
        ("bytes moved", bytes_text(before.bytes_moved), bytes_text(after.bytes_moved)),
        ("collectives", count_text(before.collectives), count_text(after.collectives)),
        ("collective payload", bytes_text(before.collective_bytes), bytes_text(after.collective_bytes)),
        ("messages", count_text(before.messages), count_text(after.messages)),
    ]
    if before.unknown_ops or after.unknown_ops:
        counts = (count_text(before.unknown_ops), count_text(after.unknown_ops))
        rows.insert(1, ("... of unknown cost, not in the sums", *counts))
    tell(table_text(("", "in", "out"), rows))
    _report_dropped(account.dropped, done.target_format)


def _report_events(account: EventConservation, target: str) -> None:
    """The account of measured events."""
    before, after = account.before, account.after
    rows = [
        ("device events", count_text(before.events), count_text(after.events)),
        ("device time", time_text(before.device_time_ns), time_text(after.device_time_ns)),
        *((name, count_text(one), count_text(other)) for name, one, other in account.rows()),
    ]
    tell(table_text(("", "in", "out"), rows))
    _report_dropped(account.dropped, target)


_HARDLY_MISSED = frozenset({"metadata", "attachments"})
"""Columns with what was said about the job beside its operations, and documents that came along."""


_TRIFLES = frozenset({"chakra.rounded-times"})
"""Findings about less than a measurement can tell."""


def _report_dropped(dropped: Iterable[Dropped], target: str) -> None:
    from hespas.converters import load_format

    losses = load_format(target).losses
    for each in dropped:
        trifle = each.reason in _TRIFLES or set(losses.get(each.reason, ("*",))) <= _HARDLY_MISSED
        if trifle and not is_verbose():
            continue
        moved = f", {bytes_text(each.bytes_moved)} not moved" if each.bytes_moved else ""
        less = "less" if each.count >= 0 else "more"
        verb = f"operations {less}: " if each.reason.startswith(("pass.", "rescale.ranks")) else ""
        tell(f"{count_text(abs(each.count))} {verb}{each.message}{moved} [{each.reason}]")


def main() -> None:
    """Entry point."""
    run_app(app)
