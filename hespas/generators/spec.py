"""Interface of all generators: settings that make a workload, and closed-form figures of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import nan
from typing import Any, Literal, Protocol, cast

from hespas.graph import CollectiveKind, Workload
from hespas.graph.errors import UsageError

__all__ = [
    "MOST_COUNT",
    "REDUCES",
    "Account",
    "Bounded",
    "Filling",
    "Generator",
    "MemoryFigure",
    "beyond_bound",
    "check_positive",
    "cuts_of",
    "fillings",
]

MOST_COUNT = 1 << 31
"""Upper bound of every numeric setting of a generator: products of three such numbers stay within 128 bits,
and one number times its byte count within the 64 bits of a tensor dimension.
"""


def check_positive(values: Mapping[str, float], *, owner: str = "") -> None:
    """Raise ``UsageError`` for a value below 1. ``owner`` is the start of the message."""
    for name, value in values.items():
        if not value >= 1:
            raise UsageError(f"{owner}{name} is {value:g}, but must be 1 or more", hint=f"set `{name}=1`")


def beyond_bound(settings: object) -> Iterator[tuple[str, str]]:
    """Yield the name and the abbreviated value of each number in a settings dataclass that is larger than
    :data:`MOST_COUNT`.
    """
    for name in (field.name for field in fields(cast("Any", settings))):
        value: object = getattr(settings, name)
        for number in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not abs(number) <= MOST_COUNT:
                is_huge = isinstance(number, int) and abs(number) > 1 << 1000
                yield name, "far" if is_huge else f"{number:g}"


@dataclass(frozen=True)
class Bounded:
    """Base class of generator settings: a frozen dataclass that checks its numbers in the constructor."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the numbers. Raises ``UsageError`` for one beyond :data:`MOST_COUNT`."""
        for name, shown in beyond_bound(self):
            raise UsageError(f"{name}: {shown} is beyond {MOST_COUNT:,}", hint=f"choose a smaller `{name}`")


REDUCES = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE})
"""Collectives that add up the buffers of the ranks."""


def cuts_of(kind: CollectiveKind, members: int) -> tuple[int, int]:
    """Return the numbers by which the whole buffer of a collective is divided to get the operand, and to get
    the result, of one rank. The operand of an all-gather and the result of a reduce-scatter are one part per
    member.
    """
    operand_parts = members if kind is CollectiveKind.ALL_GATHER else 1
    result_parts = members if kind is CollectiveKind.REDUCE_SCATTER else 1
    return operand_parts, result_parts


MemoryFigure = Literal["allocated", "reserved", "device"]
"""Memory of a rank: of all tensors, also of free blocks of the allocator, also of other libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Part of the peak memory of the rank with the highest peak, such as weights or activations.
    ``counted_as`` is the smallest figure that includes it.
    """

    what: str
    size_bytes: float
    counted_as: MemoryFigure = "allocated"


def fillings(parts: Mapping[str, int], counted_as: MemoryFigure = "allocated") -> tuple[Filling, ...]:
    """Return the non-empty parts of a memory account, the largest first."""
    largest = sorted((part for part in parts.items() if part[1]), key=lambda part: -part[1])
    return tuple(Filling(what=what, size_bytes=float(size), counted_as=counted_as) for what, size in largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Closed-form figures of a step; NaN if a generator does not provide a figure.

    ``model_flops_per_step`` has the FLOPs of the model. ``hardware_flops_per_step`` also includes
    recomputation, work that several ranks repeat, and padding. Both are sums over all ranks.
    ``peak_memory_bytes`` is the peak memory of all tensors of the rank that needs most; ``memory`` has its
    parts. ``reserved_memory_bytes`` is the memory of the allocator, ``device_memory_bytes`` the memory that
    the device must have.
    """

    parameters: float = nan
    model_flops_per_step: float = nan
    hardware_flops_per_step: float = nan
    peak_memory_bytes: float = nan
    reserved_memory_bytes: float = nan
    device_memory_bytes: float = nan
    memory: tuple[Filling, ...] = ()

    def on_device(self, kind: str) -> Account:
        """Return the account of a step on a device of a kind. Other devices than GPUs have no memory of the
        allocator of PyTorch, of the context of a GPU and of its communication library.
        """
        if kind == "gpu":
            return self
        tensors = tuple(part for part in self.memory if part.counted_as == "allocated")
        return replace(
            self, memory=tensors, reserved_memory_bytes=nan, device_memory_bytes=self.peak_memory_bytes
        )


class Generator(Protocol):
    """Generator of a workload from settings, which are its fields. Equal settings make equal workloads."""

    @property
    def name(self) -> str:
        """Name of the workload."""
        ...

    def workload(self) -> Workload:
        """Make the workload. Raises ``UsageError`` for settings that contradict each other."""
        ...

    def account(self) -> Account:
        """Return the closed-form figures of the workload."""
        ...
