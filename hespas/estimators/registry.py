"""Registry of estimators: their names, options, permissions and availability.

A spelling is a name with options, such as ``roofline:sort_passes=4``. Built-in estimators are registered as
import paths, so that looking up one of them does not import the others. Other packages register a
zero-argument factory (a frozen dataclass is one) in the entry point group ``hespas.estimators``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from inspect import getattr_static
from pathlib import Path
from typing import TypeVar, cast

from hespas.estimators.interface import Availability, Estimator, Probed
from hespas.files.trust import check_program, programs_allowed, refuse_in_untrusted
from hespas.graph.errors import HespasError, UsageError, clipped
from hespas.graph.plugins import PluginTable

__all__ = [
    "BUILTIN",
    "ENTRY_POINT_GROUP",
    "ListedEstimator",
    "check_stated_estimator",
    "estimator_factory",
    "estimator_names",
    "guarded",
    "list_estimators",
    "load_estimator",
    "named_paths",
]

_Result = TypeVar("_Result")

BUILTIN: dict[str, str] = {
    "roofline": "hespas.estimators.roofline:Roofline",
    "calibrated": "hespas.estimators.calibrated:Calibrated",
    "systolic": "hespas.estimators.systolic:Systolic",
    "imc": "hespas.estimators.imc:Imc",
    "collectives": "hespas.estimators.collectives:Collectives",
    "database": "hespas.estimators.database:Database",
    "composite": "hespas.estimators.composite:Composite",
    "training": "hespas.estimators.training:Training",
    "xla": "hespas.estimators.compiled:Xla",
    "compiler": "hespas.estimators.compiler:Compiler",
    "iree": "hespas.estimators.compiled:Iree",
    "scalesim": "hespas.estimators.external.python_packages:ScaleSim",
    "zigzag": "hespas.estimators.external.python_packages:ZigZag",
    "onnxim": "hespas.estimators.external.programs:Onnxim",
    "cocossim": "hespas.estimators.external.programs:Cocossim",
    "learned": "hespas.estimators.learned:Learned",
}
"""Name -> ``module:attribute`` of each estimator that ships with the package."""

ENTRY_POINT_GROUP = "hespas.estimators"

_BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
_MEMBERS = ("name", "estimate")
"""Attributes that an estimator must have."""
_HIDDEN_OPTIONS = frozenset({"progress", "num_ranks", "reference_devices"})
"""Fields that callers set, not users."""

_TABLE = PluginTable("estimator", ENTRY_POINT_GROUP, BUILTIN)


def estimator_names() -> tuple[str, ...]:
    """Return the names of all estimators, built-in ones first, in a fixed order."""
    return _TABLE.names()


def estimator_factory(name: str) -> Callable[..., object]:
    """Return the function or class that creates an estimator. Raises ``UsageError`` for an unknown name,
    ``UnsupportedError`` for a plug-in that cannot be loaded, ``InvariantError`` if an estimator of this
    package cannot be loaded.
    """
    factory = _TABLE.load(name)
    if not callable(factory):
        raise _TABLE.unusable(name, "the registered object cannot be called")
    return factory


def guarded(name: str, use: Callable[[], _Result]) -> _Result:
    """Return the result of ``use()``, which runs code of the plug-in ``name``. Raises ``UnsupportedError``
    for any exception of a plug-in.
    """
    return _TABLE.guarded(name, use)


def load_estimator(spelling: str) -> Estimator:
    """Return the estimator for a name with options, such as ``roofline`` or
    ``roofline:use_useful_flops=false,sort_passes=4``.

    Raises ``UsageError`` for an unknown name or option, or a value of the wrong type.
    """
    name, _, text = spelling.partition(":")
    factory = estimator_factory(name)
    options = _options(name, factory, text) if text else {}
    if _inert_options(factory) is None:
        refuse_in_untrusted(f"estimator {clipped(name)!r} runs programs or the workload")
    estimator = guarded(name, lambda: factory(**options))
    if not isinstance(estimator, Estimator):
        absent = object()
        missing = [member for member in _MEMBERS if getattr_static(estimator, member, absent) is absent]
        raise _TABLE.unusable(
            name, f"its factory does not return an estimator: no {' and no '.join(map(repr, missing))}"
        )
    return estimator


def _options(name: str, factory: Callable[..., object], text: str) -> dict[str, bool | int | float | str]:
    """Parse the options in ``text`` and return them with the types of the dataclass's defaults."""
    defaults: dict[str, object] = {}
    if is_dataclass(factory):
        defaults = {field.name: field.default for field in fields(factory) if field.init}
    values: dict[str, bool | int | float | str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in defaults or not equals:
            listed = ", ".join(sorted(defaults)) or "none"
            raise UsageError(
                f"estimator {name!r} has no option {part!r}",
                hint=f"use one of its options: {listed}"
                if defaults
                else "give the name alone: it has no options",
            )
        default = defaults[key]
        try:
            if isinstance(default, bool):
                values[key] = _BOOLEANS[value.lower()]
            elif isinstance(default, int):
                values[key] = int(value)
            else:
                values[key] = float(value) if isinstance(default, float) else value
        except (ValueError, KeyError):
            expected = "true or false" if isinstance(default, bool) else f"a number like {default}"
            raise UsageError(f"{name}:{key} is {value!r}", hint=f"use {expected}") from None
    return values


def check_stated_estimator(spelling: str, file: str | Path, position: str) -> None:
    """Check an estimator that an input file names, because input files may come from other people.

    Raises ``BoundaryError`` without the user's permission if the estimator runs a program, executes the
    workload, or has an option that names a file, a program or other estimators. An unknown name passes,
    because nothing is run for it.
    """
    if programs_allowed():
        return
    name, _, text = spelling.partition(":")
    try:
        factory = estimator_factory(name)
    except HespasError:
        return
    reason = ""
    inert = _inert_options(factory)
    if inert is None:
        reason = "runs programs or the workload"
    else:
        defaults = {field.name: field.default for field in fields(factory)} if is_dataclass(factory) else {}
        for part in text.split(",") if text else ():
            key = part.partition("=")[0]
            if key not in inert and not isinstance(defaults.get(key, ""), (bool, int, float)):
                reason = f"has the option {clipped(key)!r}, which may name files or programs"
                break
    if reason:
        check_program(
            f"estimator {clipped(spelling)!r} {reason}", file, position, typed="type this estimator"
        )


def _inert_options(factory: object) -> frozenset[str] | None:
    """Return the ``inert_options`` that a class itself declares, None if it declares none. Inherited options
    are ignored, because a subclass may use an option in another way.
    """
    declared = vars(factory).get("inert_options") if isinstance(factory, type) else None
    return cast("frozenset[str]", declared) if isinstance(declared, frozenset) else None


def named_paths(spelling: str) -> list[Path]:
    """Return every option value in the spelling of an estimator as a path. Values that are not file names are
    included.
    """
    options = (part.rpartition("=")[2] for part in re.split("[,+]", spelling))
    return [Path(option) for option in options if option and "\0" not in option]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEstimator:
    """Entry in the list of estimators. ``what`` is a one-line description. ``detail`` is the version, or the
    reason why the estimator is not available. ``install`` is the command that installs it.
    """

    name: str
    what: str
    options: tuple[str, ...]
    available: bool
    detail: str
    install: str


def list_estimators() -> tuple[ListedEstimator, ...]:
    """Return every registered estimator; one that cannot be loaded is listed as not available."""
    return tuple(_listed(name) for name in estimator_names())


def _listed(name: str) -> ListedEstimator:
    try:
        factory = estimator_factory(name)
    except HespasError as error:
        return ListedEstimator(name=name, what="", options=(), available=False, detail=str(error), install="")

    def probe() -> Availability:
        estimator = factory()
        return estimator.available() if isinstance(estimator, Probed) else Availability(True)

    try:
        availability = guarded(name, probe)
    except UsageError as error:  # installed, but needs an option
        availability = Availability(True, f"{error.message}: {error.hint}" if error.hint else error.message)
    except HespasError as error:
        availability = Availability(False, error.message, error.hint or "")
    description: object = getattr(factory, "what", None)
    if not isinstance(description, str):
        description = getattr(sys.modules.get(factory.__module__), "__doc__", "") or ""
    names: tuple[str, ...] = ()
    if is_dataclass(factory):
        names = tuple(field.name for field in fields(cast("type", factory)) if field.init)
    return ListedEstimator(
        name=name,
        what=str(description).strip().partition("\n")[0].replace("``", ""),
        options=tuple(option for option in names if option not in _HIDDEN_OPTIONS),
        available=availability.is_available,
        detail=availability.detail,
        install=availability.install,
    )
