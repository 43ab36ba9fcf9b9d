"""Estimates of models of other packages: refused if a reader of the estimate would fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from hespas.estimators.interface import estimate_with
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics, Estimate, GraphBuilder, OpClass, OpGraph
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, load_device


@dataclass(frozen=True, slots=True)
class PlugIn:
    """An estimator of another package that states a basis."""

    bases: tuple[object, ...]
    codes: NDArray[np.generic]
    name: str = "plug-in"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        made = Roofline().estimate(graph, device, diagnostics)
        return replace(
            made, bases=cast("tuple[str, ...]", self.bases), basis=cast("NDArray[np.int16]", self.codes)
        )


def graph_of_two() -> OpGraph:
    builder = GraphBuilder("two")
    for _ in range(2):
        builder.add_node(name_id=0, op_id=0, op_class=OpClass.ELEMENTWISE, flops=1.0)
    return builder.build()


@pytest.mark.parametrize(
    ("bases", "codes", "fault"),
    [
        (("a",), np.array([0, 1]), "the basis code 1, but states 1 bases"),
        (("a",), np.array([0, -2]), "the basis code -2, but states 1 bases"),
        (("a",), np.array([0, 2**64 - 1], np.uint64), "the basis code 18446744073709551615"),
        (("a",), np.array([0.0, 0.0]), "basis codes of type float64"),
        (("a", None), np.array([0, 0]), "the basis None, which is not a text"),
    ],
)
def test_an_impossible_basis_is_refused(
    bases: tuple[object, ...], codes: NDArray[np.generic], fault: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        estimate_with(PlugIn(bases, codes), graph_of_two(), load_device("a100"))
    assert f"estimator 'plug-in' of another package returns {fault}" in caught.value.message
    assert caught.value.hint


def test_a_legal_basis_is_kept() -> None:
    made = estimate_with(PlugIn(("a",), np.array([-1, 0], np.int8)), graph_of_two(), load_device("a100"))
    assert made.basis.tolist() == [-1, 0]
