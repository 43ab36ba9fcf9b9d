"""What kernels of a training step reach, where nobody measured them on a device: products in narrow formats,
fused attention, products on matrix units of TPUs.

The shares are of the dense peak and of whole families of devices. They are what libraries are published to
reach, no fit to a step: FlashAttention 1 to 3 (arXiv 2205.14135, 2307.08691, 2407.08608: forward and backward
pass, causal, heads of 128), cuDNN's attention on the level of the third; products on a device that a step
keeps at its power limit run slower than in a benchmark that it does not (arXiv 2407.08608 and vendors' notes
on clocks). A device with another power limit has the square root of the ratio of power.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from hespas.generators.llm.published import PublishedRun
from hespas.graph import OpClass, OpGraph
from hespas.graph.columns import DTYPES, FloatArray, dtype
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device
from hespas.hardware.peaks import peak_for

__all__ = ["Library", "Variant", "attention_library", "in_16_bits", "trained_times", "variant_of"]

Library = Literal["flash1", "flash2", "cudnn", "splash", "measured"]
"""Whose fused attention a step runs; ``measured``: what estimators say."""


class _Attention(NamedTuple):
    """Shares of the 16-bit peak that the two passes reach with many keys, and the keys at which half is."""

    forward: float
    backward: float
    half_keys: float


_ATTENTION: Mapping[tuple[Library, str], _Attention] = {
    ("flash1", "Ampere"): _Attention(0.36, 0.32, 200.0),
    ("flash1", "Hopper"): _Attention(0.16, 0.14, 200.0),
    ("flash2", "Ampere"): _Attention(0.65, 0.55, 400.0),
    ("flash2", "Hopper"): _Attention(0.37, 0.32, 500.0),
    ("flash2", "Blackwell"): _Attention(0.22, 0.18, 500.0),
    ("cudnn", "Ampere"): _Attention(0.62, 0.52, 400.0),
    ("cudnn", "Hopper"): _Attention(0.62, 0.50, 700.0),
    ("cudnn", "Blackwell"): _Attention(0.58, 0.45, 700.0),
    ("splash", "TPU"): _Attention(0.50, 0.45, 500.0),
}
_NARROW_HEAD = 0.8
"""What heads of fewer than 128 reach of what those do."""
_FP8_ATTENTION = 1.25
"""How much faster attention is whose products are 8-bit: its soft-max is not."""

_SUSTAINED: Mapping[tuple[str, int], float] = {
    ("Hopper", 16): 0.66,
    ("Hopper", 8): 0.62,
    ("Blackwell", 16): 0.57,
    ("Blackwell", 8): 0.57,
    ("Blackwell", 4): 0.42,
    ("TPU", 16): 0.92,
    ("TPU", 8): 0.85,
}
"""The most of the dense peak that products of a step sustain, by bits of their operands."""
_NARROW_LOSS = 0.92
"""Efficiency in a narrow format over that in 16 bits of the same product."""
_POWER = 0.5
"""The exponent of power in the clock at a power limit."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a device differs from its file: ``rate`` of units and ``bandwidth`` of memory, as ratios."""

    rate: float = 1.0
    bandwidth: float = 1.0


def variant_of(run: PublishedRun, device: Device) -> Variant:
    """What the column ``accelerator_variant`` says of power and memory."""
    text = run.row.get("accelerator_variant", "")
    power, memory = re.search(r"(\d+) W power limit", text), re.search(r"(\d+(?:\.\d+)?) TB/s", text)
    rate = (float(power[1]) / device.tdp_w) ** _POWER if power and device.tdp_w > 0 else 1.0
    own = device.main_memory.bandwidth_bytes_per_s
    return Variant(rate, float(memory[1]) * 1e12 / own if memory else 1.0)


def attention_library(run: PublishedRun, device: Device) -> Library:
    """Whose attention a row's framework runs."""
    framework = run.row.get("framework", "").casefold()
    if device.kind == "tpu":
        return "splash"
    if device.vendor != "NVIDIA" or re.search(r"megatron-lm \(20(20|21|22)", framework):
        return "measured"
    if "llm-foundry" in framework:
        return "flash1"
    return "flash2" if run.training.style == "torchtitan" else "cudnn"


def in_16_bits(graph: OpGraph, device: Device) -> OpGraph:
    """The graph with products in formats that only other vendors' devices were measured in as 16-bit ones."""
    table = graph.contractions
    change = np.isin(table.lhs, _stood_in_for(device))
    if not change.any():
        return graph
    wide = dtype("bf16").code
    lhs, rhs = (np.where(change, wide, column).astype(column.dtype) for column in (table.lhs, table.rhs))
    return replace(graph, contractions=replace(table, lhs=lhs, rhs=rhs))


def _stood_in_for(device: Device) -> list[int]:
    """Codes of number formats of products that estimators know of other vendors only."""
    if device.kind == "tpu":
        return [dtype(name).code for name in ("i8", "f8E4M3FN")]
    if device.vendor != "NVIDIA":
        return []
    return [dtype(name).code for name in ("f8E4M3FN", "f8E5M2", "mxfp8")]


_APART = 2.0
"""What a kernel that a compiler or a library fuses takes as the several that it is made of."""


def trained_times(
    graph: OpGraph,
    device: Device,
    library: Library,
    time_ns: FloatArray,
    variant: Variant,
    *,
    fused: bool = True,
) -> FloatArray:
    """Times of the nodes of a pass [ns], where ``time_ns`` is of :func:`in_16_bits`; ``fused``: elementwise
    work is, by a compiler or a library. O(nodes).
    """
    times = time_ns.copy()
    _products(graph, device, times)
    _attention(graph, device, library, times)
    heavy = np.isin(graph.op_class, (int(OpClass.CONTRACTION), int(OpClass.ATTENTION)))
    computes = ~np.isin(graph.op_class, (int(OpClass.COLLECTIVE), int(OpClass.P2P), int(OpClass.HOST)))
    slower = variant.bandwidth if fused else variant.bandwidth / _APART
    return np.where(heavy, times / variant.rate, np.where(computes, times / slower, times))


def _family(device: Device) -> str:
    return "TPU" if device.kind == "tpu" else device.family.removesuffix(" Ultra")


def _peak(device: Device, name: str) -> float:
    try:
        return peak_for(device, "matrix", name).flops_per_s
    except UnsupportedError:
        return float("nan")


def _products(graph: OpGraph, device: Device, times: FloatArray) -> None:
    table, stood = graph.contractions, set(_stood_in_for(device))
    wide = _peak(device, "bf16")
    codes: list[int] = np.unique(table.lhs).tolist()
    for code in codes:
        rows = np.flatnonzero(table.lhs == code)
        kind = DTYPES[code]
        peak = _peak(device, kind.name)
        nodes = table.node[rows]
        if code in stood:
            times[nodes] *= wide / peak / _NARROW_LOSS
        share = _SUSTAINED.get((_family(device), min(16, round(kind.bits))))
        if share is None:
            continue
        if device.kind == "tpu":
            times[nodes] = table.flops[rows] / (share * peak * _filled(graph, rows, device)) * 1e9
        else:
            times[nodes] = np.fmax(times[nodes], table.flops[rows] / (share * peak) * 1e9)


def _filled(graph: OpGraph, rows: np.ndarray[tuple[int], np.dtype[np.int64]], device: Device) -> FloatArray:
    """The share of a matrix unit's rows and columns that sizes fill."""
    side = device.systolic.rows if device.systolic is not None else 128
    table = graph.contractions
    filled = np.ones(len(rows))
    for column in (table.m, table.n, table.k):
        size = column[rows].astype(np.float64)
        filled *= size / (np.ceil(size / side) * side)
    return filled


def _attention(graph: OpGraph, device: Device, library: Library, times: FloatArray) -> None:
    shares = _ATTENTION.get((library, _family(device)))
    nodes = np.flatnonzero(graph.op_class == int(OpClass.ATTENTION))
    if shares is None or not len(nodes):
        return
    peak = _peak(device, "bf16")
    starts, operands = graph.operands.offsets, graph.operands.values
    for node in nodes.tolist():
        query, key = (graph.types.shape(int(operands[starts[node] + place])) for place in (0, 1))
        backward = graph.op_name(node).endswith("_backward")
        rate = peak * (shares.backward if backward else shares.forward)
        rate *= key[2] / (key[2] + shares.half_keys)
        rate *= 1.0 if query[3] >= 128 else _NARROW_HEAD
        kind = graph.types.dtype_of(int(operands[starts[node]]))
        rate *= _FP8_ATTENTION if kind is not None and kind.bits == 8 else 1.0
        times[node] = float(graph.useful_flops[node]) / rate * 1e9
