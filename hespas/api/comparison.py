"""Comparison of two accuracy reports: errors that grew or shrank."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from hespas.api.arguments import checked
from hespas.api.documents import Result
from hespas.api.validation import AccuracyReport, limit_of
from hespas.graph.deprecation import RenamedAttribute
from hespas.graph.hints import Option
from hespas.report import Table, table_from_records
from hespas.report.charts import Axis, Chart, Plot, Series

if TYPE_CHECKING:
    from hespas.validators.accuracy import Comparison

__all__ = ["ComparisonReport", "compare"]


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonReport(Result):
    """Changes of errors between two accuracy reports, and the limit on their increase (NaN: none).
    ``details`` is the result of the validator.
    """

    page_title: ClassVar[str] = "Comparison of two accuracy reports"

    details: Comparison
    max_regression: float = nan
    result = RenamedAttribute("details")

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Return a sentence for each figure that grew by more than the limit."""
        return self.details.exceeded(self.max_regression)

    def headline(self) -> str:
        """Return the summary line: the numbers of figures that got worse and better."""
        grown = sum(change.difference > 0 for change in self.details.changes)
        shrunk = sum(change.difference < 0 for change in self.details.changes)
        return f"{len(self.details.changes):,} figures, {grown:,} worse, {shrunk:,} better"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.compare/1``."""
        from hespas.validators.accuracy import comparison_json

        return comparison_json(self.details, self.max_regression)

    def table(self) -> Table:
        """Return the result as a table with one row per figure of both reports."""
        return table_from_records(self.to_dict()["changes"])

    def charts(self) -> tuple[Chart, ...]:
        """Return the figures of the later report over the figures of the earlier one."""
        changes = [row for row in self.details.changes if row.before > 0 and row.after > 0]
        if not changes:
            return ()
        series: list[Series] = []
        for label, sign in (("worse", 1), ("better", -1), ("same", 0)):
            rows = [row for row in changes if (row.difference > 0) - (row.difference < 0) == sign]
            if rows:
                texts = [f"{row.what}, {row.figure}: {row.before:.1%} to {row.after:.1%}" for row in rows]
                x, y = [row.before for row in rows], [row.after for row in rows]
                series.append(Series(label=label, x=x, y=y, texts=texts, tone={1: 1, -1: 0, 0: 6}[sign]))
        ends = [
            min(min(row.before, row.after) for row in changes),
            max(max(row.before, row.after) for row in changes),
        ]
        series.append(Series(label="no change", x=ends, y=ends, mark="line", tone=6))
        return (
            Plot(
                name="errors",
                title="Errors of the two reports",
                table="rows",
                note="A point above the line: the error grew.",
                x=Axis("before", "share", is_log=True),
                y=Axis("after", "share", is_log=True),
                series=series,
            ),
        )


_Base = Annotated[
    str | Path | AccuracyReport,
    Option("Accuracy report from `json`.", metavar="BASE.json", is_argument=True, label="BASE"),
]
_New = Annotated[
    str | Path | AccuracyReport,
    Option(
        "Later accuracy report of the same comparison.", metavar="NEW.json", is_argument=True, label="NEW"
    ),
]
_MaxRegression = Annotated[
    float | None,
    Option("Exit with 1 if an error grew by more; 0.01 is a percentage point.", metavar="X"),
]


@checked()
def compare(base: _Base, new: _New, *, max_regression: _MaxRegression = None) -> ComparisonReport:
    """Compare two accuracy reports, or the documents of ``accuracy --json``.

    ``max_regression`` is the largest permitted increase of an error, as a fraction: 0.01 is one percentage
    point. Raises ``FormatError`` for a file that is not such a document, ``UsageError`` if the reports have
    no figure in common.

    Examples:
        >>> report = hespas.accuracy("samples/ffn_train_rank0of2.pt.trace.json.gz", hardware="H100-SXM")
        >>> hespas.compare(report, report)
        <ComparisonReport: 196 figures, 0 worse, 0 better>
    """
    from hespas.validators.accuracy import compare_reports

    limit = limit_of("max_regression", max_regression)
    before, after = (
        report.to_json() if isinstance(report, AccuracyReport) else Path(report) for report in (base, new)
    )
    return ComparisonReport(compare_reports(before, after), limit)
