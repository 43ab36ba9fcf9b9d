"""Settings of published runs as columns of their table: ``python -m tools.published_settings IN OUT``."""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from hespas.generators.llm.published import rows_of

__all__ = ["main", "table_with_settings"]


def table_with_settings(table: Path) -> str:
    """Return the table as CSV text, with the columns that it lacks."""
    rows = list(rows_of(table))
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def main() -> None:
    """Write one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, help="table of published runs, CSV")
    parser.add_argument("out", type=Path, help="table to write")
    options = parser.parse_args()
    options.out.write_text(table_with_settings(options.table), "utf-8")


if __name__ == "__main__":
    main()
