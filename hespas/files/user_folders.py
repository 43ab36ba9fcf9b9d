"""Folders and defaults of the user, as in the XDG base directory specification.

``$XDG_CONFIG_HOME/hespas`` (``~/.config/hespas``) may hold device files in ``devices/``, system files in
``systems/``, and ``config.toml`` with defaults::

    hardware = "H100-SXM"

``$XDG_CACHE_HOME/hespas`` (``~/.cache/hespas``) holds results that later runs use.
"""

from __future__ import annotations

import os
from pathlib import Path

from hespas.files.documents import read_toml
from hespas.graph.errors import FormatError

__all__ = ["HARDWARE_VARIABLE", "cache_folder", "config_folder", "default_hardware"]

HARDWARE_VARIABLE = "HESPAS_HARDWARE"
_SETTINGS = frozenset({"hardware"})
"""Keys of ``config.toml``."""
_EXAMPLE = 'write a line such as hardware = "H100-SXM"'


def _folder(variable: str, fallback: str, parts: tuple[str, ...]) -> Path:
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():  # the standard: a relative path is ignored
        try:
            base = Path.home() / fallback
        except RuntimeError:  # a user without a home folder, as in containers
            base = Path("/") / fallback
    return base.joinpath("hespas", *parts)


def cache_folder(*parts: str) -> Path:
    """Return the default folder of cached results; ``parts`` are the names of its subfolders."""
    return _folder("XDG_CACHE_HOME", ".cache", parts)


def config_folder(*parts: str) -> Path:
    """Return the folder of the user's configuration; ``parts`` are the names of its subfolders."""
    return _folder("XDG_CONFIG_HOME", ".config", parts)


def default_hardware() -> str:
    """Return the device of commands that need one: ``HESPAS_HARDWARE``, or ``hardware`` in ``config.toml``;
    empty without either.

    Raises ``FormatError`` if ``config.toml`` is damaged or has an unknown key.
    """
    if text := os.environ.get(HARDWARE_VARIABLE, ""):
        return text
    path = config_folder("config.toml")
    if not os.path.lexists(path):
        return ""
    # A link to another folder is the user's own, also if inputs are untrusted.
    settings = read_toml(Path(os.path.realpath(path)), "a configuration", where="remove it", example=_EXAMPLE)
    unknown = sorted(settings.keys() - _SETTINGS)
    if unknown:
        raise FormatError(
            f"unknown key {unknown[0]!r}",
            path=str(path),
            position=unknown[0],
            hint=f"use {', '.join(_SETTINGS)}",
        )
    hardware = settings.get("hardware", "")
    if not isinstance(hardware, str):
        raise FormatError("is not a text", path=str(path), position="hardware", hint=_EXAMPLE)
    return hardware
