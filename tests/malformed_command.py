"""Runs of a command on malformed input, in this or a new process, and checks of its errors and leftovers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli import convert
from tests.limits import SAFETY_S, cpu_limited

__all__ = ["FIXTURES", "FORMATS", "SUFFIX", "Command", "Outcome", "convert_own"]

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATS = ("stablehlo", "hlo", "op-graph", "op-graph-arrow", "chakra")
SUFFIX = {
    "stablehlo": ".mlir",
    "hlo": ".hlo",
    "op-graph": ".json",
    "op-graph-arrow": ".arrow",
    "chakra": ".et",
}

_MAX_MESSAGE = 4000
_POSITION = re.compile(
    r"\b(?:line|byte|node|frame|rank|column|group) \d|\b(?:end of file|header|schema metadata|footer)\b"
    r"|\bwithin [\d,]+ bytes|\$[.\[:]|[@%]\w|\b(?:computation|field|group id) \W?\w",
    re.IGNORECASE,
)
_OF_THE_WHOLE = (
    "no known format fits this input",
    "no such file or directory",
    "the file is empty",
    "is a directory",
    "regular file",
    "file name too long",
    "permission denied",
    "the folder contains no rank files",
    "is in this folder",
    "the folder has no ",
    "rank files of",
    "is no object of rank lists",
    "expands to more than",
    "decompresses to more than",
)
"""Faults of a file as a whole, which stand nowhere in it."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_PROCESS = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
from hespas.cli.convert import app
try:
    app()
finally:
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
"""Says the most memory it held, in KiB; the limit keeps a failing test from taking the machine down."""

_RUNNER = CliRunner()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Output of a run, and the files that it left in the output folder and among temporary files."""

    code: int
    said: str
    left: tuple[str, ...]

    def complaints(self, source: Path) -> list[str]:
        """Return what is missing from a proper error. The caller checks the exit code."""
        head, _, remedy = ("\n" + self.said).rpartition("\nerror: ")[2].partition("\n  try: ")
        message = head.replace(str(source), "", 1)
        is_whole = any(text in message.lower() for text in _OF_THE_WHOLE)
        found = {
            "no error": "error: " not in self.said,
            "internal error": self.code == 70 or "internal error" in self.said,
            "a traceback": "Traceback" in self.said,
            f"left {self.left}": bool(self.left),
            "the file is not named": str(source) not in head,
            "no position": not is_whole and not _POSITION.search(message),
            "no remedy": not remedy.strip(),
            "control characters": self.has_control_characters,
            f"{len(self.said):,} characters": len(self.said) > _MAX_MESSAGE,
        }
        return [complaint for complaint, holds in found.items() if holds]

    @property
    def has_control_characters(self) -> bool:
        """True if control characters of the input reach the terminal."""
        return bool(_CONTROL.search(self.said))

    @property
    def start(self) -> str:
        """Start of the output, for the message of a failing test."""
        return f"exit {self.code}: {self.said[:600]!r}"


@dataclass(frozen=True, slots=True)
class Command:
    """hespas-convert in a new folder with the inputs, ``out`` and ``scratch``."""

    folder: Path

    def source(self, name: str, data: bytes) -> Path:
        """An input file."""
        path = self.folder / name
        path.write_bytes(data)
        return path

    def run(self, source: Path, *options: str, to: str = "graph.json") -> Outcome:
        """In this process."""
        out = self._out()
        done = _RUNNER.invoke(convert.app, [str(source), str(out / to), *options])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return Outcome(done.exit_code, done.stderr, self._left(out))

    def run_process(
        self, source: Path, *options: str, to: str = "graph.json", cpu_s: int = 60
    ) -> tuple[Outcome, int]:
        """Run in a process of its own; return the outcome and its peak memory in MiB.

        Fails where the process uses more than ``cpu_s`` seconds of processor time, or never ends.
        """
        out = self._out()
        arguments = [sys.executable, "-c", _PROCESS, str(source), str(out / to), *options]
        environment = {**os.environ, "TMPDIR": str(self.folder / "scratch")}
        try:
            done = subprocess.run(
                arguments, capture_output=True, text=True, env=environment, timeout=SAFETY_S, check=False,
                preexec_fn=cpu_limited(cpu_s),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            pytest.fail(f"does not end on {source} {' '.join(options)}")
        if done.returncode in {-signal.SIGXCPU, -signal.SIGKILL}:
            pytest.fail(f"uses more than {cpu_s} s of processor time on {source} {' '.join(options)}")
        return Outcome(done.returncode, done.stderr, self._left(out)), int(done.stdout or 0) >> 10

    def refuse(self, source: Path, *options: str, code: int = 3) -> str:
        """Assert a proper refusal; returns the message."""
        outcome = self.run(source, *options)
        assert (outcome.code, outcome.complaints(source)) == (code, []), outcome.start
        return outcome.said

    def _out(self) -> Path:
        out = self.folder / "out"
        out.mkdir()
        return out

    def _left(self, out: Path) -> tuple[str, ...]:
        left = [entry.name for folder in (out, self.folder / "scratch") for entry in folder.iterdir()]
        shutil.rmtree(out)
        return tuple(sorted(left))


def convert_own(program: str, target: Path, *options: str) -> bytes:
    """A file that the command itself makes of a fixture."""
    done = _RUNNER.invoke(convert.app, [str(FIXTURES / program), str(target), *options])
    assert done.exit_code == 0, done.output
    return target.read_bytes()
