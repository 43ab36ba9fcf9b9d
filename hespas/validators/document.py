"""The JSON document of a check, as ``hespas/schemas/check.schema.json`` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from hespas import __version__
from hespas.graph import Diagnostic
from hespas.validators.result import CheckedInput, CheckResult, Violation

__all__ = ["SCHEMA_ID", "encoded", "to_json"]

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
    return msgspec.json.format(encoded(document), indent=2) + b"\n"


def encoded(document: object) -> bytes:
    """A document as JSON; texts that UTF-8 cannot hold are escaped."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_writable(msgspec.to_builtins(document)))


def _writable(value: object) -> object:
    """The same with unpaired surrogates, which no UTF-8 holds, written as text: ``\\ud800``."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case list() | tuple():
            return [_writable(each) for each in cast("Sequence[object]", value)]
        case dict():
            return {_writable(key): _writable(each) for key, each in cast("dict[str, object]", value).items()}
        case _:
            return value
