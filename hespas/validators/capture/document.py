"""The document of ``hespas-validate capture --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.validators.accuracy.document import DiagnosticJson, diagnostics_json
from hespas.validators.capture.result import CaptureCheck

__all__ = ["SCHEMA_ID", "CaptureCheckDocument", "capture_check_json"]

SCHEMA_ID: Final = "hespas.capture-check/1"


class _Operation(msgspec.Struct, frozen=True, kw_only=True):
    rank: Count
    operation: str
    captured: Annotated[Figure, Meta(description="in a step")]
    measured: Annotated[Figure, Meta(description="in a step")]
    explained: Annotated[str, Meta(description="why this is no difference of the programs; empty: it is one")]


class _Violation(msgspec.Struct, frozen=True, kw_only=True):
    rank: Count
    run: int
    before: str
    after: str
    early_ns: Figure


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    checked: Count
    exact: Annotated[Count, Meta(description="of those checked, with one event at both ends")]
    inside: Annotated[Count, Meta(description="dependencies within one event")]
    unknown: Annotated[Count, Meta(description="dependencies with an end that nobody measured")]
    violated: Count
    violations: list[_Violation]


class _Collective(msgspec.Struct, frozen=True, kw_only=True):
    rank: Count
    place: Count
    captured: str
    measured: str


class CaptureCheckDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate capture --json writes."""

    schema: Literal["hespas.capture-check/1"] = SCHEMA_ID
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    diagnostics: list[DiagnosticJson]
    program: str
    trace: str
    by: Literal["operation", "instruction"]
    equal: bool
    differences: Count
    ranks: tuple[int, ...]
    runs: Count
    joined: Annotated[Figure, Meta(description="share of the device time whose operations are known, 0 to 1")]
    captured_operations: Figure
    measured_operations: Figure
    operations: Annotated[list[_Operation], Meta(description="those of which another number ran")]
    order: _Order
    captured_collectives: Count
    measured_collectives: Count
    collectives: Annotated[list[_Collective], Meta(description="places where sequences are unlike")]
    reordered: Annotated[Count, Meta(description="ranks with the captured collectives in another order")]
    combined: Annotated[
        Count, Meta(description="captured collectives of which the compiler made fewer, with the same bytes")
    ]
    captured_bytes: Figure
    measured_bytes: Figure
    notes: tuple[str, ...]


def capture_check_json(
    done: CaptureCheck, *, inputs: Sequence[str] = (), diagnostics: Diagnostics | None = None
) -> bytes:
    """The document ``hespas.capture-check/1`` as indented JSON that ends in a newline."""
    order = asdict(done.order)
    violations = [_Violation(**each) for each in order.pop("violations")]
    return document_bytes(
        CaptureCheckDocument(
            inputs=tuple(inputs),
            diagnostics=diagnostics_json(diagnostics or Diagnostics()),
            program=done.program,
            trace=done.trace,
            by=done.by,
            equal=done.equal,
            differences=done.differences,
            ranks=done.ranks,
            runs=done.runs,
            joined=done.joined,
            captured_operations=done.captured_operations,
            measured_operations=done.measured_operations,
            operations=[_Operation(**asdict(each)) for each in done.operations],
            order=_Order(**order, violations=violations),
            captured_collectives=done.captured_collectives,
            measured_collectives=done.measured_collectives,
            collectives=[_Collective(**asdict(each)) for each in done.collectives],
            reordered=done.reordered,
            combined=done.combined,
            captured_bytes=done.captured_bytes,
            measured_bytes=done.measured_bytes,
            notes=done.notes,
        )
    )
