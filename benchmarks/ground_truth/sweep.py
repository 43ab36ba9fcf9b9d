"""Families of cases in a sweep, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.ground_truth.cases import Case, Scale
from benchmarks.ground_truth.products import attention, convolutions, products
from benchmarks.ground_truth.programs import collectives, models
from benchmarks.ground_truth.streams import elementwise, gathers, movement, normalisation, reductions

__all__ = ["FAMILIES", "cases_of"]

FAMILIES: Mapping[str, Callable[[Scale], Iterator[Case]]] = {
    "models": models,
    "gemm": products,
    "attention": attention,
    "conv": convolutions,
    "norm": normalisation,
    "elementwise": elementwise,
    "reduce": reductions,
    "gather": gathers,
    "move": movement,
    "collectives": collectives,
}


def cases_of(families: Sequence[str], scale: Scale, *, gpu: bool) -> list[Case]:
    """Return the cases of some families in order, each name once. Without ``gpu``, GPU-only cases are
    excluded.
    """
    found: dict[str, Case] = {}
    for family in families:
        for case in FAMILIES[family](scale):
            if gpu or not case.gpu_only:
                found.setdefault(case.name, case)
    return list(found.values())
