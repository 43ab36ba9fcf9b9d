"""Replays of random graphs parse and verify with any names, types and costs."""

from __future__ import annotations

import random
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.costs.table import TABLE
from hespas.graph import (
    DTYPES,
    CollectiveKind,
    ExplicitGroups,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    RegionKind,
    StridedGroups,
    Workload,
)
from tests.converters.stablehlo.replays import write_bytes

pytest.importorskip("jaxlib")

RANKS = 4
OPS = [*sorted(TABLE), "aten::mm", "fusion", "", 'q"\\\n', "été", "\udc80"]
SHAPES = [(), (1,), (2,), (8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (0,), (4, 0), (3, 5), (-1, 4), (2, 1, 4)]
GROUPS: list[GroupSet] = [
    StridedGroups.all_ranks(RANKS),
    StridedGroups(((2, 2),), ((2, 1),)),
    ExplicitGroups(((0, 2), (1, 3))),
    ExplicitGroups(((0, 1, 2), (3,))),
    ExplicitGroups(((1, 2),)),
    ExplicitGroups(()),
]
WAYS = [
    Permutation.from_pairs([(0, 1), (1, 2), (2, 3), (3, 0)], RANKS),
    Permutation.from_pairs([(0, 1)], RANKS),
    Permutation.from_pairs([], RANKS),
]


class _Maker:
    """A graph from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.builder = GraphBuilder(self.random.choice(["g", "", 'a"b', "é\n"]))
        # A few types per graph, so that operands and results often are of one type.
        self.kinds = [
            (self.random.choice([None, *DTYPES]), self.random.choice(SHAPES))
            for _ in range(self.random.randint(1, 4))
        ]

    def graph(self) -> OpGraph:
        regions = [-1]
        if self.random.random() < 0.3:
            trips = self.random.choice([0.0, 1.0, 3.0, nan])
            regions.append(self.builder.add_region(RegionKind.LOOP_BODY, trips=trips, label="while"))
        for _ in range(self.random.randint(0, 12)):
            self._node(self.random.choice(regions))
        return self.builder.build()

    def _types(self, most: int) -> list[int]:
        chosen = self.random.choices(self.kinds, k=self.random.randint(0, most))
        if self.random.random() < 0.5:  # what most operations have: one type throughout
            chosen = chosen[:1] * len(chosen)
        return [self.builder.types.add(element, shape) for element, shape in chosen]

    def _cost(self) -> float:
        return self.random.choice([nan, 0.0, 1.0, 7.0, 100.0, 5000.0, 1e6])

    def _node(self, region: int) -> None:
        b, number = self.builder, len(self.builder)
        deps = self.random.sample(range(number), min(number, self.random.randint(0, 3)))
        kind = self.random.choice([NodeKind.COMPUTE] * 5 + list(NodeKind))
        node = b.add_node(
            name_id=b.strings.add(self.random.choice(["", "n", 'x"y', f"op.{number}"])),
            op_id=b.strings.add(self.random.choice(OPS)),
            op_class=self.random.choice(list(OpClass)),
            kind=kind,
            data_deps=deps[:2],
            control_deps=deps[2:],
            operands=self._types(3),
            results=self._types(2),
            flops=self._cost(),
            transcendentals=self._cost(),
            bytes_read=self._cost(),
            bytes_written=self._cost(),
            region=region,
        )
        if kind is NodeKind.COLLECTIVE:
            self._collective(node)
        elif kind in {NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE}:
            way = self.random.choice([-1, *(b.permutation(each) for each in WAYS)])
            b.add_p2p(node, permutation=way, comm_bytes=self._cost(), tag=self.random.choice([-1, 0, 5]))
        elif self.random.random() < 0.2:
            self._product(node)

    def _collective(self, node: int) -> None:
        b = self.builder
        b.add_collective(
            node,
            self.random.choice(list(CollectiveKind)),
            group_set=self.random.choice([-1, *(b.group_set(each) for each in GROUPS)]),
            comm_bytes=self._cost(),
            channel=self.random.choice([-1, 0, 1, 1, 7]),
            reduction=self.random.choice(["", "stablehlo.add", "max", "or", "mystery"]),
        )

    def _product(self, node: int) -> None:
        codes = [-1, *(entry.code for entry in DTYPES[:16])]
        batch, m, n, k = (self.random.choice([-1, 0, 1, 2, 4]) for _ in range(4))
        self.builder.add_contraction(
            node,
            batch=batch,
            m=m,
            n=n,
            k=k,
            flops=self._cost(),
            useful_flops=self._cost(),
            lhs=self.random.choice(codes),
            rhs=self.random.choice(codes),
            accumulator=-1,
        )


def _write_made(seed: int) -> None:
    workload = Workload.spmd(_Maker(seed).graph(), RANKS)
    with TemporaryDirectory() as folder:
        text, found = write_bytes(workload, Path(folder) / "any.mlir")
    assert b"hespas.replay" in text
    # Nothing is silently left out: what the writer makes of each node is a replayed operation.
    replayed = found.counts().get("stablehlo.replay", 0)
    assert replayed or b"return" in text


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_random_graphs_have_valid_replays(seed: int) -> None:
    _write_made(seed)


@settings(max_examples=5000)
@given(st.integers(0, 1 << 32))
def test_many_random_graphs_have_valid_replays(seed: int) -> None:
    _write_made(seed)
