"""Events of Chrome-trace JSON, decoded block by block: the container of Kineto's and JAX's traces.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

from hespas.converters.chrome_events.events import TraceEvent
from hespas.converters.chrome_events.stream import EventStream
from hespas.converters.chrome_events.times import event_times

__all__ = ["EventStream", "TraceEvent", "event_times"]
