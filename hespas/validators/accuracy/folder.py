"""The report as a folder: HTML, JSON, CSV and Markdown of one comparison."""

from __future__ import annotations

from pathlib import Path

from hespas.converters.output import check_destination, write_atomically
from hespas.validators.accuracy.document import accuracy_json
from hespas.validators.accuracy.report import accuracy_csv, accuracy_html, accuracy_markdown
from hespas.validators.accuracy.result import Accuracy, Thresholds

__all__ = ["REPORT_FILES", "write_report"]

REPORT_FILES = ("report.html", "report.json", "report.csv", "report.md")


def write_report(done: Accuracy, limits: Thresholds, folder: Path, *, overwrite: bool) -> None:
    """Write all files of :data:`REPORT_FILES`, each whole or not at all; other files of ``folder`` stay.

    Raises ``OutputError`` where a file exists and ``overwrite`` is not given, ``MissingExtraError`` without
    plotly.
    """
    contents = {
        "report.html": accuracy_html(done, limits).encode("utf-8", "replace"),
        "report.json": accuracy_json(done, limits),
        "report.csv": accuracy_csv(done).encode("utf-8", "replace"),
        "report.md": accuracy_markdown(done, limits).encode("utf-8", "replace"),
    }
    for name in REPORT_FILES:
        check_destination(folder / name, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        _write(content, folder / name)


def _write(content: bytes, path: Path) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=True, directory=False)
