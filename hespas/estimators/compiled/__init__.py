"""Estimators that compile parts of a program and time them on the device of this machine."""

from __future__ import annotations

from hespas.estimators.compiled.model import Iree, Xla

__all__ = ["Iree", "Xla"]
