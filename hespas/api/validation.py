"""Whether something is right, and by how much not: checks, round trips, accuracy, calibration, comparisons.

What is measured, and the program that ran, are paths or values that were read already. A report holds what
the validator found as ``result``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hespas.api.arguments import checked
from hespas.api.io import Result, read
from hespas.api.preparation import DEFAULT_ESTIMATOR
from hespas.converters import Value
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.errors import UsageError
from hespas.graph.hints import PositiveInt

if TYPE_CHECKING:
    import pandas

    from hespas.hardware import Device
    from hespas.measurements import Measurements
    from hespas.validators.accuracy import Accuracy, Comparison, Thresholds
    from hespas.validators.calibration import Calibration, FitMemory, Suggestions
    from hespas.validators.checker import CheckOptions, CheckResult, Violation
    from hespas.validators.checker import Profile as Rules
    from hespas.validators.roundtrip import RoundTrips

__all__ = [
    "AccuracyReport",
    "CalibrationReport",
    "CheckReport",
    "ComparisonReport",
    "RoundTripReport",
    "SuggestionReport",
    "accuracy",
    "calibrate",
    "check",
    "check_measured",
    "check_recorded",
    "compare",
    "limit_of",
    "read_program",
    "roundtrip",
    "suggest",
]

_Value = TypeVar("_Value")
_Path = str | Path
_Progress = Callable[[int, int], None]


def _paths(given: _Path | Sequence[_Path]) -> list[_Path]:
    """One path, or several of them, as a list."""
    return [given] if isinstance(given, str | Path) else list(given)


def _names(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _sources(given: _Path | Value | Sequence[_Path | Value]) -> list[_Path | Value]:
    return [given] if isinstance(given, str | Path | Profile | Workload) else list(given)


def _rows(report: Result, name: str) -> pandas.DataFrame:
    """A list of the document as a table."""
    import pandas as pd

    return pd.json_normalize(report.to_dict()[name])


# --- Checks and round trips


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Result):
    """What breaks which rule."""

    result: CheckResult

    @property
    def valid(self) -> bool:
        """Whether every input was read and no violation is an error."""
        return self.result.valid

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The first findings of each code."""
        return self.result.violations

    def headline(self) -> str:
        """The verdict, and how many violations there are."""
        paths = ", ".join(each.path for each in self.result.inputs)
        verdict = "valid" if self.valid else "not valid"
        broken = f"{sum(self.result.counts.values()):,} violations"
        return f"{paths or 'nothing read'}, {verdict}, {broken}"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.check/1``."""
        from hespas.validators.checker import check_json

        return check_json(self.result)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per violation."""
        return _rows(self, "violations")


@checked(CheckOptions="hespas.validators.checker:CheckOptions", Rules="hespas.validators.checker:Profile")
def check(
    source: _Path | Workload | Sequence[_Path],
    *,
    profile: Rules | None = None,
    options: CheckOptions | None = None,
) -> CheckReport:
    """Check structure and rank rules of files, of folders of rank files, or of a workload.

    ``profile`` (``chakra``, ``astra-sim``) adds the rules of such traces. An input that cannot be read
    becomes a violation. Raises ``UsageError`` without a source and ``FormatError`` for a broken
    configuration file.
    """
    from hespas.validators.checker import check as run
    from hespas.validators.checker import check_workload

    if isinstance(source, Workload):
        return CheckReport(check_workload(source, profile, options))
    return CheckReport(run([Path(each) for each in _paths(source)], profile, options))


@dataclass(frozen=True, slots=True, repr=False)
class RoundTripReport(Result):
    """What each pair of formats keeps."""

    result: RoundTrips

    @property
    def valid(self) -> bool:
        """Whether everything that was written can be read, and all that was not kept was reported."""
        return self.result.valid

    def headline(self) -> str:
        """The verdict, and of how much."""
        verdict = "all that is not kept is reported" if self.valid else "not valid"
        return f"{len(self.result.inputs):,} files, {len(self.result.cells):,} pairs of formats, {verdict}"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.roundtrip/1``."""
        from hespas.validators.roundtrip import roundtrip_json

        return roundtrip_json(self.result)

    def to_html(self) -> str:
        """The page of ``--html``."""
        from hespas.validators.roundtrip import roundtrip_html

        return roundtrip_html(self.result)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per pair of formats."""
        return _rows(self, "cells")


@checked()
def roundtrip(
    source: _Path | Sequence[_Path],
    *,
    formats: Sequence[str] = (),
    jobs: PositiveInt = 1,
    progress: _Progress | None = None,
) -> RoundTripReport:
    """Take files through every pair of ``formats`` (default: all) and back; ``jobs`` is the number of
    processes. Raises ``FormatError`` for unreadable input, ``UsageError`` for unknown formats and where there
    is nothing to try.
    """
    from hespas.validators.roundtrip import roundtrip as run

    paths = [Path(each) for each in _paths(source)]
    return RoundTripReport(run(paths, formats, jobs=jobs, progress=progress))


# --- Accuracy


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class AccuracyReport(Result):
    """How far estimates are from what was measured, and the ``limits`` held against that.

    ``hardware``, ``estimators``, ``profiles`` and ``workload`` are what was compared.
    """

    result: Accuracy
    limits: Thresholds
    hardware: tuple[str, ...]
    estimators: tuple[str, ...]
    profiles: tuple[Value, ...] = ()
    workload: Workload | None = None

    @property
    def exceeded(self) -> tuple[str, ...]:
        """A sentence for each limit that is passed."""
        return self.result.exceeded(self.limits)

    def headline(self) -> str:
        """The error of each estimator over distinct shapes."""
        rows = (
            f"{row.estimator} on {row.hardware}: MAPE {row.errors.mape:.1%}"
            for row in self.result.summary
            if (row.op_class, row.size, row.level) == ("all", "all", "shape")
            and row.estimator in self.result.estimators
        )
        return ", ".join(rows) or "nothing compared"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.accuracy/1``."""
        from hespas.validators.accuracy import accuracy_json

        return accuracy_json(self.result, self.limits)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per estimator, device, operation class, size and level."""
        return _rows(self, "summary")

    def write(self, folder: _Path, *, overwrite: bool = False) -> None:
        """Write report.html, .json, .csv and .md into a folder. Raises ``OutputError`` where one exists."""
        from hespas.validators.accuracy.report.folder import write_report

        write_report(
            self.result,
            self.limits,
            Path(folder),
            overwrite=overwrite,
            hardware=self.hardware,
            estimators=self.estimators,
            profiles=self.profiles,
            workload=self.workload,
        )


def limit_of(option: str, value: float | None, most: float = inf) -> float:
    """The limit of an option, NaN where it is not given. Raises ``UsageError`` for one that nothing, or
    everything, could pass: below 0, above ``most``, or no finite number.
    """
    if value is None:
        return nan
    if not (isfinite(value) and 0 <= value <= most):
        span = f"a number from 0 to {most:g}" if isfinite(most) else "a number of at least 0"
        raise UsageError(f"`{option}={value:g}` is no limit", hint=f"give {span}: 0.1 is 10 %")
    return value


@checked()
def accuracy(
    measured: _Path | Value | Sequence[_Path | Value] = (),
    *,
    hardware: str | Sequence[str] = (),
    table: _Path | Sequence[_Path] = (),
    workload: _Path | Workload | None = None,
    estimator: str | Sequence[str] = DEFAULT_ESTIMATOR,
    capture: _Path | Sequence[_Path] = (),
    split: str = "",
    max_mape: float | None = None,
    max_e2e: float | None = None,
    min_coverage: float | None = None,
    diagnostics: Diagnostics | None = None,
    progress: _Progress | None = None,
) -> AccuracyReport:
    """Compare estimates with measured profiles (or graphs with times) on ``hardware``, or with tables of
    measured operations, always beside naive baselines and the noise of the measurement.

    ``workload`` is the program that ran; without it, what the profile holds. ``capture`` are traces of the
    capture of the graphs that the profiles replay, or folders of them. ``split`` chooses rows of tables.
    ``max_mape``, ``max_e2e`` and ``min_coverage`` are limits as fractions: see ``exceeded`` of the
    report. Raises ``UsageError`` for what contradicts itself and where nothing can be compared, and what
    ``read`` does.
    """
    from hespas.validators.accuracy import Thresholds, accuracy_of_tables
    from hespas.validators.accuracy import accuracy as of_profiles

    limits = Thresholds(
        max_mape=limit_of("max_mape", max_mape),
        max_e2e=limit_of("max_e2e", max_e2e),
        min_coverage=limit_of("min_coverage", min_coverage, most=1.0),
    )
    recorded, tables, devices, models = _sources(measured), _paths(table), _names(hardware), _names(estimator)
    check_measured(
        recorded, tables, devices, workload=workload, capture=_paths(capture), split=split, max_e2e=max_e2e
    )
    found = diagnostics if diagnostics is not None else Diagnostics()
    program = read_program(workload, found)
    captures = _paths(capture)
    named = [*recorded, *captures, *tables]
    names = [*([_name(workload)] if workload is not None else []), *map(_name, named)]
    if tables:
        result = accuracy_of_tables(
            _measurements(tables, progress), devices, models, split=split, inputs=names, diagnostics=found
        )
        devices = devices or list(dict.fromkeys(each.hardware for each in result.cases))
        return AccuracyReport(result=result, limits=limits, hardware=tuple(devices), estimators=tuple(models))
    profiles = _values(recorded, found, progress, captures)
    result = of_profiles(profiles, devices, models, workload=program, inputs=names, diagnostics=found)
    return AccuracyReport(
        result=result,
        limits=limits,
        hardware=tuple(devices),
        estimators=tuple(models),
        profiles=tuple(profiles),
        workload=program,
    )


def check_measured(
    measured: Sequence[object],
    tables: Sequence[object],
    hardware: Sequence[str],
    *,
    workload: object = None,
    capture: Sequence[object] = (),
    split: str = "",
    max_e2e: float | None = None,
) -> None:
    """Refuse what contradicts itself before anything is read. Raises ``UsageError``."""
    if capture and not any(isinstance(each, str | Path) for each in measured):
        raise UsageError(
            "a capture belongs to a trace that replays it", hint="give the trace with `measured`"
        )
    if tables and (measured or workload is not None):
        raise UsageError(
            "a table states its operations itself", hint="give `table`, or `measured` with `workload`"
        )
    if tables and max_e2e is not None:
        raise UsageError("a table of operations has no step to time", hint="leave `max_e2e` out")
    if not tables and not measured:
        raise UsageError("nothing to compare with", hint="give `measured=PROFILE` or `table=TABLE`")
    if split and not tables:
        raise UsageError("`split` chooses rows of tables", hint="give the table with `table`")
    if measured and not hardware:
        raise UsageError("which device was it measured on?", hint="give `hardware=NAME`: see hespas hardware")


def _name(source: object) -> str:
    return source.name if isinstance(source, Profile | Workload) else str(source)


def _values(
    sources: Sequence[_Path | Value],
    diagnostics: Diagnostics,
    progress: _Progress | None = None,
    captures: Sequence[_Path] = (),
) -> list[Value]:
    found: list[Value] = []
    for place, source in enumerate(sources):
        if progress:
            progress(place, len(sources))
        if not isinstance(source, Profile | Workload):
            source = read(source, diagnostics=diagnostics, capture=captures)  # noqa: PLW2901 # what it holds
        found.append(source)
    return found


def _measurements(paths: Sequence[_Path], progress: _Progress | None) -> list[Measurements]:
    """Tables of measured operations. Raises ``UsageError`` for the same one twice."""
    from hespas.measurements import read_measurements

    found: list[Measurements] = []
    for place, path in enumerate(paths):
        if progress:
            progress(place, len(paths))
        if path in paths[:place]:
            raise UsageError("is given twice", path=str(path))
        found.append(read_measurements(path))
    return found


def read_program(source: _Path | Workload | None, diagnostics: Diagnostics) -> Workload | None:
    """The program that ran, where one is given. Raises ``UsageError`` for a profile."""
    if source is None or isinstance(source, Workload):
        return source
    value = read(source, diagnostics=diagnostics)
    if isinstance(value, Profile):
        raise UsageError("a profile is no program", path=str(source), hint="give it as `measured`")
    return value


# --- Calibration


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CalibrationReport(Result):
    """Fits on measurements, with their errors on what they have not seen."""

    result: Calibration
    inputs: tuple[str, ...]

    @property
    def device(self) -> Device:
        """The device with the new fits."""
        return self.result.device

    def headline(self) -> str:
        """Of which device, and how many fits."""
        count = f"{len(self.result.fits):,} fits, {len(self.result.models):,} learned models"
        return f"{self.device.name}, {count} of {', '.join(self.result.estimators)}"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.calibrate/1``."""
        from hespas.validators.calibration import calibration_json

        return calibration_json(self.result, self.inputs)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per fit."""
        return _rows(self, "fits")

    def write(self, path: _Path, *, overwrite: bool = False) -> Path:
        """Write the hardware file with the fits, and the learned models beside it. Raises ``OutputError``."""
        from hespas.validators.calibration import write_calibration

        return write_calibration(self.result, Path(path), overwrite=overwrite)


def check_recorded(measured: Sequence[object], tables: Sequence[object], workload: object) -> None:
    """Refuse to fit on nothing, or on what contradicts itself, before anything is read."""
    if not measured and not tables:
        raise UsageError("nothing to fit on", hint="give `table=TABLE` or `measured=PROFILE`")
    if workload is not None and not measured:
        raise UsageError("a table states its operations itself", hint="give `workload` with `measured`")


@checked(FitMemory="hespas.validators.calibration:FitMemory")
def calibrate(
    hardware: str | os.PathLike[str],
    *,
    measured: _Path | Value | Sequence[_Path | Value] = (),
    table: _Path | Sequence[_Path] = (),
    workload: _Path | Workload | None = None,
    estimator: str | Sequence[str] = "calibrated",
    split: str = "",
    test_by: str | Sequence[str] | None = None,
    seed: int = 0,
    date: str = "",
    memory: FitMemory | None = None,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> CalibrationReport:
    """Fit estimators on profiles taken on ``hardware`` (a name or a TOML file), or on tables of measured
    operations. ``write`` of the report makes the hardware file.

    ``test_by`` (``shape``, ``recording``, ``op``, ``hardware``) is what is left out to test the fits (None:
    by shape, where there are sizes enough). ``date`` is written into the file (ISO; empty: today). ``memory``
    keeps what is done, so that an interrupted run goes on. Raises ``UsageError`` where nothing can be fitted,
    and what ``read`` does.
    """
    from hespas.hardware import load_device
    from hespas.validators.calibration import calibrate as run
    from hespas.validators.calibration import measurements_of

    recorded, tables = _sources(measured), _paths(table)
    check_recorded(recorded, tables, workload)
    found = diagnostics if diagnostics is not None else Diagnostics()
    device = load_device(hardware)
    rows = _measurements(tables, None)
    program = read_program(workload, found)
    for profile in _values(recorded, found):
        rows.append(measurements_of(profile, device, workload=program, diagnostics=found))
    names = [*([_name(workload)] if workload is not None else []), *map(_name, [*recorded, *tables])]
    result = run(
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
        diagnostics=found,
    )
    return CalibrationReport(result=result, inputs=tuple(names))


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class SuggestionReport(Result):
    """Shapes that are worth measuring next."""

    result: Suggestions
    inputs: tuple[str, ...]

    @property
    def device(self) -> Device:
        """The device to measure on."""
        return self.result.device

    def headline(self) -> str:
        """Of which device, and how many shapes of what."""
        what = ", ".join(f"{each.shapes:,} of {each.kind} in {each.dtype}" for each in self.result.classes)
        return f"{self.device.name}, {what}"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.suggest/1``."""
        from hespas.validators.calibration import suggestion_json

        return suggestion_json(self.result, self.inputs)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per shape as ``write`` writes it, the most worth first; its time is NaN."""
        return self.result.frame

    def write(self, path: _Path, *, overwrite: bool = False) -> Path:
        """Write the shapes as a CSV table with an empty column of times. Raises ``OutputError``."""
        from hespas.files.output import write_atomically

        def fill(temporary: Path) -> None:
            self.result.frame.to_csv(temporary, index=False)

        write_atomically(Path(path), fill, overwrite=overwrite, directory=False)
        return Path(path)


@checked()
def suggest(
    hardware: str | os.PathLike[str],
    count: int,
    *,
    table: _Path | Sequence[_Path] = (),
    kind: str | Sequence[str] = (),
    dtype: str | Sequence[str] = (),
    seed: int = 0,
    diagnostics: Diagnostics | None = None,
) -> SuggestionReport:
    """Say which ``count`` shapes to measure next on ``hardware`` (a name or a TOML file), so that fits on few
    rows tell of all sizes. ``write`` of the report makes a table: with its times filled in, ``calibrate``
    takes it.

    What is suggested stands for other sizes than those in each ``table``, which were measured before.
    ``kind`` (empty: ``matmul``) and ``dtype`` (empty: of bf16, f16 and f32_full the fastest of the device)
    are those that the learned models of the package know. Raises ``UsageError`` for others, and what
    ``read`` does.
    """
    from hespas.hardware import load_device
    from hespas.validators.calibration import suggest as run

    found = diagnostics if diagnostics is not None else Diagnostics()
    device, tables = load_device(hardware), _paths(table)
    result = run(
        device,
        count,
        kinds=_names(kind),
        dtypes=_names(dtype),
        measured=_measurements(tables, None),
        seed=seed,
        diagnostics=found,
    )
    return SuggestionReport(result=result, inputs=tuple(map(str, tables)))


# --- Comparisons


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonReport(Result):
    """Which errors grew, and the limit held against that (NaN: none)."""

    result: Comparison
    max_regression: float = nan

    @property
    def exceeded(self) -> tuple[str, ...]:
        """A sentence for each figure that grew by more than the limit."""
        return self.result.exceeded(self.max_regression)

    def headline(self) -> str:
        """How many figures got worse, and better."""
        grown = sum(each.difference > 0 for each in self.result.changes)
        shrunk = sum(each.difference < 0 for each in self.result.changes)
        return f"{len(self.result.changes):,} figures, {grown:,} worse, {shrunk:,} better"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.compare/1``."""
        from hespas.validators.accuracy import comparison_json

        return comparison_json(self.result, self.max_regression)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per figure of both reports."""
        return _rows(self, "changes")


@checked()
def compare(
    base: _Path | AccuracyReport, new: _Path | AccuracyReport, *, max_regression: float | None = None
) -> ComparisonReport:
    """What got better or worse between two accuracy reports, or the documents that ``accuracy --json`` wrote.

    ``max_regression`` is a fraction: 0.01 is a percentage point. Raises ``FormatError`` for a file that is
    no report, ``UsageError`` where they have nothing in common.
    """
    from hespas.validators.accuracy import compare_reports

    limit = limit_of("max_regression", max_regression)
    one, two = (each.to_json() if isinstance(each, AccuracyReport) else Path(each) for each in (base, new))
    return ComparisonReport(compare_reports(one, two), limit)
