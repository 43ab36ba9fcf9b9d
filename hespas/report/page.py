"""HTML page of a report: sections of paragraphs, tables and drawings in one template.

A page loads nothing, and works without scripts except for sorting, searching and zooming. Texts are escaped;
``Markup`` is HTML already. Names from files are limited, so that a page stays small.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hespas._version import __version__
from hespas.files.documents import encode_json, json_for_script
from hespas.graph import Diagnostics
from hespas.report.charts import Chart
from hespas.report.tables import Column, Table, table_from_rows
from hespas.report.texts import NameTable, shown
from hespas.report.timelines import TimelineChart

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = [
    "OPERATION_COLUMNS",
    "Block",
    "ChartView",
    "Drawing",
    "Fold",
    "Page",
    "Paragraph",
    "Section",
    "TableView",
    "Tile",
    "Tiles",
    "code_text",
    "diagnostics_section",
    "inputs_text",
    "page_html",
    "result_page",
]

_PACKAGE = "hespas.report"
_FIRST_ROWS = 50
"""Rows of a table before its button for more rows is used."""
_MOST_ROWS = 5_000
"""Default limit of the rows of a table on a page."""
_MOST_DIAGNOSTICS = 100
_MOST_INPUTS = 8
_MOST_LEVELS = 24
OPERATION_COLUMNS = ("operation", "last_operation")
"""Columns of operations, which link to their spans in a timeline."""
_MOST_CHOICES = 40
"""Distinct texts of a column up to which they select rows."""
_LONG_TEXT = 24
"""Letters from which a column of texts gets a minimum width."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Paragraph of a report page; ``style`` are classes of the style sheet, such as ``faint`` or
    ``verdict pass``.
    """

    block: ClassVar[str] = "paragraph"
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """Figure (number) on a report page with its name, and a note below."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Row of figures next to each other on a report page, under a title."""

    block: ClassVar[str] = "tiles"
    title: str
    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Drawing on a report page with its title and a note."""

    block: ClassVar[str] = "drawing"
    content: Markup
    title: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChartView:
    """Chart of a result on a report page. ``has_title``: its title is shown above it. ``is_half``: it may be
    placed next to another one.
    """

    block: ClassVar[str] = "chart"
    chart: Chart
    has_title: bool = True
    is_half: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableView:
    """Table on a page.

    ``name`` is unique on the page. If the page has only the first ``most`` of ``of`` rows, ``file`` has all
    rows. The column ``named`` comes first and stays visible when the table is scrolled. ``tones`` and
    ``links`` have, for each cell of a column, a class of the style sheet and an id on the page. ``strong`` is
    True for emphasised rows. ``depths`` makes the first column a tree; its ``folded`` rows are shown if the
    box ``fold_text`` is ticked. ``filters`` are columns whose texts select rows. ``choices`` groups columns
    under names; the user selects one name under ``choice_title``, and the columns of this name are shown.
    """

    block: ClassVar[str] = "table"
    name: str
    table: Table
    title: str = ""
    label: str = ""
    note: str = ""
    of: int = 0
    file: str = ""
    most: int = _MOST_ROWS
    named: str = ""
    tones: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    links: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    strong: Sequence[bool] = ()
    depths: Sequence[int] = ()
    folded: Sequence[bool] = ()
    fold_text: str = ""
    filters: Collection[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict[str, str])
    choice_title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Part of a report page that is shown after a click on its summary."""

    block: ClassVar[str] = "fold"
    summary: str
    blocks: Sequence[Block]
    id: str = ""
    is_open: bool = False


Block = Paragraph | Tiles | Drawing | ChartView | TableView | Fold


@dataclass(frozen=True, slots=True)
class Section:
    """Section of a report page, with a link in the navigation."""

    id: str
    title: str
    blocks: Sequence[Block]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Page of a report. ``summary`` is above the sections."""

    title: str
    sections: Sequence[Section]
    summary: Sequence[Block] = ()


def page_html(page: Page) -> str:
    """Return the page as HTML."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE, "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    sections = [section for section in page.sections if section.blocks]
    names = NameTable()
    tables: dict[str, dict[str, Any]] = {}
    charts: dict[str, Mapping[str, object]] = {}
    for block in _leaves([*page.summary, *(block for section in sections for block in section.blocks)]):
        if isinstance(block, TableView):
            tables[block.name] = _table_data(block, names)
        elif isinstance(block, ChartView) and (values := block.chart.data(names)):
            charts[block.chart.id] = values
    texts = names.texts()

    def template(name: str) -> str:
        return (files(_PACKAGE) / "templates" / name).read_text(encoding="utf-8")

    data = {"texts": texts, "tables": tables, **({"charts": charts} if charts else {})}
    scripts = [template("page.js"), *([template("charts.js")] if charts else [])]
    return environment.get_template("page.html").render(
        version=__version__,
        page=page,
        sections=sections,
        tables=tables,
        head_cells=_head_cells,
        rows={name: _first_rows(table, texts) for name, table in tables.items()},
        counts={name: _count_text(table) for name, table in tables.items()},
        json=Markup(json_for_script(encode_json(data))),
        style=Markup(template("charts.css") + template("page.css")),
        scripts=list(map(Markup, scripts)),
    )


def result_page(
    title: str,
    headline: str,
    charts: Sequence[Chart],
    tables: Mapping[str, Table],
    diagnostics: Diagnostics | None = None,
) -> Page:
    """Return the page of a result: the summary line, a section for each table with the charts about it, and
    the diagnostics. Charts without a table come first.
    """
    sections = [
        Section(chart.id.replace("chart", "about"), chart.title, [ChartView(chart, has_title=False)])
        for chart in charts
        if chart.table not in tables
    ]
    timeline = next((chart for chart in charts if isinstance(chart, TimelineChart)), None)
    spans = timeline.links() if timeline else {}
    for name, table in tables.items():
        blocks: list[Block] = [ChartView(chart) for chart in charts if chart.table == name]
        heading = name.replace("_", " ").capitalize()
        if len(table) and (timeline is None or timeline.table != name):
            blocks.append(_table_view(name, heading, table, spans))
        sections.append(Section(name, heading, blocks))
    summary = [Paragraph(headline, "summary")]
    return Page(title=title, summary=summary, sections=[*sections, diagnostics_section(diagnostics)])


def _table_view(name: str, heading: str, table: Table, spans: Mapping[str, str]) -> TableView:
    """Return a table for a page: columns with few texts select rows, and operations link to their spans."""
    texts = {column.name: table.values(column) for column in table.header if column.is_text}
    links = {
        column: [spans.get(operation, "") for operation in texts[column]]
        for column in texts
        if spans and column in OPERATION_COLUMNS
    }
    filters = [column for column, values in texts.items() if 1 < len(set(values)) <= _MOST_CHOICES]
    named = next((column for column in ("name", *OPERATION_COLUMNS) if column in texts), "")
    return TableView(
        name=f"table-{name}", table=table, label=heading, filters=filters, links=links, named=named
    )


def _leaves(blocks: Sequence[Block]) -> Iterator[Block]:
    """Yield the blocks, with those inside folds instead of the folds."""
    for block in blocks:
        if isinstance(block, Fold):
            yield from _leaves(block.blocks)
        else:
            yield block


def _table_data(view: TableView, names: NameTable) -> dict[str, Any]:
    """Return a table in the form in which the page's script reads it: texts and values by column, null if
    unknown.
    """
    rows = min(len(view.table), view.most)
    header = [column for column in view.table.header if column.detail < 2]
    header.sort(key=lambda column: column.name != view.named)
    columns: list[dict[str, Any]] = []
    for column in header:
        values = view.table.values(column)[:rows]
        texts = [column.text(value) for value in values]
        entry: dict[str, Any] = {
            "name": column.name,
            "title": column.heading,
            "kind": column.kind,
            "codes": [names.row(text) for text in texts],
        }
        if not column.is_text:
            entry["values"] = [float(value) if isinstance(value, float) else value for value in values]
        elif max(map(len, texts), default=0) > _LONG_TEXT:
            entry["long"] = True
        if column.name in view.tones:
            entry["tones"] = list(view.tones[column.name][:rows])
        if column.name in view.links:
            entry["links"] = list(view.links[column.name][:rows])
        if column.name == view.named:
            entry["named"] = True
        if column.name in view.filters:
            entry["filter"] = True
        if column.name in view.choices:
            entry["choice"] = view.choices[column.name]
        columns.append(entry)
    data: dict[str, Any] = {"columns": columns, "rows": rows, "of": max(view.of, len(view.table))}
    if view.choices:
        data |= {"choices": list(dict.fromkeys(view.choices.values())), "choice": view.choice_title}
    if any(view.strong):
        data["strong"] = list(map(bool, view.strong[:rows]))
    if len(view.depths):
        data["levels"] = _levels(view.depths[:rows], ())
    if any(view.folded):
        folded = list(map(bool, view.folded[:rows]))
        data |= {"folded": folded, "fold": view.fold_text, "unfolded_levels": data["levels"]}
        data["levels"] = _levels(view.depths[:rows], folded)
    if view.file:
        data["file"] = view.file
    return data


def _levels(depths: Sequence[int], hidden: Sequence[bool]) -> list[int]:
    """Return the depth of each row of a tree, counted without the rows that are ``hidden``."""
    below: dict[int, int] = {}
    levels: list[int] = []
    for row, depth in enumerate(depths):
        level = below.get(depth - 1, 0)
        below[depth] = level + (0 if hidden and hidden[row] else 1)
        levels.append(min(level, _MOST_LEVELS))
    return levels


def _head_cells(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return class and title of the columns that the page shows before any click."""
    return [(_column_class(entry), entry["title"]) for entry in _first_columns(data)]


def _first_columns(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = (None, *data.get("choices", ())[:1])
    return [entry for entry in data["columns"] if entry.get("choice") in choices]


def _column_class(entry: Mapping[str, Any]) -> str:
    words = [
        "figure" if "values" in entry else "text",
        entry["kind"],
        *(("long",) if "long" in entry else ()),
    ]
    return " ".join(dict.fromkeys([*words, *(("named",) if "named" in entry else ())]))


def _first_rows(data: Mapping[str, Any], texts: Sequence[str]) -> Markup:
    """Return the first rows of a table as HTML, in the same form as the script draws all rows."""
    from markupsafe import Markup, escape

    folded, levels = data.get("folded", ()), data.get("levels", ())
    columns = [(entry, _column_class(entry)) for entry in _first_columns(data)]
    chosen = [row for row in range(data["rows"]) if not (folded and folded[row])][:_FIRST_ROWS]
    lines: list[str] = []
    for row in chosen:
        strong = ' class="strong"' if data.get("strong") and data["strong"][row] else ""
        cells: list[str] = []
        for place, (entry, kind) in enumerate(columns):
            text = texts[entry["codes"][row]]
            tone = f" {entry['tones'][row]}" if "tones" in entry else ""
            link = entry["links"][row] if "links" in entry else ""
            inside = escape(text)
            if link:
                inside = Markup('<a href="#{}">{}</a>').format(link, text)
            if "values" not in entry:
                level = f' style="--level:{levels[row]}"' if levels and not place else ""
                inside = Markup(f"<span{level}>{inside}</span>")
            share = entry["values"][row] if entry["kind"] == "share" else nan
            part = f' style="--part:{100 * max(0.0, min(share, 1.0)):.1f}%"' if isfinite(share) else ""
            cells.append(f'<td class="{escape(kind + tone)}"{part}>{inside}</td>')
        lines.append(f"<tr{strong}>{''.join(cells)}</tr>")
    return Markup("\n".join(lines))


def _count_text(data: Mapping[str, Any]) -> str:
    """Return the text about the number of rows in the form that the script writes; empty if all rows are
    shown.
    """
    found = data["rows"] - sum(data.get("folded", ()))
    counts = f"{min(found, _FIRST_ROWS):,} of {found:,} rows" if found > _FIRST_ROWS else ""
    if data["of"] > data["rows"]:
        where = f"; {data['file']} has all" if "file" in data else ""
        cut = f"the first {data['rows']:,} of {data['of']:,} rows are on this page{where}"
        return f"{counts}; {cut}" if counts else cut
    return counts


def code_text(*names: str, limit: int = 160, most: int = 0) -> Markup:
    """Return names from files as code, separated by commas; at most ``most`` (0: all)."""
    from markupsafe import Markup

    listed = names[:most] if most else names
    texts = (Markup("<code>{}</code>").format(shown(name, limit) or "(unnamed)") for name in listed)
    more = f" and {len(names) - len(listed):,} more" if len(names) > len(listed) else ""
    return Markup(", ").join(texts) + more


def inputs_text(inputs: Sequence[str], baseline: Sequence[str] = ()) -> Markup:
    """Return text that lists the inputs of a report, and the inputs that they are compared with."""
    text = code_text(*inputs, most=_MOST_INPUTS)
    return text + ", compared with " + code_text(*baseline, most=_MOST_INPUTS) if baseline else text


def diagnostics_section(diagnostics: Diagnostics | None, title: str = "Diagnostics") -> Section:
    """Return a section with the distinct diagnostics; without any it has no blocks, and is left out."""
    distinct = list({(row.code, row.path, row.message): row for row in diagnostics or ()}.values())
    header = (
        Column("severity"),
        Column("message", write=lambda text: shown(cast("str", text), 300)),
        Column("place", kind="code"),
        Column("code", kind="code"),
    )
    rows = [(row.severity.value, row.message, row.path or row.location, row.code) for row in distinct]
    view = TableView(
        name="diagnostics-table",
        label=title,
        table=table_from_rows(header, rows[:_MOST_DIAGNOSTICS]),
        of=len(rows),
        file="the JSON document",
        filters=("severity", "code"),
    )
    return Section("diagnostics", title, [view] if rows else [])
