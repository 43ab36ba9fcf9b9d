"""The pairs of many files as one matrix: what each pair of formats keeps, and whether it tells the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hespas.converters import format_names, load_format
from hespas.validators.roundtrip.columns import ColumnResult, Kept, summed
from hespas.validators.roundtrip.pairs import FilePairs, Pair, PairStatus

__all__ = ["Cell", "RoundTrips", "matrix", "unreported"]

_ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pair of formats over all files. ``compared`` files came back, ``written`` ones cannot be read.

    ``refused`` counts files by what the writer said; ``findings`` sums what was reported; ``unreported`` are
    columns that were not kept in some file and that nothing reported there accounts for.
    """

    source: str
    via: str
    compared: int
    written: int
    refused: dict[str, int]
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
    """All files and the matrix over them, cells in order of the registry."""

    inputs: tuple[FilePairs, ...]
    cells: tuple[Cell, ...]

    @property
    def valid(self) -> bool:
        """Whether everything that was not kept was reported."""
        return not any(cell.unreported for cell in self.cells)


def matrix(files: Sequence[FilePairs]) -> RoundTrips:
    """Sum the pairs of all files."""
    order = {name: place for place, name in enumerate(format_names())}
    pairs: dict[tuple[str, str], list[Pair]] = {}
    for pair in (pair for file in files for pair in file.pairs):
        pairs.setdefault((pair.source, pair.via), []).append(pair)
    ordered = sorted(pairs, key=lambda key: (order[key[0]], order[key[1]]))
    cells = tuple(_cell(source, via, pairs[source, via]) for source, via in ordered)
    return RoundTrips(inputs=tuple(files), cells=cells)


def _cell(source: str, via: str, pairs: Sequence[Pair]) -> Cell:
    compared = [pair for pair in pairs if pair.columns]
    findings: dict[str, int] = {}
    refused: dict[str, int] = {}
    for pair in pairs:
        for code, count in pair.findings.items():
            findings[code] = findings.get(code, 0) + count
        if pair.status is PairStatus.REFUSED:
            refused[pair.refused] = refused.get(pair.refused, 0) + 1
    columns = tuple(map(summed, zip(*(pair.columns for pair in compared), strict=True)))
    silent = {name for pair in compared for name in unreported(pair)}
    return Cell(
        source=source,
        via=via,
        compared=len(compared),
        written=sum(pair.status is PairStatus.WRITE_ONLY for pair in pairs),
        refused=refused,
        columns=columns,
        findings=findings,
        unreported=tuple(column.column for column in columns if column.column in silent),
    )


def unreported(pair: Pair) -> list[str]:
    """The columns of a pair that were not kept and that no declared loss of a reported finding covers."""
    formats = [load_format(name) for name in (pair.source, pair.via)]
    names = {name for entry in formats for name in _covered(entry.losses, pair.findings)}
    return [
        column.column
        for column in pair.columns
        if column.kept in {Kept.CHANGED, Kept.LOST} and not _is_covered(column.column, names)
    ]


def _covered(losses: Mapping[str, tuple[str, ...]], findings: Mapping[str, int]) -> Iterator[str]:
    for code, names in losses.items():
        if not code or code in findings:
            yield from names


def _is_covered(column: str, names: set[str]) -> bool:
    return bool({_ANY, column, column.partition(".")[0]} & names)
