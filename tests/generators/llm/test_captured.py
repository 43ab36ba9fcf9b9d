"""Generated steps compared with JAX programs of the same layers that XLA's partitioner split along a
sequence, over experts and into stages (fixtures/make/parallel.py): products and communication of a rank.
"""

from __future__ import annotations

from collections import Counter

import pytest

import hespas
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Attention, Experts, Mlp, Model
from hespas.generators.llm.settings import Training
from hespas.generators.llm.step import training_workload
from hespas.graph import CollectiveKind, OpClass, OpGraph

pytest.importorskip("jax")
LAYER = (Attention(heads=8, kv_heads=8, head_dim=32), Mlp(ffn=1024))
FUSED = {768: (256, 3), 2048: (1024, 2)}
"""Weights that the generator has as one: the extent of one of them, and how many they are."""
AGAIN = 14 / 12
"""Fused attention computes its scores again: seven products where the program has six."""


def captured(name: str, mesh: str) -> OpGraph:
    return hespas.capture(f"fixtures.make.parallel:{name}", mesh=mesh).workload.classes[0]


def generated(model: Model, layout: Layout, batch: int, micro_batch: int, rank: int = 0) -> OpGraph:
    training = Training(seq=128, global_batch=batch, micro_batch=micro_batch, style="maxtext")
    return training_workload(model, layout, training).graph_of(rank)


def products(graph: OpGraph, fused: dict[int, tuple[int, int]]) -> Counter[tuple[int, ...]]:
    """FLOPs of products that are not attention's by their extents, those of fused weights as of each."""
    found: Counter[tuple[int, ...]] = Counter()
    table = graph.contractions
    for row in range(len(table)):
        extents = [int(column[row]) for column in (table.m, table.n, table.k)]
        if int(table.batch[row]) == 1 and 32 not in extents:
            single = sorted(fused.get(extent, (extent, 1))[0] for extent in extents)
            found[tuple(single)] += int(table.flops[row] * graph.executions[table.node[row]])
    return found


def attention(graph: OpGraph) -> float:
    """FLOPs of fused attention, or of the products over heads of 32 that it is made of."""
    ours = graph.op_class == OpClass.ATTENTION
    if ours.any():
        return float((graph.flops * graph.executions)[ours].sum())
    table = graph.contractions
    heads = [32 in (int(table.m[row]), int(table.n[row]), int(table.k[row])) for row in range(len(table))]
    return float((table.flops * graph.executions[table.node])[heads].sum())


def test_a_sequence_split_over_four_ranks() -> None:
    xla = captured("context", "context=4")
    model = Model(name="llama", hidden=256, vocab=1024, layers=(LAYER,) * 2)
    ours = generated(model, Layout(cp=4), batch=4, micro_batch=4)
    assert products(ours, FUSED) == products(xla, {})
    assert attention(ours) == pytest.approx(attention(xla) * AGAIN)


def test_experts_on_four_ranks() -> None:
    xla = captured("experts", "expert=4")
    model = Model(
        name="experts", hidden=256, vocab=1000, layers=((Experts(experts=4, topk=2, ffn=512),),) * 2
    )
    ours = generated(model, Layout(dp=4, ep=4), batch=16, micro_batch=4)
    # Of a device's 1,024 chosen tokens, gate and up are one product of 1,024 columns.
    apart: Counter[tuple[int, ...]] = Counter()
    for extents, flops in products(ours, {}).items():
        if 1000 not in extents:
            apart[(256, 512, 1024) if extents == (256, 1024, 1024) else extents] += flops
    assert apart == products(xla, {})
    assert exchanged(ours) == exchanged(xla) == [512 * 2 * 256 * 2.0] * 8


def exchanged(graph: OpGraph) -> list[float]:
    """Bytes of each all-to-all."""
    table = graph.collectives
    sizes: list[float] = table.comm_bytes[table.kind == CollectiveKind.ALL_TO_ALL].tolist()
    return sizes


def test_four_stages_of_two_layers() -> None:
    xla = captured("pipeline", "stage=4")
    micro_batches, ticks = 4, 7
    model = Model(name="llama", hidden=256, vocab=1024, layers=(LAYER,) * 8)
    ours = generated(model, Layout(pp=4), batch=4, micro_batch=1, rank=1)
    wanted = {extents: flops * micro_batches // ticks for extents, flops in products(xla, {}).items()}
    assert products(ours, FUSED) == wanted
    assert attention(ours) == pytest.approx(attention(xla) / ticks * micro_batches * AGAIN)
    # A micro-batch of activations forward and one of gradients back, each a tick.
    assert set(xla.p2p.comm_bytes.tolist()) == set(ours.p2p.comm_bytes.tolist()) == {128 * 256 * 2.0}
    assert xla.executions[xla.p2p.node].tolist() == [ticks] * 2
    assert len(ours.p2p) == 4 * micro_batches
