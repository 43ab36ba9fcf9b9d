"""Protobuf's wire format as columns: https://protobuf.dev/programming-guides/encoding.

Many messages of a kind are taken apart in step, one field of each at a time, so that a million events cost a
handful of NumPy calls; few large ones in a plain loop. Only what is asked for is descended into, so the depth
of an input does not matter.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hespas.files.wire import BYTES, FIXED32, FIXED64, VARINT, WireError, fields
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Bytes", "Fields", "split"]

_IN_STEP = 64
"""Fewer messages than this are faster one by one."""
_PADDING = 16
_MAX_VARINT_BYTES = 10
_LARGEST_NUMBER = 1 << 30
"""Of fields; those beyond are all the same."""


class Bytes:
    """A document, as bytes and as an array that may be read a little past its end."""

    __slots__ = ("padded", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.padded = np.frombuffer(raw + bytes(_PADDING), np.uint8)

    def __len__(self) -> int:
        return len(self.raw)

    def text(self, start: int, size: int) -> str:
        """A string; what is not UTF-8 is replaced."""
        return self.raw[start : start + size].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """Fields of messages, message by message: the message, the field's number, and its value.

    ``value`` is the 64 bits of a number, or the length of bytes that begin at ``start``.
    """

    owner: IntArray
    number: IntArray
    is_bytes: BoolArray
    value: IntArray
    start: IntArray

    def where(self, chosen: BoolArray) -> Fields:
        """Some of the fields."""
        return Fields(
            self.owner[chosen],
            self.number[chosen],
            self.is_bytes[chosen],
            self.value[chosen],
            self.start[chosen],
        )

    def of(self, owner: int) -> Fields:
        """The fields of one message, which then counts as the first."""
        first, last = (int(np.searchsorted(self.owner, bound)) for bound in (owner, owner + 1))
        rows = slice(first, last)
        return Fields(
            np.zeros(last - first, np.int64),
            self.number[rows],
            self.is_bytes[rows],
            self.value[rows],
            self.start[rows],
        )

    def messages(self, number: int) -> Fields:
        """The fields of one number that hold bytes."""
        return self.where((self.number == number) & self.is_bytes)

    def numbers(self, number: int, count: int, missing: int = 0) -> IntArray:
        """A field that holds a number, for each of ``count`` messages: the last one counts."""
        column = np.full(count, missing, np.int64)
        chosen = (self.number == number) & ~self.is_bytes
        column[self.owner[chosen]] = self.value[chosen]
        return column

    def spans(self, number: int, count: int) -> tuple[IntArray, IntArray]:
        """Where a field that holds bytes begins, for each of ``count`` messages, and its size (-1: none)."""
        start, size = np.zeros(count, np.int64), np.full(count, -1, np.int64)
        chosen = (self.number == number) & self.is_bytes
        start[self.owner[chosen]], size[self.owner[chosen]] = self.start[chosen], self.value[chosen]
        return start, size


def split(data: Bytes, start: IntArray, size: IntArray) -> Fields:
    """The fields of messages at ``start`` with ``size`` bytes each. Raises :class:`WireError`.

    O(bytes); a message is not descended into.
    """
    owner = np.arange(len(start), dtype=np.int64)
    at, end = start.astype(np.int64), start + size
    parts: list[Fields] = []
    alive = np.flatnonzero(at < end)
    owner, at, end = owner[alive], at[alive], end[alive]
    while len(owner) >= _IN_STEP:
        part, at = _step(data, owner, at, end)
        parts.append(part)
        alive = np.flatnonzero(at < end)
        owner, at, end = owner[alive], at[alive], end[alive]
    if len(owner):
        parts.append(_one_by_one(data, owner, at, end))
    return _joined(parts)


def _joined(parts: list[Fields]) -> Fields:
    if not parts:
        none = np.empty(0, np.int64)
        return Fields(none, none, np.empty(0, np.bool_), none, none)
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.owner for part in parts]), kind="stable")
    names = ("owner", "number", "is_bytes", "value", "start")
    return Fields(*(np.concatenate([getattr(part, name) for part in parts])[order] for name in names))


def _varints(data: Bytes, at: IntArray, end: IntArray) -> tuple[NDArray[np.uint64], IntArray]:
    """Numbers at ``at``, and where they end."""
    padded = data.padded
    byte = padded[at]
    value = (byte & 0x7F).astype(np.uint64)
    after = at + 1
    more = np.flatnonzero(byte >= 0x80)
    for place in range(1, _MAX_VARINT_BYTES):
        if not len(more):
            break
        byte = padded[np.minimum(at[more] + place, len(padded) - 1)]
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
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


def _step(data: Bytes, owner: IntArray, at: IntArray, end: IntArray) -> tuple[Fields, IntArray]:
    """The next field of each message, and where it ends."""
    tag, start = _varints(data, at, end)
    wire = (tag & np.uint64(7)).astype(np.int64)
    number = np.minimum(tag >> np.uint64(3), np.uint64(_LARGEST_NUMBER)).astype(np.int64)
    unknown = np.flatnonzero((number == 0) | (wire == 3) | (wire == 4) | (wire > FIXED32))
    if len(unknown):
        raise WireError("no field of a message", int(at[unknown[0]]))
    value, size = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
    coded = np.flatnonzero((wire == VARINT) | (wire == BYTES))
    if len(coded):
        bits, start[coded] = _varints(data, start[coded], end[coded])
        value[coded] = bits.view(np.int64)
    is_bytes = wire == BYTES
    room = end - start
    beyond = np.flatnonzero(is_bytes & ((value < 0) | (value > room)))
    if len(beyond):
        raise WireError("a field reaches beyond its message", int(at[beyond[0]]))
    size[is_bytes] = value[is_bytes]
    for kind, width in ((FIXED64, 8), (FIXED32, 4)):
        rows = np.flatnonzero(wire == kind)
        if len(rows):
            size[rows] = width
            _inside(start[rows] + width, end[rows], at[rows])
            value[rows] = _fixed(data, start[rows], width)
    return Fields(owner, number, is_bytes, value, start), start + size


def _fixed(data: Bytes, start: IntArray, width: int) -> IntArray:
    bits = np.zeros(len(start), np.uint64)
    for place in range(width):
        bits |= data.padded[start + place].astype(np.uint64) << np.uint64(8 * place)
    return bits.view(np.int64)


def _one_by_one(data: Bytes, owners: IntArray, starts: IntArray, ends: IntArray) -> Fields:
    found, counts = array("Q"), [0]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        found.extend(chain.from_iterable(fields(data.raw, start, end)))
        counts.append(len(found) // 4)
    number, wire, value, place = np.frombuffer(found, np.uint64).view(np.int64).reshape(-1, 4).T
    is_bytes = wire == BYTES
    return Fields(
        np.repeat(owners, np.diff(counts)),
        np.minimum(number, _LARGEST_NUMBER),
        is_bytes,
        np.where(is_bytes, place - value, value),
        np.where(is_bytes, value, place),
    )
