"""Which kernels communicate, by what NCCL and RCCL call them and the ranges around their launch."""

from __future__ import annotations

import re
from types import MappingProxyType

__all__ = ["collective_in_kernel", "collective_in_range", "is_collective_kernel"]

_KERNEL = re.compile(
    r"(?:void )?[nr]ccl(?:(?:Symk?)?(?:Dev)?Kernel(?:_([A-Za-z]+))?"
    r"|([A-Z][A-Za-z]{2,20})(?:Ring|Tree|CollNet)\w*Kernel)"
)
"""``ncclDevKernel_AllReduce_Sum_f32_RING_LL``; older ones write ``ncclKernel_AllReduce_RING_LL_Sum_float`` or
``ncclAllReduceRingLLKernel_sum_f32``.
"""
_KINDS: MappingProxyType[str, str] = MappingProxyType(
    {
        "allreduce": "allreduce",
        "allgather": "allgather",
        "allgatherbase": "allgather",
        "reducescatter": "reduce_scatter",
        "reducescatterbase": "reduce_scatter",
        "broadcast": "broadcast",
        "reduce": "reduce",
        "alltoall": "all_to_all",
        "alltoallv": "all_to_all",
        "alltoallpivot": "all_to_all",
        "alltoallbase": "all_to_all",
        "gather": "gather",
        "scatter": "scatter",
        "sendrecv": "sendrecv",
        "send": "send",
        "recv": "recv",
        "coalesced": "",
        "generic": "",
    }
)
"""The library's name without case and underscores -> the name used here; "" where it does not tell."""

_RANGE = re.compile(r"(?:nccl:|rccl:|c10d::|nccl|rccl)_?([A-Za-z_]+)")


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel is one of NCCL or RCCL."""
    return _KERNEL.match(name) is not None


def collective_in_kernel(name: str) -> str:
    """``allreduce`` for ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``; "" where a kernel does not tell."""
    found = _KERNEL.match(name)
    return _KINDS.get((found[1] or found[2] or "").lower(), "") if found else ""


def collective_in_range(name: str) -> str:
    """``allreduce`` for ``ncclAllReduce``, ``nccl:all_reduce`` and ``c10d::allreduce_``; "" for the rest."""
    found = _RANGE.match(name)
    return _KINDS.get(found[1].replace("_", "").lower(), "") if found else ""
