"""Systems"""

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

from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware.library import canonical, index_folder, is_path
from hespas.hardware.typed_toml import (
    Count,
    CountOrUnknown,
    FileKind,
    NotNegativeOrNan,
    Positive,
    PositiveOrNan,
    Row,
    Source,
    Text,
    check_source_keys,
    fault,
    read_rows,
    refuse_repeats,
    scalar,
)

__all__ = [
    "SYSTEMS_FOLDER",
    "Dimension",
    "DimensionTopology",
    "Placement",
    "System",
    "load_system",
    "read_system",
    "system_names",
    "system_to_toml",
]


DimensionTopology = Literal["ring", "fully_connected", "switch"]
"""How the devices of one dimension are joined; a torus is several rings."""

Placement = Literal["fill", "even"]
"""How a job smaller than the system lies in it: inner dimensions full before outer ones (nodes), or
dimensions as equal as can be (slices of a torus)."""

_ANY = -1

_MOST_DEVICES = 1 << 24


def _is_size(value: float) -> bool:
    return value != 0


_Size = Annotated[
    int,
    Meta(
        ge=_ANY,
        le=_MOST_DEVICES,
        description="a positive whole number or -1 (as many as a job needs)",
        extra={"remedy": "write it as 8; -1 where the job decides", "within": _is_size},
    ),
]

_Ratio = Annotated[float, Meta(ge=1, le=1e6, description="a number that is 1 or more")]


class Dimension(Row, frozen=True, kw_only=True):
    """One level of the network.

    ``bandwidth_bytes_per_s`` is what a device sends into it, one direction, all its ``links_per_device``
    together; ``down_bandwidth_bytes_per_s`` what it receives where that differs. ``latency_ns`` is from
    device to device: one hop of a ring, both hops of a switch. ``size`` is the most (-1: no bound).

    A ring whose size is no multiple of ``closes_at``, or in a slice of fewer than ``closes_from`` devices, is
    a line. Where all devices send into the dimension, each gets one ``oversubscription``-th of its bandwidth.
    ``devices_per_nic`` devices share an interface, which one that sends alone has to itself. ``reduction``
    names what adds in the network, ``reduction_share`` the share of the bandwidth that it reaches.
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
        """What a device receives, one direction, all its links together."""
        down = self.down_bandwidth_bytes_per_s
        return self.bandwidth_bytes_per_s if isnan(down) else down

    @property
    def link_bytes_per_s(self) -> float:
        """One direction of one link: NaN where their number is unknown."""
        return self.bandwidth_bytes_per_s / self.links_per_device if self.links_per_device > 0 else nan

    def is_closed(self, devices: int) -> bool:
        """Whether a ring of this size, in a slice of so many devices, comes back to where it began."""
        return self.size % self.closes_at == 0 and devices >= self.closes_from


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system as data. ``device`` names a device file (empty: whatever device is asked about), dimensions
    stand innermost first. ``devices`` is how many a job has (-1: not sized yet, see :meth:`sized`),
    ``max_devices`` the most that there are (-1: no bound beside that of the dimensions).
    """

    name: str
    description: str
    device: str
    aliases: tuple[str, ...]
    placement: Placement
    max_devices: int
    dimensions: tuple[Dimension, ...]
    sources: tuple[Source, ...]
    devices: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions, innermost first; -1 where the job decides."""
        return tuple(each.size for each in self.dimensions)

    @property
    def most(self) -> int:
        """The most devices that there can be; -1 without a bound."""
        bounds = [] if _ANY in self.shape else [prod(self.shape)]
        return min(bounds + [self.max_devices] * (self.max_devices > 0), default=_ANY)

    def source_text(self, key: str) -> str:
        """What a ``source`` stands for; raises ``KeyError`` for a key that the system does not have."""
        return {each.key: each.text for each in self.sources}[key]

    def sized(self, devices: int | Sequence[int]) -> System:
        """The part of the system that so many devices take; or with these sizes of its dimensions.

        Devices of the outermost dimension that is needed may be fewer than it holds. Raises ``UsageError``
        where the system has fewer, or a torus no slice of so many.
        """
        if isinstance(devices, int):
            count, shape = devices, self._shape_of(devices)
        else:
            shape = tuple(devices) + (1,) * (len(self.dimensions) - len(devices))
            count = prod(shape)
            self._check_shape(shape, count)
        sized = [structs.replace(each, size=size) for each, size in zip(self.dimensions, shape, strict=True)]
        return replace(self, dimensions=tuple(sized), devices=count)

    def _shape_of(self, devices: int) -> tuple[int, ...]:
        if not 1 <= devices <= (self.most if self.most > 0 else _MOST_DEVICES):
            raise self._refused(devices)
        if self.placement == "fill":
            return self._filled(devices)
        if _ANY not in self.shape and prod(self.shape) == devices:
            return self.shape
        shapes = [shape for shape in _factors(devices, len(self.dimensions)) if self._holds(shape)]
        if not shapes:
            raise UsageError(
                f"{self.name} has no slice of {devices:,} devices",
                hint=f"{self._near(devices)} devices, or a shape as 4x4x8",
            )
        return min(shapes, key=lambda shape: (not self._closes(shape), shape[-1], -shape[0]))

    def _filled(self, devices: int) -> tuple[int, ...]:
        left, shape = devices, list[int]()
        for each in self.dimensions:
            size = left if each.size == _ANY else min(left, each.size)
            shape.append(size)
            left = -(-left // size)
        return tuple(shape)

    def _holds(self, shape: Sequence[int]) -> bool:
        return all(most == _ANY or size <= most for size, most in zip(shape, self.shape, strict=True))

    def _closes(self, shape: Sequence[int]) -> bool:
        """Whether every dimension of a slice of this shape is a whole ring."""
        closed = (
            structs.replace(each, size=size).is_closed(prod(shape))
            for each, size in zip(self.dimensions, shape, strict=True)
        )
        return all(closed)

    def _near(self, devices: int) -> int:
        """The most devices below that a slice can have."""
        return next(
            count
            for count in range(devices, 0, -1)
            if any(self._holds(shape) for shape in _factors(count, len(self.dimensions)))
        )

    def _check_shape(self, shape: tuple[int, ...], count: int) -> None:
        given = "x".join(map(str, shape))
        if len(shape) > len(self.dimensions) or min(shape) < 1:
            names = ", ".join(each.name for each in self.dimensions)
            hint = f"one size for each of {names}, from the inside out"
            raise UsageError(f"{given} is no shape of {self.name}", hint=hint)
        for each, size in zip(self.dimensions, shape, strict=True):
            if each.size != _ANY and size > each.size:
                raise UsageError(
                    f"{self.name} joins at most {each.size:,} devices by {each.name}, not {size:,}",
                    hint=f"shapes up to {'x'.join('any' if s == _ANY else str(s) for s in self.shape)}",
                )
        if count > (self.most if self.most > 0 else _MOST_DEVICES):
            raise self._refused(count)

    def _refused(self, devices: int) -> UsageError:
        most = self.most if self.most > 0 else _MOST_DEVICES
        return UsageError(
            f"{self.name} has 1 to {most:,} devices, not {devices:,}",
            hint="`hespas hardware list` names systems and the most devices that each has",
        )


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Rising factors of a number, so many of them."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, int(number ** (1 / parts)) + 2):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, parts - 1) if rest[0] >= first)


SYSTEMS_FOLDER = Path(__file__).parent / "systems"

_ABOUT = FileKind(
    "a system file",
    where="check the path; `hespas hardware list` names the systems",
    example="`hespas hardware system dgx-h100` prints a whole file to start from",
)


class _SystemFile(Row, frozen=True, kw_only=True):
    name: Text
    description: Text
    device: str = ""
    aliases: tuple[Text, ...] = ()
    placement: Placement = "fill"
    max_devices: CountOrUnknown = -1
    dimensions: tuple[Dimension, ...]
    sources: dict[str, Text]


def read_system(path: Path) -> System:
    """The system a file describes. Raises ``FormatError`` naming file, key path and what was expected."""
    table, file = read_rows(path, _SystemFile, _ABOUT)
    if not file.dimensions:
        hint = "add a row for each level of the network, innermost first"
        raise fault(path, "dimensions", "expected at least one dimension", hint)
    rows = cast("list[dict[str, object]]", table["dimensions"])
    for index, (each, row) in enumerate(zip(file.dimensions, rows, strict=True)):
        where = f"dimensions[{index}]."
        check_source_keys(row, where, file.sources, path)
        _check_dimension(each, row, where, path)
        if each.size < 0 and file.placement == "fill" and index + 1 < len(file.dimensions):
            wrong = "only the outermost dimension has no bound: what is inside of others has a size"
            raise fault(path, f"{where}size", wrong, "write it as 8")
    refuse_repeats(path, "dimensions", ((each.name,) for each in file.dimensions))
    if file.device and not canonical(file.device):
        hint = "`hespas hardware list` names them; leave it out where the device is stated elsewhere"
        raise fault(path, "device", f"no device '{clipped(file.device)}'", hint)
    stated = {name: getattr(file, name) for name in file.__struct_fields__ if name != "sources"}
    sources = tuple(Source(key=key, text=text) for key, text in file.sources.items())
    return System(**stated, sources=sources)


_SOURCED = {
    "reduction": "reduction_source",
    "oversubscription": "oversubscription_source",
    "closes_at": "closes_source",
}
"""Optional figures, and the keys of their sources."""


def _check_dimension(each: Dimension, row: Mapping[str, object], where: str, path: Path) -> None:
    for name, key in _SOURCED.items():
        if (name in row) != (key in row):
            missing = key if name in row else name
            hint = f"state {name} and {key}, or neither; {_ABOUT.example}"
            raise fault(path, where + missing, "missing key: the figure and its source go together", hint)
    if bool(each.reduction) == isnan(each.reduction_share):
        hint = 'write both, as reduction = "NVLS", reduction_share = 0.85, or neither'
        raise fault(path, f"{where}reduction_share", "a reduction and its share go together", hint)
    if each.topology != "switch" and each.links_per_device < 1:
        hint = "2 for a ring of links both ways, or 7 among eight that are fully connected"
        raise fault(path, f"{where}links_per_device", "expected how many links share the bandwidth", hint)
    if each.topology != "ring" and ("closes_at" in row or "closes_from" in row):
        raise fault(path, f"{where}closes_at", "only a ring closes", "leave it out")


def system_names() -> tuple[str, ...]:
    """The shipped systems' names, sorted; a system's file is its name with ``.toml``."""
    return index_folder(SYSTEMS_FOLDER).names


def load_system(name_or_path: str | os.PathLike[str]) -> System:
    """The system of that name or alias, or the one in that file, not sized yet.

    A path is anything that ends in ``.toml``, holds a path separator, or is a ``PathLike``. Raises
    ``UsageError`` for an unknown name, ``FormatError`` for a file that is not a system.
    """
    text = os.fspath(name_or_path)
    if is_path(name_or_path):
        return read_system(Path(text))
    index = index_folder(SYSTEMS_FOLDER)
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
    if system.name != name:
        raise FormatError(
            f"is {system.name!r} in a file named {path.name}",
            path=str(path),
            position="name",
            hint="a shipped system is named as its file",
        )
    return system


def system_to_toml(system: System) -> str:
    """The text of a system file, which is read back as the same system; of a sized one with its sizes."""
    lines = [f"{name} = {scalar(getattr(system, name))}" for name in ("name", "description", "device")]
    lines.append(f"aliases = [{', '.join(map(scalar, system.aliases))}]")
    lines.append(f"placement = {scalar(system.placement)}")
    lines.append(f"max_devices = {system.max_devices}")
    lines += ["", "dimensions = [", *(f"  {_row(each)}," for each in system.dimensions), "]"]
    lines += ["", "[sources]", *(f"{scalar(each.key)} = {scalar(each.text)}" for each in system.sources), ""]
    return "\n".join(lines)


_DEFAULTS = dict(
    zip(reversed(Dimension.__struct_fields__), reversed(Dimension.__struct_defaults__), strict=False)
)


def _row(dimension: Dimension) -> str:
    """One inline table; what is as it is by default is left out."""
    pairs = structs.asdict(dimension).items()
    stated = [(name, value) for name, value in pairs if repr(value) != repr(_DEFAULTS.get(name))]
    return "{ " + ", ".join(f"{name} = {scalar(value)}" for name, value in stated) + " }"
