"""In what coordinates measurements of one kind lie, and along which lines one may go from one to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.operations import Operations

__all__ = ["SPACES", "Move", "Space"]


@dataclass(frozen=True, slots=True)
class Move:
    """A line: ``axis`` varies, the coordinates ``held`` do not, the others follow."""

    axis: str
    held: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The coordinates that tell operations of a kind apart, the lines through them, and by which of them
    (``curves``) the measurements fall into curves that share no start and no rate. ``rising``: on a coarse
    grid a time above that of a larger size is an outlier, for the smaller fits into the larger.
    """

    names: tuple[str, ...]
    moves: tuple[Move, ...]
    curves: tuple[str, ...] = ()
    rising: bool = False

    def of(self, ops: Operations) -> dict[str, FloatArray]:
        """The coordinates of operations, shape ``(ops,)`` each; NaN where unknown."""
        return {name: _DERIVED[name](ops) if name in _DERIVED else ops.dim(name) for name in self.names}


def _window(ops: Operations) -> FloatArray:
    """The tokens that each query sees at most, from the pairs of a causal prompt; its length where all.

    A window of w over s tokens leaves w (w + 1) / 2 + (s - w) w pairs.
    """
    length = ops.dim("q_len")
    with np.errstate(invalid="ignore"):
        root = np.sqrt(np.maximum((length + 0.5) ** 2 - 2 * ops.dim("pairs"), 0.0))
    window = np.round(length + 0.5 - root)
    return np.where(window >= length, 0.0, window)


def _group(ops: Operations) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return ops.dim("heads") / ops.dim("kv_heads")


def _nodes(ops: Operations) -> FloatArray:
    """Nodes that the ranks are spread over; one where nobody says."""
    per_node = ops.dim("ranks_per_node")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isnan(per_node), 1.0, np.ceil(ops.dim("ranks") / per_node))


def _passes(ops: Operations) -> FloatArray:
    """Bytes per element: tells operations that read more from those that read less."""
    elements = ops.dim("rows") * ops.dim("columns")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.round(ops.bytes_moved / elements, 3)


_DERIVED = MappingProxyType({"window": _window, "group": _group, "nodes": _nodes, "passes": _passes})


def _lines(names: str, *axes: str, also: tuple[Move, ...] = ()) -> Space:
    """A space where each axis may vary with all other coordinates held."""
    every = tuple(names.split())
    moves = tuple(Move(axis, tuple(name for name in every if name != axis)) for axis in axes)
    return Space(names=every, moves=(*moves, *also))


_STREAM = _lines("rows columns passes", "rows", "columns")
_HEADS = Move("heads", ("batch", "q_len", "head_dim", "group", "window"))
_DECODE_HEADS = Move("heads", ("batch", "kv_len", "head_dim", "group"))

SPACES: Mapping[str, Space] = MappingProxyType(
    {
        "matmul": _lines("batch m n k", "m", "n", "k", "batch"),
        "convolution": Space(
            names=("m", "n", "k", "kernel", "spatial"),
            moves=(
                Move("m", ("n", "k", "kernel", "spatial")),
                Move("n", ("m", "k", "kernel", "spatial")),
                Move("k", ("m", "n", "kernel", "spatial")),
            ),
        ),
        "attention.context": Space(
            names=("batch", "q_len", "heads", "group", "head_dim", "window"),
            moves=(
                Move("batch", ("q_len", "heads", "group", "head_dim", "window")),
                Move("q_len", ("batch", "heads", "group", "head_dim", "window")),
                _HEADS,
                Move("group", ("batch", "q_len", "heads", "head_dim", "window")),
            ),
        ),
        "attention.generation": Space(
            names=("batch", "kv_len", "heads", "group", "head_dim"),
            moves=(
                Move("batch", ("kv_len", "heads", "group", "head_dim")),
                Move("kv_len", ("batch", "heads", "group", "head_dim")),
                _DECODE_HEADS,
                Move("group", ("batch", "kv_len", "heads", "head_dim")),
            ),
        ),
        "attention.encoder": _lines("batch q_len heads head_dim", "batch", "q_len", "heads"),
        "moe": _lines(
            "tokens hidden inter topk experts tensor_parallel expert_parallel matrices",
            "tokens", "expert_parallel", "tensor_parallel", "inter",
        ),
        "vector": _STREAM,
        "reduction": _STREAM,
        "normalization": _STREAM,
        "quantize": _STREAM,
        "pooling": _STREAM,
        "gather": _STREAM,
        "move": _STREAM,
        "collective": Space(
            names=("message_bytes", "ranks", "nodes"),
            moves=(Move("message_bytes", ("ranks", "nodes")), Move("ranks", ("message_bytes", "nodes"))),
            curves=("ranks", "nodes"),
            rising=True,
        ),
    }
)  # fmt: skip
"""Kind -> its space. Kinds that are not listed are looked up by nothing."""
