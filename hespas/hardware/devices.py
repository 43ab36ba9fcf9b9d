"""Devices: rates, memories, links and fitted efficiencies, and the TOML files that define them.

Every figure is per device (one GPU, one TPU chip, one CPU socket set), in base units (FLOP/s, bytes, bytes/s,
ns), dense unless marked, and has a source. Unknown is NaN (real numbers) or -1 (counts).

Keys of a device file: properties of the device, ``peaks``, ``memories``, ``links``, ``efficiencies``,
``fits``, ``step_factors`` (lists of tables), ``systolic`` and ``imc`` (tables), and ``sources``, a table of
texts that the ``source`` of every row refers to. ``learned_models`` lists cards of learned models by their
paths, relative to the file and within its folder; only this key names files. Unknown keys are errors. An
error has file, key, expectation and remedy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Literal, cast

from msgspec import structs

from hespas.files.output import write_atomically
from hespas.files.trust import file_in_folder_of
from hespas.graph.columns import find_dtype
from hespas.graph.errors import OutputError, clipped
from hespas.hardware.device_fits import (
    DEVICE_FILE,
    LINE_FORMS,
    Fit,
    FitRow,
    StepFactor,
    check_step_factors,
    decode_fits,
    devices_with_fits,
    fit_row,
    has_shipped_fits,
    shipped_fits,
)
from hespas.hardware.imc_macro import ImcMacro
from hespas.hardware.typed_toml import (
    ClockOrNan,
    Count,
    CountOrUnknown,
    FigureSource,
    NotNegativeOrNan,
    Positive,
    PositiveOrNan,
    Text,
    TomlRow,
    check_source_keys,
    inline_table,
    read_rows,
    refuse_repeats,
    scalar,
    toml_error,
    unexpected_value,
)

__all__ = [
    "Density",
    "Device",
    "DeviceKind",
    "Efficiency",
    "Link",
    "LinkKind",
    "Memory",
    "MemoryLevel",
    "Peak",
    "SubbyteStorage",
    "SystolicArray",
    "Topology",
    "Unit",
    "device_to_toml",
    "read_device",
    "write_device",
]


Unit = Literal["matrix", "vector"]
"""``matrix``: tensor core, matrix core, MXU, or BLAS on a CPU, for matrix products only. ``vector``: other
operations.
"""

Density = Literal["dense", "sparse"]

DeviceKind = Literal["gpu", "tpu", "cpu", "accelerator", "imc"]
"""``accelerator``: a device with matrix units that is neither a GPU nor a TPU (Gaudi, Trainium). ``imc``: a
chip of in-memory-computing macros, which the table ``imc`` describes.
"""

MemoryLevel = Literal["main", "cache", "scratchpad"]

LinkKind = Literal["scale_up", "scale_out", "pcie"]

Topology = Literal["switch", "ring", "fully_connected", "torus2d", "torus3d"]

SubbyteStorage = Literal["packed", "byte"]


class Peak(TomlRow, frozen=True, kw_only=True):
    """Highest rate of one unit (matrix or vector) for one operand type. A multiply and an add are two FLOPs.

    ``dtype`` is the operand type in MLIR's spelling. ``rhs_dtype`` is the type of the right-hand operand if a
    unit multiplies two different types (2-bit weights by 8-bit activations), empty if both are ``dtype``.
    ``accumulator`` is the type of the sum; it is empty if the rate does not depend on it or the source does
    not state it. The energy covers the arithmetic alone: no registers, no wires, no clock tree.
    """

    unit: Unit
    dtype: Text
    flops_per_s: Positive
    density: Density
    source: Text
    accumulator: Text = ""
    note: Text = ""
    energy_pj_per_flop: PositiveOrNan = nan
    energy_source: Text = ""
    rhs_dtype: Text = ""


class Memory(TomlRow, frozen=True, kw_only=True):
    """One level of memory. ``capacity_bytes`` is the total of the device (-1: unknown); bandwidth is NaN if
    unpublished.

    The bandwidth of a cache is of read hits, for all units of the device together. It is a peak if one is
    published or follows from bytes per clock, else the result of a micro-benchmark, as the note says. The
    energy is for moving a byte between this level and the chip.

    ``error_correction`` is ``inline`` if the codes are stored in this (main) memory itself, as in GDDR5 and
    GDDR6 of server boards, and take a part of its bandwidth. HBM and GDDR7 have separate bits for them.
    """

    level: MemoryLevel
    name: Text
    capacity_bytes: CountOrUnknown
    bandwidth_bytes_per_s: PositiveOrNan
    source: Text
    note: Text = ""
    error_correction: Literal["none", "inline"] = "none"
    energy_pj_per_byte: PositiveOrNan = nan
    energy_source: Text = ""


class Link(TomlRow, frozen=True, kw_only=True):
    """One kind of external link of the device.

    ``bandwidth_bytes_per_s`` is the rate in one direction, over all ``links_per_device`` links together. A
    torus divides it by ``links_per_device`` for a single link. ``devices_per_domain`` is the number of
    devices that are reachable over this kind of link alone (-1: no fixed limit). ``pcie`` is the link to the
    host, of any type.
    """

    name: Text
    kind: LinkKind
    bandwidth_bytes_per_s: Positive
    latency_ns: NotNegativeOrNan
    topology: Topology
    links_per_device: CountOrUnknown
    devices_per_domain: CountOrUnknown
    source: Text
    latency_source: Text
    note: Text = ""

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """Bandwidth of one link in one direction; NaN if the number of links is unknown."""
        return self.bandwidth_bytes_per_s / self.links_per_device if self.links_per_device > 0 else nan


class Efficiency(TomlRow, frozen=True, kw_only=True):
    """Fitted fractions of the peaks for a class of operations.

        time = t0_ns + max(flops / (compute x peak), bytes / (memory x bandwidth))

    ``op_class`` and ``dtype`` may be ``*``. Values above 1 are valid: a warm cache exceeds the memory
    bandwidth. ``provenance`` has data, version and date of the fit; ``samples`` and ``mape`` (a fraction, on
    data outside the fit) show its reliability.
    """

    op_class: Text
    dtype: Text
    compute: PositiveOrNan
    memory: PositiveOrNan
    t0_ns: NotNegativeOrNan
    provenance: Text
    samples: CountOrUnknown = -1
    mape: NotNegativeOrNan = nan


class SystolicArray(TomlRow, frozen=True, kw_only=True):
    """Shape of matrix units that are systolic arrays: ``arrays`` grids of ``rows`` x ``columns``
    multiply-accumulate cells.
    """

    rows: Count
    columns: Count
    arrays: Count
    clock_hz: PositiveOrNan
    dataflow: Literal["os", "ws", "is"]
    source: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device as its file describes it. ``units`` is the number of its compute units, which are called
    ``unit_name`` (SM, CU, TensorCore, core).

    ``arch`` is the architecture as compilers name it (``sm_90``, ``gfx942``; empty: unknown): its devices run
    the same kernels. ``launch_overhead_ns`` is the shortest time of any kernel. ``subbyte_storage``: element
    types under 8 bits are packed in memory, or take a byte each. ``own_fits`` are the fits in the file.
    ``fits_of`` names the shipped device whose fits also apply to this one (empty: none). ``own_lines`` are
    the fits of the estimator ``systolic`` in the file; they are separate because they cover the same classes.
    ``learned_models`` are absolute paths of the cards of its own learned models. ``step_factors`` correct
    the times of whole steps. ``tdp_w`` is the sustained
    power limit of the board, in watts. ``boost_clock_hz`` is the highest clock of the compute units (NaN:
    unknown).
    """

    name: str
    vendor: str
    family: str
    kind: DeviceKind
    description: str
    aliases: tuple[str, ...]
    units: int
    unit_name: str
    launch_overhead_ns: float
    launch_overhead_source: str
    subbyte_storage: SubbyteStorage
    sources: tuple[FigureSource, ...]
    peaks: tuple[Peak, ...]
    memories: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()
    systolic: SystolicArray | None = None
    imc: ImcMacro | None = None
    own_fits: tuple[Fit, ...] = ()
    fits_of: str = ""
    own_lines: tuple[Fit, ...] = ()
    learned_models: tuple[str, ...] = ()
    step_factors: tuple[StepFactor, ...] = ()
    tdp_w: float = nan
    tdp_source: str = ""
    boost_clock_hz: float = nan
    boost_clock_source: str = ""
    arch: str = ""

    @property
    def architecture(self) -> str:
        """Architecture of the device; its vendor and family if the file does not state one."""
        return self.arch or f"{self.vendor} {self.family}"

    @property
    def fits(self) -> tuple[Fit, ...]:
        """The device's own fits, followed by the shipped fits of the classes without an own fit.

        Shipped fits are read at the first access, because decoding them takes longer than the rest of a
        device.
        """
        if not self.fits_of:
            return self.own_fits
        own_keys = {fit.key for fit in self.own_fits}
        return (*self.own_fits, *(fit for fit in shipped_fits(self.fits_of) if fit.key not in own_keys))

    @property
    def main_memory(self) -> Memory:
        """Memory that holds tensors (HBM, GDDR, DRAM); the loader guarantees exactly one."""
        return next(memory for memory in self.memories if memory.level == "main")

    def link(self, kind: LinkKind) -> Link | None:
        """Return the first link of a kind (files list the innermost first), or None."""
        return next((link for link in self.links if link.kind == kind), None)

    def source_text(self, key: str) -> str:
        """Return the text of a source, by its key in the device file. Raises ``KeyError`` for a key that the
        device does not have.
        """
        for source in self.sources:
            if source.key == key:
                return source.text
        raise KeyError(key)

    def efficiency(self, op_class: str, dtype: str) -> Efficiency | None:
        """Return the most specific fitted efficiency; None without a match.

        A row of both the class and the type is preferred, then a row of the class (type ``*``), then of the
        type (class ``*``), then of ``*`` for both.
        """
        wanted = ((op_class, dtype), (op_class, "*"), ("*", dtype), ("*", "*"))
        table = {(row.op_class, row.dtype): row for row in self.efficiencies}
        return next((table[key] for key in wanted if key in table), None)


_CARDS = (
    "put the folder of models next to the hardware file and name its cards: my-device.learned/matmul.json"
)


class _DeviceFile(TomlRow, frozen=True, kw_only=True):
    sources: dict[str, Text]
    allow_sparse: bool = False
    name: Text
    vendor: Text
    family: Text
    arch: Text = ""
    kind: DeviceKind
    description: Text
    aliases: tuple[Text, ...] = ()
    units: CountOrUnknown
    unit_name: Text
    launch_overhead_ns: NotNegativeOrNan
    launch_overhead_source: Text
    subbyte_storage: SubbyteStorage
    peaks: tuple[Peak, ...]
    memories: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()
    systolic: SystolicArray | None = None
    imc: ImcMacro | None = None
    fits: tuple[FitRow, ...] = ()
    fits_of: Text = ""
    learned_models: tuple[Text, ...] = ()
    step_factors: tuple[StepFactor, ...] = ()
    tdp_w: PositiveOrNan = nan
    tdp_source: Text = ""
    boost_clock_hz: ClockOrNan = nan
    boost_clock_source: Text = ""


def read_device(path: Path) -> Device:
    """Return the device that a file describes. Raises ``FormatError`` with file, key path and expectation."""
    table, file = read_rows(path, _DeviceFile, DEVICE_FILE)
    _check_device(file, table, path)
    fits = decode_fits(file.fits, path)
    values = {name: getattr(file, name) for name in file.__struct_fields__ if name in _COPIED_FIELDS}
    # Model cards must be in the folder of the file. They are not opened here.
    cards_by_target: dict[Path, str] = {}
    for index, card in enumerate(file.learned_models):
        where = f"learned_models[{index}]"
        if not card.endswith(".json") or "\0" in card:
            expected = f"expected the path of a card (.json), got {clipped(repr(card))}"
            raise toml_error(path, where, expected, _CARDS)
        card_path = file_in_folder_of(path, card, where)
        file_in_folder_of(path, f"{card.removesuffix('.json')}.npz", where)
        target = Path(os.path.realpath(card_path))
        if target in cards_by_target:
            raise toml_error(path, where, f"'{clipped(card)}' is stated already", "name each card once")
        own_path = card_path if card_path.is_absolute() else Path.cwd() / card_path
        cards_by_target[target] = os.path.normpath(own_path)
    return Device(
        **values,
        sources=tuple(FigureSource(key=key, text=text) for key, text in file.sources.items()),
        own_fits=tuple(fit for fit in fits if fit.form not in LINE_FORMS),
        own_lines=tuple(fit for fit in fits if fit.form in LINE_FORMS),
        learned_models=tuple(cards_by_target.values()),
    )


_COPIED_FIELDS = frozenset(Device.__dataclass_fields__) - {"sources", "learned_models"}
"""Fields of a device with the same value in its file."""


def _check_device(file: _DeviceFile, table: Mapping[str, object], path: Path) -> None:
    """Check the rules of a device file that types cannot express: sources, element types, one main memory, a
    dense rate, and unique rows.
    """
    if not file.sources:
        hint = 'add [sources] and below it a key per source: vendor = "data sheet, title and date"'
        raise toml_error(path, "sources", "expected at least one source", hint)
    rows: dict[str, Mapping[str, object]] = {"": table}
    arrays: dict[str, TomlRow | None] = {"systolic.": file.systolic, "imc.": file.imc}
    rows |= {where: structs.asdict(array) for where, array in arrays.items() if array is not None}
    for name in ("peaks", "memories", "links", "efficiencies"):
        items = cast("list[dict[str, object]]", table.get(name, []))
        rows |= {f"{name}[{index}].": row for index, row in enumerate(items)}
    for where, row in rows.items():
        _check_sources(row, where, file.sources, path)
        for key in ("dtype", "rhs_dtype", "accumulator"):
            if key in row and (where.startswith("peaks") or row[key] != "*"):
                spelling = cast("str", row[key])
                entry = find_dtype(spelling)
                if entry is None:
                    hint = "use MLIR's names: bf16, f8E4M3FN, i8"
                    raise toml_error(path, where + key, f"unknown element type '{spelling}'", hint)
                if entry.name != spelling:
                    wrong = f"expected MLIR's spelling, got '{spelling}'"
                    raise toml_error(path, where + key, wrong, f"write '{entry.name}'")
    for index, peak in enumerate(file.peaks):
        if peak.density == "sparse" and not file.allow_sparse:
            wrong = "a sparse peak counts multiplications by zero that are skipped; estimates use dense peaks"
            hint = "state the dense rate (half of a 2:4 sparse one); allow_sparse = true keeps it, unused"
            raise toml_error(path, f"peaks[{index}].density", wrong, hint)
    if not any(peak.density == "dense" for peak in file.peaks):
        hint = "add the rate without sparsity, of any unit and element type: density = 'dense'"
        raise toml_error(path, "peaks", "expected at least one dense peak", hint)
    _check_memories(file.memories, path)
    refuse_repeats(
        path, "peaks", ((p.unit, p.dtype, p.rhs_dtype, p.accumulator, p.density) for p in file.peaks)
    )
    refuse_repeats(path, "memories", ((memory.name,) for memory in file.memories))
    refuse_repeats(path, "links", ((link.kind, link.name) for link in file.links))
    refuse_repeats(path, "efficiencies", ((row.op_class, row.dtype) for row in file.efficiencies))
    check_step_factors(file.step_factors, path)
    _check_macro(file, path)
    if file.fits_of and not has_shipped_fits(file.fits_of):
        hint = f"leave it out, or name one of {', '.join(devices_with_fits())}"
        raise toml_error(path, "fits_of", f"no fits ship for a device '{clipped(file.fits_of)}'", hint)


def _check_memories(memories: Sequence[Memory], path: Path) -> None:
    """Check that there is one main memory, that it has a bandwidth, and that no cache has inline codes."""
    for index, memory in enumerate(memories):
        if memory.level == "main" and isnan(memory.bandwidth_bytes_per_s):
            where = f"memories[{index}].bandwidth_bytes_per_s"
            raise unexpected_value(memory.bandwidth_bytes_per_s, Positive, where, path)
        if memory.level != "main" and memory.error_correction != "none":
            wrong = f"expected none for a memory of level '{memory.level}', got '{memory.error_correction}'"
            raise toml_error(path, f"memories[{index}].error_correction", wrong, "leave it out")
    count = sum(memory.level == "main" for memory in memories)
    if count != 1:
        wrong = f"expected exactly one row of level 'main', got {count}"
        hint = "write level = 'main' for the memory with programs and data, and level = 'cache' for caches"
        raise toml_error(path, "memories", wrong, hint)


def _check_macro(file: _DeviceFile, path: Path) -> None:
    """Check that devices of kind ``imc``, and no others, have a table ``imc`` whose cells hold a weight."""
    macro = file.imc
    if (file.kind == "imc") != (macro is not None):
        wrong = f"expected a table [imc] exactly if kind = 'imc', got kind = '{file.kind}'"
        raise toml_error(path, "imc", wrong, "set kind = 'imc' and add the table, or leave out both")
    if macro is not None and not (macro.weight_rows and macro.weight_columns):
        wrong = f"{macro.rows} x {macro.columns} cells do not hold one weight"
        hint = "rows >= rows_per_weight x weight_sets, columns >= columns_per_weight"
        raise toml_error(path, "imc.rows", wrong, hint)


_SOURCE_OF = {
    "energy_pj_per_flop": "energy_source",
    "energy_pj_per_byte": "energy_source",
    "tdp_w": "tdp_source",
    "boost_clock_hz": "boost_clock_source",
}
"""Optional figures, and the keys of their sources: both are given, or neither."""


def _check_sources(row: Mapping[str, object], where: str, known: Mapping[str, str], path: Path) -> None:
    wanted = {_SOURCE_OF[name]: name for name in row if name in _SOURCE_OF}
    for name, figure in wanted.items():
        if name not in row:
            hint = f'add {name} = "..."; {DEVICE_FILE.example}'
            raise toml_error(path, where + name, f"missing key: {figure} needs one", hint)
    for name in row:
        if name in _SOURCE_OF.values() and name not in wanted:
            hint = "leave it out, or state the figure too"
            raise toml_error(path, where + name, "the source of a figure that is not stated", hint)
    check_source_keys(row, where, known, path)


_SCALARS = (
    "name", "vendor", "family", "kind", "description", "units", "unit_name",
    "launch_overhead_ns", "launch_overhead_source", "subbyte_storage",
)  # fmt: skip


def device_to_toml(device: Device, *, folder: Path | None = None) -> str:
    """Return the text of a device file, with every row on one line.

    Paths of learned models are relative to ``folder``, the future folder of the file. Without ``folder`` they
    are absolute. Raises ``OutputError`` for a model outside of ``folder``.
    """
    lines = [f"{name} = {scalar(getattr(device, name))}" for name in _SCALARS]
    lines += [f"arch = {scalar(device.arch)}"] if device.arch else []
    lines.append(f"aliases = [{', '.join(scalar(alias) for alias in device.aliases)}]")
    if any(peak.density == "sparse" for peak in device.peaks):
        lines.append("allow_sparse = true")
    for name in ("tdp_w", "boost_clock_hz"):
        if source := getattr(device, _SOURCE_OF[name]):
            lines += [f"{name} = {scalar(getattr(device, name))}", f"{_SOURCE_OF[name]} = {scalar(source)}"]
    if device.fits_of:
        lines.append(f"fits_of = {scalar(device.fits_of)}")
    if device.learned_models:
        cards = (scalar(_relative(card, folder)) for card in device.learned_models)
        lines.append(f"learned_models = [{', '.join(cards)}]")
    for name in ("peaks", "memories", "links", "efficiencies", "step_factors"):
        rows: tuple[TomlRow, ...] = getattr(device, name)
        if rows:
            lines += ["", f"{name} = [", *(f"  {inline_table(row)}," for row in rows), "]"]
    if fits := (*device.own_fits, *device.own_lines):
        lines += ["", "fits = [", *(f"  {fit_row(fit, scalar)}," for fit in fits), "]"]
    if device.systolic is not None:
        lines += ["", f"systolic = {inline_table(device.systolic)}"]
    if device.imc is not None:
        lines += ["", f"imc = {inline_table(device.imc)}"]
    lines += ["", "[sources]", *(f"{scalar(s.key)} = {scalar(s.text)}" for s in device.sources), ""]
    return "\n".join(lines)


def write_device(device: Device, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write a device file atomically.

    Raises ``OutputError`` if the file exists and ``overwrite`` is false, if it cannot be written, or if a
    learned model of the device is outside of its folder.
    """
    target = Path(path)
    content = device_to_toml(device, folder=target.parent).encode("utf-8")

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(target, write, overwrite=overwrite, directory=False)
    return target


def _relative(card: str, folder: Path | None) -> str:
    if folder is None:
        return card
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(card))
    if not real.is_relative_to(home):
        raise OutputError(
            "a hardware file can only name learned models within its own folder",
            path=card,
            hint=f"copy the card and its trees to {home}, or remove the learned models",
        )
    return real.relative_to(home).as_posix()
