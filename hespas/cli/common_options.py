"""Options of all commands."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from hespas.cli.terminal import set_verbosity
from hespas.files import trust
from hespas.files.limits import INPUT_BYTES_VARIABLE
from hespas.files.trust import allowing_programs, check_limits, untrusted_limits
from hespas.graph.errors import UsageError
from hespas.graph.hints import DEVICE, INPUT, OUTPUT

__all__ = ["common_parameters"]


def _set_variable(context: typer.Context, name: str, text: str) -> None:
    """Set an environment variable for this process and its children, until the command ends."""
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


_MaxInputBytes = Annotated[
    int | None,
    typer.Option(
        "--max-input-bytes",
        metavar="N",
        min=1,
        max=10**18 - 1,
        callback=_raise_input_limits,
        expose_value=False,
        help="Accept inputs up to N bytes: raises the limits of size, memory and time "
        "(docs/reference/limits.md).",
        rich_help_panel=INPUT,
    ),
]
_AllowPrograms = Annotated[
    bool,
    typer.Option(
        "--allow-programs",
        callback=_allow_programs,
        expose_value=False,
        help="Allow input files to name estimators that run programs, execute the workload or read files.",
        rich_help_panel=DEVICE,
    ),
]
_Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write all results as JSON; - is standard output.",
        rich_help_panel=OUTPUT,
    ),
]
_Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE|-",
        help="Write a page with charts and tables, which loads nothing; - is standard output.",
        rich_help_panel=OUTPUT,
    ),
]
_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing output files.", rich_help_panel=OUTPUT)
]
_Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show a progress bar (default: if stderr is a terminal).",
        rich_help_panel=OUTPUT,
    ),
]
_Loudness = Annotated[
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
_Untrusted = Annotated[
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
_UntrustedLimit = Annotated[
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
_Open = Annotated[
    bool,
    typer.Option(
        "--open",
        help="Open written pages in the browser, and timelines in the Perfetto UI.",
        rich_help_panel=OUTPUT,
    ),
]
_Debug = Annotated[
    bool, typer.Option("--debug", help="Print the traceback of an error.", rich_help_panel=OUTPUT)
]


def _common(
    json_file: _Json = None,
    html_file: _Html = None,
    overwrite: _Overwrite = False,
    progress: _Progress = None,
    max_input_bytes: _MaxInputBytes = None,
    allow_programs: _AllowPrograms = False,
    loudness: _Loudness = None,
    open_results: _Open = False,
    untrusted: _Untrusted = False,
    limit: _UntrustedLimit = None,
    debug: _Debug = False,
) -> None:
    """Declare the options of all commands."""


@cache
def common_parameters() -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the options of all commands."""
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(_common, eval_str=True).parameters.items()
    }
