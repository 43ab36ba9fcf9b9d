"""The calibrated roofline: forms of time fitted on measurements of a device."""

from __future__ import annotations

from hespas.estimators.calibrated.model import Calibrated

__all__ = ["Calibrated"]
