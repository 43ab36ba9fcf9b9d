"""Cost rules of dense linear algebra and Fourier transforms.

Operation counts: G. H. Golub, C. F. Van Loan, "Matrix Computations", 4th edition. Iterative factorisations
(eigenvalues, singular values) have no exact count; the rules use the usual totals of the book. A transform of
length L is counted as 5 L log2 L (the radix-2 count), half of it for real input or output.
"""

from __future__ import annotations

from math import log2, nan, prod

from hespas.costs.operation import Cost, FftAttributes, Operation, Rule, SolveAttributes, Tensor, unknown_cost
from hespas.graph import OpClass

__all__ = [
    "LAPACK_ROUTINES",
    "fft",
    "lapack",
    "triangular_solve",
]


_FACTORISATIONS: dict[str, tuple[float, float]] = {
    routine: coefficients
    for routines, coefficients in {
        "potrf": (0.0, 1 / 3),
        "getrf": (1.0, -1 / 3),
        "geqrf geqp3 orgqr ungqr": (2.0, -2 / 3),
        "sytrd hetrd": (0.0, 4 / 3),
        "syevd heevd": (0.0, 9.0),
        "gehrd": (0.0, 10 / 3),
        "geev gees": (0.0, 25.0),
        "gesdd gesvd gesvdj": (4.0, 22.0),
    }.items()
    for routine in routines.split()
}
"""Routine -> coefficients of (m n^2, n^3) for one m x n matrix."""

LAPACK_ROUTINES: frozenset[str] = frozenset({*_FACTORISATIONS, "trsm"})
"""Routine names without the type letter."""


def _matrix_batch(tensor: Tensor) -> float:
    """Return the number of matrices in a stack (the product of all but the last two extents); NaN if
    unknown.
    """
    batch = tensor.shape[:-2]
    return nan if min(batch, default=0) < 0 else float(prod(batch))


def _extent(tensor: Tensor, dim: int) -> float:
    extent = tensor.shape[dim]
    return nan if extent < 0 else float(extent)


def _dense(op: Operation, flops: float) -> Cost:
    return Cost(OpClass.LINALG, flops, flops, 0.0, op.read_bytes, op.written_bytes, op.operands[0].code)


def lapack(routine: str) -> Rule:
    """Return the cost rule of a LAPACK or cuSOLVER routine. Its first operand is a stack of m x n
    matrices.
    """
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
    """Return the cost of a triangular solve: batch x n^2 x k FLOPs for an n x n matrix and k right-hand
    sides.
    """
    left_side = op.attributes.left_side if isinstance(op.attributes, SolveAttributes) else True
    if len(op.operands) < 2 or len(op.operands[0].shape) < 2 or len(op.operands[1].shape) < 2:
        return unknown_cost(op, OpClass.LINALG)
    matrix, right = op.operands[0], op.operands[1]
    sides = _extent(right, -1 if left_side else -2)
    return _dense(op, _matrix_batch(matrix) * _extent(matrix, -1) ** 2 * sides)


def fft(op: Operation) -> Cost:
    """Return the cost of a Fourier transform: 5 L log2 L FLOPs per complex transform over ``lengths``, half
    for a real one.
    """
    attributes = op.attributes
    if not isinstance(attributes, FftAttributes) or not op.operands:
        return unknown_cost(op, OpClass.FFT)
    complex_side = op.operands[0] if attributes.kind in {"IFFT", "FFT", "RFFT"} else op.results[0]
    points = prod(attributes.lengths)
    if points < 1:
        return Cost(OpClass.FFT, bytes_read=op.read_bytes, bytes_written=op.written_bytes)
    transforms = complex_side.elements / points
    factor = 2.5 if attributes.kind in {"RFFT", "IRFFT"} else 5.0
    flops = factor * points * log2(points) * transforms
    rate = op.operands[0].code
    return Cost(OpClass.FFT, flops, flops, 0.0, op.read_bytes, op.written_bytes, rate)
