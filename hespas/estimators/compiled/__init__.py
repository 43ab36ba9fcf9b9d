"""Programs compiled and timed, region by region, on the device this runs on."""

from __future__ import annotations

from hespas.estimators.compiled.model import Iree, Xla

__all__ = ["Iree", "Xla"]
