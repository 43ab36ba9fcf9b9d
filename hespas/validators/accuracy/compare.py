"""Two accuracy reports side by side: which errors grew."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from hespas._version import __version__
from hespas.files.documents import Figure, document_bytes
from hespas.files.streams import limits, located, read_document
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.validators.accuracy.document import SCHEMA_ID

__all__ = [
    "COMPARISON_SCHEMA_ID",
    "Change",
    "Comparison",
    "ComparisonDocument",
    "compare_reports",
    "comparison_json",
]

COMPARISON_SCHEMA_ID: Final = "hespas.compare/1"
_MOST_SOURCES = 5
_HINT = "write it with accuracy --json FILE"
_TAKES = "compare takes two documents of hespas-validate accuracy --json FILE"


_Error = Annotated[float, msgspec.Meta(ge=0.0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0 + 1e-6)]
"""A sum of parts over the whole, so its last digits may pass 1."""


class _Summary(msgspec.Struct, frozen=True):
    estimator: str
    hardware: str
    level: str
    op_class: str
    size: str
    mape: _Error | None
    median_ape: _Error | None
    coverage: _Share | None


class _Run(msgspec.Struct, frozen=True):
    source: str
    hardware: str
    estimator: str
    basis: str
    relative_error: float | None


class _Source(msgspec.Struct, frozen=True):
    source: str
    hardware: str


class _Any(msgspec.Struct, frozen=True):
    schema: str


class _Report(msgspec.Struct, frozen=True):
    schema: str
    summary: list[_Summary]
    end_to_end: list[_Run]
    sources: list[_Source] = []  # msgspec copies it


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure of both reports; every one is an error: smaller is better, ``difference`` > 0 is worse."""

    what: str
    figure: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """How much the figure grew."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``only_base`` and ``only_new`` name the figures that one report alone has; ``base_sources`` and
    ``new_sources`` the sources that one alone is of: where there are any, errors over all sources are of
    different work and say nothing of each other.
    """

    base: str
    new: str
    changes: tuple[Change, ...]
    only_base: tuple[str, ...]
    only_new: tuple[str, ...]
    base_sources: tuple[str, ...] = ()
    new_sources: tuple[str, ...] = ()

    def unlike(self) -> str:
        """A sentence where the reports are of different sources; else the empty text."""
        told = [
            f"only the {name} is of {', '.join(map(clipped, sources[:_MOST_SOURCES]))}"
            + (f" and {len(sources) - _MOST_SOURCES:,} more" if len(sources) > _MOST_SOURCES else "")
            for name, sources in (("first", self.base_sources), ("second", self.new_sources))
            if sources
        ]
        return f"the reports are of different sources: {'; '.join(told)}" if told else ""

    def regressions(self, limit: float) -> tuple[Change, ...]:
        """The changes for the worse by more than ``limit`` (NaN: no limit)."""
        return () if isnan(limit) else tuple(each for each in self.changes if each.difference > limit)

    def exceeded(self, limit: float) -> tuple[str, ...]:
        """A sentence for each figure that grew by more than ``limit``, and for each that the new report has
        not, so that nothing can be held against the limit (NaN: no limit, nothing passes it).
        """
        if isnan(limit):
            return ()
        if self.unlike():
            return (f"nothing can be held against the limit: {self.unlike()}",)
        grown = (
            f"{each.figure} of {each.what} grew by {each.difference:.1%}" for each in self.regressions(limit)
        )
        lacking = (f"{figure} is not in the second report" for figure in self.only_base)
        return (*grown, *lacking)


def compare_reports(base: Path | bytes, new: Path | bytes) -> Comparison:
    """Compare two documents that ``accuracy --json`` wrote: files, or what is in them.

    Raises ``FormatError`` for a file that is none, ``UsageError`` where they have nothing in common.
    """
    one, two = _read(base), _read(new)
    before, after = _figures_of(one, base), _figures_of(two, new)
    base_of, new_of = _sources(one), _sources(two)
    shared = [key for key in before if key in after]
    if not shared:
        raise UsageError(
            "the reports have no figure in common", path=_named(new), hint="compare like with like"
        )
    return Comparison(
        base=_named(base),
        new=_named(new),
        changes=tuple(
            Change(what=what, figure=figure, before=before[what, figure], after=after[what, figure])
            for what, figure in shared
        ),
        only_base=tuple(f"{figure} of {what}" for what, figure in before if (what, figure) not in after),
        base_sources=_missing(base_of, new_of),
        new_sources=_missing(new_of, base_of),
        only_new=tuple(f"{figure} of {what}" for what, figure in after if (what, figure) not in before),
    )


def _sources(report: _Report) -> list[str]:
    return [f"{each.source} on {each.hardware}" for each in report.sources]


def _missing(sources: list[str], others: list[str]) -> tuple[str, ...]:
    """Sources that the other report is not of; none where one of the two does not say what it is of."""
    return tuple(sorted(set(sources) - set(others))) if sources and others else ()


def _named(report: Path | bytes) -> str:
    return "a report in memory" if isinstance(report, bytes) else str(report)


def _figures_of(report: _Report, path: Path | bytes) -> dict[tuple[str, str], float]:
    """The figures of a report. Raises ``FormatError`` where it says two things of one."""
    found: dict[tuple[str, str], float] = {}
    for key, value in _figures(report):
        if found.setdefault(key, value) != value:
            what, figure = key
            raise FormatError(
                f"{figure} of {what} is {found[key]:.6g} in one row and {value:.6g} in another",
                path=_named(path),
                hint="write it again with accuracy --json FILE",
            )
    return found


def _no_repeats(pairs: list[tuple[str, object]]) -> None:
    """Check the keys of one object of a document. Raises ``ValueError`` for one that comes twice."""
    if len({key for key, _ in pairs}) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {clipped(key)!r} twice")


def _read(path: Path | bytes) -> _Report:
    if isinstance(path, Path) and not located(path).exists():
        raise FormatError("no such file", path=_named(path), hint=_HINT)
    try:
        data = read_document(path, limits().report_bytes, "a report") if isinstance(path, Path) else path
        schema = msgspec.json.decode(data, type=_Any).schema
        if schema != SCHEMA_ID:
            raise FormatError(
                f"expected schema {SCHEMA_ID!r}, found {schema[:80]!r}", path=_named(path), hint=_TAKES
            )
        report = msgspec.json.decode(data, type=_Report)
        json.loads(data, object_pairs_hook=_no_repeats)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        told = str(error).replace("`", "'")  # names in backquotes are those of our arguments
        raise FormatError(f"expected an accuracy report: {told}", path=_named(path), hint=_HINT) from error
    return report


def _figures(report: _Report) -> Iterator[tuple[tuple[str, str], float]]:
    """Every figure of a report that both may have, by what it is of and its name."""
    for row in report.summary:
        part = " ".join(part for part in (row.op_class, row.size) if part != "all") or "all"
        what = f"{row.estimator} on {row.hardware}, {part}, each {row.level}"
        for figure, value in (("MAPE", row.mape), ("median", row.median_ape)):
            if value is not None:
                yield (what, figure), value
        if row.coverage is not None:
            yield (what, "not covered"), 1.0 - row.coverage
    for run in report.end_to_end:
        if run.relative_error is not None:
            what = f"{run.estimator} on {run.hardware}, {run.source}, {run.basis}"
            yield (what, "end to end"), abs(run.relative_error)


class _Change(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    figure: Literal["MAPE", "median", "not covered", "end to end"]
    before: Figure
    after: Figure
    difference: Annotated[Figure, msgspec.Meta(description="above 0 is worse")]


class ComparisonDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate compare --json writes."""

    schema: Literal["hespas.compare/1"] = COMPARISON_SCHEMA_ID
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    diagnostics: tuple[str, ...] = ()
    max_regression: Figure
    changes: list[_Change]
    unlike: Annotated[
        str, msgspec.Meta(description="a sentence where the reports are of different sources; else empty")
    ]
    only_base: tuple[str, ...]
    only_new: tuple[str, ...]
    regressions: list[_Change]


def comparison_json(done: Comparison, limit: float) -> bytes:
    """The document ``hespas.compare/1`` as indented JSON that ends in a newline."""
    document = ComparisonDocument(
        inputs=(done.base, done.new),
        max_regression=limit,
        changes=_rows(done.changes),
        unlike=done.unlike(),
        only_base=done.only_base,
        only_new=done.only_new,
        regressions=_rows(done.regressions(limit)),
    )
    return document_bytes(document)


def _rows(changes: Sequence[Change]) -> list[_Change]:
    return [_Change(**asdict(each), difference=each.difference) for each in changes]
