"""What a prediction depends on beside its row: contents of the package, of models, devices and estimators."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

from hespas.estimators.registry import named_paths

__all__ = ["content_stamp", "estimator_stamp", "package_stamp"]

_ROOMS = (
    "costs", "estimators", "files", "generators/llm", "graph", "hardware", "measurements", "operations",
    "programs", "schemas", "simulator",
)  # fmt: skip
_OWN = ("kernels", "parts", "places", "predict", "runs", "steps", "table")
"""Rooms of the package, and modules of this folder."""


def content_stamp(files: Iterable[Path]) -> str:
    """A text that changes with the content of files; one that cannot be read counts as empty, and its
    reader says so.
    """
    digest = sha256()
    for file in files:
        try:
            content = file.read_bytes() if file.is_file() else b""
        except (OSError, ValueError):
            content = b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


@cache
def package_stamp() -> str:
    """A text that changes with the package: 8 MB, read once in a process."""
    root = Path(__file__).parents[2]
    files = [file for room in _ROOMS for file in _files_in(root / room)]
    return content_stamp([*files, *(Path(__file__).with_name(f"{name}.py") for name in _OWN)])


def estimator_stamp(spelling: str) -> str:
    """A text that changes with the files and folders that options of an estimator name."""
    named = named_paths(spelling.partition(":")[2])
    return content_stamp(file for path in named for file in (_files_in(path) if path.is_dir() else [path]))


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
