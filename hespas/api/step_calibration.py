"""Calibration of whole steps: factors of a device by framework and phase, from a table of recorded steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import exp, inf, log, nan
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from hespas.api.arguments import checked
from hespas.api.documents import Document, Result, findings
from hespas.api.simulation import simulate
from hespas.api.simulation_result import SimulationResult
from hespas.estimators.configuration import AUTO
from hespas.estimators.step_intervals import NO_FACTOR
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.tables import Column, read_typed_table
from hespas.files.trust import file_in_folder_of
from hespas.fitting.effects import fit_step_factor
from hespas.graph import Diagnostics, StepPhase
from hespas.graph.errors import UsageError
from hespas.graph.progress import Progress
from hespas.hardware import Device, StepFactor, canonical_name, load_device, write_device
from hespas.report import Table, table_from_records
from hespas.report.texts import counted
from hespas.validators.calibration.calibrate import KEPT_SPLIT

__all__ = [
    "FittedStepFactor",
    "StepFactorsDocument",
    "StepFactorsReport",
    "StepWorkload",
    "calibrate_steps",
]


class FittedStepFactor(StepFactor, frozen=True, kw_only=True):
    """Row of a calibration of whole steps. The errors are the mean relative errors of the workloads: without
    a factor, and with the factor that all other workloads give.
    """

    before_mape: Figure
    after_mape: Figure


class StepWorkload(msgspec.Struct, frozen=True):
    """Measured workload of a calibration of whole steps. ``ratio`` is the measured over the predicted time,
    the geometric mean over ``rows``. ``before`` and ``after`` are the relative errors of the prediction:
    without a factor, and with the factor that the other workloads give.
    """

    framework: str
    phase: StepPhase
    workload: str
    rows: Count
    ratio: Figure
    before: Figure
    after: Figure


class StepFactorsDocument(Document, frozen=True, kw_only=True):
    """Result of hespas-validate calibrate --end-to-end for whole steps."""

    schema: Literal["hespas.step_factors/1"] = "hespas.step_factors/1"
    hardware: str
    estimator: str
    factors: list[FittedStepFactor]
    workloads: list[StepWorkload]


@dataclass(frozen=True, slots=True, repr=False)
class StepFactorsReport(Result):
    """Factors on whole steps of a device, and their errors on workloads that were left out of the fit.
    ``device`` has the factors; :meth:`write` writes its file.
    """

    page_title: ClassVar[str] = "Step factors of a device"

    device: Device
    factors: tuple[FittedStepFactor, ...]
    workloads: tuple[StepWorkload, ...]
    source: str
    estimator: str
    diagnostics: Diagnostics

    def headline(self) -> str:
        """Return the summary line: the number of factors, and the errors of left-out workloads."""
        before, after = (
            sum(abs(error) for error in errors) / len(errors)
            for errors in (
                [workload.before for workload in self.workloads],
                [workload.after for workload in self.workloads],
            )
        )
        applied = sum(factor.share > 0 for factor in self.factors)
        rows = sum(factor.rows for factor in self.factors)
        return (
            f"{self.device.name}, {applied} of {counted(len(self.factors), 'step factor')} applied, from "
            f"{counted(rows, 'step')} of {counted(len(self.workloads), 'workload')}; mean error {before:.1%} "
            f"before, {after:.1%} on workloads left out"
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.step_factors/1``."""
        return document_bytes(
            StepFactorsDocument(
                inputs=[self.source],
                diagnostics=findings(self.diagnostics),
                hardware=self.device.name,
                estimator=self.estimator,
                factors=list(self.factors),
                workloads=list(self.workloads),
            )
        )

    def table(self) -> Table:
        """Return the result as a table with one row per framework and phase."""
        return table_from_records(self.to_dict()["factors"])

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the file of the device with the factors. Raises ``OutputError`` if the file exists, without
        ``overwrite``, or if learned models of the device are outside of its folder.
        """
        write_device(self.device, path, overwrite=overwrite)


class _StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a table of recorded steps."""

    device: str
    framework: str
    phase: StepPhase
    workload: str
    step_ns: Annotated[float, Column(is_open=True, unit="ns")]
    predicted_ns: Annotated[float, Column(is_open=True, unit="ns")] = nan
    model: str = ""
    split: str = ""


_RATIO_BOUNDS = 0.1, 10.0
"""Limits of measured over predicted time: a ratio beyond them is a wrong unit, or another workload."""


@checked()
def calibrate_steps(
    hardware: str,
    table: str | Path,
    *,
    estimator: str = AUTO,
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> StepFactorsReport:
    """Fit a factor on the time of whole steps on ``hardware`` for each framework and phase of ``table``,
    which has one row per recorded step.

    Columns: ``device``, ``framework`` (such as torch, jax or megatron), ``phase``, ``workload`` (the path of
    a file that :func:`simulate` reads, in the folder of the table) and ``step_ns``; optional are
    ``predicted_ns`` (the time that Hespas predicts without a factor; ``workload`` is then only a name),
    ``model`` (workloads of one model count as one) and ``split`` (rows of devval are not fitted).

    A factor shrinks towards 1, and is applied as far as left-out workloads justify: not at all with fewer
    than three (:func:`hespas.fitting.effects.fit_step_factor`). It holds only for ``estimator``.

    Raises ``UsageError`` if the table has no row of the device, ``FormatError`` for a malformed table and for
    steps that take less than 0.1 or more than 10 times their prediction, ``BoundaryError`` for a path outside
    of the folder, and what :func:`simulate` raises.
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    device, path = load_device(hardware), Path(table)

    def simulated(file: Path) -> SimulationResult:
        return simulate(file, hardware, estimator=estimator, step_factor=NO_FACTOR, diagnostics=sink)

    factors: list[FittedStepFactor] = []
    workloads: list[StepWorkload] = []
    for (framework, phase), steps in _log_ratios(path, device, simulated, progress, sink).items():
        names = [name for name, _ in steps]
        fit = fit_step_factor(names, np.array([error for _, error in steps]))
        factor = FittedStepFactor(
            framework=framework,
            phase=phase,
            estimator=estimator,
            factor=exp(fit.mean),
            std_error=fit.std_error,
            share=fit.share,
            ratio=exp(fit.log_ratio),
            rows=len(steps),
            workloads=len(fit.workloads),
            table=path.name,
            fitted=datetime.now(UTC).date().isoformat(),
            before_mape=float(np.abs(fit.before).mean()),
            after_mape=float(np.abs(fit.after).mean()),
        )
        factors.append(factor)
        for name, before, after in zip(fit.workloads, fit.before.tolist(), fit.after.tolist(), strict=True):
            ratio, count = 1.0 / (1.0 + before), names.count(name)
            workloads.append(StepWorkload(framework, phase, name, count, ratio, before, after))
    if not factors:
        raise UsageError(
            f"{table}: no step of {device.name} can be predicted", hint="see the warnings about its workloads"
        )
    fields = StepFactor.__struct_fields__
    new = {row.name: StepFactor(**{name: getattr(row, name) for name in fields}) for row in factors}
    kept = (row for row in device.step_factors if row.name.casefold() not in new)
    fitted = replace(device, step_factors=(*kept, *new.values()))
    return StepFactorsReport(fitted, tuple(factors), tuple(workloads), str(table), estimator, sink)


def _log_ratios(
    path: Path,
    device: Device,
    simulated: Callable[[Path], SimulationResult],
    progress: Progress | None,
    diagnostics: Diagnostics,
) -> dict[tuple[str, StepPhase], list[tuple[str, float]]]:
    """Return the workload and ln(measured / predicted) of each step of the device that may be fitted, by
    framework and phase. Workloads of which only a lower bound is known are left out, with a warning.
    """
    rows = list(read_typed_table(path, _StepRow))
    names = {name.casefold() for name in (device.name, *device.aliases)}
    own = [
        (row, cells)
        for row, cells in rows
        if cells.device.casefold() in names or canonical_name(cells.device) == device.name
    ]
    fitted = [(row, cells) for row, cells in own if cells.split != KEPT_SPLIT]
    if not fitted:
        devices = sorted({cells.device for _, cells in rows})
        reserved = f": all are of the split {KEPT_SPLIT}" if own else ""
        raise UsageError(
            f"{path} has no row of {device.name} that may be fitted{reserved}",
            hint=f"choose a device of the table: {', '.join(devices)}",
        )
    message = f"rows are of other devices than {device.name}: not fitted"
    diagnostics.info("calibrate.other-devices", str(path), message, count=len(rows) - len(own))
    message = "rows reserved for testing: not fitted"
    diagnostics.info("calibrate.kept-rows", str(path), message, count=len(own) - len(fitted))
    files: dict[str, Path] = {}
    for row, cells in fitted:
        if not cells.predicted_ns > 0:
            file = file_in_folder_of(path, cells.workload, f"row {row.row}, column workload")
            if not file.exists():
                expected = "the name of a file in the folder of the table, or fill in predicted_ns"
                raise row.fault("workload", f"{cells.workload!r} does not exist", expected)
            files.setdefault(cells.workload, file)
    times_ns: dict[str, float] = {}
    for number, (name, file) in enumerate(files.items()):
        if progress:
            progress(number, len(files))
        done = simulated(file)
        message = "the workload has operations of unknown duration: its steps are not fitted"
        diagnostics.warning("calibrate.untimed", name, message, count=int(done.is_lower_bound))
        times_ns[name] = nan if done.is_lower_bound else done.step_ns
    ratios: dict[tuple[str, StepPhase], list[tuple[str, float]]] = {}
    low, high = _RATIO_BOUNDS
    for row, cells in fitted:
        predicted_ns = cells.predicted_ns if cells.predicted_ns > 0 else times_ns[cells.workload]
        if not 0 < predicted_ns < inf:
            continue
        if not low <= cells.step_ns / predicted_ns <= high:
            problem = f"is {cells.step_ns / predicted_ns:.3g} times the predicted {predicted_ns:,.0f} ns"
            raise row.fault("step_ns", problem, "the time of one step of the whole workload in nanoseconds")
        ratio = cells.model or cells.workload, log(cells.step_ns / predicted_ns)
        ratios.setdefault((cells.framework.casefold(), cells.phase), []).append(ratio)
    return ratios
