"""Costs of elementwise operations, reductions, windows, normalisation and sorting.

Formulas: StableHLO specification for what is computed; counts follow the convention of :mod:`cost`.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, nan, prod

from hespas.costs.convolution import valid_positions
from hespas.costs.cost import Cost, Rule, arithmetic_dtype, is_complex, unknown_cost
from hespas.costs.facts import (
    Body,
    MapFacts,
    Operation,
    ReduceFacts,
    ScanFacts,
    SelectScatterFacts,
    SortFacts,
    Tensor,
    TopKFacts,
    WindowFacts,
)
from hespas.graph import OpClass

__all__ = [
    "batch_norm",
    "elementwise",
    "expanded",
    "map_body",
    "quantize",
    "reduce",
    "reduce_window",
    "scan",
    "select_and_scatter",
    "sort",
    "top_k",
    "transcendental",
]


def _pointwise(op: Operation, op_class: OpClass, flops: float, transcendentals: float) -> Cost:
    return Cost(
        op_class,
        flops,
        flops,
        transcendentals,
        op.read_bytes,
        op.written_bytes,
        arithmetic_dtype(op.operands),
    )


def elementwise(per_element: int = 1, per_complex_element: int | None = None) -> Rule:
    """``per_element`` FLOPs for each result element; a complex add is 2 and a complex multiply 6."""
    complex_flops = 2 * per_element if per_complex_element is None else per_complex_element

    def rule(op: Operation) -> Cost:
        factor = complex_flops if is_complex(op.operands[-1]) else per_element
        return _pointwise(op, OpClass.ELEMENTWISE, factor * op.results[0].elements, 0.0)

    return rule


def transcendental(op: Operation) -> Cost:
    """One transcendental for each result element, no FLOPs."""
    return _pointwise(op, OpClass.TRANSCENDENTAL, 0.0, op.results[0].elements)


def quantize(op: Operation) -> Cost:
    """Scale and shift: two FLOPs for each element, in the type that is expressed; bytes at storage width."""
    return _pointwise(op, OpClass.QUANTIZE, 2.0 * op.results[0].elements, 0.0)


def _applied(op: Operation, op_class: OpClass, times: float, flops: float, transcendentals: float) -> Cost:
    """A body applied ``times`` times over all operands and results."""
    total = times * flops
    rate = op.operands[0].code if op.operands else -1
    return Cost(op_class, total, total, times * transcendentals, op.read_bytes, op.written_bytes, rate)


def reduce(op: Operation) -> Cost:
    """(n_in - n_out) applications of the combined body; reads **all** inputs and init values."""
    if not isinstance(op.facts, ReduceFacts) or not op.operands:
        return unknown_cost(op, OpClass.REDUCTION)
    steps = op.operands[0].elements - op.results[0].elements
    body = op.facts.body
    return _applied(op, OpClass.REDUCTION, max(steps, 0.0), body.flops, body.transcendentals)


def reduce_window(op: Operation) -> Cost:
    """(taps - 1) applications for each result element, where taps on padding or dilation holes are left out.

    ``useful_flops`` counts real taps only, ``flops`` all positions of the window.
    """
    facts = op.facts
    if not isinstance(facts, WindowFacts) or not op.operands:
        return unknown_cost(op, OpClass.WINDOW)
    source, result = op.operands[0], op.results[0]
    applications = result.elements * (prod(dim.size for dim in facts.window) - 1)
    pairs = [
        float(valid_positions(extent, out, dim))
        for extent, out, dim in zip(source.shape, result.shape, facts.window, strict=True)
    ]
    useful = max(prod(pairs) - result.elements, 0.0) if result.elements == result.elements else nan
    cost = _applied(op, OpClass.WINDOW, applications, facts.body.flops, facts.body.transcendentals)
    return replace(cost, useful_flops=useful * facts.body.flops)


def select_and_scatter(op: Operation) -> Cost:
    """(window - 1) comparisons and one scatter body for each source element."""
    facts = op.facts
    if not isinstance(facts, SelectScatterFacts):
        return unknown_cost(op, OpClass.WINDOW)
    picks = facts.window_elements - 1
    flops = picks * facts.select.flops + facts.scatter.flops
    transcendentals = picks * facts.select.transcendentals + facts.scatter.transcendentals
    return _applied(op, OpClass.WINDOW, op.operands[1].elements, flops, transcendentals)


def map_body(op: Operation) -> Cost:
    """The body once for each element."""
    if not isinstance(op.facts, MapFacts):
        return unknown_cost(op, OpClass.MAP)
    body = op.facts.body
    return _applied(op, OpClass.MAP, op.results[0].elements, body.flops, body.transcendentals)


def expanded(flops: float, transcendentals: float) -> Rule:
    """A special function, by what its polynomials take for each result element."""

    def rule(op: Operation) -> Cost:
        elements = op.results[0].elements
        return _pointwise(op, OpClass.TRANSCENDENTAL, flops * elements, transcendentals * elements)

    return rule


def scan(op: Operation) -> Cost:
    """The body once for each slice along the scanned dimension."""
    if not isinstance(op.facts, ScanFacts) or not op.operands:
        return unknown_cost(op, OpClass.REDUCTION)
    trips = float(op.facts.trips) if op.facts.trips >= 0 else nan
    return _applied(op, OpClass.REDUCTION, trips, op.facts.body.flops, op.facts.body.transcendentals)


def batch_norm(per_element: int) -> Rule:
    """About ``per_element`` FLOPs for each input element and one rsqrt for each feature (approximate)."""

    def rule(op: Operation) -> Cost:
        features: Tensor = op.operands[1]
        cost = _applied(op, OpClass.NORMALIZATION, op.operands[0].elements, per_element, 0.0)
        return replace(cost, transcendentals=features.elements)

    return rule


def _comparisons(op: Operation, extent: int, depth: int, body: Body) -> Cost:
    """``depth`` comparisons for each element of the first operand; unknown where the extent is."""
    times = op.operands[0].elements * depth if extent >= 0 else nan
    return _applied(op, OpClass.SORT, times, body.flops, body.transcendentals)


def sort(op: Operation) -> Cost:
    """elements x ceil(log2 extent) comparisons; inputs and outputs pass once."""
    if not isinstance(op.facts, SortFacts) or not op.operands:
        return unknown_cost(op, OpClass.SORT)
    extent = op.facts.extent
    depth = ceil(log2(extent)) if extent > 1 else 0
    return _comparisons(op, extent, depth, op.facts.comparator)


def top_k(op: Operation) -> Cost:
    """elements x ceil(log2 k) comparisons, at least one each."""
    if not isinstance(op.facts, TopKFacts) or not op.operands:
        return unknown_cost(op, OpClass.SORT)
    depth = max(ceil(log2(op.facts.k)), 1) if op.facts.k > 0 else 0
    return _comparisons(op, 0, depth, Body(1.0))
