"""Hespas: one workload graph, every trace format, every fidelity, evaluated against measurement.

One function per command takes paths or values, and returns a result with a short ``repr``, ``to_pandas()``
and the document of ``--json``: docs/reference/python. Functions are imported on first use, so that the import
of the package is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas._version import __version__

__all__ = [
    "ProgressBar",
    "__version__",
    "accuracy",
    "analyze",
    "bundle",
    "calibrate",
    "capture",
    "check",
    "collective_benchmark",
    "compare",
    "conform",
    "convert",
    "dit_step",
    "dlrm_step",
    "eager_step",
    "estimate",
    "estimate_table",
    "generate",
    "league",
    "list_devices",
    "list_estimators",
    "list_formats",
    "list_models",
    "list_systems",
    "llm_step",
    "load_system",
    "noise",
    "plan",
    "plan_serving",
    "privacy",
    "profile_program",
    "random_job",
    "read",
    "roundtrip",
    "sample",
    "serve",
    "simulate",
    "suggest_shapes",
    "synthesize",
    "validate_capture",
    "validate_serving",
    "view",
    "vit_step",
    "write",
]

if TYPE_CHECKING:
    from hespas.api import (
        ProgressBar,
        accuracy,
        analyze,
        bundle,
        calibrate,
        capture,
        check,
        collective_benchmark,
        compare,
        conform,
        convert,
        dit_step,
        dlrm_step,
        eager_step,
        estimate,
        estimate_table,
        generate,
        league,
        list_devices,
        list_estimators,
        list_formats,
        list_models,
        list_systems,
        llm_step,
        load_system,
        noise,
        plan,
        plan_serving,
        privacy,
        profile_program,
        random_job,
        read,
        roundtrip,
        sample,
        serve,
        simulate,
        suggest_shapes,
        synthesize,
        validate_capture,
        validate_serving,
        view,
        vit_step,
        write,
    )


_RENAMED = {"suggest": "suggest_shapes", "system": "load_system"}
"""Deprecated names -> new names."""


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        from hespas.graph.deprecation import warn_renamed

        warn_renamed(f"hespas.{name}", f"hespas.{_RENAMED[name]}")
        name = _RENAMED[name]
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'hespas' has no attribute {name!r}")
    import hespas.api

    return getattr(hespas.api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
