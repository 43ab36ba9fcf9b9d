"""Writing a device file that :mod:`hespas.hardware.decode` reads back unchanged."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

from hespas.files.output import write_atomically
from hespas.graph.errors import OutputError
from hespas.hardware.fits_file import fit_row
from hespas.hardware.model import Device, Efficiency, Link, Memory, Peak, SystolicArray

__all__ = ["device_to_toml", "write_device"]

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
