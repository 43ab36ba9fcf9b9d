"""A model of one product as ONNX: some forty bytes of protobuf, which need no library.

Field numbers are those of the ONNX specification (``onnx.proto``, IR version 8).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["matmul_model"]

_IR_VERSION, _OPSET = 8, 13
_FLOAT = 1


def matmul_model(m: int, n: int, k: int) -> bytes:
    """``y = x w`` with x (m, k) given and w (k, n) a weight without values."""
    node = _text(1, "x") + _text(1, "w") + _text(2, "y") + _text(3, "product") + _text(4, "MatMul")
    weight = b"".join(_number(1, extent) for extent in (k, n)) + _number(2, _FLOAT) + _text(8, "w")
    graph = (
        _message(1, node)
        + _text(2, "product")
        + _message(5, weight)
        + _message(11, _tensor("x", (m, k)))
        + _message(12, _tensor("y", (m, n)))
    )
    opset = _text(1, "") + _number(2, _OPSET)
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, opset)


def _tensor(name: str, shape: Sequence[int]) -> bytes:
    extents = b"".join(_message(1, _number(1, extent)) for extent in shape)
    return _text(1, name) + _message(2, _message(1, _number(1, _FLOAT) + _message(2, extents)))


def _varint(value: int) -> bytes:
    digits: list[int] = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _text(number: int, text: str) -> bytes:
    return _message(number, text.encode())
