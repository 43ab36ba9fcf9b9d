"""Peak rate of an operation on a device.

The operand types determine the rate, not the accumulator or the result. If a device lists no rate for a type,
the tables below give the replacement, which the result reports. :func:`product_peak` is for products of two
different types: the pair itself if the unit supports it, else the next wider types that hold both.

Keys of the tables are element types, or families of types with one rate (`f8`: E4M3, E5M2 and their
variants). A type runs at the first entry of its row that the unit has: itself, then the next wider one that
holds its values exactly. The scale of block-scaled types is applied outside of the multiplier, so their
element type decides. A complex product counts as its real multiplies and adds, so the real type decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import nan

from hespas.graph.columns import DTYPES, DTypeKind, find_dtype
from hespas.graph.errors import UnsupportedError
from hespas.hardware.devices import Device, Link, Peak, Unit

__all__ = [
    "MATRIX_FALLBACKS",
    "TPU_MATRIX_FALLBACKS",
    "VECTOR_FALLBACKS",
    "PeakChoice",
    "energy_pj_per_flop",
    "host_payload",
    "peak_for",
    "product_peak",
    "tdp_energy_j",
    "type_multiplied",
]

MATRIX_FALLBACKS: dict[str, tuple[str, ...]] = {
    "f64": ("f64",),
    # XLA's default precision on GPUs rounds float32 operands to TF32 where there is such a unit.
    "f32": ("f32", "tf32"),
    "tf32": ("tf32", "f32"),
    "bf16": ("bf16", "tf32", "f32"),
    "f16": ("f16", "tf32", "f32"),
    "f8": ("f8", "f16", "bf16", "tf32", "f32"),
    "f6": ("f6", "f8", "f16", "bf16", "tf32", "f32"),
    "f4": ("f4", "f6", "f8", "f16", "bf16", "tf32", "f32"),
    "i8": ("i8",),
    "i7": ("i7", "i8"),
    "i6": ("i6", "i8"),
    "i5": ("i5", "i8"),
    "i4": ("i4", "i8"),
    "i3": ("i3", "i4", "i8"),
    "i2": ("i2", "i4", "i8"),
    "i1": ("i8",),
}

TPU_MATRIX_FALLBACKS: dict[str, tuple[str, ...]] = {
    **MATRIX_FALLBACKS,
    "f32": ("f32", "bf16"),
    "tf32": ("f32", "bf16"),
    "f16": ("f16", "bf16"),
    "i8": ("i8", "bf16"),
    "i7": ("i7", "i8", "bf16"),
    "i6": ("i6", "i8", "bf16"),
    "i5": ("i5", "i8", "bf16"),
    "i4": ("i4", "i8", "bf16"),
    "i3": ("i3", "i4", "i8", "bf16"),
    "i2": ("i2", "i4", "i8", "bf16"),
    "i1": ("i8", "bf16"),
}
"""Fallbacks of the MXU, which multiplies bf16 only: at default precision wider floats are rounded to it (one
pass), and 8-bit integers fit its 8-bit significand exactly.
"""

VECTOR_FALLBACKS: dict[str, tuple[str, ...]] = {
    "f64": ("f64",),
    "f32": ("f32",),
    "tf32": ("f32",),
    "bf16": ("bf16", "f32"),
    "f16": ("f16", "f32"),
    "f8": ("f8", "f16", "bf16", "f32"),
    "f6": ("f6", "f16", "bf16", "f32"),
    "f4": ("f4", "f16", "bf16", "f32"),
    "i64": ("i64", "i32", "f32"),
    "i32": ("i32", "f32"),
    "i16": ("i16", "i32", "f32"),
    "i8": ("i8", "i32", "f32"),
    "i7": ("i7", "i8", "i32", "f32"),
    "i6": ("i6", "i8", "i32", "f32"),
    "i5": ("i5", "i8", "i32", "f32"),
    "i4": ("i4", "i8", "i32", "f32"),
    "i3": ("i3", "i4", "i8", "i32", "f32"),
    "i2": ("i2", "i4", "i8", "i32", "f32"),
    "i1": ("i8", "i32", "f32"),
}
"""Fallbacks of vector units: narrow floats are widened; integer units are 32 bits wide, and without a
published integer rate the float32 lanes issue as many integer operations.
"""

_AS_FLOAT: dict[str, tuple[str, ...]] = {
    "i2": ("f4", "f6", "f8", "f16", "bf16", "tf32", "f32"),
    "i4": ("f8", "f16", "bf16", "tf32", "f32"),
    **dict.fromkeys(("i3", "i5", "i6", "i7", "i8"), ("f16", "bf16", "tf32", "f32")),
    "i1": ("f16", "bf16", "tf32", "f32"),
    "i16": ("f32", "tf32"),
    "i32": ("f32", "tf32"),
    "i64": ("f64",),
}
"""Floats that hold integers exactly, for products of an integer and a float: i8 in the 8-bit significand of
bf16, i4 in the 3 or 4 bits of f8, i2 in f4. Wider integers use f32, or its fallback.
"""

_SHARED_RATE = {"f8E": "f8", "f6E": "f6", "f4E": "f4"}
"""Families by prefix; the E distinguishes `f6E2M3FN` from `f64`."""
_NARROW_FLOATS = frozenset({"f8", "f6", "f4"})
_BLOCK_SCALED = {"mxfp8": "f8", "mxfp6": "f6", "mxfp4": "f4", "nvfp4": "f4", "mxint8": "i8"}
_COMPLEX = {"complex<f32>": "f32", "complex<f64>": "f64"}
_HALF_RATE = {("i64", "i32"), ("i64", "f32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakChoice:
    """Selected rate of an operation and the rule by which it was selected.

    ``products`` is the number of operations of the unit per counted FLOP. ``flops_per_s`` is
    ``peak.flops_per_s`` divided by ``products``, for FLOPs that are counted once. ``exact`` is True if the
    device lists this type on the requested unit.
    """

    flops_per_s: float
    peak: Peak
    products: int
    exact: bool
    rule: str


def peak_for(
    device: Device, unit: Unit, dtype: str, *, accumulator: str = "", products: int = 1
) -> PeakChoice:
    """Return the dense rate at which ``unit`` of ``device`` processes operands of ``dtype`` (any known
    spelling).

    ``accumulator`` only distinguishes rows that are otherwise equal. ``products`` is the number of matmuls
    that emulate one at higher precision (3 or 6). Float32 at that precision uses true float32 if the device
    has it, on a TPU as many bf16 passes. Matmuls of types that the matrix unit does not support run on the
    vector unit. Raises ``UnsupportedError`` with the rates of the device.
    """
    wanted = _rate_class(dtype)
    full_precision = products > 1 and wanted == "f32"
    if unit == "matrix":
        table = TPU_MATRIX_FALLBACKS if device.kind == "tpu" else MATRIX_FALLBACKS
        is_true_f32 = full_precision and device.kind != "tpu"
        for candidate in ("f32",) if is_true_f32 else table.get(wanted, ()):
            if peak := _listed(device, "matrix", candidate, dtype, accumulator):
                emulated = candidate != "f32" or not full_precision
                return _choice("matrix", dtype, peak, products if emulated else 1, "matrix")
    for candidate in VECTOR_FALLBACKS.get(wanted, ()):
        if peak := _listed(device, "vector", candidate, dtype, accumulator):
            slowdown = 2 if (wanted, candidate) in _HALF_RATE else 1
            return _choice(unit, dtype, peak, slowdown if full_precision else slowdown * products, "vector")
    dense = [peak for peak in device.peaks if peak.density == "dense"]
    names = ", ".join(" x ".join(filter(None, (f"{p.unit} {p.dtype}", p.rhs_dtype))) for p in dense)
    raise UnsupportedError(
        f"{device.name} has no rate for {dtype} on its {unit} unit",
        hint=f"add a peak to the device file; it has {names}",
    )


def product_peak(
    device: Device, lhs: str, rhs: str, *, accumulator: str = "", products: int = 1
) -> PeakChoice:
    """Return the dense rate at which the matrix unit multiplies operands of two types, in either order.

    If the device file has a row for the two types (with ``rhs_dtype``), its rate is used. Otherwise both
    operands are converted to types that hold them exactly, and the pair that widens them least is used. An
    integer multiplied by a float is widened to a float, and two different floats to one that holds both.
    Without such a row the wider operand (the float) determines the rate, as in :func:`peak_for`, which
    describes the other arguments and errors.
    """
    left, right = _rate_class(lhs), _rate_class(rhs)
    if left == right or products > 1:
        return peak_for(device, "matrix", _deciding(lhs, rhs), accumulator=accumulator, products=products)
    lefts, rights = _holders(device, left, right), _holders(device, right, left)
    ranked = [(i + j, i, (a, b)) for i, a in enumerate(lefts) for j, b in enumerate(rights)]
    for _, _, pair in sorted(ranked):  # the least widened pair first
        if pair[0] == pair[1]:  # an ordinary row
            peak = _listed(device, "matrix", pair[0], lhs if pair[0] == left else rhs, accumulator)
        else:
            rows = [
                peak
                for peak in device.peaks
                if (peak.unit, peak.density) == ("matrix", "dense")
                and peak.rhs_dtype
                and (_rate_class(peak.dtype), _rate_class(peak.rhs_dtype)) in (pair, pair[::-1])
            ]
            peak = min(rows, key=lambda peak: _accumulator_distance(peak, accumulator), default=None)
        if peak is not None:
            exact, rule = pair == (left, right), f"{lhs} x {rhs} on matrix"
            if not exact:
                rule += f": rate of {peak.dtype}" + (f" x {peak.rhs_dtype}" if peak.rhs_dtype else "")
            return PeakChoice(flops_per_s=peak.flops_per_s, peak=peak, products=1, exact=exact, rule=rule)
    return peak_for(device, "matrix", _deciding(lhs, rhs), accumulator=accumulator)


@lru_cache(maxsize=4096)
def _type_multiplied(device_key: tuple[str, str, frozenset[str]], dtype: str) -> str:
    kind, vendor, listed = device_key
    units, entry = {_rate_class(name) for name in listed}, find_dtype(dtype)
    own = _rate_class(dtype)
    if entry is None or not units or entry.name in listed:
        return dtype
    if own in _NARROW_FLOATS:
        is_block = entry.name in _BLOCK_SCALED
        fits = own in units and (not is_block or "f4" in units)
        if fits and (entry.name != "nvfp4" or vendor.casefold() == "nvidia"):
            return dtype
        return next((name for name in ("bf16", "f16") if name in units), "f32")
    return "f32" if own == "bf16" and own not in units and kind == "gpu" else dtype


def type_multiplied(device: Device, dtype: str) -> str:
    """Return the type in which the matrix units of a device multiply operands of ``dtype``.

    It is ``dtype`` itself if the device has units for it or no matrix units at all. Otherwise it is the wider
    type to which kernels convert first: bf16 or f16 for floats of 8 bits and fewer, f32 for bf16 on a GPU
    without bf16 units. Block-scaled types need units that scale blocks, which a device has if it has units
    for 4-bit floats; ``nvfp4`` needs NVIDIA's units.
    """
    listed = frozenset(
        peak.dtype for peak in device.peaks if (peak.unit, peak.density) == ("matrix", "dense")
    )
    return _type_multiplied((device.kind, device.vendor, listed), dtype)


def _holders(device: Device, own: str, other: str) -> tuple[str, ...]:
    """Return the types in which an operand of type ``own`` can be multiplied without loss, the narrowest
    first. Floats are included for an integer if the other operand is a float.
    """
    table = TPU_MATRIX_FALLBACKS if device.kind == "tpu" else MATRIX_FALLBACKS
    types = table.get(own, ())
    if own.startswith("i") and not other.startswith("i"):
        types = (*types, *(name for name in _AS_FLOAT.get(own, ()) if name not in types))
    return types or (own,)


def _deciding(lhs: str, rhs: str) -> str:
    """Return the operand type that determines the rate of a matmul of two types.

    It is the float if the other type is an integer, and otherwise the wider type. It is float32 if neither of
    two floats can represent the other (bf16 and f16).
    """
    entries = (find_dtype(lhs), find_dtype(rhs))
    left, right = (
        (entry.kind in (DTypeKind.FLOAT, DTypeKind.COMPLEX), entry.bits) if entry else (False, 0)
        for entry in entries
    )
    if left == right and left[0] and _rate_class(lhs) != _rate_class(rhs):
        return "f32"
    return lhs if left >= right else rhs


def _accumulator_distance(peak: Peak, requested: str) -> tuple[int, int]:
    """Return a sort key for the accumulator type of a peak. The ``requested`` type is first, then the next
    wider types, then narrower types.
    """
    if peak.accumulator == requested or not requested:
        return 0, 0
    wanted, listed = find_dtype(requested), find_dtype(peak.accumulator)
    if wanted is None or listed is None:
        return 2, 0
    more = listed.bits - wanted.bits
    return (1, more) if more >= 0 else (2, -more)


@lru_cache(maxsize=256)
def _rate_class(dtype: str) -> str:
    """Return the key under which the tables of substitute rates list an element type."""
    entry = find_dtype(dtype)
    if entry is None or entry.kind in (DTypeKind.TOKEN, DTypeKind.OPAQUE):
        names = ", ".join(e.name for e in DTYPES if e.kind not in (DTypeKind.TOKEN, DTypeKind.OPAQUE))
        raise UnsupportedError(f"'{dtype}' is not an element type with a rate", hint=f"use one of {names}")
    if name := _BLOCK_SCALED.get(entry.name) or _COMPLEX.get(entry.name):
        return name
    if entry.kind is DTypeKind.UNSIGNED:
        return entry.name.removeprefix("u")
    return _SHARED_RATE.get(entry.name[:3], entry.name)


def _listed(device: Device, unit: Unit, candidate: str, dtype: str, accumulator: str) -> Peak | None:
    """Return the dense peak of a unit for the type or family of types ``candidate``; None without one. Rows
    of the exact type are preferred, then rows with the requested or the next wider accumulator, then the
    first row of the file.
    """
    rows = [
        peak
        for peak in device.peaks
        if peak.unit == unit and peak.density == "dense" and not peak.rhs_dtype
        if _rate_class(peak.dtype) == candidate
    ]
    entry = find_dtype(dtype)
    name = entry.name if entry else dtype
    # `min` returns the first of equals, in file order.
    return min(
        rows, key=lambda peak: (peak.dtype != name, _accumulator_distance(peak, accumulator)), default=None
    )


def _choice(requested: Unit, dtype: str, peak: Peak, products: int, used: Unit) -> PeakChoice:
    entry = find_dtype(dtype)
    exact = used == requested and entry is not None and entry.name == peak.dtype
    rule = f"{dtype} on {requested}"
    if not exact:
        rule += f": rate of {peak.dtype} on {used}"
    if products > 1:
        rule += f", {products} operations each"
    return PeakChoice(
        flops_per_s=peak.flops_per_s / products, peak=peak, products=products, exact=exact, rule=rule
    )


def energy_pj_per_flop(device: Device, unit: Unit, dtype: str) -> float:
    """Return the energy per operation [pJ], where a multiply and an add are two operations; NaN if the device
    file has none.

    It is the energy of the peak that :func:`peak_for` selects, multiplied by the number of operations of the
    unit per counted FLOP.
    """
    try:
        choice = peak_for(device, unit, dtype)
    except UnsupportedError:
        return nan
    return choice.peak.energy_pj_per_flop * choice.products


def tdp_energy_j(device: Device, duration_ns: float) -> float:
    """Return the energy [J] of the board at its thermal design power for a duration; NaN if the power is
    unknown.
    """
    return device.tdp_w * duration_ns * 1e-9


def host_payload(link: Link) -> float:
    """Return the share of the data in the traffic of a host link: 0.86 if its name states PCIe 3, 4 or 5, and
    1 for others. PCIe 6 has other packets, and NVLink-C2C has none of PCIe.

    A packet of 256 bytes has 26 bytes of headers and checks, 130 bits carry 128, and 3 % of the packets are
    acknowledgements (PCI Express Base Specification 5.0, chapters 2 to 4).
    """
    return 0.86 if re.search(r"\bpcie\s*(gen\s*)?[345]\b", link.name.casefold()) else 1.0
