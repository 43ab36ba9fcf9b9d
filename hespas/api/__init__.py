"""What the commands do, as functions: each command is a thin shell around one of them.

Names are loaded on first use, so that a conversion does not pay for the validators.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "AccuracyReport",
    "Analysis",
    "CalibrationReport",
    "CaptureCheckReport",
    "CaptureResult",
    "CheckReport",
    "ClassTotals",
    "ComparisonReport",
    "Conservation",
    "Conversion",
    "Dropped",
    "EstimatorShare",
    "FactorsReport",
    "GenerationResult",
    "Granularity",
    "GridResult",
    "KindTotals",
    "LeagueReport",
    "Missing",
    "NodeEstimates",
    "Parts",
    "Preparation",
    "ProfiledProgram",
    "Result",
    "RoundTripReport",
    "RunDifference",
    "Server",
    "ServingAccuracyReport",
    "ServingResult",
    "SimulationResult",
    "SuggestionReport",
    "Summary",
    "SystemResult",
    "TableEstimates",
    "accuracy",
    "analysis_document",
    "analyze",
    "calibrate",
    "calibrate_end_to_end",
    "capture",
    "check",
    "check_timeline",
    "class_totals",
    "compare",
    "compare_runs",
    "conversion_document",
    "convert",
    "devices_document",
    "estimate",
    "estimate_document",
    "estimate_table",
    "estimators_document",
    "generate",
    "graph_estimator",
    "join_profile",
    "league",
    "profile_program",
    "read",
    "read_profiles",
    "roundtrip",
    "serve",
    "simulate",
    "simulate_grid",
    "simulation_document",
    "step_of",
    "suggest",
    "summarise",
    "summary_document",
    "system",
    "table_estimate_document",
    "total_duration_ns",
    "validate_capture",
    "validate_serving",
    "view",
    "write",
    "write_estimates_csv",
    "write_json",
    "write_request_rows",
    "write_simulation_json",
    "write_table_estimates",
    "write_timeline",
]

if TYPE_CHECKING:
    from hespas.api.analysis import Analysis, analysis_document, analyze
    from hespas.api.capture_check import CaptureCheckReport, validate_capture
    from hespas.api.capturing import CaptureResult, capture
    from hespas.api.conversion import Conversion, conversion_document, convert
    from hespas.api.estimation import (
        ClassTotals,
        EstimatorShare,
        NodeEstimates,
        class_totals,
        estimate,
        estimate_document,
        step_of,
        total_duration_ns,
        write_estimates_csv,
    )
    from hespas.api.generation import GenerationResult, generate
    from hespas.api.grid import GridResult, simulate_grid
    from hespas.api.io import Result, read, read_profiles, write, write_json
    from hespas.api.joining import join_profile
    from hespas.api.parts import Parts
    from hespas.api.preparation import (
        Conservation,
        Dropped,
        Granularity,
        Missing,
        Preparation,
        graph_estimator,
    )
    from hespas.api.profiling import ProfiledProgram, profile_program
    from hespas.api.published_runs import FactorsReport, LeagueReport, calibrate_end_to_end, league
    from hespas.api.run_difference import RunDifference, compare_runs
    from hespas.api.serving import Server, ServingResult, serve, write_request_rows
    from hespas.api.serving_accuracy import ServingAccuracyReport, validate_serving
    from hespas.api.simulation import (
        SimulationResult,
        simulate,
        simulation_document,
        write_simulation_json,
    )
    from hespas.api.summary import (
        Summary,
        devices_document,
        estimators_document,
        summarise,
        summary_document,
        view,
    )
    from hespas.api.systems import SystemResult, system
    from hespas.api.table_estimation import (
        KindTotals,
        TableEstimates,
        estimate_table,
        table_estimate_document,
        write_table_estimates,
    )
    from hespas.api.timeline_file import check_timeline, write_timeline
    from hespas.api.validation import (
        AccuracyReport,
        CalibrationReport,
        CheckReport,
        ComparisonReport,
        RoundTripReport,
        SuggestionReport,
        accuracy,
        calibrate,
        check,
        compare,
        roundtrip,
        suggest,
    )

_HOMES: dict[str, tuple[str, ...]] = {
    "hespas.api.analysis": ("Analysis", "analysis_document", "analyze"),
    "hespas.api.capture_check": ("CaptureCheckReport", "validate_capture"),
    "hespas.api.capturing": ("CaptureResult", "capture"),
    "hespas.api.profiling": ("ProfiledProgram", "profile_program"),
    "hespas.api.conversion": ("Conversion", "conversion_document", "convert"),
    "hespas.api.joining": ("join_profile",),
    "hespas.api.parts": ("Parts",),
    "hespas.api.estimation": (
        "ClassTotals",
        "NodeEstimates",
        "EstimatorShare",
        "class_totals",
        "estimate",
        "estimate_document",
        "step_of",
        "total_duration_ns",
        "write_estimates_csv",
    ),
    "hespas.api.generation": ("GenerationResult", "generate"),
    "hespas.api.grid": ("GridResult", "simulate_grid"),
    "hespas.api.io": ("Result", "read", "read_profiles", "write", "write_json"),
    "hespas.api.preparation": (
        "Conservation",
        "Dropped",
        "Granularity",
        "Missing",
        "Preparation",
        "graph_estimator",
    ),
    "hespas.api.published_runs": ("FactorsReport", "LeagueReport", "calibrate_end_to_end", "league"),
    "hespas.api.run_difference": ("RunDifference", "compare_runs"),
    "hespas.api.serving": ("Server", "ServingResult", "serve", "write_request_rows"),
    "hespas.api.serving_accuracy": ("ServingAccuracyReport", "validate_serving"),
    "hespas.api.simulation": (
        "SimulationResult",
        "simulate",
        "simulation_document",
        "write_simulation_json",
    ),
    "hespas.api.summary": (
        "Summary",
        "devices_document",
        "estimators_document",
        "summarise",
        "summary_document",
        "view",
    ),
    "hespas.api.systems": ("SystemResult", "system"),
    "hespas.api.table_estimation": (
        "KindTotals",
        "TableEstimates",
        "estimate_table",
        "table_estimate_document",
        "write_table_estimates",
    ),
    "hespas.api.timeline_file": ("check_timeline", "write_timeline"),
    "hespas.api.validation": (
        "AccuracyReport",
        "CalibrationReport",
        "CheckReport",
        "ComparisonReport",
        "RoundTripReport",
        "SuggestionReport",
        "accuracy",
        "calibrate",
        "check",
        "compare",
        "roundtrip",
        "suggest",
    ),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'hespas.api' has no attribute {name!r}")
