"""Protobuf's wire format, against Google's own encoder."""

from __future__ import annotations

import pytest
from google.protobuf.wrappers_pb2 import UInt64Value
from hypothesis import given
from hypothesis import strategies as st

from hespas.files.wire import (
    BYTES,
    FIXED64,
    VARINT,
    WireError,
    decode_varint,
    encode_varint,
    field_bytes,
    fields,
    fixed64,
    signed,
    tag,
)

_U64 = st.integers(0, (1 << 64) - 1)


@given(_U64)
def test_varints_are_those_of_protobuf(value: int) -> None:
    data = encode_varint(value)
    reference = UInt64Value(value=value).SerializeToString()
    assert reference == (tag(1, VARINT) + data if value else b"")
    assert decode_varint(b"\x01" + data, 1, len(data) + 1) == (value, len(data) + 1)


@given(st.integers(1, (1 << 29) - 1), _U64, st.binary(max_size=40))
def test_fields_are_read_as_they_were_written(number: int, value: int, content: bytes) -> None:
    data = field_bytes(number, value) + field_bytes(number, content) + fixed64(number, value)
    first, second, third = fields(data, 0, len(data))
    assert first == (number, VARINT, value, len(tag(number, VARINT)) + len(encode_varint(value)))
    assert second[:2] == (number, BYTES)
    assert data[second[2] : second[3]] == content
    assert third == (number, FIXED64, value, len(data) - 8)
    assert signed(value) % (1 << 64) == value


@pytest.mark.parametrize(
    ("data", "problem", "position"),
    [
        (b"\x08\x80", "cut off", 1),
        (b"\x08" + b"\x80" * 10 + b"\x01", "longer than ten bytes", 1),
        (b"\x0a\x05abc", "reaches beyond its message", 0),
        (b"\x09abc", "reaches beyond its message", 0),
        (b"\x00\x01", "field number 0", 0),
        (b"\x0b", "wire type 3", 0),
    ],
)
def test_what_is_no_message_is_told_with_its_place(data: bytes, problem: str, position: int) -> None:
    with pytest.raises(WireError, match=problem) as caught:
        list(fields(data, 0, len(data)))
    assert caught.value.position == position
