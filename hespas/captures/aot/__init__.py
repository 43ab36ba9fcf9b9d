"""What the real compilers for TPUs and GPUs make of a program, without the chip: scheduled HLO as a workload.

The compilers are extras that the user installs: ``jax-tpu`` (libtpu, proprietary: its output is not ours to
hand on), ``jax-gpu`` (XLA of the CUDA plugin of JAX).
"""

from __future__ import annotations

from hespas.captures.aot.compiler import Compiled, compile_for, missing_compiler, workload_of_compiled
from hespas.captures.aot.figures import Figures, figures_of
from hespas.captures.aot.target import Target

__all__ = [
    "Compiled",
    "Figures",
    "Target",
    "compile_for",
    "figures_of",
    "missing_compiler",
    "workload_of_compiled",
]
