"""Kernels of a training step: what another estimator says, and where libraries are published to reach more or
less, that.

Fits and learned models come from benchmarks of single kernels on an idle device, of libraries for serving.
A training step differs: its fused attention is one of a few libraries, for both passes; its products keep the
device at its power limit; 8-bit ones were measured on other vendors' devices only. What is known of these by
family of devices is data with sources (:mod:`hespas.hardware.kernel_shares`); all else is as ``base`` says.
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
"""Of narrower heads libraries reach less."""
_LEAST = 0.01
"""Of the memory's bandwidth: no change of clock or part is as large as that, a slip of units is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The estimator. ``base`` says what shares do not. ``attention``: whose fused attention runs (empty: the
    newest that is known for the device). ``power_w`` is another power limit than the device file's (0:
    that), ``bandwidth`` that of the memory over the file's. ``fused``: elementwise work is, by a compiler or
    a library. ``num_ranks`` as in :class:`~hespas.estimators.composite.Composite`.
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
                f"training: no library of attention {self.attention!r}",
                hint=f"one of: {', '.join(LIBRARIES)}",
            )
        if self.base.partition(":")[0] == "training":
            raise UsageError("training: its base is training itself", hint="name another: base=composite")
        if self.power_w != 0 and not self.power_w >= 1:
            raise UsageError("training: power_w is below 1 W", hint="leave it out: the device file's counts")
        if not _LEAST <= self.bandwidth <= 1 / _LEAST:
            raise UsageError(
                f"training: bandwidth is a share of the device file's, of {_LEAST:g} to {1 / _LEAST:g}",
                hint="leave it out: the device file's counts",
            )
        object.__setattr__(self, "_model", for_job(load_estimator(self.base), self.num_ranks))

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return "training"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node. O(nodes) beside what ``base`` costs."""
        found = Diagnostics() if diagnostics is None else diagnostics
        shares = training_shares(device)
        said = estimate_with(self._model, _in_16_bits(graph, shares), device, found)
        times = said.duration_ns.copy()
        _products(graph, device, shares, times)
        attention = _attention(graph, device, shares, self.attention, times)
        stated = np.union1d(graph.contractions.node, attention)
        times[stated] = np.fmax(times[stated], _least_ns(graph, device)[stated])
        done = _with_times(said, self.name, self._scaled(graph, device, times))
        changed = int((done.estimator == len(said.estimators)).sum())
        _tell(shares, self.attention, changed, len(attention), found)
        return done

    def _scaled(self, graph: OpGraph, device: Device, times: FloatArray) -> FloatArray:
        """Times at another power limit and another memory, and of kernels that nothing fuses."""
        limits, shares = self.power_w > 0 and device.tdp_w > 0, common_shares()
        rate = (self.power_w / device.tdp_w) ** shares.power.exponent if limits else 1.0
        slower = self.bandwidth if self.fused else self.bandwidth / shares.apart.factor
        heavy = np.isin(graph.op_class, _HEAVY)
        computes = ~np.isin(graph.op_class, _ELSEWHERE)
        return np.where(heavy, times / rate, np.where(computes, times / slower, times))


def _codes(names: tuple[str, ...]) -> list[int]:
    return [dtype(name).code for name in names]


def _in_16_bits(graph: OpGraph, shares: TrainingShares) -> OpGraph:
    """The graph with products in formats that only other vendors' devices were measured in as 16-bit ones."""
    table = graph.contractions
    change = np.isin(table.lhs, _codes(shares.stands_in))
    if not change.any():
        return graph
    wide = dtype("bf16").code
    lhs, rhs = (np.where(change, wide, column).astype(column.dtype) for column in (table.lhs, table.rhs))
    return replace(graph, contractions=replace(table, lhs=lhs, rhs=rhs))


def _peak(device: Device, name: str) -> float:
    try:
        return peak_for(device, "matrix", name).flops_per_s
    except UnsupportedError:
        return float("nan")


def _products(graph: OpGraph, device: Device, shares: TrainingShares, times: FloatArray) -> None:
    table, stood = graph.contractions, set(_codes(shares.stands_in))
    wide = _peak(device, "bf16")
    codes: list[int] = np.unique(table.lhs).tolist()
    for code in codes:
        rows = np.flatnonzero(table.lhs == code)
        kind = DTYPES[code]
        peak, share = _peak(device, kind.name), shares.products_of(kind.bits)
        nodes = table.node[rows]
        if code in stood:
            less = 1.0 if share is None or isnan(share.of_16_bits) else share.of_16_bits
            times[nodes] *= wide / peak / less
        if share is not None and not isnan(peak):
            sustained_ns = table.flops[rows] / (share.sustained * peak) * 1e9
            if share.filled:
                times[nodes] = sustained_ns / _filled(graph, rows, device)
            else:
                times[nodes] = np.fmax(times[nodes], sustained_ns)
            if kind.block_elements:
                times[nodes] /= share.of_blocks


def _least_ns(graph: OpGraph, device: Device) -> FloatArray:
    """What no kernel is faster than: its bytes through memory, and the shortest of any."""
    moved_ns = graph.bytes_moved / device.main_memory.bandwidth_bytes_per_s * 1e9
    return np.fmax(moved_ns, device.launch_overhead_ns)


def _filled(graph: OpGraph, rows: IntArray, device: Device) -> FloatArray:
    """The share of a matrix unit's rows and columns that sizes fill."""
    side = device.systolic.rows if device.systolic is not None else 128
    table = graph.contractions
    filled = np.ones(len(rows))
    for column in (table.m, table.n, table.k):
        size = column[rows].astype(np.float64)
        filled *= size / (np.ceil(size / side) * side)
    return filled


_FUSED = "scaled_dot_product"
"""In the name of attention whose operands are (batch, heads, length, size)."""


def _attention(
    graph: OpGraph, device: Device, shares: TrainingShares, library: str, times: FloatArray
) -> IntArray:
    """Times of fused attention of many queries by a library's shares; the nodes that have one."""
    share = shares.attention_of(library or shares.library)
    nodes = np.flatnonzero((graph.op_class == int(OpClass.ATTENTION)) & ~np.isnan(graph.useful_flops))
    stated: list[int] = []
    for node in nodes.tolist() if share else ():
        rate = _attention_rate(graph, node, share) if share else 0.0
        if rate > 0:
            times[node] = float(graph.useful_flops[node]) / (rate * _peak(device, "bf16")) * 1e9
            stated.append(node)
    return np.array(stated, np.int64)


def _attention_rate(graph: OpGraph, node: int, share: AttentionShare) -> float:
    """The share of the peak that a node reaches; 0 where its operands do not show its sizes."""
    name, operands = graph.op_name(node), graph.operands.row(node).tolist()
    shapes = [graph.types.shape(row) for row in operands[:2]]
    known = len(shapes) == 2 and all(len(shape) == 4 and min(shape) > 0 for shape in shapes)
    if not known or _FUSED not in name or shapes[0][2] == 1:
        return 0.0
    (*_, head), (_, _, keys, _) = shapes
    rate = share.backward if name.endswith("_backward") else share.forward
    rate *= keys / (keys + share.half_keys)
    rate *= 1.0 if head >= _WHOLE_HEAD else share.narrow_head
    kind = graph.types.dtype_of(operands[0])
    return rate * (share.of_8_bits if kind is not None and kind.bits == 8 else 1.0)


_ASSUMED = 1.3
"""A time that a share says is so sure at most: of published steps, which are made of such, one in ten is
farther off uncalibrated (docs/league.md).
"""


def _with_times(said: Estimate, name: str, times: FloatArray) -> Estimate:
    """An estimate with other times: intervals in proportion, but those of assumed shares as wide as these
    are sure, and whose word the changed ones are.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(said.duration_ns > 0, times / said.duration_ns, 1.0)
    changed = ~np.isnan(times) & ~(times == said.duration_ns)
    place = len(said.estimators)
    return replace(
        said,
        estimators=(*said.estimators, name),
        duration_ns=times,
        low_ns=np.where(changed, np.fmin(said.low_ns * ratio, times / _ASSUMED), said.low_ns),
        high_ns=np.where(changed, np.fmax(said.high_ns * ratio, times * _ASSUMED), said.high_ns),
        estimator=np.where(changed, place, said.estimator).astype(np.int8),
    )


def _tell(shares: TrainingShares, library: str, changed: int, attention: int, found: Diagnostics) -> None:
    """Say where times are from that no fit of the device gave."""
    share = shares.attention_of(library or shares.library)
    if share is not None:
        found.info(
            "training.attention",
            shares.name,
            f"attention reaches what {share.library} is published to: {shares.sources[share.source]}",
            count=attention,
        )
    found.info(
        "training.shares",
        shares.name,
        "kernels take what their family of devices reaches in a step (hespas/hardware/training)",
        count=changed,
    )
