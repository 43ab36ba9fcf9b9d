"""The measuring process: reads jobs, a line each, and answers each with a line; see :mod:`.messages`.

It is a process of its own because what it runs is somebody else's compiler on a generated program: that may
crash, hang or take all memory, and takes nobody with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec
import numpy as np

from hespas.estimators.compiled.clock import Slope, slope_of, timing_of
from hespas.estimators.compiled.messages import Job, Machine, Timing
from hespas.estimators.compiled.toolchains import TOOLCHAINS, Toolchain

__all__ = ["main", "serve"]

_LONGEST = 4000
_NUMPY_NAMES: Mapping[str, str] = MappingProxyType(
    {"i1": "bool", "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
    | {f"i{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)}
    | {f"ui{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)}
    | {"complex<f32>": "complex64", "complex<f64>": "complex128"}
)


def serve(toolchain: Toolchain, asked: BinaryIO, answers: BinaryIO) -> None:
    """Say who measures, then answer job by job until the input ends."""
    _say(answers, toolchain.machine())
    empty: dict[str, Slope] = {}
    for line in asked:
        job = msgspec.json.decode(line, type=Job)
        try:
            answer = _measured(toolchain, job, empty)
        except Exception as error:
            # Whatever a compiler raises is its verdict on this program, and the next may be sound.
            answer = Timing(fault=_text(error))
        _say(answers, answer)


def _measured(toolchain: Toolchain, job: Job, empty: dict[str, Slope]) -> Timing:
    if job.baseline not in empty:
        run = toolchain.compile(job.baseline, _arguments(job.baseline_arguments))
        empty[job.baseline] = slope_of(run, job.repeats)
    work = slope_of(toolchain.compile(job.program, _arguments(job.arguments)), job.repeats)
    return timing_of(work, empty[job.baseline])


def _arguments(types: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """Values that take the usual way through any operation: no zeros, no denormals, small integers."""
    rng = np.random.default_rng(7)
    found: list[np.ndarray[Any, np.dtype[Any]]] = []
    for name, shape in types:
        numpy_name = _NUMPY_NAMES.get(name, f"float8_{name[2:].lower()}")
        try:
            dtype: np.dtype[Any] = np.dtype(numpy_name)
        except TypeError:
            dtype = np.dtype(getattr(import_module("ml_dtypes"), numpy_name))
        values = rng.integers(0, 2, shape) if dtype.itemsize == 1 else rng.random(shape) + 0.5
        found.append(np.asarray(values, dtype))
    return found


def _text(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _say(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


def main() -> int:
    """The process: measures with the toolchain that its argument names."""
    name = sys.argv[1]
    # Libraries write to standard output what they like: the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        toolchain = TOOLCHAINS[name]()
        toolchain.machine()
    except Exception as error:
        # A compiler that is installed and does not start is told as what it says itself.
        _say(answers, Machine(compiler=name, platform="", device="", flags="", fault=_text(error)))
        return 0
    serve(toolchain, sys.stdin.buffer, answers)
    return 0
