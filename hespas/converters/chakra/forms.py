"""File forms of Chakra traces: binary (``.et``) and JSON (:mod:`.json.files`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hespas.converters.chakra import RANK_FILE
from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.wire import Bytes
from hespas.converters.chakra.wire.decode import FrameBatch, frames, open_trace

__all__ = ["BINARY", "TraceForm"]


@dataclass(frozen=True, slots=True)
class TraceForm:
    """File form of Chakra traces: the encoding of the messages in a file, and the names of the files.

    ``rank_file`` matches the file name of one rank, with groups ``name`` and ``rank``. ``ending`` matches the
    suffixes of a file name. ``batches`` reads a file as batches of messages (the second argument limits the
    decompressed bytes) and reports faults. ``content`` converts pieces of a binary trace to pieces of a file
    in this form. ``version`` is the schema version of all files, if the form has only one. ``findings`` are
    (diagnostic code, message) pairs about nodes that other readers of the form misread.
    """

    name: str
    suffix: str
    rank_file: re.Pattern[str]
    ending: re.Pattern[str]
    batches: Callable[[Path, int | None, Faults], Iterator[FrameBatch]]
    content: Callable[[Iterable[Bytes]], Iterable[Bytes]]
    version: str = ""
    findings: tuple[tuple[str, str], ...] = ()

    def stem(self, name: str) -> str:
        """Return a file name without the suffixes of this form of traces."""
        return self.ending.sub("", name) or name


BINARY = TraceForm(
    name="chakra",
    suffix=".et",
    rank_file=RANK_FILE,
    ending=re.compile(r"(\.e[tg])?(\.gz)?$"),
    batches=lambda path, max_bytes, _: frames(open_trace(path, max_bytes)),
    content=iter,
)
"""Frames of protobuf messages."""
