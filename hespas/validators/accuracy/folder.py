"""The report as a folder: HTML, JSON, CSV and Markdown of one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hespas.converters.output import check_destination, write_atomically
from hespas.estimators import load_estimator
from hespas.graph import Diagnostics, Profile, Timeline, Workload
from hespas.graph.errors import OutputError
from hespas.hardware import Device, load_device
from hespas.simulator import simulate
from hespas.validators.accuracy.document import accuracy_json
from hespas.validators.accuracy.report import (
    accuracy_csv,
    accuracy_html,
    accuracy_markdown,
    provenance_of,
)
from hespas.validators.accuracy.report.embedding import plotly_script
from hespas.validators.accuracy.result import Accuracy, Thresholds

__all__ = ["REPORT_FILES", "check_folder", "write_report"]

REPORT_FILES = ("report.html", "report.json", "report.csv", "report.md")


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise what :func:`write_report` would, before anything is computed."""
    plotly_script()
    if folder.is_dir():
        for name in REPORT_FILES:
            check_destination(folder / name, overwrite=overwrite)
    elif folder.exists() or folder.is_symlink():
        raise OutputError("expected a folder", path=str(folder), hint="name another --report DIR")


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
    """Write all files of :data:`REPORT_FILES`, each whole or not at all; other files of ``folder`` stay.

    What was compared is given again as to :func:`~hespas.validators.accuracy.accuracy`: the page shows the
    devices' figures, what ran when, and beside it ``workload`` simulated with the first of ``estimators`` on
    the first device. Raises ``OutputError`` where a file exists and ``overwrite`` is not given,
    ``MissingExtraError`` without plotly.
    """
    check_folder(folder, overwrite=overwrite)
    devices = [load_device(name) for name in hardware]
    measured = [profile for profile in profiles if isinstance(profile, Profile)]
    page = accuracy_html(
        done,
        limits,
        provenance_of(done.inputs, devices, {each.name: each.metadata for each in measured}),
        profiles=measured,
        timeline=_simulated(workload, devices, estimators),
        program=workload,
    )
    contents = {
        "report.html": page.encode("utf-8", "replace"),
        "report.json": accuracy_json(done, limits),
        "report.csv": accuracy_csv(done).encode("utf-8", "replace"),
        "report.md": accuracy_markdown(done, limits).encode("utf-8", "replace"),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder: {error.strerror}", path=str(folder)) from error
    for name, content in contents.items():
        _write(content, folder / name)


def _simulated(
    workload: Workload | None, devices: Sequence[Device], estimators: Sequence[str]
) -> Timeline | None:
    """One step of the program; findings about it are those of the comparison, and not told again."""
    if workload is None or not devices or not estimators:
        return None
    model = load_estimator(estimators[0])
    found = Diagnostics()
    estimates = [model.estimate(graph, devices[0], found) for graph in workload.classes]
    return simulate(workload, estimates, diagnostics=found).timeline


def _write(content: bytes, path: Path) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=True, directory=False)
