"""A report as files of a folder: looked at before any work, then written, each whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from hespas.files.output import check_destination, write_atomically
from hespas.graph.errors import OutputError

__all__ = ["check_report_files", "write_report_files"]

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
