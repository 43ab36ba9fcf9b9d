"""Small language models, and counts of their workloads."""

from __future__ import annotations

from typing import Any

import numpy as np

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Attention, Experts, LatentAttention, Mamba, Mlp, Model
from hespas.generators.llm.settings import Training
from hespas.generators.llm.step import training_workload
from hespas.graph import CollectiveKind, OpClass, OpGraph, Workload
from hespas.graph.groups import GroupSet
from hespas.graph.passes import totals

DENSE = Model(
    name="dense",
    hidden=512,
    vocab=1024,
    layers=((Attention(heads=8, kv_heads=4, head_dim=64), Mlp(ffn=1536)),) * 8,
)
PLAIN = Model(
    name="plain",
    hidden=512,
    vocab=1000,
    layers=((Attention(heads=8, kv_heads=8, head_dim=64), Mlp(ffn=2048, gated=False, activation="gelu")),)
    * 4,
    tied=True,
    norm="layer",
    positions="learned",
    max_positions=256,
)
MIXTURE = Model(
    name="mixture",
    hidden=512,
    vocab=1024,
    layers=(
        (
            LatentAttention(heads=8, q_lora=192, kv_lora=64, nope_dim=32, rope_dim=16, v_dim=32),
            Experts(experts=16, topk=2, ffn=256, shared_ffn=256),
        ),
    )
    * 4,
    mtp_layers=1,
)
HYBRID = Model(
    name="hybrid",
    hidden=256,
    vocab=512,
    layers=(
        (Mamba(heads=8, head_dim=64, state=64, groups=4, chunk=64),),
        (Attention(heads=8, kv_heads=4, head_dim=32),),
        (Mlp(ffn=512, gated=False, activation="relu2"),),
        (Mlp(ffn=512, gated=False, activation="relu2"),),
    ),
)
MODELS = (DENSE, PLAIN, MIXTURE, HYBRID)


def training(seq: int = 256, global_batch: int = 8, **settings: Any) -> Training:
    """A step of few tokens."""
    return Training(seq=seq, global_batch=global_batch, **settings)


def step(model: Model, layout: Layout, **settings: Any) -> Workload:
    """The workload of such a step."""
    return training_workload(model, layout, training(**settings))


def useful_flops(workload: Workload) -> float:
    """FLOPs of all ranks, without what masks hide."""
    classes = zip(workload.classes, workload.class_sizes, strict=True)
    return sum(totals(graph).useful_flops * count for graph, count in classes)


def product_flops(workload: Workload) -> float:
    """FLOPs of matrix products and attention of all ranks, which no layout may change."""
    total = 0.0
    for graph, count in zip(workload.classes, workload.class_sizes, strict=True):
        chosen = graph.contractions.node
        heads = np.flatnonzero(graph.op_class == OpClass.ATTENTION)
        for rows in (chosen, heads):
            total += count * float((graph.useful_flops * graph.executions)[rows].sum())
    return total


def calls(graph: OpGraph, kind: CollectiveKind, groups: GroupSet) -> list[float]:
    """Payloads per rank of a kind of collective over some groups, executions counted."""
    table = graph.collectives
    found: list[float] = []
    for row in range(len(table)):
        if table.kind[row] == kind and graph.group_sets[int(table.group_set[row])] == groups:
            found += [float(table.comm_bytes[row])] * int(graph.executions[table.node[row]])
    return found
