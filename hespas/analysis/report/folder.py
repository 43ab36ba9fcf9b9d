"""The folder of a report: ``index.html``, its document and ``NAME.csv`` of each table that has rows."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from hespas.analysis.table import Table
from hespas.files.documents import inert_cell
from hespas.files.output import check_destination, write_atomically
from hespas.graph.errors import OutputError

__all__ = ["check_folder", "table_csv", "write_report"]

_PAGE, _ANALYSIS = "index.html", "analysis.json"
_HINT = "name another `report=DIR`"


def check_folder(folder: Path, *, document: str = _ANALYSIS, overwrite: bool) -> None:
    """Raise what :func:`write_report` would, before anything is computed."""
    nearest = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), folder)
    if not nearest.is_dir():
        raise OutputError("expected a folder", path=str(nearest), hint=_HINT)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError("the folder is not writable", path=str(nearest), hint=_HINT)
    for name in (_PAGE, document) if nearest == folder else ():
        _check_file(folder / name, overwrite=overwrite)


def _check_file(path: Path, *, overwrite: bool) -> None:
    if path.is_symlink():
        message = "is a link, and what it leads to is no file of this folder"
        raise OutputError(message, path=str(path), hint=f"remove it, or {_HINT}")
    if path.is_dir():
        raise OutputError("exists and is a directory", path=str(path), hint=_HINT)
    check_destination(path, overwrite=overwrite)


def table_csv(table: Table[Any]) -> str:
    """A table with a line of names; unknown figures are empty, and no spreadsheet calculates a text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in zip(*(column.tolist() for column in table.columns.values()), strict=True):
        writer.writerow("" if isinstance(cell, float) and isnan(cell) else inert_cell(cell) for cell in row)
    return text.getvalue()


def write_report(
    folder: Path,
    page: str,
    document: bytes,
    tables: Mapping[str, Table[Any]],
    *,
    name: str = _ANALYSIS,
    overwrite: bool,
) -> None:
    """Write all files, the document as ``name``, each whole or not at all; others in ``folder`` stay. Raises
    ``OutputError`` where one exists and ``overwrite`` is not given, or the folder cannot be made.
    """
    check_folder(folder, document=name, overwrite=overwrite)
    contents = {_PAGE: page.encode("utf-8", "replace"), name: document}
    for title, table in tables.items():
        if len(table):
            contents[f"{title}.csv"] = table_csv(table).encode("utf-8", "replace")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the folder: {error.strerror}"
        raise OutputError(message, path=str(folder), hint=_HINT) from error
    for file in contents:
        _check_file(folder / file, overwrite=overwrite)
    for file, content in contents.items():
        _write(folder / file, content, overwrite=overwrite)


def _write(path: Path, content: bytes, *, overwrite: bool) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=overwrite, directory=False)
