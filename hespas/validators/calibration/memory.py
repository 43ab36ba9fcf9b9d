"""What a run of ``calibrate`` has fitted so far, kept beside its output until it is done."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hespas._version import __version__
from hespas.estimators.learned.serialization import LearnedModel, model_bytes, read_model
from hespas.files.output import placed_at_once, write_atomically
from hespas.graph.errors import FormatError, OutputError
from hespas.hardware import Device, Fit, device_to_toml
from hespas.hardware.fits_file import fits_to_toml, read_fits
from hespas.measurements import Measurements
from hespas.operations import Labels

__all__ = ["FitMemory", "content_key"]

_KEY = re.compile("[0-9a-f]{64}")
_SUFFIXES = (".toml", ".json", ".npz")


def content_key(
    tables: Iterable[Measurements], devices: Device | Iterable[Device], seed: int, what: str = "calibrated"
) -> str:
    """A SHA-256 of all that decides what is fitted: rows, devices, seed, what is fitted on them (a text that
    says how, too), and this version. Hexadecimal.
    """
    digest = hashlib.sha256(f"{__version__} {seed}\n{what}\n".encode())
    for device in [devices] if isinstance(devices, Device) else devices:
        digest.update(device_to_toml(replace(device, learned_models=())).encode())
    for table in tables:
        digest.update(f"{table.name}\n{table.provenance}\n{len(table)}\n".encode())
        ops = table.ops
        for labels in (ops.kind, ops.op, ops.scheme, ops.variant, table.hardware, table.split):
            digest.update(_label_bytes(labels))
        columns = (*ops.dims.items(), ("flops", ops.flops), ("bytes", ops.bytes_moved))
        for name, column in (*columns, ("transcendentals", ops.transcendentals), ("ns", table.duration_ns)):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def _label_bytes(labels: Labels) -> bytes:
    names = "\x1f".join(labels.names).encode("utf-8", "backslashreplace")
    return names + np.ascontiguousarray(labels.row).tobytes()


@dataclass(frozen=True, slots=True)
class FitMemory:
    """A folder of fits by :func:`content_key`; what is not readable there counts as not there."""

    folder: Path

    @classmethod
    def beside(cls, destination: Path) -> FitMemory:
        """The memory of what will be written to ``destination``."""
        return cls(destination.with_name(f".{destination.name}.calibrating"))

    def recall(self, key: str, fitted: str) -> tuple[Fit, ...] | None:
        """Fits of an interrupted run, dated ``fitted``; None where there are none."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return tuple(replace(fit, fitted=fitted) for fit in read_fits(path))
        except FormatError:
            return None

    def recall_model(self, key: str) -> LearnedModel | None:
        """A learned model of an interrupted run; None where there is none."""
        path = self._path(key).with_suffix(".json")
        if not path.is_file():
            return None
        try:
            return read_model(path)
        except FormatError:
            return None

    def keep_model(self, key: str, model: LearnedModel) -> None:
        """Keep a learned model: its card last, which says that all of it is there. Raises ``OutputError``."""
        card, trees = model_bytes(model)
        self._write(self._path(key).with_suffix(".npz"), trees)
        self._write(self._path(key).with_suffix(".json"), card)

    def keep(self, key: str, name: str, fits: Sequence[Fit]) -> None:
        """Keep the fits of one step of the work. Raises ``OutputError``."""
        self._write(self._path(key), fits_to_toml(name, fits).encode())

    def _write(self, path: Path, content: bytes) -> None:
        def fill(temporary: Path) -> None:
            temporary.write_bytes(content)

        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"what is fitted so far cannot be kept: {error.strerror or error}",
                path=str(self.folder),
                hint="remove what is there, or name another --out",
            ) from error
        with placed_at_once():
            write_atomically(path, fill, overwrite=True, directory=False)

    def forget(self) -> None:
        """Remove all of it: the work is done. Files of others stay, and so does what a link leads to."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return
        for path in self.folder.iterdir():
            if path.suffix in _SUFFIXES and _KEY.fullmatch(path.stem):
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.toml"
