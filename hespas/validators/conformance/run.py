"""Run of a tool on a conformance kit: the result of each case, as values, a table and a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from hespas._version import __version__
from hespas.files.documents import Count, document_bytes
from hespas.files.trust import refuse_in_untrusted
from hespas.graph.errors import UsageError, clipped
from hespas.graph.progress import Progress
from hespas.report.tables import Column, Table, table_from_rows
from hespas.validators.accuracy.document import DiagnosticJson
from hespas.validators.conformance.adapters import ForeignTool, own_problems
from hespas.validators.conformance.case import Case, KitCase
from hespas.validators.conformance.kit import Kit

__all__ = [
    "SCHEMA_ID",
    "CaseResult",
    "ConformanceDocument",
    "ConformanceRun",
    "conformance_json",
    "failures_table",
    "kinds_table",
    "results_table",
    "run_kit",
]

SCHEMA_ID: Final = "hespas.conform/1"
_Outcome = Literal["passed", "failed", "skipped"]


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one case: ``skipped`` if the tool cannot run it. ``problems`` are the differences between the
    result of the tool and the expected one.
    """

    case: str
    about: str
    rules: list[str]
    outcome: _Outcome
    problems: list[str]

    @property
    def kind(self) -> str:
        """Return the family of the case."""
        return self.case.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceRun:
    """Results of a tool for the cases of a kit. ``tool`` is the command of the tool, empty for Hespas."""

    tool: str
    adapter: str
    kit: int
    seed: int
    results: tuple[CaseResult, ...]

    def number(self, outcome: _Outcome, kind: str = "") -> int:
        """Return the number of cases with an outcome, of one kind or in total."""
        return sum(result.outcome == outcome and kind in {"", result.kind} for result in self.results)

    @property
    def valid(self) -> bool:
        """Return True if no case failed."""
        return not self.number("failed")


class ConformanceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a conformance kit (hespas-validate conform --json)."""

    schema: Literal["hespas.conform/1"] = SCHEMA_ID
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[DiagnosticJson]
    tool: str
    adapter: str
    kit: Annotated[int, Meta(ge=1)]
    seed: Count
    passed: Count
    failed: Count
    skipped: Count
    cases: list[CaseResult]


def run_kit(
    kit: Kit, tool: ForeignTool | None = None, names: Sequence[str] = (), progress: Progress | None = None
) -> ConformanceRun:
    """Run a tool (None: Hespas) on the cases whose names match a pattern of ``names`` (default: all).

    The files of each case are written to a temporary folder. Raises ``UsageError`` if no case matches.
    """
    if tool is not None:
        refuse_in_untrusted("`tool` runs a program")
    chosen = [
        entry for entry in kit.cases if not names or any(fnmatchcase(entry.case.name, name) for name in names)
    ]
    if not chosen:
        shown = ", ".join(map(clipped, names))
        raise UsageError(f"no case has a name like {shown}", hint="use a pattern, such as `cases='frames/*'`")
    results: list[CaseResult] = []
    for done, entry in enumerate(chosen):
        if progress:
            progress(done, len(chosen))
        results.append(_result(entry, tool))
    return ConformanceRun(
        tool="" if tool is None else tool.command,
        adapter="" if tool is None else tool.adapter,
        kit=kit.manifest.kit,
        seed=kit.manifest.seed,
        results=tuple(results),
    )


def _result(entry: KitCase, tool: ForeignTool | None) -> CaseResult:
    case: Case = entry.case
    with TemporaryDirectory(prefix="hespas-conform-") as temporary:
        folder, scratch = Path(temporary, "case"), Path(temporary, "scratch")
        folder.mkdir()
        scratch.mkdir()
        for name, content in entry.files.items():
            (folder / name).write_bytes(content)
        problems = own_problems(folder, case) if tool is None else tool.problems(folder, scratch, case)
        texts = [problem.replace(f"{temporary}/", "") for problem in problems or ()]
    outcome: _Outcome = "skipped" if problems is None else "failed" if problems else "passed"
    return CaseResult(case=case.name, about=case.about, rules=case.rules, outcome=outcome, problems=texts)


def conformance_json(run: ConformanceRun, inputs: Sequence[str] = ()) -> bytes:
    """Return the document of ``hespas-validate conform --json``."""
    return document_bytes(
        ConformanceDocument(
            inputs=list(inputs),
            diagnostics=[],
            tool=run.tool,
            adapter=run.adapter,
            kit=run.kit,
            seed=run.seed,
            passed=run.number("passed"),
            failed=run.number("failed"),
            skipped=run.number("skipped"),
            cases=list(run.results),
        )
    )


def kinds_table(run: ConformanceRun) -> Table:
    """Return a table with the numbers of cases by kind and outcome."""
    kinds = dict.fromkeys(result.kind for result in run.results)
    outcomes: tuple[_Outcome, ...] = ("passed", "failed", "skipped")
    header = (Column("cases"), *(Column(outcome, kind="count") for outcome in outcomes))
    return table_from_rows(
        header, [(kind, *(run.number(outcome, kind) for outcome in outcomes)) for kind in kinds]
    )


def failures_table(run: ConformanceRun) -> Table:
    """Return a table with a row for each failed case."""
    failed = [result for result in run.results if result.outcome == "failed"]
    return results_table(failed, with_outcome=False)


def results_table(results: Sequence[CaseResult], *, with_outcome: bool = True) -> Table:
    """Return a table with a row for each case."""
    header = [Column("case", kind="code"), Column("rules")]
    header += [Column("outcome")] if with_outcome else []
    header += [Column("problems"), Column("about", detail=1)]
    rows = [
        (
            result.case, ", ".join(result.rules), *([result.outcome] if with_outcome else []),
            "; ".join(result.problems), result.about,
        )
        for result in results
    ]  # fmt: skip
    return table_from_rows(header, rows)
