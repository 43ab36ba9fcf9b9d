"""Checking as a function: what ``hespas-validate check`` does."""

from __future__ import annotations

from hespas.validators import CheckOptions, CheckResult
from hespas.validators import check as validate

__all__ = ["CheckOptions", "CheckResult", "validate"]
