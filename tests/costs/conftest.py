"""Tensors and operations for the tests of the cost table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hespas.costs.operation import Attributes, Cost, Operation, Tensor
from hespas.costs.table import cost_of
from hespas.graph import dtype

MakeTensor = Callable[..., Tensor]
Price = Callable[..., Cost]


@pytest.fixture
def tensor() -> MakeTensor:
    """``tensor("f32", 4, 8)``."""

    def make(element: str, *shape: int) -> Tensor:
        return Tensor(dtype(element), shape)

    return make


@pytest.fixture
def price() -> Price:
    """``price("add", [a, b], [c], attributes)``: what one operation costs by the table."""

    def make(
        name: str,
        operands: list[Tensor],
        results: list[Tensor],
        attributes: Attributes = None,
        repeated: tuple[int, ...] = (),
    ) -> Cost:
        return cost_of(name, Operation(tuple(operands), tuple(results), attributes, repeated))

    return make
