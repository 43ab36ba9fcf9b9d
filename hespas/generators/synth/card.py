"""Comparison of generated graphs with real ones: structure, cost, use for training, and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata, wasserstein_distance

from hespas.generators.synth.features import StarTable, descriptors
from hespas.generators.synth.job_card import variation
from hespas.generators.synth.sequences import Token, TypedDag, depths_of, flatten, structure_key
from hespas.graph.columns import FloatArray

__all__ = ["SynthesisCard", "measure_synthesis"]

_PENALTY = 10.0
_NEIGHBOURS = 5
_NEAR = 0.1
_BASE, _MODULUS = 1_000_003, (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class SynthesisCard:
    """Figures of a set of generated graphs. Distances of distributions are to the test graphs: W1 is the
    Wasserstein distance, TV the total variation. NaN: not defined, for example without costs.
    """

    nodes_w1: float
    depth_w1: float
    width_w1: float  # of the layers of all graphs
    type_tv: float
    bigram_tv: float  # types of both ends of an edge
    motif_tv: float  # type of a node with the types of its parents
    cost_w1: float
    pearson: float  # costs of test graphs by a ridge regression that is fitted to the generated graphs
    spearman: float
    neighbour_pearson: float  # the same with the mean of the five nearest generated graphs
    copies: float  # share of generated graphs with the structure of a training graph
    distinct_copies: float  # the same among distinct generated structures
    distinct: float  # distinct structures per generated graph
    nearest: float  # median distance of distinct generated structures, except copies, to a training graph
    nearest_ratio: float  # to the same between distinct training structures
    near_copies: float  # share of these structures whose distance is below 0.1
    longest_run: float  # mean share of a structure that is one run of tokens of a training graph


def measure_synthesis(
    generated: Sequence[TypedDag], training: Sequence[TypedDag], test: Sequence[TypedDag]
) -> SynthesisCard:
    """Compare generated graphs with the graphs that their model was fitted to, and with test graphs."""
    num_types = 1 + max(int(dag.types.max()) for dags in (generated, test) for dag in dags)
    table, test_table = descriptors(generated, num_types), descriptors(test, num_types)
    costs, test_costs = (np.array([dag.cost for dag in dags]) for dags in (generated, test))
    predicted = _ridge(table, costs, test_table)
    near = np.argsort(StarTable(generated).matrix(test), axis=1, kind="stable")[:, :_NEIGHBOURS]
    known = {structure_key(dag): dag for dag in training}
    keys = [structure_key(dag) for dag in generated]
    structures = dict(zip(keys, generated, strict=True))
    new = [dag for key, dag in structures.items() if key not in known]
    stars = StarTable(list(known.values()))
    among = stars.matrix(known.values()) + 2.0 * np.eye(len(known))
    nearest = stars.matrix(new).min(axis=1) if new else np.empty(0)
    median = float(np.median(nearest)) if new else np.nan
    return SynthesisCard(
        nodes_w1=_wasserstein(table[:, 0], test_table[:, 0]),
        depth_w1=_wasserstein(table[:, 2], test_table[:, 2]),
        width_w1=_wasserstein(_layer_widths(generated), _layer_widths(test)),
        type_tv=variation(_types(generated), _types(test)),
        bigram_tv=variation(_bigrams(generated), _bigrams(test)),
        motif_tv=variation(_motifs(generated), _motifs(test)),
        cost_w1=_wasserstein(costs, test_costs),
        pearson=_correlation(predicted, test_costs),
        spearman=_correlation(rankdata(predicted), rankdata(test_costs)),
        neighbour_pearson=_correlation(costs[near].mean(axis=1), test_costs),
        copies=sum(key in known for key in keys) / len(keys),
        distinct_copies=1.0 - len(new) / len(structures),
        distinct=len(structures) / len(keys),
        nearest=median,
        nearest_ratio=median / float(np.median(among.min(axis=1))) if len(known) > 1 else np.nan,
        near_copies=float((nearest < _NEAR).mean()) if new else np.nan,
        longest_run=_longest_run(new, list(known.values())),
    )


def _ridge(table: FloatArray, costs: FloatArray, test_table: FloatArray) -> FloatArray:
    """Return the costs of test graphs by a ridge regression of standardised descriptors."""
    centre, spread = table.mean(axis=0), table.std(axis=0)
    spread[spread == 0] = 1.0
    scaled = (table - centre) / spread
    gram = scaled.T @ scaled + _PENALTY * np.eye(table.shape[1])
    weights = np.asarray(np.linalg.solve(gram, scaled.T @ (costs - costs.mean())), np.float64)
    predicted: FloatArray = (test_table - centre) / spread @ weights + costs.mean()
    return predicted


def _correlation(left: FloatArray, right: FloatArray) -> float:
    left, right = left - left.mean(), right - right.mean()
    norm = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / norm if norm > 0 else np.nan


def _wasserstein(left: ArrayLike, right: ArrayLike) -> float:
    """Return the Wasserstein distance of two samples, NaN if a value is unknown."""
    first, second = np.asarray(left, dtype=float), np.asarray(right, dtype=float)
    has_unknown = np.isnan(first).any() or np.isnan(second).any()
    return np.nan if has_unknown else float(wasserstein_distance(first, second))


def _layer_widths(dags: Iterable[TypedDag]) -> FloatArray:
    return np.concatenate([np.bincount(depths_of(dag)) for dag in dags]).astype(float)


def _types(dags: Iterable[TypedDag]) -> Counter[Hashable]:
    return Counter(kind for dag in dags for kind in dag.types.tolist())


def _bigrams(dags: Iterable[TypedDag]) -> Counter[Hashable]:
    return Counter(
        pair
        for dag in dags
        for pair in zip(dag.types[dag.sources].tolist(), dag.types[dag.targets].tolist(), strict=True)
    )


def _motifs(dags: Iterable[TypedDag]) -> Counter[Hashable]:
    motifs: Counter[Hashable] = Counter()
    for dag in dags:
        types: list[int] = dag.types.tolist()
        parents, _ = dag.neighbours()
        motifs.update(
            (kind, tuple(sorted(types[parent] for parent in row)))
            for kind, row in zip(types, parents, strict=True)
        )
    return motifs


def _longest_run(dags: Sequence[TypedDag], training: Sequence[TypedDag]) -> float:
    """Return the mean over graphs of the longest run of tokens that a training graph has too, as a share of
    the graph.
    """
    ids: dict[Token, int] = {}
    sequences = [
        _prefix_hashes([ids.setdefault(token, len(ids)) for token in flatten(dag)]) for dag in training
    ]
    runs: dict[int, set[int]] = {}

    def shares_run(row: list[int], length: int) -> bool:
        if length not in runs:
            runs[length] = {window for sequence in sequences for window in _window_hashes(sequence, length)}
        return any(window in runs[length] for window in _window_hashes(row, length))

    shares: list[float] = []
    for dag in dags:
        row = _prefix_hashes([ids.get(token, -1) for token in flatten(dag)])
        least, most = 0, len(dag)
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if shares_run(row, middle) else (least, middle - 1)
        shares.append(least / len(dag))
    return float(np.mean(shares)) if shares else np.nan


def _prefix_hashes(row: Sequence[int]) -> list[int]:
    """Return the polynomial hashes of all prefixes of a row."""
    hashes = [0]
    for value in row:
        hashes.append((hashes[-1] * _BASE + value + 1) % _MODULUS)
    return hashes


def _window_hashes(prefixes: Sequence[int], length: int) -> Iterator[int]:
    """Yield the hash of each run of ``length`` values."""
    power = pow(_BASE, length, _MODULUS)
    for start in range(len(prefixes) - length):
        yield (prefixes[start + length] - prefixes[start] * power) % _MODULUS
