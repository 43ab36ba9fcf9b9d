"""The walker of all fields against the protobuf library and against a plain walk of one message at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.chakra.wire import ByteWindow, offsets_of
from hespas.converters.chakra.wire.walk import WireFields, walk
from tests.converters.chakra.historic_protos import classes

_SETTINGS = settings(max_examples=80)


def _walk(*messages: bytes) -> WireFields:
    offsets = offsets_of(np.array([len(message) for message in messages], np.int64))
    window = ByteWindow.holding(np.frombuffer(b"".join(messages), np.uint8))
    return walk(window, offsets[:-1], offsets[1:])


def _plain(message: bytes) -> list[tuple[int, int]] | None:
    """(tag, value or length) of each field, None for a malformed message."""
    fields: list[tuple[int, int]] = []
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if at < 0 or not 8 <= tag < 1 << 32 or tag & 7 not in (0, 1, 2, 5):
            return None
        size = {1: 8, 5: 4}.get(tag & 7)
        value, behind = (0, at + size) if size else _varint(message, at)
        if size:
            value = int.from_bytes(message[at:behind], "little")
        if behind < 0:
            return None
        behind += value if tag & 7 == 2 else 0
        if behind > len(message):
            return None
        fields.append((tag, value))
        at = behind
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    for place in range(at, min(at + 10, len(message))):
        if message[place] < 0x80:
            groups = [byte & 0x7F for byte in message[at : place + 1]]
            return sum(group << 7 * number for number, group in enumerate(groups)) & (1 << 64) - 1, place + 1
    return 0, -1


_MESSAGES = st.lists(
    st.binary(max_size=12)
    | st.lists(
        st.sampled_from(
            [b"\x08\x05", b"\x12\x02ab", b"\x1a\x00", b"\x25abcd", b"\x31abcdefgh", b"\x92\x01\x01x"]
        ),
        max_size=90,
    ).map(b"".join),
    max_size=5,
)


@_SETTINGS
@given(messages=_MESSAGES)
def test_walking_many_is_walking_each(messages: list[bytes]) -> None:
    found = _walk(*messages)
    plain = [_plain(message) for message in messages]
    assert found.bad.tolist() == [fields is None for fields in plain]
    for row, fields in enumerate(plain):
        own = found.owner == row
        if fields is not None:
            assert list(zip(found.tag[own].tolist(), found.value[own].tolist(), strict=True)) == fields


@pytest.mark.parametrize("packed", [False, True])
@_SETTINGS
@given(lists=st.lists(st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 3), max_size=80), max_size=4))
def test_repeated_integers_packed_or_not(packed: bool, lists: list[list[int]]) -> None:
    made = classes("0.0.2", packed=packed)["Node"]
    nodes: list[Any] = [made(id=1, name="n", type=0, parent=values) for values in lists]
    found, bad = _walk(*(node.SerializeToString() for node in nodes)).integers(4)
    assert bad is None or not bad.any()
    assert found.values.tolist() == [value for values in lists for value in values]
    assert np.diff(found.offsets).tolist() == [len(values) for values in lists]


def test_both_kinds_of_lists_in_one_message_keep_their_order() -> None:
    found, bad = _walk(b"\x20\x07\x22\x02\x01\x02\x20\x09\x22\x00", b"", b"\x22\x01\x05").integers(4)
    assert bad is None
    assert found.values.tolist() == [7, 1, 2, 9, 5]
    assert found.offsets.tolist() == [0, 4, 4, 5]


def test_a_malformed_packed_list_is_marked() -> None:
    _, bad = _walk(b"\x22\x01\x05", b"\x22\x01\x85").integers(4)
    assert bad is not None
    assert bad.tolist() == [False, True]


def test_the_last_value_counts() -> None:
    fields = _walk(b"\x08\x01\x12\x01a\x08\x02\x12\x02bc", b"\x08\x07")
    assert fields.scalar(8).tolist() == [2, 7]
    start, length = fields.span(2)
    assert bytes(fields.window.u8[start[0] : start[0] + length[0]]) == b"bc"
    assert length.tolist() == [2, 0]
