"""Recorded ranks, and ranks that are assumed to be equal to them."""

from __future__ import annotations

import pytest

from hespas.captures.torch.classes import MAX_RECORDED, find_classes
from hespas.captures.torch.world import PeerNotRun, ShapeExchange
from hespas.graph import GraphBuilder, OpClass, OpGraph
from hespas.graph.errors import UnsupportedError
from hespas.graph.mesh import Mesh


def program(kind: object) -> OpGraph:
    """A graph that differs from those of other kinds."""
    builder = GraphBuilder("step")
    builder.add_node(name_id=builder.strings.add(str(kind)), op_id=0, op_class=OpClass.FREE)
    return builder.build()


class Ranks:
    """Programs of ranks by a rule; ``asked`` lists the ranks that were recorded."""

    def __init__(self, sizes: tuple[int, ...], kinds: list[object]) -> None:
        self.sizes, self.kinds = sizes, kinds
        self.asked: list[int] = []

    def graph_at(self, rank: int) -> OpGraph:
        self.asked.append(rank)
        return program(self.kinds[rank])


def test_equal_ranks_are_one_class_and_three_an_axis_are_looked_at() -> None:
    ranks = Ranks((128, 128), ["same"] * 16_384)
    found, rank_class = find_classes(Mesh(("data", "model"), (128, 128)), ranks.graph_at)
    assert len(found.graphs) == 1
    assert sorted(ranks.asked) == [0, 64, 127, 64 * 128, 127 * 128]
    assert rank_class.shape == (16_384,)
    assert rank_class.strides == (0,)


@pytest.mark.parametrize("sizes", [(1,), (1, 1)])
def test_a_mesh_of_one_rank_is_recorded(sizes: tuple[int, ...]) -> None:
    ranks = Ranks(sizes, ["alone"])
    found, rank_class = find_classes(Mesh(("data", "model")[: len(sizes)], sizes), ranks.graph_at)
    assert ranks.asked == found.first == rank_class.tolist() == [0]


def test_borders_between_stretches_are_found_and_combined() -> None:
    mesh = Mesh(("pipe", "data"), (4, 1000))
    kinds: list[object] = [
        (("first", "inner", "inner", "last")[rank // 1000], rank % 1000 >= 777) for rank in range(4000)
    ]
    ranks = Ranks(mesh.sizes, kinds)
    found, rank_class = find_classes(mesh, ranks.graph_at)
    names = [graph.node_name(0) for graph in found.graphs]
    assert [names[index] for index in rank_class] == [str(kind) for kind in kinds]
    assert list(dict.fromkeys(rank_class.tolist())) == list(range(6))
    assert [str(kinds[rank]) for rank in found.first] == names
    assert len(ranks.asked) == len(set(ranks.asked)) < 30


def test_too_many_kinds_of_ranks_are_refused() -> None:
    size = 2 * MAX_RECORDED
    with pytest.raises(UnsupportedError, match="ranks differ from each other"):
        find_classes(Mesh(("data",), (size,)), Ranks((size,), list(range(size))).graph_at)


class Pipeline:
    """Ranks that need shapes from the previous rank, send to the next rank, and then need shapes from it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.board = ShapeExchange()
        self.told = self.board.sent
        self.runs: list[int] = []

    def tell(self, rank: int, peer: int) -> None:
        self.told[rank, rank, peer, peer] = "shapes"

    def ask(self, rank: int, peer: int) -> None:
        if (peer, peer, rank, rank) not in self.told:
            raise PeerNotRun(peer)

    def run(self, rank: int) -> str:
        self.runs.append(rank)
        if rank:
            self.ask(rank, rank - 1)
        if rank + 1 < self.size:
            self.tell(rank, rank + 1)
            self.ask(rank, rank + 1)
        if rank:
            self.tell(rank, rank - 1)
        return f"rank {rank}"


def test_stages_run_in_the_order_in_which_they_tell() -> None:
    pipeline = Pipeline(4)
    found = pipeline.board.run_in_order(2, pipeline.run)
    assert found == {rank: f"rank {rank}" for rank in range(4)}
    assert len(pipeline.runs) <= 10


def test_stages_that_wait_for_each_other_are_refused() -> None:
    def run(rank: int) -> str:
        raise PeerNotRun(1 - rank)

    with pytest.raises(UnsupportedError, match="wait for each other's shapes"):
        ShapeExchange().run_in_order(0, run)
