"""What every generator is: settings that make a workload, and what can be said of it without making it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import nan
from typing import Any, Protocol, cast

from hespas.graph import CollectiveKind, Workload
from hespas.graph.errors import UsageError

__all__ = [
    "MOST_COUNT",
    "REDUCES",
    "Account",
    "Bounded",
    "Filling",
    "Generator",
    "beyond_bound",
    "cuts_of",
    "fillings",
]

MOST_COUNT = 1 << 31
"""The bound of every setting of a generator that is a number: products of three stay within 128 bits, and one
with its byte count within the 64 bits that a dimension of a tensor has.
"""


def beyond_bound(settings: object) -> Iterator[tuple[str, str]]:
    """Yield each number of a dataclass that is beyond :data:`MOST_COUNT`, with a short form of it."""
    for name in (field.name for field in fields(cast("Any", settings))):
        value: object = getattr(settings, name)
        for number in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not abs(number) <= MOST_COUNT:
                is_far = isinstance(number, int) and abs(number) > 1 << 1000
                yield name, "far" if is_far else f"{number:g}"


@dataclass(frozen=True)
class Bounded:
    """Base class of settings: a frozen dataclass whose numbers are bounded when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the numbers. Raises ``UsageError`` for one beyond :data:`MOST_COUNT`."""
        for name, shown in beyond_bound(self):
            raise UsageError(f"{name}: {shown} is beyond {MOST_COUNT:,}", hint=f"a smaller `{name}`")


REDUCES = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE})
"""Collectives that add up what ranks bring."""


def cuts_of(kind: CollectiveKind, members: int) -> tuple[int, int]:
    """Into how many parts the whole buffer of a collective of so many ranks is cut, of which a rank brings
    one (an all-gather) and of which it gets one (a reduce-scatter).
    """
    brought = members if kind is CollectiveKind.ALL_GATHER else 1
    return brought, members if kind is CollectiveKind.REDUCE_SCATTER else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """A part of the memory of the fullest rank."""

    what: str
    size_bytes: float


def fillings(parts: Mapping[str, int]) -> tuple[Filling, ...]:
    """Parts of a memory, the largest first; what takes nothing is left out."""
    largest = sorted((part for part in parts.items() if part[1]), key=lambda part: -part[1])
    return tuple(Filling(what=what, size_bytes=float(size)) for what, size in largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Closed-form figures of a step; NaN where a generator has none. ``model_flops_per_step`` are those of
    the model, ``hardware_flops_per_step`` also count what is computed again, by several ranks alike, or on
    padding; of all ranks.
    ``peak_memory_bytes`` is of the fullest rank, ``memory`` what fills it then.
    """

    parameters: float = nan
    model_flops_per_step: float = nan
    hardware_flops_per_step: float = nan
    peak_memory_bytes: float = nan
    memory: tuple[Filling, ...] = ()


class Generator(Protocol):
    """Settings of a workload. Equal settings make equal workloads."""

    @property
    def name(self) -> str:
        """What the workload is called."""
        ...

    def workload(self) -> Workload:
        """The workload. Raises ``UsageError`` for settings that contradict each other."""
        ...

    def account(self) -> Account:
        """What is known of it in closed form."""
        ...
