"""What the measuring process is asked and answers: one JSON document a line."""

from __future__ import annotations

import msgspec

__all__ = ["Job", "Machine", "Timing"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Programs to time: the loop with the work and the one without, and the types of their arguments."""

    program: str
    baseline: str
    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    baseline_arguments: tuple[tuple[str, tuple[int, ...]], ...]
    repeats: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Who measures: a compiler with its version, on a device with its processor and flags."""

    compiler: str
    platform: str
    device: str
    flags: str
    fault: str = ""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one turn [ns], or why nothing was (``fault``: the compiler's message).

    ``clock_mhz`` is the processor's frequency meanwhile (0: not known), ``turns`` how many a sample had,
    ``samples`` their number.
    """

    duration_ns: float = -1.0
    low_ns: float = -1.0
    high_ns: float = -1.0
    turns: int = 0
    samples: int = 0
    clock_mhz: float = 0.0
    fault: str = ""
    when: str = ""

    @property
    def is_known(self) -> bool:
        """Whether there is a time: positive and finite."""
        return not self.fault and 0 < self.duration_ns < float("inf")
