"""Many ranks: classes found and expanded, groups and peers per rank, permutes as matched messages."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hespas.converters.chakra import FORMAT
from hespas.converters.chakra.contract import AttributeFacts
from hespas.converters.chakra.wire import EtColumns
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    Permutation,
    StridedGroups,
    Workload,
    dtype,
)
from hespas.schemas.chakra.tables import NodeType


def _step(num_ranks: int, pairs: list[tuple[int, int]] | None = None) -> Workload:
    """Compute, an all-reduce over four neighbours, one over the rest, one over all, perhaps a permute."""
    builder = GraphBuilder("step")
    mesh = [num_ranks // 4, 4]
    inner = builder.group_set(StridedGroups.from_mesh(mesh, [1]))
    outer = builder.group_set(StridedGroups.from_mesh(mesh, [0]))
    world = builder.group_set(StridedGroups.all_ranks(num_ranks))
    tensor = builder.types.add(dtype("bf16"), [16, 128])
    dot = builder.add_node(
        name_id=builder.strings.add("dot"),
        op_id=builder.strings.add("stablehlo.dot_general"),
        op_class=OpClass.CONTRACTION,
        operands=[tensor, tensor],
        results=[tensor],
        flops=1000,
        transcendentals=7,
        bytes_read=300,
        bytes_written=100,
    )
    builder.set(dot, duration_ns=1234.0, rate_dtype=dtype("bf16").code)
    last = dot
    if pairs:
        last = builder.add_node(
            name_id=builder.strings.add("shift"),
            op_id=builder.strings.add("stablehlo.collective_permute"),
            op_class=OpClass.P2P,
            kind=NodeKind.PERMUTE,
            data_deps=[last],
        )
        way = builder.permutation(Permutation.from_pairs(pairs, num_ranks))
        builder.add_p2p(last, permutation=way, comm_bytes=64)
    for name, groups in (("inner", inner), ("outer", outer), ("world", world)):
        last = builder.add_node(
            name_id=builder.strings.add(name),
            op_id=builder.strings.add("stablehlo.all_reduce"),
            op_class=OpClass.COLLECTIVE,
            kind=NodeKind.COLLECTIVE,
            data_deps=[last],
        )
        builder.add_collective(last, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=4096)
    return Workload.spmd(builder.build(), num_ranks)


def _write(workload: Workload, path: Path, ranks: range | None = None, name: str = "job") -> Diagnostics:
    assert FORMAT.write is not None
    diagnostics = Diagnostics()
    FORMAT.write(workload, path, WriteOptions(name=name, ranks=ranks), diagnostics)
    return diagnostics


def _read(path: Path) -> Workload:
    assert FORMAT.read is not None
    value = FORMAT.read(path, ReadOptions(), Diagnostics())
    assert isinstance(value, Workload)
    return value


def _columns(path: Path) -> EtColumns:
    return read_columns(path, Diagnostics())


def _groups(columns: EtColumns) -> dict[str, str]:
    """Node name -> pg_name."""
    facts = AttributeFacts.of(columns.attrs)
    found = facts.texts("pg_name")
    return {
        columns.name.text(node): columns.attrs.payload.text(int(row))
        for node, row in zip(found.node.tolist(), found.value.tolist(), strict=True)
    }


@pytest.mark.parametrize("num_ranks", [8, 64, 1024])
def test_every_rank_has_its_own_groups(tmp_path: Path, num_ranks: int) -> None:
    _write(_step(num_ranks), tmp_path / "job")
    listed: dict[str, list[int]] = json.loads((tmp_path / "job" / "comm_group.json").read_text())
    assert min(map(int, listed)) == 1
    assert max(map(int, listed)) == len(listed) == num_ranks // 4 + 4
    for rank in range(0, num_ranks, max(1, num_ranks // 16)):
        columns = _columns(tmp_path / "job" / f"job.{rank}.et")
        groups = _groups(columns)
        assert set(groups) == {"inner", "outer"}  # all ranks have no pg_name
        assert listed[groups["inner"]] == [rank - rank % 4 + place for place in range(4)]
        assert listed[groups["outer"]] == list(range(rank % 4, num_ranks, 4))
    assert len(list((tmp_path / "job").iterdir())) == num_ranks + 1


def test_a_written_set_is_read_as_one_class(tmp_path: Path) -> None:
    workload = _step(64)
    _write(workload, tmp_path / "job")
    again = _read(tmp_path / "job")
    assert len(again.classes) == 1
    assert again.num_ranks == 64
    assert again.group_sets == workload.group_sets[:2]
    graph = again.classes[0]
    assert graph.op_name(0) == "stablehlo.dot_general"
    assert graph.node_name(0) == "dot"
    for column, value in (
        ("flops", 1000),
        ("transcendentals", 7),
        ("bytes_read", 300),
        ("bytes_written", 100),
        ("duration_ns", 1234),
        ("op_class", OpClass.CONTRACTION),
        ("rate_dtype", dtype("bf16").code),
    ):
        assert getattr(graph, column)[0] == value, column
    assert [graph.types.shape(row) for row in graph.operands.row(0).tolist()] == [(16, 128), (16, 128)]
    assert graph.collectives.comm_bytes.tolist() == [4096] * 3
    _write(again, tmp_path / "twice")
    for file in (tmp_path / "job").iterdir():
        assert (tmp_path / "twice" / file.name).read_bytes() == file.read_bytes()


def test_patched_files_equal_files_encoded_alone(tmp_path: Path) -> None:
    pairs = [(rank, (rank + 4) % 256) for rank in range(256)]
    workload = _step(256, pairs)
    _write(workload, tmp_path / "job")
    for rank in (0, 3, 9, 10, 127, 128, 255):
        _write(workload, tmp_path / f"{rank}.et", range(rank, rank + 1))
        alone, together = _columns(tmp_path / f"{rank}.et"), _columns(tmp_path / "job" / f"job.{rank}.et")
        np.testing.assert_array_equal(alone.attrs.bits, together.attrs.bits)
        assert list(alone.attrs.payload) == list(together.attrs.payload)
        assert list(alone.name) == list(together.name)


def test_one_rank_alone_says_its_rank_and_its_groups(tmp_path: Path) -> None:
    workload = _step(65_536)
    _write(workload, tmp_path / "one.et", range(40_001, 40_002), "one.et")
    again = _read(tmp_path / "one.et")
    assert again.metadata["rank"] == "40001"
    assert again.classes[0].group_sets[0].members(0).tolist() == [40_000, 40_001, 40_002, 40_003]
    _write(again, tmp_path / "two.et", name="two.et")
    assert (tmp_path / "one.et").read_bytes() == (tmp_path / "two.et").read_bytes()


def _messages(folder: Path, num_ranks: int) -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]:
    """(source, target, tag, size) of all sends and of all receives."""
    sent: Counter[tuple[int, ...]] = Counter()
    received: Counter[tuple[int, ...]] = Counter()
    for rank in range(num_ranks):
        columns = _columns(folder / f"job.{rank}.et")
        facts = AttributeFacts.of(columns.attrs)
        values = {
            name: dict(zip(found.node.tolist(), found.value.tolist(), strict=True))
            for name in ("comm_src", "comm_dst", "comm_tag", "comm_size")
            for found in [facts.integers(name)]
        }
        for node, kind in enumerate(columns.type.tolist()):
            if kind not in {NodeType.COMM_SEND, NodeType.COMM_RECV}:
                continue
            key = tuple(values[name][node] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
            is_send = kind == NodeType.COMM_SEND
            assert key[0 if is_send else 1] == rank
            (sent if is_send else received)[key] += 1
    return sent, received


@pytest.mark.parametrize(
    "pairs",
    [
        [(rank, (rank + 1) % 8) for rank in range(8)],
        [(rank, rank + 1) for rank in range(7)],
        [(0, 5), (5, 0), (2, 3)],
        [(0, 0), (1, 2), (2, 1)],
    ],
    ids=["ring", "open", "listed", "self"],
)
def test_a_permute_becomes_matched_messages(tmp_path: Path, pairs: list[tuple[int, int]]) -> None:
    _write(_step(8, pairs), tmp_path / "job")
    sent, received = _messages(tmp_path / "job", 8)
    assert (
        sent == received == Counter((source, target, 0, 64) for source, target in pairs if source != target)
    )
    for rank in range(8):
        columns = _columns(tmp_path / "job" / f"job.{rank}.et")
        assert set(columns.data_deps.tolist()) <= set(columns.id.tolist())
        names = [columns.name.text(node) for node in range(len(columns))]
        first, last = columns.data_offsets[names.index("inner") :][:2].tolist()
        waits = set(columns.data_deps[first:last].tolist())
        halves = {int(columns.id[place]) for place, name in enumerate(names) if name == "shift"}
        assert halves <= waits <= halves | {0}
        assert waits


def test_collectives_over_a_group_of_one_are_not_written(tmp_path: Path) -> None:
    _write(_step(4), tmp_path / "job")  # the outer groups have one rank each
    columns = _columns(tmp_path / "job" / "job.2.et")
    assert [columns.name.text(node) for node in range(len(columns))] == ["dot", "inner", "world"]
    assert not (tmp_path / "job" / "comm_group.json").exists()  # the inner group is all ranks


def test_pipeline_stages_are_classes(tmp_path: Path) -> None:
    pairs = [(rank, rank + 4) for rank in range(4)]
    workload = _step(8, pairs)
    _write(workload, tmp_path / "job")
    again = _read(tmp_path / "job")
    assert len(again.classes) == 2
    assert again.rank_class.tolist() == [0] * 4 + [1] * 4
    assert [NodeKind.SEND in graph.kind for graph in again.classes] == [True, False]
    assert [NodeKind.RECV in graph.kind for graph in again.classes] == [False, True]
    sender = again.classes[0]
    assert sender.permutations[0].target_of(2) == 6
    _write(again, tmp_path / "twice")
    for file in (tmp_path / "job").iterdir():
        assert (tmp_path / "twice" / file.name).read_bytes() == file.read_bytes()


def test_repeated_and_unknown_work_is_reported(tmp_path: Path) -> None:
    workload = _step(4)
    graph = workload.classes[0]
    diagnostics = _write(workload, tmp_path / "once")
    assert "chakra.unknown-duration" not in diagnostics.counts()
    assert np.isnan(graph.duration_ns[graph.kind == NodeKind.COLLECTIVE]).all()


def test_format_tells_its_files(tmp_path: Path) -> None:
    from hespas.converters import sniff

    _write(_step(8), tmp_path / "job")
    _write(_step(8), tmp_path / "zipped", name="job.gz")
    assert sniff(tmp_path / "job").name == "chakra"
    assert sniff(tmp_path / "job" / "job.3.et").name == "chakra"
    assert sniff(tmp_path / "zipped" / "job.3.et.gz").name == "chakra"
