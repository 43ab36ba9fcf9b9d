"""Result of a capture check, as values and as the document of ``hespas-validate capture --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.validators.accuracy.document import DiagnosticJson, diagnostics_json

__all__ = [
    "SCHEMA_ID",
    "CaptureCheck",
    "CaptureCheckDocument",
    "CollectiveDifference",
    "OperationDifference",
    "OrderCheck",
    "OrderViolation",
    "capture_check_json",
]

SCHEMA_ID: Final = "hespas.capture-check/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDifference:
    """Difference between capture and run in the number of operations per step on a rank, of one name, kind or
    instruction.

    ``explained`` is the reason if the programs are equal nevertheless, such as a fusion by the compiler;
    empty for a real difference.
    """

    rank: int
    operation: str
    captured: float
    measured: float
    explained: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderViolation:
    """Dependency of the captured program that a run violates. The operation ``after`` depends on ``before``,
    but began ``early_ns`` before its end, under every assignment of operations to events.
    """

    rank: int
    run: int
    before: str
    after: str
    early_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCheck:
    """Number of captured dependencies by outcome, over ranks and runs.

    ``checked`` dependencies could be checked; ``violated`` of them do not hold. For ``exact`` of them, both
    operations have exactly one event; all others hold under some assignment of events. ``inside``
    dependencies are within one event. For ``unknown`` dependencies, one of the operations has no event.
    ``violations`` lists some of the violated dependencies.
    """

    checked: int = 0
    exact: int = 0
    inside: int = 0
    unknown: int = 0
    violated: int = 0
    violations: tuple[OrderViolation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveDifference:
    """Position in the sequence of collectives of a rank at which capture and trace differ. An empty text
    means that one of them has no collective there.
    """

    rank: int
    place: int
    captured: str
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCheck:
    """Comparison of a captured program with one trace of its run.

    ``by`` is the method: operation by operation, or by the instructions of the compiled module that implement
    the operations. Counts are for one step, summed over the ``ranks`` of the trace. Bytes are the bytes that
    the collectives of these ranks send or reduce. ``joined`` is the share of the device time whose operations
    are known. ``reordered`` is the number of ranks whose collectives ran in another order, which the
    dependencies allow. ``combined`` is the number of captured collectives that the compiler combined, with
    the same bytes.
    """

    program: str
    trace: str
    by: Literal["operation", "instruction"]
    ranks: tuple[int, ...]
    runs: int
    joined: float
    captured_operations: float
    measured_operations: float
    operations: tuple[OperationDifference, ...]
    order: OrderCheck
    captured_collectives: int
    measured_collectives: int
    collectives: tuple[CollectiveDifference, ...]
    reordered: int
    combined: int
    captured_bytes: float
    measured_bytes: float
    notes: tuple[str, ...] = ()

    @property
    def differences(self) -> int:
        """Return the number of differences that are not explained."""
        unexplained = sum(not entry.explained for entry in self.operations)
        return unexplained + self.order.violated + len(self.collectives) + (self.joined < 1.0)

    @property
    def equal(self) -> bool:
        """Return True if no unexplained difference was found: the captured program is the program that
        ran.
        """
        return not self.differences


class _OperationEntry(msgspec.Struct, frozen=True, kw_only=True):
    rank: Count
    operation: str
    captured: Annotated[Figure, Meta(description="per step")]
    measured: Annotated[Figure, Meta(description="per step")]
    explained: Annotated[
        str, Meta(description="reason if the programs are equal nevertheless; empty: a difference")
    ]


class _ViolationEntry(msgspec.Struct, frozen=True, kw_only=True):
    rank: Count
    run: int
    before: str
    after: str
    early_ns: Figure


class _OrderEntry(msgspec.Struct, frozen=True, kw_only=True):
    checked: Count
    exact: Annotated[Count, Meta(description="checked dependencies with one event at both ends")]
    inside: Annotated[Count, Meta(description="dependencies within one event")]
    unknown: Annotated[Count, Meta(description="dependencies with an end without an event")]
    violated: Count
    violations: list[_ViolationEntry]


class _CollectiveEntry(msgspec.Struct, frozen=True, kw_only=True):
    rank: Count
    place: Count
    captured: str
    measured: str


class CaptureCheckDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate capture."""

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
    operations: Annotated[list[_OperationEntry], Meta(description="operations whose count differs")]
    order: _OrderEntry
    captured_collectives: Count
    measured_collectives: Count
    collectives: Annotated[
        list[_CollectiveEntry], Meta(description="positions at which the sequences differ")
    ]
    reordered: Annotated[Count, Meta(description="ranks with the captured collectives in another order")]
    combined: Annotated[
        Count, Meta(description="captured collectives that the compiler combined, with the same bytes")
    ]
    captured_bytes: Figure
    measured_bytes: Figure
    notes: tuple[str, ...]


def capture_check_json(
    done: CaptureCheck, *, inputs: Sequence[str] = (), diagnostics: Diagnostics | None = None
) -> bytes:
    """Return the document ``hespas.capture-check/1`` as indented JSON that ends in a newline."""
    order = asdict(done.order)
    violations = [_ViolationEntry(**entry) for entry in order.pop("violations")]
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
            operations=[_OperationEntry(**asdict(entry)) for entry in done.operations],
            order=_OrderEntry(**order, violations=violations),
            captured_collectives=done.captured_collectives,
            measured_collectives=done.measured_collectives,
            collectives=[_CollectiveEntry(**asdict(entry)) for entry in done.collectives],
            reordered=done.reordered,
            combined=done.combined,
            captured_bytes=done.captured_bytes,
            measured_bytes=done.measured_bytes,
            notes=done.notes,
        )
    )
