"""What a profile's record of an operation says of the communication that it starts."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from hespas.converters.pytorch.communication import C10D, Communication, communication_of
from hespas.converters.pytorch.et_records import EtNode, Values, is_list
from hespas.converters.pytorch.events import HostEvents, KinetoTrace
from hespas.graph import find_dtype

__all__ = ["recorded_communication"]

_LIST = msgspec.json.Decoder(list[Any])


def recorded_communication(kineto: KinetoTrace, event: int) -> Communication | None:
    """The communication that an operation of the host starts, None for one that starts none."""
    name = kineto.strings[int(kineto.host.name_row[event])]
    return communication_of(_as_node(kineto, kineto.host, event, name))


def _as_node(kineto: KinetoTrace, host: HostEvents, event: int, name: str) -> EtNode:
    """An operation as an execution trace would have it, as far as the profile tells."""
    dims = _decoded(kineto.strings[int(host.dims_row[event])])
    kinds = _decoded(kineto.strings[int(host.types_row[event])])
    concrete = _decoded(kineto.strings[int(host.concrete_row[event])])
    inputs = Values()
    for place in range(max(len(dims), len(concrete))):
        kind = str(kinds[place]) if place < len(kinds) else ""
        shape: object = dims[place] if place < len(dims) else []
        tensor = _tensor(shape, kind)
        text = concrete[place] if place < len(concrete) else ""
        inputs.values.append(_literal(text) if tensor is None else tensor)
        inputs.shapes.append(shape)
        inputs.types.append("" if tensor is None else f"Tensor({kind})")
    schema = "(bool async_op) ->" if name not in C10D else ""
    return EtNode(event, name, -1, -1, 0, -1, schema, inputs, Values(), {})


def _decoded(text: str) -> list[Any]:
    try:
        return _LIST.decode(text or "[]")
    except (msgspec.DecodeError, RecursionError):
        return []


def _tensor(shape: object, kind: str) -> list[Any] | None:
    """The six fields of a tensor, of which only size and type are known."""
    element = find_dtype(kind) if kind else None
    if element is None or not is_list(shape):
        return None
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        return None
    elements = prod(shape)
    return [0, 0, 0, elements, element.storage_bytes(1), ""] if elements < 1 << 60 else None


def _literal(text: object) -> object:
    """A recorded scalar: Python writes ``True``, and numbers in decimal."""
    if not isinstance(text, str):
        return text
    if text in ("True", "False"):
        return text == "True"
    digits = text.removeprefix("-")
    return int(text) if digits.isdecimal() and len(digits) < 19 else text
