"""Generated steps compared with the same model in JAX (fixtures/make/llama.py), lowered: products of each
rank, on one device and on a mesh of FSDP 2 x TP 4.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import hespas
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Attention, Mlp, Model
from hespas.generators.llm.settings import Training
from hespas.generators.llm.step import training_workload
from hespas.graph import OpClass, OpGraph, Workload

pytest.importorskip("jaxlib")
FIXTURES = Path(__file__).parents[3] / "fixtures"
MODEL = Model(
    name="llama",
    hidden=256,
    vocab=1024,
    layers=((Attention(heads=8, kv_heads=8, head_dim=32), Mlp(ffn=1024)),) * 2,
)


def linear(graph: OpGraph) -> Counter[tuple[int, int]]:
    """FLOPs of products that are not attention's, by the two extents that are not of tokens: whichever of the
    three the gradient of a weight sums over, they are those of the weight.
    """
    found: Counter[tuple[int, int]] = Counter()
    table = graph.contractions
    for row, (batch, m, n, k) in enumerate(
        zip(table.batch.tolist(), table.m.tolist(), table.n.tolist(), table.k.tolist(), strict=True)
    ):
        if batch > 1:
            continue
        extents = sorted((m, n, k))
        tokens = 512 if 512 in extents else 256
        extents.remove(tokens)
        found[extents[0], extents[1]] += int(table.flops[row])
    return found


def split(
    found: Counter[tuple[int, int]], parts: dict[tuple[int, int], tuple[int, int]]
) -> Counter[tuple[int, int]]:
    """Fused weights counted as the ones they are made of, which take the same work in sum."""
    renamed: Counter[tuple[int, int]] = Counter()
    for extents, flops in found.items():
        renamed[parts.get(extents, extents)] += flops
    return renamed


@pytest.mark.parametrize(
    ("program", "layout", "batch", "fused"),
    [
        ("hlo/llama_train_1dev.hlo.txt.gz", Layout(), 2, {(256, 768): (256, 256), (256, 2048): (256, 1024)}),
        (
            "stablehlo/llama_fsdp_tp_local_N8.mlir.gz",
            Layout(dp=2, tp=4, zero=3, sequence_parallel=False),
            8,
            {(192, 256): (64, 256), (256, 512): (256, 256)},
        ),
    ],
)
def test_products_are_those_that_xla_has(
    program: str, layout: Layout, batch: int, fused: dict[tuple[int, int], tuple[int, int]]
) -> None:
    lowered = hespas.read(FIXTURES / program)
    assert isinstance(lowered, Workload)
    xla = lowered.classes[0]
    training = Training(seq=128, global_batch=batch, micro_batch=batch // layout.dp, style="maxtext")
    ours = training_workload(MODEL, layout, training).classes[0]
    assert split(linear(ours), fused) == linear(xla)
    attended = xla.contractions.flops[xla.contractions.batch > 1].sum()
    mine = ours.flops[ours.op_class == OpClass.ATTENTION].sum()
    assert mine == pytest.approx(attended * 14 / 12)  # a fused kernel computes the scores again
