"""Graphs that use every column, made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hespas.graph import (
    DTYPES,
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    ExplicitGroups,
    ExtraTable,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    Permutation,
    RaggedArray,
    RegionKind,
    RegionTable,
    StridedGroups,
    StringTable,
    TensorTypes,
    Workload,
)
from hespas.graph.builder import region_executions
from hespas.graph.columns import FloatArray, SmallIntArray
from hespas.graph.passes import leaves_loop

_TEXTS = ("", "dot", "été", "\udc80\ud800", "\x00nul", "😀", "", 'q"\\\n', "b", "x" * 300, "add", "src.py:3")
_GROUPS = (
    StridedGroups.all_ranks(8),
    StridedGroups(((2, 4),), ((4, 1),)),
    StridedGroups(((4, 1),), ((2, 4),), 8),
    StridedGroups(((2, 1), (2, 4)), ((2, 2),)),
    ExplicitGroups(((0, 1), (2, 3))),
    ExplicitGroups(((5, 0, 2), (1,))),
    ExplicitGroups(()),
    ExplicitGroups(((0, 1), (2, 3)), 1),
    replace(StridedGroups.all_ranks(8), communicator=2),
)
_PERMUTATIONS = (
    Permutation(8, (8, 1), 1, True),
    Permutation(8, (2, 4), -1, False),
    Permutation.from_pairs([(0, 5), (5, 2)], 8),
    Permutation(4),
)


class GraphMaker:
    """One random graph; every draw comes from one seeded generator."""

    def __init__(self, seed: int, nodes: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes = nodes

    def ints(self, low: int, high: int, size: int | None = None) -> SmallIntArray:
        return self.rng.integers(low, high, self.nodes if size is None else size).astype(np.int32)

    def costs(self, size: int | None = None) -> FloatArray:
        count = self.nodes if size is None else size
        if self.rng.random() < 0.2:
            return np.broadcast_to(np.float64(self.rng.choice([np.nan, 0.0, 7.5])), (count,))
        column = self.rng.choice([np.nan, 0.0, -0.0, 1.0, 2.0**60, 1e-300, 5e-324, 0.1, 1e22], count)
        return np.where(self.rng.random(count) < 0.5, column, self.rng.random(count) * 1e9)

    def ragged(self, high: int) -> RaggedArray:
        lengths = self.rng.integers(0, 4, self.nodes) if high else np.zeros(self.nodes, np.int64)
        return RaggedArray.from_lengths(lengths, self.rng.integers(0, max(high, 1), int(lengths.sum())))

    def deps(self) -> RaggedArray:
        """Each node waits for earlier ones."""
        lengths = np.minimum(self.rng.integers(0, 3, self.nodes), np.arange(self.nodes))
        owners = np.repeat(np.arange(self.nodes), lengths)
        return RaggedArray.from_lengths(lengths, (self.rng.random(len(owners)) * owners).astype(np.int64))

    def some_nodes(self) -> SmallIntArray:
        return np.flatnonzero(self.rng.random(self.nodes) < 0.3).astype(np.int32)

    def types(self) -> TensorTypes:
        count = int(self.rng.integers(1, 9))
        lengths = self.rng.integers(0, 4, count)
        bytes_of_rows = self.costs(count).tolist()
        made = TensorTypes(
            dtype=self.rng.integers(-1, len(DTYPES), count).astype(np.int16),
            dim_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            dims=self.rng.integers(-1, 5, int(lengths.sum())).astype(np.int64),
            bytes=np.zeros(count),
            bounded=self.rng.random(count) < 0.5,
            encoding=self.ints(0, len(_TEXTS), count),
        )
        sizes: dict[tuple[object, ...], float] = {}
        for row in range(count):  # the same type twice has one size, or the graph is none that is read
            encoding = _TEXTS[int(made.encoding[row])]
            key = (int(made.dtype[row]), made.shape(row), bool(made.bounded[row]), encoding)
            bytes_of_rows[row] = sizes.setdefault(key, bytes_of_rows[row])
        return replace(made, bytes=np.array(bytes_of_rows))

    def collectives(self) -> CollectiveTable:
        node = self.some_nodes()
        count = len(node)
        return CollectiveTable(
            node=node,
            kind=self.rng.integers(0, len(CollectiveKind), count).astype(np.uint8),
            group_set=self.ints(-1, len(_GROUPS), count),
            comm_bytes=self.costs(count),
            operand_bytes=self.costs(count),
            result_bytes=self.costs(count),
            channel=self.rng.integers(-1, 2**60, count),
            reduction=self.ints(0, len(_TEXTS), count),
        )

    def p2p(self) -> P2pTable:
        node = self.some_nodes()
        count = len(node)
        return P2pTable(
            node=node,
            permutation=self.ints(-1, len(_PERMUTATIONS), count),
            comm_bytes=self.costs(count),
            tag=self.rng.integers(-1, 2**60, count),
            host=self.rng.random(count) < 0.5,
        )

    def contractions(self) -> ContractionTable:
        node = np.repeat(self.some_nodes(), 2)
        count = len(node)
        window = self.rng.integers(1, 100, count)
        return ContractionTable(
            node=node,
            batch=self.rng.integers(1, 2**40, count),
            m=self.rng.integers(1, 2**40, count),
            n=self.rng.integers(1, 2**40, count),
            k=window * self.rng.integers(1, 2**33, count),
            flops=self.costs(count),
            useful_flops=self.costs(count),
            lhs=self.rng.integers(-1, len(DTYPES), count).astype(np.int16),
            rhs=self.rng.integers(-1, len(DTYPES), count).astype(np.int16),
            accumulator=self.rng.integers(-1, len(DTYPES), count).astype(np.int16),
            products=self.rng.integers(0, 256, count).astype(np.uint8),
            window=window,
        )

    def regions(self) -> RegionTable:
        count, carried = int(self.rng.integers(0, 5)), 12 if self.nodes else 0
        carried = carried if count else 0
        return RegionTable(
            parent=np.array([self.rng.integers(-1, row) for row in range(count)], np.int32),
            kind=self.rng.integers(0, len(RegionKind), count).astype(np.uint8),
            trips=np.minimum(np.abs(self.costs(count)), 1e9),  # nested loops stay below the limit of costs
            label=self.ints(0, len(_TEXTS), count),
            carried_region=self.ints(0, max(count, 1), carried),
            carried_producer=self.ints(0, max(self.nodes, 1), carried),
            carried_consumer=self.ints(0, max(self.nodes, 1), carried),
        )

    def extra(self) -> ExtraTable:
        node = np.sort(self.ints(-1, self.nodes, 12))
        lengths = self.rng.integers(0, 9, len(node))
        return ExtraTable(
            node=node,
            key=self.ints(0, len(_TEXTS), len(node)),
            tag=self.rng.integers(-(2**15), 2**15, len(node)).astype(np.int16),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            values=self.rng.bytes(int(lengths.sum())),
        )

    def ids(self) -> NDArray[np.uint64]:
        if self.rng.random() < 0.3:
            return np.arange(self.nodes, dtype=np.uint64)
        steps = self.rng.integers(1, 2**50, self.nodes, dtype=np.uint64)
        ids = np.uint64(2**63) + np.cumsum(steps, dtype=np.uint64)
        return self.rng.permutation(ids)

    def build(self) -> OpGraph:
        regions = self.regions()
        region = self.ints(-1, max(len(regions), 1)) if len(regions) else np.full(self.nodes, -1, np.int32)
        flops, types, texts = self.costs(), self.types(), len(_TEXTS)
        collectives, p2p = self.collectives(), self.p2p()
        told = np.isin(p2p.node, collectives.node, invert=True)
        p2p = P2pTable(**{entry.name: getattr(p2p, entry.name)[told] for entry in fields(p2p)})
        kind = self.rng.integers(0, len(NodeKind), self.nodes).astype(np.uint8)
        kind[collectives.node] = NodeKind.COLLECTIVE
        kind[p2p.node] = self.rng.integers(NodeKind.SEND, NodeKind.PERMUTE + 1, len(p2p.node))
        executions = region_executions(regions, region)
        graph = OpGraph(
            name="g\x00raph\udcff",
            strings=StringTable.from_strings(_TEXTS),
            types=types,
            group_sets=_GROUPS,
            permutations=_PERMUTATIONS,
            id=self.ids(),
            name_id=self.ints(0, texts),
            op_id=self.ints(0, texts),
            kind=kind,
            op_class=self.rng.integers(0, len(OpClass), self.nodes).astype(np.uint8),
            resource=self.rng.integers(0, 2, self.nodes).astype(np.uint8),
            stream=np.broadcast_to(np.int32(-1), (self.nodes,)),
            region=region,
            rate_dtype=self.rng.integers(-1, len(DTYPES), self.nodes).astype(np.int16),
            source_id=self.ints(0, texts),
            framework_id=np.broadcast_to(np.int32(0), (self.nodes,)),
            flops=flops,
            useful_flops=flops if self.rng.random() < 0.5 else self.costs(),
            transcendentals=self.costs(),
            bytes_read=self.costs(),
            bytes_written=self.costs(),
            duration_ns=self.costs(),
            executions=executions if self.rng.random() < 0.5 else self.costs(),
            data_deps=self.deps(),
            control_deps=self.deps() if self.rng.random() < 0.5 else RaggedArray.empty(self.nodes),
            operands=self.ragged(len(types)),
            results=self.ragged(len(types)),
            collectives=collectives,
            p2p=p2p,
            contractions=self.contractions(),
            regions=regions,
            extra=self.extra() if self.nodes else ExtraTable.empty(),
            attachments={"module.bc": self.rng.bytes(20), "é\udc80": b""},
        )
        inside = ~leaves_loop(graph)  # values that leave their loop are refused
        kept = replace(
            regions,
            carried_region=regions.carried_region[inside],
            carried_producer=regions.carried_producer[inside],
            carried_consumer=regions.carried_consumer[inside],
        )
        return replace(graph, regions=kept)


@pytest.fixture(scope="session")
def make_graph() -> Callable[[int, int], OpGraph]:
    """``(seed, nodes) -> graph``."""
    return lambda seed, nodes: GraphMaker(seed, nodes).build()


@pytest.fixture(scope="session")
def make_workload() -> Callable[[int, int], Workload]:
    """``(seed, nodes) -> workload`` of two classes and sixteen ranks."""

    def make(seed: int, nodes: int) -> Workload:
        return Workload(
            name="job",
            classes=(GraphMaker(seed, nodes).build(), GraphMaker(seed + 1, nodes + 3).build()),
            rank_class=np.array([0, 0, 0, 1, 1, 0, 1, 1] * 2, np.int32),
            metadata={"format": "test", "é": "\udc80"},
        )

    return make
