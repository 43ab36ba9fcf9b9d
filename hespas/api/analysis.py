"""Where the time of measured profiles went, and where it would be won."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.analysis.breakdown import ALL_STEPS, BreakdownRow
from hespas.analysis.collectives import CollectiveRow, InstanceRow, StragglerRow
from hespas.analysis.critical_path import PathRow, SegmentRow
from hespas.analysis.difference import ChangeRow, Difference, PartRow, difference_of
from hespas.analysis.idle import GapRow, IdleRow
from hespas.analysis.launches import LaunchRow, QueuePointRow, QueueRow
from hespas.analysis.memory import MemoryPointRow, MemoryRow
from hespas.analysis.operations import ClassRow, KernelRow, OperationRow, WinRow
from hespas.analysis.run import Analyses, analyses_of, device_of
from hespas.analysis.table import Table
from hespas.analysis.tree import TreeRow
from hespas.analysis.verdict import changed_text, step_ns_of, verdict_of
from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings, read_profiles, with_capture
from hespas.converters import ReadOptions
from hespas.files.documents import Figure, document_bytes
from hespas.graph import Diagnostics, Profile, StepFacts
from hespas.graph.errors import UsageError
from hespas.simulator.throughput import Throughput, rates_of, warn_of_rates

if TYPE_CHECKING:
    import pandas

__all__ = ["Analysis", "AnalysisDocument", "DifferenceDocument", "analysis_document", "analyze"]


@dataclass(frozen=True, slots=True, repr=False)
class Analysis(Result):
    """Results of the analyses: ``found`` holds their tables, ``difference`` those of what changed against
    another recording, if one was given; ``devices`` are those that the profiles name, ``throughput`` the
    rates of a step.
    """

    found: Analyses
    inputs: tuple[str, ...] = ()
    difference: Difference | None = None
    against: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    throughput: Throughput = field(default_factory=Throughput)

    def headline(self) -> str:
        """Return the step time, its parts, and MFU and tokens/s where their inputs are stated."""
        told = verdict_of(self.found)
        told += f"; {self.throughput}" if self.throughput.is_known else ""
        return f"{told}; {changed_text(self.difference)}" if self.difference else told

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.analyze/1``."""
        return document_bytes(analysis_document(self))

    def tables(self) -> dict[str, Table[Any]]:
        """All tables under their names: those of a comparison only where there was one."""
        return {**self.found.tables(), **(self.difference.tables() if self.difference else {})}

    def to_pandas(self, table: str = "operations") -> pandas.DataFrame:
        """One of the tables, as the document names them: ``breakdown``, ``kernels``, ``by_shape``, ... Raises
        ``UsageError`` for another name.
        """
        tables = self.tables()
        if table not in tables:
            raise UsageError(f"there is no table {table!r}", hint=f"one of: {', '.join(tables)}")
        return tables[table].to_pandas()

    def write(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write ``index.html``, ``analysis.json`` and a CSV file per table into a folder. Raises
        ``OutputError`` where one of them exists, without ``overwrite``.
        """
        from hespas.analysis.report import analysis_html, write_report

        device = self.found.hardware
        about = f"Roofs are those of {device}." if device else "The device is not known: there are no roofs."
        page = analysis_html(
            self.headline(),
            self.tables(),
            inputs=self.inputs,
            against=self.against,
            devices=self.devices,
            about=about,
            notes=self.found.notes,
            diagnostics=self.diagnostics,
        )
        write_report(Path(folder), page, self.to_json(), self.tables(), overwrite=overwrite)


class DifferenceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What changed against the inputs ``against``."""

    against: list[str]
    parts: list[PartRow]
    by_operation: list[ChangeRow]
    by_shape: list[ChangeRow]
    by_kernel: list[ChangeRow]


class AnalysisDocument(Document, frozen=True, kw_only=True):
    """Document of `hespas analyze --json`: one list of rows per analysis. ``step_period_ns`` is from the
    start of a step to that of the next, of a single step its length; rates are of that time.
    """

    schema: Literal["hespas.analyze/1"] = "hespas.analyze/1"
    verdict: str
    devices: list[str]
    hardware: str
    step_period_ns: Figure
    model_flops_per_step: Figure
    tokens_per_step: Figure
    mfu: Figure
    mfu_peak_dtype: str
    tokens_per_s: Figure
    notes: list[str]
    breakdown: list[BreakdownRow]
    idle: list[IdleRow]
    gaps: list[GapRow]
    launches: list[LaunchRow]
    queues: list[QueueRow]
    queue_points: list[QueuePointRow]
    classes: list[ClassRow]
    operations: list[OperationRow]
    kernels: list[KernelRow]
    wins: list[WinRow]
    tree: list[TreeRow]
    critical_path: list[PathRow]
    critical_segments: list[SegmentRow]
    collectives: list[CollectiveRow]
    collective_instances: list[InstanceRow]
    stragglers: list[StragglerRow]
    memory: list[MemoryRow]
    memory_points: list[MemoryPointRow]
    difference: DifferenceDocument | None


@checked()
def analyze(
    source: str | Path | Profile | Sequence[str | Path | Profile],
    *,
    against: str | Path | Profile | Sequence[str | Path | Profile] | None = None,
    capture: str | Path | Sequence[str | Path] | None = None,
    hardware: str = "",
    tokens: float | None = None,
    model_flops: float | None = None,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Analyse what was measured: profiles, or paths of them, each of one rank or more of one job; a folder
    holds one per rank.

    ``against`` is an earlier recording of the same job: what changed since is told. ``capture`` are traces in
    which the graphs were captured that the profiles replay, or folders of them. ``hardware`` (a name or a
    TOML file) is the device whose peaks are the roof, by default the one that the profiles name. ``tokens``
    and ``model_flops`` are those of a step on all ranks: they give tokens/s and MFU. Raises ``UsageError``
    for a program, which holds no measurements, for nothing, for a device that is unknown, and for tokens or
    FLOPs that are not above 0; for paths also what ``read`` raises.
    """
    _check_counts(tokens=tokens, model_flops=model_flops)
    found = diagnostics if diagnostics is not None else Diagnostics()
    sources = _listed(source)
    options = with_capture(options or ReadOptions(), capture)
    profiles = _profiles_of(sources, format, options, found, progress)
    device = device_of(profiles, hardware, found)
    analysed = analyses_of(profiles, device, found)
    # The host may take longer for a step than the span of its device events.
    period_ns = step_ns_of(analysed) if isnan(analysed.period_ns) else analysed.period_ns
    rates = rates_of(_facts(profiles, analysed, tokens, model_flops), period_ns, device)
    warn_of_rates(rates, _names(sources)[0], found)
    done = Analysis(
        analysed, _names(sources), devices=_devices(profiles), diagnostics=found, throughput=rates
    )
    if against is None:
        return done
    others = _listed(against)
    before = _profiles_of(others, None, options, found, progress)
    if set(_devices(before)) != set(_devices(profiles)):
        listed = (", ".join(_devices(each)) or "an unnamed device" for each in (before, profiles))
        message = "the two recordings are of different devices: {} before, {} after".format(*listed)
        found.warning("analysis.devices-differ", _names(others)[0], message)
    old = analyses_of(before, device, found)
    _tell_steps(old, analysed, found, _names(others)[0])
    changed = difference_of(old, analysed)
    return replace(done, difference=changed, against=_names(others))


def _check_counts(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < inf:
            raise UsageError(f"`{name}` is {value:g}", hint="give the number of one step on all ranks")


def _facts(
    profiles: Sequence[Profile], found: Analyses, tokens: float | None, model_flops: float | None
) -> StepFacts:
    """Return the facts of a recorded step. The job has as many ranks as its profiles state or record."""
    stated = [profile.metadata.get("world_size", "") for profile in profiles]
    sizes = [int(text) for text in stated if text.isdecimal() and len(text) < 10]
    recorded = int((found.breakdown["step"] == ALL_STEPS).sum())
    return StepFacts(
        kind="training",
        tokens=nan if tokens is None else tokens,
        model_flops=nan if model_flops is None else model_flops,
        ranks=max(recorded, *sizes, 0),
        dtype=found.product_dtype,
    )


_Source = str | Path | Profile


def _listed(source: _Source | Sequence[_Source]) -> list[_Source]:
    return [source] if isinstance(source, str | Path | Profile) else list(source)


def _names(sources: Sequence[_Source]) -> tuple[str, ...]:
    return tuple(each.name if isinstance(each, Profile) else str(each) for each in sources)


def _devices(profiles: Sequence[Profile]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for profile in profiles for name in profile.devices if name))


def _profiles_of(
    sources: Sequence[_Source],
    format_name: str | None,
    options: ReadOptions | None,
    diagnostics: Diagnostics,
    progress: Callable[[int, int], None] | None,
) -> list[Profile]:
    """The profiles of all sources. Raises ``UsageError`` where there is none."""
    profiles: list[Profile] = []
    for done, each in enumerate(sources):
        if progress:
            progress(done, len(sources))
        if isinstance(each, Profile):
            profiles.append(each)
        else:
            found = read_profiles(each, format=format_name, options=options, diagnostics=diagnostics)
            profiles.extend(found)
    if not profiles:
        raise UsageError("nothing to analyse", hint="name a profile, or a folder with one per rank")
    return profiles


def _tell_steps(before: Analyses, after: Analyses, diagnostics: Diagnostics, where: str) -> None:
    """Say where the two did not record equally much: their times are of all they recorded."""
    counts = [
        {name: len(np.unique(each.breakdown[name][chosen])) for name, chosen in _of(each).items()}
        for each in (before, after)
    ]
    for name in ("rank", "step"):
        old, new = (each[name] for each in counts)
        message = f"{old} {name}s were recorded before and {new} after: times are of all of them"
        diagnostics.warning("analysis.recorded-differ", where, message, count=int(old != new))


def _of(found: Analyses) -> dict[str, NDArray[np.bool_]]:
    """Which rows of the breakdown are of ranks, and which of steps."""
    whole = found.breakdown["step"] == ALL_STEPS
    return {"rank": whole, "step": ~whole}


def _difference_document(done: Analysis) -> DifferenceDocument | None:
    if done.difference is None:
        return None
    return DifferenceDocument(
        against=list(done.against),
        parts=done.difference.parts.rows(),
        by_operation=done.difference.by_operation.rows(),
        by_shape=done.difference.by_shape.rows(),
        by_kernel=done.difference.by_kernel.rows(),
    )


def analysis_document(done: Analysis) -> AnalysisDocument:
    """The document of an analysis."""
    found = done.found
    return AnalysisDocument(
        inputs=list(done.inputs),
        diagnostics=findings(done.diagnostics),
        verdict=done.headline(),
        devices=list(done.devices),
        hardware=found.hardware,
        step_period_ns=found.period_ns,
        model_flops_per_step=done.throughput.model_flops,
        tokens_per_step=done.throughput.tokens,
        mfu=done.throughput.mfu,
        mfu_peak_dtype=done.throughput.peak_dtype,
        tokens_per_s=done.throughput.tokens_per_s,
        notes=list(found.notes),
        breakdown=found.breakdown.rows(),
        idle=found.idle.rows(),
        gaps=found.gaps.rows(),
        launches=found.launches.rows(),
        queues=found.queues.rows(),
        queue_points=found.queue_points.rows(),
        classes=found.classes.rows(),
        operations=found.operations.rows(),
        kernels=found.kernels.rows(),
        wins=found.wins.rows(),
        tree=found.tree.rows(),
        critical_path=found.critical_path.rows(),
        critical_segments=found.critical_segments.rows(),
        collectives=found.collectives.rows(),
        collective_instances=found.collective_instances.rows(),
        stragglers=found.stragglers.rows(),
        memory=found.memory.rows(),
        memory_points=found.memory_points.rows(),
        difference=_difference_document(done),
    )
