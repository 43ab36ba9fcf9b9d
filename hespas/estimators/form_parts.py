"""Building blocks of forms (formulas that turn sizes into time): parameters, rates of a device, overlap of
times, and cache hits.

Times are in ns, rates in FLOP/ns and bytes/ns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import isnan
from typing import Literal

import numpy as np

from hespas.estimators.rates import rate_flops_per_s
from hespas.graph.columns import FloatArray, find_dtype
from hespas.hardware import Device, SystolicArray
from hespas.operations import MATRIX_KINDS, Operations, find_scheme

__all__ = [
    "Columns",
    "Form",
    "MachineRates",
    "Parameter",
    "Values",
    "carried_values",
    "hit_share",
    "machine_of",
    "soft_max",
]

_CACHE_RATE = 3.5
"""Bandwidth of a cache over the memory's, where a device's file does not state it: the median of
stated ones.
"""
_LOADS_POWER = 0.5
"""Power of the ratio of two caches' bandwidths by which rates of loads change: loads also come from registers
and shared memory. Of 0, 1/3, 1/2, 2/3 and 1 it gave the smallest mean error on left-out architectures.
"""
_PROCESS_ENERGY: Mapping[str, float] = {
    **dict.fromkeys(("sm_60", "sm_61"), 2.56),
    **dict.fromkeys(("sm_70", "sm_72", "sm_75"), 1.9),
    **dict.fromkeys(("sm_86", "sm_87"), 1.4),
    **dict.fromkeys(("sm_80", "gfx908", "gfx90a"), 1.0),
    **dict.fromkeys(("sm_89", "sm_90", "gfx942", "gaudi3", "xe2"), 0.7),
    **dict.fromkeys(("sm_100", "sm_103", "sm_120", "sm_121"), 0.55),
    "gfx950": 0.44,
}
"""Energy of an operation by the process of an architecture, relative to TSMC N7. Processes, in this order:
16FF+; 12FFN; Samsung 8N; N7 and N6; N5 and 4N; 4NP; N3P. The values are products of reductions of power at
equal speed. Announced by the foundries are 12FFC 25 % (of 16FFC) and 10LPE 40 % (of 14LPE), both in
AnandTech's article 11337; 8LPP 10 % (of 10LPP); N5 30 % (of N7) and N4P 22 % (of N5), both from TSMC. Assumed
are 10FF 35 % (of 16FF+), N7 40 % (of 10FF), N3E 34 % (of N5), N3P 5 % (of N3E), and that 12FFN, 4N and 4NP
equal 12FFC, N5 and N4P.
"""
_MATRIX_PJ, _VECTOR_PJ = 1.0, 5.0
"""Energy of the board per FLOP at full load in N7 [pJ]: of 16-bit operands on matrix units (other widths in
proportion), and of f32 on vector units. Round numbers that gave the smallest error on left-out architectures,
so that the errors on these are not blind.
"""
_VOLTAGE_POWER = 3.0
"""Power of the clock with which the watts of one architecture rise, because the voltage rises with it."""
_START_POWER = 0.7
"""Power of the rate with which starts of kernels and tiles become shorter: a start also waits for the memory.
Of 0, 0.5, 0.7, 0.85 and 1 it is a compromise between kinds of operations on left-out architectures of
``calib`` rows; these scores are therefore not blind.
"""
_SCORE_POWER = 1 / 3
"""Power of the ratio of two units' FLOPs per clock by which the cost of an exponential in FLOPs changes. All
GPUs have 16 special function units per unit (CUDA C++ Programming Guide, throughput of native arithmetic
instructions), but exponentials overlap with products. Of 0, 0.3, 0.5 and 1, values near 0.3 to 0.5 gave the
smallest errors on left-out architectures of ``calib`` rows.
"""
_PASSES_POWER = 0.75
"""Power of the memory's bytes per unit and clock with which the number of passes between kernels falls; it
never rises. Of 0, 0.25, 0.5, 0.75 and 1, this power gave the smallest error on left-out architectures other
than the L40S.
"""
_CACHE_LIMIT = 0.1
"""Range of shares below 1 of the cache's bandwidth in which the limit of streams changes from the units to
the cache, which is the limit at 1.
"""
_INSTRUCTIONS: Mapping[str, str] = {
    "sm_60": "none",
    "sm_61": "none",
    **dict.fromkeys(("sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121"), "mma"),
    "sm_90": "wgmma",
    "sm_100": "tcgen05",
    "sm_103": "tcgen05",
    **dict.fromkeys(("gfx908", "gfx90a", "gfx942", "gfx950"), "mfma"),
}
"""Architecture -> its matrix instructions, which decide on the kernels of a library: of a warp, of a group of
warps, or of a whole unit. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "TensorCore
5th Generation Family Instructions"; AMD matrix instruction calculator. Others: the architecture itself.
"""
_BLOCKS_AT_ONCE: Mapping[str, float] = {"mma": 2.0, "wgmma": 1.0, "tcgen05": 1.0}
"""Blocks of an attention kernel that a unit runs at once, by matrix instructions: one block of queries fills
the unit if its instructions take groups of warps. Others are unknown.
"""
_OWN_ACCUMULATORS = frozenset({"tcgen05"})
"""Matrix instructions whose results are in a memory of their own, from which a tile is stored during the
products of the next (PTX ISA, "Tensor Memory").
"""
_CACHE_COPIES: Mapping[str, float] = dict.fromkeys(("sm_80", "sm_90", "sm_100", "sm_103"), 2.0)
"""Copies of data that all units read in the largest cache, by architecture; others have 1. Each half of the
units has its own partition of the L2 cache ("NVIDIA A100 Tensor Core GPU Architecture", white paper); that
later devices with HBM have the same is assumed.
"""
_INLINE_ECC_SHARE = 0.9
"""Share of the memory's bandwidth that is left for data if error correction codes are stored in the same
memory: about the ratio of the shares of the peak that the fastest tenth of large measured operations reach,
0.80 to 0.86 on an L40S (GDDR with codes) and 0.86 to 0.91 on an H100 (HBM). Of 0.85, 0.9 and 1, it gave the
smallest error on left-out architectures. On a T4 and a P4 the share is 0.75, on an Arc Pro B60 without codes
0.96.
"""
_VECTOR_BYTES = 16.0
"""Size of a GPU's widest load."""

_LINE_BYTES: Mapping[str, float] = {"AMD": 128.0, "": 64.0}
"""Bytes that a unit fetches from the largest cache for a single element, by vendor (empty: others): a line of
128 bytes ("AMD CDNA 3 Architecture", white paper, Table 2), or two sectors of 32 bytes (CUDA C++ Programming
Guide, default fetch granularity of the L2 cache). Recorded transposes of an H100 and an MI300X take 5 to 8 ps
per element, 64 and 128 bytes at the bandwidths of their caches 6.3 and 7.4 ps.
"""

Columns = Mapping[str, FloatArray]
"""Inputs of a form by name: arrays whose last axis is ``(ops,)``, or constants."""

Values = Mapping[str, float]
"""Parameters by name."""


_Carry = Literal[
    "",
    "clock",
    "start",
    "block",
    "tile",
    "score",
    "power",
    "cached",
    "loads",
    "hits",
    "passes",
    "key",
    "stream",
    "memory",
]
"""Rule by which a parameter changes for a device with other rates (:class:`Parameter`); empty: it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Positive parameter of a form (:class:`Form`). ``start``, ``low`` and ``high`` are the initial value and
    the bounds of a fit. ``width`` is the expected distance of the fitted value from the initial value, as a
    natural logarithm of the ratio.

    ``varies`` is False for parameters that are set before the fit and not changed by it. ``absent`` is the
    value for older fits that do not have the parameter (NaN: all fits have it). Parameters that are shares of
    a peak are at most 1.

    ``carries`` is how a fitted value changes for a device with other rates (:func:`carried_values`). A
    *clock* value is a time of compute units, a *start* value the time of a launch, a *block* value the start
    of a block of queries, a *tile* value the start of a tile in steps of a product, a *score* value the cost
    of an exponential in FLOPs, a *power* value a share of the peak FLOP/s, a *cached* value a share of the
    cache's size or of the data that stay in it, a *loads* value a rate of loads that partly come from the
    cache, and a *hits* value 1 less than a rate of the cache; the last two rates are relative to the memory.
    A *passes* value is a number of transfers of data between two kernels at the rate of the memory, a *key*
    value the time of a unit for a key, a *stream* value the share of the cache's bandwidth that a stream
    reaches, and a *memory* value the share of the memory's bandwidth. Other values stay.
    """

    name: str
    start: float
    low: float
    high: float
    varies: bool = True
    absent: float = np.nan
    width: float = 1.5
    carries: _Carry = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Rates of a device for one number format, the inputs of a form. NaN if the device file does not state a
    rate.

    ``cache_bytes`` is the size of the largest cache, ``cache_rate`` the ratio of its bandwidth to the
    bandwidth of the main memory. ``vector_elements`` is the width of loads and matrix units; rows that are
    shorter or not aligned use only a part of it. ``quantizes`` is True if separate kernels convert the
    activations to the number format of the matmul. ``lane_flops_per_ns`` is the f32 rate of the vector units,
    which compute addresses and conversions for every format. ``array`` describes matrix units that are
    systolic arrays. ``tiles`` is True if the device stores tensors in whole tiles
    (:mod:`hespas.operations.tiles`). ``clock_hz`` is the highest clock of the compute units. ``line_bytes``
    is what a unit fetches to read one element. ``powered_share`` is the share of the peak FLOP/s for which
    the power limit suffices; it may be above 1. ``cache_copies`` is the number of copies of shared data in
    the cache. ``usable_share`` is the share of the memory's bandwidth that error correction codes in the same
    memory leave. ``arch`` is the name of the architecture, ``instructions`` of its matrix instructions (else
    the architecture).
    """

    flops_per_ns: float
    bytes_per_ns: float
    units: float
    cache_bytes: float
    cache_rate: float
    activation_bytes: float
    weight_bytes: float
    output_bytes: float
    vector_elements: float
    quantizes: bool
    lane_flops_per_ns: float = np.nan
    array: SystolicArray | None = None
    tiles: bool = False
    clock_hz: float = np.nan
    line_bytes: float = 64.0
    powered_share: float = np.nan
    cache_copies: float = 1.0
    usable_share: float = 1.0
    arch: str = ""
    instructions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Formula (form) that computes the time of operations from their sizes and fitted parameters.

    ``columns`` computes the inputs of the formula from the operations, once per fit. ``time_ns`` is called
    for each trial of parameters. ``dims`` are the sizes of an operation whose fitted range limits the
    validity of a fit. ``choices`` are alternative values of parameters that do not vary; a fit tries all
    alternatives and uses the best.
    """

    name: str
    parameters: tuple[Parameter, ...]
    dims: tuple[str, ...]
    columns: Callable[[Operations, MachineRates], Columns]
    time_ns: Callable[[Values, Columns], FloatArray]
    choices: tuple[Values, ...] = ({},)


def machine_of(device: Device, kind: str, scheme: str) -> MachineRates:
    """Return the rates of a device for operations of a kind in a number format (``scheme``)."""
    rate = rate_flops_per_s(device, scheme, matrix=kind in MATRIX_KINDS)
    known_scheme = find_scheme(scheme)
    caches = [memory for memory in device.memories if memory.level != "main" and memory.capacity_bytes > 0]
    cache = max(caches, key=lambda memory: memory.capacity_bytes, default=None)
    cache_rate = (
        np.nan if cache is None else cache.bandwidth_bytes_per_s / device.main_memory.bandwidth_bytes_per_s
    )
    bits = (np.nan,) * 3
    if known_scheme is not None:
        bits = (known_scheme.activation_bits, known_scheme.weight_bits, known_scheme.output_bits)
    lane_rate = rate_flops_per_s(device, "f32", matrix=False)
    operand = None if known_scheme is None else find_dtype(known_scheme.rate_dtype)
    flop_pj = np.nan if operand is None else _MATRIX_PJ * operand.bits / 16
    if kind not in MATRIX_KINDS or rate <= lane_rate:  # on vector units
        flop_pj *= _VECTOR_PJ / (2 * _MATRIX_PJ)
    flop_pj *= _PROCESS_ENERGY.get(device.arch, np.nan)
    return MachineRates(
        flops_per_ns=rate / 1e9,
        bytes_per_ns=device.main_memory.bandwidth_bytes_per_s / 1e9,
        units=float(device.units) if device.units > 0 else np.nan,
        cache_bytes=0.0 if cache is None else float(cache.capacity_bytes),
        cache_rate=_CACHE_RATE if isnan(cache_rate) else cache_rate,
        activation_bytes=bits[0] / 8,
        weight_bytes=bits[1] / 8,
        output_bytes=bits[2] / 8,
        vector_elements=_VECTOR_BYTES * 8 / bits[0] if device.systolic is None else device.systolic.columns,
        quantizes=known_scheme is not None and known_scheme.quantizes,
        lane_flops_per_ns=lane_rate / 1e9,
        array=device.systolic,
        tiles=device.kind == "tpu",
        clock_hz=device.boost_clock_hz,
        line_bytes=_LINE_BYTES.get(device.vendor, _LINE_BYTES[""]),
        powered_share=device.tdp_w / (rate * flop_pj * 1e-12),
        cache_copies=_CACHE_COPIES.get(device.arch, 1.0),
        usable_share=_INLINE_ECC_SHARE if device.main_memory.error_correction == "inline" else 1.0,
        arch=device.architecture,
        instructions=_INSTRUCTIONS.get(device.arch, device.architecture),
    )


def carried_values(form: Form, values: Values, fitted: MachineRates, machine: MachineRates) -> Values:
    """Return the parameters of a form that was fitted on a device with the rates ``fitted``, for a device
    with the rates ``machine``.

    Times of compute units scale with the inverse of the clock. So do starts of launches, by the power
    :data:`_START_POWER`, but not within one architecture, where the hosts differ more. Starts of a block of
    queries are shorter if more blocks run at once (:data:`_BLOCKS_AT_ONCE`). Starts of tiles in steps scale
    with the power :data:`_START_POWER` of a unit's FLOPs per clock, unless only one device stores a tile
    during the next (:data:`_OWN_ACCUMULATORS`). Costs of exponentials scale with the power
    :data:`_SCORE_POWER` of the same ratio.

    Shares of the peak scale with the shares for which the power limits suffice (``powered_share``), up to the
    bounds of the parameter. In one architecture, where the watts of a unit rise with the third power of its
    clock (:data:`_VOLTAGE_POWER`), they scale with the clocks for which the limits suffice, over the highest
    clocks.

    Shares of the memory's bandwidth scale with the shares that error correction codes leave
    (``usable_share``). Rates relative to the memory are relative to this part of the bandwidth.

    Shares of the cache scale with the inverse of the copies in it (``cache_copies``). Rates of the cache,
    which are relative to the memory, scale with the ratio of the two bandwidths (``cache_rate``). Rates of
    loads scale with the power :data:`_LOADS_POWER` of this ratio. An unknown clock, power limit or kernel
    leaves the values. An unknown bandwidth of a cache counts as the usual ratio, :data:`_CACHE_RATE`, as in
    the fit.

    Three rules depend on the bytes that the memory or the cache delivers per unit and clock. Streams from the
    cache run at a rate of the units: additions on an A100 and an H100 move 19 bytes per unit and clock. Their
    shares of the cache's bandwidth therefore scale with the inverse of its bytes. A share of 1 stays, which
    shows the limit of the cache; shares near 1 (:data:`_CACHE_LIMIT`) change less. Data that one kernel
    leaves for the next stay in the cache. Relative to a slower memory they cost fewer passes, by the power
    :data:`_PASSES_POWER` of its bytes; libraries for a faster memory do not make more passes. Measurements
    rarely show the time of a unit for a key, because the time of the memory is longer. On another
    architecture with a faster memory, it is assumed to be shorter by the same ratio.
    """
    is_sibling = fitted.arch == machine.arch
    slower = fitted.clock_hz / machine.clock_hz
    usable = machine.usable_share / fitted.usable_share
    faster = machine.cache_rate / fitted.cache_rate / usable
    # At equal watts, the higher clock of a sibling needs a higher voltage.
    power, root = (_VOLTAGE_POWER - 1, 1 / _VOLTAGE_POWER) if is_sibling else (0.0, 1.0)
    suffices = np.minimum([machine.powered_share * slower**power, fitted.powered_share], 1.0)
    powered = float(suffices[0] / suffices[1]) ** root
    flops = slower * (machine.flops_per_ns / machine.units) / (fitted.flops_per_ns / fitted.units)
    paced = (machine.bytes_per_ns / machine.units) / (fitted.bytes_per_ns / fitted.units) * slower * usable
    at_once = [_BLOCKS_AT_ONCE.get(rates.instructions, np.nan) for rates in (fitted, machine)]
    stores = {rates.instructions in _OWN_ACCUMULATORS for rates in (fitted, machine)}
    factors: dict[_Carry, float] = {
        "clock": slower,
        "start": 1.0 if is_sibling else slower**_START_POWER,
        "block": slower * (1.0 if any(map(isnan, at_once)) else at_once[0] / at_once[1]),
        "tile": flops**_START_POWER if len(stores) == 1 else 1.0,
        "score": flops**_SCORE_POWER,
        "power": powered,
        "cached": fitted.cache_copies / machine.cache_copies,
        "loads": faster**_LOADS_POWER,
        "passes": float(np.minimum(paced, 1.0)) ** _PASSES_POWER,
        "key": slower / (1.0 if is_sibling else float(np.maximum(paced, 1.0))),
        "stream": 1 / (paced * faster),
        "memory": usable,
    }
    carried = dict(values)
    for parameter in form.parameters:
        value, factor = carried.get(parameter.name, np.nan), factors.get(parameter.carries, 1.0)
        if parameter.carries == "stream":  # near the highest share, the cache is the limit
            factor **= min((parameter.high - value) / (_CACHE_LIMIT * parameter.high), 1.0)
        if parameter.carries == "hits":
            carried[parameter.name] = max((1 + value) * faster - 1, 0.0)
        elif value > 0 and not isnan(factor) and factor != 1:  # 0 is the value of older fits without it
            carried[parameter.name] = min(max(value * factor, parameter.low), parameter.high)
    return carried


def soft_max(sharpness: float, *times: FloatArray) -> FloatArray:
    """Return a time between the longest of ``times`` and their sum, which models partly overlapping work.

    It is the norm of order ``1 + sharpness``. A sharpness of 0 adds the times (no overlap), infinity takes
    the longest (full overlap).
    """
    order = 1 + sharpness
    scale = np.maximum(reduce(np.maximum, times), 1e-300)
    total = sum(((time / scale) ** order for time in times), np.zeros_like(scale))
    return scale * total ** (1 / order)


def hit_share(working_set: FloatArray, cache_bytes: float, steepness: float) -> FloatArray:
    """Return the fraction of a working set that is still in a cache of ``cache_bytes`` when it is read
    again.
    """
    if not cache_bytes > 0:
        return np.zeros_like(working_set)
    return 1 / (1 + np.minimum(working_set / cache_bytes, 1e6) ** steepness)
