"""Calibration: parameters of estimators fitted to measurements, with their errors on held-out rows."""

from __future__ import annotations

from hespas.graph.deprecation import moved_names
from hespas.validators.accuracy.sources import measurements_of
from hespas.validators.calibration.calibrate import (
    ESTIMATORS,
    Calibration,
    calibrate,
    calibration_json,
    check_models_folder,
    models_folder,
    write_calibration,
)
from hespas.validators.calibration.held_out import TESTS
from hespas.validators.calibration.suggest import TIME_COLUMN, Suggestions, suggest, suggestion_json

__all__ = [
    "ESTIMATORS",
    "TESTS",
    "TIME_COLUMN",
    "Calibration",
    "Suggestions",
    "calibrate",
    "calibration_json",
    "check_models_folder",
    "measurements_of",
    "models_folder",
    "suggest",
    "suggestion_json",
    "write_calibration",
]

__getattr__ = moved_names(
    __name__, {"FitMemory": "hespas.fitting.approaches", "fit_device": "hespas.fitting.device_forms"}
)
