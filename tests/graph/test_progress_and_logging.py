"""Progress bars with tqdm's interface, and findings in the logger ``hespas``."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import hespas
from hespas.graph import Diagnostics

ROOT = Path(__file__).parents[2]


class _Bar:
    """Bar with the interface of tqdm, which records what it shows."""

    shown: list[tuple[float, float | None]] = []  # noqa: RUF012 - shared by all bars of a test

    def __init__(self, *, total: float | None, desc: str) -> None:
        self.n: float = 0
        self.total, self.desc, self.is_closed = total, desc, False

    def update(self, n: float) -> None:
        assert not self.is_closed
        self.n += n
        self.shown.append((self.n, self.total))

    def refresh(self) -> None:
        self.shown.append((self.n, self.total))

    def close(self) -> None:
        self.is_closed = True


def test_progress_of_a_growing_total() -> None:
    _Bar.shown.clear()
    progress = hespas.ProgressBar(_Bar, desc="read")
    for done, total in ((0, 2), (1, 2), (1, 4), (4, 4)):
        progress(done, total)
    assert _Bar.shown == [(0, 2), (1, 2), (1, 4), (1, 4), (4, 4)]
    progress(1, 1)  # further work draws a further bar
    assert _Bar.shown[-1] == (1, 1)


def test_progress_of_a_conversion(tmp_path: Path) -> None:
    _Bar.shown.clear()
    source = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"
    hespas.convert(source, tmp_path / "traces", progress=hespas.ProgressBar(_Bar, desc="write"))
    done, total = _Bar.shown[-1]
    assert done == total
    assert done >= 1


def test_findings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    diagnostics = Diagnostics(keep=2)
    with caplog.at_level(logging.INFO, "hespas"):
        for number in range(5):
            diagnostics.warning("x.guessed", f"node {number}", "guessed a size")
        diagnostics.info("x.note", "node \udfff", "read")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "node 0: guessed a size [x.guessed]"),
        ("WARNING", "node 1: guessed a size [x.guessed]"),
        ("INFO", "node \\udfff: read [x.note]"),
    ]


def test_nothing_is_printed_without_a_handler() -> None:
    program = "import logging\nfrom hespas.graph import Diagnostics\nDiagnostics().warning('a', 'b', 'c')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=ROOT)
    assert done.stdout == done.stderr == b""
