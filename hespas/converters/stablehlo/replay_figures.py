"""Whether a replay is as much work as its graph: its file is read again and compared."""

from __future__ import annotations

import numpy as np

from hespas.converters.stablehlo.replay import Replayed
from hespas.graph import Diagnostics, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.passes import known_sum

__all__ = ["compare"]

_FLOPS_TOLERANCE = 0.01
_BYTES_TOLERANCE = 0.01


def compare(flat: OpGraph, replayed: Replayed, written: OpGraph, diagnostics: Diagnostics) -> None:
    """Report where ``written``, the graph of a replay, noticeably is more or less work than ``flat``."""
    stated = np.where(np.isnan(flat.useful_flops), flat.flops, flat.useful_flops)
    wanted = known_sum(stated)
    if not abs(replayed.flops - wanted) <= _FLOPS_TOLERANCE * wanted and (replayed.flops or wanted > 0):
        message = (
            f"replays in which XLA counts {replayed.flops:,.0f} FLOPs where the graph says {_said(stated)}: "
            "sums of all-reduce count there, and so does what ties operations together"
        )
        diagnostics.warning("stablehlo.replay-flops", flat.name, message)
    else:
        _compare_specified(flat, written, diagnostics)
    _compare_bytes(flat, written, diagnostics)


def _compare_specified(flat: OpGraph, written: OpGraph, diagnostics: Diagnostics) -> None:
    """FLOPs as the specification counts them, products with padding and holes among them."""
    before, after = (known_sum(np.array(graph.flops * graph.multiplicity)) for graph in (flat, written))
    if not before or abs(after - before) <= _FLOPS_TOLERANCE * before or np.isnan(after - before):
        return
    message = (
        f"replays of {after:,.0f} FLOPs by the specification where the graph says {before:,.0f}: "
        "convolutions are replayed without the products with padding and dilation holes"
    )
    diagnostics.warning("stablehlo.replay-flops", flat.name, message)


def _compare_bytes(flat: OpGraph, written: OpGraph, diagnostics: Diagnostics) -> None:
    before, after = _local_bytes(flat), _local_bytes(written)
    wanted, made = known_sum(before), known_sum(after)
    if np.isnan(wanted) or abs(made - wanted) <= _BYTES_TOLERANCE * wanted:
        return
    message = (
        f"replays that move {made:,.0f} bytes where the graph says {_said(before)}: what ties operations "
        "together moves some, and others of the same types, or several, stand for an operation"
    )
    diagnostics.warning("stablehlo.replay-bytes", flat.name, message)


def _local_bytes(graph: OpGraph) -> FloatArray:
    """Bytes moved per step by operations other than collectives and messages, whose payloads are compared
    one by one.
    """
    moved = np.array(graph.bytes_moved * graph.multiplicity)
    moved[graph.collectives.node] = 0.0
    moved[graph.p2p.node] = 0.0
    return moved


def _said(column: FloatArray) -> str:
    """What a graph says of one figure: an unknown sum is not zero."""
    unknown = int(np.isnan(column).sum())
    if unknown == len(column):
        return f"nothing of its {unknown:,} operations"
    beside = f", and nothing of {unknown:,} operations" if unknown else ""
    return f"{known_sum(column):,.0f}{beside}"
