"""What ranks keep in memory, and how documents say it."""

from __future__ import annotations

from math import nan

import msgspec

from hespas.files.documents import Count, Figure
from hespas.graph import Diagnostics, OpGraph
from hespas.hardware import load_device
from hespas.simulator import Simulation
from hespas.simulator.memory import RankMemory, memory_by_class

__all__ = ["MemoryDocument", "memory_document", "memory_on"]


def memory_on(ran: Simulation, hardware: str | None, diagnostics: Diagnostics) -> tuple[RankMemory, ...]:
    """Return what each rank class of a run keeps in memory. Warns where its device has less."""
    capacity = load_device(hardware).main_memory.capacity_bytes if hardware else -1
    shown = {found.rank_class: found.rank for found in ran.classes}
    found = memory_by_class(ran.workload, ran.timeline, shown, float(capacity) if capacity >= 0 else nan)
    beyond = sum(ran.workload.class_sizes[each.rank_class] for each in found if each.fits is False)
    message = f"ranks need more memory than {hardware} has ({capacity / 1e9:,.1f} GB)"
    diagnostics.warning("simulate.beyond-memory", ran.workload.name, message, count=beyond)
    return found


class _LiveValue(msgspec.Struct, frozen=True):
    name: str
    op_class: str
    kind: str
    size_bytes: Figure
    framework: str
    source: str


class _OfMaker(msgspec.Struct, frozen=True):
    op_class: str
    size_bytes: Figure


class MemoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``memory`` in what hespas simulate --json writes."""

    rank_class: int
    peak_bytes: Figure
    at_ns: Figure
    at_node: str
    parameters_bytes: Figure
    constants_bytes: Figure
    outputs_bytes: Figure
    temporaries_bytes: Figure
    collectives_bytes: Figure
    donated_bytes: Figure
    unlisted_bytes: Figure
    capacity_bytes: Figure
    fits: bool | None
    is_lower_bound: bool
    is_whole_job: bool
    unknown: Count
    op_classes: list[_OfMaker]
    largest: list[_LiveValue]


def memory_document(found: RankMemory, graph: OpGraph) -> MemoryDocument:
    """The figures of one rank class, whose graph it is."""
    use = found.use
    return MemoryDocument(
        rank_class=found.rank_class,
        peak_bytes=use.peak_bytes,
        at_ns=use.at_ns,
        at_node=graph.node_name(use.at_node) if use.at_node >= 0 else "",
        parameters_bytes=use.parameters_bytes,
        constants_bytes=use.constants_bytes,
        outputs_bytes=use.outputs_bytes,
        temporaries_bytes=use.temporaries_bytes,
        collectives_bytes=use.collectives_bytes,
        donated_bytes=use.donated_bytes,
        unlisted_bytes=use.unlisted_bytes,
        capacity_bytes=found.capacity_bytes,
        fits=found.fits,
        is_lower_bound=use.is_lower_bound,
        is_whole_job=found.is_whole_job,
        unknown=use.unknown,
        op_classes=[_OfMaker(name, size) for name, size in use.class_bytes.items()],
        largest=[
            _LiveValue(row.name, row.op_class, row.kind, row.size_bytes, row.framework, row.source)
            for row in use.largest
        ],
    )
