"""Tables that are declared once, and their text, Markdown, CSV, Parquet, JSON and pandas.

The page of a report renders the same tables as HTML.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from itertools import zip_longest
from math import isnan
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from hespas.files.documents import escape_cell
from hespas.graph.columns import check_lengths
from hespas.report.texts import (
    UNKNOWN,
    bytes_text,
    count_text,
    flops_text,
    plain_text,
    shown,
    time_text,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = [
    "WIDTH",
    "Column",
    "Kind",
    "Name",
    "Phrase",
    "Table",
    "Values",
    "column_of",
    "columns",
    "is_unknown",
    "joined_tables",
    "markdown_code",
    "table_from_records",
    "table_from_rows",
    "write_tables",
]

WIDTH = 100
"""Target width of a text table in characters; tables with many figures may be wider."""
_MIN_WIDTH = 25
_NOTEBOOK_ROWS = 20

Kind = Literal["text", "code", "id", "flag", "count", "number", "share", "time", "moment", "bytes", "flops"]
"""Kinds of values. ``code`` is a name from a file, ``id`` a number that identifies something, ``time`` and
``moment`` are in ns, ``share`` is a fraction of 1.
"""
Values = Sequence[Any] | NDArray[Any]
"""Values of a column. Unknown values are None, NaN, or an empty text."""


def _number_text(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")


_WRITERS: Mapping[Kind, Callable[[Any], str]] = {
    "text": str,
    "code": str,
    "id": str,
    "flag": lambda value: "yes" if value else "",
    "count": count_text,
    "number": _number_text,
    "share": lambda value: f"{value:.1%}",
    "time": time_text,
    "moment": lambda value: f"{value / 1e6:,.6f} ms",
    "bytes": bytes_text,
    "flops": flops_text,
}
"""Kind -> text of a known value."""

_TEXTS: frozenset[Kind] = frozenset({"text", "code", "flag"})
"""Kinds that are aligned left."""


def is_unknown(value: object) -> bool:
    """Return True for None and NaN."""
    return value is None or (isinstance(value, float) and isnan(value))


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of a column.

    ``name`` is the key in CSV, Parquet, JSON and pandas. ``title`` is the heading elsewhere (default: the
    name with blanks, and ``unit``). ``write`` returns the text of a known value (default: the function of
    ``kind``). ``unknown`` is the text of an unknown value in terminals, Markdown and pages (None: the text of
    the rendering). ``digits`` limits the significant digits in CSV (0: all), ``limit`` the characters of a
    name in Markdown. ``detail`` is 0 for columns of all renderings, 1 for columns that text and Markdown
    leave out, and 2 for columns that pages leave out too.
    """

    name: str
    title: str = ""
    kind: Kind = "text"
    unit: str = ""
    write: Callable[[Any], str] | None = None
    unknown: str | None = None
    digits: int = 0
    limit: int = 80
    detail: int = 0

    @property
    def heading(self) -> str:
        """Return the title, or a title made of the name and the unit."""
        return self.title or f"{self.name.replace('_', ' ')} {self.unit}".strip()

    @property
    def is_text(self) -> bool:
        """Return True for texts, which are aligned left; figures are aligned right."""
        return self.kind in _TEXTS

    def text(self, value: object, unknown: str = UNKNOWN) -> str:
        """Return the text of a value, ``unknown`` for None and NaN."""
        if is_unknown(value):
            return unknown if self.unknown is None else self.unknown
        return (self.write or _WRITERS[self.kind])(value)


def columns(
    kind: Kind,
    *names: str,
    write: Callable[[Any], str] | None = None,
    unknown: str | None = None,
    digits: int = 0,
    limit: int = 80,
    detail: int = 0,
) -> list[Column]:
    """Return declarations of several columns of one kind; their titles are their names."""
    return [
        Column(name, name, kind, write=write, unknown=unknown, digits=digits, limit=limit, detail=detail)
        for name in names
    ]


class Name(str):
    """Name from a file inside a :class:`Phrase`. It is escaped or formatted as code where needed."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Phrase:
    """Text value of a table column that mixes Hespas's own words with names from files."""

    parts: tuple[str, ...]

    def __str__(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Table:
    """Table for reports: columns of equal length with their declarations. ``columns`` holds the values by
    name.
    """

    header: tuple[Column, ...]
    columns: Mapping[str, Values]

    def __post_init__(self) -> None:
        lengths = {column.name: len(self.columns[column.name]) for column in self.header}
        check_lengths(
            "table", next(iter(lengths.values()), 0), {name: self.columns[name] for name in lengths}
        )

    def __len__(self) -> int:
        return len(self.columns[self.header[0].name]) if self.header else 0

    def values(self, column: Column) -> list[Any]:
        """Return the values of a column as Python objects."""
        values = self.columns[column.name]
        return values.tolist() if isinstance(values, np.ndarray) else list(values)

    def tuples(self) -> Iterable[tuple[Any, ...]]:
        """Iterate over the rows as tuples of Python objects."""
        return zip(*map(self.values, self.header), strict=True)

    def head(self, count: int) -> Table:
        """Return the first rows."""
        return Table(self.header, {name: values[:count] for name, values in self.columns.items()})

    def select(self, titles: Mapping[str, str | Column]) -> Table:
        """Return some columns in the order of ``titles``, which maps names to titles or declarations."""
        known = {column.name: column for column in self.header}
        header = tuple(
            title if isinstance(title, Column) else replace(known[name], title=title, detail=0)
            for name, title in titles.items()
        )
        return Table(
            header, {column.name: self.columns[name] for column, name in zip(header, titles, strict=True)}
        )

    def to_text(self, unknown: str = "unknown") -> list[str]:
        """Return the lines of a table for terminals."""
        header = [column for column in self.header if not column.detail]
        columns = [[column.text(value, unknown) for value in self.values(column)] for column in header]
        left = [place for place, column in enumerate(header) if column.is_text]
        rows = list(zip(*columns, strict=True))
        return _text_lines([column.heading for column in header], rows, left=left)

    def to_markdown(self) -> str:
        """Return a table in GitHub's Markdown without a final newline. No text becomes markup: names
        (``code``), and texts with characters that have a meaning in Markdown, are in code spans.
        """
        header = [column for column in self.header if not column.detail]
        columns = [[_markdown_cell(column, value) for value in self.values(column)] for column in header]
        titles = (column.heading for column in header)
        lines = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(header)]
        lines += (f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))
        return "\n".join(lines)

    def write_csv(self, stream: TextIO, *, line_end: str = "\n", has_header: bool = True) -> None:
        """Write the table as CSV. Unknown values are empty, and spreadsheets evaluate no text."""
        # A writer quotes the letters of its own line ends only: this one quotes both.
        lines = _LineEnds(stream, line_end)
        writer = csv.writer(lines, lineterminator="\r\n")
        if has_header:
            writer.writerow([escape_cell(column.name) for column in self.header])
        columns = ([_csv_cell(column, value) for value in self.values(column)] for column in self.header)
        writer.writerows(zip(*columns, strict=True))

    def to_csv(self) -> str:
        """Return the table as CSV. Letters that UTF-8 cannot encode are escaped."""
        text = StringIO()
        self.write_csv(text)
        return text.getvalue().encode("utf-8", "backslashreplace").decode("utf-8")

    def to_records(self) -> list[dict[str, object]]:
        """Return one dictionary per row, for JSON; unknown values are None."""
        names = [column.name for column in self.header]
        return [
            {name: None if is_unknown(value) else value for name, value in zip(names, row, strict=True)}
            for row in self.tuples()
        ]

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a data frame; unknown values are NaN."""
        import pandas as pd

        # pandas would store texts as Arrow strings, which cannot hold the lone surrogates that ours may have
        columns: dict[str, object] = {}
        for column in self.header:
            values = self.columns[column.name]
            is_object = isinstance(values, np.ndarray) and values.dtype == np.object_
            try:
                columns[column.name] = pd.Series(cast("Any", values), dtype=object if is_object else None)
            except UnicodeEncodeError:
                columns[column.name] = pd.Series(cast("Any", values), dtype=object)
        return pd.DataFrame(columns, columns=[column.name for column in self.header])

    def to_arrow(self) -> pa.Table:
        """Return the table as an Arrow table; unknown values are null. Letters that UTF-8 cannot encode are
        escaped.
        """
        import pyarrow as pa

        columns = {
            column.name: [
                None if is_unknown(value) else shown(value, len(value)) if isinstance(value, str) else value
                for value in self.values(column)
            ]
            for column in self.header
        }
        return pa.table(columns)

    def write_parquet(self, path: Path) -> None:
        """Write the table as a Parquet file; unknown values are null."""
        from pyarrow import parquet

        write: Callable[[object, Path], None] = getattr(parquet, "write_table")  # noqa: B009 - untyped
        write(self.to_arrow(), path)

    def __repr__(self) -> str:
        return "\n".join(self.to_text())

    def _repr_html_(self) -> str:
        """Return the first rows as HTML, for notebooks."""
        return self.to_html()

    def to_html(self, most: int = _NOTEBOOK_ROWS) -> str:
        """Return the first ``most`` rows as an HTML table, and the number of further rows."""
        shown_columns = [column for column in self.header if column.detail < 2]
        sides = ["left" if column.is_text else "right" for column in shown_columns]
        head = "".join(
            f'<th scope="col" style="text-align:{side}">{escape(column.heading)}</th>'
            for column, side in zip(shown_columns, sides, strict=True)
        )
        first = self.head(most)
        texts = ([escape(column.text(value)) for value in first.values(column)] for column in shown_columns)
        rows = ""
        for row in zip(*texts, strict=True):
            cells = (
                f'<td style="text-align:{side}">{text}</td>' for side, text in zip(sides, row, strict=True)
            )
            rows += f"<tr>{''.join(cells)}</tr>"
        left = len(self) - most
        more = f"<p>{left:,} more rows</p>" if left > 0 else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def write_tables(tables: Iterable[Table], path: Path, *, is_parquet: bool, line_end: str = "\n") -> None:
    """Write tables with the same columns, one after the other, to one file: Parquet, or CSV in UTF-8 with
    ``line_end``. Letters that UTF-8 cannot encode become ``?`` in CSV.
    """
    if is_parquet:
        joined_tables(list(tables)).write_parquet(path)
        return
    with path.open("w", newline="", encoding="utf-8", errors="replace") as stream:
        for number, table in enumerate(tables):
            table.write_csv(stream, line_end=line_end, has_header=not number)


def _markdown_cell(column: Column, value: object) -> str:
    if isinstance(value, Phrase):
        return "".join(markdown_code(part) if isinstance(part, Name) else part for part in value.parts)
    text = column.text(value)
    if column.kind == "code" or (column.is_text and not _PLAIN_MARKDOWN.fullmatch(text)):
        return markdown_code(text, column.limit)
    return text


@dataclass(frozen=True, slots=True)
class _LineEnds:
    """Stream that replaces the line end CRLF of the CSV writer by another one."""

    stream: TextIO
    line_end: str

    def write(self, line: str) -> int:
        """Write one line."""
        return self.stream.write(line.removesuffix("\r\n") + self.line_end)


def _csv_cell(column: Column, value: object) -> object:
    if is_unknown(value):
        return ""
    return f"{value:.{column.digits}g}" if column.digits else escape_cell(value)


_UNITS = {"gbytes_per_s": "GB/s", "tflops_per_s": "TFLOP/s", "_ns": "", "_bytes": "", "": ""}
"""Suffixes of column names -> units in titles; times and bytes are written with their own units."""


def column_of(name: str, kind: Kind = "number") -> Column:
    """Return the declaration of a column from its name. A suffix such as ``_ns`` determines its quantity;
    columns without a known suffix are of ``kind``.
    """
    unit = next(suffix for suffix in _UNITS if name.endswith(suffix))
    title = f"{name.removesuffix(unit).replace('_', ' ')} {_UNITS[unit]}".strip()
    kinds: Mapping[Kind, bool] = {
        "time": name.endswith("_ns"),
        "share": name in {"overlap", "share"} or name.endswith("_share"),
        "bytes": name == "bytes_moved" or name.endswith("_bytes"),
        "flops": name == "flops",
        "id": name in {"rank", "rank_class", "node"},
    }
    if kind in _TEXTS:
        return Column(name, title, kind)
    stated: list[Kind] = [each for each, applies in kinds.items() if applies]
    return Column(name, title, stated[0] if stated else kind)


def table_from_rows(header: Sequence[Column], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table of rows of values, in order of the columns."""
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    return Table(tuple(header), {column.name: cells for column, cells in zip(header, columns, strict=True)})


def table_from_records(records: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> Table:
    """Return a table of the rows of a document. Columns are ``names``, by default all keys in order; keys of
    nested objects are joined by dots.
    """
    flat = [dict(_flattened(record, "")) for record in records]
    keys = list(names) or list(dict.fromkeys(key for record in flat for key in record))
    columns = {key: [record.get(key) for record in flat] for key in keys}
    return Table(tuple(column_of(key, _kind_of(columns[key])) for key in keys), columns)


def _kind_of(values: Sequence[object]) -> Kind:
    """Return the kind of a column (text, number, ...) from its JSON values."""
    match next((value for value in values if value is not None), None):
        case bool():
            return "flag"
        case int():
            return "count"
        case float():
            return "number"
        case _:
            return "text"


def joined_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of several tables with the same columns, one table after the other."""
    header = tables[0].header
    return Table(
        header,
        {column.name: [cell for table in tables for cell in table.values(column)] for column in header},
    )


def _flattened(record: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, object]]:
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from _flattened(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_PLAIN_MARKDOWN = re.compile(r"[A-Za-z0-9 _-]*")
"""Texts that have no meaning in Markdown."""


def markdown_code(name: str, limit: int = 80) -> str:
    """Return any text as a Markdown code span in a table cell: fenced by enough backticks, with bars
    escaped.
    """
    text = shown(name, limit) or "(unnamed)"
    text = re.sub(r"\\+\|", lambda match: match[0][:-1] + " |", text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    if not longest:
        return f"`{text}`"
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}"


def _text_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> list[str]:
    """Return the lines of a plain-text table. Columns ``left`` are aligned left, the others right.

    The widest text columns are wrapped at blanks, so that lines fit :data:`WIDTH` characters if possible.
    """
    texts = [[plain_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    words = [column for column in left if column]
    while words and (excess := sum(widths) + 2 * len(widths) - 2 - WIDTH) > 0:
        widest = max(words, key=widths.__getitem__)
        words.remove(widest)
        widths[widest] = max(widths[widest] - excess, min(widths[widest], _MIN_WIDTH))
    lines: list[str] = []
    for row in texts:
        broken = [
            [cell] if len(cell) <= width else wrap(cell, width)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*broken, fillvalue=""):
            cells = [
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
    return lines
