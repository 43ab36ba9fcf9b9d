"""The part of an estimated step that rests on no measurement of its device, its sizes or its kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from hespas.graph import Diagnostics, Estimate, OpClass, Workload

__all__ = ["weighed"]

_FINDINGS: Mapping[str, str] = {
    "calibrated.carried": "calibrated",
    "calibrated.outside-support": "calibrated",
    "calibrated.unseen-device": "calibrated",
    "collectives.carried": "collectives",
    "collectives.data-sheet": "collectives",
    "collectives.kin": "collectives",
    "database.not-near": "database",
    "database.other-device": "database",
    "learned.stand-in": "learned",
    "learned.unseen-device": "learned",
    "composite.unseen-device": "",
}
"""Findings about answers beyond measurements, and the estimator that gave them (empty: of matmuls, any)."""
_DATA_SHEET = "roofline"
_NOTED = 0.1
"""The share of the time from which on a finding is a warning: it may change the answer."""


def weighed(
    heard: Diagnostics, workload: Workload, estimates: Sequence[Estimate], hardware: str
) -> Diagnostics:
    """Return the findings of estimators, with warnings for what a tenth of the time or more rests on.

    A model that was chosen alone is no fallback, so that its data sheet is not reported.
    """
    by_estimator, of_products, on_data_sheet = _shares(workload, estimates)
    notes: dict[str, str] = {}
    for code, estimator in _FINDINGS.items():
        share = by_estimator[estimator] if estimator else of_products
        if share >= _NOTED:
            what = f"{estimator} gives" if estimator else "matmuls are"
            notes[code] = f"{what} {share:.0%} of the time"
    found = heard.as_warnings(notes)
    total = sum(on_data_sheet.values())
    if total > 0:
        names = ", ".join(sorted(on_data_sheet, key=lambda name: -on_data_sheet[name]))
        text = f"{total:.0%} of the time follows from the data sheet: no measurement of {names} covers it"
        add = found.warning if total >= _NOTED else found.info
        add("estimate.data-sheet", hardware, text)
    return found


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are infinite
def _shares(
    workload: Workload, estimates: Sequence[Estimate]
) -> tuple[Mapping[str, float], float, Mapping[str, float]]:
    """Return the shares of the time by estimator, of matmuls, and from the data sheet by operation class."""
    ranks = workload.class_sizes
    by_estimator: defaultdict[str, float] = defaultdict(float)
    on_data_sheet: defaultdict[str, float] = defaultdict(float)
    of_products = whole = 0.0
    for graph, said, count in zip(workload.classes, estimates, ranks, strict=True):
        time_ns = np.nan_to_num(said.duration_ns * graph.multiplicity, posinf=0.0) * count
        whole += float(time_ns.sum())
        products = (graph.op_class == OpClass.CONTRACTION) & (time_ns > 0)
        for number, spelling in enumerate(said.estimators):
            mine = (said.estimator == number) & (time_ns > 0)
            name = spelling.partition(":")[0]
            by_estimator[name] += float(time_ns[mine].sum())
            if name != _DATA_SHEET:
                of_products += float(time_ns[mine & products].sum())
            elif len(said.estimators) > 1:
                for code in np.unique(graph.op_class[mine]).tolist():
                    of_class = mine & (graph.op_class == code)
                    on_data_sheet[OpClass(code).name.lower()] += float(time_ns[of_class].sum())
    if not 0 < whole < np.inf:
        return defaultdict(float), 0.0, {}
    for sums in (by_estimator, on_data_sheet):
        for name in sums:
            sums[name] /= whole
    return by_estimator, of_products / whole, on_data_sheet
