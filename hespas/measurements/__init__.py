"""Tables of measured operations: their columns, readers and consistency checks.

All tables have the columns hardware, op, dtype, and a time with its unit in its name. Profiles are written as
tables of device events (:data:`COLUMNS`): ``op_class`` is a name of :class:`hespas.graph.OpClass` in lower
case; ``kernel`` is the kernel name; ``start_ns`` counts from the first event; ``dtype`` and ``shapes``
describe the operands as the profiler writes them, ``strides`` and ``values`` add inputs on which costs
depend; events with the same ``operation`` number share the cost of that operation. A table of operations
states the ``kind`` and the sizes of that kind (:mod:`hespas.measurements.tidy`). An empty text or field
(Parquet: null) is unknown.

Importing this module is cheap.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from hespas.graph.plugins import attribute_of

if TYPE_CHECKING:
    from hespas.measurements.columns import Columns, text_batches
    from hespas.measurements.model import LeftOut, Measurements, joined
    from hespas.measurements.read import columns_measured, read_measurements

__all__ = [
    "COLUMNS",
    "DURATIONS",
    "OF_OPERATIONS",
    "ColumnKind",
    "Columns",
    "LeftOut",
    "Measurements",
    "columns_measured",
    "joined",
    "read_measurements",
    "text_batches",
]

ColumnKind = Literal["text", "whole number", "number"]
"""Type of the fields of a column."""

COLUMNS: MappingProxyType[str, ColumnKind] = MappingProxyType(
    {
        "hardware": "text",
        "op": "text",
        "op_class": "text",
        "kernel": "text",
        "rank": "whole number",
        "stream": "whole number",
        "start_ns": "number",
        "duration_ns": "number",
        "dtype": "text",
        "shapes": "text",
        "strides": "text",
        "values": "text",
        "operation": "whole number",
    }
)
"""Columns of a table of device events, in their order."""

_UNITS_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
DURATIONS: MappingProxyType[str, float] = MappingProxyType(
    {f"{name}_{unit}": factor for unit, factor in _UNITS_NS.items() for name in ("duration", "latency")}
)
"""Name of a column of times -> ns per unit, the finest first."""

OF_OPERATIONS = frozenset({"hardware", "kind", "dtype"})
"""Columns that mark a table of operations by kind and sizes."""

_MODULES = MappingProxyType(
    {
        **dict.fromkeys(("Columns", "text_batches"), "columns"),
        **dict.fromkeys(("LeftOut", "Measurements", "joined"), "model"),
        **dict.fromkeys(("columns_measured", "read_measurements"), "read"),
    }
)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return attribute_of(f"{__name__}.{_MODULES[name]}:{name}")
