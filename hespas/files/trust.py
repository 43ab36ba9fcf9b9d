"""The trust boundary: which names in an input file may open a file or run a program.

Everything that a TOML, CSV or JSON file names is data. A path in it opens files in the folder of that file
only, and a program that it names runs only with the user's permission (:func:`allowing_programs`,
``--allow-programs``).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath, PureWindowsPath

from hespas.graph.errors import BoundaryError, clipped

__all__ = [
    "ALLOW_PROGRAMS",
    "allowing_programs",
    "check_program",
    "file_beside",
    "permit_programs",
    "programs_allowed",
]

ALLOW_PROGRAMS = "`allow_programs`"
"""The permission as messages name it; the commands print it as their option."""
_ALLOWED: ContextVar[bool] = ContextVar("_ALLOWED", default=False)


# Programs.


@contextmanager
def allowing_programs(allowed: bool = True) -> Generator[None]:
    """Let input files name programs, configuration files and estimators that execute the workload, within.

    Threads that are started within do not inherit the permission.
    """
    before = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def permit_programs(allowed: bool) -> None:
    """Set the permission for the rest of this process: a worker has that of its parent."""
    _ALLOWED.set(allowed)


def programs_allowed() -> bool:
    """Return True where input files may name programs."""
    return _ALLOWED.get()


def check_program(what: str, file: str | os.PathLike[str], position: str, *, typed: str = "") -> None:
    """Raise ``BoundaryError`` where ``file`` names a program (or what runs one) without permission.

    ``what`` is the text in the file with the reason, ``typed`` another way to permit it.
    """
    if not programs_allowed():
        also = f", or {typed}" if typed else ""
        raise BoundaryError(
            f"{what}: an input file may not do that without permission",
            path=os.fspath(file),
            position=clipped(position),
            hint=f"check the file, then add {ALLOW_PROGRAMS}{also}",
        )


# Paths.


def file_beside(file: Path, text: str, position: str) -> Path:
    """Return the path of a file, or folder, that a cell or key at ``position`` of ``file`` names.

    It is relative to the folder of ``file`` (of its target, where ``file`` is a link) and does not leave that
    folder, by ``..`` or by a link. Raises ``BoundaryError`` for any other path, which is not opened.
    """
    parts = PurePosixPath(text).parts + PureWindowsPath(text).parts
    if not text or "\0" in text or ".." in parts or _is_absolute(text):
        raise _outside(file, text, position)
    home = Path(os.path.realpath(file)).parent if file.is_symlink() else file.parent
    target, folder = home / text, Path(os.path.realpath(home))
    for path in (target, *_links_in(target)):
        if not Path(os.path.realpath(path)).is_relative_to(folder):
            raise _outside(file, str(path.relative_to(home)), position)
    return target


def _is_absolute(text: str) -> bool:
    windows = PureWindowsPath(text)
    return PurePosixPath(text).is_absolute() or bool(windows.drive or windows.root)


def _links_in(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder and below it; nothing for a file."""
    for place, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(place, name)).is_symlink())


def _outside(file: Path, text: str, position: str) -> BoundaryError:
    return BoundaryError(
        f"{clipped(text)!r} is not within the folder of this file",
        path=str(file),
        position=clipped(position) or None,
        hint="put the file there, without links that lead elsewhere, and name it by a relative path",
    )
