"""Options that several commands have, each with its type, its words and what it sets.

Those that a signature does not pass on (``expose_value=False``) hold until the command ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hespas.api import preparation
from hespas.api.parts import Parts
from hespas.cli.session import set_loudness, version
from hespas.converters import format as formats
from hespas.files import trust
from hespas.files.streams import VARIABLE
from hespas.files.trust import allowing_programs, check_limits, untrusted_limits
from hespas.graph.errors import UsageError

__all__ = [
    "DEVICE",
    "INPUT",
    "OUTPUT",
    "AllowPrograms",
    "AsJson",
    "Capture",
    "Cluster",
    "CommGroups",
    "Debug",
    "DefaultDtype",
    "Destination",
    "DestinationFormat",
    "Dim",
    "Estimator",
    "Estimators",
    "Granularity",
    "Jobs",
    "Json",
    "ListFile",
    "Loudness",
    "MaxInputBytes",
    "Missing",
    "ModelFlops",
    "NumDevices",
    "NumReplicas",
    "OnlyClasses",
    "Overwrite",
    "Progress",
    "Recover",
    "Resume",
    "RunTimeUnit",
    "Shard",
    "SourceFormat",
    "Tables",
    "Tokens",
    "Untrusted",
    "UntrustedLimit",
    "Version",
    "Workload",
    "device_names",
    "estimator_names",
    "format_names",
    "hardware_option",
    "parts_of",
    "system_names",
    "workload_format",
]

_MAX_EXTENT_DIGITS = 18

# Under which of these headings --help lists an option; those without stand first.

INPUT = "Input"
DEVICE = "Device and estimate"
OUTPUT = "Output"


def _beginning(incomplete: str, names: Iterable[str]) -> Sequence[str]:
    wanted = incomplete.casefold()
    return [name for name in names if name.casefold().startswith(wanted)]


def device_names(incomplete: str) -> Sequence[str]:
    """What a shell offers: the devices that ship with the package; a path is the shell's own business."""
    from hespas import hardware

    return _beginning(incomplete, hardware.device_names())


def system_names(incomplete: str) -> Sequence[str]:
    """What a shell offers: the systems that ship with the package."""
    from hespas import hardware

    return _beginning(incomplete, hardware.system_names())


def estimator_names(incomplete: str) -> Sequence[str]:
    """What a shell offers: the estimators, built-in first."""
    from hespas import estimators

    return _beginning(incomplete, estimators.estimator_names())


def format_names(incomplete: str) -> Sequence[str]:
    """What a shell offers: the formats."""
    from hespas import converters

    return _beginning(incomplete, converters.format_names())


def _trust(context: typer.Context, number: int | None) -> None:
    """Raise the limits on inputs, of this process and its children, until the command ends."""
    if number is not None:
        _set_variable(context, VARIABLE, str(number))


def _distrust(context: typer.Context, untrusted: bool) -> None:
    """Treat inputs as untrusted, in this process and its children, until the command ends."""
    if untrusted and untrusted_limits() is None:
        _set_variable(context, trust.VARIABLE, "1")


def _limit(context: typer.Context, stated: list[str] | None) -> None:
    """Change limits of untrusted inputs until the command ends."""
    if not stated:
        return
    if untrusted_limits() is None:
        raise typer.BadParameter("is a limit of untrusted inputs: add --untrusted")
    text = ",".join([os.environ[trust.VARIABLE], *stated])
    try:
        check_limits(text)
    except UsageError as error:
        raise typer.BadParameter(f"{error.message}; {error.hint}") from error
    _set_variable(context, trust.VARIABLE, text)


def _set_variable(context: typer.Context, name: str, text: str) -> None:
    before = os.environ.get(name)
    os.environ[name] = text

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    context.call_on_close(restore)


def parts_of(shard: str, cluster: str, *, only_classes: bool, resume: bool) -> Parts:
    """How a large job is written; ``shard`` is a text such as ``2/8``, the second of eight. Raises
    :class:`UsageError` for another text.
    """
    return Parts(only_classes=only_classes, shard=_parse_shard(shard), resume=resume, cluster=cluster)


def _parse_shard(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    number, slash, shares = text.partition("/")
    numbers = [part for part in (number, shares) if part.isascii() and part.isdigit() and len(part) < 10]
    if not slash or len(numbers) < 2:
        raise UsageError(f"--shard {text!r} is no share of several", hint="the first of four: --shard 1/4")
    return int(number), int(shares)


def _allow_programs(context: typer.Context, allowed: bool) -> None:
    if allowed:
        context.with_resource(allowing_programs())


def _assume_dtype(context: typer.Context, name: str) -> None:
    if name:
        context.with_resource(formats.assuming(default_dtype=name))


def _assume_groups(context: typer.Context, path: Path | None) -> None:
    if path is not None:
        context.with_resource(formats.assuming(comm_groups=path))


def _assume_unit(context: typer.Context, unit: formats.RunTimeUnit) -> None:
    if unit:
        context.with_resource(formats.assuming(run_time_unit=unit))


def _assume_dims(context: typer.Context, stated: list[str] | None) -> None:
    dims: dict[str, int] = {}
    for each in stated or ():
        name, _, extent = each.partition("=")
        is_extent = extent.isascii() and extent.isdigit() and len(extent) <= _MAX_EXTENT_DIGITS
        if not name.strip() or not is_extent:
            raise typer.BadParameter(f"{each!r}: write NAME=N, such as b=128 or arg0.1=128")
        dims[name.strip()] = int(extent)
    if dims:
        context.with_resource(formats.assuming(dims=dims))


def hardware_option(what: str) -> Any:
    """The option of a device; ``what`` it is for."""
    return typer.Option(metavar="NAME|FILE", help=what, autocompletion=device_names, rich_help_panel=DEVICE)


Tokens = Annotated[
    float | None,
    typer.Option(
        "--tokens",
        metavar="N",
        help="Tokens of a step on all ranks, for tokens/s.",
        rich_help_panel=DEVICE,
    ),
]
ModelFlops = Annotated[
    float | None,
    typer.Option(
        "--model-flops",
        metavar="N",
        help="Model FLOPs of a step on all ranks, for MFU.",
        rich_help_panel=DEVICE,
    ),
]

# What is read, and as what

SourceFormat = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FORMAT",
        help="Read the input as this format.",
        autocompletion=format_names,
        rich_help_panel=INPUT,
    ),
]
NumDevices = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of ranks where the input does not say.", rich_help_panel=INPUT
    ),
]
NumReplicas = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="How many of --num-devices are replicas, where the input does not say.",
        rich_help_panel=INPUT,
    ),
]
Dim = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=N",
        callback=_assume_dims,
        expose_value=False,
        help="Extent of a symbolic dimension of a StableHLO program, by name or place (arg0.1=128); "
        "repeatable.",
        rich_help_panel=INPUT,
    ),
]
DefaultDtype = Annotated[
    str,
    typer.Option(
        "--default-dtype",
        metavar="TYPE",
        callback=_assume_dtype,
        expose_value=False,
        help="Element type of operations that state none, as in other tools' traces: bf16, f32, ...",
        rich_help_panel=INPUT,
    ),
]
CommGroups = Annotated[
    Path | None,
    typer.Option(
        "--comm-groups",
        metavar="FILE",
        callback=_assume_groups,
        expose_value=False,
        help="The process groups of a trace (default: comm_group.json beside it).",
        rich_help_panel=INPUT,
    ),
]
Capture = Annotated[
    list[Path] | None,
    typer.Option(
        "--capture",
        metavar="CAPTURE",
        help="The trace in which graphs were captured that a trace of PyTorch replays, or a folder of such; "
        "repeatable.",
        rich_help_panel=INPUT,
    ),
]
RunTimeUnit = Annotated[
    formats.RunTimeUnit,
    typer.Option(
        "--run-time-unit",
        metavar="us|ns",
        callback=_assume_unit,
        expose_value=False,
        help="Unit of run times in traces of old schemas, which name none (default: us).",
        rich_help_panel=INPUT,
    ),
]
MaxInputBytes = Annotated[
    int | None,
    typer.Option(
        "--max-input-bytes",
        metavar="N",
        min=1,
        max=10**18 - 1,
        callback=_trust,
        expose_value=False,
        help="Trust inputs of N bytes: raises the limits on size, memory and time (docs/formats.md).",
        rich_help_panel=INPUT,
    ),
]
Tables = Annotated[
    list[Path] | None,
    typer.Option(
        "--table",
        metavar="T",
        help="A table of measured operations (CSV, Parquet); repeatable.",
        rich_help_panel=INPUT,
    ),
]
Workload = Annotated[
    Path | None,
    typer.Option(
        metavar="W", help="The program that ran; without it, what the profile holds.", rich_help_panel=INPUT
    ),
]

# How it is estimated

Estimator = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which estimator says how long: see 'hespas estimators'.",
        autocompletion=estimator_names,
        rich_help_panel=DEVICE,
    ),
]
Estimators = Annotated[
    list[str] | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help="Which estimator says how long: see 'hespas estimators'; repeated: a column each.",
        autocompletion=estimator_names,
        show_default=f"{preparation.STEP_ESTIMATOR}: by kind of workload",
        rich_help_panel=DEVICE,
    ),
]
AllowPrograms = Annotated[
    bool,
    typer.Option(
        "--allow-programs",
        callback=_allow_programs,
        expose_value=False,
        help="Let input files name estimators that run programs, execute the workload or read other files.",
        rich_help_panel=DEVICE,
    ),
]
Granularity = Annotated[
    preparation.Granularity | None,
    typer.Option(
        help="One node per operation, per elementwise chain, or per region between collectives (default: "
        "fused where no compiler has fused the program yet and it gets times).",
        show_default=False,
        rich_help_panel=DEVICE,
    ),
]
Missing = Annotated[
    preparation.Missing,
    typer.Option(help="What to do where a time or a trip count is not known.", rich_help_panel=DEVICE),
]

# What is written and told

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write all figures as JSON; - is standard output.",
        rich_help_panel=OUTPUT,
    ),
]
ListFile = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE|-]", help="With --json: where to write it.", show_default=False),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="The list as JSON, to standard output or a FILE behind it.")
]
Destination = Annotated[
    Path | None,
    typer.Option("--out", metavar="DST", help="Write the workload: traces of all ranks, or a file."),
]
DestinationFormat = Annotated[
    str,
    typer.Option("--to", metavar="FORMAT", help="Write DST in this format.", autocompletion=format_names),
]
Jobs = Annotated[
    int, typer.Option(min=1, metavar="N", help="Threads for writing rank files.", rich_help_panel=OUTPUT)
]
OnlyClasses = Annotated[
    bool,
    typer.Option(
        "--only-classes",
        help="Write one trace per class of ranks, and rank_map.json, which says for whom.",
        rich_help_panel=OUTPUT,
    ),
]
Shard = Annotated[
    str,
    typer.Option(
        metavar="I/N",
        help="Write only the I-th (from 1) of N shares of the ranks: one process of a batch job each.",
        rich_help_panel=OUTPUT,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where the same command was interrupted; keep what is written if this one is.",
        rich_help_panel=OUTPUT,
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Write on the workers of this dask scheduler (tcp://...), which share the folder of DST.",
        rich_help_panel=OUTPUT,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace files that the options name.", rich_help_panel=OUTPUT)
]
Recover = Annotated[
    bool,
    typer.Option(
        "--recover",
        help="Keep what is whole of an input that was cut off or is damaged.",
        rich_help_panel=INPUT,
    ),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show a progress bar on long work (default: when the terminal can).",
        rich_help_panel=OUTPUT,
    ),
]
Loudness = Annotated[
    bool | None,
    typer.Option(
        "--verbose/--quiet",
        "-v/-q",
        callback=set_loudness,
        expose_value=False,
        show_default=False,
        help="Also tell what hardly anybody misses; or only results and errors.",
        rich_help_panel=OUTPUT,
    ),
]
Untrusted = Annotated[
    bool,
    typer.Option(
        "--untrusted",
        callback=_distrust,
        expose_value=False,
        is_eager=True,
        help="Limit processor time, memory and ranks, and run no programs of others: for inputs of strangers "
        "(SECURITY.md).",
        rich_help_panel=INPUT,
    ),
]
UntrustedLimit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N",
        callback=_limit,
        expose_value=False,
        help="Change a limit of --untrusted: cpu_s, memory_bytes or ranks; repeatable.",
        rich_help_panel=INPUT,
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)
]
Version = Annotated[
    bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
]


def workload_format(destination: Path | None, stated: str) -> str | None:
    """The format of a workload that is made: as stated, traces where a folder is named, else as the name of
    the file says. Raises :class:`UsageError` for standard output.
    """
    if destination == Path("-"):
        raise UsageError("--out -: a workload is files, not one stream", hint="name a folder or a file")
    return stated or ("chakra" if destination and not destination.suffix else None)
