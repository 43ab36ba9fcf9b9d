"""Trust boundary: the names in an input file that may open a file or run a program.

Names in TOML, CSV and JSON files are data. A path opens files in the folder of that file only, and a program
runs only with the user's permission (:func:`allowing_programs`, ``--allow-programs``).

``--untrusted``, or ``HESPAS_UNTRUSTED=1`` in the environment, is for inputs from strangers: foreign programs
do not run, links must not leave the folder of an input, and a command has the limits of :class:`Untrusted`.
``HESPAS_UNTRUSTED=cpu_s=20,ranks=4096`` sets other limits, as ``--limit cpu_s=20`` does.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import cast

import msgspec

from hespas.graph.errors import BoundaryError, UnsupportedError, UsageError, clipped

__all__ = [
    "ALLOW_PROGRAMS",
    "UNTRUSTED_VARIABLE",
    "Untrusted",
    "allowing_programs",
    "check_limits",
    "check_link",
    "check_program",
    "confining_links",
    "file_in_folder_of",
    "permit_programs",
    "programs_allowed",
    "refuse_in_untrusted",
    "untrusted_limits",
]

UNTRUSTED_VARIABLE = "HESPAS_UNTRUSTED"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
ALLOW_PROGRAMS = "`allow_programs`"
"""Name of the permission in messages; the commands print it as their option."""
_ALLOWED: ContextVar[bool] = ContextVar("_ALLOWED", default=False)
_CONFINED: ContextVar[tuple[Path, ...]] = ContextVar("_CONFINED", default=())


@contextmanager
def allowing_programs(allowed: bool = True) -> Generator[None]:
    """Permit input files to name programs, and configuration files and estimators that execute the workload,
    inside the block.

    Threads started inside the block do not inherit the permission.
    """
    before = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def permit_programs(allowed: bool) -> None:
    """Set the permission for input files to name programs, for the rest of this process. A worker has the
    permission of its parent.
    """
    _ALLOWED.set(allowed)


def programs_allowed() -> bool:
    """Return True if input files may name programs."""
    return _ALLOWED.get()


def check_program(what: str, file: str | os.PathLike[str], position: str, *, typed: str = "") -> None:
    """Raise ``BoundaryError`` if input files may not run programs. ``file`` is the input file that names a
    program, or names an object that runs one. ``position`` is the position in it.

    ``what`` is the beginning of the message: the text in the file and the problem. ``typed`` describes
    another way to permit it (empty: none).
    """
    if not programs_allowed():
        also = f", or {typed}" if typed else ""
        raise BoundaryError(
            f"{what}: input files need permission for this",
            path=os.fspath(file),
            position=clipped(position),
            hint=f"check the file, then add {ALLOW_PROGRAMS}{also}",
        )


def file_in_folder_of(file: Path, text: str, position: str) -> Path:
    """Return the path of a file or folder. ``text`` names it in a cell or key of ``file``, at ``position``.

    The path is relative to the folder of ``file`` (of its target, if ``file`` is a link) and must not leave
    that folder, by ``..`` or by a link. Raises ``BoundaryError`` for any other path, which is not opened.
    """
    posix, windows = PurePosixPath(text), PureWindowsPath(text)
    is_absolute = posix.is_absolute() or bool(windows.drive or windows.root)
    if not text or "\0" in text or ".." in posix.parts + windows.parts or is_absolute:
        raise _outside(file, text, position)
    home = Path(os.path.realpath(file)).parent if file.is_symlink() else file.parent
    target, folder = home / text, Path(os.path.realpath(home))
    inside = (Path(parent, name) for parent, dirs, files in os.walk(target) for name in (*dirs, *files))
    for path in (target, *(path for path in inside if path.is_symlink())):
        if not Path(os.path.realpath(path)).is_relative_to(folder):
            raise _outside(file, str(path.relative_to(home)), position)
    return target


def _outside(file: Path, text: str, position: str) -> BoundaryError:
    return BoundaryError(
        f"{clipped(text)!r} is not within the folder of this file",
        path=str(file),
        position=clipped(position) or None,
        hint="move the file into that folder, without links to other folders, and use a relative path",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrusted:
    """Limits of a command on untrusted inputs: CPU time [s] and memory [bytes] of its process, and the number
    of ranks of a job.
    """

    cpu_s: float = 4.0
    memory_bytes: int = 350 << 20
    ranks: int = 1 << 17


def untrusted_limits() -> Untrusted | None:
    """Return the limits of a command on untrusted inputs, None if inputs are trusted.

    Raises ``UsageError`` if the environment variable ``HESPAS_UNTRUSTED`` is invalid.
    """
    return _parse_limits(os.environ.get(UNTRUSTED_VARIABLE, ""))


def check_limits(text: str) -> None:
    """Raise ``UsageError`` if ``text`` is not a list of limits such as ``cpu_s=20,ranks=4096``."""
    _parse_limits(text)


@lru_cache(maxsize=8)
def _parse_limits(text: str) -> Untrusted | None:
    if text.strip().lower() in _FALSE:
        return None
    parts = [part for part in text.split(",") if part.strip().lower() not in _TRUE]
    return msgspec.convert(asdict(Untrusted()) | dict(map(_limit, parts)), Untrusted)


def _limit(text: str) -> tuple[str, float]:
    """Parse one limit, ``NAME=N``; return its name and its value."""
    name, equals, number = (part.strip() for part in text.partition("="))
    kinds: Mapping[str, type[object]] = {
        field.name: type(cast("object", field.default)) for field in fields(Untrusted)
    }
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if name not in kinds or not equals or not 0 < value < 1e18:
        raise UsageError(
            f"{clipped(text)!r} is not a limit",
            hint=f"NAME=N with one of {', '.join(kinds)} and a number above 0",
        )
    return name, value if kinds[name] is float else int(value)


def refuse_in_untrusted(what: str) -> None:
    """Raise ``UnsupportedError`` if inputs are untrusted. ``what`` names the action that is refused, such as
    running a program.
    """
    if untrusted_limits() is not None:
        raise UnsupportedError(
            f"{what}: not allowed for untrusted inputs",
            hint=f"do not pass `untrusted`, and unset {UNTRUSTED_VARIABLE}",
        )


@contextmanager
def confining_links(folders: Sequence[Path]) -> Generator[None]:
    """Inside the block, refuse links in ``folders`` that lead out of all of them. The folders are real paths.

    Threads and processes started inside the block do not inherit this.
    """
    before = _CONFINED.set(tuple(folders))
    try:
        yield
    finally:
        _CONFINED.reset(before)


def check_link(path: Path) -> None:
    """Raise ``BoundaryError`` for a link out of the folders of :func:`confining_links`, and for a link to
    another folder if inputs are untrusted.
    """
    folders = _CONFINED.get()
    if any(path.is_relative_to(folder) for folder in folders):
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(folder) for folder in folders):
            raise BoundaryError(
                "is a link that leads out of the folders that may be read",
                path=str(path),
                hint="copy the file into one of the folders",
            )
    if untrusted_limits() is None or not path.is_symlink():
        return
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise BoundaryError(
            "is a link that leads out of its folder: not allowed for untrusted inputs",
            path=str(path),
            hint="copy the file into the folder",
        )
