"""Interface of estimators: protocols, predictions, and the functions that call an estimator and check its
times.

An :class:`Estimator` estimates the nodes of a graph. An :class:`OperationModel` predicts single operations,
so that each distinct operation of a graph is predicted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from math import nan
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.rates import OperationCosts, group_ranks_per_node, message_ranks_per_node
from hespas.graph import Diagnostics, Estimate, NodeKind, OpClass, OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray, constant
from hespas.graph.errors import InvariantError, UnsupportedError, clipped
from hespas.graph.passes import REGION, is_recorded_wait
from hespas.hardware import Device, Fit
from hespas.operations import Labels, Operations, between_ranks, operations_of

__all__ = [
    "Availability",
    "CasePrediction",
    "EnergyModel",
    "Estimator",
    "OperationModel",
    "Prediction",
    "Probed",
    "basis_codes",
    "estimate_by_operation",
    "estimate_with",
    "for_job",
    "operations_on",
    "predict_with",
    "prediction_of_rows",
    "takes_no_time",
    "transcendentals",
    "with_bands",
    "with_option",
]


@runtime_checkable
class Estimator(Protocol):
    """Protocol of an estimator: a frozen dataclass whose fields are its options.

    Nodes that the estimator does not cover get NaN, never 0. Zero-cost nodes, and no others, get 0.

    ``inert_options`` is a frozenset of text options that name no file, program or estimator. A class declares
    it if it runs no program and does not execute the workload. Input files may name such a class with these
    options and with numbers and booleans. All other classes and options need the user's permission
    (:func:`~hespas.estimators.registry.check_stated_estimator`).
    """

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        ...

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node on ``device``; ``graph`` is not changed.

        ``diagnostics`` receives the nodes without an estimate, with reasons, and the assumptions of the other
        estimates.
        """
        ...


class Availability(NamedTuple):
    """Availability of the software that an estimator needs. ``detail`` is the installed version, or the
    reason why it is not available. ``install`` is the command that installs it.
    """

    is_available: bool
    detail: str = ""
    install: str = ""


@runtime_checkable
class Probed(Protocol):
    """Interface of estimators that need other software and can test if it is installed."""

    def available(self) -> Availability:
        """Return the availability of the software, tested quickly: without a simulation or compilation."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """Predicted times of operations; columns of shape ``(ops,)`` [ns].

    ``duration_ns`` is NaN where the model does not cover an operation; ``low_ns`` and ``high_ns`` are the
    ends of a 90 % interval (NaN: no interval). ``estimator`` is an index into ``models`` (-1: none).
    ``basis`` is the kind of evidence behind each time, as in :class:`~hespas.graph.Estimate` (empty: not
    stated).
    """

    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    models: tuple[str, ...]
    estimator: NDArray[np.int8]
    basis: Labels

    @classmethod
    def of(
        cls,
        model: str,
        duration_ns: FloatArray,
        low_ns: FloatArray | None = None,
        high_ns: FloatArray | None = None,
        *,
        basis: Labels | str = "",
    ) -> Prediction:
        """Return a prediction in which all times come from one model. ``basis`` is one for all times, or one
        per time.
        """
        unknown = np.full(len(duration_ns), np.nan)
        return cls(
            duration_ns=duration_ns,
            low_ns=unknown if low_ns is None else low_ns,
            high_ns=unknown if high_ns is None else high_ns,
            models=(model,),
            estimator=np.where(np.isnan(duration_ns), -1, 0).astype(np.int8),
            basis=Labels.constant(basis, len(duration_ns)) if isinstance(basis, str) else basis,
        )

    def take(self, rows: IntArray) -> Prediction:
        """Return the predictions of ``rows``, which may repeat. The row number -1 gives an unknown time."""
        duration_ns, low_ns, high_ns = (
            np.append(column, np.nan)[rows] for column in (self.duration_ns, self.low_ns, self.high_ns)
        )
        return Prediction(
            duration_ns=duration_ns,
            low_ns=low_ns,
            high_ns=high_ns,
            models=self.models,
            estimator=np.append(self.estimator, np.int8(-1))[rows],
            basis=Labels.choice(
                (*self.basis.names, ""), np.append(self.basis.row, len(self.basis.names))[rows]
            ),
        )

    def __post_init__(self) -> None:
        """Check that all columns have one row per operation."""
        others = (self.low_ns, self.high_ns, self.estimator, self.basis)
        if {len(column) for column in others} != {len(self.duration_ns)}:
            raise InvariantError("Prediction: columns differ in length")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CasePrediction:
    """Times and intervals that one estimator predicts for each row of a table [ns]; NaN without a prediction
    or an interval.
    """

    estimator: str
    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray


@runtime_checkable
class EnergyModel(Protocol):
    """Interface of estimators that also model the energy of each operation, by part of the device."""

    def operation_costs(self, graph: OpGraph, device: Device) -> OperationCosts:
        """Return the energy of one execution of each node, by part."""
        ...


@runtime_checkable
class OperationModel(Protocol):
    """A model of the time of single operations: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        ...

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of one execution of each operation; NaN where the model does not cover one, never
        0.

        ``diagnostics`` receives the number of uncovered operations per reason.
        """
        ...


def with_option(model: Estimator, name: str, default: object, value: object) -> Estimator:
    """Return a copy of the model with the option ``name`` set to ``value``. Return the model unchanged if it
    has no such option, or if the option is not at its ``default``.
    """
    candidate: object = model
    absent = object()
    if not is_dataclass(candidate) or isinstance(candidate, type):
        return model
    current: object = getattr(model, name, absent)
    if current is absent or current != default:
        return model
    return cast("Estimator", replace(candidate, **{name: value}))


def for_job(model: Estimator, num_ranks: int) -> Estimator:
    """Return a copy of the model for a job of ``num_ranks`` ranks (-1: unknown). Collectives without a stated
    group have this number of ranks. Models without the option ``num_ranks`` are returned unchanged.
    """
    return with_option(model, "num_ranks", -1, num_ranks)


def with_bands(fit: Fit, time_ns: FloatArray, widening: FloatArray | float = 1.0) -> FloatArray:
    """Return times with the 5 % and 95 % ends of their intervals, shape ``(3, ops)`` [ns], from the error
    bands of a fit. Ends are NaN without bands.

    The ends of the band, as factors on the time, are raised to the power ``widening``, which is above 1
    beyond the fitted sizes.
    """
    if not fit.bands:
        unknown = np.full(len(time_ns), np.nan)
        return np.stack((time_ns, unknown, unknown))
    tops = np.array([band.up_to_ns for band in fit.bands])
    index = np.minimum(np.searchsorted(tops, time_ns), len(tops) - 1)
    with np.errstate(over="ignore"):  # far beyond the fitted sizes an end may be infinite
        low = np.array([band.low for band in fit.bands])[index] ** widening
        high = np.array([band.high for band in fit.bands])[index] ** widening
        return np.stack((time_ns, time_ns * np.minimum(low, 1.0), time_ns * np.maximum(high, 1.0)))


def operations_on(graph: OpGraph, device: Device, *, num_ranks: int = -1) -> Operations:
    """Return the nodes of a graph as a table of operations. For collectives and messages the table also has
    the number of their ranks in one node of ``device``. O(nodes).
    """
    ops = operations_of(graph, num_ranks=num_ranks, tiled=device.kind == "tpu")
    table, messages = graph.collectives, graph.p2p
    if not len(table) and not len(messages):
        return ops
    per_node = np.full(len(ops), np.nan)
    shared = group_ranks_per_node(graph, device, num_ranks=num_ranks)
    per_node[table.node] = shared[table.group_set]
    between = between_ranks(graph)
    per_node[messages.node[between]] = message_ranks_per_node(graph, device)[between]
    return replace(ops, dims={**ops.dims, "ranks_per_node": per_node})


def estimate_by_operation(
    model: OperationModel,
    graph: OpGraph,
    device: Device,
    diagnostics: Diagnostics | None = None,
    *,
    num_ranks: int = -1,
) -> Estimate:
    """Estimate a graph with a model of single operations. Equal operations are predicted once. O(nodes log
    nodes).
    """
    distinct, index = operations_on(graph, device, num_ranks=num_ranks).distinct()
    prediction = model.predict(distinct, device, diagnostics).take(index)
    free = takes_no_time(graph)
    duration = np.where(free, 0.0, prediction.duration_ns)
    unknown = np.isnan(duration)
    return Estimate(
        hardware=device.name,
        estimators=prediction.models,
        bounds=("free", "model"),
        duration_ns=duration,
        low_ns=np.where(free, 0.0, prediction.low_ns),
        high_ns=np.where(free, 0.0, prediction.high_ns),
        estimator=np.where(unknown, -1, np.where(free, 0, prediction.estimator)).astype(np.int8),
        bound=np.where(unknown, -1, np.where(free, 0, 1)).astype(np.int8),
        bases=prediction.basis.names,
        basis=basis_codes(prediction.basis, ~(unknown | free)),
    )


def basis_codes(basis: Labels, stated: BoolArray) -> NDArray[np.int16]:
    """Return the column ``basis`` of an estimate: the index of each label, -1 where ``stated`` is False or
    the label is empty.
    """
    empty = np.array([not name for name in basis.names], np.bool_)[basis.row]
    return np.where(stated & ~empty, basis.row, -1).astype(np.int16)


def estimate_with(
    model: Estimator, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None
) -> Estimate:
    """Return the estimate of ``model`` for each node of ``graph``; host work and delays keep their recorded
    time. Regions that have a duration get no estimate, because they were several kernels.

    Raises ``UnsupportedError`` if a model of another package returns a negative or infinite time, or bases
    that are not texts and indices into them.
    """
    estimate = model.estimate(graph, device, diagnostics)
    _check_basis(model, estimate.bases, estimate.basis)
    if (row := _impossible_row(model, estimate.duration_ns)) >= 0:
        node = f"node {graph.id[row]} ({graph.op_name(row)})"
        raise _impossible_time(model, estimate.duration_ns[row], node)
    waits = is_recorded_wait(graph)
    region = graph.strings.find(REGION)
    regions = (graph.op_id == region) & (region > 0) & (graph.duration_ns > 0)
    own = waits | regions
    if not own.any():
        return estimate
    recorded = np.where(waits, graph.duration_ns, nan)
    times = (estimate.duration_ns, estimate.low_ns, estimate.high_ns)
    duration, low, high = (np.where(own, recorded, column) for column in times)
    estimator, bound = (
        np.where(own, -1, column).astype(np.int8) for column in (estimate.estimator, estimate.bound)
    )
    return replace(
        estimate,
        duration_ns=duration,
        low_ns=low,
        high_ns=high,
        estimator=estimator,
        bound=bound,
        basis=np.where(own, -1, estimate.basis).astype(np.int16),
    )


def predict_with(
    model: OperationModel, ops: Operations, device: Device, diagnostics: Diagnostics | None = None
) -> Prediction:
    """Return the prediction of ``model`` for each operation. Raises the same errors as
    :func:`estimate_with`.
    """
    prediction = model.predict(ops, device, diagnostics)
    if (row := _impossible_row(model, prediction.duration_ns)) >= 0:
        operation = f"an operation of kind {ops.kind[row]}"
        raise _impossible_time(model, prediction.duration_ns[row], operation)
    return prediction


def _is_own(model: object) -> bool:
    """Return True for models of this package."""
    return type(model).__module__.partition(".")[0] == __name__.partition(".")[0]


def _check_basis(model: Estimator, names: tuple[object, ...], codes: NDArray[np.int16]) -> None:
    """Raise ``UnsupportedError`` for a model of another package if names of bases are not texts, or if codes
    are not integers from -1 to the last name.
    """
    if _is_own(model):
        return
    others = [name for name in names if not isinstance(name, str)]
    if others:
        fault = f"the basis {clipped(repr(others[0]))}, which is not a text"
    elif not np.issubdtype(codes.dtype, np.integer):
        fault = f"basis codes of type {codes.dtype}"
    else:
        outside = codes[(codes < -1) | (codes >= len(names))]
        if not len(outside):
            return
        fault = f"the basis code {outside[0]}, but states {len(names)} bases"
    raise UnsupportedError(
        f"estimator {model.name!r} of another package returns {fault}",
        hint="update that package, or choose another estimator: codes are indices of texts in bases, or -1",
    )


def _impossible_row(model: object, duration_ns: FloatArray) -> int:
    """Return the first row with a negative or infinite time, or -1. Always -1 for models of this package:
    they are tested, and their times may overflow to infinity for very large sizes.
    """
    if _is_own(model):
        return -1
    wrong = (duration_ns < 0) | np.isinf(duration_ns)
    return int(wrong.argmax()) if wrong.any() else -1


def _impossible_time(model: Estimator | OperationModel, time_ns: float, subject: str) -> UnsupportedError:
    return UnsupportedError(
        f"estimator {model.name!r} of another package returns {time_ns:g} ns for {clipped(subject)}",
        hint="update that package, or choose another estimator: times must be 0 or more, or NaN if unknown",
    )


def transcendentals(graph: OpGraph) -> FloatArray:
    """Return the number of transcendental operations of each node. It is 0 for formats whose FLOPs include
    them.
    """
    return np.where(np.isnan(graph.transcendentals) & ~np.isnan(graph.flops), 0.0, graph.transcendentals)


def takes_no_time(graph: OpGraph) -> BoolArray:
    """Return a mask of the nodes that take no time on any device: metadata, nodes with a cost of zero, and
    views or control nodes without work.
    """
    work = (graph.flops > 0) | (graph.transcendentals > 0) | (graph.bytes_moved > 0)
    nothing = (graph.flops == 0) & (transcendentals(graph) == 0) & (graph.bytes_moved == 0)
    structural = np.isin(graph.op_class, (int(OpClass.FREE), int(OpClass.CONTROL)))
    compute = graph.kind == int(NodeKind.COMPUTE)
    free: BoolArray = compute & (nothing | (structural & ~work))
    free |= graph.kind == int(NodeKind.METADATA)
    return free


_OPERATIONS_PER_BLOCK = 1 << 20


def prediction_of_rows(
    model: OperationModel,
    ops: Operations,
    device: Device,
    diagnostics: Diagnostics,
    distinct: tuple[IntArray, IntArray] | None = None,
) -> CasePrediction:
    """Return the prediction of a model for each row of ``ops``.

    Equal operations are estimated once, in blocks, so that the memory does not grow with the table.
    ``distinct`` is optional and saves time if the caller has it: the first row of each group of equal
    operations, and the index of the group of each row.
    """
    first, index = distinct or ops.distinct_rows()
    blocks = [
        predict_with(model, ops.take(first[start : start + _OPERATIONS_PER_BLOCK]), device, diagnostics)
        for start in range(0, max(len(first), 1), _OPERATIONS_PER_BLOCK)
    ]

    def of_all_rows(columns: Sequence[FloatArray]) -> FloatArray:
        if all(np.isnan(column).all() for column in columns):  # unknown values need no memory
            return constant(np.nan, len(index))
        return (columns[0] if len(columns) == 1 else np.concatenate(columns))[index]

    return CasePrediction(
        estimator=model.name,
        duration_ns=of_all_rows([block.duration_ns for block in blocks]),
        low_ns=of_all_rows([block.low_ns for block in blocks]),
        high_ns=of_all_rows([block.high_ns for block in blocks]),
    )
