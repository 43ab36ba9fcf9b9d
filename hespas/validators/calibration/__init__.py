"""Calibration: parameters of estimators fitted on measurements, with their error on shapes left out."""

from __future__ import annotations

from hespas.validators.calibration.approaches import FitMemory
from hespas.validators.calibration.calibrate import (
    ESTIMATORS,
    Calibration,
    calibrate,
    calibration_json,
    check_models_folder,
    models_folder,
    write_calibration,
)
from hespas.validators.calibration.fit_device import fit_device
from hespas.validators.calibration.held_out import TESTS
from hespas.validators.calibration.recordings import measurements_of

__all__ = [
    "ESTIMATORS",
    "TESTS",
    "Calibration",
    "FitMemory",
    "calibrate",
    "calibration_json",
    "check_models_folder",
    "fit_device",
    "measurements_of",
    "models_folder",
    "write_calibration",
]
