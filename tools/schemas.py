"""Schemas of JSON documents, from their types: ``python -m tools.schemas [--check]``.

A document has all keys of its type and no others. Only keys with the default ``UNSET`` may be absent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from hespas.api.analysis import AnalysisDocument
from hespas.api.attacks import PrivacyDocument
from hespas.api.bundling import BundleDocument
from hespas.api.capturing import CaptureDocument, ProfiledProgramDocument
from hespas.api.conversion import ConversionDocument
from hespas.api.estimation import EstimateDocument
from hespas.api.generation import GenerationDocument
from hespas.api.noise_curves import NoiseDocument
from hespas.api.plan_result import PlanDocument
from hespas.api.samples import SamplesDocument
from hespas.api.serving import ServingDocument
from hespas.api.serving_plan_result import ServingPlanDocument
from hespas.api.simulation_result import SimulationDocument
from hespas.api.step_calibration import StepFactorsDocument
from hespas.api.summary import SummaryDocument
from hespas.api.synthesis import SynthesisDocument
from hespas.api.systems import DevicesDocument, EstimatorsDocument, SystemDocument
from hespas.api.table_estimation import TableDocument
from hespas.api.what_if import GridDocument, RunDifferenceDocument
from hespas.converters.chakra.rank_map import RankMapDocument
from hespas.studies.league.document import FactorsDocument, LeagueDocument
from hespas.studies.serving.evaluation import ServingAccuracyDocument
from hespas.validators.accuracy.compare import ComparisonDocument
from hespas.validators.accuracy.document import AccuracyDocument
from hespas.validators.calibration.calibrate import CalibrationDocument
from hespas.validators.calibration.suggest import SuggestionDocument
from hespas.validators.capture.result import CaptureCheckDocument
from hespas.validators.checker.job import CheckDocument
from hespas.validators.conformance.kit import Manifest
from hespas.validators.conformance.run import ConformanceDocument
from hespas.validators.roundtrip.matrix import RoundTripDocument
from tools.documents import document_command

__all__ = ["DOCUMENTS", "FOLDER", "main", "schema_text"]

FOLDER = Path(__file__).parents[1] / "hespas" / "schemas"
DOCUMENTS: Mapping[str, type[msgspec.Struct]] = {
    "accuracy": AccuracyDocument,
    "analyze": AnalysisDocument,
    "bundle": BundleDocument,
    "calibrate": CalibrationDocument,
    "capture": CaptureDocument,
    "capture_check": CaptureCheckDocument,
    "capture_profile": ProfiledProgramDocument,
    "check": CheckDocument,
    "compare": ComparisonDocument,
    "conform": ConformanceDocument,
    "conformance": Manifest,
    "convert": ConversionDocument,
    "devices": DevicesDocument,
    "estimate": EstimateDocument,
    "estimate_table": TableDocument,
    "estimators": EstimatorsDocument,
    "generate": GenerationDocument,
    "grid": GridDocument,
    "league": LeagueDocument,
    "league_factors": FactorsDocument,
    "noise": NoiseDocument,
    "privacy": PrivacyDocument,
    "rank_map": RankMapDocument,
    "roundtrip": RoundTripDocument,
    "run_difference": RunDifferenceDocument,
    "samples": SamplesDocument,
    "plan": PlanDocument,
    "serving": ServingDocument,
    "serving_plan": ServingPlanDocument,
    "serving_accuracy": ServingAccuracyDocument,
    "simulate": SimulationDocument,
    "step_factors": StepFactorsDocument,
    "suggest": SuggestionDocument,
    "synthesis": SynthesisDocument,
    "system": SystemDocument,
    "view": SummaryDocument,
}
"""Types of documents by the name of their schema; a new document is one row."""


def schema_text(name: str) -> str:
    """Return the text of ``NAME.schema.json``."""
    (whole,), parts = msgspec.json.schema_components((DOCUMENTS[name],), ref_template="#/$defs/{name}")
    root = parts.pop(whole["$ref"].rpartition("/")[2])
    title = " ".join(str(root.pop("description")).split()).removesuffix(".")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:hespas:schema:{name}:1",
    }
    document = head | _closed(root) | {"title": title}
    if parts:
        document["$defs"] = {_public(key): _closed(part) for key, part in sorted(parts.items())}
    return json.dumps(document, indent=1).replace("#/$defs/_", "#/$defs/") + "\n"


def _public(name: str) -> str:
    return name.removeprefix("_")


def _closed(part: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects allow exactly their keys, with constants for enums of one value, and
    descriptions on one line.
    """
    properties: dict[str, dict[str, Any]] = part.get("properties", {})
    if properties:
        stated = {key for key, value in properties.items() if "default" in value}
        part["required"] = [key for key in properties if key in {*stated, *part.get("required", ())}]
        part["additionalProperties"] = False
    part.pop("default", None)
    if part.pop("nullable", False):
        part["type"] = [part["type"], "null"]
    if len(part.get("enum", ())) == 1:
        part["const"] = part.pop("enum")[0]
    for key, value in part.items():
        if key == "properties":
            part[key] = {name: _closed(each) for name, each in properties.items()}
        elif key == "description":
            part[key] = " ".join(str(value).split())
        elif key == "title":
            part[key] = _public(str(value))
        elif isinstance(value, dict):
            part[key] = _closed(cast("dict[str, Any]", value))
        elif isinstance(value, list):
            parts = cast("list[object]", value)
            part[key] = [
                _closed(cast("dict[str, Any]", each)) if isinstance(each, dict) else each for each in parts
            ]
    return part


def main() -> int:
    """Write all schemas; return 1 if one is stale with ``--check``."""
    return document_command(
        __doc__, lambda: {FOLDER / f"{name}.schema.json": schema_text(name) for name in DOCUMENTS}
    )


if __name__ == "__main__":
    sys.exit(main())
