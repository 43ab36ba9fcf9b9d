"""Calibration: parameters of estimators fitted on measurements, with their error on shapes left out."""

from __future__ import annotations

from hespas.validators.calibration.calibrate import Calibration, calibrate
from hespas.validators.calibration.document import calibration_json
from hespas.validators.calibration.fit import fit_device
from hespas.validators.calibration.from_profiles import joined, measurements_of
from hespas.validators.calibration.held_out import TESTS
from hespas.validators.calibration.memory import FitMemory

__all__ = [
    "TESTS",
    "Calibration",
    "FitMemory",
    "calibrate",
    "calibration_json",
    "fit_device",
    "joined",
    "measurements_of",
]
