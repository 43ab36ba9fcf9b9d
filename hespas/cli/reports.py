"""Documents that a command writes beside its result: looked at before any work, never over an input."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hespas.graph.errors import OutputError, UsageError

__all__ = ["check_reports"]

_TABLE = "--out"
"""The option of tables, which cannot be told from those that hold measured operations."""


def check_reports(reports: Mapping[str, Path | None], others: Mapping[str, Sequence[str | Path]]) -> None:
    """Raise ``OutputError`` or ``UsageError`` where a report of an option cannot be written, or would replace
    what the same command reads or writes, another report of it, or any file with a workload or profile.

    An earlier report is replaced. ``others`` are the paths of each argument.
    """
    from hespas.converters import is_recognised
    from hespas.converters.output import check_destination

    taken = {role: list(paths) for role, paths in others.items()}
    for option, path in reports.items():
        if path is None:
            continue
        if str(path) == "-":
            raise UsageError(f"{option} - names no file", hint=f"{option} report{_suffix(option)}")
        check_destination(path, overwrite=True)
        if path.is_dir():
            raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
        for role, paths in taken.items():
            if any(_same(path, Path(other)) for other in paths):
                raise UsageError(
                    f"{option} names the same file as {role}", path=str(path), hint="choose another file"
                )
        if path.exists() and option != _TABLE and is_recognised(path):
            raise OutputError(
                "holds a workload or a profile, and no earlier report",
                path=str(path),
                hint="choose another file",
            )
        taken[option] = [path]


def _suffix(option: str) -> str:
    return {"--html": ".html", _TABLE: ".csv"}.get(option, ".json")


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, also where it is not there yet."""
    if str(other) == "-":
        return False
    try:
        return os.path.realpath(one) == os.path.realpath(other) or one.samefile(other)
    except OSError:  # one of them does not exist yet
        return False
