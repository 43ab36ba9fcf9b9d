"""Arrow op graphs: nothing is lost or copied, and no file crashes the reader."""

from __future__ import annotations

import gc
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.op_graph.arrow import check_columns, read_arrow, write_arrow
from hespas.converters.op_graph.arrow_layout import (
    COLUMNS,
    ArrowColumns,
    ArrowSource,
    BinaryColumn,
    RaggedColumn,
    save_arrow,
)
from hespas.graph import Diagnostics, GraphBuilder, OpClass, OpGraph, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError, OutputError, UnsupportedError, UsageError

HEADER = {
    "schema": "hespas.op-graph-arrow/1",
    "workload": '{"name":"x","metadata":{},"rank_class":[[0,16]]}',
}
MakeGraph = Callable[[int, int], OpGraph]
MakeWorkload = Callable[[int, int], Workload]


def read(path: Path, lenient: bool = False) -> Workload:
    return read_arrow(path, ReadOptions(lenient=lenient), Diagnostics())


def write(workload: Workload, path: Path) -> Path:
    write_arrow(workload, path, WriteOptions(), Diagnostics())
    return path


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), nodes=st.integers(0, 40))
def test_round_trip_keeps_every_column(
    seed: int, nodes: int, make_workload: MakeWorkload, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workload = make_workload(seed, nodes)
    again = read(write(workload, tmp_path_factory.mktemp("arrow") / "graph.opgraph"))
    assert workloads_equal(workload, again) == []
    for one, two in zip(workload.classes, again.classes, strict=True):
        assert one.group_sets == two.group_sets
        assert one.permutations == two.permutations
        assert list(one.strings) == list(two.strings), "rows keep their numbers"
        assert np.array_equal(one.name_id, two.name_id)
        assert list(one.attachments.items()) == list(two.attachments.items())


def test_columns_are_the_bytes_of_the_file(make_graph: MakeGraph, tmp_path: Path) -> None:
    path = write(Workload.spmd(make_graph(3, 5000), 16), tmp_path / "graph.opgraph")
    graph = read(path).classes[0]
    gc.collect()
    for column in (graph.kind, graph.op_id, graph.data_deps.values, graph.data_deps.offsets):
        assert not column.flags.owndata
        assert not column.flags.writeable
    assert isinstance(graph.strings.buffer, memoryview)
    path.unlink()
    assert graph.strings.find("été") == 2, "the columns keep the bytes alive"


def test_constant_columns_take_no_room(tmp_path: Path) -> None:
    builder = GraphBuilder("chain")
    name = builder.strings.add("op")
    for node in range(20_000):
        deps = [node - 1] if node else []
        builder.add_node(name_id=name, op_id=name, op_class=OpClass.FREE, data_deps=deps)
    path = write(Workload.spmd(builder.build(), 65_536), tmp_path / "graph.opgraph")
    graph = read(path).classes[0]
    assert graph.stream.strides == (0,)
    assert len(graph.control_deps) == 20_000
    assert path.stat().st_size < 80 * 20_000


def test_plain_pyarrow_reads_the_file(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(3, 50)
    path = write(Workload.spmd(graph, 4), tmp_path / "graph.opgraph")
    reader = ipc.open_file(pyarrow.py_buffer(path.read_bytes()))
    assert reader.schema.names == [spec.name for spec in COLUMNS]
    kinds = reader.get_batch(0).to_pydict()["kind"]
    assert len(kinds[0]) == 50


def test_gzip_is_read(make_graph: MakeGraph, tmp_path: Path) -> None:
    workload = Workload.spmd(make_graph(1, 5), 16)
    plain, packed = write(workload, tmp_path / "graph.opgraph"), tmp_path / "graph.opgraph.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert workloads_equal(workload, read(packed)) == []


# --- hostile files


@pytest.fixture
def sample(make_workload: MakeWorkload, tmp_path: Path) -> bytes:
    return write(make_workload(7, 9), tmp_path / "sample.opgraph").read_bytes()


def test_every_truncation_is_refused(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.opgraph"
    for length in np.random.default_rng(0).integers(0, len(sample), 80).tolist():
        path.unlink(missing_ok=True)
        path.write_bytes(sample[:length])
        with pytest.raises(FormatError):
            read(path)


@settings(max_examples=60)
@given(data=st.data())
def test_flipped_bytes_never_crash(
    data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any outcome but a crash or a foreign exception: damage in a cost is not noticed."""
    damaged = bytearray(sample)
    start = data.draw(st.sampled_from([0, len(sample) // 2, len(sample) - 2000]))
    for place in data.draw(st.lists(st.integers(start, len(sample) - 1), min_size=1, max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "graph.opgraph"
    path.write_bytes(damaged)
    try:
        workload = read(path)
    except (FormatError, UnsupportedError):
        return
    assert workloads_equal(workload, workload) == [], "what is accepted can be walked"


def columns_of(graph: OpGraph, folder: Path) -> ArrowColumns:
    path = write(Workload.spmd(graph, 16), folder / "sound.opgraph")
    (columns,) = ArrowSource(path, 1 << 30).classes()
    return columns


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("kind", 200, "kind 200 is outside"),
        ("op_class", 99, "op_class 99"),
        ("name_row", 10_000, "name_row 10000"),
        ("source_row", -1, "source_row -1"),
        ("region", 1000, "region 1000"),
        ("rate_dtype", -2, "rate_dtype -2"),
        ("collectives.group_set", 99, "collectives.group_set 99"),
        ("collectives.node", 99, "collectives.node 99"),
        ("p2p.permutation", -2, "p2p.permutation -2"),
        ("contractions.lhs", 999, "contractions.lhs 999"),
        ("extra.key", 999, "extra.key 999"),
        ("carried.producer", 50, "carried.producer 50"),
        ("types.encoding", 99, "types.encoding 99"),
        ("types.bounded", 2, "types.bounded 2"),
    ],
)
def test_reference_out_of_range_is_named(
    column: str, value: int, message: str, make_graph: MakeGraph, tmp_path: Path
) -> None:
    columns = columns_of(make_graph(1, 40), tmp_path)
    check_columns(columns, "f")
    damaged = columns.flat[column].copy()
    damaged[-1:] = np.array([value], damaged.dtype)
    columns.flat[column] = damaged
    with pytest.raises(FormatError, match=message) as caught:
        check_columns(columns, "f")
    assert caught.value.position


def test_dangling_dep_names_the_node(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(1, 40)
    columns = columns_of(graph, tmp_path)
    values = columns.ragged["data_deps"].values.copy()
    values[-1:] = np.array([40], np.int32)
    columns.ragged["data_deps"] = RaggedColumn(columns.ragged["data_deps"].offsets, values)
    owner = graph.id[int(np.flatnonzero(graph.data_deps.lengths)[-1])]
    with pytest.raises(FormatError) as caught:
        check_columns(columns, "f")
    assert caught.value.position == f"node {owner}"


def damage_length(columns: ArrowColumns) -> None:
    columns.counts["nodes"] = 41


def damage_column(columns: ArrowColumns) -> None:
    columns.flat["flops"] = np.zeros(7)


def damage_table(columns: ArrowColumns) -> None:
    columns.flat["p2p.tag"] = np.zeros(1, np.int64)


def damage_order(columns: ArrowColumns) -> None:
    columns.flat["extra.node"] = columns.flat["extra.node"][::-1]


def damage_empty_text(columns: ArrowColumns) -> None:
    columns.binary["strings"] = BinaryColumn.from_items([b"x"] * 12)


def damage_utf8(columns: ArrowColumns) -> None:
    columns.binary["strings"] = BinaryColumn.from_items([b"", b"a\xff", *[b""] * 10])


def damage_text_boundary(columns: ArrowColumns) -> None:
    offsets = np.array([0, 0, 1, *[2] * 10], np.int64)
    columns.binary["strings"] = BinaryColumn(offsets, "é".encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_length, "41 nodes have 40 ids"),
        (damage_column, "flops has 7 rows"),
        (damage_table, "p2p.tag has 1 rows, p2p.node has"),
        (damage_order, "extra.node is not sorted"),
        (damage_empty_text, "row 0 of strings"),
        (damage_utf8, "UTF-8"),
        (damage_text_boundary, "UTF-8"),
    ],
)
def test_inconsistent_tables_are_refused(
    damage: Callable[[ArrowColumns], None], message: str, make_graph: MakeGraph, tmp_path: Path
) -> None:
    columns = columns_of(make_graph(1, 40), tmp_path)
    damage(columns)
    with pytest.raises(FormatError, match=message):
        check_columns(columns, "f")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("flops", -5.0),
        ("bytes_read", np.inf),
        ("duration_ns", -np.inf),
        ("multiplicity", -1.0),
        ("collectives.comm_bytes", -1.0),
        ("p2p.comm_bytes", np.inf),
        ("contractions.m", -2),
        ("contractions.flops", -1.0),
        ("regions.trips", np.inf),
        ("types.bytes", -1.0),
    ],
)
def test_illegal_values_are_refused(column: str, value: float, make_graph: MakeGraph, tmp_path: Path) -> None:
    columns = columns_of(make_graph(1, 40), tmp_path)
    rows = len(columns.flat[column])
    assert rows
    columns.flat[column] = np.full(rows, value, columns.flat[column].dtype)
    path = tmp_path / "damaged.opgraph"
    save_arrow(path, HEADER, [columns])
    with pytest.raises(FormatError) as caught:
        read(path)
    assert (caught.value.position or "").startswith(("node ", "field "))
    assert caught.value.hint
    assert read_arrow(path, ReadOptions(lenient=True), Diagnostics()).num_ranks == 16


def test_a_tensor_no_json_can_state_is_refused(make_graph: MakeGraph, tmp_path: Path) -> None:
    columns = columns_of(make_graph(1, 40), tmp_path)
    offsets, extents = columns.ragged["types.dims"].offsets, columns.ragged["types.dims"].values
    columns.ragged["types.dims"] = RaggedColumn(offsets, np.full(len(extents), 2**32, extents.dtype))
    path = tmp_path / "damaged.opgraph"
    save_arrow(path, HEADER, [columns])
    with pytest.raises(FormatError, match=r"more than 2\*\*63 elements") as caught:
        read(path)
    row = int(np.flatnonzero(np.diff(offsets) > 1)[0])
    assert caught.value.position == f"field types[{row}]"


def test_groups_outside_the_job_are_refused(make_graph: MakeGraph, tmp_path: Path) -> None:
    path = write(Workload.spmd(make_graph(1, 40), 4), tmp_path / "small.opgraph")
    with pytest.raises(FormatError, match="not all within"):
        read(path)


def test_cycle_and_duplicate_id(tmp_path: Path) -> None:
    builder = GraphBuilder("loop")
    row = builder.strings.add("op")
    for deps in ([1], [0]):
        builder.add_node(name_id=row, op_id=row, op_class=OpClass.FREE, data_deps=deps)
    builder.set_id(0, 5)
    path = write(Workload.spmd(builder.build(), 1), tmp_path / "cycle.opgraph")
    with pytest.raises(FormatError, match="cycle: 5 -> 1 -> 5"):
        read(path)
    builder.set_id(1, 5)
    path = write(Workload.spmd(builder.build(), 1), tmp_path / "twice.opgraph")
    with pytest.raises(FormatError, match="occurs 2 times"):
        read(path)
    diagnostics = Diagnostics()
    read_arrow(path, ReadOptions(lenient=True), diagnostics)
    assert diagnostics.counts() == {}


def test_compressed_file_is_unsupported(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Compressed buffers could unpack to anything; they are refused before that."""
    import pyarrow as pa

    path = write(Workload.spmd(make_graph(1, 500), 16), tmp_path / "plain.opgraph")
    table = pa.ipc.open_file(str(path)).read_all()
    packed = tmp_path / "packed.opgraph"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(packed), table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(UnsupportedError, match="compressed"):
        read(packed)


def test_foreign_arrow_file_is_told(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.table({"a": [1, 2]})
    path = tmp_path / "other.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(FormatError, match="not an op graph"):
        read(path)


@pytest.mark.parametrize(
    ("schema", "error"),
    [("hespas.op-graph-arrow/2", UnsupportedError), ("other", FormatError)],
)
def test_version_is_checked(
    schema: str, error: type[Exception], make_graph: MakeGraph, tmp_path: Path
) -> None:
    columns = columns_of(make_graph(1, 3), tmp_path)
    path = tmp_path / "other.opgraph"
    save_arrow(path, {"schema": schema, "workload": "{}"}, [columns])
    with pytest.raises(error):
        read(path)


@pytest.mark.parametrize(
    "workload",
    [
        "{}",
        "[" * 100_000,
        '{"name":"x","metadata":{},"rank_class":[[0,2000000000]]}',
        '{"name":"x","metadata":{},"rank_class":[[3,2]]}',
    ],
)
def test_header_is_checked(workload: str, make_graph: MakeGraph, tmp_path: Path) -> None:
    columns = columns_of(make_graph(1, 3), tmp_path)
    path = tmp_path / "other.opgraph"
    save_arrow(path, {"schema": "hespas.op-graph-arrow/1", "workload": workload}, [columns])
    with pytest.raises(FormatError):
        read(path)


def test_writer_refuses_what_it_cannot_hold(make_graph: MakeGraph, tmp_path: Path) -> None:
    workload = Workload.spmd(make_graph(1, 2), 8)
    with pytest.raises(UsageError, match="all ranks"):
        write_arrow(workload, tmp_path / "x.opgraph", WriteOptions(ranks=range(2)), Diagnostics())
    with pytest.raises(OutputError):
        write_arrow(workload, tmp_path / "missing" / "x.opgraph", WriteOptions(), Diagnostics())


def test_a_file_that_is_cut_later_leaves_what_was_read(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Columns over a mapped file would end the process at the first touch of what is gone."""
    path = write(Workload.spmd(make_graph(3, 50_000), 16), tmp_path / "graph.opgraph")
    value = read(path)
    expected = make_graph(3, 50_000)
    os.truncate(path, 100)
    assert np.array_equal(value.classes[0].flops, expected.flops, equal_nan=True)
