"""Seven published chips: energy efficiency and throughput against the papers and against ZigZag-IMC."""

from __future__ import annotations

from math import isnan, nan

import pytest
from msgspec import structs

from hespas.estimators.imc.energy import (
    CLOCK_ERROR,
    clock_hz,
    peak_energy_pj_per_op,
    peak_ops_per_s,
    step_energies,
)
from hespas.hardware import ImcMacro, load_device

CHIPS = {
    # alias: energy and cycle time of ZigZag-IMC relative to the published ones (its README, figure), and ours
    "AIMC1": (0.89, 1.00, 0.890, 0.990),
    "AIMC2": (7.03, 1.05, 7.034, 1.047),
    "AIMC3": (1.01, 1.02, 1.015, 1.024),
    "DIMC1": (1.01, 0.83, 1.009, 0.833),
    "DIMC2": (1.39, 1.31, 1.381, 1.058),
    "DIMC3": (0.98, 0.98, 0.976, 0.983),
    "DIMC4": (15.97, 0.95, 15.895, 0.952),
}
ROUNDING = 0.0055
"""The figure of ZigZag-IMC has whole percents. Its value for AIMC1's cycle time is 0.990 before rounding."""
PUBLISHED_TOPS_PER_W = {
    "AIMC1": 1050, "AIMC2": 15.02, "AIMC3": 18.7, "DIMC1": 36.63, "DIMC2": 22, "DIMC3": 19.5, "DIMC4": 275,
}  # fmt: skip


def macro_of(name: str) -> ImcMacro:
    macro = load_device(name).imc
    assert macro is not None
    return macro


@pytest.mark.parametrize("name", CHIPS)
def test_energy_efficiency_is_within_the_error_of_zigzag(name: str) -> None:
    reported, _, expected, _ = CHIPS[name]
    published = load_device(name).peaks[0].energy_pj_per_flop
    assert 1 / published == pytest.approx(PUBLISHED_TOPS_PER_W[name], rel=1e-5)
    ratio = peak_energy_pj_per_op(macro_of(name)) / published
    assert ratio == pytest.approx(expected, abs=0.002)
    assert abs(ratio - 1) <= abs(reported - 1) + ROUNDING


@pytest.mark.parametrize("name", CHIPS)
def test_throughput_at_the_published_clock(name: str) -> None:
    assert peak_ops_per_s(macro_of(name)) == pytest.approx(load_device(name).peaks[0].flops_per_s, rel=1e-5)


@pytest.mark.parametrize("name", CHIPS)
def test_derived_cycle_time_is_within_the_error_of_zigzag(name: str) -> None:
    _, reported, _, expected = CHIPS[name]
    macro = macro_of(name)
    derived = structs.replace(macro, clock_hz=nan)
    ratio = macro.clock_hz / clock_hz(derived)
    assert ratio == pytest.approx(expected, abs=0.002)
    assert abs(ratio - 1) <= abs(reported - 1) + ROUNDING + 0.005 * (name == "AIMC1")
    assert CLOCK_ERROR[0] <= 1 / ratio <= CLOCK_ERROR[1]


def test_a_macro_without_circuit_figures_gets_derived_ones() -> None:
    """256 x 256 cells, 4-bit DACs, 6-bit ADCs, ternary weights in two cells: by hand from the formulas."""
    macro = ImcMacro(
        domain="analog", macros=1, rows=256, columns=256, columns_per_weight=2, weight_bits=2, input_bits=4,
        input_bits_per_step=4, adcs_per_column=1, adc_bits=6, clock_hz=nan, node_nm=22.0, supply_v=0.8,
        gate_capacitance_ff=0.55, gate_delay_ns=0.0478, input_activity=0.5, weight_activity=0.5,
        source="s", circuit_source="s", activity_source="s",
    )  # fmt: skip
    step = step_energies(macro)
    gate_pj = 0.55e-3 * 0.64
    assert step.dac_pj == pytest.approx(50e-3 * 4 * 0.64)
    assert step.adc_pj == pytest.approx((0.6 + 0.001e-3 * 4**6) * 0.64 * 0.5)
    assert step.weight_pj == pytest.approx(0.5 * gate_pj * (2 * 0.25 + 2 * 0.5))
    assert step.accumulate_pj == 0
    assert clock_hz(macro) == pytest.approx(1e9 / (0.0478 + 6 * (0.00653 * 256 + 0.64)))
    stated = structs.replace(macro, adc_energy_pj=1.5, cell_energy_pj=0.001, dac_energy_pj=0.0)
    assert step_energies(stated).adc_pj == 1.5
    assert step_energies(stated).weight_pj == 0.002
    assert step_energies(stated).dac_pj == 0.0


def test_a_digital_macro_without_circuit_figures_resembles_its_chip() -> None:
    """DIMC1 from its array alone: the tree and the accumulator have about as many adders as in the paper."""
    macro = macro_of("DIMC1")
    circuit = ("multiplier_gates", "lines", "adder_bits", "accumulator_bits", "register_bits")
    names = [name for name in macro.__struct_fields__ if name.startswith(circuit)]
    unknown = dict.fromkeys(names, -1)
    assert len(unknown) == len(circuit)
    derived = structs.replace(macro, clock_hz=nan, path_gates=nan, **unknown)
    assert peak_energy_pj_per_op(derived) == pytest.approx(peak_energy_pj_per_op(macro), rel=0.25)
    assert not isnan(clock_hz(derived))
    assert clock_hz(derived) == pytest.approx(macro.clock_hz, rel=1.0)
