"""Estimator of training steps: another estimator's times, or published rates of libraries where known.

Fits and learned models come from benchmarks of single kernels on an idle device, of libraries for serving. A
training step differs in three ways. Its fused attention is one of a few libraries, for the forward and the
backward pass. Its products keep the device at its power limit. 8-bit products were measured on devices of
other vendors only. The published rates by family of devices are data with sources
(:mod:`hespas.hardware.kernel_shares`); all other
times are from ``base``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isnan
from typing import ClassVar

import numpy as np

from hespas.estimators.interface import Estimator, estimate_with, for_job
from hespas.estimators.registry import load_estimator
from hespas.graph import Diagnostics, Estimate, OpClass, OpGraph
from hespas.graph.columns import DTYPES, FloatArray, IntArray, dtype
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import Device
from hespas.hardware.kernel_shares import (
    LIBRARIES,
    AttentionShare,
    TrainingShares,
    common_shares,
    training_shares,
)
from hespas.hardware.peaks import peak_for

__all__ = ["Training"]

_HEAVY = (int(OpClass.CONTRACTION), int(OpClass.ATTENTION))
_ELSEWHERE = (int(OpClass.COLLECTIVE), int(OpClass.P2P), int(OpClass.HOST))
_WHOLE_HEAD = 128
"""Head size below which libraries reach lower rates."""
_LEAST = 0.01
"""Least bandwidth relative to the file's: a larger change is an error of units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Estimator of training steps, which uses published rates of matmuls and fused attention.

    ``base``: estimator of all other times. ``attention``: library of the fused attention (empty: the newest
    one known for the device). ``power_w``: power limit [W] (0: the limit in the device file). ``bandwidth``:
    ratio of the memory bandwidth to the bandwidth in the device file. ``fused``: elementwise work is fused,
    by a compiler or a library. ``num_ranks`` is as in :class:`~hespas.estimators.composite.Composite`.
    """

    base: str = "composite"
    attention: str = ""
    power_w: float = 0.0
    bandwidth: float = 1.0
    fused: bool = True
    num_ranks: int = -1

    inert_options: ClassVar[frozenset[str]] = frozenset({"attention"})
    _model: Estimator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.attention and self.attention not in LIBRARIES:
            raise UsageError(
                f"training: unknown library of attention {self.attention!r}",
                hint=f"use one of: {', '.join(LIBRARIES)}",
            )
        if self.base.partition(":")[0] == "training":
            raise UsageError(
                f"training: base={self.base} is the estimator training itself",
                hint="name another estimator: base=composite",
            )
        if self.power_w != 0 and not self.power_w >= 1:
            raise UsageError(
                f"training: invalid option power_w={self.power_w:g}",
                hint="use 1 W or more, or omit it to use the device file's value",
            )
        if not _LEAST <= self.bandwidth <= 1 / _LEAST:
            raise UsageError(
                f"training: bandwidth={self.bandwidth:g} is not a ratio of {_LEAST:g} to {1 / _LEAST:g}",
                hint="give the memory bandwidth relative to the device file's (1: the same), or omit it",
            )
        object.__setattr__(self, "_model", for_job(load_estimator(self.base), self.num_ranks))

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        return "training"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node. O(nodes) in addition to ``base``."""
        findings = Diagnostics() if diagnostics is None else diagnostics
        shares = training_shares(device)
        # Products in formats that were measured on other vendors' devices only are estimated as 16-bit ones.
        table, base_graph = graph.contractions, graph
        change = np.isin(table.lhs, _codes(shares.stands_in))
        if change.any():
            wide = dtype("bf16").code
            lhs, rhs = (
                np.where(change, wide, column).astype(column.dtype) for column in (table.lhs, table.rhs)
            )
            base_graph = replace(graph, contractions=replace(table, lhs=lhs, rhs=rhs))
        estimate = estimate_with(self._model, base_graph, device, findings)
        times = estimate.duration_ns.copy()
        _set_products(graph, device, shares, times)
        attention = _set_attention(graph, device, shares, self.attention, times)
        sorting = _set_experts(graph, device, shares, times)
        replaced = np.union1d(table.node, np.union1d(attention, sorting))
        # No kernel is faster than its bytes through memory, or than the shortest kernel.
        moved_ns = graph.bytes_moved / device.main_memory.bandwidth_bytes_per_s * 1e9
        least_ns = np.fmax(moved_ns, device.launch_overhead_ns)
        times[replaced] = np.fmax(times[replaced], least_ns[replaced])
        # Times at another power limit and another memory, and of kernels without fusion.
        limits, common = self.power_w > 0 and device.tdp_w > 0, common_shares()
        rate = (self.power_w / device.tdp_w) ** common.power.exponent if limits else 1.0
        slower = self.bandwidth if self.fused else self.bandwidth / common.apart.factor
        heavy = np.isin(graph.op_class, _HEAVY)
        computes = ~np.isin(graph.op_class, _ELSEWHERE)
        times = np.where(heavy, times / rate, np.where(computes, times / slower, times))
        # Intervals of changed times scale, and are at least a factor of _SHARE_WIDENING wide on both sides.
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(estimate.duration_ns > 0, times / estimate.duration_ns, 1.0)
        is_changed = ~np.isnan(times) & ~(times == estimate.duration_ns)
        index = len(estimate.estimators)
        result = replace(
            estimate,
            estimators=(*estimate.estimators, self.name),
            duration_ns=times,
            low_ns=np.where(
                is_changed, np.fmin(estimate.low_ns * ratio, times / _SHARE_WIDENING), estimate.low_ns
            ),
            high_ns=np.where(
                is_changed, np.fmax(estimate.high_ns * ratio, times * _SHARE_WIDENING), estimate.high_ns
            ),
            estimator=np.where(is_changed, index, estimate.estimator).astype(np.int8),
            bases=(
                *estimate.bases,
                f"published runs of {' and '.join(shares.families) or shares.vendor} devices",
            ),
            basis=np.where(is_changed, len(estimate.bases), estimate.basis).astype(np.int16),
        )
        changed = int((result.estimator == len(estimate.estimators)).sum())
        share = shares.attention_of(self.attention or shares.library)
        if share is not None:
            text = f"attention at the published rate of {share.library}: {shares.sources[share.source]}"
            findings.info("training.attention", shares.name, text, count=len(attention))
        text = "kernels at the rates of their device family in a step (hespas/hardware/training)"
        findings.info("training.shares", shares.name, text, count=changed)
        return result


def _codes(names: tuple[str, ...]) -> list[int]:
    return [dtype(name).code for name in names]


def _peak(device: Device, name: str) -> float:
    try:
        return peak_for(device, "matrix", name).flops_per_s
    except UnsupportedError:
        return float("nan")


def _set_products(graph: OpGraph, device: Device, shares: TrainingShares, times: FloatArray) -> None:
    """Set the times of products, in ``times``, to those at the published shares of the peak for the device
    family.
    """
    table, as_16_bits = graph.contractions, set(_codes(shares.stands_in))
    wide = _peak(device, "bf16")
    side = device.systolic.rows if device.systolic is not None else 128
    codes: list[int] = np.unique(table.lhs).tolist()
    for code in codes:
        rows = np.flatnonzero(table.lhs == code)
        kind = DTYPES[code]
        peak, share = _peak(device, kind.name), shares.products_of(kind.bits)
        nodes = table.node[rows]
        if code in as_16_bits:
            less = 1.0 if share is None or isnan(share.of_16_bits) else share.of_16_bits
            times[nodes] *= wide / peak / less
        if share is not None and not isnan(peak):
            sustained_ns = table.flops[rows] / (share.sustained * peak) * 1e9
            if share.filled:
                # The share of a matrix unit's rows and columns that the sizes fill.
                filled = np.ones(len(rows))
                for column in (table.m, table.n, table.k):
                    size = column[rows].astype(np.float64)
                    filled *= size / (np.ceil(size / side) * side)
                times[nodes] = sustained_ns / filled
            else:
                times[nodes] = np.fmax(times[nodes], sustained_ns)
            if kind.block_elements:
                times[nodes] /= share.of_blocks


_EXPERT_MATMULS = "aten::bmm"
"""Operation of matmuls of experts that are launched one by one. One kernel for all experts
(``aten::_grouped_mm``) starts tiles of the next expert while tiles of the last one end.
"""
_SCAN = "mamba_chunk_scan"
"""Operation of the matmuls of a chunked scan."""
_SORTING = ("moe_permute", "moe_sort_chunks", "moe_unpermute", "moe_unpermute_backward")
"""Operations that sort tokens by expert."""


def _set_experts(graph: OpGraph, device: Device, shares: TrainingShares, times: FloatArray) -> IntArray:
    """Set the times of kernels of experts in ``times``: of single matmuls, which are smaller than matmuls of
    a whole layer, of kernels that sort tokens, and of chunked scans. Return the nodes that sort tokens by
    expert.
    """
    figures, table = common_shares().experts, graph.contractions
    if device.kind != "gpu":
        return np.empty(0, np.int64)
    least = np.minimum(np.minimum(table.m, table.n), table.k).astype(np.float64)
    is_expert = (table.batch > 1) & (least >= figures.least_size)
    is_expert &= graph.op_id[table.node] == graph.strings.find(_EXPERT_MATMULS)
    # Each matmul takes the time of ``half_size`` more rows than it has. Traffic is not affected.
    rate = np.ones(len(table))
    codes: list[int] = np.unique(table.lhs[is_expert]).tolist()
    for code in codes:
        kind = DTYPES[code]
        share = shares.products_of(kind.bits)
        sustained = 1.0 if share is None else share.sustained
        rate[table.lhs == code] = sustained * _peak(device, kind.name)
    experts = table.node[is_expert]
    flops_ns = np.fmin(table.flops[is_expert] / rate[is_expert] * 1e9, times[experts])
    times[experts] += figures.half_size / least[is_expert] * flops_ns
    sorting = np.flatnonzero(
        np.isin(graph.op_id, [row for name in _SORTING if (row := graph.strings.find(name)) >= 0])
    )
    scans = np.flatnonzero(graph.op_id == graph.strings.find(_SCAN))
    moved_ns = graph.bytes_moved / device.main_memory.bandwidth_bytes_per_s * 1e9
    times[sorting] = moved_ns[sorting] / figures.sorting
    times[scans] = np.fmax(times[scans], moved_ns[scans] / figures.scans)
    return sorting.astype(np.int64)


_FUSED = "scaled_dot_product"
"""Part of the name of attention whose operands are (batch, heads, length, size)."""


def _set_attention(
    graph: OpGraph, device: Device, shares: TrainingShares, library: str, times: FloatArray
) -> IntArray:
    """Set the times of fused attention over many queries in ``times``: useful FLOPs divided by the published
    share of the bf16 peak that the library reaches. Return the changed nodes.
    """
    share = shares.attention_of(library or shares.library)
    nodes = np.flatnonzero((graph.op_class == int(OpClass.ATTENTION)) & ~np.isnan(graph.useful_flops))
    if share is None:
        return np.empty(0, np.int64)
    known: dict[tuple[int, ...], float] = {}
    rates = np.zeros(len(nodes))
    operands: list[list[int]] = graph.operands.take(nodes).to_lists()
    op_ids: list[int] = graph.op_id[nodes].tolist()
    for row, (node, op_id, types) in enumerate(zip(nodes.tolist(), op_ids, operands, strict=True)):
        key = (op_id, *types[:2])
        if key not in known:
            known[key] = _attention_rate(graph, node, share)
        rates[row] = known[key]
    replaced = nodes[rates > 0]
    times[replaced] = graph.useful_flops[replaced] / (rates[rates > 0] * _peak(device, "bf16")) * 1e9
    return replaced.astype(np.int64)


def _attention_rate(graph: OpGraph, node: int, share: AttentionShare) -> float:
    """Return the share of the peak that a node of fused attention reaches; 0 if its operands do not determine
    the sizes.
    """
    name, operands = graph.op_name(node), graph.operands.row(node).tolist()
    shapes = [graph.types.shape(row) for row in operands[:2]]
    has_sizes = len(shapes) == 2 and all(len(shape) == 4 and min(shape) > 0 for shape in shapes)
    if not has_sizes or _FUSED not in name or shapes[0][2] == 1:
        return 0.0
    (*_, head), (_, _, keys, _) = shapes
    rate = share.backward if name.endswith("_backward") else share.forward
    rate *= keys / (keys + share.half_keys)
    rate *= 1.0 if head >= _WHOLE_HEAD else share.narrow_head
    kind = graph.types.dtype_of(operands[0])
    return rate * (share.of_8_bits if kind is not None and kind.bits == 8 else 1.0)


_SHARE_WIDENING = 1.3
"""Factor of the interval of a time by shares: one in ten published steps, which consist of such times, is
farther off without calibration (docs/accuracy/training.md).
"""
