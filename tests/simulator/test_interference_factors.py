"""Contention factors of nodes, by hand.

An A100-SXM-40GB has 108 SMs, of which a collective occupies 24, and 1,555 GB/s of memory bandwidth. Its
fitted factors are 0.87 (arithmetic) and 1.37 (memory) of s / (1 - s).
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import nan

import numpy as np
import pytest

from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    Estimate,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    Resource,
    StridedGroups,
    Workload,
    dtype,
)
from hespas.graph.columns import constant
from hespas.hardware import Device, load_device
from hespas.simulator.interference import Pressure, pressures_of, uniform_pressures
from tests.simulator.job.small_jobs import part

A100 = load_device("A100-SXM-40GB")
BANDWIDTH = A100.main_memory.bandwidth_bytes_per_s
ALL = StridedGroups.all_ranks(2)
RING = Permutation(2, (2, 1), 1, True)


def estimate_of(graph: OpGraph, duration_ns: list[float]) -> Estimate:
    nodes = len(graph)
    return Estimate(
        hardware="A100-SXM-40GB",
        estimators=("model",),
        bounds=("model",),
        duration_ns=np.array(duration_ns),
        low_ns=constant(nan, nodes),
        high_ns=constant(nan, nodes),
        estimator=np.zeros(nodes, np.int8),
        bound=np.zeros(nodes, np.int8),
    )


def pressure_of(graph: OpGraph, duration_ns: list[float], device: Device = A100) -> Pressure:
    found = pressures_of(Workload.spmd(graph, 2), [estimate_of(graph, duration_ns)], device, Diagnostics())
    assert found is not None
    return found[0]


def of_share(factor: float, share: float) -> float:
    return factor * share / (1 - share)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (CollectiveKind.ALL_REDUCE, 2),
        (CollectiveKind.ALL_GATHER, 1),
        (CollectiveKind.REDUCE_SCATTER, 1),
        (CollectiveKind.ALL_TO_ALL, 1),
        (CollectiveKind.BROADCAST, 1),
    ],
)
def test_factors_of_collectives(kind: CollectiveKind, times: int) -> None:
    """1 MB in 10 us, out of memory and into it; twice for an all-reduce."""
    made = part()
    made.collective(ALL, nan, kind=kind)
    found = pressure_of(made.built(), [10_000.0])
    assert found.holds[0] == pytest.approx(of_share(0.87, 24 / 108))
    assert found.moves[0] == pytest.approx(of_share(1.37, 2 * times * 1e11 / BANDWIDTH))
    assert (found.by_units[0], found.by_memory[0], bool(found.stretches[0])) == (0, 0, True)


def test_factors_of_messages() -> None:
    """They occupy units and move bytes, but do not take longer."""
    made = part()
    made.message(NodeKind.SEND, RING, nan)
    found = pressure_of(made.built(), [10_000.0])
    assert found.holds[0] == pytest.approx(of_share(0.87, 24 / 108))
    assert found.moves[0] == pytest.approx(of_share(1.37, 2 * 1e11 / BANDWIDTH))
    assert not found.stretches[0]


def test_the_largest_buffer_counts() -> None:
    """Of an all-gather, the result is larger than the message that is stated."""
    made = part()
    node = made.builder.add_node(name_id=0, op_id=0, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
    made.builder.add_collective(
        node, CollectiveKind.ALL_GATHER, group_set=made.builder.group_set(ALL), comm_bytes=5e5,
        operand_bytes=5e5, result_bytes=1e6,
    )  # fmt: skip
    found = pressure_of(made.built(), [10_000.0])
    assert found.moves[0] == pytest.approx(of_share(1.37, 2 * 1e11 / BANDWIDTH))


def test_no_collective_is_faster_than_its_links() -> None:
    """1 MB in 1 us would be 2 TB/s; NVLink has 300 GB/s each way."""
    made = part()
    made.collective(ALL, nan)
    found = pressure_of(made.built(), [1_000.0])
    assert found.moves[0] == pytest.approx(of_share(1.37, 2 * 300e9 / BANDWIDTH))


def test_no_more_than_half_is_taken() -> None:
    """The formula covers half of the units and of the bandwidth: 24 of 30 units, and links without a
    limit.
    """
    made = part()
    made.collective(ALL, nan)
    device = replace(A100, units=30, links=tuple(link for link in A100.links if link.kind == "pcie"))
    found = pressure_of(made.built(), [1_000.0], device)
    assert found.holds[0] == pytest.approx(0.87)
    assert found.moves[0] == pytest.approx(1.37)


def test_communication_without_an_estimate_moves_nothing_known() -> None:
    """It occupies units, and takes as long as recorded."""
    made = part()
    made.collective(ALL, 5_000.0)
    found = pressure_of(made.built(), [nan])
    assert found.holds[0] == pytest.approx(of_share(0.87, 24 / 108))
    assert (found.moves[0], bool(found.stretches[0])) == (0, False)


def test_kernels_are_limited_by_arithmetic_or_by_memory() -> None:
    """Half by each if their costs are unknown. Recorded times, and the host, are not slowed down."""
    made = part()
    costs = ((1e12, 1e3), (1e3, 1e9), (nan, nan))
    for flops, read in costs:
        made.builder.add_node(
            name_id=0, op_id=made.builder.strings.add("op"), op_class=OpClass.ELEMENTWISE, flops=flops,
            transcendentals=0.0, bytes_read=read, bytes_written=0.0,
        )  # fmt: skip
    for node in range(3):
        made.builder.set(node, rate_dtype=dtype("f32").code)
    made.compute(5_000.0)
    made.compute(nan)
    made.builder.set(4, resource=int(Resource.HOST))
    found = pressure_of(made.built(), [10.0, 10.0, 10.0, nan, 10.0])
    assert found.by_units.tolist() == [1, 0, 0.5, 0, 0]
    assert found.by_memory.tolist() == [0, 1, 0.5, 0, 0]
    assert not found.holds.any()
    assert not found.stretches.any()


def test_the_report_counts_jobs_with_an_effect() -> None:
    for names, count in ((("collective", "compute"), 1), (("compute",), 0), (("collective",), 0)):
        made, findings = part(), Diagnostics()
        for name in names:
            if name == "collective":
                made.collective(ALL, nan)
            else:
                made.compute(nan)
        graph = made.built()
        pressures_of(Workload.spmd(graph, 2), [estimate_of(graph, [1e4] * len(names))], A100, findings)
        assert findings.counts().get("simulate.interference", 0) == count


def test_uniform_pressures() -> None:
    made = part()
    made.collective(ALL, nan)
    made.compute(nan)
    made.compute(5_000.0)
    graph = made.built()
    (found,) = uniform_pressures(Workload.spmd(graph, 2), [estimate_of(graph, [1e4, 1e4, nan])], 0.3)
    assert found.moves.tolist() == [0.3, 0, 0]
    assert found.by_memory.tolist() == [0, 1, 0]
    assert not found.holds.any()
    assert not found.by_units.any()
    assert not found.stretches.any()


def some(**columns: list[float]) -> Pressure:
    count = len(next(iter(columns.values())))
    arrays = {name: np.array(values) for name, values in columns.items()}
    return replace(Pressure.none(count), **arrays)


def test_factors_matter_if_both_sides_have_some() -> None:
    for communicates in ("holds", "moves"):
        for computes in ("by_units", "by_memory"):
            assert some(**{communicates: [0.0, 0.1], computes: [0.2, 0.0]}).matters
            assert not some(**{communicates: [0.0, 0.1], computes: [0.0, 0.0]}).matters
            assert not some(**{communicates: [0.0, 0.0], computes: [0.2, 0.0]}).matters


def test_rows_of_factors() -> None:
    found = some(holds=[1.0, 2.0, 3.0], moves=[4.0, 5.0, 6.0])
    stretched = replace(found, stretches=np.array([True, True, True]))
    taken = stretched.take(np.array([2, 0, 1]), np.array([True, False, True]))
    assert taken.holds.tolist() == [3, 0, 2]
    assert taken.moves.tolist() == [6, 0, 5]
    assert taken.stretches.tolist() == [True, False, True]
    assert found.take(np.array([1, 1])).holds.tolist() == [2, 2]
    # Rows that are not valid may lie outside.
    assert found.take(np.array([-1, 7]), np.zeros(2, np.bool_)).holds.tolist() == [0, 0]
    nothing = Pressure.none(0).take(np.array([-1, -1]), np.zeros(2, np.bool_))
    assert len(nothing) == 2
    assert not any(getattr(nothing, column.name).any() for column in fields(nothing))


def test_joined_factors() -> None:
    joined = Pressure.joined([some(holds=[1.0, 2.0]), some(holds=[3.0])])
    assert joined.holds.tolist() == [1, 2, 3]
    assert len(Pressure.joined([])) == 0
