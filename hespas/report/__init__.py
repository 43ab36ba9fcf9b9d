"""Tables that are declared once, with all their renderings, and the HTML page that shows them in sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.report.tables import (
        Column,
        Kind,
        Name,
        Phrase,
        Table,
        column_of,
        joined_tables,
        table_from_records,
        table_from_rows,
        write_tables,
    )

__all__ = [
    "Column",
    "Kind",
    "Name",
    "Phrase",
    "Table",
    "column_of",
    "joined_tables",
    "table_from_records",
    "table_from_rows",
    "write_tables",
]

__getattr__ = lazy_names(
    __name__,
    tables=(
        "Column",
        "Kind",
        "Name",
        "Phrase",
        "Table",
        "column_of",
        "joined_tables",
        "table_from_records",
        "table_from_rows",
        "write_tables",
    ),
)
