"""Access to PyTorch: lazy import, and temporary replacement of its attributes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hespas.graph.errors import MissingExtraError

__all__ = ["EXTRA", "replaced_attribute", "torch_module"]

EXTRA = "torch"
"""Extra that installs PyTorch."""


def torch_module(name: str = "torch") -> Any:
    """Import a module of PyTorch.

    Raises ``MissingExtraError`` if PyTorch is not installed, or its version does not have the module.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError("capturing programs of PyTorch", EXTRA, detail=str(error)) from error


@contextmanager
def replaced_attribute(owner: Any, name: str, replacement: object) -> Generator[None]:
    """Set ``owner.name`` to ``replacement`` inside the block, and restore it afterwards."""
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
