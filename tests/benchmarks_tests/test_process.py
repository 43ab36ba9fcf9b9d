"""Measured CPU time and memory belong to the measured process alone."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks.process import run

BARE = [sys.executable, "-I", "-S", "-c"]


def test_the_peak_is_of_the_child_not_of_who_measures() -> None:
    held = np.ones(50_000_000)  # 400 MB in this process
    small = run([*BARE, "pass"])
    large = run([*BARE, "x = b'1' * 200_000_000"])
    assert held.nbytes == 400_000_000
    assert small.peak_mb < 60
    assert 200 < large.peak_mb < 300


def test_a_command_that_fails_says_what_it_wrote() -> None:
    with pytest.raises(RuntimeError, match="no such luck"):
        run([*BARE, "raise SystemExit('no such luck')"])


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="nowhere-at-all"):
        run(["nowhere-at-all"])
