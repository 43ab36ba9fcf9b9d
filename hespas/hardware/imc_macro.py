"""Macros of in-memory-computing chips: the table ``imc`` of device files."""

from __future__ import annotations

from math import ceil, nan
from typing import Annotated, Literal

from msgspec import Meta

from hespas.hardware.typed_toml import (
    CountOrUnknown,
    NotNegativeOrNan,
    Positive,
    PositiveOrNan,
    Text,
    TomlRow,
)

__all__ = ["ImcDomain", "ImcMacro"]

ImcDomain = Literal["analog", "digital"]
"""``analog``: the sums of columns are converted by ADCs. ``digital``: adder trees sum the products."""

_Whole = Annotated[
    int, Meta(ge=-1, le=1 << 40, description="a whole number that is 0 or more, or -1 (unknown), up to 2^40")
]

_Cells = Annotated[int, Meta(ge=1, le=1 << 16, description="a whole number from 1 to 65536")]
"""Rows or columns of an array. Mappings try all numbers of blocks, so their time and memory grow with it."""

_Macros = Annotated[int, Meta(ge=1, le=1 << 20, description="a whole number from 1 to 1048576")]

_Bits = Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")]

_BitsOrUnknown = Annotated[
    int,
    Meta(
        ge=-1,
        le=64,
        description="a whole number from 1 to 64, or -1 (unknown)",
        extra={"unknown": "-1", "within": bool},
    ),
]

_Share = Annotated[float, Meta(gt=0, le=1, description="a number above 0, up to 1")]


class ImcMacro(TomlRow, frozen=True, kw_only=True):
    """In-memory-computing macros of a chip: arrays of cells that multiply stored weights by inputs.

    A macro has ``rows`` x ``columns`` cells. A weight takes ``rows_per_weight`` x ``columns_per_weight``
    cells, and ``weight_sets`` weights share the circuits of one position. In one step, all positions of one
    set multiply their weight by ``input_bits_per_step`` bits of the input of their row, and each weight
    column sums its products. Figures that a file leaves out (-1, NaN) are derived in
    :mod:`hespas.estimators.imc`.

    ``input_bits`` and ``weight_bits`` are the widths of one operand; wider operands take more steps and more
    columns. ``dac_bits`` is the resolution of one DAC (-1: all bits of a step). ``conversions_per_step`` is
    above 1 if columns share an ADC. ``clock_hz`` is the rate of conversions; NaN derives it from the delays.

    ``multiplier_gates_per_weight`` and ``lines_per_weight`` count the one-bit multipliers and the word and
    bit lines that an input step switches for one weight. ``adder_bits_per_column``,
    ``accumulator_bits_per_column`` and ``register_bits_per_column`` count the full adders that depend on the
    data, the full adders that switch in every step, and the flip-flops, for one weight column. ``path_gates``
    is the longest digital path of a step, in delays of a NAND gate. ``input_activity`` and
    ``weight_activity`` are the shares of input bits that toggle and of weight bits that are 1.

    ``dac_energy_pj`` and ``adc_energy_pj`` are for one conversion, ``cell_energy_pj`` is for one cell and
    step, ``accumulate_energy_pj`` for one weight column and step. ``write_bits_per_cycle`` is the number of
    cells that a macro writes in a cycle (-1: a row). ``area_mm2`` is the area of all macros together.
    """

    domain: ImcDomain
    macros: _Macros
    rows: _Cells
    columns: _Cells
    rows_per_weight: _Cells = 1
    columns_per_weight: _Cells
    weight_sets: _Cells = 1
    weight_bits: _Bits
    input_bits: _Bits
    input_bits_per_step: _Bits
    dacs_per_row: _Whole = -1
    dac_bits: _BitsOrUnknown = -1
    adcs_per_column: _Whole = -1
    conversions_per_step: _Cells = 1
    adc_bits: _BitsOrUnknown = -1
    clock_hz: PositiveOrNan
    node_nm: Positive
    supply_v: Positive
    gate_capacitance_ff: Positive
    gate_delay_ns: Positive
    input_activity: _Share
    weight_activity: _Share
    multiplier_gates_per_weight: _Whole = -1
    lines_per_weight: _Whole = -1
    adder_bits_per_column: _Whole = -1
    accumulator_bits_per_column: _Whole = -1
    register_bits_per_column: _Whole = -1
    path_gates: PositiveOrNan = nan
    dac_energy_pj: NotNegativeOrNan = nan
    cell_energy_pj: NotNegativeOrNan = nan
    adc_energy_pj: NotNegativeOrNan = nan
    accumulate_energy_pj: NotNegativeOrNan = nan
    write_energy_pj_per_bit: NotNegativeOrNan = nan
    write_bits_per_cycle: CountOrUnknown = -1
    area_mm2: PositiveOrNan = nan
    source: Text
    circuit_source: Text
    activity_source: Text
    note: Text = ""

    @property
    def weight_rows(self) -> int:
        """Number of weights that one column sums in a step; 0 if the rows do not hold one weight."""
        return self.rows // (self.rows_per_weight * self.weight_sets)

    @property
    def weight_columns(self) -> int:
        """Number of weights side by side; 0 if the columns do not hold one weight."""
        return self.columns // self.columns_per_weight

    @property
    def cells_per_weight(self) -> int:
        """Number of cells that hold one weight."""
        return self.rows_per_weight * self.columns_per_weight

    @property
    def converters_per_row(self) -> int:
        """Number of DACs of one weight row: 1 by default in analog macros with inputs of several bits."""
        if self.domain == "digital":
            return 0
        return self.dacs_per_row if self.dacs_per_row >= 0 else int(self.input_bits_per_step > 1)

    @property
    def converters_per_column(self) -> int:
        """Number of ADCs of one weight column: one per column of cells by default in analog macros."""
        if self.domain == "digital":
            return 0
        return self.adcs_per_column if self.adcs_per_column >= 0 else self.columns_per_weight

    def steps(self, input_bits: float = nan) -> int:
        """Return the number of cycles of one input vector: steps of ``input_bits`` (NaN: the macro's), times
        conversions per step.
        """
        bits = input_bits if input_bits > 0 else self.input_bits
        return ceil(bits / self.input_bits_per_step) * self.conversions_per_step
