"""A calibration as JSON: ``hespas/schemas/calibrate.schema.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hespas import __version__
from hespas.estimators.learned.serialization import LearnedModel
from hespas.files.documents import document_bytes
from hespas.hardware import Fit
from hespas.validators.accuracy.document import diagnostics_json, summary_json
from hespas.validators.calibration.calibrate import Calibration
from hespas.validators.calibration.held_out import TESTS

__all__ = ["SCHEMA_ID", "calibration_json"]

SCHEMA_ID = "hespas.calibrate/1"
"""What a document of this version says in ``schema``."""


def calibration_json(done: Calibration, inputs: Sequence[str]) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    document = {
        "schema": SCHEMA_ID,
        "hespas_version": __version__,
        "inputs": list(inputs),
        "hardware": done.device.name,
        "estimators": list(done.estimators),
        "seed": done.seed,
        "fitted": done.fitted,
        "tables": [asdict(table) for table in done.tables],
        "fits": [_fit(fit) for fit in done.fits],
        "models": [_model(model) for model in done.models],
        "held_out": [
            {
                "by": test.by,
                "what": TESTS[test.by],
                "rows": test.count,
                "fitted_rows": test.fitted,
                "summary": [summary_json(row) for row in test.accuracy.summary],
            }
            for test in done.held_out
        ],
        "diagnostics": diagnostics_json(done.diagnostics),
    }
    return document_bytes(document)


def _fit(fit: Fit) -> dict[str, object]:
    error = fit.error
    return {
        "kind": fit.kind,
        "op": fit.op,
        "scheme": fit.scheme,
        "variant": fit.variant,
        "default": fit.default,
        "form": fit.form,
        "samples": fit.samples,
        "parameters": {each.name: [each.value, each.std_error] for each in fit.parameters},
        "n": max(error.n, 0),
        "mape": error.mape,
        "median_ape": error.median_ape,
        "p90_ape": error.p90_ape,
        "bias": error.bias,
        "table": fit.table,
        "provenance": fit.provenance,
    }


def _model(model: LearnedModel) -> dict[str, object]:
    card, training = model.card, model.card.training
    return {
        "name": card.name,
        "schemes": sorted({cell.scheme for cell in card.cells}),
        "samples": training.rows,
        "shape_groups": training.shape_groups,
        "trees": training.trees,
        "leaves": training.leaves,
        "loss": training.loss,
        "library": training.library,
        "tables": training.tables,
        "provenance": training.provenance,
        "errors": [
            {
                "kind": row.kind,
                "n": row.n,
                "mape": row.mape,
                "median_ape": row.median_ape,
                "p90_ape": row.p90_ape,
                "bias": row.bias,
            }
            for row in card.errors
        ],
    }
