"""Options of the commands that write documents, and the writing of changed documents."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["ROOT", "csv_text", "document_command"]

ROOT = Path(__file__).parents[1]


def document_command(
    description: str | None, make: Callable[[], Mapping[Path, str]], words: Sequence[str] | None = None
) -> int:
    """Write the documents of ``make`` (path -> text) that have changed, and return the exit code.

    With ``--check`` in ``words`` (default: the command line) nothing is written, and the exit code is 1 if a
    document is stale.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a document is stale"
    )
    is_check = parser.parse_args(words).check
    stale = 0
    for path, text in make().items():
        same = path.is_file() and path.read_text("utf-8") == text
        stale += not same
        if not same and not is_check:
            path.write_text(text, encoding="utf-8")
        outcome = "unchanged" if same else "stale" if is_check else "updated"
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        sys.stdout.write(f"{shown}: {outcome}\n")
    return int(is_check and stale > 0)


def csv_text(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as CSV, for details that a page links."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(rows)
    return stream.getvalue()
