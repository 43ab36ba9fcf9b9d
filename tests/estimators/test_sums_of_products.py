"""Nodes of several products: their time is the sum of the products' times."""

from __future__ import annotations

import pytest

from hespas.estimators import load_estimator
from hespas.estimators.roofline import Roofline
from hespas.graph import GraphBuilder, OpClass, OpGraph, dtype
from hespas.hardware import load_device

H100 = load_device("H100-SXM")


def gradients(op_class: OpClass, *sizes: tuple[int, int, int]) -> OpGraph:
    """A node of several bf16 products of (m, n, k)."""
    b = GraphBuilder("gradients")
    flops = [2.0 * m * n * k for m, n, k in sizes]
    moved = sum(2.0 * (m * n + m * k + n * k) for m, n, k in sizes)
    node = b.add_node(
        name_id=0, op_id=b.strings.add("convolution_backward"), op_class=op_class, flops=sum(flops),
        transcendentals=0, bytes_read=moved, bytes_written=0,
    )  # fmt: skip
    for (m, n, k), work in zip(sizes, flops, strict=True):
        b.add_contraction(
            node, batch=1, m=m, n=n, k=k, flops=work, useful_flops=work,
            lhs=dtype("bf16").code, rhs=dtype("bf16").code, accumulator=dtype("f32").code, products=1,
        )  # fmt: skip
    return b.build()


@pytest.mark.parametrize("op_class", [OpClass.CONVOLUTION, OpClass.CONTRACTION])
def test_a_node_of_several_products_takes_the_sum_of_their_times(op_class: OpClass) -> None:
    sizes = (8192, 512, 4608), (512, 4608, 8192)
    model = load_estimator("composite")
    whole = model.estimate(gradients(op_class, *sizes), H100)
    parts = [model.estimate(gradients(op_class, size), H100) for size in sizes]
    for column in ("duration_ns", "low_ns", "high_ns"):
        expected = sum(float(getattr(part, column)[0]) for part in parts)
        assert getattr(whole, column)[0] == pytest.approx(expected, rel=0.1)
    assert whole.estimators[whole.estimator[0]] == "learned"
    assert whole.bases[whole.basis[0]] in {"measured", "beyond range"}
    assert whole.duration_ns[0] > 1.2 * Roofline().estimate(gradients(op_class, *sizes), H100).duration_ns[0]


def test_a_fusion_of_several_products_is_not_their_sum() -> None:
    graph = gradients(OpClass.FUSION, (512, 512, 512), (512, 512, 512))
    estimate = load_estimator("composite").estimate(graph, H100)
    assert estimate.estimators[estimate.estimator[0]] == "roofline"
