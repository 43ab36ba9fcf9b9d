"""Microseconds as JSON writes them to whole nanoseconds, without the loss of a float at epoch scale."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import msgspec
import numpy as np

from hespas.converters.chrome_events.events import ExactEvent, TraceEvent
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["EXACT_US", "event_times", "nanoseconds"]

EXACT_US = float(1 << 43)
"""Below this a float64 is within half a nanosecond of the microseconds written: 2**43 us are 101 days."""

_LARGEST_NS = (1 << 63) - 1
_EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])


def event_times(
    events: Sequence[TraceEvent], array: bytes, chosen: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """Start and duration of the ``chosen`` events in whole ns; ``array`` is the text of all ``events``.

    Raises ``ValueError`` for a time that is missing, no number, or too large for 64 bits of nanoseconds.
    """
    start_us = np.array([events[place].ts for place in chosen], np.float64)
    duration_us = np.array([events[place].dur for place in chosen], np.float64)
    fast = [_whole(column) for column in (start_us, duration_us)]
    if fast[0] is not None and fast[1] is not None:
        return fast[0], fast[1]
    exact = _EXACT_EVENTS.decode(array)
    return (
        nanoseconds([bytes(exact[place].ts) for place in chosen]),
        nanoseconds([bytes(exact[place].dur) for place in chosen]),
    )


def _whole(column_us: FloatArray) -> IntArray | None:
    """Whole ns, None where a float is not good enough."""
    if not len(column_us):
        return np.empty(0, np.int64)
    whole = np.floor(column_us)
    part = column_us - whole
    if not np.isfinite(whole).all() or float(np.abs(whole).max()) > _LARGEST_NS // 1000:
        return None
    if bool(part.any()) and float(np.abs(whole).max()) >= EXACT_US:
        return None
    return whole.astype(np.int64) * 1000 + np.rint(part * 1000).astype(np.int64)


def nanoseconds(texts: Sequence[bytes]) -> IntArray:
    """Whole ns of microseconds in decimal text (quoted or not), rounded half to even.

    Raises ``ValueError`` for what is no finite number or does not fit 64 bits.
    """
    return np.array([_exact(text) for text in texts], np.int64)


def _exact(text: bytes) -> int:
    text = text.strip(b'" \t\r\n')
    if text[-4:-3] == b"." and text[:-4].isdigit() and text[-3:].isdigit():
        whole = int(text[:-4] + text[-3:])
    else:
        try:
            whole = int((Decimal(text.decode("ascii")) * 1000).to_integral_value())
        except (InvalidOperation, UnicodeDecodeError, OverflowError, ValueError) as error:
            raise ValueError(f"{text[:40]!r} is no time") from error
    if abs(whole) > _LARGEST_NS:
        raise ValueError(f"{text[:40]!r} does not fit 64 bits of nanoseconds")
    return whole
