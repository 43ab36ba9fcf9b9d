"""What a cost rule is told about one operation: tensor types, and the attributes that change its cost.

Everything is frozen and hashable, so that readers cache the cost of equal operations; named tuples
and not dataclasses, because making so many of those takes longer than reading a small program. Readers
translate their own attributes into these facts once; no rule sees a format's object.
"""

from __future__ import annotations

from math import nan, prod
from typing import NamedTuple

from hespas.graph import DYNAMIC, DType

__all__ = [
    "Body",
    "BroadcastFacts",
    "ConvFacts",
    "CustomFacts",
    "DotFacts",
    "EinsumFacts",
    "Facts",
    "FftFacts",
    "MapFacts",
    "Operation",
    "Precision",
    "RaggedDotFacts",
    "ReduceFacts",
    "ScanFacts",
    "ScatterFacts",
    "SelectScatterFacts",
    "SolveFacts",
    "SortFacts",
    "Tensor",
    "TopKFacts",
    "UpdateFacts",
    "WindowDim",
    "WindowFacts",
]


class Tensor(NamedTuple):
    """One operand or result. ``dtype`` is None where unknown, extents are -1 where known at run time only.

    ``extra_bytes`` is storage beside the elements (quantisation scales). A token has no bytes. ``expressed``
    is the type whose values a quantised tensor stands for, None for any other tensor; ``dtype`` is what it
    stores. ``layout`` names the dimensions from the fastest in memory to the slowest, as HLO does (``0,1``),
    or the distances between elements (``strides 1,0``); empty: the last dimension is the fastest, or unknown.
    """

    dtype: DType | None
    shape: tuple[int, ...]
    extra_bytes: int = 0
    expressed: DType | None = None
    layout: str = ""

    @property
    def elements(self) -> float:
        """Number of elements, NaN where an extent is unknown."""
        return nan if DYNAMIC in self.shape else float(prod(self.shape))

    @property
    def bytes(self) -> float:
        """Storage, NaN where an extent or the element type is unknown."""
        if self.dtype is None or DYNAMIC in self.shape:
            return nan
        return float(self.dtype.storage_bytes(prod(self.shape)) + self.extra_bytes)

    @property
    def code(self) -> int:
        """The code of the element type, -1 unknown."""
        return -1 if self.dtype is None else self.dtype.code


class Body(NamedTuple):
    """A computation on scalars: what one application costs (NaN unknown) and what it is.

    ``name`` is the operation where the body is a single one (``add``), ``""`` for a mere return of an
    argument and otherwise ``custom``. ``reads_first`` is False where the first argument is not used: a
    scatter that replaces.
    """

    flops: float
    transcendentals: float = 0.0
    name: str = "custom"
    reads_first: bool = True


class Precision(NamedTuple):
    """How exactly a contraction multiplies.

    ``lhs``, ``rhs`` and ``accumulator`` are the types of an explicit ``algorithm``, None where there is none.
    ``products`` counts primitive products per multiply: the algorithm's own number, else 3 for ``HIGH`` and
    6 for ``HIGHEST`` on f32 operands, else 1. ``accumulator_bits`` (-1: not stated) and ``mac_noise_sigma``
    (None: not stated) are attributes of networks trained for analogue or narrow accumulators (FQ-Conv, arXiv
    1912.09356), whose element types do not show them. Noise costs no time.
    """

    lhs: DType | None = None
    rhs: DType | None = None
    accumulator: DType | None = None
    products: int = 1
    level: str = "DEFAULT"
    accumulator_bits: int = -1
    mac_noise_sigma: float | None = None


class DotFacts(NamedTuple):
    """Dimension numbers of a matrix product."""

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    precision: Precision = Precision()


class RaggedDotFacts(NamedTuple):
    """A grouped matrix product: ``dot`` as for all groups together, ``ragged_lhs`` the dimension cut in
    groups.
    """

    dot: DotFacts
    ragged_lhs: int


class EinsumFacts(NamedTuple):
    """The equation of an einsum, ``ij,jk->ik``."""

    equation: str


class WindowDim(NamedTuple):
    """One dimension of a window. ``lhs_dilation`` spreads the input, ``rhs_dilation`` the window; padding
    may be negative.
    """

    size: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1


class ConvFacts(NamedTuple):
    """Dimension numbers and window of a convolution of any rank, in the order of the spatial dimensions.

    ``kernel_in`` is the kernel's input-feature dimension, whose extent is per group already.
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


class ReduceFacts(NamedTuple):
    """``num_inputs`` tensors reduced together (their init values follow as operands) by one combined body."""

    body: Body
    num_inputs: int = 1


class WindowFacts(NamedTuple):
    """A windowed reduction; ``window`` has one entry for each dimension of the operand."""

    body: Body
    window: tuple[WindowDim, ...]
    num_inputs: int = 1


class SelectScatterFacts(NamedTuple):
    """The gradient of a windowed selection; ``window_elements`` is the product of the window's extents."""

    select: Body
    scatter: Body
    window_elements: int


class MapFacts(NamedTuple):
    """A body applied to each element."""

    body: Body


class SortFacts(NamedTuple):
    """``extent`` elements are sorted along one dimension; ``comparator`` is one comparison."""

    extent: int
    comparator: Body


class ScanFacts(NamedTuple):
    """``body`` runs once for each of the ``trips`` slices along one dimension."""

    trips: int
    body: Body


class TopKFacts(NamedTuple):
    """The ``k`` largest along the last dimension."""

    k: int


class ScatterFacts(NamedTuple):
    """``num_inputs`` operands, then the indices, then as many updates. ``in_place``: the operand's buffer
    dies.
    """

    body: Body
    num_inputs: int = 1
    in_place: bool = False


class UpdateFacts(NamedTuple):
    """``in_place``: the operand's buffer dies here, so that only the update is written."""

    in_place: bool


class BroadcastFacts(NamedTuple):
    """``materialised``: somebody needs the whole result in memory. The default is that consumers fuse it."""

    materialised: bool


class FftFacts(NamedTuple):
    """``kind`` is ``FFT``, ``IFFT``, ``RFFT`` or ``IRFFT``; ``lengths`` are the transformed extents, last
    fastest.
    """

    kind: str
    lengths: tuple[int, ...]


class SolveFacts(NamedTuple):
    """``left_side``: solve ``a x = b``; otherwise ``x a = b``."""

    left_side: bool = True


class CustomFacts(NamedTuple):
    """A custom call: its target, its backend configuration as text, and its window where the format states
    one.
    """

    target: str
    config: str = ""
    conv: ConvFacts | None = None


Facts = (
    BroadcastFacts
    | ConvFacts
    | CustomFacts
    | DotFacts
    | EinsumFacts
    | FftFacts
    | MapFacts
    | RaggedDotFacts
    | ReduceFacts
    | ScanFacts
    | ScatterFacts
    | SelectScatterFacts
    | SolveFacts
    | SortFacts
    | TopKFacts
    | UpdateFacts
    | WindowFacts
    | None
)


class Operation(NamedTuple):
    """One operation as a cost rule sees it. ``repeated`` lists operand positions that repeat an earlier
    operand: their bytes are read once only (``multiply %x, %x``).
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    facts: Facts = None
    repeated: tuple[int, ...] = ()

    @property
    def read_bytes(self) -> float:
        """Bytes of the distinct operands."""
        repeated = frozenset(self.repeated)
        return sum(tensor.bytes for place, tensor in enumerate(self.operands) if place not in repeated)

    @property
    def written_bytes(self) -> float:
        """Bytes of all results."""
        return sum(tensor.bytes for tensor in self.results)
