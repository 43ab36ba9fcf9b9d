"""Documents to trees of fields and back: JSON, protobuf, words of a text, tables of text.

What was read is written as a sound document as far as a changed tree can be one: lengths, quotes and brackets
are right, so that a change reaches what lies behind a reader's grammar.
"""

from __future__ import annotations

import csv
import io
import json
import re
import struct
from collections.abc import Iterator
from math import isfinite
from typing import cast

from tests.fuzzing.trees import Group, Node, Scalar
from tests.fuzzing.values import Raw

__all__ = [
    "decode_csv",
    "decode_frames",
    "decode_json",
    "decode_text",
    "decode_wire",
    "encode_csv",
    "encode_json",
    "encode_text",
    "encode_wire",
    "text_of",
]


def text_of(node: Node) -> str:
    """A value as a word without quotes."""
    match node:
        case None:
            return ""
        case str():
            return node
        case bytes():
            return node.decode("latin-1")
        case Group():
            return " ".join(text_of(part) for part in node.parts)
        case _:
            return str(node)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- JSON: one document or several, one after the other


def decode_json(data: bytes) -> Group:
    """Objects keep repeated keys: they are groups of pairs."""
    text, decoder = data.decode(), json.JSONDecoder(object_pairs_hook=_object)
    found, at = Group("documents"), 0
    while at < len(text):
        value, end = cast("tuple[object, int]", decoder.raw_decode(text, at))
        found.parts.append(_json_node(value))
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found


def _object(pairs: list[tuple[str, object]]) -> Group:
    return Group("object", [Group("pair", [key, _json_node(value)]) for key, value in pairs])


def _json_node(value: object) -> Node:
    if isinstance(value, list):
        return Group("array", [_json_node(part) for part in cast("list[object]", value)])
    return cast("Node", value)


def encode_json(tree: Group) -> bytes:
    """The documents of a tree."""
    return "\n".join(map(_json, tree.parts)).encode("utf-8", "surrogatepass")


def _json(node: Node) -> str:
    match node:
        case Group(kind="object"):
            return f"{{{', '.join(map(_json_pair, node.parts))}}}"
        case Group(kind="pair"):
            return f"{{{_json_pair(node)}}}"
        case Group():
            return f"[{', '.join(map(_json, node.parts))}]"
        case Raw():
            return str(node)
        case bytes():
            return json.dumps(node.decode("latin-1"))
        case _:
            return json.dumps(node)


def _json_pair(node: Node) -> str:
    if not isinstance(node, Group) or not node.parts:
        return f"{json.dumps(text_of(node))}: null"
    key, *rest = node.parts
    name = key if isinstance(key, str) else text_of(key)
    return f"{json.dumps(name)}: {_json(rest[0]) if rest else 'null'}"


# --- protobuf: fields by number, without a schema

_MOST_DEPTH = 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def decode_wire(data: bytes) -> Group:
    """A message. What reads as one is taken for a message inside it, and printable bytes for a text."""
    found = _message(data, 0)
    if found is None:
        raise ValueError("no message")
    return found


def decode_frames(data: bytes) -> Group:
    """Messages one after the other, each behind its length."""
    found, at = Group("frames"), 0
    while at < len(data):
        size, at = _varint(data, at)
        found.parts.append(decode_wire(data[at : at + size]))
        at += size
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("no varint")


def _message(data: bytes, depth: int) -> Group | None:
    """None where the bytes are no message."""
    found, at = Group("message"), 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            part, at = _field(data, at, tag, depth)
            found.parts.append(part)
    except (ValueError, IndexError, struct.error):
        return None
    return found


def _field(data: bytes, at: int, tag: int, depth: int) -> tuple[Group, int]:
    number, kind = tag >> 3, tag & 7
    if not 0 < number < 1 << 20:
        raise ValueError("no field")
    match kind:
        case 0:
            value, at = _varint(data, at)
            return Group("varint", [number, value]), at
        case 1:
            return Group("fixed64", [number, *struct.unpack_from("<d", data, at)]), at + 8
        case 5:
            return Group("fixed32", [number, *struct.unpack_from("<f", data, at)]), at + 4
        case 2:
            size, at = _varint(data, at)
            content = data[at : at + size]
            if len(content) != size:
                raise ValueError("too short")
            return Group("bytes", [number, _content(content, depth)]), at + size
        case _:
            raise ValueError("no kind")


def _content(content: bytes, depth: int) -> Node:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and text:
        return text
    inner = _message(content, depth + 1) if depth < _MOST_DEPTH else None
    return content if inner is None or not inner.parts else inner


def encode_wire(tree: Group) -> bytes:
    """The message, or the frames of messages."""
    if tree.kind != "frames":
        return _wire_body(tree)
    return b"".join(_sized(_wire_value(part)) for part in tree.parts)


def _wire_body(message: Group) -> bytes:
    return b"".join(_wire_field(part) for part in message.parts)


def _wire_field(node: Node) -> bytes:
    """A field by what its value has become: a text or message is one whatever stood there."""
    if not isinstance(node, Group):
        return _wire_value(node)
    if node.kind in {"message", "frames"}:
        return _wire_body(node)
    number = node.parts[0] if node.parts and isinstance(node.parts[0], int) else 1
    value = node.parts[1] if len(node.parts) > 1 else None
    tag = (number % (1 << 29)) << 3
    if isinstance(value, float) and node.kind == "fixed32":
        return _put(tag | _FIXED32) + struct.pack(
            "<f", value if abs(value) < 3e38 or not isfinite(value) else 3e38
        )
    if isinstance(value, float):
        return _put(tag | _FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return _put(tag | _VARINT) + _put(value)
    return _put(tag | _BYTES) + _sized(_wire_value(value))


def _put(value: int) -> bytes:
    rest = value % (1 << 64)
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _sized(content: bytes) -> bytes:
    return _put(len(content)) + content


def _wire_value(value: Node) -> bytes:
    match value:
        case None:
            return b""
        case bytes():
            return value
        case str():
            return _encoded(value)
        case float() | int():
            return struct.pack("<d", value) if isinstance(value, float) else _put(value)
        case Group(kind="varint" | "fixed64" | "fixed32" | "bytes"):
            return _wire_field(value)
        case Group():
            return _wire_body(value)


# --- texts: words, numbers, quoted texts and signs by line

_WORD = re.compile(r"\s+|\"(?:[^\"\\]|\\.)*\"|[%@#!^$]?[\w.-]+|->|.", re.DOTALL)


def decode_text(data: bytes) -> Group:
    """Lines of words; what stands between words is kept."""
    lines = data.decode().splitlines(keepends=True)
    return Group("text", [Group("line", [*_words(line)]) for line in lines])


def _words(line: str) -> Iterator[str]:
    return (found.group() for found in _WORD.finditer(line))


def encode_text(tree: Group) -> bytes:
    """The lines of a tree."""
    return _encoded("".join(_line(part) for part in tree.parts))


def _line(node: Node) -> str:
    if isinstance(node, Group):
        return "".join(map(_line, node.parts))
    return text_of(node)


# --- tables of text


def decode_csv(data: bytes) -> Group:
    """Rows of cells."""
    rows = csv.reader(io.StringIO(data.decode(), newline=""))
    return Group("table", [Group("row", [*_cells(row)]) for row in rows])


def _cells(row: list[str]) -> Iterator[Scalar]:
    yield from row


def encode_csv(tree: Group) -> bytes:
    """The rows of a tree."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    for row in tree.parts:
        writer.writerow([text_of(cell) for cell in row.parts] if isinstance(row, Group) else [text_of(row)])
    return _encoded(out.getvalue())
