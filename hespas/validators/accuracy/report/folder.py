"""The report as a folder: HTML, JSON, CSV and Markdown of one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hespas.estimators import load_estimator
from hespas.estimators.registry import estimate_with, for_job
from hespas.files.report import check_report_files, write_report_files
from hespas.graph import Diagnostics, Profile, Timeline, Workload
from hespas.hardware import Device, load_device
from hespas.simulator import simulate
from hespas.validators.accuracy.document import accuracy_json
from hespas.validators.accuracy.report import (
    accuracy_csv,
    accuracy_html,
    accuracy_markdown,
    provenance_of,
    speed_up_csv,
)
from hespas.validators.accuracy.report.page import plotly_script
from hespas.validators.accuracy.result import Accuracy, Thresholds

__all__ = ["REPORT_FILES", "check_folder", "write_report"]

REPORT_FILES = ("report.html", "report.json", "report.csv", "report.md")
_ACROSS = "speed-ups.csv"
"""Written where several devices measured the same shapes."""


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise what :func:`write_report` would, before anything is computed."""
    plotly_script()
    check_report_files(folder, (*REPORT_FILES, _ACROSS), overwrite=overwrite)


def write_report(
    done: Accuracy,
    limits: Thresholds,
    folder: Path,
    *,
    overwrite: bool,
    hardware: Sequence[str] = (),
    estimators: Sequence[str] = (),
    profiles: Sequence[Profile | Workload] = (),
    workload: Workload | None = None,
) -> None:
    """Write all files of :data:`REPORT_FILES`, and the table of speed-ups where devices share shapes, each
    whole or not at all; other files of ``folder`` stay.

    What was compared is given again as to :func:`~hespas.validators.accuracy.accuracy`: the page shows the
    devices' figures, what ran when, and beside it ``workload`` simulated with the first of ``estimators`` on
    the first device; without it, the program that took most time of those that came with their measurements,
    on its device. Raises ``OutputError`` where a file exists and ``overwrite`` is not given,
    ``MissingExtraError`` without plotly.
    """
    check_folder(folder, overwrite=overwrite)
    devices = [load_device(name) for name in hardware]
    measured = [profile for profile in profiles if isinstance(profile, Profile)]
    if workload is None:
        workload, devices_of_it = _longest(done, devices)
    else:
        devices_of_it = devices
    page = accuracy_html(
        done,
        limits,
        provenance_of(done.inputs, devices, {each.name: each.metadata for each in measured}),
        profiles=measured,
        timeline=_simulated(workload, devices_of_it, estimators),
        program=workload,
    )
    contents = {
        "report.html": page.encode("utf-8", "replace"),
        "report.json": accuracy_json(done, limits),
        "report.csv": accuracy_csv(done).encode("utf-8", "replace"),
        "report.md": accuracy_markdown(done, limits).encode("utf-8", "replace"),
    }
    across = speed_up_csv(done.cases)
    if across:
        contents[_ACROSS] = across.encode("utf-8", "replace")
    write_report_files(folder, contents, overwrite=overwrite)


def _longest(done: Accuracy, devices: Sequence[Device]) -> tuple[Workload | None, list[Device]]:
    """Of the programs that came with what was measured the one that took most time, and its device."""
    found = [cases for cases in done.cases if cases.source in done.programs]
    if not found:
        return None, []
    cases = max(found, key=lambda each: float(each.measured_ns.sum()))
    return done.programs[cases.source], [each for each in devices if each.name == cases.hardware]


def _simulated(
    workload: Workload | None, devices: Sequence[Device], estimators: Sequence[str]
) -> Timeline | None:
    """One step of the program; findings about it are those of the comparison, and not told again."""
    if workload is None or not devices or not estimators:
        return None
    model = for_job(load_estimator(estimators[0]), workload.num_ranks)
    found = Diagnostics()
    estimates = [estimate_with(model, graph, devices[0], found) for graph in workload.classes]
    return simulate(workload, estimates, device=devices[0], diagnostics=found).timeline
