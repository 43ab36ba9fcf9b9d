"""Builder of small jobs from a list of steps per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.graph import (
    CollectiveKind,
    ExplicitGroups,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    Resource,
    Workload,
)


@dataclass
class Steps:
    """Builder of the program of one rank; every call adds a node and returns its number."""

    num_ranks: int = 2
    builder: GraphBuilder = field(default_factory=lambda: GraphBuilder("g"))

    def node(self, kind: NodeKind, deps: Sequence[int], op_class: OpClass, name: str, **sets: float) -> int:
        b = self.builder
        node = b.add_node(
            name_id=b.strings.add(name), op_id=b.strings.add(name), op_class=op_class, kind=kind,
            data_deps=deps, flops=1.0, transcendentals=0.0, bytes_read=8.0, bytes_written=0.0,
        )  # fmt: skip
        b.set(node, **sets)
        return node

    def compute(self, *deps: int, ns: float = 1000.0, host: bool = False) -> int:
        resource = int(Resource.HOST if host else Resource.DEVICE)
        return self.node(
            NodeKind.COMPUTE, deps, OpClass.ELEMENTWISE, "compute", duration_ns=ns, resource=resource
        )

    def coll(
        self,
        *deps: int,
        kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
        size: float = 1024.0,
        groups: GroupSet | Sequence[Sequence[int]] | None = None,
        host: bool = False,
    ) -> int:
        node = self.node(
            NodeKind.COLLECTIVE, deps, OpClass.COLLECTIVE, "coll",
            resource=int(Resource.HOST if host else Resource.DEVICE),
        )  # fmt: skip
        row = -1
        if groups is not None:
            if isinstance(groups, Sequence):
                groups = ExplicitGroups.from_rows(groups)
            row = self.builder.group_set(groups)
        self.builder.add_collective(node, kind, group_set=row, comm_bytes=size)
        return node

    def message(
        self, kind: NodeKind, deps: Sequence[int], pairs: Permutation | Sequence[tuple[int, int]] | None,
        *, size: float = 64.0, tag: int = 0,
    ) -> int:  # fmt: skip
        node = self.node(kind, deps, OpClass.P2P, kind.name.lower())
        row = -1
        if pairs is not None:
            permutation = (
                pairs if isinstance(pairs, Permutation) else Permutation(self.num_ranks, pairs=tuple(pairs))
            )
            row = self.builder.permutation(permutation)
        self.builder.add_p2p(node, permutation=row, comm_bytes=size, tag=tag)
        return node

    def send(self, source: int, target: int, *deps: int, size: float = 64.0, tag: int = 0) -> int:
        return self.message(NodeKind.SEND, deps, [(source, target)], size=size, tag=tag)

    def recv(self, source: int, target: int, *deps: int, size: float = 64.0, tag: int = 0) -> int:
        return self.message(NodeKind.RECV, deps, [(source, target)], size=size, tag=tag)

    def build(self) -> OpGraph:
        return self.builder.build()


def job_of(*ranks: Steps) -> Workload:
    """One class per rank."""
    return Workload(
        name="job",
        classes=tuple(rank.build() for rank in ranks),
        rank_class=np.arange(len(ranks), dtype=np.int32),
    )
