"""Errors of the shipped estimators on measurements: ``docs/accuracy/index.md`` and the pages that it links.

    python -m tools.accuracy --tables DIR [--profiles DIR] [--split devval] [--estimator NAME] [--date DATE]

evaluates every table of measured operations and every profile in the folders like `hespas-validate accuracy`,
and writes the figures to ``docs/accuracy/accuracy.json``. The pages show these figures. Without ``--tables``
and ``--profiles`` the command writes the pages from the existing figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from hespas import api
from hespas._version import __version__
from hespas.estimators import estimator_names
from hespas.estimators.step_intervals import step_intervals
from hespas.fitting.fits import with_fits
from hespas.graph import Profile
from hespas.graph.errors import FormatError, HespasError, UsageError
from hespas.hardware import Device, find_device, load_device, write_device
from hespas.measurements import Measurements, read_measurements
from hespas.validators.accuracy import Accuracy, Thresholds, accuracy, accuracy_json, accuracy_of_tables
from tools.figures import FIGURES, Errors, Figures, Row, Section, read_figures
from tools.goals import goals_section, growth_section, left_out_section, shipped_cards
from tools.kernels import Trace, fits_without, kernel_tables, model_of, recorded_traces
from tools.step_intervals import step_interval_table

__all__ = ["DOCS", "accuracy_pages", "main"]

DOCS = Path(__file__).parents[1] / "docs" / "accuracy"
_PAGE, _FOLDER = "index.md", "tables"
_ESTIMATORS = ("roofline", "calibrated", "learned", "collectives", "systolic", "composite")
_NAIVE = "overhead+two-efficiencies"
_ON_OTHERS = "calibrated on the other profiles"
_ON_OTHER_DEVICES = "calibrated on other devices' profiles"
_NO_LIMITS = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
_TABLES = (".parquet", ".csv", ".csv.gz")
_INTRODUCTION = """# Accuracy

This page has the errors of the estimators that ship with Hespas, on tables of measured operations and on
profiles of programs. Made by `python -m tools.accuracy --tables DIR --profiles DIR` from reports of
`hespas-validate accuracy`; do not edit. The figures alone are in [accuracy.json](accuracy.json).

Errors are relative to the measurement, (predicted - measured) / measured. Columns and rows of the tables:

- *MAPE* is the mean absolute error, *bias* the mean error.
- *in 90 %* is the share of measurements inside the estimator's 90 % interval.
- *naive* is a simple baseline (overhead+two-efficiencies): one launch time and one efficiency per class,
  fitted on rows that are not compared. For a profile it is fitted on four fifths of the profile's own
  shapes.
- *noise* is a lower bound for the error of every estimator: the error of the best constant per shape, for
  shapes that were measured repeatedly.
- *calibrated on the other profiles* is the estimator `composite` after
  `hespas-validate calibrate --measured` on profiles of the same device. The compared model is left out. If
  the device has no other profiles, it is *calibrated on other devices' profiles*. For these rows all fits
  on profiles exclude the model on every device (`python -m benchmarks.carry_over.traces`, which also prints
  a baseline that is fitted on other profiles).
- The fits that ship use all profiles, so the errors of shipped fits on profiles show the quality of the fit
  and not of the extrapolation.

## Blind or not

| figures | rows that are compared | blind |
| --- | --- | --- |
| tables of operations, on this page | split `devval` | yes: no fit used their sizes |
| `learned` on devices and families that were left out | all of the device | yes |
| profiles, calibrated on others | the model is in no fit | yes |
| profiles, shipped fits | the same profiles | no: the fits use them |
| [training runs](training.md) | published rows | no: some constants were chosen with them |
| the same, `leave-group-out` | groups left out | the correction is, those constants are not |
| [servers](serving.md) | split `devval` | the fits are: they use other rows |

[Round trips](roundtrip.md) shows what conversions lose.

Each table of measurements has its own page with every device and class: follow the names in the tables
below. Two more pages have the [profiles](tables/profiles.md) and the
[devices left out](tables/devices-left-out.md) of the fits of learned models.
"""
_BEHIND = """# {title}

Made by `python -m tools.accuracy`; do not edit. The columns are explained in [accuracy](../index.md).
"""


class _Summary(msgspec.Struct, frozen=True):
    estimator: str
    hardware: str
    level: str
    op_class: str
    size: str
    n: int
    of: int
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    interval_coverage: float | None
    sum_error: float | None


class _Noise(msgspec.Struct, frozen=True):
    hardware: str
    n: int
    mape: float | None


class _Report(msgspec.Struct, frozen=True):
    summary: list[_Summary]
    noise: list[_Noise]


def _section(done: Accuracy, name: str, provenance: str, level: str) -> Section:
    """Return the figures of one report, by family of classes if its classes have families."""
    report = msgspec.json.decode(accuracy_json(done, _NO_LIMITS), type=_Report)
    shown = {name for cases in done.cases for name in cases.families}
    shown = shown or {"all"}
    noise = {row.hardware: row.mape for row in report.noise if row.n}
    found: dict[tuple[str, str], dict[str, _Summary]] = {}
    sums = {
        (row.hardware, row.op_class, row.estimator): row.sum_error
        for row in report.summary
        if (row.level, row.size) == ("instance", "all")
    }
    for row in report.summary:
        if row.level == level and row.size == "all" and row.op_class in shown:
            found.setdefault((row.hardware, row.op_class), {})[row.estimator] = row
    rows = [
        Row(
            hardware=hardware,
            op_class=op_class,
            of=max(row.of for row in by_estimator.values()),
            noise=_rounded(noise.get(hardware)),
            errors={
                estimator: _errors(row, sums.get((hardware, op_class, estimator)))
                for estimator, row in by_estimator.items()
                if estimator in (*done.estimators, _NAIVE) and row.n
            },
        )
        for (hardware, op_class), by_estimator in sorted(found.items(), key=lambda item: item[0][::-1])
    ]
    return Section(name=name, provenance=provenance, rows=rows)


def _errors(row: _Summary, sum_error: float | None) -> Errors:
    return Errors(
        n=row.n,
        mape=_rounded(row.mape),
        median_ape=_rounded(row.median_ape),
        p90_ape=_rounded(row.p90_ape),
        bias=_rounded(row.bias),
        interval_coverage=_rounded(row.interval_coverage),
        sum_error=_rounded(sum_error),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _of_tables(folder: Path, split: str, estimators: Sequence[str]) -> Iterator[Section]:
    """Yield the figures of every table with operations of known devices."""
    for path in sorted(folder.iterdir()):
        if not path.name.endswith(_TABLES):
            continue
        try:
            table = read_measurements(path)
            # The database has rows of the same table, without the rows that are compared.
            names = (*estimators, f"database:path={path}") if len(table.part(split)) else estimators
            done = accuracy_of_tables([table], (), names, split=split, inputs=[path.name])
        except (FormatError, UsageError) as error:
            sys.stderr.write(f"{path.name}: skipped: {error.message[:200]}\n")
            continue
        sys.stderr.write(f"{path.name}: {sum(map(len, done.cases)):,} rows\n")
        yield _section(done, path.name, table.provenance, "instance")


def _of_profiles(folder: Path, tables: Path | None, estimators: Sequence[str]) -> Iterator[Section]:
    """Yield the figures of every profile of a known device that has operations to compare."""
    profiles = _profiles(folder)
    recorded = recorded_traces(folder)
    measured = [] if tables is None else kernel_tables(tables)
    for name, (profile, hardware) in profiles.items():
        try:
            done = accuracy([profile], [hardware], estimators, inputs=[name])
            section = _section(done, name, f"recorded on {profile.devices[0]}", "shape")
            yield _with_others(section, (name, profile), recorded, hardware, measured)
        except HespasError as error:
            sys.stderr.write(f"{name}: skipped: {error.message[:200]}\n")


def _profiles(folder: Path) -> dict[str, tuple[Profile, str]]:
    """Return profiles and their devices by file name."""
    found: dict[str, tuple[Profile, str]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".csv":
            continue
        try:
            profile = api.read(path)
            if isinstance(profile, Profile) and profile.devices:
                found[path.name] = (profile, find_device(profile.devices[0]))
        except HespasError as error:
            sys.stderr.write(f"{path.name}: skipped: {error.message[:200]}\n")
    return found


def _with_others(
    section: Section,
    compared: tuple[str, Profile],
    recorded: Sequence[tuple[Trace, Measurements]],
    hardware: str,
    measured: Sequence[tuple[Measurements, Device]],
) -> Section:
    """Return the section with the errors of the composite estimator, calibrated on the recordings of other
    models: on the device, and for common kernels on any device.
    """
    name, profile = compared
    device, model = load_device(hardware), model_of(name)
    others = [(table, load_device(each.hardware)) for each, table in recorded if each.model != model]
    label = _ON_OTHERS if any(other.name == hardware for _, other in others) else _ON_OTHER_DEVICES
    fitted = with_fits(device, fits_without(others, measured, device))
    with TemporaryDirectory() as folder:
        path = Path(folder, "fitted.toml")
        write_device(fitted, path)
        done = accuracy([profile], [str(path)], ["composite"], inputs=[name])
    more = {row.op_class: row.errors for row in _section(done, name, "", "shape").rows}
    rows = [
        msgspec.structs.replace(
            row, errors=row.errors | {label: more[row.op_class]["composite"]}
        ) if "composite" in more.get(row.op_class, {}) else row
        for row in section.rows
    ]  # fmt: skip
    return msgspec.structs.replace(section, rows=rows)


def accuracy_pages(figures: Figures) -> Mapping[str, str]:
    """Return the pages by their names in ``docs``: the summary, one page per table, the profiles, and the
    devices left out.
    """
    cards = shipped_cards()
    about = (
        f"The figures are of version {figures.hespas_version}, made on {figures.date}. Tables of "
        f"measurements: each row of the split `{figures.split}` counts once, and no fit used their sizes. "
        "Profiles: each distinct shape counts once.\n"
    )
    summary = [_INTRODUCTION, about]
    if growth := growth_section(figures.profiles, cards):
        summary.append(growth)
    if goals := goals_section(figures.tables, figures.profiles, cards):
        summary.append(goals)
    if figures.tables:
        summary.append(step_interval_table(step_intervals().values()))
        summary += ["## Mean over devices\n", _means(figures.tables)]
    behind = {_page_of(section): _section_page(section) for section in figures.tables}
    profiles = [part for each in figures.profiles for part in (f"## {each.name}\n", *_section_parts(each))]
    behind["profiles.md"] = "\n".join((_BEHIND.format(title="Profiles"), *profiles))
    if left_out := left_out_section(cards):
        behind["devices-left-out.md"] = "\n".join((_BEHIND.format(title="Devices left out"), left_out))
    return {_PAGE: "\n".join(summary)} | {f"{_FOLDER}/{name}": text for name, text in behind.items()}


def _page_of(section: Section) -> str:
    return f"{section.name.partition('.')[0]}.md"


def _section_page(section: Section) -> str:
    return "\n".join((_BEHIND.format(title=section.name), *_section_parts(section)))


def _section_parts(section: Section) -> Sequence[str]:
    return f"Data: {section.provenance}.\n", _rows(section)


def _estimators_of(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.errors)
    return [name for name in names if name != _NAIVE]


def _means(sections: Sequence[Section]) -> str:
    """Return a table with the MAPE of each class of each table, averaged over its devices."""
    names = _estimators_of(row for section in sections for row in section.rows)
    lines: list[list[str]] = []
    for section in sections:
        for op_class in dict.fromkeys(row.op_class for row in section.rows):
            rows = [row for row in section.rows if row.op_class == op_class]
            columns = [
                _mean([row.errors[name].mape for row in rows if name in row.errors])
                for name in (*names, _NAIVE)
            ]
            count = sum(row.of for row in rows)
            lines.append(
                [
                    f"[`{section.name}`]({_FOLDER}/{_page_of(section)})",
                    op_class,
                    str(len(rows)),
                    f"{count:,}",
                    *map(_percent, columns),
                ]
            )
    return _table(("table", "class", "devices", "rows", *names, "naive"), lines)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rows(section: Section) -> str:
    """Return a table with a line per device, class and estimator. The first line of a class has the columns
    that its estimators share.
    """
    lines: list[list[str]] = []
    for row in section.rows:
        naive = row.errors.get(_NAIVE)
        shared = [
            row.hardware,
            row.op_class,
            f"{row.of:,}",
            _percent(row.noise),
            _percent(naive.mape if naive else None),
        ]
        for name in _estimators_of([row]):
            errors = row.errors[name]
            covered = f"{errors.n / row.of:.0%}" if errors.n < row.of else "all"
            lines.append(
                [
                    *shared,
                    name,
                    covered,
                    *map(_percent, (errors.mape, errors.median_ape, errors.p90_ape)),
                    _percent(errors.bias, signed=True),
                    _percent(errors.interval_coverage),
                ]
            )
            shared = [""] * len(shared)
    header = (
        "device",
        "class",
        "n",
        "noise",
        "naive",
        "estimator",
        "covered",
        "MAPE",
        "median",
        "P90",
        "bias",
        "in 90 %",
    )
    return _table(header, lines)


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value:{'+' if signed else ''}.1%}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, help="folder of tables of measured operations")
    parser.add_argument("--profiles", type=Path, help="folder of profiles")
    parser.add_argument("--split", default="devval", help="split of the compared rows (default: devval)")
    parser.add_argument(
        "--estimator", action="append", help="estimators to evaluate (default: the shipped estimators)"
    )
    parser.add_argument("--date", default="", help="date on the page (default: today)")
    return parser.parse_args()


def _figures(arguments: argparse.Namespace, before: Mapping[str, list[Section]]) -> Figures:
    known = set(estimator_names())
    estimators: list[str] = arguments.estimator or [name for name in _ESTIMATORS if name in known]
    found = dict(before)
    if arguments.tables:
        found["tables"] = list(_of_tables(arguments.tables, arguments.split, estimators))
    if arguments.profiles:
        found["profiles"] = list(_of_profiles(arguments.profiles, arguments.tables, estimators))
    return Figures(
        schema="hespas.accuracy-figures/1",
        hespas_version=__version__,
        date=arguments.date or datetime.now(UTC).date().isoformat(),
        split=arguments.split,
        tables=found["tables"],
        profiles=found["profiles"],
    )


def main() -> None:
    """Write the figures, if data is given, and the pages."""
    arguments = _arguments()
    if arguments.tables or arguments.profiles:
        before: dict[str, list[Section]] = {"tables": [], "profiles": []}
        if FIGURES.is_file():
            earlier = read_figures(FIGURES)
            before = {"tables": earlier.tables, "profiles": earlier.profiles}
        figures = _figures(arguments, before)
        text = json.dumps(msgspec.to_builtins(figures), indent=1)
        FIGURES.write_text(text + "\n", encoding="utf-8")
    (DOCS / _FOLDER).mkdir(exist_ok=True)
    for name, text in accuracy_pages(read_figures(FIGURES)).items():
        (DOCS / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{DOCS / name}\n")


if __name__ == "__main__":
    main()
