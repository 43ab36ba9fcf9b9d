"""Convolutions as the products that SCALE-Sim makes of them (im2col, every window read anew)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["Product", "convolution_product"]


class Product(NamedTuple):
    """``batch`` products (m, k) by (k, n), one after another."""

    m: FloatArray
    n: FloatArray
    k: FloatArray
    batch: FloatArray


def convolution_product(
    *,
    height: FloatArray,
    width: FloatArray,
    kernel_height: FloatArray,
    kernel_width: FloatArray,
    channels: FloatArray,
    filters: FloatArray,
    stride: FloatArray,
    images: FloatArray | None = None,
    groups: FloatArray | None = None,
    dilation: FloatArray | None = None,
) -> Product:
    """Sizes of an input that is padded already, columns of one shape. ``m`` counts output places of all
    ``images``, ``k`` is a window; groups run one after another; dilation only changes the number of places.

    The simulator knows one image, one group and no dilation; the rest follows from what it does with those.
    """
    one = np.ones_like(height)
    spread, parts = one if dilation is None else dilation, one if groups is None else groups
    places = one if images is None else images
    for size, kernel in ((height, kernel_height), (width, kernel_width)):
        reach = spread * (kernel - 1) + 1
        places = places * np.maximum(np.ceil((size - reach + stride) / stride), 0.0)
    return Product(places, filters / parts, kernel_height * kernel_width * channels / parts, parts)
