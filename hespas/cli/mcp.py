"""``hespas mcp``: public functions as tools of the Model Context Protocol, over standard input and output."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from math import isfinite
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
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
from hespas.api.planning import plan
from hespas.api.simulation import simulate
from hespas.api.summary import view
from hespas.api.validation import accuracy
from hespas.cli.command import LISTING, Call, accepted_type, command, file_access, is_column, listed
from hespas.cli.session import reported_error
from hespas.estimators.registry import check_stated_estimator
from hespas.files.limits import command_budget
from hespas.files.output import place_immediately
from hespas.files.trust import confining_links
from hespas.graph.errors import BoundaryError, HespasError, MissingExtraError, UsageError, clipped
from hespas.graph.hints import REQUIRED, DeclaredOption, Option, options_of
from hespas.hardware import is_path
from hespas.report import Table

__all__ = ["Requests", "ToolSettings", "mcp", "tool_server"]

_ROWS = 20
"""Default number of rows of a table in an answer."""
_WITHOUT = frozenset({"astra_bin", "astra_timeout", "cluster", "jobs", "simulator"})
"""Options that run programs or other processes, which a tool does not offer."""
_LISTS: tuple[Callable[[], Table], ...] = (list_devices, list_systems, list_models, list_formats)
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    view,
    check,
    estimate,
    simulate,
    plan,
    analyze,
    accuracy,
    compare,
)


class Requests:
    """Requests of a server. They run on the main thread one after another, because only the main thread has
    limits of time and memory, and receives signals.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def run(self, work: Callable[[], Any]) -> Any:
        """Return the result of ``work`` on the main thread. The threads of the server call this."""
        result: Future[Any] = Future()
        self._waiting.put((result, work))
        return result.result()

    def serve(self, run_server: Callable[[], None]) -> None:
        """Run a server on another thread and its requests on this one, until the server ends.

        An interrupt ends both. The thread of the server may then wait for its input forever.
        """
        ended: Future[None] = Future()

        def run() -> None:
            try:
                run_server()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            self._waiting.put(None)

        Thread(target=run, daemon=True).start()
        while request := self._waiting.get():
            result, work = request
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)
        ended.result()


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
        paths = [_real_path(folder, text) for folder in self.folders]
        path = next(filter(os.path.exists, paths), paths[0])
        if not any(path.is_relative_to(folder) for folder in self.folders):
            names = ", ".join(map(str, self.folders))
            raise UsageError(f"{text!r} is not in a folder of this server", hint=f"name a file in {names}")
        return path

    def writable(self, text: str) -> Path:
        """Return the path of a file or folder to write. Raises ``UsageError`` if it is not in ``output``."""
        if self.output is None:
            raise UsageError("this server writes no files", hint="start it with --write FOLDER")
        path = _real_path(self.output, text)
        if not path.is_relative_to(self.output):
            raise UsageError(f"{text!r} is not in {self.output}", hint="name a file in that folder")
        return path

    def values(self, options: Mapping[str, DeclaredOption], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a tool as values of its options, with checked paths and estimators.

        An empty text or list is an option that is not given.

        Raises ``UsageError`` for a path outside of the folders, for an estimator that runs a program or reads
        files, and for a missing value.
        """
        values: dict[str, Any] = {}
        for name, declared in options.items():
            value = given.get(name)
            parts = listed(value)
            if not parts and declared.default is REQUIRED:
                raise UsageError(f"`{name}` is empty", hint="give a value")
            access, completes = file_access(declared), declared.option.completes
            if completes == "estimators":
                for text in parts:
                    try:
                        check_stated_estimator(text, "", "")
                    except BoundaryError as error:
                        raise UsageError(
                            f"estimator {clipped(text)!r} runs programs or reads files, which tools may not",
                            hint="use another one, such as roofline, or leave `estimator` out",
                        ) from error
            elif access:
                checked_path = self.readable if access in {"reads", "stream"} else self.writable
                names = completes in {"devices", "systems", "models"}
                kind = accepted_type(declared)[0]
                parts = [text if names and not is_path(text) else kind(checked_path(text)) for text in parts]
            takes_list = isinstance(value, list) or is_column(declared)
            values[name] = None if not parts else parts if takes_list else parts[0]
        return values


def _real_path(folder: Path, text: str) -> Path:
    """Return the path of a file or folder in ``folder``, with links resolved.

    Raises ``UsageError`` for a text that is not a path.
    """
    if not text or "\0" in text:
        raise UsageError(f"{clipped(text)!r} is not a path", hint="name a file or folder")
    return Path(os.path.realpath(folder / text))


def _argument_type(declared: DeclaredOption) -> Any:
    """Return the type of a tool's argument, from which its JSON schema follows."""
    kind, repeats = accepted_type(declared)
    kind = str if kind is Path or get_origin(kind) is tuple else kind
    argument: Any = GenericAlias(list, kind) if repeats and not is_column(declared) else kind
    return argument if declared.default is REQUIRED else argument | None


def _answer(result: Any, call: Call, rows: int) -> dict[str, Any]:
    """Return the content of a tool's answer: the figures of the document, the first rows of the table, and
    one diagnostic of each code.
    """
    table = result if isinstance(result, Table) else result.table()
    shown = [
        {
            name: None if isinstance(value, float) and not isfinite(value) else value
            for name, value in row.items()
        }
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


def _tool_function(
    name: str,
    functions: tuple[Callable[..., Any], ...],
    settings: ToolSettings,
    requests: Requests,
    run: Callable[[Call], Any],
) -> Callable[..., dict[str, Any]]:
    """Return the function of a tool: its arguments are the options of ``functions``, and ``rows``."""
    field: Any = import_module("pydantic").Field
    tool_error: Any = import_module("mcp.server.mcpserver.exceptions").ToolError
    options = {
        option_name: option
        for function in functions
        for option_name, option in options_of(function).items()
        if option_name not in _WITHOUT
        and (settings.output is not None or file_access(option) not in {"writes", "document", "folder"})
    }

    def tool(rows: int = _ROWS, **given: Any) -> Any:
        def work() -> dict[str, Any]:
            call = Call(None, options, settings.values(options, given), "")
            with command_budget(used_s=0.0), confining_links(settings.folders), place_immediately():
                return _answer(run(call), call, rows)

        try:
            return requests.run(work)
        except Exception as error:
            reported = reported_error(error, reads=settings.folders, writes=[settings.output])
            bug = f"internal error: {type(error).__name__}: {clipped(str(error))}"
            raise tool_error(str(reported) if isinstance(reported, HespasError) else bug) from error

    parameters = [
        inspect.Parameter(
            option_name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is REQUIRED else None,
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


def _tool_functions(settings: ToolSettings, requests: Requests) -> list[Callable[..., dict[str, Any]]]:
    """Return the functions of all tools. ``convert`` needs a folder for output."""
    from hespas.api.generation import generate

    def tool_of(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
        def run(call: Call) -> Any:
            return function(**call.arguments(function))

        return _tool_function(function.__name__, (function,), settings, requests, run)

    writers = () if settings.output is None else (convert,)
    tools = [tool_of(function) for function in (*_FUNCTIONS, *_LISTS, *writers)]

    def generated(call: Call) -> Any:
        arguments = call.arguments(generate)
        arguments.setdefault("measure", arguments.get("destination") is None)
        return generate(llm_step(**call.arguments(llm_step)), **arguments)

    tools.append(_tool_function("generate_llm", (llm_step, generate), settings, requests, generated))
    return tools


def tool_server(settings: ToolSettings, requests: Requests) -> Any:
    """Return a server with all tools. Raises ``MissingExtraError`` if its package is not installed."""
    try:
        server_type: Any = import_module("mcp.server.mcpserver").MCPServer
        tool_type: Any = import_module("mcp.server.mcpserver.tools").Tool
    except ImportError as error:
        raise MissingExtraError("hespas mcp", "mcp") from error
    tools = [tool_type.from_function(function) for function in _tool_functions(settings, requests)]
    for tool in tools:
        arguments = tool.fn_metadata.arg_model
        arguments.model_config["extra"] = "forbid"  # by default, unknown arguments are ignored
        arguments.model_rebuild(force=True)
        tool.parameters = arguments.model_json_schema(by_alias=True)
    return server_type(
        "hespas", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR", tools=tools
    )


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


@command(without=(*LISTING, "overwrite", "open_results"), is_server=True)
def mcp(call: Call, *, folders: _Folders, write: _Write = None) -> None:
    """Offer view, check, estimate, simulate, analyze, accuracy and others to a language model as tools.

    The server speaks the Model Context Protocol on standard input and output. Tools have the options of the
    commands as typed arguments. They read files in FOLDER only, run no programs, and write only with --write.
    Calls run one after another.

    hespas mcp traces
    """
    for folder in (*folders, *([] if write is None else [write])):
        if not folder.is_dir():
            raise UsageError("is not a folder", path=str(folder), hint="make it, or name another folder")
    requests = Requests()
    server = tool_server(ToolSettings(folders, write), requests)
    requests.serve(lambda: server.run("stdio"))


_INSTRUCTIONS = """Hespas estimates and simulates ML workloads. Times are in nanoseconds, sizes in bytes.
Start with `view` for a file, `simulate` for the time of a step on a device, `generate_llm` for a model that
is not in a file, `plan` for its best layout on a cluster, and `list_devices` for the names of devices.
Diagnostics report what was guessed or assumed.
"""
