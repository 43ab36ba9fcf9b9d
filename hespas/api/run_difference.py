"""Two simulated runs, one beside the other: the step, operation classes, resources, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings
from hespas.files.documents import Figure, document_bytes
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    import pandas

__all__ = ["DifferenceRow", "RunDifference", "RunDifferenceDocument", "compare_runs"]

_SCHEMA = "hespas.simulate/1"
_PartName = Literal["step", "critical path by class", "critical path by resource", "busy", "rank"]


class DifferenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A time of both runs. ``critical path`` is that of the rank that is done last, ``busy`` its resources,
    ``rank`` when each is done.
    """

    part: _PartName
    name: str
    before_ns: Figure
    after_ns: Figure

    @property
    def difference_ns(self) -> float:
        """What the second takes longer."""
        return self.after_ns - self.before_ns


class RunDifferenceDocument(Document, frozen=True, kw_only=True):
    """What hespas simulate --compare writes as JSON."""

    schema: Literal["hespas.run_difference/1"] = "hespas.run_difference/1"
    rows: list[DifferenceRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunDifference(Result):
    """The times of two runs; unknown (NaN) where a run has no such part."""

    paths: tuple[str, str]
    rows: tuple[DifferenceRow, ...]
    diagnostics: Diagnostics

    def headline(self) -> str:
        """The steps of both."""
        step = self.rows[0]
        change = step.difference_ns / step.before_ns if step.before_ns > 0 else nan
        before, after = (
            "unknown" if isnan(each) else f"{each / 1e6:,.3f} ms" for each in (step.before_ns, step.after_ns)
        )
        return f"step {before} -> {after}{'' if isnan(change) else f' ({change:+.1%})'}"

    def document(self) -> RunDifferenceDocument:
        """All rows: ``hespas.run_difference/1``."""
        return RunDifferenceDocument(
            inputs=list(self.paths), diagnostics=findings(self.diagnostics), rows=list(self.rows)
        )

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.run_difference/1``."""
        return document_bytes(self.document())

    def to_pandas(self) -> pandas.DataFrame:
        """One row per part and name."""
        import pandas as pd

        rows = [(row.part, row.name, row.before_ns, row.after_ns, row.difference_ns) for row in self.rows]
        return pd.DataFrame(rows, columns=["part", "name", "before_ns", "after_ns", "difference_ns"])


class _Part(msgspec.Struct):
    duration_ns: float | None
    op_class: str = ""
    resource: str = ""


class _Busy(msgspec.Struct):
    resource: str
    busy_ns: float | None


class _Path(msgspec.Struct):
    op_classes: list[_Part]
    resources: list[_Part]


class _Class(msgspec.Struct):
    finish_ns: float | None
    resources: list[_Busy]
    critical_path: _Path


class _Rank(msgspec.Struct):
    rank: int
    finish_ns: float | None


class _Run(msgspec.Struct):
    schema: str
    step_ns: float | None
    rank_classes: list[_Class]
    ranks: list[_Rank]


@checked()
def compare_runs(
    before: str | Path, after: str | Path, *, diagnostics: Diagnostics | None = None
) -> RunDifference:
    """What differs between two documents of ``hespas simulate --json``: the parts that differ most first.

    Raises ``FormatError`` for a file that is none.
    """
    one, other = _parts(_read(Path(before))), _parts(_read(Path(after)))
    keys = list(dict.fromkeys((*one, *other)))
    rows = [
        DifferenceRow(part=cast("_PartName", part), name=name, before_ns=one.get((part, name), nan),
                      after_ns=other.get((part, name), nan))
        for part, name in keys
    ]  # fmt: skip
    order = {part: place for place, part in enumerate(dict.fromkeys(part for part, _ in keys))}
    rows.sort(key=lambda row: (order[row.part], -_weight(row)))
    return RunDifference(
        paths=(str(before), str(after)),
        rows=tuple(rows),
        diagnostics=diagnostics if diagnostics is not None else Diagnostics(),
    )


def _weight(row: DifferenceRow) -> float:
    """How much a row says; one that a run lacks as much as its time."""
    known = [each for each in (row.before_ns, row.after_ns) if not isnan(each)]
    return max(known, default=0.0) if isnan(row.difference_ns) else abs(row.difference_ns)


def _read(path: Path) -> _Run:
    content = read_document(path, limits().report_bytes, "a document of hespas simulate --json")
    hint = "give two files that hespas simulate --json wrote"
    try:
        run = msgspec.json.decode(content, type=_Run)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"no simulation: {error}", path=str(path), hint=hint) from error
    if run.schema != _SCHEMA:
        raise FormatError(f"the schema is {run.schema!r}, not {_SCHEMA!r}", path=str(path), hint=hint)
    return run


def _parts(run: _Run) -> Mapping[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {("step", ""): _ns(run.step_ns)}
    last = max(run.rank_classes, key=lambda each: each.finish_ns or 0.0, default=None)
    if last is not None:
        path, name = last.critical_path, "critical path by "
        found |= {(f"{name}class", each.op_class): _ns(each.duration_ns) for each in path.op_classes}
        found |= {(f"{name}resource", each.resource): _ns(each.duration_ns) for each in path.resources}
        found |= {("busy", each.resource): _ns(each.busy_ns) for each in last.resources}
    found |= {("rank", str(each.rank)): _ns(each.finish_ns) for each in run.ranks}
    return found


def _ns(value: float | None) -> float:
    return nan if value is None else value
