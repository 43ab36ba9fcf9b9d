"""Round trips of many files on several cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from hespas.converters import is_recognised, load_format
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.roundtrip.pairs import FilePairs, file_pairs
from hespas.validators.roundtrip.result import RoundTrips, matrix

__all__ = ["roundtrip"]


def roundtrip(
    paths: Sequence[Path],
    formats: Sequence[str] = (),
    *,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> RoundTrips:
    """Take each file through every pair of ``formats`` (default: all that are registered).

    A folder that is no set of rank files stands for the files in it that some format knows. ``jobs`` is the
    number of processes. Raises ``FormatError`` for unreadable input, ``UsageError`` for unknown formats.
    """
    for name in formats:
        load_format(name)
    inputs = [file for path in paths for file in _inputs(path)]
    if not inputs:
        raise UsageError("none of these files is of a known format", hint="hespas-convert --list-formats")
    done: list[FilePairs] = []
    for result in _each(inputs, formats, jobs):
        done.append(result)
        if progress:
            progress(len(done), len(inputs))
    return matrix(done)


def _inputs(path: Path) -> Iterator[Path]:
    """The inputs that a path names: itself, or what a folder holds."""
    if not path.exists():
        raise FormatError("no such file or directory", path=str(path), hint="check the path")
    if not path.is_dir() or is_recognised(path):
        yield path
        return
    for entry in sorted(path.rglob("*")):
        if entry.is_file() and is_recognised(entry):
            yield entry


def _each(inputs: Sequence[Path], formats: Sequence[str], jobs: int) -> Iterator[FilePairs]:
    """The pairs of each input, in order. Processes are spawned: forking one that has threads is unsafe."""
    if jobs <= 1 or len(inputs) == 1:
        yield from (file_pairs(path, formats) for path in inputs)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(file_pairs, inputs, [tuple(formats)] * len(inputs))
