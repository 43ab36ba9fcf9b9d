"""Finding a device: by name or alias among the shipped files, or by the path of a user's own."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from hespas.files.streams import STANDARD_STREAM
from hespas.files.trust import file_beside
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware.device_fits import Fit, has_shipped_fits, shipped_fits
from hespas.hardware.devices import Device, read_device

__all__ = [
    "DATA_FOLDER",
    "DeviceIndex",
    "canonical",
    "device_files",
    "device_names",
    "find",
    "fits_of_user",
    "index_folder",
    "is_path",
    "load_device",
    "named_device",
    "stated_by",
]


DATA_FOLDER = Path(__file__).parent / "data"

_THIS_MACHINE = frozenset({"cpu", "host", "thiscpu", "localhost", "local", "x86", "x8664"})

_ALIASES = re.compile(r"^aliases\s*=\s*\[.*?\]", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class DeviceIndex:
    """Names and aliases of a folder of device files. ``owner`` maps folded spellings to canonical names."""

    folder: Path
    names: tuple[str, ...]
    owner: dict[str, str]

    def known(self, query: str) -> str:
        """The canonical name of a device; empty where none has that name. Unknown ones cost no more."""
        return self.owner.get(_fold(query), "")

    def find(self, query: str) -> str:
        """The canonical name of a device; case and punctuation do not matter.

        Raises ``UsageError`` for a name that several devices share the beginning of, or that none has.
        """
        if known := self.known(query):
            return known
        folded = _fold(query)
        candidates = [name for name in self.names if folded and _fold(name).startswith(folded)]
        if len(candidates) > 1:
            raise UsageError(
                f"device '{clipped(query)}' is ambiguous", hint=f"one of {', '.join(candidates)}"
            )
        if folded in _THIS_MACHINE:
            raise UsageError(
                f"no device '{clipped(query)}': every CPU is another",
                hint="measure this one: hespas hardware measure --out this-cpu.toml, then --hardware "
                "this-cpu.toml",
            )
        from difflib import get_close_matches

        close = get_close_matches(folded, self.owner, n=8, cutoff=0.5)
        suggestions = candidates or list(dict.fromkeys(self.owner[key] for key in close))[:4]
        listed = f"{', '.join(suggestions)}?" if suggestions else f"one of {', '.join(self.names)}."
        raise UsageError(
            f"no device '{clipped(query)}'", hint=f"{listed} Or give the path of a device file (.toml)"
        )


def load_device(name_or_path: str | os.PathLike[str]) -> Device:
    """The device of that name or alias, or the one in that file; only one file is decoded.

    A path is anything that ends in ``.toml``, holds a path separator, or is a ``PathLike``: only what the
    user wrote on a command line or in a call is loaded here; :func:`stated_by` resolves what a file states.
    Raises ``UsageError`` for an unknown or ambiguous name, ``FormatError`` for a file that is not a device.
    """
    text = os.fspath(name_or_path)
    return read_device(Path(text)) if is_path(name_or_path) else named_device(text)


def is_path(name_or_path: str | os.PathLike[str]) -> bool:
    """Whether what a user wrote for a device or a system is the path of a file, not a name."""
    text = os.fspath(name_or_path)
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return (
        not isinstance(name_or_path, str)
        or text == STANDARD_STREAM
        or text.endswith(".toml")
        or any(s in text for s in separators)
    )


def stated_by(file: Path, text: str, position: str) -> str:
    """Return the name, or the path in the folder of ``file``, of a device or system that ``file`` states.

    Raises ``BoundaryError`` for a path out of that folder.
    """
    return str(file_beside(file, text, position)) if is_path(text) else text


def device_files(name_or_path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The files that :func:`load_device` and the device's learned models come from; none for a name, whose
    files ship. Raises as it does.
    """
    if not is_path(name_or_path):
        return ()
    cards = map(Path, load_device(name_or_path).learned_models)
    return (Path(name_or_path), *(file for card in cards for file in (card, card.with_suffix(".npz"))))


def named_device(spelling: str) -> Device:
    """The shipped device of that name or alias, which comes from an input: never opened as a path.

    Raises ``UsageError`` for an unknown or ambiguous name.
    """
    return _shipped(DATA_FOLDER, find(spelling))


@lru_cache(maxsize=64)
def _shipped(folder: Path, name: str) -> Device:
    """A shipped device, decoded once: rows of a table and calls ask for the same ones again and again.

    Raises ``FormatError`` where it calls itself something other than its file.
    """
    path = folder / f"{name}.toml"
    device = read_device(path)
    if device.name != name:
        raise FormatError(
            f"is {device.name!r} in a file named {path.name}",
            path=str(path),
            position="name",
            hint="a shipped device is named as its file",
        )
    return replace(device, fits_of=name) if has_shipped_fits(name) and not device.fits_of else device


def find(name: str) -> str:
    """The canonical name of a shipped device, from any of its names. Raises ``UsageError``."""
    by_fold = {_fold(known): known for known in device_names()}
    return by_fold.get(_fold(name)) or index_folder(DATA_FOLDER).find(name)


def canonical(name: str) -> str:
    """The same for a name that an input states, of which there may be many: empty where no device has it."""
    return index_folder(DATA_FOLDER).known(name)


@cache
def device_names() -> tuple[str, ...]:
    """The shipped devices' names, sorted; a device's file is its name with ``.toml``."""
    return tuple(sorted(path.stem for path in DATA_FOLDER.glob("*.toml")))


@cache
def index_folder(folder: Path) -> DeviceIndex:
    """The index of a folder; reads each file's alias list only.

    Raises ``FormatError`` naming both files where two claim one spelling.
    """
    owner: dict[str, str] = {}
    names = tuple(sorted(path.stem for path in folder.glob("*.toml")))
    for name in names:
        path = folder / f"{name}.toml"
        for spelling in (name, *_aliases(path)):
            other = owner.setdefault(_fold(spelling), name)
            if other != name:
                raise FormatError(
                    f"'{spelling}' already names {other} ({folder / other}.toml)",
                    path=str(path),
                    position="aliases",
                    hint="one spelling names one device",
                )
    return DeviceIndex(folder, names, owner)


def _aliases(path: Path) -> list[str]:
    """The alias list alone: decoding every whole file to find one would cost ten times as much."""
    found = _ALIASES.search(path.read_text("utf-8"))
    if found is None:
        return []
    try:
        aliases: list[str] = tomllib.loads(found.group())["aliases"]
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"not TOML: {error}", path=str(path), position="aliases") from error
    return aliases


def _fold(name: str) -> str:
    """A spelling without case and punctuation: ``A100-SXM-40GB`` and ``a100_sxm 40gb`` are one."""
    return "".join(character for character in name.casefold() if character.isalnum())


def fits_of_user(device: Device) -> tuple[Fit, ...]:
    """The fits of a device's own file that do not ship with the package: files that are written anew hold
    those, too.
    """
    if not has_shipped_fits(device.name):
        return device.own_fits
    known = {_identity(fit) for fit in shipped_fits(device.name)}
    return tuple(fit for fit in device.own_fits if _identity(fit) not in known)


def _identity(fit: Fit) -> tuple[object, ...]:
    values = tuple((each.name, each.value) for each in fit.parameters)
    return (*fit.key, fit.form, fit.samples, fit.table, values)
