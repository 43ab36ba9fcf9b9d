"""Protobuf's wire format as columns: https://protobuf.dev/programming-guides/encoding.

Many messages of a kind are decoded in parallel, one field of each at a time, so that a million events cost a
handful of NumPy calls; a few large messages are decoded in a plain loop. Submessages are decoded on request
only, so the depth of an input does not matter.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hespas.files.wire import BYTES, FIXED32, FIXED64, VARINT, WireError, fields
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Bytes", "ProtoFields", "split"]

_IN_STEP = 64
"""Minimum number of messages that are decoded in parallel; fewer are decoded in a loop."""
_PADDING = 16
_MAX_VARINT_BYTES = 10
_LARGEST_NUMBER = 1 << 30
"""Largest field number; larger numbers are clipped to it."""


class Bytes:
    """Protobuf document as bytes, and as an array. Zero bytes are appended to the array, so that reads past
    the end are safe.
    """

    __slots__ = ("padded", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.padded = np.frombuffer(raw + bytes(_PADDING), np.uint8)

    def __len__(self) -> int:
        return len(self.raw)

    def text(self, start: int, size: int) -> str:
        """Decode a string; invalid UTF-8 is replaced."""
        return self.raw[start : start + size].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, eq=False)
class ProtoFields:
    """Fields of several protobuf messages as columns, message by message.

    ``owner`` is the index of the message of each field, and ``number`` the field number. ``value`` has the 64
    bits of a number. For a field of bytes, ``value`` is the length of the bytes, which begin at ``start``.
    """

    owner: IntArray
    number: IntArray
    is_bytes: BoolArray
    value: IntArray
    start: IntArray

    def where(self, chosen: BoolArray) -> ProtoFields:
        """Return the fields that a mask selects."""
        return ProtoFields(
            self.owner[chosen],
            self.number[chosen],
            self.is_bytes[chosen],
            self.value[chosen],
            self.start[chosen],
        )

    def of(self, owner: int) -> ProtoFields:
        """Return the fields of the message ``owner``, renumbered as message 0."""
        first, last = (int(np.searchsorted(self.owner, bound)) for bound in (owner, owner + 1))
        rows = slice(first, last)
        return ProtoFields(
            np.zeros(last - first, np.int64),
            self.number[rows],
            self.is_bytes[rows],
            self.value[rows],
            self.start[rows],
        )

    def messages(self, number: int) -> ProtoFields:
        """Return the fields with this number that hold bytes."""
        return self.where((self.number == number) & self.is_bytes)

    def numbers(self, number: int, count: int, missing: int = 0) -> IntArray:
        """Return the value of a numeric field for each of ``count`` messages, ``missing`` where it is absent.

        If a message has the field several times, the last value is used.
        """
        column = np.full(count, missing, np.int64)
        chosen = (self.number == number) & ~self.is_bytes
        column[self.owner[chosen]] = self.value[chosen]
        return column

    def spans(self, number: int, count: int) -> tuple[IntArray, IntArray]:
        """Return start and size (-1: none) of a bytes field for each of ``count`` messages."""
        start, size = np.zeros(count, np.int64), np.full(count, -1, np.int64)
        chosen = (self.number == number) & self.is_bytes
        start[self.owner[chosen]], size[self.owner[chosen]] = self.start[chosen], self.value[chosen]
        return start, size


def split(data: Bytes, start: IntArray, size: IntArray) -> ProtoFields:
    """Split messages at ``start`` with ``size`` bytes each into fields. Raises :class:`WireError`.

    O(bytes); submessages are not decoded.
    """
    owner = np.arange(len(start), dtype=np.int64)
    at, end = start.astype(np.int64), start + size
    parts: list[ProtoFields] = []
    alive = np.flatnonzero(at < end)
    owner, at, end = owner[alive], at[alive], end[alive]
    while len(owner) >= _IN_STEP:
        part, at = _step(data, owner, at, end)
        parts.append(part)
        alive = np.flatnonzero(at < end)
        owner, at, end = owner[alive], at[alive], end[alive]
    if len(owner):
        parts.append(_one_by_one(data, owner, at, end))
    if not parts:
        none = np.empty(0, np.int64)
        return ProtoFields(none, none, np.empty(0, np.bool_), none, none)
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.owner for part in parts]), kind="stable")
    names = ("owner", "number", "is_bytes", "value", "start")
    return ProtoFields(*(np.concatenate([getattr(part, name) for part in parts])[order] for name in names))


def _varints(data: Bytes, at: IntArray, end: IntArray) -> tuple[NDArray[np.uint64], IntArray]:
    """Decode the varints that begin at ``at``; return their values and the positions after them."""
    padded = data.padded
    byte = padded[at]
    value = (byte & 0x7F).astype(np.uint64)
    after = at + 1
    more = np.flatnonzero(byte >= 0x80)
    for offset in range(1, _MAX_VARINT_BYTES):
        if not len(more):
            break
        byte = padded[np.minimum(at[more] + offset, len(padded) - 1)]
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * offset)
        after[more] += 1
        more = more[byte >= 0x80]
    if len(more):
        raise WireError("a number has more than 10 bytes", int(at[more[0]]))
    _inside(after, end, at)
    return value, after


def _inside(after: IntArray, end: IntArray, at: IntArray) -> None:
    beyond = np.flatnonzero(after > end)
    if len(beyond):
        raise WireError("a field reaches beyond its message", int(at[beyond[0]]))


def _step(data: Bytes, owner: IntArray, at: IntArray, end: IntArray) -> tuple[ProtoFields, IntArray]:
    """Decode the next field of each message, at byte ``at``; return the fields and the positions after
    them.
    """
    tag, start = _varints(data, at, end)
    wire = (tag & np.uint64(7)).astype(np.int64)
    number = np.minimum(tag >> np.uint64(3), np.uint64(_LARGEST_NUMBER)).astype(np.int64)
    unknown = np.flatnonzero((number == 0) | (wire == 3) | (wire == 4) | (wire > FIXED32))
    if len(unknown):
        row = int(unknown[0])
        raise WireError(f"invalid field {int(number[row])} with wire type {int(wire[row])}", int(at[row]))
    value, size = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
    coded = np.flatnonzero((wire == VARINT) | (wire == BYTES))
    if len(coded):
        bits, start[coded] = _varints(data, start[coded], end[coded])
        value[coded] = bits.view(np.int64)
    is_bytes = wire == BYTES
    bytes_left = end - start
    beyond = np.flatnonzero(is_bytes & ((value < 0) | (value > bytes_left)))
    if len(beyond):
        raise WireError("a field reaches beyond its message", int(at[beyond[0]]))
    size[is_bytes] = value[is_bytes]
    for kind, width in ((FIXED64, 8), (FIXED32, 4)):
        rows = np.flatnonzero(wire == kind)
        if len(rows):
            size[rows] = width
            _inside(start[rows] + width, end[rows], at[rows])
            bits = np.zeros(len(rows), np.uint64)
            for offset in range(width):
                bits |= data.padded[start[rows] + offset].astype(np.uint64) << np.uint64(8 * offset)
            value[rows] = bits.view(np.int64)
    return ProtoFields(owner, number, is_bytes, value, start), start + size


def _one_by_one(data: Bytes, owners: IntArray, starts: IntArray, ends: IntArray) -> ProtoFields:
    decoded, counts = array("Q"), [0]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        decoded.extend(chain.from_iterable(fields(data.raw, start, end)))
        counts.append(len(decoded) // 4)
    number, wire, value, end_or_start = np.frombuffer(decoded, np.uint64).view(np.int64).reshape(-1, 4).T
    is_bytes = wire == BYTES
    return ProtoFields(
        np.repeat(owners, np.diff(counts)),
        np.minimum(number, _LARGEST_NUMBER),
        is_bytes,
        np.where(is_bytes, end_or_start - value, value),
        np.where(is_bytes, value, end_or_start),
    )
