"""Replica groups in every spelling, collectives, permutations, messages, asynchronous pairs."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import numpy as np
import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.hlo.attributes import header_meshes, parse_groups
from hespas.graph import PROGRAM_BYTES, CollectiveKind, Diagnostics, NodeKind, OpClass, OpGraph, Workload
from hespas.graph.errors import FormatError, UsageError
from hespas.graph.passes import totals

ReadText = Callable[..., tuple[Workload, Diagnostics]]

ADD = """add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}
"""


def _module(header: str, *instructions: str) -> str:
    body = "\n".join(f"  {line}" for line in instructions)
    return f"HloModule m{header}\n\n{ADD}\nENTRY e {{\n{body}\n}}\n"


def _node(graph: OpGraph, name: str) -> int:
    return [graph.node_name(node) for node in range(len(graph))].index(name)


def _deps(graph: OpGraph, name: str) -> list[str]:
    return [graph.node_name(dep) for dep in graph.data_deps.row(_node(graph, name)).tolist()]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{ {0, 1}, {2, 3} }", [[0, 1], [2, 3]]),
        ("{{0,1,2},{3,4,5,6,7}}", [[0, 1, 2], [3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[4,2] <= [2,4] T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'a'}", [[3, 2], [1, 0]]),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("@named {'tp'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("@inline['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_spellings(text: str, groups: list[list[int]]) -> None:
    meshes = header_meshes(
        {"frontend_attributes": '{xla.sdy.meshes={named = #sdy.mesh<["fsdp"=2, "tp"=4]>}}'}
    )
    parsed = parse_groups(text, 8, meshes)
    assert parsed is not None
    assert [members.tolist() for members in parsed] == groups


@pytest.mark.parametrize("text", [None, "{}", "{{}}"])
def test_nobody_listed_means_everybody(text: str | None) -> None:
    assert parse_groups(text, 8, {}) is None


@pytest.mark.parametrize(
    "text",
    [
        "{0,1}",
        "{{0,1},{2",
        "{{a}}",
        "[4,2]<=[9]",
        "[4]<=[4]",
        "[4,2]<=[2,4]T(0,0)",
        "[8,8]<=[64]",
        "[2,2]<=[999999999999999999999]",
        "mesh['a'=2] {'b'}",
        "mesh['a'=2 {'a'}",
        "mesh['a'=2,'a'=4] {'a'}",
        "mesh['a'=8] {'a':(3)2}",
        "mesh['a'=100000000] {'a'}",
        "mesh['a'=2,'b'=4], device_ids=([4]) {'a'}",
        "@other {'a'}",
        "ring",
    ],
)
def test_what_is_no_spelling(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|mesh|iota|divide|overlap|permutation"):
        parse_groups(text, 8, {})


def test_strided_spellings_stay_symbolic_at_scale() -> None:
    groups = parse_groups("mesh['data'=4096,'model'=16] {'data'}", 65_536, {})
    assert groups is not None
    assert (groups.num_groups, groups.group_size, groups.group_of(65_535)) == (16, 4096, 15)
    assert groups == parse_groups("[16,4096]<=[4096,16]T(1,0)", 65_536, {})


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1}}, ", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("channel_id=1, replica_groups={{0,1}}, ", [list(range(8))]),
        ("channel_id=1, replica_groups={{0},{1}}, ", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            "channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, ",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ("replica_groups={}, ", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_modes_become_global_device_ids(
    read_text: ReadText, attributes: str, groups: list[list[int]]
) -> None:
    """Two replicas of four partitions: device = replica * 4 + partition."""
    line = f"r = f32[64]{{0}} all-reduce(x), {attributes}to_apply=add"
    text = _module(", replica_count=2, num_partitions=4", "x = f32[64]{0} parameter(0)", line)
    workload, _ = read_text(text)
    graph = workload.classes[0]
    found = graph.group_sets[int(graph.collectives.group_set[0])]
    assert workload.num_ranks == 8
    assert sorted(sorted(members.tolist()) for members in found) == sorted(groups)


GATHER = "replica_groups=[2,4]<=[8], channel_id=1, use_global_device_ids=true"


def test_sizes_are_those_of_each_kind(read_text: ReadText) -> None:
    text = _module(
        ", num_partitions=8",
        "shard = f32[64]{0} parameter(0)",
        "full = f32[256]{0} parameter(1)",
        f"ag = f32[256]{{0}} all-gather(shard), {GATHER}, dimensions={{0}}",
        f"rs = f32[64]{{0}} reduce-scatter(full), {GATHER}, dimensions={{0}}, to_apply=add",
        f"ar = (f32[256]{{0}}, f32[64]{{0}}) all-reduce(full, shard), {GATHER}, to_apply=add",
        "a2a = (f32[64]{0}, f32[64]{0}) all-to-all(shard, shard), channel_id=1, replica_groups=[4,2]<=[8]",
        "cb = f32[64]{0} collective-broadcast(shard), replica_groups={{0,1}}, channel_id=1",
        "i = s32[8]{0} parameter(2)",
        "rag = f32[256]{0} ragged-all-to-all(shard, full, i, i, i, i), channel_id=1",
    )
    workload, diagnostics = read_text(text)
    table = workload.classes[0].collectives
    assert [CollectiveKind(kind) for kind in table.kind.tolist()] == [
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.BROADCAST,
        CollectiveKind.RAGGED_ALL_TO_ALL,
    ]
    assert table.comm_bytes.tolist() == [256, 1024, 1280, 512, 256, 1024]
    assert table.operand_bytes.tolist()[:3] == [256, 1024, 1280]
    assert table.result_bytes.tolist()[:3] == [1024, 256, 1280]
    graph = workload.classes[0]
    assert [graph.strings[row] for row in table.reduction.tolist()][1:3] == ["add", "add"]
    assert not np.nansum(graph.flops)
    assert diagnostics.counts() == {"hlo.devices-left-out": 1, "hlo.bounded-collective": 1}


ASYNC_BODIES = """gather {
  p = f32[64]{0} parameter(0)
  ROOT g = f32[256]{0} all-gather(p), replica_groups=[2,4]<=[8], channel_id=1,
      use_global_device_ids=true, dimensions={0}
}
twisted {
  p = f32[64,8]{1,0} parameter(1)
  q = f32[16,64]{1,0} parameter(0)
  ROOT d = f32[16,8]{1,0} dot(q, p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    ("start", "done"),
    [
        (f"(f32[64]{{0}}, f32[256]{{0}}) all-gather-start(x), {GATHER}, dimensions={{0}}", "all-gather-done"),
        (
            f"((f32[64]{{0}}), f32[256]{{0}}, u32[]) all-gather-start(x), {GATHER}, dimensions={{0}}",
            "all-gather-done",
        ),
        ("((f32[64]{0}), f32[256]{0}, u32[]) async-start(x), calls=gather", "async-done"),
    ],
)
def test_a_start_carries_cost_and_traffic(read_text: ReadText, start: str, done: str) -> None:
    text = _module(
        ", num_partitions=8",
        "x = f32[64]{0} parameter(0)",
        f"s = {start}",
        "work = f32[64]{0} negate(x)",
        f"d = f32[256]{{0}} {done}(s)",
        "y = f32[256]{0} negate(d)",
    ).replace("ENTRY", ASYNC_BODIES + "\nENTRY")
    graph = read_text(text)[0].classes[0]
    node = _node(graph, "s")
    assert graph.kind[node] == NodeKind.COLLECTIVE
    assert (graph.bytes_read[node], graph.bytes_written[node]) == (256, 1024)
    assert graph.collectives.node.tolist() == [node]
    assert graph.collectives.comm_bytes.tolist() == [256]
    ended = _node(graph, "d")
    assert graph.op_class[ended] == OpClass.FREE
    assert graph.bytes_moved[ended] == 0
    assert _deps(graph, "d") == ["s"]
    assert _deps(graph, "work") == ["x"]
    assert _deps(graph, "y") == ["d"]


def test_an_all_reduce_start_states_its_results_only(read_text: ReadText) -> None:
    line = f"s = (f32[64]{{0}}, f32[32]{{0}}) all-reduce-start(x, y), {GATHER}, to_apply=add"
    text = _module(", num_partitions=8", "x = f32[64]{0} parameter(0)", "y = f32[32]{0} parameter(1)", line)
    table = read_text(text)[0].classes[0].collectives
    assert (table.operand_bytes.tolist(), table.result_bytes.tolist()) == ([384], [384])


def test_operands_of_a_wrapped_operation_keep_their_order(read_text: ReadText) -> None:
    text = _module(
        "",
        "a = f32[16,64]{1,0} parameter(0)",
        "b = f32[64,8]{1,0} parameter(1)",
        "s = ((f32[16,64]{1,0}, f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]) async-start(a, b), calls=twisted",
        "u = ((f32[16,64]{1,0}, f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]) async-update(s)",
        "d = f32[16,8]{1,0} async-done(u)",
    ).replace("ENTRY", ASYNC_BODIES + "\nENTRY")
    graph = read_text(text)[0].classes[0]
    assert totals(graph).flops == 2 * 16 * 64 * 8
    assert graph.flops[_node(graph, "s")] == 2 * 16 * 64 * 8
    assert _deps(graph, "d") == ["u"]


def test_an_asynchronous_computation_of_several_operations(read_text: ReadText) -> None:
    body = """host {
  p = f32[64]{0} parameter(0)
  q = f32[64]{0} negate(p)
  ROOT r = f32[64]{0} add(q, p)
}, execution_thread="host"
"""
    text = _module(
        "",
        "x = f32[64]{0} parameter(0)",
        's = ((f32[64]{0}), f32[64]{0}, u32[]) async-start(x), async_execution_thread="host", calls=host',
        "d = f32[64]{0} async-done(s)",
    ).replace("ENTRY", body + "\nENTRY")
    graph = read_text(text)[0].classes[0]
    assert _deps(graph, "q") == ["s"]
    assert _deps(graph, "d") == ["s", "r"]
    assert graph.resource[_node(graph, "r")] == 1
    assert graph.resource[_node(graph, "d")] == 0


def test_copies_by_the_dma_engine(read_text: ReadText) -> None:
    text = _module(
        "",
        "x = f32[64]{0} parameter(0)",
        "s = (f32[64]{0:S(5)}, f32[64]{0}, u32[]) copy-start(x)",
        "d = f32[64]{0:S(5)} copy-done(s)",
        "t = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(d)",
        "e = f32[64]{0} copy-done(t)",
        "u = (f32[64]{0:S(1)}, f32[64]{0}, u32[]) copy-start(x)",
    )
    graph = read_text(text)[0].classes[0]
    kinds = [graph.kind[_node(graph, name)] for name in "stu"]
    assert kinds == [NodeKind.MEM_STORE, NodeKind.MEM_LOAD, NodeKind.COMPUTE]
    assert {int(graph.op_class[_node(graph, name)]) for name in "stu"} == {int(OpClass.MEMORY)}
    assert [graph.bytes_moved[_node(graph, name)] for name in "stude"] == [512, 512, 512, 0, 0]


def test_permutation_and_messages(read_text: ReadText) -> None:
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}"
    quoted = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
    text = _module(
        ", replica_count=2, num_partitions=4",
        "x = f32[64]{0} parameter(0)",
        "p = f32[64]{0} collective-permute(x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
        "t = token[] after-all()",
        f"s = (f32[64]{{0}}, u32[], token[]) send(x, t), channel_id=3, {pairs}",
        "sd = token[] send-done(s), channel_id=3",
        f"r = (f32[64]{{0}}, u32[], token[]) recv(t), channel_id=3, {quoted}",
        "rd = (f32[64]{0}, token[]) recv-done(r), channel_id=3",
        "h = (f32[64]{0}, u32[], token[]) send(x, t), channel_id=4, is_host_transfer=true",
        "l = (f32[64]{0}, u32[], token[]) send(x, t), channel_id=5",
    )
    workload, diagnostics = read_text(text)
    graph = workload.classes[0]
    assert [graph.kind[_node(graph, name)] for name in ("p", "s", "r", "sd")] == [
        NodeKind.PERMUTE,
        NodeKind.SEND,
        NodeKind.RECV,
        NodeKind.COMPUTE,
    ]
    ring, line = (graph.permutations[int(row)] for row in graph.p2p.permutation[:2])
    assert [ring.target_of(rank) for rank in range(8)] == [1, 2, 3, 0, 5, 6, 7, 4]
    assert [line.target_of(rank) for rank in range(8)] == [1, 2, -1, -1, 5, 6, -1, -1]
    assert graph.p2p.permutation.tolist()[3:] == [-1, -1]
    assert graph.p2p.comm_bytes.tolist() == [256] * 5
    assert graph.p2p.tag.tolist() == [1, 3, 3, 4, 5]
    assert graph.p2p.host.tolist() == [False, False, False, True, False]
    assert [graph.bytes_read[_node(graph, name)] for name in ("s", "r")] == [256, 0]
    assert [graph.bytes_written[_node(graph, name)] for name in ("s", "r")] == [0, 256]
    assert diagnostics.counts() == {"hlo.unknown-peer": 1}


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        (", num_partitions=4", "replica_groups=[1,8]<=[8]", "over at most 4 devices"),
        (", num_partitions=4", "replica_groups={{0,1},{1,2}}", "is repeated"),
        (", num_partitions=4", "replica_groups={{0,9}}", "outside 0..3"),
    ],
)
def test_impossible_groups_name_the_instruction(
    read_text: ReadText, header: str, line: str, message: str
) -> None:
    collective = (
        f"r = f32[64]{{0}} all-reduce(x), channel_id=1, {line}, use_global_device_ids=true, to_apply=add"
    )
    with pytest.raises(FormatError) as caught:
        read_text(_module(header, "x = f32[64]{0} parameter(0)", collective))
    assert caught.value.position == "line 11"
    assert "all-reduce %r" in caught.value.message
    assert message in caught.value.message


TPU = """HloModule tpu, is_scheduled=true, num_partitions=4

start_body {
  p = bf16[64,128]{1,0} parameter(0)
  ROOT g = bf16[256,128]{1,0} all-gather(p), channel_id=7, replica_groups=[1,4]<=[4],
      dimensions={0}, use_global_device_ids=true
}

step_body {
  a = bf16[128,256]{1,0} parameter(0)
  b = bf16[256,128]{1,0} parameter(1)
  p = bf16[64,128]{1,0} parameter(2)
  g = bf16[256,128]{1,0} all-gather(p), channel_id=7, replica_groups=[1,4]<=[4],
      dimensions={0}, use_global_device_ids=true
  d = f32[128,128]{1,0} convolution(a, b), dim_labels=bf_io->bf
  ROOT t = (f32[128,128]{1,0}, bf16[256,128]{1,0}) tuple(d, g)
}

done_body {
  p = bf16[64,128]{1,0} parameter(0)
  ROOT g = bf16[256,128]{1,0} all-gather(p), channel_id=7, replica_groups=[1,4]<=[4],
      dimensions={0}, use_global_device_ids=true
}

ENTRY e {
  p = bf16[64,128]{1,0} parameter(0)
  a = bf16[128,256]{1,0} parameter(1)
  b = bf16[256,128]{1,0} parameter(2)
  async-collective-start = bf16[256,128]{1,0} fusion(p), kind=kCustom, calls=start_body
  step = (f32[128,128]{1,0}, bf16[256,128]{1,0}) fusion(a, b, p), kind=kOutput, calls=step_body
  async-collective-done = bf16[256,128]{1,0} fusion(p), kind=kCustom, calls=done_body,
      control-predecessors={async-collective-start}
  ROOT out = (bf16[256,128]{1,0}) tuple(async-collective-done)
}
"""


def test_collectives_wrapped_in_fusions_count_once(read_text: ReadText) -> None:
    graph = read_text(TPU)[0].classes[0]
    assert graph.collectives.node.tolist() == [_node(graph, "async-collective-start")]
    assert graph.collectives.comm_bytes.tolist() == [64 * 128 * 2]
    assert graph.op_class[_node(graph, "async-collective-start")] == OpClass.COLLECTIVE
    step, done = _node(graph, "step"), _node(graph, "async-collective-done")
    assert (graph.kind[step], graph.flops[step]) == (NodeKind.COMPUTE, 2 * 128 * 256 * 128)
    assert (graph.op_class[done], graph.bytes_moved[done]) == (OpClass.FREE, 0)
    assert graph.control_deps.row(done).tolist() == [_node(graph, "async-collective-start")]


def test_synchronous_starts_are_told(read_text: ReadText) -> None:
    config = 'backend_config={"collective_backend_config":{"is_sync":true}}'
    line = f"s = f32[64]{{0}} all-reduce-start(x), {GATHER}, to_apply=add, {config}"
    _, diagnostics = read_text(_module(", num_partitions=8", "x = f32[64]{0} parameter(0)", line))
    assert diagnostics.counts() == {"hlo.synchronous-collective": 1}


def test_unknown_bytes_stay_unknown(read_text: ReadText) -> None:
    line = f"s = f32[?]{{0}} all-reduce(x), {GATHER}, to_apply=add"
    workload, diagnostics = read_text(_module(", num_partitions=8", "x = f32[?]{0} parameter(0)", line))
    assert workload.classes[0].collectives.comm_bytes.tolist() == pytest.approx([nan], nan_ok=True)
    assert diagnostics.counts() == {"hlo.dynamic-shape": 1}


ALL_FOUR = "replica_groups=[1,4]<=[4], use_global_device_ids=true"
SHARDED = "sharding={devices=[4,1]<=[4]}"


@pytest.mark.parametrize(("around", "is_global"), [("reshape(f)", False), ("abs(f)", True)])
def test_a_program_is_of_one_device_where_all_its_work_is_inside_a_shard_map(
    read_text: ReadText, around: str, *, is_global: bool
) -> None:
    shards = 'm = f32[16]{0} custom-call(x), custom_call_target="SPMDFullToShardShape", sharding={manual}'
    text = f"""HloModule m, num_partitions=4
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}}
body {{
  p = f32[16]{{0}} parameter(0)
  q = f32[16]{{0}} negate(p), sharding={{manual}}
  ROOT r = f32[16]{{0}} all-reduce(q), channel_id=1, replica_groups={{}}, to_apply=add
}}
inner {{
  x = f32[64]{{0}} parameter(0)
  {shards}
  c = f32[16]{{0}} call(m), to_apply=body
  ROOT f = f32[64]{{0}} custom-call(c), custom_call_target="SPMDShardToFullShape"
}}
ENTRY e {{
  x = f32[64]{{0}} parameter(0)
  f = f32[64]{{0}} call(x), to_apply=inner
  ROOT o = f32[64]{{0}} {around}
}}
"""
    workload, diagnostics = read_text(text)
    assert workload.num_ranks == 4
    assert ("hlo.global-program" in diagnostics.counts()) is is_global


def test_what_the_partitioner_has_made_is_of_a_device_even_where_nothing_is_exchanged(
    read_text: ReadText,
) -> None:
    text = _module(
        ", num_partitions=4", "x = f32[64]{0} parameter(0), " + SHARDED, "r = f32[64]{0} negate(x)"
    )
    entry = next(line for line in text.splitlines() if line.startswith("ENTRY "))
    name = entry.split()[1]
    _, diagnostics = read_text(text.replace(f"ENTRY {name}", f"ENTRY {name}_spmd"))
    assert "hlo.global-program" not in diagnostics.counts()


@pytest.mark.parametrize(
    ("header", "stated"),
    [
        ("", "128 128 0"),
        (", buffer_donor={ (0, {}) }", "128 128 64"),
        (", input_output_alias={ {1}: (1, {}, may-alias) }", "128 128 64"),
    ],
)
def test_programs_that_nobody_scheduled_say_what_parameters_and_results_take(
    read_text: ReadText, header: str, stated: str
) -> None:
    lines = ("x = f32[16]{0} parameter(0)", "y = f32[16]{0} parameter(1)", "a = f32[16]{0} add(x, y)")
    text = _module(header, *lines, "r = (f32[16]{0}, f32[16]{0}) tuple(a, x)")
    assert read_text(text)[0].metadata[PROGRAM_BYTES] == stated
    scheduled = _module(", is_scheduled=true" + header, *lines, "r = (f32[16]{0}, f32[16]{0}) tuple(a, x)")
    assert PROGRAM_BYTES not in read_text(scheduled)[0].metadata


@pytest.mark.parametrize(
    ("header", "lines", "is_global"),
    [
        ("", ("x = f32[64]{0} parameter(0), " + SHARDED, "r = f32[64]{0} negate(x)"), True),
        (
            "",
            ("x = f32[64]{0} parameter(0)", "y = f32[64]{0} abs(x), " + SHARDED, "r = f32[64] abs(y)"),
            True,
        ),
        (
            "",
            (
                "x = f32[64]{0} parameter(0)",
                'm = f32[16]{0} custom-call(x), custom_call_target="SPMDFullToShardShape", sharding={manual}',
                "r = f32[16]{0} all-reduce(m), channel_id=1, replica_groups={}, to_apply=add",
            ),
            True,
        ),
        (
            "",
            (
                "x = f32[64]{0} parameter(0), " + SHARDED,
                "r = f32[64]{0} all-reduce(x), channel_id=1, replica_groups={}, to_apply=add",
            ),
            False,
        ),
        (", is_scheduled=true", ("x = f32[64]{0} parameter(0), " + SHARDED, "r = f32[64]{0} abs(x)"), False),
        ("", ("x = f32[64]{0} parameter(0), sharding={replicated}", "r = f32[64]{0} abs(x)"), False),
        ("", ("x = f32[64]{0} parameter(0), sharding={manual}", "r = f32[64]{0} abs(x)"), False),
    ],
)
def test_a_program_of_the_whole_job_is_told_from_one_of_a_device(
    read_text: ReadText, header: str, lines: tuple[str, ...], *, is_global: bool
) -> None:
    _, diagnostics = read_text(_module(", num_partitions=4" + header, *lines))
    assert ("hlo.global-program" in diagnostics.counts()) is is_global
    _, alone = read_text(_module(header, *lines))
    assert "hlo.global-program" not in alone.counts()


@pytest.mark.parametrize(("entry", "is_global"), [("main.4", True), ("main.4_spmd", False)])
def test_what_the_partitioner_made_is_told_by_its_name_where_nothing_is_exchanged(
    read_text: ReadText, entry: str, *, is_global: bool
) -> None:
    lines = f"  x = f32[16]{{0}} parameter(0), {SHARDED}\n  ROOT r = f32[16]{{0}} abs(x)"
    _, diagnostics = read_text(f"HloModule m, num_partitions=4\nENTRY {entry} {{\n{lines}\n}}\n")
    assert ("hlo.global-program" in diagnostics.counts()) is is_global


@pytest.mark.parametrize(
    ("header", "line", "devices"),
    [
        ("", "all-reduce(x), replica_groups={{0,1,2,3}}, to_apply=add", 4),
        ("", "all-reduce(x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=add", 4),
        ("", f"all-reduce(x), channel_id=1, {ALL_FOUR}, to_apply=add", 4),
        (", num_partitions=2", "all-reduce(x), replica_groups={{0,1,2,3}}, to_apply=add", 8),
        (", replica_count=4", "all-reduce(x), replica_groups={{0,1,2,3}}, to_apply=add", 4),
        ("", "collective-permute(x), source_target_pairs={{0,1},{1,2}}", 3),
        ("", "collective-permute(x), channel_id=2, source_target_pairs={{0,5}}", 6),
    ],
)  # fmt: skip
def test_counts_that_a_header_leaves_out_follow_from_the_ids(
    read_text: ReadText, header: str, line: str, devices: int
) -> None:
    text = _module(header, "x = f32[64]{0} parameter(0)", f"r = f32[64]{{0}} {line}")
    workload, diagnostics = read_text(text)
    assert workload.num_ranks == devices
    inferred = "hlo.inferred-devices" in diagnostics.counts()
    assert inferred is ("replica_count" not in header)


_OVER_ALL = ("x = f32[8]{0} parameter(0)", "r = f32[8]{0} all-reduce(x), replica_groups={}, to_apply=add")
_OVER_REPLICAS = (
    "x = f32[8]{0} parameter(0)",
    "r = f32[8]{0} all-reduce(x), replica_groups={{0,1}}, to_apply=add",
)


def _members(workload: Workload) -> list[int]:
    return [int(member) for member in next(iter(next(iter(workload.group_sets))))]


def test_collectives_over_all_devices_of_an_unknown_number_are_told(read_text: ReadText) -> None:
    workload, diagnostics = read_text(_module("", *_OVER_ALL))
    assert (workload.num_ranks, diagnostics.counts()) == (1, {"hlo.unknown-devices": 1})
    for header, options in ((", replica_count=4", ReadOptions()), ("", ReadOptions(num_devices=4))):
        workload, diagnostics = read_text(_module(header, *_OVER_ALL), options)
        assert (workload.num_ranks, diagnostics.counts()) == (4, {})
        assert _members(workload) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("header", "devices", "counts"),
    [
        ("", None, ("2", "1")),
        ("", 8, ("2", "4")),
        (", num_partitions=3", None, ("2", "3")),
        (", replica_count=2", None, ("2", "1")),
    ],
)
def test_replicas_are_those_asked_for(
    read_text: ReadText, header: str, devices: int | None, counts: tuple[str, str]
) -> None:
    options = ReadOptions(num_devices=devices, num_replicas=2)
    workload, diagnostics = read_text(_module(header, *_OVER_REPLICAS), options)
    assert (workload.metadata["num_replicas"], workload.metadata["num_partitions"]) == counts
    assert workload.num_ranks == int(counts[0]) * int(counts[1])
    assert diagnostics.counts() == {}
    partitions = int(counts[1])
    assert _members(workload) == [0, partitions]


def test_replicas_that_contradict_are_told(read_text: ReadText) -> None:
    asked = ReadOptions(num_replicas=3)
    workload, diagnostics = read_text(_module(", replica_count=2", *_OVER_REPLICAS), asked)
    assert (workload.num_ranks, diagnostics.counts()) == (2, {"hlo.num-replicas": 1})
    with pytest.raises(UsageError, match="8 devices cannot be divided into 3 replicas"):
        read_text(_module("", *_OVER_REPLICAS), ReadOptions(num_devices=8, num_replicas=3))
