"""Composite estimator: the first of several estimators that covers an operation, in an order per kind.

Models of single operations predict each distinct operation once, and only operations that no earlier model
covers. Models that use more of a graph than single operations (the roofline: messages, fusions of several
products) estimate the whole graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from pathlib import Path
from typing import ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.interface import (
    Estimator,
    OperationModel,
    Prediction,
    basis_codes,
    estimate_with,
    for_job,
    operations_on,
    predict_with,
    takes_no_time,
)
from hespas.estimators.kernels import PRODUCTS, as_programs_run
from hespas.estimators.learned.serialization import cards_at
from hespas.estimators.registry import check_stated_estimator, load_estimator
from hespas.files.documents import read_toml
from hespas.graph import Diagnostics, Estimate, OpGraph, Severity
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import ANY, Device
from hespas.hardware.library import fits_of_user
from hespas.operations import KINDS, LabelColumn, Labels, Operations, single_products

__all__ = [
    "DEFAULT_ORDER",
    "KINDS_BY_MODELS",
    "Composite",
    "Order",
    "least_better",
    "read_order",
    "split_order",
]

DEFAULT_ORDER = "collectives+calibrated+roofline"
"""Default order of estimators: fits before data sheets."""

KINDS_BY_MODELS = (
    "matmul",
    "convolution",
    "attention.context",
    "attention.encoder",
    "attention.generation",
    "moe",
    "quantize",
)
"""Kinds for which the shipped learned models come before fits: they err less on held-out shapes
(docs/accuracy/index.md), for products and attention also in recorded programs.
"""

_LEARNED_FIRST = ("learned", "calibrated", "roofline")
_KINDS_OF_LIBRARIES = ("vector", "normalization", "pooling", "gather")
"""Kinds for which learned models come first if an operation names its library: they were fitted on the
libraries' times, and on held-out shapes they err by less than half as much as the fitted forms
(docs/accuracy/index.md).
"""
_OWN_MODELS, _SHIPPED_MODELS = "learned:shipped=false", "learned:own=false"
"""Learned models of a user's device file, and learned models of the package."""

_OF_GRAPHS = frozenset({"roofline"})
"""Models that use more of a graph than its single operations."""
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
"""Codes about predictions that were made, which stay warnings even if other estimators follow."""
_MOST_ESTIMATORS = 64
"""Limit of estimators in one composite; their indices are stored as int8."""
_FREE, _MODEL = 0, 1
_LARGE_ERROR = 0.5
"""Error from which a shipped model comes last. Times that are far too short err by less than 100 %, however
wrong, so that larger errors cannot be compared.
"""
_LEAST_SHARE_OF_ROWS = 0.8
"""Least share of a model's rows that fits must cover for their errors to be compared: fits of one library
do not apply to others.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order in which ``composite`` tries estimators, by kind of operation. ``default`` applies to kinds that
    ``kinds`` does not name.
    """

    default: tuple[str, ...]
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def of(self, kind: str) -> tuple[str, ...]:
        """Return the names of the estimators for a kind of operation, the first choice first."""
        return self.kinds.get(kind, self.default)

    def spellings(self) -> tuple[str, ...]:
        """Return every estimator that occurs in the order, without repetitions."""
        orders = (*self.kinds.values(), self.default)
        return tuple(dict.fromkeys(spelling for order in orders for spelling in order))


def split_order(text: str) -> tuple[str, ...]:
    """Split a text of estimators such as ``a+b:x=1+c`` at ``+``. Raises ``UsageError`` for an empty or
    repeated part.
    """
    return _checked(tuple(part.strip() for part in text.split("+")), "order")


_EXAMPLE_ORDER = "database+calibrated+roofline"


def _checked(order: tuple[str, ...], key: str) -> tuple[str, ...]:
    if not order or not all(order):
        raise UsageError(
            f"composite: {key} has an empty estimator: {'+'.join(order)!r}", hint=f"write {_EXAMPLE_ORDER}"
        )
    repeated = next((part for part in order if order.count(part) > 1), "")
    if repeated:
        raise UsageError(f"composite: {key} names {repeated!r} twice", hint="name each estimator once")
    if len(order) > _MOST_ESTIMATORS:
        raise UsageError(
            f"composite: {key} names {len(order)} estimators, more than the limit of {_MOST_ESTIMATORS}",
            hint="name fewer estimators",
        )
    if any(part.partition(":")[0] == "composite" for part in order):
        raise UsageError(
            f"composite: {key} names composite, which cannot contain itself",
            hint=f"name other estimators: {_EXAMPLE_ORDER}",
        )
    return order


def read_order(path: str) -> Order:
    """Read an order from a TOML file: a list ``order``, and a table ``kinds`` of lists by kind of operation.

    Raises ``FormatError`` with the wrong key, ``BoundaryError`` for an estimator that needs permission.
    """
    example = 'a whole file is: order = ["calibrated", "roofline"]'
    root = read_toml(Path(path), "an order of estimators", where="check the path", example=example)
    unknown = sorted(set(root) - {"order", "kinds"})
    if unknown:
        raise FormatError(f"unknown key {unknown[0]!r}", path=path, hint="use the keys order and kinds")
    table = root.get("kinds", {})
    if not isinstance(table, dict):
        raise FormatError("expected a table of lists by kind", path=path, position="kinds")
    kinds = cast("dict[str, object]", table)
    for name in kinds:
        if name not in KINDS:
            raise FormatError(
                f"no such kind of operation: {name!r}",
                path=path,
                position="kinds",
                hint=f"use one of {', '.join(KINDS)}",
            )
    return Order(
        default=_listed_estimators(root.get("order"), path, "order"),
        kinds={name: _listed_estimators(value, path, f"kinds.{name}") for name, value in kinds.items()},
    )


def _listed_estimators(value: object, path: str, position: str) -> tuple[str, ...]:
    entries = cast("list[object]", value) if isinstance(value, list) else []
    spellings = tuple(entry for entry in entries if isinstance(entry, str))
    if not isinstance(value, list) or len(spellings) != len(entries):
        raise FormatError("expected a list of estimators", path=path, position=position)
    for spelling in spellings:
        check_stated_estimator(spelling, path, position)
    try:
        return _checked(spellings, position)
    except UsageError as error:
        raise FormatError(error.message, path=path, position=position, hint=error.hint) from error


_DEFAULT = Order(default=split_order(DEFAULT_ORDER), kinds=dict.fromkeys(KINDS_BY_MODELS, _LEARNED_FIRST))


def least_better(rows: float) -> float:
    """Return the required ratio of two errors: an error counts as better only if it is below another one by
    this factor. It is smaller if the error was measured on fewer held-out ``rows``, because it is then less
    certain.
    """
    return 1.0 - float(max(rows, 2.0) ** -0.5)


@dataclass(slots=True)
class _HeldOutErrors:
    """Errors of the estimators for one kind of operation and number format, as stated in a user's device file
    and in the cards of its learned models.

    ``errors`` maps an estimator to pairs: an error, and the number of held-out rows on which it was measured.
    ``own`` lists the estimators that the device file adds.
    """

    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict[str, list[tuple[float, float]]])
    own: list[str] = field(default_factory=list[str])

    def add(self, estimator: str, error: float | None, rows: float) -> None:
        """Add an error that was measured on ``rows`` rows. Unknown errors (None or NaN) are ignored."""
        if error is not None and not isnan(error) and rows > 0:
            self.errors.setdefault(estimator, []).append((error, rows))

    def order(self) -> list[str]:
        """Return the estimators, the best first. Estimators of the device file without a known error come
        first, then all others by error.

        An estimator of the device file comes before the shipped models only if its error is lower by more
        than the uncertainty of the error. If the fits of the file were tested on only a small share of the
        rows, they come after a learned model that was tested on all of them. Shipped models with an error
        above :data:`_LARGE_ERROR` come last.
        """
        mean: dict[str, float] = {}
        rows = {estimator: sum(count for _, count in pairs) for estimator, pairs in self.errors.items()}
        for estimator, pairs in self.errors.items():
            error = sum(error * count for error, count in pairs) / rows[estimator]
            if estimator == _SHIPPED_MODELS:
                mean[estimator] = inf if error > _LARGE_ERROR else error
            else:
                mean[estimator] = error / least_better(rows[estimator])
        if rows.get("calibrated", inf) < _LEAST_SHARE_OF_ROWS * rows.get(_OWN_MODELS, 0.0):
            mean["calibrated"] = max(mean["calibrated"], mean[_OWN_MODELS])
        unknown = [estimator for estimator in self.own if estimator not in mean]
        return [*unknown, *sorted(mean, key=lambda name: (mean[name], name == "calibrated"))]


@dataclass(frozen=True, slots=True)
class _DeviceOrder:
    """Default order of estimators for one device. Estimators of a user's device file come first.

    ``fitted`` are the kinds of operations for which the device file has fits that come first. ``learned`` are
    the kinds for which it has learned models. ``by_error`` has the order for each kind and number format
    whose errors the file states.
    """

    fitted: frozenset[str]
    learned: frozenset[str]
    by_error: Mapping[tuple[str, str], tuple[str, ...]]

    @classmethod
    def of(cls, device: Device) -> _DeviceOrder:
        """Return the default order for a device."""
        fits = [fit for fit in fits_of_user(device) if fit.form != PRODUCTS]
        cards = [card for _, card in cards_at(device.learned_models)]
        by_format: dict[tuple[str, str], _HeldOutErrors] = {}
        for card in cards:
            for cell in card.cells:
                if cell.kind not in KINDS_BY_MODELS:
                    continue
                errors = by_format.setdefault((cell.kind, cell.scheme), _HeldOutErrors())
                errors.own = [_OWN_MODELS]
                for row in card.errors:
                    same = (row.kind, row.hardware) == (cell.kind, device.name)
                    if same and row.scheme in (cell.scheme, ANY):
                        errors.add(_OWN_MODELS, row.mape, row.n)
                        errors.add(_SHIPPED_MODELS, row.before_mape, row.n)
        for fit in fits:
            if fit.kind in KINDS_BY_MODELS and fit.scheme != ANY:
                errors = by_format.setdefault((fit.kind, fit.scheme), _HeldOutErrors())
                errors.own = [*(name for name in errors.own if name != "calibrated"), "calibrated"]
                errors.add("calibrated", fit.error.mape, fit.samples)
                errors.add(_SHIPPED_MODELS, fit.error.before_mape, fit.samples)
        return cls(
            fitted=frozenset(
                fit.kind for fit in fits if fit.kind not in KINDS_BY_MODELS or fit.scheme == ANY
            ),
            learned=frozenset(cell.kind for card in cards for cell in card.cells),
            by_error={
                (kind, scheme): tuple(dict.fromkeys((*errors.order(), *_DEFAULT.of(kind))))
                for (kind, scheme), errors in by_format.items()
            },
        )

    def of_class(self, kind: str, scheme: str, *, has_library: bool) -> tuple[str, ...]:
        """Return the order of estimators for a kind and number format. ``has_library`` is true for operations
        that name the library that runs them.
        """
        order = _DEFAULT.default
        if kind not in self.fitted:
            if (kind, scheme) in self.by_error:
                return self.by_error[kind, scheme]
            order = _DEFAULT.of(kind)
        if kind in self.learned and "learned" not in order:  # "learned" tries the device's own models itself
            return (_OWN_MODELS, *order)
        if has_library and kind in _KINDS_OF_LIBRARIES and kind not in self.fitted:
            return _LEARNED_FIRST
        return order

    def spellings(self) -> set[str]:
        """Return all estimators that the orders of any kind include."""
        orders = [self.of_class(kind, "", has_library=False) for kind in KINDS]
        orders += [order for (kind, _), order in self.by_error.items() if kind not in self.fitted]
        return {spelling for order in orders for spelling in order}


class _DispatchRound(NamedTuple):
    """One call of an estimator by ``composite``. ``model`` is the index of the estimator, ``rows`` a mask of
    the operations that it predicts. ``is_last`` is True if no other estimator follows.
    """

    model: int
    rows: BoolArray
    is_last: bool


_MOST_KNOWN = 64
"""Limit of stored predictions: those of a few rounds of the rank classes of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dispatch:
    """Estimators for one device, and the order in which they are tried for each class of operations.

    ``plan`` is an order that the user states. If ``device_order`` is given, it replaces ``plan``, and
    predicted times of matmuls are converted from benchmarks to programs
    (:func:`~hespas.estimators.kernels.as_programs_run`).
    """

    spellings: tuple[str, ...]
    models: tuple[Estimator, ...]
    plan: Order
    device_order: _DeviceOrder | None
    known: dict[tuple[object, ...], tuple[Prediction, Diagnostics]] = field(
        default_factory=dict[tuple[object, ...], tuple[Prediction, Diagnostics]]
    )
    """Predictions by model and operations, because rank classes often have the same operations."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each estimator, for reports. If several have the same name, their spellings with
        options are used.
        """
        names = [model.name for model in self.models]
        pairs = zip(names, self.spellings, strict=True)
        return tuple(spelling if names.count(name) > 1 else name for name, spelling in pairs)

    def rounds(self, ops: Operations) -> list[_DispatchRound]:
        """Return the calls of estimators that are needed for ``ops``.

        In round n each class of operations tries the n-th estimator of its order; classes that try the same
        estimator share one call.
        """
        kinds, schemes = ops.kind.names, ops.scheme.names
        orders = [
            self.plan.of(kind)
            if self.device_order is None
            else self.device_order.of_class(kind, scheme, has_library=has_library)
            for has_library in (False, True)
            for kind in kinds
            for scheme in schemes
        ]
        row = np.zeros(0, np.int64)
        if len(ops):
            has_library = np.array([bool(name) for name in ops.variant.names], np.bool_)[ops.variant.row]
            row = ops.kind.row + len(kinds) * has_library.astype(np.int64)
            row = row * len(schemes) + ops.scheme.row
        rounds: list[_DispatchRound] = []
        for number in range(max((len(order) for order in orders), default=0)):
            for model, spelling in enumerate(self.spellings):
                tries = np.array([order[number : number + 1] == (spelling,) for order in orders], np.bool_)
                rows = tries[row] if len(tries) else np.zeros(len(ops), np.bool_)
                if rows.any():
                    classes: list[int] = np.unique(row[rows]).tolist()
                    is_last = all(number + 1 == len(orders[index]) for index in classes)
                    rounds.append(_DispatchRound(model, rows, is_last))
        return rounds

    def predict(
        self, call: _DispatchRound, ops: Operations, rows: IntArray, device: Device, diagnostics: Diagnostics
    ) -> Prediction:
        """Call the estimator of a round for ``rows`` of ``ops`` and return its prediction."""
        part = ops.take(rows)
        key = (call.model, *part.content())
        if key not in self.known:
            reported = Diagnostics()
            prediction = predict_with(cast("OperationModel", self.models[call.model]), part, device, reported)
            if self.device_order is not None:
                prediction = as_programs_run(prediction, part, device, reported)
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[key] = prediction, reported
        prediction, reported = self.known[key]
        diagnostics.extend(reported)
        return prediction


@dataclass(frozen=True, slots=True, eq=False)
class _FilledTimes:
    """Predicted times, which one estimator after the other fills in.

    ``times`` are times with intervals, shape ``(3, rows)``. ``estimator`` is the index of the estimator that
    predicted a row, ``bound`` the code of the resource that limits it, both of shape ``(rows,)``. ``basis``
    is the basis of each time.
    """

    times: FloatArray
    estimator: NDArray[np.int8]
    bound: NDArray[np.int8]
    basis: LabelColumn

    @classmethod
    def unknown(cls, rows: int) -> _FilledTimes:
        """Return an object in which the times of all rows are unknown."""
        none = np.full(rows, -1, np.int8)
        return cls(np.full((3, rows), np.nan), none, none.copy(), LabelColumn(rows))

    def fill(
        self,
        rows: IntArray,
        times: FloatArray,
        model: int | NDArray[np.int8],
        bound: NDArray[np.int8],
        basis: Labels,
    ) -> None:
        """Store ``times`` of shape ``(3, rows)`` for the given rows. Rows whose new time is NaN are not
        changed.
        """
        covered = np.flatnonzero(~np.isnan(times[0]))
        target = rows[covered]
        self.times[:, target] = times[:, covered]
        self.estimator[target] = model if isinstance(model, int) else model[covered]
        self.bound[target] = bound[covered]
        self.basis.fill(target, basis.take(covered))

    def fill_from(self, rows: IntArray, prediction: Prediction, model: int) -> None:
        """Store the prediction of single operations for the given rows."""
        times = np.stack((prediction.duration_ns, prediction.low_ns, prediction.high_ns))
        self.fill(rows, times, model, np.full(len(rows), _MODEL, np.int8), prediction.basis)


def _forward(reported: Diagnostics, diagnostics: Diagnostics, *, is_last: bool) -> None:
    """Forward the diagnostics of one estimator to ``diagnostics``. If another estimator follows, messages
    about operations without an estimate get the severity information. Errors and assumptions keep their
    severity.
    """
    if is_last:
        diagnostics.extend(reported)
        return
    left = reported.counts()
    waiting = Counter(entry.code for entry in reported)
    for entry in reported:
        # A collector stores the first few entries of a code and counts all: the rest goes with the last one.
        waiting[entry.code] -= 1
        count = 1 if waiting[entry.code] else left[entry.code]
        left[entry.code] -= count
        keeps = entry.severity is Severity.ERROR or entry.code in _ASSUMED
        severity = entry.severity if keeps else Severity.INFO
        diagnostics.add(entry.code, severity, entry.location, entry.message, path=entry.path, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """Estimator that uses for each operation the first of several estimators that covers it.

    ``order``: names of estimators with options, joined by ``+`` (empty: the default order, which had the
    lowest errors on the split ``devval`` and on recorded programs). ``path``: a TOML file that replaces
    ``order``, with a list ``order`` and lists by kind of operation in ``kinds``. ``num_ranks``: number of
    ranks in collectives over all ranks, for graphs that do not state it (-1: unknown).
    """

    order: str = ""
    path: str = ""
    num_ranks: int = -1

    inert_options: ClassVar[frozenset[str]] = frozenset()
    _plan: Order = field(init=False, repr=False, compare=False)
    _models: tuple[Estimator, ...] = field(init=False, repr=False, compare=False)
    _dispatches: dict[int, tuple[Device, _Dispatch]] = field(
        init=False, repr=False, compare=False, default_factory=dict[int, tuple[Device, "_Dispatch"]]
    )

    def __post_init__(self) -> None:
        """Read the order and load its estimators. Raises ``UsageError``, and ``FormatError`` for the file."""
        if self.order and self.path:
            raise UsageError(
                "composite: order and path are both given", hint="give order= or path=, not both"
            )
        plan = Order(default=split_order(self.order)) if self.order else _DEFAULT
        plan = read_order(self.path) if self.path else plan
        models = tuple(for_job(load_estimator(spelling), self.num_ranks) for spelling in plan.spellings())
        object.__setattr__(self, "_plan", plan)
        object.__setattr__(self, "_models", models)

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        return "composite"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node, by the first model that covers it. O(nodes log
        nodes).
        """
        diagnostics = Diagnostics() if diagnostics is None else diagnostics
        distinct, index = operations_on(graph, device, num_ranks=self.num_ranks).distinct()
        of_ops, of_nodes = _FilledTimes.unknown(len(distinct)), _FilledTimes.unknown(len(graph))
        free = takes_no_time(graph)
        self._fill_sums(graph, device, of_nodes, diagnostics)
        is_sum = ~np.isnan(of_nodes.times[0])
        needed = np.zeros(len(distinct), np.bool_)
        needed[index[~(free | is_sum)]] = True
        bounds = ["free", "model"]
        dispatch = self._dispatch(device)
        for call in dispatch.rounds(distinct):
            model, reported = dispatch.models[call.model], Diagnostics()
            missing = call.rows & needed & np.isnan(of_ops.times[0])
            if isinstance(model, OperationModel) and model.name not in _OF_GRAPHS:
                rows = np.flatnonzero(missing)
                if len(rows):
                    of_ops.fill_from(
                        rows, dispatch.predict(call, distinct, rows, device, reported), call.model
                    )
            else:
                rows = np.flatnonzero(missing[index] & np.isnan(of_nodes.times[0]) & ~free)
                if len(rows):
                    estimate = estimate_with(model, graph, device, reported)
                    bounds += [name for name in estimate.bounds if name not in bounds]
                    number = np.array([*(bounds.index(name) for name in estimate.bounds), -1], np.int8)
                    times = np.stack((estimate.duration_ns, estimate.low_ns, estimate.high_ns))
                    codes = np.where(estimate.basis < 0, len(estimate.bases), estimate.basis)[rows]
                    basis = Labels.choice((*estimate.bases, ""), codes.astype(np.int64))
                    of_nodes.fill(rows, times[:, rows], call.model, number[estimate.bound[rows]], basis)
            _forward(reported, diagnostics, is_last=call.is_last)
        by_node = ~np.isnan(of_nodes.times[0])
        times = np.where(free, 0.0, np.where(by_node, of_nodes.times, of_ops.times[:, index]))
        estimator = np.where(by_node, of_nodes.estimator, of_ops.estimator[index])
        bound = np.where(by_node, of_nodes.bound, of_ops.bound[index])
        bases = LabelColumn(len(graph))
        for labels, rows in (
            (of_ops.basis.labels().take(index), np.flatnonzero(~by_node)),
            (of_nodes.basis.labels(), np.flatnonzero(by_node)),
        ):
            bases.fill(rows, labels.take(rows))
        basis = bases.labels()
        unknown = np.isnan(times[0])
        diagnostics.warning(
            "composite.not-covered",
            graph.name,
            f"no estimator of {'+'.join(dispatch.spellings)} covers the operation",
            count=int(unknown.sum()),
        )
        # Nodes without cost count as estimated by the first model.
        return Estimate(
            hardware=device.name,
            estimators=dispatch.names,
            bounds=tuple(bounds),
            duration_ns=times[0],
            low_ns=times[1],
            high_ns=times[2],
            estimator=np.where(unknown, -1, np.where(free, 0, estimator)).astype(np.int8),
            bound=np.where(unknown, -1, np.where(free, _FREE, bound)).astype(np.int8),
            bases=basis.names,
            basis=basis_codes(basis, ~(unknown | free)),
        )

    def _fill_sums(
        self, graph: OpGraph, device: Device, of_nodes: _FilledTimes, diagnostics: Diagnostics
    ) -> None:
        """Store the times of nodes that consist of several products, as the sums of their products' times.
        The estimator and the basis of a node are those of its longest product.
        """
        products, owner = single_products(graph)
        if not len(products):
            return
        parts = self.predict(products, device, diagnostics)
        columns = (parts.duration_ns, parts.low_ns, parts.high_ns)
        nodes = np.unique(owner)
        times: FloatArray = np.stack(
            [np.bincount(owner, column, len(graph))[nodes].astype(np.float64) for column in columns]
        )
        order = np.lexsort((parts.duration_ns, owner))
        longest = order[np.append(np.flatnonzero(np.diff(owner[order])), len(order) - 1)]
        bound = np.full(len(nodes), _MODEL, np.int8)
        of_nodes.fill(nodes, times, parts.estimator[longest], bound, parts.basis.take(longest))

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of one execution of each operation, from the first estimator that covers it.
        Estimators that need a graph are skipped.
        """
        diagnostics = Diagnostics() if diagnostics is None else diagnostics
        distinct, index = ops.distinct()
        answer = _FilledTimes.unknown(len(distinct))
        dispatch = self._dispatch(device)
        for call in dispatch.rounds(distinct):
            if not isinstance(dispatch.models[call.model], OperationModel):
                continue
            reported = Diagnostics()
            rows = np.flatnonzero(call.rows & np.isnan(answer.times[0]))
            if len(rows):
                answer.fill_from(rows, dispatch.predict(call, distinct, rows, device, reported), call.model)
            _forward(reported, diagnostics, is_last=call.is_last)
        duration_ns, low_ns, high_ns = answer.times
        prediction = Prediction(
            duration_ns=duration_ns,
            low_ns=low_ns,
            high_ns=high_ns,
            models=dispatch.names,
            estimator=answer.estimator,
            basis=answer.basis.labels(),
        )
        return prediction.take(index)

    def _dispatch(self, device: Device) -> _Dispatch:
        """Return the estimators for a device and their order. The result is cached for each device."""
        if id(device) not in self._dispatches:
            self._dispatches[id(device)] = device, self._dispatch_of(device)
        return self._dispatches[id(device)][1]

    def _dispatch_of(self, device: Device) -> _Dispatch:
        spellings, models = self._plan.spellings(), self._models
        if self._plan is not _DEFAULT:
            return _Dispatch(spellings=spellings, models=models, plan=self._plan, device_order=None)
        device_order = _DeviceOrder.of(device)
        added = sorted(device_order.spellings() - set(spellings))
        return _Dispatch(
            spellings=(*spellings, *added),
            models=(*models, *(for_job(load_estimator(name), self.num_ranks) for name in added)),
            plan=self._plan,
            device_order=device_order,
        )
