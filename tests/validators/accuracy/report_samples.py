"""Synthetic comparisons for reports: any names and numbers of cases, without files."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from math import nan

import numpy as np

from hespas.estimators.interface import CasePrediction
from hespas.fitting.statistics import noise_floor
from hespas.graph import Diagnostics, OpClass
from hespas.graph.columns import FloatArray
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.coverage import Coverage, UnmatchedName
from hespas.validators.accuracy.lint import LintFinding
from hespas.validators.accuracy.result import Accuracy, EndToEnd, Thresholds
from hespas.validators.accuracy.summaries import contributions, speed_ups, summaries, trends

__all__ = ["HOSTILE", "NO_LIMITS", "Page", "cases", "comparison", "hostile_comparison", "limits", "page_of"]

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"'><b onmouseover='alert(3)'>bold</b>",
    "<!--<script>",
    "a\N{LINE SEPARATOR}b\N{PARAGRAPH SEPARATOR}c",
    "\N{RIGHT-TO-LEFT OVERRIDE}gnp.exe",
    "\N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}(x)",
    "{{ 7 * 7 }}{% raw %}%{y}${z}",
    "| a | `b` | \\| [link](http://example.invalid) @someone",
    "\x00\x1b[31mred\x07",
    "&lt;already&gt;",
    "unpaired \ud800 surrogate",
    "very long " + "x" * 20_000,
    "",
)
"""Names that would break a page which took them for anything but text."""


def limits(*, mape: float = nan, e2e: float = nan, coverage: float = nan) -> Thresholds:
    """Only the limits named."""
    return Thresholds(max_mape=mape, max_e2e=e2e, min_coverage=coverage)


NO_LIMITS = limits()


def cases(
    count: int,
    *,
    source: str = "trace",
    hardware: str = "H100-SXM",
    names: tuple[str, ...] = (),
    estimator: str = "roofline",
    repeated: int = 1,
) -> Cases:
    """``count`` cases, each shape ``repeated`` times, all predicted at 1.1 times the measurement or so; every
    seventh is not predicted.
    """
    rows = np.arange(count)
    measured = np.asarray(1e3 * (1.0 + rows % 97) ** 2, np.float64)
    predicted = measured * (1.1 + 0.01 * (rows % 5))
    predicted[rows % 7 == 6] = nan
    shape = rows // repeated
    shapes = tuple(
        names[each % len(names)] + f" {each}" if names else f"op{each}(8x{each}xf32) -> 8xf32"
        for each in range(int(shape[-1]) + 1 if count else 0)
    )
    unknown = np.full(count, nan)
    classes = np.array([OpClass.CONTRACTION, OpClass.ELEMENTWISE, OpClass.REDUCTION], np.int8)
    return Cases(
        source=source,
        workload="workload",
        hardware=hardware,
        labels=tuple(names[row % len(names)] if names else f"op{row}" for row in range(count)),
        shapes=shapes,
        shape=shape,
        op_class=classes[rows % 3],
        measured_ns=measured,
        spread_ns=measured * np.float64(0.02),
        repeats=np.full(count, 3),
        flops=measured * np.float64(10.0),
        bytes_moved=measured * np.float64(2.0),
        predictions=tuple(
            CasePrediction(estimator=name, duration_ns=factor * predicted, low_ns=unknown, high_ns=unknown)
            for name, factor in (
                (estimator, 1.0),
                ("datasheet-roofline", 0.5),
                ("one-efficiency", 0.8),
                ("overhead+two-efficiencies", 0.9),
            )
        ),
    )


def _total(values: FloatArray) -> float:
    return float(np.nansum(values))


def comparison(*sources: Cases, estimator: str = "roofline") -> Accuracy:
    """The comparison of some sources."""
    runs = tuple(
        EndToEnd(
            workload=each.workload,
            source=each.source,
            hardware=each.hardware,
            estimator=said.estimator,
            basis="sum of operations",
            predicted_ns=_total(said.duration_ns),
            measured_ns=_total(each.measured_ns),
            is_lower_bound=True,
        )
        for each in sources
        for said in each.predictions
        if len(each)
    )
    return Accuracy(
        inputs=(),
        estimators=(estimator,),
        cases=sources,
        summary=tuple(summaries(sources)),
        end_to_end=runs,
        contributions=tuple(row for each in sources for row in contributions(each)),
        speed_ups=tuple(speed_ups(sources)),
        trends=tuple(trends(runs)),
        noise={
            each.hardware: noise_floor(each.measured_ns, each.spread_ns, each.repeats, each.shape)
            for each in sources
        },
        coverage={},
        lint=(),
        diagnostics=Diagnostics(),
    )


def _of_hostile_classes(found: Cases) -> Cases:
    """Classes of operations that a table names itself."""
    link = "<a href='http://example.invalid'>=1+1</a> | `x` [link](http://example.invalid)"
    return replace(found, classes=tuple(f"{link} {each}" for each in found.classes))


def hostile_comparison() -> Accuracy:
    """Every text that comes from files holds something hostile."""
    name = HOSTILE[0] + HOSTILE[2]
    sources = (
        cases(40, source=name, names=HOSTILE, hardware=HOSTILE[1], estimator=HOSTILE[2]),
        cases(40, source="other", names=HOSTILE, hardware="<u>other</u>", estimator=HOSTILE[2]),
    )
    done = comparison(*map(_of_hostile_classes, sources), estimator=HOSTILE[2])
    missed = tuple(UnmatchedName(name=each, count=2, total_ns=5.0) for each in HOSTILE)
    coverage = Coverage(
        events=100, matched_events=86, time_ns=1e6, matched_time_ns=9e5, compared_time_ns=9e5, nodes=50,
        matched_nodes=40, by_rule={"<i>rule</i>": 9e5}, inferred_time_ns=1e3, unmatched_events=missed,
        unmatched_nodes=missed,
    )  # fmt: skip
    diagnostics = Diagnostics()
    diagnostics.warning("some.code", HOSTILE[1], HOSTILE[0])
    lint = tuple(
        LintFinding(code="overlap", source=each, count=1, share=nan, message=each) for each in HOSTILE
    )
    return replace(done, inputs=(name,), coverage={name: coverage}, lint=lint, diagnostics=diagnostics)


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, and the text outside scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag in {"script", "style"}:
            self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data

    def ids(self) -> set[str]:
        """Of all elements."""
        return {attributes["id"] for _, attributes in self.elements if "id" in attributes}


def page_of(html: str) -> Page:
    """The parsed page."""
    page = Page()
    page.feed(html)
    page.close()
    return page
