"""Functions and results of all commands: each command is a thin layer around one function.

Names are imported on first use, so that a conversion does not import the validators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names
from hespas.graph.progress import ProgressBar

__all__ = [
    "AccuracyReport",
    "Analysis",
    "Bundle",
    "CalibrationReport",
    "CaptureCheckReport",
    "CaptureResult",
    "CheckReport",
    "ClassTotals",
    "ComparisonReport",
    "ConformanceReport",
    "Conversion",
    "ConversionAccount",
    "DeviceEnergy",
    "EstimatorShare",
    "FactorsReport",
    "GenerationResult",
    "Granularity",
    "GridResult",
    "KindTotals",
    "LeagueReport",
    "Lowering",
    "MergedOps",
    "Missing",
    "NodeData",
    "NodeEstimates",
    "NoiseReport",
    "PlanResult",
    "PrivacyReport",
    "ProfiledProgram",
    "ProgressBar",
    "Result",
    "RoundTripReport",
    "RunDifference",
    "Samples",
    "Server",
    "ServingAccuracyReport",
    "ServingPlanResult",
    "ServingResult",
    "SimulationResult",
    "StepFactorsReport",
    "SuggestionReport",
    "Summary",
    "Synthesis",
    "SystemResult",
    "TableEstimates",
    "WriteSharding",
    "accuracy",
    "analysis_document",
    "analyze",
    "bundle",
    "calibrate",
    "calibrate_end_to_end",
    "calibrate_steps",
    "capture",
    "check",
    "check_timeline",
    "collective_benchmark",
    "compare",
    "compare_runs",
    "conform",
    "conversion_document",
    "convert",
    "device_energy",
    "devices_document",
    "dit_step",
    "dlrm_step",
    "eager_step",
    "estimate",
    "estimate_document",
    "estimate_table",
    "estimators_document",
    "generate",
    "graph_estimator",
    "join_profile",
    "league",
    "list_devices",
    "list_estimators",
    "list_formats",
    "list_models",
    "list_systems",
    "llm_step",
    "load_system",
    "node_data",
    "noise",
    "op_class_summary",
    "plan",
    "plan_serving",
    "privacy",
    "profile_program",
    "random_job",
    "read",
    "read_profiles",
    "roundtrip",
    "sample",
    "serve",
    "simulate",
    "simulate_grid",
    "simulated_step",
    "simulation_document",
    "suggest_shapes",
    "summarise",
    "summary_document",
    "synthesize",
    "table_estimate_document",
    "total_duration_ns",
    "validate_capture",
    "validate_serving",
    "view",
    "vit_step",
    "write",
    "write_estimates_csv",
    "write_json",
    "write_node_data",
    "write_request_rows",
    "write_simulation_json",
    "write_table_estimates",
    "write_timeline",
]

if TYPE_CHECKING:
    from hespas.api.analysis import (
        Analysis,
        analysis_document,
        analyze,
    )
    from hespas.api.attacks import PrivacyReport, privacy
    from hespas.api.bundling import Bundle, bundle
    from hespas.api.capturing import (
        CaptureResult,
        ProfiledProgram,
        capture,
        join_profile,
        profile_program,
    )
    from hespas.api.checks import (
        CaptureCheckReport,
        CheckReport,
        RoundTripReport,
        check,
        roundtrip,
        validate_capture,
    )
    from hespas.api.comparison import (
        ComparisonReport,
        compare,
    )
    from hespas.api.conformance import (
        ConformanceReport,
        conform,
    )
    from hespas.api.conversion import (
        Conversion,
        conversion_document,
        convert,
    )
    from hespas.api.documents import (
        Result,
        write_json,
    )
    from hespas.api.estimation import (
        ClassTotals,
        DeviceEnergy,
        EstimatorShare,
        NodeEstimates,
        device_energy,
        estimate,
        estimate_document,
        op_class_summary,
        simulated_step,
        total_duration_ns,
        write_estimates_csv,
    )
    from hespas.api.generation import (
        GenerationResult,
        generate,
    )
    from hespas.api.generators import (
        collective_benchmark,
        dit_step,
        dlrm_step,
        eager_step,
        llm_step,
        random_job,
        vit_step,
    )
    from hespas.api.io import (
        WriteSharding,
        read,
        read_profiles,
        write,
    )
    from hespas.api.listings import (
        list_devices,
        list_estimators,
        list_formats,
        list_models,
        list_systems,
    )
    from hespas.api.lowering import (
        ConversionAccount,
        Granularity,
        Lowering,
        MergedOps,
        Missing,
        graph_estimator,
    )
    from hespas.api.model_explorer import (
        NodeData,
        node_data,
        write_node_data,
    )
    from hespas.api.noise_curves import NoiseReport, noise
    from hespas.api.plan_result import PlanResult
    from hespas.api.planning import plan
    from hespas.api.published_runs import (
        FactorsReport,
        LeagueReport,
        ServingAccuracyReport,
        calibrate_end_to_end,
        league,
        validate_serving,
    )
    from hespas.api.samples import (
        Samples,
        sample,
    )
    from hespas.api.serving import (
        Server,
        ServingResult,
        serve,
        write_request_rows,
    )
    from hespas.api.serving_plan import plan_serving
    from hespas.api.serving_plan_result import ServingPlanResult
    from hespas.api.simulation import (
        simulate,
    )
    from hespas.api.simulation_job import (
        check_timeline,
        write_timeline,
    )
    from hespas.api.simulation_result import (
        SimulationResult,
        simulation_document,
        write_simulation_json,
    )
    from hespas.api.step_calibration import StepFactorsReport, calibrate_steps
    from hespas.api.summary import (
        Summary,
        summarise,
        summary_document,
        view,
    )
    from hespas.api.synthesis import Synthesis, synthesize
    from hespas.api.systems import (
        SystemResult,
        devices_document,
        estimators_document,
        load_system,
    )
    from hespas.api.table_estimation import (
        KindTotals,
        TableEstimates,
        estimate_table,
        table_estimate_document,
        write_table_estimates,
    )
    from hespas.api.validation import (
        AccuracyReport,
        CalibrationReport,
        SuggestionReport,
        accuracy,
        calibrate,
        suggest_shapes,
    )
    from hespas.api.what_if import (
        GridResult,
        RunDifference,
        compare_runs,
        simulate_grid,
    )

_find = lazy_names(
    __name__,
    validation=(
        "AccuracyReport",
        "CalibrationReport",
        "SuggestionReport",
        "accuracy",
        "calibrate",
        "suggest_shapes",
    ),
    attacks=("PrivacyReport", "privacy"),
    synthesis=("Synthesis", "synthesize"),
    bundling=("Bundle", "bundle"),
    analysis=(
        "Analysis",
        "analysis_document",
        "analyze",
    ),
    capturing=(
        "CaptureResult",
        "ProfiledProgram",
        "capture",
        "join_profile",
        "profile_program",
    ),
    checks=(
        "CaptureCheckReport",
        "CheckReport",
        "RoundTripReport",
        "check",
        "roundtrip",
        "validate_capture",
    ),
    comparison=(
        "ComparisonReport",
        "compare",
    ),
    conformance=(
        "ConformanceReport",
        "conform",
    ),
    conversion=(
        "Conversion",
        "conversion_document",
        "convert",
    ),
    documents=(
        "Result",
        "write_json",
    ),
    estimation=(
        "ClassTotals",
        "DeviceEnergy",
        "EstimatorShare",
        "NodeEstimates",
        "device_energy",
        "estimate",
        "estimate_document",
        "op_class_summary",
        "simulated_step",
        "total_duration_ns",
        "write_estimates_csv",
    ),
    generation=(
        "GenerationResult",
        "generate",
    ),
    generators=(
        "collective_benchmark",
        "dit_step",
        "dlrm_step",
        "eager_step",
        "llm_step",
        "random_job",
        "vit_step",
    ),
    io=(
        "WriteSharding",
        "read",
        "read_profiles",
        "write",
    ),
    lowering=(
        "ConversionAccount",
        "Granularity",
        "Lowering",
        "MergedOps",
        "Missing",
        "graph_estimator",
    ),
    model_explorer=(
        "NodeData",
        "node_data",
        "write_node_data",
    ),
    noise_curves=(
        "NoiseReport",
        "noise",
    ),
    plan_result=("PlanResult",),
    planning=("plan",),
    step_calibration=("StepFactorsReport", "calibrate_steps"),
    published_runs=(
        "FactorsReport",
        "LeagueReport",
        "ServingAccuracyReport",
        "calibrate_end_to_end",
        "league",
        "validate_serving",
    ),
    listings=(
        "list_devices",
        "list_estimators",
        "list_formats",
        "list_models",
        "list_systems",
    ),
    samples=(
        "Samples",
        "sample",
    ),
    serving=(
        "Server",
        "ServingResult",
        "serve",
        "write_request_rows",
    ),
    serving_plan=("plan_serving",),
    serving_plan_result=("ServingPlanResult",),
    simulation=("simulate",),
    simulation_result=(
        "SimulationResult",
        "simulation_document",
        "write_simulation_json",
    ),
    summary=(
        "Summary",
        "summarise",
        "summary_document",
        "view",
    ),
    systems=(
        "SystemResult",
        "devices_document",
        "estimators_document",
        "load_system",
    ),
    table_estimation=(
        "KindTotals",
        "TableEstimates",
        "estimate_table",
        "table_estimate_document",
        "write_table_estimates",
    ),
    simulation_job=(
        "check_timeline",
        "write_timeline",
    ),
    what_if=(
        "GridResult",
        "RunDifference",
        "compare_runs",
        "simulate_grid",
    ),
)
_RENAMED = {
    "Conservation": "ConversionAccount",
    "Dropped": "MergedOps",
    "Parts": "WriteSharding",
    "Preparation": "Lowering",
    "class_totals": "op_class_summary",
    "step_of": "simulated_step",
    "suggest": "suggest_shapes",
    "system": "load_system",
}
"""Deprecated names -> new names."""


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        from hespas.graph.deprecation import warn_renamed

        warn_renamed(f"hespas.api.{name}", f"hespas.api.{_RENAMED[name]}")
        name = _RENAMED[name]
    return _find(name)
