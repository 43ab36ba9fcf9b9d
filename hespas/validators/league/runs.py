"""A published run as timed passes: its settings from its row, its system by its accelerator, times of kernels
by an estimator and of communication by the network of the system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from hespas.estimators import load_estimator
from hespas.estimators.registry import Estimator, for_job
from hespas.generators.llm.layout import check_layout, layers_of_stages, micro_batches
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.stage import StagePasses, stage_passes
from hespas.graph import Diagnostics, Estimate, NodeKind, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, Dimension, System, load_device, load_system
from hespas.hardware.model import Source
from hespas.simulator.network import Network, on_system
from hespas.validators.league.kernels import (
    attention_library,
    in_16_bits,
    trained_times,
    variant_of,
)
from hespas.validators.league.parts import StageNodes, stage_nodes
from hespas.validators.league.pipeline import Schedule

__all__ = ["SYSTEMS", "TimedRun", "issue_ns", "timed_run"]

SYSTEMS: Mapping[str, str] = {
    "A100-SXM-40GB": "dgx-a100",
    "A100-SXM-80GB": "dgx-a100",
    "H100-SXM": "dgx-h100",
    "H200-SXM": "dgx-h200",
    "H200-NVL": "dgx-h200",
    "B200-SXM": "dgx-b200",
    "B300-SXM": "dgx-b200",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI300X": "hgx-mi300x",
    "MI325X": "hgx-mi300x",
    "MI350X": "hgx-mi300x",
    "TPU-v5e": "tpu-v5e",
    "TPU-v5p": "tpu-v5p",
    "TPU-v6e": "tpu-v6e",
}
"""The system that an accelerator stands in where a row names none."""
_SLICES_NS = 10_000.0
"""From host to host of two slices, where nobody says."""


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The passes of the distinct stages of a run with their times, and the schedule that joins them."""

    stages: tuple[StageNodes, ...]
    schedule: Schedule
    unknown: int
    """Nodes without a time, which count as none."""


def timed_run(
    run: PublishedRun, estimator: str, diagnostics: Diagnostics, system: System | None = None
) -> TimedRun:
    """The passes of a run with what an estimator and the network of a system say of them. Raises
    ``UsageError`` for layouts that break a rule and devices that are not known.
    """
    check_layout(run.model, run.layout, run.training)
    device = load_device(run.row["accelerator"])
    network = Network(_system_of(run, system, device), device)
    like, first = _distinct(run)
    passes = [stage_passes(run.model, run.layout, run.training, stage) for stage in first]
    model = for_job(load_estimator(estimator), run.layout.ranks)
    times = _times(_Clock(run, device, model, network, diagnostics), passes, like)
    stages: list[StageNodes] = []
    unknown = 0
    for each, time_ns in zip(passes, times, strict=True):
        silent = np.isnan(time_ns)
        unknown += int(silent.sum())
        arrives = each.graph.kind == int(NodeKind.RECV)
        settled = np.where(silent | arrives, 0.0, time_ns)
        stages.append(
            stage_nodes(
                each.graph,
                each.parts,
                each.variants,
                each.end,
                settled.tolist(),
                synchronizes=issue_ns(run, device) > 0 and run.training.capacity == 0,
            )
        )
    schedule = Schedule(
        run.training.schedule,
        run.layout,
        micro_batches(run.layout, run.training),
        like,
        run.training.overlap.pipeline,
    )
    return TimedRun(tuple(stages), schedule, unknown)


def _system_of(run: PublishedRun, stated: System | None, device: Device) -> System:
    """The system of a row, sized to its ranks: of slices of a torus where one has fewer."""
    accelerator, ranks = run.row["accelerator"], run.layout.ranks
    name = SYSTEMS.get(accelerator)
    if stated is None and name is None:
        raise UsageError(f"no system of {accelerator} is known", hint="name one in the column system_file")
    found = stated or load_system(str(name))
    if found.devices >= 0:
        return found
    if 0 < found.most < ranks:
        return _in_slices(found, device, ranks)
    return found.sized(_even(found, ranks))


_EAGER_NS, _PARTLY_NS = 20_000.0, 10_000.0


def issue_ns(run: PublishedRun, device: Device) -> float:
    """What it takes a host to issue one of the kernels of a pass: modules of PyTorch one by one, some of them
    or all as a CUDA graph; a program of XLA is issued as a whole.
    """
    notes = run.row.get("notes", "").casefold()
    if device.kind != "gpu" or run.training.style == "maxtext":
        return 0.0
    if not re.search(r"cuda graphs(?! none)", notes):
        return _EAGER_NS
    partly = "transformer_engine" in notes and "full_iteration" not in notes
    return _PARTLY_NS if partly else 0.0


def _even(found: System, ranks: int) -> int | tuple[int, int]:
    """Ranks of a job, or of each domain and domains: a job that does not fill whole domains takes as many
    devices of each, so that groups of a power of two stay inside of one.
    """
    inner = found.shape[0]
    if found.placement != "fill" or inner < 0 or ranks <= inner or ranks % inner == 0:
        return ranks
    domains = -(-ranks // inner)
    return ranks if ranks % domains else (ranks // domains, domains)


def _in_slices(found: System, device: Device, ranks: int) -> System:
    """Whole slices, or as many equal ones as hold the job, joined by the network of the data center."""
    outside = device.link("scale_out")
    if outside is None:
        raise UsageError(f"{found.name} has {found.most:,} devices, and nothing joins several")
    slices = next(count for count in range(-(-ranks // found.most), ranks + 1) if ranks % count == 0)
    one = found.sized(ranks // slices)
    between = Dimension(
        name=outside.name,
        topology="switch",
        size=slices,
        bandwidth_bytes_per_s=outside.bandwidth_bytes_per_s,
        latency_ns=_SLICES_NS if isnan(outside.latency_ns) else outside.latency_ns,
        links_per_device=1,
        source="device",
        latency_source="device",
    )
    return replace(
        one,
        dimensions=(*one.dimensions, between),
        devices=ranks,
        max_devices=-1,
        sources=(*one.sources, Source(key="device", text=f"the file of {device.name}")),
    )


def _distinct(run: PublishedRun) -> tuple[list[int], list[int]]:
    """Of each stage which of the distinct ones it is like, and the first stage of each of those."""
    layers = run.model.all_layers
    found: dict[tuple[object, ...], int] = {}
    like: list[int] = []
    first: list[int] = []
    last = run.layout.pp - 1
    for stage, chunks in enumerate(layers_of_stages(run.model, run.layout)):
        kinds = tuple(tuple(layers[number] for number in chunk) for chunk in chunks)
        key = (kinds, stage == 0, stage == last)
        if key not in found:
            found[key] = len(found)
            first.append(stage)
        like.append(found[key])
    return like, first


@dataclass(frozen=True, slots=True)
class _Clock:
    """Who says what nodes of a run take."""

    run: PublishedRun
    device: Device
    model: Estimator
    network: Network
    diagnostics: Diagnostics


def _times(clock: _Clock, passes: list[StagePasses], like: list[int]) -> list[FloatArray]:
    """The time of each node of each distinct stage [ns], NaN where nobody knows: of ranks that differ in
    where their groups lie, the longest.
    """
    run, device, diagnostics = clock.run, clock.device, clock.diagnostics
    graphs = tuple(each.graph for each in passes)
    ranks = np.repeat(np.array(like, np.int32), run.layout.ranks // run.layout.pp)
    job = Workload(name=run.model.name, classes=graphs, rank_class=ranks, metadata={})
    library, variant = attention_library(run, device), variant_of(run, device)
    estimates: list[Estimate] = []
    for graph in graphs:
        said = clock.model.estimate(in_16_bits(graph, device), device, diagnostics)
        fused = run.training.compiled
        times = trained_times(graph, device, library, said.duration_ns, variant, fused=fused)
        estimates.append(replace(said, duration_ns=times))
    parted, placed = on_system(job, estimates, clock.network, diagnostics)
    longest = [np.full(len(graph), np.nan) for graph in graphs]
    for number, estimate in enumerate(placed or ()):
        members = np.flatnonzero(parted.rank_class == number)
        if len(members):
            whose = int(ranks[members[0]])
            longest[whose] = np.fmax(longest[whose], estimate.duration_ns)
    return longest
