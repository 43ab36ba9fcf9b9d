"""Tells StableHLO inputs by content, without jaxlib. A folder is one that our writer made of rank classes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hespas.converters.format import Head
from hespas.files.streams import open_input

__all__ = ["BYTECODE_MAGIC", "CLASS_MARK", "class_files", "looks_like_text", "sniff"]

CLASS_MARK = "// Rank class"
"""Starts the line that says which of several programs this is."""

BYTECODE_MAGIC = b"ML\xefR"

_DIALECTS = (b"stablehlo.", b"func.func", b"vhlo.", b"mhlo.", b"chlo.")
_MAX_EXPORT_HEAD = 4_096
_CLASS_FILE = re.compile(r"(.*)\.(0|[1-9]\d{0,6})\.mlir")
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
    if head.is_directory:
        return _sniff_folder(head)
    if not data:
        return 0
    if data.startswith(BYTECODE_MAGIC):
        return 100
    if 0 < data.find(BYTECODE_MAGIC) <= _MAX_EXPORT_HEAD:
        return 90
    if looks_like_text(data):
        return 95 if any(name in data for name in _DIALECTS) else 60
    # A comment may fill the head, and some exporters start in the middle of a comment.
    return 70 if b"stablehlo." in data and b"func.func" in data else 0


def class_files(names: Iterable[str]) -> dict[int, str]:
    """File names by class where all are ``NAME.{class}.mlir`` of one name, ascending; else nothing."""
    found = [_CLASS_FILE.fullmatch(name) for name in names if not name.startswith(".")]
    matches = [match for match in found if match is not None]
    if len(matches) < len(found) or len({match[1] for match in matches}) != 1:
        return {}
    return dict(sorted((int(match[2]), match[0]) for match in matches))


def _sniff_folder(head: Head) -> int:
    """A name alone could be that of any program: the first file says whether it is of a rank class."""
    files = class_files(head.names)
    if not files:
        return 0
    try:
        with open_input(Path(head.path) / next(iter(files.values()))) as stream:
            start = stream.read(_MAX_EXPORT_HEAD)
    except OSError:
        return 0
    return 100 if CLASS_MARK.encode() in start else 0
