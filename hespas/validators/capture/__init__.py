"""Whether a captured program is what ran: operations, their order, collectives and bytes, counted exactly."""

from hespas.validators.capture.check import check_capture
from hespas.validators.capture.document import capture_check_json
from hespas.validators.capture.result import CaptureCheck

__all__ = ["CaptureCheck", "capture_check_json", "check_capture"]
