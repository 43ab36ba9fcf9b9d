"""Compilation of a program by a real compiler for a chip that is not there, and figures of the compiled
program.

The compiler (libtpu, or XLA of the CUDA plugin) runs in a supervised process. A crash, a hang or a refusal
raises an error with a hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import nan
from tempfile import TemporaryFile
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from hespas.captures.aot.child import CompileJob, CompileResult, environment
from hespas.captures.aot.target import TPUS, Target, target_config
from hespas.converters.format import ReadOptions
from hespas.converters.hlo.reader import read_module
from hespas.files.processes import clean_environment, decode_error, isolated_python, run
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpGraph, Workload
from hespas.graph.columns import BoolArray, SmallIntArray
from hespas.graph.errors import (
    MissingExtraError,
    UnsupportedError,
    UsageError,
    clipped,
)
from hespas.graph.mesh import Mesh
from hespas.graph.passes import is_free

__all__ = [
    "CompiledProgram",
    "JaxLowered",
    "ProgramFigures",
    "compile_for",
    "figures_of",
    "missing_compiler",
    "workload_of_compiled",
]

_CHILD = "hespas.captures.aot.child"
_TIMEOUT_S = 1800.0
_PACKAGES: Mapping[str, tuple[str, str, str]] = {
    "tpu": ("libtpu", "libtpu", "0.0.42."),
    "gpu": ("jax_plugins.xla_cuda13", "jax-cuda13-plugin", "0.10."),
}
"""Platform -> module, distribution, tested versions."""
_JAX = "0.10."
_DEFAULT_HINT = (
    "omit `compile_for` to partition without a compiler, name another target, or compile less of the "
    "program: fewer layers, or only the relevant part"
)
_OTHER_PLATFORM = (
    "the program uses operations of another platform: lower it for this one, "
    "jax.jit(f).trace(...).lower(lowering_platforms=('cuda',)) or ('tpu',)"
)
_HINTS = (
    (
        "PartitionId",
        "the program is partitioned already: give the program before, with its sharding annotations",
    ),
    ("No FFI handler registered", _OTHER_PLATFORM),
    ("Custom emitter for", _OTHER_PLATFORM),
    ("devices, the mesh", "give the mesh that the program was lowered for, and a target of its size"),
)
"""Texts in compiler messages, and the hint for each."""
_COMMUNICATION = (NodeKind.COLLECTIVE, NodeKind.PERMUTE, NodeKind.SEND)


@runtime_checkable
class JaxLowered(Protocol):
    """Interface of the result of ``jax.jit(...).lower(...)``."""

    def as_text(self) -> str:
        """Return the program as StableHLO."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """Program compiled for ``target``: ``program`` is the input (StableHLO), ``hlo`` the output.

    ``memory`` is the memory of one device as the compiler reports it [bytes]: argument, output, alias
    (outputs that reuse arguments), temp, generated_code, peak (-1: not reported). ``costs`` are the
    compiler's totals of one device (flops, transcendentals, ``bytes accessed``, ``optimal_seconds``), empty
    if it reports none. They are estimates, not measurements. ``compiler`` is the version of the compiler.
    ``cpu_s`` and ``peak_rss_bytes`` are the CPU time and the memory that compiling took.
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
    """Return the reason why the compiler for a target is not installed; empty if it is."""
    module, distribution, tested = _PACKAGES[target.platform]
    for module_name, package, tested_version in (("jax", "jax", _JAX), (module, distribution, tested)):
        try:
            present = find_spec(module_name) is not None
        except ModuleNotFoundError:  # of the parent package
            present = False
        if not present:
            return f"{package} is not installed"
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if not installed.startswith(tested_version):
            return f"{package} {installed} is installed; tested with {tested_version}*"
    return ""


def compile_for(
    program: str | bytes | JaxLowered,
    target: str | Target,
    mesh: str | Mapping[str, int] | Mesh,
    *,
    diagnostics: Diagnostics,
    timeout_s: float = _TIMEOUT_S,
) -> CompiledProgram:
    """Compile a program ahead of time for all devices of ``target``, arranged as ``mesh``.

    The program is StableHLO (text, bytecode, or lowered by JAX) with sharding annotations of ``sdy`` or
    GSPMD.

    Raises ``UsageError`` for an impossible target or mesh, ``FormatError`` if the input is not a program,
    ``MissingExtraError`` without the compiler, and ``UnsupportedError`` if the compiler refuses, crashes, or
    takes longer than ``timeout_s``.
    """
    target, mesh = Target.of(target), Mesh.of(mesh)
    if mesh.num_devices != target.num_devices:
        raise UsageError(
            f"target {target} has {target.num_devices:,} devices, mesh {mesh} has {mesh.num_devices:,}",
            hint="name a mesh and a target of the same number of devices",
        )
    if reason := missing_compiler(target):
        raise MissingExtraError(f"compiling for {target}", target.extra, detail=reason)
    if not isinstance(program, bytes):
        text = program if isinstance(program, str) else program.as_text()
        program = text.encode("utf-8", "surrogatepass")
    is_gpu = target.platform == "gpu"
    job = CompileJob(
        platform=target.platform,
        topology=target.topology,
        axes=mesh.names,
        mesh=mesh.sizes,
        config=target_config(target.name) if is_gpu else "",
        chip_config="" if is_gpu else TPUS[target.name].chip_config,
        chips_of_host=target.chips_of_host,
    )
    result, hlo = _run_compiler(job, program, target, timeout_s)
    for note in result.notes:
        diagnostics.info("aot.mesh-order", str(target), note)
    # A negative cost or a time of zero means that the compiler has no estimate.
    wrong = [
        key
        for key, value in result.costs.items()
        if not value >= 0 or (key == "optimal_seconds" and not value)
    ]
    if wrong:
        diagnostics.info(
            "aot.no-estimate",
            str(target),
            f"the compiler reports {', '.join(f'{key} {result.costs[key]:g}' for key in wrong)}, which is "
            "not an estimate: ignored",
        )
    distribution = _PACKAGES[target.platform][1]
    return CompiledProgram(
        target=target,
        mesh=mesh,
        program=program,
        hlo=hlo,
        memory=result.memory,
        costs={key: value for key, value in result.costs.items() if key not in wrong},
        compiler=f"{distribution} {version(distribution)}",
        cpu_s=result.cpu_s if result.cpu_s >= 0 else nan,
        peak_rss_bytes=result.peak_rss_bytes,
    )


def workload_of_compiled(compiled: CompiledProgram, diagnostics: Diagnostics) -> Workload:
    """Return a compiled program as a workload, with fusions, asynchronous collectives, and the compiler's
    schedule as control dependencies. The metadata state the target, the compiler, and the required memory.
    """
    text = compiled.hlo.encode("utf-8", "surrogateescape")
    workload = read_module(text, str(compiled.target), ReadOptions(), diagnostics, in_order=True)
    compilation = {
        "compiled_for": str(compiled.target),
        "compiler": compiled.compiler,
        "mesh": str(compiled.mesh),
        **{f"compiler_{name}_bytes": str(size) for name, size in compiled.memory.items() if size >= 0},
        **{f"compiler_{name.replace(' ', '_')}": repr(value) for name, value in compiled.costs.items()},
    }
    return replace(workload, metadata={**workload.metadata, **compilation})


def _run_compiler(
    job: CompileJob, program: bytes, target: Target, timeout_s: float
) -> tuple[CompileResult, str]:
    """Run the compiler in a child process and return its result and the HLO. Raises ``UnsupportedError`` if
    it fails.
    """
    with TemporaryFile() as output:
        try:
            ended = run(
                isolated_python(_CHILD),
                time_s=timeout_s,
                environment=clean_environment(environment()),
                data=msgspec.json.encode(job) + b"\n" + program,
                output=output,
            )
        except OSError as error:
            raise UnsupportedError(
                f"the process that compiles for {target} does not start: {error}",
                hint="check the limits of the shell (ulimit -a)",
            ) from error
        if ended.stopped == "time":
            raise _failure(target, f"takes longer than {timeout_s:,.0f} s")
        if ended.status != 0:
            raise _failure(target, ended.describe())
        output.seek(0)
        result = msgspec.json.decode(output.readline(), type=CompileResult)
        hlo = output.read()
    if result.fault:
        raise decode_error(result.fault)
    if result.refused:
        message = result.refused.partition("\n")[0].strip()
        hint = next((hint for mark, hint in _HINTS if mark in message), _DEFAULT_HINT)
        raise _failure(target, f"refuses it: {clipped(message)}", hint)
    return result, hlo.decode("utf-8", "surrogateescape")


def _failure(target: Target, reason: str, hint: str = _DEFAULT_HINT) -> UnsupportedError:
    return UnsupportedError(f"the compiler for {target} {reason}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFigures:
    """Totals of one rank class and step, with loops multiplied out, to compare a program before and after
    compilation.

    ``operations`` counts operations that take time, and ``fusions`` the fused ones among them.
    ``product_flops`` are useful FLOPs of matmuls and convolutions. ``collectives`` (number) and
    ``collective_bytes`` are by kind (``all_reduce``), with bytes as defined by Chakra. ``asynchronous``
    counts collectives and messages that overlap other work before the operation that completes them.
    """

    operations: float
    fusions: float
    product_flops: float
    collectives: Mapping[str, float]
    collective_bytes: Mapping[str, float]
    asynchronous: float


def figures_of(workload: Workload, rank_class: int = 0) -> ProgramFigures:
    """Return figures of one compiled rank class, such as numbers of fusions and FLOPs, for tables.
    O(nodes).
    """
    graph = workload.classes[rank_class]
    runs = np.nan_to_num(graph.executions, nan=1.0)
    busy = ~is_free(graph)
    table, products = graph.collectives, graph.contractions
    counts: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for code in np.unique(table.kind).tolist():
        of_kind = table.kind == code
        kind = CollectiveKind(code).name.lower()
        counts[kind] = float(runs[table.node[of_kind]].sum())
        sizes[kind] = float((table.comm_bytes[of_kind] * runs[table.node[of_kind]]).sum())
    useful = np.where(np.isnan(products.useful_flops), products.flops, products.useful_flops)
    busy_streams = ~is_free(graph) & (graph.kind == int(NodeKind.COMPUTE))
    completes = _contain(graph, graph.op_id, "-done") | _contain(graph, graph.name_id, "-done")
    consumers, producers = graph.data_deps.row_ids, graph.data_deps.values
    consumers, producers = consumers[completes[consumers]], producers[completes[consumers]]
    done_at = np.full(len(graph), -1, np.int64)
    np.maximum.at(done_at, producers, consumers)
    before = np.concatenate([[0], np.cumsum(busy_streams)])
    started = np.isin(graph.kind, _COMMUNICATION) & (done_at >= 0)
    overlapping: BoolArray = started & (before[np.maximum(done_at, 0)] > before[np.arange(len(graph)) + 1])
    return ProgramFigures(
        operations=float(runs[busy].sum()),
        fusions=float(runs[busy & _contain(graph, graph.op_id, "fusion")].sum()),
        product_flops=float((useful * runs[products.node]).sum()),
        collectives=counts,
        collective_bytes=sizes,
        asynchronous=float(runs[overlapping].sum()),
    )


def _contain(graph: OpGraph, string_ids: SmallIntArray, part: str) -> BoolArray:
    """Return a mask of the strings of a graph (by ``string_ids``) that contain the text ``part``."""
    contains = {row: part in graph.strings[row] for row in np.unique(string_ids).tolist()}
    return np.array([contains[row] for row in string_ids.tolist()], np.bool_)
