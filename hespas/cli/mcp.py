"""``hespas mcp``: public functions as tools of the Model Context Protocol, over standard input and output."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from math import isnan
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_origin

from hespas._version import __version__
from hespas.api.analysis import analyze
from hespas.api.checks import check
from hespas.api.comparison import compare
from hespas.api.conversion import convert
from hespas.api.estimation import estimate
from hespas.api.generators import llm_step
from hespas.api.listings import list_devices, list_formats, list_models, list_systems
from hespas.api.simulation import simulate
from hespas.api.summary import view
from hespas.api.validation import accuracy
from hespas.cli.command import LISTING, Call, accepted_type, command, file_access, is_column, listed
from hespas.estimators.registry import check_stated_estimator
from hespas.files.output import place_immediately
from hespas.graph.errors import HespasError, MissingExtraError, UsageError
from hespas.graph.hints import DeclaredOption, Option, options_of
from hespas.hardware import is_path
from hespas.report import Table

__all__ = ["ToolSettings", "mcp", "tool_functions"]

_ROWS = 20
"""Default number of rows of a table in an answer."""
_WITHOUT = frozenset({"astra_bin", "astra_timeout", "cluster", "jobs", "simulator"})
"""Options that run programs or other processes, which a tool does not offer."""
_LISTS: tuple[Callable[[], Table], ...] = (list_devices, list_systems, list_models, list_formats)
_FUNCTIONS: tuple[Callable[..., Any], ...] = (view, check, estimate, simulate, analyze, accuracy, compare)


class ToolSettings:
    """Files that tools may use: those in ``folders``, and new ones in ``output`` (None: tools write none)."""

    def __init__(self, folders: list[Path], output: Path | None) -> None:
        self.output = None if output is None else Path(os.path.realpath(output))
        readable = [Path(os.path.realpath(folder)) for folder in folders]
        self.folders = readable if self.output is None else [*readable, self.output]

    def readable(self, text: str) -> Path:
        """Return the path of a file or folder to read; a relative path is in the first folder that has it.

        Raises ``UsageError`` for a path outside of all folders.
        """
        paths = [Path(os.path.realpath(folder / text)) for folder in self.folders]
        path = next((path for path in paths if path.exists()), paths[0])
        if not any(path.is_relative_to(folder) for folder in self.folders):
            names = ", ".join(map(str, self.folders))
            raise UsageError(f"{text!r} is not in a folder of this server", hint=f"name a file in {names}")
        return path

    def writable(self, text: str) -> Path:
        """Return the path of a file or folder to write. Raises ``UsageError`` if it is not in ``output``."""
        if self.output is None:
            raise UsageError("this server writes no files", hint="start it with --write FOLDER")
        path = Path(os.path.realpath(self.output / text))
        if not path.is_relative_to(self.output):
            raise UsageError(f"{text!r} is not in {self.output}", hint="name a file in that folder")
        return path

    def values(self, options: Mapping[str, DeclaredOption], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a tool as values of its options, with checked paths and estimators.

        Raises ``UsageError`` for a path outside of the folders, ``BoundaryError`` for an estimator that runs
        a program or reads files.
        """
        values: dict[str, Any] = {}
        for name, declared in options.items():
            value = given.get(name)
            parts = listed(value)
            access, completes = file_access(declared), declared.option.completes
            if completes == "estimators":
                for text in parts:
                    check_stated_estimator(text, "request", name)
            elif access:
                checked_path = self.readable if access in {"reads", "stream"} else self.writable
                names = completes in {"devices", "systems", "models"}
                kind = accepted_type(declared)[0]
                parts = [text if names and not is_path(text) else kind(checked_path(text)) for text in parts]
            takes_list = isinstance(value, list) or is_column(declared)
            values[name] = None if value is None else parts if takes_list else parts[0]
        return values


def _argument_type(declared: DeclaredOption) -> Any:
    """Return the type of a tool's argument, from which its JSON schema follows."""
    kind, repeats = accepted_type(declared)
    kind = str if kind is Path or get_origin(kind) is tuple else kind
    argument: Any = GenericAlias(list, kind) if repeats and not is_column(declared) else kind
    return argument if declared.is_required else argument | None


def _answer(result: Any, call: Call, rows: int) -> dict[str, Any]:
    """Return the content of a tool's answer: the figures of the document, the first rows of the table, and
    one diagnostic of each code.
    """
    table = result if isinstance(result, Table) else result.table()
    shown = [
        {name: None if isinstance(value, float) and isnan(value) else value for name, value in row.items()}
        for row in table.head(rows).to_records()
    ]
    answer: dict[str, Any] = {}
    if not isinstance(result, Table):
        figures = {key: value for key, value in result.to_dict().items() if not isinstance(value, list)}
        answer = {"summary": result.headline(), "figures": figures}
    answer |= {"rows": shown, "rows_in_all": len(table)}
    counts = call.diagnostics.counts()
    first_of = {entry.code: entry for entry in reversed(list(call.diagnostics))}
    answer["diagnostics"] = [
        f"{first_of[code].severity.value}: {first_of[code].message} [{code}, {count} times]"
        for code, count in counts.items()
    ]
    return answer


def _tool(
    name: str, functions: tuple[Callable[..., Any], ...], settings: ToolSettings, run: Callable[[Call], Any]
) -> Callable[..., dict[str, Any]]:
    """Return the function of a tool: its arguments are the options of ``functions``, and ``rows``."""
    field: Any = import_module("pydantic").Field
    tool_error: Any = import_module("mcp.server.mcpserver.exceptions").ToolError
    options = {
        option_name: option
        for function in functions
        for option_name, option in options_of(function).items()
        if option_name not in _WITHOUT and (settings.output is not None or not _writes(option))
    }

    def tool(rows: int = _ROWS, **given: Any) -> dict[str, Any]:
        call = Call(None, options, {}, "")
        try:
            call = Call(None, options, settings.values(options, given), "")
            with place_immediately():
                return _answer(run(call), call, rows)
        except HespasError as error:
            raise tool_error(str(error)) from error

    parameters = [
        inspect.Parameter(
            option_name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.is_required else None,
            annotation=Annotated[_argument_type(option), field(description=option.option.help)],
        )
        for option_name, option in options.items()
    ]
    rows_type = Annotated[int, field(ge=0, le=1000, description="Number of table rows in the answer.")]
    parameters.append(
        inspect.Parameter("rows", inspect.Parameter.KEYWORD_ONLY, default=_ROWS, annotation=rows_type)
    )
    vars(tool)["__signature__"] = inspect.Signature(parameters, return_annotation=dict[str, Any])
    tool.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    tool.__annotations__["return"] = dict[str, Any]
    tool.__name__, tool.__doc__ = name, inspect.getdoc(functions[0])
    return tool


def _writes(declared: DeclaredOption) -> bool:
    return file_access(declared) in {"writes", "document", "folder"}


def tool_functions(settings: ToolSettings) -> list[Callable[..., dict[str, Any]]]:
    """Return the functions of all tools. ``convert`` and ``generate`` need a folder for output."""
    from hespas.api.generation import generate

    def of(function: Callable[..., Any]) -> Callable[[Call], Any]:
        return lambda call: function(**call.arguments(function))

    def listing(function: Callable[[], Table]) -> Callable[[Call], Any]:
        return lambda _: function()

    tools = [_tool(function.__name__, (function,), settings, of(function)) for function in _FUNCTIONS]
    tools += [_tool(function.__name__, (function,), settings, listing(function)) for function in _LISTS]
    if settings.output is not None:
        tools.append(_tool("convert", (convert,), settings, of(convert)))

    def generated(call: Call) -> Any:
        arguments = call.arguments(generate)
        arguments.setdefault("measure", arguments.get("destination") is None)
        return generate(llm_step(**call.arguments(llm_step)), **arguments)

    tools.append(_tool("generate_llm", (llm_step, generate), settings, generated))
    return tools


_Folders = Annotated[
    list[Path],
    Option(
        "Folders with the files that tools may read.", metavar="FOLDER...", is_argument=True, access="reads"
    ),
]
_Write = Annotated[
    Path | None,
    Option("Let tools write new files in this folder.", metavar="FOLDER", access="folder"),
]


@command(without=LISTING)
def mcp(call: Call, *, folders: _Folders, write: _Write = None) -> None:
    """Offer view, check, estimate, simulate, analyze, accuracy and others to a language model as tools.

    The server speaks the Model Context Protocol on standard input and output. Tools have the options of the
    commands as typed arguments. They read files in FOLDER only, run no programs, and write only with --write.

    hespas mcp traces
    """
    for folder in (*folders, *([] if write is None else [write])):
        if not folder.is_dir():
            raise UsageError("is not a folder", path=str(folder), hint="make it, or name another folder")
    try:
        server_type: Any = import_module("mcp.server.mcpserver").MCPServer
    except ImportError as error:
        raise MissingExtraError("hespas mcp", "mcp") from error
    server = server_type("hespas", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR")
    for function in tool_functions(ToolSettings(folders, write)):
        server.add_tool(function)
    server.run("stdio")


_INSTRUCTIONS = """Hespas estimates and simulates ML workloads. Times are in nanoseconds, sizes in bytes.
Start with `view` for a file, `simulate` for the time of a step on a device, `generate_llm` for a model that
is not in a file, and `list_devices` for the names of devices. Diagnostics report what was guessed or assumed.
"""
