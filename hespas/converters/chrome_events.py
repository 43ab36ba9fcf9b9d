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

from hespas.files.json_text import BracketScan, array_cut
from hespas.files.streams import GZIP_MAGIC, PackedInput, damage_errors, open_regular, refuse_special_files
from hespas.graph import Findings
from hespas.graph.columns import BoolArray, IntArray
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

    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"0")


# --- Times.

EXACT_US = float(1 << 43)
"""Below this a float64 is within half a nanosecond of the microseconds written: 2**43 us are 101 days."""

_LARGEST_NS = (1 << 63) - 1
_MOST_DIGITS = 30
"""Of the whole part of a time; far more would take long to compute, and fit nothing."""
_SHOWN = 40
_EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])


@dataclass(frozen=True, slots=True, eq=False)
class EventTimes:
    """Whole ns, shape ``(chosen,)``. ``overflowed`` are the rows whose duration nobody knows, since what is
    written for it does not fit the clock: it counts as none.
    """

    start_ns: IntArray
    duration_ns: IntArray
    overflowed: IntArray


def event_times(
    events: Sequence[TraceEvent], array: bytes, chosen: Sequence[int], *, path: str = "", before: int = 0
) -> EventTimes:
    """Start and duration of the ``chosen`` events; ``array`` is the text of all ``events``, which follow
    ``before`` others in the file ``path``.

    A duration that does not fit 64 bits of nanoseconds, or ends the event past them, is what an unsigned
    clock writes for an end before its start, or for an event that never ended; so is null. Raises
    ``FormatError`` with the event and the field for any other time that is no number or too large.
    """
    start_ns = _whole([events[place].ts for place in chosen])
    duration_ns = _whole([events[place].dur for place in chosen])
    unknown = np.zeros(len(chosen), np.bool_)
    if start_ns is None or duration_ns is None:
        exact = _EXACT_EVENTS.decode(array)
        times = [_exact_times(exact[place], events[place], path, before + place) for place in chosen]
        start_ns, duration_ns, missing = (np.array(column, np.int64) for column in zip(*times, strict=True))
        unknown = missing.astype(np.bool_)
    end_ns = start_ns + duration_ns
    unknown |= (duration_ns < 0) != (end_ns < start_ns)
    return EventTimes(start_ns, np.where(unknown, 0, duration_ns), np.flatnonzero(unknown))


class _TooLargeError(ValueError):
    """A number that does not fit 64 bits of nanoseconds."""


def _exact_times(exact: ExactEvent, event: TraceEvent, path: str, number: int) -> tuple[int, int, bool]:
    """Start and duration, and whether the latter is unknown."""
    found: list[int] = []
    for field, text in (("ts", exact.ts), ("dur", exact.dur)):
        try:
            found.append(_exact(bytes(text)))
        except ValueError as error:
            if field == "dur" and (isinstance(error, _TooLargeError) or bytes(text) == b"null"):
                return found[0], 0, True
            raise _refused(f"has a time that cannot be used: {error}", field, event, path, number) from error
    return found[0], found[1], False


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
            if number and number.adjusted() > _MOST_DIGITS and number.is_finite():
                raise _TooLargeError(f"{shown} does not fit 64 bits of nanoseconds")
            whole = int((number * 1000).to_integral_value())
        except (ArithmeticError, UnicodeDecodeError) as error:
            raise ValueError(f"{shown} is no time") from error
    if abs(whole) > _LARGEST_NS:
        raise _TooLargeError(f"{shown} does not fit 64 bits of nanoseconds")
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
_NOTHING = re.compile(rb"[, \t\r\n]*(?:null[, \t\r\n]+)*(?:null)?")
"""What may stand behind the last: writers that drop events late leave null."""
_BAD_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.|\Z))', re.DOTALL)
"""Any escape; one that JSON does not have has a group 1."""
_NO_NUMBER = re.compile(rb"(?<![\w.])-?(?:NaN|nan|Infinity|inf)(?![\w.])")

REPAIRS = {
    "invalid-utf8": "blocks with text that is not Unicode, which was replaced",
    "control-character": "control characters inside texts, which JSON does not allow, are read as escaped",
    "invalid-escape": "backslashes in texts that escape nothing are read as themselves",
    "no-number": "values that JSON does not have (NaN, Infinity) are read as null",
    "odd-field": "events with a field that is null, or of another type than it should be, are read without",
    "overflowed-duration": "events have a duration that is null or overflowed: unknown, it counts as none",
    "broken-event": "pieces between whole events make no sense and are left out",
    "broken-header": "what stands beside the events makes no sense and is left out, devices and ranks too",
}
"""What is mended while events are read, and what is said of it; its number stands with it."""
_CUT = "cut"
_ENDS_EARLY = "truncated"
"""What the parser says of a text that is whole so far as it goes."""


Block = tuple[list[TraceEvent], bytes]
"""Events, and the text of their array."""

_EVENT = msgspec.json.Decoder(TraceEvent)
_EVENTS = msgspec.json.Decoder(list[TraceEvent])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


def _events_of(array: bytes) -> list[TraceEvent]:
    """The events of a list. Raises ``UnicodeDecodeError`` also for text that the parser only skips."""
    if not array.isascii():
        array.decode()
    return _EVENTS.decode(array)


_IN_LIST = 1
_SPACE = 0x20


class EventStream:
    """Reads the events of one file, once. ``header`` is everything else, when all blocks were read.

    ``repairs`` counts what was mended, by key of ``REPAIRS``. With ``recover`` what makes no sense is left
    out, and of a file that ends early the events before the cut are kept, the bytes behind the last of them
    are counted as ``cut``, and ``header`` is what stands before the events. Raises ``FormatError`` with the
    byte (of the decompressed text) where the JSON ends or makes no sense, and where its list of events
    stands twice.
    """

    def __init__(
        self, path: Path, max_bytes: int, block_bytes: int = BLOCK_BYTES, *, recover: bool = False
    ) -> None:
        """Open nothing yet."""
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
        """Events, and the text of their array for :class:`ExactEvent`."""
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
                        self._leave_out("no trace event", self._parsed_bytes + taken)
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
                return likely, -1, (_events_of(array), array)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # no cut, or no events: looked at more closely below
        found = array_cut(text)
        block = self._decoded(text, found.behind) if found.behind else None
        return found.behind, found.closed, block

    def _decoded(self, text: bytes, cut: int) -> Block:
        array = b"".join((b"[", memoryview(text)[:cut], b"]"))
        try:
            return _events_of(array), array
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            mended = self._mended(array)
        try:
            return _EVENTS.decode(mended), mended
        except (msgspec.DecodeError, RecursionError) as error:
            return self._one_by_one(mended, error)

    def _mended(self, array: bytes) -> bytes:
        """JSON text without what JSON does not allow inside of texts and as a number."""
        try:
            array.decode()
            text = array
        except UnicodeDecodeError:
            text = array.decode("utf-8", "replace").encode()
        text = _whole_characters(text)
        self.repairs["invalid-utf8"] += text != array
        inside = BracketScan().scan(text).inside
        text, count = _escaped(text, inside)
        self.repairs["control-character"] += count
        if b"\\" in text:
            text, count = _without_bad_escapes(text)
            self.repairs["invalid-escape"] += count
        if _NO_NUMBER.search(text):
            text, count = _without_odd_numbers(text)
            self.repairs["no-number"] += count
        return text

    def _one_by_one(self, array: bytes, error: Exception) -> Block:
        """The events of a list in which some are null, as that of writers that drop them late, or have fields
        of another type than they should.
        """
        try:
            texts = list(map(bytes, _RAWS.decode(array)))
        except (msgspec.DecodeError, RecursionError):
            if not self._recover:
                raise self._malformed(error) from error
            texts = self._whole_objects(array)
        kept: list[bytes] = []
        for text in texts:
            try:
                _EVENT.decode(text)
                kept.append(text)
                continue
            except (msgspec.DecodeError, RecursionError) as wrong:
                other = b"{}" if text == b"null" else _plain_event(text)
                reason = wrong
            if other is None and not self._recover:
                raise self._malformed(error) from reason
            self.repairs["broken-event" if other is None else "odd-field"] += text != b"null"
            kept.extend(() if other is None else (other,))
        whole = b"".join((b"[", b",".join(kept), b"]"))
        return _EVENTS.decode(whole), whole

    def _whole_objects(self, array: bytes) -> list[bytes]:
        """What stands between brackets that belong together, whatever stands between such; the account counts
        the pieces that are none.
        """
        brackets = BracketScan().scan(array)
        opens = np.flatnonzero((brackets.step > 0) & (brackets.depth == _IN_LIST + 1))
        closes = np.flatnonzero((brackets.step < 0) & (brackets.depth == _IN_LIST))
        found: list[bytes] = []
        behind = 1
        for begin, end in zip(opens.tolist(), closes.tolist(), strict=False):
            self.repairs["broken-event"] += bool(array[behind:begin].strip(_BETWEEN))
            found.append(array[begin : end + 1])
            behind = end + 1
        self.repairs["broken-event"] += bool(array[behind:-1].strip(_BETWEEN))
        return found

    def _malformed(self, error: Exception) -> FormatError:
        found = _BYTE.search(str(error))
        inside = int(found[1]) - 1 if found else 0
        return self._error(f"no trace event: {error}", self._parsed_bytes + inside)

    def _leave_out(self, message: str, byte: int) -> None:
        """Count what makes no sense between events. Raises ``FormatError`` unless it is to be recovered."""
        if not self._recover:
            raise self._error(message, byte)
        self.repairs["broken-event"] += 1

    def _cut(self, lost_bytes: int, message: str) -> None:
        """Count the bytes behind the last whole event of a file that ends early. Raises ``FormatError``
        unless it is to be recovered.
        """
        if not self._recover:
            raise self._cut_error(message)
        self.repairs[_CUT] += max(lost_bytes, 1)

    def _rest(self, before: bytes, behind: bytes, chunks: Iterator[bytes]) -> bytes:
        """The document without its events."""
        rest = b"".join((behind, *chunks))
        if not before:
            if rest[1:].strip():
                self._leave_out("text behind the list of events", self._read_bytes)
            return b"{}"
        header = self._closed(before, rest)
        keys = [found.start() for found in _KEY.finditer(header)]
        if len(keys) > 1:
            self._refuse_other_lists(header, keys, len(before))
        return header

    def _closed(self, before: bytes, rest: bytes) -> bytes:
        """The text around the events as JSON. Of what makes none, what stands before the events alone, or
        nothing at all. Raises ``FormatError`` unless it is to be recovered.
        """
        header = self._whole_header(before + rest)
        if isinstance(header, bytes):
            return header
        if not self._recover:
            message = f"what stands beside the events is no JSON: {header}"
            raise self._error(message, self._read_bytes) from header
        first = self._whole_header(before + b"]}")
        if isinstance(first, bytes) and _ENDS_EARLY in str(header):
            self._cut(len(rest) - 1, "")
        else:
            self.repairs["broken-header"] += 1
        return first if isinstance(first, bytes) else b"{}"

    def _whole_header(self, header: bytes) -> bytes | Exception:
        """The text, mended where it has to be, if that makes it JSON; what is wrong with it if not."""
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

    def _refuse_other_lists(self, header: bytes, keys: list[int], behind: int) -> None:
        """Of several lists JSON keeps the last, and one inside of something else is not the document's."""
        own = [at for at, depth in zip(keys, _depths_at(header, keys), strict=True) if depth == 1]
        if own != [at for at in keys if at < behind][-1:]:
            at = own[-1] if own else keys[0]
            left_out = self._read_bytes - len(header) if at >= behind else 0
            raise self._error("the list 'traceEvents' stands twice, or inside something else", left_out + at)

    def _cut_error(self, message: str) -> FormatError:
        """Of a file that ends early; says what could be had of it."""
        error = self._error(message, self._read_bytes)
        if self._events:
            commands = "in hespas-convert and hespas analyze"
            kept = f"`recover` keeps the {self._events:,} events before the cut"
            error.hint = f"{error.hint}; {commands} {kept}"
        return error

    def _error(self, message: str, byte: int) -> FormatError:
        return FormatError(
            message,
            path=str(self.path),
            position=f"byte {byte}",
            hint="was the profiler interrupted? export the trace again",
        )


def report_repairs(repairs: Mapping[str, int], findings: Findings) -> None:
    """Say what an :class:`EventStream` mended, once all blocks were read."""
    for code, message in REPAIRS.items():
        findings.warning(code, message, repairs.get(code, 0))
    lost = repairs.get(_CUT, 0)
    message = (
        f"the file ends early: {lost:,} bytes behind the last whole event are lost, and all that followed"
    )
    findings.warning(_CUT, message, int(lost > 0))


def _whole_characters(text: bytes) -> bytes:
    """JSON text with U+FFFD for each escaped surrogate that lacks its other half."""
    if b"\\u" not in text:
        return text
    return _LONE.sub(lambda found: b"\\ufffd" if found[1] else found[0], text)


def _escaped(text: bytes, inside: BoolArray) -> tuple[bytes, int]:
    """The text with the control characters ``inside`` of strings written as escapes, and how many."""
    data = np.frombuffer(text, np.uint8)
    places = np.flatnonzero((data < _SPACE) & inside).tolist()
    if not places:
        return text, 0
    parts: list[bytes] = []
    behind = 0
    for place in places:
        parts += (text[behind:place], b"\\u%04x" % text[place])
        behind = place + 1
    return b"".join((*parts, text[behind:])), len(places)


def _without_bad_escapes(text: bytes) -> tuple[bytes, int]:
    """The text with a second backslash before each that escapes nothing, and how many. Backslashes stand in
    strings only.
    """
    count = 0

    def doubled(found: re.Match[bytes]) -> bytes:
        nonlocal count
        if found[1] is None:
            return found[0]
        count += 1
        return b"\\" + found[0]

    return _BAD_ESCAPE.sub(doubled, text), count


def _without_odd_numbers(text: bytes) -> tuple[bytes, int]:
    """The text with null for numbers that JSON does not have, outside of strings, and how many."""
    inside = BracketScan().scan(text).inside
    found = [each for each in _NO_NUMBER.finditer(text) if not inside[each.start()]]
    parts: list[bytes] = []
    behind = 0
    for each in found:
        parts += (text[behind : each.start()], b"null")
        behind = each.end()
    return b"".join((*parts, text[behind:])), len(found)


def _plain_event(text: bytes) -> bytes | None:
    """An event without the fields that are of another type than they should be; None where it is none."""
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
