"""Nodes of a list ``workload_graph`` as messages of the schema.

Two writers make such lists. The C++ feeder of Chakra (https://github.com/mlcommons/chakra, file
``src/feeder/json_node.cpp``) reads ``Id``, ``Name``, ``NodeType``, ``is_cpu_op``, ``runtime`` (microseconds)
and ``data_deps``, and of communication nodes ``tensor_size`` and ``comm_*``; what those say becomes the
attributes of the contract. Our own writer states the same keys, so that the feeder can be fed with its files,
and beside them ``attr`` and the other fields of a node, which then count.
"""

from __future__ import annotations

from types import MappingProxyType

from hespas.converters.chakra.contract import ATTRIBUTES
from hespas.converters.chakra.json_values import JsonValue, WrongValueError
from hespas.schemas.chakra.tables import VALUE_FIELDS, AttributeField, Kind

__all__ = ["COMMUNICATION_KEYS", "FEEDER_KEYS", "HOST_KEY", "contradicted_keys", "listed_node"]

HOST_KEY = "is_cpu_op"
COMMUNICATION_KEYS = (
    "tensor_size",
    "comm_type",
    "comm_priority",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
)
"""What the feeder reads of sends, receives and collectives only."""

FEEDER_KEYS = (HOST_KEY, *COMMUNICATION_KEYS)

_FIELDS = MappingProxyType(
    {
        "Id": "id",
        "Name": "name",
        "NodeType": "type",
        "runtime": "duration_micros",
        "data_deps": "data_deps",
        "ctrl_deps": "ctrl_deps",
        "ctrlDeps": "ctrl_deps",
        "start_time_micros": "start_time_micros",
        "inputs": "inputs",
        "outputs": "outputs",
        "attr": "attr",
    }
)
"""Key of a listed node -> field of the schema."""

_VALUE = ("_val", "Val")
_INTEGERS = frozenset({Kind.INT32, Kind.INT64, Kind.UINT32, Kind.UINT64})
_OF_SCALAR: tuple[tuple[type, str], ...] = (
    (bool, "bool"),
    (int, "int64"),
    (float, "double"),
    (str, "string"),
)
"""In this order, because a bool is an int."""


def listed_node(node: dict[str, JsonValue], left_out: list[str]) -> dict[str, JsonValue]:
    """The node as protobuf-JSON says it. Keys that mean nothing and hold no plain value go to ``left_out``.

    Raises :class:`WrongValueError` where what every node has is missing.
    """
    for key in ("Id", "NodeType"):
        if node.get(key) is None:
            raise WrongValueError(f"{key} is missing")
    found: dict[str, JsonValue] = {}
    others: dict[str, JsonValue] = {}
    for key, value in node.items():
        if value is None:
            continue
        field = _FIELDS.get(key)
        if field is None:
            others[key] = value
        elif field in found:
            raise WrongValueError(f"{key}: stands twice, in two spellings")
        else:
            found[field] = value
    if "attr" not in found:
        found["attr"] = _attributes(found, others, left_out)
    else:
        left_out += [key for key in others if key not in FEEDER_KEYS]
    return found


def contradicted_keys(node: dict[str, JsonValue]) -> list[str]:
    """The keys for the feeder whose value is not that of the attribute of the same name."""
    attributes = node.get("attr")
    if not isinstance(attributes, list):
        return []
    stated: dict[str, JsonValue] = {}
    for attribute in attributes:
        name = attribute.get("name") if isinstance(attribute, dict) else None
        if isinstance(attribute, dict) and isinstance(name, str) and name in FEEDER_KEYS:
            stated.setdefault(name, next((attribute[key] for key in attribute if key.endswith(_VALUE)), None))
    return [key for key in FEEDER_KEYS if key in node and _plain(node[key]) != _plain(stated.get(key, 0))]


def _plain(value: JsonValue) -> int | None:
    """The number that a key states, as a number, a text or a truth value."""
    try:
        return int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None


def _attributes(
    fields: dict[str, JsonValue], others: dict[str, JsonValue], left_out: list[str]
) -> list[JsonValue]:
    """Attributes from plain keys: those of the contract have its type, others that of their value."""
    found: list[JsonValue] = []
    runtime = fields.get("duration_micros")
    if isinstance(runtime, float) and not runtime.is_integer() and 0 <= runtime < 1 << 53:
        fields["duration_micros"] = int(runtime)
        exact_ns = round(runtime * 1e3)
        others = {"duration_nanos": max(1, exact_ns) if runtime else exact_ns, **others}
    for key, value in others.items():
        attribute = _attribute(key, value)
        if attribute is None:
            left_out.append(key)
        else:
            found.append(attribute)
    return found


def _attribute(key: str, value: JsonValue) -> JsonValue:
    """None for what no attribute holds: objects and mixed lists."""
    field = ATTRIBUTES.get(key, AttributeField.INT32 if key == "comm_priority" else None)
    if isinstance(value, list):
        kinds = {_kind_of(entry) for entry in value}
        if len(kinds) != 1 or "" in kinds:
            return None
        return {"name": key, f"{kinds.pop()}_list": {"values": value}}
    if field is not None:
        kind = VALUE_FIELDS[field]
        return {"name": key, f"{kind.proto}_val": _as_stated(kind, value)}
    kind_name = _kind_of(value)
    return {"name": key, f"{kind_name}_val": value} if kind_name else None


def _as_stated(kind: Kind, value: JsonValue) -> JsonValue:
    """A value in the type that the contract gives its name, where that loses nothing."""
    if kind is Kind.BOOL and not isinstance(value, bool) and value in (0, 1):
        return value == 1
    if kind is Kind.STRING and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind in _INTEGERS and isinstance(value, bool):
        return int(value)
    return value


def _kind_of(value: JsonValue) -> str:
    """The type of attribute for a plain value: ``int64``; nothing for objects and lists."""
    kind = next((name for type_, name in _OF_SCALAR if isinstance(value, type_)), "")
    too_large = kind == "int64" and isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
    return "uint64" if too_large else kind
