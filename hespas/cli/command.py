"""Commands made of the options that public functions declare: see :mod:`hespas.graph.hints`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import typer

from hespas.cli.common_options import common_parameters
from hespas.cli.completions import COMPLETIONS
from hespas.cli.destinations import check_apart, check_reports, estimator_files, hardware_files, report_folder
from hespas.cli.entry import Version
from hespas.cli.session import command_line
from hespas.cli.terminal import flagged, flags_of_command, progress_bar
from hespas.files.limits import limits
from hespas.files.output import check_report_files
from hespas.files.streams import STANDARD_STREAM, read_document
from hespas.files.user_folders import HARDWARE_VARIABLE, default_hardware
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import (
    REQUIRED,
    Access,
    AtLeast,
    AtMost,
    DeclaredOption,
    check_value,
    members_of,
    options_of,
    parameters_of,
)
from hespas.graph.progress import Progress

if TYPE_CHECKING:
    from hespas.api.documents import Result

__all__ = [
    "LISTING",
    "Call",
    "accepted_type",
    "command",
    "file_access",
    "is_column",
    "listed",
]

LISTING = ("json_file", "max_input_bytes", "loudness")
"""Options of all commands that a command without inputs does not have."""
_Result = TypeVar("_Result")
_Handler = Callable[..., None]
_EnumOf: Any = StrEnum
_ABSENT: tuple[object, ...] = (None, "", [])
"""Values of options that are not given; numbers and switches always have a value."""


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a command. ``texts`` has the values of all options as typed. ``call[name]`` is the value of
    an option, converted for the Python interface. ``context`` is None for a tool without a command line.
    """

    context: typer.Context | None
    options: Mapping[str, DeclaredOption]
    texts: Mapping[str, Any]
    label: str
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option, or its default if it is not given. If the option has no default, an
        empty text is a value. Raises ``UsageError`` for a text that cannot be converted.
        """
        declared, value = self.options[name], self.texts[name]
        if value in _ABSENT:
            return (value if value == "" else None) if declared.default is REQUIRED else declared.default
        if declared.option.parse is not None:
            return declared.option.parse(value)
        return value[0] if is_column(declared) else value

    @property
    def json_file(self) -> Path | None:
        """Return the file of ``--json``."""
        return self.texts.get("json_file")

    @property
    def html_file(self) -> Path | None:
        """Return the file of ``--html``."""
        return self.texts.get("html_file")

    @property
    def overwrite(self) -> bool:
        """Return True if existing files may be replaced."""
        return bool(self.texts.get("overwrite"))

    @property
    def subject(self) -> str:
        """Return the inputs that messages name: all arguments, or the first file of an option."""
        stated: list[object] = []
        files: list[Path] = []
        for name, declared in self.options.items():
            values = listed(self.texts[name])
            first: object = values[0] if values else None
            if declared.option.is_argument and declared.option.access != "writes":
                stated += values
            elif isinstance(first, Path) and file_access(declared) == "reads":
                files.append(first)
        return ", ".join(map(str, stated or files[:1]))

    def several(self, name: str) -> list[Any]:
        """Return all values of a repeatable option; its default if it is not given."""
        value = self.texts[name]
        if value in _ABSENT:
            return [] if self[name] in _ABSENT or self[name] == () else [self[name]]
        return listed(value)

    def columns(self) -> dict[str, list[Any]]:
        """Return the options that are given several times, each with its values, to compare them in
        columns.
        """
        compared = (name for name, declared in self.options.items() if is_column(declared))
        return {name: values for name in compared if len(values := self.several(name)) > 1}

    def is_written(self, name: str) -> bool:
        """Return True if the option was typed on the command line, not taken from its default."""
        source = None if self.context is None else self.context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    def spelling(self, name: str) -> str:
        """Return the spelling of an option that the user wrote: ``--no-launches`` if a switch is off."""
        assert self.context is not None
        parameter = next(each for each in self.context.command.params if each.name == name)
        is_off = self.context.params.get(name) is False and parameter.secondary_opts
        return (parameter.secondary_opts if is_off else parameter.opts)[0]

    def paths(self, access: Access) -> list[Path | str]:
        """Return the values of the options whose files are used in the given way: read or written."""
        used = (name for name, declared in self.options.items() if file_access(declared) == access)
        return [value for name in used for value in listed(self.texts[name])]

    def documents(self) -> dict[str, Path | None]:
        """Return the documents that the command writes, by option."""
        documents: dict[str, Path | None] = {
            declared.flag: self.texts[name]
            for name, declared in self.options.items()
            if file_access(declared) == "document"
        }
        if "json_file" not in self.options:
            documents["--json"] = self.json_file
        return documents | {"--html": self.html_file}

    def files(self, *accesses: Access) -> dict[str, list[Path]]:
        """Return the files that the command reads or writes besides documents, by option."""
        files: dict[str, list[Path]] = {}
        for access in accesses or ("reads", "stream", "writes"):
            for name, declared in self.options.items():
                texts = [str(text) for text in listed(self.texts[name])]
                if file_access(declared) != access or not texts:
                    continue
                if declared.option.completes == "estimators":
                    found = estimator_files(*texts)
                elif declared.option.completes in {"devices", "systems"}:
                    found = hardware_files(*texts)
                else:
                    found = [Path(text) for text in texts]
                files.setdefault(declared.option.label or declared.flag, []).extend(found)
        return files

    def check_outputs(self) -> None:
        """Raise an error, before any work, for a document that cannot be written or would replace a file."""
        check_reports(self.documents(), self.files(), overwrite=self.overwrite)

    def check_report(self, names: Sequence[str], check: Callable[..., None] = check_report_files) -> None:
        """Raise an error, before any work, for a report folder that cannot be written, or in which a file
        would be replaced. ``check`` raises the errors of writing files with these names into a folder.
        """
        for folder in map(Path, self.paths("folder")):
            for name in names:
                check_apart("--report", folder / name, self.files())
            if self.json_file:
                check_apart("--json", self.json_file, {"--report": [folder / name for name in names]})
            check(folder, names, overwrite=self.overwrite)

    def arguments(self, function: Callable[..., object], progress: Progress | None = None) -> dict[str, Any]:
        """Return the keyword arguments for a function of :mod:`hespas.api` from the options that are
        given.
        """
        known = parameters_of(function)
        arguments: dict[str, Any] = {"diagnostics": self.diagnostics, "overwrite": self.overwrite}
        arguments = {name: value for name, value in arguments.items() if name in known}
        if "progress" in known:
            arguments["progress"] = progress
        classes: dict[str, tuple[type, dict[str, Any]]] = {}
        for name, declared in options_of(function).items():
            keywords = arguments
            if declared.kind is not None:
                _, keywords = classes.setdefault(declared.parameter, (declared.kind, {}))
            value = self.texts.get(name)
            if value not in _ABSENT or (value == "" and declared.default is REQUIRED):
                keywords[name] = self[name]
        for parameter, (kind, keywords) in classes.items():
            if "progress" in parameters_of(kind):
                keywords["progress"] = progress
            arguments[parameter] = kind(**keywords)
        return arguments

    def run(self, function: Callable[..., _Result], **changes: Any) -> _Result:
        """Check the outputs, then call a function of :mod:`hespas.api` with the options, while a progress bar
        is drawn.
        """
        self.check_outputs()
        with progress_bar(self.label, self.texts.get("progress")) as callback:
            return function(**self.arguments(function, callback) | changes)

    def write_json(self, document: object) -> None:
        """Write the document of ``--json``, if it is requested."""
        if self.json_file:
            from hespas.api.documents import write_json

            write_json(document, self.json_file, overwrite=self.overwrite)

    def write_html(self, result: Result) -> None:
        """Write the page of ``--html``, if it is requested."""
        if self.html_file:
            from hespas.api.documents import write_json

            page = result.to_html().encode("utf-8", "replace")
            write_json(page, self.html_file, overwrite=self.overwrite)


def command(
    *functions: Callable[..., object],
    progress: str = "",
    without: Sequence[str] = (),
    panels: Sequence[str] = (),
    has_version: bool = False,
    has_page: bool = False,
    is_server: bool = False,
) -> Callable[[_Handler], Callable[..., None]]:
    """Return a decorator that makes a command of a handler and of the options of ``functions``.

    The handler receives a :class:`Call`, and by name its own options, which are declared in the same way. All
    commands have ``--json``, ``--overwrite`` and the options about messages and limits, except ``without``;
    with ``progress``, the label of a progress bar, also ``--progress``. ``panels`` is the order of the
    headings of ``--help`` (default: by their first option). ``has_version`` adds ``--version``, for a program
    without other commands, ``has_page`` adds ``--html``, and ``is_server`` limits requests, not the command.
    """

    def decorate(handler: _Handler) -> Callable[..., None]:
        own = options_of(handler)
        declared: dict[str, DeclaredOption] = {}
        for function in functions:
            for name, option in options_of(function).items():
                declared.setdefault(name, option)
        declared |= own
        flags = {name: option.flag for name, option in declared.items()}

        def run(typer_context: typer.Context, debug: bool = False, **texts: Any) -> None:
            call = Call(typer_context, declared, texts, progress)
            streams = (path for path in call.paths("stream") if str(path) != STANDARD_STREAM)
            reads = [*call.paths("reads"), *streams]
            with flags_of_command(flags), command_line(
                debug, call.diagnostics, call.subject, documents=call.documents().values(), reads=reads,
                writes=[*call.paths("writes"), *call.paths("folder")], has_budget=not is_server,
            ):  # fmt: skip
                texts |= _devices_and_systems(declared, texts)
                if groups := texts.get("comm_groups"):  # report a file that cannot be read, in any command
                    read_document(groups, limits().groups_bytes, "a list of process groups")
                values = {name: call[name] for name in own}
                for name, value in values.items():
                    if texts[name] not in _ABSENT:  # the parser of the command line lets NaN pass
                        check_value(name, value, own[name].hint)
                if texts.get("open_results"):
                    _pages_and_timelines(call)
                handler(call, **values)
            if texts.get("open_results"):
                with command_line(debug):
                    _open_results(call)

        context = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        common = dict(common_parameters())
        opens = has_page or any(map(_opens, declared.values()))
        offered = {"progress": bool(progress), "html_file": has_page, "open_results": opens}
        left_out = [name for name, is_offered in offered.items() if not is_offered]
        for name in (*declared, *without, *left_out):
            common.pop(name, None)
        permission = common.pop("allow_programs")
        listed: list[inspect.Parameter] = []
        with flags_of_command(flags):
            for option in declared.values():
                listed.append(_parameter(option))
                if option.option.completes == "estimators" and permission not in listed:
                    listed.append(permission)
        listed += common.values()
        if has_version:
            listed.append(
                inspect.Parameter(
                    "show_version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Version
                )
            )
        parameters = [context, *sorted(listed, key=lambda parameter: _order(parameter, panels))]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = handler.__name__, handler.__doc__
        return run

    return decorate


def _opens(declared: DeclaredOption) -> bool:
    """Return True if an option names a report folder or a timeline, which ``--open`` opens."""
    return file_access(declared) == "folder" or bool(declared.option.opens)


def _pages_and_timelines(call: Call) -> tuple[list[Path], list[Path]]:
    """Return the pages and report folders, and the timelines, that a command writes. Raises ``UsageError`` if
    it writes none.
    """
    pages = [Path(folder) for folder in call.paths("folder")] + ([call.html_file] if call.html_file else [])
    timelines = [
        Path(path)
        for name, declared in call.options.items()
        for path in listed(call.texts[name])
        if str(path).removesuffix(".gz").endswith(tuple(declared.option.opens))
    ]
    if not pages and not timelines:
        options = [declared.flag for declared in call.options.values() if _opens(declared)]
        options += ["--html"] if "html_file" in call.texts else []
        raise UsageError(
            "--open: the command writes no page and no timeline",
            hint=f"add {' or '.join(options)} with a name such as step.pftrace or page.html",
        )
    return pages, timelines


def _open_results(call: Call) -> None:
    """Open the pages in the browser, and the timelines in the Perfetto UI."""
    from hespas.cli.browser import open_page, open_timeline

    pages, timelines = _pages_and_timelines(call)
    for page in pages:
        open_page(page)
    for timeline in timelines:
        open_timeline(timeline)


def _devices_and_systems(
    options: Mapping[str, DeclaredOption], texts: Mapping[str, Any]
) -> dict[str, list[str] | str]:
    """Return the values of the options that name devices or systems: lists are split at commas, and a device
    that the command needs has the user's default.

    Raises ``UsageError`` if a needed device is not given and there is no default.
    """
    named: dict[str, list[str] | str] = {}
    for name, declared in options.items():
        if declared.option.completes not in {"devices", "systems"}:
            continue
        value, takes_list = texts[name], accepted_type(declared)[1]
        if _takes_default_hardware(declared) and value in _ABSENT:
            value = default_hardware()
            if not value:
                hint = (
                    f"{declared.flag} NAME, or set {HARDWARE_VARIABLE}; list the names: hespas hardware list"
                )
                raise UsageError(f"{declared.flag} is required", hint=hint)
            value = [value] if takes_list else value
        if takes_list and value:
            value = [
                part
                for text in map(str, value)
                for part in ([text] if hardware_files(text) else text.split(","))
            ]
        named[name] = value
    return named


def _takes_default_hardware(declared: DeclaredOption) -> bool:
    """Return True if the command needs the device that an option names."""
    return declared.option.completes == "devices" and declared.is_required


def _order(parameter: inspect.Parameter, panels: Sequence[str]) -> int:
    """Return the position of the heading under which ``--help`` lists an option; options without a heading
    come first.
    """
    panel: str | None = get_args(parameter.annotation)[-1].rich_help_panel
    return panels.index(panel) + 1 if panel in panels else 0


def listed(value: object) -> list[Any]:
    """Return the values of an option as a list; empty for an option that is not given."""
    if value in _ABSENT:
        return []
    return list(cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else [value]


def file_access(declared: DeclaredOption) -> str:
    """Return how the command uses the files that an option names (reads or writes); empty if the option names
    no file.
    """
    option = declared.option
    is_named = option.completes in {"devices", "systems", "estimators"}
    return option.access or ("reads" if is_named or accepted_type(declared)[0] is Path else "")


def _element_of(declared: DeclaredOption) -> Any:
    """Return the type hint of the elements if the option takes a sequence, otherwise None."""
    for member in members_of(declared.hint):
        inside = get_args(member)
        if get_origin(member) in {Sequence, list} or (get_origin(member) is tuple and Ellipsis in inside):
            return inside[0]
    return None


def is_column(declared: DeclaredOption) -> bool:
    """Return True if the command may repeat an option to compare its values in columns, each of which is one
    call of the function.
    """
    return declared.option.repeats and declared.option.parse is None and _element_of(declared) is None


def accepted_type(declared: DeclaredOption) -> tuple[Any, bool]:
    """Return the type that the command line parses for an option, and True if the option can be repeated."""
    option, element = declared.option, _element_of(declared)
    repeats = option.repeats or (element is not None and option.parse is None)
    if option.parse is not None:
        return str, repeats
    members = members_of(declared.hint) if element is None else members_of(element)
    for member in members:
        if get_origin(member) is Literal:
            return member, repeats
        if get_origin(member) is tuple:
            return GenericAlias(tuple, tuple(map(_class_of, get_args(member)))), repeats
    kind = _class_of(declared.hint if element is None else element)
    return str if kind is Path and option.is_text else kind, repeats


def _class_of(hint: object) -> type:
    """Return the class of the values that the command line accepts for a type hint."""
    members = members_of(hint)
    return next(kind for kind in (bool, Path, str, float, int) if kind in members)


def _bounds_of(hint: object) -> Iterator[AtLeast | AtMost]:
    """Yield the lower and upper bounds in a type hint."""
    if isinstance(hint, AtLeast | AtMost):
        yield hint
    for member in get_args(hint):
        yield from _bounds_of(member)


def _parameter(declared: DeclaredOption) -> inspect.Parameter:
    """Return the parameter of a typer function that declares an option."""
    option = declared.option
    kind, repeats = accepted_type(declared)
    bounds: dict[str, Any] = {}
    for bound in _bounds_of(declared.hint):
        name, number = ("min", bound.least) if isinstance(bound, AtLeast) else ("max", bound.most)
        bounds[name] = int(number) if kind is int else number
    default: Any = declared.default if not repeats and declared.default not in ((), {}) else None
    shows_default: bool | str = option.default_text or False
    if option.default_text is None:
        shows_default = HARDWARE_VARIABLE if _takes_default_hardware(declared) else True
    if _takes_default_hardware(declared):
        default = None
    elif declared.is_required:
        default = inspect.Parameter.empty
    elif default is REQUIRED:
        default = None
    described: dict[str, Any] = {
        "metavar": option.metavar,
        "help": flagged(option.help),
        "rich_help_panel": option.panel or None,
        "show_default": shows_default,
        "autocompletion": COMPLETIONS.get(option.completes),
        **bounds,
    }
    if repeats and get_origin(kind) is Literal:
        kind = _EnumOf(declared.name, [(choice, choice) for choice in get_args(kind)])
    if file_access(declared) == "folder":
        described["parser"] = report_folder
    annotation: Any = GenericAlias(list, kind) if repeats else kind
    if default is None:
        annotation = annotation | None
    made: Any = (
        typer.Argument(**described) if option.is_argument else typer.Option(declared.flags, **described)
    )
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, made],
    )
