"""Round trips of many files on several cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from hespas.converters import ReadOptions, is_recognised, load_format
from hespas.files.sandbox import die_with_parent, safe_spawning
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.roundtrip.pairs import FilePairs, file_pairs
from hespas.validators.roundtrip.result import RoundTrips, matrix

__all__ = ["roundtrip"]


def roundtrip(
    paths: Sequence[Path],
    formats: Sequence[str] = (),
    *,
    options: ReadOptions | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> RoundTrips:
    """Take each file through every pair of ``formats`` (default: all that are registered).

    A folder that is no set of rank files stands for the files in it that some format knows; profiles in it
    are skipped. ``options`` say how to read the inputs; ``jobs`` is the number of processes. Raises
    ``FormatError`` for unreadable input, ``UsageError`` for unknown formats and where there is nothing to
    try.
    """
    chosen = [load_format(name) for name in formats]
    if chosen and not any(entry.write for entry in chosen):
        raise UsageError(
            f"there is no pair to try: none of these formats can be written: {', '.join(formats)}",
            hint="hespas-convert --list-formats",
        )
    reading = options or ReadOptions()
    inputs = [file for path in paths for file in _inputs(path, reading)]
    if not inputs:
        raise UsageError("none of these files is of a known format", hint="hespas-convert --list-formats")
    done: list[FilePairs] = []
    for result in _each(inputs, formats, jobs):
        done.append(result)
        if progress:
            progress(len(done), len(inputs))
    if all(file.skipped for file in done):
        raise UsageError(
            "there is nothing to try: round trips are of workloads, and these are profiles",
            hint="give programs or traces",
        )
    return matrix(done)


@dataclass(frozen=True, slots=True)
class _Input:
    path: Path
    options: ReadOptions
    in_folder: bool


def _inputs(path: Path, options: ReadOptions) -> Iterator[_Input]:
    """The inputs that a path names: itself, or what a folder holds."""
    if not path.exists():
        raise FormatError("no such file or directory", path=str(path), hint="check the path")
    if not path.is_dir() or is_recognised(path):
        yield _Input(path, options, in_folder=False)
        return
    for entry in sorted(path.rglob("*")):
        if entry.is_file() and is_recognised(entry):
            yield _Input(entry, options, in_folder=True)


def _stands_somewhere() -> bool:
    """Whether the current folder is still there: a process that is spawned starts in it."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _pairs_of(given: _Input, formats: Sequence[str]) -> FilePairs:
    return file_pairs(given.path, formats, options=given.options, in_folder=given.in_folder)


def _each(inputs: Sequence[_Input], formats: Sequence[str], jobs: int) -> Iterator[FilePairs]:
    """The pairs of each input, in order. Processes are spawned: forking one that has threads is unsafe."""
    if jobs <= 1 or len(inputs) == 1 or not _stands_somewhere():
        yield from (_pairs_of(given, formats) for given in inputs)
        return
    context, parent = get_context("spawn"), (os.getpid(),)
    with safe_spawning(), ProcessPoolExecutor(jobs, context, die_with_parent, parent) as pool:
        yield from pool.map(_pairs_of, inputs, [tuple(formats)] * len(inputs))
