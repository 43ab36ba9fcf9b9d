"""What reaches the terminal: nothing that steers it, nothing without end."""

from __future__ import annotations

import json
from math import inf, nan

import pytest
import typer

from hespas.cli.session import command_line, emit, say, say_diagnostics
from hespas.cli.text import bytes_text, count_text, flops_text, table_text, time_text
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError


def test_escapes_of_terminals_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say("error: \x1b[31mred\x07\r\u202e\x9b \udc80")
    assert capsys.readouterr().err == "error: \\u001b[31mred\\u0007\\r\\u202e\\u009b \\udc80\n"
    emit("two µ 日本 é")
    assert capsys.readouterr().out == "two µ 日本 é\n"


def test_a_foreign_text_makes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of an input may hold anything: none of it can look like a message of ours."""
    name = "mm\nerror: all is lost\u2028\x85\v\tx"
    shown = "mm\\nerror: all is lost\\u2028\\u0085\\u000b\\tx"
    diagnostics = Diagnostics()
    diagnostics.warning("code", name, name)
    say_diagnostics(diagnostics, "file")
    assert capsys.readouterr().err == f"warning: file: {shown}: {shown} [code]\n"
    with pytest.raises(typer.Exit), command_line(debug=False):
        raise FormatError(name, path="file", position="byte 1", hint=f"do\n  try: {name}")
    assert capsys.readouterr().err == (f"error: file: byte 1: {shown}\n  try: do\\n  try: {shown}\n")
    with pytest.raises(typer.Exit), command_line(debug=False):
        raise KeyError(name)
    assert capsys.readouterr().err.count("\n") == 2
    emit(table_text((name, "n"), [(name, "1")]))
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
    say_diagnostics(diagnostics, "file")
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
