"""The composite: several estimators in an order per kind of operation; the first that covers one counts.

Models of single operations are asked once for each distinct operation, and only for those that nobody
before covered. Models that see more in a graph (the roofline: messages, fusions of several products) are
asked of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.kernels import PRODUCTS, as_programs_run
from hespas.estimators.learned.serialization import cards_at
from hespas.estimators.registry import (
    Estimator,
    OperationModel,
    Prediction,
    check_stated_estimator,
    estimate_with,
    for_job,
    load_estimator,
    operations_on,
    predict_with,
    takes_no_time,
)
from hespas.files.documents import read_toml
from hespas.graph import Diagnostics, Estimate, OpGraph, Severity
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import ANY, Device, Fit
from hespas.hardware.library import fits_of_user
from hespas.operations import KINDS, Operations

__all__ = [
    "DEFAULT_ORDER",
    "KINDS_BY_MODELS",
    "Composite",
    "Order",
    "least_better",
    "read_order",
    "split_order",
]

# Which estimators are asked of which kind of operation, and in what order.

_MOST = 64
"""Estimators that one composite may name; they are numbered in a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``default`` holds for every kind that ``kinds`` does not name; spellings as on a command line."""

    default: tuple[str, ...]
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def of(self, kind: str) -> tuple[str, ...]:
        """Who is asked of a kind, the first first."""
        return self.kinds.get(kind, self.default)

    def spellings(self) -> tuple[str, ...]:
        """Every estimator that is asked of anything, once."""
        every = (*self.kinds.values(), self.default)
        return tuple(dict.fromkeys(spelling for order in every for spelling in order))


def split_order(text: str) -> tuple[str, ...]:
    """``a+b:x=1+c`` as its parts. Raises ``UsageError`` for an empty or repeated one."""
    return _checked(tuple(part.strip() for part in text.split("+")), "order")


def _checked(order: tuple[str, ...], where: str) -> tuple[str, ...]:
    if not order or not all(order):
        raise UsageError(f"composite: {where} names no estimator", hint="write database+calibrated+roofline")
    if len(set(order)) < len(order):
        raise UsageError(f"composite: {where} names an estimator twice: {'+'.join(order)}")
    if len(order) > _MOST:
        raise UsageError(f"composite: {where} names more than {_MOST} estimators")
    if any(part.partition(":")[0] == "composite" for part in order):
        raise UsageError(f"composite: {where} names the composite itself")
    return order


def read_order(path: str) -> Order:
    """An order from a TOML file: a list ``order``, and a table ``kinds`` of lists by kind of operation.

    Raises ``FormatError`` naming the key that is wrong, ``BoundaryError`` for an estimator that needs
    permission.
    """
    example = 'a whole file is: order = ["calibrated", "roofline"]'
    root = read_toml(Path(path), "an order of estimators", where="check the path", example=example)
    unknown = sorted(set(root) - {"order", "kinds"})
    if unknown:
        raise FormatError(f"unknown key {unknown[0]!r}", path=path, hint="known are order and kinds")
    stated = root.get("kinds", {})
    if not isinstance(stated, dict):
        raise FormatError("expected a table of lists by kind", path=path, position="kinds")
    kinds = cast("dict[str, object]", stated)
    for name in kinds:
        if name not in KINDS:
            raise FormatError(
                f"no such kind of operation: {name!r}",
                path=path,
                position="kinds",
                hint=f"known are {', '.join(KINDS)}",
            )
    return Order(
        default=_list(root.get("order"), path, "order"),
        kinds={name: _list(value, path, f"kinds.{name}") for name, value in kinds.items()},
    )


def _list(value: object, path: str, where: str) -> tuple[str, ...]:
    stated = cast("list[object]", value) if isinstance(value, list) else []
    items = tuple(item for item in stated if isinstance(item, str))
    if not isinstance(value, list) or len(items) != len(stated):
        raise FormatError("expected a list of estimators", path=path, position=where)
    for item in items:
        check_stated_estimator(item, path, where)
    try:
        return _checked(items, where)
    except UsageError as error:
        raise FormatError(error.message, path=path, position=where, hint=error.hint) from error


DEFAULT_ORDER = "collectives+calibrated+roofline"
"""What is asked where nobody says: fits before data sheets."""

KINDS_BY_MODELS = (
    "matmul",
    "convolution",
    "attention.context",
    "attention.encoder",
    "attention.generation",
    "moe",
    "quantize",
)
"""Kinds that the shipped learned models are asked about before fits."""

_DEFAULT = Order(
    default=split_order(DEFAULT_ORDER),
    kinds=dict.fromkeys(KINDS_BY_MODELS, ("learned", "calibrated", "roofline")),
)
"""Of these the learned models know more on held-out shapes (docs/accuracy.md), of products and attention in
recorded programs too; of what else streams its data they know the sizes of their tables only.
"""

_MEASURED = ("learned", "calibrated", "roofline")
_MEASURED_KINDS = ("vector", "normalization", "pooling", "gather")
"""Of these the learned models know what libraries were measured at (on held-out shapes they err by less
than half as much as the fitted forms: docs/accuracy.md), where an operation names its library.
"""

_OWN_MODELS, _SHIPPED_MODELS = "learned:shipped=false", "learned:own=false"
"""The learned models that a user's own device file names, and those of the package."""

_OF_GRAPHS = frozenset({"roofline"})
"""Models that see more in a graph than in its operations one by one."""
_ASSUMED = frozenset(
    {
        "calibrated.carried",
        "calibrated.event-times",
        "calibrated.includes-quantizing",
        "collectives.carried",
        "collectives.data-sheet",
        "collectives.kin",
        "collectives.tuned",
    }
)
"""Findings about answers that were given, which stand whoever would have come after."""
_FREE, _MODEL = 0, 1


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Columns under way, shape ``(3, rows)`` and ``(rows,)`` twice: time and interval, who, bound."""

    times: FloatArray
    estimator: NDArray[np.int8]
    bound: NDArray[np.int8]

    @classmethod
    def nothing(cls, rows: int) -> _Answer:
        """Nobody has said anything yet."""
        silent = np.full(rows, -1, np.int8)
        return cls(np.full((3, rows), np.nan), silent, silent.copy())

    def take(self, rows: IntArray, times: FloatArray, who: int, bound: NDArray[np.int8] | int) -> None:
        """Keep what a model says of some rows, where it says something; ``times`` of shape ``(3, rows)``."""
        heard = ~np.isnan(times[0])
        at = rows[heard]
        self.times[:, at] = times[:, heard]
        self.estimator[at] = who
        self.bound[at] = bound if isinstance(bound, int) else bound[heard]

    def ask(
        self,
        who: int,
        model: OperationModel,
        ops: Operations,
        wanted: BoolArray,
        *,
        device: Device,
        heard: Diagnostics,
        in_programs: bool,
    ) -> None:
        """What a model of operations says of those that are wanted and have no time yet; ``in_programs`` as
        programs run them, not benchmarks.
        """
        rows = np.flatnonzero(wanted & np.isnan(self.times[0]))
        if len(rows):
            part = ops.take(rows)
            said = predict_with(model, part, device, heard)
            if in_programs:
                said = as_programs_run(said, part, device, heard)
            self.take(rows, np.stack((said.duration_ns, said.low_ns, said.high_ns)), who, _MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """Who is asked about a device: ``models`` by ``spellings``, and the spellings of each kind in order."""

    spellings: tuple[str, ...]
    models: tuple[Estimator, ...]
    of_kind: Mapping[str, tuple[str, ...]]
    of_library: Mapping[str, tuple[str, ...]]
    """Another order for some kinds, of operations that name the library that runs them."""
    of_format: Mapping[tuple[str, str], tuple[str, ...]]
    """Another order for some kinds in some number formats."""
    by_default: bool = False
    """Nobody stated an order: what models say of products is taken as programs run them."""

    @property
    def names(self) -> tuple[str, ...]:
        """What each estimator is called: its name, as it was spelled where two share one."""
        names = [model.name for model in self.models]
        pairs = zip(names, self.spellings, strict=True)
        return tuple(spelling if names.count(name) > 1 else name for name, spelling in pairs)

    def steps(self, ops: Operations) -> list[tuple[bool, BoolArray, int]]:
        """Who is asked of which operations, turn by turn: whether nobody comes after, the rows, the model.

        In turn n each kind asks the n-th of its order; kinds that ask the same share a question.
        """
        kinds, schemes = ops.kind.names, ops.scheme.names
        orders = [
            self.of_format.get((kind, scheme), of_any.get(kind, self.of_kind[kind]))
            for of_any in (self.of_kind, self.of_library)
            for kind in kinds
            for scheme in schemes
        ]
        named = np.array([bool(name) for name in ops.variant.names], np.bool_)
        row = np.zeros(0, np.int64)
        if len(ops):
            row = ops.kind.row + len(kinds) * named[ops.variant.row].astype(np.int64)
            row = row * len(schemes) + ops.scheme.row
        steps: list[tuple[bool, BoolArray, int]] = []
        for turn in range(max((len(order) for order in orders), default=0)):
            for who, spelling in enumerate(self.spellings):
                asks = np.array([order[turn : turn + 1] == (spelling,) for order in orders], np.bool_)
                rows = asks[row] if len(asks) else np.zeros(len(ops), np.bool_)
                if rows.any():
                    asked: list[int] = np.unique(row[rows]).tolist()
                    last = all(turn + 1 == len(orders[each]) for each in asked)
                    steps.append((last, rows, who))
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """The estimator. ``order`` are estimators with their options, joined by ``+`` (empty: what devval and
    recorded programs speak for, see :data:`_DEFAULT`); in its place ``path`` is a
    TOML file with a list ``order`` and lists by kind of operation in ``kinds``. ``num_ranks``: size of
    collectives over all ranks where the graph does not say (-1: unknown).
    """

    order: str = ""
    path: str = ""
    num_ranks: int = -1

    inert_options: ClassVar[frozenset[str]] = frozenset()
    _plan: Order = field(init=False, repr=False, compare=False)
    _models: tuple[Estimator, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the order and load its estimators. Raises ``UsageError``, and ``FormatError`` for the file."""
        if self.order and self.path:
            raise UsageError("composite: an order and a file of one", hint="give order= or path=, not both")
        stated = Order(default=split_order(self.order)) if self.order else _DEFAULT
        plan = read_order(self.path) if self.path else stated
        models = tuple(for_job(load_estimator(each), self.num_ranks) for each in plan.spellings())
        object.__setattr__(self, "_plan", plan)
        object.__setattr__(self, "_models", models)

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return "composite"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node by the first that covers it. O(nodes log nodes)."""
        found = Diagnostics() if diagnostics is None else diagnostics
        distinct, place = operations_on(graph, device, num_ranks=self.num_ranks).distinct()
        of_ops = _Answer.nothing(len(distinct))
        of_nodes = _Answer.nothing(len(graph))
        free = takes_no_time(graph)
        needed = np.zeros(len(distinct), np.bool_)
        needed[place[~free]] = True
        bounds = ["free", "model"]
        panel = self._panel(device)
        for last, wanted, who in panel.steps(distinct):
            model, heard = panel.models[who], Diagnostics()
            if isinstance(model, OperationModel) and model.name not in _OF_GRAPHS:
                of_ops.ask(
                    who,
                    model,
                    distinct,
                    wanted & needed,
                    device=device,
                    heard=heard,
                    in_programs=panel.by_default,
                )
            else:
                missing = (wanted & needed & np.isnan(of_ops.times[0]))[place]
                nodes = np.flatnonzero(missing & np.isnan(of_nodes.times[0]) & ~free)
                if len(nodes):
                    said = estimate_with(model, graph, device, heard)
                    bounds += [name for name in said.bounds if name not in bounds]
                    number = np.array([*(bounds.index(name) for name in said.bounds), -1], np.int8)
                    times = np.stack((said.duration_ns, said.low_ns, said.high_ns))
                    of_nodes.take(nodes, times[:, nodes], who, number[said.bound[nodes]])
            _pass_on(heard, found, last)
        by_node = ~np.isnan(of_nodes.times[0])
        times = np.where(free, 0.0, np.where(by_node, of_nodes.times, of_ops.times[:, place]))
        said_by = np.where(by_node, of_nodes.estimator, of_ops.estimator[place])
        bound = np.where(by_node, of_nodes.bound, of_ops.bound[place])
        silent = np.isnan(times[0])
        found.warning(
            "composite.not-covered",
            graph.name,
            f"no estimator of {'+'.join(panel.spellings)} covers the operation",
            count=int(silent.sum()),
        )
        # What is free was said by nobody in particular: the first may have the word.
        return Estimate(
            hardware=device.name,
            estimators=panel.names,
            bounds=tuple(bounds),
            duration_ns=times[0],
            low_ns=times[1],
            high_ns=times[2],
            estimator=np.where(silent, -1, np.where(free, 0, said_by)).astype(np.int8),
            bound=np.where(silent, -1, np.where(free, _FREE, bound)).astype(np.int8),
        )

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of one execution of each operation, by the first that covers it; models that need a graph
        are passed over.
        """
        found = Diagnostics() if diagnostics is None else diagnostics
        distinct, place = ops.distinct()
        answer = _Answer.nothing(len(distinct))
        panel = self._panel(device)
        for last, wanted, who in panel.steps(distinct):
            model, heard = panel.models[who], Diagnostics()
            if isinstance(model, OperationModel):
                answer.ask(
                    who,
                    model,
                    distinct,
                    wanted,
                    device=device,
                    heard=heard,
                    in_programs=panel.by_default,
                )
                _pass_on(heard, found, last)
        duration_ns, low_ns, high_ns = answer.times
        said = Prediction(
            duration_ns=duration_ns,
            low_ns=low_ns,
            high_ns=high_ns,
            models=panel.names,
            estimator=answer.estimator,
        )
        return said.take(place)

    def _panel(self, device: Device) -> _Panel:
        """Who is asked: what a user's own device file brings comes first, where nobody said."""
        plan, spellings, models = self._plan, self._plan.spellings(), self._models
        orders = {kind: plan.of(kind) for kind in KINDS}
        of_library: dict[str, tuple[str, ...]] = {}
        of_format: dict[tuple[str, str], tuple[str, ...]] = {}
        if plan is _DEFAULT:
            fits = [fit for fit in fits_of_user(device) if fit.form != PRODUCTS]
            fitted = {fit.kind for fit in fits if fit.kind not in KINDS_BY_MODELS or fit.scheme == ANY}
            orders |= {kind: plan.default for kind in KINDS if kind in fitted}
            of_library = {kind: _MEASURED for kind in _MEASURED_KINDS if kind not in fitted}
            learned = {cell.kind for _, card in cards_at(device.learned_models) for cell in card.cells}
            # The learned estimator asks them first by itself.
            first = [kind for kind in KINDS if kind in learned and "learned" not in orders[kind]]
            of_library = {kind: order for kind, order in of_library.items() if kind not in first}
            orders |= {kind: (_OWN_MODELS, *orders[kind]) for kind in first}
            of_format = {key: order for key, order in _by_errors(fits, device, plan) if key[0] not in fitted}
            new = {each for order in (*orders.values(), *of_format.values()) for each in order}
            for each in sorted(new - set(spellings)):
                spellings = (*spellings, each)
                models = (*models, for_job(load_estimator(each), self.num_ranks))
        return _Panel(
            spellings=spellings,
            models=models,
            of_kind=orders,
            of_library=of_library,
            of_format=of_format,
            by_default=plan is _DEFAULT,
        )


_OFF = 0.5
"""Times that are far too short err by less than 100 %, however wrong: no measure of who is near."""
_MOST_OF = 0.8
"""Share of a model's rows that fits must be of, too, for their errors to be compared: those of one library
among several say nothing of the others.
"""


def least_better(rows: float) -> float:
    """Return the share of another's error that an error on so many held-out rows has to stay below."""
    return 1.0 - float(max(rows, 2.0) ** -0.5)


@dataclass(slots=True)
class _Told:
    """What a user's device file and its cards say of one kind in one number format: who errs by how much on
    rows left out, each with a weight, and who may answer.
    """

    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict[str, list[tuple[float, float]]])
    own: list[str] = field(default_factory=list[str])

    def hear(self, who: str, error: float | None, rows: float) -> None:
        """An error of an estimator on so many rows, if it is known."""
        if error is not None and not isnan(error) and rows > 0:
            self.errors.setdefault(who, []).append((error, rows))

    def order(self) -> list[str]:
        """Return own answers of unknown error, then all by their errors; fits of a part of the rows come
        after a model of all, and models of the package that are off by more than :data:`_OFF` after both.
        Answers that a calibration brought come first only where they are better than the package's as far
        as so many rows can tell.
        """
        mean: dict[str, float] = {}
        rows = {who: sum(count for _, count in told) for who, told in self.errors.items()}
        for who, told in self.errors.items():
            error = sum(each * count for each, count in told) / rows[who]
            if who == _SHIPPED_MODELS:
                mean[who] = inf if error > _OFF else error
            else:
                mean[who] = error / least_better(rows[who])
        if rows.get("calibrated", inf) < _MOST_OF * rows.get(_OWN_MODELS, 0.0):
            mean["calibrated"] = max(mean["calibrated"], mean[_OWN_MODELS])
        unknown = [who for who in self.own if who not in mean]
        return [*unknown, *sorted(mean, key=lambda who: (mean[who], who == "calibrated"))]


def _by_errors(
    fits: Sequence[Fit], device: Device, plan: Order
) -> Iterator[tuple[tuple[str, str], tuple[str, ...]]]:
    """Of kinds and number formats that a user's own device file speaks of: who errs least on rows left out
    comes first, as its fits and cards say it, of what they brought and of the package's models before.
    """
    found: dict[tuple[str, str], _Told] = {}
    for _, card in cards_at(device.learned_models):
        for cell in card.cells:
            if cell.kind not in KINDS_BY_MODELS:
                continue
            told = found.setdefault((cell.kind, cell.scheme), _Told())
            told.own = [_OWN_MODELS]
            for row in card.errors:
                same = (row.kind, row.hardware) == (cell.kind, device.name)
                if same and row.scheme in (cell.scheme, ANY):
                    told.hear(_OWN_MODELS, row.mape, row.n)
                    told.hear(_SHIPPED_MODELS, row.before_mape, row.n)
    for fit in fits:
        if fit.kind in KINDS_BY_MODELS and fit.scheme != ANY:
            told = found.setdefault((fit.kind, fit.scheme), _Told())
            told.own = [*(each for each in told.own if each != "calibrated"), "calibrated"]
            told.hear("calibrated", fit.error.mape, fit.samples)
            told.hear(_SHIPPED_MODELS, fit.error.before_mape, fit.samples)
    for key, told in found.items():
        yield key, tuple(dict.fromkeys((*told.order(), *plan.of(key[0]))))


def _pass_on(heard: Diagnostics, found: Diagnostics, last: bool) -> None:
    """What a model says it lacks is no finding while others come after: it is then worth knowing, no more.
    What it assumed of the answers it gave stays what it is.
    """
    if last:
        found.extend(heard)
        return
    left = heard.counts()
    waiting = Counter(each.code for each in heard)
    for each in heard:
        # A collector keeps the first few findings of a code and counts all: the rest goes with the last kept.
        waiting[each.code] -= 1
        count = 1 if waiting[each.code] else left[each.code]
        left[each.code] -= count
        keeps = each.severity is Severity.ERROR or each.code in _ASSUMED
        severity = each.severity if keeps else Severity.INFO
        found.add(each.code, severity, each.location, each.message, path=each.path, count=count)
