"""Calibration: parameters of estimators fitted to measurements, with their errors on held-out rows."""

from __future__ import annotations

from importlib import import_module

from hespas.graph.deprecation import warn_renamed
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

_MOVED = {"FitMemory": "hespas.fitting.approaches", "fit_device": "hespas.fitting.device_forms"}
"""Deprecated names of this package, with the module that has them."""


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", f"{_MOVED[name]}.{name}")
    return getattr(import_module(_MOVED[name]), name)
