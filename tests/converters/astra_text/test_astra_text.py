"""Text workloads of ASTRA-sim 1.0: each policy compared with the loop of the simulator by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.converters import ReadOptions, sniff
from hespas.converters.astra_text import FORMAT
from hespas.converters.astra_text.grammar import parse
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpGraph, StridedGroups, Workload
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.graph.passes import find_cycle

_LAYERS = """\
a  -1  10 ALLGATHER 100  11 ALLREDUCE 110  12 ALLREDUCE 120  1
b  -1  20 NONE 0         21 ALLTOALL 210   22 ALLREDUCE 220  0
c  -1  30 ALLREDUCE 300  31 NONE 0         32 REDUCESCATTER 320 3
"""


def _read(
    folder: Path, text: str, diagnostics: Diagnostics | None = None, *, ranks: int | None = 4
) -> Workload:
    path = folder / "job.txt"
    path.write_text(text)
    assert FORMAT.read
    found = Diagnostics() if diagnostics is None else diagnostics
    value = FORMAT.read(path, ReadOptions(num_devices=ranks), found)
    assert isinstance(value, Workload)
    return value


def _edges(graph: OpGraph) -> dict[str, tuple[set[str], set[str]]]:
    """Names of what each node needs, and of what it only comes after."""
    names = [graph.node_name(node) for node in range(len(graph))]
    assert len(set(names)) == len(names)
    return {
        name: (
            {names[node] for node in graph.data_deps.row(number).tolist()},
            {names[node] for node in graph.control_deps.row(number).tolist()},
        )
        for number, name in enumerate(names)
    }


def _groups(graph: OpGraph, row: int) -> list[list[int]]:
    found = graph.group_sets[row]
    return [found.members(number).tolist() for number in range(found.num_groups)]


def test_data_parallel_runs_weight_gradients_first_and_only_their_collectives(tmp_path: Path) -> None:
    found = Diagnostics()
    workload = _read(tmp_path, f"DATA\n3\n{_LAYERS}", found)
    graph = workload.classes[0]
    assert workload.num_ranks == 4
    assert workload.metadata["parallelism"] == "DATA"
    assert _edges(graph) == {
        "a.fwd": (set(), set()),
        "b.fwd": ({"a.fwd"}, set()),
        "c.fwd": ({"b.fwd"}, set()),
        "c.wg": ({"c.fwd"}, set()),
        "c.wg.reduce_scatter": ({"c.wg"}, set()),
        "c.wg.update": ({"c.wg.reduce_scatter"}, set()),
        "c.ig": ({"c.fwd"}, {"c.wg"}),
        "b.wg": ({"c.ig"}, set()),
        "b.wg.all_reduce": ({"b.wg"}, set()),
        "b.ig": ({"c.ig"}, {"b.wg"}),
        "a.wg": ({"b.ig"}, set()),
        "a.wg.all_reduce": ({"a.wg"}, set()),
        "a.wg.update": ({"a.wg.all_reduce"}, set()),
    }
    assert graph.collectives.comm_bytes.tolist() == [320, 220, 120]
    assert graph.collectives.kind.tolist() == [
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_REDUCE,
    ]
    assert graph.group_sets == (StridedGroups.all_ranks(4),)
    assert found.counts()["astra-text.not-run"] == 3  # a.fwd, c.fwd, b.ig; the first layer's ig never runs


def test_cycles_are_nanoseconds_and_unknown_costs_stay_unknown(tmp_path: Path) -> None:
    graph = _read(tmp_path, f"DATA\n3\n{_LAYERS}").classes[0]
    times = {graph.node_name(node): time for node, time in enumerate(graph.duration_ns.tolist())}
    assert (times["a.fwd"], times["c.wg"], times["b.ig"], times["c.wg.update"]) == (10, 32, 21, 3)
    assert np.isnan(times["c.wg.reduce_scatter"])
    assert np.isnan(graph.flops).all()
    assert [graph.strings[int(row)] for row in graph.source_id[:3]] == [
        "job.txt:3",
        "job.txt:4",
        "job.txt:5",
    ]


def test_model_parallel_overlaps_the_input_gradient_with_the_weight_gradient(tmp_path: Path) -> None:
    found = Diagnostics()
    graph = _read(tmp_path, f"MODEL\n3\n{_LAYERS}", found).classes[0]
    assert _edges(graph) == {
        "a.fwd": (set(), set()),
        "a.fwd.all_gather": ({"a.fwd"}, set()),
        "a.fwd.update": ({"a.fwd.all_gather"}, set()),
        "b.fwd": ({"a.fwd.update"}, set()),
        "c.fwd": ({"b.fwd"}, set()),
        "c.fwd.all_reduce": ({"c.fwd"}, set()),
        "c.fwd.update": ({"c.fwd.all_reduce"}, set()),
        "c.ig": ({"c.fwd.update"}, set()),
        "c.wg": ({"c.fwd.update"}, {"c.ig"}),
        "b.ig": ({"c.ig"}, {"c.wg"}),
        "b.ig.all_to_all": ({"b.ig"}, set()),
        "b.wg": ({"c.ig"}, {"b.ig"}),
        "a.ig": ({"b.ig.all_to_all"}, {"b.wg"}),
        "a.wg": ({"b.ig.all_to_all"}, {"a.ig"}),
    }
    assert found.counts()["astra-text.not-run"] == 4


@pytest.mark.parametrize("policy", ["HYBRID_DATA_MODEL", "HYBRID_MODEL_DATA"])
def test_groups_that_depend_on_the_network_are_unknown_and_told(tmp_path: Path, policy: str) -> None:
    found = Diagnostics()
    graph = _read(tmp_path, f"{policy}\n3\n{_LAYERS}", found).classes[0]
    edges = _edges(graph)
    assert edges["a.wg.all_reduce"] == ({"a.wg"}, set())
    assert "a.ig.all_reduce" not in edges
    assert set(graph.collectives.group_set.tolist()) == {-1}
    assert found.counts()["astra-text.network-groups"] == len(graph.collectives) == 6


def test_a_transformer_exchanges_every_gradient_and_has_groups_of_neighbours(tmp_path: Path) -> None:
    found = Diagnostics()
    text = f"HYBRID_TRANSFORMER model_parallel_NPU_group: 2\n3\n{_LAYERS}"
    workload = _read(tmp_path, text, found, ranks=8)
    graph = workload.classes[0]
    edges = _edges(graph)
    assert edges["b.wg"] == ({"c.ig"}, {"b.ig"})
    assert edges["a.ig"] == ({"b.ig.all_to_all"}, {"b.wg"})
    assert edges["a.ig.all_reduce"] == ({"a.ig"}, set())
    assert edges["a.wg"] == ({"b.ig.all_to_all"}, {"a.ig"})
    names = {graph.node_name(int(node)): row for row, node in enumerate(graph.collectives.node)}
    sets = graph.collectives.group_set.tolist()
    assert _groups(graph, sets[names["a.fwd.all_gather"]]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _groups(graph, sets[names["a.wg.all_reduce"]]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sets[names["b.ig.all_to_all"]] == sets[names["a.fwd.all_gather"]]
    assert workload.metadata["model_parallel_npu_group"] == "2"
    assert "astra-text.network-groups" not in found.counts()


def test_ranks_must_hold_whole_copies_of_the_model(tmp_path: Path) -> None:
    text = f"HYBRID_TRANSFORMER model_parallel_NPU_group: 3\n3\n{_LAYERS}"
    with pytest.raises(UsageError, match="8 ranks cannot be split into the workload's groups of 3"):
        _read(tmp_path, text, ranks=8)
    found = Diagnostics()
    assert _read(tmp_path, text, found, ranks=None).num_ranks == 3
    assert found.counts()["astra-text.ranks"] == 1
    assert found.counts()["astra-text.network-groups"] == 3  # gradients are summed over copies nobody counted


def test_one_copy_of_the_model_sums_no_gradients(tmp_path: Path) -> None:
    found = Diagnostics()
    text = f"HYBRID_TRANSFORMER model_parallel_NPU_group: 8\n3\n{_LAYERS}"
    edges = _edges(_read(tmp_path, text, found, ranks=8).classes[0])
    assert not [name for name in edges if name.startswith(("a.wg.", "b.wg.", "c.wg."))]
    assert found.counts()["astra-text.no-transfer"] == 3


def test_checkpointed_layers_run_forward_again_before_their_backward_pass(tmp_path: Path) -> None:
    head = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 checkpoints: 1 0 "
    head += "checkpoint_initiates: 1 2"
    edges = _edges(_read(tmp_path, f"{head}\n3\n{_LAYERS}").classes[0])
    assert edges["a.again"] == (set(), {"c.fwd.update"})
    assert edges["a.again.all_gather"] == ({"a.again"}, set())
    assert edges["b.again"] == ({"a.again.update"}, set())
    assert edges["c.ig"] == ({"c.fwd.update", "b.again"}, set())
    head = head.replace("checkpoints: 1 0", "checkpoints: 2 0 1").replace(
        "initiates: 1 2", "initiates: 2 2 1"
    )
    with pytest.raises(FormatError, match="layer 1 starts a second forward pass"):
        _read(tmp_path, f"{head}\n3\n{_LAYERS}")
    later = head.replace("initiates: 2 2 1", "initiates: 1 2")
    edges = _edges(_read(tmp_path, f"{later}\n3\n{_LAYERS}").classes[0])
    assert "a.again" not in edges
    assert edges["b.again"] == ({"a.fwd.update"}, {"c.fwd.update"})


def test_recommendation_joins_the_embedding_behind_the_last_bottom_layer(tmp_path: Path) -> None:
    text = """HYBRID_DLRM 1
4
emb  -1 300 ALLTOALL 900  301 ALLTOALL 901  302 NONE 0  9
bot  -1 10 NONE 0  11 NONE 0  12 ALLREDUCE 100 0
top  -1 20 ALLTOALL 5  21 NONE 0  22 ALLREDUCE 200 0
out  -1 30 NONE 0  31 NONE 0  32 NONE 0 0
"""
    found = Diagnostics()
    edges = _edges(_read(tmp_path, text, found).classes[0])
    assert edges["bot.fwd"] == ({"emb.fwd"}, set())
    assert edges["top.fwd"] == ({"bot.fwd", "emb.fwd.update"}, set())
    assert edges["emb.ig.all_to_all"] == ({"top.ig"}, set())
    assert edges["bot.wg"] == ({"top.ig"}, set())
    assert edges["emb.wg"] == ({"bot.ig"}, set())
    assert "top.fwd.all_to_all" not in edges
    assert "emb.ig" not in edges
    assert found.counts()["astra-text.not-run"] == 1


def test_micro_runs_one_collective_and_inference_the_forward_pass(tmp_path: Path) -> None:
    found = Diagnostics()
    graph = _read(tmp_path, f"MICRO\n3\n{_LAYERS}", found).classes[0]
    assert _edges(graph) == {"a.wg.all_reduce": (set(), set()), "a.wg.update": ({"a.wg.all_reduce"}, set())}
    assert graph.kind[0] == NodeKind.COLLECTIVE
    assert found.counts()["astra-text.micro"] == 2
    assert found.counts()["astra-text.not-computed"] == 9
    found = Diagnostics()
    edges = _edges(_read(tmp_path, f"DISTRIBUTED_INFERENCE\n3\n{_LAYERS}", found).classes[0])
    assert {name.split(".")[1] for name in edges} == {"fwd"}
    assert found.counts()["astra-text.not-computed"] == 6
    assert found.counts()["astra-text.not-run"] == 5


def test_customised_layers_have_policies_of_their_own(tmp_path: Path) -> None:
    lines = _LAYERS.splitlines()
    text = "HYBRID_CUSTOMIZED\n3\n" + "\n".join(
        f"{line} {policy}" for line, policy in zip(lines, ("DATA", "MODEL", "HYBRID_DATA_MODEL"), strict=True)
    )
    found = Diagnostics()
    edges = _edges(_read(tmp_path, text, found).classes[0])
    collectives = {name for name in edges if name.split(".")[-1] not in {"fwd", "ig", "wg", "update"}}
    assert collectives == {"a.wg.all_reduce", "b.ig.all_to_all", "c.fwd.all_reduce", "c.wg.reduce_scatter"}
    assert found.counts()["astra-text.network-groups"] == 2
    with pytest.raises(UnsupportedError, match="is not a policy of a single layer"):
        _read(tmp_path, text.replace(" DATA", " HYBRID_CUSTOMIZED"))
    with pytest.raises(FormatError, match="the policy of the layer expected, but the file ends"):
        _read(tmp_path, text.removesuffix("HYBRID_DATA_MODEL"))


def test_words_may_stand_on_any_line_and_the_rest_is_told(tmp_path: Path) -> None:
    found = Diagnostics()
    text = f"DATA\n3\n{_LAYERS}"
    spread = _read(tmp_path, "\n".join(text.split()) + "\n extra words\r\n", found).classes[0]
    assert _edges(spread) == _edges(_read(tmp_path, text).classes[0])
    assert found.counts()["astra-text.trailing-text"] == 2


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("PIPELINE\n1\n", 1, "a parallelism policy expected, not 'PIPELINE'"),
        ("DATA\nx\n", 2, "the number of layers expected"),
        ("DATA\n0\n", 2, "at least one layer"),
        ("DATA\n2\n" + _LAYERS.splitlines()[0], 3, "the name of a layer expected, but the file ends"),
        (f"DATA\n99999999999999\n{_LAYERS}", 5, "the name of a layer expected"),
        ("DATA\n1\na -1 1.5 NONE 0", 3, "the cycles of the forward phase expected"),
        ("DATA\n1\na -1 -1 NONE 0", 3, "the cycles of the forward phase expected"),
        ("DATA\n1\na -1 99999999999999999999 NONE 0", 3, "up to 2"),
        ("DATA\n1\na -1 1 BROADCAST 0", 3, "one of: NONE, ALLREDUCE"),
        ("DATA\n1\na -1 1 NONE \u0663", 3, "the bytes of the forward collective"),
        ("HYBRID_DLRM 5\n1\na", 2, "names layer 5, but the last layer is 0"),
        ("HYBRID_TRANSFORMER model_parallel_NPU_group: 0\n1\n", 1, "at least one rank"),
    ],
)
def test_what_breaks_the_grammar_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        _read(tmp_path, text)
    assert caught.value.position == f"line {line}"
    assert caught.value.path == str(tmp_path / "job.txt")


@pytest.mark.parametrize(
    "text",
    [
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1 pp: 1\n1\n",
        "DATA\n1\na -1 1 ALLTOALL_EP 5",
        "DATA\n1\na -1 1 ALLREDUCEALLTOALL 5",
    ],
)
def test_what_the_simulator_does_not_run_is_unsupported(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnsupportedError):
        _read(tmp_path, text)


def test_a_join_behind_the_last_layer_comes_before_the_backward_pass(tmp_path: Path) -> None:
    text = "HYBRID_DLRM 1\n2\nemb -1 3 ALLTOALL 9 3 NONE 0 3 NONE 0 0\nbot -1 1 NONE 0 1 NONE 0 1 NONE 0 0\n"
    edges = _edges(_read(tmp_path, text).classes[0])
    assert edges["bot.wg"] == ({"bot.fwd", "emb.fwd.all_to_all"}, set())


def test_a_file_too_large_to_be_a_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"^33,554,433 bytes, more than the limit of 33,554,432$|limit of"):
        _read(tmp_path, "DATA\n1\n" + " " * ((32 << 20) - 6))


def test_a_workload_of_many_layers_is_read(tmp_path: Path) -> None:
    line = _LAYERS.splitlines()[0]
    count = (1 << 20) // len(line) + 1
    graph = _read(tmp_path, f"MICRO\n{count}\n" + f"{line}\n" * count).classes[0]
    assert len(graph.collectives) == 1


def test_checkpoints_are_matched_with_one_look_each() -> None:
    count = 40_000
    kept, again = " ".join(map(str, range(0, count, 2))), " ".join(map(str, range(1, count, 2)))
    head = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 1"
    head += f" checkpoints: {count // 2} {kept} checkpoint_initiates: {count // 2} {again}"
    parsed = parse(f"{head}\n{count}\n" + "l -1 1 NONE 0 1 NONE 0 1 NONE 0 0\n" * count, "job.txt")
    assert len(parsed.initiates) == count // 2


@pytest.mark.parametrize("group", [(1 << 24) + 1, 99_999_999_999])
def test_more_ranks_than_any_job_has_are_refused_at_once(group: int, tmp_path: Path) -> None:
    text = f"HYBRID_TRANSFORMER model_parallel_NPU_group: {group}\n3\n{_LAYERS}"
    with pytest.raises(UnsupportedError, match="16,777,216"):
        _read(tmp_path, text, ranks=None)
    with pytest.raises(UsageError, match="devices requested"):
        _read(tmp_path, f"DATA\n3\n{_LAYERS}", ranks=group)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_bytes(b"DATA\n1\n\xff")
    assert FORMAT.read
    with pytest.raises(FormatError, match="not UTF-8") as caught:
        FORMAT.read(path, ReadOptions(), Diagnostics())
    assert caught.value.position == "byte 7"


def test_files_are_told_by_content(tmp_path: Path) -> None:
    path = tmp_path / "workload"
    path.write_text(f"HYBRID_DLRM\t1\t\t\n3\t\t\n{_LAYERS}")
    assert sniff(path).name == "astra-text"
    path.write_bytes(b"\xef\xbb\xbfDATA\r\n3\r\n" + _LAYERS.encode())
    assert sniff(path).name == "astra-text"
    path.with_suffix(".txt").write_text("HloModule a\nENTRY e {\n ROOT p = f32[] parameter(0)\n}\n")
    assert sniff(path.with_suffix(".txt")).name == "hlo"


@pytest.mark.parametrize("ranks", [None, 1, 6])
@pytest.mark.parametrize("policy", ["DATA", "MODEL", "MICRO", "HYBRID_DATA_MODEL", "DISTRIBUTED_INFERENCE"])
def test_every_policy_gives_a_graph_without_cycles(tmp_path: Path, policy: str, ranks: int | None) -> None:
    workload = _read(tmp_path, f"{policy}\n3\n{_LAYERS}", ranks=ranks)
    assert not find_cycle(workload.classes[0])
    assert workload.num_ranks == (ranks or 1)
