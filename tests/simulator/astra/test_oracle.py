"""Every recorded run of ASTRA-sim is reproduced rank by rank to the nanosecond."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from hespas.api import simulate
from hespas.api.simulation_result import SimulationResult
from hespas.simulator.astra import Backend

ORACLE = Path(__file__).parents[4] / "shared" / "data" / "astra_oracle"
CASES = sorted(path.parent for path in ORACLE.glob("*/w.0.et"))

pytestmark = pytest.mark.skipif(not CASES, reason="the recorded runs of ASTRA-sim are not here")

ROOFLINE = (
    ("roofline_compute_bound_percentage", 100.0),
    ("roofline_average_compute_utilization", 100.0),
    ("roofline_average_memory_utilization", 100.0),
    ("roofline_average_operation_intensity", 1.0),
)


class Recorded(TypedDict):
    backend: Backend
    num_queues_per_dim: int


def simulated(case: Path) -> SimulationResult:
    recorded: Recorded = json.loads((case / "run.json").read_text())
    return simulate(
        case,
        mode="astra",
        system_config=case / "system.json",
        network_config=case / "network.yml",
        backend=recorded["backend"],
        queues_per_dim=recorded["num_queues_per_dim"],
    )


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_every_rank_is_exact(case: Path) -> None:
    expected: list[dict[str, float]] = json.loads((case / "expected.json").read_text())["ranks"]
    done = simulated(case)
    found = done.astra_statistics
    assert found is not None
    names = {
        "finish_ns": found.finish_ns,
        "exposed_comm_ns": found.exposed_comm_ns,
        "wall_ns": found.wall_ns,
        "gpu_ns": found.compute_ns,
        "comm_ns": found.comm_ns,
        "overlap_ns": found.overlap_ns,
    }
    for name, column in names.items():
        # What is 0 was not printed.
        assert column.tolist() == [rank.get(name, 0) for rank in expected], name
    assert done.timeline.finish_ns.tolist() == found.finish_ns.tolist()
    if "roofline_compute_bound_percentage" in expected[0]:
        assert found.roofline is not None
        printed = [[rank[name] / scale for name, scale in ROOFLINE] for rank in expected]
        # Printed with three decimals, three of the four as per cent.
        np.testing.assert_allclose(found.roofline, printed, atol=5.1e-4)
    else:
        assert found.roofline is None
