"""Cache of slow results between runs: one small JSON file for each result, named by a hash of its inputs.

The folder is ``$XDG_CACHE_HOME/hespas`` (``~/.cache/hespas``). Files are written under a temporary name and
renamed, so that an interrupted run can be resumed. A file that cannot be read counts as missing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic, sleep, time
from typing import Generic, TypeVar

import msgspec

from hespas.graph.errors import OutputError

__all__ = ["ResultCache", "content_key"]

_Result = TypeVar("_Result", bound=msgspec.Struct)

_LARGEST = 1 << 20
_TOUCHED_S = 1.0
_POLL_S = 0.1


def content_key(parts: Sequence[str]) -> str:
    """Return a hash of ``parts`` that serves as the name of a result. Different parts have different
    hashes.
    """
    digest = sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ResultCache(Generic[_Result]):
    """Cache of results of one type in a folder, which later runs use. Each result has a key."""

    folder: Path
    type: type[_Result]

    def get(self, key: str) -> _Result | None:
        """Return the saved result; None if it is missing or unreadable, or if another user may have written
        it.
        """
        path = self._file(key)
        try:
            if not path.is_file():  # reading a pipe could wait forever
                return None
            with path.open("rb") as file:
                if not _is_own(os.fstat(file.fileno())):
                    return None
                data = file.read(_LARGEST + 1)
            return None if len(data) > _LARGEST else msgspec.json.decode(data, type=self.type)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def put(self, key: str, result: _Result) -> None:
        """Save a result. Raises ``OutputError`` if the folder cannot be written."""
        path = self._file(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
                file.write(msgspec.json.encode(result))
            Path(file.name).replace(path)
        except OSError as error:
            raise _cannot(self.folder, error) from error

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    @contextmanager
    def alone(self, wait_s: float, stale_s: float) -> Generator[_Lock]:
        """Return a context that holds the lock of this cache. Two runs that measure times on the same machine
        would disturb each other.

        The lock is a file that only one process can create. The process updates the time of the file while it
        holds the lock. Another process removes a lock that was not updated for ``stale_s``. Raises
        ``OutputError`` after ``wait_s``, or if the folder cannot be written.
        """
        lock = _Lock(self.folder / "lock", stale_s)
        lock.take(wait_s)
        try:
            yield lock
        finally:
            lock.leave()


class _Lock:
    """Lock file that only one process can hold, so that processes do not write the same results."""

    def __init__(self, path: Path, stale_s: float) -> None:
        self.path = path
        self.stale_s = stale_s
        self.touched_s = 0.0
        self.mine = f"{os.getpid()} {time():.6f}"

    def take(self, wait_s: float) -> None:
        """Create the lock file. If another process holds it, wait up to ``wait_s`` seconds."""
        end_s = monotonic() + wait_s
        while not self._create():
            if self._is_stale():
                continue
            if monotonic() > end_s:
                raise OutputError(
                    "another run holds the lock and does not end",
                    path=str(self.path),
                    hint="wait for it, or remove the file if no such run exists",
                )
            sleep(_POLL_S)

    def touch(self) -> None:
        """Update the time of the lock file, so that other processes do not treat it as stale."""
        if monotonic() - self.touched_s > _TOUCHED_S:
            self.touched_s = monotonic()
            with suppress(OSError):
                os.utime(self.path)

    def leave(self) -> None:
        """Remove the lock file, unless another process has taken it over because it seemed stale."""
        with suppress(OSError):
            if self.path.read_text() == self.mine:
                self.path.unlink()

    def _create(self) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError as error:
            raise _cannot(self.path.parent, error) from error
        with os.fdopen(handle, "w") as file:
            file.write(self.mine)
        self.touched_s = monotonic()
        return True

    def _is_stale(self) -> bool:
        """Return True if the process that holds the lock has ended. The lock file is then renamed, which
        succeeds for only one of several processes.
        """
        aside = self.path.with_name(f"lock.{os.getpid()}.left")
        try:
            if time() - self.path.stat().st_mtime < self.stale_s:
                return False
            self.path.rename(aside)
            if (
                time() - aside.stat().st_mtime < self.stale_s
            ):  # another process took it over in between: restore it
                aside.rename(self.path)
                return False
            aside.unlink()
        except FileNotFoundError:
            return True
        except OSError as error:
            raise _cannot(self.path.parent, error) from error
        return True


def _is_own(status: os.stat_result) -> bool:
    """Return True if the file's owner and permissions allow only this user to have written it."""
    if not hasattr(os, "getuid"):  # Windows
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _cannot(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"results cannot be saved: {error.strerror or error}",
        path=str(folder),
        hint="name a writable folder (XDG_CACHE_HOME, or the estimator's option cache=)",
    )
