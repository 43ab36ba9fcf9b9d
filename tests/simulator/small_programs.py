"""Programs of a few nodes, given by resource, duration and dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan

from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    RegionKind,
    Resource,
)
from hespas.graph.groups import StridedGroups

_KINDS = {
    "compute": (NodeKind.COMPUTE, OpClass.ELEMENTWISE),
    "product": (NodeKind.COMPUTE, OpClass.CONTRACTION),
    "comm": (NodeKind.COLLECTIVE, OpClass.COLLECTIVE),
    "send": (NodeKind.SEND, OpClass.P2P),
    "recv": (NodeKind.RECV, OpClass.P2P),
    "permute": (NodeKind.PERMUTE, OpClass.P2P),
    "host send": (NodeKind.SEND, OpClass.P2P),
    "copy": (NodeKind.COMPUTE, OpClass.HOST),
    "load": (NodeKind.MEM_LOAD, OpClass.MEMORY),
    "store": (NodeKind.MEM_STORE, OpClass.MEMORY),
    "host": (NodeKind.COMPUTE, OpClass.ELEMENTWISE),
    "free": (NodeKind.COMPUTE, OpClass.FREE),
    "metadata": (NodeKind.METADATA, OpClass.UNKNOWN),
}
P2P = ("send", "recv", "permute", "host send")


@dataclass(slots=True)
class Sketch:
    """Builder of a graph; nodes are numbered in the order in which they are added."""

    builder: GraphBuilder = field(default_factory=lambda: GraphBuilder("sketch"))

    def add(
        self,
        what: str,
        duration_ns: float = nan,
        *deps: int,
        control: Sequence[int] = (),
        region: int = -1,
        stream: int = -1,
    ) -> int:
        b = self.builder
        kind, op_class = _KINDS[what]
        free = 0.0 if what == "free" else nan
        node = b.add_node(
            name_id=b.strings.add(f"{what}{len(b)}"),
            op_id=b.strings.add(what),
            op_class=op_class,
            kind=kind,
            data_deps=deps,
            control_deps=control,
            flops=free,
            transcendentals=free,
            bytes_read=free,
            bytes_written=free,
            region=region,
        )
        b.set(node, duration_ns=duration_ns, stream=stream)
        if what == "host":
            b.set(node, resource=int(Resource.HOST))
        if what == "comm":
            everyone = b.group_set(StridedGroups.all_ranks(4))
            b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=everyone, comm_bytes=1e6)
        if what in P2P:
            b.add_p2p(node, permutation=-1, comm_bytes=1e6, host=what == "host send")
        return node

    def loop(self, trips: float, parent: int = -1) -> int:
        return self.builder.add_region(RegionKind.LOOP_BODY, parent=parent, trips=trips, label="loop")

    def build(self) -> OpGraph:
        return self.builder.build()
