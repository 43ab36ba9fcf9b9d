"""Commands made of the options that public functions declare: see :mod:`hespas.graph.hints`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from hespas.cli import options as shared
from hespas.cli.destinations import check_reports, estimator_files, hardware_files, report_folder
from hespas.cli.session import command_line
from hespas.cli.terminal import progress_bar
from hespas.cli.text import flagged
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.hints import (
    REQUIRED,
    Access,
    AtLeast,
    AtMost,
    DeclaredOption,
    members_of,
    options_of,
    parameters_of,
)

__all__ = ["Call", "command"]

_Result = TypeVar("_Result")
_Handler = Callable[..., None]
_ABSENT: tuple[object, ...] = (None, "", [])
"""Values of options that are not given; numbers and switches always have a value."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run of a command. ``texts`` are the values of all options from the command line; an item is the value
    that the Python interface takes.
    """

    context: typer.Context
    options: Mapping[str, DeclaredOption]
    texts: Mapping[str, Any]
    label: str
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option, its default if it is not given. Raises ``UsageError`` for a text
        that is not a value.
        """
        declared, value = self.options[name], self.texts[name]
        if value in _ABSENT:
            return None if declared.default is REQUIRED else declared.default
        if declared.option.parse is not None:
            return declared.option.parse(value)
        return value[0] if declared.option.repeats and not _element_of(declared) else value

    @property
    def json_file(self) -> Path | None:
        """Return the file of ``--json``."""
        return self.texts.get("json_file")

    @property
    def overwrite(self) -> bool:
        """Return True if existing files may be replaced."""
        return bool(self.texts.get("overwrite"))

    def several(self, name: str) -> list[Any]:
        """Return all values of an option; its default if it is not given."""
        value = self.texts[name]
        if value in _ABSENT:
            return [] if self[name] in _ABSENT or self[name] == () else [self[name]]
        return list(value) if isinstance(value, list) else [value]

    def is_written(self, name: str) -> bool:
        """Return True if the user wrote the option on the command line."""
        source = self.context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    def paths(self, access: Access) -> list[Path | str]:
        """Return the values of the options whose files are used in this way."""
        used = (name for name, declared in self.options.items() if _access(declared) == access)
        return [value for name in used for value in _listed(self.texts[name])]

    def documents(self) -> dict[str, Path | None]:
        """Return the documents that the command writes, by option."""
        documents: dict[str, Path | None] = {
            declared.flag: self.texts[name]
            for name, declared in self.options.items()
            if _access(declared) == "document"
        }
        return documents | ({} if "json_file" in self.options else {"--json": self.json_file})

    def files(self, *accesses: Access) -> dict[str, list[Path]]:
        """Return the files that the command reads or writes besides documents, by option."""
        files: dict[str, list[Path]] = {}
        for access in accesses or ("reads", "writes"):
            for name, declared in self.options.items():
                texts = [str(text) for text in _listed(self.texts[name])]
                if _access(declared) != access or not texts:
                    continue
                if declared.option.completes == "estimators":
                    found = estimator_files(*texts)
                elif declared.option.completes:
                    found = hardware_files(*texts)
                else:
                    found = [Path(text) for text in texts]
                files.setdefault(declared.option.label or declared.flag, []).extend(found)
        return files

    def check_outputs(self) -> None:
        """Raise an error, before any work, for a document that cannot be written or would replace a file."""
        check_reports(self.documents(), self.files(), overwrite=self.overwrite)

    def arguments(
        self, function: Callable[..., object], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Return the keyword arguments of a public function from the options that are given."""
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
            if self.texts.get(name) not in _ABSENT:
                keywords[name] = self[name]
        for parameter, (kind, keywords) in classes.items():
            if "progress" in parameters_of(kind):
                keywords["progress"] = progress
            arguments[parameter] = kind(**keywords)
        return arguments

    def run(self, function: Callable[..., _Result], **changes: Any) -> _Result:
        """Check the outputs, then call a public function with the options, while a progress bar is drawn."""
        self.check_outputs()
        with progress_bar(self.label, self.texts.get("progress")) as callback:
            return function(**self.arguments(function, callback) | changes)

    def write_json(self, document: object) -> None:
        """Write the document of ``--json``, if it is requested."""
        if self.json_file:
            from hespas.api.documents import write_json

            write_json(document, self.json_file, overwrite=self.overwrite)


def command(
    *functions: Callable[..., object],
    progress: str = "",
    subject: Callable[[Mapping[str, Any]], object] | None = None,
    without: Sequence[str] = (),
    panels: Sequence[str] = (),
) -> Callable[[_Handler], Callable[..., None]]:
    """Return a decorator that makes a command of a handler and of the options of ``functions``.

    The handler receives a :class:`Call`, and by name its own options, which are declared in the same way. All
    commands have ``--json``, ``--overwrite`` and the options about messages and limits, except ``without``;
    with ``progress``, the label of a progress bar, also ``--progress``. ``subject`` returns the input that
    messages name from the values of the options (default: the first input). ``panels`` is the order of the
    headings of ``--help`` (default: by their first option).
    """

    def decorate(handler: _Handler) -> Callable[..., None]:
        own = options_of(handler)
        declared: dict[str, DeclaredOption] = {}
        for function in functions:
            for name, option in options_of(function).items():
                declared.setdefault(name, option)
        declared |= own

        def run(context: typer.Context, debug: bool = False, **texts: Any) -> None:
            call = Call(context, declared, texts, progress)
            reads = call.paths("reads")
            first = next(iter(reads), "") if subject is None else subject(texts)
            with command_line(
                debug, call.diagnostics, str(first or ""), documents=call.documents().values(), reads=reads,
                writes=[*call.paths("writes"), *call.paths("folder")],
            ):  # fmt: skip
                if groups := texts.get("comm_groups"):  # report a file that cannot be read, in any command
                    read_document(groups, limits().groups_bytes, "a list of process groups")
                handler(call, **{name: call[name] for name in own})

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        left_out = {*declared, *without, *(() if progress else ("progress",))}
        common = [parameter for name, parameter in shared.common_parameters().items() if name not in left_out]
        listed = [*map(_parameter, declared.values()), *common]
        parameters = [context, *sorted(listed, key=lambda parameter: _order(parameter, panels))]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = handler.__name__, handler.__doc__
        return run

    return decorate


def _order(parameter: inspect.Parameter, panels: Sequence[str]) -> int:
    """Return the position of the heading of an option; options without one come first."""
    panel: str | None = get_args(parameter.annotation)[-1].rich_help_panel
    return panels.index(panel) + 1 if panel in panels else 0


def _listed(value: object) -> list[Any]:
    """Return the values of an option as a list; empty for an option that is not given."""
    if value in _ABSENT:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _access(declared: DeclaredOption) -> str:
    """Return the use of the files that an option names; empty if it names none."""
    option = declared.option
    is_named = option.completes in {"devices", "systems", "estimators"}
    return option.access or ("reads" if is_named or _cli_type(declared)[0] is Path else "")


def _element_of(declared: DeclaredOption) -> Any:
    """Return the hint of the elements if a sequence is allowed, otherwise None."""
    for member in members_of(declared.hint):
        inside = get_args(member)
        if get_origin(member) in {Sequence, list} or (get_origin(member) is tuple and Ellipsis in inside):
            return inside[0]
    return None


def _cli_type(declared: DeclaredOption) -> tuple[Any, bool]:
    """Return the type of a value on the command line, and True if the option can be repeated."""
    option, element = declared.option, _element_of(declared)
    repeats = option.repeats or (element is not None and option.parse is None)
    if option.parse is not None:
        return str, repeats
    members = members_of(declared.hint) if element is None else members_of(element)
    for member in members:
        if get_origin(member) in {Literal, tuple}:
            return member, repeats
    for kind in (bool, str, Path, float, int) if option.is_text else (bool, Path, str, float, int):
        if kind in members:
            return kind, repeats
    raise TypeError(f"{declared.name}: the command line has no values of {declared.hint}")


def _bounds_of(hint: object) -> Iterator[AtLeast | AtMost]:
    """Yield the bounds in a hint."""
    if isinstance(hint, AtLeast | AtMost):
        yield hint
    for member in get_args(hint):
        yield from _bounds_of(member)


def _parameter(declared: DeclaredOption) -> inspect.Parameter:
    """Return the parameter of a typer function for an option."""
    option = declared.option
    kind: Any
    kind, repeats = _cli_type(declared)
    bounds: dict[str, Any] = {}
    for bound in _bounds_of(declared.hint):
        name, number = ("min", bound.least) if isinstance(bound, AtLeast) else ("max", bound.most)
        bounds[name] = int(number) if kind is int else number
    default: Any = declared.default if not repeats and declared.default not in ((), {}) else None
    if declared.is_required:
        default = inspect.Parameter.empty
    elif default is REQUIRED:
        default = None
    described: dict[str, Any] = {
        "metavar": option.metavar,
        "help": flagged(option.help),
        "rich_help_panel": option.panel or None,
        "show_default": True if option.default_text is None else option.default_text or False,
        "autocompletion": shared.COMPLETIONS.get(option.completes),
        **bounds,
    }
    if _access(declared) == "folder":
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
