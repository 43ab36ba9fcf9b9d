"""The enumerations that graph columns store as small integers."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CollectiveKind", "NodeKind", "OpClass", "RegionKind", "Resource", "timed_class_name"]


class NodeKind(IntEnum):
    """What a node is to a scheduler."""

    COMPUTE = 0
    COLLECTIVE = 1
    SEND = 2
    RECV = 3
    PERMUTE = 4
    """A send and a receive along one permutation (``collective_permute``)."""
    MEM_LOAD = 5
    MEM_STORE = 6
    METADATA = 7
    INVALID = 8


class OpClass(IntEnum):
    """What a node costs: the classes of the cost table."""

    UNKNOWN = 0
    FREE = 1
    ELEMENTWISE = 2
    TRANSCENDENTAL = 3
    CONTRACTION = 4
    CONVOLUTION = 5
    REDUCTION = 6
    WINDOW = 7
    NORMALIZATION = 8
    SORT = 9
    MAP = 10
    LINALG = 11
    FFT = 12
    MOVE = 13
    BROADCAST = 14
    GENERATE = 15
    SLICE = 16
    UPDATE = 17
    GATHER = 18
    SCATTER = 19
    QUANTIZE = 20
    ATTENTION = 21
    FUSION = 22
    COLLECTIVE = 23
    P2P = 24
    HOST = 25
    CONTROL = 26
    CUSTOM = 27
    MEMORY = 28


def timed_class_name(code: int) -> str:
    """What a class of operations that took time is called: what costs nothing and took some, as calls around
    others and views do on a host, is overhead.
    """
    return "host overhead" if code == OpClass.FREE else OpClass(code).name.lower()


class CollectiveKind(IntEnum):
    """Collective operations; the codes are ours, formats map theirs."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    BARRIER = 8
    RAGGED_ALL_TO_ALL = 9
    REDUCE_SCATTER_BLOCK = 10
    UNKNOWN = 11


class Resource(IntEnum):
    """Where a node runs."""

    DEVICE = 0
    HOST = 1


class RegionKind(IntEnum):
    """Why some nodes stand together; a region's parent encloses it."""

    CALL = 0
    LOOP_BODY = 1
    """One trip of a loop: the nodes of its condition, then those of its body, which wait for the predicate.
    The one evaluation of the condition that ends the loop is not modelled."""
    BRANCH = 2
    COMPOSITE = 3
    MANUAL = 4
    ASYNC = 5
    FUSION = 6
    SEGMENT = 7
