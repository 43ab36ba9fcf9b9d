"""Validation of estimates against measurements: accuracy, calibration, and shapes to measure."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from hespas.api.arguments import (
    Captures,
    ProfiledProgram,
    ReadingTrace,
    Seed,
    Tables,
    checked,
    hardware_option,
)
from hespas.api.documents import Result
from hespas.api.io import read
from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.converters import ReadOptions, Value
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.deprecation import RenamedAttribute, renamed_arguments
from hespas.graph.errors import UsageError
from hespas.graph.hints import AtLeast, Option
from hespas.graph.progress import Progress
from hespas.report import Table, column_of, table_from_records

if TYPE_CHECKING:
    from hespas.fitting.approaches import FitMemory
    from hespas.hardware import Device
    from hespas.hardware.device_fits import Fit
    from hespas.measurements import Measurements
    from hespas.report.charts import Chart
    from hespas.validators.accuracy import Accuracy, Thresholds
    from hespas.validators.accuracy.report.folder import ReportInputs
    from hespas.validators.accuracy.result import EndToEnd, SummaryRow
    from hespas.validators.calibration import Calibration, Suggestions

__all__ = [
    "AccuracyReport",
    "CalibrationReport",
    "SuggestionReport",
    "accuracy",
    "calibrate",
    "check_recorded",
    "limit_of",
    "read_program",
    "suggest_shapes",
]

_Path = str | Path
_FITTED = ("calibrated", "systolic", "learned")
"""Estimators that can be fitted."""


def _paths(paths: _Path | Sequence[_Path]) -> list[_Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _sources(sources: _Path | Value | Sequence[_Path | Value]) -> list[_Path | Value]:
    return [sources] if isinstance(sources, str | Path | Profile | Workload) else list(sources)


def _input_names(workload: _Path | Workload | None, sources: Sequence[_Path | Value]) -> list[str]:
    """Return the names of all inputs of a command: paths, or the names of values."""
    inputs = [*([] if workload is None else [workload]), *sources]
    return [source.name if isinstance(source, Profile | Workload) else str(source) for source in inputs]


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class AccuracyReport(Result):
    """Errors of estimates against measurements, and the ``limits`` with which they are compared.

    ``hardware``, ``estimators``, ``profiles`` and ``workload`` are the inputs of the comparison. ``details``
    is the result of the validator.
    """

    details: Accuracy
    limits: Thresholds
    hardware: tuple[str, ...]
    estimators: tuple[str, ...]
    profiles: tuple[Value, ...] = ()
    workload: Workload | None = None
    result = RenamedAttribute("details")

    @property
    def summary(self) -> tuple[SummaryRow, ...]:
        """Return the errors by estimator, device, operation class, size and level."""
        return self.details.summary

    @property
    def end_to_end(self) -> tuple[EndToEnd, ...]:
        """Return the errors of step times."""
        return self.details.end_to_end

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Return a sentence for each limit (``max_mape``, ``max_e2e``, ``min_coverage``) that is exceeded."""
        return self.details.exceeded(self.limits)

    def headline(self) -> str:
        """Return the summary line: the error of each estimator over distinct shapes."""
        rows = (
            f"{row.estimator} on {row.hardware}: MAPE {row.errors.mape:.1%}"
            for row in self.summary
            if (row.op_class, row.size, row.level) == ("all", "all", "shape")
            and row.estimator in self.details.estimators
        )
        return ", ".join(rows) or "nothing compared"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.accuracy/1``."""
        from hespas.validators.accuracy import accuracy_json

        return accuracy_json(self.details, self.limits)

    def table(self) -> Table:
        """Return a table with one row per estimator, device, operation class, size and level."""
        return table_from_records(self.to_dict()["summary"])

    def write(self, folder: _Path, *, overwrite: bool = False) -> None:
        """Write report.html, .json, .csv and .md into a folder. Raises ``OutputError`` if one of them exists,
        without ``overwrite``.
        """
        from hespas.validators.accuracy.report.folder import write_report

        write_report(self.details, self.limits, Path(folder), self._inputs(), overwrite=overwrite)

    def charts(self) -> tuple[Chart, ...]:
        """Return the predicted over the measured times, the distribution of errors, the rooflines, the
        waterfalls from measured to predicted time, and the timelines.
        """
        return self._inputs().charts(self.details)

    def to_html(self) -> str:
        """Return the page of the report."""
        return self._inputs().html(self.details, self.limits)

    def _inputs(self) -> ReportInputs:
        from hespas.validators.accuracy.report.folder import ReportInputs

        return ReportInputs.of(
            self.details,
            hardware=self.hardware,
            estimators=self.estimators,
            profiles=self.profiles,
            workload=self.workload,
        )


def limit_of(option: str, value: float | None, most: float = inf) -> float:
    """Return the limit that an option sets; NaN if it is not given. Raises ``UsageError`` for a limit below
    0, above ``most``, or not finite.
    """
    if value is None:
        return nan
    if not (isfinite(value) and 0 <= value <= most):
        span = f"a number from 0 to {most:g}" if isfinite(most) else "a number of at least 0"
        raise UsageError(f"`{option}={value:g}` is not a valid limit", hint=f"give {span}: 0.1 is 10 %")
    return value


_Measured = Annotated[
    _Path | Value | Sequence[_Path | Value],
    Option(
        "Read a profile, or a graph with measured times; repeatable.",
        flag="measured",
        metavar="P",
        label="an input",
    ),
]
_MeasuredDevices = Annotated[
    str | Sequence[str],
    Option(
        "Set the measured device; repeatable (default with `table`: all devices in it).",
        metavar="NAME|FILE",
        completes="devices",
    ),
]
_Split = Annotated[
    str, Option("Compare only the rows of this split of the tables, such as devval.", metavar="NAME")
]
_Evaluated = Annotated[
    str | Sequence[str],
    Option(
        f"Evaluate this estimator; repeatable (default: {DEFAULT_ESTIMATOR}).",
        metavar="NAME",
        completes="estimators",
    ),
]
_MaxMape = Annotated[
    float | None,
    Option("Exit with 1 above this MAPE over distinct shapes; 0.2 is 20 %.", metavar="X"),
]
_MaxStep = Annotated[
    float | None, Option("Exit with 1 above this relative error of a whole step.", metavar="X")
]
_MinCoverage = Annotated[
    float | None, Option("Exit with 1 below this matched share of all device time.", metavar="X")
]


@renamed_arguments(measured="profiles")
@checked()
def accuracy(
    profiles: _Measured = (),
    *,
    table: Tables = (),
    hardware: _MeasuredDevices = (),
    split: _Split = "",
    workload: ProfiledProgram = None,
    capture: Captures = None,
    estimator: _Evaluated = DEFAULT_ESTIMATOR,
    max_mape: _MaxMape = None,
    max_e2e: _MaxStep = None,
    min_coverage: _MinCoverage = None,
    options: ReadingTrace = None,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> AccuracyReport:
    """Compare estimates with measured ``profiles`` (or graphs with times) on ``hardware``, or with tables of
    measured operations. The report includes naive baselines and the noise of the measurement.

    ``workload`` is the program that ran; without it, the operations of the profile are estimated. ``capture``
    is one or more traces of graph captures that the profiles replay, or folders of such traces. ``split``
    selects rows of tables. ``max_mape``, ``max_e2e`` and ``min_coverage`` are limits as fractions; the method
    ``exceeded`` of the report checks them. Raises ``UsageError`` for contradicting arguments and if nothing
    can be compared, and the errors of ``read``.

    Examples:
        >>> hespas.accuracy("samples/ffn_train_rank0of2.pt.trace.json.gz", hardware="H100-SXM")
        <AccuracyReport: composite on H100-SXM: MAPE 19.8%>
    """
    from hespas.validators.accuracy import Thresholds

    limits = Thresholds(
        max_mape=limit_of("max_mape", max_mape),
        max_e2e=limit_of("max_e2e", max_e2e),
        min_coverage=limit_of("min_coverage", min_coverage, most=1.0),
    )
    sources, tables, devices, models = _sources(profiles), _paths(table), _names(hardware), _names(estimator)
    captures = _paths(capture or ())
    _check_measured(
        sources, tables, devices, workload=workload, capture=captures, split=split, max_e2e=max_e2e
    )
    sink = diagnostics if diagnostics is not None else Diagnostics()
    program = read_program(workload, sink, options)
    names = _input_names(workload, [*sources, *captures, *tables])
    if tables:
        from hespas.validators.accuracy import accuracy_of_tables

        details = accuracy_of_tables(
            _read_tables(tables, progress), devices, models, split=split, inputs=names, diagnostics=sink
        )
        devices = devices or list(dict.fromkeys(case.hardware for case in details.cases))
        return AccuracyReport(
            details=details, limits=limits, hardware=tuple(devices), estimators=tuple(models)
        )
    from hespas.validators.accuracy import accuracy as accuracy_of_profiles

    values = _read_values(sources, sink, options, progress, captures)
    details = accuracy_of_profiles(values, devices, models, workload=program, inputs=names, diagnostics=sink)
    return AccuracyReport(
        details=details,
        limits=limits,
        hardware=tuple(devices),
        estimators=tuple(models),
        profiles=tuple(values),
        workload=program,
    )


def _check_measured(
    profiles: Sequence[object],
    tables: Sequence[object],
    hardware: Sequence[str],
    *,
    workload: object = None,
    capture: Sequence[object] = (),
    split: str = "",
    max_e2e: float | None = None,
) -> None:
    """Raise ``UsageError`` for contradicting arguments of :func:`accuracy`, before anything is read."""
    if capture and not any(isinstance(profile, str | Path) for profile in profiles):
        raise UsageError("`capture` requires the trace of the replay", hint="give the trace with `profiles`")
    if tables and (profiles or workload is not None):
        raise UsageError(
            "`table` cannot be combined with `profiles` or `workload`",
            hint="give `table`, or `profiles` with `workload`",
        )
    if tables and max_e2e is not None:
        raise UsageError("`max_e2e` limits errors of steps, and a table has none", hint="leave `max_e2e` out")
    if not tables and not profiles:
        raise UsageError("no measurements to compare with", hint="give `profiles=PROFILE` or `table=TABLE`")
    if split and not tables:
        raise UsageError("`split` selects rows of a table, and no table is given", hint="add `table=TABLE`")
    if profiles and not hardware:
        raise UsageError(
            "the device that the profiles were recorded on is not named",
            hint="give `hardware=NAME`: see hespas hardware list",
        )


def _read_values(
    sources: Sequence[_Path | Value],
    diagnostics: Diagnostics,
    options: ReadOptions | None,
    progress: Progress | None = None,
    captures: Sequence[_Path] | None = None,
) -> list[Value]:
    values: list[Value] = []
    for done, source in enumerate(sources):
        if progress:
            progress(done, len(sources))
        if isinstance(source, Profile | Workload):
            values.append(source)
        else:
            values.append(read(source, options=options, diagnostics=diagnostics, capture=captures))
    return values


def _read_tables(paths: Sequence[_Path], progress: Progress | None) -> list[Measurements]:
    """Read tables of measured operations. Raises ``UsageError`` for a table that is given twice."""
    from hespas.measurements import read_measurements

    tables: list[Measurements] = []
    for done, path in enumerate(paths):
        if progress:
            progress(done, len(paths))
        if path in paths[:done]:
            raise UsageError("is given twice", path=str(path), hint="give each table once")
        tables.append(read_measurements(path))
    return tables


def read_program(
    source: _Path | Workload | None, diagnostics: Diagnostics, options: ReadOptions | None = None
) -> Workload | None:
    """Read the program that ran, if given. Raises ``UsageError`` for a profile."""
    if source is None or isinstance(source, Workload):
        return source
    value = read(source, options=options, diagnostics=diagnostics)
    if isinstance(value, Profile):
        raise UsageError("a profile is not a program", path=str(source), hint="give it as `profiles`")
    return value


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CalibrationReport(Result):
    """Fits on measurements, with their errors on held-out measurements. ``details`` is the validator's own
    result.
    """

    details: Calibration
    inputs: tuple[str, ...]
    result = RenamedAttribute("details")

    @property
    def device(self) -> Device:
        """Return the device with the new fits."""
        return self.details.device

    @property
    def fits(self) -> tuple[Fit, ...]:
        """Return the new fits."""
        return self.details.fits

    def headline(self) -> str:
        """Return the summary line: the device, the numbers of fits and learned models, and the estimators."""
        count = f"{len(self.fits):,} fits, {len(self.details.models):,} learned models"
        return f"{self.device.name}, {count} of {', '.join(self.details.estimators)}"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.calibrate/1``."""
        from hespas.validators.calibration import calibration_json

        return calibration_json(self.details, self.inputs)

    def table(self) -> Table:
        """Return the result as a table with one row per fit."""
        return table_from_records(self.to_dict()["fits"])

    def write(self, path: _Path, *, overwrite: bool = False) -> Path:
        """Write the hardware file with the fits, and the learned models in the same folder. Raises
        ``OutputError``.
        """
        from hespas.validators.calibration import write_calibration

        return write_calibration(self.details, Path(path), overwrite=overwrite)


def check_recorded(
    profiles: Sequence[object], tables: Sequence[object], workload: object, estimators: Sequence[str]
) -> None:
    """Raise ``UsageError`` for missing or contradicting arguments of :func:`calibrate`, before anything is
    read.
    """
    if not profiles and not tables:
        raise UsageError("no measurements to fit to", hint="give `table=TABLE` or `profiles=PROFILE`")
    if workload is not None and not profiles:
        raise UsageError(
            "`workload` is the program of `profiles`, and none are given",
            hint="add `profiles=PROFILE`, or leave `workload` out",
        )
    for name in estimators:
        if name not in _FITTED:
            raise UsageError(
                f"`estimator={name}`: expected one of {', '.join(_FITTED)}", hint="`estimator=calibrated`"
            )


_CalibratedDevice = Annotated[
    str | os.PathLike[str],
    hardware_option("Calibrate this device; its data sheet and other fits are kept."),
]
_Recorded = Annotated[
    _Path | Value | Sequence[_Path | Value],
    Option("Read a profile from the device; repeatable.", flag="measured", metavar="P", label="an input"),
]
_Fitted = Annotated[
    str | Sequence[str],
    Option(
        "Fit this estimator; repeatable (default: calibrated). calibrated fits the roofline and the "
        "collectives, systolic the times of a systolic array, learned decision trees (written to the folder "
        "FILE.learned). With `end_to_end`: the estimator that predicts the steps (default: composite).",
        metavar="NAME",
        completes="estimators",
    ),
]
_FittedSplit = Annotated[
    str, Option("Fit on rows of this split (default: all except held-out rows).", metavar="NAME")
]
_Test = Literal["shape", "recording", "op", "hardware"]
_HeldOut = Annotated[
    _Test | Sequence[_Test] | None,
    Option(
        "Test the fits by leaving out one shape, recording, op or hardware at a time; repeatable "
        "(default: shape)."
    ),
]
_Date = Annotated[str, Option("Set the date in the file (default: today).", metavar="YYYY-MM-DD")]


@renamed_arguments(measured="profiles")
@checked(FitMemory="hespas.fitting.approaches:FitMemory")
def calibrate(
    hardware: _CalibratedDevice,
    *,
    profiles: _Recorded = (),
    table: Tables = (),
    workload: ProfiledProgram = None,
    estimator: _Fitted = "calibrated",
    split: _FittedSplit = "",
    test_by: _HeldOut = None,
    seed: Seed = 0,
    date: _Date = "",
    options: ReadingTrace = None,
    memory: FitMemory | None = None,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> CalibrationReport:
    """Fit estimators on profiles taken on ``hardware`` (a name or a TOML file), or on tables of measured
    operations. ``write`` of the report makes the hardware file.

    ``test_by`` (``shape``, ``recording``, ``op``, ``hardware``) selects what is held out to test the fits
    (None: shapes, if there are enough sizes). ``date`` is written into the file (ISO; empty: today).
    ``memory`` caches finished fits, so that an interrupted run can be resumed. Raises ``UsageError`` if
    nothing can be fitted, and what ``read`` raises.

    Examples:
        >>> recording = "samples/recorded/train-small.xplane.pb.gz"
        >>> hespas.calibrate("samples/recorded/recorded-cpu.toml", profiles=recording)
        <CalibrationReport: recorded-cpu, 3 fits, 0 learned models of calibrated>
    """
    from hespas.hardware import load_device
    from hespas.validators.calibration import calibrate as fit_device
    from hespas.validators.calibration import measurements_of

    sources, tables = _sources(profiles), _paths(table)
    check_recorded(sources, tables, workload, _names(estimator))
    sink = diagnostics if diagnostics is not None else Diagnostics()
    device = load_device(hardware)
    rows = _read_tables(tables, None)
    program = read_program(workload, sink, options)
    for value in _read_values(sources, sink, options):
        rows.append(measurements_of(value, device, workload=program, diagnostics=sink))
    names = _input_names(workload, [*sources, *tables])
    details = fit_device(
        rows,
        device,
        estimators=_names(estimator),
        split=split,
        tests=None if test_by is None else _names(test_by),
        seed=seed,
        fitted=date,
        inputs=names,
        memory=memory,
        progress=progress,
        diagnostics=sink,
    )
    return CalibrationReport(details=details, inputs=tuple(names))


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class SuggestionReport(Result):
    """Shapes to measure next. ``details`` is the validator's own result."""

    details: Suggestions
    inputs: tuple[str, ...]
    result = RenamedAttribute("details")

    @property
    def device(self) -> Device:
        """Return the device to measure on."""
        return self.details.device

    def headline(self) -> str:
        """Return the summary line: the device, and the number of shapes by kind and element type."""
        counts = ", ".join(f"{row.shapes:,} of {row.kind} in {row.dtype}" for row in self.details.classes)
        return f"{self.device.name}, {counts}"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.suggest/1``."""
        from hespas.validators.calibration import suggestion_json

        return suggestion_json(self.details, self.inputs)

    def table(self) -> Table:
        """Return a table with one row per shape, the most informative first; its time is NaN."""
        frame = self.details.frame
        columns = {str(name): frame[name].tolist() for name in frame.columns}
        return Table(tuple(map(column_of, columns)), columns)

    def write(self, path: _Path, *, overwrite: bool = False) -> Path:
        """Write the shapes as a CSV table with an empty column of times. Raises ``OutputError``."""
        from hespas.files.output import write_atomically

        def fill(temporary: Path) -> None:
            temporary.write_text(self.table().to_csv(), encoding="utf-8")

        write_atomically(Path(path), fill, overwrite=overwrite, directory=False)
        return Path(path)


_Count = Annotated[
    int,
    AtLeast(1),
    Option(
        "Write N shapes to measure next, not in `table`, to `out` FILE.csv; fit nothing.",
        flag="suggest",
        metavar="N",
        is_required=False,
    ),
]
_Kind = Annotated[
    str | Sequence[str],
    Option("With `suggest`: suggest shapes of this kind; repeatable (default: matmul).", metavar="KIND"),
]
_Dtype = Annotated[
    str | Sequence[str],
    Option(
        "With `suggest`: suggest shapes of this dtype; repeatable (default: fastest of bf16, f16 and "
        "f32_full).",
        metavar="DTYPE",
    ),
]


@checked()
def suggest_shapes(
    hardware: _CalibratedDevice,
    count: _Count,
    *,
    table: Tables = (),
    kind: _Kind = (),
    dtype: _Dtype = (),
    seed: Seed = 0,
    diagnostics: Diagnostics | None = None,
) -> SuggestionReport:
    """Suggest ``count`` shapes to measure next on ``hardware`` (a name or a TOML file), so that fits to few
    rows predict all sizes. The method ``write`` of the report writes a table. After its times are filled in,
    ``calibrate`` reads it.

    Sizes that the rows of each ``table`` represent are not suggested again. ``kind`` (empty: ``matmul``) and
    ``dtype`` (empty: the fastest of bf16, f16 and f32_full on the device) are kinds and element types of the
    learned models in the package. Raises ``UsageError`` for others, and the errors of ``read``.

    Examples:
        >>> hespas.suggest_shapes("H100-SXM", 3)
        <SuggestionReport: H100-SXM, 3 of matmul in bf16>
    """
    from hespas.hardware import load_device
    from hespas.validators.calibration import suggest

    sink = diagnostics if diagnostics is not None else Diagnostics()
    device, tables = load_device(hardware), _paths(table)
    details = suggest(
        device,
        count,
        kinds=_names(kind),
        dtypes=_names(dtype),
        measured=_read_tables(tables, None),
        seed=seed,
        diagnostics=sink,
    )
    return SuggestionReport(details=details, inputs=tuple(map(str, tables)))
