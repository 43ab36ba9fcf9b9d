"""What reaches the terminal: nothing that steers it, nothing without end."""

from __future__ import annotations

import json
from math import inf, nan

import pytest

from hespas.cli.session import emit, say, say_diagnostics
from hespas.cli.text import bytes_text, count_text, flops_text, time_text
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError


def test_escapes_of_terminals_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say("error: \x1b[31mred\x07\r\u202e\x9b \udc80")
    assert capsys.readouterr().err == "error: \\u001b[31mred\\u0007\\u000d\\u202e\\u009b \\udc80\n"
    emit("one\n\ttwo µ 日本 é")
    assert capsys.readouterr().out == "one\n\ttwo µ 日本 é\n"


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
