"""Look-up of devices, by the name or alias of a shipped file or by the path of a user's file."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from hespas.files.limits import limits
from hespas.files.streams import STANDARD_STREAM, read_document
from hespas.files.trust import file_in_folder_of
from hespas.files.user_folders import config_folder
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware.device_fits import Fit, devices_with_fits, has_shipped_fits, shipped_fits
from hespas.hardware.devices import Device, read_device

__all__ = [
    "DATA_FOLDER",
    "IMC_FOLDER",
    "DeviceIndex",
    "all_device_names",
    "canonical_name",
    "check_file_name",
    "device_files",
    "device_names",
    "find_device",
    "fits_of_user",
    "index_folder",
    "is_path",
    "link_target",
    "load_device",
    "named_device",
    "own_device_file",
    "own_file",
    "own_names",
    "resolve_reference",
]


DATA_FOLDER = Path(__file__).parent / "data"
IMC_FOLDER = Path(__file__).parent / "imc"
"""Files of published in-memory-computing chips, separate from the devices that tables of runs name."""

_THIS_MACHINE = frozenset({"cpu", "host", "thiscpu", "localhost", "local", "x86", "x8664"})

_ALIASES = re.compile(r"^aliases\s*=\s*\[.*?\]", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class DeviceIndex:
    """Names and aliases of the device files in a folder. ``owner`` maps spellings (without case and
    punctuation) to canonical names.
    """

    folder: Path
    names: tuple[str, ...]
    owner: dict[str, str]

    def known(self, query: str) -> str:
        """Return the canonical name of a device; empty for an unknown one. Known and unknown names take the
        same time.
        """
        return self.owner.get(_fold_spelling(query), "")

    def find(self, query: str) -> str:
        """Return the canonical name of a device; case and punctuation do not matter.

        Raises ``UsageError`` for an unknown name, or a prefix of several names.
        """
        if name := self.known(query):
            return name
        folded = _fold_spelling(query)
        candidates = [name for name in self.names if folded and _fold_spelling(name).startswith(folded)]
        if len(candidates) > 1:
            raise UsageError(
                f"device '{clipped(query)}' is ambiguous", hint=f"use one of {', '.join(candidates)}"
            )
        if folded in _THIS_MACHINE:
            raise UsageError(
                f"no device '{clipped(query)}': CPUs differ",
                hint="measure this CPU: hespas hardware measure --out this-cpu.toml, then --hardware "
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
    """Return the device with a name or alias, or the device in a file. Only one file is decoded.

    A path is anything that ends in ``.toml``, contains a path separator, or is a ``PathLike``. Names are
    those of shipped devices and of files in the user's folder ``devices``
    (:func:`hespas.files.user_folders.config_folder`). Use it only for names and paths that the user gave, on
    a command line or in a call; :func:`resolve_reference` resolves references in files. Raises ``UsageError``
    for an unknown or ambiguous name, ``FormatError`` for a file that is not a device, or is not named after
    its device.
    """
    path = own_device_file(name_or_path)
    if path is None:
        return named_device(os.fspath(name_or_path))
    if is_path(name_or_path):
        return read_device(path)
    device = read_device(link_target(path))
    check_file_name(path, device.name)
    return device


def own_file(
    name_or_path: str | os.PathLike[str], shipped: DeviceIndex, folder_name: Literal["devices", "systems"]
) -> Path | None:
    """Return the file of a user's own device or system: a path, or the name of a file in the user's
    configuration folder; None for any other name.

    Raises ``UsageError`` if such a file has the name of a shipped one.
    """
    text = os.fspath(name_or_path)
    if is_path(name_or_path):
        return Path(text)
    own = _own_index(folder_name)
    name = own.known(text)
    if name and shipped.known(text):
        raise UsageError(
            f"'{clipped(text)}' names a {folder_name[:-1]} that ships with Hespas, and a file",
            path=str(own.folder / f"{name}.toml"),
            hint="rename the file and its aliases",
        )
    return own.folder / f"{name}.toml" if name else None


def own_device_file(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Return the file of a user's own device (see :func:`own_file`)."""
    imc = index_folder(IMC_FOLDER)
    is_imc = not is_path(name_or_path) and imc.known(os.fspath(name_or_path))
    return own_file(name_or_path, imc if is_imc else index_folder(DATA_FOLDER), "devices")


def is_path(name_or_path: str | os.PathLike[str]) -> bool:
    """Return True if a user's text for a device or a system is the path of a file and not a name."""
    text = os.fspath(name_or_path)
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return (
        not isinstance(name_or_path, str)
        or text == STANDARD_STREAM
        or text.endswith(".toml")
        or any(s in text for s in separators)
    )


def resolve_reference(file: Path, text: str, position: str) -> str:
    """Return the device or system to which the ``text`` in ``file`` refers: a name, or a path in the folder
    of ``file``.

    Raises ``BoundaryError`` for a path outside of that folder.
    """
    return str(file_in_folder_of(file, text, position)) if is_path(text) else text


def device_files(name_or_path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the files of a user's device and of its learned models; empty for a name, whose files ship with
    the package. Raises the errors of :func:`load_device`.
    """
    path = own_device_file(name_or_path)
    if path is None:
        return ()
    cards = map(Path, load_device(name_or_path).learned_models)
    return (path, *(file for card in cards for file in (card, card.with_suffix(".npz"))))


def named_device(spelling: str) -> Device:
    """Return the shipped device that an input file names, by name or alias. The name is never opened as a
    path.

    Raises ``UsageError`` for an unknown or ambiguous name.
    """
    name = find_device(spelling)
    return _shipped(IMC_FOLDER if name in index_folder(IMC_FOLDER).names else DATA_FOLDER, name)


@lru_cache(maxsize=64)
def _shipped(folder: Path, name: str) -> Device:
    """Return a shipped device. It is decoded once and cached, because rows of a table repeat the same names.

    Raises ``FormatError`` if its name differs from the name of its file.
    """
    path = folder / f"{name}.toml"
    device = read_device(path)
    check_file_name(path, device.name)
    return replace(device, fits_of=name) if has_shipped_fits(name) and not device.fits_of else device


def find_device(name: str) -> str:
    """Return the canonical name of a shipped device, from any of its names. Raises ``UsageError``."""
    canonical = _names_by_fold().get(_fold_spelling(name)) or index_folder(IMC_FOLDER).known(name)
    return canonical or index_folder(DATA_FOLDER).find(name)


@cache
def _names_by_fold() -> dict[str, str]:
    return {_fold_spelling(device): device for device in device_names()}


def canonical_name(name: str) -> str:
    """Return the canonical name of the device that an input file names; empty if no device has the name.
    Results are cached, because tables repeat names.
    """
    return index_folder(DATA_FOLDER).known(name)


@cache
def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices, sorted; a device's file is its name with ``.toml``. They are
    the same for all users; :func:`all_device_names` has in-memory-computing chips and the user's devices too.
    """
    return tuple(sorted(path.stem for path in DATA_FOLDER.glob("*.toml")))


def all_device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices, of the shipped in-memory-computing chips, then of the user's
    devices, each sorted.
    """
    return (*device_names(), *index_folder(IMC_FOLDER).names, *own_names("devices"))


def own_names(folder_name: Literal["devices", "systems"]) -> tuple[str, ...]:
    """Return the names of the device or system files in the user's configuration folder, sorted."""
    return _own_index(folder_name).names


@cache
def index_folder(folder: Path) -> DeviceIndex:
    """Return the index of a folder of the package (see :func:`_indexed`)."""
    return _indexed(folder)


def _own_index(folder_name: Literal["devices", "systems"]) -> DeviceIndex:
    """Return the index of a folder of the user, which may change at any time."""
    return _indexed(config_folder(folder_name))


def _indexed(folder: Path) -> DeviceIndex:
    """Return the index of a folder of device or system files, without entries if it does not exist.

    Raises ``FormatError`` for a file that cannot be read, and with both files if two files have the same name
    or alias.
    """
    owner: dict[str, str] = {}
    # A folder without permission is as one that does not exist.
    files = folder.glob("*.toml") if os.path.isdir(folder) else ()  # noqa: PTH112
    names = tuple(sorted(path.stem for path in files))
    for name in names:
        path = folder / f"{name}.toml"
        for spelling in (name, *_aliases_in(path)):
            other = owner.setdefault(_fold_spelling(spelling), name)
            if other != name:
                raise FormatError(
                    f"'{spelling}' already names {other} ({folder / other}.toml)",
                    path=str(path),
                    position="aliases",
                    hint="remove it from one of the files",
                )
    return DeviceIndex(folder, names, owner)


def _aliases_in(path: Path) -> list[str]:
    """Return the aliases in a device or system file. Only their list is decoded: whole files would cost ten
    times as much.
    """
    content = read_document(link_target(path), limits().device_bytes, "a device or system file")
    match = _ALIASES.search(content.decode("utf-8", "replace"))
    try:
        aliases: list[object] = tomllib.loads(match.group())["aliases"] if match else []
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"not TOML: {error}", path=str(path), position="aliases") from error
    names = [alias for alias in aliases if isinstance(alias, str)]
    if len(names) < len(aliases):
        hint = 'write texts: aliases = ["my-gpu"]'
        raise FormatError("are not texts", path=str(path), position="aliases", hint=hint)
    return names


def link_target(path: Path) -> Path:
    """Return the file to which a link in the user's folder leads: any file, also if inputs are untrusted."""
    return Path(os.path.realpath(path))


def check_file_name(path: Path, name: str) -> None:
    """Raise ``FormatError`` if a file in a folder of devices or systems is not named after its content."""
    if name != path.stem:
        raise FormatError(
            f"is {name!r} in a file named {path.name}",
            path=str(path),
            position="name",
            hint=f"rename the file to {name}.toml, or change the name in it",
        )


def _fold_spelling(name: str) -> str:
    """Return a spelling without case and punctuation: ``A100-SXM-40GB`` and ``a100_sxm 40gb`` are equal."""
    return "".join(character for character in name.casefold() if character.isalnum())


def fits_of_user(device: Device) -> tuple[Fit, ...]:
    """Return the fits in a device's own file that do not ship with the package, for this or another device.
    They must be kept if the file is rewritten.
    """
    if not device.own_fits:
        return ()
    shipped = _shipped_identities()
    return tuple(fit for fit in device.own_fits if _identity(fit) not in shipped)


@cache
def _shipped_identities() -> frozenset[tuple[object, ...]]:
    """Return the identities of all shipped fits. A device file can have copies of the fits of the device in
    its ``fits_of``.
    """
    return frozenset(_identity(fit) for name in devices_with_fits() for fit in shipped_fits(name))


def _identity(fit: Fit) -> tuple[object, ...]:
    values = tuple((entry.name, entry.value) for entry in fit.parameters)
    return (*fit.key, fit.form, fit.samples, fit.table, values)
