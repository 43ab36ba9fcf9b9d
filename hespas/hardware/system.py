"""Systems: a device type, the networks that connect devices, and the TOML files that define them.

The number of a device is a mixed-radix number over the dimensions of the system, the innermost fastest: with
eight devices per node, device 11 is device 3 of node 1. Every figure is per device and in base units, and has
a source.

Keys of a system file: ``name``, ``description``, ``device``, ``aliases``, ``placement``, ``max_devices``,
``dimensions`` (a list of tables, innermost first) and ``sources``, a table of texts that the ``source`` of
every row refers to. Unknown keys are errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from math import isnan, nan, prod
from pathlib import Path
from typing import Annotated, Literal, cast

from msgspec import Meta, structs

from hespas.graph.errors import UsageError, clipped
from hespas.hardware.library import (
    canonical_name,
    check_file_name,
    index_folder,
    is_path,
    link_target,
    own_file,
    own_names,
)
from hespas.hardware.typed_toml import (
    Count,
    CountOrUnknown,
    FigureSource,
    FileKind,
    NotNegativeOrNan,
    Positive,
    PositiveOrNan,
    Text,
    TomlRow,
    check_source_keys,
    read_rows,
    refuse_repeats,
    scalar,
    toml_error,
)

__all__ = [
    "SYSTEMS_FOLDER",
    "Dimension",
    "DimensionTopology",
    "Placement",
    "System",
    "all_system_names",
    "load_system",
    "own_system_file",
    "read_system",
    "system_names",
    "system_to_toml",
]


DimensionTopology = Literal["ring", "fully_connected", "switch"]
"""Topologies of one dimension; a torus is several rings."""

Placement = Literal["fill", "even"]
"""Placement of a job smaller than the system: inner dimensions full before outer ones (nodes), or dimensions
as equal as possible (slices of a torus).
"""

_ANY = -1

_MOST_DEVICES = 1 << 24


_Size = Annotated[
    int,
    Meta(
        ge=_ANY,
        le=_MOST_DEVICES,
        description="a positive whole number or -1 (as many as a job needs)",
        extra={"remedy": "write it as 8; -1 where the job decides", "within": bool},
    ),
]

_Ratio = Annotated[float, Meta(ge=1, le=1e6, description="a number that is 1 or more")]


class Dimension(TomlRow, frozen=True, kw_only=True):
    """One level of the network.

    ``bandwidth_bytes_per_s`` is the rate at which a device sends, in one direction, over all
    ``links_per_device`` links together. ``down_bandwidth_bytes_per_s`` is the rate at which it receives, if
    it differs. ``latency_ns`` is the latency from device to device: one hop of a ring, both hops of a switch.
    ``size`` is the maximum number of members (-1: no limit).

    A ring is a line if its size is not a multiple of ``closes_at``, or if its slice has fewer than
    ``closes_from`` devices. If all devices send into the dimension, each gets its bandwidth divided by
    ``oversubscription``. ``devices_per_nic`` devices share a network interface. A device that sends alone
    gets the whole interface. ``reduction`` names the in-network reduction, ``reduction_share`` the fraction
    of the bandwidth that it reaches.
    """

    name: Text
    topology: DimensionTopology
    size: _Size
    bandwidth_bytes_per_s: Positive
    latency_ns: NotNegativeOrNan
    links_per_device: CountOrUnknown
    source: Text
    latency_source: Text
    down_bandwidth_bytes_per_s: PositiveOrNan = nan
    closes_at: Count = 1
    closes_from: Count = 1
    closes_source: Text = ""
    oversubscription: _Ratio = 1.0
    oversubscription_source: Text = ""
    devices_per_nic: Count = 1
    reduction: Text = ""
    reduction_share: PositiveOrNan = nan
    reduction_source: Text = ""
    note: Text = ""

    @property
    def received_bytes_per_s(self) -> float:
        """Return the receiving rate of a device, one direction, all its links together."""
        down = self.down_bandwidth_bytes_per_s
        return self.bandwidth_bytes_per_s if isnan(down) else down

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth of one link in one direction; NaN if the number of links is unknown."""
        return self.bandwidth_bytes_per_s / self.links_per_device if self.links_per_device > 0 else nan

    def is_closed(self, devices: int) -> bool:
        """Return True if a ring dimension is closed (and not a line) in a slice of ``devices`` devices."""
        return self.size % self.closes_at == 0 and devices >= self.closes_from


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Devices and the network dimensions between them, innermost first. ``device`` is the name of a device
    file (empty: any device).

    ``devices`` is the number of devices of a job (-1: not known yet, see :meth:`sized`). ``max_devices`` is
    the maximum (-1: only limited by the dimensions).
    """

    name: str
    description: str
    device: str
    aliases: tuple[str, ...]
    placement: Placement
    max_devices: int
    dimensions: tuple[Dimension, ...]
    sources: tuple[FigureSource, ...]
    devices: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the network dimensions, innermost first; -1 if the job decides."""
        return tuple(dimension.size for dimension in self.dimensions)

    @property
    def most(self) -> int:
        """Maximum number of devices that a job can use; -1 without a limit."""
        bounds = [] if _ANY in self.shape else [prod(self.shape)]
        return min(bounds + [self.max_devices] * (self.max_devices > 0), default=_ANY)

    def source_text(self, key: str) -> str:
        """Return the text of a source, by its key in the system file. Raises ``KeyError`` for a key that the
        system does not have.
        """
        return {source.key: source.text for source in self.sources}[key]

    def sized(self, devices: int | Sequence[int]) -> System:
        """Return the part of the system that a job uses: a number of devices, or the sizes of the dimensions.

        The outermost dimension in use may be partially filled. Raises ``UsageError`` if the system has fewer
        devices, or a torus has no slice of that size.
        """
        if isinstance(devices, int):
            count, shape = devices, self._shape_of(devices)
        else:
            shape = tuple(devices) + (1,) * (len(self.dimensions) - len(devices))
            count = prod(shape)
            self._check_shape(shape, count)
        sized = [
            structs.replace(dimension, size=size)
            for dimension, size in zip(self.dimensions, shape, strict=True)
        ]
        return replace(self, dimensions=tuple(sized), devices=count)

    def _shape_of(self, devices: int) -> tuple[int, ...]:
        if not 1 <= devices <= (self.most if self.most > 0 else _MOST_DEVICES):
            raise self._refused(devices)
        if self.placement == "fill":
            left, filled = devices, list[int]()
            for dimension in self.dimensions:
                size = left if dimension.size == _ANY else min(left, dimension.size)
                filled.append(size)
                left = -(-left // size)
            return tuple(filled)
        if _ANY not in self.shape and prod(self.shape) == devices:
            return self.shape
        shapes = [shape for shape in _factors(devices, len(self.dimensions)) if self._holds(shape)]
        if not shapes:
            near = next(
                count
                for count in range(devices, 0, -1)
                if any(self._holds(shape) for shape in _factors(count, len(self.dimensions)))
            )
            raise UsageError(
                f"{self.name} has no slice of {devices:,} devices",
                hint=f"use {near} devices, or a shape such as 4x4x8",
            )
        return min(shapes, key=lambda shape: (not self._closes(shape), shape[-1], -shape[0]))

    def _holds(self, shape: Sequence[int]) -> bool:
        return all(most == _ANY or size <= most for size, most in zip(shape, self.shape, strict=True))

    def _closes(self, shape: Sequence[int]) -> bool:
        """Return True if all rings of a slice with these dimension sizes are closed."""
        closed = (
            structs.replace(dimension, size=size).is_closed(prod(shape))
            for dimension, size in zip(self.dimensions, shape, strict=True)
        )
        return all(closed)

    def _check_shape(self, shape: tuple[int, ...], count: int) -> None:
        text = "x".join(map(str, shape))
        if len(shape) > len(self.dimensions) or min(shape) < 1:
            names = ", ".join(dimension.name for dimension in self.dimensions)
            hint = f"give one size for each of {names}, innermost first"
            raise UsageError(f"{text} is not a shape of {self.name}", hint=hint)
        for dimension, size in zip(self.dimensions, shape, strict=True):
            if dimension.size != _ANY and size > dimension.size:
                largest = "x".join("any" if most == _ANY else str(most) for most in self.shape)
                raise UsageError(
                    f"{self.name} joins at most {dimension.size:,} devices by {dimension.name}, not {size:,}",
                    hint=f"use a shape up to {largest}",
                )
        if count > (self.most if self.most > 0 else _MOST_DEVICES):
            raise self._refused(count)

    def _refused(self, devices: int) -> UsageError:
        most = self.most if self.most > 0 else _MOST_DEVICES
        return UsageError(
            f"{self.name} has 1 to {most:,} devices, not {devices:,}",
            hint="choose a size or a system from `hespas hardware list`",
        )


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``number`` as a product of ``parts`` ascending factors."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, int(number ** (1 / parts)) + 2):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, parts - 1) if rest[0] >= first)


SYSTEMS_FOLDER = Path(__file__).parent / "systems"

_SYSTEM_FILE = FileKind(
    "a system file",
    where="check the path; `hespas hardware list` names the systems",
    example="`hespas hardware system dgx-h100` prints a whole file to start from",
)


class _SystemFile(TomlRow, frozen=True, kw_only=True):
    name: Text
    description: Text
    device: str = ""
    aliases: tuple[Text, ...] = ()
    placement: Placement = "fill"
    max_devices: CountOrUnknown = -1
    dimensions: tuple[Dimension, ...]
    sources: dict[str, Text]


def read_system(path: Path) -> System:
    """Return the system that a file describes. Raises ``FormatError`` with file, key path and expectation."""
    table, file = read_rows(path, _SystemFile, _SYSTEM_FILE)
    if not file.dimensions:
        hint = "add a row for each level of the network, innermost first"
        raise toml_error(path, "dimensions", "expected at least one dimension", hint)
    rows = cast("list[dict[str, object]]", table["dimensions"])
    for index, (dimension, row) in enumerate(zip(file.dimensions, rows, strict=True)):
        where = f"dimensions[{index}]."
        check_source_keys(row, where, file.sources, path)
        _check_dimension(dimension, row, where, path)
        if dimension.size < 0 and file.placement == "fill" and index + 1 < len(file.dimensions):
            wrong = "only the outermost dimension may be unbounded: inner dimensions need a size"
            raise toml_error(path, f"{where}size", wrong, "write it as 8")
    refuse_repeats(path, "dimensions", ((dimension.name,) for dimension in file.dimensions))
    if file.device and not canonical_name(file.device):
        hint = "`hespas hardware list` names them; remove the key if the device is given elsewhere"
        raise toml_error(path, "device", f"no device '{clipped(file.device)}'", hint)
    values = {name: getattr(file, name) for name in file.__struct_fields__ if name != "sources"}
    sources = tuple(FigureSource(key=key, text=text) for key, text in file.sources.items())
    return System(**values, sources=sources)


_SOURCED = {
    "reduction": "reduction_source",
    "oversubscription": "oversubscription_source",
    "closes_at": "closes_source",
}
"""Optional figures, and the keys of their sources."""


def _check_dimension(dimension: Dimension, row: Mapping[str, object], where: str, path: Path) -> None:
    for name, key in _SOURCED.items():
        if (name in row) != (key in row):
            missing = key if name in row else name
            hint = f"state {name} and {key}, or neither; {_SYSTEM_FILE.example}"
            raise toml_error(
                path, where + missing, "missing key: the figure and its source go together", hint
            )
    if bool(dimension.reduction) == isnan(dimension.reduction_share):
        hint = 'write both, as reduction = "NVLS", reduction_share = 0.85, or neither'
        raise toml_error(path, f"{where}reduction_share", "a reduction and its share go together", hint)
    if dimension.topology != "switch" and dimension.links_per_device < 1:
        hint = "write 2 for a ring with links in both directions, or 7 for eight fully connected devices"
        raise toml_error(
            path, f"{where}links_per_device", "expected the number of links that share the bandwidth", hint
        )
    if dimension.topology != "ring" and ("closes_at" in row or "closes_from" in row):
        raise toml_error(path, f"{where}closes_at", "only a ring closes", "leave it out")


def system_names() -> tuple[str, ...]:
    """Return the names of the shipped systems, sorted; a system's file is its name with ``.toml``."""
    return index_folder(SYSTEMS_FOLDER).names


def all_system_names() -> tuple[str, ...]:
    """Return the names of the shipped systems, then of the user's, each sorted."""
    return (*system_names(), *own_names("systems"))


def own_system_file(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Return the file of a user's own system (see :func:`hespas.hardware.library.own_file`)."""
    return own_file(name_or_path, index_folder(SYSTEMS_FOLDER), "systems")


def load_system(name_or_path: str | os.PathLike[str]) -> System:
    """Return the system with a name or alias, or the system in a file. Its number of devices is not set yet
    (see :meth:`System.sized`).

    A path is anything that ends in ``.toml``, contains a path separator, or is a ``PathLike``. Names are
    those of shipped systems and of files in the user's folder ``systems``. Raises ``UsageError`` for an
    unknown name, ``FormatError`` for a file that is not a system, or is not named after its system.
    """
    text, index = os.fspath(name_or_path), index_folder(SYSTEMS_FOLDER)
    path = own_system_file(name_or_path)
    if path is not None and is_path(name_or_path):
        return read_system(path)
    if path is not None:
        system = read_system(link_target(path))
        check_file_name(path, system.name)
        return system
    name = index.known(text)
    if not name:
        close = get_close_matches(text.casefold(), index.names, n=4, cutoff=0.4)
        listed = f"{', '.join(close)}?" if close else f"one of {', '.join(index.names)}."
        raise UsageError(
            f"no system '{clipped(text)}'", hint=f"{listed} Or give the path of a system file (.toml)"
        )
    return _shipped(name)


@cache
def _shipped(name: str) -> System:
    path = SYSTEMS_FOLDER / f"{name}.toml"
    system = read_system(path)
    check_file_name(path, system.name)
    return system


_DEFAULTS = dict(
    zip(reversed(Dimension.__struct_fields__), reversed(Dimension.__struct_defaults__), strict=False)
)


def system_to_toml(system: System) -> str:
    """Return the text of a system file that reads back as the same system. The sizes of a sized system are
    included.
    """
    lines = [f"{name} = {scalar(getattr(system, name))}" for name in ("name", "description", "device")]
    lines.append(f"aliases = [{', '.join(map(scalar, system.aliases))}]")
    lines.append(f"placement = {scalar(system.placement)}")
    lines.append(f"max_devices = {system.max_devices}")
    rows: list[str] = []
    for dimension in system.dimensions:
        pairs = structs.asdict(dimension).items()
        shown = [(name, value) for name, value in pairs if repr(value) != repr(_DEFAULTS.get(name))]
        rows.append("  { " + ", ".join(f"{name} = {scalar(value)}" for name, value in shown) + " },")
    lines += ["", "dimensions = [", *rows, "]"]
    lines += ["", "[sources]", *(f"{scalar(s.key)} = {scalar(s.text)}" for s in system.sources), ""]
    return "\n".join(lines)
