"""Attacker who holds public models and names the model of an obfuscated trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray
from hespas.validators.privacy.fingerprint import FEATURES, Fingerprint, similarity

__all__ = ["Attacker", "Reference"]

_STEPS = 200
_PENALTY = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Workload that the attacker holds: its model, its fingerprint, and fingerprints of the same workload
    after obfuscation with keys of the attacker.
    """

    model: str
    plain: Fingerprint
    obfuscated: tuple[Fingerprint, ...] = ()


@dataclass(frozen=True, slots=True)
class Attacker:
    """Attacker who weighs the similarity of features by logistic regression.

    The weights are learned from pairs of references with different layouts: whether both are of one model.
    If references have obfuscated fingerprints, pairs of an obfuscated and a plain one are learned too, as an
    attacker who knows the program that obfuscates can do.
    """

    references: tuple[Reference, ...]
    weights: FloatArray
    bias: float

    @classmethod
    def trained(cls, references: Sequence[Reference]) -> Attacker:
        """Return an attacker with these references. O(references^2)."""
        rows, same = list[FloatArray](), list[bool]()
        for number, one in enumerate(references):
            for other in references[:number]:
                for seen in one.obfuscated or (one.plain,):
                    for held in (other.plain, *other.obfuscated):
                        rows.append(similarity(seen, held))
                        same.append(one.model == other.model)
        weights, bias = _logistic(np.array(rows).reshape(-1, len(FEATURES)), np.array(same, np.bool_))
        return cls(tuple(references), weights, bias)

    def ranking(self, seen: Fingerprint, *others: Reference) -> list[tuple[str, float]]:
        """Return the models of the references and of ``others`` with their best scores, the most likely
        first.
        """
        best = dict[str, float]()
        for reference in (*self.references, *others):
            for held in (reference.plain, *reference.obfuscated):
                score = float(similarity(seen, held) @ self.weights) + self.bias
                best[reference.model] = max(best.get(reference.model, -np.inf), score)
        return sorted(best.items(), key=lambda entry: -entry[1])


def _logistic(rows: FloatArray, same: BoolArray) -> tuple[FloatArray, float]:
    """Return the weights (at least 0) and the bias of a logistic regression with balanced classes.

    A similarity is never evidence against, so negative weights are cut off. Newton's method would leave the
    bounds, so the steps are projected gradients.
    """
    if not same.any() or same.all():
        return np.ones(len(FEATURES)), 0.0
    wanted = same.astype(np.float64)
    share = float(wanted.mean())
    sample: FloatArray = np.where(same, 0.5 / share, 0.5 / (1.0 - share)) / len(same)
    weights, bias = np.ones(rows.shape[1]), 0.0
    for _ in range(_STEPS):
        chance = 1.0 / (1.0 + np.exp(-(rows @ weights + bias)))
        error: FloatArray = sample * (chance - wanted)
        weights = np.maximum(weights - 20.0 * (rows.T @ error + _PENALTY * weights / len(weights)), 0.0)
        bias -= 20.0 * float(error.sum())
    return weights, bias
