"""What if: a simulation per combination of devices, systems, precisions, links, layouts; one table of all."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import blake2b
from io import StringIO
from math import isnan
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hespas._version import __version__
from hespas.api.arguments import checked
from hespas.api.grid_file import AXES, Grid, Value, read_grid
from hespas.api.grid_page import grid_page
from hespas.api.grid_row import GridRow, grid_row
from hespas.api.io import Document, Result, findings
from hespas.estimators.registry import named_paths
from hespas.files.documents import document_bytes, encoded, inert_cell
from hespas.files.output import check_destination, write_atomically
from hespas.files.processes import safe_spawning, start_worker, worker_state
from hespas.files.trust import allowing_programs, programs_allowed
from hespas.graph import Diagnostics
from hespas.graph.errors import OutputError
from hespas.graph.hints import PositiveInt
from hespas.hardware import is_path

if TYPE_CHECKING:
    import pandas

__all__ = ["GridDocument", "GridResult", "simulate_grid"]

_ROWS, _DOCUMENT, _TABLE, _PAGE = "rows", "grid.json", "grid.csv", "index.html"
_FIGURES = tuple(name for name in GridRow.__struct_fields__ if name not in {"settings", "critical_ns"})


class GridDocument(Document, frozen=True, kw_only=True):
    """What hespas simulate --grid writes as JSON."""

    schema: Literal["hespas.grid/1"] = "hespas.grid/1"
    axes: dict[str, list[Value]]
    shared: dict[str, Value]
    rows: list[GridRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GridResult(Result):
    """The rows in order of the axes. ``kept`` are those that an earlier run had finished."""

    grid: Grid
    rows: tuple[GridRow, ...]
    kept: int
    diagnostics: Diagnostics

    def headline(self) -> str:
        """The best row, and how many there are."""
        failed = sum(bool(row.fault) for row in self.rows)
        told = f"{len(self.rows):,} row{'s' * (len(self.rows) != 1)}, {failed:,} without a time"
        best = min(
            (row for row in self.rows if not isnan(row.step_ns)), key=lambda row: row.step_ns, default=None
        )
        if best is None:
            return told
        named = ", ".join(f"{key} {value}" for key, value in best.settings.items())
        return f"{told}; shortest step {best.step_ns / 1e6:,.3f} ms{f': {named}' if named else ''}"

    @property
    def exit_code(self) -> int:
        """0 where a row has a time; else that of the rows, of different ones the highest."""
        return 0 if any(not row.fault for row in self.rows) else max(row.exit_code for row in self.rows)

    def document(self) -> GridDocument:
        """All figures: ``hespas.grid/1``."""
        return GridDocument(
            inputs=[self.grid.path],
            diagnostics=findings(self.diagnostics),
            axes={key: list(values) for key, values in self.grid.axes.items()},
            shared=dict(self.grid.shared),
            rows=list(self.rows),
        )

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.grid/1``."""
        return document_bytes(self.document())

    def to_csv(self) -> str:
        """One line per row: the axes, then the figures; unknown is an empty field."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.grid.axes, *_FIGURES])
        for row in self.rows:
            figures = [getattr(row, name) for name in _FIGURES]
            cells = [*row.settings.values(), *("" if _unknown(value) else value for value in figures)]
            writer.writerow([inert_cell(cell) for cell in cells])
        return text.getvalue()

    def to_pandas(self) -> pandas.DataFrame:
        """The same as a frame."""
        import pandas as pd

        rows = [row.settings | {name: getattr(row, name) for name in _FIGURES} for row in self.rows]
        return pd.DataFrame(rows, columns=[*self.grid.axes, *_FIGURES])


def _unknown(value: object) -> bool:
    return isinstance(value, float) and isnan(value)


@checked()
def simulate_grid(
    path: str | Path | Grid,
    source: str | Path | None = None,
    *,
    folder: str | Path | None = None,
    estimator: str | None = None,
    jobs: PositiveInt = 1,
    allow_programs: bool = False,
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> GridResult:
    """Simulate every combination of the axes of a grid (or its file), over ``jobs`` processes.

    Into ``folder`` goes each row as it is finished, so that a run that was interrupted goes on where it was;
    at the end ``grid.json``, ``grid.csv`` and a page (``index.html``), which ``overwrite`` replaces. A row
    that cannot be simulated says why, and is tried again.

    The file is data: it names files in its folder only, and no estimator that runs programs, executes the
    workload or has an option that names files, unless ``allow_programs`` permits them or ``estimator`` is
    the same one. Where the file names no estimator, ``estimator`` is that of all rows.

    Raises ``FormatError`` for the file, ``BoundaryError`` where it names what needs permission,
    ``OutputError`` for a folder that holds an earlier table, without ``overwrite``.
    """
    with allowing_programs(allow_programs or programs_allowed()):
        grid = path
        if not isinstance(grid, Grid):
            grid = read_grid(Path(grid), None if source is None else Path(source), estimator)
        target = None if folder is None else Path(folder)
        if target is not None:
            _make(target / _ROWS)
            for name in (_DOCUMENT, _TABLE, _PAGE):
                check_destination(target / name, overwrite=overwrite)
        settings = grid.rows()
        files = [None if target is None else target / _ROWS / f"{_key(each)}.json" for each in settings]
        rows: list[GridRow | None] = [None if file is None else _kept(file) for file in files]
        kept = sum(row is not None for row in rows)
        left = [place for place, row in enumerate(rows) if row is None]
        done = kept
        if progress and done:
            progress(done, len(rows))
        shown = [{key: each[key] for key in grid.axes} for each in settings]
        for place, row in _each([(place, settings[place], shown[place]) for place in left], jobs):
            rows[place] = row
            file = files[place]
            if file is not None and not row.fault:
                _keep(file, encoded(row))
            done += 1
            if progress:
                progress(done, len(rows))
        result = GridResult(
            grid=grid,
            rows=tuple(row for row in rows if row is not None),
            kept=kept,
            diagnostics=diagnostics if diagnostics is not None else Diagnostics(),
        )
        if target is not None:
            _write(target / _DOCUMENT, result.to_json(), overwrite=overwrite)
            _write(target / _TABLE, result.to_csv().encode(), overwrite=overwrite)
            page = grid_page(result.headline(), grid, result.rows)
            _write(target / _PAGE, page.encode(), overwrite=overwrite)
        return result


_Task = tuple[int, Mapping[str, Value], Mapping[str, Value]]


def _one(task: _Task) -> tuple[int, GridRow]:
    place, settings, shown = task
    return place, grid_row(settings, shown)


def _each(tasks: Sequence[_Task], jobs: int) -> Iterator[tuple[int, GridRow]]:
    """The rows as they are finished. Processes are spawned: forking one that has threads is unsafe."""
    if jobs <= 1 or len(tasks) <= 1:
        yield from map(_one, tasks)
        return
    context = get_context("spawn")
    with (
        safe_spawning(),
        ProcessPoolExecutor(min(jobs, len(tasks)), context, start_worker, worker_state()) as pool,
    ):
        for finished in as_completed([pool.submit(_one, task) for task in tasks]):
            yield finished.result()


def _key(settings: Mapping[str, Value]) -> str:
    """A name for a row: its settings, the files they name as they are now, and this version."""
    digest = blake2b(digest_size=12)
    digest.update(msgspec.json.encode([__version__, sorted(settings.items(), key=lambda item: item[0])]))
    for key, value in settings.items():
        for path in _named_by(key, str(value)):
            digest.update(_stamp(path))
    return digest.hexdigest()


def _named_by(key: str, text: str) -> list[Path]:
    """Return the files that a setting names, or an option of an estimator, of which some are no files."""
    if key == "estimator":
        return named_paths(text.partition(":")[2])
    return [Path(text)] if AXES[key].is_path or is_path(text) else []


def _stamp(path: Path) -> bytes:
    """Sizes and times of a file, or of the files in a folder; nothing of what is neither."""
    try:
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        return b"".join(f"{each.stat().st_size} {each.stat().st_mtime_ns};".encode() for each in entries)
    except (OSError, ValueError):
        return b""


def _kept(file: Path) -> GridRow | None:
    """A row that was finished earlier; a damaged file counts as none."""
    try:
        stated = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
        known = {key: value for key, value in stated.items() if value is not None}  # null is not known
        return msgspec.convert(known, GridRow)
    except (OSError, ValueError, RecursionError):
        return None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(reason, path=str(folder), hint="name a folder that can be written") from error


def _keep(file: Path, content: bytes) -> None:
    """Write a row now, whatever becomes of the others: whole, or not at all."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise OutputError(reason, path=str(file), hint="check the folder of the report") from error


def _write(path: Path, content: bytes, *, overwrite: bool) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=overwrite, directory=False)
