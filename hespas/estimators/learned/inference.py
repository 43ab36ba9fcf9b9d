"""Learned: gradient-boosted trees on the logarithm of time over a data-sheet time.

    time = base(sizes, fitted physics, data sheet) x exp(sum of trees(log sizes, log ratios, descriptors))

Beyond the sizes of the fit the trees' part goes over into what they add to the largest operations, so that
the base alone decides how time grows. On a device that was not in the fit the form has the parameters of its
nearest relatives, and trees correct it that never see what a device is called; a model adapted to a few rows
of it starts from those. The interval
holds 90 % of outcomes: fitted quantiles, widened until that was so on rows left out of the fit, and wider
with every octave beyond its sizes. No time is below the device's roof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.interface import Prediction, estimate_by_operation
from hespas.estimators.learned.bases import (
    RELATIVES,
    START_NS,
    TIERS,
    BaseIndex,
    Kinship,
    combined_ns,
    relatives,
)
from hespas.estimators.learned.convolved import APART, as_products, without_library
from hespas.estimators.learned.ensemble import features_of
from hespas.estimators.learned.rising import raised
from hespas.estimators.learned.serialization import (
    Card,
    Cell,
    LearnedModel,
    Unseen,
    cards_at,
    cards_in,
    load_model,
    shipped_folder,
)
from hespas.estimators.learned.tf32 import as_deeper_products, runs_on_tf32, wider_output_ns
from hespas.estimators.rates import within_roof
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import Device
from hespas.operations import Labels, Operations, timed_with_events

__all__ = [
    "FREE_OCTAVES",
    "Choice",
    "Learned",
    "ModelsAtHand",
    "Wanted",
    "choose",
    "code_columns",
    "distances",
    "octaves_beyond",
    "octaves_of",
    "widening",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The models that the device's file names, and those that come with the package: of one operation and
    number format the first of the device's own speaks. Fields are options:
    ``models``: a folder of models that alone is asked; ``shipped``, ``own``: whether those of the package and
    those that the device's file names are asked;
    ``num_ranks``: size of collectives over all ranks where the graph does not say.
    """

    models: str = ""
    num_ranks: int = -1
    shipped: bool = True
    own: bool = True

    inert_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """``learned``."""
        return "learned"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Time of each operation; NaN with a reason where no model covers its kind, number format or sizes.

        O(ops x trees): about 2 us per operation and 300 trees. Raises ``FormatError`` for a model that is
        damaged or gone, ``UsageError`` where there is none at all.
        """
        answer = _answered(self._libraries(device), ops, device, diagnostics)
        for reason, count in answer.reasons.items():
            if diagnostics is not None:
                diagnostics.warning("learned.refused", device.name, f"no duration, {reason}", count=count)
        return Prediction.of(self.name, *answer.times)

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node; distinct operations are asked once."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def _libraries(self, device: Device) -> list[_Library]:
        """Who is asked, the first first: all together, then each part of what that leaves.

        Together, so that the package's model of a number format comes before one of the device's own that
        only stands in for it.
        """
        folder = Path(self.models) if self.models else shipped_folder()
        own = cards_at(device.learned_models) if self.own and not self.models else ()
        others = cards_in(folder) if self.models or self.shipped else ()
        if not own and not others:
            where = f"in {folder}" if self.models or self.shipped else f"named by the file of {device.name}"
            raise UsageError(f"no learned model {where}", hint="name a folder of cards and trees")
        together = _Library((*own, *others), ranked=len(own))
        if not own or not others:
            return [together]
        return [together, _Library(own, ranked=len(own)), _Library(others)]


# How far an operation is from all that a fit has seen, in octaves of its sizes.

FREE_OCTAVES = 1
"""As far from a seen size as two held-out shapes are from each other: no reason to widen."""
_KEPT_OCTAVES = 2.0
_FADING_OCTAVES = 4.0
"""So far beyond the sizes of the fit the trees' part is kept, and over so many more it fades to 1/e."""
_STEEPEST = 0.25 * np.log(2)
"""By how much intervals grow at most [log time] with each octave further than any that was left out."""

_DIFFERENCES_AT_ONCE = 1 << 17


def octaves_of(dims: Sequence[str], ops: Operations) -> IntArray:
    """log2 of each size, rounded; -1 where an operation has no such size. Shape (ops, dims)."""
    columns = [np.round(np.log2(np.maximum(np.nan_to_num(ops.dim(name), nan=0.5), 0.5))) for name in dims]
    return np.clip(np.stack(columns, axis=1), -1, 120).astype(np.int64)


def distances(seen: NDArray[np.int8], octaves: IntArray) -> FloatArray:
    """The largest difference in any size to the nearest octaves seen; shape (ops,). Equal ones count once."""
    distinct, rows = np.unique(octaves, axis=0, return_inverse=True)
    if not len(seen):
        return np.full(len(octaves), np.inf)
    nearest = np.zeros(len(distinct))
    columns = [np.ascontiguousarray(column, np.int16) for column in seen.T]
    room = np.empty((2, min(max(1, _DIFFERENCES_AT_ONCE // len(seen)), len(distinct)), len(seen)), np.int16)
    for start in range(0, len(distinct), room.shape[1]):
        some = distinct[start : start + room.shape[1]].astype(np.int16)
        farthest, apart = room[:, : len(some)]
        farthest[:] = 0
        for place, column in enumerate(columns):
            np.subtract(some[:, place, None], column, out=apart)
            np.maximum(farthest, np.abs(apart, out=apart), out=farthest)
        nearest[start : start + len(some)] = farthest.min(axis=1)
    return nearest[rows.reshape(-1)]


def octaves_beyond(reach: Mapping[str, tuple[float, float]], ops: Operations) -> FloatArray:
    """How far the sizes of operations lie outside of those of a fit: octaves in the dimension where most."""
    farthest = np.zeros(len(ops))
    for name, (low, high) in reach.items():
        size = ops.dim(name)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            beyond = np.maximum(np.log2(size / max(high, 1e-9)), np.log2(max(low, 1e-9) / size))
        farthest = np.fmax(farthest, np.nan_to_num(beyond, nan=0.0, posinf=64.0))
    return farthest


def widening(card: Card, beyond: FloatArray) -> FloatArray:
    """By how much the interval grows on both sides [log time] so many octaves beyond the sizes of the fit:
    what held 90 % of rows there, and on at the pace of the last of them.
    """
    steps = ((0.0, 0.0), *(() if card.region is None else card.region.widening))
    octaves, wide = (np.array(column) for column in zip(*steps, strict=True))
    pace = (wide[-1] - wide[0]) / octaves[-1] if octaves[-1] > 0 else _STEEPEST
    over = np.maximum(beyond - octaves[-1], 0.0)
    within: FloatArray = np.interp(beyond, octaves, wide)
    further: FloatArray = min(max(float(pace), _STEEPEST / 4), _STEEPEST) * over
    return within + further


# Asking a set of learned models: which covers an operation, and what was refused or assumed.


@dataclass(frozen=True, slots=True, eq=False)
class _Library:
    """Models by the paths of their cards; the first ``ranked`` speak in their order before all others, where
    they speak of the same. ``load`` is asked for the trees of those that speak.
    """

    cards: Sequence[tuple[Path, Card]]
    ranked: int = 0
    load: Callable[[Path], LearnedModel] = load_model

    def ask(self, ops: Operations, device: Device, diagnostics: Diagnostics | None) -> _Answer:
        """The time of each operation, and how many have none for which reason. O(ops x trees).

        Raises ``FormatError`` where a card names a column, a family or a label that there is not.
        """
        parts: dict[tuple[Path, bool], list[tuple[Choice, IntArray]]] = {}
        answer = _Answer.none(len(ops))
        for labels, rows in ops.classes():
            wanted = Wanted(*labels)
            choice = choose(self.cards, wanted, device, ranked=self.ranked)
            if isinstance(choice, str):
                answer.reasons[choice] += len(rows)
                continue
            parts.setdefault((choice.path, choice.is_seen), []).append((choice, rows))
            _tell_stand_in(wanted, choice, device, len(rows), diagnostics)
        for (path, _), choices in parts.items():
            model = self.load(path)
            try:
                _apply(model, choices, ops, device, answer)
            except KeyError as error:
                raise FormatError(
                    f"the card of {model.card.name!r} is damaged: nothing is called {clipped(str(error))}",
                    path=str(path),
                    position="$.family, $.columns or $.codes",
                    hint="copy card and trees again, or fit the model again",
                ) from error
        return answer


def _answered(
    libraries: Sequence[_Library], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _Answer:
    """What the libraries say of each operation, or of what stands in for it."""
    deep, convolved = runs_on_tf32(ops, device), without_library(ops)
    rest = np.setdiff1d(np.arange(len(ops)), np.concatenate((deep, convolved)))
    answer = _Answer.none(len(ops))
    for rows, ask in ((rest, _asked), (deep, _TF32.asked), (convolved, _CONVOLUTIONS.asked)):
        if len(rows):
            said = ask(libraries, ops.take(rows) if len(rows) < len(ops) else ops, device, diagnostics)
            answer.times[:, rows] = said.times
            answer.reasons.update(said.reasons)
    return answer


def _asked(
    libraries: Sequence[_Library], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _Answer:
    """What the libraries say, each of what those before left."""
    answer = _Answer.none(len(ops))
    for library in libraries:
        rows = np.flatnonzero(np.isnan(answer.times[0]))
        if not len(rows):
            break
        said = library.ask(ops.take(rows), device, diagnostics)
        answer.times[:, rows] = said.times
        answer.reasons.clear()  # who comes after may cover it
        answer.reasons.update(said.reasons)
    return answer


class _StandIn(NamedTuple):
    """What is asked where no model speaks of operations, and how it is said (``{}``: their formats)."""

    ask: Callable[[Sequence[_Library], Operations, Device, Diagnostics | None], _Answer]
    text: str

    def asked(
        self, libraries: Sequence[_Library], ops: Operations, device: Device, diagnostics: Diagnostics | None
    ) -> _Answer:
        """What the libraries say; gaps are what stands in, no faster than the device can be."""
        answer = _asked(libraries, ops, device, diagnostics)
        rows = np.flatnonzero(np.isnan(answer.times[0]))
        if not len(rows):
            return answer
        part = ops.take(rows)
        said = self.ask(libraries, part, device, diagnostics)
        times = answer.times[:, rows] = within_roof(said.times, part, device)
        if diagnostics is not None and (count := int((~np.isnan(times[0])).sum())):
            text = self.text.format(" ".join(part.scheme.used()))
            diagnostics.info("learned.stand-in", device.name, text, count=count)
        return _Answer(answer.times, said.reasons)


def _as_deeper(
    libraries: Sequence[_Library], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _Answer:
    said = _asked(libraries, as_deeper_products(ops), device, diagnostics)
    return _Answer(said.times + wider_output_ns(ops, device), said.reasons)


def _as_products(
    libraries: Sequence[_Library], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _Answer:
    said = _answered(libraries, as_products(ops), device, diagnostics)
    return _Answer(said.times * np.exp(APART * np.array([[0.0], [-1.0], [1.0]])), said.reasons)


_TF32 = _StandIn(_as_deeper, "matmul f32 on TF32 units: estimated as bf16 of twice the depth")
_CONVOLUTIONS = _StandIn(_as_products, "convolution {}: estimated as the products they are")


@dataclass(frozen=True, slots=True, eq=False)
class ModelsAtHand:
    """Models that are in no file (yet), as an estimator of operations."""

    models: Sequence[LearnedModel]

    @property
    def name(self) -> str:
        """``learned``."""
        return "learned"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Time of each operation; NaN where no model covers it."""
        by_path = {Path(f"{number:06d}.json"): model for number, model in enumerate(self.models)}
        cards = [(path, model.card) for path, model in by_path.items()]
        library = _Library(cards, load=by_path.__getitem__)
        answer = library.ask(ops, device, diagnostics)
        return Prediction.of(self.name, *answer.times)


def _tell_stand_in(
    wanted: Wanted, choice: Choice, device: Device, count: int, diagnostics: Diagnostics | None
) -> None:
    """Say where another number format, operation or device stands in."""
    if diagnostics is None:
        return
    cell = choice.cell
    if (cell.op, cell.scheme) != (wanted.op, wanted.scheme) and (cell.op or wanted.op or cell.scheme):
        text = f"{wanted.kind} {wanted.op} {wanted.scheme}: estimated as {cell.op} {cell.scheme}"
        diagnostics.info("learned.stand-in", device.name, " ".join(text.split()), count=count)
    if not wanted.variant and timed_with_events(cell.variant):
        text = f"{wanted.kind} {wanted.scheme}: fitted on times taken with events, which hold the launch"
        diagnostics.info("learned.event-times", device.name, text, count=count)
    if choice.kin is not None:
        kin = ", ".join(choice.kin.names)
        text = f"{wanted.kind} {wanted.scheme}: the device was not in the fit, {kin} stand in"
        diagnostics.info("learned.unseen-device", device.name, text, count=count)


# Which stored model covers an operation on a device, and which of its variants.

_TWINS: Mapping[str, tuple[str, ...]] = {
    "f16": ("bf16",),
    "bf16": ("f16",),
    "f8E4M3FN": ("a8w8_fp8",),
    "f8E4M3FNUZ": ("a8w8_fp8",),
    "i8": ("a8w8",),
}
"""Schemes of the same width and rate, so that one's times stand for the other's. The ``fp8`` of serving
libraries is none of float8's: it includes the kernels that quantise the activations.
"""
_VECTOR_TWINS: Mapping[str, tuple[str, ...]] = {**_TWINS, "f32": ("f32_full",), "f32_full": ("f32",)}
_UNARY = frozenset(
    {"abs", "neg", "negate", "exp", "log", "sqrt", "rsqrt", "sigmoid", "silu", "copy", "convert", "floor"}
)
_BINARY = frozenset({"sub", "max", "min", "and", "or", "compare", "eq", "ne", "lt", "gt", "le", "ge"})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of: names of the operation's labels."""

    kind: str
    op: str
    scheme: str
    variant: str


@dataclass(frozen=True, slots=True)
class Choice:
    """``cell`` of the model whose card is at ``path``; ``kin`` stand in where the fit had no rows of the
    device. ``as_timed`` where the variant was asked for: another host's launches are then part of it.
    """

    path: Path
    card: Card
    cell: Cell
    kin: Kinship | None
    as_timed: bool

    @property
    def is_seen(self) -> bool:
        """Whether the fit had rows of the device."""
        return self.kin is None


def choose(
    cards: Sequence[tuple[Path, Card]], wanted: Wanted, device: Device, *, ranked: int = 0
) -> Choice | str:
    """The choice, or why there is none.

    An operation's own number format on this device comes first, then one of the same width and rate, then
    other devices' rows: those that hold no launch of another host before those that events timed, the nearest
    relatives first. Of models that are alike in this, the first ``ranked`` speak in their order, before all
    others. Without a variant the one with most rows is taken.
    """
    found: list[tuple[tuple[int, ...], Choice]] = []
    reason = f"no model of {wanted.kind} in {wanted.scheme or 'an unknown number format'}"
    for place, (path, card) in enumerate(cards):
        for cell in card.cells:
            rank = _rank(cell, wanted)
            if rank is None:
                continue
            if wanted.variant and cell.variant != wanted.variant:
                reason = f"the model of {wanted.kind} has no variant {wanted.variant!r}"
                continue
            kin = None if device.name in cell.rows else relatives(device, card.devices, cell.rows)
            if kin is None and device.name not in cell.rows:
                reason = f"the model of {wanted.kind} knows no {device.kind}"
                continue
            unseen = () if kin is None else (int(timed_with_events(cell.variant)), TIERS.index(kin.tier))
            rows = cell.rows.get(device.name, 0) or sum(cell.rows.values())
            order = (int(kin is not None), *(unseen or (0, 0)), *rank, min(place, ranked), -rows)
            found.append((order, Choice(path, card, cell, kin, bool(wanted.variant))))
    if not found:
        return reason
    return min(found, key=lambda each: (each[0], each[1].cell.variant))[1]


def _rank(cell: Cell, wanted: Wanted) -> tuple[int, int] | None:
    """How far a cell is from what is wanted (operation, then scheme); None where it is something else."""
    if cell.kind != wanted.kind:
        return None
    of_products = wanted.kind in ("matmul", "convolution") or wanted.kind.startswith("attention")
    twins = (_TWINS if of_products else _VECTOR_TWINS).get(wanted.scheme, ())
    if cell.scheme != wanted.scheme and cell.scheme not in twins:
        return None
    if cell.op == wanted.op or (wanted.kind == "moe" and not wanted.op and cell.op == "balanced"):
        return 0, int(cell.scheme != wanted.scheme)
    stand_in = (cell.op == "relu" and wanted.op in _UNARY) or (cell.op == "add" and wanted.op in _BINARY)
    return (1, int(cell.scheme != wanted.scheme)) if stand_in and wanted.kind == "vector" else None


# One stored model asked about operations.


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Times and intervals of shape ``(3, ops)`` [ns] to be filled in, and why some are not."""

    times: FloatArray
    reasons: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def none(cls, count: int) -> _Answer:
        """Nothing said yet."""
        return cls(np.full((3, count), nan))


def code_columns(
    codes: Mapping[str, Mapping[str, float]], labels: Mapping[str, Labels]
) -> dict[str, FloatArray]:
    """The columns ``variant``, ``scheme`` and ``op``: the number of each label, NaN where it has none."""
    found: dict[str, FloatArray] = {}
    for name, numbers in codes.items():
        each = labels[name]
        found[name] = np.array([numbers.get(text, np.nan) for text in each.names])[each.row]
    return found


_SURELY_BELOW = 0.7
_SURELY_BELOW_UNSEEN = 0.5
"""Where the form alone has a half take less than this share, no trees make it take longer than the whole: on
a device of the fit, on others.
"""


def _apply(
    model: LearnedModel,
    choices: Sequence[tuple[Choice, IntArray]],
    ops: Operations,
    device: Device,
    answer: _Answer,
) -> None:
    """Fill in the answers of the rows of ``choices``, which are of one model and of one kind of trees."""
    rows = np.concatenate([each for _, each in choices])
    cell = np.repeat(np.arange(len(choices)), [len(each) for _, each in choices])
    asked = _as_fitted(ops.take(rows), [choice.cell for choice, _ in choices], cell)
    chosen = [choice for choice, _ in choices]
    times = _times(model, chosen, cell, asked, device)
    share = _SURELY_BELOW if chosen[0].is_seen else _SURELY_BELOW_UNSEEN

    def of_halves(halves: Operations, of: IntArray, at_most: FloatArray) -> FloatArray:
        logs, _ = _form_times(model.card, chosen, cell[of], halves, device)
        with np.errstate(invalid="ignore", over="ignore"):
            may = np.flatnonzero(~(np.exp(logs) < share * at_most))
        found = np.full(len(of), np.nan)
        found[may] = _times(model, chosen, cell[of[may]], halves.take(may), device)[0]
        return found

    times = raised(model.card.family, asked, times, of_halves, measured=chosen[0].is_seen)
    answer.reasons["sizes, FLOPs, bytes or the peak are unknown"] += int(np.isnan(times[0]).sum())
    answer.times[:, rows] = within_roof(times, asked, device)


def _times(
    model: LearnedModel, choices: Sequence[Choice], cell: IntArray, ops: Operations, device: Device
) -> FloatArray:
    """Time and interval of operations under the labels of the cells that cover them, shape ``(3, ops)``."""
    card = model.card
    features = features_of(card.family, ops, device, overhead_ns=card.overhead_ns)
    labels = {"variant": ops.variant, "scheme": ops.scheme, "op": ops.op}
    columns = dict(zip(features.names, features.columns.T, strict=True))
    columns |= {name: each.astype(np.float32) for name, each in code_columns(card.codes, labels).items()}
    known = np.ones(len(ops), np.bool_)
    for name in (*card.columns, *(card.transfer_columns if card.adapts else ())):
        known &= np.isfinite(columns[name])
    times = np.full((3, len(ops)), np.nan)
    if not known.any():
        return times
    some, at = ops.take(np.flatnonzero(known)), cell[known]
    logs, asymptote = _form_times(card, choices, at, some, device)
    sheet_ns = _without_launches(card, choices, at, features.base_ns[known])
    table = {name: column[known] for name, column in columns.items()}
    is_seen = choices[0].kin is None
    base = _base_ns(card, logs, some, device, sheet_ns)
    if is_seen:
        middle, low, high = _said(model, table, some, device)
    else:
        middle, low, high = _said_of_unseen(model, table, [choice.kin for choice in choices], at)
    apart = distances(model.octaves, octaves_of(card.support, some)) - FREE_OCTAVES
    beyond = np.maximum(octaves_beyond(card.reach, some), np.maximum(apart, 0.0))
    kept = np.exp(-np.maximum(beyond - _KEPT_OCTAVES, 0.0) / _FADING_OCTAVES)
    if not is_seen:  # the relatives' form alone
        asymptote = np.nan_to_num(logs - np.log(base))
    middle = asymptote + (middle - asymptote) * kept
    wider = widening(card, beyond)
    with np.errstate(over="ignore"):  # far beyond what was sampled, an interval may have no end
        times[:, known] = base * np.exp(np.stack((middle, middle + low - wider, middle + high + wider)))
    return times


def _without_launches(
    card: Card, choices: Sequence[Choice], cell: IntArray, sheet_ns: FloatArray
) -> FloatArray:
    """Data-sheet times with no more of a start than a launch that no host times, where the fit's launches are
    those of another host and the variant was not asked for.
    """
    hosts = [
        choice.kin is not None and not choice.as_timed and timed_with_events(choice.cell.variant)
        for choice in choices
    ]
    over_ns = max(card.overhead_ns - START_NS, 0.0)
    return sheet_ns - np.where(np.array(hosts)[cell], over_ns, 0.0)


def _base_ns(
    card: Card, form_log_ns: FloatArray, ops: Operations, device: Device, sheet_ns: FloatArray
) -> FloatArray:
    """What trees correct; where a model was adapted, as those of the relatives do, moved by how their form
    and the device's own differ.
    """
    if not card.adapts:
        return combined_ns(form_log_ns, sheet_ns, card.form_share)
    kin_log_ns, _ = BaseIndex(card.bases, card.forms).log_times(ops, device, [RELATIVES])
    return combined_ns(kin_log_ns, sheet_ns, card.form_share) * np.exp(form_log_ns - kin_log_ns)


def _form_times(
    card: Card, choices: Sequence[Choice], cell: IntArray, ops: Operations, device: Device
) -> tuple[FloatArray, FloatArray]:
    """Log of the form's time [ns] of each operation, NaN where there is none; and asymptotes (0: no form)."""
    index = BaseIndex(card.bases, card.forms)
    logs, asymptote = np.full(len(ops), np.nan), np.zeros(len(ops))
    for number, choice in enumerate(choices):
        rows = np.flatnonzero(cell == number)
        names = (device.name,) if choice.kin is None else choice.kin.names
        as_timed = choice.kin is None or choice.as_timed
        logs[rows], ends = index.log_times(ops.take(rows), device, names, as_timed=as_timed)
        asymptote[rows] = np.nan_to_num(ends) if choice.kin is None else 0.0
    return logs, asymptote


def _columns(table: Mapping[str, NDArray[np.float32]], names: Sequence[str]) -> NDArray[np.float32]:
    return np.stack([table[name] for name in names], axis=1)


def _said(
    model: LearnedModel, table: Mapping[str, NDArray[np.float32]], ops: Operations, device: Device
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Log time over the base, and how far its interval reaches below (negative) and above."""
    card, columns = model.card, _columns(table, model.card.columns)
    middle = model.forests["main"].predict(columns)
    if card.adapts and card.transfer_columns:
        middle = middle + model.forests["transfer"].predict(_columns(table, card.transfer_columns))
    below, above = _margins(card, ops, device)
    low = np.minimum(model.forests["low"].predict(columns) - below, 0.0)
    high = np.maximum(model.forests["high"].predict(columns) + above, 0.0)
    return middle, low, high


_ASSUMED = Unseen(tier="kind", low=-1.0, high=1.0, n=0)
"""The interval [log time] where nothing could be left out to see one: a factor of e."""


def _said_of_unseen(
    model: LearnedModel,
    table: Mapping[str, NDArray[np.float32]],
    kin: Sequence[Kinship | None],
    cell: IntArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The same on a device that was not in the fit."""
    card = model.card
    middle = np.zeros(len(cell))
    if card.transfer_columns:
        middle = model.forests["transfer"].predict(_columns(table, card.transfer_columns))
    of_tier = {each.tier: each for each in card.unseen}
    bounds = [of_tier.get(each.tier if each else "", _ASSUMED) for each in kin]
    low, high = (np.array([getattr(each, side) for each in bounds])[cell] for side in ("low", "high"))
    return middle, low, high


def _margins(card: Card, ops: Operations, device: Device) -> tuple[FloatArray, FloatArray]:
    """What the fitted quantiles are widened by: of device, kind and scheme, else of the kind, else of all."""
    table = {(row.hardware, row.kind, row.scheme): row for row in card.intervals}
    schemes = len(ops.scheme.names)
    rows = [
        table.get((device.name, kind, scheme)) or table.get(("*", kind, "*")) or table[("*", "*", "*")]
        for kind in ops.kind.names
        for scheme in ops.scheme.names
    ]
    place = ops.kind.row.astype(np.int64) * schemes + ops.scheme.row
    return np.array([row.low for row in rows])[place], np.array([row.high for row in rows])[place]


def _as_fitted(ops: Operations, cells: Sequence[Cell], cell: IntArray) -> Operations:
    """The operations under the labels of the cells that cover them."""

    def labelled(names: list[str]) -> Labels:
        distinct = tuple(dict.fromkeys(names))
        return Labels.choice(distinct, np.array([distinct.index(name) for name in names])[cell])

    return replace(
        ops,
        op=labelled([each.op for each in cells]),
        scheme=labelled([each.scheme for each in cells]),
        variant=labelled([each.variant for each in cells]),
    )
