"""Attributes of PyTorch that are others for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["swapped"]


@contextmanager
def swapped(owner: Any, name: str, replacement: object) -> Generator[None]:
    """``owner.name`` is ``replacement`` inside, and what it was afterwards."""
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
