"""Published runs as simulator jobs: the system of a run, and its passes (forward or backward of one
microbatch) with kernel and network times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan

import numpy as np
from msgspec import structs

from hespas.estimators import as_run_on
from hespas.estimators.configuration import training_estimator
from hespas.generators.llm.layout import Layout, check_layout, layers_of_stages, micro_batches
from hespas.generators.llm.model import Model
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.settings import Training
from hespas.generators.llm.step import StagePasses, ordered_passes, stage_passes
from hespas.graph import Diagnostics, StepFacts, Workload
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.graph.passes import with_durations
from hespas.hardware import Device, Dimension, System, load_system
from hespas.hardware.system import DimensionTopology
from hespas.hardware.typed_toml import FigureSource
from hespas.simulator.network import Network, on_system

__all__ = ["SYSTEMS", "RunSettings", "TimedRun", "settings_of", "system_of", "timed_run"]

SYSTEMS: Mapping[str, str] = {
    "A100-SXM-40GB": "dgx-a100",
    "A100-SXM-80GB": "dgx-a100",
    "H100-SXM": "dgx-h100",
    "H200-SXM": "dgx-h200",
    "B200-SXM": "dgx-b200",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI300X": "hgx-mi300x",
    "TPU-v4": "tpu-v4",
    "TPU-v5e": "tpu-v5e",
    "TPU-v5p": "tpu-v5p",
    "TPU-v6e": "tpu-v6e",
    "TPU-v7x": "tpu-v7x",
}
"""Accelerator -> its usual system. Other accelerators are connected by the links of their device file."""
_NODE_SIZE = 8
"""Default number of devices in a node."""
_SLICE_LATENCY_NS = 10_000.0
"""Default latency between hosts of two slices: a round figure of data-center networks, without a source."""
_FABRIC_BYTES_PER_S, _FABRIC_LATENCY_NS, _NODE_LATENCY_NS = 50.0e9, 2_700.0, 1_000.0
"""Defaults for devices whose files have no fabric: a 400 Gb/s port per device, as in a DGX H100, and the
latencies of networks and of PCIe inside a node in NCCL's tuning constants. The sources are in
``hespas/hardware/systems/dgx-h100.toml``.
"""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """All settings that determine the step of a run. Rows with equal settings share one prediction."""

    model: Model
    layout: Layout
    training: Training
    facts: StepFacts
    device: Device
    system: System
    estimator: str


def settings_of(
    run: PublishedRun, device: Device, estimator: str, system: System | None = None
) -> RunSettings:
    """Return the settings of a run on a device. Without ``system``, the usual system of the device is used.

    Raises ``UsageError`` for an invalid layout.
    """
    check_layout(run.model, run.layout, run.training)
    sized = system_of(run, system, device)
    return RunSettings(run.model, run.layout, run.training, run.facts(device), device, sized, estimator)


def system_of(run: PublishedRun, system: System | None, device: Device) -> System:
    """Return the system (devices and network) of a run, sized to its ranks. If ``system`` is None, it is the
    usual system of the device.

    If a torus has fewer devices than the run has ranks, the run uses several slices. Raises ``FormatError``
    for an invalid number of devices per node.
    """
    ranks = run.layout.ranks
    if system is None:
        name = SYSTEMS.get(device.name)
        system = _system_of_links(device) if name is None else load_system(name)
    node_cell = run.row.get("gpus_per_node", "")
    try:
        node_size = float(node_cell or 0)  # tables may write 4.0
    except ValueError:
        node_size = nan
    if (node_cell and not node_size > 0) or not node_size.is_integer():
        raise FormatError(
            f"{clipped(node_cell)!r} is not a number of devices",
            position="column gpus_per_node", hint="write a whole number of 1 or more",
        )  # fmt: skip
    inner = system.dimensions[0]
    if system.placement == "fill" and inner.size == _NODE_SIZE and 0 < node_size < _NODE_SIZE:
        inner = structs.replace(inner, size=int(node_size))
        system = replace(system, dimensions=(inner, *system.dimensions[1:]))
    if 0 < system.most < ranks:
        # Equal slices of a torus, connected by the data-center network: the smallest number of slices with
        # enough devices for all ranks.
        outside = device.link("scale_out")
        if outside is None:
            raise UsageError(
                f"{system.name} has at most {system.most:,} devices, and its device has no scale-out link",
                hint="add a scale_out link to the device file",
            )
        count = next(number for number in range(-(-ranks // system.most), ranks + 1) if ranks % number == 0)
        one = system.sized(ranks // count)
        latency_ns = _SLICE_LATENCY_NS if isnan(outside.latency_ns) else outside.latency_ns
        network = _dimension(outside.name, "switch", count, outside.bandwidth_bytes_per_s, latency_ns)
        return replace(
            one, dimensions=(*one.dimensions, network), devices=ranks, max_devices=-1,
            sources=(*one.sources, _source(device)),
        )  # fmt: skip
    domain = system.shape[0]
    if system.placement == "fill" and 0 <= domain < ranks and ranks % domain:
        # a job that does not fill its domains uses equally many devices of each one, so that groups of a
        # power of two stay inside a domain
        domains = -(-ranks // domain)
        if ranks % domains == 0:
            return system.sized((ranks // domains, domains))
    return system.sized(ranks)


def _dimension(
    name: str, topology: DimensionTopology, size: int, bandwidth: float, latency_ns: float
) -> Dimension:
    """Return a network dimension with one link per device. Its figures are attributed to the device file."""
    return Dimension(
        name=name, topology=topology, size=size, bandwidth_bytes_per_s=bandwidth, latency_ns=latency_ns,
        links_per_device=1, source="device", latency_source="device",
    )  # fmt: skip


def _source(device: Device) -> FigureSource:
    return FigureSource(key="device", text=f"the file of {device.name}")


def _system_of_links(device: Device) -> System:
    """Return a system made of the links in a device file.

    Inside a node it has the scale-up links (or PCIe), and between nodes a switch. A file without a scale-out
    link gets 400 Gb/s per device.
    """
    inside, outside = device.link("scale_up") or device.link("pcie"), device.link("scale_out")
    if inside is None:
        raise UsageError(
            f"{device.name} has no links to other devices",
            hint="add scale_up or pcie links to the device file",
        )
    node = _dimension(
        inside.name,
        "fully_connected" if inside.topology == "fully_connected" else "switch",
        inside.devices_per_domain if inside.devices_per_domain > 1 else _NODE_SIZE,
        inside.bandwidth_bytes_per_s,
        _NODE_LATENCY_NS if isnan(inside.latency_ns) else inside.latency_ns,
    )
    if outside is None:
        fabric = _dimension("fabric", "switch", -1, _FABRIC_BYTES_PER_S, _FABRIC_LATENCY_NS)
    else:
        latency_ns = _FABRIC_LATENCY_NS if isnan(outside.latency_ns) else outside.latency_ns
        fabric = _dimension(outside.name, "switch", -1, outside.bandwidth_bytes_per_s, latency_ns)
    return System(
        name=f"nodes of {device.name}", description="", device=device.name, aliases=(), placement="fill",
        max_devices=-1, dimensions=(node, fabric), sources=(_source(device),),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class TimedRun:
    """Training run with a duration for each node of its passes.

    Stages with equal layers on ranks with equal network times share an entry of ``passes``. ``part``, of
    shape ``(ranks,)``, is the index in ``passes`` of the entry that each rank runs.
    """

    settings: RunSettings
    passes: Sequence[StagePasses]
    part: IntArray
    unknown: int
    """Number of nodes without a duration, which are counted as 0."""

    @property
    def micro_batches(self) -> int:
        """Return the number of microbatches of a step."""
        return micro_batches(self.settings.layout, self.settings.training)

    def workload(self, count: int) -> Workload:
        """Return the step with ``count`` microbatches as a workload with times. O(nodes of the step +
        ranks).
        """
        run, layout = self.settings, self.settings.layout
        stage = np.repeat(np.arange(layout.pp), layout.ranks // layout.pp)
        distinct, rank_class = np.unique(np.stack([stage, self.part]), axis=1, return_inverse=True)
        pairs: list[tuple[int, int]] = list(zip(*distinct.tolist(), strict=True))
        return Workload(
            name=run.model.name,
            classes=tuple(
                ordered_passes(self.passes[part], layout, run.training, stage, count) for stage, part in pairs
            ),
            rank_class=rank_class.reshape(-1).astype(np.int32),
            metadata=run.facts.metadata(),
        )


def timed_run(run: RunSettings, diagnostics: Diagnostics) -> TimedRun:
    """Return the run with a duration for each node of its passes. Kernel times are from the estimator of the
    run, communication times from the network of its system.
    """
    device, network = run.device, Network(run.system, run.device)
    layers, last = run.model.all_layers, run.layout.pp - 1
    number_of: dict[tuple[object, ...], int] = {}
    stage_numbers: list[int] = []
    first_stages: list[int] = []
    for stage, chunks in enumerate(layers_of_stages(run.model, run.layout)):
        kinds = tuple(tuple(layers[number] for number in chunk) for chunk in chunks)
        key = (kinds, stage == 0, stage == last)
        if key not in number_of:
            number_of[key] = len(number_of)
            first_stages.append(stage)
        stage_numbers.append(number_of[key])
    passes = [stage_passes(run.model, run.layout, run.training, stage) for stage in first_stages]
    estimator = training_estimator(run.facts, device, run.estimator, run.layout.ranks)
    graphs = tuple(stage.graph for stage in passes)
    ranks = np.repeat(np.array(stage_numbers, np.int32), run.layout.ranks // run.layout.pp)
    job = Workload(name=run.model.name, classes=graphs, rank_class=ranks, metadata={})
    prepared = [as_run_on(graph, device, diagnostics) for graph in graphs]
    estimates = [estimator.estimate(graph, device, diagnostics) for graph in prepared]
    divided, placed = on_system(job, estimates, network, diagnostics)
    timed: dict[int, StagePasses] = {}
    untimed_nodes: dict[int, int] = {}
    for number, estimate in enumerate(placed or ()):
        members = np.flatnonzero(divided.rank_class == number)
        if len(members):
            stage = int(ranks[members[0]])
            unknown = np.isnan(estimate.duration_ns)
            untimed_nodes[stage] = max(untimed_nodes.get(stage, 0), int(unknown.sum()))
            durations_ns = np.where(unknown, 0.0, estimate.duration_ns)
            timed[number] = passes[stage]._replace(graph=with_durations(graphs[stage], durations_ns))
    part = np.full(max(timed, default=-1) + 1, -1, np.int64)
    part[list(timed)] = np.arange(len(timed))
    return TimedRun(run, tuple(timed.values()), part[divided.rank_class], sum(untimed_nodes.values()))
