"""Estimator by the cycles that XLA for TPUs writes into compiled programs, divided by the clock.

    t = max(estimated_cycles / clock, roof)          [ns]

XLA selects layouts and tiles by these cycles. They come from a heuristic, and their sum is not the run time.
Only nodes of the program's schedule are used, because the bodies of fusions repeat the cycles of the fusion.
A collective has no cycles (those at a fusion around it are of the rest of the fusion), and programs for GPUs
have none. Zero, negative and extremely large cycles mean "unknown". The clock is the clock of the device's
systolic array. Times below the device's roofline bound are raised to it.
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
"""Limit of cycles, ten minutes of any clock: larger figures are sentinels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """Estimator that converts cycle counts to time. XLA for TPUs writes these counts into the program.
    ``clock_ghz``: clock rate of the cycles (0: the device's clock rate).
    """

    clock_ghz: float = 0.0

    inert_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """Name of the model: ``compiler``."""
        return "compiler"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node for which the compiler states cycles; NaN for others.
        O(nodes + attributes).
        """
        findings = diagnostics if diagnostics is not None else Diagnostics()
        free = takes_no_time(graph)
        computes = (graph.kind == int(NodeKind.COMPUTE)) & ~free
        # The compiler wrote the cycles of a node into its backend configuration.
        stated = np.full(len(graph), np.nan)
        keys = [row for row in np.unique(graph.extra.key).tolist() if graph.strings[row] == _CONFIG]
        rows = np.flatnonzero(np.isin(graph.extra.key, keys) & (graph.extra.node >= 0))
        for row, node in zip(rows.tolist(), graph.extra.node[rows].tolist(), strict=True):
            match = _CYCLES.search(graph.extra.value(row))
            if match is not None:
                stated[node] = float(match[1])
        cycles = np.where(computes, stated, np.nan)
        sentinel = (cycles <= 0) | (cycles > _MOST_CYCLES)
        clock_hz = nan if device.systolic is None else device.systolic.clock_hz
        if self.clock_ghz > 0:
            clock_hz = self.clock_ghz * 1e9
        time: FloatArray = np.where(sentinel, np.nan, cycles) / clock_hz * 1e9
        with np.errstate(invalid="ignore"):
            raised = roof_ns(operations_on(graph, device), device)
            lifted = raised > time
        _report(
            graph, device, findings, stated=cycles, sentinel=sentinel, lifted=lifted, no_clock=isnan(clock_hz)
        )
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
            bases=("compiler's cycles",),
            basis=np.where(unknown | free, -1, 0).astype(np.int16),
        )


def _report(
    graph: OpGraph,
    device: Device,
    findings: Diagnostics,
    *,
    stated: FloatArray,
    sentinel: BoolArray,
    lifted: BoolArray,
    no_clock: bool,
) -> None:
    """Report the source of the times, and the stated cycles that were not used."""
    figures = int((~np.isnan(stated)).sum())
    if not figures:
        findings.warning(
            "compiler.none",
            graph.name,
            "the program states no cycles: only programs compiled for TPUs do (`compile_for=tpu:v5e:2x4`)",
        )
        return
    if no_clock:
        findings.warning(
            "compiler.no-clock",
            device.name,
            "the device file states no clock to convert cycles: set `clock_ghz` of the estimator",
            count=figures,
        )
        return
    used = figures - int(sentinel.sum())
    findings.info(
        "compiler.heuristic",
        graph.name,
        "times are cycles by which the compiler chose its tiles: a heuristic, not a measurement",
        count=used,
    )
    findings.warning(
        "compiler.sentinel",
        graph.name,
        "nodes state cycles of 0 or less, or more than any run takes: ignored",
        count=int(sentinel.sum()),
    )
    findings.warning(
        "compiler.beats-roof",
        device.name,
        "nodes have fewer cycles than the device's peaks allow: raised to the peaks",
        count=int(lifted.sum()),
    )
