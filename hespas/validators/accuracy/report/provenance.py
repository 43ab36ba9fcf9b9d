"""What a report was made from: files by their hash, versions, and the devices' figures with their source."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hespas import __version__
from hespas.files.streams import open_input
from hespas.hardware import Device

__all__ = ["FileFact", "Provenance", "provenance_of"]

_CHUNK = 1 << 20
_MOST_FILES = 1_000
_PACKAGES = ("numpy", "scipy", "jaxlib", "plotly")


@dataclass(frozen=True, slots=True)
class FileFact:
    """One input as the user named it, with its size and SHA-256 in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """``versions`` are of the programs, ``metadata`` what each profile says of itself (driver, framework),
    by its name; ``omitted`` counts files beyond those listed.
    """

    files: tuple[FileFact, ...] = ()
    devices: tuple[Device, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    omitted: int = 0


def provenance_of(
    inputs: Sequence[str] = (),
    devices: Sequence[Device] = (),
    metadata: Mapping[str, Mapping[str, str]] | None = None,
) -> Provenance:
    """Hash the inputs (files, or the files of folders; what is neither is left out) and ask for versions.

    Raises ``OSError`` where a file cannot be read.
    """
    files: list[tuple[str, Path]] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files.extend((f"{name}/{each.relative_to(path)}", each) for each in sorted(path.rglob("*")))
        else:
            files.append((name, path))
    existing = [(name, path) for name, path in files if path.is_file()]
    return Provenance(
        files=tuple(_fact(name, path) for name, path in existing[:_MOST_FILES]),
        devices=tuple(devices),
        versions=_versions(),
        metadata=metadata or {},
        omitted=max(len(existing) - _MOST_FILES, 0),
    )


def _fact(name: str, path: Path) -> FileFact:
    digest = hashlib.sha256()
    size = 0
    with open_input(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFact(name, size, digest.hexdigest())


def _versions() -> dict[str, str]:
    found = {"hespas": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
