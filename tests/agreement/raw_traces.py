"""Sums over Chakra trace files, decoded by the protobuf library without code of Hespas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chakra_messages import reference_messages

__all__ = ["RankSums", "sums_of"]

_COLLECTIVE, _SEND, _RECV = 7, 5, 6
"""``NodeType`` of et_def.proto."""


@dataclass(slots=True)
class RankSums:
    """Sums over the nodes of one trace file; ``collectives`` is comm_type -> (count, bytes)."""

    collectives: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    sent_bytes: int = 0
    received_bytes: int = 0
    ops: int = 0


def sums_of(folder: Path) -> dict[int, RankSums]:
    """Return the sums of each ``NAME.{rank}.et`` of a folder."""
    return {int(path.name.split(".")[-2]): _sums(path) for path in folder.glob("*.et")}


def _sums(path: Path) -> RankSums:
    sums = RankSums()
    counted: defaultdict[int, list[int]] = defaultdict(list)
    for node in _nodes(path.read_bytes()):
        attributes = {each.name: _value(each) for each in node.attr}
        size = int(attributes.get("comm_size", 0))
        if node.type == _COLLECTIVE:
            counted[int(attributes["comm_type"])].append(size)
        elif node.type == _SEND:
            sums.sent_bytes += size
        elif node.type == _RECV:
            sums.received_bytes += size
        else:
            sums.ops += int(attributes.get("num_ops", 0)) * (1 - int(attributes.get("counted_ops", 1) == 0))
    sums.collectives = {kind: (len(sizes), sum(sizes)) for kind, sizes in counted.items()}
    return sums


def _value(attribute: Any) -> Any:
    which = attribute.WhichOneof("value")
    return 0 if which is None else getattr(attribute, which)


def _nodes(data: bytes) -> Iterator[Any]:
    messages = reference_messages()
    first = True
    position = 0
    while position < len(data):
        size, position = _varint(data, position)
        part = data[position : position + size]
        position += size
        if not first:
            yield messages.node.FromString(part)
        first = False


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
