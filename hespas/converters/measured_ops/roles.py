"""What a device event is to its operation, by its kernel and the profiler's category."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.costs.kernels import kernel_facts
from hespas.graph import OpClass, Profile
from hespas.graph.columns import mapped

__all__ = ["Role", "event_roles", "is_to_device"]


class Role(IntEnum):
    """What a device event is to its operation."""

    WORK = 0
    HOST_COPY = 1
    COMMUNICATION = 2
    DEVICE_COPY = 3
    FILL = 4


_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH", "CopyHostToDevice", "CopyDeviceToHost")
_COMMUNICATION = ("nccldevkernel", "ncclkernel", "rccl_generic", "rccldevkernel", "onerccl", "mscclkernel")


def is_to_device(kernel: str) -> bool:
    """Whether a copy between host and device is one to the device."""
    return "HtoD" in kernel or "HostToDevice" in kernel


def event_roles(profile: Profile) -> NDArray[np.uint8]:
    """The role of each event, by kernel name and category; each distinct pair is looked at once."""
    strings = profile.strings
    pair = (profile.kernel_row.astype(np.int64) << 32) | profile.category_row
    return mapped(pair, lambda pair: _role(strings[pair >> 32], strings[pair & 0xFFFFFFFF]), np.uint8)


def _role(kernel: str, category: str) -> Role:
    if kernel.startswith(_HOST_COPIES):
        return Role.HOST_COPY
    if kernel.lower().startswith(_COMMUNICATION):
        return Role.COMMUNICATION
    if "memset" in category or kernel.startswith("Memset"):
        return Role.FILL
    if "memcpy" in category or kernel.startswith("Memcpy"):
        return Role.DEVICE_COPY
    talks = kernel_facts(kernel).op_class is OpClass.COLLECTIVE
    return Role.COMMUNICATION if talks else Role.WORK
