"""Payloads of collectives: message sizes as Chakra's ``comm_size``, and bytes that each device sends.

``group_size`` is N. Sent bytes follow bandwidth-optimal algorithms, per device. Bytes are per device of one
program: a variadic collective counts the sum over its operands.
"""

from __future__ import annotations

from math import nan
from typing import NamedTuple

from hespas.graph import CollectiveKind

__all__ = ["COLLECTIVE_KINDS", "Payload", "payload"]

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
"""Canonical operation name (see :func:`hespas.costs.table.canonical_name`) -> kind."""


class Payload(NamedTuple):
    """Sizes of a collective [bytes]. ``comm_bytes`` is the size that Chakra defines, and ``sent_bytes`` the
    bytes that one device sends.

    ``is_bound`` is True if both are upper bounds, because the sizes are run-time values.
    """

    comm_bytes: float
    sent_bytes: float
    is_bound: bool = False


def payload(kind: CollectiveKind, operand_bytes: float, result_bytes: float, group_size: int) -> Payload:
    """Return the sizes of one collective. ``sent_bytes`` is unknown if ``group_size`` is -1 (unknown or
    unequal groups).

    For an all-gather ``comm_bytes`` is the size of the shard, for a reduce-scatter of the full input. Both
    are the operand.
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
