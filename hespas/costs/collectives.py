"""What a collective sends: Chakra's ``comm_size``, bytes on the wire, reduction work.

``group_size`` is N. Sent bytes are those of bandwidth-optimal algorithms, per device. Bytes are those of one
device in this program: a variadic collective counts the sum over its operands.
"""

from __future__ import annotations

from math import nan
from typing import NamedTuple

from hespas.graph import CollectiveKind

__all__ = ["COLLECTIVE_KINDS", "Payload", "payload", "reduction_flops"]

COLLECTIVE_KINDS: dict[str, CollectiveKind] = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "cross-replica-sum": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "ragged_all_to_all": CollectiveKind.RAGGED_ALL_TO_ALL,
    "collective_broadcast": CollectiveKind.BROADCAST,
    "collective_reduce": CollectiveKind.REDUCE,
}
"""Canonical operation name (see :func:`hespas.costs.canonical_name`) -> kind."""

_REDUCING = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE})


class Payload(NamedTuple):
    """``comm_bytes``: the size a Chakra trace states; ``sent_bytes``: what one device puts on the wire.

    ``is_bound`` says that both are upper bounds, because the sizes are run-time values.
    """

    comm_bytes: float
    sent_bytes: float
    is_bound: bool = False


def payload(kind: CollectiveKind, operand_bytes: float, result_bytes: float, group_size: int) -> Payload:
    """The payload of one collective; ``group_size`` -1 (groups differ or unknown) leaves sent bytes unknown.

    All-gather counts the shard and reduce-scatter the full input: both are the operand.
    """
    others = float(group_size - 1) if group_size > 0 else nan
    share = others / group_size if group_size > 0 else nan
    size = operand_bytes
    if kind is CollectiveKind.RAGGED_ALL_TO_ALL:
        return Payload(result_bytes, share * result_bytes, is_bound=True)
    if kind is CollectiveKind.ALL_REDUCE:
        return Payload(size, 2.0 * share * size)
    if kind is CollectiveKind.ALL_GATHER:
        return Payload(size, others * size)
    if kind in {CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL}:
        return Payload(size, share * size)
    return Payload(size, size if group_size != 1 else 0.0)


def reduction_flops(kind: CollectiveKind, operand_elements: float, group_size: int) -> float:
    """Additions one device makes for a reducing collective: (N - 1) / N of its elements; 0 for the others.

    Listed apart: it is not compute of the program.
    """
    if kind not in _REDUCING:
        return 0.0
    return operand_elements * (group_size - 1) / group_size if group_size > 0 else nan
