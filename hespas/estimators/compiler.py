"""The compiler's own estimates: cycles that XLA for TPUs writes beside what it schedules, over the clock.

    t = max(estimated_cycles / clock, roof)          [ns]

XLA chooses layouts and tiles by these cycles: a heuristic of its own, not a measurement, and their sum is no
run time. Only what stands in a program's schedule counts: the bodies of fusions repeat figures. A collective
has none (what is stated at the fusion around one is of its body), nor has anything compiled for GPUs; zero
and negative figures, and such as no clock reaches, stand for "unknown". The clock is that of the device's
systolic array; what no device can do is raised to its roof.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isnan, nan
from typing import ClassVar

import numpy as np

from hespas.estimators.interface import operations_on, takes_no_time
from hespas.estimators.rates import roof_ns
from hespas.graph import Diagnostics, Estimate, NodeKind, OpGraph
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device

__all__ = ["Compiler"]

_CONFIG = "backend_config"
_CYCLES = re.compile(rb'"estimated_cycles"\s*:\s*"?(-?\d{1,20})')
_MOST_CYCLES = 1e12
"""Ten minutes of any clock: larger figures are sentinels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """Cycles as the compiler states them. ``clock_ghz``: the clock they count (0: that of the device)."""

    clock_ghz: float = 0.0

    inert_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """``compiler``."""
        return "compiler"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Time of one execution of each node that has a figure of its own. O(nodes + attributes)."""
        found = diagnostics if diagnostics is not None else Diagnostics()
        free = takes_no_time(graph)
        computes = (graph.kind == int(NodeKind.COMPUTE)) & ~free
        stated = np.where(computes, _stated_cycles(graph), np.nan)
        sentinel = (stated <= 0) | (stated > _MOST_CYCLES)
        clock_hz = self._clock_hz(device)
        time: FloatArray = np.where(sentinel, np.nan, stated) / clock_hz * 1e9
        with np.errstate(invalid="ignore"):
            raised = roof_ns(operations_on(graph, device), device)
            lifted = raised > time
        _tell(graph, device, found, stated=stated, sentinel=sentinel, lifted=lifted, no_clock=isnan(clock_hz))
        duration = np.where(free, 0.0, np.where(lifted, raised, time))
        unknown = np.isnan(duration)
        return Estimate(
            hardware=device.name,
            estimators=(self.name,),
            bounds=("free", "cycles", "roof"),
            duration_ns=duration,
            low_ns=np.full(len(graph), np.nan),
            high_ns=np.full(len(graph), np.nan),
            estimator=np.where(unknown, -1, 0).astype(np.int8),
            bound=np.where(unknown, -1, np.where(free, 0, np.where(lifted, 2, 1))).astype(np.int8),
        )

    def _clock_hz(self, device: Device) -> float:
        if self.clock_ghz > 0:
            return self.clock_ghz * 1e9
        return nan if device.systolic is None else device.systolic.clock_hz


def _stated_cycles(graph: OpGraph) -> FloatArray:
    """The figure of each node's own configuration, NaN where there is none."""
    cycles = np.full(len(graph), np.nan)
    keys = [row for row in np.unique(graph.extra.key).tolist() if graph.strings[row] == _CONFIG]
    rows = np.flatnonzero(np.isin(graph.extra.key, keys) & (graph.extra.node >= 0))
    for row, node in zip(rows.tolist(), graph.extra.node[rows].tolist(), strict=True):
        match = _CYCLES.search(graph.extra.value(row))
        if match is not None:
            cycles[node] = float(match[1])
    return cycles


def _tell(
    graph: OpGraph,
    device: Device,
    found: Diagnostics,
    *,
    stated: FloatArray,
    sentinel: BoolArray,
    lifted: BoolArray,
    no_clock: bool,
) -> None:
    """What the times rest on, and which figures were not taken as they stand."""
    known = int((~np.isnan(stated)).sum())
    if not known:
        found.warning(
            "compiler.none",
            graph.name,
            "states no cycles: only programs that XLA compiled for TPUs do (`compile_for=tpu:v5e:2x4`)",
        )
        return
    if no_clock:
        found.warning(
            "compiler.no-clock",
            device.name,
            "its file states no clock: cycles are no time; `clock_ghz` of the estimator states one",
            count=known,
        )
        return
    taken = known - int(sentinel.sum())
    found.info(
        "compiler.heuristic",
        graph.name,
        "times are cycles by which the compiler chose its tiles: a heuristic, not a measurement",
        count=taken,
    )
    found.warning(
        "compiler.sentinel",
        graph.name,
        "nodes state cycles of 0 or less, or more than any run takes: no estimate, left out",
        count=int(sentinel.sum()),
    )
    found.warning(
        "compiler.beats-roof",
        device.name,
        "nodes are stated to be faster than the device's peaks allow: raised to these",
        count=int(lifted.sum()),
    )
