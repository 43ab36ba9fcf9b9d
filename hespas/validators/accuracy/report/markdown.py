"""Markdown report of a comparison (GitHub's tables), short enough for a comment on a change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import isnan

from hespas._version import __version__
from hespas.fitting.statistics import ErrorSummary
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.report.texts import (
    UNKNOWN,
    count_text,
    limits_of,
    percent,
    shown,
    summary_lines,
    time_text,
    verdict_of,
)
from hespas.validators.accuracy.result import Accuracy, Thresholds

__all__ = ["FEW_SHAPES", "accuracy_markdown"]

FEW_SHAPES = 5
"""Least distinct shapes of a row that represents others of its kind."""

_MOST_ROWS = 20
_MOST_NAMES = 5
_LEGEND = (
    f"hespas {__version__}. MAPE: mean absolute error relative to the measurement; "
    "datasheet-roofline: published peaks; one-efficiency, overhead+two-efficiencies: two parameters fitted "
    "per device and per class, with each shape excluded from its own fit."
)
_VERDICTS = {
    "pass": "pass",
    "fail": "FAIL",
    "unknown": "unknown: a limit could not be checked",
    "none": "no limits set",
}


def accuracy_markdown(result: Accuracy, limits: Thresholds) -> str:
    """Return the report: verdict, end-to-end errors, errors by class and size, contributions, devices, lint.

    Names are in code spans, so that nothing in them becomes markup, a link or a mention.
    """
    checks = limits_of(result, limits)
    sources = f"{len(result.cases):,} {'source' if len(result.cases) == 1 else 'sources'}"
    sections = [
        "# Estimates against measurements",
        f"**Verdict: {_VERDICTS[verdict_of(checks)]}** ({sum(map(len, result.cases)):,} cases of {sources})",
    ]
    if result.inputs:
        more = _more_text(len(result.inputs) - _MOST_ROWS)
        sections.append(f"Inputs: {', '.join(map(_code, result.inputs[:_MOST_ROWS]))}{more}")
    rows = [(check.name, check.required, check.worst, check.status) for check in checks]
    sections += [
        _table("Limits", "quantity | limit | worst | status", rows),
        *_error_tables(result),
        *_device_tables(result),
        *_matching_tables(result),
        _LEGEND,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _error_tables(result: Accuracy) -> Iterator[str]:
    """Yield the errors: summary lines, end to end, by class and size, and by contribution."""
    yield _table(
        "Summary, each shape once",
        "estimator | device | MAPE | 95 % | best naive | noise floor | estimated | matched | end to end",
        (
            (
                _code(line.estimator),
                _code(line.hardware),
                percent(line.shape.mape),
                _interval(line.shape),
                f"{percent(line.baseline_mape)} ({line.best_baseline})" if line.best_baseline else UNKNOWN,
                percent(line.noise.mape),
                percent(line.instance.coverage),
                percent(line.matched),
                UNKNOWN if line.run is None else percent(line.run.relative_error, signed=True),
            )
            for line in summary_lines(result)
        ),
    )
    yield _table(
        "End to end",
        "source | device | basis | estimator | predicted | measured | error | estimated",
        (
            (
                _code(run.source),
                _code(run.hardware),
                run.basis_text,
                _code(run.estimator),
                ("at least " if run.is_lower_bound else "") + time_text(run.predicted_ns),
                time_text(run.measured_ns),
                percent(run.relative_error, signed=True),
                percent(run.coverage),
            )
            for run in result.end_to_end[: 4 * _MOST_ROWS]
        ),
        len(result.end_to_end),
    )
    yield from _class_tables(result)
    contributions = [row for row in result.contributions if row.estimator in result.estimators]
    contributions.sort(key=lambda row: -abs(row.share))
    yield _table(
        "Largest contributions to the error",
        "source | estimator | operation | shape | class | instructions : operations | n | predicted | "
        "measured | of the measured time",
        (
            (
                _code(row.source, 40),
                _code(row.estimator),
                _code(row.label, 40),
                _code(row.shape, 80),
                _plain_or_code(row.op_class),
                f"{row.instructions:,} : {row.operations:,}",
                f"{row.count:,}",
                time_text(row.predicted_ns),
                time_text(row.measured_ns),
                percent(row.share, signed=True),
            )
            for row in contributions[:_MOST_ROWS]
        ),
        len(contributions),
    )


def _class_tables(result: Accuracy) -> Iterator[str]:
    """Yield one table of errors by class and size per device and estimator, next to the naive baselines."""
    by_part = {
        (row.hardware, row.estimator, row.op_class, row.size): row
        for row in result.summary
        if row.level == "shape"
    }
    header = "part | n | MAPE | 95 % | median | P90 | bias | sum error | coverage"
    for hardware in dict.fromkeys(row.hardware for row in result.summary):
        for estimator in result.estimators:
            rows: list[Sequence[str]] = []
            for (row_hardware, row_estimator, op_class, size), row in by_part.items():
                if (row_hardware, row_estimator) != (hardware, estimator):
                    continue
                errors = row.errors
                naive = [by_part.get((hardware, name, op_class, size)) for name in BASELINES]
                note = "n too small" if errors.shapes < FEW_SHAPES else ""
                rows.append(
                    (
                        size if op_class == "all" else _plain_or_code(op_class),
                        f"{errors.n:,}",
                        percent(errors.mape),
                        _interval(errors),
                        percent(errors.median_ape),
                        percent(errors.p90_ape),
                        percent(errors.bias, signed=True),
                        percent(errors.sum_error, signed=True),
                        percent(errors.coverage),
                        *(UNKNOWN if other is None else percent(other.errors.mape) for other in naive),
                        note if errors.n else "not estimated",
                    )
                )
            yield _table(
                f"Errors of {_code(estimator)} on {_code(hardware)}, each shape once",
                " | ".join((header, *(f"MAPE {name}" for name in BASELINES), "note")),
                rows,
            )


def _device_tables(result: Accuracy) -> Iterator[str]:
    """Yield speed-ups between devices, and trends over the sources of a device."""
    yield _table(
        "Speed-ups between devices",
        "estimator | devices | n | faster device correct | above 20 us | median error | of one ratio | tau",
        (
            (
                _code(row.estimator),
                f"{_code(row.other)} over {_code(row.hardware)}",
                f"{row.n:,}",
                percent(row.sign),
                percent(row.sign_long),
                percent(row.median_error),
                percent(row.constant_error),
                f"{row.rank:+.2f}",
            )
            for row in result.speed_ups
        ),
    )
    yield _table(
        "Trends over sources",
        "estimator | device | n | tau | slope",
        (
            (_code(row.estimator), _code(row.hardware), f"{row.n:,}", f"{row.rank:+.2f}", f"{row.slope:.2f}")
            for row in result.trends
        ),
    )


def _matching_tables(result: Accuracy) -> Iterator[str]:
    """Yield matched shares, the operations of each instruction, and findings about the measurements."""
    rows: list[Sequence[str]] = []
    for source, coverage in result.coverage.items():
        events = [
            f"{_code(row.name, 40)} {time_text(row.total_ns)}"
            for row in coverage.unmatched_events[:_MOST_NAMES]
        ]
        nodes = [f"{_code(row.name, 40)} x {row.count:,}" for row in coverage.unmatched_nodes[:_MOST_NAMES]]
        more_events = len(coverage.unmatched_events) + coverage.unlisted_events - _MOST_NAMES
        more_nodes = len(coverage.unmatched_nodes) + coverage.unlisted_nodes - _MOST_NAMES
        rows.append(
            (
                _code(source),
                f"{coverage.matched_events:,} of {coverage.events:,}",
                percent(coverage.time_share),
                f"{coverage.matched_nodes:,} of {coverage.nodes:,}",
                ", ".join(events) + _more_text(more_events),
                ", ".join(nodes) + _more_text(more_nodes),
            )
        )
    yield _table(
        "Matching", "source | events | device time | operations | only measured | only in the program", rows
    )
    joins = [(source, join) for source, of_source in result.joins.items() for join in of_source]
    joins.sort(key=lambda row: -row[1].time_ns)
    yield _table(
        "Operations of each instruction",
        "source | instruction | operations of the program | rule | events | time",
        (
            (
                _code(source, 40),
                _code(join.instruction, 40),
                ", ".join(_code(name, 40) for name in join.operations[:_MOST_NAMES])
                + _more_text(len(join.operations) - _MOST_NAMES),
                join.rule,
                f"{join.events:,}",
                time_text(join.time_ns),
            )
            for source, join in joins[:_MOST_ROWS]
        ),
        len(joins),
    )
    yield _table(
        "Findings about the measurements",
        "finding | source | count | of the time | message",
        (
            (
                finding.code,
                _code(finding.source),
                count_text(finding.count),
                percent(finding.share),
                _code(finding.message),
            )
            for finding in result.lint
        ),
    )


def _more_text(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def _interval(errors: ErrorSummary) -> str:
    if isnan(errors.ci_low) or isnan(errors.ci_high):
        return UNKNOWN
    return f"{percent(errors.ci_low)} to {percent(errors.ci_high)}"


def _plain_or_code(name: str) -> str:
    """Return a name as it is if nothing in it can be markup, otherwise as a code span."""
    return name if re.fullmatch(r"[A-Za-z0-9 _-]*", name) else _code(name)


def _code(name: str, limit: int = 80) -> str:
    """Return a code span of any text: fenced by more backticks than it has, bars escaped for the table."""
    text = shown(name, limit) or "(unnamed)"
    text = re.sub(r"\\+\|", lambda match: match[0][:-1] + " |", text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    if not longest:
        return f"`{text}`"
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}"


def _table(title: str, header: str, rows: Iterable[Sequence[str]], of: int = 0) -> str:
    """Return a table with its title; an empty text without rows. ``of`` is the number of all rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    note = f"\n\n{len(lines):,} of {of:,} rows." if of > len(lines) else ""
    head = [f"| {header} |", "|" + " --- |" * (header.count(" | ") + 1)]
    return f"## {title}\n\n" + "\n".join([*head, *lines]) + note
