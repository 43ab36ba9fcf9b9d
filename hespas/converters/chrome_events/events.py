"""One event of a trace, as its JSON says it."""

from __future__ import annotations

import msgspec

__all__ = ["ExactEvent", "TraceEvent"]


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
