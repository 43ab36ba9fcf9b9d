"""Energy and delay of one step of an in-memory-computing macro.

Figures of the device file are used where it states them. All others follow from gates, with the formulas of
ZigZag-IMC (Sun et al., "Analog or Digital In-Memory Computing? Benchmarking Through Quantitative Modeling",
ICCAD 2023; code: github.com/KULeuven-MICAS/zigzag-imc, ``imc_model_validation``). ``C`` is the input
capacitance of a NAND gate, ``V`` the supply voltage and ``d`` the delay of a NAND gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isnan, log2

from hespas.hardware import ImcMacro

__all__ = [
    "CLOCK_ERROR",
    "StepEnergies",
    "clock_hz",
    "peak_energy_pj_per_op",
    "peak_ops_per_s",
    "step_energies",
]

CLOCK_ERROR = (0.94, 1.21)
"""Smallest and largest published cycle time of seven chips, divided by the derived one
(``tests/estimators/imc/test_imc_chips.py``).
"""

_ADC_LINEAR_FF, _ADC_QUADRATIC_FF = 100.0, 0.001
_DAC_FF_PER_BIT = 50.0
_ADC_NS_PER_BIT, _ADC_NS_PER_BIT_AND_ROW = 0.640, 0.00653
_ADDER_GATES = 6.0
"""Input capacitance of a full adder in NAND gates: two XOR of 1.5 and three NAND."""
_REGISTER_GATES = 3.0
_XOR_DELAY = 2.4
_WRITE_LINES = 2.0
"""Bit lines that a write switches over their length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnergies:
    """Energies of one step [pJ]: of one DAC and one ADC conversion, of one stored weight, and of the digital
    sums of one weight column. ``write_pj_per_bit`` is for storing one bit of a weight.
    """

    dac_pj: float
    weight_pj: float
    adc_pj: float
    accumulate_pj: float
    write_pj_per_bit: float


def step_energies(macro: ImcMacro) -> StepEnergies:
    """Return the energies of the parts of a macro.

    - DAC: 50 fF x bits x V^2.
    - ADC: (100 fF x bits + 0.001 fF x 4^bits) x V^2, times the share of weight bits that are 1.
    - Weight: a multiplier gate switches half of C, a word or bit line half of C per cell.
    - Full adder: 6 C V^2. Flip-flop: 3 C V^2. Only the adders behind cells depend on the data.
    - Write of a bit (our assumption): two bit lines over all rows of the array, half of C per cell.
    """
    gate_pj = macro.gate_capacitance_ff * macro.supply_v**2 * 1e-3
    square_pj = macro.supply_v**2 * 1e-3
    is_analog = macro.domain == "analog"
    dac_bits = macro.dac_bits if macro.dac_bits > 0 else macro.input_bits_per_step
    adc_bits = _adc_bits(macro)
    gates = macro.multiplier_gates_per_weight
    if gates < 0:
        gates = macro.cells_per_weight if is_analog else macro.weight_bits * macro.input_bits_per_step
    lines = macro.lines_per_weight
    if lines < 0:
        lines = macro.cells_per_weight if is_analog else 0
    adders, accumulators, registers = _adder_bits(macro)
    active = macro.input_activity * macro.weight_activity
    adder_active = macro.weight_activity if is_analog else active
    adc_pj = (
        (_ADC_LINEAR_FF * adc_bits + _ADC_QUADRATIC_FF * 4.0**adc_bits) * square_pj * macro.weight_activity
    )
    weight_pj = 0.5 * gate_pj * (gates * active + lines * macro.weight_activity)
    accumulate_pj = gate_pj * (
        _ADDER_GATES * (adders * adder_active + accumulators) + _REGISTER_GATES * registers
    )
    write_pj = 0.5 * gate_pj * _WRITE_LINES * macro.rows
    return StepEnergies(
        dac_pj=_stated(macro.dac_energy_pj, _DAC_FF_PER_BIT * dac_bits * square_pj),
        weight_pj=_stated(macro.cell_energy_pj * macro.cells_per_weight, weight_pj),
        adc_pj=_stated(macro.adc_energy_pj, adc_pj),
        accumulate_pj=_stated(macro.accumulate_energy_pj, accumulate_pj),
        write_pj_per_bit=_stated(macro.write_energy_pj_per_bit, write_pj),
    )


def clock_hz(macro: ImcMacro) -> float:
    """Return the rate of conversions: the clock of the file, or else derived from the delays of ZigZag-IMC.

    - ADC: bits x (0.00653 ns x rows + 0.640 ns). DACs take no time of their own.
    - Logic: ``path_gates`` x d; without it the tree and the accumulator, with ripple carries: a sum takes
      4.8 d, a carry 2 d, the first carry 4.4 d, a multiplier d.
    """
    if not isnan(macro.clock_hz):
        return macro.clock_hz
    gates = macro.path_gates
    if isnan(gates):
        sum_gates, carry_gates, first_gates = 2 * _XOR_DELAY, 2.0, _XOR_DELAY + 2.0
        gates = 1.0
        inputs = macro.weight_rows if macro.domain == "digital" else macro.converters_per_column
        width = macro.weight_bits if macro.domain == "digital" else _adc_bits(macro)
        depth = ceil(log2(inputs)) if inputs > 1 else 0
        if depth:
            gates += sum_gates * (depth - 1) + first_gates + carry_gates * (width + depth - 2)
        if macro.input_bits_per_step < macro.input_bits:
            gates += sum_gates + carry_gates * (macro.input_bits - macro.input_bits_per_step)
    delay_ns = gates * macro.gate_delay_ns
    if macro.domain == "analog":
        delay_ns += _adc_bits(macro) * (_ADC_NS_PER_BIT_AND_ROW * macro.weight_rows + _ADC_NS_PER_BIT)
    return 1e9 / delay_ns


def peak_ops_per_s(macro: ImcMacro) -> float:
    """Return the operations per second with all weights in use (a multiply and an add are two).

    Examples:
        >>> from hespas.hardware import load_device
        >>> f"{peak_ops_per_s(load_device('IMC-ISSCC22-15-5').imc) / 1e12:.2f} TOP/s"
        '1.20 TOP/s'
    """
    weights = macro.weight_rows * macro.weight_columns * macro.macros
    return 2.0 * weights * clock_hz(macro) / macro.steps()


def peak_energy_pj_per_op(macro: ImcMacro) -> float:
    """Return the energy per operation with all weights in use, without buffers and weight writes.

    Examples:
        >>> from hespas.hardware import load_device
        >>> f"{1 / peak_energy_pj_per_op(load_device('IMC-ISSCC22-15-5').imc):.1f} TOP/s/W"
        '36.3 TOP/s/W'
    """
    step = step_energies(macro)
    rows, columns = macro.weight_rows, macro.weight_columns
    energy_pj = (
        rows * macro.converters_per_row * step.dac_pj
        + rows * columns * step.weight_pj
        + columns * macro.converters_per_column * step.adc_pj
        + columns * step.accumulate_pj
    )
    return energy_pj * macro.steps() / (2.0 * rows * columns)


def _stated(figure: float, derived: float) -> float:
    return derived if isnan(figure) else figure


def _adc_bits(macro: ImcMacro) -> int:
    """Return the ADC resolution: of the file, or else the bits of a step + 0.5 log2 rows, the default of
    ZigZag-IMC (``AimcArrayUnit.py``).
    """
    if macro.adc_bits > 0:
        return macro.adc_bits
    return macro.input_bits_per_step + ceil(0.5 * log2(macro.weight_rows))


def _adder_bits(macro: ImcMacro) -> tuple[int, int, int]:
    """Return the full adders that depend on the data, the full adders of the accumulator and the flip-flops
    of one weight column.

    A tree of N inputs of w bits has N (w + 1) - (w + log2 N + 1) full adders. In a digital macro it sums the
    rows, in an analog macro the converted columns of one weight. The accumulator holds the whole sum: bits of
    input, weight and log2 of the rows. It is not needed if one step takes all input bits.
    """
    if macro.domain == "digital":
        inputs, width = macro.weight_rows, macro.weight_bits
    else:
        inputs, width = macro.converters_per_column, _adc_bits(macro)
    adders = macro.adder_bits_per_column
    if adders < 0:
        adders = inputs * (width + 1) - (width + ceil(log2(inputs)) + 1) if inputs > 1 else 0
    held = 0
    if macro.input_bits_per_step < macro.input_bits:
        held = macro.input_bits + macro.weight_bits + ceil(log2(macro.weight_rows))
    accumulators = macro.accumulator_bits_per_column
    registers = macro.register_bits_per_column
    return adders, held if accumulators < 0 else accumulators, held if registers < 0 else registers
