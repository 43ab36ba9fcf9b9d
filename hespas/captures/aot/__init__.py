"""Ahead-of-time compilation by the real TPU and GPU compilers, without the chip. The scheduled HLO becomes a
workload.

The compilers are extras that the user installs: ``jax-tpu`` (libtpu, proprietary: its output must not be
redistributed) and ``jax-gpu`` (XLA of JAX's CUDA plugin).
"""

from __future__ import annotations

from hespas.captures.aot.compiler import (
    CompiledProgram,
    ProgramFigures,
    compile_for,
    figures_of,
    missing_compiler,
    workload_of_compiled,
)
from hespas.captures.aot.target import Target

__all__ = [
    "CompiledProgram",
    "ProgramFigures",
    "Target",
    "compile_for",
    "figures_of",
    "missing_compiler",
    "workload_of_compiled",
]
