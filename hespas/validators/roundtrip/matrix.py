"""The pairs of many files as one matrix: what each pair of formats keeps, and whether it tells the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from hespas._version import __version__
from hespas.converters import ReadOptions, format_names, is_recognised, load_format
from hespas.files.documents import Count, document_bytes
from hespas.files.sandbox import safe_spawning, start_worker, worker_state
from hespas.files.streams import located
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.roundtrip.pairs import (
    ColumnResult,
    FilePairs,
    Kept,
    Pair,
    PairStatus,
    file_pairs,
    summed,
)

__all__ = [
    "SCHEMA_ID",
    "Cell",
    "CellText",
    "RoundTripDocument",
    "RoundTrips",
    "cell_text",
    "matrix",
    "roundtrip",
    "roundtrip_html",
    "roundtrip_json",
    "unreported",
]

_ANY = "*"
_SHIFTED = frozenset({"nodes", "ranks", "id", "data_deps", "control_deps"})
"""What one node more or less, which is one finding, changes in many others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pair of formats over all files. ``compared`` files came back, ``written`` ones cannot be read.

    ``refused`` counts files by what the writer said, ``unreadable`` those that were written and that the
    reader of the format refuses, by what that said; ``findings`` sums what was reported; ``unreported`` are
    columns that were not kept in some file and that nothing reported there accounts for.
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
        """Columns of which some rows came back otherwise."""
        return tuple(column for column in self.columns if column.kept is Kept.CHANGED)

    @property
    def lost(self) -> tuple[ColumnResult, ...]:
        """Columns that did not come back at all."""
        return tuple(column for column in self.columns if column.kept is Kept.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrips:
    """All files and the matrix over them, cells in order of the registry. ``skipped`` are files of folders
    that no pair was tried with.
    """

    inputs: tuple[FilePairs, ...]
    cells: tuple[Cell, ...]
    skipped: tuple[FilePairs, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether everything that was written can be read, and all that was not kept was reported."""
        return not any(cell.unreported or cell.unreadable for cell in self.cells)


def matrix(files: Sequence[FilePairs]) -> RoundTrips:
    """Sum the pairs of all files."""
    order = {name: place for place, name in enumerate(format_names())}
    pairs: dict[tuple[str, str], list[Pair]] = {}
    for pair in (pair for file in files for pair in file.pairs):
        pairs.setdefault((pair.source, pair.via), []).append(pair)
    ordered = sorted(pairs, key=lambda key: (order[key[0]], order[key[1]]))
    cells = tuple(_cell(source, via, pairs[source, via]) for source, via in ordered)
    return RoundTrips(
        inputs=tuple(file for file in files if not file.skipped),
        cells=cells,
        skipped=tuple(file for file in files if file.skipped),
    )


def _cell(source: str, via: str, pairs: Sequence[Pair]) -> Cell:
    compared = [pair for pair in pairs if pair.columns]
    findings = Counter[str]()
    for pair in pairs:
        findings.update(pair.findings)
    refused, unreadable = (
        Counter(pair.refused for pair in pairs if pair.status is status)
        for status in (PairStatus.REFUSED, PairStatus.UNREADABLE)
    )
    columns = tuple(map(summed, zip(*(pair.columns for pair in compared), strict=True)))
    silent = {name for pair in compared for name in unreported(pair)}
    return Cell(
        source=source,
        via=via,
        compared=len(compared),
        written=sum(pair.status is PairStatus.WRITE_ONLY for pair in pairs),
        refused=refused,
        unreadable=unreadable,
        columns=columns,
        findings=findings,
        unreported=tuple(column.column for column in columns if column.column in silent),
    )


def unreported(pair: Pair) -> list[str]:
    """The columns of a pair that were not kept and that no declared loss of a reported finding covers, or not
    as often as rows changed.
    """
    formats = {load_format(name).name: load_format(name) for name in (pair.source, pair.via)}
    declared = [item for entry in formats.values() for item in entry.losses.items()]
    return [
        column.column
        for column in pair.columns
        if column.kept in {Kept.CHANGED, Kept.LOST} and not _is_reported(column, declared, pair.findings)
    ]


def _is_reported(
    column: ColumnResult, declared: Sequence[tuple[str, tuple[str, ...]]], findings: Mapping[str, int]
) -> bool:
    """Whether the findings about a column are as many as its rows that changed; where one of them is that
    there are other nodes now, rows stand elsewhere and are not counted.
    """
    names = {_ANY, column.column, column.column.partition(".")[0]}
    about = [(code, columns) for code, columns in declared if names & set(columns)]
    found = [(code, columns) for code, columns in about if not code or code in findings]
    codes = {code for code, _ in found}
    if "" in codes or any("nodes" in columns for _, columns in found):
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
    progress: Callable[[int, int], None] | None = None,
) -> RoundTrips:
    """Take each file through every pair of ``formats`` (default: all that are registered).

    A folder that is no set of rank files stands for the files in it that some format knows; profiles in it
    are skipped. ``options`` say how to read the inputs; ``jobs`` is the number of processes. Raises
    ``FormatError`` for unreadable input, ``UsageError`` for unknown formats and where there is nothing to
    try.
    """
    chosen = [load_format(name) for name in formats]
    if chosen and not any(entry.write for entry in chosen):
        raise UsageError(
            f"there is no pair to try: none of these formats can be written: {', '.join(formats)}",
            hint="hespas-convert --list-formats",
        )
    inputs = [given for path in paths for given in _inputs(path)]
    if not inputs:
        raise UsageError("none of these files is of a known format", hint="hespas-convert --list-formats")
    done: list[FilePairs] = []
    # What is assumed of inputs here is not known in other processes.
    for result in _each(inputs, formats, options or ReadOptions(), jobs):
        done.append(result)
        if progress:
            progress(len(done), len(inputs))
    if all(file.skipped for file in done):
        raise UsageError(
            "there is nothing to try: round trips are of workloads, and these are profiles",
            hint="give programs or traces",
        )
    return matrix(done)


def _inputs(path: Path) -> Iterator[tuple[Path, bool]]:
    """The inputs that a path names, and whether they were met in a folder: itself, or what that holds."""
    if not located(path).exists():
        raise FormatError("no such file or directory", path=str(path), hint="check the path")
    if not path.is_dir() or is_recognised(path):
        yield path, False
        return
    for entry in sorted(path.rglob("*")):
        if entry.is_file() and is_recognised(entry):
            yield entry, True


def _stands_somewhere() -> bool:
    """Whether the current folder is still there: a process that is spawned starts in it."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _pairs_of(given: tuple[Path, bool], formats: Sequence[str], options: ReadOptions) -> FilePairs:
    path, in_folder = given
    return file_pairs(path, formats, options=options, in_folder=in_folder)


def _each(
    inputs: Sequence[tuple[Path, bool]], formats: Sequence[str], options: ReadOptions, jobs: int
) -> Iterator[FilePairs]:
    """The pairs of each input, in order. Processes are spawned: forking one that has threads is unsafe."""
    pairs_of = partial(_pairs_of, formats=tuple(formats), options=options)
    if jobs <= 1 or len(inputs) == 1 or not _stands_somewhere():
        yield from map(pairs_of, inputs)
        return
    context = get_context("spawn")
    with safe_spawning(), ProcessPoolExecutor(jobs, context, start_worker, worker_state()) as pool:
        yield from pool.map(pairs_of, inputs)


SCHEMA_ID: Final = "hespas.roundtrip/1"
"""What a document of this version says in ``schema``."""

_Number = Annotated[int, Meta(ge=1)]


class _Finding(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    count: _Number


_Findings = tuple[_Finding, ...]


class _InputRow(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    format: str
    diagnostics: Annotated[_Findings, Meta(description="What its reader reported.")]
    skipped: Annotated[str, Meta(description="Why no pair was tried with it; empty where pairs were.")]


class _ColumnRow(msgspec.Struct, frozen=True, kw_only=True):
    column: str
    kept: Literal["exact", "changed", "cannot express"]
    known: Annotated[Count, Meta(description="Rows that said something.")]
    changed: Annotated[Count, Meta(description="Rows that say something else afterwards.")]
    reported: Annotated[bool, Meta(description="A finding or the format's declaration accounts for it.")]


class _CellRow(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    via: str
    verdict: str
    compared: Annotated[Count, Meta(description="Files that came back.")]
    written: Annotated[Count, Meta(description="Files written in a format that cannot be read.")]
    refused: Annotated[dict[str, _Number], Meta(description="Files by the message of the refusal.")]
    unreadable: Annotated[
        dict[str, _Number],
        Meta(description="Files that were written and that their own reader refuses, by its message."),
    ]
    columns: Annotated[tuple[_ColumnRow, ...], Meta(description="Columns that said something in some file.")]
    diagnostics: _Findings


class RoundTripDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate roundtrip."""

    schema: Literal["hespas.roundtrip/1"] = SCHEMA_ID
    hespas_version: str = __version__
    valid: Annotated[
        bool,
        Meta(description="Everything that was written can be read, and all that was not kept was reported."),
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
    diagnostics: _Findings


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
    totals = Counter[str]()
    for cell in done.cells:
        totals.update(cell.findings)
    document = RoundTripDocument(
        valid=done.valid,
        inputs=tuple(map(_input_row, (*done.inputs, *done.skipped))),
        formats=_formats(done),
        cells=tuple(map(_cell_row, done.cells)),
        diagnostics=_findings(totals),
    )
    return document_bytes(document)


def _input_row(file: FilePairs) -> _InputRow:
    return _InputRow(
        path=file.path, format=file.format, diagnostics=_findings(file.findings), skipped=file.skipped
    )


def _cell_row(cell: Cell) -> _CellRow:
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
