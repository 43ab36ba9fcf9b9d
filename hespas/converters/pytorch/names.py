"""What libraries call their collectives and messages, and what that is to us: one table for all spellings.

Sources: ``torch/csrc/distributed/c10d`` (``Ops.cpp``, ``ParamCommsUtils``), NCCL and RCCL kernel names.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import NamedTuple

from hespas.graph import CollectiveKind, NodeKind

__all__ = ["C10D", "C10dOp", "Named", "is_communication_kernel", "kernel_operation", "named"]


class Named(NamedTuple):
    """A kind of communication: a collective's, or the direction of a message."""

    node: NodeKind
    collective: CollectiveKind = CollectiveKind.UNKNOWN


def _collective(kind: CollectiveKind) -> Named:
    return Named(NodeKind.COLLECTIVE, kind)


_SEND, _RECV = Named(NodeKind.SEND), Named(NodeKind.RECV)

_NAMES: MappingProxyType[str, Named] = MappingProxyType(
    {
        "allreduce": _collective(CollectiveKind.ALL_REDUCE),
        "allreducecoalesced": _collective(CollectiveKind.ALL_REDUCE),
        "allreducesparse": _collective(CollectiveKind.ALL_REDUCE),
        "allgather": _collective(CollectiveKind.ALL_GATHER),
        "allgatherv": _collective(CollectiveKind.ALL_GATHER),
        "allgatherbase": _collective(CollectiveKind.ALL_GATHER),
        "allgathercoalesced": _collective(CollectiveKind.ALL_GATHER),
        "allgatherintotensor": _collective(CollectiveKind.ALL_GATHER),
        "allgatherintotensorcoalesced": _collective(CollectiveKind.ALL_GATHER),
        "reducescatter": _collective(CollectiveKind.REDUCE_SCATTER),
        "reducescatterv": _collective(CollectiveKind.REDUCE_SCATTER),
        "reducescatterbase": _collective(CollectiveKind.REDUCE_SCATTER),
        "reducescattertensor": _collective(CollectiveKind.REDUCE_SCATTER),
        "reducescattertensorcoalesced": _collective(CollectiveKind.REDUCE_SCATTER),
        "alltoall": _collective(CollectiveKind.ALL_TO_ALL),
        "alltoallv": _collective(CollectiveKind.ALL_TO_ALL),
        "alltoallbase": _collective(CollectiveKind.ALL_TO_ALL),
        "alltoallsingle": _collective(CollectiveKind.ALL_TO_ALL),
        "broadcast": _collective(CollectiveKind.BROADCAST),
        "broadcastoop": _collective(CollectiveKind.BROADCAST),
        "reduce": _collective(CollectiveKind.REDUCE),
        "reduceoop": _collective(CollectiveKind.REDUCE),
        "gather": _collective(CollectiveKind.GATHER),
        "scatter": _collective(CollectiveKind.SCATTER),
        "barrier": _collective(CollectiveKind.BARRIER),
        "monitoredbarrier": _collective(CollectiveKind.BARRIER),
        "send": _SEND,
        "recv": _RECV,
        "recvanysource": _RECV,
    }
)

_KERNEL = re.compile(r"^(?:void )?(?:nccl|rccl|msccl)\w*?(?:Kernel|Dev)\w*", re.IGNORECASE)
_KERNEL_OPERATION = re.compile(r"(?:Kernel|DevKernel)(?:Debug)?_(\w+?)(?:_|\(|<|$)")


def named(spelling: str) -> Named | None:
    """What a library's word for a communication means; None for other words (``wait``, ``init``)."""
    return _NAMES.get(re.sub(r"[^a-z]", "", spelling.lower()))


def is_communication_kernel(kernel: str) -> bool:
    """Whether a kernel is NCCL's or RCCL's."""
    return _KERNEL.match(kernel) is not None


def kernel_operation(kernel: str) -> Named | None:
    """The operation in a kernel's name; None where it holds none (``Generic``) or several (``SendRecv``)."""
    found = _KERNEL_OPERATION.search(kernel)
    return named(found[1]) if found else None


class C10dOp(NamedTuple):
    """The arguments of a dispatcher operation by place (-1: none): where tensors, root, peer and splits are.

    ``output`` and ``input`` are the same place where the operation works in place.
    """

    meaning: Named
    output: int = -1
    input: int = -1
    peer: int = -1
    tag: int = -1
    splits: tuple[int, ...] = ()


def _gathered(kind: CollectiveKind, splits: tuple[int, ...] = ()) -> C10dOp:
    return C10dOp(_collective(kind), 0, 1, splits=splits)


def _in_place(kind: CollectiveKind) -> C10dOp:
    return C10dOp(_collective(kind), 0, 0)


C10D: MappingProxyType[str, C10dOp] = MappingProxyType(
    {
        "c10d::allreduce_": _in_place(CollectiveKind.ALL_REDUCE),
        "c10d::allreduce_coalesced_": _in_place(CollectiveKind.ALL_REDUCE),
        "c10d::broadcast_": _in_place(CollectiveKind.BROADCAST),
        "c10d::reduce_": _in_place(CollectiveKind.REDUCE),
        "c10d::allgather_": _gathered(CollectiveKind.ALL_GATHER),
        "c10d::_allgather_base_": _gathered(CollectiveKind.ALL_GATHER),
        "c10d::allgather_coalesced_": _gathered(CollectiveKind.ALL_GATHER),
        "c10d::allgather_into_tensor_coalesced_": _gathered(CollectiveKind.ALL_GATHER),
        "c10d::gather_": _gathered(CollectiveKind.GATHER),
        "c10d::scatter_": _gathered(CollectiveKind.SCATTER),
        "c10d::reduce_scatter_": _gathered(CollectiveKind.REDUCE_SCATTER),
        "c10d::_reduce_scatter_base_": _gathered(CollectiveKind.REDUCE_SCATTER),
        "c10d::reduce_scatter_tensor_coalesced_": _gathered(CollectiveKind.REDUCE_SCATTER),
        "c10d::alltoall_base_": _gathered(CollectiveKind.ALL_TO_ALL, (3, 4)),
        "c10d::alltoall_": _gathered(CollectiveKind.ALL_TO_ALL),
        "c10d::barrier": C10dOp(_collective(CollectiveKind.BARRIER)),
        "c10d::monitored_barrier_": C10dOp(_collective(CollectiveKind.BARRIER)),
        "c10d::send": C10dOp(_SEND, -1, 0, peer=2, tag=3),
        "c10d::recv_": C10dOp(_RECV, 0, -1, peer=2, tag=3),
        "c10d::recv_any_source_": C10dOp(_RECV, 0, -1, tag=2),
    }
)
"""The dispatcher's communication operations, with the places of their arguments."""
