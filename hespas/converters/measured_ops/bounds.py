"""What the names of kernels and their launches say of each event of a profile, without any host operation."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.roles import Role, event_roles
from hespas.costs.kernels import KernelFacts, WorkBounds, kernel_facts, launch_of, work_bounds
from hespas.graph import Profile
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray, distinct_rows

__all__ = ["KernelBounds", "bounds_of", "bounds_text", "kernel_bounds"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelBounds:
    """Columns of shape ``(events,)``: of each event its class (an ``OpClass`` code), the row of ``facts``
    that its name has, and what it did at least and at most (NaN: nothing says so). ``elements`` are those of
    its results, ``bytes`` what it read and wrote together; copies, fills and communication moved what the
    profiler says. They are bounds, not figures: nothing is made of them that is shown as a cost.
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
        """Which events have any bound."""
        known = np.zeros(len(self.op_class), np.bool_)
        for name in WorkBounds._fields:
            known |= ~np.isnan(getattr(self, name))
        return known


def kernel_bounds(profile: Profile) -> KernelBounds:
    """Read each kernel name, and each with each way it was launched, once. O(events)."""
    strings = profile.strings
    names, fact = np.unique(profile.kernel_row, return_inverse=True)
    facts = tuple(kernel_facts(strings[row]) for row in names.tolist())
    pairs, place = distinct_rows(fact.reshape(-1), profile.grid_row)
    rows = [bounds_of(facts[number], strings[grid]) for number, grid in pairs]
    found = np.array(rows, np.float64).reshape(-1, len(WorkBounds._fields))[place].T
    columns = dict(zip(WorkBounds._fields, found, strict=True))
    for name, moved in zip(("bytes_low", "bytes_high"), _moved(profile), strict=True):
        columns[name] = np.where(np.isnan(moved), columns[name], moved)
    classes = np.array([each.op_class for each in facts], np.uint8)
    number = fact.reshape(-1).astype(np.int32)
    return KernelBounds(facts=facts, fact=number, op_class=classes[number], **columns)


def bounds_of(facts: KernelFacts, grid: str) -> WorkBounds:
    """The bounds of one kernel by its launch as :attr:`Profile.grid_row` has it; by its name where that is
    not known.
    """
    launch = launch_of(grid)
    return work_bounds(facts) if launch is None else work_bounds(facts, *launch)


def _moved(profile: Profile) -> tuple[FloatArray, FloatArray]:
    """Bytes that the profiler says events read and wrote, at least and at most; NaN where it does
    not. Of a collective it may know one side alone.
    """
    roles = event_roles(profile)
    moved = np.where((roles == Role.HOST_COPY) | (roles == Role.FILL), profile.bytes_moved, nan)
    moved = np.where(roles == Role.DEVICE_COPY, 2 * profile.bytes_moved, moved)
    comms, most = profile.comms, moved.copy()
    either = np.fmax(comms.operand_bytes, comms.result_bytes)
    both = comms.operand_bytes + comms.result_bytes
    moved[comms.event], most[comms.event] = np.where(np.isnan(both), either, both), both
    return moved, most


def bounds_text(bounds: WorkBounds) -> str:
    """The bounds that are known as JSON: ``{"elements":[low,high]}``; null for one that is not."""
    values = bounds._asdict()
    told: dict[str, list[float | None]] = {}
    for name in ("flops", "bytes", "elements"):
        ends = [values[f"{name}_low"], values[f"{name}_high"]]
        if not all(map(isnan, ends)):
            told[name] = [None if isnan(end) else end for end in ends]
    return msgspec.json.encode(told).decode()
