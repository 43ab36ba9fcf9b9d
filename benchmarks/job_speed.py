"""CPU time of simulations of a Llama-7B-like step on 256 and on 32,768 ranks.

``python -m benchmarks.job_speed`` prints CPU seconds, and the ratio to schedules of one rank of each class on
the same graphs; both run in turn. The job has 4 pipeline stages, tensor parallelism of 8, and data
parallelism of the rest. It also runs with a straggler, and (256 ranks) with jitter, which makes all ranks
different. Exits with 1 above 1 s at 256 ranks or 10 s at 32,768 ranks, where only the symmetry of ranks makes
the bound possible.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    StridedGroups,
    Workload,
)
from hespas.simulator import JobScheduler, ListScheduler, Simulator, simulate

__all__ = ["job", "main"]

_STAGES, _TENSOR, _LAYERS, _MICROBATCHES = 4, 8, 32, 8
_ROUNDS = 3
_LIMITS_S = {256: 1.0, 32_768: 10.0}


@dataclass(slots=True)
class _Stage:
    """Builder of the program of one stage, in which each operation depends on the previous one."""

    builder: GraphBuilder
    last: int = -1

    def add(self, name: str, duration_ns: float, kind: NodeKind = NodeKind.COMPUTE) -> int:
        b = self.builder
        op_class = OpClass.CONTRACTION if kind is NodeKind.COMPUTE else OpClass.COLLECTIVE
        row = b.strings.add(name)
        deps = [] if self.last < 0 else [self.last]
        node = b.add_node(name_id=row, op_id=row, op_class=op_class, kind=kind, data_deps=deps)
        b.set(node, duration_ns=duration_ns)
        self.last = node
        return node

    def reduce(self, groups: StridedGroups, duration_ns: float) -> None:
        node = self.add("all-reduce", duration_ns, NodeKind.COLLECTIVE)
        row = self.builder.group_set(groups)
        self.builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=row, comm_bytes=3.3e7)

    def message(self, kind: NodeKind, permutation: Permutation, tag: int) -> None:
        node = self.add(kind.name.lower(), 50_000, kind)
        row = self.builder.permutation(permutation)
        self.builder.add_p2p(node, permutation=row, comm_bytes=3.3e7, tag=tag)


def _stage(stage: int, data: int) -> OpGraph:
    """Return the graph of a stage: all microbatches forward, then backward, then gradients over the
    replicas.
    """
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
                for name in ("qkv", "attention", "project", "mlp up", "mlp gate", "mlp down", "norm"):
                    made.add(name, 100_000.0 + 1_000 * stage)
                made.reduce(tensor, 80_000)
                made.reduce(tensor, 80_000)
            if goes:
                made.message(NodeKind.SEND, way, batch)
    for _ in range(_LAYERS // _STAGES):
        made.reduce(replicas, 400_000)
        made.add("optimizer", 200_000)
    return made.builder.build()


def job(ranks: int) -> Workload:
    """Return the job; ``ranks`` must be a multiple of 32."""
    data = ranks // (_STAGES * _TENSOR)
    classes = tuple(_stage(stage, data) for stage in range(_STAGES))
    return Workload(
        name="llama",
        classes=classes,
        rank_class=np.repeat(np.arange(_STAGES, dtype=np.int32), data * _TENSOR),
    )


def _seconds(workload: Workload, simulator: Simulator) -> float:
    begin = time.process_time()
    simulate(workload, simulator=simulator, diagnostics=Diagnostics())
    return time.process_time() - begin


def _measured(workload: Workload, simulator: Simulator) -> tuple[float, float]:
    """Return the medians of CPU seconds, and of their ratio to schedules of the rank classes alone."""
    pairs = [(_seconds(workload, simulator), _seconds(workload, ListScheduler())) for _ in range(_ROUNDS)]
    return (
        statistics.median(mine for mine, _ in pairs),
        statistics.median(mine / floor for mine, floor in pairs),
    )


def main() -> int:
    """Measure and print. Return 1 if a bound is exceeded, else 0."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    missed = False
    for ranks, limit_s in _LIMITS_S.items():
        workload = job(ranks)
        nodes = [len(graph) for graph in workload.classes]
        rows = {"symmetric": JobScheduler(), "one straggler": JobScheduler(stragglers=((5, 1.3),))}
        if ranks <= 256:
            rows["jitter, every rank"] = JobScheduler(jitter=0.05)
        for name, simulator in rows.items():
            seconds, ratio = _measured(workload, simulator)
            print(
                f"{ranks:>6,} ranks of {min(nodes):,} to {max(nodes):,} operations, {name}: "
                f"{seconds:.2f} CPU s, {ratio:.1f} times the rank classes alone"
            )
            missed |= name == "symmetric" and seconds > limit_s
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
