"""Operations that a rank executes: ranks without work, transfers to the host, and times of permutes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.converters.chakra import FORMAT
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    Workload,
)
from hespas.validators.checker import check


def _write(workload: Workload, path: Path, ranks: range | None = None) -> Diagnostics:
    assert FORMAT.write is not None
    diagnostics = Diagnostics()
    FORMAT.write(workload, path, WriteOptions(name="job", ranks=ranks), diagnostics)
    return diagnostics


def _read(path: Path) -> Workload:
    assert FORMAT.read is not None
    value = FORMAT.read(path, ReadOptions(), Diagnostics())
    assert isinstance(value, Workload)
    return value


def _node(
    builder: GraphBuilder, name: str, kind: NodeKind, op_class: OpClass, deps: tuple[int, ...] = ()
) -> int:
    row = builder.strings.add(name)
    return builder.add_node(name_id=row, op_id=row, op_class=op_class, kind=kind, data_deps=deps)


def _only_a_collective(num_ranks: int) -> Workload:
    """An all-reduce between the ranks 0 and 1; the others do nothing at all."""
    builder = GraphBuilder("pair")
    node = _node(builder, "sum", NodeKind.COLLECTIVE, OpClass.COLLECTIVE)
    builder.set(node, duration_ns=5000.0)
    groups = builder.group_set(ExplicitGroups.from_rows([[0, 1]]))
    builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=4096)
    return Workload.spmd(builder.build(), num_ranks)


def test_ranks_without_work_have_one_idle_node(tmp_path: Path) -> None:
    diagnostics = _write(_only_a_collective(4), tmp_path / "job")
    assert diagnostics.counts() == {"chakra.idle": 2, "chakra.empty-rank": 2}
    assert "(ranks: 2; their time there: 10.000 us)" in next(iter(diagnostics)).message
    assert check([tmp_path / "job"], "astra-sim").valid
    again = _read(tmp_path / "job")
    idle = again.graph_of(3)
    assert (len(idle), idle.node_name(0), idle.op_name(0)) == (1, "idle", "idle")
    assert (idle.duration_ns[0], idle.flops[0], idle.bytes_moved[0]) == (0, 0, 0)
    assert again.graph_of(0).kind.tolist() == [NodeKind.COLLECTIVE]
    _write(again, tmp_path / "twice")
    for file in (tmp_path / "job").iterdir():
        assert (tmp_path / "twice" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_program_without_operations_can_be_written(tmp_path: Path, ranks: int) -> None:
    workload = Workload.spmd(GraphBuilder("constants").build(), ranks)
    diagnostics = _write(workload, tmp_path / "out")
    assert diagnostics.counts() == {"chakra.empty-rank": ranks}
    assert check([tmp_path / "out"], "astra-sim").violations == ()
    assert [len(graph) for graph in _read(tmp_path / "out").classes] == [1]


def test_a_rank_alone_keeps_its_place_though_idle(tmp_path: Path) -> None:
    _write(_only_a_collective(4), tmp_path / "one.et", range(3, 4))
    again = _read(tmp_path / "one.et")
    assert again.metadata["rank"] == "3"
    assert again.classes[0].node_name(0) == "idle"


def _host_program(bytes_read: float) -> Workload:
    builder = GraphBuilder("host")
    row = builder.strings.add("stablehlo.send")
    node = builder.add_node(
        name_id=builder.strings.add("out"),
        op_id=row,
        op_class=OpClass.P2P,
        kind=NodeKind.SEND,
        bytes_read=bytes_read,
        bytes_written=0.0,
    )
    builder.set(node, duration_ns=2500.0)
    builder.add_p2p(node, permutation=-1, comm_bytes=4096, tag=6, host=True)
    _node(builder, "after", NodeKind.COMPUTE, OpClass.ELEMENTWISE, (node,))
    return Workload.spmd(builder.build(), 2)


@pytest.mark.parametrize("bytes_read", [4096.0, np.nan])
def test_host_transfers_are_work_of_their_bytes(tmp_path: Path, bytes_read: float) -> None:
    workload = _host_program(bytes_read)
    diagnostics = _write(workload, tmp_path / "job")
    assert diagnostics.counts()["chakra.host-transfer"] == 1
    graph = _read(tmp_path / "job").classes[0]
    assert graph.kind.tolist() == [NodeKind.COMPUTE] * 2
    assert len(graph.p2p) == 0
    assert graph.op_name(0) == "stablehlo.send"
    assert (graph.op_class[0], graph.bytes_moved[0], graph.duration_ns[0]) == (OpClass.HOST, 4096, 2500)
    assert graph.data_deps.row(1).tolist() == [0]
    assert workload.classes[0].kind[0] == NodeKind.SEND  # the input is as it was
    assert not [found for found in check([tmp_path / "job"], "astra-sim").violations if found.code != "ET023"]


def _permute(pairs: list[tuple[int, int]], num_ranks: int) -> Workload:
    builder = GraphBuilder("shift")
    first = _node(builder, "work", NodeKind.COMPUTE, OpClass.ELEMENTWISE)
    builder.set(first, duration_ns=1000.0)
    node = _node(builder, "shift", NodeKind.PERMUTE, OpClass.P2P, (first,))
    builder.set(node, duration_ns=7000.0)
    builder.add_p2p(
        node, permutation=builder.permutation(Permutation.from_pairs(pairs, num_ranks)), comm_bytes=64
    )
    return Workload.spmd(builder.build(), num_ranks)


def _communication_ns(graph: OpGraph) -> float:
    return float(np.nansum(graph.duration_ns[graph.kind != NodeKind.COMPUTE]))


def test_the_time_of_a_permute_is_neither_lost_nor_doubled(tmp_path: Path) -> None:
    workload = _permute([(0, 1), (1, 2)], 4)  # sends; sends and receives; receives; neither
    diagnostics = _write(workload, tmp_path / "job")
    again = _read(tmp_path / "job")
    assert [_communication_ns(again.graph_of(rank)) for rank in range(4)] == [7000, 7000, 7000, 0]
    assert diagnostics.counts() == {"chakra.permute": 1, "chakra.idle": 1}
    told = {found.code: found.message for found in diagnostics}
    assert "(ranks: 1; their time there: 7.000 us)" in told["chakra.idle"]


def test_work_of_less_than_a_microsecond_is_counted_and_kept_in_nanoseconds(tmp_path: Path) -> None:
    builder = GraphBuilder("dense")
    last: tuple[int, ...] = ()
    for number in range(10):
        last = (_node(builder, f"op{number}", NodeKind.COMPUTE, OpClass.ELEMENTWISE, last),)
        builder.set(last[0], duration_ns=250.0)
    workload = Workload.spmd(builder.build(), 2)
    diagnostics = _write(workload, tmp_path / "job")
    assert diagnostics.counts() == {"chakra.sub-microsecond": 14}  # 3 of 10 nodes start a microsecond
    graph = _read(tmp_path / "job").classes[0]
    assert graph.duration_ns.tolist() == [250.0] * 10
