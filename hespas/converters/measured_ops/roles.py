"""What a device event is to its operation, by its kernel and the profiler's category."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.costs.kernels import kernel_facts
from hespas.graph import OpClass, Profile
from hespas.graph.columns import mapped
from hespas.graph.passes import is_runtime_copy

__all__ = ["Role", "event_roles", "is_to_device"]


class Role(IntEnum):
    """What a device event is to its operation."""

    WORK = 0
    HOST_COPY = 1
    COMMUNICATION = 2
    DEVICE_COPY = 3
    FILL = 4


_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH", "CopyHostToDevice", "CopyDeviceToHost")


_OF_HOST = frozenset({"cpu_op", "user_annotation"})
"""Operations of a run without a device: a call that starts a communication is not the communication."""


def is_to_device(kernel: str) -> bool:
    """Whether a copy between host and device is one to the device."""
    return "HtoD" in kernel or "HostToDevice" in kernel


def event_roles(profile: Profile) -> NDArray[np.uint8]:
    """The role of each event: what its profile states of communication, then kernel name and category.

    This decides for analyses, graphs and simulations alike what communicates. Each distinct pair of name and
    category is looked at once.
    """
    strings = profile.strings
    pair = (profile.kernel_row.astype(np.int64) << 32) | profile.category_row
    roles = mapped(pair, lambda pair: _role(strings[pair >> 32], strings[pair & 0xFFFFFFFF]), np.uint8)
    roles[np.isin(profile.op_class, (OpClass.COLLECTIVE, OpClass.P2P))] = Role.COMMUNICATION
    roles[profile.comms.event] = Role.COMMUNICATION
    return roles


def _role(kernel: str, category: str) -> Role:
    if kernel.startswith(_HOST_COPIES):
        return Role.HOST_COPY
    if "memset" in category or "memcpy" in category or is_runtime_copy(kernel):
        return Role.FILL if "memset" in f"{category} {kernel}".lower() else Role.DEVICE_COPY
    if category in _OF_HOST:
        return Role.WORK
    talks = kernel_facts(kernel).op_class is OpClass.COLLECTIVE
    return Role.COMMUNICATION if talks else Role.WORK
