"""Programs import a command only to run it."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from hespas.cli import convert, main, validate

if TYPE_CHECKING:
    from collections.abc import Iterator

APPS = {"main": main, "validate": validate}


@pytest.mark.parametrize("name", APPS)
def test_listed_help_is_the_first_line_of_the_command(name: str) -> None:
    for source in APPS[name].COMMANDS.values():
        loaded: Any = getattr(import_module(source.module), source.name)
        text = str(loaded.info.help if isinstance(loaded, typer.Typer) else loaded.__doc__)
        assert text.splitlines()[0] == source.help


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
@pytest.mark.parametrize("name", APPS)
def test_version_and_help_import_no_command(name: str, arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"from hespas.cli.{name} import main, COMMANDS\n"
        f"sys.argv = ['hespas', *{arguments}]\n"
        "try:\n    main()\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "modules = {source.module for source in COMMANDS.values()} | {'hespas.api.lowering', 'pandas'}\n"
        "print(sorted(modules & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "hespas" in done.stdout


@pytest.mark.parametrize("name", APPS)
def test_groups_list_and_find_all_commands(name: str) -> None:
    group: Any = typer.main.get_command(APPS[name].app)
    visible = [word for word, command in group.commands.items() if not command.hidden]
    assert visible == list(APPS[name].COMMANDS)
    assert group.commands.get("no-such-command") is None
    assert all(command.name == word for word, command in group.commands.items())


def _command_lines(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the object of each command below a command."""
    if not hasattr(command, "commands"):
        yield words, command
    for word in getattr(command, "commands", {}):
        member = command.get_command(None, word)
        if not member.hidden:
            yield from _command_lines(member, (*words, word))


@pytest.mark.parametrize("module", [main, validate, convert])
def test_help_shows_the_whole_text_of_each_option(module: Any) -> None:
    """The renderer takes brackets as markup and drops them."""
    group: Any = typer.main.get_command(module.app)
    for words, command in _command_lines(group, ()):
        done = CliRunner().invoke(module.app, [*words, "--help"], env={"COLUMNS": "900", "TERM": "dumb"})
        assert done.exit_code == 0, words
        shown = " ".join(done.output.split())
        for parameter in command.params:
            texts = (parameter.help or "").splitlines()
            missing = [text for text in texts if " ".join(text.split()) not in shown]
            assert not missing or parameter.hidden, (words, parameter.name)
