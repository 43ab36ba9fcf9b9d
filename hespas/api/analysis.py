"""Analyses of measured profiles: time breakdown, idle causes, operations against the roofline,
communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from hespas.analysis.collectives import InstanceRow, MeasuredCollectiveRow, StragglerRow
from hespas.analysis.critical_path import PathRow, SegmentRow
from hespas.analysis.device_use import (
    ALL_STEPS,
    BreakdownRow,
    GapRow,
    IdleLengthRow,
    IdleRow,
    LaunchRow,
    MemoryPointRow,
    MemoryRow,
    QueuePointRow,
    QueueRow,
)
from hespas.analysis.difference import ChangeRow, PartRow, RecordingDifference, difference_of
from hespas.analysis.operations import ClassRow, KernelRow, OperationRow, WinRow
from hespas.analysis.run import (
    AnalysisTables,
    analysis_tables,
    changed_text,
    device_of,
    step_ns_of,
    summary_line,
    world_size_of,
)
from hespas.analysis.table import RowTable
from hespas.analysis.traffic import TrafficRow
from hespas.analysis.tree import TreeRow
from hespas.api.arguments import Captures, ModelFlops, ReadingRecording, Tokens, checked, hardware_option
from hespas.api.documents import Document, Result, findings
from hespas.api.io import read_profiles, with_capture
from hespas.converters import ReadOptions
from hespas.converters.format import SourceFormat
from hespas.files.documents import Figure, document_bytes
from hespas.graph import Diagnostics, Profile, StepFacts
from hespas.graph.deprecation import RenamedAttribute, renamed_arguments
from hespas.graph.errors import UsageError
from hespas.graph.hints import INPUT, Option
from hespas.graph.progress import Progress
from hespas.report import Table
from hespas.report.charts import Chart
from hespas.simulator.results import Throughput, rates_of, warn_of_rates

if TYPE_CHECKING:
    import pandas

__all__ = ["Analysis", "AnalysisDocument", "DifferenceDocument", "analysis_document", "analyze"]


@dataclass(frozen=True, slots=True, repr=False)
class Analysis(Result):
    """Analysis of profiles. ``tables`` has one attribute per table. ``difference`` has the tables of the
    comparison with the ``baseline``, if one was given. ``devices`` are the device names in the profiles.
    ``throughput`` has the rates of a step.
    """

    tables: AnalysisTables
    inputs: tuple[str, ...] = ()
    baseline: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    throughput: Throughput = field(default_factory=Throughput)
    found = RenamedAttribute("tables")
    against = RenamedAttribute("baseline")

    @property
    def difference(self) -> RecordingDifference | None:
        """Return the tables of the comparison with the baseline; None without a baseline."""
        return self.tables.difference

    def headline(self) -> str:
        """Return the summary line: the step time and its parts, MFU and tokens/s if known, and the
        change from the baseline.
        """
        summary = summary_line(self.tables)
        summary += f"; {self.throughput}" if self.throughput.is_known else ""
        return f"{summary}; {changed_text(self.difference)}" if self.difference else summary

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.analyze/1``."""
        return document_bytes(analysis_document(self))

    def tables_by_name(self) -> Mapping[str, RowTable[Any]]:
        """Return all tables by name, including the comparison with a baseline."""
        return self.tables.by_name()

    def table(self, name: str = "operations") -> Table:
        """Return one table by its name in the JSON document: ``breakdown``, ``kernels``, ``by_shape``, ...
        Raises ``UsageError`` for an unknown name.
        """
        tables = self.tables_by_name()
        if name not in tables:
            raise UsageError(f"no table {name!r}", hint=f"use one of: {', '.join(tables)}")
        return tables[name]

    def to_pandas(self, table: str = "operations") -> pandas.DataFrame:
        """Return :meth:`table` as a data frame."""
        return self.table(table).to_pandas()

    def charts(self) -> tuple[Chart, ...]:
        """Return the charts, as far as their data were recorded: difference, timeline, idle time, roofline,
        flame graph, bus bandwidth and memory.
        """
        return self.tables.charts()

    def to_html(self) -> str:
        """Return the page of the analysis."""
        from hespas.analysis.report import analysis_html

        device = self.tables.hardware
        about = f"The roofline is that of {device}." if device else "The device is unknown: no roofline."
        return analysis_html(
            self.headline(),
            self.tables_by_name(),
            inputs=self.inputs,
            baseline=self.baseline,
            devices=self.devices,
            about=about,
            notes=self.tables.notes,
            charts=self.charts(),
            diagnostics=self.diagnostics,
        )

    def write(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write ``index.html``, ``analysis.json`` and a CSV file per table into a folder. Raises
        ``OutputError`` if one of these files exists and ``overwrite`` is false.
        """
        from hespas.analysis.report import write_report

        tables = self.tables_by_name()
        write_report(Path(folder), self.to_html(), self.to_json(), tables, overwrite=overwrite)


class DifferenceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Differences from the inputs ``against``."""

    against: list[str]
    parts: list[PartRow]
    by_operation: list[ChangeRow]
    by_shape: list[ChangeRow]
    by_kernel: list[ChangeRow]


class AnalysisDocument(Document, frozen=True, kw_only=True):
    """Document of ``hespas analyze --json``: one list of rows per analysis. ``step_period_ns`` is the time
    from the start of a step to the start of the next one (for a single step, its length). Rates are per this
    period.
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
    idle_lengths: list[IdleLengthRow]
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
    collectives: list[MeasuredCollectiveRow]
    collective_instances: list[InstanceRow]
    stragglers: list[StragglerRow]
    traffic: list[TrafficRow]
    memory: list[MemoryRow]
    memory_points: list[MemoryPointRow]
    difference: DifferenceDocument | None


_ProfileSource = str | Path | Profile
_Profiles = Annotated[
    _ProfileSource | Sequence[_ProfileSource],
    Option("Profiles, one per rank, or a folder of profiles.", metavar="PROFILE...", is_argument=True),
]
_Baseline = Annotated[
    _ProfileSource | Sequence[_ProfileSource] | None,
    Option("Compare with this earlier profile; repeat for each rank.", metavar="PROFILE", panel=INPUT),
]
_Hardware = Annotated[str, hardware_option("Use the roofline of this device (default: the measured device).")]


@renamed_arguments(against="baseline")
@checked()
def analyze(
    source: _Profiles,
    *,
    baseline: _Baseline = None,
    hardware: _Hardware = "",
    tokens: Tokens = None,
    model_flops: ModelFlops = None,
    capture: Captures = None,
    format: SourceFormat = None,  # noqa: A002 # the word users know
    options: ReadingRecording = None,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Analyse profiles of one job (values or paths), each of one or more ranks; a folder holds one per
    rank.

    ``baseline`` is an earlier recording of the same job, which is compared. ``capture`` is one or more
    traces of the graph captures that the profiles replay, or folders of them. ``hardware`` (a name or a
    TOML file) is the device of the roofline; by default the device named by the profiles. ``tokens`` and
    ``model_flops`` are per step on all ranks, for tokens/s and MFU.

    Raises ``UsageError`` for a program, which has no measurements, without profiles, for an unknown device,
    and for tokens or FLOPs that are not above 0; for paths also what ``read`` raises.

    Examples:
        >>> done = hespas.analyze("samples/ffn_train_rank0of2.pt.trace.json.gz")
        >>> done.tables_by_name()["kernels"].to_pandas().shape[0]
        9
    """
    for name, value in {"tokens": tokens, "model_flops": model_flops}.items():
        if value is not None and not 0 < value < inf:
            raise UsageError(
                f"`{name}` is {value:g}, but must be above 0", hint="give the number of one step on all ranks"
            )
    sink = diagnostics if diagnostics is not None else Diagnostics()
    options = with_capture(options or ReadOptions(), capture)
    names, profiles = _read_sources(source, format, options, sink, progress)
    device = device_of(profiles, hardware, sink)
    tables = analysis_tables(profiles, device, sink)
    # the host may take longer for a step than the span of its device events
    period_ns = step_ns_of(tables) if isnan(tables.period_ns) else tables.period_ns
    # the job has as many ranks as its profiles state, or as were recorded
    recorded = int((tables.breakdown["step"] == ALL_STEPS).sum())
    facts = StepFacts(
        kind="training",
        tokens=nan if tokens is None else tokens,
        model_flops=nan if model_flops is None else model_flops,
        ranks=max(recorded, world_size_of(profiles)),
        dtype=tables.product_dtype,
    )
    rates = rates_of(facts, period_ns, device)
    warn_of_rates(rates, names[0], sink)
    devices = _devices(profiles)
    result = Analysis(tables, names, devices=devices, diagnostics=sink, throughput=rates)
    if baseline is None:
        return result
    base_names, base_profiles = _read_sources(baseline, None, options, sink, progress)
    base_devices = _devices(base_profiles)
    if set(base_devices) != set(devices):
        before, after = (", ".join(listed) or "an unnamed device" for listed in (base_devices, devices))
        message = f"the two recordings are of different devices: {before} before, {after} after"
        sink.warning("analysis.devices-differ", base_names[0], message)
    base_tables = analysis_tables(base_profiles, device, sink)
    for name in ("rank", "step"):  # times are sums over all that was recorded
        old, new = (
            len(np.unique(table[name][(table["step"] == ALL_STEPS) == (name == "rank")]))
            for table in (base_tables.breakdown, tables.breakdown)
        )
        message = f"{old} {name}s were recorded before and {new} after: times are of all of them"
        sink.warning("analysis.recorded-differ", base_names[0], message, count=int(old != new))
    compared = replace(tables, difference=difference_of(base_tables, tables))
    return replace(result, tables=compared, baseline=base_names)


def _devices(profiles: Sequence[Profile]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for profile in profiles for name in profile.devices if name))


def _read_sources(
    sources: _ProfileSource | Sequence[_ProfileSource],
    format_name: str | None,
    options: ReadOptions | None,
    diagnostics: Diagnostics,
    progress: Progress | None,
) -> tuple[tuple[str, ...], list[Profile]]:
    """Return the names of the sources, and the profiles of all of them. Raises ``UsageError`` without a
    profile.
    """
    listed = [sources] if isinstance(sources, str | Path | Profile) else list(sources)
    profiles: list[Profile] = []
    for done, source in enumerate(listed):
        if progress:
            progress(done, len(listed))
        if isinstance(source, Profile):
            profiles.append(source)
        else:
            profiles += read_profiles(source, format=format_name, options=options, diagnostics=diagnostics)
    if not profiles:
        raise UsageError("no profile to analyse", hint="name a profile, or a folder with one per rank")
    return tuple(source.name if isinstance(source, Profile) else str(source) for source in listed), profiles


def analysis_document(done: Analysis) -> AnalysisDocument:
    """Return the document of an analysis: ``hespas.analyze/1``."""
    tables, difference = done.tables, done.difference
    compared = None
    if difference is not None:
        compared = DifferenceDocument(
            against=list(done.baseline),
            parts=difference.parts.rows(),
            by_operation=difference.by_operation.rows(),
            by_shape=difference.by_shape.rows(),
            by_kernel=difference.by_kernel.rows(),
        )
    return AnalysisDocument(
        inputs=list(done.inputs),
        diagnostics=findings(done.diagnostics),
        verdict=done.headline(),
        devices=list(done.devices),
        hardware=tables.hardware,
        step_period_ns=tables.period_ns,
        model_flops_per_step=done.throughput.model_flops,
        tokens_per_step=done.throughput.tokens,
        mfu=done.throughput.mfu,
        mfu_peak_dtype=done.throughput.peak_dtype,
        tokens_per_s=done.throughput.tokens_per_s,
        notes=list(tables.notes),
        breakdown=tables.breakdown.rows(),
        idle=tables.idle.rows(),
        idle_lengths=tables.idle_lengths.rows(),
        gaps=tables.gaps.rows(),
        launches=tables.launches.rows(),
        queues=tables.queues.rows(),
        queue_points=tables.queue_points.rows(),
        classes=tables.classes.rows(),
        operations=tables.operations.rows(),
        kernels=tables.kernels.rows(),
        wins=tables.wins.rows(),
        tree=tables.tree.rows(),
        critical_path=tables.critical_path.rows(),
        critical_segments=tables.critical_segments.rows(),
        collectives=tables.collectives.rows(),
        collective_instances=tables.collective_instances.rows(),
        stragglers=tables.stragglers.rows(),
        traffic=tables.traffic.rows(),
        memory=tables.memory.rows(),
        memory_points=tables.memory_points.rows(),
        difference=compared,
    )
