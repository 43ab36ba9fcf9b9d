"""A system file: TOML, decoded into typed rows; unknown keys are faults. Finding one by its name or path.

Top level: ``name``, ``description``, ``device``, ``aliases``, ``placement``, ``max_devices``, ``dimensions``
(a list of tables, innermost first) and ``sources``, a table of texts that every row's ``source`` refers to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from math import isnan
from pathlib import Path
from typing import cast

from msgspec import structs

from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware.library import canonical, index_folder, is_path
from hespas.hardware.model import CountOrUnknown, Row, Source, Text
from hespas.hardware.system_model import Dimension, Placement, System
from hespas.hardware.typed_toml import FileKind, check_source_keys, fault, read_rows, refuse_repeats, scalar

__all__ = ["SYSTEMS_FOLDER", "load_system", "read_system", "system_names", "system_to_toml"]

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
