"""Products of float32 on TF32 units by those of bf16."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.estimators.learned import Learned
from hespas.estimators.rates import roof_ns
from hespas.graph import Diagnostics
from hespas.hardware import load_device
from hespas.operations import Labels, Operations, build

A100 = load_device("A100-SXM-80GB")


def products(scheme: str | Labels, k: float, *, variant: str = "", count: int = 5) -> Operations:
    """Square-ish products of growing m."""
    return build.matmuls(
        Labels.constant(scheme, count) if isinstance(scheme, str) else scheme,
        batch=np.ones(count),
        m=np.geomspace(64, 4096, count).round(),
        n=np.full(count, 1024.0),
        k=np.full(count, k),
        variant=Labels.constant(variant, count),
    )


def test_a_product_on_tf32_units_takes_as_long_as_a_bf16_product_of_twice_the_depth() -> None:
    found = Diagnostics()
    said = Learned().predict(products("f32", 512), A100, found)
    half = Learned().predict(products("bf16", 1024), A100)
    ops = products("f32", 512)
    written_ns = ops.dim("m") * 1024 * 2 / A100.main_memory.bandwidth_bytes_per_s * 1e9
    np.testing.assert_allclose(said.duration_ns, half.duration_ns + written_ns)
    assert np.all(said.low_ns <= said.duration_ns)
    assert np.all(said.low_ns >= roof_ns(ops, A100))
    assert [each.code for each in found] == ["learned.stand-in"]


@pytest.mark.parametrize(
    ("device", "variant"), [("V100-SXM2-32GB", ""), ("MI100", ""), ("A100-SXM-80GB", "some library")]
)
def test_without_tf32_units_or_with_a_library_nothing_stands_in(device: str, variant: str) -> None:
    found = Diagnostics()
    said = Learned().predict(products("f32", 512, variant=variant), load_device(device), found)
    assert np.isnan(said.duration_ns).all()
    assert found.counts()["learned.refused"] == 5


def test_what_stands_in_leaves_other_operations_as_they_are() -> None:
    deep, plain = products("f32", 1024), products("bf16", 1024)
    names = Labels.choice(("bf16", "f32"), np.array([0, 1, 0, 1, 0]))
    both = Learned().predict(products(names, 1024), A100).duration_ns
    np.testing.assert_array_equal(both[0::2], Learned().predict(plain, A100).duration_ns[0::2])
    np.testing.assert_array_equal(both[1::2], Learned().predict(deep, A100).duration_ns[1::2])
