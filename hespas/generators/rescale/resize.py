"""Graph pass that rescales a workload to a mesh of another size.

Changes follow from the rule of each axis (see ``docs/how-to/rescale.md``) or from a second trace. A change
that neither of them proves raises an error. Recorded durations of unchanged operations are preserved; the
others become unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import nan

import numpy as np

from hespas.generators.rescale.figures import (
    AxisSizes,
    GraphFigures,
    changed_nodes,
    extrapolate,
    with_figures,
)
from hespas.generators.rescale.mesh import (
    SUMS,
    Rule,
    Traffic,
    axes_of_rows,
    changed_axes,
    find_mesh,
    group_axes,
    named_by_traffic,
    parse_mesh,
    permutation_axes,
    rule_of,
    traffic_of,
)
from hespas.generators.rescale.shards import AxisChange, resize_shards
from hespas.graph import (
    ABSENT,
    ACCUMULATOR_BITS,
    DONATED_TO,
    IN_PLACE,
    MAC_NOISE_SIGMA,
    PROGRAM_BYTES,
    RECORDED_STEPS,
    RETURNED,
    SOURCE_DTYPE,
    WHOLE_JOB,
    CollectiveKind,
    Diagnostics,
    ExtraTable,
    OpGraph,
    Permutation,
    Workload,
    step_facts,
)
from hespas.graph.columns import BoolArray, SmallIntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.mesh import Mesh
from hespas.graph.passes import is_recorded_wait

__all__ = ["Rescale", "parse_sizes"]


_MOST_DIGITS = 19


def parse_sizes(text: str) -> dict[str, int]:
    """Parse sizes by axis: ``dp=512,tp=8``. Raises ``UsageError``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if (
            not name
            or not equals
            or not (size.isascii() and size.isdigit() and len(size) < _MOST_DIGITS)
            or not int(size)
            or name in sizes
        ):
            raise UsageError(
                f"`rescale={text}`: {part!r} is not AXIS=SIZE", hint="write `rescale=dp=512,tp=8`"
            )
        sizes[name] = int(size)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """Graph pass that changes mesh axes to new ``sizes``.

    ``mesh`` names the axes of the trace, outermost first, such as ``dp=2,tp=4`` (empty: axes are named by
    their traffic). ``others`` are traces of the same program, each at another size of one axis.
    """

    sizes: Mapping[str, int]
    mesh: str = ""
    others: tuple[Workload, ...] = field(default=(), repr=False)

    def __call__(self, workload: Workload, diagnostics: Diagnostics) -> Workload:
        """Return the rescaled workload. Time and memory grow with the number of rank classes, plus a few
        bytes per rank.

        Raises ``UnsupportedError`` for changes that do not follow with certainty from the traces.
        """
        if workload.metadata.get(WHOLE_JOB):
            raise UnsupportedError(
                "the program is sharded but not partitioned: it has the shapes of the whole job",
                position=workload.name,
                hint="compile it, or lower it under shard_map, and rescale that",
            )
        if self.mesh:
            mesh = parse_mesh(self.mesh, workload.num_ranks)
        else:
            mesh = named_by_traffic(workload, find_mesh(workload), self.sizes)
        unknown = [name for name in self.sizes if name not in mesh.names]
        if unknown:
            if workload.num_ranks == 1:
                raise UsageError(
                    f"the trace has one rank and no axis {unknown[0]!r}: nothing shows what ranks send",
                    hint="trace a run of 2 or more ranks, or copy this rank: `num_devices=N`",
                )
            raise UsageError(
                f"the mesh {mesh} has no axis {unknown[0]!r}",
                hint=f"choose from {', '.join(mesh.names)}, or name them: `mesh=dp=2,tp=4`",
            )
        target = mesh.resized(self.sizes)
        changed = tuple(changed_axes(mesh, self.sizes))
        if not changed:
            return workload
        traffic = traffic_of(workload, mesh)
        self._check_traffic(mesh, traffic, changed)
        source = _RescaleSource(workload, mesh, target, changed)
        source.check_ranks(diagnostics)
        seconds: dict[str, _SecondTrace | None] = {}
        for name in changed:
            seconds[name] = None
            for other in self.others:
                ratio, rest = divmod(other.num_ranks * mesh.axes[name], workload.num_ranks)
                trace = _SecondTrace(other, mesh.resized({name: ratio}))
                if not rest and ratio != mesh.axes[name] and trace.fits(workload, mesh):
                    seconds[name] = trace
                    break
        used = [trace.workload for trace in seconds.values() if trace is not None]
        unused = next((other for other in self.others if not any(other is trace for trace in used)), None)
        if unused is not None:
            raise UnsupportedError(
                f"the second trace ({unused.name}, {unused.num_ranks:,} ranks) is not this program ({mesh}) "
                f"at another size of one changed axis ({', '.join(seconds)}): its groups differ, or there is "
                "another second trace of that axis",
                position=unused.name,
                hint="give one trace for each axis, in which only that axis has another size",
            )
        steps = [
            _AxisStep(mesh, target, name, rule_of(name, traffic[name]), seconds[name]) for name in changed
        ]
        classes = tuple(
            _resize_class(graph, row, source, steps, diagnostics)
            for row, graph in enumerate(workload.classes)
        )
        diagnostics.info("rescale.mesh", workload.name, f"mesh {mesh} became {target}")
        return Workload(
            name=workload.name,
            classes=classes,
            rank_class=source.rank_class(diagnostics),
            metadata=_metadata(workload, target.num_devices),
        )

    def _check_traffic(self, mesh: Mesh, traffic: Mapping[str, Traffic], changed: tuple[str, ...]) -> None:
        """Raise ``UnsupportedError`` for axes that neither a rule nor a second trace can rescale."""
        for name in changed:
            row = traffic[name]
            if not row.kinds and not row.messages:
                raise UnsupportedError(
                    f"the trace has no traffic along axis {name} of {mesh}: the traffic of a larger axis is "
                    "unknown",
                    position=f"axis {name}",
                    hint=f"trace a run with {name} of 2 or more",
                )
            if row.messages or rule_of(name, row) == "pipeline":
                raise UnsupportedError(
                    f"axis {name} is a pipeline or a ring: another number of stages moves layers and "
                    "micro-batches between ranks, which changes their programs",
                    position=f"axis {name}",
                    hint="trace a run with the same number of stages, and rescale its other axes",
                )


@dataclass(frozen=True, slots=True)
class _SecondTrace:
    """Trace of the same program at another size of one axis, with its mesh."""

    workload: Workload
    mesh: Mesh

    def fits(self, workload: Workload, mesh: Mesh) -> bool:
        """Return True if the groups of both traces follow the same axes."""
        one, two = workload.classes[0], self.workload.classes[0]
        try:
            return axes_of_rows(one, mesh) == axes_of_rows(two, self.mesh)
        except UnsupportedError:
            return False

    def graph_like(self, coordinates: tuple[int, ...]) -> OpGraph:
        """Return the graph of the rank at ``coordinates``, taken modulo the sizes of this trace's mesh."""
        rank = sum(
            coordinate % size * stride
            for coordinate, size, stride in zip(coordinates, self.mesh.sizes, self.mesh.strides, strict=True)
        )
        row = int(self.workload.rank_class[rank])
        return self.workload.classes[max(row, 0)]


@dataclass(frozen=True, slots=True)
class _AxisStep:
    """Change of the size of one mesh axis from ``mesh`` to ``target``. Figures are extrapolated from a second
    trace if there is one, and otherwise changed by the rule of the axis.
    """

    mesh: Mesh
    target: Mesh
    axis: str
    rule: Rule | None
    second: _SecondTrace | None

    def apply(self, graph: OpGraph, now: GraphFigures, coordinates: tuple[int, ...]) -> GraphFigures:
        """Return the figures at the new size of this axis."""
        before, after = self.mesh.axes[self.axis], self.target.axes[self.axis]
        if self.second is not None:
            sizes = AxisSizes(self.axis, before, self.second.mesh.axes[self.axis], after)
            return extrapolate(graph, now, self.second.graph_like(coordinates), sizes)
        if self.rule is None:
            raise UnsupportedError(
                f"the name of axis {self.axis} does not define the sharing of work over it",
                position=f"axis {self.axis}",
                hint="name it dp, fsdp or tp in `mesh`, or give a second trace: `others=OTHER_TRACE`",
            )
        rows = axes_of_rows(graph, self.mesh)
        is_along = np.array([self.axis in axes for axes in rows], np.bool_)
        if self.rule != "data":
            change = AxisChange(self.axis, before, after, is_along, self.rule == "tensor")
            return resize_shards(graph, now, change)
        # A data axis may have only sums, whose buffers do not change.
        table = graph.collectives
        wrong = np.flatnonzero(is_along & ~np.isin(table.kind, SUMS))
        if len(wrong):
            row = int(wrong[0])
            raise UnsupportedError(
                f"a {CollectiveKind(int(table.kind[row])).name.lower()} along data axis {self.axis} has "
                "buffers that "
                "depend on the number of ranks",
                position=f"node {int(table.node[row])}",
                hint="give a trace at another size of the axis: `others=OTHER_TRACE`",
            )
        return now


@dataclass(frozen=True, slots=True)
class _RescaleSource:
    """Trace that is rescaled, with its mesh, and the target mesh of the rescaled job."""

    workload: Workload
    mesh: Mesh
    target: Mesh
    changed: tuple[str, ...]

    def coordinates_of_class(self, row: int) -> tuple[int, ...]:
        """Return the mesh coordinates of the first rank of a rank class."""
        column = self.workload.rank_class
        rank = 0 if column.strides == (0,) else int(np.argmax(column == row))
        return tuple(
            rank // stride % size for size, stride in zip(self.mesh.sizes, self.mesh.strides, strict=True)
        )

    def rank_class(self, diagnostics: Diagnostics) -> SmallIntArray:
        """Return the rank class of each rank of the new job. O(ranks).

        Along a changed axis the traced ranks are repeated. A rank without a trace is assumed to run the
        program of the first traced rank along the axis.
        """
        column, mesh = self.workload.rank_class, self.mesh
        if column.strides == (0,):
            return np.broadcast_to(column[0], (self.target.num_devices,))
        grid = column.reshape(mesh.sizes)
        for axis, name in enumerate(mesh.names):
            if name not in self.changed:
                continue
            first = np.argmax(grid != ABSENT, axis=axis, keepdims=True)
            absent = grid == ABSENT
            grid = np.where(absent, np.take_along_axis(grid, first, axis=axis), grid)
            diagnostics.warning(
                "rescale.absent",
                f"axis {name}",
                "ranks without a trace are assumed to run the program of a traced rank",
                count=int((absent & (grid != ABSENT)).sum()),
            )
            repeated = np.arange(self.target.axes[name]) % mesh.axes[name]
            grid = np.take(grid, repeated, axis=axis)
        return grid.reshape(-1)

    def on_target(self, permutation: Permutation) -> Permutation:
        """Return the messages for the ranks of the target mesh. They follow axes whose size does not
        change.
        """
        names = permutation_axes(permutation, self.mesh)
        strides = dict(zip(self.target.names, self.target.strides, strict=True))
        size = permutation.digit[0]
        stride = min((strides[name] for name in names), default=1)
        return Permutation(self.target.num_devices, (size, stride), permutation.shift, permutation.wraps)

    def check_ranks(self, diagnostics: Diagnostics) -> None:
        """Check that the traced ranks along a changed axis run the same collectives, and warn if their other
        operations differ.

        O(nodes of all classes).
        """
        column, mesh = self.workload.rank_class, self.mesh
        if column.strides == (0,) or len(self.workload.classes) == 1:
            return
        calls: list[tuple[object, ...]] = []
        operations: list[tuple[object, ...]] = []
        for graph in self.workload.classes:
            table = graph.collectives
            rows = [tuple(sorted(axes)) for axes in axes_of_rows(graph, mesh)]
            calls.append(tuple(zip(table.kind.tolist(), table.comm_bytes.tolist(), rows, strict=True)))
            nodes = np.flatnonzero(~is_recorded_wait(graph)).tolist()
            operations.append(tuple(graph.op_name(node) for node in nodes))
        for axis, name in enumerate(mesh.names):
            if name not in self.changed:
                continue
            if _differs(column.reshape(mesh.sizes), calls, axis):
                raise UnsupportedError(
                    f"ranks along axis {name} do not call the same collectives",
                    position=f"axis {name}",
                    hint="name the real axes of the mesh, outermost first: `mesh=pp=2,dp=4`",
                )
            if _differs(column.reshape(mesh.sizes), operations, axis):
                diagnostics.warning(
                    "rescale.unlike-ranks",
                    f"axis {name}",
                    "ranks along the axis do not run the same operations; new ranks repeat them in turn",
                )


def _differs(grid: SmallIntArray, keys: list[tuple[object, ...]], axis: int) -> bool:
    """Return True if rank classes along an axis of ``grid`` have different ``keys``; absent ranks (-1) are
    ignored.
    """
    seen: dict[tuple[object, ...], int] = {}
    numbers = np.array([*(seen.setdefault(key, len(seen)) for key in keys), -1], np.int32)[grid]
    least = np.where(numbers < 0, np.iinfo(np.int32).max, numbers).min(axis=axis, keepdims=True)
    return bool(((numbers >= 0) & (numbers != least)).any())


def _resize_class(
    graph: OpGraph, row: int, source: _RescaleSource, steps: list[_AxisStep], diagnostics: Diagnostics
) -> OpGraph:
    """Return the rescaled graph of one rank class. The figures change axis by axis, then the groups and peers
    are replaced.
    """
    now = GraphFigures.of(graph)
    coordinates = source.coordinates_of_class(row)
    for step in steps:
        now = step.apply(graph, now, coordinates)
    has_other_work = changed_nodes(graph, now)
    has_other_groups = [bool(axes & {*source.changed}) for axes in axes_of_rows(graph, source.mesh)]
    stale = has_other_work.copy()
    stale[graph.collectives.node[np.array(has_other_groups, np.bool_)]] = True
    timed = ~np.isnan(graph.duration_ns)
    extra = _size_free_attributes(graph, stale)
    findings = diagnostics.about(graph.name, "rescale")
    findings.info("work", "operations have other shapes, FLOPs or bytes", int(has_other_work.sum()))
    if source.workload.metadata.get("is_scheduled") == "true":
        findings.warning("compiled", _COMPILED, int(has_other_work.any()))
    findings.info("groups", "collectives have other groups", sum(has_other_groups))
    findings.warning("unknown-time", _UNKNOWN_TIME, int((stale & timed).sum()))
    findings.info("kept-time", "unchanged operations have their recorded times", int((timed & ~stale).sum()))
    findings.info("attributes", "attributes of the small job dropped", len(graph.extra) - len(extra))
    # the rescaled ranks run as many steps as the recorded ones
    kept = {name: text for name, text in graph.attachments.items() if name == RECORDED_STEPS}
    dropped = len(graph.attachments) - len(kept)
    findings.info("source-program", "documents of the small program dropped", dropped)
    return replace(
        with_figures(graph, now),
        duration_ns=np.where(stale, np.nan, graph.duration_ns)
        if (stale & timed).any()
        else graph.duration_ns,
        group_sets=tuple(
            source.target.groups(group_axes(groups, source.mesh), groups.communicator)
            for groups in graph.group_sets
        ),
        permutations=tuple(source.on_target(permutation) for permutation in graph.permutations),
        extra=extra,
        attachments=kept,
    )


_UNKNOWN_TIME = "recorded times of changed operations are unknown; give `hardware` to estimate them"

_COMPILED = "a compiler may fuse differently at the new size; the operations are taken from the trace"

_SIZE_FREE = frozenset(
    {
        *(ACCUMULATOR_BITS, DONATED_TO, IN_PLACE, MAC_NOISE_SIGMA, RETURNED, SOURCE_DTYPE),
        *("channel_id", "use_global_device_ids", "to_apply", "calls", "kind", "index", "dimensions"),
        *("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims", "is_scheduled"),
    }
)
"""Attributes that do not depend on sizes, groups or ranks."""

_RANK_ATTRIBUTES = frozenset({"sharding", "num_partitions", "replica_count", "entry_computation_layout"})
"""Attributes that depend on ranks in all operations."""


def _size_free_attributes(graph: OpGraph, stale: BoolArray) -> ExtraTable:
    """Return the preserved attributes that are still valid after rescaling: all attributes of unchanged
    operations, and size-independent attributes of changed ones.
    """
    table = graph.extra
    if not len(table):
        return table
    is_free, is_of_ranks = (
        np.array([text in names for text in graph.strings], np.bool_)[table.key]
        for names in (_SIZE_FREE, _RANK_ATTRIBUTES)
    )
    is_of_changed = np.append(stale, False)[table.node]
    selected = np.flatnonzero(is_free | ~(is_of_changed | is_of_ranks)).tolist()
    rows = [
        (int(table.node[row]), int(table.key[row]), int(table.tag[row]), table.value(row)) for row in selected
    ]
    return table if len(rows) == len(table) else ExtraTable.from_rows(rows)


_RANK_COUNTS = ("num_partitions", "num_replicas", "world_size", "num_devices")


def _metadata(workload: Workload, num_ranks: int) -> dict[str, str]:
    """Return the metadata of the rescaled job with its number of ranks. Bytes, FLOPs and tokens of the traced
    job are removed.
    """
    entries = {key: value for key, value in workload.metadata.items() if key != PROGRAM_BYTES}
    facts = step_facts(workload.metadata)
    if facts is not None:
        entries |= replace(facts, model_flops=nan, tokens=nan, ranks=0).metadata()
    old = str(workload.num_ranks)
    return {
        key: str(num_ranks) if key in _RANK_COUNTS and value == old else value
        for key, value in entries.items()
    }
