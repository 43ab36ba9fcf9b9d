"""Roles of device events and bounds of their work, by kernel name, launch and category."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import isnan, nan

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.costs.kernels import KernelFacts, WorkBounds, kernel_facts, launch_of, work_bounds
from hespas.graph import OpClass, Profile
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray, distinct_rows, mapped
from hespas.graph.passes import is_runtime_copy

__all__ = [
    "EventRole",
    "KernelBounds",
    "bounds_of",
    "bounds_text",
    "event_roles",
    "is_to_device",
    "kernel_bounds",
]

_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH", "CopyHostToDevice", "CopyDeviceToHost")
_HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation"})
"""Operations of a run without a device: a call that starts a communication is not the communication."""


class EventRole(IntEnum):
    """Role of a device event in its operation."""

    WORK = 0
    HOST_COPY = 1
    COMMUNICATION = 2
    DEVICE_COPY = 3
    FILL = 4


def is_to_device(kernel: str) -> bool:
    """Return True if a copy between host and device goes to the device."""
    return "HtoD" in kernel or "HostToDevice" in kernel


def event_roles(profile: Profile) -> NDArray[np.uint8]:
    """Return the role of each event, by the communication that the profile states, kernel name and category.

    Analyses, graphs and simulations use these roles, so all agree about what communicates. Each distinct pair
    of name and category is evaluated once.
    """
    strings = profile.strings

    def role(pair: int) -> EventRole:
        kernel, category = strings[pair >> 32], strings[pair & 0xFFFFFFFF]
        if kernel.startswith(_HOST_COPIES):
            return EventRole.HOST_COPY
        if "memset" in category or "memcpy" in category or is_runtime_copy(kernel):
            is_fill = "memset" in f"{category} {kernel}".lower()
            return EventRole.FILL if is_fill else EventRole.DEVICE_COPY
        is_collective = kernel_facts(kernel).op_class is OpClass.COLLECTIVE
        return (
            EventRole.COMMUNICATION if is_collective and category not in _HOST_CATEGORIES else EventRole.WORK
        )

    roles = mapped((profile.kernel_row.astype(np.int64) << 32) | profile.category_row, role, np.uint8)
    roles[np.isin(profile.op_class, (OpClass.COLLECTIVE, OpClass.P2P))] = EventRole.COMMUNICATION
    roles[profile.comms.event] = EventRole.COMMUNICATION
    return roles


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelBounds:
    """Lower and upper bounds of the work of each event; columns of shape ``(events,)``, NaN for unknown.

    ``op_class`` is an ``OpClass`` code, ``fact`` the index of the kernel's name in ``facts``. ``elements``
    are those of results; ``bytes`` are read and written bytes together. Bytes of copies, fills and
    communication come from the profiler. Bounds are not figures: no cost is derived from them.
    """

    facts: tuple[KernelFacts, ...]
    fact: SmallIntArray
    op_class: NDArray[np.uint8]
    flops_low: FloatArray
    flops_high: FloatArray
    bytes_low: FloatArray
    bytes_high: FloatArray
    elements_low: FloatArray
    elements_high: FloatArray

    @property
    def known(self) -> BoolArray:
        """Mask of the events that have any bound."""
        has_bound = np.zeros(len(self.op_class), np.bool_)
        for name in WorkBounds._fields:
            has_bound |= ~np.isnan(getattr(self, name))
        return has_bound


def kernel_bounds(profile: Profile) -> KernelBounds:
    """Read each kernel name once, and once with each of its launches. O(events)."""
    strings = profile.strings
    names, fact = np.unique(profile.kernel_row, return_inverse=True)
    facts = tuple(kernel_facts(strings[row]) for row in names.tolist())
    pairs, index = distinct_rows(fact.reshape(-1), profile.grid_row)
    rows = [bounds_of(facts[number], strings[grid]) for number, grid in pairs]
    values = np.array(rows, np.float64).reshape(-1, len(WorkBounds._fields))[index].T
    columns = dict(zip(WorkBounds._fields, values, strict=True))
    roles = event_roles(profile)
    one_side = (roles == EventRole.HOST_COPY) | (roles == EventRole.FILL)
    low = np.where(one_side, profile.bytes_moved, nan)
    low = np.where(roles == EventRole.DEVICE_COPY, 2 * profile.bytes_moved, low)
    high, comms = low.copy(), profile.comms
    largest = np.fmax(comms.operand_bytes, comms.result_bytes)  # one side of a collective may be unknown
    both = comms.operand_bytes + comms.result_bytes
    low[comms.event], high[comms.event] = np.where(np.isnan(both), largest, both), both
    for name, moved in (("bytes_low", low), ("bytes_high", high)):
        columns[name] = np.where(np.isnan(moved), columns[name], moved)
    classes = np.array([facts_of_kernel.op_class for facts_of_kernel in facts], np.uint8)
    number = fact.reshape(-1).astype(np.int32)
    return KernelBounds(facts=facts, fact=number, op_class=classes[number], **columns)


def bounds_of(facts: KernelFacts, grid: str) -> WorkBounds:
    """Return the bounds of one kernel by its launch (see :attr:`Profile.grid_row`), or by its name alone."""
    launch = launch_of(grid)
    return work_bounds(facts) if launch is None else work_bounds(facts, *launch)


def bounds_text(bounds: WorkBounds) -> str:
    """Return the known bounds as JSON: ``{"elements":[low,high]}``; null for an unknown end."""
    values = bounds._asdict()
    ranges: dict[str, list[float | None]] = {}
    for name in ("flops", "bytes", "elements"):
        ends = [values[f"{name}_low"], values[f"{name}_high"]]
        if not all(map(isnan, ends)):
            ranges[name] = [None if isnan(end) else end for end in ends]
    return msgspec.json.encode(ranges).decode()
