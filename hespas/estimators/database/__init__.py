"""The profile database: measured times of operations, looked up and interpolated."""

from __future__ import annotations

from hespas.estimators.database.model import INSTALLED, Database

__all__ = ["INSTALLED", "Database"]
