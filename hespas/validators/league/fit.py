"""Calibration end to end: by how much the parts of a step take longer than they were predicted to.

The logarithm of a row's error is what errors of its components add up to, each times the component's share of
the step: derivatives along the critical path. Each component's error is a sum of effects: of the family of
devices, the software stack, the accelerator in that stack, the number formats, the kind of model and the
release. Effects are normal around none (shrinkage to the fits per operation), so their posterior has a closed
form, with standard errors; rows far off count less (Student's t). No effect is of a row alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import InvariantError
from hespas.validators.league.parts import COMPONENTS

__all__ = [
    "EFFECTS",
    "Effect",
    "Factor",
    "Facts",
    "Fit",
    "Posterior",
    "Strength",
    "applied",
    "applied_share",
    "central_rows",
    "dominating",
    "factors_of",
    "fitted",
    "share_of_others",
    "strength_of",
]

_Texts = np.ndarray[tuple[int], np.dtype[np.str_]]
"""A column of texts."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Rows that agree in ``columns`` share it: ``spread`` is the standard deviation of the logarithm of a
    component's factor, times the component's own of :data:`_SPREAD`, ``whole`` that of one for all together.
    """

    name: str
    columns: tuple[str, ...]
    spread: float
    whole: float


EFFECTS: tuple[Effect, ...] = (
    Effect("family", ("family",), 0.15, 0.05),
    Effect("stack", ("source",), 0.15, 0.10),
    Effect("accelerator", ("source", "accelerator"), 0.10, 0.10),
    Effect("precision", ("source", "precision"), 0.0, 0.05),
    Effect("model kind", ("source", "kind"), 0.10, 0.10),
    Effect("release", ("source", "release"), 0.0, 0.05),
    Effect("group", ("source", "model", "accelerator"), 0.0, 0.06),
)
"""What rows may err alike by. Round figures, set with the development rows in sight."""
_SPREAD: Mapping[str, float] = {
    "products": 1.0,
    "products of 8 bits": 1.0,
    "products of 4 bits": 1.0,
    "experts": 1.5,
    "attention": 1.5,
    "vector": 1.5,
    "quantize": 2.0,
    "optimizer": 2.0,
    "tensor": 2.0,
    "context": 2.0,
    "data": 2.0,
    "expert": 2.0,
    "pipeline": 2.0,
    "copies": 2.0,
    "host": 3.0,
    "overlap": 3.0,
    "bubble": 1.0,
}
"""How much less is known of a component than of products, of which most was measured: round figures, set with
the development rows in sight.
"""
_NOISE = 0.04
"""Standard deviation of what nothing explains, of one row: between submitters it is 2.8 % in the median."""
_FREEDOM = 4.0
"""Degrees of freedom of Student's t, by which rows far off count less: the customary few, not fitted."""
_ROUNDS = 4
"""Of weights and fits in turn."""
_GROUP = ("source", "model", "accelerator")
"""Columns of a group, whose rows are held out together."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Rows of a fit: ``shares`` of the components in the predicted step, shape ``(rows, components)``,
    ``log_error`` ln(measured / predicted), ``weight`` of a row, ``rounding`` of its logarithm, and ``keys``,
    texts by column that effects are told apart by.
    """

    shares: FloatArray
    log_error: FloatArray
    weight: FloatArray
    rounding: FloatArray
    keys: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        """Rows."""
        return len(self.log_error)

    def covariance(self, effects: Sequence[Effect] = EFFECTS) -> FloatArray:
        """Prior covariance of the logarithms of errors of all rows. O(rows^2 effects)."""
        spread = np.array([_SPREAD[name] for name in COMPONENTS])
        mixed = (self.shares * spread**2) @ self.shares.T
        total: FloatArray = np.zeros((len(self), len(self)))
        for effect in effects:
            total = total + self.alike(effect) * (effect.spread**2 * mixed + effect.whole**2)
        return total

    def alike(self, effect: Effect) -> BoolArray:
        """Which rows an effect gives the same, shape ``(rows, rows)``."""
        columns = (self.keys[name] for name in effect.columns)
        texts = ["\0".join(parts) for parts in zip(*columns, strict=True)]
        _, code = np.unique(texts, return_inverse=True)
        return np.asarray(code[:, None] == code[None, :])

    def taken(self, rows: IntArray) -> Facts:
        """Some of the rows."""
        chosen: list[int] = rows.tolist()
        return Facts(
            shares=self.shares[rows],
            log_error=self.log_error[rows],
            weight=self.weight[rows],
            rounding=self.rounding[rows],
            keys={name: [texts[place] for place in chosen] for name, texts in self.keys.items()},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """Of each row asked about: the logarithm of the factor that its prediction is off by, and its standard
    deviation without what nothing explains.
    """

    mean: FloatArray
    deviation: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What the rows ``here`` say of others: the inverse of their covariance with the noise of each, more of
    which has what is far off.
    """

    covariance: FloatArray
    here: IntArray
    target: FloatArray
    noise: FloatArray
    inverse: FloatArray

    def of(self, asked: BoolArray) -> Posterior:
        """What is known of the rows asked about."""
        across = self.covariance[np.ix_(np.flatnonzero(asked), self.here)]
        gain = across @ self.inverse
        own = np.diag(self.covariance)[asked]
        return Posterior(gain @ self.target, np.sqrt(np.maximum(own - (gain * across).sum(axis=1), 0.0)))

    def left_out(self, groups: _Texts) -> tuple[FloatArray, FloatArray]:
        """Of the rows of the fit, what it would leave of each without those of its own of ``groups``, and how
        sure it would be, shapes ``(rows of the fit,)``: by blocks of the inverse (Rasmussen and Williams,
        Gaussian Processes for Machine Learning, 5.4.2), with noise as it is.
        """
        left, variance = np.zeros((2, len(self.here)))
        pull, mine = self.inverse @ self.target, groups[self.here]
        for group in np.unique(mine):
            rows = np.flatnonzero(mine == group)
            spread = np.linalg.inv(self.inverse[np.ix_(rows, rows)])
            left[rows] = spread @ pull[rows]
            variance[rows] = np.diag(spread) - self.noise[rows]
        return left, np.sqrt(np.maximum(variance, 0.0))


def fitted(covariance: FloatArray, facts: Facts, known: BoolArray, rounds: int = _ROUNDS) -> Fit:
    """A fit on the rows ``known``. O(known^3)."""
    here = np.flatnonzero(known)
    inside, target = covariance[np.ix_(here, here)], facts.log_error[here]
    stated = (_NOISE**2 + facts.rounding[here] ** 2) / facts.weight[here]
    noise = stated
    inverse = _inverse(inside + np.diag(noise))
    for _ in range(rounds):
        left = inverse @ target * noise  # what the fit leaves of each row
        trust = (_FREEDOM + 1) / (_FREEDOM + left**2 / stated)
        noise = stated / trust
        inverse = _inverse(inside + np.diag(noise))
    return Fit(covariance, here, target, noise, inverse)


def _inverse(matrix: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.inv(matrix), np.float64)


_STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a correction that may be applied, from none on."""
_SURE = 1.645
"""Standard errors by which a gain has to be above 0: a normally distributed one is, in 95 of 100 cases."""
_CELL_POOL, _SOURCE_POOL = 2.0, 4.0
"""Groups of an accelerator and stack that count as much as all other groups of the stack together, and groups
of a stack as much as all other stacks: round figures, set with the development rows in sight.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Strength:
    """Share of its correction that a cell (a stack on an accelerator) gets, and the residual of each row of
    the fit without its own group: ``left`` and ``deviation`` of shape ``(rows of the fit,)``.
    """

    share: float
    left: FloatArray
    deviation: FloatArray

    def posterior(self, said: Posterior, prior: FloatArray) -> Posterior:
        """Return a posterior as it is applied; ``prior``: deviations where nothing is."""
        return applied_share(said, prior, self.share)


def applied_share(said: Posterior, prior: FloatArray, share: float) -> Posterior:
    """Return a posterior of which a share is applied; ``prior``: deviations where nothing is."""
    return Posterior(said.mean * share, _mixed(said.deviation, prior, share))


def strength_of(fit: Fit, facts: Facts, source: str, accelerator: str) -> Strength:
    """Return the share of a correction to apply in a cell, decided on held-out rows of the fit alone.

    Each row is corrected by a fit without its group. Groups of the cell count most, then those of its stack.
    A cell without rows gets no correction: with all rows of an accelerator left out, corrections by other
    accelerators do not lower the mean error for sure. A fit on one group cannot be tested, and is applied.
    """
    names = [np.array([facts.keys[name][row] for row in fit.here.tolist()]) for name in _GROUP]
    in_source = names[0] == source
    in_cell = in_source & (names[2] == accelerator)
    prior = np.sqrt(np.diag(fit.covariance)[fit.here])
    groups = np.array(["\0".join(parts) for parts in zip(*names, strict=True)])
    several = len(set(groups.tolist())) > 1
    if several and not in_cell.any():
        return Strength(0.0, fit.target, prior)
    keys = np.array(["\0".join(parts) for parts in zip(*(facts.keys[name] for name in _GROUP), strict=True)])
    left, deviation = fit.left_out(keys)
    if not several:
        return Strength(1.0, left, deviation)
    correction = fit.target - left
    share = _share(fit.target, correction, _evidence(groups, in_cell, in_source), groups)
    return Strength(share, fit.target - share * correction, _mixed(deviation, prior, share))


def share_of_others(
    facts: Facts, mean: FloatArray, tested: BoolArray, source: str, accelerator: str
) -> float:
    """Return the share of a correction to apply in a cell of which one row is known, decided on rows of other
    cells that are corrected likewise: ``mean`` of the rows ``tested``. Cells of the stack count most. Without
    other cells nothing can be tested, and the correction is applied.
    """
    sources, accelerators = (np.array(facts.keys[name]) for name in ("source", "accelerator"))
    in_source = sources == source
    others = np.flatnonzero(tested & ~(in_source & (accelerators == accelerator)))
    if not len(others):
        return 1.0
    cells = np.array(["\0".join(parts) for parts in zip(sources, accelerators, strict=True)])
    weight = _evidence(cells[others], np.zeros(len(others), np.bool_), in_source[others])
    return _share(facts.log_error[others], mean[others], weight, cells[others])


def _share(
    error: FloatArray,
    correction: FloatArray,
    weight: FloatArray,
    unit: _Texts,
) -> float:
    """Return the share of corrections with the greatest sure gain: the mean by which it lowers errors less
    :data:`_SURE` standard errors of that mean over units (groups or cells), whose rows err alike. 0 where no
    gain is sure.
    """
    errors = np.abs(np.expm1(np.multiply.outer(_STRENGTHS, correction) - error))
    gain = errors[0] - errors
    _, number = np.unique(unit, return_inverse=True)
    place = number.reshape(-1)
    weight_of = np.bincount(place, weight)
    spread = float((weight_of**2).sum())
    if spread >= 1.0:
        return 0.0
    mean = gain @ weight
    of_unit = np.array([np.bincount(place, weight * row) for row in gain]) / np.maximum(weight_of, 1e-300)
    doubt = np.sqrt((weight_of**2 * (of_unit - mean[:, None]) ** 2).sum(axis=1) / (1.0 - spread))
    return _STRENGTHS[int(np.argmax(mean - _SURE * doubt))]


def _evidence(groups: _Texts, cell: BoolArray, source: BoolArray) -> FloatArray:
    """Return weights of rows, which sum to 1: groups alike, rows of a group alike."""
    _, number, size = np.unique(groups, return_inverse=True, return_counts=True)
    alone = 1.0 / size[number.reshape(-1)]
    weight, left = np.zeros(len(groups)), 1.0
    for tier, pool in ((cell, _CELL_POOL), (source & ~cell, _SOURCE_POOL), (~source, 0.0)):
        count = float(alone[tier].sum())
        if count > 0:
            share = left * count / (count + pool)
            weight[tier] = share * alone[tier] / count
            left -= share
    whole = float(weight.sum())
    return weight / whole if whole > 0 else weight


def _mixed(deviation: FloatArray, prior: FloatArray, share: float) -> FloatArray:
    return np.sqrt(share * deviation**2 + (1 - share) * prior**2)


def dominating(facts: Facts, left: FloatArray) -> FloatArray:
    """What ``left`` of the rows, logarithms of measured over predicted, is put down to: shape ``(rows,
    components + 1)``, the last for what all components share, and NaN for rows without a measurement. Rows
    that err alike decide: the mean that the effects have given all of them. O(rows^2 effects components).
    """
    here = np.flatnonzero(~np.isnan(left))
    some = facts.taken(here)
    shares, spread = some.shares, np.array([_SPREAD[name] for name in COMPONENTS])
    found = np.full((len(facts), len(COMPONENTS) + 1), np.nan)
    noise = (_NOISE**2 + some.rounding**2) / some.weight
    pull = np.linalg.solve(some.covariance() + np.diag(noise), left[here]) if len(here) else left[here]
    parts: FloatArray = np.zeros((len(here), len(COMPONENTS) + 1))
    for effect in EFFECTS:
        same = some.alike(effect)
        parts[:, :-1] += effect.spread**2 * (shares * spread**2) * (same @ (shares * pull[:, None]))
        parts[:, -1] += effect.whole**2 * (same @ pull)
    found[here] = parts
    return found


def central_rows(covariance: FloatArray, facts: Facts, preferred: Sequence[BoolArray]) -> list[int]:
    """Return for each accelerator and stack the row whose error predicts those of its other rows best. Only
    settings decide, among the rows of the first of ``preferred`` that has any there.
    """
    texts = ["\0".join(parts) for parts in zip(facts.keys["source"], facts.keys["accelerator"], strict=True)]
    found: list[int] = []
    for name in dict.fromkeys(texts):
        mine = np.array([text == name for text in texts])
        choices = (np.flatnonzero(mine & rows) for rows in preferred)
        among = next((rows for rows in choices if len(rows)), np.flatnonzero(mine))
        said = covariance[np.ix_(among, np.flatnonzero(mine))] ** 2
        worth = said.sum(axis=1) / (np.diag(covariance)[among] + _NOISE**2)
        found.append(int(among[int(np.argmax(worth))]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """By how much one component takes longer on an accelerator in a software stack than predicted, with the
    standard error of its logarithm and that of the prior. ``share`` is what the component is of the steps.
    """

    source: str
    accelerator: str
    component: str
    factor: float
    std_error: float
    prior_std: float
    share: float
    n: int


def factors_of(facts: Facts) -> list[Factor]:
    """The factors of each component that takes part in the steps of an accelerator and stack, fitted on all
    rows that are measured.
    """
    known = np.flatnonzero(~np.isnan(facts.log_error))
    cells = list(zip(facts.keys["source"], facts.keys["accelerator"], strict=True))
    found: list[Factor] = []
    asked: list[tuple[int, int]] = []
    members: dict[tuple[str, str], list[int]] = {}
    for place in known.tolist():
        members.setdefault(cells[place], []).append(place)
    for rows in members.values():
        share = facts.shares[rows].mean(axis=0)
        asked += [(rows[0], component) for component in np.flatnonzero(share >= _LEAST_SHARE).tolist()]
    whole = _with_units(facts, known, asked)
    is_unit = np.arange(len(whole)) >= len(known)
    fit = fitted(whole.covariance(), whole, ~is_unit)
    said, prior = fit.of(is_unit), np.sqrt(np.diag(fit.covariance)[is_unit])
    strengths = {cell: strength_of(fit, whole, *cell) for cell in members}
    if not np.isfinite(said.mean).all():
        raise InvariantError("a fit gives factors that are no numbers")
    for place, (row, component) in enumerate(asked):
        source, accelerator = cells[row]
        rows = members[source, accelerator]
        mine = Posterior(said.mean[place : place + 1], said.deviation[place : place + 1])
        applied_to = strengths[source, accelerator].posterior(mine, prior[place : place + 1])
        found.append(
            Factor(
                source=source,
                accelerator=accelerator,
                component=COMPONENTS[component],
                factor=float(np.exp(applied_to.mean[0])),
                std_error=float(applied_to.deviation[0]),
                prior_std=float(prior[place]),
                share=float(facts.shares[rows, component].mean()),
                n=len(rows),
            )
        )
    return found


def applied(facts: Facts, factors: Sequence[Factor]) -> Posterior:
    """What factors that were fitted before say of rows of their accelerator and software stack; of others,
    that nothing is known. Deviations have in them what factors leave open: model, number format, release.
    """
    cells = list(zip(facts.keys["source"], facts.keys["accelerator"], strict=True))
    place = {name: number for number, name in enumerate(COMPONENTS)}
    mean, variance = np.zeros((2, len(facts)))
    known = np.zeros(len(facts), np.bool_)
    for each in factors:
        rows = np.array([cell == (each.source, each.accelerator) for cell in cells], np.bool_)
        share = facts.shares[:, place[each.component]] * rows
        mean += share * np.log(each.factor)
        variance += (share * each.std_error) ** 2
        known |= rows
    own = np.diag(facts.covariance()) if len(facts) else mean
    left = sum(each.whole**2 for each in EFFECTS if not set(each.columns) <= set(_OF_STACK)) + _NOISE**2
    return Posterior(mean, np.sqrt(np.where(known, variance + left, own + _NOISE**2)))


_LEAST_SHARE = 0.005
"""Components of less of the steps get no factor: of so little a step says nothing."""
_OF_STACK = ("family", "source", "accelerator")


def _with_units(facts: Facts, known: IntArray, asked: Sequence[tuple[int, int]]) -> Facts:
    """The known rows, and behind them one for each that is asked about: all of it one component, of no model,
    release or number format in particular.
    """
    units = np.zeros((len(asked), len(COMPONENTS)))
    units[np.arange(len(asked)), [component for _, component in asked]] = 1.0
    keys: dict[str, Sequence[str]] = {}
    for name, texts in facts.keys.items():
        own: list[str] = [
            texts[row] if name in _OF_STACK else f"\0{place}" for place, (row, _) in enumerate(asked)
        ]
        here: list[int] = known.tolist()
        keys[name] = [*(texts[place] for place in here), *own]
    return Facts(
        shares=np.concatenate([facts.shares[known], units]),
        log_error=np.concatenate([facts.log_error[known], np.full(len(asked), np.nan)]),
        weight=np.concatenate([facts.weight[known], np.ones(len(asked))]),
        rounding=np.concatenate([facts.rounding[known], np.zeros(len(asked))]),
        keys=keys,
    )
