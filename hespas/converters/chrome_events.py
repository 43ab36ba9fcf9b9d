"""Events of Chrome-trace JSON, decoded block by block: the container of Kineto's and JAX's traces.

Memory is bounded by the block, not by the file. Microseconds become whole nanoseconds, without the loss of a
float at epoch scale. Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(Trace Event Format).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from hespas.files.json_text import BracketScan, array_cut
from hespas.files.streams import GZIP_MAGIC, PackedInput, damage_errors, open_regular, refuse_special_files
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError

__all__ = [
    "BLOCK_BYTES",
    "EXACT_US",
    "Block",
    "EventStream",
    "ExactEvent",
    "TraceEvent",
    "event_times",
    "likely_cut",
    "nanoseconds",
]


class TraceEvent(msgspec.Struct, gc=False):
    """One event. ``ts`` and ``dur`` are microseconds; ``args`` stays text until somebody wants it."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    id: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class ExactEvent(msgspec.Struct, gc=False):
    """The times of an event as they are written, for values that a float does not hold."""

    ts: msgspec.Raw = msgspec.Raw(b"0")
    dur: msgspec.Raw = msgspec.Raw(b"0")


# --- Times.

EXACT_US = float(1 << 43)
"""Below this a float64 is within half a nanosecond of the microseconds written: 2**43 us are 101 days."""

_LARGEST_NS = (1 << 63) - 1
_MOST_DIGITS = 30
"""Of the whole part of a time; far more would take long to compute, and fit nothing."""
_SHOWN = 40
_EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])


def event_times(
    events: Sequence[TraceEvent], array: bytes, chosen: Sequence[int], *, path: str = "", before: int = 0
) -> tuple[IntArray, IntArray]:
    """Start and duration of the ``chosen`` events in whole ns; ``array`` is the text of all ``events``, which
    follow ``before`` others in the file ``path``.

    Raises ``FormatError`` with the event and the field for a time that is null, no number, or, like the
    event's end, too large for 64 bits of nanoseconds.
    """
    start_ns = _whole([events[place].ts for place in chosen])
    duration_ns = _whole([events[place].dur for place in chosen])
    if start_ns is None or duration_ns is None:
        exact = _EXACT_EVENTS.decode(array)
        times = [_exact_times(exact[place], events[place], path, before + place) for place in chosen]
        start_ns, duration_ns = (np.array(column, np.int64) for column in zip(*times, strict=True))
    end_ns = start_ns + duration_ns
    wrong = np.flatnonzero((duration_ns < 0) != (end_ns < start_ns))
    if len(wrong):
        place = chosen[int(wrong[0])]
        raise _refused("ends too late for 64 bits of nanoseconds", "dur", events[place], path, before + place)
    return start_ns, duration_ns


def _exact_times(exact: ExactEvent, event: TraceEvent, path: str, number: int) -> tuple[int, int]:
    found: list[int] = []
    for field, text in (("ts", exact.ts), ("dur", exact.dur)):
        try:
            found.append(_exact(bytes(text)))
        except ValueError as error:
            raise _refused(f"has a time that cannot be used: {error}", field, event, path, number) from error
    return found[0], found[1]


def _refused(message: str, field: str, event: TraceEvent, path: str, number: int) -> FormatError:
    return FormatError(
        f"{event.name[:_SHOWN]!r} {message}",
        path=path,
        position=f"event {number + 1}, field {field!r}",
        hint="export the trace again",
    )


def _whole(times_us: Sequence[int | float | str | None]) -> IntArray | None:
    """Whole ns, None where a float is not good enough."""
    if not times_us:
        return np.empty(0, np.int64)
    try:
        column_us = np.array(times_us, np.float64)
    except (ValueError, OverflowError):  # a text that is no number, a number beyond any float
        return None
    if not np.isfinite(column_us).all():
        return None
    whole = np.floor(column_us)
    part = column_us - whole
    largest_us = float(np.abs(whole).max())
    if largest_us > _LARGEST_NS // 1000 or (largest_us >= EXACT_US and bool(part.any())):
        return None
    return whole.astype(np.int64) * 1000 + np.rint(part * 1000).astype(np.int64)


def nanoseconds(texts: Sequence[bytes]) -> IntArray:
    """Whole ns of microseconds in decimal text (quoted or not), rounded half to even.

    Raises ``ValueError`` for what is no finite number or does not fit 64 bits.
    """
    return np.array([_exact(text) for text in texts], np.int64)


def _exact(text: bytes) -> int:
    text = text.strip(b'" \t\r\n')
    shown = text[:_SHOWN].decode("utf-8", "replace")
    if text[-4:-3] == b"." and text[:-4].isdigit() and text[-3:].isdigit() and len(text) <= _MOST_DIGITS:
        whole = int(text[:-4] + text[-3:])
    else:
        try:
            number = Decimal(text.decode("ascii"))
            if number and number.adjusted() > _MOST_DIGITS:
                raise ValueError(f"{shown} does not fit 64 bits of nanoseconds")
            whole = int((number * 1000).to_integral_value())
        except (ArithmeticError, UnicodeDecodeError) as error:
            raise ValueError(f"{shown} is no time") from error
    if abs(whole) > _LARGEST_NS:
        raise ValueError(f"{shown} does not fit 64 bits of nanoseconds")
    return whole


# --- Blocks.

BLOCK_BYTES = 4 << 20
_HEAD_BYTES = 64 << 20
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_KEY = re.compile(rb'"traceEvents"\s*:')
_LONE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Any escape; a surrogate without its other half, which is no character, is group 1."""
_BYTE = re.compile(r"byte (\d+)")
_BETWEEN = b", \t\r\n"
"""What may stand between two events."""


Block = tuple[list[TraceEvent], bytes]
"""Events, and the text of their array."""

_EVENTS = msgspec.json.Decoder(list[TraceEvent])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_NULL = msgspec.Raw(b"null")


class EventStream:
    """Reads the events of one file, once. ``header`` is everything else, when all blocks were read.

    ``repaired_blocks`` counts blocks that held bytes which are not UTF-8, or halves of surrogate pairs; those
    are replaced. Raises ``FormatError`` with the byte (of the decompressed text) where the JSON ends or makes
    no sense, and where its list of events stands twice.
    """

    def __init__(self, path: Path, max_bytes: int, block_bytes: int = BLOCK_BYTES) -> None:
        """Open nothing yet."""
        refuse_special_files(path)
        self.path = path
        self.repaired_blocks = 0
        self.header = b"{}"
        self._block_bytes = self._wanted_bytes = block_bytes
        self._max_bytes = max_bytes
        self._read_bytes = 0
        self._parsed_bytes = 0

    def blocks(self) -> Generator[Block]:
        """Events, and the text of their array for :class:`ExactEvent`."""
        with closing(_opened(self.path, self._max_bytes)) as stream:
            chunks = self._chunks(stream)
            before, text = self._array_start(chunks)
            self._parsed_bytes = self._read_bytes - len(text)
            while True:
                taken, closed, block = self._block(text)
                if block is not None:
                    yield block
                if closed >= 0:
                    if text[taken:closed].strip(_BETWEEN):
                        raise self._error("no trace event", self._parsed_bytes + taken)
                    break
                self._wanted_bytes = max(self._block_bytes, len(text) - taken)
                more = next(chunks, b"")
                if not more and not taken:
                    raise self._error("the list of events is not closed", self._read_bytes)
                rest = text[taken:].lstrip(_BETWEEN)
                text = rest + more if rest else more.lstrip(_BETWEEN)
                self._parsed_bytes = self._read_bytes - len(text)
            self.header = self._rest(before, text[closed:], chunks)

    def _chunks(self, stream: BinaryIO | PackedInput) -> Iterator[bytes]:
        while True:
            try:
                chunk = stream.read(self._wanted_bytes)
            except damage_errors() as error:
                what = "gzip stream ends early" if isinstance(error, EOFError) else f"cannot be read: {error}"
                raise self._error(what, self._read_bytes) from error
            if not chunk:
                return
            self._read_bytes += len(chunk)
            if self._read_bytes > self._max_bytes:
                raise self._error(f"more than the limit of {self._max_bytes:,} bytes", self._read_bytes)
            yield chunk

    def _array_start(self, chunks: Iterator[bytes]) -> tuple[bytes, bytes]:
        """What stands before the events, and the text behind their opening bracket."""
        text = next(chunks, b"")
        while len(text) <= _HEAD_BYTES:
            stripped = text.removeprefix(b"\xef\xbb\xbf").lstrip()
            if stripped.startswith(b"["):
                return b"", stripped[1:]
            found = _START.search(text)
            if found:
                return text[: found.end()].removeprefix(b"\xef\xbb\xbf"), text[found.end() :]
            more = next(chunks, b"")
            if not more:
                break
            text += more
        raise self._error("there is no list 'traceEvents'", len(text))

    def _block(self, text: bytes) -> tuple[int, int, Block | None]:
        """Where whole events end, where their list does (-1: not yet), and the events. The parser proves the
        likely cut: it takes only whole elements.
        """
        likely = likely_cut(text)
        if likely:
            array = b"".join((b"[", memoryview(text)[:likely], b"]"))
            try:
                return likely, -1, (_EVENTS.decode(array), array)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # no cut, or no events: looked at more closely below
        found = array_cut(text)
        block = self._decoded(text, found.behind) if found.behind else None
        return found.behind, found.closed, block

    def _decoded(self, text: bytes, cut: int) -> Block:
        array = b"".join((b"[", memoryview(text)[:cut], b"]"))
        try:
            return _EVENTS.decode(array), array
        except UnicodeDecodeError:
            repaired = _whole_characters(array.decode("utf-8", "replace").encode())
        except (msgspec.DecodeError, RecursionError) as error:
            repaired = _whole_characters(array)
            if repaired == array:
                return self._without_nulls(array, error)
        self.repaired_blocks += 1
        try:
            return _EVENTS.decode(repaired), repaired
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._malformed(error) from error

    def _without_nulls(self, array: bytes, error: Exception) -> Block:
        """The events of a list in which some are null, as that of writers that drop them late."""
        try:
            texts = _RAWS.decode(array)
        except (msgspec.DecodeError, RecursionError):
            raise self._malformed(error) from error
        if _NULL not in texts:
            raise self._malformed(error) from error
        whole = b"".join((b"[", b",".join([b"{}" if text == _NULL else text for text in texts]), b"]"))
        try:
            return _EVENTS.decode(whole), whole
        except (msgspec.DecodeError, RecursionError):
            raise self._malformed(error) from error

    def _malformed(self, error: Exception) -> FormatError:
        found = _BYTE.search(str(error))
        inside = int(found[1]) - 1 if found else 0
        return self._error(f"no trace event: {error}", self._parsed_bytes + inside)

    def _rest(self, before: bytes, behind: bytes, chunks: Iterator[bytes]) -> bytes:
        """The document without its events."""
        rest = b"".join((behind, *chunks))
        if not before:
            if rest[1:].strip():
                raise self._error("text behind the list of events", self._read_bytes)
            return b"{}"
        header = before + rest
        keys = [found.start() for found in _KEY.finditer(header)]
        if len(keys) > 1:
            self._refuse_other_lists(header, keys, len(before))
        return _whole_characters(header)

    def _refuse_other_lists(self, header: bytes, keys: list[int], behind: int) -> None:
        """Of several lists JSON keeps the last, and one inside of something else is not the document's."""
        own = [at for at, depth in zip(keys, _depths_at(header, keys), strict=True) if depth == 1]
        if own != [at for at in keys if at < behind][-1:]:
            at = own[-1] if own else keys[0]
            left_out = self._read_bytes - len(header) if at >= behind else 0
            raise self._error("the list 'traceEvents' stands twice, or inside something else", left_out + at)

    def _error(self, message: str, byte: int) -> FormatError:
        return FormatError(
            message,
            path=str(self.path),
            position=f"byte {byte}",
            hint="was the profiler interrupted? export the trace again",
        )


def _whole_characters(text: bytes) -> bytes:
    """JSON text with U+FFFD for each escaped surrogate that lacks its other half."""
    if b"\\u" not in text:
        return text
    return _LONE.sub(lambda found: b"\\ufffd" if found[1] else found[0], text)


def _opened(path: Path, max_bytes: int) -> BinaryIO | PackedInput:
    """The file, gunzipped while it is read where it starts with the gzip magic."""
    stream = open_regular(path)
    if stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
        return PackedInput(stream, path, max_bytes)
    stream.seek(0)
    return stream


def likely_cut(text: bytes | bytearray) -> int:
    """The position behind the last ``}`` that a comma and a ``{`` follow, 0 where there is none."""
    at = len(text)
    while at > 0:
        at = text.rfind(b"}", 0, at)
        if at < 0:
            return 0
        rest = text[at + 1 : at + 64].lstrip()
        if rest.startswith(b",") and rest[1:].lstrip().startswith(b"{"):
            return at + 1
    return 0


def _depths_at(text: bytes, places: Sequence[int]) -> list[int]:
    """How many brackets, outside strings, are open at some positions of a document. O(len(text))."""
    depth = BracketScan().scan(text).depth
    return [int(depth[place]) for place in places]
