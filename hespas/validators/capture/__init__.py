"""Exact comparison of a captured program with its run: operations, their order, collectives and bytes."""

from hespas.validators.capture.check import check_capture
from hespas.validators.capture.result import CaptureCheck, capture_check_json

__all__ = ["CaptureCheck", "capture_check_json", "check_capture"]
