"""Folder with the HTML, JSON, CSV and Markdown report of one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hespas.estimators import load_estimator
from hespas.estimators.interface import estimate_with, for_job
from hespas.files.output import check_report_files, write_report_files
from hespas.graph import Diagnostics, Profile, Timeline, Workload
from hespas.hardware import Device, load_device
from hespas.report.charts import Chart
from hespas.simulator import simulate
from hespas.validators.accuracy.document import accuracy_json
from hespas.validators.accuracy.report import (
    accuracy_csv,
    accuracy_html,
    accuracy_markdown,
    provenance_of,
    speed_up_csv,
)
from hespas.validators.accuracy.report.charts import chart_groups
from hespas.validators.accuracy.result import Accuracy, Thresholds

__all__ = ["REPORT_FILES", "ReportInputs", "check_folder", "write_report"]

REPORT_FILES = ("report.html", "report.json", "report.csv", "report.md")
_SPEED_UPS = "speed-ups.csv"
"""Name of the file of speed-ups, if several devices measured the same shapes."""


def check_folder(folder: Path, names: Sequence[str] = REPORT_FILES, *, overwrite: bool) -> None:
    """Raise the errors of :func:`write_report` before anything is computed."""
    check_report_files(folder, (*names, _SPEED_UPS), overwrite=overwrite)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInputs:
    """Inputs of a comparison that its page shows: devices, measured timelines, and one simulated timeline
    with the names of its nodes in ``program``.
    """

    devices: tuple[Device, ...]
    profiles: tuple[Profile, ...]
    timeline: Timeline | None
    program: Workload | None

    @classmethod
    def of(
        cls,
        result: Accuracy,
        *,
        hardware: Sequence[str] = (),
        estimators: Sequence[str] = (),
        profiles: Sequence[Profile | Workload] = (),
        workload: Workload | None = None,
    ) -> ReportInputs:
        """Return the inputs, with the simulated timeline of ``workload``, with the first of ``estimators`` on
        the first device. Without ``workload`` it is the timeline of the longest program in a profile, on the
        device of that profile. The arguments are the inputs of :func:`~hespas.validators.accuracy.accuracy`.
        """
        devices = tuple(load_device(name) for name in hardware)
        simulated_on: Sequence[Device] = devices
        if workload is None:
            simulated_on = []
            with_program = [cases for cases in result.cases if cases.source in result.programs]
            if with_program:
                longest = max(with_program, key=lambda cases: float(cases.measured_ns.sum()))
                workload = result.programs[longest.source]
                simulated_on = [device for device in devices if device.name == longest.hardware]
        timeline: Timeline | None = None
        if workload is not None and simulated_on and estimators:
            model = for_job(load_estimator(estimators[0]), workload.num_ranks)
            diagnostics = Diagnostics()  # the comparison has already reported these
            estimates = [
                estimate_with(model, graph, simulated_on[0], diagnostics) for graph in workload.classes
            ]
            timeline = simulate(workload, estimates, device=simulated_on[0], diagnostics=diagnostics).timeline
        measured = tuple(profile for profile in profiles if isinstance(profile, Profile))
        return cls(devices=devices, profiles=measured, timeline=timeline, program=workload)

    def charts(self, result: Accuracy) -> tuple[Chart, ...]:
        """Return the charts of the page."""
        groups = chart_groups(
            result,
            self.devices,
            profiles=self.profiles,
            timeline=self.timeline,
            program=self.program,
        )
        return tuple(chart for group in groups for chart in group.charts)

    def html(self, result: Accuracy, limits: Thresholds) -> str:
        """Return the page."""
        metadata = {profile.name: profile.metadata for profile in self.profiles}
        return accuracy_html(
            result,
            limits,
            provenance_of(result.inputs, self.devices, metadata),
            profiles=self.profiles,
            timeline=self.timeline,
            program=self.program,
        )


def write_report(
    result: Accuracy, limits: Thresholds, folder: Path, inputs: ReportInputs, *, overwrite: bool
) -> None:
    """Write the files of :data:`REPORT_FILES`, and the table of speed-ups if several devices measured the
    same shapes.

    Each file is written completely or not at all; other files of ``folder`` stay. Raises ``OutputError`` if a
    file exists and ``overwrite`` is false.
    """
    check_folder(folder, overwrite=overwrite)
    contents = {
        "report.html": inputs.html(result, limits).encode("utf-8", "replace"),
        "report.json": accuracy_json(result, limits),
        "report.csv": accuracy_csv(result).encode("utf-8", "replace"),
        "report.md": accuracy_markdown(result, limits).encode("utf-8", "replace"),
    }
    speed_ups = speed_up_csv(result.cases)
    if speed_ups:
        contents[_SPEED_UPS] = speed_ups.encode("utf-8", "replace")
    write_report_files(folder, contents, overwrite=overwrite)
