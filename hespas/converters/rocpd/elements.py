"""The elements of a JSON array a block at a time, so that memory is bounded by the block.

Elements of few bytes become objects of many: an array is never decoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.graph.errors import FormatError

__all__ = ["array_elements"]

_BLOCK_BYTES = 1 << 20
_PLACE = re.compile(r" - at `\$\[(\d+)\](.*)`$", re.DOTALL)
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_STEP = np.array([(byte in b"{[") - (byte in b"}]") for byte in range(256)], np.int8)

_T = TypeVar("_T")


@dataclass(slots=True)
class _Scan:
    """Where a scan stands: inside a string or not, behind a lone backslash or not, and how deep."""

    inside: bool = False
    escaped: bool = False
    depth: int = 0

    def commas(self, data: NDArray[np.uint8]) -> NDArray[np.intp]:
        """The positions of commas between elements of the array; goes on from the last piece."""
        quotes = data == _QUOTE
        slashes = data == _BACKSLASH
        if self.escaped or slashes.any():
            quotes &= ~self._behind_a_backslash(slashes)
        inside = (np.cumsum(quotes, dtype=np.int32) + self.inside) % 2 == 1
        depth = np.cumsum(np.where(inside, 0, _STEP[data]), dtype=np.int32) + self.depth
        found = np.flatnonzero((data == _COMMA) & ~inside & (depth == 0))
        self.inside, self.depth = bool(inside[-1]), int(depth[-1])
        return found

    def _behind_a_backslash(self, slashes: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which characters follow an odd number of backslashes."""
        place = np.arange(len(slashes))
        last_other = np.maximum.accumulate(np.where(slashes, -1 - int(self.escaped), place))
        odd = slashes & ((place - last_other) % 2 == 1)
        before, self.escaped = self.escaped, bool(odd[-1])
        return np.concatenate(([before], odd[:-1]))


def array_elements(
    raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[_T]], path: str, where: str
) -> Iterator[list[_T]]:
    """The elements of the array at the JSON path ``where``, some at a time. Raises ``FormatError`` for what
    is no array of these.
    """
    text = memoryview(raw).cast("B") if raw else memoryview(b"[]")
    data = np.frombuffer(text, np.uint8)
    opened = _first_of(data)
    if opened < 0 or data[opened] != ord("["):
        raise FormatError(
            "a list is missing", path=path, position=where, hint="record again with --output-format json"
        )
    begin, scan, count = opened + 1, _Scan(), 0
    end = len(data) - 1 - _first_of(data[::-1])
    for start in range(begin, end, _BLOCK_BYTES):
        piece = data[start : min(start + _BLOCK_BYTES, end)]
        commas = scan.commas(piece)
        if len(commas):
            cut = start + int(commas[-1])
            part = _decoded(text[begin:cut], decoder, path, (where, count))
            count += len(part)
            yield part
            begin = cut + 1
    yield _decoded(text[begin:end], decoder, path, (where, count))


def _first_of(data: NDArray[np.uint8]) -> int:
    """The first character that is no white space."""
    for start in range(0, len(data), _BLOCK_BYTES):
        found = np.flatnonzero(~np.isin(data[start : start + _BLOCK_BYTES], (0x20, 0x09, 0x0A, 0x0D)))
        if len(found):
            return start + int(found[0])
    return -1


def _decoded(
    part: memoryview[int], decoder: msgspec.json.Decoder[list[_T]], path: str, at: tuple[str, int]
) -> list[_T]:
    whole = b"".join((b"[", part, b"]"))
    try:
        return decoder.decode(whole)
    except UnicodeDecodeError:
        whole = whole.decode("utf-8", "replace").encode()
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_record(error, path, at) from error
    try:
        return decoder.decode(whole)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_record(error, path, at) from error


def _no_record(error: Exception, path: str, at: tuple[str, int]) -> FormatError:
    """The error at a place of the array, whose elements are decoded some at a time: ``at`` is the first."""
    where, first = at
    told = str(error)
    place = _PLACE.search(told)
    position = f"{where}[{first}] or later"
    if place:
        position = f"{where}[{first + int(place.group(1))}]{place.group(2)}"
    return FormatError(
        f"a record makes no sense: {_PLACE.sub('', told)}",
        path=path,
        position=position,
        hint="was the profiler interrupted? record again",
    )
