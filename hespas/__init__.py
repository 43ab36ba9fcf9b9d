"""Hespas: one workload graph, every trace format, every fidelity, judged against measurement.

``hespas.read``, ``hespas.write``, ``hespas.convert``, ``hespas.estimate``, ``hespas.simulate`` and
``hespas.validate`` do what the commands of the same names do. They are loaded on first use, so that importing
the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas._version import __version__

__all__ = ["__version__", "convert", "estimate", "read", "simulate", "validate", "write"]

if TYPE_CHECKING:
    from hespas.api import convert, estimate, read, simulate, validate, write


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'hespas' has no attribute {name!r}")
    import hespas.api

    return getattr(hespas.api, name)
