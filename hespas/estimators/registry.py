"""The table of estimators. Rows are strings, so naming an estimator imports none of the others.

Other packages register a zero-argument factory (a frozen dataclass is one) in the entry point group
``hespas.estimators``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar, cast

from hespas.estimators.protocol import Availability, Estimator, Probed
from hespas.graph.errors import HespasError, UsageError
from hespas.graph.plugins import PluginTable

__all__ = [
    "BUILTIN",
    "ENTRY_POINT_GROUP",
    "ListedEstimator",
    "estimator_factory",
    "estimator_names",
    "guarded",
    "list_estimators",
    "load_estimator",
]

_Result = TypeVar("_Result")

BUILTIN: dict[str, str] = {
    "roofline": "hespas.estimators.roofline:Roofline",
    "calibrated": "hespas.estimators.calibrated:Calibrated",
    "systolic": "hespas.estimators.systolic:Systolic",
    "collectives": "hespas.estimators.collectives:Collectives",
    "database": "hespas.estimators.database:Database",
    "composite": "hespas.estimators.composite:Composite",
    "xla": "hespas.estimators.compiled:Xla",
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


_TABLE = PluginTable("estimator", ENTRY_POINT_GROUP, BUILTIN)


def estimator_names() -> tuple[str, ...]:
    """The names of all estimators, built-in first, in a fixed order."""
    return _TABLE.names()


def estimator_factory(name: str) -> Callable[..., object]:
    """What makes the estimator of a name. Raises ``UsageError`` for an unknown one, ``UnsupportedError`` for
    a plug-in that does not work.
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
    made = guarded(name, lambda: factory(**options))
    if not isinstance(made, Estimator):
        raise _TABLE.unusable(name, "what it makes is no estimator")
    return made


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

_NOT_SPELLED = frozenset({"progress", "num_ranks"})
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
