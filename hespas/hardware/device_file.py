"""A device file: TOML, checked key by key.

Top level: what the device is, ``peaks``, ``memories``, ``links``, ``efficiencies``, ``fits`` (lists of
tables), ``systolic`` (a table), and ``sources``, a table of texts that every row's ``source`` refers to.
``learned_models`` lists cards of learned models by their paths, relative to the file and within its folder:
the only key that names files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from math import inf, isfinite, nan
from pathlib import Path
from typing import get_args

from hespas.files.output import write_atomically
from hespas.graph.columns import find_dtype
from hespas.graph.errors import OutputError, clipped
from hespas.hardware.model import (
    LINE_FORMS,
    Density,
    Device,
    DeviceKind,
    Efficiency,
    Fit,
    FitBand,
    FitError,
    FitParameter,
    FitRange,
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
    parameter_fault,
)
from hespas.hardware.reader import TableReader, read_table

__all__ = [
    "FITS_FOLDER",
    "device_to_toml",
    "devices_with_fits",
    "fit_row",
    "fits_to_toml",
    "has_shipped_fits",
    "read_device",
    "read_fit",
    "read_fits",
    "shipped_fits",
    "unique_fits",
    "write_device",
]

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


# --- Fits as TOML: rows of a device file, and the files of fits that ship beside the devices

FITS_FOLDER = Path(__file__).parent / "fits"
"""One file per shipped device that has fits, by the device's name."""

_HEADER = """\
# Fitted parameters of {name}, made by `python -m tools.fits`. Written by a command: edits are lost.
# Each row names the table, its source and licence; errors are of shapes outside the fit.
"""
_MOST = 1e60
"""Beyond, products of parameters overflow."""
_REMEDY = "state it as name = [value, standard error], or fit again with hespas-validate calibrate"


def devices_with_fits() -> tuple[str, ...]:
    """The names of the devices that fits ship for, sorted."""
    return tuple(sorted(_shipped_names()))


def has_shipped_fits(name: str) -> bool:
    """Whether fits ship for a device of that name."""
    return name in _shipped_names()


@cache
def _shipped_names() -> frozenset[str]:
    return frozenset(path.stem for path in FITS_FOLDER.glob("*.toml"))


@cache
def shipped_fits(name: str) -> tuple[Fit, ...]:
    """The fits that ship for a device; read once."""
    return read_fits(FITS_FOLDER / f"{name}.toml")


def read_fits(path: Path) -> tuple[Fit, ...]:
    """A file of fits. Raises ``FormatError`` naming file, key path and what was expected."""
    root = read_table(path)
    fits = tuple(read_fit(row) for row in root.tables("fits"))
    root.close()
    unique_fits(root, fits)
    return fits


def unique_fits(root: TableReader, fits: tuple[Fit, ...]) -> None:
    """Raise ``FormatError`` for the second fit of one class; lines of a systolic array are classes of their
    own.
    """
    seen: dict[tuple[bool, tuple[str, str, str, str]], int] = {}
    for index, fit in enumerate(fits):
        key = fit.form in LINE_FORMS, fit.key
        if key in seen:
            stated = f"'{clipped(' '.join(fit.key))}' is stated already in fits[{seen[key]}]"
            raise root.fault(f"fits[{index}]", stated, hint="keep one of the two fits")
        seen[key] = index


def read_fit(row: TableReader) -> Fit:
    """One row. Raises ``FormatError``."""
    form = row.text("form")
    fit = Fit(
        kind=row.text("kind"),
        op=row.text("op", empty=True),
        scheme=row.text("scheme", empty=True),
        variant=row.text("variant", empty=True),
        form=form,
        default=row.flag("default", default=False),
        samples=row.count("samples"),
        parameters=_parameters(row, form),
        support=_support(row),
        error=_error(row),
        bands=_bands(row),
        table=row.text("table"),
        provenance=row.text("provenance"),
        fitted=row.text("fitted"),
        seed=_seed(row),
    )
    row.close()
    return fit


def _seed(row: TableReader) -> int:
    (seed,) = row.reals("seed", 1)
    if not (isfinite(seed) and seed == int(seed) and seed >= 0):
        raise row.fault("seed", "expected a whole number that is 0 or more", hint="write it as 0")
    return int(seed)


def _parameters(row: TableReader, form: str) -> tuple[FitParameter, ...]:
    table = _required(row, "parameters")
    found: list[FitParameter] = []
    for name in table.names():
        value, error = table.reals(name, 2, hint=_REMEDY)
        if not abs(value) <= _MOST or error < 0:
            expected = "expected [value, standard error], a finite number and one that is 0 or more"
            raise table.fault(name, expected, hint=_REMEDY)
        found.append(FitParameter(name=name, value=value, std_error=error))
    if not found:
        raise row.fault("parameters", "expected at least one parameter", hint=_REMEDY)
    fault = parameter_fault(form, {each.name: each.value for each in found})
    if fault:
        raise table.fault(*fault, hint=_REMEDY)
    return tuple(found)


def _support(row: TableReader) -> tuple[FitRange, ...]:
    table = _required(row, "support")
    found: list[FitRange] = []
    for name in table.names():
        low, high = table.reals(name, 2)
        if not low <= high:
            raise table.fault(name, "expected [least, most]", hint="write the smaller size first")
        found.append(FitRange(name=name, low=low, high=high))
    return tuple(found)


def _error(row: TableReader) -> FitError:
    table = _required(row, "error")
    (bias,) = table.reals("bias", 1)
    error = FitError(
        n=table.count("n", unknown=True),
        mape=table.real("mape", unknown=True, zero=True),
        median_ape=table.real("median_ape", unknown=True, zero=True),
        p90_ape=table.real("p90_ape", unknown=True, zero=True),
        bias=bias,
    )
    table.close()
    return error


def _bands(row: TableReader) -> tuple[FitBand, ...]:
    bands: list[FitBand] = []
    for values in row.real_rows("bands", 3):
        up_to_ns, low, high = values
        before = bands[-1].up_to_ns if bands else 0.0
        if not (up_to_ns > before and 0 <= low <= high):
            expected = "expected [up to ns (rising), low, high]"
            raise row.fault(f"bands[{len(bands)}]", expected, hint="write it as [1e6, 0.9, 1.1]")
        bands.append(FitBand(up_to_ns=up_to_ns, low=low, high=high))
    if bands and bands[-1].up_to_ns != inf:
        expected = "expected the last band to reach up to inf"
        raise row.fault("bands", expected, hint="end with [inf, low, high]")
    return tuple(bands)


def _required(row: TableReader, name: str) -> TableReader:
    table = row.table(name)
    if table is None:
        raise row.fault(name, "missing key", hint=f"add {name} = {{ ... }}; {_REMEDY}")
    return table


def fits_to_toml(name: str, fits: Iterable[Fit]) -> str:
    """The text of a file of fits of the device ``name``, ordered by class."""
    rows = [f"  {fit_row(fit, json.dumps)}," for fit in sorted(fits, key=lambda fit: fit.key)]
    return "\n".join((_HEADER.format(name=name) + "fits = [", *rows, "]", ""))


def fit_row(fit: Fit, quoted: Callable[[str], str]) -> str:
    """One fit as an inline table; ``quoted`` writes a text."""
    texts = [(name, getattr(fit, name)) for name in ("kind", "op", "scheme", "variant", "form")]
    parts = [f"{name} = {quoted(text)}" for name, text in texts]
    if fit.default:
        parts.append("default = true")
    parts.append(f"samples = {fit.samples}")
    pairs = ((each.name, each.value, each.std_error) for each in fit.parameters)
    parts.append(f"parameters = {_pairs(pairs, quoted)}")
    parts.append(f"support = {_pairs(((each.name, each.low, each.high) for each in fit.support), quoted)}")
    error = fit.error
    parts.append(
        f"error = {{ n = {error.n}, mape = {error.mape!r}, median_ape = {error.median_ape!r}, "
        f"p90_ape = {error.p90_ape!r}, bias = {error.bias!r} }}"
    )
    bands = ", ".join(f"[{band.up_to_ns!r}, {band.low!r}, {band.high!r}]" for band in fit.bands)
    parts.append(f"bands = [{bands}]")
    parts += [f"{name} = {quoted(getattr(fit, name))}" for name in ("table", "provenance", "fitted")]
    parts.append(f"seed = {fit.seed}")
    return "{ " + ", ".join(parts) + " }"


def _pairs(pairs: Iterable[tuple[str, float, float]], quoted: Callable[[str], str]) -> str:
    inner = ", ".join(f"{quoted(name)} = [{one!r}, {two!r}]" for name, one, two in pairs)
    return f"{{ {inner} }}" if inner else "{}"


# --- Writing a device file that :mod:`hespas.hardware.device_file` reads back unchanged

_SCALARS = (
    "name",
    "vendor",
    "family",
    "kind",
    "description",
    "units",
    "unit_name",
    "launch_overhead_ns",
    "launch_overhead_source",
    "subbyte_storage",
)


def device_to_toml(device: Device, *, folder: Path | None = None) -> str:
    """The text of a device file; every row on one line. Learned models are named relative to ``folder``,
    where the file will be; without one by their whole paths. Raises ``OutputError`` for one outside of it.
    """
    lines = [f"{name} = {_scalar(getattr(device, name))}" for name in _SCALARS]
    lines.append(f"aliases = [{', '.join(_scalar(alias) for alias in device.aliases)}]")
    if any(peak.density == "sparse" for peak in device.peaks):
        lines.append("allow_sparse = true")
    if device.tdp_source:
        lines += [f"tdp_w = {_scalar(device.tdp_w)}", f"tdp_source = {_scalar(device.tdp_source)}"]
    if device.fits_of:
        lines.append(f"fits_of = {_scalar(device.fits_of)}")
    if device.learned_models:
        cards = (_scalar(_relative(card, folder)) for card in device.learned_models)
        lines.append(f"learned_models = [{', '.join(cards)}]")
    for name in ("peaks", "memories", "links", "efficiencies"):
        rows: tuple[Peak | Memory | Link | Efficiency, ...] = getattr(device, name)
        if rows:
            lines += ["", f"{name} = [", *(f"  {_row(row)}," for row in rows), "]"]
    if fits := (*device.own_fits, *device.own_lines):
        lines += ["", "fits = [", *(f"  {fit_row(fit, _scalar)}," for fit in fits), "]"]
    if device.systolic is not None:
        lines += ["", f"systolic = {_row(device.systolic)}"]
    lines += ["", "[sources]", *(f"{_scalar(s.key)} = {_scalar(s.text)}" for s in device.sources), ""]
    return "\n".join(lines)


def write_device(device: Device, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write a device file at once or not at all. Raises ``OutputError`` if it exists, cannot be written, or
    would name learned models outside of its folder.
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
    place = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(card))
    if not real.is_relative_to(place):
        raise OutputError(
            "a hardware file names learned models within its own folder only",
            path=card,
            hint=f"copy the card and its trees to {place}, or leave the learned models out",
        )
    return real.relative_to(place).as_posix()


def _row(row: Peak | Memory | Link | Efficiency | SystolicArray) -> str:
    """One inline table; an empty optional text is left out, and so is an energy nobody states."""
    pairs = [(column.name, getattr(row, column.name)) for column in fields(row)]
    unstated = {"energy_pj_per_flop", "energy_pj_per_byte"} if ("energy_source", "") in pairs else set[str]()
    stated = [(name, value) for name, value in pairs if value != "" and name not in unstated]
    return "{ " + ", ".join(f"{name} = {_scalar(value)}" for name, value in stated) + " }"


def _scalar(value: str | float) -> str:
    """A TOML value. JSON's escapes are TOML's, except that TOML also wants DEL escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
