"""Atomic output: a temporary name beside the destination, fsync, rename. Nothing half-made is visible."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from hespas.graph.errors import OutputError

__all__ = ["check_destination", "write_atomically"]

_RANK_FILE = re.compile(r"^.+\.[0-9]+\.et(\.gz)?$")
_FEW_FILES = 16
_FLUSHES_AT_ONCE = 8


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` where writing cannot succeed, before any work is done."""
    parent = destination.parent
    if not parent.is_dir():
        raise OutputError("the folder does not exist", path=str(parent), hint=f"mkdir -p {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError("the folder is not writable", path=str(parent), hint="choose another destination")
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if destination.exists() and not overwrite:
        raise OutputError("exists already", path=str(destination), hint="add --overwrite to replace it")


def write_atomically(
    destination: Path, write: Callable[[Path], None], *, overwrite: bool, directory: bool
) -> int:
    """Let ``write`` fill a temporary path, then put it in place; returns the bytes written.

    A directory appears as a whole. Over an existing directory its files are replaced one by one, each
    atomically, and no other file is touched; rank files of a larger earlier set would survive and spoil the
    new set, so they are an ``OutputError``. Links are followed. A failure of any kind removes the temporary.
    """
    check_destination(destination, overwrite=overwrite)
    target = destination.resolve()
    if target.exists() and target.is_dir() != directory:
        kind = "a directory" if target.is_dir() else "a file"
        raise OutputError(
            f"exists and is {kind}", path=str(destination), hint="choose another destination or format"
        )
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(6).hex()}.partial")
    try:
        write(temporary)
        written = _sync(temporary)
        _put_in_place(temporary, target)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            path=str(destination),
            hint="free some space or choose another destination",
        ) from error
    finally:
        _remove(temporary)
    return written


def _sync(path: Path) -> int:
    """Flush a file, or a directory with its files, to the disk; returns the bytes of the files.

    A flush is one wait for the disk, so many files are flushed at once.
    """
    if not path.is_dir():
        return _flush(path)
    files = sorted(path.iterdir())
    if len(files) > _FEW_FILES:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_FLUSHES_AT_ONCE) as pool:
            total = sum(pool.map(_flush, files))
    else:
        total = sum(map(_flush, files))
    _flush(path)
    return total


def _flush(path: Path) -> int:
    """Flush one file or directory; returns its size."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def _put_in_place(temporary: Path, target: Path) -> None:
    if not temporary.is_dir():
        temporary.replace(target)
    elif target.is_dir() and any(target.iterdir()):
        _replace_files(temporary, target)
    else:
        temporary.rename(target)
    _flush(target.parent)


def _replace_files(temporary: Path, target: Path) -> None:
    fresh = {file.name for file in temporary.iterdir()}
    stale = [file.name for file in target.iterdir() if _RANK_FILE.match(file.name) and file.name not in fresh]
    if stale:
        raise OutputError(
            f"holds {len(stale)} rank files of an earlier set that would mix with the new one: "
            f"{', '.join(sorted(stale)[:3])}",
            path=str(target),
            hint="remove them or choose another destination",
        )
    for file in sorted(temporary.iterdir()):
        file.replace(target / file.name)


def _remove(temporary: Path) -> None:
    if temporary.is_dir():
        import shutil

        shutil.rmtree(temporary, ignore_errors=True)
    else:
        temporary.unlink(missing_ok=True)
