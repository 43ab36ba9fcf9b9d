"""Round trips as documents: JSON as ``hespas/schemas/roundtrip.schema.json`` says, and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hespas import __version__
from hespas.converters import format_names, load_format
from hespas.files.documents import document_bytes
from hespas.validators.roundtrip.columns import Kept
from hespas.validators.roundtrip.pairs import FilePairs
from hespas.validators.roundtrip.result import Cell, RoundTrips

__all__ = ["SCHEMA_ID", "CellText", "cell_text", "roundtrip_html", "roundtrip_json"]

SCHEMA_ID = "hespas.roundtrip/1"
"""What a document of this version says in ``schema``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    code: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    path: str
    format: str
    diagnostics: tuple[_Finding, ...]
    skipped: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    column: str
    kept: str
    known: int
    changed: int
    reported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    source: str
    via: str
    verdict: str
    compared: int
    written: int
    refused: Mapping[str, int]
    unreadable: Mapping[str, int]
    columns: tuple[_Column, ...]
    diagnostics: tuple[_Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    schema: str
    hespas_version: str
    valid: bool
    inputs: tuple[_Input, ...]
    formats: tuple[str, ...]
    cells: tuple[_Cell, ...]
    diagnostics: tuple[_Finding, ...]


@dataclass(frozen=True, slots=True)
class CellText:
    """A cell in a word or two, and which colour that has: good, lossy, bad or none."""

    text: str
    tone: str


def cell_text(cell: Cell) -> CellText:
    """What stands in the matrix."""
    if cell.unreadable:
        return CellText("UNREADABLE", "bad")
    if cell.unreported:
        return CellText(f"{len(cell.unreported)} UNREPORTED", "bad")
    if not cell.compared:
        return CellText("refused", "none") if cell.refused else CellText("not read back", "none")
    told = [f"{len(part)} {word}" for part, word in ((cell.lost, "lost"), (cell.changed, "changed")) if part]
    refused = f" ({sum(cell.refused.values())} refused)" if cell.refused else ""
    return CellText((", ".join(told) or "exact") + refused, "lossy" if told or refused else "good")


def roundtrip_json(done: RoundTrips) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline."""
    totals: dict[str, int] = {}
    for cell in done.cells:
        for code, count in cell.findings.items():
            totals[code] = totals.get(code, 0) + count
    document = _Document(
        schema=SCHEMA_ID,
        hespas_version=__version__,
        valid=done.valid,
        inputs=tuple(map(_input, (*done.inputs, *done.skipped))),
        formats=_formats(done),
        cells=tuple(map(_cell, done.cells)),
        diagnostics=_findings(totals),
    )
    return document_bytes(document)


def _input(file: FilePairs) -> _Input:
    return _Input(
        path=file.path, format=file.format, diagnostics=_findings(file.findings), skipped=file.skipped
    )


def _cell(cell: Cell) -> _Cell:
    return _Cell(
        source=cell.source,
        via=cell.via,
        verdict=cell_text(cell).text,
        compared=cell.compared,
        written=cell.written,
        refused=cell.refused,
        unreadable=cell.unreadable,
        columns=tuple(
            _Column(
                column=column.column,
                kept=column.kept.value,
                known=column.known,
                changed=column.changed,
                reported=column.column not in cell.unreported,
            )
            for column in cell.columns
            if column.kept is not Kept.ABSENT
        ),
        diagnostics=_findings(cell.findings),
    )


def _findings(counts: Mapping[str, int]) -> tuple[_Finding, ...]:
    return tuple(_Finding(code=code, count=count) for code, count in sorted(counts.items()))


def _formats(done: RoundTrips) -> tuple[str, ...]:
    """The formats met, in order of the registry."""
    met = {name for cell in done.cells for name in (cell.source, cell.via)}
    return tuple(name for name in format_names() if name in met)


def roundtrip_html(done: RoundTrips) -> str:
    """One page that works offline: the matrix, and every cell's columns under it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hespas.validators.roundtrip", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    cells = {(cell.source, cell.via): cell for cell in done.cells}
    return environment.get_template("roundtrip.html").render(
        version=__version__,
        done=done,
        cells=cells,
        sources=[name for name in _formats(done) if any(name == source for source, _ in cells)],
        targets=[name for name in _formats(done) if any(name == via for _, via in cells)],
        cell_text=cell_text,
        kept=Kept,
        titles={name: load_format(name).title for name in _formats(done)},
    )
