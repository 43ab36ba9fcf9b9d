"""Telling HLO from its first bytes: text by its first word, ``HloModuleProto`` by its first fields.

Messages: ``xla/service/hlo.proto`` of openxla/xla.
"""

from __future__ import annotations

from hespas.converters.format import Head
from hespas.converters.hlo.scan import Source, begins_headerless

__all__ = ["is_text", "module_bytes", "sniff"]

_CERTAIN, _LIKELY, _NO = 100, 80, 0
_NAME_TAG, _ENTRY_TAG, _COMPUTATION_TAG = 0x0A, 0x12, 0x1A
_MAX_NAME_BYTES = 4096


def is_text(data: bytes) -> bool:
    """Whether the bytes begin as a module does, comments and blanks aside."""
    text, start = _beginning(data)
    return _has_header(text, start) or begins_headerless(text, start)


def _beginning(data: bytes) -> tuple[str, int]:
    text = data[: 1 << 16].decode("utf-8-sig", "replace")
    return text, Source(text, "").skip_space(0)


def _has_header(text: str, start: int) -> bool:
    return text.startswith("HloModule", start) and not text[start + 9 : start + 10].isalnum()


def _field(data: bytes, position: int, tag: int) -> tuple[bytes, int] | None:
    """A short length-delimited field at ``position``: its content and where it ends."""
    if data[position : position + 1] != bytes([tag]):
        return None
    length, shift, cursor = 0, 0, position + 1
    while cursor < len(data) and shift < 35:
        byte = data[cursor]
        length |= (byte & 0x7F) << shift
        cursor, shift = cursor + 1, shift + 7
        if byte < 0x80:
            return data[cursor : cursor + min(length, _MAX_NAME_BYTES)], cursor + length
    return None


def _is_module(data: bytes) -> bool:
    """Whether the bytes begin as ``HloModuleProto`` does: module name, entry name, then a computation whose
    first field is its own name (fields 1, 2, 3).
    """
    module = _field(data, 0, _NAME_TAG)
    entry = _field(data, module[1], _ENTRY_TAG) if module else None
    computation = _field(data, entry[1], _COMPUTATION_TAG) if entry else None
    name = _field(computation[0], 0, _NAME_TAG) if computation else None
    if module is None or entry is None or name is None:
        return False
    return all(part[0].isascii() and part[0].decode("ascii").isprintable() for part in (module, entry))


def module_bytes(data: bytes) -> bytes | None:
    """The ``HloModuleProto`` in a binary file: the file itself, or the first field of an ``HloProto`` (what
    ``--xla_dump_hlo_as_proto`` writes); None for anything else.
    """
    if _is_module(data):
        return data
    start = _field(data, 0, _NAME_TAG)
    if start is None or not _is_module(start[0]):
        return None
    content, end = start
    return data[data.index(content) : end]


def sniff(head: Head) -> int:
    """How surely an input is HLO."""
    if head.is_directory:
        return _NO
    if is_text(head.data):
        return _CERTAIN if _has_header(*_beginning(head.data)) else _LIKELY
    return _NO if module_bytes(head.data) is None else _LIKELY
