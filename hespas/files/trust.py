"""The trust boundary: which names in an input file may open a file or run a program.

Everything that a TOML, CSV or JSON file names is data. A path in it opens files in the folder of that file
only, and a program that it names runs only with the user's permission (:func:`allowing_programs`,
``--allow-programs``).

``--untrusted``, or ``HESPAS_UNTRUSTED=1`` in the environment, is for inputs of strangers: no program of
others runs, no link leads out of the folder of an input, and a command has the limits of :class:`Untrusted`.
``HESPAS_UNTRUSTED=cpu_s=20,ranks=4096`` states other limits, as ``--limit cpu_s=20`` does.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
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
    "file_beside",
    "permit_programs",
    "programs_allowed",
    "refuse_in_untrusted",
    "untrusted_limits",
]

UNTRUSTED_VARIABLE = "HESPAS_UNTRUSTED"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
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
            f"{what}: input files need permission for this",
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


# Inputs of strangers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrusted:
    """Limits of a command on inputs of strangers: CPU time [s] and memory [bytes] of its process, ranks."""

    cpu_s: float = 4.0
    memory_bytes: int = 350 << 20
    ranks: int = 1 << 17


def untrusted_limits() -> Untrusted | None:
    """Return the limits of a shared service, None where inputs are trusted as usual.

    Raises ``UsageError`` where the environment states something else.
    """
    return _stated(os.environ.get(UNTRUSTED_VARIABLE, ""))


def check_limits(text: str) -> None:
    """Raise ``UsageError`` where ``text`` states no limits."""
    _stated(text)


@lru_cache(maxsize=8)
def _stated(text: str) -> Untrusted | None:
    if text.strip().lower() in _FALSE:
        return None
    parts = [part for part in text.split(",") if part.strip().lower() not in _TRUE]
    return msgspec.convert(asdict(Untrusted()) | dict(map(_limit, parts)), Untrusted)


def _limit(text: str) -> tuple[str, float]:
    """Return a limit that is stated as ``NAME=N``."""
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
    """Raise ``UnsupportedError`` for ``what`` where inputs are untrusted: it runs programs."""
    if untrusted_limits() is not None:
        raise UnsupportedError(
            f"{what}: not allowed for untrusted inputs",
            hint=f"do not pass `untrusted`, and unset {UNTRUSTED_VARIABLE}",
        )


def check_link(path: Path) -> None:
    """Raise ``BoundaryError`` for a link that leads out of its folder, where inputs are untrusted."""
    if untrusted_limits() is None or not path.is_symlink():
        return
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise BoundaryError(
            "is a link that leads out of its folder: not allowed for untrusted inputs",
            path=str(path),
            hint="copy the file into the folder",
        )
