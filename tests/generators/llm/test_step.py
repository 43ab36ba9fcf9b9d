"""Steps of language models: work that layouts do not change, the traffic of each scheme, and defects of STAGE
(with their numbers in the comments).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

import hespas
from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Model
from hespas.generators.llm.settings import Overlap, precision_of, recompute_of
from hespas.generators.llm.step import training_workload
from hespas.generators.llm.weights import RankWeights, weights_of_layer, weights_of_rest
from hespas.graph import CollectiveKind, NodeKind, OpClass, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import UsageError
from hespas.graph.passes import is_topological
from tests.generators.llm.small_models import (
    DENSE,
    HYBRID,
    MIXTURE,
    MODELS,
    PLAIN,
    calls,
    product_flops,
    step,
    training,
)

LAYOUTS = (
    Layout(tp=4),
    Layout(tp=2, sequence_parallel=False),
    Layout(dp=4),
    Layout(dp=2, zero=0),
    Layout(dp=4, zero=2),
    Layout(dp=4, zero=3),
    Layout(dp=4, zero=3, shard=2),
    Layout(cp=4, dp=2),
    Layout(cp=2, ring_attention=True),
    Layout(cp=4, context_all_to_all=True),
    Layout(pp=4),
    Layout(pp=2, vp=2),
    Layout(dp=2, tp=2, pp=2, cp=2),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
def test_no_layout_changes_the_work(model: Model, layout: Layout) -> None:
    if model is MIXTURE and layout.tp > 1 and not layout.sequence_parallel:
        with pytest.raises(UsageError, match="sequence parallelism"):
            step(model, layout)
        return
    alone, spread = step(model, Layout()), step(model, layout)
    assert product_flops(spread) == pytest.approx(product_flops(alone), rel=0.002)
    assert spread.num_ranks == layout.ranks
    assert all(is_topological(graph) for graph in spread.classes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_no_schedule_changes_the_work(schedule: str) -> None:
    assert product_flops(step(DENSE, Layout(pp=4), schedule=schedule)) == product_flops(step(DENSE, Layout()))


def test_work_of_a_dense_step_is_six_times_parameters_and_attention() -> None:
    seq, batch, hidden, layers = 256, 8, 512, 8
    matrices = layers * (hidden * 64 * (8 + 8 + 4 + 4) + 3 * hidden * 1536) + hidden * 1024
    pairs = seq * (seq + 1) / 2
    attention = layers * batch * 8 * 64 * 4 * pairs * 3.5  # defect 3: quadratic in the sequence
    assert product_flops(step(DENSE, Layout())) == pytest.approx(
        6 * matrices * seq * batch + attention
    )  # defect 2


def test_full_recomputation_adds_a_forward_pass_of_the_layers() -> None:
    plain, again = (
        product_flops(step(DENSE, Layout(), recompute=recompute_of(each))) for each in ("none", "full")
    )
    head = 6 * 512 * 1024 * 256 * 8
    pairs = 8 * 8 * 8 * 64 * 4 * 256 * 257 / 2
    forward = (plain - head - 3.5 * pairs) / 3 + pairs
    assert again - plain == pytest.approx(forward)
    layers = product_flops(step(DENSE, Layout(), recompute=recompute_of("full:3")))
    assert layers - plain == pytest.approx(forward * 3 / 8)


@pytest.mark.parametrize(
    "modules", ["selective", "layernorm", "mlp_act", "mlp", "qkv", "layernorm,mlp_act,core_attn"]
)
def test_parts_are_computed_again_where_they_are_asked_for(modules: str) -> None:
    plain, again = step(DENSE, Layout(tp=2)), step(DENSE, Layout(tp=2), recompute=recompute_of(modules))
    assert len(again.classes[0]) > len(plain.classes[0])
    assert hespas.check(again).valid


A = 256 * 512 * 2  # bytes of a micro-batch of activations: tokens x hidden x 16 bit
SYNC = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER


def test_traffic_of_tensor_parallelism() -> None:
    layout, layers, micro = Layout(tp=4), 8, 8
    graph, groups = step(DENSE, layout).classes[0], RankGroups(layout).tensor
    reduce, gather, scatter = (calls(graph, kind, groups) for kind in SYNC)
    # forward 2 and 2 a layer, backward as many and 2 to gather inputs again; embedding and head
    assert gather.count(A / 4) == micro * (layers * (2 + 2 + 2) + 1 + 1 + 1)
    assert scatter.count(A) == micro * (layers * 4 + 1 + 1)
    assert len(reduce) == micro * 3 + 2  # the loss; gradients of norms and their norm once
    assert reduce.count(256 * 4) == micro * 3


def test_traffic_of_tensor_parallelism_without_sequence_parallelism() -> None:
    layout = Layout(tp=4, sequence_parallel=False)
    graph, groups = step(DENSE, layout).classes[0], RankGroups(layout).tensor
    reduce, gather, scatter = (calls(graph, kind, groups) for kind in SYNC)
    assert reduce.count(A) == 8 * (8 * 4 + 1 + 1)
    assert not gather
    assert not scatter


def gradients(model_bytes: int, each: list[float]) -> bool:
    return sum(each) == model_bytes


def parameters_of_dense() -> int:
    return 8 * (512 * 64 * 24 + 3 * 512 * 1536 + 2 * 512) + 2 * 1024 * 512 + 512


@pytest.mark.parametrize("micro", [1, 4])
def test_gradients_are_reduced_once_a_step(micro: int) -> None:  # defects 1 and 4
    layout = Layout(dp=4, zero=0)
    graph = step(DENSE, layout, global_batch=4 * micro).classes[0]
    reduce = [each for each in calls(graph, CollectiveKind.ALL_REDUCE, RankGroups(layout).data) if each > 4]
    assert sum(reduce) == 4 * parameters_of_dense()


def test_a_sharded_optimizer_scatters_gradients_and_gathers_weights() -> None:
    layout = Layout(dp=4, zero=1)
    graph, shards = step(DENSE, layout, global_batch=16).classes[0], RankGroups(layout).shards
    assert sum(calls(graph, CollectiveKind.REDUCE_SCATTER, shards)) == 4 * parameters_of_dense()
    assert sum(calls(graph, CollectiveKind.ALL_GATHER, shards)) == 2 * parameters_of_dense() / 4


def test_gradients_of_16_bits_halve_their_traffic() -> None:
    made = hespas.llm_step("llama-3-8b", dp=4, zero=0, precision="fp16", gradient_precision="16bit", seq=64)
    wide = hespas.llm_step("llama-3-8b", dp=4, zero=0, precision="fp16", seq=64)
    narrow_bytes, wide_bytes = (
        sum(each for each in calls(made.workload().classes[0], CollectiveKind.ALL_REDUCE, groups) if each > 4)
        for made in (made, wide)
        for groups in (RankGroups(made.layout).data,)
    )
    assert narrow_bytes == wide_bytes / 2
    narrow, whole = made.account(), wide.account()
    assert whole.peak_memory_bytes - narrow.peak_memory_bytes == 2 * made.account().parameters
    with pytest.raises(UsageError, match="activations have 32 bits"):
        hespas.llm_step("llama-3-8b", precision="f32", gradient_precision="16bit")


def test_gradients_without_fusion_are_added_by_a_kernel_per_matrix() -> None:
    fused, apart = (
        step(DENSE, Layout(), precision=precision_of("fp16"), fused_gradients=fused).classes[0]
        for fused in (True, False)
    )
    names = [apart.node_name(number) for number in range(len(apart))]
    added = [number for number, name in enumerate(names) if name.endswith("wgrad.add")]
    products = [number for number, name in enumerate(names) if f"{name}.add" in names]
    assert len(added) == len(products) > 0
    assert len(apart) == len(fused) + len(added)
    # The product writes 16 bits. The addition reads them and the sum of 32 bits, and writes the sum.
    elements = apart.bytes_written[products] / 2
    assert apart.bytes_read[added].tolist() == (6 * elements).tolist()
    assert apart.bytes_written[added].tolist() == (4 * elements).tolist()


@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize(
    ("zero", "style", "gathers"), [(3, "megatron", 2), (3, "torchtitan", 2), (2, "torchtitan", 1)]
)
def test_fsdp_gathers_and_scatters_all_weights_each_micro_batch(
    micro: int, zero: int, style: str, gathers: int
) -> None:
    layout = Layout(dp=4, zero=zero)
    graph, shards = (
        step(DENSE, layout, global_batch=4 * micro, style=style).classes[0],
        RankGroups(layout).shards,
    )
    gathered = sum(calls(graph, CollectiveKind.ALL_GATHER, shards))
    assert gathered == micro * gathers * 2 * parameters_of_dense() / 4
    reduced = sum(calls(graph, CollectiveKind.REDUCE_SCATTER, shards))
    assert reduced == micro * 4 * parameters_of_dense()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": "zero-bubble"},
        {"overlap": Overlap.none()},
        {"schedule": "zero-bubble", "overlap": Overlap.none()},
    ],
    ids=["1f1b", "zero-bubble", "nothing-overlaps", "zero-bubble-nothing-overlaps"],
)
@pytest.mark.parametrize("zero", [2, 3])
def test_stages_of_a_pipeline_reduce_their_own_each_micro_batch(zero: int, settings: dict[str, Any]) -> None:
    layout, micro = Layout(dp=2, pp=2, zero=zero), 4
    workload, shards = step(DENSE, layout, global_batch=2 * micro, **settings), RankGroups(layout).shards
    kinds = CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER
    scattered, gathered = (
        sum(sum(calls(graph, kind, shards)) for graph in workload.classes) for kind in kinds
    )
    assert scattered == micro * 4 * parameters_of_dense()
    assert gathered == (2 * micro if zero == 3 else 1) * 2 * parameters_of_dense() / 2
    assert hespas.check(workload, profile="astra-sim").valid
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0


def test_the_norm_of_a_zero_bubble_waits_for_the_last_backward_pass() -> None:
    for graph in step(DENSE, Layout(pp=2, dp=2), schedule="zero-bubble").classes:
        rows = range(len(graph))
        norm = next(node for node in rows if graph.node_name(node) == "optimizer.grad_norm")
        made = (graph.strings[int(graph.framework_id[node])] for node in graph.data_deps.row(norm))
        assert {each.partition("/")[0] for each in made} >= {"backward", "weights"}


def test_experts_travel_by_all_to_all() -> None:
    layout = Layout(dp=4, ep=4)
    graph = step(MIXTURE, layout, global_batch=4).classes[0]
    sent = calls(graph, CollectiveKind.ALL_TO_ALL, RankGroups(layout).experts)
    assert sent == [256 * 2 * 512 * 2] * (
        4 * 5
    )  # 4 mixtures and that of the further prediction, both ways twice
    held = calls(graph, CollectiveKind.REDUCE_SCATTER, RankGroups(layout).expert_data)
    assert not held  # each expert is on one rank


EXPERTS = 5 * 16 * 3 * 512 * 256  # parameters of all experts, those of the further prediction included


def adam_elements(workload: Workload) -> int:
    """Parameters that the optimizer of a rank updates."""
    graph = workload.classes[0]
    (node,) = (each for each in range(len(graph)) if graph.node_name(each) == "optimizer.adam")
    return math.prod(graph.types.shape(int(graph.operands.row(node)[0])))


@pytest.mark.parametrize(
    ("layout", "shards", "copies"),
    [
        (Layout(dp=8, ep=2), 4, 1),
        (Layout(dp=8, ep=2, shard=4), 2, 2),
        (Layout(dp=8, ep=4, shard=4), 1, 2),  # each rank of a shard group has its own experts
        (Layout(dp=4, tp=2, ep=2, etp=2, shard=2), 1, 2),
        (Layout(dp=8, ep=2, zero=0), 1, 4),
    ],
    ids=str,
)
def test_experts_are_sharded_in_groups_as_dense_weights_are(layout: Layout, shards: int, copies: int) -> None:
    """Gradients in the graph, the optimizer's elements and the memory account tell the same groups."""
    workload = step(MIXTURE, layout, global_batch=8)
    graph, groups = workload.classes[0], RankGroups(layout)
    own = EXPERTS / (layout.ep * layout.etp)
    parted, alike = groups.expert_shards, groups.expert_copies
    if not layout.zero:
        alike = groups.expert_data
    table = graph.collectives
    found = {CollectiveKind.REDUCE_SCATTER: 0.0, CollectiveKind.ALL_REDUCE: 0.0}
    for row, node in enumerate(table.node.tolist()):
        if "gradients.experts" in graph.node_name(node):
            kind = CollectiveKind(int(table.kind[row]))
            expected = parted if kind is CollectiveKind.REDUCE_SCATTER else alike
            assert graph.group_sets[int(table.group_set[row])] == expected
            found[kind] += float(table.comm_bytes[row])
    assert found == {
        CollectiveKind.REDUCE_SCATTER: 4 * own if shards > 1 else 0,
        CollectiveKind.ALL_REDUCE: 4 * own / shards if copies > 1 else 0,
    }
    every = of_rank(MIXTURE, layout)
    dense = -(-every.dense // (layout.sharded if layout.zero else 1))
    assert adam_elements(workload) == pytest.approx(dense + own / shards, abs=4096)
    (memory,) = memory_of(MIXTURE, layout, training(global_batch=8))
    assert memory.parts["optimizer moments"] == 8 * (dense + own / shards)


def of_rank(model: Model, layout: Layout) -> RankWeights:
    layers = [weights_of_layer(model, layout, training(), each) for each in model.all_layers]
    return sum(layers, weights_of_rest(model, layout, training(), first=True, last=True))


def test_groups_of_experts() -> None:
    groups = RankGroups(Layout(dp=8, ep=2, shard=4))
    assert [sorted(groups.expert_shards.members(each)) for each in (0, 1)] == [[0, 2], [1, 3]]
    assert sorted(groups.expert_copies.members(0)) == [0, 4]
    assert sorted(groups.expert_data.members(0)) == [0, 2, 4, 6]


def test_weights_that_are_gathered_are_parted_alike_in_memory() -> None:
    layout = Layout(dp=8, ep=4, shard=4, zero=3)
    (memory,) = memory_of(MIXTURE, layout, training(global_batch=8))
    every = of_rank(MIXTURE, layout)
    assert every.experts == EXPERTS / 4
    assert memory.parts["weights"] == 2 * (-(-every.dense // 4) + every.experts)


@pytest.mark.parametrize("zero", [1, 3])
def test_copies_without_shards_are_reduced(zero: int) -> None:
    layout = Layout(dp=4, zero=zero, shard=1)
    graph = step(DENSE, layout, global_batch=4).classes[0]
    reduce = [each for each in calls(graph, CollectiveKind.ALL_REDUCE, RankGroups(layout).data) if each > 4]
    assert sum(reduce) == 4 * parameters_of_dense()


def test_capacity_pads_what_travels() -> None:
    layout = Layout(dp=4, ep=4)
    graph = step(MIXTURE, layout, global_batch=4, capacity=1.25).classes[0]
    assert set(calls(graph, CollectiveKind.ALL_TO_ALL, RankGroups(layout).experts)) == {
        256 * 2 * 512 * 2 * 1.25
    }


def test_keys_travel_between_context_ranks() -> None:
    layout = Layout(cp=4)
    graph, groups = step(DENSE, layout, global_batch=1).classes[0], RankGroups(layout).context
    piece = 2 * 64 * 4 * 64 * 2  # keys and values of 64 tokens, 4 heads of 64, 16 bit
    assert calls(graph, CollectiveKind.ALL_GATHER, groups).count(piece) == 2 * 8
    assert calls(graph, CollectiveKind.REDUCE_SCATTER, groups).count(4 * piece) == 8
    ring = step(DENSE, Layout(cp=4, ring_attention=True), global_batch=1).classes[0]
    permutes = ring.p2p.comm_bytes[ring.kind[ring.p2p.node] == NodeKind.PERMUTE]
    assert set(permutes.tolist()) == {piece}
    assert len(permutes) == 8 * 3 * 3  # keys forward and backward, and their gradients


@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(pp=2, vp=2), Layout(pp=4, dp=2, tp=2)])
def test_messages_between_stages_have_tags_of_their_own(layout: Layout) -> None:  # defect 7
    workload = step(DENSE, layout)
    sends, receives = set[tuple[int, int, int]](), set[tuple[int, int, int]]()
    for stage, graph in enumerate(workload.classes):
        rank = int(workload.ranks_of(stage)[0])
        for row, node in enumerate(graph.p2p.node.tolist()):
            way = graph.permutations[int(graph.p2p.permutation[row])]
            tag = int(graph.p2p.tag[row])
            if graph.kind[node] == NodeKind.SEND:
                key = (rank, way.target_of(rank), tag)
                assert key not in sends
                sends.add(key)
            else:
                receives.add((way.source_of(rank), rank, tag))
            assert float(graph.p2p.comm_bytes[row]) == A / layout.tp
    first = {(a, b, tag) for a, b, tag in sends if min(a, b) >= 0}
    assert first == receives
    assert max(tag for *_, tag in sends) < 500_000_000


def test_bytes_of_a_product_are_those_of_operands_and_result() -> None:  # defect 5
    graph = step(DENSE, Layout()).classes[0]
    node = next(each for each in range(len(graph)) if graph.node_name(each) == "layers.0.mlp.fc1")
    m, n, k = 256, 2 * 1536, 512
    assert graph.bytes_moved[node] == 2 * (m * k + k * n + m * n)


def test_looking_up_embeddings_is_no_product() -> None:  # defect 6
    graph = step(DENSE, Layout(tp=2)).classes[0]
    found = [each for each in range(len(graph)) if graph.node_name(each) == "embedding.lookup"]
    assert {int(graph.op_class[each]) for each in found} == {OpClass.GATHER}
    assert {float(graph.flops[each]) for each in found} == {0.0}


def test_equal_settings_give_equal_workloads() -> None:  # defect 7
    for model, layout in ((MIXTURE, Layout(dp=2, tp=2, pp=2)), (HYBRID, Layout(dp=2, tp=2))):
        assert not workloads_equal(step(model, layout), step(model, layout))


@pytest.mark.parametrize(
    ("layout", "settings", "rule"),
    [
        (Layout(tp=3), {}, "tp-divides-heads"),  # defect 8
        (Layout(tp=16), {}, "tp-divides-heads"),
        (Layout(tp=8, dp=0), {}, "dp-positive"),
        (Layout(pp=9), {}, "pp-divides-layers"),
        (Layout(vp=2), {}, "vp-needs-pp"),
        (Layout(pp=4, vp=2), {"global_batch": 6}, "vp-micro-batches"),
        (Layout(ep=2, dp=2), {}, "ep-needs-experts"),
        (Layout(cp=3), {}, "cp-divides-seq"),
        (Layout(dp=3), {}, "batch-divides"),
        (Layout(dp=4, shard=3), {}, "shard-divides-dp"),
        (Layout(zero=4), {}, "zero-level"),
        (Layout(pp=2, vp=2), {"schedule": "zero-bubble"}, "vp-schedule"),
        (Layout(pp=2, vp=2), {"schedule": "gpipe"}, "vp-schedule"),
    ],
)
def test_layouts_that_cannot_be_name_their_rule(layout: Layout, settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        step(DENSE, layout, **settings)
    assert caught.value.code == rule
    assert caught.value.hint


def test_experts_that_no_shard_group_holds_are_refused() -> None:
    with pytest.raises(UsageError, match="the 2 ranks of a shard group") as caught:
        step(MIXTURE, Layout(dp=8, ep=4, shard=2))
    assert caught.value.code == "ep-divides-shard"


def test_experts_that_do_not_spread_are_refused() -> None:
    with pytest.raises(UsageError, match="16 experts do not divide over 3"):
        training_workload(MIXTURE, Layout(dp=3, ep=3), training(global_batch=9))


SETTINGS: tuple[tuple[Model, Layout, dict[str, Any]], ...] = (
    (DENSE, Layout(dp=2, tp=2, pp=4), {}),
    (DENSE, Layout(pp=4, vp=2, dp=2), {"schedule": "interleaved"}),
    (DENSE, Layout(pp=4), {"schedule": "gpipe"}),
    (DENSE, Layout(pp=4, dp=2), {"schedule": "zero-bubble"}),
    (DENSE, Layout(dp=2, tp=2), {"precision": precision_of("mxfp8")}),
    (DENSE, Layout(dp=2, tp=2), {"lora_rank": 8}),
    (DENSE, Layout(pp=2, dp=2), {"overlap": Overlap.none()}),
    (PLAIN, Layout(pp=2, dp=2, tp=2), {}),
    (MIXTURE, Layout(dp=2, tp=2, pp=2, ep=4), {}),
    (MIXTURE, Layout(dp=4, ep=2, etp=2), {"overlap": Overlap(experts=True)}),
    (MIXTURE, Layout(dp=2, tp=2, ep=2), {"recompute": recompute_of("moe_act,mla_up_proj,layernorm")}),
    (HYBRID, Layout(dp=2, tp=2, pp=2), {"recompute": recompute_of("full")}),
    (DENSE, Layout(dp=4, zero=3, shard=2), {"style": "torchtitan"}),
)


@pytest.mark.parametrize(("model", "layout", "settings"), SETTINGS)
def test_steps_are_valid_and_run(model: Model, layout: Layout, settings: dict[str, Any]) -> None:
    workload = step(model, layout, **settings)
    report = hespas.check(workload, profile="astra-sim")
    assert report.valid
    assert {each.code for each in report.details.violations} <= {"ET023", "ET021"}
    done = hespas.simulate(workload, "H100-SXM", system="dgx-h100")
    assert done.step_ns > 0
    assert sum(each.unknown for each in done.classes) == 0


def test_products_and_their_traffic_are_pipelined_where_that_is_asked_for() -> None:
    layout = Layout(tp=4, sequence_parallel=True)
    plain, pieces = (step(DENSE, layout, overlap=Overlap(tensor=each)) for each in (False, True))
    assert product_flops(pieces) == pytest.approx(product_flops(plain))
    graph = pieces.classes[0]
    assert set(graph.p2p.comm_bytes.tolist()) == {A / 4}
    # 3 pieces each: four products of a layer forward, four for gradients of inputs
    assert graph.executions[graph.p2p.node].sum() == 8 * 3 * 8 * 8
    scattered = calls(graph, CollectiveKind.REDUCE_SCATTER, RankGroups(layout).tensor)
    assert scattered == [A] * 8 * 2  # of the embedding, and of the gradient of the head's input
    assert hespas.check(pieces).valid


def test_compilers_merge_additions_into_the_next_norm() -> None:
    alone, merged = (step(DENSE, Layout(pp=2), style=each) for each in ("megatron", "torchtitan"))
    for plain, fused in zip(alone.classes, merged.classes, strict=True):
        names = Counter(fused.op_name(node) for node in range(len(fused)))
        adds = Counter(plain.op_name(node) for node in range(len(plain)))["aten::add"]
        assert adds == 8 * 8  # two of each of four layers, for eight micro-batches
        left = names["aten::add"]  # what leaves a stage is added before it is sent
        assert (left, names["fused_add_rms_norm"]) in {(8, 56), (0, 64)}
    assert product_flops(merged) == product_flops(alone)
    assert hespas.check(merged).valid


def test_weights_are_gathered_no_earlier_than_a_layer_ahead() -> None:
    workload = step(DENSE, Layout(dp=4, zero=3), global_batch=8)
    graph = workload.classes[0]
    done = hespas.simulate(workload, "H100-SXM", system="dgx-h100").timeline
    mine = done.rank == 0
    starts = dict(zip(done.node[mine].tolist(), done.start_ns[mine].tolist(), strict=True))
    names = {graph.node_name(node): node for node in reversed(range(len(graph)))}
    loss = starts[names["loss0.cross_entropy"]]
    gathers = [node for node in range(len(graph)) if graph.node_name(node) == "layers.7.weights.all_gather"]
    forward, backward, *_ = sorted(starts[node] for node in gathers)
    assert forward > starts[names["layers.5.attention.norm"]]
    assert backward > loss
    waited = set(graph.data_deps.values.tolist())
    made = [node for node in range(len(graph)) if ".wgrad" in graph.node_name(node)]
    layers = [node for node in made if graph.node_name(node).startswith("layers.")]
    assert layers
    assert set(layers) <= waited


def test_layers_computed_again_are_counted_in_each_stage() -> None:
    layout, recompute = Layout(pp=2, vp=2), recompute_of("full:3")
    one, other = step(DENSE, layout, recompute=recompute), step(DENSE, Layout(pp=2), recompute=recompute)
    assert product_flops(one) == pytest.approx(product_flops(other))


def test_settings_are_not_spent_on_generating() -> None:
    layout = Layout(dp=4096, tp=8, pp=2)
    workload: Workload = step(DENSE, layout, global_batch=4096 * 4)
    assert workload.num_ranks == 65_536
    assert sum(map(len, workload.classes)) < 10_000
