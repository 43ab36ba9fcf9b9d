"""Conformance kit: sets of execution traces with the results that a conforming tool gives for them.

The kit is made from a seed by :func:`make_kit`. :func:`run_kit` runs a tool on it: Hespas, or any program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.validators.conformance.adapters import AdapterName, ForeignTool
    from hespas.validators.conformance.case import Case, Counts, KitCase
    from hespas.validators.conformance.kit import Kit, Manifest, kit_bytes, make_kit, read_kit
    from hespas.validators.conformance.run import (
        CaseResult,
        ConformanceRun,
        conformance_json,
        failures_table,
        kinds_table,
        results_table,
        run_kit,
    )

__all__ = [
    "AdapterName",
    "Case",
    "CaseResult",
    "ConformanceRun",
    "Counts",
    "ForeignTool",
    "Kit",
    "KitCase",
    "Manifest",
    "conformance_json",
    "failures_table",
    "kinds_table",
    "kit_bytes",
    "make_kit",
    "read_kit",
    "results_table",
    "run_kit",
]

__getattr__ = lazy_names(
    __name__,
    adapters=("AdapterName", "ForeignTool"),
    case=("Case", "Counts", "KitCase"),
    kit=("Kit", "Manifest", "kit_bytes", "make_kit", "read_kit"),
    run=(
        "CaseResult",
        "ConformanceRun",
        "conformance_json",
        "failures_table",
        "kinds_table",
        "results_table",
        "run_kit",
    ),
)
