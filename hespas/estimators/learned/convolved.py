"""Convolutions in number formats in which none was measured: as the products that libraries make of them.

Implicit products work through the tiles and waves of a product of as many rows (images and places), columns
(channels out) and depth (window and channels in), but read their input once, not every window of it; so the
product has the traffic of the convolution. On the convolutions in f32 of ``neusight_conv.parquet`` (split
``calib``) the median of measured over such an estimate is 1.00 on the A100, 0.94 on the P100 and 0.74 on the
T4, whose library saves multiplications for most of them; 90 % lie within a factor of e on the A100, on which
:data:`APART` stands.

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", arXiv:1410.0759.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.graph.columns import IntArray
from hespas.operations import Labels, Operations

__all__ = ["APART", "as_products", "without_library"]

APART = 1.0
"""By how much such an interval is wider than that of the product, on both sides [log time]."""


def without_library(ops: Operations) -> IntArray:
    """The rows of convolutions that name no library."""
    return np.intersect1d(ops.kind.where("convolution"), ops.variant.where(""))


def as_products(ops: Operations) -> Operations:
    """The same operations as products of matrices with the traffic of the convolutions."""
    return replace(ops, kind=Labels.constant("matmul", len(ops)))
