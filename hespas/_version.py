"""The version of the package, for those that write it into what they make."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
