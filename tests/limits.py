"""Limits of CPU time for the processes that tests start, which are independent of the load of the machine."""

from __future__ import annotations

import resource
from collections.abc import Callable

__all__ = ["SAFETY_S", "cpu_limited"]

SAFETY_S = 1800.0
"""Seconds after which a wait is given up. It only ends what would wait forever: work of seconds of processor
time passes on a machine that gives a process a hundredth of its time.
"""


def cpu_limited(cpu_s: int) -> Callable[[], None]:
    """Return a ``preexec_fn`` that lets a process use ``cpu_s`` seconds of processor time (else: SIGXCPU)."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))

    return limit
