"""The table of estimators. Rows are strings, so naming an estimator imports none of the others.

Other packages register a zero-argument factory (a frozen dataclass is one) in the entry point group
``hespas.estimators``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

from hespas.estimators.protocol import Estimator
from hespas.graph.errors import UsageError
from hespas.graph.plugins import PluginTable

__all__ = [
    "BUILTIN",
    "ENTRY_POINT_GROUP",
    "estimator_factory",
    "estimator_names",
    "guarded",
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
    "scalesim": "hespas.estimators.external:ScaleSim",
    "zigzag": "hespas.estimators.external:ZigZag",
    "onnxim": "hespas.estimators.external:Onnxim",
    "cocossim": "hespas.estimators.external:Cocossim",
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
