"""Events of Chrome-trace JSON, decoded block by block: the container of Kineto's and JAX's traces.

Memory is bounded by the block, not by the file. Microseconds become whole nanoseconds, without the loss of a
float at epoch scale. Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(Trace Event Format).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from hespas.files.documents import BracketScan, array_cut
from hespas.files.streams import GZIP_MAGIC, PackedInput, damage_errors, open_regular, refuse_special_files
from hespas.graph import Findings
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError

__all__ = [
    "BLOCK_BYTES",
    "EXACT_US",
    "REPAIRS",
    "Block",
    "EventStream",
    "EventTimes",
    "ExactEvent",
    "TraceEvent",
    "event_times",
    "likely_cut",
    "nanoseconds",
    "report_repairs",
]


class TraceEvent(msgspec.Struct, gc=False):
    """Event of a Chrome trace. ``ts`` and ``dur`` are microseconds; ``args`` is JSON text that is decoded
    when it is needed.
    """

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
    """Times of an event as their digits in the file. It is decoded if a float does not hold the times
    exactly.
    """

    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"0")


EXACT_US = float(1 << 43)
"""Limit of exact times: a float64 below it (2**43 us, 101 days) is within half a nanosecond."""

_LARGEST_NS = (1 << 63) - 1
_MOST_DIGITS = 30
"""Limit of the digits before the decimal point of a time. Longer numbers take long to convert and do not
fit 64 bits.
"""
_SHOWN = 40
_EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])


@dataclass(frozen=True, slots=True, eq=False)
class EventTimes:
    """Start and duration of the chosen events in whole ns, shape ``(chosen,)``.

    ``overflowed`` are the indices of events with an unknown duration, which is 0 here. The duration in the
    file is null or does not fit 64 bits.
    """

    start_ns: IntArray
    duration_ns: IntArray
    overflowed: IntArray


def event_times(
    events: Sequence[TraceEvent], array: bytes, chosen: Sequence[int], *, path: str = "", before: int = 0
) -> EventTimes:
    """Return start and duration of the ``chosen`` events.

    ``array`` is the JSON text of all ``events``, which follow ``before`` others in the file ``path``. The
    duration of an event is unknown if it is null, or if the duration or the end does not fit 64 bits of
    nanoseconds. Profilers with unsigned clocks write such numbers for an end before its start, or for an
    event that never ended. Raises ``FormatError`` with the event and the field for any other time that is not
    a number or too large.
    """
    start_ns = _whole([events[row].ts for row in chosen])
    duration_ns = _whole([events[row].dur for row in chosen])
    unknown = np.zeros(len(chosen), np.bool_)
    if start_ns is None or duration_ns is None:
        exact = _EXACT_EVENTS.decode(array)
        times = [_exact_times(exact[row], events[row], path, before + row) for row in chosen]
        start_ns, duration_ns, missing = (np.array(column, np.int64) for column in zip(*times, strict=True))
        unknown = missing.astype(np.bool_)
    end_ns = start_ns + duration_ns
    unknown |= (duration_ns < 0) != (end_ns < start_ns)
    return EventTimes(start_ns, np.where(unknown, 0, duration_ns), np.flatnonzero(unknown))


class _TooLargeError(ValueError):
    """Error for a time that does not fit 64 bits of nanoseconds."""


def _exact_times(exact: ExactEvent, event: TraceEvent, path: str, number: int) -> tuple[int, int, bool]:
    """Return start and duration, and True if the duration is unknown."""
    values: list[int] = []
    for field, text in (("ts", exact.ts), ("dur", exact.dur)):
        try:
            values.append(_exact(bytes(text)))
        except ValueError as error:
            if field == "dur" and (isinstance(error, _TooLargeError) or bytes(text) == b"null"):
                return values[0], 0, True
            reason = f"has a time that cannot be used: {error}"
            raise FormatError(
                f"{event.name[:_SHOWN]!r} {reason}",
                path=path,
                position=f"event {number + 1}, field {field!r}",
                hint="export the trace again",
            ) from error
    return values[0], values[1], False


def _whole(times_us: Sequence[int | float | str | None]) -> IntArray | None:
    """Return times as whole ns, computed with floats; None if a float is not exact enough."""
    if not times_us:
        return np.empty(0, np.int64)
    try:
        column_us = np.array(times_us, np.float64)
    except (ValueError, OverflowError):  # not a number, or a number beyond any float
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
    """Return whole ns of microseconds in decimal text (quoted or not), rounded half to even.

    Raises ``ValueError`` for text that is not a finite number or does not fit 64 bits.
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
            if number and number.adjusted() > _MOST_DIGITS and number.is_finite():
                raise _TooLargeError(f"{shown} does not fit 64 bits of nanoseconds")
            whole = int((number * 1000).to_integral_value())
        except (ArithmeticError, UnicodeDecodeError) as error:
            raise ValueError(f"{shown} is not a time") from error
    if abs(whole) > _LARGEST_NS:
        raise _TooLargeError(f"{shown} does not fit 64 bits of nanoseconds")
    return whole


BLOCK_BYTES = 4 << 20
_HEAD_BYTES = 64 << 20
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_KEY = re.compile(rb'"traceEvents"\s*:')
_LONE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Pattern of a JSON escape; group 1 is a surrogate without its other half, which encodes no character."""
_BYTE = re.compile(r"byte (\d+)")
_BETWEEN = b", \t\r\n"
"""Bytes allowed between two events."""
_NOTHING = re.compile(rb"[, \t\r\n]*(?:null[, \t\r\n]+)*(?:null)?")
"""Bytes allowed after the last event: writers that drop events late leave null."""
_BAD_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.|\Z))', re.DOTALL)
"""Pattern of a JSON escape; group 1 is the character after the backslash if JSON has no such escape."""
_NO_NUMBER = re.compile(rb"(?<![\w.])-?(?:NaN|nan|Infinity|inf)(?![\w.])")

REPAIRS = {
    "invalid-utf8": "blocks with text that is not Unicode, which was replaced",
    "control-character": "control characters inside texts, which JSON does not allow, are read as escaped",
    "invalid-escape": "backslashes in texts that do not escape a character are read literally",
    "no-number": "values that JSON does not have (NaN, Infinity) are read as null",
    "odd-field": "events with a null field, or a field of a wrong type, are read without it",
    "overflowed-duration": "events have a null or overflowed duration, which is unknown and counts as 0",
    "broken-event": "invalid pieces between whole events are omitted",
    "broken-header": "the invalid part outside of the events is omitted, including devices and ranks",
}
"""Message of each repair that the reader makes. Reports add the number of repairs."""
_CUT = "cut"
_ENDS_EARLY = "truncated"
"""Word in the parser's message about a text that is valid but ends too early."""


Block = tuple[list[TraceEvent], bytes]
"""Events, and the JSON text of the list from which they were decoded."""

_EVENT = msgspec.json.Decoder(TraceEvent)
_EVENTS = msgspec.json.Decoder(list[TraceEvent])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


def _events_of(array: bytes) -> list[TraceEvent]:
    """Decode a JSON list of events.

    Raises ``UnicodeDecodeError`` for invalid UTF-8 in any field, also in fields that the parser skips.
    """
    if not array.isascii():
        array.decode()
    return _EVENTS.decode(array)


_IN_LIST = 1
_SPACE = 0x20


class EventStream:
    """Reader of the events of one file, block by block. A file is read once.

    After the last block, ``header`` is the JSON document without its events. ``repairs`` counts the repairs
    by key of :data:`REPAIRS`. With ``recover``, invalid parts are omitted. A truncated file then yields its
    complete events, ``repairs["cut"]`` is the number of bytes after them, and ``header`` is the part before
    the events.

    Without ``recover``, ``FormatError`` states the byte of the decompressed text at which the JSON ends or is
    invalid. A second list of events is an error.
    """

    def __init__(
        self, path: Path, max_bytes: int, block_bytes: int = BLOCK_BYTES, *, recover: bool = False
    ) -> None:
        """Prepare the stream without opening the file."""
        refuse_special_files(path)
        self.path = path
        self.repairs = Counter[str]()
        self.header = b"{}"
        self._recover = recover
        self._events = 0
        self._block_bytes = self._wanted_bytes = block_bytes
        self._max_bytes = max_bytes
        self._read_bytes = 0
        self._parsed_bytes = 0

    def blocks(self) -> Generator[Block]:
        """Yield the events of each block, and the JSON text of their list, for :class:`ExactEvent`."""
        with closing(_opened(self.path, self._max_bytes)) as stream:
            chunks = self._chunks(stream)
            before, text = self._array_start(chunks)
            self._parsed_bytes = self._read_bytes - len(text)
            while True:
                taken, closed, block = self._block(text)
                if block is not None:
                    self._events += len(block[0])
                    yield block
                if closed >= 0:
                    if not _NOTHING.fullmatch(text, taken, closed):
                        self._leave_out("not a trace event", self._parsed_bytes + taken)
                    break
                self._wanted_bytes = max(self._block_bytes, len(text) - taken)
                more = next(chunks, b"")
                if not more and not taken:
                    self._cut(len(text), "the list of events is not closed")
                    self.header = self._closed(before, b"]}") if before else b"{}"
                    return
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
                if not self._recover or not isinstance(stream, PackedInput):
                    raise self._cut_error(what) from error
                last = stream.before_damage(self._read_bytes, self._max_bytes - self._read_bytes)
                self._read_bytes += len(last)
                yield last
                return
            if not chunk:
                return
            self._read_bytes += len(chunk)
            if self._read_bytes > self._max_bytes:
                raise self._error(f"more than the limit of {self._max_bytes:,} bytes", self._read_bytes)
            yield chunk

    def _array_start(self, chunks: Iterator[bytes]) -> tuple[bytes, bytes]:
        """Return the text of the file before the list of events, and the text after its opening bracket."""
        text = next(chunks, b"")
        while len(text) <= _HEAD_BYTES:
            stripped = text.removeprefix(b"\xef\xbb\xbf").lstrip()
            if stripped.startswith(b"["):
                return b"", stripped[1:]
            start = _START.search(text)
            if start:
                return text[: start.end()].removeprefix(b"\xef\xbb\xbf"), text[start.end() :]
            more = next(chunks, b"")
            if not more:
                break
            text += more
        raise self._error("the document has no list 'traceEvents'", len(text))

    def _block(self, text: bytes) -> tuple[int, int, Block | None]:
        """Find the complete events at the start of a text.

        Return the position after the last complete event, the position at which the list of events ends (-1:
        not in this text), and the events (None: none). A quick search suggests the first position. The parser
        confirms it, because it accepts only complete events.
        """
        likely = likely_cut(text)
        if likely:
            array = b"".join((b"[", memoryview(text)[:likely], b"]"))
            try:
                return likely, -1, (_events_of(array), array)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # not a cut, or not events: examined more closely below
        whole = array_cut(text)
        block = self._decoded(text, whole.behind) if whole.behind else None
        return whole.behind, whole.closed, block

    def _decoded(self, text: bytes, cut: int) -> Block:
        listed = b"".join((b"[", memoryview(text)[:cut], b"]"))
        try:
            return _events_of(listed), listed
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            mended = self._mended(listed)
        try:
            return _EVENTS.decode(mended), mended
        except (msgspec.DecodeError, RecursionError) as error:
            return self._one_by_one(mended, error)

    def _mended(self, array: bytes) -> bytes:
        """Repair invalid characters, escapes and numbers in JSON text, and count the repairs."""
        try:
            array.decode()
            text = array
        except UnicodeDecodeError:
            text = array.decode("utf-8", "replace").encode()
        text = _whole_characters(text)
        self.repairs["invalid-utf8"] += text != array
        inside = BracketScan().scan(text).inside
        codes = np.frombuffer(text, np.uint8)
        controls = np.flatnonzero((codes < _SPACE) & inside).tolist()
        parts: list[bytes] = []
        behind = 0
        for position in controls:
            parts += (text[behind:position], b"\\u%04x" % text[position])
            behind = position + 1
        text = b"".join((*parts, text[behind:]))
        self.repairs["control-character"] += len(controls)
        if b"\\" in text:
            text, count = _without_bad_escapes(text)
            self.repairs["invalid-escape"] += count
        if _NO_NUMBER.search(text):
            text, count = _without_odd_numbers(text)
            self.repairs["no-number"] += count
        return text

    def _one_by_one(self, array: bytes, error: Exception) -> Block:
        """Decode a list of events one by one, because some are null or have fields of a wrong type."""
        try:
            texts = list(map(bytes, _RAWS.decode(array)))
        except (msgspec.DecodeError, RecursionError):
            if not self._recover:
                raise self._malformed(error) from error
            brackets = BracketScan().scan(array)
            opens = np.flatnonzero((brackets.step > 0) & (brackets.depth == _IN_LIST + 1))
            closes = np.flatnonzero((brackets.step < 0) & (brackets.depth == _IN_LIST))
            objects: list[bytes] = []
            behind = 1
            for begin, end in zip(opens.tolist(), closes.tolist(), strict=False):
                self.repairs["broken-event"] += bool(array[behind:begin].strip(_BETWEEN))
                objects.append(array[begin : end + 1])
                behind = end + 1
            self.repairs["broken-event"] += bool(array[behind:-1].strip(_BETWEEN))
            texts = objects
        events: list[bytes] = []
        for text in texts:
            try:
                _EVENT.decode(text)
                events.append(text)
                continue
            except (msgspec.DecodeError, RecursionError) as wrong:
                other = b"{}" if text == b"null" else _plain_event(text)
                reason = wrong
            if other is None and not self._recover:
                raise self._malformed(error) from reason
            self.repairs["broken-event" if other is None else "odd-field"] += text != b"null"
            events.extend(() if other is None else (other,))
        whole = b"".join((b"[", b",".join(events), b"]"))
        return _EVENTS.decode(whole), whole

    def _malformed(self, error: Exception) -> FormatError:
        byte = _BYTE.search(str(error))
        inside = int(byte[1]) - 1 if byte else 0
        return self._error(f"not a trace event: {error}", self._parsed_bytes + inside)

    def _leave_out(self, message: str, byte: int) -> None:
        """Count invalid data between two events and skip it. Raises ``FormatError`` unless recovering."""
        if not self._recover:
            raise self._error(message, byte)
        self.repairs["broken-event"] += 1

    def _cut(self, lost_bytes: int, message: str) -> None:
        """Count the bytes after the last complete event of a truncated file. Raises ``FormatError`` unless
        recovering.
        """
        if not self._recover:
            raise self._cut_error(message)
        self.repairs[_CUT] += max(lost_bytes, 1)

    def _rest(self, before: bytes, behind: bytes, chunks: Iterator[bytes]) -> bytes:
        """Return the document without its events, as JSON.

        ``before`` is the text in front of the events, ``behind`` and ``chunks`` are the text after them.
        """
        rest = b"".join((behind, *chunks))
        if not before:
            if rest[1:].strip():
                self._leave_out("text after the list of events", self._read_bytes)
            return b"{}"
        header = self._closed(before, rest)
        keys = [key.start() for key in _KEY.finditer(header)]
        if len(keys) > 1:  # JSON keeps the last of several lists, and an inner one is not the document's
            depth = BracketScan().scan(header).depth
            own = [offset for offset in keys if depth[offset] == 1]
            if own != [offset for offset in keys if offset < len(before)][-1:]:
                offset = own[-1] if own else keys[0]
                omitted = self._read_bytes - len(header) if offset >= len(before) else 0
                message = "the list 'traceEvents' occurs twice, or inside another value"
                raise self._error(message, omitted + offset)
        return header

    def _closed(self, before: bytes, rest: bytes) -> bytes:
        """Return the text before and after the events as one JSON document.

        If that is invalid and ``recover`` is set, return the part before the events, or an empty object.
        Raises ``FormatError`` without ``recover``.
        """
        header = self._whole_header(before + rest)
        if isinstance(header, bytes):
            return header
        if not self._recover:
            message = f"the part outside of the events is not JSON: {header}"
            raise self._error(message, self._read_bytes) from header
        first = self._whole_header(before + b"]}")
        if isinstance(first, bytes) and _ENDS_EARLY in str(header):
            self._cut(len(rest) - 1, "")
        else:
            self.repairs["broken-header"] += 1
        return first if isinstance(first, bytes) else b"{}"

    def _whole_header(self, header: bytes) -> bytes | Exception:
        """Return the text if it is valid JSON, repaired if needed, else the error of the parser."""
        counted = self.repairs.copy()
        try:
            header.decode()
            msgspec.json.decode(header, type=msgspec.Raw)
            return _whole_characters(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            mended = self._mended(header)
        try:
            msgspec.json.decode(mended, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError) as error:
            self.repairs = counted
            return error
        return mended

    def _cut_error(self, message: str) -> FormatError:
        """Return the error for a truncated file. Its message states how many events can be recovered."""
        error = self._error(message, self._read_bytes)
        if self._events:
            commands = "in hespas-convert and hespas analyze"
            recovered = f"`recover` keeps the {self._events:,} events before the cut"
            error.hint = f"{error.hint}; {commands} {recovered}"
        return error

    def _error(self, message: str, byte: int) -> FormatError:
        return FormatError(
            message,
            path=str(self.path),
            position=f"byte {byte}",
            hint="check that the profiler was not interrupted, and export the trace again",
        )


def report_repairs(repairs: Mapping[str, int], findings: Findings) -> None:
    """Report the repairs of an :class:`EventStream` after all blocks were read."""
    for code, message in REPAIRS.items():
        findings.warning(code, message, repairs.get(code, 0))
    lost = repairs.get(_CUT, 0)
    message = f"the file ends early: {lost:,} bytes after the last whole event, and later data, are lost"
    findings.warning(_CUT, message, int(lost > 0))


def _whole_characters(text: bytes) -> bytes:
    """Return JSON text in which U+FFFD replaces each escaped surrogate that lacks its other half."""
    if b"\\u" not in text:
        return text
    return _LONE.sub(lambda escape: b"\\ufffd" if escape[1] else escape[0], text)


def _without_bad_escapes(text: bytes) -> tuple[bytes, int]:
    """Return the text with a second backslash before each invalid escape, and their number.

    Backslashes occur in strings only.
    """
    count = 0

    def doubled(escape: re.Match[bytes]) -> bytes:
        nonlocal count
        if escape[1] is None:
            return escape[0]
        count += 1
        return b"\\" + escape[0]

    return _BAD_ESCAPE.sub(doubled, text), count


def _without_odd_numbers(text: bytes) -> tuple[bytes, int]:
    """Return the text with null for numbers that JSON does not have, and their number.

    Numbers in strings stay unchanged.
    """
    in_text = BracketScan().scan(text).inside
    numbers = [number for number in _NO_NUMBER.finditer(text) if not in_text[number.start()]]
    parts: list[bytes] = []
    behind = 0
    for number in numbers:
        parts += (text[behind : number.start()], b"null")
        behind = number.end()
    return b"".join((*parts, text[behind:])), len(numbers)


def _plain_event(text: bytes) -> bytes | None:
    """Return an event without fields of a wrong type; None if it is not an event."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    for name, raw in list(fields.items()):
        one = msgspec.json.encode({name: raw})
        try:
            _EVENT.decode(one)
        except (msgspec.DecodeError, RecursionError):
            del fields[name]
    return msgspec.json.encode(fields)


def _opened(path: Path, max_bytes: int) -> BinaryIO | PackedInput:
    """Return the open file, decompressed while it is read if it starts with the gzip magic."""
    opened = open_regular(path)
    if opened.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
        return PackedInput(opened, path, max_bytes)
    opened.seek(0)
    return opened


def likely_cut(text: bytes | bytearray) -> int:
    """Return the position after the last ``}`` that is followed by a comma and a ``{``, 0 without one."""
    at = len(text)
    while at > 0:
        at = text.rfind(b"}", 0, at)
        if at < 0:
            return 0
        rest = text[at + 1 : at + 64].lstrip()
        if rest.startswith(b",") and rest[1:].lstrip().startswith(b"{"):
            return at + 1
    return 0
