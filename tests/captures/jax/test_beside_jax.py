"""Captured programs equal the programs of XLA in each instruction, and compute the same as jit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SAFETY_S

pytest.importorskip("jax")
ROOT = Path(__file__).parents[3]
CASES = [
    ("step_of_llama", 2, 4),
    ("step_of_llama", 2, 2),
    ("vocabulary", 2, 4),
    *((name, 2, 4) for name in ("convolution", "scanned", "loop", "moved", "ring")),
    ("experts", 8, 1),
]


@pytest.mark.parametrize(("name", "data", "model"), CASES)
def test_a_captured_program_is_that_of_xla(name: str, data: int, model: int) -> None:
    command = [sys.executable, "-m", "tests.captures.jax.beside_jax", name, str(data), str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SAFETY_S)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["instructions"] > 20
    assert answer["mine_only"] == []
    assert answer["theirs_only"] == []
    assert answer["difference"] < 1e-6
