"""A child process bears what a native parser does: crashes, hangs and a greed for memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hespas.files import sandbox
from hespas.files.sandbox import OUT_OF_MEMORY, run_contained

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much address space there is")


def _module(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """A module for a child: its ``main``."""
    lines = ["import os, sys, time", "def main():", *(f"    {line}" for line in body.splitlines())]
    (folder / "parser_of_tests.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return "parser_of_tests"


@pytest.mark.parametrize(
    ("body", "fate"),
    [
        ("sys.stdout.write('fine')", ""),
        ("os.kill(os.getpid(), 11)", "makes X end with SIGSEGV"),
        ("time.sleep(60)", "keeps X busy without end"),
        (f"sys.exit({OUT_OF_MEMORY})", "makes X ask for more than 157,286,400 bytes of memory"),
    ],
)
def test_what_becomes_of_a_child_is_told(
    body: str, fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_LIMIT_S", 2)
    done = run_contained(_module(tmp_path, monkeypatch, body), b"", "X")
    assert done is not None
    assert done.fate == fate
    assert done.output == (b"" if fate else b"fine")


_GREEDY = """from hespas.files.sandbox import bounded_memory
with bounded_memory(1 << 20):
    few = bytearray(100 << 20)
    try:
        bytearray(1 << 30)
    except MemoryError:
        print("bounded")
print(len(bytearray(1 << 30)))"""


@linux
def test_memory_is_bounded_within_and_free_again_after() -> None:
    done = subprocess.run([sys.executable, "-c", _GREEDY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bounded", str(1 << 30)]
