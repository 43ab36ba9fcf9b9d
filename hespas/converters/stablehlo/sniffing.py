"""Tells StableHLO inputs by content, without jaxlib."""

from __future__ import annotations

import re

from hespas.converters.format import Head

__all__ = ["BYTECODE_MAGIC", "looks_like_text", "sniff"]

BYTECODE_MAGIC = b"ML\xefR"

_DIALECTS = (b"stablehlo.", b"func.func", b"vhlo.", b"mhlo.", b"chlo.")
_MAX_EXPORT_HEAD = 4_096
_COMMENTS = re.compile(rb"(?:\s+|//[^\n]*(?:\n|\Z))*")
_TEXT_START = re.compile(
    rb'(?:"?(?:builtin\.)?module\b|"?func\.func\b|"?sdy\.mesh\b|"?vhlo\.|"?stablehlo\.|#[A-Za-z_][\w.$]*\s*=|![A-Za-z_]\w*\s*=|\{-#)'
)


def looks_like_text(data: bytes) -> bool:
    """Whether the bytes start, after comments, like an MLIR program."""
    start = _COMMENTS.match(data)
    return _TEXT_START.match(data, start.end() if start else 0) is not None


def sniff(head: Head) -> int:
    """100 for bytecode, 95 for text with operations, 90 for an export file, less for what only looks like
    MLIR.
    """
    data = head.data
    if head.is_directory or not data:
        return 0
    if data.startswith(BYTECODE_MAGIC):
        return 100
    if 0 < data.find(BYTECODE_MAGIC) <= _MAX_EXPORT_HEAD:
        return 90
    if looks_like_text(data):
        return 95 if any(name in data for name in _DIALECTS) else 60
    # A comment may fill the head, and some exporters start in the middle of a comment.
    return 70 if b"stablehlo." in data and b"func.func" in data else 0
