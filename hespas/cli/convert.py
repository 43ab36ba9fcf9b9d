"""``hespas-convert``: conversion of a workload from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.lowering import STEP_ESTIMATOR, MergedOps
from hespas.cli import options
from hespas.cli.destinations import check_reports, list_file
from hespas.cli.entry import Version
from hespas.cli.entry import run as run_app
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, is_verbose, print_info, progress_bar, report_diagnostics
from hespas.files.streams import STANDARD_STREAM
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.report.tables import table_text
from hespas.report.texts import bytes_text, count_text, counted, flops_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hespas.api import Conversion

__all__ = ["app", "convert", "main"]

_EXAMPLE = "hespas-convert step.mlir traces/ --hardware H100-SXM"

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Input file, folder of NAME.{rank}.et files, or - for stdin.")
]
_Destination = Annotated[str, typer.Argument(metavar="DST", help="Output file, folder, or - for stdout.")]
_To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="Write DST in this format (default: by suffix).",
        autocompletion=options.format_names,
        rich_help_panel=options.OUTPUT,
    ),
]
_FromVersion = Annotated[
    str,
    typer.Option(
        metavar="VERSION",
        help="Set the version of SRC's format, for files that do not state it.",
        rich_help_panel=options.INPUT,
    ),
]
_ToVersion = Annotated[
    str,
    typer.Option(
        metavar="VERSION",
        help="Write this version of DST's format (see --list-formats).",
        rich_help_panel=options.OUTPUT,
    ),
]
_Hardware = Annotated[
    str,
    options.hardware_option("Estimate the durations of operations on this device."),
]
_Rescale = Annotated[
    str,
    typer.Option(
        metavar="AXIS=N,...",
        help="Rescale the job to these mesh sizes, if the result is provably exact.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Mesh = Annotated[
    str,
    typer.Option(
        metavar="AXIS=N,...",
        help="Partition a program with shardings over this mesh; with --rescale: the mesh of SRC.",
        rich_help_panel=options.OUTPUT,
    ),
]
_With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with",
        metavar="TRACE",
        help="With --rescale: read the same program at another size of one axis, as evidence; repeatable.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Ranks = Annotated[
    str,
    typer.Option(
        metavar="N|A-B", help="Write only this rank, or this range of ranks.", rich_help_panel=options.OUTPUT
    ),
]
_Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace DST and the file of --log-json if they exist.",
        rich_help_panel=options.OUTPUT,
    ),
]
_LogJson = Annotated[
    Path | None,
    typer.Option(
        "--log-json",
        metavar="FILE|-",
        help="Write the conversion account as JSON.",
        rich_help_panel=options.OUTPUT,
    ),
]
_ListFormats = Annotated[bool, typer.Option("--list-formats", help="List supported formats and exit.")]
_AsJson = Annotated[
    bool,
    typer.Option("--json", help="With --list-formats: write JSON to stdout, or to the FILE that follows."),
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
    show_version: Version = False,
) -> None:
    """Convert a workload between StableHLO, HLO, op graphs, Chakra traces, profiler traces and drawings.

    hespas-convert step.mlir traces/ --hardware H100-SXM
    """
    diagnostics, reads = Diagnostics(), [source, hardware, estimator, *(capture or ()), *(with_trace or ())]
    paths = [path for path in reads if str(path) != STANDARD_STREAM]  # the converter reads the stream itself
    with command_line(debug, diagnostics, source, documents=[log_json], reads=paths, writes=[destination]):
        if list_formats:
            _list_formats(source, destination, as_json=as_json, overwrite=overwrite)
            return
        if not source or not destination:
            raise UsageError("SRC and DST are required", hint=_EXAMPLE)
        taken: dict[str, list[str] | list[Path]] = {
            "SRC": [source], "DST": [destination], "--capture": capture or [],
        }  # fmt: skip
        check_reports({"--log-json": log_json}, taken, overwrite=overwrite)
        if with_trace and not rescale:
            raise UsageError("--with requires --rescale", hint="--rescale dp=512")
        from hespas import api
        from hespas.api.conversion import Rescaling

        rescaling = Rescaling(sizes=rescale, mesh=mesh, others=with_trace or []) if rescale else None
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
                rescale=rescaling,
                mesh=mesh if mesh and not rescale else None,
                granularity=granularity,
                on_unknown=missing,
                overwrite=overwrite,
                jobs=jobs,
                parts=options.parts_of(shard, cluster, only_classes=only_classes, resume=resume),
                progress=callback,
                diagnostics=diagnostics,
            )
        if log_json:
            api.write_json(done.to_json(), log_json, overwrite=overwrite)
        _print_account(done)


def _parse_ranks(text: str) -> range | None:
    """Return the ranks of ``--ranks``: ``5``, or ``2-7`` with both ends; None if empty."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not all(part.isascii() and part.isdigit() for part in ([first, last] if dash else [first])):
        raise UsageError(f"invalid --ranks {text!r}: expected N or A-B", hint="--ranks 0 or --ranks 0-7")
    low, high = int(first), int(last or first)
    if high < low:
        raise UsageError(f"--ranks {text!r} ends before it starts", hint=f"--ranks {high}-{low}")
    return range(low, high + 1)


def _list_formats(source: str, destination: str, *, as_json: bool, overwrite: bool) -> None:
    """Print the formats, or write them as JSON to SRC, the argument that follows ``--json``."""
    from hespas.converters import usable_formats

    if destination:
        raise UsageError("--list-formats excludes SRC and DST", hint="leave SRC and DST out")
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
    emit(table_text(("format", "description", "suffixes", "supports"), lines, left=range(4)))


def _print_account(done: Conversion) -> None:
    """Print diagnostics and the conservation account on standard error: standard output may be DST."""
    report_diagnostics(done.diagnostics, done.source)
    print_info(
        f"{done.source} ({done.source_format}) -> "
        f"{done.destination} ({done.target_format}, {bytes_text(done.bytes_written)})"
    )
    if done.events is not None:
        before_events, after_events = done.events.before, done.events.after
        rows = [
            ("device events", count_text(before_events.events), count_text(after_events.events)),
            (
                "device time",
                time_text(before_events.device_time_ns),
                time_text(after_events.device_time_ns),
            ),
            *((name, count_text(one), count_text(other)) for name, one, other in done.events.rows()),
        ]
        print_info(table_text(("", "in", "out"), rows))
        _print_dropped(done.events.dropped, done.target_format)
    account = done.conservation
    if account is None:
        return
    before, after = account.before, account.after
    print_info(
        f"{counted(account.num_ranks, 'rank')} in {counted(account.rank_classes, 'class')}; "
        "sums over all ranks:"
    )
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
    print_info(table_text(("", "in", "out"), rows))
    _print_dropped(account.dropped, done.target_format)


_DETAIL_COLUMNS = frozenset({"metadata", "attachments"})
"""Columns whose loss is printed with ``--verbose`` only: facts about the job and attached documents."""
_DETAIL_CODES = frozenset({"chakra.rounded-times"})
"""Losses that are printed with ``--verbose`` only, because they are below the precision of measurements."""


_REMOVALS = {
    "pass.fused": "{count} operations fused into their consumers",
    "pass.folded-free": "{count} zero-cost operations removed (views, constants, tuples)",
    "pass.grouped": "{count} operations merged into regions between collectives",
}
"""Code of a pass that removes operations -> its line in the account."""


def _print_dropped(dropped: Iterable[MergedOps], target: str) -> None:
    """Print the operations and columns that a conversion drops, merges or adds, with their reasons."""
    from hespas.converters import load_format

    losses = load_format(target).losses
    for entry in dropped:
        columns = set(losses.get(entry.reason, ("*",)))
        is_detail = entry.reason in _DETAIL_CODES or columns <= _DETAIL_COLUMNS
        if is_detail and not is_verbose():
            continue
        count = count_text(abs(entry.count))
        if entry.count >= 0 and entry.reason in _REMOVALS:
            text = _REMOVALS[entry.reason].format(count=count)
        elif entry.reason.startswith(("pass.", "rescale.ranks")):
            text = f"{count} operations {'removed' if entry.count >= 0 else 'added'}: {entry.message}"
        else:
            text = f"{count} {entry.message}"
        saved = f" (saves {bytes_text(entry.bytes_moved)} of memory traffic)" if entry.bytes_moved else ""
        print_info(f"{text}{saved} [{entry.reason}]")


def main() -> None:
    """Run ``hespas-convert``."""
    run_app(app)
