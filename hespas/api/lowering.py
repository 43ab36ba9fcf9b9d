"""Lowering of workloads between reading and writing: passes, estimates, and the operations that passes
merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from hespas.converters import Format
from hespas.files.documents import Figure
from hespas.graph import (
    ESTIMATED_ON,
    GUESSED_VALUES,
    WHOLE_JOB,
    CollectiveKind,
    Diagnostics,
    OpClass,
    OpGraph,
    Workload,
)
from hespas.graph.columns import FloatArray
from hespas.graph.deprecation import renamed_arguments, renamed_fields
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import (
    FoldFree,
    FuseElementwise,
    GroupRegions,
    Pass,
    Totals,
    UnrollLoops,
    totals,
)
from hespas.graph.workload import of_own_ranks

__all__ = [
    "DEFAULT_ESTIMATOR",
    "STEP_ESTIMATOR",
    "ConversionAccount",
    "Granularity",
    "Lowering",
    "MergedOps",
    "Missing",
    "Mode",
    "granularity_of",
    "graph_estimator",
    "merged",
    "rank_totals",
    "refuse_global",
    "step_estimator",
]

DEFAULT_ESTIMATOR = "composite"
"""Default estimator of single operations: fits of the device if it has any, otherwise its roofline."""
STEP_ESTIMATOR = "auto"
"""Default estimator of a workload: the estimator with the best evidence for the kind of workload. It is
``AUTO`` of :mod:`hespas.estimators.configuration`, which is imported only when a time is needed.
"""

Granularity = Literal["op", "fused", "region"]
Missing = Literal["error", "warn", "zero"]
Mode = Literal["hespas", "astra"]
"""``hespas``: the list schedule of each rank class; ``astra``: ASTRA-sim's analytical simulator."""

_EstimateGraph = Callable[[OpGraph, Diagnostics], OpGraph]


@dataclass(frozen=True, slots=True)
class MergedOps:
    """Operations of the input that are not in the output, for one reason. ``count`` is their number on all
    ranks.

    ``bytes_moved`` is the memory traffic that is saved because tensors stay inside a fusion.
    """

    reason: str
    message: str
    count: Figure
    bytes_moved: Figure = 0.0


@dataclass(frozen=True, slots=True)
class ConversionAccount:
    """Conservation account of a conversion: totals over the written ranks before and after it, and the
    reasons for each difference.
    """

    num_ranks: int
    rank_classes: int
    before: Totals
    after: Totals
    dropped: tuple[MergedOps, ...]


@dataclass(frozen=True, slots=True)
class _LoweringPass:
    """Pass of a conversion. ``reason`` and ``message`` are the code and the text of the diagnostic about the
    operations that it removes.
    """

    reason: str
    message: str
    rewrite: Pass
    added_message: str = ""
    """Message if the pass adds operations; empty: the same message."""


def granularity_of(workload: Workload, granularity: Granularity | None) -> Granularity | None:
    """Return the granularity to which operations are merged before they get times. It is ``granularity`` if
    given. By default it is ``fused`` for a program that no compiler has optimised yet, and None (no merging)
    for others.
    """
    if granularity is not None:
        return granularity
    # A program as a framework writes it, in whatever format it was saved since.
    form, scheduled = (workload.metadata.get(key, "") for key in ("format", "is_scheduled"))
    is_program = form == "stablehlo" or (form == "hlo" and scheduled != "true")
    has_fusions = any((graph.op_class == OpClass.FUSION).any() for graph in workload.classes)
    return "fused" if is_program and not has_fusions else None


def merged(
    workload: Workload, granularity: Granularity | None, diagnostics: Diagnostics | None = None
) -> Workload:
    """Merge the operations of a workload before their times are estimated, as all commands do."""
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    classes = workload.classes
    for step in _merging_passes(granularity, folds=granularity is not None):
        classes = tuple(step.rewrite(graph, diagnostics) for graph in classes)
    return replace(workload, classes=classes)


def _merging_passes(granularity: Granularity | None, *, folds: bool) -> list[_LoweringPass]:
    """Return the passes that merge operations before their times are estimated."""
    passes: list[_LoweringPass] = []
    if granularity in {"fused", "region"}:
        passes.append(_LoweringPass("pass.fused", "fused into their consumers", FuseElementwise()))
    if folds:
        passes.append(_LoweringPass("pass.folded-free", "zero cost (views, constants, tuples)", FoldFree()))
    return passes


@renamed_fields(missing="on_unknown")
@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """Options for converting a workload to the operations that a ``target`` format can express.

    For a flat target, loops are unrolled. With ``folds``, zero-cost operations are removed, and collectives
    for which simulators have no algorithm are substituted. By default, an unoptimised program is fused (see
    :func:`granularity_of`) if the target stores times and either the times are estimated now, for
    ``hardware``, or the target is flat, because later readers of a flat trace cannot fuse its operations.
    ``on_unknown`` is the policy for unknown times and trip counts.
    """

    granularity: Granularity | None
    on_unknown: Missing
    hardware: str | None
    estimator: str
    target: Format
    folds: bool = True

    def run(
        self, workload: Workload, ranks: range, diagnostics: Diagnostics
    ) -> tuple[Workload, ConversionAccount]:
        """Return the workload to write and its account. Only the rank classes of ``ranks`` are lowered."""
        if self.on_unknown == "error":
            refuse_global(workload)
            if self.hardware is not None:
                from hespas.estimators import refuse_converted
                from hespas.hardware import load_device

                refuse_converted(workload, load_device(self.hardware))
        fuses = self.target.timed and (bool(self.hardware) or (self.target.flat and self.folds))
        granularity = granularity_of(workload, self.granularity) if fuses else self.granularity
        lowered, account = replace(self, granularity=granularity)._lower(workload, ranks, diagnostics)
        if self.hardware and self.target.timed:
            from hespas.hardware import load_device

            metadata = {**workload.metadata, ESTIMATED_ON: load_device(self.hardware).name}
            lowered = replace(lowered, metadata=metadata)
        return lowered, account

    def _lower(
        self, workload: Workload, ranks: range, diagnostics: Diagnostics
    ) -> tuple[Workload, ConversionAccount]:
        counts = workload.sizes_within(ranks)
        merged_ops: dict[str, MergedOps] = {}
        folds = bool((self.target.flat and self.folds) or self.granularity)
        before, after = _merging_passes(self.granularity, folds=folds), list[_LoweringPass]()
        if self.granularity == "region":
            after.append(
                _LoweringPass("pass.grouped", "merged into regions between collectives", GroupRegions())
            )
        if self.target.flat:
            trips = {"error": None, "warn": 1, "zero": 0}[self.on_unknown]
            unroll = UnrollLoops(unknown_trips=trips)
            added = "loop bodies of unknown trip count (assumed 1), or loop-end markers"
            after.append(_LoweringPass("pass.unrolled", "in loops that never run", unroll, added))
        if self.target.flat and self.folds:
            message = "have no algorithm in simulators"
            after.append(_LoweringPass("pass.substituted-collective", message, _SubstituteCollectives()))
        estimate = self._graph_estimate(workload)
        classes: list[OpGraph] = []
        for number, (graph, count) in enumerate(zip(workload.classes, counts, strict=True)):
            if count:
                graph = _apply(before, graph, count, merged_ops, diagnostics)  # noqa: PLW2901
                if self.hardware:
                    # times depend on the groups and peers of the rank class
                    timed = estimate(of_own_ranks(workload, number, graph), diagnostics)
                    graph = replace(  # noqa: PLW2901
                        timed, group_sets=graph.group_sets, permutations=graph.permutations, p2p=graph.p2p
                    )
                else:
                    graph = estimate(graph, diagnostics)  # noqa: PLW2901
                graph = _apply(after, graph, count, merged_ops, diagnostics)  # noqa: PLW2901
            classes.append(graph)
        account = ConversionAccount(
            sum(counts),
            sum(count > 0 for count in counts),
            rank_totals(workload.classes, counts),
            rank_totals(tuple(classes), counts),
            tuple(merged_ops.values()),
        )
        return replace(workload, classes=tuple(classes)), account

    def _graph_estimate(self, workload: Workload) -> _EstimateGraph:
        """Return the function that gives each graph its durations: estimates on the device, or the durations
        of the graph, to which the policy for missing durations is applied.
        """
        if self.hardware is not None:
            spelling = step_estimator(workload, self.hardware, self.estimator)
            return graph_estimator(self.hardware, spelling, workload.num_ranks, self.on_unknown)
        policy = self.on_unknown
        if policy == "warn" or not self.target.flat:
            return lambda graph, _: graph
        from hespas.estimators import settle_missing

        return lambda graph, diagnostics: settle_missing(graph, policy, diagnostics)


def _apply(
    passes: Sequence[_LoweringPass],
    graph: OpGraph,
    ranks: int,
    merged_ops: dict[str, MergedOps],
    diagnostics: Diagnostics,
) -> OpGraph:
    """Run passes on the graph of a rank class with ``ranks`` ranks, and add the operations that they remove
    to ``merged_ops``.
    """
    for step in passes:
        rewritten = step.rewrite(graph, diagnostics)
        if rewritten is graph:
            continue
        before, after = totals(graph), totals(rewritten)
        graph = rewritten
        count, moved = before.ops - after.ops, before.bytes_moved - after.bytes_moved
        if count:
            message = step.message if count > 0 else step.added_message or step.message
            so_far = merged_ops.get(step.reason, MergedOps(step.reason, message, 0))
            merged_ops[step.reason] = replace(
                so_far,
                count=so_far.count + count * ranks,
                bytes_moved=so_far.bytes_moved + (moved if moved > 0 else 0.0) * ranks,
            )
    return graph


def step_estimator(workload: Workload, hardware: str, estimator: str) -> str:
    """Return the name and options of the estimator for a workload on a device: ``estimator``, or the default
    for the kind of workload if it is not named.

    Raises ``UsageError`` for an unknown device.
    """
    from hespas.estimators.configuration import default_configuration
    from hespas.hardware import load_device

    return default_configuration(workload, load_device(hardware), estimator).estimator


@renamed_arguments(missing="on_unknown")
def graph_estimator(hardware: str, estimator: str, num_ranks: int, on_unknown: Missing) -> _EstimateGraph:
    """Return a function that gives a graph of a job of ``num_ranks`` the durations of ``estimator`` on
    ``hardware``.

    Raises ``UsageError`` for an unknown device or estimator.
    """
    from hespas.estimators import apply_estimate, as_run_on, load_estimator
    from hespas.estimators.interface import estimate_with, for_job, with_option
    from hespas.hardware import load_device

    device, model = load_device(hardware), for_job(load_estimator(estimator), num_ranks)
    if on_unknown != "error":
        model = with_option(model, "failed", "error", "unknown")

    def run(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        estimate = estimate_with(model, as_run_on(graph, device, diagnostics), device, diagnostics)
        return apply_estimate(graph, estimate, on_unknown, diagnostics)

    return run


def refuse_global(workload: Workload) -> None:
    """Raise ``UnsupportedError`` for a program whose work per device is uncertain, such as one that is
    sharded but not partitioned.
    """
    if guessed := workload.metadata.get(GUESSED_VALUES):
        raise UnsupportedError(
            f"the captured program read {guessed} values from tensors without data: its loops and branches "
            "depend on guessed values",
            hint="capture it with `real_tensors`; `on_unknown=warn` accepts the guesses",
        )
    if workload.metadata.get(WHOLE_JOB):
        raise UnsupportedError(
            "the program is sharded but not partitioned: the work of one device is not known",
            hint="compile it and convert the optimised HLO; `on_unknown=warn` accepts the whole program",
        )


def rank_totals(classes: tuple[OpGraph, ...], ranks: Sequence[int]) -> Totals:
    """Return the totals over all ranks, ``ranks`` of each class; ``unknown_ops`` counts each class once."""
    rows = [(asdict(totals(graph)), count) for graph, count in zip(classes, ranks, strict=True) if count]
    summed = {
        name: sum(row[name] * (1 if name == "unknown_ops" else count) for row, count in rows)
        for name in rows[0][0]
    }
    return Totals(**summed)


_SUBSTITUTES: MappingProxyType[CollectiveKind, CollectiveKind] = MappingProxyType(
    {
        CollectiveKind.REDUCE: CollectiveKind.ALL_REDUCE,
        CollectiveKind.GATHER: CollectiveKind.ALL_GATHER,
        CollectiveKind.SCATTER: CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.REDUCE_SCATTER_BLOCK: CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.BARRIER: CollectiveKind.ALL_REDUCE,
    }
)
"""Collectives that ASTRA-sim has no algorithm for -> a collective of the same payload that includes them,
whose time is an upper bound. A barrier is an all-reduce of one byte, as NCCL does it with one element.
"""


@dataclass(frozen=True, slots=True)
class _SubstituteCollectives:
    """Pass that replaces collectives of a kind that ASTRA-sim does not have by a kind that it has, with the
    same payload. Other properties of the nodes do not change.
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph with substituted kinds, or the same graph if nothing is substituted."""
        table = graph.collectives
        replaced = np.isin(table.kind, list(_SUBSTITUTES))
        if not replaced.any():
            return graph
        kind = table.kind.copy()
        for old, new in _SUBSTITUTES.items():
            old_name, new_name = (code.name.lower().replace("_", "-") for code in (old, new))
            diagnostics.warning(
                f"pass.substituted-{old_name}",
                graph.name,
                f"{old_name}s are written as {new_name}s of the same payload, which simulators run",
                count=int((table.kind == old).sum()),
            )
            kind[table.kind == old] = new
        barrier = table.kind == CollectiveKind.BARRIER
        payload: FloatArray = np.where(barrier & ~(table.comm_bytes >= 1), 1.0, table.comm_bytes)
        operand, result = (
            np.where(replaced, np.nan, column) for column in (table.operand_bytes, table.result_bytes)
        )
        return replace(
            graph,
            collectives=replace(
                table, kind=kind, comm_bytes=payload, operand_bytes=operand, result_bytes=result
            ),
        )
