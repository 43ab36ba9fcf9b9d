"""What array simulators understand: one product at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hespas.operations import Operations, find_scheme

__all__ = ["Product", "products_of"]


class Product(NamedTuple):
    """(m x k) by (k x n), operands of ``bits`` bits."""

    m: int
    n: int
    k: int
    bits: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} of {self.bits} bits"


def products_of(ops: Operations) -> list[tuple[Product, int] | None]:
    """The product of each operation and how often it runs (its batch); None for what is no product.

    A convolution is the product that im2col makes of it.
    """
    wanted = np.zeros(len(ops), np.bool_)
    wanted[ops.kind.where("matmul", "convolution")] = True
    sizes = [ops.dim(name).tolist() for name in ("m", "n", "k", "batch")]
    found: list[tuple[Product, int] | None] = []
    for row in range(len(ops)):
        m, n, k, batch = (column[row] for column in sizes)
        scheme = find_scheme(ops.scheme[row])
        known = all(size >= 1 and size.is_integer() for size in (m, n, k, batch))  # NaN is neither
        if not wanted[row] or scheme is None or not known:
            found.append(None)
            continue
        bits = int(max(scheme.activation_bits, 1))
        found.append((Product(int(m), int(n), int(k), bits), int(batch)))
    return found
