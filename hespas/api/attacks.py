"""Privacy of obfuscated workloads: what an attacker can name, and how much the simulated time changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from hespas.api.arguments import checked, hardware_option
from hespas.api.documents import Document, Result, findings
from hespas.api.io import as_workload, read
from hespas.api.secrecy import simulated_ns
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.obfuscate import Key, Level
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UsageError
from hespas.graph.hints import Option
from hespas.graph.progress import Progress
from hespas.report import Column, Table, table_from_rows
from hespas.report.texts import counted

__all__ = ["PrivacyDocument", "PrivacyReport", "PrivacyRow", "privacy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyRow:
    """Attack on one obfuscated workload.

    ``level`` is what its obfuscation hides. ``named`` is the public model that the attacker names.
    ``model_rank`` is the place of the true model among the models that the attacker holds (1: named, 0: the
    true model was not stated). ``is_linked`` is True if an attacker who also holds the original recognises it
    among all models. Times are simulated steps in nanoseconds (NaN: an operation has no duration).
    """

    path: str
    level: Level
    named: str
    model_rank: int
    is_linked: bool
    original_ns: Figure
    obfuscated_ns: Figure

    @property
    def change(self) -> float:
        """Relative change of the simulated time."""
        return self.obfuscated_ns / self.original_ns - 1.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrivacyReport(Result):
    """Attacks on obfuscated workloads, one row each. ``models`` is the number of models that the attacker
    holds. ``accuracy`` is the share of workloads whose true model was named (NaN: it was not stated), and
    ``linked`` the share whose original was recognised.
    """

    page_title: ClassVar[str] = "Privacy of obfuscated workloads"

    original: str
    model: str
    models: int
    rows: tuple[PrivacyRow, ...]
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    @property
    def accuracy(self) -> float:
        """Share of workloads whose true model was named, NaN if it was not stated."""
        return float(np.mean([row.model_rank == 1 for row in self.rows])) if self.model else nan

    @property
    def linked(self) -> float:
        """Share of workloads whose original was recognised by an attacker who holds it."""
        return float(np.mean([row.is_linked for row in self.rows]))

    def headline(self) -> str:
        """Return the summary line: accuracy of the attacker, and chance."""
        named = (
            f"the attacker names {self.model} in {self.accuracy:.0%} of {counted(len(self.rows), 'workload')}"
            if self.model
            else counted(len(self.rows), "workload")
        )
        return f"{named}, and recognises the original in {self.linked:.0%} (chance {1 / self.models:.0%})"

    def table(self) -> Table:
        """Return the result as a table with one row per obfuscated workload."""
        header = (
            Column("workload", kind="code"),
            Column("hides"),
            Column("named model"),
            Column("rank of the model", kind="count"),
            Column("original recognised"),
            Column("original", kind="time"),
            Column("obfuscated", kind="time"),
            Column("change", kind="share"),
        )
        rows = [
            (
                row.path,
                row.level,
                row.named,
                row.model_rank or None,
                "yes" if row.is_linked else "no",
                row.original_ns,
                row.obfuscated_ns,
                row.change,
            )
            for row in self.rows
        ]
        return table_from_rows(header, rows)

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.privacy/1``."""
        return document_bytes(
            PrivacyDocument(
                inputs=[self.original, *(row.path for row in self.rows)],
                diagnostics=findings(self.diagnostics),
                model=self.model,
                models=self.models,
                accuracy=self.accuracy,
                linked=self.linked,
                rows=self.rows,
            )
        )


class PrivacyDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas-validate privacy --json``."""

    schema: Literal["hespas.privacy/1"] = "hespas.privacy/1"
    model: str
    models: Count
    accuracy: Figure
    linked: Figure
    rows: tuple[PrivacyRow, ...]


_Original = Annotated[
    str | Path | Workload,
    Option("Workload before its obfuscation.", metavar="ORIGINAL", is_argument=True, is_text=True),
]
_Obfuscated = Annotated[
    str | Path | Workload | Sequence[str | Path | Workload],
    Option("Obfuscated workloads.", metavar="OBFUSCATED...", is_argument=True),
]
_Model = Annotated[
    str,
    Option(
        "State the built-in model of the original, to count how often the attacker names it.",
        metavar="MODEL",
        completes="models",
    ),
]
_Hardware = Annotated[
    str | None, hardware_option("Simulate with durations on this device instead of those of the workloads.")
]


@checked()
def privacy(
    original: _Original,
    obfuscated: _Obfuscated,
    *,
    model: _Model = "",
    hardware: _Hardware = None,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> PrivacyReport:
    """Attack obfuscated workloads, and compare their simulated times with that of the original.

    The attacker holds 20 public models in four layouts each, knows how workloads are obfuscated, and compares
    shapes, FLOPs, layer counts, sizes of collectives and sequences of operations
    (:class:`hespas.validators.privacy.attacker.Attacker`). Raises what ``read`` and ``simulate`` raise.

    Examples:
        >>> hespas.convert("samples/pipeline_2x2", "shared/", obfuscate="trace.key")  # doctest: +ELLIPSIS
        <Conversion: samples/pipeline_2x2, chakra -> shared/ (chakra), ... bytes>
        >>> hespas.privacy("samples/pipeline_2x2", "shared/").models
        20
    """
    from hespas.generators.llm.model_file import load_model
    from hespas.validators.privacy.attacker import Attacker, Reference
    from hespas.validators.privacy.fingerprint import fingerprint
    from hespas.validators.privacy.library import PUBLIC_MODELS, references

    sink = Diagnostics() if diagnostics is None else diagnostics
    named = load_model(model).name if model else ""
    models = (*PUBLIC_MODELS, *({named} - {load_model(name).name for name in PUBLIC_MODELS} - {""}))
    sources = [obfuscated] if isinstance(obfuscated, str | Path | Workload) else list(obfuscated)
    if not sources:
        raise UsageError("no obfuscated workload was given", hint="name at least one OBFUSCATED")
    first = _workload(original, sink)
    original_ns = simulated_ns(first, hardware, progress)
    held = Reference(model="", plain=fingerprint(first))
    attackers: dict[Level, Attacker] = {}
    rows: list[PrivacyRow] = []
    for source in sources:
        workload = _workload(source, sink)
        level = _level_of(workload)
        if level not in attackers:
            attackers[level] = Attacker.trained(list(references(models, level)))
        ranking = [name for name, _ in attackers[level].ranking(fingerprint(workload))]
        linked = attackers[level].ranking(fingerprint(workload), held)[0][0]
        rows.append(
            PrivacyRow(
                path=workload.name if isinstance(source, Workload) else str(source),
                level=level,
                named=ranking[0],
                model_rank=ranking.index(named) + 1 if named else 0,
                is_linked=not linked,
                original_ns=original_ns,
                obfuscated_ns=simulated_ns(workload, hardware, progress),
            )
        )
    path = first.name if isinstance(original, Workload) else str(original)
    return PrivacyReport(original=path, model=named, models=len(models), rows=tuple(rows), diagnostics=sink)


def _workload(source: str | Path | Workload, diagnostics: Diagnostics) -> Workload:
    if isinstance(source, Workload):
        return source
    return as_workload(read(source, diagnostics=diagnostics), diagnostics)


def _level_of(workload: Workload) -> Level:
    """Return what the obfuscation of a workload hides. Raises ``UsageError`` if its names are readable."""
    texts = {text for graph in workload.classes for text in graph.strings if text}
    if not any(map(Key.is_token, texts)):
        raise UsageError(
            f"workload {workload.name!r} has no obfuscated names",
            hint="hespas-convert SRC DST --obfuscate KEYFILE",
        )
    shaped = [graph for graph in workload.classes if len(graph.contractions) or len(graph.operands.values)]
    if not shaped:
        return "layers"
    extents = np.concatenate([graph.types.dims for graph in shaped])
    return "names" if (extents[extents > 0] & (extents[extents > 0] - 1)).any() else "shapes"
