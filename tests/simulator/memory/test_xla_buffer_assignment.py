"""Peaks of compiled programs against the memory that XLA's own buffer assignment reserves for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import hespas
from hespas.graph import Workload
from hespas.simulator.memory import MemoryUse, memory_use

FIXTURES = Path(__file__).parents[3] / "fixtures"
ROWS: list[dict[str, Any]] = msgspec.json.decode((FIXTURES / "manifest.json").read_bytes())["files"]
RESERVED: dict[str, dict[str, int]] = {row["file"]: row["xla_memory"] for row in ROWS if row["xla_memory"]}
TUPLES = 1024
"""XLA counts tables of pointers for tuples, and rounds each buffer up to 64 bytes."""
BEYOND = {
    # A conditional writes the result of each of its branches into one buffer; only the branch that is taken
    # to run stands in the graph's schedule, so that this buffer is free earlier.
    "hlo/branches.hlo.txt": 0.18,
}


def use_of(file: str) -> MemoryUse:
    workload = hespas.read(FIXTURES / file)
    assert isinstance(workload, Workload)
    found = memory_use(workload.classes[0])
    assert found is not None
    return found


def test_there_are_programs_of_many_kinds() -> None:
    assert len(RESERVED) >= 21
    assert any(row["alias"] for row in RESERVED.values())


@pytest.mark.parametrize("file", sorted(RESERVED))
def test_the_peak_is_that_of_the_buffer_assignment(file: str) -> None:
    xla, found = RESERVED[file], use_of(file)
    whole = xla["argument"] + xla["output"] - xla["alias"] + xla["temp"]
    ours = found.peak_bytes - found.constants_bytes  # XLA:CPU keeps those with the code
    assert found.unknown == 0
    assert ours == pytest.approx(whole, rel=BEYOND.get(file, 0.05), abs=TUPLES)


@pytest.mark.parametrize("file", sorted(RESERVED))
def test_parameters_results_and_donations_are_xlas(file: str) -> None:
    xla, found = RESERVED[file], use_of(file)
    assert found.parameters_bytes == xla["argument"]
    assert found.donated_bytes == xla["alias"]
    assert found.outputs_bytes == pytest.approx(xla["output"] - xla["alias"], rel=0.001, abs=TUPLES)
