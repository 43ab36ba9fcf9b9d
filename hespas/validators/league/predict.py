"""Every row of a table of runs, predicted: on all cores asked for, and kept between runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isclose, isnan, nan
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import NamedTuple

import msgspec

from hespas.estimators import load_estimator
from hespas.estimators.result_cache import ResultCache, cache_folder, content_key
from hespas.estimators.step_intervals import Level, device_level
from hespas.files.processes import safe_spawning, start_worker, worker_state
from hespas.files.trust import file_in_folder_of
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Experts, LatentAttention, Mamba
from hespas.generators.llm.published import MODELS, PublishedRun, run_of
from hespas.graph import Diagnostics
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import BoundaryError, FormatError, HespasError, OutputError, UnsupportedError
from hespas.hardware import device_files, is_path, load_device, load_system, resolve_reference
from hespas.validators.league.parts import COMPONENTS
from hespas.validators.league.runs import RunSettings, settings_of, timed_run
from hespas.validators.league.stamps import content_stamp, estimator_stamp, package_stamp
from hespas.validators.league.steps import Step, step_of
from hespas.validators.league.table import NEEDED, read_runs

__all__ = [
    "Assumed",
    "LeagueRow",
    "Predicted",
    "Refusal",
    "Task",
    "layout_text",
    "league_rows",
    "predicted_rows",
]

_MARKS = "row."
_KEPT_STEPS = 1_000
"""Steps of settings that a process keeps while it predicts the rows of a table."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a row is not predicted: where in it, or in which other file, and what to do. ``supported`` is
    whether it is the row that is at fault.
    """

    message: str
    position: str = ""
    hint: str = ""
    supported: bool = True


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """What was assumed of a row, or left out: an example of how it is told."""

    code: str
    message: str


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Saved prediction of a row: the time of a step [ns] and its parts by component [ns], or why there is
    none. ``parts`` are of the stage that is the last to finish, with its bubble; ``path`` is the critical
    path, by which errors of components change the time. Both sum to it.
    ``layout`` is a text that is the same where rows say the same layout, in whatever words. ``level`` is the
    extrapolation level of the device. ``assumed`` is what the row does not say, and what its estimator had to
    assume. ``capacity_bytes`` is the memory of a device (NaN unknown).
    """

    time_ns: float = nan
    parts: dict[str, float] = {}
    path: dict[str, float] = {}
    peak_memory_bytes: float = nan
    capacity_bytes: float = nan
    assumed: list[Assumed] = []
    refusal: Refusal | None = None
    family: str = ""
    kind: str = ""
    layout: str = ""
    level: Level = "measured"

    @property
    def refused(self) -> str:
        """Why it is not predicted; empty where it is."""
        return self.refusal.message if self.refusal else ""

    @property
    def fits(self) -> bool | None:
        """Return whether the peak fits the memory of the device; None where either is unknown."""
        if isnan(self.peak_memory_bytes) or isnan(self.capacity_bytes):
            return None
        return self.peak_memory_bytes <= self.capacity_bytes

    @property
    def assumptions(self) -> list[str]:
        """Codes of what the row does not say, and of kernels without a time: it is marked for these."""
        return [each.code for each in self.assumed if each.code.startswith(_MARKS)]


@dataclass(frozen=True, slots=True)
class LeagueRow:
    """A row of the table, its number from 0, and what is predicted of it. The cell of its accelerator has
    the name of the device, however the table spells it.
    """

    number: int
    cells: Mapping[str, str]
    predicted: Predicted

    @property
    def position(self) -> str:
        """Where a refusal is: the row, and what in it."""
        refusal = self.predicted.refusal
        return f"row {self.number}{refusal.position if refusal else ''}"

    def number_of(self, column: str) -> float:
        """A figure of the row; NaN where the cell is empty. Raises ``FormatError`` for what is none."""
        text = self.cells.get(column, "")
        try:
            return float(text) if text else nan
        except ValueError:
            raise FormatError(
                f"{text!r} is no number", position=f"row {self.number}, column {column}"
            ) from None


class Task(NamedTuple):
    """A row of ``table`` to predict: its cells with the name of its accelerator, and ``device``, the row's
    spelling of it.
    """

    number: int
    cells: Mapping[str, str]
    device: str
    table: Path
    estimator: str


def predicted_rows(
    table: Path,
    *,
    estimator: str = "composite",
    jobs: int = 2,
    cache: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    diagnostics: Diagnostics | None = None,
) -> list[LeagueRow]:
    """Every row of ``table``; models that do not ship are read from ``models.csv`` beside it. What an earlier
    run found is taken from ``cache`` (None: the user's) where nothing changed that it depends on: the row,
    its files, the package; ``diagnostics`` is told where nothing can be kept. About 1 s a row. Files that
    a row names, and ``models.csv``, lie in the folder of ``table``. Raises ``FormatError`` or
    ``UnsupportedError`` where none of them can be predicted.
    """
    load_estimator(estimator)
    _step.cache_clear()
    kept = _Kept(ResultCache(cache or cache_folder("league"), Predicted), diagnostics)
    models = file_in_folder_of(table, MODELS, "column model")
    stamps = [package_stamp(), content_stamp([models]), estimator, estimator_stamp(estimator)]
    rows = read_runs(table)
    if diagnostics is not None:
        repeated = len(rows) - len({tuple(sorted(row.items())) for row in rows})
        message = "rows are equal to another one in all columns: their errors count once more"
        diagnostics.warning("league.repeated-row", str(table), message, count=repeated)
    devices = {cell: _device(cell, table) for cell in {row.get("accelerator", "") for row in rows}}
    systems = {cell: _system_stamp(cell, table) for cell in {row.get("network", "") for row in rows}}
    tasks: list[Task] = []
    keys: list[str] = []
    for number, row in enumerate(rows):
        cell = row.get("accelerator", "")
        name, stamp = devices[cell]
        tasks.append(Task(number, {**row, "accelerator": name}, cell, table, estimator))
        own = [*stamps, stamp, systems[row.get("network", "")]]
        keys.append(content_key([*own, *_said(tasks[-1].cells)]))
    found = [kept.get(key) for key in keys]
    missing = [place for place, each in enumerate(found) if each is None]
    if progress:
        progress(len(tasks) - len(missing), len(tasks))
    for place, each in _all_of([tasks[place] for place in missing], missing, jobs):
        found[place] = each
        kept.put(keys[place], each)
        if progress:
            progress(sum(each is not None for each in found), len(tasks))
    done = [
        LeagueRow(task.number, task.cells, each)
        for task, each in zip(tasks, found, strict=True)
        if each is not None
    ]
    _check_some(done, table)
    return done


@dataclass(slots=True)
class _Kept:
    """Results of earlier runs. A folder that cannot be written is told of once, and costs only time."""

    results: ResultCache[Predicted]
    diagnostics: Diagnostics | None
    is_writable: bool = True

    def get(self, key: str) -> Predicted | None:
        """What an earlier run kept; None where that is nothing, or no prediction: its parts are those of a
        step, and add up to it.
        """
        found = self.results.get(key)
        if found is None or found.refusal:
            return None
        for parts in (found.parts, found.path):
            if parts.keys() != set(COMPONENTS) or min(parts.values()) < 0:
                return None
            if not isclose(sum(parts.values()), found.time_ns, rel_tol=1e-6):
                return None
        return found if 0 < found.time_ns < inf else None

    def put(self, key: str, result: Predicted) -> None:
        """Keep a result; not a refusal, which may be for want of what is installed tomorrow."""
        try:
            if self.is_writable and not result.refused:
                self.results.put(key, result)
        except OutputError as error:
            self.is_writable = False
            if self.diagnostics is not None:
                message = f"{error.message}: rows will be predicted again; set XDG_CACHE_HOME to keep them"
                self.diagnostics.warning("league.not-kept", str(self.results.folder), message)


def _check_some(rows: Sequence[LeagueRow], table: Path) -> None:
    """Raise where no row is predicted: an error of the table unless this version cannot handle any."""
    refusals = [row.predicted.refusal for row in rows if row.predicted.refusal]
    if len(refusals) < len(rows):
        return
    kind = FormatError if any(each.supported for each in refusals) else UnsupportedError
    first = refusals[0]
    why = first.message if len(rows) == 1 else f"none of {len(rows):,} rows can be predicted: {first.message}"
    raise kind(why, path=str(table), position=rows[0].position, hint=first.hint or _HINT)


_HINT = "docs/league.md says what a row states"


def league_rows(rows: Sequence[LeagueRow]) -> list[LeagueRow]:
    """Those that have a prediction."""
    return [row for row in rows if not row.predicted.refused]


def _all_of(tasks: Sequence[Task], places: Sequence[int], jobs: int) -> Iterator[tuple[int, Predicted]]:
    """Predictions with their places, each as soon as it is done."""
    if jobs < 2 or len(tasks) < 2:
        yield from zip(places, map(_predicted, tasks), strict=True)
        return
    context = get_context("spawn")
    workers = min(jobs, len(tasks), cpu_count() or 1)
    with safe_spawning(), ProcessPoolExecutor(workers, context, start_worker, worker_state()) as pool:
        of = {pool.submit(_predicted, task): place for task, place in zip(tasks, places, strict=True)}
        try:  # as they come, so that an interrupted run has kept all that was done
            for done in as_completed(of):
                yield of[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_MEASURED = ("step_time_", "tokens_per_s", "model_tflop", "hw_tflop", "mfu", "hfu", "peak_memory", "split")


_TEXT = frozenset({"accelerator_variant", "notes"})


def _said(cells: Mapping[str, str]) -> list[str]:
    """Return the cells that a prediction may depend on: all but measurements and free text."""
    return [
        f"{name}={text}"
        for name, text in sorted(cells.items())
        if name not in _TEXT and not name.startswith(_MEASURED)
    ]


def _device(spelling: str, table: Path) -> tuple[str, str]:
    """Return the name of a device, and a text that changes with its files where it does not ship. An error
    is reported with the rows.
    """
    try:
        device = resolve_reference(table, spelling, "column accelerator")
        return load_device(device).name, content_stamp(device_files(device))
    except HespasError as error:
        return spelling, str(error)


def _system_stamp(spelling: str, table: Path) -> str:
    """Return a text that changes with the file of a system that does not ship."""
    try:
        system = resolve_reference(table, spelling, "column network")
    except BoundaryError as error:
        return str(error)
    return content_stamp([Path(system)] if is_path(system) else [])


@lru_cache(maxsize=_KEPT_STEPS)
def _step(settings: RunSettings) -> tuple[Step, int, Diagnostics]:
    """Return the step of some settings, the number of nodes without a time, and the diagnostics. Many rows of
    a table differ in their measurement alone.
    """
    found = Diagnostics()
    timed = timed_run(settings, found)
    return step_of(timed, found), timed.unknown, found


def _predicted(task: Task) -> Predicted:
    found, place = Diagnostics(), f"row {task.number}"
    try:
        _check_settings(task.cells, place)
        run = run_of(task.cells, place, found, task.table)
        device = load_device(resolve_reference(task.table, task.device, "column accelerator"))
        network = task.cells.get("network", "")
        system = load_system(resolve_reference(task.table, network, "column network")) if network else None
        step, unknown, diagnostics = _step(settings_of(run, device, task.estimator, system))
        found.extend(diagnostics)
        if not 0 < step.time_ns < inf:
            raise UnsupportedError("the estimator has no time for any part of the step", path=place)
        peak = max(each.peak_bytes for each in memory_of(run.model, run.layout, run.training))
    except HespasError as error:
        return Predicted(refusal=_refusal(error, place))
    if unknown:
        message = f"{unknown:,} nodes of the passes have no time, and count as none"
        found.warning("row.untimed", place, message)
    capacity = float(device.main_memory.capacity_bytes)
    if 0 <= capacity < peak:
        message = "the predicted peak memory is beyond the memory of the device"
        found.warning("memory.beyond-device", place, message)
    return Predicted(
        time_ns=step.time_ns,
        parts=dict(zip(COMPONENTS, step.spent_ns.tolist(), strict=True)),
        path=dict(zip(COMPONENTS, step.path_ns.tolist(), strict=True)),
        peak_memory_bytes=float(peak),
        capacity_bytes=capacity if capacity >= 0 else nan,
        assumed=_assumed(found),
        family="TPU" if device.kind == "tpu" else f"{device.vendor} {device.family}",
        kind=_kind(run),
        layout=layout_text(run),
        level=device_level("training", device),
    )


def layout_text(run: PublishedRun) -> str:
    """What tells layouts apart, the same in every process: sets have no order of their own."""
    settings = (run.layout, run.training.micro_batch, run.training.recompute)
    return msgspec.json.encode(settings, order="sorted").decode()


def _refusal(error: HespasError, place: str) -> Refusal:
    """What is kept of an error. Rows move between runs: where in the row it is, not which."""
    own = error.path in {None, place}
    parts = [error.position] if own else [error.path, error.position]
    return Refusal(
        message=error.message,
        position="".join(f", {part}" for part in parts if part),
        hint=error.hint or "",
        supported=not isinstance(error, UnsupportedError),
    )


def _assumed(found: Diagnostics) -> list[Assumed]:
    """Each code once, sorted; what changes no figure is no assumption."""
    told = {each.code: each.message for each in found if each.severity is not Severity.INFO}
    return [Assumed(code=code, message=message) for code, message in sorted(told.items())]


def _check_settings(cells: Mapping[str, str], place: str) -> None:
    """Raise ``FormatError`` where a row leaves out what no run is without."""
    for column in NEEDED:
        if not cells.get(column):
            raise FormatError("the cell is empty", path=place, position=f"column {column}")


def _kind(run: PublishedRun) -> str:
    """The kind of model: what its layers are made of, and whether adapters are trained."""
    blocks = set(map(type, run.model.blocks()))
    words = [
        word
        for word, block in (("hybrid", Mamba), ("latent", LatentAttention), ("experts", Experts))
        if block in blocks
    ]
    words += ["adapters"] if run.training.lora_rank else []
    return " ".join(words) or "dense"
