"""Synthesis of jobs like given ones, and the card that compares them with their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as from_zero
from math import exp, inf, isnan, log, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
import numpy as np

from hespas.api.arguments import Seed, WritingJob, checked
from hespas.api.documents import Document, Finding, Result, findings
from hespas.api.io import as_workload, read, write
from hespas.api.lowering import granularity_of, merged
from hespas.converters import WriteOptions
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.graph import Diagnostics, Severity, Workload
from hespas.graph.errors import CheckFailedError, HespasError, UnsupportedError, UsageError
from hespas.graph.hints import DEVICE, AtLeast, Option, PositiveInt
from hespas.graph.progress import Progress
from hespas.report import Column, Table, column_of, table_from_rows
from hespas.report.texts import counted

if TYPE_CHECKING:
    from hespas.generators.synth.job_card import JobProfile
    from hespas.generators.synth.job_costs import CostSamples
    from hespas.generators.synth.jobs import Template, TemplateJob

__all__ = [
    "CardFigure",
    "Synthesis",
    "SynthesisDocument",
    "SyntheticJob",
    "attack_figure",
    "calibrated_job",
    "card_figures",
    "synthesize",
]

_SYSTEMS = ("dgx-h100", "dgx-b200", "dgx-a100", "hgx-mi300x", "tpu-v5p")
_TOLERANCE, _TOLERANCE_OF_TARGET = 0.02, 0.005
_MOST_STEPS = 6
_MOST_CALIBRATION = 0.1
"""Largest change of the logarithm of all costs for the step time of the source."""
_CARD = "card.json"


class SyntheticJob(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic job. ``nodes`` and ``collective_bytes`` are means per rank, ``flops`` the sum of all ranks.
    ``is_valid`` is the verdict of the checker with the rules of ASTRA-sim. ``step_ns`` is the simulated step
    by system, ``astra_ns`` the step of ASTRA-sim's analytical simulator on the first system (null: it did not
    finish, or was not simulated).
    """

    name: str
    source: str
    ranks: Count
    nodes: Figure
    flops: Figure
    collective_bytes: Figure
    is_valid: bool
    violations: dict[str, int]
    step_ns: dict[str, Figure]
    astra_ns: Figure

    @classmethod
    def of(cls, workload: Workload, source: str, systems: Sequence[str]) -> SyntheticJob:
        """Check and simulate a job."""
        from hespas.api.checks import check
        from hespas.generators.synth.jobs import total_flops, total_payload

        report = check(workload, profile="astra-sim")
        sizes = [len(graph) for graph in workload.classes]
        has_network = bool(systems) and workload.num_ranks > 1
        return cls(
            name=workload.name,
            source=source,
            ranks=workload.num_ranks,
            nodes=float(np.average(sizes, weights=workload.class_sizes)),
            flops=total_flops(workload),
            collective_bytes=total_payload(workload) / workload.num_ranks,
            is_valid=report.valid,
            violations=dict(report.counts),
            step_ns=_steps(workload, systems),
            astra_ns=_simulated_ns(workload, systems[0], "astra") if has_network else nan,
        )


class CardFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Figure of a card. ``real`` is the same figure between sources (null: not defined)."""

    axis: Literal["structure", "cost", "use", "privacy", "validity"]
    figure: str
    value: Figure
    real: Figure = nan


class SynthesisDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas generate synth --json``, and the file card.json of a set of jobs."""

    schema: Literal["hespas.synthesis/1"] = "hespas.synthesis/1"
    seed: Count
    scale: float
    systems: list[str]
    jobs: list[SyntheticJob]
    card: list[CardFigure]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Synthesis(Result):
    """Set of synthetic jobs: their workloads, a row each, and the figures of the card."""

    page_title: ClassVar[str] = "Synthetic jobs"

    workloads: tuple[Workload, ...]
    jobs: tuple[SyntheticJob, ...]
    card: tuple[CardFigure, ...]
    sources: tuple[str, ...]
    seed: int
    scale: float
    systems: tuple[str, ...]
    diagnostics: Diagnostics
    written: str = ""
    written_bytes: int = 0

    @property
    def valid(self) -> bool:
        """Return True if the checker accepts every job."""
        return all(job.is_valid for job in self.jobs)

    def value(self, figure: str) -> float:
        """Return one figure of the card by its name. Raises ``UsageError`` for an unknown name."""
        for row in self.card:
            if row.figure == figure:
                return row.value
        names = ", ".join(row.figure for row in self.card)
        raise UsageError(f"the card has no figure {figure!r}", hint=f"use one of: {names}")

    def headline(self) -> str:
        """Return the summary line: the number of jobs, their sources, and the number of valid ones."""
        valid = sum(job.is_valid for job in self.jobs)
        return (
            f"{counted(len(self.jobs), 'synthetic job')} like {counted(len(self.sources), 'source')}, "
            f"{valid} valid"
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.synthesis/1``."""
        return document_bytes(self.document(list(self.sources), findings(self.diagnostics)))

    def document(self, inputs: list[str], notes: list[Finding]) -> SynthesisDocument:
        """Return the document as a typed value."""
        return SynthesisDocument(
            inputs=inputs,
            diagnostics=notes,
            seed=self.seed,
            scale=self.scale,
            systems=list(self.systems),
            jobs=list(self.jobs),
            card=list(self.card),
        )

    def table(self) -> Table:
        """Return the jobs as a table."""
        header = (
            Column("job"),
            Column("source"),
            Column("ranks", kind="count"),
            Column("nodes", "nodes per rank", kind="count"),
            column_of("flops"),
            column_of("collective_bytes"),
            Column("valid"),
            *(Column(system, f"step on {system}", kind="time") for system in self.systems),
        )
        rows = [
            (
                job.name,
                job.source,
                job.ranks,
                round(job.nodes),
                job.flops,
                job.collective_bytes,
                "yes" if job.is_valid else "no",
                *(job.step_ns.get(system, nan) for system in self.systems),
            )
            for job in self.jobs
        ]
        return table_from_rows(header, rows)

    def write(
        self, folder: str | Path, options: WriteOptions | None = None, *, overwrite: bool = False
    ) -> int:
        """Write the jobs, each as a folder of traces, and card.json, which names no source. Return the number
        of bytes.
        """
        target = Path(folder)
        if not (overwrite and target.is_dir()):
            check_destination(target, overwrite=overwrite)
        target.mkdir(parents=True, exist_ok=True)
        size = 0
        for workload in self.workloads:
            destination = f"{target / workload.name}/"
            size += write(workload, destination, overwrite=overwrite, options=options or WriteOptions())
        numbers = {source: f"source {number}" for number, source in enumerate(self.sources)}
        jobs = tuple(msgspec.structs.replace(job, source=numbers[job.source]) for job in self.jobs)
        document = document_bytes(replace(self, jobs=jobs).document(list(numbers.values()), []))

        def fill(temporary: Path) -> None:
            temporary.write_bytes(document)

        return size + write_atomically(target / _CARD, fill, overwrite=overwrite, directory=False)

    def card_table(self) -> Table:
        """Return the card as a table."""
        header = (
            Column("axis"),
            Column("figure"),
            Column("value", kind="number", write=_figure_text),
            Column("real", "real to real", kind="number", write=_figure_text, unknown=""),
        )
        rows = [(row.axis, row.figure, row.value, row.real) for row in self.card]
        return table_from_rows(header, rows)

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the jobs and the card."""
        return {"jobs": self.table(), "card": self.card_table()}


def _figure_text(value: float) -> str:
    return f"{value:.4g}"


_Sources = Annotated[
    str | Path | Workload | Sequence[str | Path | Workload],
    Option("Generate jobs like this workload; repeatable.", flag="like", metavar="TRACE", access="reads"),
]
_Folder = Annotated[
    str | Path | None,
    Option("Write the jobs and card.json to this folder.", flag="out", metavar="DIR", access="writes"),
]
_Methods = Literal["template", "n-gram", "transformer"]
_Method = Annotated[
    _Methods,
    Option("Vary the layers of a source, or draw programs from a model that learned its windows."),
]
_Count = Annotated[PositiveInt, Option("Set the number of jobs.", metavar="N")]
_Above = AtLeast(1e-9)
_Scale = Annotated[
    float, _Above, Option("Set nodes, FLOPs and collective bytes relative to the source.", metavar="X")
]
_Nodes = Annotated[
    float | None, AtLeast(1), Option("Set nodes per rank (default: from `scale`).", metavar="N")
]
_Flops = Annotated[
    float | None, _Above, Option("Set FLOPs per step over all ranks (default: from `scale`).", metavar="F")
]
_CollectiveBytes = Annotated[
    float | None,
    _Above,
    Option("Set the payload of collectives per rank in bytes (default: from `scale`).", metavar="B"),
]
_StepTime = Annotated[
    float | None,
    _Above,
    Option(
        "Set the simulated step time on the first system in ms (default: from `scale`).",
        flag="step-time",
        metavar="MS",
        panel=DEVICE,
    ),
]
_Systems = Annotated[
    Sequence[str],
    Option(
        "Compare simulated steps on these systems; repeatable.",
        flag="system",
        metavar="NAME|FILE",
        panel=DEVICE,
        completes="systems",
        default_text=",".join(_SYSTEMS),
    ),
]
_Simulates = Annotated[
    bool,
    Option("Simulate jobs and sources for the card.", flag="simulate/no-simulate", panel=DEVICE),
]
_Attacks = Annotated[
    bool, Option("Also count jobs whose source an attacker with 20 public models finds.", flag="attack")
]


@checked()
def synthesize(
    like: _Sources,
    destination: _Folder = None,
    *,
    count: _Count = 10,
    method: _Method = "template",
    seed: Seed = 0,
    scale: _Scale = 1.0,
    nodes: _Nodes = None,
    flops: _Flops = None,
    collective_bytes: _CollectiveBytes = None,
    step_ms: _StepTime = None,
    systems: _Systems = _SYSTEMS,
    simulates: _Simulates = True,
    attacks: _Attacks = False,
    options: WritingJob = None,
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> Synthesis:
    """Make jobs that keep the statistics of their sources: ranks, groups, order of operations, FLOPs,
    payloads and step time. Numbers of layers, costs of operations, extents and names are other ones.

    Each job has one of the sources as its template; the sources take turns. With ``method`` ``n-gram`` or
    ``transformer``, its program is drawn from a model that learned windows of the source; all ranks of such
    sources must run one program without messages. The jobs and ``card.json`` are
    written to ``destination``, if given, as a folder of Chakra traces each. Equal settings make equal jobs.
    Raises ``UsageError`` for contradicting settings, ``CheckFailedError`` for a source that is not valid,
    ``UnsupportedError`` for a source without some of its ranks, and what ``read`` raises.

    Examples:
        >>> jobs = hespas.synthesize("samples/pipeline_2x2", count=2, systems=["dgx-h100"])
        >>> jobs
        <Synthesis: 2 synthetic jobs like 1 source, 2 valid>
    """
    from hespas.generators.synth.jobs import JobSize, TemplateJob, templates_of

    sink = diagnostics if diagnostics is not None else Diagnostics()
    if step_ms is not None and not (flops is None and collective_bytes is None):
        raise UsageError(
            "`step_ms` contradicts `flops` and `collective_bytes`, which determine the step time",
            hint="give one of them",
        )
    if step_ms is not None and not (simulates and systems):
        raise UsageError("`step_ms` requires a simulation", hint="leave out `simulates=False`")
    folder = None if destination is None else Path(destination)
    if folder is not None and not (overwrite and folder.is_dir()):
        check_destination(folder, overwrite=overwrite)
    given = [like] if isinstance(like, str | Path | Workload) else list(like)
    if not given:
        raise UsageError("no source was given", hint="name at least one TRACE")
    sources = [_source(value, sink) for value in given]
    templates = templates_of(sources, sink)
    size = JobSize(
        scale=scale,
        nodes=nan if nodes is None else nodes,
        flops=nan if flops is None else flops,
        collective_bytes=nan if collective_bytes is None else collective_bytes,
    )
    if nodes is not None and not all(any(template.runs) for template in templates):
        sink.warning("synth.no-layers", "`nodes`", "has no effect on jobs without repeated layers")
    chosen = tuple(systems) if simulates else ()
    steps = [_steps(source, chosen) for source in sources[:count]]
    made = list[tuple[TemplateJob, Workload, SyntheticJob]]()
    bases = _bases(templates, sources, method, round(nodes or 0), seed)
    for number, (template, basis, samples) in zip(range(count), bases, strict=False):
        job = TemplateJob(template=basis, samples=samples, seed=seed, number=number, size=size)
        workload = job.workload()
        if chosen and flops is None and collective_bytes is None:
            wanted = job.growth_of_costs * steps[template][chosen[0]] if step_ms is None else step_ms * 1e6
            limits = (_TOLERANCE, _MOST_CALIBRATION) if step_ms is None else (_TOLERANCE_OF_TARGET, inf)
            job, workload = calibrated_job(job, workload, chosen[0], wanted, limits)
        made.append((job, workload, SyntheticJob.of(workload, _name_of(given[template]), chosen)))
        if progress is not None:
            progress(number + 1, count)
    wanted_ns = nan if step_ms is None else step_ms * 1e6
    workloads = tuple(workload for _, workload, _ in made)
    card = card_figures([template.workload for template in templates], steps, made, wanted_ns)
    if attacks:
        card.append(attack_figure(sources, workloads))
    result = Synthesis(
        workloads=workloads,
        jobs=tuple(row for _, _, row in made),
        card=tuple(card),
        sources=tuple(map(_name_of, given)),
        seed=seed,
        scale=scale,
        systems=chosen,
        diagnostics=sink,
    )
    if folder is None:
        return result
    size_bytes = result.write(folder, options, overwrite=overwrite)
    return replace(result, written=str(folder), written_bytes=size_bytes)


def _name_of(source: str | Path | Workload) -> str:
    return source.name if isinstance(source, Workload) else str(source)


def _source(value: str | Path | Workload, diagnostics: Diagnostics) -> Workload:
    """Return a source with its operations merged as all commands merge them. Raises ``UnsupportedError`` if
    ranks are missing, ``CheckFailedError`` for a source that is not valid.
    """
    from hespas.api.checks import check

    workload = (
        value
        if isinstance(value, Workload)
        else as_workload(read(value, diagnostics=diagnostics), diagnostics)
    )
    if not workload.is_complete:
        raise UnsupportedError(
            f"{workload.name}: {workload.num_available} of {workload.num_ranks} ranks are available; "
            "messages and collectives of the others cannot be generated",
            hint="name the folder of all ranks",
        )
    source = merged(workload, granularity_of(workload, None), diagnostics)
    report = check(source, profile="astra-sim")
    if not report.valid:
        errors = [entry for entry in report.violations if entry.severity is Severity.ERROR]
        raise CheckFailedError(
            f"source {workload.name} is not valid, and jobs like it would not be: {errors[0].message}",
            code=errors[0].code,
            hint="hespas-validate check TRACE --profile astra-sim",
        )
    return source


def _simulated_ns(workload: Workload, system: str, mode: Literal["hespas", "astra"] = "hespas") -> float:
    """Return the simulated time of a step, NaN if it does not finish."""
    from hespas.api.simulation import simulate

    try:
        return float(simulate(workload, system=system, mode=mode).step_ns)
    except HespasError as error:
        if isinstance(error, UsageError):
            raise
        return nan


def _steps(workload: Workload, systems: Sequence[str]) -> dict[str, float]:
    return {system: _simulated_ns(workload, system) for system in systems}


def calibrated_job(
    job: TemplateJob, workload: Workload, system: str, wanted_ns: float, limits: tuple[float, float]
) -> tuple[TemplateJob, Workload]:
    """Return a job, and its workload, whose costs are scaled so that its simulated step takes the wanted
    time. The exponent of the step time over the costs is estimated from the last two steps. ``limits`` are
    the tolerance, and the largest change of costs, as logarithms.
    """
    tolerance, most = limits
    best, least, exponent = (job, workload), np.inf, 1.0
    last: tuple[float, float] | None = None
    for _ in range(_MOST_STEPS):
        step_ns = _simulated_ns(workload, system)
        if not step_ns > 0 or not wanted_ns > 0:
            break
        error = log(wanted_ns / step_ns)
        if abs(error) < least:
            best, least = (job, workload), abs(error)
        if abs(error) <= tolerance:
            break
        if last is not None and abs(log(job.cost_scale) - last[0]) > 1e-9:
            exponent = (log(step_ns) - last[1]) / (log(job.cost_scale) - last[0])
        last = log(job.cost_scale), log(step_ns)
        change = min(max(error / min(max(exponent, 0.2), 2.0), -5.0), 5.0)
        new_scale = min(max(log(job.cost_scale) + change, -most), most)
        if new_scale == log(job.cost_scale):
            break
        job = replace(job, cost_scale=exp(new_scale))
        workload = job.workload()
    return best


def card_figures(
    sources: Sequence[Workload],
    steps: Sequence[Mapping[str, float]],
    made: Sequence[tuple[TemplateJob, Workload, SyntheticJob]],
    step_ns: float,
) -> list[CardFigure]:
    """Return the figures of a card. Sources count as often as they are templates. Their sizes and times are
    those of a job of the wanted size. ``step_ns`` is the wanted step time on the first system (NaN: from the
    size).
    """
    from hespas.fitting.statistics import kendall_tau
    from hespas.generators.synth.job_card import JobProfile, sample_distance, structure_distances

    generators, workloads, rows = zip(*made, strict=True)
    systems = list(rows[0].step_ns)
    used = [number % len(sources) for number in range(len(rows))]
    real = [JobProfile.of(source) for source in sources[: len(rows)]]
    jobs = [JobProfile.of(workload) for workload in workloads]
    growth = [job.growth_of_nodes for job in generators]
    scales = [1.0 if isnan(step_ns) else job.cost_scale for job in generators]
    costs = [job.growth_of_costs * scale for job, scale in zip(generators, scales, strict=True)]
    times = [
        (job.growth_of_nodes if isnan(job.size.flops) else costs[number])
        if isnan(step_ns)
        else step_ns / steps[source][systems[0]]
        for number, (source, job) in enumerate(zip(used, generators, strict=True))
    ]
    own = [real[source] for source in used]

    def error(made: Sequence[float], wanted: Sequence[float]) -> float:
        ratios = [abs(one / other - 1.0) for one, other in zip(made, wanted, strict=True) if other > 0]
        return float(np.mean(ratios)) if ratios else nan

    structure = structure_distances(jobs, own, growth)
    card = [CardFigure(axis="structure", figure=name, value=value) for name, value in structure.items()]
    flops, moved = (
        [getattr(profile, name) * scale for profile, scale in zip(own, costs, strict=True)]
        for name in ("flops", "bytes_moved")
    )
    card.append(_cost("FLOPs error", error([job.flops for job in jobs], flops)))
    card.append(_cost("bytes error", error([job.bytes_moved for job in jobs], moved)))
    for kind in sorted({kind for profile in own for kind in profile.payloads}):
        payloads = [job.payloads.get(kind, 0.0) for job in jobs]
        wanted = [
            profile.payloads.get(kind, 0.0) * job.growth_of_payload * scale
            for profile, job, scale in zip(own, generators, scales, strict=True)
        ]
        card.append(_cost(f"{kind} bytes error", error(payloads, wanted)))
    for system in systems:
        wanted_ns = [steps[source][system] * time for source, time in zip(used, times, strict=True)]
        made_ns = [row.step_ns[system] for row in rows]
        ratios = [one / other for one, other in zip(made_ns, wanted_ns, strict=True) if other > 0]
        card.append(_cost(f"step ratio on {system}", float(np.mean(ratios)) if ratios else nan))
        card.append(_cost(f"step W1 on {system}", sample_distance(made_ns, wanted_ns)))
    if len(systems) > 1:
        taus = [
            kendall_tau(
                np.array([row.step_ns[s] for s in systems]), np.array([steps[source][s] for s in systems])
            )
            for source, row in zip(used, rows, strict=True)
        ]
        for name, tau in (("mean", np.mean(taus)), ("least", np.min(taus))):
            card.append(CardFigure(axis="use", figure=f"systems, {name} Kendall tau", value=float(tau)))
    card += _privacy(real, jobs)
    verdicts = {"checker, share valid": [row.is_valid for row in rows]}
    if systems:
        verdicts["simulation, share finished"] = [not any(map(isnan, row.step_ns.values())) for row in rows]
    if systems and (astra := [not isnan(row.astra_ns) for row in rows if row.ranks > 1]):
        verdicts["ASTRA-sim model, share finished"] = astra
    card += [
        CardFigure(axis="validity", figure=figure, value=float(np.mean(shares)))
        for figure, shares in verdicts.items()
    ]
    return card


def _cost(figure: str, value: float) -> CardFigure:
    return CardFigure(axis="cost", figure=figure, value=value)


def _bases(
    templates: Sequence[Template], sources: Sequence[Workload], method: _Methods, nodes: int, seed: int
) -> Iterator[tuple[int, Template, CostSamples]]:
    """Yield for each job the number of its source, its template, and the costs that it may take: those of all
    sources, or those of a program that a learned model of its source drew.
    """
    from hespas.generators.synth.job_costs import CostSamples
    from hespas.generators.synth.jobs import templates_of
    from hespas.generators.synth.programs import LearnedPrograms

    if method == "template":
        samples = CostSamples.of([table for template in templates for table in template.tables])
        for number in from_zero():
            row = number % len(templates)
            yield row, templates[row], samples
    else:
        programs = dict[int, LearnedPrograms]()
        for number in from_zero():
            row = number % len(sources)
            if row not in programs:
                programs[row] = LearnedPrograms(sources[row], method, seed=seed)
            drawn = programs[row].workload(nodes=nodes, seed=seed + number)
            (basis,) = templates_of([drawn], Diagnostics())
            yield row, basis, CostSamples.of(basis.tables)


def _privacy(real: Sequence[JobProfile], jobs: Sequence[JobProfile]) -> list[CardFigure]:
    from hespas.generators.synth.job_card import nearest_distances

    def copies(of: Callable[[JobProfile], bytes]) -> tuple[float, float]:
        originals = [of(profile) for profile in real]
        among = float(np.mean([originals.count(key) > 1 for key in originals])) if len(real) > 1 else nan
        return float(np.mean([of(job) in originals for job in jobs])), among

    exact, exact_real = copies(lambda job: job.identity)
    same, same_real = copies(lambda job: job.structure)
    nearest = nearest_distances(jobs, real)
    among = nearest_distances(real, real) if len(real) > 1 else np.array([nan])
    near, near_real = float(np.median(nearest)), float(np.median(among))
    return [
        CardFigure(axis="privacy", figure="exact copies", value=exact, real=exact_real),
        CardFigure(axis="privacy", figure="structure copies", value=same, real=same_real),
        CardFigure(axis="privacy", figure="nearest source", value=near, real=near_real),
        CardFigure(
            axis="privacy", figure="nearest-neighbour ratio", value=near / near_real if near_real > 0 else nan
        ),
    ]


def attack_figure(sources: Sequence[Workload], workloads: Sequence[Workload]) -> CardFigure:
    """Return the share of jobs whose source is found by an attacker who holds it and 20 public models. The
    figure of real jobs is chance.
    """
    from hespas.validators.privacy.attacker import Attacker, Reference
    from hespas.validators.privacy.fingerprint import fingerprint
    from hespas.validators.privacy.library import PUBLIC_MODELS, references

    attacker = Attacker.trained(list(references(PUBLIC_MODELS, "shapes")))
    own = [Reference(model="", plain=fingerprint(source)) for source in sources]
    is_named = [
        not attacker.ranking(fingerprint(workload), own[number % len(own)])[0][0]
        for number, workload in enumerate(workloads)
    ]
    return CardFigure(
        axis="privacy",
        figure="source found by the attacker",
        value=float(np.mean(is_named)),
        real=1.0 / (len(PUBLIC_MODELS) + 1),
    )
