"""Costs and durations: signs, units, and zeros where there is work."""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.preserve import simulated_ns
from hespas.graph import NodeKind, OpClass, Resource
from hespas.graph.columns import BoolArray, FloatArray
from hespas.validators.job import Job, Report
from hespas.validators.rules.structure import is_kind

__all__ = ["duration_where_work", "known_trips", "legal_costs", "plausible_units", "positive_duration"]

_COSTS = (
    ("flops", "FLOPs"),
    ("useful_flops", "useful FLOPs"),
    ("transcendentals", "transcendentals"),
    ("bytes_read", "bytes read"),
    ("bytes_written", "bytes written"),
    ("duration_ns", "ns"),
    ("multiplicity", "executions"),
)
_LONGEST_NS = 1e12
_MOST_APART = 0.01
"""Share of the exact time by which what simulators read may differ from it."""


def legal_costs(job: Job, report: Report) -> None:
    """GR001: costs, sizes and trip counts are not negative and not infinite."""
    for index, graph in enumerate(job.classes):
        for name, unit in _COSTS:
            column: FloatArray = getattr(graph, name)
            report.nodes(index, column < 0, f"it states a negative number of {unit}")
            report.nodes(index, np.isinf(column), f"it states infinitely many {unit}")
        for table in (graph.collectives, graph.p2p):
            wrong = np.zeros(len(graph), np.bool_)
            wrong[table.node[(table.comm_bytes < 0) | np.isinf(table.comm_bytes)]] = True
            report.nodes(index, wrong, "its message size is negative or infinite")
        trips = graph.regions.trips
        if (trips < 0).any():
            report.add(f"{int((trips < 0).sum()):,} loops run a negative number of times")


def plausible_units(job: Job, report: Report) -> None:
    """GR003: durations look like nanoseconds and message sizes like whole bytes."""
    for index, graph in enumerate(job.classes):
        long = (graph.duration_ns > _LONGEST_NS) & np.isfinite(graph.duration_ns)
        report.nodes(index, long, f"it takes more than {_LONGEST_NS / 1e9:,.0f} s: is that ns?")
        for table in (graph.collectives, graph.p2p):
            fraction = np.isfinite(table.comm_bytes) & (table.comm_bytes != np.floor(table.comm_bytes))
            mask = np.zeros(len(graph), np.bool_)
            mask[table.node[fraction]] = True
            report.nodes(index, mask, "its message size is not a whole number of bytes")


def _works(job: Job, index: int) -> BoolArray:
    graph = job.classes[index]
    works: BoolArray = (graph.flops > 0) | (graph.bytes_moved > 0) | (graph.transcendentals > 0)
    works &= is_kind(graph, NodeKind.COMPUTE) & (graph.multiplicity != 0)
    return works


def duration_where_work(job: Job, report: Report) -> None:
    """GR005: a node that costs something takes some time."""
    for index, graph in enumerate(job.classes):
        report.nodes(index, _works(job, index) & (graph.duration_ns == 0), "it has work to do and takes 0 ns")


def positive_duration(job: Job, report: Report) -> None:
    """ET023: a compute node of a trace takes some time (ASTRA-sim makes 1 ns of 0).

    A trace cannot say "unknown", so an unknown duration is one of 0. Where it states ns as well, those and
    the microseconds that simulators read are about the same. In roofline mode durations do not count.
    """
    if job.system is not None and job.system.roofline:
        return
    for index, graph in enumerate(job.classes):
        on_device = is_kind(graph, NodeKind.COMPUTE) & (graph.resource == int(Resource.DEVICE))
        real = on_device & (graph.op_class != int(OpClass.FREE)) & (graph.multiplicity != 0)
        read_ns = simulated_ns(graph)
        _same_durations(job, index, read_ns, report)
        untimed = real & ~(read_ns > 0)
        if untimed.any() and np.array_equal(untimed, real):
            rank = next(iter(job.ranks_of(index).tolist()), None)
            report.add(f"none of the {int(real.sum()):,} compute nodes has a duration", rank=rank)
        else:
            report.nodes(index, untimed, "it has no duration, or one of 0, of which ASTRA-sim makes 1 ns")


def _same_durations(job: Job, index: int, read_ns: FloatArray, report: Report) -> None:
    """The durations that simulators read differ from the exact ones by no more than rounding does."""
    exact_ns = float(np.nansum(job.classes[index].duration_ns))
    total_ns = float(np.nansum(read_ns))
    if abs(total_ns - exact_ns) > _MOST_APART * exact_ns:
        rank = next(iter(job.ranks_of(index).tolist()), None)
        message = (
            f"duration_micros add up to {total_ns / 1e3:,.3f} us, which is what simulators read, "
            f"and duration_nanos to {exact_ns / 1e3:,.3f} us"
        )
        report.add(message, rank=rank)


def known_trips(job: Job, report: Report) -> None:
    """GR006: it is known how often every loop runs."""
    for graph in job.classes:
        rows = np.flatnonzero(np.isnan(graph.regions.trips))
        if len(rows):
            label = graph.strings[int(graph.regions.label[rows[0]])] or f"region {int(rows[0])}"
            report.add(f"{len(rows):,} loops run an unknown number of times, first {label}", count=len(rows))
