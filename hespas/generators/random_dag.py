"""Random programs of several ranks, for tests of simulators and validators.

Events are drawn in one order for the whole job: work of a class of ranks, collectives of all ranks in some
groups, a message from class to class. A node waits for earlier nodes of its rank alone, and communication for
the one before it, so every rank communicates in the order of the events: no deadlock is possible. With
``broken`` the job ends with exactly one violation that has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

import numpy as np

from hespas.generators.spec import Account, Bounded, cuts_of
from hespas.graph import (
    CollectiveKind,
    ExplicitGroups,
    GraphBuilder,
    NodeKind,
    OpClass,
    Permutation,
    StridedGroups,
    Workload,
    dtype,
)
from hespas.graph.errors import UsageError
from hespas.graph.groups import GroupSet

__all__ = ["RULES", "RandomJob"]

_KINDS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)
_LEAST_BYTES_BITS, _MOST_BYTES_BITS = 10, 24
_EXTENTS = (64, 128, 256, 512, 1024)
_MOST_RANKS, _MOST_NODES = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomJob(Bounded):
    """``nodes`` events of which ``collective_share`` are collectives and ``p2p_share`` messages; the rest is
    work of one class each. Rank r runs class r mod ``classes``. Nodes wait for up to three of the last
    ``width`` nodes of their rank. Equal settings make equal jobs.
    """

    ranks: int
    nodes: int
    seed: int = 0
    collective_share: float = 0.2
    p2p_share: float = 0.1
    classes: int = 1
    width: int = 8
    broken: str = ""

    @property
    def name(self) -> str:
        """The seed and the sizes."""
        return f"random-{self.seed}-{self.ranks}x{self.nodes}{'-' if self.broken else ''}{self.broken}"

    def account(self) -> Account:
        """What is computed is the sum of what is drawn; there is no model."""
        return Account()

    def workload(self) -> Workload:
        """The job."""
        self._check()
        job = _Job(self, Random(f"hespas random job {self.seed}"))
        for _ in range(self.nodes):
            job.draw()
        if self.broken:
            RULES[self.broken](job)
        rank_class = np.arange(self.ranks, dtype=np.int32) % self.classes
        graphs = tuple(each.builder.build() for each in job.programs)
        if self.classes == 1:
            return Workload.spmd(graphs[0], self.ranks)
        return Workload(name=self.name, classes=graphs, rank_class=rank_class)

    def _check(self) -> None:
        if not 2 <= self.ranks <= _MOST_RANKS or self.nodes < 1 or self.width < 1:
            raise UsageError("a random job has at least two ranks, one node and a width of one")
        if self.nodes > _MOST_NODES:
            raise UsageError(f"{self.nodes:,} events are more than {_MOST_NODES:,}", hint="fewer nodes")
        if self.classes < 1 or self.ranks % self.classes:
            raise UsageError(
                f"{self.ranks} ranks are no whole multiple of {self.classes} classes", hint="`classes`"
            )
        shares = (self.collective_share, self.p2p_share)
        if min(shares) < 0 or sum(shares) > 1:
            raise UsageError("shares of collectives and messages are at least 0, and at most 1 together")
        if self.broken and self.broken not in RULES:
            raise UsageError(f"no rule {self.broken!r} to break", hint=f"known are {', '.join(RULES)}")
        if self.broken and self.broken != "cycle" and self.classes < 2:
            raise UsageError(f"`broken={self.broken}` needs ranks that differ", hint="`classes=2`")


@dataclass(slots=True)
class _Program:
    """The nodes of one class. ``last`` is its latest communication."""

    builder: GraphBuilder
    last: list[int] = field(default_factory=list[int])

    def node(
        self,
        op: str,
        op_class: OpClass,
        kind: NodeKind,
        data: Sequence[int],
        *,
        flops: float,
        size_bytes: float,
    ) -> int:
        talks = kind is not NodeKind.COMPUTE
        node = self.builder.add_node(
            name_row=self.builder.strings.add(f"{op}/{len(self.builder)}"),
            op_row=self.builder.strings.add(op),
            op_class=op_class,
            kind=kind,
            data_deps=data,
            control_deps=[each for each in self.last if each not in data] if talks else (),
            flops=flops,
            transcendentals=0.0,
            bytes_read=size_bytes,
            bytes_written=size_bytes,
        )
        if talks:
            self.last = [node]
        return node


class _Job:
    """The programs of all classes, and what draws their events."""

    def __init__(self, settings: RandomJob, random: Random) -> None:
        self.settings, self.random = settings, random
        self.programs = [_Program(GraphBuilder(settings.name)) for _ in range(settings.classes)]
        self._tag = 0

    def draw(self) -> None:
        """One event."""
        settings, place = self.settings, self.random.random()
        if place < settings.collective_share:
            size = self.size()
            chosen = self.random.choice(_KINDS)
            apart = self.random.random() < 0.5 and settings.ranks // settings.classes > 1
            groups = self._by_class() if apart else self._mesh()
            self.collective(chosen, groups, size, range(settings.classes))
        elif place < settings.collective_share + settings.p2p_share:
            self.message()
        else:
            self._work(self.programs[self.random.randrange(settings.classes)])

    def size(self) -> int:
        """Bytes of a message, a whole number of elements of every rank."""
        return self.settings.ranks << self.random.randrange(_LEAST_BYTES_BITS, _MOST_BYTES_BITS)

    def _parents(self, program: _Program) -> list[int]:
        count = len(program.builder)
        near = range(max(0, count - self.settings.width), count)
        return sorted(self.random.sample(near, min(len(near), self.random.randrange(1, 4))))

    def _work(self, program: _Program) -> None:
        """A product, an elementwise operation, or work of which only the time is known."""
        data, chosen = self._parents(program), self.random.randrange(3)
        m, n, k = (self.random.choice(_EXTENTS) for _ in range(3))
        builder, bf16 = program.builder, dtype("bf16")
        if chosen == 0:
            flops = 2.0 * m * n * k
            node = program.node(
                "aten::mm",
                OpClass.CONTRACTION,
                NodeKind.COMPUTE,
                data,
                flops=flops,
                size_bytes=2.0 * (m * k + k * n),
            )
            f32, code = dtype("f32").code, bf16.code
            builder.add_contraction(
                node,
                batch=1,
                m=m,
                n=n,
                k=k,
                flops=flops,
                useful_flops=flops,
                lhs=code,
                rhs=code,
                accumulator=f32,
            )
            builder.set(node, rate_dtype=code)
            return
        node = program.node(
            "aten::add",
            OpClass.ELEMENTWISE,
            NodeKind.COMPUTE,
            data,
            flops=float(m * n),
            size_bytes=2.0 * m * n,
        )
        builder.set(node, rate_dtype=bf16.code)
        if chosen == 2:
            builder.set(node, duration_ns=float(1000 * self.random.randrange(1, 500)))

    def _mesh(self) -> GroupSet:
        """All ranks, or blocks of them, or every so many."""
        ranks = self.settings.ranks
        size = self.random.choice([each for each in range(2, ranks + 1) if ranks % each == 0])
        if self.random.random() < 0.5:
            return StridedGroups.from_mesh([ranks // size, size], [1])
        return StridedGroups.from_mesh([size, ranks // size], [0])

    def _by_class(self) -> GroupSet:
        """The ranks of each class among themselves. All ranks call every collective: ASTRA-sim numbers those
        of all ranks by how many a rank called before, and hangs where ranks differ in that.
        """
        ranks, classes = self.settings.ranks, self.settings.classes
        return ExplicitGroups.from_rows([range(mine, ranks, classes) for mine in range(classes)])

    def world(self) -> GroupSet:
        """All ranks."""
        return StridedGroups.all_ranks(self.settings.ranks)

    def collective(
        self, kind: CollectiveKind, groups: GroupSet, size: int, classes: Sequence[int], odd: int = 0
    ) -> None:
        """One collective of some classes; the last of them says ``odd`` bytes more."""
        for place, mine in enumerate(classes):
            program = self.programs[mine]
            stated = size + (odd if place == len(classes) - 1 else 0)
            sent, got = (stated // cuts for cuts in cuts_of(kind, groups.group_size))
            op = f"c10d::{kind.name.lower()}"
            node = program.node(
                op,
                OpClass.COLLECTIVE,
                NodeKind.COLLECTIVE,
                self._parents(program),
                flops=0.0,
                size_bytes=sent,
            )
            program.builder.add_collective(
                node,
                kind,
                group_set=program.builder.group_set(groups),
                comm_bytes=sent,
                operand_bytes=sent,
                result_bytes=got,
            )

    def message(self, *, lost: bool = False) -> None:
        """From each rank of a class to one of another (whose receive is ``lost``), or around the ring."""
        settings, size = self.settings, self.size()
        self._tag += 1
        if settings.classes == 1:
            ring = [(rank, (rank + 1) % settings.ranks) for rank in range(settings.ranks)]
            self._half(self.programs[0], NodeKind.PERMUTE, Permutation.from_pairs(ring, settings.ranks), size)
            return
        source, target = self.random.sample(range(settings.classes), 2)
        starts = range(0, settings.ranks, settings.classes)
        pairs = [(start + source, start + target) for start in starts]
        way = Permutation.from_pairs(pairs, settings.ranks)
        self._half(self.programs[source], NodeKind.SEND, way, size)
        if not lost:
            self._half(self.programs[target], NodeKind.RECV, way, size)

    def _half(self, program: _Program, kind: NodeKind, way: Permutation, size: int) -> None:
        op = f"c10d::{kind.name.lower()}"
        node = program.node(op, OpClass.P2P, kind, self._parents(program), flops=0.0, size_bytes=size)
        row = program.builder.permutation(way)
        program.builder.add_p2p(node, permutation=row, comm_bytes=size, tag=self._tag)


# --- one violation each, at the end of the job


def _cycle(job: _Job) -> None:
    """Two operations of a rank wait for each other."""
    program = job.programs[0]
    first = len(program.builder)
    program.node("aten::add", OpClass.ELEMENTWISE, NodeKind.COMPUTE, [first + 1], flops=1.0, size_bytes=1.0)
    program.node("aten::add", OpClass.ELEMENTWISE, NodeKind.COMPUTE, [first], flops=1.0, size_bytes=1.0)


def _sizes(job: _Job) -> None:
    """The ranks of one class bring more to a collective than others."""
    job.collective(CollectiveKind.ALL_REDUCE, job.world(), 1 << 20, range(job.settings.classes), odd=4096)


def _missing_receive(job: _Job) -> None:
    """Nobody receives what ranks of one class send."""
    job.message(lost=True)


def _missing_collective(job: _Job) -> None:
    """The ranks of the last class leave a collective out."""
    job.collective(CollectiveKind.ALL_REDUCE, job.world(), 1 << 20, range(job.settings.classes - 1))


def _order(job: _Job) -> None:
    """Ranks of the last class call two collectives of the same ranks in the other order."""
    both = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
    for mine in range(job.settings.classes):
        for kind in both if mine < job.settings.classes - 1 else reversed(both):
            job.collective(kind, job.world(), job.settings.ranks << 10, [mine])


RULES: Mapping[str, Callable[[_Job], None]] = MappingProxyType(
    {
        "cycle": _cycle,
        "sizes": _sizes,
        "missing-receive": _missing_receive,
        "missing-collective": _missing_collective,
        "order": _order,
    }
)
"""What can be broken, by name."""
