"""Durations of an estimate put into a graph, with a stated policy for nodes nobody could estimate."""

from __future__ import annotations

from collections import Counter
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
    OpGraph,
    Severity,
    find_dtype,
)
from hespas.graph.columns import FloatArray
from hespas.graph.errors import InvariantError, UnsupportedError, UsageError
from hespas.graph.passes import is_free, with_durations
from hespas.hardware import Device

__all__ = [
    "MISSING_POLICIES",
    "MissingPolicy",
    "apply_estimate",
    "as_run_on",
    "kept_durations",
    "settle_missing",
]

MissingPolicy = Literal["error", "warn", "zero"]
MISSING_POLICIES: tuple[MissingPolicy, ...] = ("error", "warn", "zero")
"""What to do with nodes that have no duration: refuse, keep them unknown, or count them as 0."""

_LISTED = 12
_CONVERT, _WIDE_BITS = "convert", 32


def as_run_on(graph: OpGraph, device: Device, diagnostics: Diagnostics) -> OpGraph:
    """The work of a program on a device. What was compiled for a CPU multiplies narrow values as f32 (see
    :data:`~hespas.graph.SOURCE_DTYPE`): another device multiplies them as they are, and converts nothing.
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
        f"products of narrow values that were widened to f32 for a CPU are estimated on {device.name} as "
        "what they were, without the conversions around them",
        count=int(wide.sum()),
    )
    bits = np.array([kind.bits for kind in DTYPES], np.float64)[source].mean(axis=0)

    def kept(figure: FloatArray) -> FloatArray:
        return np.where(converts, 0.0, figure)

    return replace(
        graph,
        flops=kept(graph.flops),
        useful_flops=kept(graph.useful_flops),
        transcendentals=kept(graph.transcendentals),
        bytes_read=kept(graph.bytes_read) * np.where(wide, bits / _WIDE_BITS, 1.0),
        bytes_written=kept(graph.bytes_written),
        rate_dtype=np.where(wide, source[0], graph.rate_dtype).astype(np.int16),
        contractions=replace(table, lhs=lhs.astype(np.int16), rhs=rhs.astype(np.int16)),
    )


def apply_estimate(
    graph: OpGraph, estimate: Estimate, missing: MissingPolicy, diagnostics: Diagnostics | None = None
) -> OpGraph:
    """A graph with the durations of ``estimate``; ``graph`` itself is not changed.

    A node without an estimate keeps the duration it came with (a measured one, say). What then has none is
    ``missing``: ``error`` raises ``UnsupportedError`` listing the operations, ``warn`` leaves NaN, ``zero``
    sets 0; both tell ``diagnostics``. Raises ``UsageError`` for another policy. O(nodes).
    """
    if missing not in MISSING_POLICIES:
        raise UsageError(
            f"unknown policy {missing!r} for missing durations", hint=f"one of: {', '.join(MISSING_POLICIES)}"
        )
    if len(estimate) != len(graph):
        raise InvariantError(f"an estimate of {len(estimate)} nodes is not one of {graph.name!r}")
    found = diagnostics if diagnostics is not None else Diagnostics()
    absent = np.isnan(estimate.duration_ns)
    durations = np.where(absent, graph.duration_ns, estimate.duration_ns)
    # A node of a branch that is not taken never runs, so nobody misses its duration.
    unknown = np.isnan(durations) & (graph.multiplicity != 0)
    _tell_kept(graph, estimate, kept_durations(graph, estimate), found)
    if unknown.any():
        durations = _settle(graph, durations, unknown, missing, found)
    return with_durations(graph, durations)


def kept_durations(graph: OpGraph, estimate: Estimate) -> NDArray[np.bool_]:
    """Which nodes that run have no estimate but a time above 0 of their own, shape ``(nodes,)``."""
    timed = (graph.duration_ns > 0) & (graph.multiplicity != 0)
    kept: NDArray[np.bool_] = np.isnan(estimate.duration_ns) & timed
    return kept


def _tell_kept(graph: OpGraph, estimate: Estimate, kept: NDArray[np.bool_], found: Diagnostics) -> None:
    """Say what keeps a time of its own: beside estimates of a device, that is a time of another one."""
    if not estimate.hardware:
        found.info(
            "estimate.kept-duration",
            graph.name,
            "nodes keep the duration they came with",
            count=int(kept.sum()),
        )
        return
    runs = graph.multiplicity != 0
    with np.errstate(over="ignore", invalid="ignore"):  # sums past what a float holds are infinite
        total_ns = float(np.nansum(np.where(runs, graph.duration_ns * graph.multiplicity, 0.0)))
        kept_ns = float((graph.duration_ns * graph.multiplicity)[kept].sum())
    share = 1.0 if kept_ns == inf else kept_ns / total_ns if total_ns > 0 else 0.0
    found.warning(
        "estimate.kept-duration",
        graph.name,
        f"nodes without an estimate for {estimate.hardware} keep the time that was recorded, on whatever "
        f"device that was: {share:.1%} of the recorded time",
        count=int(kept.sum()),
    )


def settle_missing(graph: OpGraph, missing: MissingPolicy, diagnostics: Diagnostics) -> OpGraph:
    """A graph without an estimate, with ``missing`` applied to its computation: see :func:`apply_estimate`.

    Communication has no duration before a simulator gives it one, so nobody misses that.
    """
    compute = (graph.kind == int(NodeKind.COMPUTE)) & ~is_free(graph)
    unknown = np.isnan(graph.duration_ns) & compute & (graph.multiplicity != 0)
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
    count = int(unknown.sum())
    listed = _operations(graph, unknown)
    if missing == "error":
        raise UnsupportedError(
            f"no duration for {count:,} of {len(graph):,} nodes of {graph.name!r}: {listed}",
            hint="`hardware=NAME` estimates; `missing=warn` keeps them unknown, `missing=zero` counts 0",
        )
    what = "stay unknown" if missing == "warn" else "are set to 0"
    code = "estimate.missing" if missing == "warn" else "estimate.missing-as-zero"
    diagnostics.add(
        code,
        Severity.WARNING,
        graph.name,
        f"durations of nodes nobody could estimate {what}: {listed}",
        count=count,
    )
    return durations if missing == "warn" else np.where(unknown, 0.0, durations)


def _operations(graph: OpGraph, nodes: NDArray[np.bool_]) -> str:
    """Operation names with their counts, most frequent first, and where the first one is."""
    rows = Counter[int](graph.op_row[nodes].tolist())
    parts: list[str] = []
    for row, count in rows.most_common(_LISTED):
        node = int(np.flatnonzero(nodes & (graph.op_row == row))[0])
        place = graph.strings[int(graph.source_row[node])] or f"node {int(graph.id[node])}"
        operation = graph.strings[row] or "(unnamed)"
        parts.append(f"{operation} ({count:,}, first {graph.node_name(node) or '(unnamed)'} at {place})")
    if len(rows) > _LISTED:
        parts.append(f"and {len(rows) - _LISTED} more operations")
    return "; ".join(parts)
