"""Comparison of synthetic jobs with their sources: structure, costs, and copies."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph import CollectiveKind, OpGraph, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.passes import all_deps, levels, totals

__all__ = [
    "JobProfile",
    "nearest_distances",
    "sample_distance",
    "structure_distances",
    "variation",
]

_MIX = 0x9E3779B97F4A7C15
_COST_STEP = 0.2
"""Width of a bucket of the logarithm of a cost, for distances between jobs."""

_Counts = Mapping[int, float]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JobProfile:
    """Figures of a job. Each rank counts once.

    ``nodes`` and ``depth`` are means over ranks. ``widths`` and ``in_degrees`` are counts by value. ``types``
    are counts of kinds of operations, ``bigrams`` of pairs along dependencies, ``motifs`` of operations with
    the kinds of their producers, and ``stars`` of motifs with a bucket of the cost. ``structure`` and
    ``identity`` are digests, equal for jobs with equal operations and dependencies, and for jobs that also
    have equal costs. ``payloads`` is the payload of each kind of collective.
    """

    nodes: float
    depth: float
    widths: _Counts
    in_degrees: _Counts
    types: _Counts
    bigrams: _Counts
    motifs: _Counts
    stars: _Counts
    structure: bytes
    identity: bytes
    flops: float
    bytes_moved: float
    payloads: Mapping[str, float]

    @classmethod
    def of(cls, workload: Workload) -> JobProfile:
        """Return the profile of a job. O(nodes + dependencies)."""
        ranks = np.array(workload.class_sizes, np.float64)
        share = ranks / ranks.sum()
        counts: dict[str, dict[int, float]] = {
            name: {} for name in ("widths", "in_degrees", "types", "bigrams", "motifs", "stars")
        }
        nodes = depth = flops = moved = 0.0
        payloads = dict[str, float]()
        structure, identity = list[bytes](), list[bytes]()
        for graph, part, count in zip(workload.classes, share.tolist(), ranks.tolist(), strict=True):
            if not count:
                continue
            columns = _columns(graph)
            for name, values in columns.items():
                if name in counts:
                    own = counts[name]
                    distinct, number = np.unique(values, return_counts=True)
                    for value, times in zip(distinct.tolist(), number.tolist(), strict=True):
                        own[value] = own.get(value, 0.0) + times * part
            nodes += part * len(graph)
            depth += part * (float(columns["level"].max(initial=-1)) + 1.0)
            sums = totals(graph)
            flops += sums.flops * count
            moved += sums.bytes_moved * count
            for kind in np.unique(graph.collectives.kind).tolist():
                rows = graph.collectives.kind == kind
                executions = graph.executions[graph.collectives.node[rows]]
                name = CollectiveKind(kind).name.lower()
                payload = float(np.nansum(graph.collectives.comm_bytes[rows] * executions)) * count
                payloads[name] = payloads.get(name, 0.0) + payload
            structure.append(_digest(columns["motifs"]))
            identity.append(_digest(columns["exact"]))
        return cls(
            nodes=nodes,
            depth=depth,
            structure=b"".join(sorted(structure)),
            identity=b"".join(sorted(identity)),
            flops=flops,
            bytes_moved=moved,
            payloads=payloads,
            **counts,
        )


def _columns(graph: OpGraph) -> dict[str, NDArray[Any]]:
    deps = all_deps(graph)
    collective = np.zeros(len(graph), np.int64)
    collective[graph.collectives.node] = graph.collectives.kind.astype(np.int64) + 1
    types = (graph.kind.astype(np.int64) << 16) | (graph.op_class.astype(np.int64) << 8) | collective
    consumer = deps.row_ids
    producers = types[deps.values]
    mixed = _mixed(producers.view(np.uint64))
    parents = np.zeros(len(graph), np.uint64)
    filled = np.flatnonzero(deps.lengths)
    if len(filled):
        parents[filled] = np.add.reduceat(mixed, deps.offsets[:-1][filled])
    motifs = _mixed(types.view(np.uint64) * np.uint64(3) + _mixed(parents))
    payload = np.zeros(len(graph))
    for table in (graph.collectives, graph.p2p):
        payload[table.node] = table.comm_bytes
    cost = np.nan_to_num(np.stack([graph.flops, graph.bytes_moved, payload]))
    size = np.log(np.maximum(cost.sum(axis=0), 1.0))
    exact = motifs
    for row in cost:
        exact = _mixed(exact + row.view(np.uint64))
    level = np.array(levels(graph, [1] * len(graph)), np.int64)
    return {
        "level": level,
        "widths": np.bincount(level),
        "in_degrees": deps.lengths,
        "types": types,
        "bigrams": (producers << 32) | types[consumer],
        "motifs": motifs.view(np.int64),
        "stars": _mixed(motifs + np.rint(size / _COST_STEP).astype(np.uint64)).view(np.int64),
        "exact": exact.view(np.int64),
    }


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashes of 64-bit numbers."""
    with np.errstate(over="ignore"):
        mixed = (values ^ (values >> np.uint64(31))) * np.uint64(_MIX)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(_MIX | 5)
        return mixed ^ (mixed >> np.uint64(32))


def _digest(values: NDArray[Any]) -> bytes:
    return blake2b(np.sort(values).tobytes(), digest_size=16).digest()


def variation(left: Mapping[_Key, float], right: Mapping[_Key, float]) -> float:
    """Return the total variation of two weighted samples: 0 (equal) to 1."""
    one, other = max(sum(left.values()), 1e-300), max(sum(right.values()), 1e-300)
    keys = {*left, *right}
    return sum(abs(left.get(key, 0.0) / one - right.get(key, 0.0) / other) for key in keys) / 2.0


def sample_distance(
    values: Iterable[float],
    others: Iterable[float],
    weights: Iterable[float] | None = None,
    others_weights: Iterable[float] | None = None,
) -> float:
    """Return the Wasserstein distance (W1) of two samples, relative to the mean of the second; NaN if one is
    empty or the mean is 0.
    """
    from scipy.stats import wasserstein_distance  # most commands make no card

    first, second = list(values), list(others)
    one, other = (None if row is None else list(row) for row in (weights, others_weights))
    mean = float(np.average(second, weights=other)) if second else 0.0
    if not first or not mean > 0:
        return float("nan")
    return float(wasserstein_distance(first, second, one, other)) / mean


def structure_distances(
    jobs: Sequence[JobProfile], sources: Sequence[JobProfile], growth: Sequence[float]
) -> dict[str, float]:
    """Return the distances between the structures of jobs and of their sources, by name. ``growth`` is the
    wanted number of nodes of each job relative to its source.
    """
    nodes = [profile.nodes * scale for profile, scale in zip(sources, growth, strict=True)]
    depth = [profile.depth * scale for profile, scale in zip(sources, growth, strict=True)]
    distances = {
        "nodes W1": sample_distance([job.nodes for job in jobs], nodes),
        "depth W1": sample_distance([job.depth for job in jobs], depth),
    }
    for name, column in (
        ("width W1", "widths"),
        ("in-degree W1", "in_degrees"),
        ("type TV", "types"),
        ("bigram TV", "bigrams"),
        ("motif TV", "motifs"),
    ):
        made, real = dict[int, float](), dict[int, float]()
        for mixture, profiles in ((made, jobs), (real, sources)):
            for profile in profiles:
                counts: _Counts = getattr(profile, column)
                total = sum(counts.values()) or 1.0
                for value, count in counts.items():
                    mixture[value] = mixture.get(value, 0.0) + count / total
        distances[name] = (
            sample_distance(made, real, made.values(), real.values())
            if name.endswith("W1")
            else variation(made, real)
        )
    return distances


def nearest_distances(jobs: Sequence[JobProfile], others: Sequence[JobProfile]) -> FloatArray:
    """Return the distance of each job to the nearest other one (the same object does not count): the total
    variation of their operations with producers and costs.
    """
    return np.array(
        [
            min((variation(job.stars, other.stars) for other in others if other is not job), default=np.nan)
            for job in jobs
        ]
    )
