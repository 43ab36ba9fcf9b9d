"""``python -m benchmarks`` runs the named benchmarks, and none if a name is wrong."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.__main__ as command

FOLDER = Path(command.__file__).parent


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The benchmarks that ran, each of which misses its bound if it is ``hub_memory``."""
    names: list[str] = []

    def benchmark(module: str) -> SimpleNamespace:
        name = module.removeprefix("benchmarks.")

        def main() -> int:
            assert len(sys.argv) == 1
            names.append(name)
            return int(name == "hub_memory")

        return SimpleNamespace(main=main)

    monkeypatch.setattr(command, "import_module", benchmark)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--of-the-caller"])
    return names


def test_every_benchmark_is_listed() -> None:
    with_main = {
        path.stem
        for path in FOLDER.glob("*.py")
        if path.stem != "__main__"
        and callable(getattr(import_module(f"benchmarks.{path.stem}"), "main", None))
    }
    assert with_main == set(command.BENCHMARKS)


def test_help_lists_them_and_runs_none(ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in command.BENCHMARKS)
    assert ran == []


def test_a_name_that_is_none_runs_none(ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(["et_codec", "etc_codec"])
    assert done.value.code == 2
    assert "no benchmark 'etc_codec'; there are: analyze_speed, astra_" in capsys.readouterr().err
    assert ran == []


def test_those_named_run_in_turn_and_a_missed_bound_is_the_exit_status(ran: list[str]) -> None:
    assert command.main(["systolic_speed", "et_codec"]) == 0
    assert ran == ["systolic_speed", "et_codec"]
    ran.clear()
    assert command.main([]) == 1
    assert ran == list(command.BENCHMARKS)
