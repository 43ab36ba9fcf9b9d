"""Predict the rows of a league table on several cores, and cache the predictions between runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache as cached
from functools import lru_cache
from hashlib import sha256
from math import inf, isclose, isnan
from pathlib import Path
from typing import NamedTuple

import msgspec

from hespas.estimators import load_estimator
from hespas.estimators.registry import named_paths
from hespas.estimators.result_cache import ResultCache, content_key
from hespas.estimators.step_intervals import device_level
from hespas.files.processes import pool
from hespas.files.trust import file_in_folder_of
from hespas.files.user_folders import cache_folder
from hespas.fitting.effects import COMPONENTS
from hespas.generators.llm.model import Experts, LatentAttention, Mamba
from hespas.generators.llm.published import (
    MODELS,
    NOTES_IGNORED,
    UNSTATED,
    PublishedRun,
    has_only_notes,
    run_of,
)
from hespas.generators.llm.settings import recompute_of
from hespas.generators.llm.step import LlmStep
from hespas.generators.spec import Account
from hespas.graph import Diagnostics
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import BoundaryError, FormatError, HespasError, OutputError, UnsupportedError
from hespas.graph.progress import Progress
from hespas.hardware import (
    Device,
    device_files,
    load_device,
    load_system,
    own_system_file,
    resolve_reference,
)
from hespas.simulator.memory import capacity_of, fits_memory
from hespas.studies.league.rows import (
    NEEDED,
    LeagueRow,
    Refusal,
    RowAssumption,
    StepPrediction,
    read_runs,
)
from hespas.studies.league.runs import RunSettings, settings_of, timed_run
from hespas.studies.league.steps import StepTime, simulated_step

__all__ = [
    "PredictionTask",
    "content_digest",
    "estimator_digest",
    "layout_text",
    "predicted_rows",
]

_PACKAGES = (
    "costs", "estimators", "files", "generators/llm", "graph", "hardware", "measurements", "operations",
    "programs", "schemas", "simulator",
)  # fmt: skip
_MODULES = ("predict", "rows", "runs", "steps")
"""Packages of Hespas, and modules of this package, on which predictions depend."""
_MEASUREMENTS = (
    "step_time_",
    "tokens_per_s",
    "model_tflop",
    "hw_tflop",
    "mfu",
    "hfu",
    "peak_memory",
    "split",
)
"""Prefixes of columns on which a prediction does not depend."""
_FREE_TEXT = frozenset({"accelerator_variant", "notes"})
_MAX_STEPS = 1_000
"""Number of simulated steps that a process caches."""


def content_digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files. An unreadable file counts as empty, because its reader
    reports the error.
    """
    digest = sha256()
    for file in files:
        try:
            content = file.read_bytes() if file.is_file() else b""
        except (OSError, ValueError):
            content = b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


@cached
def _package_digest() -> str:
    """Return a digest of the code and data of Hespas that predictions depend on (8 MB)."""
    root = Path(__file__).parents[2]
    files = [file for package in _PACKAGES for file in _files_in(root / package)]
    return content_digest([*files, *(Path(__file__).with_name(f"{module}.py") for module in _MODULES)])


def estimator_digest(spelling: str) -> str:
    """Return a digest of the files and folders that the options of an estimator name. ``spelling`` is the
    estimator with its options.
    """
    paths = named_paths(spelling.partition(":")[2])
    return content_digest(file for path in paths for file in (_files_in(path) if path.is_dir() else [path]))


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


class PredictionTask(NamedTuple):
    """Row of ``table`` whose step is to be predicted, as sent to another process. In ``cells`` the
    accelerator is the name of the device; ``device`` is the text in the table.
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
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> list[LeagueRow]:
    """Predict every row of ``table``. A row takes about 1 s.

    Models that are not in the package are read from ``models.csv`` in the folder of ``table``. Files that a
    row names are in that folder too. A prediction is read from ``cache`` (None: the user's cache folder) if
    the row, its files and the package have not changed. ``diagnostics`` report a cache that cannot be
    written. Raises ``FormatError`` or ``UnsupportedError`` if no row can be predicted.
    """
    load_estimator(estimator)
    _step.cache_clear()
    results = _PredictionCache(ResultCache(cache or cache_folder("league"), StepPrediction), diagnostics)
    models = file_in_folder_of(table, MODELS, "column model")
    common = [_package_digest(), content_digest([models]), estimator, estimator_digest(estimator)]
    rows = read_runs(table)
    if diagnostics is not None:
        repeated = len(rows) - len({tuple(sorted(row.items())) for row in rows})
        message = "rows equal another row in all columns: their errors count more than once"
        diagnostics.warning("league.repeated-row", str(table), message, count=repeated)
        diagnostics.warning("row.notes", str(table), NOTES_IGNORED, count=sum(map(has_only_notes, rows)))
    devices = {cell: _device_key(cell, table) for cell in {row.get("accelerator", "") for row in rows}}
    systems: dict[str, str] = {}
    for spelling in {row.get("network", "") for row in rows}:
        try:
            system = resolve_reference(table, spelling, "column network")
            systems[spelling] = content_digest(filter(None, [own_system_file(system)]))
        except BoundaryError as error:  # the prediction of the row reports it
            systems[spelling] = str(error)
    tasks: list[PredictionTask] = []
    keys: list[str] = []
    for number, row in enumerate(rows):
        spelling = row.get("accelerator", "")
        name, device_digest = devices[spelling]
        cells = {**row, "accelerator": name}
        settings = [
            f"{column}={text}"
            for column, text in sorted(cells.items())
            if column not in _FREE_TEXT and not column.startswith(_MEASUREMENTS)
        ]
        tasks.append(PredictionTask(number, cells, spelling, table, estimator))
        keys.append(content_key([*common, device_digest, systems[row.get("network", "")], *settings]))
    predictions = [results.get(key) for key in keys]
    missing = [index for index, prediction in enumerate(predictions) if prediction is None]
    done = len(tasks) - len(missing)
    if progress:
        progress(done, len(tasks))
    unfinished = [tasks[index] for index in missing]
    # in order of completion, so that an interrupted run has cached all finished rows
    for number, prediction in pool(_predicted, unfinished, jobs, progress=progress, finished=done):
        index = missing[number]
        predictions[index] = prediction
        results.put(keys[index], prediction)
    league = [
        LeagueRow(task.number, task.cells, prediction)
        for task, prediction in zip(tasks, predictions, strict=True)
        if prediction is not None
    ]
    refusals = [row.predicted.refusal for row in league if row.predicted.refusal]
    if len(refusals) == len(league):
        first = refusals[0]
        error_type = FormatError if any(refusal.supported for refusal in refusals) else UnsupportedError
        count = "" if len(league) == 1 else f"none of {len(league):,} rows can be predicted: "
        raise error_type(
            f"{count}{first.message}", path=str(table), position=league[0].position,
            hint=first.hint or "compare the row with the columns in docs/reference/runs.md",
        )  # fmt: skip
    return league


@dataclass(slots=True)
class _PredictionCache:
    """Cache of predictions in a folder. A folder that cannot be written is reported once; predictions are
    then not cached.
    """

    results: ResultCache[StepPrediction]
    diagnostics: Diagnostics | None
    is_writable: bool = True

    def get(self, key: str) -> StepPrediction | None:
        """Return a cached prediction. None if it is missing, or if it is damaged: its parts do not sum to its
        time.
        """
        prediction = self.results.get(key)
        if prediction is None or prediction.refusal:
            return None
        for parts in (prediction.parts, prediction.path):
            if parts.keys() != set(COMPONENTS) or min(parts.values()) < 0:
                return None
            if not isclose(sum(parts.values()), prediction.time_ns, rel_tol=1e-6):
                return None
        return prediction if 0 < prediction.time_ns < inf else None

    def put(self, key: str, prediction: StepPrediction) -> None:
        """Cache a prediction. Refusals are not cached, because a missing extra may be installed later."""
        try:
            if self.is_writable and not prediction.refused:
                self.results.put(key, prediction)
        except OutputError as error:
            self.is_writable = False
            if self.diagnostics is not None:
                message = f"{error.message}: rows will be predicted again; set XDG_CACHE_HOME to cache them"
                self.diagnostics.warning("league.not-kept", str(self.results.folder), message)


def _device_key(spelling: str, table: Path) -> tuple[str, str]:
    """Return the name of a device, and a digest of its files outside of the package. If the device cannot be
    loaded, return ``spelling`` and the error message; the prediction of the row then reports the error.
    """
    try:
        device = resolve_reference(table, spelling, "column accelerator")
        return load_device(device).name, content_digest(device_files(device))
    except HespasError as error:
        return spelling, str(error)


@lru_cache(maxsize=_MAX_STEPS)
def _step(settings: RunSettings) -> tuple[StepTime, int, Diagnostics]:
    """Return the simulated step of a run, the number of nodes without a time, and the diagnostics. Results
    are cached, because rows with equal settings have several measurements.
    """
    diagnostics = Diagnostics()
    timed = timed_run(settings, diagnostics)
    return simulated_step(timed, diagnostics), timed.unknown, diagnostics


def _predicted(task: PredictionTask) -> StepPrediction:
    """Return the prediction of a row. An error is returned as a refusal."""
    diagnostics, position = Diagnostics(), f"row {task.number}"
    try:
        for column in NEEDED:
            if not task.cells.get(column):
                raise FormatError(
                    "the cell is empty",
                    path=position,
                    position=f"column {column}",
                    hint="fill it in, or remove the row",
                )
        run = run_of(task.cells, position, diagnostics, task.table)
        device = load_device(resolve_reference(task.table, task.device, "column accelerator"))
        network = task.cells.get("network", "")
        system = load_system(resolve_reference(task.table, network, "column network")) if network else None
        capacity_bytes = capacity_of(device, run.facts(device))
        run, account = _fitting_run(run, device, capacity_bytes, position, diagnostics)
        step, num_untimed, step_diagnostics = _step(settings_of(run, device, task.estimator, system))
        diagnostics.extend(step_diagnostics)
        if not 0 < step.time_ns < inf:
            raise UnsupportedError(
                f"the estimated time of the step is {step.time_ns:g} ns",
                path=position,
                hint="use another `estimator`, such as composite",
            )
    except HespasError as error:
        # rows have other numbers in other tables: only a position in the row, or another file, is stored
        is_in_row = error.path in {None, position}
        parts = [error.position] if is_in_row else [error.path, error.position]
        return StepPrediction(
            refusal=Refusal(
                message=error.message,
                position="".join(f", {part}" for part in parts if part),
                hint=error.hint or "",
                supported=not isinstance(error, UnsupportedError),
            )
        )
    if device.step_factors:
        message = "the step factors of the device file are not applied: a league evaluates steps without them"
        diagnostics.warning("league.step-factors", position, message)
    if num_untimed:
        message = f"{num_untimed:,} nodes of the microbatches have no time and are counted as 0"
        diagnostics.warning("row.untimed", position, message)
    if fits_memory(account.device_memory_bytes, capacity_bytes) is False:
        message = "the run needs more memory than the device has (device_memory_gib exceeds capacity_gib)"
        diagnostics.warning("memory.beyond-device", position, message)
    blocks = set(map(type, run.model.blocks()))
    kinds = (("hybrid", Mamba), ("latent", LatentAttention), ("experts", Experts))
    features = [feature for feature, block in kinds if block in blocks]
    features += ["adapters"] if run.training.lora_rank else []
    messages = {event.code: event.message for event in diagnostics if event.severity is not Severity.INFO}
    return StepPrediction(
        time_ns=step.time_ns,
        parts=dict(zip(COMPONENTS, step.spent_ns.tolist(), strict=True)),
        path=dict(zip(COMPONENTS, step.path_ns.tolist(), strict=True)),
        peak_memory_bytes=account.peak_memory_bytes,
        device_memory_bytes=account.device_memory_bytes,
        reserved_memory_bytes=-1.0 if isnan(account.reserved_memory_bytes) else account.reserved_memory_bytes,
        capacity_bytes=capacity_bytes,
        assumed=[RowAssumption(code=code, message=message) for code, message in sorted(messages.items())],
        family="TPU" if device.kind == "tpu" else f"{device.vendor} {device.family}",
        kind=" ".join(features) or "dense",
        layout=layout_text(run),
        level=device_level("training", device),
    )


def _fitting_run(
    run: PublishedRun, device: Device, capacity_bytes: float, position: str, diagnostics: Diagnostics
) -> tuple[PublishedRun, Account]:
    """Return the run and its account. If its memory exceeds the memory of the device, and the
    row does not state which layers are recomputed, the fewest layers per stage with which it fits are
    recomputed.
    """
    layers = len(run.model.layers)

    def recomputing(count: int) -> tuple[PublishedRun, Account]:
        recompute = recompute_of(f"full:{count}") if count else run.training.recompute
        changed = replace(run, training=replace(run.training, recompute=recompute))
        step = LlmStep(model=changed.model, layout=changed.layout, training=changed.training)
        return changed, step.account().on_device(device.kind)

    def is_beyond(count: int) -> bool:
        return fits_memory(recomputing(count)[1].device_memory_bytes, capacity_bytes) is False

    is_stated = run.row.get("recompute", "").casefold() not in UNSTATED
    if is_stated or not is_beyond(0) or is_beyond(layers):
        return recomputing(0)
    count = bisect_left(range(layers + 1), True, key=lambda number: not is_beyond(number))
    message = (
        f"the run does not fit {device.name} without recomputation, which the row does not state: "
        f"{count} layers of each stage are recomputed, the fewest with which it fits"
    )
    diagnostics.warning("row.recompute-to-fit", position, message)
    return recomputing(count)


def layout_text(run: PublishedRun) -> str:
    """Return a text that identifies the layout of a run. It is the same in every process, because sets are
    sorted.
    """
    settings = (run.layout, run.training.micro_batch, run.training.recompute)
    return msgspec.json.encode(settings, order="sorted").decode()
