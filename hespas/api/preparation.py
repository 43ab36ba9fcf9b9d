"""What happens to a workload between reading and writing: passes, estimates, and the account of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
    OpGraph,
    Workload,
)
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import FoldFree, FuseElementwise, GroupRegions, Pass, Totals, UnrollLoops, totals
from hespas.graph.workload import of_own_ranks

__all__ = [
    "DEFAULT_ESTIMATOR",
    "STEP_ESTIMATOR",
    "Conservation",
    "Dropped",
    "Granularity",
    "Missing",
    "Mode",
    "Preparation",
    "granularity_of",
    "graph_estimator",
    "merged",
    "rank_totals",
    "refuse_global",
    "step_estimator",
]

DEFAULT_ESTIMATOR = "composite"
"""The default estimator of single operations: fits of the device where it has some, else its roofline."""
STEP_ESTIMATOR = "auto"
"""The default estimator of a workload: the one with the best evidence for its kind
(:mod:`hespas.estimators.configuration`, whose ``AUTO`` this is, loaded only when a time is needed).
"""

Granularity = Literal["op", "fused", "region"]
Missing = Literal["error", "warn", "zero"]
Mode = Literal["hespas", "astra"]
"""``hespas``: the list schedule of each rank class; ``astra``: ASTRA-sim's analytical simulator."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why some operations of the input are not in the output: ``count`` operations of all ranks together.

    ``bytes_moved`` is the traffic that went with them, because it stays inside a fusion.
    """

    reason: str
    message: str
    count: Figure
    bytes_moved: Figure = 0.0


@dataclass(frozen=True, slots=True)
class Conservation:
    """Sums over the ranks written, before and after, and what accounts for the difference."""

    num_ranks: int
    rank_classes: int
    before: Totals
    after: Totals
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    reason: str
    message: str
    rewrite: Pass
    more: str = ""
    """What is said where there are more operations behind it than before."""


@dataclass(slots=True)
class _Account:
    """Collects, per reason, what a step took away."""

    dropped: dict[str, Dropped] = field(default_factory=dict[str, Dropped])

    def add(self, step: _Step, before: Totals, after: Totals, ranks: int) -> None:
        count, moved = before.ops - after.ops, before.bytes_moved - after.bytes_moved
        if not count:
            return
        said = step.message if count > 0 else step.more or step.message
        so_far = self.dropped.get(step.reason, Dropped(step.reason, said, 0))
        self.dropped[step.reason] = replace(
            so_far,
            count=so_far.count + count * ranks,
            bytes_moved=so_far.bytes_moved + (moved if moved > 0 else 0.0) * ranks,
        )


def granularity_of(workload: Workload, stated: Granularity | None) -> Granularity | None:
    """What is merged before operations get times: what the caller states, else elementwise work where no
    compiler has been at the program yet, which would fuse it. None: operations are taken as they stand.
    """
    from hespas.estimators.configuration import is_unoptimised

    return stated or ("fused" if is_unoptimised(workload) else None)


def merged(
    workload: Workload, granularity: Granularity | None, diagnostics: Diagnostics | None = None
) -> Workload:
    """The workload of which operations are estimated: what every command does before it asks a device."""
    found = diagnostics if diagnostics is not None else Diagnostics()
    classes = workload.classes
    for step in _before(granularity, folds=granularity is not None):
        classes = tuple(step.rewrite(graph, found) for graph in classes)
    return replace(workload, classes=classes)


def _before(granularity: Granularity | None, *, folds: bool) -> list[_Step]:
    """What stands before the estimate."""
    steps: list[_Step] = []
    if granularity in {"fused", "region"}:
        steps.append(_Step("pass.fused", "merged into the operation that uses them", FuseElementwise()))
    if folds:
        steps.append(_Step("pass.folded-free", "cost nothing (views, constants, tuples)", FoldFree()))
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How to prepare. A flat ``target`` wants loops unrolled and, with ``folds``, no free operations and only
    collectives that simulators have an algorithm for. An unoptimised program is fused by default (see
    :func:`granularity_of`) where the target holds times and either gets them now, from ``hardware``, or is
    flat: later readers of a flat trace cannot fuse its operations as :func:`merged` would have.
    """

    granularity: Granularity | None
    missing: Missing
    hardware: str | None
    estimator: str
    target: Format
    folds: bool = True

    def run(
        self, workload: Workload, ranks: range, diagnostics: Diagnostics
    ) -> tuple[Workload, Conservation]:
        """The workload to write. Only the classes of ``ranks`` are prepared, the others left as they are."""
        if self.missing == "error":
            refuse_global(workload)
            self._refuse_converted(workload)
        fuses = self.target.timed and (bool(self.hardware) or (self.target.flat and self.folds))
        stated = granularity_of(workload, self.granularity) if fuses else self.granularity
        prepared, conservation = replace(self, granularity=stated)._run(workload, ranks, diagnostics)
        return self._with_device(prepared), conservation

    def _with_device(self, workload: Workload) -> Workload:
        """Return the workload with the device of its estimates, of which a file holds the durations only."""
        if not (self.hardware and self.target.timed):
            return workload
        from hespas.hardware import load_device

        return replace(
            workload, metadata={**workload.metadata, ESTIMATED_ON: load_device(self.hardware).name}
        )

    def _run(
        self, workload: Workload, ranks: range, diagnostics: Diagnostics
    ) -> tuple[Workload, Conservation]:
        counts = workload.sizes_within(ranks)
        account = _Account()
        estimate = self._estimator(workload)
        classes = tuple(
            self._prepare(
                graph,
                count,
                partial(_as_own, estimate, workload, number) if self.hardware else estimate,
                account,
                diagnostics,
            )
            if count
            else graph
            for number, (graph, count) in enumerate(zip(workload.classes, counts, strict=True))
        )
        conservation = Conservation(
            sum(counts),
            sum(count > 0 for count in counts),
            rank_totals(workload.classes, counts),
            rank_totals(classes, counts),
            tuple(account.dropped.values()),
        )
        return replace(workload, classes=classes), conservation

    def _steps(self) -> tuple[list[_Step], list[_Step]]:
        """What stands before the estimate and what behind it."""
        before = _before(self.granularity, folds=bool((self.target.flat and self.folds) or self.granularity))
        after: list[_Step] = []
        if self.granularity == "region":
            after.append(_Step("pass.grouped", "merged into regions between collectives", GroupRegions()))
        if self.target.flat:
            trips = {"error": None, "warn": 1, "zero": 0}[self.missing]
            unroll = UnrollLoops(unknown_trips=trips)
            more = "stand in loops whose trips nobody knows, taken as one, or end a trip of a loop"
            after.append(_Step("pass.unrolled", "stand in loops that never run", unroll, more))
        if self.target.flat and self.folds:
            after.append(
                _Step(
                    "pass.substituted-collective", "have no algorithm in simulators", _SimulatedCollectives()
                )
            )
        return before, after

    def _prepare(
        self,
        graph: OpGraph,
        ranks: int,
        estimate: Callable[[OpGraph, Diagnostics], OpGraph],
        account: _Account,
        diagnostics: Diagnostics,
    ) -> OpGraph:
        before, after = self._steps()
        for step in before:
            graph = _apply(step, graph, ranks, account, diagnostics)
        graph = estimate(graph, diagnostics)
        for step in after:
            graph = _apply(step, graph, ranks, account, diagnostics)
        return graph

    def _refuse_converted(self, workload: Workload) -> None:
        """Raise ``UnsupportedError`` for products in number formats that the device has no units for."""
        if self.hardware is None:
            return
        from hespas.estimators import refuse_converted
        from hespas.hardware import load_device

        refuse_converted(workload, load_device(self.hardware))

    def _estimator(self, workload: Workload) -> Callable[[OpGraph, Diagnostics], OpGraph]:
        """Return the function that gives a graph durations, or handles those that it lacks."""
        if self.hardware is None:
            return self._settle
        spelling = step_estimator(workload, self.hardware, self.estimator)
        return graph_estimator(self.hardware, spelling, workload.num_ranks, self.missing)

    def _settle(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Without a device nobody is asked for durations; a strict caller still hears of missing ones."""
        if self.missing == "warn" or not self.target.flat:
            return graph
        from hespas.estimators import settle_missing

        return settle_missing(graph, self.missing, diagnostics)


def _as_own(
    estimate: Callable[[OpGraph, Diagnostics], OpGraph],
    workload: Workload,
    number: int,
    graph: OpGraph,
    diagnostics: Diagnostics,
) -> OpGraph:
    """Return the graph of rank class ``number`` with the times that its own groups and peers give."""
    timed = estimate(of_own_ranks(workload, number, graph), diagnostics)
    return replace(timed, group_sets=graph.group_sets, permutations=graph.permutations, p2p=graph.p2p)


def step_estimator(workload: Workload, hardware: str, estimator: str) -> str:
    """Return the spelling of the estimator for a workload on a device: the default of its kind unless named.

    Raises ``UsageError`` for an unknown device.
    """
    from hespas.estimators.configuration import default_configuration
    from hespas.hardware import load_device

    return default_configuration(workload, load_device(hardware), estimator).estimator


def graph_estimator(
    hardware: str, estimator: str, num_ranks: int, missing: Missing
) -> Callable[[OpGraph, Diagnostics], OpGraph]:
    """A function that gives a graph of a job of ``num_ranks`` the durations of ``estimator`` on ``hardware``.

    Raises ``UsageError`` for an unknown device or estimator.
    """
    from hespas.estimators import apply_estimate, as_run_on, load_estimator
    from hespas.estimators.registry import estimate_with, for_job, with_option
    from hespas.hardware import load_device

    device, model = load_device(hardware), for_job(load_estimator(estimator), num_ranks)
    if missing != "error":
        model = with_option(model, "failed", "error", "unknown")

    def run(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        said = estimate_with(model, as_run_on(graph, device, diagnostics), device, diagnostics)
        return apply_estimate(graph, said, missing, diagnostics)

    return run


def refuse_global(workload: Workload) -> None:
    """Raise ``UnsupportedError`` for a program of which it is uncertain what one device does."""
    if guessed := workload.metadata.get(GUESSED_VALUES):
        raise UnsupportedError(
            f"the captured program read {guessed} values from tensors without data: its loops and branches "
            "end by a guess",
            hint="capture it with `real_tensors`; `missing=warn` takes it as it stands",
        )
    if workload.metadata.get(WHOLE_JOB):
        raise UnsupportedError(
            "the program is sharded but not partitioned: what one device does is not known",
            hint="compile it and convert the optimised HLO; `missing=warn` takes it as it stands",
        )


def _apply(step: _Step, graph: OpGraph, ranks: int, account: _Account, diagnostics: Diagnostics) -> OpGraph:
    rewritten = step.rewrite(graph, diagnostics)
    if rewritten is not graph:
        account.add(step, totals(graph), totals(rewritten), ranks)
    return rewritten


def rank_totals(classes: tuple[OpGraph, ...], ranks: Sequence[int]) -> Totals:
    """Sums over all ranks, ``ranks`` of each class; ``unknown_ops`` counts each class once."""
    rows = [(asdict(totals(graph)), count) for graph, count in zip(classes, ranks, strict=True) if count]
    summed = {
        name: sum(row[name] * (1 if name == "unknown_ops" else count) for row, count in rows)
        for name in rows[0][0]
    }
    return Totals(**summed)


# Collectives that simulators have no algorithm for, replaced by one that moves the same data.

_SUBSTITUTES: MappingProxyType[CollectiveKind, CollectiveKind] = MappingProxyType(
    {
        CollectiveKind.REDUCE: CollectiveKind.ALL_REDUCE,
        CollectiveKind.GATHER: CollectiveKind.ALL_GATHER,
        CollectiveKind.SCATTER: CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.REDUCE_SCATTER_BLOCK: CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.BARRIER: CollectiveKind.ALL_REDUCE,
    }
)
"""A kind -> the kind that includes it, of the same payload: an upper bound of its time. A barrier is an
all-reduce of one byte, as NCCL does it with one element.
"""


@dataclass(frozen=True, slots=True)
class _SimulatedCollectives:
    """Say of every collective a kind that ASTRA-sim runs. Nodes, operations and times stay."""

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph with substituted kinds; the same graph where there is nothing to substitute."""
        table = graph.collectives
        replaced = np.isin(table.kind, list(_SUBSTITUTES))
        if not replaced.any():
            return graph
        kind = table.kind.copy()
        for old, new in _SUBSTITUTES.items():
            diagnostics.warning(
                f"pass.substituted-{old.name.lower().replace('_', '-')}",
                graph.name,
                f"{_spelled(old)} are written as {_spelled(new)} of the same payload, which simulators run",
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


def _spelled(kind: CollectiveKind) -> str:
    return f"{kind.name.lower().replace('_', '-')}s"
