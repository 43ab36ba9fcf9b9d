"""The result of a cost rule, and the few shapes most results have.

Conventions: add and multiply are one FLOP each, so a fused multiply-add is two; transcendentals are counted
apart; bytes are the compulsory traffic of the operation as if nothing were fused. Unknown is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan

from hespas.costs.facts import Operation, Tensor
from hespas.graph import ACCUMULATOR_BITS, DTYPES, MAC_NOISE_SIGMA, DTypeKind, OpClass

__all__ = [
    "FREE",
    "Contraction",
    "Cost",
    "Rule",
    "arithmetic_dtype",
    "branch_ns",
    "is_complex",
    "move_cost",
    "unknown_cost",
]


@dataclass(frozen=True, slots=True)
class Contraction:
    """``batch`` products of M x K by K x N, as in :class:`hespas.graph.ContractionTable`; -1 unknown.

    ``accumulator_bits`` and ``mac_noise_sigma`` as in :class:`~hespas.costs.facts.Precision`.
    """

    batch: int
    m: int
    n: int
    k: int
    flops: float
    useful_flops: float
    lhs: int
    rhs: int
    accumulator: int
    products: int = 1
    accumulator_bits: int = -1
    mac_noise_sigma: float | None = None

    @property
    def attributes(self) -> dict[str, str]:
        """What no column holds, as attributes of the node that every format carries."""
        found: dict[str, str] = {}
        if self.accumulator_bits >= 0:
            found[ACCUMULATOR_BITS] = str(self.accumulator_bits)
        if self.mac_noise_sigma is not None:
            found[MAC_NOISE_SIGMA] = repr(self.mac_noise_sigma)
        return found


@dataclass(frozen=True, slots=True)
class Cost:
    """What one execution of an operation costs; see the columns of :class:`hespas.graph.OpGraph`."""

    op_class: OpClass
    flops: float = 0.0
    useful_flops: float = 0.0
    transcendentals: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    rate_dtype: int = -1
    contractions: tuple[Contraction, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether no figure is NaN."""
        total = self.flops + self.transcendentals + self.bytes_read + self.bytes_written
        return not isnan(total)


Rule = Callable[[Operation], Cost]
"""One row of the table."""

FREE = Cost(OpClass.FREE)
"""Views, structure, bookkeeping: no arithmetic and no traffic."""


def arithmetic_dtype(tensors: tuple[Tensor, ...]) -> int:
    """The type whose arithmetic an elementwise operation runs: that of its last operand.

    The last operand is a value in every operation whose first is a predicate. Quantised values are computed
    with as what they stand for.
    """
    if not tensors:
        return -1
    last = tensors[-1]
    return last.code if last.expressed is None else last.expressed.code


_BYTES_PER_NS = 2_000.0
_FLOPS_PER_NS = 30_000.0
_PRODUCT_FLOPS_PER_NS = 400_000.0
_TRANSCENDENTAL_FLOPS = 8.0
_KERNEL_NS, _FUSED_NS = 2_000.0, 100.0
"""What accelerators of today do, roughly: memory, vector units, products of 16 bits and less, and the least
time of a kernel; an elementwise operation shares one.
"""
_FUSING = frozenset({OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.MOVE, OpClass.SLICE})
_WITHOUT_KERNEL = frozenset({OpClass.FREE, OpClass.CONTROL, OpClass.GENERATE, OpClass.BROADCAST})
_NARROW_BITS = 16


def branch_ns(cost: Cost, *, is_kernel: bool = True) -> float:
    """About how long an operation takes: the larger of arithmetic and traffic, behind the start of a kernel
    where it ``is_kernel``.

    Only to tell which of several branches is the costliest, before a device is chosen; what is unknown takes
    no time.
    """
    flops, heavy, moved = (
        0.0 if isnan(figure) else figure
        for figure in (cost.flops, cost.transcendentals, cost.bytes_read + cost.bytes_written)
    )
    arithmetic_ns = heavy * _TRANSCENDENTAL_FLOPS / _FLOPS_PER_NS
    for part in cost.contractions:
        if not isnan(part.flops):
            is_narrow = part.lhs >= 0 and DTYPES[part.lhs].bits <= _NARROW_BITS
            arithmetic_ns += part.flops / (_PRODUCT_FLOPS_PER_NS if is_narrow else _FLOPS_PER_NS)
            flops -= part.flops
    arithmetic_ns += max(flops, 0.0) / _FLOPS_PER_NS
    least_ns = _FUSED_NS if cost.op_class in _FUSING else _KERNEL_NS
    if not is_kernel or cost.op_class in _WITHOUT_KERNEL:
        least_ns = 0.0
    return least_ns + max(arithmetic_ns, moved / _BYTES_PER_NS)


def is_complex(tensor: Tensor) -> bool:
    """Whether elements are complex."""
    return tensor.dtype is not None and tensor.dtype.kind is DTypeKind.COMPLEX


def move_cost(op: Operation, op_class: OpClass = OpClass.MOVE) -> Cost:
    """No arithmetic; every distinct operand read, every result written."""
    return Cost(op_class, bytes_read=op.read_bytes, bytes_written=op.written_bytes)


def unknown_cost(op: Operation, op_class: OpClass = OpClass.UNKNOWN) -> Cost:
    """Arithmetic unknown; operand and result bytes stand as a lower bound of the traffic."""
    return Cost(op_class, nan, nan, nan, op.read_bytes, op.written_bytes)
