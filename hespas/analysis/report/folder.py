"""The folder of a report: ``index.html``, its document and ``NAME.csv`` of each table that has rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from hespas.analysis.table import Table
from hespas.files.documents import inert_cell
from hespas.files.output import check_report_files, write_report_files

__all__ = ["check_folder", "table_csv", "write_report"]

_PAGE, _ANALYSIS = "index.html", "analysis.json"


def check_folder(folder: Path, *, document: str = _ANALYSIS, overwrite: bool) -> None:
    """Raise what :func:`write_report` would, before anything is computed."""
    check_report_files(folder, (_PAGE, document), overwrite=overwrite)


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
    contents = {_PAGE: page.encode("utf-8", "replace"), name: document}
    for title, table in tables.items():
        if len(table):
            contents[f"{title}.csv"] = table_csv(table).encode("utf-8", "replace")
    write_report_files(folder, contents, overwrite=overwrite)
