"""Options that several commands share, each with its type, its help and its callback.

Options with ``expose_value=False`` are not passed to the command: their callbacks change a setting until
the command ends.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from hespas.api import lowering
from hespas.api.io import WriteSharding
from hespas.cli.terminal import set_verbosity
from hespas.converters import format as formats
from hespas.files import trust
from hespas.files.limits import INPUT_BYTES_VARIABLE
from hespas.files.trust import allowing_programs, check_limits, untrusted_limits
from hespas.graph.errors import UsageError

__all__ = [
    "COMPLETIONS",
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
    "Workload",
    "common_parameters",
    "device_names",
    "estimator_names",
    "format_names",
    "hardware_option",
    "parts_of",
    "system_names",
    "workload_format",
]

_MAX_EXTENT_DIGITS = 18
_MAX_SHARD_DIGITS = 9

INPUT = "Input"
"""Headings of ``--help`` that group options; options without a heading come first."""
DEVICE = "Device and estimate"
OUTPUT = "Output"


def _completions(incomplete: str, names: Iterable[str]) -> Sequence[str]:
    prefix = incomplete.casefold()
    return [name for name in names if name.casefold().startswith(prefix)]


def device_names(incomplete: str) -> Sequence[str]:
    """Complete the names of built-in devices for a shell, which completes paths itself."""
    from hespas import hardware

    return _completions(incomplete, hardware.device_names())


def system_names(incomplete: str) -> Sequence[str]:
    """Complete the names of built-in systems for a shell."""
    from hespas import hardware

    return _completions(incomplete, hardware.system_names())


def estimator_names(incomplete: str) -> Sequence[str]:
    """Complete the names of estimators for a shell, built-in ones first."""
    from hespas import estimators

    return _completions(incomplete, estimators.estimator_names())


def format_names(incomplete: str) -> Sequence[str]:
    """Complete the names of formats for a shell."""
    from hespas import converters

    return _completions(incomplete, converters.format_names())


COMPLETIONS = {
    "devices": device_names,
    "systems": system_names,
    "estimators": estimator_names,
    "formats": format_names,
}
"""Names that a shell completes -> the function that lists them."""


def _set_variable(context: typer.Context, name: str, text: str) -> None:
    """Set an environment variable, for this process and its children, until the command ends."""
    before = os.environ.get(name)
    os.environ[name] = text

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    context.call_on_close(restore)


def _raise_input_limits(context: typer.Context, max_bytes: int | None) -> None:
    if max_bytes is not None:
        _set_variable(context, INPUT_BYTES_VARIABLE, str(max_bytes))


def _distrust_inputs(context: typer.Context, untrusted: bool) -> None:
    if untrusted and untrusted_limits() is None:
        _set_variable(context, trust.UNTRUSTED_VARIABLE, "1")


def _set_untrusted_limits(context: typer.Context, values: list[str] | None) -> None:
    """Change limits of untrusted inputs until the command ends."""
    if not values:
        return
    if untrusted_limits() is None:
        raise typer.BadParameter("requires --untrusted, whose limits it changes")
    text = ",".join([os.environ[trust.UNTRUSTED_VARIABLE], *values])
    try:
        check_limits(text)
    except UsageError as error:
        raise typer.BadParameter(f"{error.message}; {error.hint}") from error
    _set_variable(context, trust.UNTRUSTED_VARIABLE, text)


def _allow_programs(context: typer.Context, allowed: bool) -> None:
    if allowed:
        context.with_resource(allowing_programs())


def _assuming(name: str) -> Callable[[typer.Context, Any], None]:
    """Return a callback that makes an assumption about inputs until the command ends."""

    def assume(context: typer.Context, value: Any) -> None:
        if value:
            context.with_resource(formats.assuming(**{name: value}))

    return assume


def _assume_dims(context: typer.Context, values: list[str] | None) -> None:
    dims: dict[str, int] = {}
    for value in values or ():
        name, _, extent = value.partition("=")
        is_extent = extent.isascii() and extent.isdigit() and len(extent) <= _MAX_EXTENT_DIGITS
        if not name.strip() or not is_extent:
            raise typer.BadParameter(f"{value!r}: expected NAME=N, such as b=128 or arg0.1=128")
        dims[name.strip()] = int(extent)
    if dims:
        context.with_resource(formats.assuming(dims=dims))


def parts_of(shard: str, cluster: str, *, only_classes: bool, resume: bool) -> WriteSharding:
    """Return how a large job is written.

    ``shard`` is empty or a text such as ``2/8``, the second of eight. Raises :class:`UsageError` for any
    other text.
    """
    if not shard:
        return WriteSharding(only_classes=only_classes, shard=None, resume=resume, cluster=cluster)
    index, slash, count = shard.partition("/")
    is_valid = slash and all(
        part.isascii() and part.isdigit() and len(part) <= _MAX_SHARD_DIGITS for part in (index, count)
    )
    if not is_valid:
        raise UsageError(
            f"invalid --shard {shard!r}: expected I/N", hint="give --shard 1/4 for the first of four"
        )
    return WriteSharding(
        only_classes=only_classes, shard=(int(index), int(count)), resume=resume, cluster=cluster
    )


def workload_format(destination: Path | None, target_format: str) -> str | None:
    """Return the format of a workload that is written to ``destination``: ``target_format`` if it is given.

    Otherwise a folder gets Chakra traces, and None means that the suffix of the file decides. Raises
    :class:`UsageError` for standard output.
    """
    if destination == Path("-"):
        raise UsageError(
            "--out -: a workload consists of files and cannot go to standard output",
            hint="name a folder or a file",
        )
    return target_format or ("chakra" if destination and not destination.suffix else None)


def hardware_option(help_text: str) -> Any:
    """Return the option for a device, with the given help."""
    return typer.Option(
        metavar="NAME|FILE", help=help_text, autocompletion=device_names, rich_help_panel=DEVICE
    )


Tokens = Annotated[
    float | None,
    typer.Option(
        "--tokens",
        metavar="N",
        help="Set tokens per step over all ranks, to report tokens/s.",
        rich_help_panel=DEVICE,
    ),
]
ModelFlops = Annotated[
    float | None,
    typer.Option(
        "--model-flops",
        metavar="N",
        help="Set model FLOPs per step over all ranks, to report MFU.",
        rich_help_panel=DEVICE,
    ),
]

SourceFormat = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FORMAT",
        help="Read the input as this format (default: detected).",
        autocompletion=format_names,
        rich_help_panel=INPUT,
    ),
]
NumDevices = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Set the number of ranks, for inputs that do not state it.",
        rich_help_panel=INPUT,
    ),
]
NumReplicas = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Set how many of --num-devices are replicas, for inputs that do not state it.",
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
        help="Set a symbolic dimension of a StableHLO program, by name or position (arg0.1=128); repeatable.",
        rich_help_panel=INPUT,
    ),
]
DefaultDtype = Annotated[
    str,
    typer.Option(
        "--default-dtype",
        metavar="TYPE",
        callback=_assuming("default_dtype"),
        expose_value=False,
        help="Set the element type of operations that state none: bf16, f32, ...",
        rich_help_panel=INPUT,
    ),
]
CommGroups = Annotated[
    Path | None,
    typer.Option(
        "--comm-groups",
        metavar="FILE",
        callback=_assuming("comm_groups"),
        expose_value=False,
        help="Read process groups of a trace from FILE (default: comm_group.json in its folder).",
        rich_help_panel=INPUT,
    ),
]
Capture = Annotated[
    list[Path] | None,
    typer.Option(
        "--capture",
        metavar="CAPTURE",
        help="Read CUDA graph captures from this PyTorch trace, or folder of traces; repeatable.",
        rich_help_panel=INPUT,
    ),
]
RunTimeUnit = Annotated[
    formats.RunTimeUnit,
    typer.Option(
        "--run-time-unit",
        metavar="us|ns",
        callback=_assuming("run_time_unit"),
        expose_value=False,
        help="Set the unit of run times in traces of old schemas (default: us).",
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
        callback=_raise_input_limits,
        expose_value=False,
        help="Accept inputs up to N bytes: raises the limits of size, memory and time (docs/formats.md).",
        rich_help_panel=INPUT,
    ),
]
Tables = Annotated[
    list[Path] | None,
    typer.Option(
        "--table",
        metavar="T",
        help="Read measured operations from a table (CSV, Parquet); repeatable.",
        rich_help_panel=INPUT,
    ),
]
Workload = Annotated[
    Path | None,
    typer.Option(
        metavar="W",
        help="Read the program that was profiled (default: operations in the profile).",
        rich_help_panel=INPUT,
    ),
]

Estimator = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Estimate durations with this estimator (see 'hespas estimators').",
        autocompletion=estimator_names,
        rich_help_panel=DEVICE,
    ),
]
Estimators = Annotated[
    list[str] | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help="Estimate durations with this estimator (see 'hespas estimators'); repeat to compare.",
        autocompletion=estimator_names,
        show_default=f"{lowering.STEP_ESTIMATOR}: by kind of workload",
        rich_help_panel=DEVICE,
    ),
]
AllowPrograms = Annotated[
    bool,
    typer.Option(
        "--allow-programs",
        callback=_allow_programs,
        expose_value=False,
        help="Allow input files to name estimators that run programs, execute the workload or read files.",
        rich_help_panel=DEVICE,
    ),
]
Granularity = Annotated[
    lowering.Granularity | None,
    typer.Option(
        help="Use one node per operation, elementwise chain, or region between collectives "
        "(default: fused if durations are estimated and no compiler has fused the program, else op).",
        show_default=False,
        rich_help_panel=DEVICE,
    ),
]
Missing = Annotated[
    lowering.Missing,
    typer.Option(
        help="Handle unknown durations and trip counts: warn, fail, or count as zero.", rich_help_panel=DEVICE
    ),
]

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write all results as JSON; - is standard output.",
        rich_help_panel=OUTPUT,
    ),
]
ListFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE|-]",
        help="Write the JSON of --json to this file (default: standard output).",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Write the list as JSON to standard output, or to the FILE that follows."),
]
Destination = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DST", help="Write the workload to DST: a folder of traces, one per rank, or a file."
    ),
]
DestinationFormat = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="Write DST in this format (default: by suffix).",
        autocompletion=format_names,
    ),
]
Jobs = Annotated[
    int, typer.Option(min=1, metavar="N", help="Write rank files with N threads.", rich_help_panel=OUTPUT)
]
OnlyClasses = Annotated[
    bool,
    typer.Option(
        "--only-classes",
        help="Write one trace per distinct rank, and rank_map.json (rank to trace).",
        rich_help_panel=OUTPUT,
    ),
]
Shard = Annotated[
    str,
    typer.Option(
        metavar="I/N",
        help="Write only share I (from 1) of N shares of the ranks, for batch jobs.",
        rich_help_panel=OUTPUT,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue an interrupted run of the same command; keep written files if interrupted again.",
        rich_help_panel=OUTPUT,
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Write with the workers of this Dask scheduler (tcp://...), which must share the folder of DST.",
        rich_help_panel=OUTPUT,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing output files.", rich_help_panel=OUTPUT)
]
Recover = Annotated[
    bool,
    typer.Option(
        "--recover",
        help="Recover the intact part of a truncated or damaged input.",
        rich_help_panel=INPUT,
    ),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show a progress bar (default: if stderr is a terminal).",
        rich_help_panel=OUTPUT,
    ),
]
Loudness = Annotated[
    bool | None,
    typer.Option(
        "--verbose/--quiet",
        "-v/-q",
        callback=set_verbosity,
        expose_value=False,
        show_default=False,
        help="Print more detail; or print only results and errors.",
        rich_help_panel=OUTPUT,
    ),
]
Untrusted = Annotated[
    bool,
    typer.Option(
        "--untrusted",
        callback=_distrust_inputs,
        expose_value=False,
        is_eager=True,
        help="Limit CPU time, memory and ranks, and run no external programs, for untrusted inputs "
        "(SECURITY.md).",
        rich_help_panel=INPUT,
    ),
]
UntrustedLimit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N",
        callback=_set_untrusted_limits,
        expose_value=False,
        help="Change a limit of --untrusted: cpu_s, memory_bytes or ranks; repeatable.",
        rich_help_panel=INPUT,
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Print the traceback of an error.", rich_help_panel=OUTPUT)
]


def _common(
    json_file: Json = None,
    overwrite: Overwrite = False,
    progress: Progress = None,
    max_input_bytes: MaxInputBytes = None,
    allow_programs: AllowPrograms = False,
    loudness: Loudness = None,
    untrusted: Untrusted = False,
    limit: UntrustedLimit = None,
    debug: Debug = False,
) -> None:
    """Declare the options of all commands."""


@cache
def common_parameters() -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the options of all commands."""
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(_common, eval_str=True).parameters.items()
    }
