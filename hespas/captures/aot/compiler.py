"""Asks a real compiler what it makes of a program for a chip that is not there.

The compiler (libtpu, or XLA of the CUDA plugin) runs in a supervised process: a crash, a hang or a refusal is
an error here that says what to do instead.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import nan
from typing import Protocol, runtime_checkable

import msgspec

from hespas.captures.aot.child import Answer, Job, environment
from hespas.captures.aot.gpu_config import target_config
from hespas.captures.aot.target import TPUS, Target
from hespas.captures.mesh import Mesh
from hespas.converters.format import ReadOptions
from hespas.converters.hlo.reader import read_module
from hespas.files.children import end_of, error_from_text
from hespas.files.sandbox import ROOT, clean_environment, isolated_python
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import (
    MissingExtraError,
    UnsupportedError,
    UsageError,
    clipped,
)

__all__ = ["Compiled", "Lowered", "compile_for", "missing_compiler", "workload_of_compiled"]

_CHILD = "hespas.captures.aot.child"
_TIMEOUT_S = 1800.0
_PACKAGES: Mapping[str, tuple[str, str, str]] = {
    "tpu": ("libtpu", "libtpu", "0.0.42."),
    "gpu": ("jax_plugins.xla_cuda13", "jax-cuda13-plugin", "0.10."),
}
"""Platform -> module, distribution, versions it is tested with."""
_JAX = "0.10."
_ELSEWISE = (
    "leave `compile_for` out to partition without a compiler, name another target, or compile less of the "
    "program: fewer layers, or the part that is asked about"
)


_OTHER_PLATFORM = (
    "the program calls what another platform has: lower it for this one, "
    "jax.jit(f).trace(...).lower(lowering_platforms=('cuda',)) or ('tpu',)"
)
_REFUSALS = (
    ("PartitionId", "the program is partitioned already: give the one before, with its sharding annotations"),
    ("No FFI handler registered", _OTHER_PLATFORM),
    ("Custom emitter for", _OTHER_PLATFORM),
    ("devices, the mesh", "give the mesh that the program was lowered for, and a target of its size"),
)
"""What compilers say, and what to do then."""


@runtime_checkable
class Lowered(Protocol):
    """What ``jax.jit(...).lower(...)`` returns."""

    def as_text(self) -> str:
        """The program as StableHLO."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A program as compiled for ``target``. ``program`` is what was given, ``hlo`` what came out.

    ``memory`` is the compiler's account of one device [bytes]: argument, output, alias (of outputs over
    arguments), temp, generated_code, peak (-1: not stated). ``costs`` are its totals of one device (flops,
    transcendentals, ``bytes accessed``, ``optimal_seconds``), empty where it has none; estimates, none of
    them measured. ``compiler`` is its version; ``cpu_s`` and ``peak_rss_bytes`` are what compiling took.
    """

    target: Target
    mesh: Mesh
    program: bytes
    hlo: str
    memory: Mapping[str, int]
    costs: Mapping[str, float] = field(default_factory=dict[str, float])
    compiler: str = ""
    cpu_s: float = nan
    peak_rss_bytes: int = -1


def missing_compiler(target: Target) -> str:
    """Why the compiler for a target cannot be asked here; empty where it can."""
    module, distribution, tested = _PACKAGES[target.platform]
    for name, found, wanted in (("jax", "jax", _JAX), (module, distribution, tested)):
        try:
            present = find_spec(name) is not None
        except ModuleNotFoundError:  # of the package that holds it
            present = False
        if not present:
            return f"{found} is not installed"
        try:
            installed = version(found)
        except PackageNotFoundError:
            continue
        if not installed.startswith(wanted):
            return f"{found} {installed} is installed; tested with {wanted}*"
    return ""


def compile_for(
    program: str | bytes | Lowered,
    target: str | Target,
    mesh: str | Mapping[str, int] | Mesh,
    *,
    diagnostics: Diagnostics,
    timeout_s: float = _TIMEOUT_S,
) -> Compiled:
    """Compile StableHLO (text, bytecode, or lowered by JAX; ``sdy`` or GSPMD annotations in it) for all
    devices of ``target``, which stand in the order of ``mesh``.

    Raises ``UsageError`` for a target or mesh that cannot be, ``FormatError`` for what is no program,
    ``MissingExtraError`` without the compiler, and
    ``UnsupportedError`` where the compiler refuses, crashes, or takes longer than ``timeout_s``.
    """
    aim, axes = Target.of(target), Mesh.of(mesh)
    if axes.num_devices != aim.num_devices:
        raise UsageError(
            f"target {aim} has {aim.num_devices:,} devices, mesh {axes} has {axes.num_devices:,}",
            hint="name a mesh and a target of the same number of devices",
        )
    if why := missing_compiler(aim):
        raise MissingExtraError(f"compiling for {aim}", aim.extra, detail=why)
    data, distribution = _bytes_of(program), _PACKAGES[aim.platform][1]
    is_gpu = aim.platform == "gpu"
    job = Job(
        platform=aim.platform,
        topology=aim.topology,
        axes=axes.names,
        mesh=axes.sizes,
        config=target_config(aim.name) if is_gpu else "",
        chip_config="" if is_gpu else TPUS[aim.name].chip_config,
        chips_of_host=aim.chips_of_host,
    )
    answer, hlo = _ask(job, data, aim, timeout_s)
    for note in answer.notes:
        diagnostics.info("aot.mesh-order", str(aim), note)
    return Compiled(
        target=aim,
        mesh=axes,
        program=data,
        hlo=hlo,
        memory=answer.memory,
        costs=_checked(answer.costs, aim, diagnostics),
        compiler=f"{distribution} {version(distribution)}",
        cpu_s=answer.cpu_s if answer.cpu_s >= 0 else nan,
        peak_rss_bytes=answer.peak_rss_bytes,
    )


def workload_of_compiled(compiled: Compiled, diagnostics: Diagnostics) -> Workload:
    """The graph of the optimised program: fusions, asynchronous collectives, and the compiler's schedule as
    control dependencies. Its metadata say what it was compiled for and by, and the memory it takes.
    """
    text = compiled.hlo.encode("utf-8", "surrogateescape")
    workload = read_module(text, str(compiled.target), ReadOptions(), diagnostics, in_order=True)
    stated = {
        "compiled_for": str(compiled.target),
        "compiler": compiled.compiler,
        "mesh": str(compiled.mesh),
        **{f"compiler_{name}_bytes": str(size) for name, size in compiled.memory.items() if size >= 0},
        **{f"compiler_{name.replace(' ', '_')}": repr(value) for name, value in compiled.costs.items()},
    }
    return replace(workload, metadata={**workload.metadata, **stated})


def _bytes_of(program: str | bytes | Lowered) -> bytes:
    if isinstance(program, bytes):
        return program
    text = program if isinstance(program, str) else program.as_text()
    return text.encode("utf-8", "surrogatepass")


def _ask(job: Job, program: bytes, target: Target, timeout_s: float) -> tuple[Answer, str]:
    """The answer of the compiler and the HLO. Raises ``UnsupportedError`` where there is none."""
    try:
        ended = subprocess.run(
            isolated_python(_CHILD),
            input=msgspec.json.encode(job) + b"\n" + program,
            capture_output=True,
            cwd=ROOT,
            env=clean_environment(environment()),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _failed(target, f"takes longer than {timeout_s:,.0f} s") from None
    except OSError as error:
        raise UnsupportedError(
            f"the process that compiles for {target} does not start: {error}",
            hint="check the limits of the shell (ulimit -a)",
        ) from error
    if ended.returncode != 0:
        raise _failed(target, end_of(ended.returncode, ended.stderr))
    head, _, hlo = ended.stdout.partition(b"\n")
    answer = msgspec.json.decode(head, type=Answer)
    if answer.fault:
        raise error_from_text(answer.fault)
    if answer.refused:
        said = answer.refused.partition("\n")[0].strip()
        hint = next((hint for mark, hint in _REFUSALS if mark in said), _ELSEWISE)
        raise _failed(target, f"refuses it: {clipped(said)}", hint)
    return answer, hlo.decode("utf-8", "surrogateescape")


def _failed(target: Target, what: str, hint: str = _ELSEWISE) -> UnsupportedError:
    return UnsupportedError(f"the compiler for {target} {what}", hint=hint)


def _checked(costs: Mapping[str, float], target: Target, diagnostics: Diagnostics) -> dict[str, float]:
    """Totals without those that stand for nothing: a negative or zero time says that there is no estimate."""
    wrong = [
        key for key, value in costs.items() if not value >= 0 or (key == "optimal_seconds" and not value)
    ]
    if wrong:
        diagnostics.info(
            "aot.no-estimate",
            str(target),
            f"the compiler states {', '.join(f'{key} {costs[key]:g}' for key in wrong)}, which is no "
            "estimate: left out",
        )
    return {key: value for key, value in costs.items() if key not in wrong}
