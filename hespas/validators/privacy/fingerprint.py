"""Fingerprints of workloads: what remains visible in a trace, in a form in which two traces compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp2, log2

import numpy as np

from hespas.generators.obfuscate.layers import repeated_runs, signatures
from hespas.graph import NodeKind, OpGraph, Workload
from hespas.graph.columns import FloatArray

__all__ = ["FEATURES", "Fingerprint", "fingerprint", "similarity"]

FEATURES = (
    "extents",
    "odd parts of extents",
    "layers",
    "FLOPs",
    "shares of FLOPs",
    "collective sizes",
    "shares of collective sizes",
    "operation sequence",
    "totals",
)
"""Properties by which workloads are compared; each has a similarity between 0 and 1."""

_BINS_PER_OCTAVE = 8
_SMALLEST_EXTENT = 16
"""Smaller extents (batch, heads per rank) say more about the layout than about the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Histograms of a workload by feature, each normalised to a sum of 1, and its totals: the logarithms of
    FLOPs and traffic per rank and of collective bytes.
    """

    histograms: Mapping[str, Mapping[object, float]]
    totals: FloatArray


def fingerprint(workload: Workload) -> Fingerprint:
    """Return the fingerprint of a workload: of the program of each rank class, weighted equally. O(nodes)."""
    counts: dict[str, Counter[object]] = {name: Counter() for name in FEATURES[:-1]}
    totals = np.zeros(3)
    for graph, ranks in zip(workload.classes, workload.class_sizes, strict=True):
        if ranks:
            _count(graph, counts)
            totals += ranks * np.array(
                [
                    np.nansum(graph.flops * graph.executions),
                    np.nansum(graph.bytes_moved * graph.executions),
                    np.nansum(graph.collectives.comm_bytes),
                ]
            )
    histograms = {
        name: {key: number / histogram.total() for key, number in histogram.items()}
        for name, histogram in counts.items()
    }
    return Fingerprint(
        histograms=histograms, totals=np.log2(np.maximum(totals / max(workload.num_available, 1), 1.0))
    )


def _count(graph: OpGraph, counts: Mapping[str, Counter[object]]) -> None:
    for extent, number in _extents(graph).items():
        counts["extents"][extent] += number
        counts["odd parts of extents"][extent // (extent & -extent)] += number
    for run in repeated_runs(signatures(graph)):
        counts["layers"][run.repeats] += run.period * run.repeats
    compute = graph.kind == int(NodeKind.COMPUTE)
    _count_sizes(graph.flops[compute], counts["FLOPs"], counts["shares of FLOPs"], "")
    table = graph.collectives
    for kind in np.unique(table.kind).tolist():
        _count_sizes(
            table.comm_bytes[table.kind == kind],
            counts["collective sizes"],
            counts["shares of collective sizes"],
            kind,
        )
    collective = np.zeros(len(graph), np.int64)
    collective[table.node] = 1 + table.kind
    words = list(
        zip(
            graph.kind.tolist(),
            graph.op_class.tolist(),
            collective.tolist(),
            strict=True,
        )
    )
    counts["operation sequence"].update(zip(words, words[1:], words[2:], strict=False))


def _extents(graph: OpGraph) -> Counter[int]:
    counts = Counter[int]()
    rows = np.concatenate([graph.operands.values, graph.results.values])
    uses = np.bincount(rows, minlength=len(graph.types)) if len(rows) else np.zeros(len(graph.types), int)
    bounds = graph.types.dim_offsets
    of_type = np.repeat(np.arange(len(graph.types)), np.diff(bounds))
    table = graph.contractions
    extents = np.concatenate([graph.types.dims, table.m, table.n, table.k])
    weights = np.concatenate([uses[of_type], np.ones(3 * len(table), np.int64)])
    for extent in np.unique(extents[extents >= _SMALLEST_EXTENT]).tolist():
        counts[extent] = int(weights[extents == extent].sum())
    return +counts


def _count_sizes(
    sizes: FloatArray, absolute: Counter[object], relative: Counter[object], label: object
) -> None:
    """Count sizes by logarithm, in absolute terms and as shares of the largest one."""
    positive = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not len(positive):
        return
    bins = np.rint(np.log2(positive) * _BINS_PER_OCTAVE).astype(np.int64)
    for value, number in zip(*np.unique(bins, return_counts=True), strict=True):
        absolute[label, int(value)] += int(number)
        relative[label, int(value) - int(bins.max())] += int(number)


def similarity(one: Fingerprint, other: Fingerprint) -> FloatArray:
    """Return the similarity of two workloads in each feature, shape ``(len(FEATURES),)``, from 0 to 1.

    Histograms compare by their common area. Layer counts compare by the closest logarithm, totals by the mean
    ratio.
    """
    values = list[float]()
    for name in FEATURES[:-1]:
        first, second = one.histograms[name], other.histograms[name]
        values.append(
            _layer_similarity(first, second)
            if name == "layers"
            else sum(min(share, second.get(key, 0.0)) for key, share in first.items())
        )
    values.append(float(np.exp(-np.abs(one.totals - other.totals).mean())))
    return np.array(values)


def _layer_similarity(one: Mapping[object, float], other: Mapping[object, float]) -> float:
    if not one or not other:
        return float(not one and not other)
    return sum(
        share * max(exp2(-4.0 * abs(log2(_number(key) / _number(match)))) for match in other)
        for key, share in one.items()
    )


def _number(key: object) -> float:
    return float(key) if isinstance(key, int) else 1.0
