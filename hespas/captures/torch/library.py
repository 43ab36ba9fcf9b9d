"""PyTorch, loaded when it is asked for. What is private there is named here and in ``world``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hespas.graph.errors import MissingExtraError

__all__ = ["EXTRA", "torch_module"]

EXTRA = "torch"
"""What to install."""


def torch_module(name: str = "torch") -> Any:
    """A module of PyTorch. Raises ``MissingExtraError`` where it is not installed, or is a version without
    that module.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError("capturing programs of PyTorch", EXTRA, detail=str(error)) from error
