"""Costs of elementwise operations, reductions, windows, normalisation, sorting and linear algebra.

Formulas: StableHLO specification for what is computed; counts follow the convention of
:mod:`hespas.costs.operation`.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, nan, prod

from hespas.costs.contraction import valid_positions
from hespas.costs.operation import (
    Body,
    Cost,
    FftFacts,
    MapFacts,
    Operation,
    ReduceFacts,
    Rule,
    ScanFacts,
    SelectScatterFacts,
    SolveFacts,
    SortFacts,
    Tensor,
    TopKFacts,
    WindowFacts,
    arithmetic_dtype,
    is_complex,
    unknown_cost,
)
from hespas.graph import OpClass

__all__ = [
    "LAPACK_ROUTINES",
    "batch_norm",
    "elementwise",
    "expanded",
    "fft",
    "lapack",
    "map_body",
    "quantize",
    "reduce",
    "reduce_window",
    "scan",
    "select_and_scatter",
    "sort",
    "top_k",
    "transcendental",
    "triangular_solve",
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


# --- dense linear algebra and Fourier transforms.
#
# Operation counts: G. H. Golub, C. F. Van Loan, "Matrix Computations", 4th edition. Factorisations that
# iterate (eigenvalues, singular values) have no exact count; the book's usual totals stand for them. A
# transform of length L is counted as 5 L log2 L (the radix-2 count), half of it for real input or output.


# routine -> coefficients of (m n^2, n^3) for one m x n matrix
_FACTORISATIONS: dict[str, tuple[float, float]] = {
    "potrf": (0.0, 1 / 3),
    "getrf": (1.0, -1 / 3),
    "geqrf": (2.0, -2 / 3),
    "geqp3": (2.0, -2 / 3),
    "orgqr": (2.0, -2 / 3),
    "ungqr": (2.0, -2 / 3),
    "sytrd": (0.0, 4 / 3),
    "hetrd": (0.0, 4 / 3),
    "syevd": (0.0, 9.0),
    "heevd": (0.0, 9.0),
    "gehrd": (0.0, 10 / 3),
    "geev": (0.0, 25.0),
    "gees": (0.0, 25.0),
    "gesdd": (4.0, 22.0),
    "gesvd": (4.0, 22.0),
    "gesvdj": (4.0, 22.0),
}
LAPACK_ROUTINES: frozenset[str] = frozenset({*_FACTORISATIONS, "trsm"})
"""Routine names without the type letter."""


def _matrix_batch(tensor: Tensor) -> float:
    """Matrices in a stack of them, NaN unknown."""
    batch = tensor.shape[:-2]
    return nan if min(batch, default=0) < 0 else float(prod(batch))


def _extent(tensor: Tensor, dim: int) -> float:
    extent = tensor.shape[dim]
    return nan if extent < 0 else float(extent)


def _dense(op: Operation, flops: float) -> Cost:
    return Cost(OpClass.LINALG, flops, flops, 0.0, op.read_bytes, op.written_bytes, op.operands[0].code)


def lapack(routine: str) -> Rule:
    """The count of one LAPACK or cuSOLVER routine on the first operand, a stack of m x n matrices."""
    if routine == "trsm":
        return triangular_solve
    cross, cube = _FACTORISATIONS[routine]

    def rule(op: Operation) -> Cost:
        if not op.operands or len(op.operands[0].shape) < 2:
            return unknown_cost(op, OpClass.LINALG)
        matrix = op.operands[0]
        rows, columns = _extent(matrix, -2), _extent(matrix, -1)
        long, short = max(rows, columns), min(rows, columns)
        return _dense(op, _matrix_batch(matrix) * (cross * long * short**2 + cube * short**3))

    return rule


def triangular_solve(op: Operation) -> Cost:
    """Batch x n^2 x k for an n x n matrix and k right-hand sides."""
    left_side = op.facts.left_side if isinstance(op.facts, SolveFacts) else True
    if len(op.operands) < 2 or len(op.operands[0].shape) < 2 or len(op.operands[1].shape) < 2:
        return unknown_cost(op, OpClass.LINALG)
    matrix, right = op.operands[0], op.operands[1]
    sides = _extent(right, -1 if left_side else -2)
    return _dense(op, _matrix_batch(matrix) * _extent(matrix, -1) ** 2 * sides)


def fft(op: Operation) -> Cost:
    """5 L log2 L for each complex transform over ``lengths``, half for a real one."""
    facts = op.facts
    if not isinstance(facts, FftFacts) or not op.operands:
        return unknown_cost(op, OpClass.FFT)
    complex_side = op.operands[0] if facts.kind in {"IFFT", "FFT", "RFFT"} else op.results[0]
    points = prod(facts.lengths)
    if points < 1:
        return Cost(OpClass.FFT, bytes_read=op.read_bytes, bytes_written=op.written_bytes)
    transforms = complex_side.elements / points
    factor = 2.5 if facts.kind in {"RFFT", "IRFFT"} else 5.0
    flops = factor * points * log2(points) * transforms
    rate = op.operands[0].code
    return Cost(OpClass.FFT, flops, flops, 0.0, op.read_bytes, op.written_bytes, rate)
