"""pandas views of values are equal to the columns."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.graph import (
    CollectiveKind,
    Estimate,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Profile,
    StridedGroups,
    StringTable,
    Timeline,
    Workload,
    dtype,
)
from hespas.graph.errors import UsageError
from hespas.graph.frames import to_pandas


def graph() -> OpGraph:
    builder = GraphBuilder("step")
    bf16 = builder.types.add(dtype("bf16"), (4, -1))
    builder.add_node(
        name_id=builder.strings.add("dot\udc80"),
        op_id=builder.strings.add("dot"),
        op_class=OpClass.CONTRACTION,
        operands=[bf16, bf16],
        flops=8.0,
    )
    builder.add_node(
        name_id=0,
        op_id=builder.strings.add("all_reduce"),
        op_class=OpClass.COLLECTIVE,
        kind=NodeKind.COLLECTIVE,
        data_deps=[0],
    )
    builder.set(0, rate_dtype=dtype("bf16").code)
    groups = builder.group_set(StridedGroups.from_mesh([2, 4], [1]))
    builder.add_collective(1, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=64.0)
    return builder.build()


def test_graph() -> None:
    frame = to_pandas(graph())
    assert frame.index.name == "node"
    assert frame["name"].tolist() == ["dot\udc80", ""]
    assert frame["op"].tolist() == ["dot", "all_reduce"]
    assert frame["kind"].tolist() == ["compute", "collective"]
    assert frame["op_class"].tolist() == ["contraction", "collective"]
    assert frame["operands"].tolist() == [["bf16[4,?]", "bf16[4,?]"], []]
    assert frame["data_deps"].tolist() == [[], [0]]
    assert frame["rate_dtype"].astype(object).fillna("unknown").tolist() == ["bf16", "unknown"]
    assert frame["collective"].astype(object).fillna("none").tolist() == ["none", "all_reduce"]
    assert frame["group_size"].tolist() == [-1, 4]
    np.testing.assert_array_equal(frame["comm_bytes"].to_numpy(), [np.nan, 64.0])
    np.testing.assert_array_equal(frame["flops"].to_numpy(), [8.0, np.nan])
    assert frame["id"].dtype == np.uint64


def test_lists_are_python_lists_even_where_all_have_one_length() -> None:
    builder = GraphBuilder("pairs")
    for _ in range(3):
        builder.add_node(name_id=0, op_id=0, op_class=OpClass.FREE, data_deps=[0, 1])
    assert to_pandas(builder.build())["data_deps"].tolist() == [[0, 1]] * 3


def test_empty_graph() -> None:
    assert len(to_pandas(GraphBuilder("empty").build())) == 0


def test_workload() -> None:
    workload = Workload(name="job", classes=(graph(), graph()), rank_class=np.array([0, 1, 1], np.int32))
    frame = to_pandas(workload)
    assert frame.index.names == ["rank_class", "node"]
    assert frame["ranks"].tolist() == [1, 1, 2, 2]


def profile() -> Profile:
    rows = np.array([1, 2], np.int32)
    return Profile.of(
        "p",
        ("d",),
        StringTable.from_strings(["", "dot", "gemm"]),
        op_id=rows,
        kernel_id=rows[::-1],
        stream=np.array([7, 8], np.int64),
        start_ns=np.array([0.0, 10.0]),
        duration_ns=np.array([5.0, 6.0]),
    )


def test_profile() -> None:
    frame = to_pandas(profile())
    assert frame.index.name == "event"
    assert frame["op"].tolist() == ["dot", "gemm"]
    assert frame["kernel"].tolist() == ["gemm", "dot"]
    assert frame["duration_ns"].tolist() == [5.0, 6.0]


def estimate() -> Estimate:
    return Estimate(
        hardware="H100-SXM",
        estimators=("roofline",),
        bounds=("compute", "memory"),
        duration_ns=np.array([3.0, np.nan]),
        low_ns=np.full(2, np.nan),
        high_ns=np.full(2, np.nan),
        estimator=np.array([0, -1], np.int8),
        bound=np.array([1, -1], np.int8),
    )


def test_estimate() -> None:
    frame = to_pandas(estimate())
    assert frame["estimator"].astype(object).fillna("nobody").tolist() == ["roofline", "nobody"]
    assert frame["bound"].astype(object).fillna("").tolist() == ["memory", ""]
    described = to_pandas(estimate(), graph())
    assert described["op"].tolist() == ["dot", "all_reduce"]
    np.testing.assert_array_equal(described["duration_ns"].to_numpy(), [3.0, np.nan])
    with pytest.raises(UsageError, match="2 nodes"):
        to_pandas(estimate(), GraphBuilder("other").build())


def timeline(last_node: int = 1) -> Timeline:
    return Timeline(
        resources=("compute", "communication"),
        node=np.array([0, last_node], np.int32),
        rank=np.array([0, 3], np.int32),
        resource=np.array([0, 1], np.int8),
        start_ns=np.array([0.0, 4.0]),
        end_ns=np.array([4.0, 9.0]),
        critical=np.array([True, False]),
        finish_ns=np.full(4, 9.0),
        exposed_comm_ns=np.zeros(4),
    )


def test_timeline() -> None:
    frame = to_pandas(timeline(), graph())
    assert frame.index.name == "span"
    assert frame["duration_ns"].tolist() == [4.0, 5.0]
    assert frame["resource"].tolist() == ["compute", "communication"]
    assert frame["op"].tolist() == ["dot", "all_reduce"]
    assert "op" not in to_pandas(timeline())
    with pytest.raises(UsageError, match="node 9"):
        to_pandas(timeline(9), graph())


def test_a_span_of_a_loop_has_no_node_to_describe() -> None:
    frame = to_pandas(timeline(-1), graph())
    assert frame["op"].tolist()[0] == "dot"
    assert frame["op"].isna().tolist() == [False, True]
    assert frame["trips"].tolist() == [1.0, 1.0]
