"""The pass: a workload in, the workload of the same program over a mesh of another size out.

What changes is proved by the rule of each axis (see ``docs/rescaling.md``) or by a second trace; what neither
proves is refused. Recorded durations stay where nothing about an operation changed, else they are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import nan

import numpy as np

from hespas.generators.rescale.figures import Figures, changed_nodes, with_figures
from hespas.generators.rescale.mesh import (
    Mesh,
    find_mesh,
    group_axes,
    permutation_axes,
    stated_mesh,
)
from hespas.generators.rescale.pair import Sizes, extended
from hespas.generators.rescale.shards import Change, sharded
from hespas.generators.rescale.traffic import (
    SUMS,
    Rule,
    Traffic,
    axes_of_rows,
    changed_axes,
    named,
    rule_of,
    traffic_of,
)
from hespas.graph import (
    ABSENT,
    ACCUMULATOR_BITS,
    DONATED_TO,
    IN_PLACE,
    MAC_NOISE_SIGMA,
    PROGRAM_BYTES,
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
from hespas.graph.passes import is_recorded_wait

__all__ = ["Rescale", "parse_sizes"]

_MAX_RANKS = 1 << 24


_MOST_DIGITS = 19


def parse_sizes(text: str) -> dict[str, int]:
    """``dp=512,tp=8`` as sizes by axis. Raises ``UsageError``."""
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
            raise UsageError(f"`rescale={text}`: {part!r} is no AXIS=SIZE", hint="`rescale=dp=512,tp=8`")
        sizes[name] = int(size)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """``sizes`` of the axes to be; ``mesh`` names those of the trace (``dp=2,tp=4``, outermost first; empty:
    by their traffic). ``others`` are traces of the same program, each at another size of one axis.
    """

    sizes: Mapping[str, int]
    mesh: str = ""
    others: tuple[Workload, ...] = field(default=(), repr=False)

    def __call__(self, workload: Workload, diagnostics: Diagnostics) -> Workload:
        """The rescaled workload. Time and memory are those of one rank of each class, and a few bytes a rank.

        Raises ``UnsupportedError`` for what cannot be proved.
        """
        if workload.metadata.get(WHOLE_JOB):
            raise UnsupportedError(
                "the program is sharded but not partitioned: its shapes are those of the whole job",
                position=workload.name,
                hint="compile it, or lower it under shard_map, and rescale that",
            )
        mesh = self._mesh_of(workload)
        target = mesh.resized(self.sizes)
        if target.num_ranks > _MAX_RANKS:
            raise UsageError(f"{target} has {target.num_ranks:,} ranks", hint=f"at most {_MAX_RANKS:,}")
        changed = tuple(changed_axes(mesh, self.sizes))
        if not changed:
            return workload
        traffic = traffic_of(workload, mesh)
        self._check_traffic(mesh, traffic, changed)
        source = _Source(workload, mesh, target, changed)
        source.check_alike(diagnostics)
        seconds = {name: self._second(workload, mesh, name) for name in changed}
        self._check_used(mesh, seconds)
        steps = [_Step(mesh, target, name, rule_of(name, traffic[name]), seconds[name]) for name in changed]
        classes = tuple(
            _resized(graph, row, source, steps, diagnostics) for row, graph in enumerate(workload.classes)
        )
        diagnostics.info("rescale.mesh", workload.name, f"mesh {mesh} became {target}")
        return Workload(
            name=workload.name,
            classes=classes,
            rank_class=source.rank_class(diagnostics),
            metadata=_metadata(workload, target.num_ranks),
        )

    def _mesh_of(self, workload: Workload) -> Mesh:
        if self.mesh:
            mesh = stated_mesh(self.mesh, workload.num_ranks)
        else:
            mesh = named(workload, find_mesh(workload), self.sizes)
        unknown = [name for name in self.sizes if name not in mesh.names]
        if unknown:
            raise UsageError(
                f"the mesh {mesh or 'of one rank'} has no axis {unknown[0]!r}",
                hint=f"one of {', '.join(mesh.names) or 'no axes'}, or name them: `mesh=dp=2,tp=4`",
            )
        return mesh

    def _check_traffic(self, mesh: Mesh, traffic: Mapping[str, Traffic], changed: tuple[str, ...]) -> None:
        """Refuse what no rule and no second trace can be about."""
        for name in changed:
            row = traffic[name]
            if not row.kinds and not row.messages:
                raise UnsupportedError(
                    f"nothing in the trace is sent along axis {name} of {mesh}: what a larger one would "
                    "send is not known",
                    position=f"axis {name}",
                    hint=f"trace a run with {name} of 2 or more",
                )
            if row.messages or rule_of(name, row) == "pipeline":
                raise UnsupportedError(
                    f"axis {name} is a pipeline or a ring: another number of stages moves layers and "
                    "microbatches between ranks, which changes their programs",
                    position=f"axis {name}",
                    hint="trace a run with as many stages, and rescale its other axes",
                )

    def _check_used(self, mesh: Mesh, seconds: Mapping[str, _Second | None]) -> None:
        """Refuse a second trace that proves nothing."""
        used = [found.workload for found in seconds.values() if found is not None]
        idle = next((other for other in self.others if not any(other is each for each in used)), None)
        if idle is not None:
            raise UnsupportedError(
                f"the second trace ({idle.name}, {idle.num_ranks:,} ranks) is not the same program as this "
                f"one ({mesh}) at another size of one axis that changes ({', '.join(seconds)}): its groups "
                "differ, or another second trace is of that axis",
                position=idle.name,
                hint="give one trace for each axis, in which that axis alone has another size",
            )

    def _second(self, workload: Workload, mesh: Mesh, name: str) -> _Second | None:
        """The other trace that differs in this axis alone."""
        for other in self.others:
            ratio, rest = divmod(other.num_ranks * mesh.size(name), workload.num_ranks)
            if rest or ratio == mesh.size(name):
                continue
            second = mesh.resized({name: ratio})
            found = _Second(other, second)
            if found.fits(workload, mesh):
                return found
        return None


@dataclass(frozen=True, slots=True)
class _Second:
    """Another trace, and the mesh that it is of if one axis alone is of another size."""

    workload: Workload
    mesh: Mesh

    def fits(self, workload: Workload, mesh: Mesh) -> bool:
        """Whether its groups are those of that mesh."""
        one, two = workload.classes[0], self.workload.classes[0]
        try:
            return axes_of_rows(one, mesh) == axes_of_rows(two, self.mesh)
        except UnsupportedError:
            return False

    def graph_like(self, coordinates: tuple[int, ...]) -> OpGraph:
        """What the rank at some coordinates runs, which are cut to this mesh."""
        rank = sum(
            place % size * stride
            for place, size, stride in zip(coordinates, self.mesh.sizes, self.mesh.strides, strict=True)
        )
        row = int(self.workload.rank_class[rank])
        return self.workload.classes[max(row, 0)]


@dataclass(frozen=True, slots=True)
class _Step:
    """One axis that changes: by its rule, or by a second trace where there is one."""

    mesh: Mesh
    target: Mesh
    axis: str
    rule: Rule | None
    second: _Second | None

    def apply(self, graph: OpGraph, now: Figures, coordinates: tuple[int, ...]) -> Figures:
        """The figures at the new size of this axis."""
        before, after = self.mesh.size(self.axis), self.target.size(self.axis)
        if self.second is not None:
            sizes = Sizes(self.axis, before, self.second.mesh.size(self.axis), after)
            return extended(graph, now, self.second.graph_like(coordinates), sizes)
        if self.rule is None:
            raise UnsupportedError(
                f"the name of axis {self.axis} does not say how work is shared over it",
                position=f"axis {self.axis}",
                hint="name it dp, fsdp or tp in `mesh`, or give a second trace: `others=OTHER_TRACE`",
            )
        rows = axes_of_rows(graph, self.mesh)
        here = np.array([self.axis in axes for axes in rows], np.bool_)
        if self.rule == "data":
            _check_sums(graph, here, self.axis)
            return now
        return sharded(graph, now, Change(self.axis, before, after, here, self.rule == "tensor"))


def _check_sums(graph: OpGraph, here: BoolArray, axis: str) -> None:
    """Along a data axis only sums may go: their buffers stay."""
    table = graph.collectives
    wrong = np.flatnonzero(here & ~np.isin(table.kind, SUMS))
    if len(wrong):
        row = int(wrong[0])
        raise UnsupportedError(
            f"a {CollectiveKind(int(table.kind[row])).name.lower()} along data axis {axis} has buffers that "
            "depend on how many ranks take part",
            position=f"node {int(table.node[row])}",
            hint="give a trace at another size of the axis: `others=OTHER_TRACE`",
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """The trace, its mesh and the one to be."""

    workload: Workload
    mesh: Mesh
    target: Mesh
    changed: tuple[str, ...]

    def coordinates_of_class(self, row: int) -> tuple[int, ...]:
        """Where the first rank of a class stands."""
        column = self.workload.rank_class
        rank = 0 if column.strides == (0,) else int(np.argmax(column == row))
        return tuple(
            rank // stride % size for size, stride in zip(self.mesh.sizes, self.mesh.strides, strict=True)
        )

    def rank_class(self, diagnostics: Diagnostics) -> SmallIntArray:
        """The class of each rank of the new job: along an axis the traced ranks repeat; one that is not here
        is taken to run what the first one along the axis does that is. O(ranks).
        """
        column, mesh = self.workload.rank_class, self.mesh
        if column.strides == (0,):
            return np.broadcast_to(column[0], (self.target.num_ranks,))
        grid = column.reshape(mesh.sizes)
        for place, name in enumerate(mesh.names):
            if name not in self.changed:
                continue
            first = np.argmax(grid != ABSENT, axis=place, keepdims=True)
            absent = grid == ABSENT
            grid = np.where(absent, np.take_along_axis(grid, first, axis=place), grid)
            diagnostics.warning(
                "rescale.absent",
                f"axis {name}",
                "ranks that are not in the trace are taken to run what a rank that is runs",
                count=int((absent & (grid != ABSENT)).sum()),
            )
            taken = np.arange(self.target.size(name)) % mesh.size(name)
            grid = np.take(grid, taken, axis=place)
        return grid.reshape(-1)

    def check_alike(self, diagnostics: Diagnostics) -> None:
        """Ranks along an axis that changes must call the same collectives; other work may differ, and is
        told.

        O(nodes of all classes).
        """
        column, mesh = self.workload.rank_class, self.mesh
        if column.strides == (0,) or len(self.workload.classes) == 1:
            return
        calls = _numbered([_calls(graph, mesh) for graph in self.workload.classes])
        work = _numbered([_work(graph) for graph in self.workload.classes])
        for place, name in enumerate(mesh.names):
            if name not in self.changed:
                continue
            if _differs(column.reshape(mesh.sizes), calls, place):
                raise UnsupportedError(
                    f"ranks along axis {name} do not call the same collectives",
                    position=f"axis {name}",
                    hint="name the axes of the mesh as they are, outermost first: `mesh=pp=2,dp=4`",
                )
            if _differs(column.reshape(mesh.sizes), work, place):
                diagnostics.warning(
                    "rescale.unlike-ranks",
                    f"axis {name}",
                    "ranks along the axis do not run the same operations; new ranks run what they do in turn",
                )


def _numbered(keys: list[tuple[object, ...]]) -> SmallIntArray:
    seen: dict[tuple[object, ...], int] = {}
    return np.array([*(seen.setdefault(key, len(seen)) for key in keys), -1], np.int32)


def _differs(grid: SmallIntArray, number: SmallIntArray, place: int) -> bool:
    """Whether ranks along an axis have different numbers; those that are not here have none."""
    told = number[grid]
    least = np.where(told < 0, np.iinfo(np.int32).max, told).min(axis=place, keepdims=True)
    return bool(((told >= 0) & (told != least)).any())


def _calls(graph: OpGraph, mesh: Mesh) -> tuple[object, ...]:
    table = graph.collectives
    rows = [tuple(sorted(axes)) for axes in axes_of_rows(graph, mesh)]
    return tuple(zip(table.kind.tolist(), table.comm_bytes.tolist(), rows, strict=True))


def _work(graph: OpGraph) -> tuple[object, ...]:
    rows = np.flatnonzero(~is_recorded_wait(graph)).tolist()
    return tuple(graph.op_name(node) for node in rows)


def _resized(
    graph: OpGraph, row: int, source: _Source, steps: list[_Step], diagnostics: Diagnostics
) -> OpGraph:
    """One class: its figures axis by axis, then its groups and peers."""
    now = Figures.of(graph)
    coordinates = source.coordinates_of_class(row)
    for step in steps:
        now = step.apply(graph, now, coordinates)
    touched = changed_nodes(graph, now)
    widened = [bool(axes & {*source.changed}) for axes in axes_of_rows(graph, source.mesh)]
    stale = touched.copy()
    stale[graph.collectives.node[np.array(widened, np.bool_)]] = True
    timed = ~np.isnan(graph.duration_ns)
    extra = _kept_attributes(graph, stale)
    said = diagnostics.about(graph.name, "rescale")
    said.info("work", "operations have other shapes, FLOPs or bytes", int(touched.sum()))
    if source.workload.metadata.get("is_scheduled") == "true":
        said.warning("compiled", _COMPILED, int(touched.any()))
    said.info("groups", "collectives are of other groups", sum(widened))
    said.warning("unknown-time", _UNKNOWN_TIME, int((stale & timed).sum()))
    said.info("kept-time", "operations do as before and keep their times", int((timed & ~stale).sum()))
    said.info("attributes", "attributes that speak of the small job left out", len(graph.extra) - len(extra))
    said.info("source-program", "documents of the small program left out", len(graph.attachments))
    return replace(
        with_figures(graph, now),
        duration_ns=np.where(stale, np.nan, graph.duration_ns)
        if (stale & timed).any()
        else graph.duration_ns,
        group_sets=tuple(
            source.target.groups(group_axes(groups, source.mesh), groups.communicator)
            for groups in graph.group_sets
        ),
        permutations=tuple(_moved(each, source) for each in graph.permutations),
        extra=extra,
        attachments={},
    )


_UNKNOWN_TIME = (
    "recorded times of operations that changed are unknown now; give `hardware` to have them estimated"
)

_COMPILED = "a compiler may fuse otherwise at the new size; these are the operations of the traced one"

_SIZE_FREE = frozenset(
    {
        *(ACCUMULATOR_BITS, DONATED_TO, IN_PLACE, MAC_NOISE_SIGMA, RETURNED, SOURCE_DTYPE),
        *("channel_id", "use_global_device_ids", "to_apply", "calls", "kind", "index", "dimensions"),
        *("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims", "is_scheduled"),
    }
)
"""Attributes that say nothing of sizes, groups or ranks."""

_OF_RANKS = frozenset({"sharding", "num_partitions", "replica_count", "entry_computation_layout"})
"""Attributes that do wherever they stand."""


def _kept_attributes(graph: OpGraph, stale: BoolArray) -> ExtraTable:
    """Attributes of what stays as it is, and of the rest those that say nothing of sizes."""
    table = graph.extra
    if not len(table):
        return table
    free, of_ranks = (
        np.array([text in names for text in graph.strings], np.bool_)[table.key]
        for names in (_SIZE_FREE, _OF_RANKS)
    )
    of_changed = np.append(stale, False)[table.node]
    kept = np.flatnonzero(free | ~(of_changed | of_ranks)).tolist()
    rows = [
        (int(table.node[row]), int(table.key[row]), int(table.tag[row]), table.value(row)) for row in kept
    ]
    return table if len(rows) == len(table) else ExtraTable.from_rows(rows)


def _moved(permutation: Permutation, source: _Source) -> Permutation:
    """The same messages on the new mesh: they go along axes that did not change."""
    names = permutation_axes(permutation, source.mesh)
    kept = dict(zip(source.target.names, source.target.strides, strict=True))
    size = permutation.digit[0]
    stride = min((kept[name] for name in names), default=1)
    return Permutation(source.target.num_ranks, (size, stride), permutation.shift, permutation.wraps)


_RANK_COUNTS = ("num_partitions", "num_replicas", "world_size", "num_devices")


def _metadata(workload: Workload, num_ranks: int) -> dict[str, str]:
    """Return the metadata of the rescaled job: with its counts of ranks, without bytes, FLOPs and tokens of
    the small program.
    """
    told = {key: value for key, value in workload.metadata.items() if key != PROGRAM_BYTES}
    facts = step_facts(workload.metadata)
    if facts is not None:
        told |= replace(facts, model_flops=nan, tokens=nan, ranks=0).metadata()
    old = str(workload.num_ranks)
    return {
        key: str(num_ranks) if key in _RANK_COUNTS and value == old else value for key, value in told.items()
    }
