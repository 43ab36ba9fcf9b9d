"""Entry points: the three programs, and groups whose commands are imported when they run."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hespas.cli.terminal import (
    ClosedOutput,
    discard_output,
    emit,
    flush_output,
    open_closed_descriptors,
    print_message,
)
from hespas.graph.errors import OutputError, UsageError, exit_code

__all__ = ["CommandSource", "Version", "program", "renamed_options", "run"]

_WRITE_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class CommandSource(NamedTuple):
    """Definition of a command: ``module`` and ``name`` of its function or app. ``help`` is the first line of
    its help and ``epilog`` the last. ``renamed`` maps deprecated options to new names.
    """

    module: str
    name: str
    help: str
    epilog: str | None = None
    renamed: Mapping[str, str] = MappingProxyType({})


def program(
    name: str, help_text: str, commands: Mapping[str, CommandSource], elsewhere: Mapping[str, str]
) -> typer.Typer:
    """Return an app of commands, each of which is imported only when it runs.

    ``elsewhere`` maps hidden commands to another program, which their message names: ``convert`` to
    ``hespas-convert``.
    """

    class ProgramGroup(_LazyGroup):
        """Group of the commands of one program."""

        sources = commands

    app = typer.Typer(
        cls=ProgramGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help=help_text,
    )

    @app.callback()
    def common(show_version: Version = False) -> None:
        """Handle the options in front of the command."""

    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}

    def add(command: str, replacement: str) -> None:
        @app.command(command, hidden=True, context_settings=anything)
        def refuse(context: typer.Context) -> None:
            from hespas.cli.session import command_line

            with command_line(debug=False):
                hint = " ".join((replacement, *context.args))
                raise UsageError(f"unknown command '{name} {command}'", hint=hint)

    for command, replacement in elsewhere.items():
        add(command, replacement)
    return app


class _LazyCommands(dict[str, Any]):
    """Commands of a group by name. A command is imported only when it is looked up, so that the program
    starts fast.
    """

    def __init__(self, sources: Mapping[str, CommandSource], built: Mapping[str, Any]) -> None:
        super().__init__(dict.fromkeys(sources) | dict(built))
        self._sources = sources

    def __getitem__(self, name: str) -> Any:
        command: Any = super().__getitem__(name)
        if command is None:
            source = self._sources[name]
            loaded: Any = getattr(import_module(source.module), source.name)
            if isinstance(loaded, typer.Typer):
                command = typer.main.get_group(loaded)
            else:
                app = typer.Typer(
                    add_completion=False,
                    pretty_exceptions_enable=False,
                    context_settings={"help_option_names": ["-h", "--help"]},
                )
                app.command(name, cls=renamed_options(source.renamed), epilog=source.epilog)(loaded)
                command = typer.main.get_command(app)
            command.name = name
            self[name] = command
        return command

    def get(self, name: str, default: Any = None) -> Any:
        """Return a command, or ``default`` for an unknown name."""
        if name not in self:
            return default
        return self[name]

    def values(self) -> Any:
        """Return all commands."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Return all names and commands."""
        return [(name, self[name]) for name in self]


class _LazyGroup(TyperGroup):
    """Group of commands that imports a command only to run it, not to list it in the help."""

    sources: ClassVar[Mapping[str, CommandSource]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _LazyCommands(self.sources, self.commands)
        self._lists_only = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of declaration."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command. While help is printed, it is a placeholder that has only the first line of its
        help.
        """
        if self._lists_only and cmd_name in self.sources:
            return TyperCommand(cmd_name, help=self.sources[cmd_name].help)
        return self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the group."""
        self._lists_only = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._lists_only = False


def renamed_options(new_names: Mapping[str, str]) -> type[TyperCommand]:
    """Return a command class that also accepts deprecated options, given as ``{"--old": "--new"}``. A
    deprecated option prints a warning with the new name. ``--help`` does not list it.
    """
    if not new_names:
        return TyperCommand

    class RenamingCommand(TyperCommand):
        """Command that replaces deprecated options by their new names before it parses them."""

        renamed: ClassVar[Mapping[str, str]] = new_names

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Replace deprecated options in front of ``--``, then parse."""
            end = args.index("--") if "--" in args else len(args)
            for index, word in enumerate(args[:end]):
                old, equals, value = word.partition("=")
                if new := self.renamed.get(old):
                    print_message(f"warning: {old} is deprecated: use {new}")
                    args[index] = f"{new}{equals}{value}"
            return super().parse_args(ctx, args)

    return RenamingCommand


def _print_version(show: bool) -> None:
    """Print the version and exit."""
    if show:
        from hespas._version import __version__

        try:
            emit(f"hespas {__version__}")
            flush_output()
        except OutputError as error:  # without the session of a command, whose import takes longer than this
            print_message(f"error: {error}".split("\n"))
            raise typer.Exit(exit_code(error)) from error
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


def run(app: typer.Typer) -> NoReturn:
    """Run an app as the entry point of a process. Failures to write help and usage texts are reported too."""
    open_closed_descriptors()
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    out: object = sys.stdout
    if isinstance(out, io.TextIOWrapper):  # file names may hold characters outside the terminal's encoding
        out.reconfigure(errors="backslashreplace")
    code: str | int | None = None
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    except OSError as error:
        if error.errno not in _WRITE_FAILURES:
            raise
        code = exit_code(OutputError(""))
        print_message(f"error: standard output cannot be written: {error.strerror}")
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError as error:
            discard_output(stream)
            code = code or (0 if isinstance(error, BrokenPipeError) else exit_code(OutputError("")))
    with suppress(OSError):  # user programs may print while Python exits: keep that out of the results
        os.dup2(2, 1)
    sys.exit(code)
