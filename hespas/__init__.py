"""Hespas: one workload graph, every trace format, every fidelity, judged against measurement."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
