"""What a check of a capture finds, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CaptureCheck", "CollectiveDifference", "OperationDifference", "OrderCheck", "OrderViolation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDifference:
    """Operations of one name, kind or instruction of which a rank runs another number in a step than the
    capture has. ``explained`` says why that is no difference of the programs (``""``: it is one): the
    compiler merged them into others, say.
    """

    rank: int
    operation: str
    captured: float
    measured: float
    explained: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderViolation:
    """``after`` depends on ``before`` and began ``early_ns`` before that was done, in any reading of what
    each event carries out.
    """

    rank: int
    run: int
    before: str
    after: str
    early_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCheck:
    """Captured dependencies held against each rank and run: ``checked`` of them; of those, ``exact`` have one
    event at both ends (the others: in some reading); ``inside`` are within one event and ``unknown`` have an
    end that nobody measured. ``violated`` counts, ``violations`` list some.
    """

    checked: int = 0
    exact: int = 0
    inside: int = 0
    unknown: int = 0
    violated: int = 0
    violations: tuple[OrderViolation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveDifference:
    """One place of the sequence of a rank where capture and trace are unlike; ``""``: it has none there."""

    rank: int
    place: int
    captured: str
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCheck:
    """A captured program against one trace of it.

    ``by`` says how they were compared: operation by operation, or operations with the instructions of the
    compiled module that carry them out. Counts are of one step, summed over the ``ranks`` that the trace has;
    bytes are what the collectives of these ranks send or reduce. ``joined`` is the share of the device time
    whose operations are known. ``reordered`` counts ranks whose collectives are the captured ones in an
    order that its dependencies allow as well; ``combined`` counts captured collectives that the compiler made
    fewer of, over the same groups and with the same bytes in all.
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
        """How many things are unlike; explained ones do not count."""
        unlike = sum(not each.explained for each in self.operations)
        return unlike + self.order.violated + len(self.collectives) + (self.joined < 1.0)

    @property
    def equal(self) -> bool:
        """Whether the capture is what ran."""
        return not self.differences
