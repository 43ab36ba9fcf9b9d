"""A grid of simulations as a TOML file: a key per axis with a list of values, or one value for all rows.

The file is data: files that it names lie in its folder, and estimators that run programs need permission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import cast, get_args

from hespas.api.preparation import Granularity, Missing, Mode
from hespas.estimators.registry import check_stated_estimator
from hespas.files.documents import read_toml
from hespas.files.trust import file_beside
from hespas.graph.columns import DTypeKind, find_dtype
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import is_path
from hespas.simulator.astra import Backend

__all__ = ["AXES", "Grid", "Value", "read_grid"]

Value = str | int | float

_MOST_ROWS = 10_000
_MOST_FASTER = 1e9
_EXAMPLE = 'a line is an axis: hardware = ["H100-SXM", "B200-SXM"]'


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values of an axis: ``is_path`` values are files in the folder of the grid's file."""

    expected: str
    holds: Callable[[Value], bool]
    is_path: bool = False


def _text(value: Value) -> bool:
    return isinstance(value, str) and bool(value)


def _count(value: Value) -> bool:
    return isinstance(value, int) and value >= 1


def _factor(value: Value) -> bool:
    return isinstance(value, (int, float)) and 1 / _MOST_FASTER <= value <= _MOST_FASTER


def _is_float(value: Value) -> bool:
    dtype = find_dtype(value) if isinstance(value, str) else None
    return value == "f32_full" or (dtype is not None and dtype.kind is DTypeKind.FLOAT)


def _one_of(*names: str) -> _Axis:
    return _Axis(f"one of {', '.join(names)}", lambda value: value in names)


_BY_NAME_OR_FILE = ("hardware", "system")
_NAME, _FILE, _COUNT = _Axis("a name", _text), _Axis("a path", _text, True), _Axis("a whole number", _count)
AXES: Mapping[str, _Axis] = {
    "source": _FILE,
    "hardware": _NAME,
    "estimator": _NAME,
    "precision": _Axis("a floating-point type such as bf16, tf32 or f32_full (IEEE)", _is_float),
    "link_bandwidth": _Axis("a factor from 1e-9 to 1e9", _factor),
    "num_devices": _COUNT,
    "num_replicas": _COUNT,
    "granularity": _one_of(*get_args(Granularity)),
    "missing": _one_of(*get_args(Missing)),
    "mode": _one_of(*get_args(Mode)),
    "system": _NAME,
    "system_config": _FILE,
    "network_config": _FILE,
    "memory_config": _FILE,
    "backend": _one_of(*get_args(Backend)),
    "queues_per_dim": _COUNT,
}  # fmt: skip
"""The keys of the file. ``precision`` f32 multiplies as the program's framework does by default: IEEE f32 in
PyTorch, TF32 in XLA on devices with such units. ``link_bandwidth`` is a factor on the bandwidth of all links;
but for 1, collectives follow the links then, not what was measured of them. ``source`` may list one program
per parallel layout.
"""


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes in order of the file, and values that all rows share."""

    path: str
    axes: Mapping[str, tuple[Value, ...]]
    shared: Mapping[str, Value]

    def rows(self) -> list[dict[str, Value]]:
        """The settings of every row, the last axis fastest."""
        return [
            dict(self.shared) | dict(zip(self.axes, values, strict=True))
            for values in product(*self.axes.values())
        ]


def read_grid(path: Path, source: Path | None = None, estimator: str | None = None) -> Grid:
    """Read a grid. ``source`` is the workload where the file names none; ``estimator``, which the user has
    typed, is the one of all rows where the file names none, and otherwise permits the same one in the file.

    Raises ``FormatError`` naming the key, what was expected and what to do; ``BoundaryError`` for a file
    outside of the folder, or an estimator that needs permission.
    """
    stated = read_toml(path, "a grid", where="give a TOML file with axes", example=_EXAMPLE)
    axes: dict[str, tuple[Value, ...]] = {}
    shared: dict[str, Value] = {}
    for key, value in stated.items():
        if key not in AXES:
            raise FormatError(
                f"unknown axis '{clipped(key)}'", path=str(path), position=key,
                hint=f"one of {', '.join(AXES)}",
            )  # fmt: skip
        if isinstance(value, list):
            axes[key] = _values(path, key, cast("list[object]", value), estimator)
        else:
            shared[key] = _checked(path, key, value, estimator)
    if estimator is not None:
        _take_typed(path, estimator, axes, shared)
    if "source" not in axes and "source" not in shared:
        if source is None:
            raise FormatError("no source", path=str(path), hint='give SRC, or source = ["a.mlir", "b.mlir"]')
        shared["source"] = str(source)
    count = prod(map(len, axes.values()))
    if count > _MOST_ROWS:
        raise FormatError(f"{count:,} rows are more than {_MOST_ROWS:,}", path=str(path), hint="fewer values")
    return Grid(str(path), axes, shared)


def _take_typed(
    path: Path, estimator: str, axes: Mapping[str, tuple[Value, ...]], shared: dict[str, Value]
) -> None:
    """Add the estimator that the user has typed. Raises ``UsageError`` where the file names only others."""
    stated = axes["estimator"] if "estimator" in axes else (shared.setdefault("estimator", estimator),)
    if estimator not in stated:
        raise UsageError(
            f"{path} names other estimators than `estimator={clipped(estimator)}`",
            hint="leave it out: the estimators of the file are simulated",
        )


def _values(path: Path, key: str, listed: Sequence[object], estimator: str | None) -> tuple[Value, ...]:
    values = tuple(
        _checked(path, key, value, estimator, f"{key}[{place}]") for place, value in enumerate(listed)
    )
    if not values or len(set(values)) < len(values):
        fault = "lists a value twice" if values else "lists nothing"
        raise FormatError(f"{key} {fault}", path=str(path), position=key, hint=_EXAMPLE)
    return values


def _checked(path: Path, key: str, value: object, estimator: str | None, position: str = "") -> Value:
    axis = AXES[key]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not axis.holds(value):
        raise FormatError(
            f"{key} has the value {clipped(repr(value))}", path=str(path), position=key,
            hint=f"expected {axis.expected}, or a list of such",
        )  # fmt: skip
    if not isinstance(value, str):
        return value
    if key == "estimator" and value != estimator:
        check_stated_estimator(value, path, position or key)
    is_file = axis.is_path or (key in _BY_NAME_OR_FILE and is_path(value))
    return str(file_beside(path, value, position or key)) if is_file else value
