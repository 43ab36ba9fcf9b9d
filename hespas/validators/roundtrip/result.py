"""The pairs of many files as one matrix: what each pair of formats keeps, and whether it tells the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hespas.converters import format_names, load_format
from hespas.validators.roundtrip.columns import ColumnResult, Kept, summed
from hespas.validators.roundtrip.pairs import FilePairs, Pair, PairStatus

__all__ = ["Cell", "RoundTrips", "matrix", "unreported"]

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
    findings: dict[str, int] = {}
    refused: dict[PairStatus, dict[str, int]] = {PairStatus.REFUSED: {}, PairStatus.UNREADABLE: {}}
    for pair in pairs:
        for code, count in pair.findings.items():
            findings[code] = findings.get(code, 0) + count
        if pair.status in refused:
            told = refused[pair.status]
            told[pair.refused] = told.get(pair.refused, 0) + 1
    columns = tuple(map(summed, zip(*(pair.columns for pair in compared), strict=True)))
    silent = {name for pair in compared for name in unreported(pair)}
    return Cell(
        source=source,
        via=via,
        compared=len(compared),
        written=sum(pair.status is PairStatus.WRITE_ONLY for pair in pairs),
        refused=refused[PairStatus.REFUSED],
        unreadable=refused[PairStatus.UNREADABLE],
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
    """Whether the findings that speak of a column are as many as its rows that changed."""
    names = {_ANY, column.column, column.column.partition(".")[0]}
    codes = {code for code, columns in declared if names & set(columns) and (not code or code in findings)}
    if "" in codes:
        return True
    if not codes or column.column in _SHIFTED:
        return bool(codes)
    return column.changed_in_one <= sum(findings[code] for code in codes)
