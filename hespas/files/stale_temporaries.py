"""Names of temporaries that say who makes them, so that those of a process that was killed can be removed."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from pathlib import Path

__all__ = ["remove", "remove_leftovers", "temporary_beside"]

_NAME = re.compile(
    r"\.(?P<target>.+)\.(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)-(?P<place>[0-9a-f]{8})-[0-9a-f]+\.partial"
)
_START_FIELD = 19
"""Of ``/proc/PID/stat`` behind the name of the program: when the process started, in ticks since boot."""


def temporary_beside(target: Path) -> Path:
    """A new name in the folder of ``target`` that says which process of which machine uses it."""
    pid = os.getpid()
    name = f".{_shortened(target)}.{pid:x}-{_started(pid):x}-{_place():08x}-{os.urandom(4).hex()}.partial"
    return target.with_name(name)


def remove_leftovers(target: Path) -> None:
    """Remove what processes that are no more have left of earlier writes to ``target``.

    What a running process, another machine or an unknown one makes stays.
    """
    wanted, place = _shortened(target), f"{_place():08x}"
    for entry in target.parent.glob(".*.partial"):
        match = _NAME.fullmatch(entry.name)
        if match is None or match["target"] != wanted or match["place"] != place:
            continue
        if _started(int(match["pid"], 16)) != int(match["start"], 16):
            remove(entry)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
