"""Bytes that collectives send, by kind."""

from __future__ import annotations

from math import isnan

import pytest

from hespas.costs.payloads import payload
from hespas.graph import CollectiveKind

MIB = float(1 << 20)


@pytest.mark.parametrize(
    ("kind", "operand", "result", "comm", "sent"),
    [
        (CollectiveKind.ALL_REDUCE, 4 * MIB, 4 * MIB, 4 * MIB, 6 * MIB),
        (CollectiveKind.ALL_GATHER, MIB, 4 * MIB, MIB, 3 * MIB),
        (CollectiveKind.REDUCE_SCATTER, 4 * MIB, MIB, 4 * MIB, 3 * MIB),
        (CollectiveKind.ALL_TO_ALL, 4 * MIB, 4 * MIB, 4 * MIB, 3 * MIB),
        (CollectiveKind.BROADCAST, MIB, MIB, MIB, MIB),
        (CollectiveKind.REDUCE, MIB, MIB, MIB, MIB),
    ],
)
def test_four_devices(kind: CollectiveKind, operand: float, result: float, comm: float, sent: float) -> None:
    found = payload(kind, operand, result, 4)
    assert (found.comm_bytes, found.sent_bytes, found.is_bound) == (comm, sent, False)


@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_a_group_of_one_sends_nothing(kind: CollectiveKind) -> None:
    assert payload(kind, MIB, MIB, 1).sent_bytes == 0


def test_groups_of_unknown_size_leave_sent_bytes_unknown() -> None:
    found = payload(CollectiveKind.ALL_REDUCE, MIB, MIB, -1)
    assert found.comm_bytes == MIB
    assert isnan(found.sent_bytes)


def test_ragged_exchange_is_bounded_by_its_result() -> None:
    found = payload(CollectiveKind.RAGGED_ALL_TO_ALL, MIB, 2 * MIB, 4)
    assert (found.comm_bytes, found.sent_bytes, found.is_bound) == (2 * MIB, 1.5 * MIB, True)
