"""A device file: TOML, decoded into typed rows; unknown keys are faults.

Top level: what the device is, ``peaks``, ``memories``, ``links``, ``efficiencies``, ``fits`` (lists of
tables), ``systolic`` (a table), and ``sources``, a table of texts that every row's ``source`` refers to.
``learned_models`` lists cards of learned models by their paths, relative to the file and within its folder:
the only key that names files. A fault names file, key, expectation and remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import inf, isnan, nan
from pathlib import Path
from typing import Annotated, Any, cast

from msgspec import Meta, structs

from hespas.files.output import write_atomically
from hespas.files.trust import file_beside
from hespas.graph.columns import find_dtype
from hespas.graph.errors import OutputError, clipped
from hespas.hardware.model import (
    LINE_FORMS,
    Count,
    CountOrUnknown,
    Device,
    DeviceKind,
    Efficiency,
    Fit,
    FitBand,
    FitError,
    FitParameter,
    FitRange,
    Link,
    Memory,
    NotNegativeOrNan,
    Peak,
    Positive,
    PositiveOrNan,
    Row,
    Source,
    SubbyteStorage,
    SystolicArray,
    Text,
    parameter_fault,
)
from hespas.hardware.typed_toml import (
    FileKind,
    check_source_keys,
    fault,
    read_rows,
    refuse_repeats,
    scalar,
    unexpected,
)

__all__ = [
    "FITS_FOLDER",
    "device_to_toml",
    "devices_with_fits",
    "fit_row",
    "fits_to_toml",
    "has_shipped_fits",
    "read_device",
    "read_fits",
    "shipped_fits",
    "write_device",
]

_ABOUT = FileKind(
    "a device file",
    where="check the path; `hespas hardware list` names the devices",
    example="`hespas hardware show H100-SXM` prints a whole file to start from",
)
_CARDS = "put the folder of models beside the hardware file and name its cards: my-device.learned/matmul.json"
_MOST = 1e60
"""Beyond, products of parameters overflow."""
_REMEDY = "state it as name = [value, standard error], or fit again with hespas-validate calibrate"


class _FitRow(Row, frozen=True, kw_only=True):
    kind: Text
    op: str
    scheme: str
    variant: str
    form: Text
    default: bool = False
    samples: Count
    parameters: dict[
        str,
        Annotated[tuple[float, float], Meta(description="a list of 2 numbers", extra={"remedy": _REMEDY})],
    ]
    support: dict[str, tuple[float, float]]
    error: FitError
    bands: tuple[tuple[float, float, float], ...]
    table: Text
    provenance: Text
    fitted: Text
    seed: Annotated[
        float,
        Meta(
            ge=0,
            multiple_of=1,
            description="a whole number that is 0 or more",
            extra={"remedy": "write it as 0"},
        ),
    ]


class _FitsFile(Row, frozen=True, kw_only=True):
    fits: tuple[_FitRow, ...]


class _DeviceFile(Row, frozen=True, kw_only=True):
    sources: dict[str, Text]
    allow_sparse: bool = False
    name: Text
    vendor: Text
    family: Text
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
    fits: tuple[_FitRow, ...] = ()
    fits_of: Text = ""
    learned_models: tuple[Text, ...] = ()
    tdp_w: PositiveOrNan = nan
    tdp_source: Text = ""


def read_device(path: Path) -> Device:
    """The device a file describes. Raises ``FormatError`` naming file, key path and what was expected."""
    table, file = read_rows(path, _DeviceFile, _ABOUT)
    _check(file, table, path)
    fits = _fits(file.fits, path)
    stated = {name: getattr(file, name) for name in file.__struct_fields__ if name in _SAME}
    return Device(
        **stated,
        sources=tuple(Source(key=key, text=text) for key, text in file.sources.items()),
        own_fits=tuple(fit for fit in fits if fit.form not in LINE_FORMS),
        own_lines=tuple(fit for fit in fits if fit.form in LINE_FORMS),
        learned_models=_learned_models(file.learned_models, path),
    )


_SAME = frozenset(Device.__dataclass_fields__) - {"sources", "learned_models"}
"""What a device states in its file's own terms."""


def _learned_models(cards: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """Return the absolute paths of cards in the folder of the file, which are opened when they are used."""
    cards_by_target: dict[Path, str] = {}
    for index, card in enumerate(cards):
        where = f"learned_models[{index}]"
        if not card.endswith(".json") or "\0" in card:
            expected = f"expected the path of a card (.json), got {clipped(repr(card))}"
            raise fault(path, where, expected, _CARDS)
        place = file_beside(path, card, where)
        file_beside(path, f"{card.removesuffix('.json')}.npz", where)
        target = Path(os.path.realpath(place))
        if target in cards_by_target:
            raise fault(path, where, f"'{clipped(card)}' is stated already", "name each card once")
        cards_by_target[target] = os.path.normpath(place if place.is_absolute() else Path.cwd() / place)
    return tuple(cards_by_target.values())


def _check(file: _DeviceFile, table: Mapping[str, object], path: Path) -> None:
    """What types cannot show: sources and element types, one main memory, some rate, no row stated twice."""
    if not file.sources:
        hint = 'add [sources] and below it a key per source: vendor = "data sheet, title and date"'
        raise fault(path, "sources", "expected at least one source", hint)
    rows = {"": table} | ({} if file.systolic is None else {"systolic.": structs.asdict(file.systolic)})
    for name in ("peaks", "memories", "links", "efficiencies"):
        items = cast("list[dict[str, object]]", table.get(name, []))
        rows |= {f"{name}[{index}].": row for index, row in enumerate(items)}
    for where, row in rows.items():
        _check_sources(row, where, file.sources, path)
        for key in ("dtype", "rhs_dtype", "accumulator"):
            if key in row and (where.startswith("peaks") or row[key] != "*"):
                _check_dtype(cast("str", row[key]), where + key, path)
    for index, peak in enumerate(file.peaks):
        if peak.density == "sparse" and not file.allow_sparse:
            wrong = "a sparse peak counts multiplications by zero that are skipped; estimates use dense peaks"
            hint = "state the dense rate (half of a 2:4 sparse one); allow_sparse = true keeps it, unused"
            raise fault(path, f"peaks[{index}].density", wrong, hint)
    if not any(peak.density == "dense" for peak in file.peaks):
        hint = "add the rate without sparsity, of any unit and element type: density = 'dense'"
        raise fault(path, "peaks", "expected at least one dense peak", hint)
    _check_main(file, path)
    refuse_repeats(
        path, "peaks", ((p.unit, p.dtype, p.rhs_dtype, p.accumulator, p.density) for p in file.peaks)
    )
    refuse_repeats(path, "memories", ((memory.name,) for memory in file.memories))
    refuse_repeats(path, "links", ((link.kind, link.name) for link in file.links))
    refuse_repeats(path, "efficiencies", ((row.op_class, row.dtype) for row in file.efficiencies))
    if file.fits_of and not has_shipped_fits(file.fits_of):
        hint = f"leave it out, or name one of {', '.join(devices_with_fits())}"
        raise fault(path, "fits_of", f"no fits ship for a device '{clipped(file.fits_of)}'", hint)


def _check_main(file: _DeviceFile, path: Path) -> None:
    main = [index for index, memory in enumerate(file.memories) if memory.level == "main"]
    for index in main:
        rate = file.memories[index].bandwidth_bytes_per_s
        if isnan(rate):
            raise unexpected(rate, Positive, f"memories[{index}].bandwidth_bytes_per_s", path)
    if len(main) != 1:
        wrong = f"expected exactly one row of level 'main', got {len(main)}"
        hint = (
            "level = 'main' is the memory that programs and their data lie in; others are 'cache' or the like"
        )
        raise fault(path, "memories", wrong, hint)


_SOURCE_OF = {
    "energy_pj_per_flop": "energy_source",
    "energy_pj_per_byte": "energy_source",
    "tdp_w": "tdp_source",
}
"""Optional figures, and the keys of their sources: both are stated, or neither is."""


def _check_sources(row: Mapping[str, object], where: str, known: Mapping[str, str], path: Path) -> None:
    wanted = {_SOURCE_OF[name]: name for name in row if name in _SOURCE_OF}
    for name, figure in wanted.items():
        if name not in row:
            hint = f'add {name} = "..."; {_ABOUT.example}'
            raise fault(path, where + name, f"missing key: {figure} needs one", hint)
    for name in row:
        if name in _SOURCE_OF.values() and name not in wanted:
            hint = "leave it out, or state the figure too"
            raise fault(path, where + name, "the source of a figure that is not stated", hint)
    check_source_keys(row, where, known, path)


def _check_dtype(spelling: str, where: str, path: Path) -> None:
    entry = find_dtype(spelling)
    if entry is None:
        hint = "use MLIR's names: bf16, f8E4M3FN, i8"
        raise fault(path, where, f"unknown element type '{spelling}'", hint)
    if entry.name != spelling:
        raise fault(path, where, f"expected MLIR's spelling, got '{spelling}'", f"write '{entry.name}'")


# --- Fits as TOML: rows of a device file, and the files of fits that ship beside the devices

FITS_FOLDER = Path(__file__).parent / "fits"
"""One file per shipped device that has fits, by the device's name."""

_HEADER = """\
# Fitted parameters of {name}, made by `python -m tools.fits`. Written by a command: edits are lost.
# Each row names the table, its source and licence; errors are of shapes outside the fit.
"""


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
    return _fits(read_rows(path, _FitsFile, _ABOUT)[1].fits, path)


def _fits(rows: tuple[_FitRow, ...], path: Path) -> tuple[Fit, ...]:
    """The fits of a file; one of each class, of which lines of a systolic array are classes of their own."""
    fits = tuple(_fit(row, f"fits[{index}]", path) for index, row in enumerate(rows))
    refuse_repeats(path, "fits", ((*fit.key, fit.form in LINE_FORMS) for fit in fits))
    return fits


def _fit(row: _FitRow, where: str, path: Path) -> Fit:
    stated: dict[str, Any] = structs.asdict(row)
    stated["parameters"] = _parameters(row, f"{where}.parameters", path)
    stated["support"] = _support(row, f"{where}.support", path)
    stated["bands"] = _bands(row, f"{where}.bands", path)
    stated["seed"] = int(row.seed)
    return Fit(**stated)


def _parameters(row: _FitRow, where: str, path: Path) -> tuple[FitParameter, ...]:
    for name, (value, error) in row.parameters.items():
        if not abs(value) <= _MOST or error < 0:
            expected = "expected [value, standard error], a finite number and one that is 0 or more"
            raise fault(path, f"{where}.{name}", expected, _REMEDY)
    if not row.parameters:
        raise fault(path, where, "expected at least one parameter", _REMEDY)
    wrong = parameter_fault(row.form, {name: value for name, (value, _) in row.parameters.items()})
    if wrong:
        raise fault(path, f"{where}.{wrong[0]}", wrong[1], _REMEDY)
    stated = row.parameters.items()
    return tuple(FitParameter(name=name, value=value, std_error=error) for name, (value, error) in stated)


def _support(row: _FitRow, where: str, path: Path) -> tuple[FitRange, ...]:
    for name, (low, high) in row.support.items():
        if not low <= high:
            raise fault(path, f"{where}.{name}", "expected [least, most]", "write the smaller size first")
    return tuple(FitRange(name=name, low=low, high=high) for name, (low, high) in row.support.items())


def _bands(row: _FitRow, where: str, path: Path) -> tuple[FitBand, ...]:
    before = 0.0
    for index, (up_to_ns, low, high) in enumerate(row.bands):
        if not (up_to_ns > before and 0 <= low <= high):
            expected = "expected [up to ns (rising), low, high]"
            raise fault(path, f"{where}[{index}]", expected, "write it as [1e6, 0.9, 1.1]")
        before = up_to_ns
    if row.bands and before != inf:
        raise fault(path, where, "expected the last band to reach up to inf", "end with [inf, low, high]")
    return tuple(FitBand(up_to_ns=up_to_ns, low=low, high=high) for up_to_ns, low, high in row.bands)


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
    errors = structs.asdict(fit.error)
    if isnan(fit.error.before_mape):
        del errors["before_mape"]
    parts.append(f"error = {{ {', '.join(f'{name} = {value!r}' for name, value in errors.items())} }}")
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
    lines = [f"{name} = {scalar(getattr(device, name))}" for name in _SCALARS]
    lines.append(f"aliases = [{', '.join(scalar(alias) for alias in device.aliases)}]")
    if any(peak.density == "sparse" for peak in device.peaks):
        lines.append("allow_sparse = true")
    if device.tdp_source:
        lines += [f"tdp_w = {scalar(device.tdp_w)}", f"tdp_source = {scalar(device.tdp_source)}"]
    if device.fits_of:
        lines.append(f"fits_of = {scalar(device.fits_of)}")
    if device.learned_models:
        cards = (scalar(_relative(card, folder)) for card in device.learned_models)
        lines.append(f"learned_models = [{', '.join(cards)}]")
    for name in ("peaks", "memories", "links", "efficiencies"):
        rows: tuple[Row, ...] = getattr(device, name)
        if rows:
            lines += ["", f"{name} = [", *(f"  {_row(row)}," for row in rows), "]"]
    if fits := (*device.own_fits, *device.own_lines):
        lines += ["", "fits = [", *(f"  {fit_row(fit, scalar)}," for fit in fits), "]"]
    if device.systolic is not None:
        lines += ["", f"systolic = {_row(device.systolic)}"]
    lines += ["", "[sources]", *(f"{scalar(s.key)} = {scalar(s.text)}" for s in device.sources), ""]
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


def _row(row: Row) -> str:
    """One inline table; an empty optional text is left out, and so is an energy nobody states."""
    pairs = list(structs.asdict(row).items())
    unstated = {"energy_pj_per_flop", "energy_pj_per_byte"} if ("energy_source", "") in pairs else set[str]()
    stated = [(name, value) for name, value in pairs if value != "" and name not in unstated]
    return "{ " + ", ".join(f"{name} = {scalar(value)}" for name, value in stated) + " }"
