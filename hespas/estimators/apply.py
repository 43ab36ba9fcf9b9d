"""Steps around an estimate: choose the element types that the device multiplies in, write the estimated
durations into the graph, and apply the policy for nodes without an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hespas.graph import (
    DTYPES,
    SOURCE_DTYPE,
    Diagnostics,
    Estimate,
    NodeKind,
    OpClass,
    OpGraph,
    Severity,
    Workload,
    find_dtype,
    step_facts,
)
from hespas.graph.columns import BoolArray, DTypeKind, FloatArray, dtype
from hespas.graph.errors import InvariantError, UnsupportedError, UsageError
from hespas.graph.opgraph import FULL_F32_PRODUCTS
from hespas.graph.passes import is_free, with_durations
from hespas.hardware import Device, peak_for, type_multiplied

__all__ = [
    "MISSING_POLICIES",
    "MissingPolicy",
    "apply_estimate",
    "as_run_on",
    "kept_durations",
    "refuse_converted",
    "settle_missing",
    "warn_of_tf32",
]

MissingPolicy = Literal["error", "warn", "zero"]
MISSING_POLICIES: tuple[MissingPolicy, ...] = ("error", "warn", "zero")
"""Policies for nodes without a duration: raise an error, leave them unknown with a warning, or count them as
0.
"""

_LISTED = 12
_CONVERT, _WIDE_BITS = "convert", 32


def as_run_on(graph: OpGraph, device: Device, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph as ``device`` executes it: with the element types in which the device computes the
    matmuls.

    Programs compiled for a CPU convert narrow values to f32 before matmuls (see
    :data:`~hespas.graph.SOURCE_DTYPE`). Other devices multiply the narrow values without conversions. If the
    device has no matrix units for a type, matmuls run in a wider type. GPUs without TF32 units, or whose f32
    units are faster, multiply f32 in IEEE f32.
    """
    return _in_own_types(_as_written(graph, device, diagnostics), device, diagnostics)


def refuse_converted(workload: Workload, device: Device) -> None:
    """Raise ``UnsupportedError`` for matrix products in a number format that a device has no units for."""
    hint = "use another precision or device, or `on_unknown=warn` to estimate what would run"
    if _lacks_tf32(workload.metadata, device):
        raise UnsupportedError(f"{device.name} has no TF32 units: matmuls would run in IEEE f32", hint=hint)
    for graph in workload.classes:
        changes, nodes = _converted_types(graph, device)
        if changes:
            names = ", ".join(f"{name} (would run in {wider})" for name, wider in changes.items())
            raise UnsupportedError(
                f"{device.name} has no matrix units for {names}: {int(nodes.sum()):,} operations", hint=hint
            )


def _lacks_tf32(metadata: Mapping[str, str], device: Device) -> bool:
    """Return True if a step was generated for TF32 products and a GPU has no units for them."""
    facts = step_facts(metadata)
    wants_tf32 = facts is not None and facts.dtype == "tf32"
    return wants_tf32 and device.kind == "gpu" and not _rounds_to_tf32(device)


def warn_of_tf32(metadata: Mapping[str, str], device: Device, where: str, diagnostics: Diagnostics) -> None:
    """Warn about a step generated for TF32 products on a GPU without TF32 units: they run in IEEE f32."""
    message = f"{device.name} has no TF32 units: matmuls run in IEEE f32"
    diagnostics.warning("estimate.no-units", where, message, count=int(_lacks_tf32(metadata, device)))


def _converted_types(graph: OpGraph, device: Device) -> tuple[dict[str, str], BoolArray]:
    """Return the element types for which ``device`` has no matrix units, each with the wider type in which
    the device multiplies it. Also return a mask of the nodes with matmuls of these types.
    """
    table, heads = graph.contractions, graph.op_class == int(OpClass.ATTENTION)
    lhs, rhs = (_wider_codes(device)[column] for column in (table.lhs, table.rhs))
    both = (lhs >= 0) & (rhs >= 0)
    nodes = heads & (_wider_codes(device)[graph.rate_dtype] >= 0)
    codes: list[int] = np.concatenate((table.lhs[both], table.rhs[both], graph.rate_dtype[nodes])).tolist()
    nodes[table.node[both]] = True
    names = sorted({DTYPES[code].name for code in codes})
    return {name: type_multiplied(device, name) for name in names}, nodes


def _wider_codes(device: Device) -> NDArray[np.int16]:
    """Return an array that maps the code of an element type to the code of the wider type in which ``device``
    multiplies it (-1: no conversion is needed). The additional last entry is for an unknown type, whose code
    is -1.
    """
    codes = np.full(len(DTYPES) + 1, -1, np.int16)
    for code, entry in enumerate(DTYPES):
        if entry.kind is DTypeKind.FLOAT and (wider := type_multiplied(device, entry.name)) != entry.name:
            codes[code] = dtype(wider).code
    return codes


def _in_own_types(graph: OpGraph, device: Device, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph with the operand types of matmuls replaced by types for which ``device`` has matrix
    units. The stored operands keep their types, so memory traffic does not change.
    """
    changes, nodes = _converted_types(graph, device)
    for name, wider in changes.items():
        code, table = dtype(name).code, graph.contractions
        of_type = (graph.op_class == int(OpClass.ATTENTION)) & (graph.rate_dtype == code)
        of_type[table.node[(table.lhs == code) | (table.rhs == code)]] = True
        diagnostics.warning(
            "estimate.no-units",
            graph.name,
            f"{device.name} has no matrix units for {name}: estimated as matmuls in {wider}, to which "
            "operands are converted",
            count=int((of_type & nodes).sum()),
        )
    table, wider_codes = graph.contractions, _wider_codes(device)
    change = nodes[table.node] & (wider_codes[table.lhs] >= 0) & (wider_codes[table.rhs] >= 0)
    lhs, rhs = (np.where(change, wider_codes[column], column) for column in (table.lhs, table.rhs))
    f32, rounds = dtype("f32").code, _rounds_to_tf32(device)
    plain = (lhs == f32) & (rhs == f32) & (table.products == 1) & (device.kind == "gpu")
    message = "matmuls of f32 run on TF32 units, as XLA and PyTorch's allow_tf32 let them"
    diagnostics.info("estimate.tf32", graph.name, message, count=int((plain & ~change & rounds).sum()))
    message = "matmuls of f32 that may round to TF32 run in IEEE f32: the device file lists no faster units"
    full = plain & (change | (not rounds))
    diagnostics.info("estimate.ieee-f32", graph.name, message, count=int((full & ~change).sum()))
    if not changes and not full.any():
        return graph
    products = np.where(full, FULL_F32_PRODUCTS, table.products).astype(np.uint8)
    multiplies = nodes & (wider_codes[graph.rate_dtype] >= 0)
    return replace(
        graph,
        rate_dtype=np.where(multiplies, wider_codes[graph.rate_dtype], graph.rate_dtype),
        contractions=replace(table, lhs=lhs, rhs=rhs, products=products),
    )


def _rounds_to_tf32(device: Device) -> bool:
    """Return True if the device computes products of f32 operands on TF32 units, which round the operands."""
    try:
        return peak_for(device, "matrix", "f32").peak.dtype == "tf32"
    except UnsupportedError:
        return False


def _as_written(graph: OpGraph, device: Device, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph with matmuls in the narrow element types of the source program. A CPU compiler may
    have widened them to f32; the conversions that it added are removed.
    """
    key = {row for row in np.unique(graph.extra.key).tolist() if graph.strings[row] == SOURCE_DTYPE}
    rows = np.flatnonzero(np.isin(graph.extra.key, list(key)) & (graph.extra.node >= 0)).tolist()
    if device.kind == "cpu" or not rows:
        return graph
    source = np.full((2, len(graph)), -1, np.int16)
    converts = np.zeros(len(graph), np.bool_)
    for row in rows:
        node, names = int(graph.extra.node[row]), graph.extra.value(row).decode("utf-8", "replace").split(",")
        types = [find_dtype(name) for name in (names[0], names[-1])]
        source[:, node] = [-1 if kind is None else kind.code for kind in types]
        converts[node] = names == [_CONVERT]
    table, wide = graph.contractions, (source >= 0).all(axis=0)
    if not wide.any():  # conversions for anything else are real ones
        return graph
    narrow = np.where(wide, source, -1)[:, table.node]
    lhs, rhs = np.where(narrow >= 0, narrow, np.stack((table.lhs, table.rhs)))
    diagnostics.warning(
        "estimate.widened",
        graph.name,
        f"matmuls of narrow values that were widened to f32 for a CPU are estimated on {device.name} as "
        "what they were, without the conversions around them",
        count=int(wide.sum()),
    )
    bits = np.array([kind.bits for kind in DTYPES], np.float64)[source].mean(axis=0)

    def without_converts(figure: FloatArray) -> FloatArray:
        return np.where(converts, 0.0, figure)

    return replace(
        graph,
        flops=without_converts(graph.flops),
        useful_flops=without_converts(graph.useful_flops),
        transcendentals=without_converts(graph.transcendentals),
        bytes_read=without_converts(graph.bytes_read) * np.where(wide, bits / _WIDE_BITS, 1.0),
        bytes_written=without_converts(graph.bytes_written),
        rate_dtype=np.where(wide, source[0], graph.rate_dtype).astype(np.int16),
        contractions=replace(table, lhs=lhs.astype(np.int16), rhs=rhs.astype(np.int16)),
    )


def apply_estimate(
    graph: OpGraph, estimate: Estimate, missing: MissingPolicy, diagnostics: Diagnostics | None = None
) -> OpGraph:
    """Return a graph with the durations of ``estimate``; ``graph`` itself is not changed.

    A node without an estimate keeps its duration in ``graph`` (a measured one, for example). ``missing``
    applies to nodes that have neither: ``error`` raises ``UnsupportedError`` with the operations, ``warn``
    leaves NaN, ``zero`` sets 0. Both ``warn`` and ``zero`` report the nodes to ``diagnostics``. Raises
    ``UsageError`` for another policy. O(nodes).
    """
    if missing not in MISSING_POLICIES:
        raise UsageError(
            f"unknown policy {missing!r} for missing durations",
            hint=f"use one of: {', '.join(MISSING_POLICIES)}",
        )
    if len(estimate) != len(graph):
        raise InvariantError(f"the estimate has {len(estimate)} nodes, {graph.name!r} has {len(graph)}")
    findings = diagnostics if diagnostics is not None else Diagnostics()
    absent = np.isnan(estimate.duration_ns)
    durations = np.where(absent, graph.duration_ns, estimate.duration_ns)
    # A node of a branch that is not taken never runs and needs no duration.
    unknown = np.isnan(durations) & (graph.executions != 0)
    _report_kept(graph, estimate, kept_durations(graph, estimate), findings)
    if unknown.any():
        durations = _settle(graph, durations, unknown, missing, findings)
    return with_durations(graph, durations)


def kept_durations(graph: OpGraph, estimate: Estimate) -> NDArray[np.bool_]:
    """Return a mask of the nodes that have no estimate but already have a duration above 0 (for example a
    measured one) and run in this step. Shape ``(nodes,)``.
    """
    timed = (graph.duration_ns > 0) & (graph.executions != 0)
    keeps: NDArray[np.bool_] = np.isnan(estimate.duration_ns) & timed
    return keeps


def _report_kept(graph: OpGraph, estimate: Estimate, kept: NDArray[np.bool_], findings: Diagnostics) -> None:
    """Report nodes that have no estimate and keep the duration of the input file, which may have been
    measured on another device.
    """
    if not estimate.hardware:
        findings.info(
            "estimate.kept-duration",
            graph.name,
            "nodes keep their own duration",
            count=int(kept.sum()),
        )
        return
    runs = graph.executions != 0
    with np.errstate(over="ignore", invalid="ignore"):  # sums past what a float holds are infinite
        total_ns = float(np.nansum(np.where(runs, graph.duration_ns * graph.executions, 0.0)))
        kept_ns = float((graph.duration_ns * graph.executions)[kept].sum())
    share = 1.0 if kept_ns == inf else kept_ns / total_ns if total_ns > 0 else 0.0
    findings.warning(
        "estimate.kept-duration",
        graph.name,
        f"nodes without an estimate for {estimate.hardware} keep their recorded time, which may belong to "
        f"another device: {share:.1%} of the recorded time",
        count=int(kept.sum()),
    )


def settle_missing(graph: OpGraph, missing: MissingPolicy, diagnostics: Diagnostics) -> OpGraph:
    """Apply the policy ``missing`` to the compute nodes of a graph that has no estimate: see
    :func:`apply_estimate`.

    Communication nodes are skipped, because a simulator computes their duration.
    """
    compute = (graph.kind == int(NodeKind.COMPUTE)) & ~is_free(graph)
    unknown = np.isnan(graph.duration_ns) & compute & (graph.executions != 0)
    if not unknown.any():
        return graph
    return with_durations(graph, _settle(graph, graph.duration_ns, unknown, missing, diagnostics))


def _settle(
    graph: OpGraph,
    durations: NDArray[np.float64],
    unknown: NDArray[np.bool_],
    missing: MissingPolicy,
    diagnostics: Diagnostics,
) -> NDArray[np.float64]:
    """Apply the policy ``missing`` to the nodes in the mask ``unknown`` and return the new durations.
    ``error`` raises ``UnsupportedError``, ``warn`` leaves the durations unknown, ``zero`` sets them to 0.
    """
    count = int(unknown.sum())
    listed = _operations(graph, unknown)
    if missing == "error":
        raise UnsupportedError(
            f"no duration for {count:,} of {len(graph):,} nodes of {graph.name!r}: {listed}",
            hint="estimate them with `hardware=NAME`, keep them unknown with `on_unknown=warn`, or count 0 "
            "with `on_unknown=zero`",
        )
    outcome = "stay unknown" if missing == "warn" else "are set to 0"
    code = "estimate.missing" if missing == "warn" else "estimate.missing-as-zero"
    diagnostics.add(
        code,
        Severity.WARNING,
        graph.name,
        f"durations of nodes without an estimate {outcome}: {listed}",
        count=count,
    )
    return durations if missing == "warn" else np.where(unknown, 0.0, durations)


def _operations(graph: OpGraph, nodes: NDArray[np.bool_]) -> str:
    """Return text for an error or warning: the names of the operations in the mask ``nodes`` with their
    counts, most frequent first, and the location of the first node.
    """
    rows = Counter[int](graph.op_id[nodes].tolist())
    parts: list[str] = []
    for row, count in rows.most_common(_LISTED):
        node = int(np.flatnonzero(nodes & (graph.op_id == row))[0])
        source = graph.strings[int(graph.source_id[node])] or f"node {int(graph.id[node])}"
        operation = graph.strings[row] or "(unnamed)"
        parts.append(f"{operation} ({count:,}, first {graph.node_name(node) or '(unnamed)'} at {source})")
    if len(rows) > _LISTED:
        parts.append(f"and {len(rows) - _LISTED} more operations")
    return "; ".join(parts)
