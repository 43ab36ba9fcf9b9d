"""Convolutions in number formats without measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators.learned import Learned
from hespas.estimators.rates import roof_ns
from hespas.graph import Diagnostics
from hespas.hardware import load_device
from hespas.operations import Labels, Operations, build

A100 = load_device("A100-SXM-80GB")


def convolutions(scheme: str, *, kernel: float = 3.0, variant: str = "") -> Operations:
    """Layers of 256 images that halve their sides and double their channels."""
    sides = np.array([56.0, 28.0, 14.0, 7.0])
    channels = 64 * 56 / sides
    return build.convolutions(
        Labels.constant(scheme, 4),
        images=np.full(4, 256.0),
        in_channels=channels,
        out_channels=channels,
        kernel=np.full(4, kernel),
        in_size=sides,
        out_size=sides,
        variant=Labels.constant(variant, 4),
    )


def as_product(ops: Operations) -> Operations:
    return replace(ops, kind=Labels.constant("matmul", len(ops)))


def of_windows(ops: Operations) -> Operations:
    """The product of every window, written out."""
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    return build.matmuls(ops.scheme, batch=batch, m=m, n=n, k=k)


def test_a_convolution_takes_as_long_as_the_product_it_is_that_reads_its_input_once() -> None:
    found = Diagnostics()
    ops = convolutions("f16")
    said = Learned().predict(ops, A100, found)
    product = Learned().predict(as_product(ops), A100)
    np.testing.assert_allclose(said.duration_ns, np.maximum(product.duration_ns, roof_ns(ops, A100)))
    assert np.all(said.low_ns < product.low_ns)
    assert np.all(said.high_ns > product.high_ns)
    assert said.duration_ns[0] < 0.8 * Learned().predict(of_windows(ops), A100).duration_ns[0]
    assert [each.code for each in found] == ["learned.stand-in"]


def test_a_format_that_was_measured_and_a_named_library_have_no_stand_in() -> None:
    pcie = load_device("A100-PCIe-80GB")
    ops = convolutions("f32_full")
    found = Diagnostics()
    said = Learned().predict(ops, pcie, found)
    assert np.all(said.duration_ns != Learned().predict(as_product(ops), pcie).duration_ns)
    assert "learned.stand-in" not in found.counts()
    assert np.isnan(Learned().predict(convolutions("f16", variant="some library"), A100).duration_ns).all()


def test_on_tf32_units_a_convolution_moves_what_a_convolution_moves() -> None:
    ops = convolutions("f32", kernel=7.0)
    said = Learned().predict(ops, A100).duration_ns
    whole = Learned().predict(of_windows(ops), A100).duration_ns
    assert np.all(said <= whole)
    assert said[0] < 0.8 * whole[0]


def test_where_no_product_is_known_either_it_is_refused_once() -> None:
    found = Diagnostics()
    said = Learned().predict(convolutions("f64"), A100, found)
    assert np.isnan(said.duration_ns).all()
    assert found.counts() == pytest.approx({"learned.refused": 4})
