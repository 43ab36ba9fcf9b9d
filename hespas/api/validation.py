"""Checking as a function: what ``hespas-validate check`` does."""

from __future__ import annotations

from hespas.validators.checker import CheckOptions, CheckResult
from hespas.validators.checker import check as validate

__all__ = ["CheckOptions", "CheckResult", "validate"]
