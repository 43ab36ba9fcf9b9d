"""A device file: TOML, checked key by key.

Top level: what the device is, ``peaks``, ``memories``, ``links``, ``efficiencies``, ``fits`` (lists of
tables), ``systolic`` (a table), and ``sources``, a table of texts that every row's ``source`` refers to.
``learned_models`` lists cards of learned models by their paths, relative to the file and within its folder:
the only key that names files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import nan
from pathlib import Path
from typing import get_args

from hespas.graph.errors import clipped
from hespas.graph.tensors import find_dtype
from hespas.hardware.fits_file import devices_with_fits, has_shipped_fits, read_fit, unique_fits
from hespas.hardware.forms import LINE_FORMS
from hespas.hardware.model import (
    Density,
    Device,
    DeviceKind,
    Efficiency,
    Link,
    LinkKind,
    Memory,
    MemoryLevel,
    Peak,
    Source,
    SubbyteStorage,
    SystolicArray,
    Topology,
    Unit,
)
from hespas.hardware.reader import TableReader, read_table

__all__ = ["read_device"]

_UNITS: tuple[Unit, ...] = get_args(Unit)
_DENSITIES: tuple[Density, ...] = get_args(Density)
_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)
_LEVELS: tuple[MemoryLevel, ...] = get_args(MemoryLevel)
_LINKS: tuple[LinkKind, ...] = get_args(LinkKind)
_TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
_CARDS = "put the folder of models beside the hardware file and name its cards: my-device.learned/matmul.json"
_STORAGE: tuple[SubbyteStorage, ...] = get_args(SubbyteStorage)


def read_device(path: Path) -> Device:
    """The device a file describes. Raises ``FormatError`` naming file, key path and what was expected."""
    root = read_table(path)
    sources = _sources(root)
    known = {source.key for source in sources}
    sparse_allowed = root.flag("allow_sparse", default=False)
    systolic = root.table("systolic", optional=True)
    fits = tuple(read_fit(row) for row in root.tables("fits", optional=True))
    unique_fits(root, fits)
    device = Device(
        name=root.text("name"),
        vendor=root.text("vendor"),
        family=root.text("family"),
        kind=root.choice("kind", _KINDS),
        description=root.text("description"),
        aliases=root.texts("aliases"),
        units=root.count("units", unknown=True),
        unit_name=root.text("unit_name"),
        launch_overhead_ns=root.real("launch_overhead_ns", unknown=True, zero=True),
        launch_overhead_source=_source(root, known, "launch_overhead_source"),
        subbyte_storage=root.choice("subbyte_storage", _STORAGE),
        sources=sources,
        peaks=tuple(_peak(row, known, sparse_allowed) for row in root.tables("peaks")),
        memories=tuple(_memory(row, known) for row in root.tables("memories")),
        links=tuple(_link(row, known) for row in root.tables("links", optional=True)),
        efficiencies=tuple(_efficiency(row) for row in root.tables("efficiencies", optional=True)),
        systolic=None if systolic is None else _systolic(systolic, known),
        own_fits=tuple(fit for fit in fits if fit.form not in LINE_FORMS),
        fits_of=root.text("fits_of", default=""),
        own_lines=tuple(fit for fit in fits if fit.form in LINE_FORMS),
        learned_models=_learned_models(root, path),
        tdp_w=root.real("tdp_w", default=nan, unknown=True),
        tdp_source=_optional_source(root, known, "tdp_source", "tdp_w"),
    )
    root.close()
    _check(root, device)
    return device


def _learned_models(root: TableReader, path: Path) -> tuple[str, ...]:
    """The absolute paths of cards; whether they are there is seen when they are asked."""
    cards = root.texts("learned_models")
    folder = Path(os.path.realpath(path)).parent
    found: dict[Path, str] = {}
    for index, card in enumerate(cards):
        where = f"learned_models[{index}]"
        if not card.endswith(".json") or "\0" in card:
            expected = f"expected the path of a card (.json), got {clipped(repr(card))}"
            raise root.fault(where, expected, hint=_CARDS)
        target = Path(os.path.realpath(folder / card))  # where links lead, too
        if Path(card).is_absolute() or not target.is_relative_to(folder):
            raise root.fault(where, f"'{clipped(card)}' is not within the folder of this file", hint=_CARDS)
        if target in found:
            raise root.fault(where, f"'{clipped(card)}' is stated already", hint="name each card once")
        found[target] = os.path.normpath(folder / card)
    return tuple(found.values())


def _sources(root: TableReader) -> tuple[Source, ...]:
    table = root.table("sources")
    if table is None or not table.values:
        hint = 'add [sources] and below it a key per source: vendor = "data sheet, title and date"'
        raise root.fault("sources", "expected at least one source", hint=hint)
    return tuple(Source(key=key, text=table.text(key)) for key in table.names())


def _source(row: TableReader, known: set[str], name: str = "source") -> str:
    key = row.text(name)
    if key not in known:
        hint = f"the file's sources are {', '.join(sorted(known))}"
        raise row.fault(name, f"'{key}' is not a key of the sources table", hint=hint)
    return key


def _optional_source(row: TableReader, known: set[str], name: str, figure: str) -> str:
    """The source of an optional figure: required where the figure is stated, empty otherwise."""
    return _source(row, known, name) if figure in row.values else ""


def _peak(row: TableReader, known: set[str], sparse_allowed: bool) -> Peak:
    peak = Peak(
        unit=row.choice("unit", _UNITS),
        dtype=_dtype(row, "dtype"),
        flops_per_s=row.real("flops_per_s"),
        density=row.choice("density", _DENSITIES),
        source=_source(row, known),
        accumulator=_dtype(row, "accumulator") if "accumulator" in row.values else "",
        note=row.text("note", default=""),
        energy_pj_per_flop=row.real("energy_pj_per_flop", default=nan, unknown=True),
        energy_source=_optional_source(row, known, "energy_source", "energy_pj_per_flop"),
        rhs_dtype=_dtype(row, "rhs_dtype") if "rhs_dtype" in row.values else "",
    )
    row.close()
    if peak.density == "sparse" and not sparse_allowed:
        raise row.fault(
            "density",
            "a sparse peak counts multiplications by zero that are skipped; estimates use dense peaks",
            hint="state the dense rate (half of a 2:4 sparse one); allow_sparse = true keeps it, unused",
        )
    return peak


def _dtype(row: TableReader, name: str) -> str:
    spelling = row.text(name)
    entry = find_dtype(spelling)
    if entry is None:
        raise row.fault(
            name, f"unknown element type '{spelling}'", hint="use MLIR's names: bf16, f8E4M3FN, i8"
        )
    if entry.name != spelling:
        raise row.fault(name, f"expected MLIR's spelling, got '{spelling}'", hint=f"write '{entry.name}'")
    return spelling


def _memory(row: TableReader, known: set[str]) -> Memory:
    level = row.choice("level", _LEVELS)
    memory = Memory(
        level=level,
        name=row.text("name"),
        capacity_bytes=row.count("capacity_bytes", unknown=True),
        bandwidth_bytes_per_s=row.real("bandwidth_bytes_per_s", unknown=level != "main"),
        source=_source(row, known),
        note=row.text("note", default=""),
        energy_pj_per_byte=row.real("energy_pj_per_byte", default=nan, unknown=True),
        energy_source=_optional_source(row, known, "energy_source", "energy_pj_per_byte"),
    )
    row.close()
    return memory


def _link(row: TableReader, known: set[str]) -> Link:
    link = Link(
        name=row.text("name"),
        kind=row.choice("kind", _LINKS),
        bandwidth_bytes_per_s=row.real("bandwidth_bytes_per_s"),
        latency_ns=row.real("latency_ns", unknown=True, zero=True),
        topology=row.choice("topology", _TOPOLOGIES),
        links_per_device=row.count("links_per_device", unknown=True),
        devices_per_domain=row.count("devices_per_domain", unknown=True),
        source=_source(row, known),
        latency_source=_source(row, known, "latency_source"),
        note=row.text("note", default=""),
    )
    row.close()
    return link


def _efficiency(row: TableReader) -> Efficiency:
    dtype = row.text("dtype")
    efficiency = Efficiency(
        op_class=row.text("op_class"),
        dtype=dtype if dtype == "*" else _dtype(row, "dtype"),
        compute=row.real("compute", unknown=True),
        memory=row.real("memory", unknown=True),
        t0_ns=row.real("t0_ns", unknown=True, zero=True),
        provenance=row.text("provenance"),
        samples=row.count("samples", default=-1, unknown=True),
        mape=row.real("mape", default=nan, unknown=True, zero=True),
    )
    row.close()
    return efficiency


def _systolic(row: TableReader, known: set[str]) -> SystolicArray:
    array = SystolicArray(
        rows=row.count("rows"),
        columns=row.count("columns"),
        arrays=row.count("arrays"),
        clock_hz=row.real("clock_hz", unknown=True),
        dataflow=row.choice("dataflow", ("os", "ws", "is")),
        source=_source(row, known),
    )
    row.close()
    return array


def _check(root: TableReader, device: Device) -> None:
    """What single rows cannot show: exactly one main memory, some rate, no row stated twice."""
    main = sum(memory.level == "main" for memory in device.memories)
    if main != 1:
        hint = (
            "level = 'main' is the memory that programs and their data lie in; others are 'cache' or the like"
        )
        raise root.fault("memories", f"expected exactly one row of level 'main', got {main}", hint=hint)
    if not any(peak.density == "dense" for peak in device.peaks):
        hint = "add the rate without sparsity, of any unit and element type: density = 'dense'"
        raise root.fault("peaks", "expected at least one dense peak", hint=hint)
    _unique(root, "peaks", ((p.unit, p.dtype, p.rhs_dtype, p.accumulator, p.density) for p in device.peaks))
    _unique(root, "memories", ((memory.name,) for memory in device.memories))
    _unique(root, "links", ((link.kind, link.name) for link in device.links))
    _unique(root, "efficiencies", ((row.op_class, row.dtype) for row in device.efficiencies))
    if device.fits_of and not has_shipped_fits(device.fits_of):
        hint = f"leave it out, or name one of {', '.join(devices_with_fits())}"
        raise root.fault("fits_of", f"no fits ship for a device '{clipped(device.fits_of)}'", hint=hint)


def _unique(root: TableReader, name: str, keys: Iterable[tuple[str, ...]]) -> None:
    seen: dict[tuple[str, ...], int] = {}
    for index, key in enumerate(keys):
        if key in seen:
            shown = " ".join(part for part in key if part)
            stated = f"'{clipped(shown)}' is stated already in {name}[{seen[key]}]"
            raise root.fault(f"{name}[{index}]", stated, hint="keep one of the two rows")
        seen[key] = index
