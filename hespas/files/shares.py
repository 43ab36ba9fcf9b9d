"""A folder that several processes fill, on as many machines: each writes a share of its files.

The first share makes the folder, and in it a mark for each share that is missing, a file
``.NAME.ranks-A-B.missing``. A share that joins moves its files in, each at once, and takes its mark away.
When all are there no mark is left, and the folder is as one process would have written it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hespas.graph.errors import OutputError

__all__ = ["MISSING", "Share", "file_names", "missing_ranks"]

MISSING = re.compile(r"\.(?P<name>.+)\.ranks-(?P<first>[0-9]{1,10})-(?P<last>[0-9]{1,10})\.missing")
"""The mark of a share that is not there yet: its ranks are among these."""


@dataclass(frozen=True, slots=True)
class Share:
    """The ``number``-th (from 1) of ``spans``, the first and last rank of each share, of the files
    ``file_name.RANK.*``; ``key`` is a checksum of what all of them hold.
    """

    number: int
    spans: tuple[tuple[int, int], ...]
    file_name: str
    key: str

    @property
    def name(self) -> str:
        """``1-of-4``."""
        return f"{self.number}-of-{len(self.spans)}"

    def mark(self, folder: Path) -> Path:
        """The file that says that this share is missing."""
        return self._mark(folder, self.number)

    def mark_others(self, folder: Path) -> None:
        """Say that all other shares are missing."""
        for number in range(1, len(self.spans) + 1):
            if number != self.number:
                self._mark(folder, number).write_text(f"{self.key}\n", encoding="utf-8")

    def check(self, folder: Path, *, overwrite: bool) -> None:
        """Raise ``OutputError`` where this share cannot join what is in a folder."""
        try:
            key = self.mark(folder).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            key = ""
        if key == self.key:
            return
        if key:
            raise OutputError(
                "holds shares of another job, or of other options",
                path=str(folder),
                hint="give all shares the same input and options, or choose another destination",
            )
        own = self._names(folder)
        if not own:
            raise OutputError(
                f"exists already, and share {self.number} of {len(self.spans)} is not missing in it",
                path=str(folder),
                hint="choose another destination, or remove the folder before the first share is written",
            )
        if not overwrite:
            raise OutputError(
                f"holds share {self.number} of {len(self.spans)} already",
                path=str(folder),
                hint="add `overwrite` to write it again",
            )

    def _mark(self, folder: Path, number: int) -> Path:
        first, last = self.spans[number - 1]
        return folder / f".{self.file_name}.ranks-{first}-{last}.missing"

    def _names(self, folder: Path) -> bool:
        """Whether files of this share are in a folder."""
        first, last = self.spans[self.number - 1]
        start = f"{self.file_name}.{first}."
        return first <= last and any(name.startswith(start) for name in file_names(folder))


def missing_ranks(names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """First and last rank of each share that is said to be missing among files of these names."""
    for name in names:
        match = MISSING.fullmatch(name)
        if match is not None:
            yield int(match["first"]), int(match["last"])


def file_names(folder: Path) -> list[str]:
    """The names of all that is in a folder."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)
