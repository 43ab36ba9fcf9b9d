"""Atomic output: write to a temporary name next to the destination, flush to disk, rename.

Unfinished output is never visible, for a file, a folder, a share of a folder, or the files of a report.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from hespas.files.partial import (
    MISSING_MARK,
    OutputShare,
    file_names,
    lock_folder,
    remove_path,
    remove_stale_temporaries,
    resumable_beside,
    temporary_beside,
)
from hespas.graph.errors import HespasError, OutputError

__all__ = [
    "after_placing",
    "check_destination",
    "check_report_files",
    "exchange",
    "place_immediately",
    "place_together",
    "write_atomically",
    "write_report_files",
]


_RANK_FILE = re.compile(r"^.+\.[0-9]+\.(et|json)(\.gz)?$")

_OF_RANK_FILES = frozenset({"comm_group.json", "rank_map.json"})
"""Names of files that accompany a set of rank files. They are replaced together with the set."""

_FEW_FILES = 16

_FLUSHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _WrittenResult:
    """Output file or folder that is complete but still has its temporary name."""

    destination: Path
    target: Path
    temporary: Path
    overwrite: bool
    share: OutputShare | None = None
    is_resumable: bool = False
    """Another run may resume the temporary."""
    lock: int = -1
    """Handle of the lock of a resumable temporary, see :func:`hespas.files.partial.lock_folder`."""

    def put_in_place(self) -> None:
        with _renamed_errors(self.destination, self.temporary):
            if self.share is not None:
                _place_share(self.temporary, self.target, self.share, overwrite=self.overwrite)
                return
            if self.temporary.is_dir():
                _place_directory(self.temporary, self.target, overwrite=self.overwrite)
            else:
                _place_file(self.temporary, self.target, overwrite=self.overwrite)
            _flush(self.target.parent)

    def end(self, *, placed: bool) -> None:
        """Close the output. Remove the temporary file or folder if it has its final name or no later run may
        resume it.
        """
        if placed or not self.is_resumable:
            remove_path(self.temporary)
        if self.lock >= 0:
            os.close(self.lock)

    def files(self) -> list[tuple[Path, Path]]:
        """Return the temporary path and the final path of each file."""
        if not self.temporary.is_dir():
            return [(self.temporary, self.target)]
        return [(file, self.target / file.name) for file in self.temporary.iterdir()]

    def back_up(self, backups: Path, rollback: ExitStack) -> None:
        """Link the files that will be replaced into ``backups``; closing ``rollback`` restores them."""
        with _renamed_errors(self.destination, backups):
            backups.mkdir()
            if self.temporary.is_dir() and not self.target.exists():
                rollback.callback(_remove_empty, self.target)
            for file, target in self.files():
                backup = backups / target.name
                if os.path.lexists(target):
                    try:
                        os.link(target, backup, follow_symlinks=False)
                    except OSError:  # a file system without hard links, or the file of another user
                        shutil.copy2(target, backup, follow_symlinks=False)
                rollback.callback(_restore, target, backup, _identity(file))


@dataclass(frozen=True, slots=True)
class _PendingResults:
    """Outputs that are complete and get their final names at the end of a block. ``afterwards`` are actions
    to run after that.
    """

    results: list[_WrittenResult] = field(default_factory=list[_WrittenResult])
    afterwards: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def put_in_place(self) -> None:
        """Give all outputs their final names, or none: if one rename fails, the earlier ones are undone."""
        with ExitStack() as cleanup, ExitStack() as rollback:
            for result in self.results:
                if len(self.results) > 1:
                    backups = temporary_beside(result.target)
                    cleanup.callback(remove_path, backups)
                    result.back_up(backups, rollback)
                result.put_in_place()
            rollback.pop_all()
        for action in self.afterwards:
            action()


_PENDING: ContextVar[_PendingResults | None] = ContextVar("_PENDING", default=None)


def check_destination(destination: Path, *, overwrite: bool, share: OutputShare | None = None) -> None:
    """Raise ``OutputError`` if writing to ``destination`` cannot succeed. Use it before any work is done.

    An existing path that is neither file nor folder is also an error, because replacing would destroy it. A
    ``share`` may be written into a folder that has other shares of the same output.
    """
    mode = _mode_of(destination)
    _resolved(destination)
    parent = destination.parent
    if not parent.is_dir():
        raise OutputError("the folder does not exist", path=str(parent), hint=f"create it: mkdir -p {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(parent)
    if "{rank}" in destination.name:
        raise OutputError(
            "{rank} in the name stands for many files, but the destination is one folder",
            path=str(destination),
            hint="name the folder: the files in it are called NAME.0.et, NAME.1.et and so on",
        )
    if mode is None:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OutputError(
            "not a regular file", path=str(destination), hint="pipe it out: hespas-convert SOURCE - > FILE"
        )
    if stat.S_ISDIR(mode) and not os.access(destination, os.R_OK | os.W_OK | os.X_OK):
        raise _unwritable(destination)
    if stat.S_ISDIR(mode) and not any(destination.iterdir()):
        return
    if share is not None and stat.S_ISDIR(mode):
        share.check(destination, overwrite=overwrite)
        return
    if not overwrite:
        raise OutputError("exists already", path=str(destination), hint="add `overwrite` to replace it")
    if stat.S_ISDIR(mode):
        _refuse_folders(destination, destination.iterdir())


def _mode_of(destination: Path) -> int | None:
    """Return the mode (type and permissions) of a file, links followed; None if it does not exist."""
    try:
        return destination.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a name too long, a cycle of links, a folder without permission
        raise OutputError(
            error.strerror or str(error), path=str(destination), hint="choose another destination"
        ) from error


def _refuse_folders(destination: Path, entries: Iterable[Path]) -> None:
    folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.is_symlink())
    if folders:
        raise OutputError(
            f"contains folders, which an atomic replacement would remove: {', '.join(folders[:3])}",
            path=str(destination),
            hint="move them elsewhere or choose another destination",
        )


def _unwritable(folder: Path) -> OutputError:
    return OutputError("the folder is not writable", path=str(folder), hint="choose another destination")


def write_atomically(
    destination: Path,
    write: Callable[[Path], None],
    *,
    overwrite: bool,
    directory: bool,
    key: str = "",
    share: OutputShare | None = None,
) -> int:
    """Let ``write`` fill a temporary path, then move it to ``destination``; return the bytes written.

    A directory appears as a whole. An existing one is exchanged with the new one in one step, and its other
    files are preserved (if the system has no exchange, files are replaced one by one). Folders in it cannot
    be preserved, and rank files of a larger earlier set would mix with the new set: both raise
    ``OutputError``. Links to the destination are followed, and replaced files have the permissions of the old
    ones. A failure removes the temporary path. The next write to the same destination removes the temporaries
    of killed processes.

    With a ``key`` (checksum) of the content, a failure leaves the temporary folder for the next write with
    the same key, so ``write`` may get a folder with files in it. A ``share`` of a folder is added as a whole
    to the other shares, see :mod:`hespas.files.partial`.
    """
    check_destination(destination, overwrite=overwrite, share=share)
    target = _resolved(destination)
    if target.exists() and target.is_dir() != directory:
        kind = "a file, and several ranks need a folder" if directory else "a directory"
        remedy = (
            "name a folder, or choose one rank with `ranks`"
            if directory
            else "choose another destination or format"
        )
        raise OutputError(f"exists and is {kind}", path=str(destination), hint=remedy)
    is_resumable = directory and key != ""
    temporary = (
        resumable_beside(target, key, share.name if share else "")
        if is_resumable
        else temporary_beside(target)
    )
    with _renamed_errors(destination, temporary):
        remove_stale_temporaries(target, key)
        lock = lock_folder(temporary) if is_resumable else -1
    result = _WrittenResult(destination, target, temporary, overwrite, share, is_resumable, lock)
    pending = _PENDING.get()
    try:
        with _renamed_errors(destination, temporary):
            write(temporary)
            written = _sync(temporary)
        if pending is None:
            result.put_in_place()
    except BaseException:
        result.end(placed=False)
        raise
    if pending is None:
        result.end(placed=True)  # after an exchange, the temporary name has the old folder
    else:
        pending.results.append(result)
    return written


@contextmanager
def place_together() -> Generator[None]:
    """Move all results that are written inside the block to their destinations at its end, all or none.

    If an error ends the block or one result cannot be moved, nothing is moved, so a failed command replaces
    no file. A nested block is part of the outer one.
    """
    if _PENDING.get() is not None:
        yield
        return
    pending = _PendingResults()
    before = _PENDING.set(pending)
    placed = False
    try:
        yield
        pending.put_in_place()
        placed = True
    finally:
        _PENDING.reset(before)
        for result in pending.results:
            result.end(placed=placed)


def after_placing(action: Callable[[], None]) -> None:
    """Run an action after the results have their final names: now, or at the end of
    :func:`place_together`.
    """
    pending = _PENDING.get()
    if pending is None:
        action()
    else:
        pending.afterwards.append(action)


@contextmanager
def place_immediately() -> Generator[None]:
    """Within :func:`place_together`, give the results of this block their final names at once, because later
    steps read them.
    """
    before = _PENDING.set(None)
    try:
        yield
    finally:
        _PENDING.reset(before)


@contextmanager
def _renamed_errors(destination: Path, temporary: Path) -> Generator[None]:
    """Within the block, errors about the temporary file name the destination, because users do not know the
    temporary.
    """
    try:
        yield
    except HespasError as error:
        if error.path and error.path.startswith(str(temporary)):
            error.path = str(destination)
        raise
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            path=str(destination),
            hint="free some space or choose another destination",
        ) from error


def _resolved(destination: Path) -> Path:
    """Return the destination with links resolved. Raises ``OutputError`` if the working folder does not
    exist.
    """
    try:
        return destination.resolve()
    except (OSError, RuntimeError) as error:
        raise OutputError(
            "the working folder does not exist", path=str(destination), hint="change to an existing folder"
        ) from error


def _sync(path: Path) -> int:
    """Flush a file, or a directory with its files, to disk; return the number of bytes of the files.

    A flush waits for the disk, so many files are flushed concurrently.
    """
    if not path.is_dir():
        return _flush(path)
    names: dict[int, list[str]] = {}
    with os.scandir(path) as entries:
        for entry in entries:
            names.setdefault(entry.inode(), []).append(entry.path)  # one file may have several names
    files = sorted((min(same), len(same)) for same in names.values())
    if len(files) > _FEW_FILES:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_FLUSHES_AT_ONCE) as pool:
            sizes = list(pool.map(_flush, (file for file, _ in files)))
    else:
        sizes = [_flush(file) for file, _ in files]
    _flush(path)
    return sum(size * count for size, (_, count) in zip(sizes, files, strict=True))


def _flush(path: str | Path) -> int:
    """Flush one file or directory; return its size."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def _identity(file: Path) -> tuple[int, int]:
    """Return device and inode of a file, which do not depend on its name."""
    status = file.lstat()
    return status.st_dev, status.st_ino


def _restore(target: Path, backup: Path, placed: tuple[int, int]) -> None:
    """Restore ``target`` from ``backup``, unless another process has replaced the file that was moved there.

    ``placed`` is the identity (device and inode) of the file that this process moved there.
    """
    with suppress(OSError):  # the error that caused the rollback is reported
        if _identity(target) != placed:
            return
        if os.path.lexists(backup):
            backup.replace(target)
        else:
            target.unlink()


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _place_directory(temporary: Path, target: Path, *, overwrite: bool) -> None:
    if not _is_filled(target):
        try:
            temporary.rename(target)
            return
        except OSError:
            if not _is_filled(target):
                raise
            # Another process has just made it: continue as if it had existed.
    if not overwrite:
        raise _written_meanwhile(target)
    _replace_directory(temporary, target)


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _place_file(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Rename the temporary to the target. Without ``overwrite``, raise if another process made it
    meanwhile.
    """
    if overwrite:
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise _written_meanwhile(target) from None
    except OSError:  # a file system without hard links
        temporary.replace(target)


def _written_meanwhile(target: Path) -> OutputError:
    return OutputError(
        "exists already: another program has just written it",
        path=str(target),
        hint="add `overwrite` to replace it",
    )


def _replace_directory(temporary: Path, target: Path) -> None:
    """Put the new files into an existing folder that contains other files."""
    fresh = {file.name for file in temporary.iterdir()}
    existing = list(target.iterdir())
    _refuse_folders(target, existing)
    others = [file for file in existing if file.name not in fresh]
    stale = [file.name for file in others if _RANK_FILE.match(file.name)]
    if stale:
        raise OutputError(
            f"contains {len(stale)} rank files of an earlier set that would mix with the new one: "
            f"{', '.join(sorted(stale)[:3])}",
            path=str(target),
            hint="remove them or choose another destination",
        )
    replaced = [file for file in existing if file.name in fresh]
    for file in replaced:
        if not file.is_symlink():
            shutil.copymode(file, temporary / file.name)
    obsolete: list[Path] = []
    if any(_RANK_FILE.match(file.name) for file in replaced):
        obsolete = [file for file in others if _belongs_to_ranks(file.name)]
        others = [file for file in others if not _belongs_to_ranks(file.name)]
    are_linked = True
    try:
        for file in others:
            os.link(file, temporary / file.name, follow_symlinks=False)
    except OSError:
        are_linked = False
    shutil.copymode(target, temporary)
    if are_linked and exchange(temporary, target):
        # The temporary name now has the old folder, which is removed. Files that appeared in it after the
        # listing are moved back, except rank files of another set.
        for entry in temporary.iterdir():
            of_a_set = _RANK_FILE.match(entry.name) or _belongs_to_ranks(entry.name)
            if not of_a_set and not os.path.lexists(target / entry.name):
                entry.rename(target / entry.name)
        return
    for file in others:
        (temporary / file.name).unlink(missing_ok=True)
    for file in sorted(temporary.iterdir()):
        file.replace(target / file.name)
    for file in obsolete:
        file.unlink(missing_ok=True)


def _belongs_to_ranks(name: str) -> bool:
    """Return True for a file that belongs to a set of rank files, such as ``comm_group.json``."""
    return name in _OF_RANK_FILES or MISSING_MARK.fullmatch(name) is not None


_AT_FDCWD = -100

_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically (Linux's ``renameat2``); return False if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    rename.restype = ctypes.c_int
    first, second = os.fsencode(one), os.fsencode(other)
    done: int = rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE)
    return done == 0


def _place_share(temporary: Path, target: Path, share: OutputShare, *, overwrite: bool) -> None:
    """Move the files of one share into the folder ``target``. Several processes fill this folder, each with a
    share.

    The first share creates the folder, with a marker file for each share that is still missing. Later shares
    move their files into it and remove their marker file.
    """
    share.mark_others(temporary)
    _flush(temporary)
    if not _is_filled(target):
        try:
            temporary.rename(target)
            _flush(target.parent)
            return
        except OSError:
            if not _is_filled(target):
                raise
            # Another share has just made it.
    share.check(target, overwrite=overwrite)
    own_mark = share.mark(target)
    for name in file_names(temporary):
        if MISSING_MARK.fullmatch(name) is None:
            (temporary / name).replace(target / name)
    _flush(target)
    own_mark.unlink(missing_ok=True)
    _flush(target)


_HINT = "name another `report=DIR`"


def check_report_files(folder: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Raise ``OutputError`` if one of the files ``names`` of a report cannot be written into ``folder``,
    which may not exist yet.

    That is the case for an existing file without ``overwrite``. It is also the case for a link, because its
    target may be outside of the folder.
    """
    existing = next((path for path in (folder, *folder.parents) if _is_folder(path, folder)), None)
    if existing is None:
        raise OutputError("the working folder does not exist", path=str(folder), hint=_HINT)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError("the folder is not writable", path=str(existing), hint=_HINT)
    if existing != folder:
        return
    for name in names:
        path = folder / name
        if path.is_symlink():
            message = "is a link, whose target is outside of this folder"
            raise OutputError(message, path=str(path), hint=f"remove it, or {_HINT}")
        if path.is_dir():
            raise OutputError("exists and is a directory", path=str(path), hint=_HINT)
        check_destination(path, overwrite=overwrite)


def _is_folder(path: Path, report: Path) -> bool:
    """Return True for a folder, False if the path does not exist; raise ``OutputError`` for others."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise OutputError("a link without a target", path=str(path), hint=_HINT) from None
        return False
    except OSError as error:  # a name too long, a cycle of links, a folder without permission
        raise OutputError(error.strerror or str(error), path=str(report), hint=_HINT) from error
    if not stat.S_ISDIR(mode):
        raise OutputError("expected a folder", path=str(path), hint=_HINT)
    return True


def write_report_files(folder: Path, contents: Mapping[str, bytes], *, overwrite: bool) -> None:
    """Write the files of a report, name -> content, into ``folder``. Other files in the folder stay.

    Raises the errors of :func:`check_report_files`, and ``OutputError`` if the folder cannot be made.
    """
    check_report_files(folder, contents, overwrite=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the folder: {error.strerror}"
        raise OutputError(message, path=str(folder), hint=_HINT) from error
    for name, content in contents.items():

        def fill(temporary: Path, content: bytes = content) -> None:
            temporary.write_bytes(content)

        write_atomically(folder / name, fill, overwrite=overwrite, directory=False)
