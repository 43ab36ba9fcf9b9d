"""``hespas-validate calibrate --suggest``: which shapes to measure next, as a table to fill in."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from hespas.cli.destinations import check_apart, check_once, check_reports, hardware_files, write_document
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, is_quiet, report_diagnostics
from hespas.cli.text import count_text, counted, table_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.validators.calibration import Suggestions

__all__ = ["suggest_shapes"]


def suggest_shapes(
    hardware: str,
    count: int | None,
    *,
    tables: Sequence[Path],
    kinds: Sequence[str],
    dtypes: Sequence[str],
    seed: int,
    out: Path,
    json_file: Path | None,
    overwrite: bool,
    fitting: Sequence[str],
    debug: bool,
) -> None:
    """Write ``count`` shapes to ``out``, and say what was chosen and why. ``fitting`` names options that were
    given and ask for a fit.
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    source = str(tables[0]) if tables else ""
    reads = [hardware, *map(str, tables)]
    with command_line(debug, diagnostics, source, documents=[json_file], reads=reads, writes=[out]):
        from hespas import api

        if count is None:
            raise UsageError("--kind and --dtype say what to suggest", hint="add --suggest N")
        _check(hardware, tables, out, json_file, fitting, overwrite=overwrite)
        report = api.suggest_shapes(
            hardware, count, table=tables, kind=kinds, dtype=dtypes, seed=seed, diagnostics=diagnostics
        )
        report_diagnostics(diagnostics, source)
        if json_file:
            write_document(report.to_json(), json_file, overwrite=overwrite)
        report.write(out, overwrite=overwrite)
        _show(report.details, hardware, out)


def _check(
    hardware: str,
    tables: Sequence[Path],
    out: Path,
    json_file: Path | None,
    fitting: Sequence[str],
    *,
    overwrite: bool,
) -> None:
    """Refuse what contradicts itself, or cannot be written, before anything is read."""
    from hespas.files.output import check_destination

    if fitting:
        raise UsageError(
            f"--suggest fits nothing, and takes no {' and no '.join(fitting)}",
            hint="leave that out; what was measured goes to --table",
        )
    if out.suffix != ".csv":
        raise UsageError("shapes to measure go to a .csv", path=str(out), hint="--out shapes.csv")
    check_once(tables)
    reads = {"an input": tables, "--hardware": hardware_files(hardware)}
    check_apart("--out", out, reads)
    check_destination(out, overwrite=overwrite)
    check_reports({"--json": json_file}, {**reads, "--out": [out]}, overwrite=overwrite)


def _show(done: Suggestions, hardware: str, out: Path) -> None:
    """What was chosen of how many, why, and what to do with it."""
    from hespas.validators.calibration import TIME_COLUMN

    if not is_quiet():
        rows = [
            (
                each.kind,
                each.dtype,
                count_text(each.shapes),
                count_text(each.candidates),
                count_text(each.measured),
                "" if isnan(each.disagreement) else f"{each.disagreement:.2f}x",
                ", ".join(each.models),
            )
            for each in done.classes
        ]
        titles = ("kind", "dtype", "shapes", "of", "measured", "devices disagree by", "sizes known from")
        emit(table_text(titles, rows, left=(0, 1, 6)))
        emit(
            "each shape stands for the most sizes that no row measured or chosen before it stands for, "
            "weighed by how unsure the models are of them"
        )
    emit(
        f"{out}: {counted(len(done.frame), 'shape')} to measure on {done.device.name}, the most worth first; "
        f"fill in {TIME_COLUMN}, then: hespas-validate calibrate --hardware {quote(hardware)} "
        f"--table {quote(str(out))} --out FILE.toml"
    )
