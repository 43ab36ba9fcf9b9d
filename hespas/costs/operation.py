"""Inputs and results of cost rules: tensor types, attributes of operations that change the cost, and costs.

All classes are frozen and hashable, so that readers can cache the cost of equal operations. Most are named
tuples, which are faster to create than dataclasses. Readers translate the attributes of their format once.

Conventions: add and multiply are one FLOP each, so a fused multiply-add is two; transcendentals are counted
separately; bytes are the compulsory traffic of the operation without fusion. Unknown is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan, prod
from typing import NamedTuple

from hespas.graph import (
    ACCUMULATOR_BITS,
    DTYPES,
    DYNAMIC,
    MAC_NOISE_SIGMA,
    DType,
    DTypeKind,
    GraphBuilder,
    NodeKind,
    OpClass,
)

__all__ = [
    "FREE",
    "Attributes",
    "Body",
    "BodyAttributes",
    "BroadcastAttributes",
    "Contraction",
    "ConvAttributes",
    "Cost",
    "CustomAttributes",
    "DotAttributes",
    "EinsumAttributes",
    "FftAttributes",
    "Operation",
    "Precision",
    "RaggedDotAttributes",
    "Rule",
    "ScatterAttributes",
    "SelectScatterAttributes",
    "SolveAttributes",
    "Tensor",
    "TopKAttributes",
    "UpdateAttributes",
    "WindowAttributes",
    "WindowDim",
    "add_costed",
    "arithmetic_dtype",
    "branch_ns",
    "is_complex",
    "move_cost",
    "unknown_cost",
]


class Tensor(NamedTuple):
    """Type of an operand or result. ``dtype`` is None if unknown; extents that are only known at run time are
    -1.

    ``extra_bytes`` is additional storage (quantisation scales). A token has no bytes. ``expressed`` is the
    type that a quantised tensor represents (None for other tensors); ``dtype`` is then its storage type.
    ``layout`` lists the dimensions from the fastest in memory to the slowest, as HLO does (``0,1``), or the
    distances between elements (``strides 1,0``). If it is empty, the last dimension is the fastest, or the
    layout is unknown.
    """

    dtype: DType | None
    shape: tuple[int, ...]
    extra_bytes: int = 0
    expressed: DType | None = None
    layout: str = ""

    @property
    def elements(self) -> float:
        """Return the number of elements, NaN where an extent is unknown."""
        return nan if DYNAMIC in self.shape else float(prod(self.shape))

    @property
    def bytes(self) -> float:
        """Return the storage in bytes, NaN where an extent or the element type is unknown."""
        if self.dtype is None or DYNAMIC in self.shape:
            return nan
        return float(self.dtype.storage_bytes(prod(self.shape)) + self.extra_bytes)

    @property
    def code(self) -> int:
        """Return the code of the element type, -1 where unknown."""
        return -1 if self.dtype is None else self.dtype.code


class Body(NamedTuple):
    """Scalar computation that an operation applies repeatedly (such as a reducer), with the cost of one
    application (NaN: unknown).

    ``name`` is the operation if the body consists of a single one (``add``), ``""`` if it only returns an
    argument and otherwise ``custom``. ``reads_first`` is False if the first argument is not used, as in a
    scatter that replaces elements.
    """

    flops: float
    transcendentals: float = 0.0
    name: str = "custom"
    reads_first: bool = True


class Precision(NamedTuple):
    """Precision of the arithmetic of a contraction (matmul or convolution).

    ``lhs``, ``rhs`` and ``accumulator`` are the types of an explicit ``algorithm``, or None without one.
    ``products`` counts hardware products per multiply: the algorithm's own number, else 3 for ``HIGH`` and 6
    for ``HIGHEST`` on f32 operands, else 1. ``accumulator_bits`` (-1: not stated) and ``mac_noise_sigma``
    (None: not stated) are attributes of networks that were trained for analogue or narrow accumulators
    (FQ-Conv, arXiv 1912.09356); element types do not show these accumulators. Noise costs no time.
    """

    lhs: DType | None = None
    rhs: DType | None = None
    accumulator: DType | None = None
    products: int = 1
    level: str = "DEFAULT"
    accumulator_bits: int = -1
    mac_noise_sigma: float | None = None


class DotAttributes(NamedTuple):
    """Dimension numbers and precision of a matmul (``dot_general``)."""

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    precision: Precision = Precision()


class RaggedDotAttributes(NamedTuple):
    """Attributes of a grouped matmul. ``dot`` has the dimension numbers of the matmul of all groups together.
    ``ragged_lhs`` is the dimension of the left operand that is split into groups.
    """

    dot: DotAttributes
    ragged_lhs: int


class EinsumAttributes(NamedTuple):
    """Equation of an einsum, such as ``ij,jk->ik``."""

    equation: str


class WindowDim(NamedTuple):
    """One dimension of a window. ``lhs_dilation`` inserts holes into the input, ``rhs_dilation`` into the
    window; padding may be negative.
    """

    size: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1


class ConvAttributes(NamedTuple):
    """Dimension numbers and window of a convolution of any rank. Tuples have one entry per spatial dimension,
    in the same order.

    ``kernel_in`` is the kernel's input-feature dimension; its extent is per feature group.
    """

    input_batch: int
    input_feature: int
    input_spatial: tuple[int, ...]
    kernel_in: int
    kernel_out: int
    kernel_spatial: tuple[int, ...]
    output_batch: int
    output_feature: int
    output_spatial: tuple[int, ...]
    window: tuple[WindowDim, ...]
    feature_groups: int = 1
    batch_groups: int = 1
    precision: Precision = Precision()


class BodyAttributes(NamedTuple):
    """Attributes of an operation with a scalar body: reduction, sort, scan or map. ``extent`` is the size of
    the sorted or scanned dimension (-1: unknown, or none).
    """

    body: Body
    extent: int = -1


class WindowAttributes(NamedTuple):
    """Attributes of a windowed reduction; ``window`` has one entry for each dimension of the operand."""

    body: Body
    window: tuple[WindowDim, ...]


class SelectScatterAttributes(NamedTuple):
    """Attributes of ``select_and_scatter``, the gradient of max pooling. ``window_elements`` is the product
    of the window's extents.
    """

    select: Body
    scatter: Body
    window_elements: int


class TopKAttributes(NamedTuple):
    """Attributes of ``top_k``: ``k`` is the number of largest elements that are selected along the last
    dimension.
    """

    k: int


class ScatterAttributes(NamedTuple):
    """Attributes of a scatter of ``num_inputs`` operands. Its inputs are the operands, the indices, and as
    many updates as operands.

    ``in_place`` is True if the operands are not read later, so that only the updates are written.
    """

    body: Body
    num_inputs: int = 1
    in_place: bool = False


class UpdateAttributes(NamedTuple):
    """Attributes of a slice update. ``in_place`` is True if the operand is not read later, so that only the
    update is written.
    """

    in_place: bool


class BroadcastAttributes(NamedTuple):
    """Attributes of a broadcast. ``materialised`` is True if the result is written to memory; otherwise the
    broadcast is fused into its consumers.
    """

    materialised: bool


class FftAttributes(NamedTuple):
    """Attributes of a Fourier transform. ``kind`` is ``FFT``, ``IFFT``, ``RFFT`` or ``IRFFT``; ``lengths``
    are the transformed extents, the last one fastest.
    """

    kind: str
    lengths: tuple[int, ...]


class SolveAttributes(NamedTuple):
    """Attributes of a triangular solve: of ``a x = b`` if ``left_side``, else of ``x a = b``."""

    left_side: bool = True


class CustomAttributes(NamedTuple):
    """Attributes of a custom call: the target, the backend configuration as text, and the dimension numbers
    and window of a library convolution (None: not stated).
    """

    target: str
    config: str = ""
    conv: ConvAttributes | None = None


Attributes = (
    BodyAttributes
    | BroadcastAttributes
    | ConvAttributes
    | CustomAttributes
    | DotAttributes
    | EinsumAttributes
    | FftAttributes
    | RaggedDotAttributes
    | ScatterAttributes
    | SelectScatterAttributes
    | SolveAttributes
    | TopKAttributes
    | UpdateAttributes
    | WindowAttributes
    | None
)


class Operation(NamedTuple):
    """Operation as the input of a cost rule.

    ``repeated`` lists the positions of operands that occur earlier among the operands (``multiply %x, %x``):
    their bytes are read only once.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    attributes: Attributes = None
    repeated: tuple[int, ...] = ()

    @property
    def read_bytes(self) -> float:
        """Return the bytes of the distinct operands."""
        repeated = frozenset(self.repeated)
        return sum(tensor.bytes for position, tensor in enumerate(self.operands) if position not in repeated)

    @property
    def written_bytes(self) -> float:
        """Return the bytes of all results."""
        return sum(tensor.bytes for tensor in self.results)


@dataclass(frozen=True, slots=True)
class Contraction:
    """Batched matmul as a row of :class:`hespas.graph.ContractionTable`: ``batch`` matmuls of M x K by K x N
    (-1: unknown). A convolution is a row, too.

    ``window`` is the number of positions of a convolution's kernel. ``products``, ``accumulator_bits`` and
    ``mac_noise_sigma`` have the same meaning as in
    :class:`~hespas.costs.operation.Precision`.
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
    window: int = 1

    @property
    def attributes(self) -> dict[str, str]:
        """Return the figures that have no column in the contraction table and are stored as attributes of the
        node.
        """
        attributes: dict[str, str] = {}
        if self.accumulator_bits >= 0:
            attributes[ACCUMULATOR_BITS] = str(self.accumulator_bits)
        if self.mac_noise_sigma is not None:
            attributes[MAC_NOISE_SIGMA] = repr(self.mac_noise_sigma)
        return attributes


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one execution of an operation. The fields are columns of :class:`hespas.graph.OpGraph`."""

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
        """Return True if no figure is NaN."""
        total = self.flops + self.transcendentals + self.bytes_read + self.bytes_written
        return not isnan(total)


_LARGEST_INT64 = (1 << 63) - 1


def add_costed(
    graph: GraphBuilder,
    name: str,
    cost: Cost,
    *,
    operands: tuple[Tensor, ...] = (),
    results: tuple[Tensor, ...] = (),
    op: str = "",
    kind: NodeKind = NodeKind.COMPUTE,
    control_deps: tuple[int, ...] = (),
) -> int:
    """Add a node with the cost of an operation to ``graph`` and return its number; ``op`` defaults to
    ``name``.

    A matmul with an extent above 63 bits is not added to the table of contractions.
    """
    strings, types = graph.strings, graph.types
    name_id, op_id = strings.add(name), strings.add(op or name)
    rows = [
        [types.add(tensor.dtype, tensor.shape, encoding=strings.add(tensor.layout)) for tensor in tensors]
        for tensors in (operands, results)
    ]
    node = graph.add_node(
        name_id=name_id,
        op_id=op_id,
        op_class=cost.op_class,
        kind=kind,
        control_deps=control_deps,
        operands=rows[0],
        results=rows[1],
        flops=cost.flops,
        transcendentals=cost.transcendentals,
        bytes_read=cost.bytes_read,
        bytes_written=cost.bytes_written,
    )
    if cost.rate_dtype >= 0:
        graph.set(node, rate_dtype=cost.rate_dtype)
    if not isnan(cost.flops) and cost.useful_flops != cost.flops:
        graph.set(node, useful_flops=cost.useful_flops)
    for row in cost.contractions:
        if max(row.batch, row.m, row.n, row.k) <= _LARGEST_INT64:
            graph.add_contraction(
                node,
                batch=row.batch,
                m=row.m,
                n=row.n,
                k=row.k,
                flops=row.flops,
                useful_flops=row.useful_flops,
                lhs=row.lhs,
                rhs=row.rhs,
                accumulator=row.accumulator,
                products=row.products,
                window=row.window,
            )
    return node


Rule = Callable[[Operation], Cost]
"""Function from an operation to its cost."""

FREE = Cost(OpClass.FREE)
"""Cost of views, structure and bookkeeping: without arithmetic and traffic."""


def arithmetic_dtype(tensors: tuple[Tensor, ...]) -> int:
    """Return the code of the element type in which an elementwise operation computes: the type of its last
    operand.

    The first operand may be a predicate; the last one is always a value. Quantised values are computed in the
    type that they represent.
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
"""Approximate rates of current accelerators: memory, vector units, products of at most 16 bits, and the least
time of a kernel; elementwise operations share a kernel.
"""
_FUSING = frozenset({OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.MOVE, OpClass.SLICE})
_WITHOUT_KERNEL = frozenset({OpClass.FREE, OpClass.CONTROL, OpClass.GENERATE, OpClass.BROADCAST})
_NARROW_BITS = 16


def branch_ns(cost: Cost, *, is_kernel: bool = True) -> float:
    """Estimate the time of an operation [ns] without a device model: the longer of arithmetic and memory
    traffic at fixed rates, plus the launch of a kernel.

    It is used to select the most expensive of several branches before a device is chosen. Unknown figures
    count as 0.
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
    """Return True if the tensor has complex elements."""
    return tensor.dtype is not None and tensor.dtype.kind is DTypeKind.COMPLEX


def move_cost(op: Operation, op_class: OpClass = OpClass.MOVE) -> Cost:
    """Return the cost of a copy without arithmetic: every distinct operand is read, every result is
    written.
    """
    return Cost(op_class, bytes_read=op.read_bytes, bytes_written=op.written_bytes)


def unknown_cost(op: Operation, op_class: OpClass = OpClass.UNKNOWN) -> Cost:
    """Return a cost with unknown arithmetic. The bytes of operands and results are a lower bound of the
    traffic.
    """
    return Cost(op_class, nan, nan, nan, op.read_bytes, op.written_bytes)
