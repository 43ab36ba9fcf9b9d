"""The communication matrix: bytes by the definition of each collective, and messages from their sender."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.analysis.traffic import matrix_of, traffic
from hespas.graph import CollectiveKind, GraphBuilder, NodeKind, OpClass, Workload
from hespas.graph.groups import ExplicitGroups, Permutation, StridedGroups
from tests.converters.pytorch.traces import Json, kernel, write_kineto

FIXTURES = Path(__file__).parents[2] / "fixtures"


def workload(ranks: int, kind: CollectiveKind, rows: list[list[int]], size: float) -> Workload:
    builder = GraphBuilder("program")
    name = builder.strings.add("collective")
    node = builder.add_node(name_id=name, op_id=name, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
    group_set = builder.group_set(ExplicitGroups.from_rows(rows))
    builder.add_collective(node, kind, group_set=group_set, comm_bytes=size)
    return Workload.spmd(builder.build(), ranks)


@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        (CollectiveKind.ALL_REDUCE, 400.0),  # 2 / 4 of the buffer
        (CollectiveKind.REDUCE_SCATTER, 200.0),
        (CollectiveKind.ALL_GATHER, 800.0),  # the size is of a shard
        (CollectiveKind.ALL_TO_ALL, 200.0),
        (CollectiveKind.BROADCAST, 0.0),  # its root is unknown
    ],
)
def test_bytes_follow_from_the_kind(kind: CollectiveKind, pair: float) -> None:
    table = traffic(workload(8, kind, [[0, 1, 2, 3], [4, 5, 6, 7]], 800.0))
    rows = {(row.source, row.target): row.size_bytes for row in table.rows()}
    inside = [(one, other) for one in range(4) for other in range(4) if one != other]
    pairs = {(str(one + first), str(other + first)) for first in (0, 4) for one, other in inside}
    assert rows == (dict.fromkeys(pairs, pair) if pair else {})


def test_messages_are_counted_at_their_sender() -> None:
    builder = GraphBuilder("program")
    name = builder.strings.add("shift")
    node = builder.add_node(name_id=name, op_id=name, op_class=OpClass.P2P, kind=NodeKind.PERMUTE)
    permutation = builder.permutation(Permutation.from_pairs([(0, 1), (1, 2), (2, 0)], 3))
    builder.add_p2p(node, permutation=permutation, comm_bytes=70.0)
    table = traffic(Workload.spmd(builder.build(), 3))
    rows = [(row.source, row.target, row.size_bytes) for row in table.rows()]
    assert rows == [("0", "1", 70.0), ("1", "2", 70.0), ("2", "0", 70.0)]


def test_many_ranks_are_blocks() -> None:
    groups = StridedGroups.all_ranks(256)
    builder = GraphBuilder("program")
    name = builder.strings.add("collective")
    node = builder.add_node(name_id=name, op_id=name, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
    size, group_set = 256.0, builder.group_set(groups)
    builder.add_collective(node, CollectiveKind.ALL_TO_ALL, group_set=group_set, comm_bytes=size)
    table = traffic(Workload.spmd(builder.build(), 256))
    assert table["source"][0] == "0-3"
    assert len(table) == 64 * 64
    assert table["size_bytes"].sum() == 256 * 255
    chart = matrix_of(table)
    assert chart is not None
    assert chart.rows[-1] == "252-255"
    assert np.diag(chart.values).tolist() == [12.0] * 64


def test_a_rank_sends_the_bytes_of_the_bus_bandwidth() -> None:
    done = hespas.simulate(FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz", "H100-SXM")
    sizes = done.tables_by_name()["collectives"]
    factor = sizes["bus_gbytes_per_s"] / sizes["algorithm_gbytes_per_s"]
    bus_bytes = float((sizes["size_bytes"] * sizes["count"] * factor).sum())
    assert done.tables_by_name()["traffic"]["size_bytes"].sum() == pytest.approx(bus_bytes)


def collective(name: str, ranks: list[int], elements: int, start_us: float) -> Json:
    facts: Json = {
        "Collective name": name, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
        "Group size": len(ranks), "Process Group Name": str(ranks), "Process Group Ranks": str(ranks),
    }  # fmt: skip
    return kernel("ncclDevKernel_Generic", start_us, 10, int(start_us), facts, stream=20)


def test_recorded_ranks_send_the_bytes_of_the_bus_bandwidth(tmp_path: Path) -> None:
    traces = [
        write_kineto(
            tmp_path / f"rank{rank}.json",
            [
                collective("allreduce", [0, 1, 2, 3], 3000, 100.0 * rank),
                collective("all_to_allv", [0, 2], 1000, 100.0 * rank + 50),
            ],
            distributedInfo={"rank": rank, "world_size": 4},
        )
        for rank in (0, 2)
    ]
    tables = hespas.analyze(traces).tables
    rows = {(row.source, row.target): row.size_bytes for row in tables.traffic.rows()}
    reduced = 2 * 3000 * 4 / 4  # two parts of a buffer of 3,000 numbers of 4 bytes, to each of 3 ranks
    assert rows[("0", "1")] == rows[("0", "3")] == rows[("2", "1")] == reduced
    assert rows[("0", "2")] == rows[("2", "0")] == reduced + 1000 * 4 / 2
    assert {source for source, _ in rows} == {"0", "2"}
