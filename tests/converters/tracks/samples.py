"""Small profiles and runs to show on tracks, and hostile names."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    HostOps,
    NodeKind,
    OpClass,
    Permutation,
    Profile,
    StridedGroups,
    StringTable,
    Timeline,
    Workload,
)

__all__ = ["HOSTILE", "events", "measured", "profiles", "simulated", "spans"]

HOSTILE = (
    'quote " backslash \\ slash /', "a\nb\rc\td", "\x00\x01\x1f\x7f", "</script><b>&amp;", "é漢🚀", "a,b;c",
    "nan", "\u2028\u2029", "rank 7: x", "stream 9", " ", "{}", "'single'", "=1+1",
)  # fmt: skip


def measured() -> Profile:
    """Two streams of rank 3, and a host thread whose operations launch two of the three kernels."""
    strings = ["", "gemm", "aten::mm", "[[4, 8]]", "float", "kernel", "copy", "9:1", "aten::linear", "add"]
    host = HostOps(
        name_id=np.array([8, 2], np.int32),
        thread_id=np.array([7, 7], np.int32),
        parent=np.array([-1, 0], np.int32),
        start_ns=np.array([0.0, 100.0]),
        duration_ns=np.array([5_000.0, 1_000.0]),
        sequence=np.array([-1, -1], np.int64),
        shapes_id=np.array([0, 3], np.int32),
        dtype_id=np.array([0, 4], np.int32),
        strides_id=np.zeros(2, np.int32),
        values_id=np.zeros(2, np.int32),
    )
    return Profile.of(
        "sample",
        ("H100",),
        StringTable.from_strings(strings),
        start_ns=np.array([2_000.0, 9_000.0, 2_500.0]),
        duration_ns=np.array([3_125.0, 1.0, 10_000.0]),
        op_id=np.array([2, 9, 0], np.int32),
        kernel_id=np.array([1, 9, 6], np.int32),
        category_id=np.array([5, 5, 6], np.int32),
        shapes_id=np.array([3, 0, 0], np.int32),
        dtype_id=np.array([4, 0, 0], np.int32),
        op_class=np.array([OpClass.CONTRACTION, 0, OpClass.MEMORY], np.int8),
        rank=np.full(3, 3, np.int32),
        stream=np.array([7, 7, 20], np.int64),
        run=np.array([0, 1, -1], np.int32),
        bytes_moved=np.array([np.nan, np.nan, 4_096.0]),
        host_event=np.array([1, -1, 0], np.int32),
        host=host,
        metadata={"format": "kineto", "first_event_ns": "1700000000000000000"},
    )


def simulated() -> tuple[Timeline, Workload]:
    """Two ranks: a product, an all-reduce of both, and a message from rank 0 to rank 1."""
    builder = GraphBuilder("step")
    add, strings = builder.add_node, builder.strings.add
    first = add(name_id=strings("dot.1"), op_id=strings("dot"), op_class=OpClass.CONTRACTION, flops=8.0)
    groups = builder.group_set(StridedGroups.all_ranks(2))
    second = add(
        name_id=strings("all-reduce.2"), op_id=strings("all-reduce"), op_class=OpClass.COLLECTIVE,
        kind=NodeKind.COLLECTIVE, data_deps=[first],
    )  # fmt: skip
    builder.add_collective(second, kind=CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=64.0)
    third = add(
        name_id=strings("permute.3"), op_id=strings("permute"), op_class=OpClass.P2P,
        kind=NodeKind.PERMUTE, control_deps=[second],
    )  # fmt: skip
    permutation = builder.permutation(Permutation.from_pairs([(0, 1)], 2))
    builder.add_p2p(third, permutation=permutation, comm_bytes=8.0)
    workload = Workload.spmd(builder.build(), 2)
    timeline = Timeline(
        resources=("compute", "communication"),
        node=np.array([0, 1, 2, 0, 1, 2], np.int32),
        rank=np.array([0, 0, 0, 1, 1, 1], np.int32),
        resource=np.array([0, 1, 1, 0, 1, 1], np.int8),
        start_ns=np.array([0.0, 10.0, 20.0, 0.0, 12.0, 22.0]),
        end_ns=np.array([10.0, 20.0, 25.0, 12.0, 22.0, 27.0]),
        critical=np.array([1, 1, 0, 1, 1, 1], np.bool_),
        finish_ns=np.array([25.0, 27.0]),
        exposed_comm_ns=np.array([15.0, 15.0]),
    )
    return timeline, workload


def spans(node: list[int], rank: list[int], start_ns: list[float]) -> Timeline:
    """Spans of 5 ns on one resource."""
    starts = np.array(start_ns, np.float64)
    ranks = max(rank) + 1
    return Timeline(
        resources=("compute",),
        node=np.array(node, np.int32),
        rank=np.array(rank, np.int32),
        resource=np.zeros(len(node), np.int8),
        start_ns=starts,
        end_ns=starts + 5.0,
        critical=np.zeros(len(node), np.bool_),
        finish_ns=np.zeros(ranks),
        exposed_comm_ns=np.zeros(ranks),
    )


def events(profile: Profile) -> list[tuple[object, ...]]:
    """All that is told of each event, sorted: what a round trip keeps."""
    text = list(profile.strings)
    sizes: list[float] = profile.bytes_moved.tolist()
    texts = (
        profile.op_id, profile.kernel_id, profile.module_id, profile.category_id, profile.shapes_id,
        profile.dtype_id,
    )  # fmt: skip
    columns: list[list[object]] = [
        profile.start_ns.tolist(),
        profile.duration_ns.tolist(),
        profile.rank.tolist(),
        profile.stream.tolist(),
        [profile.devices[index] for index in profile.device_index.tolist()],
        profile.op_class.tolist(),
        profile.run.tolist(),
        [None if math.isnan(size) else size for size in sizes],
        *([text[row] for row in rows.tolist()] for rows in texts),
    ]
    return sorted(zip(*columns, strict=True), key=repr)


_NAMES = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Profiles with any times: whole ns or ps, epoch-sized, negative, overlapping."""
    names = draw(st.lists(_NAMES, min_size=1, max_size=5, unique=True))
    count = draw(st.integers(1, 12))
    row = st.integers(0, len(names))
    rows = st.lists(row, min_size=count, max_size=count).map(lambda values: np.array(values, np.int32))
    numbers = st.one_of(
        st.integers(-1_000, 1 << 42).map(float),
        st.integers(0, 1 << 44).map(lambda ps: ps / 1000),
        st.integers(0, 50).map(float),
    )
    times = st.lists(numbers, min_size=count, max_size=count).map(lambda values: np.array(values, np.float64))
    streams = st.lists(st.integers(-1, 3), min_size=count, max_size=count)
    return Profile.of(
        "drawn",
        ("one", "other: device"),
        StringTable.from_strings(["", *names]),
        start_ns=draw(times),
        duration_ns=np.abs(draw(times)),
        op_id=draw(rows),
        kernel_id=draw(rows),
        category_id=draw(rows),
        shapes_id=draw(rows),
        dtype_id=draw(rows),
        module_id=draw(rows),
        stream=np.array(draw(streams), np.int64),
        rank=np.array(draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count)), np.int32),
        device_index=np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int32),
        run=np.array(draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count)), np.int32),
    )
