"""Estimator of in-memory-computing chips: mapping to macros, cycles, and energy by part."""

from __future__ import annotations

from hespas.estimators.imc.model import Imc

__all__ = ["Imc"]
