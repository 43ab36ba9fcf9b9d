"""Matrix of round trips over many files: the columns that each pair of formats preserves, changes, or changes
without a report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from markupsafe import Markup
from msgspec import Meta

from hespas._version import __version__
from hespas.converters import ReadOptions, format_names, is_recognised, load_format
from hespas.files.documents import Count, document_bytes
from hespas.files.processes import pool
from hespas.files.streams import input_location
from hespas.graph.errors import FormatError, UsageError
from hespas.graph.progress import Progress
from hespas.report.page import (
    Block,
    Fold,
    Page,
    Paragraph,
    Section,
    TableView,
    code_text,
    page_html,
)
from hespas.report.tables import Column, Table, table_from_rows
from hespas.validators.roundtrip.columns import ColumnResult, ColumnStatus, summed
from hespas.validators.roundtrip.pairs import FilePairs, FormatPair, PairStatus, file_pairs

__all__ = [
    "SCHEMA_ID",
    "CellText",
    "MatrixCell",
    "RoundTripDocument",
    "RoundTrips",
    "cell_text",
    "matrix",
    "matrix_table",
    "roundtrip",
    "roundtrip_html",
    "roundtrip_json",
    "unreported",
]

_ANY = "*"
_SHIFTED = frozenset({"nodes", "ranks", "id", "data_deps", "control_deps"})
"""Columns in which one added or removed node, which is one diagnostic, changes many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """Round trips from one format (``source``) through another (``via``), summed over all files.

    ``compared`` is the number of files that were converted back and compared, ``written`` the number written
    to a write-only format. ``refused`` counts files by the message with which the writer refused them.
    ``unreadable`` counts files by the message with which the reader refused the written file. ``findings``
    counts diagnostics by code. ``unreported`` lists columns that changed in some file without a diagnostic.
    """

    source: str
    via: str
    compared: int
    written: int
    refused: dict[str, int]
    unreadable: dict[str, int]
    columns: tuple[ColumnResult, ...]
    findings: dict[str, int]
    unreported: tuple[str, ...]

    @property
    def changed(self) -> tuple[ColumnResult, ...]:
        """Return the columns with some changed rows."""
        return tuple(column for column in self.columns if column.kept is ColumnStatus.CHANGED)

    @property
    def lost(self) -> tuple[ColumnResult, ...]:
        """Return the columns that were lost entirely."""
        return tuple(column for column in self.columns if column.kept is ColumnStatus.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrips:
    """Round trips of all files, and the matrix of cells by pair of formats, in the order of the format
    registry. ``skipped`` lists profiles in folders, which are not converted.
    """

    inputs: tuple[FilePairs, ...]
    cells: tuple[MatrixCell, ...]
    skipped: tuple[FilePairs, ...] = ()

    @property
    def valid(self) -> bool:
        """Return True if every written file can be read and every loss is reported."""
        return not any(cell.unreported or cell.unreadable for cell in self.cells)


def matrix(files: Sequence[FilePairs]) -> RoundTrips:
    """Return the matrix of the round trips of all files."""
    order = {name: position for position, name in enumerate(format_names())}
    pairs: dict[tuple[str, str], list[FormatPair]] = {}
    for pair in (pair for file in files for pair in file.pairs):
        pairs.setdefault((pair.source, pair.via), []).append(pair)
    ordered = sorted(pairs, key=lambda key: (order[key[0]], order[key[1]]))
    cells = tuple(_cell(source, via, pairs[source, via]) for source, via in ordered)
    return RoundTrips(
        inputs=tuple(file for file in files if not file.skipped),
        cells=cells,
        skipped=tuple(file for file in files if file.skipped),
    )


def _cell(source: str, via: str, pairs: Sequence[FormatPair]) -> MatrixCell:
    compared = [pair for pair in pairs if pair.columns]
    findings = Counter[str]()
    for pair in pairs:
        findings.update(pair.findings)
    refused, unreadable = (
        Counter(pair.refused for pair in pairs if pair.status is status)
        for status in (PairStatus.REFUSED, PairStatus.UNREADABLE)
    )
    columns = tuple(map(summed, zip(*(pair.columns for pair in compared), strict=True)))
    unreported_names = {name for pair in compared for name in unreported(pair)}
    return MatrixCell(
        source=source,
        via=via,
        compared=len(compared),
        written=sum(pair.status is PairStatus.WRITE_ONLY for pair in pairs),
        refused=refused,
        unreadable=unreadable,
        columns=columns,
        findings=findings,
        unreported=tuple(column.column for column in columns if column.column in unreported_names),
    )


def unreported(pair: FormatPair) -> list[str]:
    """Return the columns of a round trip that have more changed rows than diagnostics about them.

    Each format declares the columns that its diagnostics are about.
    """
    formats = {load_format(name).name: load_format(name) for name in (pair.source, pair.via)}
    declared = [item for entry in formats.values() for item in entry.losses.items()]
    return [
        column.column
        for column in pair.columns
        if column.kept in {ColumnStatus.CHANGED, ColumnStatus.LOST}
        and not _is_reported(column, declared, pair.findings)
    ]


def _is_reported(
    column: ColumnResult, declared: Sequence[tuple[str, tuple[str, ...]]], findings: Mapping[str, int]
) -> bool:
    """Return True if the diagnostics about a column count at least as many rows as changed. One diagnostic
    about added or removed nodes is enough for any number of rows, because such nodes shift all rows.
    """
    names = {_ANY, column.column, column.column.partition(".")[0]}
    about = [(code, columns) for code, columns in declared if names & set(columns)]
    reported = [(code, columns) for code, columns in about if not code or code in findings]
    codes = {code for code, _ in reported}
    if "" in codes or any("nodes" in columns for _, columns in reported):
        return True
    if not codes or column.column in _SHIFTED:
        return bool(codes)
    return column.changed_in_one <= sum(findings[code] for code in codes)


def roundtrip(
    paths: Sequence[Path],
    formats: Sequence[str] = (),
    *,
    options: ReadOptions | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> RoundTrips:
    """Convert each file through every pair of ``formats`` (default: all) and back.

    Of a folder, all files of known formats are converted, unless the folder is one set of rank files.
    Profiles in a folder are skipped. ``options`` are for reading the inputs; ``jobs`` is the number of
    processes. Raises ``FormatError`` for unreadable input, and ``UsageError`` for unknown formats or if no
    input is a workload.
    """
    chosen = [load_format(name) for name in formats]
    if chosen and not any(entry.write for entry in chosen):
        raise UsageError(
            f"none of these formats can be written: {', '.join(formats)}",
            hint="hespas-convert --list-formats",
        )
    inputs = [entry for path in paths for entry in _inputs(path)]
    if not inputs:
        raise UsageError(
            "no file has a known format", hint="give files of the formats in hespas-convert --list-formats"
        )
    work = partial(_pairs_of, formats=tuple(formats), options=options or ReadOptions())
    pairs = dict(pool(work, inputs, jobs, progress=progress))
    done = [pairs[index] for index in range(len(inputs))]
    if all(file.skipped for file in done):
        raise UsageError(
            "round trips require workloads, and all inputs are profiles",
            hint="give programs or traces",
        )
    return matrix(done)


def _inputs(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the inputs of a path: the file itself, or the files in a folder. The flag is True for files in a
    folder.
    """
    if not input_location(path).exists():
        raise FormatError("no such file or directory", path=str(path), hint="check the path")
    if not path.is_dir() or is_recognised(path):
        yield path, False
        return
    for entry in sorted(path.rglob("*")):
        if entry.is_file() and is_recognised(entry):
            yield entry, True


def _pairs_of(entry: tuple[Path, bool], formats: Sequence[str], options: ReadOptions) -> FilePairs:
    path, in_folder = entry
    return file_pairs(path, formats, options=options, in_folder=in_folder)


SCHEMA_ID: Final = "hespas.roundtrip/1"
"""Value of ``schema`` in documents of this version."""

_Number = Annotated[int, Meta(ge=1)]


class _DiagnosticCount(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    count: _Number


_DiagnosticCounts = tuple[_DiagnosticCount, ...]


class _InputRow(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    format: str
    diagnostics: Annotated[_DiagnosticCounts, Meta(description="Diagnostics of its reader.")]
    skipped: Annotated[str, Meta(description="Reason if it was not tried; else empty.")]


class _ColumnRow(msgspec.Struct, frozen=True, kw_only=True):
    column: str
    kept: Literal["exact", "changed", "cannot express"]
    known: Annotated[Count, Meta(description="Rows with known values before.")]
    changed: Annotated[Count, Meta(description="Rows with other values after.")]
    reported: Annotated[bool, Meta(description="A diagnostic or the format's declaration covers it.")]


class _CellRow(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    via: str
    verdict: str
    compared: Annotated[Count, Meta(description="Files that were compared.")]
    written: Annotated[Count, Meta(description="Files written in a format that cannot be read.")]
    refused: Annotated[dict[str, _Number], Meta(description="Files by the message of the refusal.")]
    unreadable: Annotated[
        dict[str, _Number],
        Meta(description="Files whose written form the reader refuses, by its message."),
    ]
    columns: Annotated[tuple[_ColumnRow, ...], Meta(description="Columns with known values in some file.")]
    diagnostics: _DiagnosticCounts


class RoundTripDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate roundtrip."""

    schema: Literal["hespas.roundtrip/1"] = SCHEMA_ID
    hespas_version: str = __version__
    valid: Annotated[
        bool,
        Meta(description="Every written file can be read, and every loss is reported."),
    ]
    inputs: tuple[_InputRow, ...]
    formats: tuple[str, ...]
    cells: Annotated[
        tuple[_CellRow, ...],
        Meta(
            description="One per pair: from source through via and back to source (one way where source "
            "cannot be written)."
        ),
    ]
    diagnostics: _DiagnosticCounts


@dataclass(frozen=True, slots=True)
class CellText:
    """Text of a cell of the matrix of round trips, with a tone that selects its colour: good, lossy, bad or
    none.
    """

    text: str
    tone: str


def cell_text(cell: MatrixCell) -> CellText:
    """Return the text of a cell in the matrix."""
    if cell.unreadable:
        return CellText("UNREADABLE", "bad")
    if cell.unreported:
        return CellText(f"{len(cell.unreported)} UNREPORTED", "bad")
    if not cell.compared:
        return CellText("refused", "none") if cell.refused else CellText("not read back", "none")
    losses = [
        f"{len(part)} {word}" for part, word in ((cell.lost, "lost"), (cell.changed, "changed")) if part
    ]
    refused = f" ({sum(cell.refused.values())} refused)" if cell.refused else ""
    return CellText((", ".join(losses) or "exact") + refused, "lossy" if losses or refused else "good")


def roundtrip_json(done: RoundTrips) -> bytes:
    """Return the document as indented UTF-8 JSON that ends in a newline."""
    totals = Counter[str]()
    for cell in done.cells:
        totals.update(cell.findings)
    document = RoundTripDocument(
        valid=done.valid,
        inputs=tuple(
            _InputRow(
                path=file.path,
                format=file.format,
                diagnostics=_diagnostic_counts(file.findings),
                skipped=file.skipped,
            )
            for file in (*done.inputs, *done.skipped)
        ),
        formats=_formats(done),
        cells=tuple(map(_cell_row, done.cells)),
        diagnostics=_diagnostic_counts(totals),
    )
    return document_bytes(document)


def _cell_row(cell: MatrixCell) -> _CellRow:
    return _CellRow(
        source=cell.source,
        via=cell.via,
        verdict=cell_text(cell).text,
        compared=cell.compared,
        written=cell.written,
        refused=cell.refused,
        unreadable=cell.unreadable,
        columns=tuple(
            _ColumnRow(
                column=column.column,
                kept=column.kept.value,
                known=column.known,
                changed=column.changed,
                reported=column.column not in cell.unreported,
            )
            for column in cell.columns
            if column.kept is not ColumnStatus.ABSENT
        ),
        diagnostics=_diagnostic_counts(cell.findings),
    )


def _diagnostic_counts(counts: Mapping[str, int]) -> tuple[_DiagnosticCount, ...]:
    return tuple(_DiagnosticCount(code=code, count=count) for code, count in sorted(counts.items()))


def _formats(done: RoundTrips) -> tuple[str, ...]:
    """Return the formats of all cells, in order of the registry."""
    used = {name for cell in done.cells for name in (cell.source, cell.via)}
    return tuple(name for name in format_names() if name in used)


def roundtrip_html(done: RoundTrips) -> str:
    """Return an offline HTML page with the matrix and the columns of every cell."""
    skipped = f", {len(done.skipped):,} profiles skipped" if done.skipped else ""
    about = (
        f"{len(done.inputs):,} files{skipped}. A row is the source format, a column the format through which "
        "it is converted and back. A cell counts the lost and changed columns of the graph."
    )
    verdict = "Every loss is reported." if done.valid else "Some losses are not reported."
    files = table_from_rows(
        (Column("file", kind="code"), Column("format")), [(file.path, file.format) for file in done.inputs]
    )
    page = Page(
        title="Round trips between formats",
        summary=[
            Paragraph(about, "faint"),
            Paragraph(verdict, f"verdict {'good' if done.valid else 'bad'}"),
        ],
        sections=[
            Section("matrix", "Matrix", [_matrix_view(done)] if done.cells else []),
            Section("cells", "Cell by cell", [_cell_fold(cell) for cell in done.cells]),
            Section("files", "Files", [TableView(name="table-files", table=files, label="Files")]),
        ],
    )
    return page_html(page)


def matrix_table(done: RoundTrips) -> Table:
    """Return the matrix: one row per source format, one column per format that it goes through."""
    cells = {(cell.source, cell.via): cell for cell in done.cells}
    sources = list(dict.fromkeys(source for source, _ in cells))
    targets = list(dict.fromkeys(via for _, via in cells))
    rows = [
        (
            source,
            *(cell_text(cells[source, via]).text if (source, via) in cells else "" for via in targets),
        )
        for source in sources
    ]
    return table_from_rows((Column("source", "from \\ through"), *map(Column, targets)), rows)


def _matrix_view(done: RoundTrips) -> TableView:
    """Return the matrix as a view in which each cell is a link to the columns of its pair."""
    table = matrix_table(done)
    cells = {(cell.source, cell.via): cell for cell in done.cells}
    sources = list(table.columns["source"])
    tones: dict[str, list[str]] = {}
    links: dict[str, list[str]] = {}
    for column in table.header[1:]:
        row = [cells.get((source, column.name)) for source in sources]
        tones[column.name] = ["none" if cell is None else cell_text(cell).tone for cell in row]
        links[column.name] = ["" if cell is None else f"{cell.source}--{cell.via}" for cell in row]
    return TableView(
        name="table-matrix", table=table, label="Matrix", named="source", tones=tones, links=links
    )


def _cell_fold(cell: MatrixCell) -> Fold:
    """Return a foldable section of the page for one pair of formats: its columns, refusals and
    diagnostics.
    """
    counts = (
        f"{cell.compared:,} compared, {cell.written:,} written only, {sum(cell.refused.values()):,} refused, "
        f"{sum(cell.unreadable.values()):,} unreadable."
    )
    blocks: list[Block] = [Paragraph(counts)]
    for word, tone, messages in (
        ("refused", "", cell.refused),
        ("written but unreadable", "bad", cell.unreadable),
    ):
        blocks += [
            Paragraph(Markup("{} {}: {}").format(f"{count:,}", word, code_text(message, limit=400)), tone)
            for message, count in messages.items()
        ]
    columns = [column for column in cell.columns if column.kept is not ColumnStatus.ABSENT]
    rows: list[tuple[object, ...]] = []
    tones: list[str] = []
    for column in columns:
        is_silent = column.column in cell.unreported
        is_exact = column.kept is ColumnStatus.EXACT
        reported = "" if is_exact else "NO" if is_silent else "yes"
        rows.append((column.column, column.kept.value, column.known, column.changed, reported))
        tones.append("good" if is_exact else "bad" if is_silent else "lossy")
    header = (
        Column("column"),
        Column("kept"),
        Column("known", "known rows", "count"),
        Column("changed", "rows changed", "count"),
        Column("reported"),
    )
    name = f"{cell.source}--{cell.via}"
    if rows:
        table = table_from_rows(header, rows)
        view = TableView(name=f"table-{name}", table=table, label=name, tones={"kept": tones})
        blocks.append(view)
    if cell.findings:
        found = [f"{code} {count:,}" for code, count in sorted(cell.findings.items())]
        blocks.append(Paragraph(Markup("Findings: {}").format(code_text(*found))))
    return Fold(
        summary=f"{cell.source} \N{RIGHTWARDS ARROW} {cell.via}: {cell_text(cell).text}",
        blocks=blocks,
        id=name,
    )
