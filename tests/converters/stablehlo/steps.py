"""Builder of small graphs, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    dtype,
)

__all__ = ["RANKS", "Steps"]

RANKS = 4


class Steps:
    """Builder of a graph: each call adds an operation and returns its number."""

    def __init__(self) -> None:
        self.builder = GraphBuilder("steps")

    def op(
        self,
        name: str = "step",
        *,
        deps: Sequence[int] = (),
        shape: Sequence[int] | None = None,
        element: str = "f32",
        kind: NodeKind = NodeKind.COMPUTE,
        flops: float = 0.0,
        moved: float = 0.0,
        region: int = -1,
    ) -> int:
        """An operation; with ``shape`` of one operand and one result."""
        b = self.builder
        types = [] if shape is None else [b.types.add(dtype(element), shape)]
        return b.add_node(
            name_id=b.strings.add(f"{name}.{len(b)}"),
            op_id=b.strings.add(name),
            op_class=OpClass.UNKNOWN,
            kind=kind,
            data_deps=deps,
            operands=types,
            results=types,
            flops=flops,
            transcendentals=0.0,
            bytes_read=moved / 2,
            bytes_written=moved / 2,
            region=region,
        )

    def collective(
        self,
        kind: CollectiveKind,
        *,
        deps: Sequence[int] = (),
        groups: GroupSet | None = None,
        size: float = 64.0,
        shape: Sequence[int] | None = None,
        channel: int = -1,
        reduction: str = "",
        name: str = "collective",
        element: str = "f32",
    ) -> int:
        """A collective of all ranks where no ``groups`` are given."""
        node = self.op(name, deps=deps, kind=NodeKind.COLLECTIVE, shape=shape, element=element)
        row = -1 if groups is None else self.builder.group_set(groups)
        self.builder.add_collective(
            node, kind, group_set=row, comm_bytes=size, channel=channel, reduction=reduction
        )
        return node

    def message(
        self,
        kind: NodeKind,
        pairs: list[tuple[int, int]] | None,
        *,
        deps: Sequence[int] = (),
        tag: int = -1,
        size: float = 256.0,
        name: str = "message",
    ) -> int:
        """A message along ``pairs``, to nobody known where there are none."""
        node = self.op(name, deps=deps, kind=kind)
        row = -1 if pairs is None else self.builder.permutation(Permutation.from_pairs(pairs, RANKS))
        self.builder.add_p2p(node, permutation=row, comm_bytes=size, tag=tag)
        return node

    def graph(self) -> OpGraph:
        """Return the graph."""
        return self.builder.build()
