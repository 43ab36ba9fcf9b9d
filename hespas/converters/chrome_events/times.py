"""Microseconds as JSON writes them to whole nanoseconds, without the loss of a float at epoch scale."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import msgspec
import numpy as np

from hespas.converters.chrome_events.events import ExactEvent, TraceEvent
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError

__all__ = ["EXACT_US", "event_times", "nanoseconds"]

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
