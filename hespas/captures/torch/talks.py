"""Which operations communicate, and what their arguments say: group, sizes, peer, tag.

Two families: ``c10d`` takes a process group and fills tensors, ``_c10d_functional`` (DTensor, compiled
graphs) names a group and makes new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from types import MappingProxyType
from typing import NamedTuple

from hespas.captures.torch.calls import Argument, TensorRecord
from hespas.converters.pytorch.communication import C10D
from hespas.graph import find_dtype

__all__ = ["Talker", "bytes_of", "is_ragged", "talker_of", "tensors_at"]


class Talker(NamedTuple):
    """Places of arguments (-1: none): what is sent, what is filled, the peer within the group, the tag, and
    the two lists of splits. ``fills`` -1 is a new tensor. ``word`` is what libraries call the collective.
    """

    word: str
    sent: int
    fills: int = -1
    peer: int = -1
    tag: int = -1
    splits: int = -1


_FUNCTIONAL: dict[str, Talker] = {
    "all_reduce": Talker("allreduce", 0),
    "all_reduce_": Talker("allreduce", 0, 0),
    "all_reduce_coalesced": Talker("allreduce_coalesced", 0),
    "all_reduce_coalesced_": Talker("allreduce_coalesced", 0, 0),
    "all_gather_into_tensor": Talker("allgather_into_tensor", 0),
    "all_gather_into_tensor_coalesced": Talker("allgather_into_tensor_coalesced", 0),
    "all_gather_into_tensor_out": Talker("allgather_into_tensor", 0, 3),
    "reduce_scatter_tensor": Talker("reduce_scatter_tensor", 0),
    "reduce_scatter_tensor_coalesced": Talker("reduce_scatter_tensor_coalesced", 0),
    "reduce_scatter_tensor_out": Talker("reduce_scatter_tensor", 0, 4),
    "all_to_all_single": Talker("alltoall_base", 0, splits=1),
    "broadcast": Talker("broadcast", 0),
    "broadcast_": Talker("broadcast", 0, 0),
    "isend": Talker("send", 0, peer=1, tag=2),
    "irecv": Talker("recv", -1, 0, peer=1, tag=2),
}

_TALKERS: Mapping[str, Talker] = MappingProxyType(
    {
        name: Talker(
            name.partition("::")[2].strip("_").removesuffix("_"),
            each.input,
            each.output,
            each.peer,
            each.tag,
            each.splits,
        )
        for name, each in C10D.items()
    }
    | {f"_c10d_functional::{name}": each for name, each in _FUNCTIONAL.items()}
    | {"_dtensor::shard_dim_alltoall": Talker("alltoall_base", 0)}
)


def talker_of(op: str) -> Talker | None:
    """Where an operation has what it communicates; None for other operations."""
    return _TALKERS.get(op)


def tensors_at(arguments: tuple[Argument, ...], place: int) -> tuple[TensorRecord, ...]:
    """The tensors of one argument."""
    if not 0 <= place < len(arguments):
        return ()
    found = arguments[place]
    if isinstance(found, TensorRecord):
        return (found,)
    return () if isinstance(found, str) else found


def bytes_of(tensors: tuple[TensorRecord, ...]) -> float:
    """Their elements' storage; NaN without tensors or for an unknown type."""
    total = 0.0
    for each in tensors:
        dtype = find_dtype(each.dtype)
        elements = 1
        for extent in each.shape:
            elements *= extent
        total += nan if dtype is None else dtype.storage_bytes(elements)
    return total if tensors else nan


def is_ragged(arguments: tuple[Argument, ...], talker: Talker) -> bool:
    """Whether the parts of an exchange differ in size."""
    texts = arguments[talker.splits : talker.splits + 2] if talker.splits >= 0 else ()
    return any(isinstance(text, str) and len(set(text.strip("[]").split(", "))) > 1 for text in texts)
