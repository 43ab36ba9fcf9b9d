"""Workloads that nobody has traced: small ones made larger."""

from __future__ import annotations

__all__: list[str] = []
