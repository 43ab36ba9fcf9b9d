"""Files of all ranks: a Llama-70B-like job on up to 32,768 ranks, against a plain copy of the same bytes.

``python -m benchmarks.rank_files``: a stand-in job of 16 pipeline stages by tensor parallelism of 8 by data
parallelism of the rest, about 1,000 operations per rank. Its rank files are written and copied in turn, each
file seen to the disk, in one run; the ratio counts. Then one file per class, and what a check of both takes.
Exits 1 past twice the time of the copy, 1 GB of memory, or 5 s for the classes. ``--ranks`` takes a larger
job where there is room: each 1,000 ranks take about 0.2 GB, twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    StridedGroups,
    Workload,
)

__all__ = ["job"]

_STAGES, _TENSOR, _LAYERS, _MICROBATCHES = 16, 8, 80, 8
_HIDDEN_BYTES = 8192 * 4096 * 2 / _TENSOR
_OPS = ("norm", "qkv", "rotary", "attention", "project", "mlp norm", "mlp up", "mlp act", "mlp down")


@dataclass(slots=True)
class _Stage:
    """The program of one stage in the making: each operation waits for the one before it."""

    builder: GraphBuilder
    last: int = -1

    def add(self, name: str, duration_ns: float, kind: NodeKind = NodeKind.COMPUTE) -> int:
        b = self.builder
        op_class = OpClass.CONTRACTION if kind is NodeKind.COMPUTE else OpClass.COLLECTIVE
        row = b.strings.add(name)
        deps = [] if self.last < 0 else [self.last]
        flops, read, written = (4e12, 3e8, 1e8) if kind is NodeKind.COMPUTE else (0.0, 1e8, 1e8)
        node = b.add_node(
            name_row=row,
            op_row=row,
            op_class=op_class,
            kind=kind,
            data_deps=deps,
            flops=flops,
            bytes_read=read,
            bytes_written=written,
        )
        b.set(node, duration_ns=duration_ns)
        self.last = node
        return node

    def collective(self, kind: CollectiveKind, groups: StridedGroups, duration_ns: float) -> None:
        node = self.add(kind.name.lower(), duration_ns, NodeKind.COLLECTIVE)
        row = self.builder.group_set(groups)
        self.builder.add_collective(node, kind, group_set=row, comm_bytes=_HIDDEN_BYTES)

    def message(self, kind: NodeKind, permutation: Permutation, tag: int) -> None:
        node = self.add(kind.name.lower(), 50_000, kind)
        row = self.builder.permutation(permutation)
        self.builder.add_p2p(node, permutation=row, comm_bytes=_HIDDEN_BYTES, tag=tag)


def _stage(stage: int, data: int) -> OpGraph:
    """All microbatches forward, then backward, then gradients over the replicas."""
    made = _Stage(GraphBuilder(f"stage{stage}"))
    shape = [_STAGES, data, _TENSOR]
    tensor, replicas = (StridedGroups.from_mesh(shape, [axis]) for axis in (2, 1))
    ranks, stride = _STAGES * data * _TENSOR, data * _TENSOR
    onward, back = (Permutation(ranks, (_STAGES, stride), step, wraps=False) for step in (1, -1))
    later, earlier = stage < _STAGES - 1, stage > 0
    for way, comes, goes in ((onward, earlier, later), (back, later, earlier)):
        for batch in range(_MICROBATCHES):
            if comes:
                made.message(NodeKind.RECV, way, batch)
            for _ in range(_LAYERS // _STAGES):
                for name in _OPS:
                    made.add(name, 100_000.0 + 1_000 * stage)
                    if name in ("norm", "mlp norm"):
                        made.collective(CollectiveKind.ALL_GATHER, tensor, 40_000)
                    elif name in ("project", "mlp down"):
                        made.collective(CollectiveKind.REDUCE_SCATTER, tensor, 40_000)
            if goes:
                made.message(NodeKind.SEND, way, batch)
    for _ in range(_LAYERS // _STAGES):
        made.collective(CollectiveKind.REDUCE_SCATTER, replicas, 400_000)
        made.add("optimizer", 200_000)
        made.collective(CollectiveKind.ALL_GATHER, replicas, 400_000)
    return made.builder.build()


def job(ranks: int) -> Workload:
    """The job; ``ranks`` is a multiple of 128."""
    data = ranks // (_STAGES * _TENSOR)
    return Workload(
        name="llama",
        classes=tuple(_stage(stage, data) for stage in range(_STAGES)),
        rank_class=np.repeat(np.arange(_STAGES, dtype=np.int32), data * _TENSOR),
    )
