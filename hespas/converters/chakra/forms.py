"""Forms of trace files: the binary one, and JSON (:mod:`.json.files`)."""

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
    """How the frames of a trace are stored in a file.

    ``rank_file`` is the pattern of the name of a rank's file, with groups ``name`` and ``rank``, and
    ``ending`` that of the part of a file name that is not its own. ``batches`` reads the frames of a file, up
    to ``max_bytes`` if it is compressed; findings go to the faults. ``content`` returns the pieces of a file
    for the pieces of the binary form. ``version`` is the schema of all files, if the form has only one.
    ``findings`` are messages by code about nodes that readers of the form misread.
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
        """Return a file name without the suffixes of the form."""
        return self.ending.sub("", name) or name


def _frames_of(path: Path, max_bytes: int | None, _: Faults) -> Iterator[FrameBatch]:
    return frames(open_trace(path, max_bytes))


def _unchanged(pieces: Iterable[Bytes]) -> Iterable[Bytes]:
    return pieces


BINARY = TraceForm(
    name="chakra",
    suffix=".et",
    rank_file=RANK_FILE,
    ending=re.compile(r"(\.e[tg])?(\.gz)?$"),
    batches=_frames_of,
    content=_unchanged,
)
"""Frames of protobuf messages."""
