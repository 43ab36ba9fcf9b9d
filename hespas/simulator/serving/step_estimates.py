"""Estimates of the kernels of serving steps at the points of a grid (lattice).

A serving engine chooses its kernels: products in several formats, custom all-reduces, fused memory-bound
kernels. :func:`models_of` has the estimators for them, and :func:`step_times` their times at all grid points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from hespas.estimators.interface import OperationModel, operations_on, predict_with
from hespas.estimators.rates import roof_ns
from hespas.estimators.registry import load_estimator
from hespas.graph import Diagnostics, OpClass, OpGraph
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device
from hespas.operations import Labels, Operations
from hespas.simulator.serving.steps import SHARES, StepGrids, StepTimes

__all__ = ["KernelModel", "LatticeKernels", "models_of", "step_times"]


class LatticeKernels(Protocol):
    """Protocol of the kernels at all grid points (see the module).

    The columns have one entry per kernel: ``node[i]`` is executed ``times[i]`` times at grid point
    ``point[i]``. ``part[i]`` is the part of the step to which it belongs (tokens, rows, decode, prompts).
    """

    @property
    def grids(self) -> StepGrids:
        """Return the grid points."""
        ...

    @property
    def graph(self) -> OpGraph:
        """Return the graph of all kernels."""
        ...

    @property
    def node(self) -> IntArray:
        """Return the graph node of each entry; an entry is one kernel at one grid point."""
        ...

    @property
    def part(self) -> IntArray:
        """Return the part of the step (such as attention) to which each entry belongs."""
        ...

    @property
    def point(self) -> IntArray:
        """Return the grid point of each entry."""
        ...

    @property
    def times(self) -> FloatArray:
        """Return the number of executions of each entry."""
        ...


class KernelModel(NamedTuple):
    """Estimator for some kernels of a step: operations of the given classes (empty: all) and number formats.

    ``formats`` maps number formats to their names in measured tables (empty: any format).
    """

    model: OperationModel
    classes: frozenset[OpClass] = frozenset()
    formats: Mapping[str, str] = MappingProxyType({})
    kinds: frozenset[str] = frozenset()
    """Kinds of operations (empty: any)."""
    variant: str = ""
    """Kernel of the library to use (empty: its default)."""
    inner: float = 1.0
    """Factor on the inner dimension of products."""


def step_times(
    kernels: LatticeKernels,
    device: Device,
    models: Sequence[KernelModel],
    *,
    num_ranks: int,
    diagnostics: Diagnostics,
) -> StepTimes:
    """Return the estimated times at all grid points.

    Each kernel takes the shortest time of the ``models`` that apply, because a library selects its fastest
    algorithm. Raises ``UnsupportedError`` if a kernel has no estimate.
    """
    used, row_of = np.unique(kernels.node, return_inverse=True)
    ops = operations_on(kernels.graph, device, num_ranks=num_ranks).take(used)
    classes = kernels.graph.op_class[used]
    best = np.full(len(used), np.inf)
    basis, bases = np.zeros(len(used), np.int64), {"": 0}
    for kernel_model in models:
        wanted = np.isin(classes, [int(op_class) for op_class in kernel_model.classes or OpClass])
        if kernel_model.formats:
            wanted &= np.isin(np.arange(len(ops)), ops.scheme.where(*kernel_model.formats))
        if kernel_model.kinds:
            wanted &= np.isin(np.arange(len(ops)), ops.kind.where(*kernel_model.kinds))
        wanted[_foreign_experts(ops, kernel_model, device, models)] = False
        rows = np.flatnonzero(wanted)
        if not len(rows):
            continue
        distinct, of_row = _renamed(ops.take(rows), kernel_model).distinct()
        # only the first model reports: later ones give alternatives
        messages = diagnostics if kernel_model is models[0] else Diagnostics()
        prediction = predict_with(kernel_model.model, distinct, device, messages)
        estimated_ns = prediction.duration_ns[of_row]
        codes = np.array([bases.setdefault(name, len(bases)) for name in prediction.basis.names], np.int64)
        shorter = estimated_ns < best[rows]
        basis[rows[shorter]] = codes[prediction.basis.row][of_row][shorter]
        best[rows] = np.fmin(best[rows], estimated_ns)
    if np.isinf(best).any():
        missing = ops.kind[int(np.argmax(np.isinf(best)))]
        raise UnsupportedError(
            f"no estimate of {missing} on {device.name}",
            hint="use another `estimator`, or add fits of the device",
        )
    share_of = np.array([SHARES.index(_SHARE_OF.get(op_class, "others")) for op_class in OpClass], np.int64)[
        classes
    ]
    share_of[ops.kind.where("moe")] = SHARES.index("experts")
    floor = roof_ns(ops, device)
    experts = ops.kind.where("moe")  # their roof counts the experts of one token, this time all that are busy
    floor[experts] = np.fmax(
        floor[experts], ops.bytes_moved[experts] / device.main_memory.bandwidth_bytes_per_s * 1e9
    )
    floor = np.fmin(floor, best)[row_of.reshape(-1)] * kernels.times
    share, time = share_of[row_of.reshape(-1)], best[row_of.reshape(-1)] * kernels.times
    grids = kernels.grids
    shapes = (
        (len(grids.tokens),),
        (len(grids.rows),),
        (len(grids.batch), len(grids.context)),
        (len(grids.prompts), len(grids.length), len(grids.before)),
    )
    layer = basis[row_of.reshape(-1)] * len(SHARES) + share
    tables: list[FloatArray] = []
    floors: list[FloatArray] = []
    for part, shape in enumerate(shapes):
        mine, points = kernels.part == part, int(np.prod(shape))
        at = layer[mine] * points + kernels.point[mine]
        sums = np.bincount(at, weights=time[mine], minlength=len(bases) * len(SHARES) * points)
        tables.append(np.asarray(sums, np.float64).reshape(len(bases), len(SHARES), *shape))
        at = share[mine] * points + kernels.point[mine]
        sums = np.bincount(at, weights=floor[mine], minlength=len(SHARES) * points)
        floors.append(np.asarray(sums, np.float64).reshape(len(SHARES), *shape))
    of_tokens, of_rows, of_decode, of_prompts = (table.sum(axis=0) for table in tables)
    first = (kernels.point == 0) & (kernels.part != _OF_DECODE)
    launches = float(kernels.times[first].sum())
    return StepTimes(
        grids, of_tokens, of_rows, of_decode, of_prompts,
        kernels=launches, bases=tuple(bases), by_basis=tuple(tables), floors=tuple(floors),
    )  # fmt: skip


def _foreign_experts(
    ops: Operations, kernel_model: KernelModel, device: Device, models: Sequence[KernelModel]
) -> IntArray:
    """Return the expert operations whose estimate would describe a kernel that this device does not have.

    These are operations whose number format was measured on other devices only, while this device has
    measurements of another format.
    """
    measured = {_PLAIN.get(fit.scheme, fit.scheme) for fit in device.fits if fit.kind == "moe"}
    experts = ops.kind.where("moe")
    rows = [np.zeros(0, np.int64)]
    for code, name in enumerate(ops.scheme.names):
        names = {model.formats.get(name, name) for model in models if not model.kinds or "moe" in model.kinds}
        if kernel_model.formats.get(name, name) not in measured and names & measured:
            rows.append(experts[ops.scheme.row[experts] == code])
    return np.concatenate(rows)


_OF_DECODE = 2
"""Part of a step that processes decoding sequences."""


def _renamed(ops: Operations, kernel_model: KernelModel) -> Operations:
    """Return the operations with the labels of the measured tables: variant, format names, and contracted
    extent.
    """
    if kernel_model.variant:
        ops = replace(ops, variant=Labels.constant(kernel_model.variant, len(ops)))
    if not kernel_model.formats:
        return ops
    names = tuple(kernel_model.formats.get(name, name) for name in ops.scheme.names)
    factor = np.where(np.isnan(ops.dim("k")), 1.0, kernel_model.inner)
    dims = {**ops.dims, "k": np.ceil(ops.dim("k") * factor)}
    return replace(ops, scheme=Labels(ops.scheme.row, names), dims=dims, flops=ops.flops * factor)


_SHARE_OF: Mapping[OpClass, str] = {
    OpClass.CONTRACTION: "products",
    OpClass.CONVOLUTION: "products",
    OpClass.ATTENTION: "attention",
    OpClass.COLLECTIVE: "collectives",
    OpClass.P2P: "collectives",
}
"""Operation class -> part of the time of a step (see :data:`SHARES`); the rest are others."""
_CUSTOM: Mapping[str, str] = {
    "vllm": "custom_allreduce-vllm:vLLM_custom_graph",
    "sglang": "custom_allreduce-sglang:SGLang_CustomAllReduce_graph",
    "trtllm": "custom_allreduce-trtllm",
}
"""All-reduce of a serving engine, by its name in tables of collectives; NCCL's is used if it is faster."""
_FORMATS: tuple[Mapping[str, str], ...] = (
    {"f8E4M3FN": "fp8", "mxfp4": "w4a8_mxfp4_mxfp8", "i4": "int4_wo"},
    {"f8E4M3FN": "fp8_block", "mxfp4": "w4a16_mxfp4", "i4": "w4a16_mxfp4"},
)
"""Names of number formats in tables of products. Times that include the conversion of operands are upper
bounds of the bare product, so the shortest time is used. Experts with 4-bit weights only were measured in one
such format.
"""
_PLAIN: Mapping[str, str] = {"a8w8_fp8": "f8E4M3FN"}
"""Formats of tables that are looked up by the name of the element type."""
_FP4_INNER = 0.5625
"""Time of a product in nvfp4 over one in 8 bits with equal weight bytes, scales included, at their peaks:
tables have products in nvfp4 only with the conversion of operands.
"""
_FP4_EXPERTS = "trtllm 1.3.0rc20 moe_torch_flow_min_latency"
"""Kernel for experts in nvfp4 that libraries use on Blackwell; tables have it in addition to a general
one.
"""
_MATRICES = frozenset({OpClass.CONTRACTION})
_LARGE = frozenset({OpClass.CONTRACTION, OpClass.ATTENTION, OpClass.COLLECTIVE, OpClass.P2P})


def models_of(engine: str, estimator: str) -> tuple[KernelModel, ...]:
    """Return the estimators for the kernels of a serving engine.

    Matmuls, attention and collectives use ``estimator``. The engine's custom all-reduce has a separate model.
    Memory-bound kernels use the roofline, because serving libraries fuse them into kernels that run at memory
    speed.
    """
    model = _operation_model(estimator)
    custom = f"collectives:library={_CUSTOM[engine]},tuned=false" if engine in _CUSTOM else "collectives"
    return (
        KernelModel(model, _LARGE),
        *(KernelModel(model, _MATRICES, names) for names in _FORMATS),
        KernelModel(model, _MATRICES, {"nvfp4": "f8E4M3FN"}, kinds=frozenset({"matmul"}), inner=_FP4_INNER),
        KernelModel(model, _MATRICES, {"nvfp4": "nvfp4"}, kinds=frozenset({"moe"}), variant=_FP4_EXPERTS),
        KernelModel(_operation_model(custom), frozenset({OpClass.COLLECTIVE})),
        KernelModel(_operation_model("roofline"), frozenset(OpClass) - _LARGE),
    )


def _operation_model(spelling: str) -> OperationModel:
    model = load_estimator(spelling)
    if not isinstance(model, OperationModel):
        raise UnsupportedError(
            f"{spelling} does not estimate single operations", hint="use `estimator=composite`"
        )
    return model
