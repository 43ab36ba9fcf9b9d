"""Calibration: parameters of estimators fitted to measurements, with their errors on held-out rows."""

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
from hespas.validators.calibration.suggest import TIME_COLUMN, Suggestions, suggest, suggestion_json

__all__ = [
    "ESTIMATORS",
    "TESTS",
    "TIME_COLUMN",
    "Calibration",
    "FitMemory",
    "Suggestions",
    "calibrate",
    "calibration_json",
    "check_models_folder",
    "fit_device",
    "measurements_of",
    "models_folder",
    "suggest",
    "suggestion_json",
    "write_calibration",
]
