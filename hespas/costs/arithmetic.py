"""Cost rules of elementwise operations, reductions, windows, normalisation and sorting."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, nan, prod

from hespas.costs.contraction import valid_positions
from hespas.costs.operation import (
    Body,
    BodyAttributes,
    Cost,
    Operation,
    Rule,
    SelectScatterAttributes,
    Tensor,
    TopKAttributes,
    WindowAttributes,
    arithmetic_dtype,
    is_complex,
    unknown_cost,
)
from hespas.graph import OpClass

__all__ = [
    "batch_norm",
    "elementwise",
    "map_body",
    "quantize",
    "reduce",
    "reduce_window",
    "scan",
    "select_and_scatter",
    "sort",
    "top_k",
]


def elementwise(
    flops: float = 1.0,
    *,
    complex_flops: float | None = None,
    transcendentals: float = 0.0,
    op_class: OpClass = OpClass.ELEMENTWISE,
) -> Rule:
    """Return a cost rule for operations with a fixed number of FLOPs and transcendentals per result element.

    The FLOPs have the type that the values represent, also for quantised values. ``complex_flops`` is the
    number of FLOPs per complex element (None: 2 x ``flops``). For example, a complex add is 2 FLOPs and a
    complex multiply 6.
    """
    of_complex = 2 * flops if complex_flops is None else complex_flops

    def rule(op: Operation) -> Cost:
        factor = of_complex if op_class is OpClass.ELEMENTWISE and is_complex(op.operands[-1]) else flops
        elements = op.results[0].elements
        done = factor * elements if factor else 0.0
        return Cost(
            op_class,
            done,
            done,
            transcendentals * elements if transcendentals else 0.0,
            op.read_bytes,
            op.written_bytes,
            arithmetic_dtype(op.operands),
        )

    return rule


quantize = elementwise(2.0, op_class=OpClass.QUANTIZE)
"""Scale and shift: two FLOPs per element in the expressed type; bytes at storage width."""


def _applied(op: Operation, op_class: OpClass, times: float, flops: float, transcendentals: float) -> Cost:
    """Return the cost of applying a scalar body (such as the addition of a reduction) ``times`` times, with
    the bytes of all operands and results.
    """
    total = times * flops
    rate = op.operands[0].code if op.operands else -1
    return Cost(op_class, total, total, times * transcendentals, op.read_bytes, op.written_bytes, rate)


def reduce(op: Operation) -> Cost:
    """Return the cost of a reduction. The reducer is applied once per removed element; their number is the
    elements of the inputs minus the elements of the results. Bytes include all inputs and initial values.
    """
    if not isinstance(op.attributes, BodyAttributes) or not op.operands:
        return unknown_cost(op, OpClass.REDUCTION)
    steps = op.operands[0].elements - op.results[0].elements
    body = op.attributes.body
    return _applied(op, OpClass.REDUCTION, max(steps, 0.0), body.flops, body.transcendentals)


def reduce_window(op: Operation) -> Cost:
    """Return the cost of a windowed reduction. For each result element, the reducer is applied once less than
    the window has elements.

    ``useful_flops`` leaves out window elements on padding or dilation holes; ``flops`` counts all of them.
    """
    attributes = op.attributes
    if not isinstance(attributes, WindowAttributes) or not op.operands:
        return unknown_cost(op, OpClass.WINDOW)
    source, result = op.operands[0], op.results[0]
    applications = result.elements * (prod(dim.size for dim in attributes.window) - 1)
    pairs = [
        float(valid_positions(extent, out, dim))
        for extent, out, dim in zip(source.shape, result.shape, attributes.window, strict=True)
    ]
    useful = max(prod(pairs) - result.elements, 0.0) if result.elements == result.elements else nan
    cost = _applied(op, OpClass.WINDOW, applications, attributes.body.flops, attributes.body.transcendentals)
    return replace(cost, useful_flops=useful * attributes.body.flops)


def select_and_scatter(op: Operation) -> Cost:
    """Return the cost of ``select_and_scatter`` (gradient of max pooling). For each source element it makes
    one comparison less than the window has elements, and applies the scatter body once.
    """
    attributes = op.attributes
    if not isinstance(attributes, SelectScatterAttributes):
        return unknown_cost(op, OpClass.WINDOW)
    picks = attributes.window_elements - 1
    flops = picks * attributes.select.flops + attributes.scatter.flops
    transcendentals = picks * attributes.select.transcendentals + attributes.scatter.transcendentals
    return _applied(op, OpClass.WINDOW, op.operands[1].elements, flops, transcendentals)


def map_body(op: Operation) -> Cost:
    """Return the cost of a map: one application of the body per element."""
    if not isinstance(op.attributes, BodyAttributes):
        return unknown_cost(op, OpClass.MAP)
    body = op.attributes.body
    return _applied(op, OpClass.MAP, op.results[0].elements, body.flops, body.transcendentals)


def scan(op: Operation) -> Cost:
    """Return the cost of a scan: one application of the body per slice along the scanned dimension."""
    if not isinstance(op.attributes, BodyAttributes) or not op.operands:
        return unknown_cost(op, OpClass.REDUCTION)
    trips = float(op.attributes.extent) if op.attributes.extent >= 0 else nan
    return _applied(
        op, OpClass.REDUCTION, trips, op.attributes.body.flops, op.attributes.body.transcendentals
    )


def batch_norm(per_element: int) -> Rule:
    """Return the cost rule of a batch norm with about ``per_element`` FLOPs per input element and one rsqrt
    per feature.
    """

    def rule(op: Operation) -> Cost:
        features: Tensor = op.operands[1]
        cost = _applied(op, OpClass.NORMALIZATION, op.operands[0].elements, per_element, 0.0)
        return replace(cost, transcendentals=features.elements)

    return rule


def _comparisons(op: Operation, extent: int, depth: int, body: Body) -> Cost:
    """Return a cost of ``depth`` comparisons per element of the first operand. It is unknown if ``extent`` is
    unknown.
    """
    times = op.operands[0].elements * depth if extent >= 0 else nan
    return _applied(op, OpClass.SORT, times, body.flops, body.transcendentals)


def sort(op: Operation) -> Cost:
    """Return the cost of a sort: elements x ceil(log2 extent) comparisons. Inputs are read once and outputs
    written once.
    """
    if not isinstance(op.attributes, BodyAttributes) or not op.operands:
        return unknown_cost(op, OpClass.SORT)
    extent = op.attributes.extent
    depth = ceil(log2(extent)) if extent > 1 else 0
    return _comparisons(op, extent, depth, op.attributes.body)


def top_k(op: Operation) -> Cost:
    """Return the cost of top-k: elements x ceil(log2 k) comparisons, at least one per element."""
    if not isinstance(op.attributes, TopKAttributes) or not op.operands:
        return unknown_cost(op, OpClass.SORT)
    depth = max(ceil(log2(op.attributes.k)), 1) if op.attributes.k > 0 else 0
    return _comparisons(op, 0, depth, Body(1.0))
