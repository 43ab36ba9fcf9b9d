"""Commands in documents with their output: parse them, run them again, and update their output.

A fence marked ``console`` has lines ``$ command``, each followed by the output of both streams. A fence
marked ``python`` or ``toml`` whose first line is a comment with a file name (``# layer.py``) is that file,
for the commands below it. Fences marked with a package (``console jax``) are skipped without it.

The commands run with this interpreter, or with that of another environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Example", "comparable", "examples", "refreshed", "run"]

_FENCE = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
_FILE_SIZE = re.compile(r"(?m)^(.* -> .* \((?:[a-z-]+, )?)[\d.,]+ [kMG]?B\)$")
_RUNNABLE = ("env", "hespas", "hespas-convert", "hespas-validate", "python", "ls", "cat")
"""First words of the commands that are run. Commands that install or build are not run."""
_PACKAGES = ("duckdb", "jax", "jax_cuda13_plugin", "torch")
"""Packages that a fence may need."""


@dataclass(frozen=True, slots=True)
class Example:
    """Command of a document, its output there (``start:end`` of the text), and the package that it needs."""

    command: str
    output: str
    start: int
    end: int
    needs: str
    files: tuple[tuple[str, str], ...]

    @property
    def is_runnable(self) -> bool:
        """Return False for commands that install or build."""
        return self.command.split()[0] in _RUNNABLE

    @property
    def skip_reason(self) -> str:
        """Return the reason for which :func:`run` skipped the command."""
        return f"without {self.needs}" if self.is_runnable else f"{self.command.split()[0]} commands"


def examples(text: str) -> list[Example]:
    """Return the commands of a document, in order."""
    found: list[Example] = []
    files: list[tuple[str, str]] = []
    for fence in _FENCE.finditer(text):
        language, marks, body = fence[1], fence[2].split(), fence[3]
        named = _FILE_NAME.match(body)
        if language in ("python", "toml") and named:
            files.append((named[1], body))
        if language != "console":
            continue
        for part in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
            start, end = (fence.start(3) + offset for offset in part.span(2))
            needs = next((mark for mark in marks if mark in _PACKAGES), "")
            found.append(Example(part[1], part[2], start, end, needs, tuple(files)))
            files = []
    return found


def run(shown: Sequence[Example], folder: Path, python: str = sys.executable) -> list[str | None]:
    """Run the commands in sequence in ``folder``, and return their outputs (None: not run).

    The commands are those of the environment of the interpreter ``python``. ``folder`` gets the files of
    ``hespas sample all``, unless a command writes samples. A command that fails has an ordinary output, so
    the comparison with the document shows the failure.
    """
    environment = os.environ | {
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "JAX_PLATFORMS": "cpu",
    }
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    if not any(example.command.startswith("hespas sample") for example in shown):
        command = [python, "-m", "hespas", "sample", "all", "--quiet"]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    absent = _absent_packages(python, environment)
    printed: list[str | None] = []
    for example in shown:
        for name, content in example.files:
            (folder / name).write_text(content, encoding="utf-8")
        if not example.is_runnable or example.needs in absent:
            printed.append(None)
            continue
        done = subprocess.run(
            ["sh", "-c", example.command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            encoding="utf-8",
        )
        printed.append(done.stdout)
    return printed


def _absent_packages(python: str, environment: Mapping[str, str]) -> set[str]:
    """Return the packages that the environment of an interpreter does not have."""
    code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if not importlib.util.find_spec(n)))"
    command = [python, "-c", code, *_PACKAGES]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def comparable(output: str) -> str:
    """Return an output without the sizes of written files, which depend on the versions of libraries."""
    return _FILE_SIZE.sub(r"\1its size)", output)


def refreshed(text: str, shown: Sequence[Example], printed: Sequence[str | None]) -> str:
    """Return the document with the new outputs instead of the old ones."""
    for example, output in reversed(list(zip(shown, printed, strict=True))):
        if output is not None:
            text = text[: example.start] + output + text[example.end :]
    return text
