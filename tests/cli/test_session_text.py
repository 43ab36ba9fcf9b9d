"""Terminal output: no control sequences, and bounded length."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import typer

import hespas
from hespas.cli.convert import app as convert_app
from hespas.cli.main import app as hespas_app
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, flagged, flags_of_command, print_message, report_diagnostics
from hespas.cli.validate import app as validate_app
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import bytes_text, count_text, flops_text, time_text


def test_escapes_of_terminals_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_message("error: \x1b[31mred\x07\r\u202e\x9b \udc80")
    assert capsys.readouterr().err == "error: \\u001b[31mred\\u0007\\r\\u202e\\u009b \\udc80\n"
    emit("two µ 日本 é")
    assert capsys.readouterr().out == "two µ 日本 é\n"


def test_a_foreign_text_makes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of an input may hold anything: none of it can look like a message of ours."""
    name = "mm\nerror: all is lost\u2028\x85\v\tx"
    shown = "mm\\nerror: all is lost\\u2028\\u0085\\u000b\\tx"
    diagnostics = Diagnostics()
    diagnostics.warning("code", name, name)
    report_diagnostics(diagnostics, "file")
    assert capsys.readouterr().err == f"warning: file: {shown}: {shown} [code]\n"
    with pytest.raises(typer.Exit), command_line(debug=False):
        raise FormatError(name, path="file", position="byte 1", hint=f"do\n  try: {name}")
    assert capsys.readouterr().err == (f"error: file: byte 1: {shown}\n  try: do\\n  try: {shown}\n")
    with pytest.raises(typer.Exit), command_line(debug=False):
        raise KeyError(name)
    assert capsys.readouterr().err.count("\n") == 2
    emit(table_from_rows((Column(name), *columns("count", "n")), [(name, 1)]).to_text())
    assert capsys.readouterr().out == f"{shown}  n\n{shown}  1\n"


def test_json_with_odd_characters_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"name": "\x1b\x85\U000e0001"}
    emit(json.dumps(content, ensure_ascii=False))
    assert json.loads(capsys.readouterr().out) == content


def test_messages_are_clipped(capsys: pytest.CaptureFixture[str]) -> None:
    error = FormatError("m" * 10_000, path="file", position="p" * 10_000, hint="h" * 10_000)
    assert len(str(error)) < 1_600
    assert str(error).startswith("file: ppp")
    assert "ppp...: mmm" in str(error)
    assert error.message == "m" * 10_000
    diagnostics = Diagnostics()
    diagnostics.warning("code", "l" * 10_000, "m" * 10_000)
    report_diagnostics(diagnostics, "file")
    assert len(capsys.readouterr().err) < 1_100


@pytest.mark.parametrize(
    ("value", "text"),
    [(nan, "unknown"), (inf, "infinite"), (-inf, "-infinite"), (1e300, "1.000e+300"), (1234, "1,234")],
)
def test_figures_of_any_size(value: float, text: str) -> None:
    assert count_text(value) == text


def test_units_of_any_size() -> None:
    assert flops_text(1e300) == "1.000e+282 EFLOP"
    assert bytes_text(inf) == "infinite PB"
    assert time_text(2.5e9) == "2.500 s"


# --- the library names arguments, the command line its options


def _options() -> set[str]:
    """Every option of every command."""
    found: set[str] = set()
    waiting: list[Any] = [typer.main.get_command(app) for app in (convert_app, hespas_app, validate_app)]
    while waiting:
        command = waiting.pop()
        waiting.extend(getattr(command, "commands", {}).values())
        found.update(name for each in command.params for name in each.opts if name.startswith("--"))
    return found


@cache
def _texts(path: Path) -> list[tuple[int, str]]:
    """The texts of a module that are no docstrings; parts of one that is put together are one."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    found: list[tuple[int, str]] = []
    for node in nodes:
        if id(node) in said or id(node) in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.JoinedStr):
            found.append((node.lineno, ast.unparse(node)))
    return found


def test_messages_of_the_library_name_no_options() -> None:
    """But for whole commands, which are something to run, and the options of other tools."""
    options = _options()
    assert len(options) > 40
    package = Path(hespas.__file__).parent
    wrong = [
        f"{path.relative_to(package)}:{line}: {text}"
        for path in sorted(package.rglob("*.py"))
        if path.parent.name != "cli"
        for line, text in _texts(path)
        if options & set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        if not re.search(r"hespas|accuracy --json|nsys|--xla|record again|--models_list", text)
    ]
    assert wrong == []


def test_arguments_are_shown_as_options() -> None:
    assert flagged("leave `dims` out") == "leave --dim out"
    assert flagged("`num_devices=8` or `on_unknown=warn`, `num_devices`") == (
        "--num-devices 8 or --missing warn, --num-devices"
    )
    assert flagged("`hespas hardware list`, `unheard_of=3`") == "`hespas hardware list`, `unheard_of=3`"
    for text in ("Expected `object`, got `array`", "Object missing required field `hardware`"):
        assert flagged(text) == text  # messages of msgspec about documents
    with flags_of_command({"timeout_s": "--timeout", "format": "--to"}):
        assert flagged("`timeout_s=nan` or `format`, `dims`") == "--timeout nan or --to, --dim"
    assert flagged("`timeout_s=nan`") == "`timeout_s=nan`"
    named = {
        name
        for path in sorted(Path(hespas.__file__).parent.rglob("*.py"))
        if path.parent.name != "cli"
        for _, text in _texts(path)
        for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", text)
    }
    shown = {name: flagged(f"`{name}`") for name in named}
    assert {"num_devices", "recover", "source_version"} <= {
        name for name, flag in shown.items() if flag[0] == "-"
    }
    assert {flag for flag in shown.values() if flag.startswith("--")} <= _options()


def test_letters_that_a_terminal_does_not_know_are_spelled() -> None:
    program = (
        "import typer; from hespas.cli import entry, terminal\n"
        "app = typer.Typer()\n"
        "app.command()(lambda: terminal.emit('\\xdcnder'))\n"
        "entry.run(app)\n"
    )
    named = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=named, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"\\xdcnder\n"), done.stderr


def test_messages_of_one_code_that_differ_are_all_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = Diagnostics()
    for text in ("bf16 is costed as f32", "bf16 is costed as f64", "f8 is costed as f16", "zz is skipped"):
        found.warning("x.code", "row 1", text)
    report_diagnostics(found, "table.csv")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("row 1: ")[1] for line in lines] == [
        "bf16 is costed as f32 [x.code] (4 times)",
        "f8 is costed as f16 [x.code]",
        "zz is skipped [x.code]",
    ]
