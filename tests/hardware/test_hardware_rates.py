"""Rates, products of two types and conversions of all element types, compared with a reviewed table.

``python -m tests.hardware.test_hardware_rates`` writes the table ``rates.csv`` anew; review its difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

from msgspec import structs

from hespas.graph.columns import DTYPES, DTypeKind
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, Peak, load_device
from hespas.hardware.devices import Unit
from hespas.hardware.peaks import PeakChoice, energy_pj_per_flop, peak_for, product_peak, type_multiplied

RATES = Path(__file__).with_name("rates.csv")
TYPES = [entry.name for entry in DTYPES if entry.kind not in (DTypeKind.TOKEN, DTypeKind.OPAQUE)]
PAIRED = ("bf16", "f16", "f32", "f8E4M3FN", "f8E5M2", "mxfp8", "nvfp4", "f4E2M1FN", "i4", "i8", "u8", "i32")
UNITS: tuple[Unit, ...] = ("matrix", "vector")


def devices() -> list[Device]:
    """Return devices of different vendors and units, and one whose rows differ in accumulators and pairs."""
    h100 = load_device("H100-SXM")
    bf16 = next(peak for peak in h100.peaks if peak.dtype == "bf16" and peak.density == "dense")

    def row(factor: float, lhs: str, rhs: str = "", accumulator: str = "") -> Peak:
        return structs.replace(
            bf16,
            dtype=lhs,
            rhs_dtype=rhs,
            accumulator=accumulator,
            flops_per_s=factor * bf16.flops_per_s,
            energy_pj_per_flop=factor,
        )

    peaks = (
        row(1.0, "bf16", accumulator="f32"),
        row(1.5, "bf16", accumulator="f16"),
        row(0.5, "f16", accumulator="f64"),
        row(0.25, "f32"),
        row(3.0, "i8", "i4"),
        row(3.5, "f16", "i4", "f16"),
        row(3.25, "f16", "i4", "f32"),
        row(2.5, "f8E4M3FN", "f16"),
        structs.replace(row(0.125, "f32"), unit="vector"),
    )
    mixed = replace(h100, name="mixed", peaks=peaks)
    names = ("H100-SXM", "V100-SXM2-32GB", "B200", "MI355X", "TPU-v4")
    return [*map(load_device, names), mixed, replace(mixed, name="mixed TPU", kind="tpu")]


def _shown(choice: PeakChoice) -> str:
    return f"{choice.flops_per_s / 1e12:.6g},{choice.products},{choice.exact},{choice.rule}"


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    for device in devices():
        for dtype in TYPES:
            yield f"{device.name},{dtype},multiplied as,{type_multiplied(device, dtype)}"
            for unit in UNITS:
                energy = energy_pj_per_flop(device, unit, dtype)
                for accumulator, products in (("", 1), ("f32", 1), ("f16", 1), ("", 3)):
                    try:
                        choice = peak_for(device, unit, dtype, accumulator=accumulator, products=products)
                    except UnsupportedError as error:
                        yield f"{device.name},{dtype},{unit},{error.message}"
                        break
                    yield f"{device.name},{dtype},{unit},{accumulator},{_shown(choice)},{energy:.6g}"
        for lhs, rhs in combinations_with_replacement(PAIRED, 2):
            for left, right, accumulator in ((lhs, rhs, ""), (rhs, lhs, "f32"), (lhs, rhs, "f16")):
                choice = product_peak(device, left, right, accumulator=accumulator)
                yield f"{device.name},{left} x {right},{accumulator},{_shown(choice)}"


def test_rates_equal_the_reviewed_table() -> None:
    assert list(rows()) == RATES.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    RATES.write_text("\n".join(rows()) + "\n", encoding="utf-8")
