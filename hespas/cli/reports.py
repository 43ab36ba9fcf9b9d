"""Documents that a command writes beside its result: looked at before any work, never over an input."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import inf, isfinite, nan
from pathlib import Path

import typer

from hespas.graph.errors import OutputError, UsageError

__all__ = [
    "check_apart",
    "check_once",
    "check_reports",
    "estimator_files",
    "hardware_files",
    "limit_of",
    "list_file",
    "report_folder",
    "write_document",
]

_TABLE = "--out"
"""The option of tables, which cannot be told from those that hold measured operations."""


def check_reports(
    reports: Mapping[str, Path | None], others: Mapping[str, Sequence[str | Path]], *, overwrite: bool
) -> None:
    """Raise ``OutputError`` or ``UsageError`` where a report of an option cannot be written, or would replace
    what the same command reads or writes, another report of it, any file without ``overwrite``, or one with a
    workload or profile.

    ``others`` are the paths of each argument. Standard output (``-``), pipes and devices take a report too.
    """
    from hespas.api.streams import check_document, is_standard_output, is_stream
    from hespas.converters import is_recognised

    taken = {role: list(paths) for role, paths in others.items()}
    streams = ["DST"] if "-" in taken.get("DST", ()) else []
    for option, path in reports.items():
        if path is None:
            continue
        if not is_stream(path):
            check_apart(option, path, taken)
        check_document(path, overwrite=overwrite)
        if is_standard_output(path):
            if streams:
                raise UsageError(
                    f"{option} and {streams[0]} both go to standard output", hint=f"{option} FILE"
                )
            streams.append(option)
        if not is_stream(path) and path.exists() and option != _TABLE and is_recognised(path):
            raise OutputError(
                "holds a workload or a profile, and no earlier report",
                path=str(path),
                hint="choose another file",
            )
        taken[option] = [path]


def check_apart(option: str, path: Path, others: Mapping[str, Sequence[str | Path]]) -> None:
    """Raise ``UsageError`` where what an option writes is a file of another argument."""
    for role, paths in others.items():
        if any(_same(path, Path(other)) for other in paths):
            raise UsageError(
                f"{option} names the same file as {role}", path=str(path), hint="choose another file"
            )


def check_once(paths: Sequence[Path]) -> None:
    """Raise ``UsageError`` for an input that is given twice: repeats of itself would look like no noise."""
    seen: set[tuple[int, int]] = set()
    for path in paths:
        try:
            found = path.stat()
        except OSError:  # who reads it says what is wrong
            continue
        if (found.st_dev, found.st_ino) in seen:
            raise UsageError("is given twice", path=str(path), hint="give each recording once")
        seen.add((found.st_dev, found.st_ino))


def hardware_files(*hardware: str) -> list[Path]:
    """Those of the values of ``--hardware`` that name files which are there; the others name devices."""
    return [Path(each) for each in hardware if each and _is_file(Path(each))]


def estimator_files(*spellings: str) -> list[Path]:
    """The files that options of ``--estimator`` name: tables, orders, configurations, programs."""
    options = [part.rpartition("=")[2] for spelling in spellings for part in re.split("[,+]", spelling)]
    return [Path(each) for each in options if each and _is_file(Path(each))]


def _is_file(path: Path) -> bool:
    """Whether a value of an option names a file; it may be no name at all, and longer than any."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def report_folder(text: str) -> Path:
    """The folder of ``--report``. Raises ``BadParameter`` for what names none."""
    if text in ("", "-"):
        raise typer.BadParameter(f"{text!r} names no folder")
    return Path(text)


def write_document(content: bytes, path: Path, *, overwrite: bool) -> None:
    """Write a document at once or not at all; ``-`` is standard output."""
    from hespas.api.streams import put

    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    put(path, fill, overwrite=overwrite)


def list_file(path: Path | None, *, as_json: bool, overwrite: bool) -> Path | None:
    """Where the JSON of a list goes: ``--json`` takes a file or none. Raises as ``check_reports`` does."""
    if not as_json:
        if path:
            raise UsageError(f"unexpected argument {str(path)!r}", hint="add --json to write the list there")
        return None
    place = path or Path("-")
    check_reports({"--json": place}, {}, overwrite=overwrite)
    return place


def limit_of(option: str, value: float | None, most: float = inf) -> float:
    """The limit of an option, NaN where it is not given. Raises ``UsageError`` for one that nothing, or
    everything, could pass: below 0, above ``most``, or no finite number.
    """
    if value is None:
        return nan
    if not (isfinite(value) and 0 <= value <= most):
        span = f"a number from 0 to {most:g}" if isfinite(most) else "a number of at least 0"
        raise UsageError(f"{option} {value:g} is no limit", hint=f"give {span}: 0.1 is 10 %")
    return value


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, also where it is not there yet."""
    if str(other) == "-":
        return False
    try:
        return os.path.realpath(one) == os.path.realpath(other) or one.samefile(other)
    except OSError:  # one of them does not exist yet
        return False
