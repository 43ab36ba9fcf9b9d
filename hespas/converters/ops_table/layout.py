"""The columns of a table of measured operations.

``hardware`` names the device; ``op`` the operation and ``op_class`` its class (a name of
:class:`hespas.graph.OpClass` in lower case); ``kernel`` what ran; ``rank`` and ``stream`` where; ``start_ns``
counts from the first event; ``duration_ns`` is the time of one execution; ``dtype`` and ``shapes`` describe
the operands as the profiler spells them, ``strides`` and ``values`` further what costs depend on.
``operation`` numbers the operation that caused the event: events of one number cost together what that
operation costs. Unknown is an empty text, or an empty field (Parquet: null).
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

__all__ = ["COLUMNS", "DURATIONS", "EXPECTED", "SCHEMA_ID", "Kind"]

SCHEMA_ID = "hespas.ops-table/1"
"""Stands in the metadata of the Parquet files that we write."""


class Kind(Enum):
    """What the fields of a column are."""

    TEXT = "text"
    WHOLE = "whole number"
    NUMBER = "number"


COLUMNS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        "hardware": Kind.TEXT,
        "op": Kind.TEXT,
        "op_class": Kind.TEXT,
        "kernel": Kind.TEXT,
        "rank": Kind.WHOLE,
        "stream": Kind.WHOLE,
        "start_ns": Kind.NUMBER,
        "duration_ns": Kind.NUMBER,
        "dtype": Kind.TEXT,
        "shapes": Kind.TEXT,
        "strides": Kind.TEXT,
        "values": Kind.TEXT,
        "operation": Kind.WHOLE,
    }
)
"""What is written, in this order."""

_UNITS_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
DURATIONS: MappingProxyType[str, float] = MappingProxyType(
    {f"{what}_{unit}": factor for what in ("duration", "latency") for unit, factor in _UNITS_NS.items()}
)
"""Names under which a table may state durations -> ns per unit."""

EXPECTED = (
    "a duration (duration_ns, or duration_ or latency_ with _ns, _us, _ms, _s), op or kernel, and optionally "
    "hardware, op_class, rank, stream, start_ns, dtype, shapes, strides, values, operation"
)
"""The columns a table may have, for messages."""
