"""``--untrusted`` and the budgets of readers: limits that end a command with exit code 3 and an option."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from hespas import api
from hespas.cli import convert, main, validate
from hespas.converters.format import Format, ReadOptions
from hespas.estimators import load_estimator
from hespas.files.limits import limits, reading_budget, untrusted
from hespas.files.sandbox import allowance
from hespas.files.streams import open_input
from hespas.files.trust import UNTRUSTED_VARIABLE, Untrusted, untrusted_limits
from hespas.graph import Diagnostics, GraphBuilder, Workload
from hespas.graph.errors import BoundaryError, BudgetError, UnsupportedError, UsageError, exit_code

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROGRAM = FIXTURES / "stablehlo" / "mlp.mlir"
MANY = 1 << 24


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTRUSTED_VARIABLE, raising=False)


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for word, command in getattr(group, "commands", {"": group}).items():
        if getattr(command, "hidden", False):
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}".strip(), command


APPS = {"hespas": main.app, "hespas-convert": convert.app, "hespas-validate": validate.app}
COMMANDS = dict(pair for name, app in APPS.items() for pair in _commands(typer.main.get_command(app), name))


def test_all_commands_are_here() -> None:
    assert {"hespas estimate", "hespas generate llm", "hespas-convert", "hespas-validate check"} < set(
        COMMANDS
    )
    assert len(COMMANDS) > 25


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_switch(name: str) -> None:
    options = {word for parameter in COMMANDS[name].params for word in parameter.opts}
    assert {"--untrusted", "--limit"} <= options


def _busy() -> None:
    while True:
        sum(range(1000))


def test_reading_has_a_budget_of_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hespas.files.limits._READING_S", 0.05)
    path = tmp_path / "x.mine"
    path.write_text("x")

    def read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
        _busy()
        raise AssertionError

    form = Format(name="mine", title="", suffixes=(".mine",), specification="", read=read)
    assert form.read is not None
    with pytest.raises(BudgetError, match="to read, the limit") as found:
        form.read(path, ReadOptions(), Diagnostics())
    assert exit_code(found.value) == 3
    assert "max_input_bytes=" in str(found.value)


def test_the_budget_grows_with_the_input_and_what_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hespas.files.limits._READING_S", 0.0)
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    with pytest.raises(BudgetError), reading_budget(path):
        _busy()
    monkeypatch.setenv("HESPAS_MAX_INPUT_BYTES", "1000000")
    with reading_budget(path):
        sum(range(100_000))


def test_an_inner_budget_leaves_the_outer_one(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")

    def read_and_go_on() -> None:
        with untrusted(cpu_s=0.2):
            with reading_budget(tmp_path / "x"):
                pass
            _busy()

    with pytest.raises(BudgetError, match="limit of untrusted"):
        read_and_go_on()


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", None),
        ("0", None),
        ("off", None),
        ("1", Untrusted()),
        ("true,cpu_s=20", Untrusted(cpu_s=20.0)),
        ("ranks=8,memory_bytes=1e9", Untrusted(ranks=8, memory_bytes=10**9)),
    ],
)
def test_limits_by_the_environment(
    text: str, limits: Untrusted | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNTRUSTED_VARIABLE, text)
    assert untrusted_limits() == limits


@pytest.mark.parametrize("text", ["maybe", "cpu=1", "cpu_s=", "cpu_s=-1", "ranks=nan", "cpu_s=1=2"])
def test_what_is_no_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNTRUSTED_VARIABLE, text)
    with pytest.raises(UsageError, match="is not a limit"):
        untrusted_limits()
    monkeypatch.delenv(UNTRUSTED_VARIABLE)
    done = CliRunner().invoke(main.app, ["view", str(PROGRAM), "--untrusted", "--limit", text])
    assert done.exit_code == 2


def _view(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main.app, ["view", str(PROGRAM), *words])
    return done.exit_code, done.output


def test_a_command_within_its_limits_says_what_it_says() -> None:
    assert _view("--untrusted", "--limit", "cpu_s=600") == _view()
    assert UNTRUSTED_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("source", "limit", "told"),
    [
        ("hlo/llama_train_1dev.hlo.txt.gz", "cpu_s=0.001", "--limit cpu_s="),
        ("chakra/pipeline_2x2", "ranks=3", "--limit ranks=4"),
    ],
)
def test_beyond_a_limit_a_command_names_the_option(source: str, limit: str, told: str) -> None:
    words = ["simulate", str(FIXTURES / source), "--untrusted", "--limit", "cpu_s=600", "--limit", limit]
    done = CliRunner().invoke(main.app, words)
    assert (done.exit_code, told in done.output) == (3, True), done.output


def test_beyond_its_memory_a_command_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def view(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(api, "view", view)
    code, text = _view("--untrusted", "--limit", "cpu_s=600")
    assert (code, "--limit memory_bytes=" in text) == (3, True), text


def test_limits_need_the_switch() -> None:
    code, text = _view("--limit", "cpu_s=5")
    assert (code, "requires --untrusted" in text) == (2, True), text


@pytest.mark.parametrize("spelling", ["xla", "scalesim:array=8x8", "composite:order=xla+roofline"])
def test_no_estimator_runs_programs(spelling: str) -> None:
    with untrusted(cpu_s=600), pytest.raises(UnsupportedError, match="untrusted"):
        load_estimator(spelling)


def test_estimators_of_the_package_do_what_they_do() -> None:
    with untrusted(cpu_s=600):
        load_estimator("composite:order=calibrated+roofline")
        load_estimator("training:base=composite")


def test_no_module_of_the_user_runs(tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef f(): pass\n")
    with untrusted(cpu_s=600), pytest.raises(UnsupportedError, match="untrusted"):
        api.capture(f"{module}:f", mesh={"x": 1})
    assert not (tmp_path / "ran").exists()


def test_links_that_lead_out_of_their_folder_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.txt").write_text("x")
    (tmp_path / "in" / "own.txt").write_text("x")
    (tmp_path / "in" / "a").symlink_to(tmp_path / "in" / "own.txt")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "out.txt")
    for name in ("a", "b"):
        open_input(tmp_path / "in" / name).close()
    with untrusted(cpu_s=600):
        open_input(tmp_path / "in" / "a").close()
        with pytest.raises(BoundaryError, match="leads out of its folder"):
            open_input(tmp_path / "in" / "b")


def test_parsers_share_the_limits() -> None:
    with untrusted(cpu_s=8.0, memory_bytes=10**8):
        granted = allowance(10**9)
    assert (granted.total_bytes, granted.parser_cpu_s) == (10**8, 2.0)


def _reader_of(size: int) -> Format:
    """Return a format whose reader takes so many bytes of memory."""

    def read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
        np.ones(size, np.uint8)
        return Workload.spmd(GraphBuilder("mine").build(), 1)

    return Format(name="mine", title="", suffixes=(".mine",), specification="", read=read)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts private memory")
def test_reading_has_a_budget_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hespas.files.limits.limits", lambda: replace(limits(), reading_bytes=1 << 20))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    path = tmp_path / "x.mine"
    path.write_bytes(bytes(1000))
    reader = _reader_of(300 << 20).read
    assert reader is not None
    with pytest.raises(
        BudgetError, match="bytes of memory to read, the limit of an input of its size"
    ) as found:
        reader(path, ReadOptions(), Diagnostics())
    assert exit_code(found.value) == 3
    assert found.value.path == str(path)
    assert "`max_input_bytes=" in str(found.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    monkeypatch.setenv("HESPAS_MAX_INPUT_BYTES", str(8 << 20))
    assert isinstance(reader(path, ReadOptions(), Diagnostics()), Workload)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts private memory")
def test_a_lower_limit_of_memory_is_reported_by_who_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hespas.files.limits.limits", lambda: replace(limits(), reading_bytes=1 << 32))
    path = tmp_path / "x.mine"
    path.write_bytes(bytes(1000))
    reader = _reader_of(600 << 20).read
    assert reader is not None
    with untrusted(memory_bytes=1 << 20), pytest.raises(MemoryError):
        reader(path, ReadOptions(), Diagnostics())


def test_a_system_without_memory_is_the_limit_too(tmp_path: Path) -> None:
    """What libraries raise for it is an error of the system."""
    path = tmp_path / "x.mine"
    path.write_bytes(b"x")

    def read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    form = Format(name="mine", title="", suffixes=(".mine",), specification="", read=read)
    assert form.read is not None
    expected = BudgetError if sys.platform == "linux" else OSError
    with pytest.raises(expected):
        form.read(path, ReadOptions(), Diagnostics())
