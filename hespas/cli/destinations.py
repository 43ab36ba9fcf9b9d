"""Checks of the files that a command writes: made before any work, so that no input is overwritten."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hespas.graph.errors import OutputError, UsageError
from hespas.graph.hints import Option

__all__ = [
    "AsJson",
    "ListFile",
    "check_apart",
    "check_reports",
    "check_suffix",
    "estimator_files",
    "hardware_files",
    "list_file",
    "report_folder",
    "workload_format",
]

_TABLE_OPTION = "--out"
"""Option that writes tables, which look like the tables of measured operations that Hespas reads."""


def check_reports(
    reports: Mapping[str, Path | None], others: Mapping[str, Sequence[str | Path]], *, overwrite: bool
) -> None:
    """Check the paths of documents that options write; ``reports`` maps the option to the path. ``others``
    are the paths of other arguments.

    Raises ``OutputError`` or ``UsageError`` if a document cannot be written. Also raises if it would replace
    a file that the command reads or writes, an existing file without ``overwrite``, or a workload or profile.
    Standard output (``-``), pipes and devices are allowed.
    """
    from hespas.api.documents import check_document, is_standard_output, is_stream
    from hespas.converters import is_recognised

    taken = {role: list(paths) for role, paths in others.items()}
    streams = ["DST"] if "-" in map(str, taken.get("DST", ())) else []
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
        if not is_stream(path) and path.exists() and option != _TABLE_OPTION and is_recognised(path):
            raise OutputError(
                "holds a workload or a profile, not an earlier report",
                path=str(path),
                hint="choose another file",
            )
        taken[option] = [path]


def check_apart(option: str, path: Path, others: Mapping[str, Sequence[str | Path]]) -> None:
    """Raise ``UsageError`` if an option writes to a file of another argument."""
    for role, paths in others.items():
        if any(_is_same_file(path, Path(other)) for other in paths):
            raise UsageError(
                f"{option} names the same file as {role}", path=str(path), hint="choose another file"
            )


def _is_same_file(one: Path, other: Path) -> bool:
    """Return True if two paths lead to the same file. The file need not exist yet."""
    if str(other) == "-":
        return False
    try:
        return os.path.realpath(one) == os.path.realpath(other) or one.samefile(other)
    except OSError:  # one of the files does not exist yet
        return False


def check_suffix(out: Path, suffix: str | tuple[str, ...], example: str) -> None:
    """Raise ``UsageError`` if the file of ``--out`` has another suffix."""
    suffixes = (suffix,) if isinstance(suffix, str) else suffix
    if out.suffix not in suffixes:
        expected = " or ".join(suffixes)
        raise UsageError(f"--out: expected a {expected} file", path=str(out), hint=f"--out {example}")


def hardware_files(*hardware: str) -> list[Path]:
    """Return the values of ``--hardware`` that are files; the others are names of devices."""
    return [Path(value) for value in hardware if value and _is_file(Path(value))]


def estimator_files(*spellings: str) -> list[Path]:
    """Return the files in values of ``--estimator``: tables, configurations and programs."""
    from hespas.estimators.registry import named_paths

    return [path for spelling in spellings for path in named_paths(spelling) if _is_file(path)]


def _is_file(path: Path) -> bool:
    """Return True if the path is a file; False also if it is not a valid path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def report_folder(text: str) -> Path:
    """Return a folder of output. Raises ``BadParameter`` if the text is not a folder name."""
    if text in ("", "-"):
        raise typer.BadParameter(f"{text!r} is not a folder: name one, such as report/")
    return Path(text)


ListFile = Annotated[
    Path | None,
    Option(
        "Write the JSON of --json to this file (default: standard output).",
        metavar="[FILE|-]",
        is_argument=True,
        default_text="",
        access="writes",
    ),
]
AsJson = Annotated[
    bool,
    Option("Write the list as JSON to standard output, or to the FILE that follows.", flag="json"),
]


def list_file(path: Path | None, *, as_json: bool, overwrite: bool) -> Path | None:
    """Return the destination of a list as JSON: the file after ``--json``, or standard output if no file is
    given; None without ``--json``. Raises the errors of :func:`check_reports`.
    """
    if not as_json:
        if path:
            raise UsageError(
                f"unexpected argument {str(path)!r}", hint="add --json to write the list to this file"
            )
        return None
    destination = path or Path("-")
    check_reports({"--json": destination}, {}, overwrite=overwrite)
    return destination


def workload_format(destination: Path | None, target_format: str | None) -> str | None:
    """Return the format of a workload that is written to ``destination``: ``target_format`` if it is given.

    Otherwise it is Chakra traces for a folder, and None for a file, whose suffix selects the format. Raises
    :class:`UsageError` for standard output.
    """
    if destination == Path("-"):
        raise UsageError(
            "--out -: a workload consists of files and cannot go to standard output",
            hint="name a folder or a file",
        )
    return target_format or ("chakra" if destination and not destination.suffix else None)
