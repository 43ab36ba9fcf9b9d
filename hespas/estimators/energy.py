"""Energy of a step on a device whose file has figures for it: a floor and a ceiling, never a guess between.

The floor counts arithmetic (without transcendentals, registers and wires) and traffic to main memory, where
the file has their energies; the ceiling is the board at its thermal design power while the operations run one
after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np

from hespas.estimators.rates import contraction_choices, stored_bytes
from hespas.graph import DTYPES, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.passes import known_sum
from hespas.hardware import Device
from hespas.hardware.peaks import energy_pj_per_flop, tdp_energy_j
from hespas.operations import arithmetic_dtype

__all__ = ["StepEnergy", "node_energy_j", "step_energy"]


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """Joules of one rank and step; NaN unknown. ``at_least_j`` is what is known of the parts the file has
    figures for; ``at_tdp_j`` has the board at ``tdp_w`` watts for the work of the step.
    """

    at_least_j: float
    at_tdp_j: float
    tdp_w: float


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are infinite
def step_energy(graph: OpGraph, device: Device, duration_ns: float) -> StepEnergy:
    """Energy of one step that takes ``duration_ns``. O(nodes)."""
    known = known_sum(node_energy_j(graph, device) * graph.multiplicity)
    return StepEnergy(known, tdp_energy_j(device, duration_ns), device.tdp_w)


@np.errstate(over="ignore", invalid="ignore")
def node_energy_j(graph: OpGraph, device: Device) -> FloatArray:
    """Joules of one execution of each node that the file's figures account for, shape ``(nodes,)``; NaN where
    they account for nothing.
    """
    table = graph.contractions
    parts = [stored_bytes(graph, device) * device.main_memory.energy_pj_per_byte]
    in_products = np.zeros(len(graph))
    if len(table):
        choices, place = contraction_choices(table, device)
        each = [nan if one is None else one.peak.energy_pj_per_flop * one.products for one in choices]
        in_products = np.bincount(table.node, table.flops, len(graph)).astype(np.float64)
        products = np.bincount(table.node, table.flops * np.array(each)[place], len(graph))
        parts.append(np.where(in_products > 0, products, 0.0))
    vector = [energy_pj_per_flop(device, "vector", entry.name) for entry in DTYPES]
    rest = np.maximum(graph.flops - in_products, 0.0)
    parts.append(np.where(rest == 0, 0.0, rest * np.array([*vector, nan])[arithmetic_dtype(graph, -1)]))
    known = np.nansum(parts, axis=0)
    # Nothing moved and nothing computed takes nothing; a part that is unknown is not nothing.
    return np.where((known == 0) & np.isnan(parts).any(axis=0), nan, known) * 1e-12
