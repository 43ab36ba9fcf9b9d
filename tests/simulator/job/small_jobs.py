"""Jobs of a few ranks: one program per stage of a pipeline, collectives over axes, messages along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from hypothesis import strategies as st

from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    Resource,
    StridedGroups,
    Workload,
)

__all__ = ["Part", "Step", "jobs", "part", "stages"]


@dataclass(slots=True)
class Part:
    """Builder of the program of one class."""

    builder: GraphBuilder
    region: int = -1

    def _node(self, name: str, kind: NodeKind, op_class: OpClass, deps: Sequence[int], stream: int) -> int:
        b = self.builder
        node = b.add_node(
            name_id=b.strings.add(f"{name}{len(b)}"),
            op_id=b.strings.add(name),
            op_class=op_class,
            kind=kind,
            data_deps=deps,
            region=self.region,
        )
        b.set(node, stream=stream)
        return node

    def compute(self, duration_ns: float, *deps: int, stream: int = -1) -> int:
        node = self._node("compute", NodeKind.COMPUTE, OpClass.ELEMENTWISE, deps, stream)
        self.builder.set(node, duration_ns=duration_ns)
        return node

    def host_wait(self, duration_ns: float, *deps: int) -> int:
        """Recorded time in which the device was not at work."""
        node = self._node("wait", NodeKind.COMPUTE, OpClass.FREE, deps, -1)
        self.builder.set(node, duration_ns=duration_ns, resource=int(Resource.HOST))
        return node

    def collective(
        self,
        groups: GroupSet | None,
        duration_ns: float,
        *deps: int,
        kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
        stream: int = -1,
    ) -> int:
        node = self._node("collective", NodeKind.COLLECTIVE, OpClass.COLLECTIVE, deps, stream)
        self.builder.set(node, duration_ns=duration_ns)
        row = -1 if groups is None else self.builder.group_set(groups)
        self.builder.add_collective(node, kind, group_set=row, comm_bytes=1e6)
        return node

    def message(
        self,
        kind: NodeKind,
        permutation: Permutation,
        duration_ns: float,
        *deps: int,
        tag: int = -1,
        stream: int = -1,
    ) -> int:
        node = self._node(kind.name.lower(), kind, OpClass.P2P, deps, stream)
        self.builder.set(node, duration_ns=duration_ns)
        row = self.builder.permutation(permutation)
        self.builder.add_p2p(node, permutation=row, comm_bytes=1e6, tag=tag)
        return node

    def built(self) -> OpGraph:
        return self.builder.build()


def part(name: str = "part") -> Part:
    return Part(GraphBuilder(name))


def stages(graphs: Sequence[OpGraph], rank_class: Sequence[int]) -> Workload:
    return Workload(name="job", classes=tuple(graphs), rank_class=np.array(rank_class, np.int32))


@dataclass(frozen=True, slots=True)
class Step:
    """The next operation of all stages: compute for the given times, or communicate."""

    what: str
    axis: int
    durations: tuple[int, ...]
    deps: tuple[int, ...]
    takes: int
    free: bool


def _shift(shape: Sequence[int], axis: int, *, wraps: bool) -> Permutation:
    stride = prod(shape[axis + 1 :])
    return Permutation(prod(shape), (shape[axis], stride), 1, wraps)


def _graph(shape: Sequence[int], stage: int, steps: Sequence[Step]) -> OpGraph:
    made = part(f"stage{stage}")
    nodes: list[int] = []
    for step in steps:
        deps = [nodes[max(len(nodes) - back, 0)] for back in step.deps if nodes]
        takes = 0.0 if step.free else float(step.takes)
        match step.what:
            case "compute":
                nodes.append(made.compute(float(step.durations[stage]), *dict.fromkeys(deps)))
            case "collective":
                groups = StridedGroups.from_mesh(shape, [step.axis])
                nodes.append(made.collective(groups, takes, *dict.fromkeys(deps)))
            case "shift" | "ring":
                way = _shift(shape, step.axis, wraps=step.what == "ring")
                nodes.append(made.message(NodeKind.PERMUTE, way, takes, *dict.fromkeys(deps)))
            case _:
                way = _shift(shape, 0, wraps=False)
                if stage < shape[0] - 1:
                    nodes.append(made.message(NodeKind.SEND, way, takes, *dict.fromkeys(deps)))
                if stage:
                    nodes.append(made.message(NodeKind.RECV, way, takes, *dict.fromkeys(deps)))
    return made.built()


@st.composite
def jobs(draw: st.DrawFn) -> Workload:
    """Pipelines of stages (the first axis, one class each) by two more axes, all in one order."""
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))]
    step = st.builds(
        Step,
        what=st.sampled_from(("compute", "compute", "collective", "shift", "ring", "pass on")),
        axis=st.integers(0, 2),
        durations=st.tuples(*[st.integers(1, 9)] * 3),
        deps=st.lists(st.integers(1, 4), max_size=2).map(tuple),
        takes=st.integers(1, 5),
        free=st.booleans() if draw(st.booleans()) else st.just(False),
    )
    steps = draw(st.lists(step, min_size=1, max_size=10))
    classes = [_graph(shape, stage, steps) for stage in range(shape[0])]
    return stages(classes, np.repeat(np.arange(shape[0]), shape[1] * shape[2]).tolist())
