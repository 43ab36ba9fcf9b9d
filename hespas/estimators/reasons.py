"""Why a node has no estimate, told to the user once per operation and reason."""

from __future__ import annotations

import numpy as np

from hespas.estimators.network import NetworkCosts
from hespas.estimators.rates import arithmetic_dtype, contraction_choices
from hespas.graph import DTYPES, UNKNOWN_DTYPE, Diagnostics, NodeKind, OpGraph
from hespas.graph.columns import BoolArray
from hespas.hardware import Device

__all__ = ["tell_compute", "tell_network", "tell_other", "tell_rates"]

_NARROW = 16
"""Bits below which a type is one that only some devices multiply."""


def tell_compute(
    graph: OpGraph, device: Device, unknown: BoolArray, no_rate: BoolArray, diagnostics: Diagnostics
) -> None:
    """Reasons for compute nodes; the first that applies to a node counts."""
    bytes_unknown = np.isnan(graph.bytes_moved)
    flops_unknown = np.isnan(graph.flops)
    reasons: tuple[tuple[str, str, BoolArray], ...] = (
        ("roofline.unknown-cost", "neither FLOPs nor bytes are known", flops_unknown & bytes_unknown),
        ("roofline.unknown-flops", "the FLOPs are unknown", flops_unknown),
        ("roofline.unknown-bytes", "the bytes are unknown", bytes_unknown),
        (
            "roofline.unknown-dtype",
            "the element type is unknown (--default-dtype bf16 states one for all that state none)",
            no_rate & (arithmetic_dtype(graph, UNKNOWN_DTYPE) == UNKNOWN_DTYPE),
        ),
        ("roofline.no-rate", f"{device.name} has no rate for the element type", no_rate),
        ("roofline.no-host-link", f"{device.name} states no link to the host", unknown),
    )
    rest = unknown
    for code, message, applies in reasons:
        _tell(graph, code, message, rest & applies, diagnostics)
        rest = rest & ~applies


def tell_rates(graph: OpGraph, device: Device, diagnostics: Diagnostics) -> None:
    """Products of narrow or unlike types for which the device lists no rate of their own: what stands in."""
    table = graph.contractions
    is_narrow = np.array([entry.bits < _NARROW for entry in DTYPES] + [False])
    rows = np.flatnonzero((table.lhs != table.rhs) | is_narrow[table.lhs])
    if not len(rows):
        return
    choices, place = contraction_choices(table, device)
    told: dict[str, int] = {}
    for which, count in zip(*np.unique(place[rows], return_counts=True), strict=True):
        choice = choices[int(which)]
        if choice is not None and not choice.exact:
            told[choice.rule] = told.get(choice.rule, 0) + int(count)
    for rule, count in told.items():
        diagnostics.warning("roofline.rate-fallback", device.name, rule, count=count)


def tell_other(graph: OpGraph, unknown: BoolArray, diagnostics: Diagnostics) -> None:
    """Nodes that no device runs, and communication without a row that says what it moves."""
    invalid = graph.kind == int(NodeKind.INVALID)
    compute = graph.kind == int(NodeKind.COMPUTE)
    bare = ~(invalid | compute)
    bare[graph.collectives.node] = False
    bare[graph.p2p.node] = False
    for code, message, applies in (
        ("roofline.invalid-node", "the node has no kind", invalid),
        ("roofline.host-node", "the host runs it, not the device", compute),
        ("roofline.unknown-message", "what it communicates is unknown", bare),
    ):
        _tell(graph, code, message, unknown & applies, diagnostics)


def tell_network(graph: OpGraph, device: Device, rows: NetworkCosts, diagnostics: Diagnostics) -> None:
    """Reasons for collectives and messages, from their cost rows."""
    unknown = np.isnan(rows.duration_ns) & ~rows.no_group & ~rows.no_link
    reasons = (
        ("roofline.unknown-group", "the ranks of the group are unknown (state num_ranks)", rows.no_group),
        ("roofline.no-link", f"{device.name} has no link that leaves its scale-up domain", rows.no_link),
        ("roofline.unknown-message", "the kind or the bytes of the communication are unknown", unknown),
    )
    for code, message, applies in reasons:
        mask = np.zeros(len(graph), np.bool_)
        mask[rows.node[applies]] = True
        _tell(graph, code, message, mask, diagnostics)


def _tell(graph: OpGraph, code: str, message: str, nodes: BoolArray, diagnostics: Diagnostics) -> None:
    """One warning per operation name with the number of its nodes and the place of the first."""
    rows, first, counts = np.unique(graph.op_row[nodes], return_index=True, return_counts=True)
    where = np.flatnonzero(nodes)
    for row, place, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
        node = int(where[place])
        location = graph.strings[int(graph.source_row[node])] or f"node {int(graph.id[node])}"
        operation = graph.strings[row] or "unnamed node"
        diagnostics.warning(code, location, f"{operation}: no duration, {message}", count=count)
