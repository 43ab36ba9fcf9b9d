"""Atomic output: a temporary name beside the destination, fsync, rename. Nothing half-made is visible."""

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
    MISSING,
    Share,
    file_names,
    hold,
    kept_beside,
    remove,
    remove_stale_temporaries,
    temporary_beside,
)
from hespas.graph.errors import HespasError, OutputError

__all__ = [
    "check_destination",
    "check_report_files",
    "exchange",
    "once_placed",
    "placed_at_once",
    "placed_together",
    "write_atomically",
    "write_report_files",
]


_RANK_FILE = re.compile(r"^.+\.[0-9]+\.(et|json)(\.gz)?$")

_OF_RANK_FILES = frozenset({"comm_group.json", "rank_map.json"})
"""Of a set of rank files, and of no other: they go with them."""

_FEW_FILES = 16

_FLUSHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Written:
    """What stands whole under a temporary name."""

    destination: Path
    target: Path
    temporary: Path
    overwrite: bool
    share: Share | None = None
    kept: bool = False
    """Another run may go on with the temporary."""
    held: int = -1
    """Its handle then, see :func:`.temporaries.hold`."""

    def put_in_place(self) -> None:
        with _named(self.destination, self.temporary):
            if self.share is not None:
                _place_share(self.temporary, self.target, self.share, overwrite=self.overwrite)
            else:
                _put_in_place(self.temporary, self.target, overwrite=self.overwrite)

    def end(self, *, placed: bool) -> None:
        """What is left under the temporary name goes, unless it is kept for another run."""
        if placed or not self.kept:
            remove(self.temporary)
        if self.held >= 0:
            os.close(self.held)

    def files(self) -> list[tuple[Path, Path]]:
        """Each file that is put in place: where it is now, and where it will be."""
        if not self.temporary.is_dir():
            return [(self.temporary, self.target)]
        return [(file, self.target / file.name) for file in self.temporary.iterdir()]

    def keep(self, aside: Path, way_back: ExitStack) -> None:
        """Give what will be replaced another name in ``aside``; closing ``way_back`` restores it."""
        with _named(self.destination, aside):
            aside.mkdir()
            if self.temporary.is_dir() and not self.target.exists():
                way_back.callback(_remove_empty, self.target)
            for file, target in self.files():
                kept = aside / target.name
                if os.path.lexists(target):
                    _give_second_name(target, kept)
                way_back.callback(_restore, target, kept, _identity(file))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What waits for the end of a block: results, and what is done once they are in place."""

    results: list[_Written] = field(default_factory=list[_Written])
    afterwards: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def put_in_place(self) -> None:
        """All of the results, or none: where one cannot be, those before it go back."""
        with ExitStack() as asides, ExitStack() as way_back:
            for result in self.results:
                if len(self.results) > 1:
                    aside = temporary_beside(result.target)
                    asides.callback(remove, aside)
                    result.keep(aside, way_back)
                result.put_in_place()
            way_back.pop_all()
        for action in self.afterwards:
            action()


_WAITING: ContextVar[_Waiting | None] = ContextVar("_WAITING", default=None)


def check_destination(destination: Path, *, overwrite: bool, share: Share | None = None) -> None:
    """Raise ``OutputError`` where writing cannot succeed, before any work is done: also where something
    stands there that is neither file nor folder, and that replacing would destroy. A ``share`` finds others
    of its folder there.
    """
    mode = _mode_of(destination)
    _resolved(destination)
    _check_place(destination)
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


def _check_place(destination: Path) -> None:
    """Raise ``OutputError`` where nothing of this name can be made."""
    parent = destination.parent
    if not parent.is_dir():
        raise OutputError("the folder does not exist", path=str(parent), hint=f"mkdir -p {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(parent)
    if "{rank}" in destination.name:
        raise OutputError(
            "names the files of all ranks",
            path=str(destination),
            hint="name the folder: the files in it are called NAME.0.et, NAME.1.et and so on",
        )


def _refuse_folders(destination: Path, entries: Iterable[Path]) -> None:
    folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.is_symlink())
    if folders:
        raise OutputError(
            f"holds folders, which cannot stay where all is replaced in one step: {', '.join(folders[:3])}",
            path=str(destination),
            hint="move them elsewhere or choose another destination",
        )


def _mode_of(destination: Path) -> int | None:
    """What stands there, links followed; None where nothing does."""
    try:
        return destination.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a name too long, links in a circle, a folder that may not be entered
        raise OutputError(
            error.strerror or str(error), path=str(destination), hint="choose another destination"
        ) from error


def _unwritable(folder: Path) -> OutputError:
    return OutputError("the folder is not writable", path=str(folder), hint="choose another destination")


def write_atomically(
    destination: Path,
    write: Callable[[Path], None],
    *,
    overwrite: bool,
    directory: bool,
    key: str = "",
    share: Share | None = None,
) -> int:
    """Let ``write`` fill a temporary path, then put it in place; returns the bytes written.

    A directory appears as a whole. An existing one is exchanged with the new one in one step, and its other
    files are kept (where the system cannot do that, files are replaced one by one). Folders in it cannot be
    kept so, and rank files of a larger earlier set would spoil the new set: they are an ``OutputError``.
    Links to the destination are followed: what they point to is replaced. What is replaced keeps its
    permissions. A failure of any kind removes the temporary, and the next write to the same destination what
    a killed process has left.

    With a ``key``, of what is to be written, a failure leaves the temporary folder for the next write with
    the same key, and ``write`` may get one with files in it. A ``share`` of a folder appears whole among the
    others, see :mod:`hespas.files.partial`.
    """
    check_destination(destination, overwrite=overwrite, share=share)
    target = _resolved(destination)
    if target.exists() and target.is_dir() != directory:
        kind = "a file, and several ranks are as many files" if directory else "a directory"
        remedy = (
            "name a folder, or choose one rank with `ranks`"
            if directory
            else "choose another destination or format"
        )
        raise OutputError(f"exists and is {kind}", path=str(destination), hint=remedy)
    kept = directory and key != ""
    temporary = kept_beside(target, key, share.name if share else "") if kept else temporary_beside(target)
    with _named(destination, temporary):
        remove_stale_temporaries(target, key)
        held = hold(temporary) if kept else -1
    result = _Written(destination, target, temporary, overwrite, share, kept, held)
    waiting = _WAITING.get()
    try:
        with _named(destination, temporary):
            write(temporary)
            written = _sync(temporary)
        if waiting is None:
            result.put_in_place()
    except BaseException:
        result.end(placed=False)
        raise
    if waiting is None:
        result.end(placed=True)  # what was there has this name now, where both changed places
    else:
        waiting.results.append(result)
    return written


@contextmanager
def placed_together() -> Generator[None]:
    """What is written within is put in place at the end, and nothing of it where an error ends the block or
    one of the results cannot be placed: those of a command that fails replace nothing. A block within another
    is a part of it.
    """
    if _WAITING.get() is not None:
        yield
        return
    waiting = _Waiting()
    before = _WAITING.set(waiting)
    placed = False
    try:
        yield
        waiting.put_in_place()
        placed = True
    finally:
        _WAITING.reset(before)
        for result in waiting.results:
            result.end(placed=placed)


def once_placed(action: Callable[[], None]) -> None:
    """Do something when the results are in place: now, or at the end of :func:`placed_together`."""
    waiting = _WAITING.get()
    if waiting is None:
        action()
    else:
        waiting.afterwards.append(action)


@contextmanager
def placed_at_once() -> Generator[None]:
    """Within :func:`placed_together`, what is written here is in place at once: files that others read."""
    before = _WAITING.set(None)
    try:
        yield
    finally:
        _WAITING.reset(before)


@contextmanager
def _named(destination: Path, temporary: Path) -> Generator[None]:
    """Errors about a temporary, which nobody knows, name its destination."""
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
    """Where the links lead. Raises ``OutputError`` where a relative path leads from nowhere."""
    try:
        return destination.resolve()
    except (OSError, RuntimeError) as error:
        raise OutputError(
            "the working folder is gone", path=str(destination), hint="change to a folder that is there"
        ) from error


def _sync(path: Path) -> int:
    """Flush a file, or a directory with its files, to the disk; returns the bytes of the files.

    A flush is one wait for the disk, so many files are flushed at once.
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
    """Flush one file or directory; returns its size."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def _identity(file: Path) -> tuple[int, int]:
    """Which file of which disk, whatever its name."""
    found = file.lstat()
    return found.st_dev, found.st_ino


def _give_second_name(file: Path, other: Path) -> None:
    try:
        os.link(file, other, follow_symlinks=False)
    except OSError:  # a file system without hard links, or somebody else's file
        shutil.copy2(file, other, follow_symlinks=False)


def _restore(target: Path, kept: Path, placed: tuple[int, int]) -> None:
    """Put back what stood at ``target``, if what stands there now is what we have placed."""
    with suppress(OSError):  # the error that led here is the one to tell
        if _identity(target) != placed:
            return
        if os.path.lexists(kept):
            kept.replace(target)
        else:
            target.unlink()


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _put_in_place(temporary: Path, target: Path, *, overwrite: bool) -> None:
    if temporary.is_dir():
        _place_directory(temporary, target, overwrite=overwrite)
    else:
        _place_file(temporary, target, overwrite=overwrite)
    _flush(target.parent)


def _place_directory(temporary: Path, target: Path, *, overwrite: bool) -> None:
    if not _is_filled(target):
        try:
            temporary.rename(target)
            return
        except OSError:
            if not _is_filled(target):
                raise
            # Somebody else's has just appeared: from here on as if it had been there.
    if not overwrite:
        raise _written_meanwhile(target)
    _replace_directory(temporary, target)


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _place_file(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Without ``overwrite`` a file that somebody else has written in the meantime stays."""
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
    """Put the new files into a folder that holds others."""
    fresh = {file.name for file in temporary.iterdir()}
    there = list(target.iterdir())
    _refuse_folders(target, there)
    kept = [file for file in there if file.name not in fresh]
    stale = [file.name for file in kept if _RANK_FILE.match(file.name)]
    if stale:
        raise OutputError(
            f"holds {len(stale)} rank files of an earlier set that would mix with the new one: "
            f"{', '.join(sorted(stale)[:3])}",
            path=str(target),
            hint="remove them or choose another destination",
        )
    replaced = [file for file in there if file.name in fresh]
    for file in replaced:
        if not file.is_symlink():
            shutil.copymode(file, temporary / file.name)
    gone: list[Path] = []
    if any(_RANK_FILE.match(file.name) for file in replaced):
        gone = [file for file in kept if _goes_with_ranks(file.name)]
        kept = [file for file in kept if not _goes_with_ranks(file.name)]
    gathered = _gathered(kept, temporary)
    shutil.copymode(target, temporary)
    if gathered and exchange(temporary, target):
        _rescued(temporary, target)
        return  # what was there has the temporary's name now and goes with it
    for file in kept:
        (temporary / file.name).unlink(missing_ok=True)
    for file in sorted(temporary.iterdir()):
        file.replace(target / file.name)
    for file in gone:
        file.unlink(missing_ok=True)


def _goes_with_ranks(name: str) -> bool:
    """Whether a file is of a set of rank files without being one."""
    return name in _OF_RANK_FILES or MISSING.fullmatch(name) is not None


def _gathered(kept: list[Path], temporary: Path) -> bool:
    """Give what stays a second name among the new files; False where something cannot have one."""
    try:
        for file in kept:
            os.link(file, temporary / file.name, follow_symlinks=False)
    except OSError:
        return False
    return True


def _rescued(old: Path, target: Path) -> None:
    """Move what somebody has put into the folder after it was looked at; not rank files of another set."""
    for entry in old.iterdir():
        of_a_set = _RANK_FILE.match(entry.name) or _goes_with_ranks(entry.name)
        if not of_a_set and not os.path.lexists(target / entry.name):
            entry.rename(target / entry.name)


_AT_FDCWD = -100

_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Let both paths change places at once (``renameat2`` of Linux); False where that cannot be done."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    rename.restype = ctypes.c_int
    first, second = os.fsencode(one), os.fsencode(other)
    done: int = rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE)
    return done == 0


def _place_share(temporary: Path, target: Path, share: Share, *, overwrite: bool) -> None:
    """The first share makes the folder, with a mark for each of the others; those join it."""
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
    mine = share.mark(target)
    for name in file_names(temporary):
        if MISSING.fullmatch(name) is None:
            (temporary / name).replace(target / name)
    _flush(target)
    mine.unlink(missing_ok=True)
    _flush(target)


_HINT = "name another `report=DIR`"


def check_report_files(folder: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Raise ``OutputError`` where a file of the report cannot be written into ``folder``, which need not be
    there yet: one exists and ``overwrite`` is not given, or is a link, whose target is no file of the folder.
    """
    if _nearest(folder) != folder:
        return
    for name in names:
        path = folder / name
        if path.is_symlink():
            message = "is a link, and what it leads to is no file of this folder"
            raise OutputError(message, path=str(path), hint=f"remove it, or {_HINT}")
        if path.is_dir():
            raise OutputError("exists and is a directory", path=str(path), hint=_HINT)
        check_destination(path, overwrite=overwrite)


def _nearest(folder: Path) -> Path:
    """The folder itself or the nearest one above it that is there. Raises ``OutputError`` where that is no
    folder, or nothing may be made in it.
    """
    for place in (folder, *folder.parents):
        try:
            mode = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                raise OutputError("a link that leads nowhere", path=str(place), hint=_HINT) from None
            continue
        except OSError as error:  # a name too long, links in a circle, a folder that may not be entered
            raise OutputError(error.strerror or str(error), path=str(folder), hint=_HINT) from error
        if not stat.S_ISDIR(mode):
            raise OutputError("expected a folder", path=str(place), hint=_HINT)
        if not os.access(place, os.W_OK | os.X_OK):
            raise OutputError("the folder is not writable", path=str(place), hint=_HINT)
        return place
    raise OutputError("the working folder is gone", path=str(folder), hint=_HINT)


def write_report_files(folder: Path, contents: Mapping[str, bytes], *, overwrite: bool) -> None:
    """Write files by name, others in ``folder`` stay. Raises as :func:`check_report_files`, and where the
    folder cannot be made.
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
