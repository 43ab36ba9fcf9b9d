"""Hespas: one workload graph, every trace format, every fidelity, judged against measurement.

One function per command, which takes paths or values and gives a result with a short ``repr``,
``to_pandas()`` and the document of ``--json``: docs/api.md. They are loaded on first use, so that importing
the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas._version import __version__

__all__ = [
    "__version__",
    "accuracy",
    "analyze",
    "calibrate",
    "capture",
    "check",
    "compare",
    "convert",
    "estimate",
    "estimate_table",
    "generate",
    "league",
    "profile_program",
    "read",
    "roundtrip",
    "serve",
    "simulate",
    "suggest",
    "system",
    "validate_capture",
    "validate_serving",
    "view",
    "write",
]

if TYPE_CHECKING:
    from hespas.api import (
        accuracy,
        analyze,
        calibrate,
        capture,
        check,
        compare,
        convert,
        estimate,
        estimate_table,
        generate,
        league,
        profile_program,
        read,
        roundtrip,
        serve,
        simulate,
        suggest,
        system,
        validate_capture,
        validate_serving,
        view,
        write,
    )


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'hespas' has no attribute {name!r}")
    import hespas.api

    return getattr(hespas.api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
