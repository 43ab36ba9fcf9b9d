"""In which number formats a program multiplies: operands, accumulator, and what it states beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hespas.graph import ACCUMULATOR_BITS, DTYPES, MAC_NOISE_SIGMA, UNKNOWN_DTYPE, OpGraph
from hespas.graph.columns import IntArray

__all__ = ["ProductRow", "product_rows"]

_LONGEST = 32
"""Characters of a stated figure; a longer one is no number."""


@dataclass(frozen=True, slots=True)
class ProductRow:
    """Matrix products and convolutions of one number format; sums over a step (NaN: unknown).

    Types are empty where unknown. ``accumulator_bits`` and ``mac_noise_sigma`` are the program's own words,
    empty where it states none. ``products`` counts primitive products per multiply.
    """

    lhs: str
    rhs: str
    accumulator: str
    products: int
    accumulator_bits: str
    mac_noise_sigma: str
    nodes: int
    executions: float
    flops: float


def product_rows(graph: OpGraph) -> tuple[ProductRow, ...]:
    """One row per number format, the most FLOPs first. O(products)."""
    table = graph.contractions
    if not len(table):
        return ()
    texts: dict[str, int] = {"": 0}
    stated = [_stated(graph, key, texts)[table.node] for key in (ACCUMULATOR_BITS, MAC_NOISE_SIGMA)]
    types = (table.lhs, table.rhs, table.accumulator)
    key = np.stack([*(column.astype(np.int64) for column in types), table.products.astype(np.int64), *stated])
    keys, place = np.unique(key, axis=1, return_inverse=True)
    rows = _rows(graph, keys, place.reshape(-1).astype(np.int64), tuple(texts))
    return tuple(sorted(rows, key=lambda row: -np.nan_to_num(row.flops)))


def _rows(graph: OpGraph, keys: IntArray, place: IntArray, texts: tuple[str, ...]) -> Iterator[ProductRow]:
    table = graph.contractions
    runs = graph.multiplicity[table.node]
    count = keys.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # sums past what a float holds are infinite
        executions = np.bincount(place, runs, count)
        flops = np.bincount(place, table.flops * runs, count)
    nodes = np.bincount(place, minlength=count)
    distinct: list[list[int]] = keys.T.tolist()
    for row, (lhs, rhs, accumulator, products, bits, sigma) in enumerate(distinct):
        yield ProductRow(
            lhs=_name(lhs),
            rhs=_name(rhs),
            accumulator=_name(accumulator),
            products=products,
            accumulator_bits=texts[bits],
            mac_noise_sigma=texts[sigma],
            nodes=int(nodes[row]),
            executions=float(executions[row]),
            flops=float(flops[row]),
        )


def _name(code: int) -> str:
    return "" if code == UNKNOWN_DTYPE else DTYPES[code].name


def _stated(graph: OpGraph, key: str, texts: dict[str, int]) -> IntArray:
    """For each node the number of the text it states for ``key``; new texts are added to ``texts``."""
    found = np.zeros(len(graph), np.int64)
    extra = graph.extra
    wanted = [row for row in np.unique(extra.key).tolist() if graph.strings[row] == key]
    for row in np.flatnonzero(np.isin(extra.key, wanted) & (extra.node >= 0)).tolist():
        text = bytes(extra.value(row)).decode("utf-8", "replace")
        if len(text) <= _LONGEST and text.isprintable():
            found[int(extra.node[row])] = texts.setdefault(text, len(texts))
    return found
