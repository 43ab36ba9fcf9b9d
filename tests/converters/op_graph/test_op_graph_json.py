"""JSON op graphs: nothing is lost, minimal documents suffice, errors give the position."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.op_graph.json_reader import read_json
from hespas.converters.op_graph.json_writer import write_json
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    NodeKind,
    OpClass,
    OpGraph,
    StridedGroups,
    Workload,
)
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError, OutputError, UnsupportedError, UsageError

MakeGraph = Callable[[int, int], OpGraph]
MakeWorkload = Callable[[int, int], Workload]


def rewritten(workload: Workload, folder: Path) -> Workload:
    path = folder / "graph.json"
    write_json(workload, path, WriteOptions(), Diagnostics())
    return read_json(path, ReadOptions(), Diagnostics())


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), nodes=st.integers(0, 40))
def test_round_trip_keeps_every_column(
    seed: int, nodes: int, make_workload: MakeWorkload, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workload = make_workload(seed, nodes)
    again = rewritten(workload, tmp_path_factory.mktemp("json"))
    assert workloads_equal(workload, again) == []
    for one, two in zip(workload.classes, again.classes, strict=True):
        assert one.group_sets == two.group_sets
        assert one.permutations == two.permutations
        assert list(one.attachments.items()) == list(two.attachments.items())
        assert np.array_equal(np.signbit(one.flops), np.signbit(two.flops))


def test_round_trip_over_several_chunks(make_graph: MakeGraph, tmp_path: Path) -> None:
    workload = Workload.spmd(make_graph(3, 9000), 65_536)
    done: list[tuple[int, int]] = []
    path = tmp_path / "graph.json"
    progress = WriteOptions(progress=lambda at, total: done.append((at, total)))
    write_json(workload, path, progress, Diagnostics())
    again = read_json(path, ReadOptions(), Diagnostics())
    assert workloads_equal(workload, again) == []
    assert again.num_ranks == 65_536
    assert done[-1] == (9000, 9000)
    assert all(before < after for before, after in pairwise(done))


def test_one_node_a_line(make_graph: MakeGraph, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    write_json(Workload.spmd(make_graph(1, 5), 16), path, WriteOptions(), Diagnostics())
    lines = path.read_text().splitlines()
    nodes = [json.loads(line.rstrip(",")) for line in lines if line.startswith('        {"id"')]
    assert len(nodes) == 5


def test_gzip_is_read(make_graph: MakeGraph, tmp_path: Path) -> None:
    workload = Workload.spmd(make_graph(1, 5), 16)
    plain, packed = tmp_path / "graph.json", tmp_path / "graph.json.gz"
    write_json(workload, plain, WriteOptions(), Diagnostics())
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert workloads_equal(workload, read_json(packed, ReadOptions(), Diagnostics())) == []


def test_repeated_ids_are_kept_by_position(make_graph: MakeGraph, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text('{"nodes":[{"op":"a","deps":[],"id":7},{"op":"b","deps":[7],"id":7}]}')
    workload = read_json(path, ReadOptions(lenient=True), Diagnostics())
    out = tmp_path / "again.json"
    write_json(workload, out, WriteOptions(), Diagnostics())
    diagnostics = Diagnostics()
    again = read_json(out, ReadOptions(lenient=True), diagnostics)
    assert workloads_equal(workload, again) == []
    assert diagnostics.counts() == {}


# --- hand-written documents


def parse(text: str, folder: Path, **options: bool) -> OpGraph:
    return parse_workload(text, folder, **options).classes[0]


def parse_workload(
    text: str, folder: Path, lenient: bool = False, num_devices: int | None = None
) -> Workload:
    path = folder / "hand.json"
    path.write_text(text)
    return read_json(path, ReadOptions(lenient=lenient, num_devices=num_devices), Diagnostics())


def test_smallest_document(tmp_path: Path) -> None:
    workload = parse_workload('{"nodes":[{"op":"matmul","deps":[]},{"op":"add","deps":[0]}]}', tmp_path)
    graph = workload.classes[0]
    assert workload.num_ranks == 1
    assert graph.id.tolist() == [0, 1]
    assert graph.op_name(1) == "add"
    assert graph.data_deps.to_lists() == [[], [0]]
    assert graph.kind.tolist() == [NodeKind.COMPUTE] * 2
    assert np.isnan(graph.flops).all()
    assert np.isnan(graph.duration_ns).all()
    assert graph.executions.tolist() == [1.0, 1.0]


def test_number_of_ranks_may_come_from_the_caller(tmp_path: Path) -> None:
    assert parse_workload('{"nodes":[{"op":"a","deps":[]}]}', tmp_path, num_devices=8).num_ranks == 8
    assert parse_workload('{"num_ranks":4,"nodes":[]}', tmp_path, num_devices=8).num_ranks == 4


def test_types_are_inferred_from_spellings(tmp_path: Path) -> None:
    graph = parse(
        '{"nodes":[{"op":"dot","deps":[],"operands":["bf16[4,128]","bfloat16[4, 128]","f32"],'
        '"results":["i4[?,3]","?[2]"]}]}',
        tmp_path,
    )
    first, same, scalar = graph.operands.row(0).tolist()
    assert first == same
    assert graph.types.bytes[first] == 4 * 128 * 2
    assert graph.types.shape(scalar) == ()
    dynamic, unknown = graph.results.row(0).tolist()
    assert graph.types.shape(dynamic) == (-1, 3)
    assert np.isnan(graph.types.bytes[[dynamic, unknown]]).all()


def test_kind_and_class_follow_the_fields(tmp_path: Path) -> None:
    graph = parse(
        '{"num_ranks":8,"nodes":['
        '{"op":"ar","deps":[],"collective":{"kind":"all_reduce","groups":[[0,1,2,3],[4,5,6,7]],"comm_bytes":64}},'
        '{"op":"cp","deps":[],"p2p":{"pairs":[[0,1],[1,2],[2,3],[3,4],[4,5],[5,6],[6,7],[7,0]]}},'
        '{"op":"dot","deps":[],"contractions":[{"m":2,"n":3,"k":4,"flops":48}],"flops":48},'
        '{"op":"send","kind":"send","deps":[],"p2p":{"pairs":[[0,5]]}}]}',
        tmp_path,
    )
    assert graph.kind.tolist() == [NodeKind.COLLECTIVE, NodeKind.PERMUTE, NodeKind.COMPUTE, NodeKind.SEND]
    assert graph.op_class.tolist() == [OpClass.COLLECTIVE, OpClass.P2P, OpClass.CONTRACTION, OpClass.P2P]
    assert graph.group_sets == (StridedGroups(((2, 4),), ((4, 1),)),), "inline rows are made symbolic"
    assert graph.permutations[0].pairs is None, "inline pairs are made symbolic"
    assert graph.permutations[1].pairs == ((0, 5),)
    assert graph.collectives.kind.tolist() == [CollectiveKind.ALL_REDUCE]
    assert graph.contractions.batch.tolist() == [1]
    assert graph.contractions.useful_flops.tolist() == [48.0]
    assert graph.useful_flops[2] == 48.0


def test_iota_that_cuts_through_a_dimension_is_listed(tmp_path: Path) -> None:
    document = (
        '{"num_ranks":12,"nodes":[{"op":"a","deps":[],'
        '"collective":{"kind":"reduce","groups":"[4,3]<=[2,2,3]T(0,2,1)"}}]}'
    )
    rows = np.arange(12).reshape(2, 2, 3).transpose(0, 2, 1).reshape(4, 3)
    assert parse(document, tmp_path).group_sets == (ExplicitGroups.from_rows(rows.tolist()),)


def test_ids_beyond_2_to_53_are_exact(tmp_path: Path) -> None:
    graph = parse(
        '{"nodes":[{"op":"a","deps":[],"id":18446744073709551615},'
        '{"op":"b","deps":[18446744073709551615],"id":9007199254740993}]}',
        tmp_path,
    )
    assert graph.id.tolist() == [2**64 - 1, 2**53 + 1]
    assert graph.data_deps.to_lists() == [[], [0]]


def test_multiplicity_follows_regions_and_may_be_stated(tmp_path: Path) -> None:
    graph = parse(
        '{"regions":[{"kind":"loop_body","trips":12},{"kind":"branch","parent":0,"trips":null}],'
        '"nodes":[{"op":"a","deps":[],"region":0},{"op":"b","deps":[],"region":1},'
        '{"op":"c","deps":[],"region":0,"multiplicity":5},{"op":"d","deps":[]}]}',
        tmp_path,
    )
    np.testing.assert_array_equal(graph.executions, [12.0, np.nan, 5.0, 1.0])


# --- faults


@pytest.mark.parametrize(
    ("document", "position", "message"),
    [
        (
            '{"nodes":[{"op":"a","deps":[],\n"flop":3}]}',
            "line 1, byte 10, $.nodes[0]",
            "unknown field `flop`",
        ),
        ('{"nodes":[\n{"op":"a","deps":["b"]}]}', "line 2, byte 29, $.nodes[0].deps[0]", "Expected `int`"),
        ('{"nodes":[{"op":"a"}]}', "line 1, byte 10, $.nodes[0]", "missing required field `deps`"),
        ('{"nodes":[\n\n{"op" "a"}]}', "line 3, byte 18", "expected ':'"),
        ('{"nodes":[{"op":"a","deps":[]}]', "line 1, byte 31", "ends early"),
        ('{"nodes":[{"op":"a","deps":[],"region":0}]}', "line 1, byte 10, node 0", "region 0"),
        (
            '{"nodes":[{"id":9,"op":"a","deps":[],"class":"x"}]}',
            "line 1, byte 10, node 9",
            "'x' is not one of",
        ),
        (
            '{"nodes":[{"op":"a","deps":[],"results":["q8[2]"]}]}',
            "line 1, byte 10, node 0",
            "element type 'q8'",
        ),
        (
            '{"nodes":[{"op":"a","deps":[],"results":["f32[2"]}]}',
            "line 1, byte 10, node 0",
            "not a tensor type",
        ),
        ('{"nodes":[{"op":"a","deps":[7]}]}', "node 0", "depends on node 7"),
        (
            '{"nodes":[{"id":4,"op":"a","deps":[3]},{"id":3,"op":"b","deps":[4]}]}',
            "node 4",
            "cycle: 4 -> 3 -> 4",
        ),
        ('{"nodes":[{"id":4,"op":"a","deps":[]},{"id":4,"op":"b","deps":[]}]}', "node 4", "occurs 2 times"),
        ('{"nodes":[{"op":"a","deps":[18446744073709551616]}]}', "line 1, byte 10, node 0", "2**64"),
        (
            '{"group_sets":["[2,2]<=[5]"],"nodes":[]}',
            "$",
            "has 2 groups of 2, but its dimensions multiply to 5",
        ),
        ('{"group_sets":["[1,9999999999]<=[9999999999]"],"nodes":[]}', "$", "past 16,777,216"),
        ('{"group_sets":["[2,2097153]<=[3,1398102]T(1,0)"],"nodes":[]}', "$", "more than the limit of"),
        (
            '{"permutations":[{"ranks":4,"pairs":[[0,1],[0,2]]}],"nodes":[]}',
            "$",
            "rank 0 is the source of two pairs",
        ),
        (
            '{"permutations":[{"ranks":4,"digit":[3,1]}],"nodes":[]}',
            "$",
            "4 ranks are not a multiple of 3 x 1",
        ),
        ('{"regions":[{"kind":"call","parent":0}],"nodes":[]}', "$", "regions[0].parent"),
        ('{"nodes":[],"rank_class":[[0,2],[1,2]]}', "header", "class 1"),
        ('{"nodes":[],"rank_class":[[0,2]],"num_ranks":3}', "header", "covers 2 ranks"),
        ('{"nodes":[],"num_ranks":2000000000}', "header", "2000000000 ranks"),
        ('{"rank_classes":[{"nodes":[]},{"nodes":[]}]}', "header", "to the 2 classes"),
        (
            '{"rank_classes":[{"nodes":[]}],"types":["f32"]}',
            "line 1, byte 39, $.types",
            "belongs to a class",
        ),
        (
            '{"rank_classes":[{"nodes":[],"types":[3]}]}',
            "line 1, byte 38, $.rank_classes[0].types[0]",
            "`int`",
        ),
        ('{"rank_classes":[]}', None, "empty"),
        ('{"name":"x"}', None, "either 'nodes'"),
        ("[1,2]", "line 1, byte 0", "Expected `object`"),
        ('{"carried":[[0,1,2]],"nodes":[]}', "$", "carried names region 0"),
        (
            '{"regions":[{"kind":"call"}],"carried":[[0,5,0]],"nodes":[{"op":"a","deps":[]}]}',
            "$.carried",
            "depends on node 5",
        ),
        (
            '{"nodes":[{"op":"a","deps":[],"kind":"compute","collective":{"kind":"all_reduce"}}]}',
            "node 0",
            "a collective is described for a node of kind compute",
        ),
        ('{"nodes":[{"op":"a","deps":[],"stream":-2}]}', "node 0", "stream is -2"),
        (
            '{"nodes":[{"op":"a","deps":[],"collective":{"kind":"all_reduce","channel":-7}}]}',
            "node 0",
            "channel is -7",
        ),
        (
            (
                '{"regions":[{"kind":"loop_body","label":"loop"}],"carried":[[0,0,1]],'
                '"nodes":[{"op":"a","deps":[],"region":0},{"op":"b","deps":[]}]}'
            ),
            "node 1",
            "loop loop carries a value from node 0 to node 1, but does not contain both",
        ),
        (
            '{"rank_class":[[-1,4]],"nodes":[{"op":"a","deps":[]}]}',
            "header",
            "the file has no rank of the job",
        ),
        (
            '{"nodes":[{"op":"a","deps":[],"collective":{"kind":"all_reduce","group_set":0}}]}',
            "line 1, byte 10, node 0",
            "group_set 0 does not exist",
        ),
        (
            '{"types":["i4[2]",{"type":"i4[2]"}],"nodes":[{"op":"a","deps":[],"operands":["i4[2]"]}]}',
            "line 1, byte 45, node 0",
            "name one with #row",
        ),
    ],
)
def test_fault_is_named_with_its_place(
    document: str, position: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError) as caught:
        parse(document, tmp_path)
    assert message in caught.value.message
    assert (caught.value.position or "").startswith(position or "")
    assert caught.value.path == str(tmp_path / "hand.json")
    assert "\n" not in caught.value.message


def _node(fields: str) -> str:
    return f'{{"num_ranks":2,"nodes":[{{"op":"a","deps":[],{fields}}}]}}'


@pytest.mark.parametrize(
    ("document", "position"),
    [
        (_node('"flops":-5'), "node 0"),
        (_node('"duration_ns":"inf"'), "node 0"),
        (_node('"duration_ns":1e61'), "node 0"),
        (_node('"bytes_read":"-inf"'), "node 0"),
        (_node('"multiplicity":-1'), "node 0"),
        (_node('"transcendentals":-0.5'), "node 0"),
        (_node('"collective":{"kind":"all_reduce","comm_bytes":-1}'), "node 0"),
        (_node('"contractions":[{"m":-2,"n":1,"k":1}]'), "node 0"),
        (_node('"collective":{"kind":"all_reduce","groups":[[0,0]]}'), "node 0"),
        (_node('"collective":{"kind":"all_reduce","groups":[[0,1],[1]]}'), "node 0"),
        (_node('"collective":{"kind":"all_reduce","groups":"[1,3]<=[3]"}'), "node 0"),
        ('{"regions":[{"kind":"loop_body","trips":"inf"}],"nodes":[]}', "$.regions[0]"),
        ('{"types":[{"type":"f32","bytes":-4}],"nodes":[]}', "$.types[0]"),
        ('{"num_ranks":2,"group_sets":[[[2]]],"nodes":[]}', "$.group_sets[0]"),
        ('{"num_ranks":2,"permutations":[{"ranks":4,"digit":[4,1]}],"nodes":[]}', "$.permutations[0]"),
    ],
)
def test_illegal_values_are_refused_and_kept_for_the_rules(
    document: str, position: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError) as caught:
        parse(document, tmp_path)
    assert caught.value.position == position
    assert caught.value.hint
    path = tmp_path / "hand.json"
    assert read_json(path, ReadOptions(lenient=True), Diagnostics()).classes


def test_unknown_and_empty_extents_are_legal(tmp_path: Path) -> None:
    document = _node('"flops":null,"contractions":[{"m":-1,"n":0,"k":1}]')
    assert parse(document, tmp_path).contractions.m.tolist() == [-1]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert len(parse("\ufeff" + _node('"name":"b"'), tmp_path)) == 1
    with pytest.raises(FormatError) as caught:
        parse("\ufeff[1]", tmp_path)
    assert (caught.value.position or "").startswith("line 1, byte")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"nodes":' + b"[" * 100_000])
def test_deep_nesting_has_a_position(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_json(path, ReadOptions(), Diagnostics())
    assert "$" in (caught.value.position or "")


def test_text_that_is_not_utf8_is_found(tmp_path: Path) -> None:
    content = _node('"name":"NAME"').encode().replace(b"NAME", b"ab\xff")
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_json(tmp_path / "bad.json", ReadOptions(), Diagnostics())
    assert caught.value.position == f"line 1, byte {content.index(0xFF)}"


def test_long_texts_are_shown_in_part(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        parse(_node(f'"operands":["{"x" * 100_000}"]'), tmp_path)
    assert len(caught.value.message) < 300


def test_types_of_very_many_extents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="more than 4,096 extents"):
        parse(_node(f'"operands":["f32[{"1," * 99_999}1]"]'), tmp_path)


def test_lenient_reader_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "hand.json"
    path.write_text(
        '{"nodes":[{"id":1,"op":"a","deps":[2,9]},{"id":2,"op":"b","deps":[1]},{"id":2,"op":"c","deps":[2]}]}'
    )
    diagnostics = Diagnostics()
    graph = read_json(path, ReadOptions(lenient=True), diagnostics).classes[0]
    assert diagnostics.counts() == {"ET006": 1}
    assert graph.data_deps.to_lists() == [[1], [0], [1]], "an id that stands twice means its first node"


def test_other_version_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="op-graph/2"):
        parse('{"schema":"hespas.op-graph/2","nodes":[],"new_field":1}', tmp_path)


def test_every_truncation_is_refused(make_workload: MakeWorkload, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    write_json(make_workload(2, 6), path, WriteOptions(), Diagnostics())
    whole = path.read_bytes().rstrip()
    for length in np.random.default_rng(0).integers(0, len(whole), 60).tolist():
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            read_json(path, ReadOptions(), Diagnostics())


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"{" * 100_000, b'{"nodes":' + b"[" * 1_000_000, b'"x'])
def test_junk_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "junk.json"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        read_json(path, ReadOptions(), Diagnostics())


def test_long_chain_is_read(tmp_path: Path) -> None:
    """A dependency chain is data, not nesting: no recursion."""
    nodes = ",".join(f'{{"op":"a","deps":[{number - 1}]}}' for number in range(1, 100_000))
    graph = parse(f'{{"nodes":[{{"op":"a","deps":[]}},{nodes}]}}', tmp_path)
    assert len(graph) == 100_000


def test_writer_refuses_what_it_cannot_hold(make_graph: MakeGraph, tmp_path: Path) -> None:
    workload = Workload.spmd(make_graph(1, 2), 8)
    with pytest.raises(UsageError, match="all ranks"):
        write_json(workload, tmp_path / "x.json", WriteOptions(ranks=range(2)), Diagnostics())
    with pytest.raises(OutputError):
        write_json(workload, tmp_path / "missing" / "x.json", WriteOptions(), Diagnostics())
    write_json(workload, tmp_path / "x.json", WriteOptions(ranks=range(8)), Diagnostics())


def test_writer_does_not_change_its_input(make_graph: MakeGraph, tmp_path: Path) -> None:
    workload, twin = Workload.spmd(make_graph(1, 20), 8), Workload.spmd(make_graph(1, 20), 8)
    write_json(workload, tmp_path / "x.json", WriteOptions(), Diagnostics())
    assert workloads_equal(workload, twin) == []
