"""Types of ``docs/accuracy/accuracy.json``, the figures of ``docs/accuracy/index.md``."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["FIGURES", "Errors", "Figures", "Row", "Section", "read_figures"]

FIGURES = Path(__file__).parents[1] / "docs" / "accuracy" / "accuracy.json"


class Errors(msgspec.Struct, frozen=True):
    """Errors of one estimator on the ``n`` cases that it covers; None if unknown. ``sum_error`` is the error
    of the sum of a program's times, weighted by executions.
    """

    n: int
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    interval_coverage: float | None
    sum_error: float | None = None


class Row(msgspec.Struct, frozen=True):
    """One device and class (kind and number format) of a table or profile; ``errors`` by estimator."""

    hardware: str
    op_class: str
    of: int
    noise: float | None
    errors: dict[str, Errors]


class Section(msgspec.Struct, frozen=True):
    """One table or profile."""

    name: str
    provenance: str
    rows: list[Row]


class Figures(msgspec.Struct, frozen=True):
    """Figures of the page."""

    schema: str
    hespas_version: str
    date: str
    split: str
    tables: list[Section]
    profiles: list[Section]


def read_figures(path: Path) -> Figures:
    """Read the figures of a page from a file such as :data:`FIGURES`."""
    return msgspec.json.decode(path.read_bytes(), type=Figures)
