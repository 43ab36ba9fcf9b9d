"""Where in a JSON text a fault stands: the byte and line of a path like ``$.nodes[3].flops``."""

from __future__ import annotations

import re

import msgspec
import numpy as np

__all__ = ["byte_of_path", "offset_in", "position_text", "split_message"]

_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_AT_PATH = re.compile(r"^(?P<message>.*?)(?: - at `(?P<where>key in )?(?P<path>\$[^`]*)`)?$", re.DOTALL)
_AT_BYTE = re.compile(r"^(?:JSON is malformed: )?(?P<message>.*) \(byte (?P<byte>\d+)\)$", re.DOTALL)

_MAX_SPLIT = 1 << 22
"""Lists with more commas are not split to say where an item of theirs starts: that takes memory."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def split_message(text: str) -> tuple[str, str, int]:
    """A decoder's message, the JSON path it names (``$`` where none) and the byte it names (-1 for none)."""
    at_byte = _AT_BYTE.match(text)
    if at_byte:
        return at_byte["message"], "$", int(at_byte["byte"])
    at_path = _AT_PATH.match(text)
    if at_path is None:
        return text, "$", -1
    return at_path["message"], at_path["path"] or "$", -1


def offset_in(whole: bytes | msgspec.Raw, part: msgspec.Raw) -> int:
    """Where a raw value starts in the text it was cut from: raw values share the text's memory."""
    return _address(memoryview(part)) - _address(memoryview(whole))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def byte_of_path(text: bytes | msgspec.Raw, path: str) -> int:
    """The byte where the value at ``path`` starts, or the deepest enclosing value that is well formed."""
    current: bytes | msgspec.Raw = text
    for step in _STEP.finditer(path):
        name, index = step.groups()
        if index and _num_commas(current) > _MAX_SPLIT:
            break
        try:
            found = _FIELDS.decode(current)[name] if name else _ITEMS.decode(current)[int(index)]
        except (msgspec.MsgspecError, KeyError, IndexError, RecursionError, UnicodeDecodeError):
            break
        current = found
    return offset_in(text, current) if isinstance(current, msgspec.Raw) else 0


def _num_commas(text: bytes | msgspec.Raw) -> int:
    """One less than the most items a list can have."""
    return int(np.count_nonzero(np.frombuffer(memoryview(text), np.uint8) == ord(",")))


def position_text(data: bytes, byte: int) -> str:
    """``line 3, byte 57``; lines count from 1."""
    line = data.count(b"\n", 0, byte) + 1
    return f"line {line}, byte {byte}"
