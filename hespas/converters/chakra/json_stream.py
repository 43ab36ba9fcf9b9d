"""The objects of a JSON file one by one: documents that stand behind each other, as the jsonizer writes them,
or the entries of the list ``workload_graph`` of one document.

Memory is a block of the file and its largest object; where objects end is found for all of a block at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

import msgspec
import numpy as np

from hespas.converters.chakra.frames import CutOffError, open_trace
from hespas.converters.chakra.json_values import JsonValue
from hespas.converters.chakra.spans import Bools, Bytes, Longs
from hespas.graph.errors import FormatError

__all__ = ["NODE_LIST", "JsonStream", "RepeatedKeyError", "TextObject", "decoded", "whole_objects"]

NODE_LIST = "workload_graph"
"""The key under which the feeder's JSON lists nodes."""

_BLOCK_BYTES = 1 << 20
_LARGEST_OBJECT = 64 << 20
_LIST_START = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[')
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_DAMAGED = "the file is damaged or cut off; write or copy it again"
_STEP = np.array([(byte in b"{[") - (byte in b"}]") for byte in range(256)], np.int8)


class TextObject(NamedTuple):
    """One object: its text, which it is (from 0), and the line on which it starts (from 1)."""

    text: bytes
    number: int
    line: int


class _Objects(NamedTuple):
    """Objects that begin and end in a text, and the position of the bracket that ends their list, or -1."""

    start: list[int]
    end: list[int]
    closed: int


def whole_objects(text: bytes) -> _Objects:
    """The outermost objects of a text that starts between two of them. O(len(text)), vectorised."""
    data: Bytes = np.frombuffer(_ESCAPE.sub(b"__", text) if b"\\" in text else text, np.uint8)
    quoted: Bools = (np.cumsum(data == ord('"'), dtype=np.int32) & 1).astype(np.bool_)
    step = _STEP[data]
    step[quoted] = 0
    depth = np.cumsum(step, dtype=np.int32)
    below: Longs = np.flatnonzero(depth < 0)
    closed = int(below[0]) if len(below) else -1
    if len(below):
        step, depth = step[:closed], depth[:closed]
    ends = np.flatnonzero((depth == 0) & (step < 0)) + 1
    starts = np.flatnonzero((depth == 1) & (step > 0))[: len(ends)]
    return _Objects(starts.tolist(), ends.tolist(), closed)


class RepeatedKeyError(ValueError):
    """A key that stands twice in an object: which of its values is meant, nobody knows."""


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise RepeatedKeyError(f"key {key[:60]!r} stands twice in an object")
        seen.add(key)


def _check_keys(text: bytes) -> None:
    """Raise :class:`RepeatedKeyError` where an object of a sound text has a key twice."""
    json.loads(text.decode(), object_pairs_hook=_refuse_repeated, parse_int=len, parse_float=len)


def decoded(text: bytes) -> dict[str, JsonValue]:
    """The object of a JSON text. Raises ``ValueError`` for whatever is wrong with it."""
    try:
        value = cast("JsonValue", msgspec.json.decode(text))
        _check_keys(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


class JsonStream:
    """Reads one file once: :meth:`open`, :meth:`objects`, :meth:`close`.

    ``header`` holds what stands beside the list of nodes (nothing where documents stand behind each other);
    what stands behind the list is there when all objects were read. Errors are ``ET001`` and name the line.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        """Open the file, gzip or not; raises what :func:`.frames.open_trace` does."""
        self.path = str(path)
        self.header: dict[str, JsonValue] = {}
        self.is_list = False
        self._stated: frozenset[str] = frozenset()
        self._source = open_trace(path, max_bytes)
        self._text = b""
        self._line = 1
        self._count = 0

    def open(self) -> None:
        """Find out which kind of file it is, and read it up to the first node."""
        self._more(_BLOCK_BYTES)
        self._text = self._text.removeprefix(_BOM)
        more = True
        while more:
            found = _LIST_START.search(self._text)
            if found and self._begins_list(found.end()):
                return
            if whole_objects(self._text).end or len(self._text) > _LARGEST_OBJECT:
                return
            more = self._more(len(self._text))

    def close(self) -> None:
        """Close the file."""
        self._source.stream.close()

    def _begins_list(self, end: int) -> bool:
        """Whether the list of nodes starts at ``end``: the document closed there must make sense."""
        try:
            self.header = decoded(self._text[:end] + b"]}")
        except RepeatedKeyError as error:
            self._fail(str(error), 0)
        except ValueError:
            return False
        del self.header[NODE_LIST]
        self._stated = frozenset(self.header)
        self._consume(end)
        self.is_list = True
        return True

    def _more(self, size: int) -> bool:
        data = self._source.stream.read(size)
        self._text += data
        return bool(data)

    def _consume(self, end: int) -> None:
        self._line += self._text.count(b"\n", 0, end)
        self._text = self._text[end:]

    def objects(self) -> Generator[TextObject]:
        """The objects in order, from where :meth:`open` got to."""
        more = True
        while True:
            found = whole_objects(self._text)
            if not self.is_list and found.closed >= 0:
                self._fail("a bracket closes what was not opened", found.closed)
            yield from self._within(found)
            if found.closed >= 0:
                self._check_gap(found.end[-1] if found.end else 0, found.closed, closing=True)
                self._consume(found.closed)
                self._read_trailer()
                return
            self._consume(found.end[-1] if found.end else 0)
            if not more:
                break
            if len(self._text) > _LARGEST_OBJECT:
                self._fail(f"an object of more than {_LARGEST_OBJECT >> 20} MiB", 0)
            more = self._more(max(_BLOCK_BYTES, len(self._text)))
        self._check_end()

    def _within(self, found: _Objects) -> Iterator[TextObject]:
        """The objects of the block; between them is nothing, or a comma in a list."""
        line, behind = self._line, 0
        for start, end in zip(found.start, found.end, strict=True):
            self._check_gap(behind, start)
            line += self._text.count(b"\n", behind, start)
            yield TextObject(self._text[start:end], self._count, line)
            line += self._text.count(b"\n", start, end)
            self._count += 1
            behind = end

    def _check_gap(self, start: int, end: int, *, closing: bool = False) -> None:
        gap = self._text[start:end].strip(_SPACE)
        expected = b"," if self.is_list and self._count and not closing else b""
        if gap == expected:
            return
        what = "a comma is missing" if not gap else f"an object was expected, not {gap[:20]!r}"
        self._fail(what, start)

    def _check_end(self) -> None:
        """Raise where the file ends within an object or a list."""
        rest = self._text.strip(_SPACE)
        if not rest and not self.is_list:
            return
        if rest and not rest.lstrip(b", \t\r\n").startswith(b"{"):
            self._fail(f"an object was expected, not {rest[:20]!r}", 0)
        what = f"the list {NODE_LIST}" if self.is_list else f"document {self._count + 1}"
        line = self._line + self._text.count(b"\n")
        raise CutOffError(
            f"ET001: {what} is cut off by the end of the file",
            path=self.path,
            position=f"line {line}",
            hint=_DAMAGED,
        )

    def _read_trailer(self) -> None:
        """What stands behind the list of nodes."""
        while self._more(_BLOCK_BYTES):
            if len(self._text) > _LARGEST_OBJECT:
                self._fail(f"more than {_LARGEST_OBJECT >> 20} MiB behind {NODE_LIST}", 0)
        try:
            trailer = decoded(b'{"":[' + self._text)
        except ValueError as error:
            self._fail(f"behind {NODE_LIST}: {error}", 0)
        del trailer[""]
        if NODE_LIST in trailer:
            self._fail(f"{NODE_LIST} stands twice", 0)
        again = next((key for key in trailer if key in self._stated), "")
        if again:
            self._fail(f"key {again[:60]!r} stands twice in an object", 0)
        self.header.update(trailer)

    def _fail(self, what: str, at: int) -> NoReturn:
        line = self._line + self._text.count(b"\n", 0, at)
        raise FormatError(f"ET001: {what}", path=self.path, position=f"line {line}", hint=_DAMAGED)
