"""Side tables of a graph: what only some nodes have, one row per such node.

Each table's ``node`` column says whose row it is and is sorted, so the rows of a node are a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray, SmallIntArray

__all__ = [
    "ACCUMULATOR_BITS",
    "MAC_NOISE_SIGMA",
    "SOURCE_DTYPE",
    "CollectiveTable",
    "ContractionTable",
    "ExtraTable",
    "P2pTable",
    "RegionTable",
]

ACCUMULATOR_BITS, MAC_NOISE_SIGMA = "accumulator_bits", "mac_noise_sigma"
"""Keys of texts in :class:`ExtraTable` that say how a product is accumulated where element types do not show
it: bits of the accumulator, and the standard deviation of its noise in units of its last bit.
"""

SOURCE_DTYPE = "source_dtype"
"""Key of the text that names the type of values which a compiler widened for a device that does not compute
in it: of products, and (``convert``) of the conversions themselves.
"""


def _ints() -> SmallIntArray:
    return np.empty(0, np.int32)


def _longs() -> IntArray:
    return np.empty(0, np.int64)


def _floats() -> FloatArray:
    return np.empty(0, np.float64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CollectiveTable:
    """One row per collective node; at most one row a node.

    ``kind`` is a :class:`hespas.graph.kinds.CollectiveKind`; ``group_set`` indexes the graph's group sets
    (-1: nobody said, all ranks); ``comm_bytes`` is the payload per rank in Chakra's sense (whole buffer for
    all-reduce, reduce-scatter and all-to-all, shard for all-gather); ``operand_bytes`` and ``result_bytes``
    are what the program states; ``channel`` is -1 where absent; ``reduction`` is a string row (``add``).
    """

    node: SmallIntArray
    kind: NDArray[np.uint8]
    group_set: SmallIntArray
    comm_bytes: FloatArray
    operand_bytes: FloatArray
    result_bytes: FloatArray
    channel: IntArray
    reduction: SmallIntArray

    @classmethod
    def empty(cls) -> CollectiveTable:
        """No collectives."""
        return cls(
            node=_ints(),
            kind=np.empty(0, np.uint8),
            group_set=_ints(),
            comm_bytes=_floats(),
            operand_bytes=_floats(),
            result_bytes=_floats(),
            channel=_longs(),
            reduction=_ints(),
        )

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class P2pTable:
    """One row per SEND, RECV or PERMUTE node.

    ``permutation`` indexes the graph's permutations, which map sources to targets whatever the direction
    (-1: the peer is not stated); ``comm_bytes`` is the message; ``tag`` is -1 where absent; ``host`` marks a
    transfer over the host link.
    """

    node: SmallIntArray
    permutation: SmallIntArray
    comm_bytes: FloatArray
    tag: IntArray
    host: NDArray[np.bool_]

    @classmethod
    def empty(cls) -> P2pTable:
        """No point-to-point messages."""
        return cls(
            node=_ints(), permutation=_ints(), comm_bytes=_floats(), tag=_longs(), host=np.empty(0, np.bool_)
        )

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ContractionTable:
    """Matrix products and convolutions as B x (M x K by K x N); a fusion may have several rows.

    ``flops`` is what the products cost by the specification and ``useful_flops`` without multiplications by
    padding or dilation zeros. ``lhs``, ``rhs`` and ``accumulator`` are element type codes: together they are
    the rate key. ``products`` counts primitive products per multiply (3 or 6 for emulated precision).
    """

    node: SmallIntArray
    batch: IntArray
    m: IntArray
    n: IntArray
    k: IntArray
    flops: FloatArray
    useful_flops: FloatArray
    lhs: NDArray[np.int16]
    rhs: NDArray[np.int16]
    accumulator: NDArray[np.int16]
    products: NDArray[np.uint8]

    @classmethod
    def empty(cls) -> ContractionTable:
        """No contractions."""
        return cls(
            node=_ints(),
            batch=_longs(),
            m=_longs(),
            n=_longs(),
            k=_longs(),
            flops=_floats(),
            useful_flops=_floats(),
            lhs=np.empty(0, np.int16),
            rhs=np.empty(0, np.int16),
            accumulator=np.empty(0, np.int16),
            products=np.empty(0, np.uint8),
        )

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RegionTable:
    """Nested pieces of a program: calls, loop bodies, branches, composites.

    ``parent`` is the enclosing region (-1: none) and always a smaller row; ``kind`` a
    :class:`hespas.graph.kinds.RegionKind`; ``trips`` how often the region runs per run of its parent (NaN
    unknown, 0 for a branch not taken); ``label`` a string row. A loop is one region: its condition and its
    body run ``trips`` times each; the last evaluation of the condition, which ends the loop, has no node. A
    loop carries values: node ``carried_consumer[i]`` of region ``carried_region[i]`` needs what
    ``carried_producer[i]`` made one trip earlier.
    """

    parent: SmallIntArray
    kind: NDArray[np.uint8]
    trips: FloatArray
    label: SmallIntArray
    carried_region: SmallIntArray
    carried_producer: SmallIntArray
    carried_consumer: SmallIntArray

    @classmethod
    def empty(cls) -> RegionTable:
        """A flat program."""
        return cls(
            parent=_ints(),
            kind=np.empty(0, np.uint8),
            trips=_floats(),
            label=_ints(),
            carried_region=_ints(),
            carried_producer=_ints(),
            carried_consumer=_ints(),
        )

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExtraTable:
    """Attributes of a format that the graph does not model, verbatim; several rows a node are usual.

    ``key`` is a string row; ``tag`` says what the value ``values[offsets[i]:offsets[i + 1]]`` is. Tag 0 is
    text (UTF-8) of any format, which every format may write; other tags belong to one format, which numbers
    its own types with them: 1..255 to Chakra (``hespas.converters.chakra.contract.Tag``), the rest to nobody
    yet. A format leaves rows out whose tags are another's. ``node`` is -1 for the file itself.
    """

    node: SmallIntArray
    key: SmallIntArray
    tag: NDArray[np.int16]
    offsets: IntArray
    values: bytes | memoryview[int]

    @classmethod
    def empty(cls) -> ExtraTable:
        """Nothing left over."""
        return cls(
            node=_ints(), key=_ints(), tag=np.empty(0, np.int16), offsets=np.zeros(1, np.int64), values=b""
        )

    def __len__(self) -> int:
        return len(self.node)

    def value(self, row: int) -> bytes:
        """The stored bytes of one row."""
        return bytes(self.values[self.offsets[row] : self.offsets[row + 1]])

    def rows_of(self, node: int) -> range:
        """The rows of one node."""
        start, end = np.searchsorted(self.node, [node, node + 1])
        return range(int(start), int(end))
