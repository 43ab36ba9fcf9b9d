"""What an estimator is and what it says, and the table of all. Rows are strings: naming one imports no other.

Other packages register a zero-argument factory (a frozen dataclass is one) in the entry point group
``hespas.estimators``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import getattr_static
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.rates import group_ranks_per_node, message_ranks_per_node
from hespas.files.trust import check_program, programs_allowed, refuse_in_untrusted
from hespas.graph import Diagnostics, Estimate, NodeKind, OpClass, OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import HespasError, InvariantError, UnsupportedError, UsageError, clipped
from hespas.graph.passes import is_recorded_wait
from hespas.graph.plugins import PluginTable
from hespas.hardware import Device, Fit
from hespas.operations import Operations, between_ranks, operations_of

__all__ = [
    "BUILTIN",
    "ENTRY_POINT_GROUP",
    "Availability",
    "Estimator",
    "ListedEstimator",
    "OperationModel",
    "Prediction",
    "Probed",
    "check_stated_estimator",
    "estimate_by_operation",
    "estimate_with",
    "estimator_factory",
    "estimator_names",
    "for_job",
    "guarded",
    "list_estimators",
    "load_estimator",
    "named_paths",
    "operations_on",
    "predict_with",
    "takes_no_time",
    "transcendentals",
    "with_bands",
    "with_option",
]

# What an estimator is.


@runtime_checkable
class Estimator(Protocol):
    """A model of time: a frozen dataclass whose fields are its options.

    A node it does not cover gets NaN, never 0; a node that costs nothing gets 0, and no other does.

    A class that runs no program and executes no workload declares ``inert_options``, a frozenset of those of
    its text options that name no file, program or estimator. Input files may name such a class with these
    options, numbers and booleans; any other needs the user's permission (:func:`check_stated_estimator`).
    """

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        ...

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node on ``device``; ``graph`` is not changed.

        ``diagnostics`` is told which nodes have no estimate, why, and what was assumed for the others.
        """
        ...


# Options of estimators that a caller decides where the user left them alone.


def for_job(model: Estimator, num_ranks: int) -> Estimator:
    """A model that knows how many ranks a collective without stated groups spans (-1: unknown), if it wants
    to know.
    """
    return with_option(model, "num_ranks", -1, num_ranks)


def with_option(model: Estimator, name: str, default: object, value: object) -> Estimator:
    """A model with an option that the caller decides, where it has one and the user left it alone."""
    candidate: object = model
    absent = object()
    if not is_dataclass(candidate) or isinstance(candidate, type):
        return model
    stated: object = getattr(model, name, absent)
    if stated is absent or stated != default:
        return model
    return cast("Estimator", replace(candidate, **{name: value}))


# Whether an estimator can be used here, and what to install where it cannot.


class Availability(NamedTuple):
    """What a probe finds. ``detail`` says which version is there, or why none; ``install`` what to do."""

    is_available: bool
    detail: str = ""
    install: str = ""


@runtime_checkable
class Probed(Protocol):
    """An estimator that needs more than the package: its factory says whether that is there."""

    def available(self) -> Availability:
        """Look, without running anything for long."""
        ...


# Models that see operations, not graphs: each distinct operation of a graph is asked once.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """What a model says of each operation; columns of shape ``(ops,)`` [ns].

    ``duration_ns`` is NaN where the model does not cover an operation; ``low_ns`` and ``high_ns`` hold 90 %
    of outcomes (NaN: no interval). ``estimator`` numbers ``models`` (-1: nobody), for models made of several.
    """

    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    models: tuple[str, ...]
    estimator: NDArray[np.int8]

    @classmethod
    def of(
        cls,
        model: str,
        duration_ns: FloatArray,
        low_ns: FloatArray | None = None,
        high_ns: FloatArray | None = None,
    ) -> Prediction:
        """What one model says."""
        nothing = np.full(len(duration_ns), np.nan)
        return cls(
            duration_ns=duration_ns,
            low_ns=nothing if low_ns is None else low_ns,
            high_ns=nothing if high_ns is None else high_ns,
            models=(model,),
            estimator=np.where(np.isnan(duration_ns), -1, 0).astype(np.int8),
        )

    def take(self, rows: IntArray) -> Prediction:
        """What is said of some operations, of one perhaps several times; of row -1 nothing."""
        duration_ns, low_ns, high_ns = (
            np.append(column, np.nan)[rows] for column in (self.duration_ns, self.low_ns, self.high_ns)
        )
        said_by = np.append(self.estimator, np.int8(-1))[rows]
        return Prediction(
            duration_ns=duration_ns, low_ns=low_ns, high_ns=high_ns, models=self.models, estimator=said_by
        )

    def __post_init__(self) -> None:
        """Check that all columns have one row per operation."""
        if {len(self.low_ns), len(self.high_ns), len(self.estimator)} != {len(self.duration_ns)}:
            raise InvariantError("Prediction: columns differ in length")


def with_bands(fit: Fit, time_ns: FloatArray, widening: FloatArray | float = 1.0) -> FloatArray:
    """Times with the 5 % and 95 % of their bands in a fit, shape ``(3, ops)`` [ns]; NaN where there is none.
    ``widening`` is the exponent by which a band grows beyond what was fitted on.
    """
    if not fit.bands:
        nothing = np.full(len(time_ns), np.nan)
        return np.stack((time_ns, nothing, nothing))
    tops = np.array([each.up_to_ns for each in fit.bands])
    band = np.minimum(np.searchsorted(tops, time_ns), len(tops) - 1)
    with np.errstate(over="ignore"):  # far beyond what was sampled, an interval may have no end
        low = np.array([each.low for each in fit.bands])[band] ** widening
        high = np.array([each.high for each in fit.bands])[band] ** widening
        return np.stack((time_ns, time_ns * np.minimum(low, 1.0), time_ns * np.maximum(high, 1.0)))


@runtime_checkable
class OperationModel(Protocol):
    """A model of time of single operations: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        ...

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of one execution of each operation; NaN where the model does not cover one, never 0.

        ``diagnostics`` is told, per reason, how many are not covered.
        """
        ...


def operations_on(graph: OpGraph, device: Device, *, num_ranks: int = -1) -> Operations:
    """The operations of a graph, and how many ranks of its collectives and messages share a node of it.
    O(nodes).
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
    """``model`` asked once for each distinct operation of ``graph``. O(nodes log nodes)."""
    distinct, place = operations_on(graph, device, num_ranks=num_ranks).distinct()
    said = model.predict(distinct, device, diagnostics).take(place)
    free = takes_no_time(graph)
    duration = np.where(free, 0.0, said.duration_ns)
    unknown = np.isnan(duration)
    return Estimate(
        hardware=device.name,
        estimators=said.models,
        bounds=("free", "model"),
        duration_ns=duration,
        low_ns=np.where(free, 0.0, said.low_ns),
        high_ns=np.where(free, 0.0, said.high_ns),
        estimator=np.where(unknown, -1, np.where(free, 0, said.estimator)).astype(np.int8),
        bound=np.where(unknown, -1, np.where(free, 0, 1)).astype(np.int8),
    )


# Where the answers of an estimator are taken: other packages may give any.


def estimate_with(
    model: Estimator, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None
) -> Estimate:
    """What ``model`` says of each node of ``graph``. Recorded waits keep their time, whoever is asked.

    Raises ``UnsupportedError`` where a model of another package gives a negative or infinite time.
    """
    said = model.estimate(graph, device, diagnostics)
    if (row := _impossible(model, said.duration_ns)) >= 0:
        raise _impossible_time(model, said.duration_ns[row], f"node {graph.id[row]} ({graph.op_name(row)})")
    return _with_recorded_waits(said, graph)


def _with_recorded_waits(said: Estimate, graph: OpGraph) -> Estimate:
    """The estimate with the time of the host and of delays as it was recorded, which nobody estimates."""
    waits = is_recorded_wait(graph)
    if not waits.any():
        return said
    columns = (said.duration_ns, said.low_ns, said.high_ns)
    duration, low, high = (np.where(waits, graph.duration_ns, each) for each in columns)
    estimator, bound = (np.where(waits, -1, each).astype(np.int8) for each in (said.estimator, said.bound))
    return replace(said, duration_ns=duration, low_ns=low, high_ns=high, estimator=estimator, bound=bound)


def predict_with(
    model: OperationModel, ops: Operations, device: Device, diagnostics: Diagnostics | None = None
) -> Prediction:
    """What ``model`` says of each operation. Raises as :func:`estimate_with`."""
    said = model.predict(ops, device, diagnostics)
    if (row := _impossible(model, said.duration_ns)) >= 0:
        raise _impossible_time(model, said.duration_ns[row], f"an operation of kind {ops.kind[row]}")
    return said


def _impossible(model: object, duration_ns: FloatArray) -> int:
    """The first row whose time cannot be, -1 where there is none. Ours are tested, and may overflow."""
    if type(model).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return -1
    wrong = (duration_ns < 0) | np.isinf(duration_ns)
    return int(wrong.argmax()) if wrong.any() else -1


def _impossible_time(model: Estimator | OperationModel, time_ns: float, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"estimator {model.name!r} of another package gives {time_ns:g} ns for {clipped(what)}",
        hint="times are 0 or more, and NaN where it does not know one: update that package, or name another "
        "estimator",
    )


# Nodes that take no time whatever the device.


def transcendentals(graph: OpGraph) -> FloatArray:
    """Transcendentals per node; 0 where a format counts only FLOPs (they are then among those)."""
    return np.where(np.isnan(graph.transcendentals) & ~np.isnan(graph.flops), 0.0, graph.transcendentals)


def takes_no_time(graph: OpGraph) -> BoolArray:
    """Nodes that take no time: metadata, and compute or structure that states no cost at all."""
    work = (graph.flops > 0) | (graph.transcendentals > 0) | (graph.bytes_moved > 0)
    nothing = (graph.flops == 0) & (transcendentals(graph) == 0) & (graph.bytes_moved == 0)
    structural = np.isin(graph.op_class, (int(OpClass.FREE), int(OpClass.CONTROL)))
    compute = graph.kind == int(NodeKind.COMPUTE)
    free: BoolArray = compute & (nothing | (structural & ~work))
    free |= graph.kind == int(NodeKind.METADATA)
    return free


_Result = TypeVar("_Result")

BUILTIN: dict[str, str] = {
    "roofline": "hespas.estimators.roofline:Roofline",
    "calibrated": "hespas.estimators.calibrated:Calibrated",
    "systolic": "hespas.estimators.systolic:Systolic",
    "collectives": "hespas.estimators.collectives:Collectives",
    "database": "hespas.estimators.database:Database",
    "composite": "hespas.estimators.composite:Composite",
    "training": "hespas.estimators.training:Training",
    "xla": "hespas.estimators.compiled:Xla",
    "compiler": "hespas.estimators.compiler:Compiler",
    "iree": "hespas.estimators.compiled:Iree",
    "scalesim": "hespas.estimators.external.scale_sim:ScaleSim",
    "zigzag": "hespas.estimators.external.zigzag:ZigZag",
    "onnxim": "hespas.estimators.external.onnxim:Onnxim",
    "cocossim": "hespas.estimators.external.cocossim:Cocossim",
    "learned": "hespas.estimators.learned:Learned",
}
"""Name -> ``module:attribute`` of each estimator that ships with the package."""

ENTRY_POINT_GROUP = "hespas.estimators"

_BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}


_MEMBERS = ("name", "estimate")
"""What an estimator has."""

_TABLE = PluginTable("estimator", ENTRY_POINT_GROUP, BUILTIN)


def estimator_names() -> tuple[str, ...]:
    """The names of all estimators, built-in first, in a fixed order."""
    return _TABLE.names()


def estimator_factory(name: str) -> Callable[..., object]:
    """What makes the estimator of a name. Raises ``UsageError`` for an unknown one, ``UnsupportedError`` for
    a plug-in that does not work, ``InvariantError`` for one of ours.
    """
    factory = _TABLE.load(name)
    if not callable(factory):
        raise _TABLE.unusable(name, "what is registered cannot be called")
    return factory


def load_estimator(spelling: str) -> Estimator:
    """The estimator named, with options: ``roofline`` or ``roofline:use_useful_flops=false,sort_passes=4``.

    Raises ``UsageError`` for an unknown name or option, or a value of the wrong type.
    """
    name, _, text = spelling.partition(":")
    factory = estimator_factory(name)
    options = _options(name, factory, text) if text else {}
    if _inert_options(factory) is None:
        refuse_in_untrusted(f"estimator {clipped(name)!r} runs programs or the workload")
    made = guarded(name, lambda: factory(**options))
    if not isinstance(made, Estimator):
        absent = object()
        lacks = [each for each in _MEMBERS if getattr_static(made, each, absent) is absent]
        listed = " and no ".join(map(repr, lacks))
        raise _TABLE.unusable(name, f"what it makes is no estimator: it has no {listed}")
    return made


def check_stated_estimator(spelling: str, file: str | Path, position: str) -> None:
    """Check an estimator that an input file states.

    Raises ``BoundaryError`` without permission where it runs a program, executes the workload, or has an
    option that names a file, a program or other estimators. An unknown name passes: nothing runs by it.
    """
    if programs_allowed():
        return
    name, _, text = spelling.partition(":")
    try:
        factory = estimator_factory(name)
    except HespasError:
        return
    if why := _not_inert(factory, text):
        check_program(f"estimator {clipped(spelling)!r} {why}", file, position, typed="type this estimator")


def _inert_options(factory: object) -> frozenset[str] | None:
    """Return the ``inert_options`` that a class declares, None without. They are not inherited: a class
    declares them for its own code.
    """
    declared = vars(factory).get("inert_options") if isinstance(factory, type) else None
    return cast("frozenset[str]", declared) if isinstance(declared, frozenset) else None


def _not_inert(factory: object, text: str) -> str:
    """Return the reason why an estimator with these options needs permission; empty where it needs none."""
    inert = _inert_options(factory)
    if inert is None:
        return "runs programs or the workload"
    kinds = {field.name: field.default for field in fields(factory)} if is_dataclass(factory) else {}
    for part in text.split(",") if text else ():
        key = part.partition("=")[0]
        if key not in inert and not isinstance(kinds.get(key, ""), (bool, int, float)):
            return f"has the option {clipped(key)!r}, which may name files or programs"
    return ""


def named_paths(spelling: str) -> list[Path]:
    """What options of a spelling may name: tables, orders, configurations, folders of models; the values of
    all of them, whatever they are.
    """
    options = (part.rpartition("=")[2] for part in re.split("[,+]", spelling))
    return [Path(each) for each in options if each and "\0" not in each]


def guarded(name: str, use: Callable[[], _Result]) -> _Result:
    """What ``use`` of an estimator gives. Raises ``UnsupportedError`` for whatever a plug-in raises."""
    return _TABLE.guarded(name, use)


def _options(name: str, factory: Callable[..., object], text: str) -> dict[str, bool | int | float | str]:
    """The options written in a spelling, as the types of the dataclass's defaults."""
    defaults: dict[str, object] = {}
    if is_dataclass(factory):
        defaults = {field.name: field.default for field in fields(factory) if field.init}
    values: dict[str, bool | int | float | str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in defaults or not equals:
            known = ", ".join(sorted(defaults)) or "none"
            raise UsageError(f"estimator {name!r} has no option {part!r}", hint=f"options: {known}")
        values[key] = _parsed(f"{name}:{key}", value, defaults[key])
    return values


def _parsed(where: str, value: str, default: object) -> bool | int | float | str:
    try:
        if isinstance(default, bool):
            return _BOOLEANS[value.lower()]
        if isinstance(default, int):
            return int(value)
        return float(value) if isinstance(default, float) else value
    except (ValueError, KeyError):
        wanted = "true or false" if isinstance(default, bool) else f"a number like {default}"
        raise UsageError(f"{where} is {value!r}", hint=f"give {wanted}") from None


# All estimators with what they are and whether they can be used here.

_NOT_SPELLED = frozenset({"progress", "num_ranks", "kin"})
"""Fields that callers set, not users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEstimator:
    """One estimator: ``what`` it is in a line, its ``options``, whether it is there (``detail``: which
    version, or why not), and what to ``install`` otherwise.
    """

    name: str
    what: str
    options: tuple[str, ...]
    available: bool
    detail: str
    install: str


def list_estimators() -> tuple[ListedEstimator, ...]:
    """Every registered estimator; one that cannot be loaded is listed as not available."""
    return tuple(_listed(name) for name in estimator_names())


def _listed(name: str) -> ListedEstimator:
    try:
        factory = estimator_factory(name)
    except HespasError as error:
        return ListedEstimator(name=name, what="", options=(), available=False, detail=str(error), install="")
    found = _probed(name, factory)
    return ListedEstimator(
        name=name,
        what=_what(factory),
        options=_listed_options(factory),
        available=found.is_available,
        detail=found.detail,
        install=found.install,
    )


def _probed(name: str, factory: Callable[..., object]) -> Availability:
    def probe() -> Availability:
        made = factory()
        return made.available() if isinstance(made, Probed) else Availability(True)

    try:
        return guarded(name, probe)
    except UsageError as error:  # it is there, and wants an option
        return Availability(True, f"{error.message}: {error.hint}" if error.hint else error.message)
    except HespasError as error:
        return Availability(False, error.message, error.hint or "")


def _what(factory: Callable[..., object]) -> str:
    """What it says of itself, or the first line of its module."""
    said: object = getattr(factory, "what", None)
    text = (
        said if isinstance(said, str) else getattr(sys.modules.get(factory.__module__), "__doc__", "") or ""
    )
    return text.strip().partition("\n")[0].replace("``", "")


def _listed_options(factory: object) -> tuple[str, ...]:
    if not is_dataclass(factory):
        return ()
    names = (field.name for field in fields(cast("type", factory)) if field.init)
    return tuple(name for name in names if name not in _NOT_SPELLED)
