"""Files of unfinished output, next to its destination: temporaries, and marks of missing shares.

A temporary name with a process id belongs to that process and is removed with it. A name with a key belongs
to any process that writes the same bytes to the same destination: it outlives an interrupted run, and the
next run resumes it.

Several processes, on one or several machines, can fill one folder: each writes a share of its files. The
first share makes the folder, with a mark ``.NAME.ranks-A-B.missing`` for each missing share. A share that
joins moves its files in, each atomically, and removes its mark. When all shares are present no mark is left,
and the folder is equal to the output of one process.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hespas.graph.errors import OutputError

__all__ = [
    "MISSING_MARK",
    "OutputShare",
    "file_names",
    "lock_folder",
    "missing_ranks",
    "remove_path",
    "remove_stale_temporaries",
    "resumable_beside",
    "temporary_beside",
]


_NAME = re.compile(
    r"\.(?P<target>.+)\.(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)-(?P<host>[0-9a-f]{8})-[0-9a-f]+\.partial"
)

_RESUMABLE = re.compile(r"\.(?P<target>.+)\.(?P<key>[0-9a-f]{16})(-[0-9]+-of-[0-9]+)?\.kept\.partial")

_TRIES = 20

_START_FIELD = 19
"""Index of the start time (ticks since boot) in ``/proc/PID/stat``, after the program name."""


def temporary_beside(target: Path) -> Path:
    """Return a new temporary name in the folder of ``target``. The name identifies this process and this
    machine.
    """
    pid = os.getpid()
    name = f".{_shortened(target)}.{pid:x}-{_started(pid):x}-{_host_id():08x}-{os.urandom(4).hex()}.partial"
    return target.with_name(name)


def resumable_beside(target: Path, key: str, part: str = "") -> Path:
    """Return the temporary name of resumable output, in the folder of ``target``.

    ``key`` is a checksum of the content, as 16 hexadecimal digits. ``part`` names a share of the output
    (``1-of-4``).
    """
    suffix = f"-{part}" if part else ""
    return target.with_name(f".{_shortened(target)}.{key}{suffix}.kept.partial")


def lock_folder(folder: Path) -> int:
    """Make or reuse a resumable folder and lock it for this process.

    Returns the handle to close afterwards, -1 if the file system has no locks. Raises ``OutputError`` if
    another process holds the lock.
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
    """Remove the temporaries that ended processes left from earlier writes to ``target``.

    With a ``key``, resumable output with another key is removed too. Temporaries of running processes and of
    other machines are not removed.
    """
    wanted, host = _shortened(target), f"{_host_id():08x}"
    for entry in target.parent.glob(".*.partial"):
        resumable = _RESUMABLE.fullmatch(entry.name)
        if resumable is not None:
            if key and resumable["target"] == wanted and resumable["key"] != key:
                with suppress(OutputError):  # another process has it
                    handle = lock_folder(entry)
                    remove_path(entry)
                    if handle >= 0:
                        os.close(handle)
            continue
        match = _NAME.fullmatch(entry.name)
        if match is None or match["target"] != wanted or match["host"] != host:
            continue
        if _started(int(match["pid"], 16)) != int(match["start"], 16):
            remove_path(entry)


def remove_path(path: Path) -> None:
    """Remove a file or a folder if it exists, also one that another process still writes to."""
    for _ in range(_TRIES):
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(path, ignore_errors=True)


def _shortened(target: Path) -> str:
    """Return the name of the target for use in a temporary name. A name that is too long is cut and gets a
    checksum.
    """
    name, spelled = target.name, os.fsencode(target.name)
    return name if len(spelled) <= 100 else f"{name[:20]}~{zlib.crc32(spelled):08x}"


def _started(pid: int) -> int:
    """Return the start time of a process, 0 if it is unknown or the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return int(stat.rpartition(")")[2].split()[_START_FIELD])
    except (OSError, IndexError, ValueError):
        return 0


def _host_id() -> int:
    """Return a number that identifies this machine since its start, and its namespace of process ids."""
    parts: list[str] = []
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append(os.uname().nodename if hasattr(os, "uname") else "")
    return zlib.crc32("\n".join(parts).encode())


MISSING_MARK = re.compile(r"\.(?P<name>.+)\.ranks-(?P<first>[0-9]{1,10})-(?P<last>[0-9]{1,10})\.missing")
"""Return the file name of the target. A name too long for a temporary is cut and followed by a checksum."""


@dataclass(frozen=True, slots=True)
class OutputShare:
    """One of several shares of the files ``file_name.RANK.*``. Each share has consecutive ranks and is
    written by one process.

    ``number`` is the number of this share, from 1. ``spans`` are the first and last rank of each share.
    ``key`` is a checksum of the content of all shares.
    """

    number: int
    spans: tuple[tuple[int, int], ...]
    file_name: str
    key: str

    @property
    def name(self) -> str:
        """Return the name of the share, such as ``1-of-4``."""
        return f"{self.number}-of-{len(self.spans)}"

    def mark(self, folder: Path) -> Path:
        """Return the path of the marker file for this share. Its presence shows that the share is missing."""
        return self._mark(folder, self.number)

    def mark_others(self, folder: Path) -> None:
        """Write into ``folder`` a marker file for each of the other shares, which are still missing."""
        for number in range(1, len(self.spans) + 1):
            if number != self.number:
                self._mark(folder, number).write_text(f"{self.key}\n", encoding="utf-8")

    def check(self, folder: Path, *, overwrite: bool) -> None:
        """Raise ``OutputError`` if the files of this share cannot be added to the content of a folder."""
        try:
            key = self.mark(folder).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            key = ""
        if key == self.key:
            return
        if key:
            raise OutputError(
                "contains shares of another job or of other options",
                path=str(folder),
                hint="give all shares the same input and options, or choose another destination",
            )
        first, last = self.spans[self.number - 1]
        start = f"{self.file_name}.{first}."
        is_present = first <= last and any(name.startswith(start) for name in file_names(folder))
        if not is_present:
            raise OutputError(
                f"exists and has no mark of share {self.number} of {len(self.spans)} as missing",
                path=str(folder),
                hint="choose another destination, or remove the folder before the first share is written",
            )
        if not overwrite:
            raise OutputError(
                f"already contains share {self.number} of {len(self.spans)}",
                path=str(folder),
                hint="add `overwrite` to write it again",
            )

    def _mark(self, folder: Path, number: int) -> Path:
        first, last = self.spans[number - 1]
        return folder / f".{self.file_name}.ranks-{first}-{last}.missing"


def missing_ranks(names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and last rank of each missing share, from the marker files among these file names."""
    for name in names:
        match = MISSING_MARK.fullmatch(name)
        if match is not None:
            yield int(match["first"]), int(match["last"])


def file_names(folder: Path) -> list[str]:
    """Return the names of all entries of a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)
