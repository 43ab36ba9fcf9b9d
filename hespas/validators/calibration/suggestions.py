"""Shapes that are worth measuring, and the document of ``hespas-validate calibrate --suggest --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.hardware import Device
from hespas.validators.accuracy.document import DiagnosticJson, diagnostics_json
from hespas.validators.calibration.known_sizes import LABELS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TIME_COLUMN", "SuggestedClass", "SuggestionDocument", "Suggestions", "suggestion_json"]

TIME_COLUMN = "latency_us"
"""The column that is left for the user to fill in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedClass:
    """How many ``shapes`` of one kind and number format are suggested, of how many ``candidates``, drawn from
    what ``models`` know; how many rows were ``measured`` before; and the factor (one standard deviation) by
    which devices disagree over the median shape, NaN where no two others were measured.
    """

    kind: str
    dtype: str
    shapes: int
    candidates: int
    measured: int
    models: tuple[str, ...]
    disagreement: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suggestions:
    """``frame`` has a row per shape, the most worth first: hardware, kind, op, dtype, the sizes, and
    :data:`TIME_COLUMN`, NaN.
    """

    device: Device
    frame: pd.DataFrame
    classes: tuple[SuggestedClass, ...]
    seed: int
    diagnostics: Diagnostics


class _Class(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    dtype: str
    shapes: Count
    candidates: Count
    measured: Annotated[Count, Meta(description="rows of the tables on the device")]
    models: Annotated[tuple[str, ...], Meta(description="whose sizes the candidates are drawn from")]
    disagreement: Annotated[
        Figure, Meta(description="factor, a standard deviation, between devices over the median shape")
    ]


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    op: str
    dtype: str
    sizes: dict[str, Count]


class SuggestionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate calibrate --suggest --json writes: null is unknown."""

    schema: Literal["hespas.suggest/1"] = "hespas.suggest/1"
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    hardware: str
    seed: Count
    classes: list[_Class]
    shapes: Annotated[list[_Shape], Meta(description="the most worth first")]
    diagnostics: list[DiagnosticJson]


def suggestion_json(done: Suggestions, inputs: Sequence[str]) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    names = [name for name in done.frame.columns if name not in (*LABELS, TIME_COLUMN)]
    sizes = done.frame[names].astype("float64").to_numpy().tolist()
    labels = done.frame[["kind", "op", "dtype"]].to_numpy().tolist()
    return document_bytes(
        SuggestionDocument(
            inputs=tuple(inputs),
            hardware=done.device.name,
            seed=done.seed,
            classes=[msgspec.convert(each, _Class, from_attributes=True) for each in done.classes],
            shapes=[
                _Shape(
                    kind=kind,
                    op=op,
                    dtype=dtype,
                    sizes={name: int(size) for name, size in zip(names, row, strict=True) if not isnan(size)},
                )
                for (kind, op, dtype), row in zip(labels, sizes, strict=True)
            ],
            diagnostics=diagnostics_json(done.diagnostics),
        )
    )
