"""Tables of measured operations, whatever their columns are called, as one value that models are fitted on.

Two kinds of rows share one vocabulary: hardware, op, dtype, and a time with its unit in its name. A row per
device event is what profiles are written as (:data:`COLUMNS`): ``op_class`` is a name of
:class:`hespas.graph.OpClass` in lower case; ``kernel`` what ran; ``rank`` and ``stream`` where; ``start_ns``
counts from the first event; ``dtype`` and ``shapes`` describe the operands as the profiler spells them,
``strides`` and ``values`` further what costs depend on; events of one ``operation`` number cost together what
that operation costs. A row per operation states its ``kind`` and the sizes of that kind
(:mod:`hespas.measurements.tidy`). Unknown is an empty text, or an empty field (Parquet: null).

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
"""What the fields of a column are."""

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
"""A table of device events, in the order in which it is written."""

_UNITS_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
DURATIONS: MappingProxyType[str, float] = MappingProxyType(
    {f"{what}_{unit}": factor for unit, factor in _UNITS_NS.items() for what in ("duration", "latency")}
)
"""Names under which any table may state times -> ns per unit, the finest first."""

OF_OPERATIONS = frozenset({"hardware", "kind", "dtype"})
"""Columns that together say that a row is one operation by its kind and sizes."""

_HOMES = MappingProxyType(
    {
        **dict.fromkeys(("Columns", "text_batches"), "columns"),
        **dict.fromkeys(("LeftOut", "Measurements", "joined"), "model"),
        **dict.fromkeys(("columns_measured", "read_measurements"), "read"),
    }
)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return attribute_of(f"{__name__}.{_HOMES[name]}:{name}")
