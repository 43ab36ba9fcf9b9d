"""The form of kernels that frameworks run one by one: a copy, a sum, a soft-max, as PyTorch and XLA launch
them.

Libraries of such kernels know two ways through memory. Where operands and result lie alike, threads take
vectors of 16 bytes and run at the memory's speed. Where they do not (broadcasts, transposes, concatenations,
gathers, rows whose length is no multiple of a vector), each element's address is worked out by itself, which
takes some two hundred vector operations an element whatever its type: on an H100 as on an A100, a third more
on an MI300X. Normalisations and reductions give each row to a group of threads, which costs a start per row
and unit of the device; of few long rows, each is read by one unit at a unit's share of the bandwidth.

    time = t0 + norm(bytes, elements and rows, longest row)

Fusions, of which each is a kernel of a compiler's own making, have their arithmetic beside their elements.

Structure by the kernels' sources: https://github.com/pytorch/pytorch, ``aten/src/ATen/native/cuda``
(Loops.cuh, Reduce.cuh, layer_norm_kernel.cu, SoftMax.cu, Shape.cu).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from hespas.estimators.forms import FORMS, Columns, Form, Machine, Parameter, Values, machine_of, soft_max
from hespas.estimators.interface import Prediction, with_bands
from hespas.estimators.rates import within_roof
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device, Fit
from hespas.hardware.kernel_shares import common_fits, fits_distance
from hespas.hardware.library import fits_of_user
from hespas.operations import STRIDED, Labels, Operations

__all__ = [
    "EVERY_FORM",
    "KERNELS",
    "KERNEL_KINDS",
    "PRODUCTS",
    "PRODUCT_KIND",
    "as_programs_run",
    "product_time_ns",
    "ragged_share",
]

KERNEL_KINDS = ("gather", "move", "normalization", "pooling", "reduction", "vector")
"""Kinds that the form speaks of."""

_ROWS_OF_KIND: Mapping[str, float] = {"normalization": 1.0, "reduction": 0.15}
"""Kinds that work row by row, and what a row costs beside a normalisation's: several share a group of threads
in a reduction.
"""
_GROUP = 256.0
"""Elements of a row that a group of threads takes at once; shorter rows share one."""
_LENGTH = 0.75
"""Exponent by which longer rows cost more: more of their groups of threads are at work at once."""
_WALKS_ALWAYS = ("cat", "stack")
_SHORTENED = ("f32", "f32_full")
_WALKS_OF_ROW = 2.0
"""Times that a normalisation walks a row that cannot be read by vectors: for its statistics, for its
result.
"""
_OVERLAP = 2.0
_WALK_START_NS = 1000.0
"""What the first addresses take that are worked out one by one."""
_REDUCTION_START_NS = 2000.0
"""What bringing together the parts of a reduction takes."""
_SCANS = ("cumsum", "cumprod", "asynchronous_complete_cumsum")
"""Running sums: one of a whole tensor is cut into parts for all units (``scan_dim`` of ScanUtils.cuh asks
CUB), others walk a row in one.
"""
_FUSED = ("fusion",)
"""Operations of many steps an element, whose arithmetic is beside what any element takes."""
_FLOPS_OF_SLOT, _SLOTS_OF_FUNCTION = 2.0, 8.0
"""Peaks count a fused multiplication and addition, two FLOPs, where other arithmetic has one; an exponential
or a root takes some of those (as many as :mod:`~hespas.estimators.forms` counts).
"""
_COPIED = ("local_scalar_dense",)
"""Operations that copy without a kernel, and their share of a kernel's start."""
_COPY_START = 0.5


def _columns(ops: Operations, machine: Machine) -> Columns:
    rows, columns = ops.dim("rows"), ops.dim("columns")
    share = np.array([_ROWS_OF_KIND.get(name, 0.0) for name in ops.kind.names])[ops.kind.row]
    by_row = share > 0
    length = columns / _GROUP
    shared = np.where(length < 1, length, length**_LENGTH)
    parts = np.where(_are(ops.op, _SCANS) & (rows == 1), float(machine.units), 1.0)
    row_bytes = columns * machine.activation_bytes / parts
    unit_bytes_per_ns = machine.bytes_per_ns / machine.units
    walks = _walks(ops, columns, machine.vector_elements)
    start = np.where(walks > 0, _WALK_START_NS, 0.0) + np.where(
        _are(ops.kind, ("reduction",)), _REDUCTION_START_NS, 0.0
    )
    return {
        "memory_ns": ops.bytes_moved / machine.bytes_per_ns,
        "element_ns": rows * columns / machine.lane_flops_per_ns,
        "inner_ns": np.where(_are(ops.op, _FUSED), _inner_flops(ops) / machine.lane_flops_per_ns, 0.0),
        "walks": walks,
        "rows": np.where(by_row, rows / machine.units * shared * share, 0.0),
        "start_ns": start,
        "starts": np.where(_are(ops.op, _COPIED), _COPY_START, 1.0),
        "longest_ns": np.where(by_row, row_bytes / unit_bytes_per_ns, 0.0),
    }


def _inner_flops(ops: Operations) -> FloatArray:
    flops = np.nan_to_num(ops.flops) + _SLOTS_OF_FUNCTION * np.nan_to_num(ops.transcendentals)
    return _FLOPS_OF_SLOT * flops


def _are(labels: Labels, names: Sequence[str]) -> BoolArray:
    return np.isin(labels.row, [row for row, name in enumerate(labels.names) if name in names])


def _walks(ops: Operations, columns: FloatArray, vector: float) -> FloatArray:
    """How often each element's address is worked out by itself; 0 where vectors are read."""
    # An elementwise copy is one between types; the one that shortens floats has a kernel of vectors.
    converts = _are(ops.kind, ("vector",)) & _are(ops.op, ("copy",)) & ~_are(ops.scheme, _SHORTENED)
    always = _are(ops.op, _WALKS_ALWAYS) | _are(ops.kind, ("gather", "pooling")) | converts
    ragged = _are(ops.kind, ("normalization",)) & (columns % max(vector, 1.0) != 0)
    strided = (np.nan_to_num(ops.dim(STRIDED)) > 0) | always
    return np.where(ragged, _WALKS_OF_ROW, np.where(strided, 1.0, 0.0))


def _time_ns(values: Values, columns: Columns) -> FloatArray:
    walks = columns["walks"]
    element = values["walked"] * walks + values["element"] * (walks == 0)
    work = columns["element_ns"] * element + columns["inner_ns"] + columns["rows"] * values["row_ns"]
    memory, longest = columns["memory_ns"] / values["memory"], columns["longest_ns"] / values["unit"]
    return (
        values["t0_ns"] * columns["starts"] + columns["start_ns"] + soft_max(_OVERLAP, memory, work, longest)
    )


KERNELS = Form(
    name="kernels",
    parameters=(
        Parameter(name="t0_ns", start=2500.0, low=50.0, high=1e6),
        Parameter(name="memory", start=0.75, low=1e-2, high=1.0),
        Parameter(name="element", start=60.0, low=0.1, high=1e4),
        Parameter(name="walked", start=200.0, low=1.0, high=1e5),
        Parameter(name="row_ns", start=250.0, low=0.1, high=1e5),
        Parameter(name="unit", start=0.5, low=1e-3, high=50.0),
    ),
    dims=(),
    columns=_columns,
    time_ns=_time_ns,
)
"""``memory``: share of the bandwidth. ``element``, ``walked``: f32 operations of the vector units per element
that is read by vectors, and by itself. ``row_ns``: what starting a row of 256 elements costs one unit.
``unit``: what one unit reads, in shares of bandwidth / units.
"""

EVERY_FORM: Mapping[str, Form] = MappingProxyType({**FORMS, KERNELS.name: KERNELS})
"""Every form that a fit may name, but :data:`PRODUCTS`, which speaks of answers."""


# Products of matrices as programs run them, from what benchmarks of libraries say of the same sizes.
#
# Benchmarks choose the best of a library's kernels for sizes they care about, launch them from a graph and
# sweep sizes that vectors of 16 bytes divide. A framework's call differs by three things: what a call starts
# beside the product (a workspace to clear, an epilogue), how its choice of kernels compares, and sizes of
# ``n`` or ``k`` that no vector divides, for which libraries fall back to kernels that load single elements.
#
#     time = start_ns + scale x (benchmark + ragged x what of it is more than a start)

PRODUCTS = "products"
"""The form's name in a fit."""
PRODUCT_KIND = "matmul"
_START_NS = 4000.0
"""What the smallest product takes, whose loads do not count."""


def ragged_share(ops: Operations, device: Device) -> FloatArray:
    """By products, how much of it is paid that vectors do not divide rows of n or k elements: all where half
    of one does not either, half where that does; shape ``(ops,)``.
    """
    vectors = [machine_of(device, PRODUCT_KIND, scheme).vector_elements for scheme in ops.scheme.names]
    vector = np.nan_to_num(np.array([*vectors, 1.0])[ops.scheme.row], nan=1.0)
    vector = np.maximum(vector, 1.0)
    share = np.zeros(len(ops))
    with np.errstate(invalid="ignore"):
        for size in (ops.dim("n"), ops.dim("k")):
            share = np.maximum(share, 0.5 * (size % vector > 0) + 0.5 * (size % (vector / 2) > 0))
    return share


def product_time_ns(values: Mapping[str, float], benchmark_ns: FloatArray, ragged: FloatArray) -> FloatArray:
    """The time of products in a program [ns]; ``values`` are the form's parameters by name: ``ragged`` is
    what loads of single elements cost more, as a share, of which a product pays as :func:`ragged_share` says.
    """
    loads = ragged * np.maximum(benchmark_ns - _START_NS, 0.0)
    return values["start_ns"] + values["scale"] * (benchmark_ns + values["ragged"] * loads)


def as_programs_run(
    said: Prediction, ops: Operations, device: Device, diagnostics: Diagnostics | None = None
) -> Prediction:
    """What is said of products that name no library, as programs on the device run them, where its own
    recordings or those of its vendor's devices tell; all else as it is. ``diagnostics`` is told how far the
    latter stand.
    """
    rows = ops.kind.where(PRODUCT_KIND)
    rows = rows[np.isin(rows, ops.variant.where("")) & ~np.isnan(said.duration_ns[rows])]
    mine, others = (_products_of(fits) for fits in (fits_of_user(device), common_fits(device)))
    fit = mine or others
    if fit is None or not len(rows):
        return said
    if diagnostics is not None and mine is None and (text := fits_distance(device)):
        diagnostics.info("composite.unseen-device", f"{device.name} {PRODUCT_KIND}", text, count=len(rows))
    part = ops.take(rows)
    values = {each.name: each.value for each in fit.parameters}
    before_ns = said.duration_ns[rows]
    time = product_time_ns(values, before_ns, ragged_share(part, device))
    columns = np.stack((said.duration_ns, said.low_ns, said.high_ns))
    bands = with_bands(fit, time)
    scaled = time / before_ns * columns[1:, rows]
    bounds = np.where(np.isnan(bands[1:]), scaled, bands[1:])
    columns[:, rows] = within_roof(np.stack((time, *bounds)), part, device)
    return replace(said, duration_ns=columns[0], low_ns=columns[1], high_ns=columns[2])


def _products_of(fits: Sequence[Fit]) -> Fit | None:
    return next((fit for fit in fits if fit.form == PRODUCTS), None)
