"""The JSON document of a check, as ``hespas/schemas/check.schema.json`` describes it."""

from __future__ import annotations

from dataclasses import dataclass

from hespas import __version__
from hespas.files.documents import document_bytes
from hespas.graph import Diagnostic
from hespas.validators.result import CheckedInput, CheckResult, Violation

__all__ = ["SCHEMA_ID", "to_json"]

SCHEMA_ID = "hespas.check/1"
"""What a document of this version says in ``schema``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    schema: str
    hespas_version: str
    profile: str | None
    valid: bool
    inputs: tuple[CheckedInput, ...]
    counts: dict[str, int]
    violations: tuple[Violation, ...]
    diagnostics: tuple[Diagnostic, ...]


def to_json(result: CheckResult) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline."""
    document = _Document(
        schema=SCHEMA_ID,
        hespas_version=__version__,
        profile=result.profile,
        valid=result.valid,
        inputs=result.inputs,
        counts=dict(result.counts),
        violations=result.violations,
        diagnostics=result.diagnostics,
    )
    return document_bytes(document)
