"""Files of unfinished output"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hespas.graph.errors import OutputError

__all__ = [
    "MISSING",
    "Share",
    "file_names",
    "hold",
    "kept_beside",
    "missing_ranks",
    "remove",
    "remove_stale_temporaries",
    "temporary_beside",
]


_NAME = re.compile(
    r"\.(?P<target>.+)\.(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)-(?P<place>[0-9a-f]{8})-[0-9a-f]+\.partial"
)

_KEPT = re.compile(r"\.(?P<target>.+)\.(?P<key>[0-9a-f]{16})(-[0-9]+-of-[0-9]+)?\.kept\.partial")

_TRIES = 20

_START_FIELD = 19
"""Of ``/proc/PID/stat`` behind the name of the program: when the process started, in ticks since boot."""


def temporary_beside(target: Path) -> Path:
    """A new name in the folder of ``target`` that says which process of which machine uses it."""
    pid = os.getpid()
    name = f".{_shortened(target)}.{pid:x}-{_started(pid):x}-{_place():08x}-{os.urandom(4).hex()}.partial"
    return target.with_name(name)


def kept_beside(target: Path, key: str, part: str = "") -> Path:
    """The name in the folder of ``target`` for what is written under a key of 16 hexadecimal digits, or for a
    ``part`` of it (``1-of-4``).
    """
    behind = f"-{part}" if part else ""
    return target.with_name(f".{_shortened(target)}.{key}{behind}.kept.partial")


def hold(folder: Path) -> int:
    """Make a kept folder, or take it over, so that no other process has it; the handle to close afterwards,
    -1 where the file system knows no locks. Raises ``OutputError`` where another process has it.
    """
    folder.mkdir(exist_ok=True)
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return -1
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise OutputError(
            "another process is writing this",
            path=str(folder),
            hint="wait for it, or stop it; each share of a job is for one process",
        ) from error
    except OSError:
        os.close(handle)
        return -1
    return handle


def remove_stale_temporaries(target: Path, key: str = "") -> None:
    """Remove what processes that are no more have left of earlier writes to ``target``: also what was kept
    for another run, if there is a ``key`` and it has another one.

    What a running process, another machine or an unknown one makes stays.
    """
    wanted, place = _shortened(target), f"{_place():08x}"
    for entry in target.parent.glob(".*.partial"):
        kept = _KEPT.fullmatch(entry.name)
        if kept is not None:
            if key and kept["target"] == wanted and kept["key"] != key:
                _remove_free(entry)
            continue
        match = _NAME.fullmatch(entry.name)
        if match is None or match["target"] != wanted or match["place"] != place:
            continue
        if _started(int(match["pid"], 16)) != int(match["start"], 16):
            remove(entry)


def _remove_free(folder: Path) -> None:
    """Remove a kept folder unless a process has it."""
    try:
        handle = hold(folder)
    except OutputError:
        return
    remove(folder)
    if handle >= 0:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; also one that others still fill, who will find out."""
    for _ in range(_TRIES):
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(path, ignore_errors=True)


def _shortened(target: Path) -> str:
    """The name of the target, cut where the longest file name would be exceeded; then told by a checksum."""
    name, spelled = target.name, os.fsencode(target.name)
    return name if len(spelled) <= 100 else f"{name[:20]}~{zlib.crc32(spelled):08x}"


def _started(pid: int) -> int:
    """When a process started, 0 where it is not known or not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return int(stat.rpartition(")")[2].split()[_START_FIELD])
    except (OSError, IndexError, ValueError):
        return 0


def _place() -> int:
    """A number for this machine since it was started, and for the process numbers in use here."""
    parts: list[str] = []
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append(os.uname().nodename if hasattr(os, "uname") else "")
    return zlib.crc32("\n".join(parts).encode())


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
