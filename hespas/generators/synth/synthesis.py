"""Graphs that have the statistics of training graphs and are none of them.

Each generated graph has a target: the size, depth and cost of a training graph, unless the caller sets them,
and a distance to the nearest training graph. Several drafts of a model are compared with the target, and the
nearest one is used. Drafts with the structure of a training graph are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, log, nan
from random import Random
from typing import Protocol

import numpy as np

from hespas.generators.synth.features import StarTable
from hespas.generators.synth.labels import CostLabels
from hespas.generators.synth.ngram import FrontierNgram
from hespas.generators.synth.sequences import Token, TypedDag, depths_of, flatten, structure_key, unflatten
from hespas.graph.errors import UsageError

__all__ = ["DraftModel", "Synthesizer", "Target"]

_LEAST_DEVIATION, _MOST_DEVIATION = 0.03, 0.5
_ROUNDS = 10
_SIZE_SCALE, _DEPTH_SCALE, _DISTANCE_SCALE = 0.1, 0.1, 0.1


class DraftModel(Protocol):
    """Model that drafts token sequences."""

    def drafts(self, random: Random, nodes: int, deviations: Sequence[float]) -> list[list[Token] | None]:
        """Return the tokens of a graph of about ``nodes`` nodes for each deviation, or None for failed
        drafts. A higher deviation (0 to 1) makes graphs that are less like the training graphs.
        """
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Wanted properties of a graph. ``distance`` is the star distance to the nearest training graph."""

    nodes: int
    depth: float
    distance: float
    log_cost: float = nan


@dataclass(frozen=True, slots=True)
class _Draft:
    dag: TypedDag
    error: float
    log_cost: float


class Synthesizer:
    """Generator of graphs, fitted to training graphs.

    ``novelty`` scales the distance of generated graphs to their nearest training graph: at 1 they are as far
    from it as training graphs of different structure are from each other. ``drafts`` are compared per graph.
    """

    def __init__(
        self,
        training: Sequence[TypedDag],
        *,
        novelty: float = 1.0,
        drafts: int = 12,
        model: DraftModel | None = None,
    ) -> None:
        rows: dict[int, list[int]] = {}
        for row, dag in enumerate(training):
            if not len(dag):
                raise UsageError(f"training graph {row} has no nodes", hint="remove it")
            rows.setdefault(structure_key(dag), []).append(row)
        if len(rows) < 2:
            raise UsageError(
                f"{len(training)} training graphs have {len(rows)} distinct structures: expected at least 2",
                hint="add training graphs",
            )
        if novelty < 0 or drafts < 1:
            raise UsageError(
                f"novelty is {novelty:g} and drafts is {drafts}: expected 0 or more, and 1 or more",
                hint="set `novelty=1` and `drafts=12`",
            )
        self._drafts = drafts
        distinct = [training[members[0]] for members in rows.values()]
        self.model = model if model is not None else FrontierNgram([flatten(dag) for dag in distinct])
        self._stars = StarTable(distinct)
        apart = self._stars.matrix(distinct) + 2.0 * np.eye(len(distinct))
        costs = [[training[row].cost for row in members] for members in rows.values()]
        self._labels: CostLabels | None = None
        if all(cost > 0 and cost < np.inf for row in costs for cost in row):
            self._labels = CostLabels(distinct, costs, self._stars)
        self._targets = [
            Target(
                len(dag),
                float(depths_of(dag).max()),
                novelty * float(apart[index].min()),
                log(training[row].cost) if self._labels else nan,
            )
            for index, (dag, members) in enumerate(zip(distinct, rows.values(), strict=True))
            for row in members
        ]

    def sample(
        self, count: int, *, seed: int = 0, nodes: int | None = None, cost: float | None = None
    ) -> list[TypedDag]:
        """Return ``count`` graphs of about the given size and cost. By default each graph gets the size and
        cost of a training graph that is drawn at random. Sizes far beyond the training graphs may be missed.
        Equal arguments return equal graphs.
        """
        if nodes is not None and nodes < 1:
            raise UsageError(f"nodes is {nodes}: expected 1 or more", hint="set `nodes=40`")
        if cost is not None and (self._labels is None or not 0 < cost < np.inf):
            raise UsageError(
                f"cost {cost:g} cannot be targeted: expected a positive cost and training graphs with costs",
                hint="leave out `cost`",
            )
        random = Random(f"hespas synthesis {seed}")
        return [self._graph(random, self._target(random, nodes, cost)) for _ in range(count)]

    def _target(self, random: Random, nodes: int | None, cost: float | None) -> Target:
        """Draw the target from the training graphs that are nearest to the wanted size and cost."""
        log_cost = nan if cost is None else log(cost)
        weights = [
            exp(
                -(0.0 if nodes is None else min(abs(target.nodes - nodes) / (_SIZE_SCALE * nodes + 1), 300.0))
                - (0.0 if cost is None else min(abs(target.log_cost - log_cost) / _SIZE_SCALE, 300.0))
            )
            for target in self._targets
        ]
        target = random.choices(self._targets, weights)[0]
        if nodes is not None:
            target = replace(target, nodes=nodes, depth=target.depth * nodes / target.nodes)
        return target if cost is None else replace(target, log_cost=log_cost)

    def _graph(self, random: Random, target: Target) -> TypedDag:
        best: _Draft | None = None
        for attempt in range(_ROUNDS):
            # Small graphs have few variants: if all drafts were copies, larger graphs are drafted.
            nodes = target.nodes + attempt // 2
            low, high = log(_LEAST_DEVIATION), log(_MOST_DEVIATION)
            deviations = [exp(random.uniform(low, high)) for _ in range(self._drafts)]
            for tokens in self.model.drafts(random, nodes, deviations):
                draft = self._assess(unflatten(tokens), target) if tokens else None
                if draft and (best is None or draft.error < best.error):
                    best = draft
            if best is not None:
                break
        if best is None:
            raise UsageError(
                f"all {_ROUNDS * self._drafts} drafts of a graph of {target.nodes} nodes are copies of "
                "training graphs",
                hint="add training graphs, or change `nodes`",
            )
        return replace(best.dag, cost=exp(best.log_cost)) if self._labels else best.dag

    def _assess(self, dag: TypedDag, target: Target) -> _Draft | None:
        """Compare a draft with its target. Return None for a copy of a training graph."""
        distances = self._stars.distances(dag)
        nearest = float(distances.min())
        if nearest <= 0:  # equal structures have distance 0
            return None
        depth = float(depths_of(dag).max())
        error = (
            abs(len(dag) - target.nodes) / (_SIZE_SCALE * target.nodes + 1)
            + abs(depth - target.depth) / (_DEPTH_SCALE * target.depth + 1)
            + abs(nearest - target.distance) / _DISTANCE_SCALE
        )
        log_cost = nan
        if self._labels:
            log_cost = self._labels.log_cost(dag, distances)
            if not isnan(target.log_cost):
                error += abs(log_cost - target.log_cost) / self._labels.error
        return _Draft(dag, error, log_cost)
