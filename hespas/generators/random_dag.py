"""Random programs of several ranks, for tests of simulators and validators.

All events of a job are drawn in one order: a computation of a rank class, a collective of all ranks in some
groups, or a message from class to class. A node depends only on earlier nodes of its rank. A communication
depends on the previous one of its rank, so every rank communicates in the order of the events and deadlocks
are impossible. With ``broken`` the job ends with exactly one violation of the named rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from hespas.generators.spec import Account, Bounded, check_positive, cuts_of
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
from hespas.graph.errors import InvariantError, UsageError
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
RULES = ("cycle", "sizes", "missing-receive", "missing-collective", "order")
"""Rules that a job can violate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomJob(Bounded):
    """Settings of a random job for tests. Each rank class has ``nodes`` nodes: the share ``collective_share``
    are collectives, ``p2p_share`` are messages, and the others are computations.

    Rank r runs class r mod ``classes``. Nodes depend on up to three of the last ``width`` nodes of their
    rank. Equal settings make equal jobs.
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
        """Name with the seed and the sizes."""
        return f"random-{self.seed}-{self.ranks}x{self.nodes}{'-' if self.broken else ''}{self.broken}"

    def account(self) -> Account:
        """Return an account with unknown figures, because a random job has no model."""
        return Account()

    def workload(self) -> Workload:
        """Make the job."""
        if not 2 <= self.ranks <= _MOST_RANKS:
            raise UsageError(
                f"`ranks={self.ranks}`: expected 2 to {_MOST_RANKS:,} ranks", hint="set `ranks=8`"
            )
        check_positive({"nodes": self.nodes, "width": self.width})
        if self.seed < 0:
            raise UsageError(f"invalid seed {self.seed}: expected 0 or more", hint="choose `seed=0`")
        if self.nodes > _MOST_NODES:
            raise UsageError(
                f"{self.nodes:,} events exceed the limit of {_MOST_NODES:,}", hint="choose fewer `nodes`"
            )
        if self.classes < 1 or self.ranks % self.classes:
            raise UsageError(
                f"{self.ranks} ranks are not a multiple of {self.classes} classes",
                hint="choose `classes` that divide the ranks",
            )
        shares = (self.collective_share, self.p2p_share)
        if min(shares) < 0 or sum(shares) > 1:
            raise UsageError(
                f"collective_share is {self.collective_share:g} and p2p_share is {self.p2p_share:g}: "
                "expected 0 or more, and at most 1 in total",
                hint="set `collective_share=0.3` and `p2p_share=0.3`",
            )
        if self.broken and self.broken not in RULES:
            raise UsageError(f"unknown rule {self.broken!r}", hint=f"choose one of {', '.join(RULES)}")
        if self.broken and self.broken != "cycle" and self.classes < 2:
            raise UsageError(f"`broken={self.broken}` needs ranks that differ", hint="set `classes=2`")
        job = _RandomJobBuilder(self, Random(f"hespas random job {self.seed}"))
        for _ in range(self.nodes):
            job.draw()
        if self.broken:
            job.violate(self.broken)
        rank_class = np.arange(self.ranks, dtype=np.int32) % self.classes
        graphs = tuple(program.builder.build() for program in job.programs)
        if self.classes == 1:
            return Workload.spmd(graphs[0], self.ranks)
        return Workload(name=self.name, classes=graphs, rank_class=rank_class)


@dataclass(slots=True)
class _ClassProgram:
    """Program of one rank class of a random job while it is built. ``last`` is its latest communication
    node.
    """

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
        communicates = kind is not NodeKind.COMPUTE
        node = self.builder.add_node(
            name_id=self.builder.strings.add(f"{op}/{len(self.builder)}"),
            op_id=self.builder.strings.add(op),
            op_class=op_class,
            kind=kind,
            data_deps=data,
            control_deps=[node for node in self.last if node not in data] if communicates else (),
            flops=flops,
            transcendentals=0.0,
            bytes_read=size_bytes,
            bytes_written=size_bytes,
        )
        if communicates:
            self.last = [node]
        return node


class _RandomJobBuilder:
    """Builder that draws events at random and adds them to the programs of all rank classes."""

    def __init__(self, settings: RandomJob, random: Random) -> None:
        self.settings, self.random = settings, random
        self.programs = [_ClassProgram(GraphBuilder(settings.name)) for _ in range(settings.classes)]
        self._tag = 0

    def draw(self) -> None:
        """Draw one event (computation, collective or message) at random and add it."""
        settings, draw = self.settings, self.random.random()
        if draw < settings.collective_share:
            size = self.size()
            kind = self.random.choice(_KINDS)
            by_class = self.random.random() < 0.5 and settings.ranks // settings.classes > 1
            # All ranks call every collective: ASTRA-sim numbers collectives of all ranks by the number of
            # earlier ones of a rank, and hangs if ranks differ in that.
            classes = range(settings.classes)
            rows = [range(start, settings.ranks, settings.classes) for start in classes]
            groups: GroupSet
            if by_class:
                groups = ExplicitGroups.from_rows(rows)
            else:  # consecutive ranks, or ranks with a constant stride
                ranks = settings.ranks
                divisors = [divisor for divisor in range(2, ranks + 1) if ranks % divisor == 0]
                members = self.random.choice(divisors)
                if self.random.random() < 0.5:
                    groups = StridedGroups.from_mesh([ranks // members, members], [1])
                else:
                    groups = StridedGroups.from_mesh([members, ranks // members], [0])
            self.collective(kind, groups, size, classes)
        elif draw < settings.collective_share + settings.p2p_share:
            self.message()
        else:
            self._compute(self.programs[self.random.randrange(settings.classes)])

    def size(self) -> int:
        """Draw a message size in bytes. Each rank gets a whole number of elements of it."""
        return self.settings.ranks << self.random.randrange(_LEAST_BYTES_BITS, _MOST_BYTES_BITS)

    def _parents(self, program: _ClassProgram) -> list[int]:
        count = len(program.builder)
        near = range(max(0, count - self.settings.width), count)
        return sorted(self.random.sample(near, min(len(near), self.random.randrange(1, 4))))

    def _compute(self, program: _ClassProgram) -> None:
        """Add a matrix product, an elementwise operation, or an operation with a given duration."""
        data, choice = self._parents(program), self.random.randrange(3)
        m, n, k = (self.random.choice(_EXTENTS) for _ in range(3))
        builder, bf16 = program.builder, dtype("bf16")
        if choice == 0:
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
        if choice == 2:
            builder.set(node, duration_ns=float(1000 * self.random.randrange(1, 500)))

    def world(self) -> GroupSet:
        """Return one group of all ranks."""
        return StridedGroups.all_ranks(self.settings.ranks)

    def collective(
        self, kind: CollectiveKind, groups: GroupSet, size: int, classes: Sequence[int], odd: int = 0
    ) -> None:
        """Add a collective to the programs of some classes. Its size in the last class is larger by ``odd``
        bytes.
        """
        for position, rank_class in enumerate(classes):
            program = self.programs[rank_class]
            size_bytes = size + (odd if position == len(classes) - 1 else 0)
            sent, received = (size_bytes // parts for parts in cuts_of(kind, groups.group_size))
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
                result_bytes=received,
            )

    def message(self, *, lost: bool = False) -> None:
        """Add messages from the ranks of one class to another class, or around the ring of a single class.
        With ``lost``, the receives are left out, which breaks the job.
        """
        settings, size = self.settings, self.size()
        self._tag += 1
        if settings.classes == 1:
            ring = [(rank, (rank + 1) % settings.ranks) for rank in range(settings.ranks)]
            self._half(self.programs[0], NodeKind.PERMUTE, Permutation.from_pairs(ring, settings.ranks), size)
            return
        source, target = self.random.sample(range(settings.classes), 2)
        starts = range(0, settings.ranks, settings.classes)
        pairs = [(start + source, start + target) for start in starts]
        permutation = Permutation.from_pairs(pairs, settings.ranks)
        self._half(self.programs[source], NodeKind.SEND, permutation, size)
        if not lost:
            self._half(self.programs[target], NodeKind.RECV, permutation, size)

    def violate(self, rule: str) -> None:
        """Add exactly one violation of a checker rule at the end of the job."""
        settings = self.settings
        match rule:
            case "cycle":  # two operations of a rank wait for each other
                program = self.programs[0]
                first = len(program.builder)
                for dep in (first + 1, first):
                    program.node(
                        "aten::add", OpClass.ELEMENTWISE, NodeKind.COMPUTE, [dep], flops=1.0, size_bytes=1.0
                    )
            case "sizes":  # the ranks of one class contribute more bytes to a collective than the others
                self.collective(
                    CollectiveKind.ALL_REDUCE, self.world(), 1 << 20, range(settings.classes), odd=4096
                )
            case "missing-receive":
                self.message(lost=True)
            case "missing-collective":  # the ranks of the last class do not call a collective
                classes = range(settings.classes - 1)
                self.collective(CollectiveKind.ALL_REDUCE, self.world(), 1 << 20, classes)
            case "order":  # the last class calls two collectives of the same ranks in reverse order
                both = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
                for rank_class in range(settings.classes):
                    for kind in both if rank_class < settings.classes - 1 else reversed(both):
                        self.collective(kind, self.world(), settings.ranks << 10, [rank_class])
            case _:
                raise InvariantError(f"unknown rule {rule!r}")

    def _half(self, program: _ClassProgram, kind: NodeKind, permutation: Permutation, size: int) -> None:
        op = f"c10d::{kind.name.lower()}"
        node = program.node(op, OpClass.P2P, kind, self._parents(program), flops=0.0, size_bytes=size)
        row = program.builder.permutation(permutation)
        program.builder.add_p2p(node, permutation=row, comm_bytes=size, tag=self._tag)
