"""Comparison of two accuracy reports: the errors that grew."""

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
from hespas.files.limits import limits
from hespas.files.streams import input_location, read_document
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.validators.accuracy.document import SCHEMA_ID

__all__ = [
    "COMPARISON_SCHEMA_ID",
    "Comparison",
    "ComparisonDocument",
    "FigureChange",
    "compare_reports",
    "comparison_json",
]

COMPARISON_SCHEMA_ID: Final = "hespas.compare/1"
_MOST_SOURCES = 5
_REPORT_HINT = "write it with accuracy --json FILE"

_Error = Annotated[float, msgspec.Meta(ge=0.0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0 + 1e-6)]
"""Ratio of two sums; rounding may make it slightly larger than 1."""


class _SummaryFigures(msgspec.Struct, frozen=True):
    estimator: str
    hardware: str
    level: str
    op_class: str
    size: str
    mape: _Error | None
    median_ape: _Error | None
    coverage: _Share | None


class _RunFigures(msgspec.Struct, frozen=True):
    source: str
    hardware: str
    estimator: str
    basis: str
    relative_error: float | None


class _SourceNames(msgspec.Struct, frozen=True):
    source: str
    hardware: str


class _SchemaName(msgspec.Struct, frozen=True):
    schema: str


class _ComparedReport(msgspec.Struct, frozen=True):
    schema: str
    summary: list[_SummaryFigures]
    end_to_end: list[_RunFigures]
    sources: list[_SourceNames] = []  # msgspec copies it


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """Change of one error figure between two reports. Smaller errors are better, so ``difference`` > 0 is
    worse.
    """

    what: str
    figure: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """Increase of the figure from the base report to the new report."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences of two accuracy reports.

    ``only_base`` and ``only_new`` are the names of figures that only one report has. ``base_sources`` and
    ``new_sources`` are the sources that only one report has. If there are such sources, the errors over all
    sources cannot be compared, because they are errors of different work.
    """

    base: str
    new: str
    changes: tuple[FigureChange, ...]
    only_base: tuple[str, ...]
    only_new: tuple[str, ...]
    base_sources: tuple[str, ...] = ()
    new_sources: tuple[str, ...] = ()

    def unlike(self) -> str:
        """Return a sentence if the reports have different sources, so that figures are not comparable;
        otherwise an empty text.
        """
        parts = [
            f"only the {name} has {', '.join(map(clipped, sources[:_MOST_SOURCES]))}"
            + (f" and {len(sources) - _MOST_SOURCES:,} more" if len(sources) > _MOST_SOURCES else "")
            for name, sources in (("first", self.base_sources), ("second", self.new_sources))
            if sources
        ]
        return f"the reports have different sources: {'; '.join(parts)}" if parts else ""

    def regressions(self, limit: float) -> tuple[FigureChange, ...]:
        """Return the figures that grew by more than ``limit`` (NaN: no limit)."""
        return () if isnan(limit) else tuple(row for row in self.changes if row.difference > limit)

    def exceeded(self, limit: float) -> tuple[str, ...]:
        """Return a sentence for each figure that grew by more than ``limit`` or is not in the new report.

        A missing figure cannot be checked against the limit. NaN means no limit.
        """
        if isnan(limit):
            return ()
        if self.unlike():
            return (f"the limit cannot be checked: {self.unlike()}",)
        grown = (
            f"{row.figure} of {row.what} grew by {row.difference:.1%}" for row in self.regressions(limit)
        )
        missing = (f"{figure} is not in the second report" for figure in self.only_base)
        return (*grown, *missing)


def compare_reports(base: Path | bytes, new: Path | bytes) -> Comparison:
    """Compare two documents that ``accuracy --json`` wrote, given as files or as their content.

    Raises ``FormatError`` for other content, ``UsageError`` if the reports have no figure in common.
    """
    base_name, new_name = (
        "a report in memory" if isinstance(report, bytes) else str(report) for report in (base, new)
    )
    base_report, new_report = _read_report(base, base_name), _read_report(new, new_name)
    before, after = _figures_of(base_report, base_name), _figures_of(new_report, new_name)
    base_sources = {f"{row.source} on {row.hardware}" for row in base_report.sources}
    new_sources = {f"{row.source} on {row.hardware}" for row in new_report.sources}
    have_sources = bool(base_sources and new_sources)  # old reports do not list their sources
    shared = [key for key in before if key in after]
    if not shared:
        raise UsageError(
            "the reports have no figure in common",
            path=new_name,
            hint="give two reports of the same devices and estimators",
        )
    return Comparison(
        base=base_name,
        new=new_name,
        changes=tuple(
            FigureChange(what=what, figure=figure, before=before[what, figure], after=after[what, figure])
            for what, figure in shared
        ),
        only_base=tuple(f"{figure} of {what}" for what, figure in before if (what, figure) not in after),
        base_sources=tuple(sorted(base_sources - new_sources)) if have_sources else (),
        new_sources=tuple(sorted(new_sources - base_sources)) if have_sources else (),
        only_new=tuple(f"{figure} of {what}" for what, figure in after if (what, figure) not in before),
    )


def _figures_of(report: _ComparedReport, name: str) -> dict[tuple[str, str], float]:
    """Return the figures of a report by subject and name. Raises ``FormatError`` if a figure has two
    values.
    """
    figures: dict[tuple[str, str], float] = {}
    for key, value in _figures(report):
        if figures.setdefault(key, value) != value:
            what, figure = key
            raise FormatError(
                f"{figure} of {what} is {figures[key]:.6g} in one row and {value:.6g} in another",
                path=name,
                hint=_REPORT_HINT,
            )
    return figures


def _read_report(report: Path | bytes, name: str) -> _ComparedReport:
    """Read a report from a file or from its content."""

    def no_repeats(pairs: list[tuple[str, object]]) -> None:
        if len({key for key, _ in pairs}) < len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"an object has the key {clipped(key)!r} twice")

    if isinstance(report, Path) and not input_location(report).exists():
        raise FormatError("no such file", path=name, hint=_REPORT_HINT)
    try:
        data = (
            read_document(report, limits().report_bytes, "a report") if isinstance(report, Path) else report
        )
        schema = msgspec.json.decode(data, type=_SchemaName).schema
        if schema != SCHEMA_ID:
            raise FormatError(
                f"expected schema {SCHEMA_ID!r}, found {schema[:80]!r}",
                path=name,
                hint="give two files written by hespas-validate accuracy --json FILE",
            )
        decoded = msgspec.json.decode(data, type=_ComparedReport)
        json.loads(data, object_pairs_hook=no_repeats)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FormatError(f"expected an accuracy report: {error}", path=name, hint=_REPORT_HINT) from error
    return decoded


def _figures(report: _ComparedReport) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the figures of a report that can be compared, each with its subject and name."""
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


class _ChangeJson(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    figure: Literal["MAPE", "median", "not covered", "end to end"]
    before: Figure
    after: Figure
    difference: Annotated[Figure, msgspec.Meta(description="above 0 is worse")]


class ComparisonDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document that hespas-validate compare --json writes."""

    schema: Literal["hespas.compare/1"] = COMPARISON_SCHEMA_ID
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    diagnostics: tuple[str, ...] = ()
    max_regression: Figure
    changes: list[_ChangeJson]
    unlike: Annotated[
        str, msgspec.Meta(description="a sentence if the reports have different sources; otherwise empty")
    ]
    only_base: tuple[str, ...]
    only_new: tuple[str, ...]
    regressions: list[_ChangeJson]


def comparison_json(comparison: Comparison, limit: float) -> bytes:
    """Return the document ``hespas.compare/1`` as indented JSON that ends in a newline."""
    document = ComparisonDocument(
        inputs=(comparison.base, comparison.new),
        max_regression=limit,
        changes=_changes_json(comparison.changes),
        unlike=comparison.unlike(),
        only_base=comparison.only_base,
        only_new=comparison.only_new,
        regressions=_changes_json(comparison.regressions(limit)),
    )
    return document_bytes(document)


def _changes_json(changes: Sequence[FigureChange]) -> list[_ChangeJson]:
    return [_ChangeJson(**asdict(row), difference=row.difference) for row in changes]
