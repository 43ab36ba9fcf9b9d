"""The measuring process: reads jobs, a line each, and answers each with a line; see :mod:`.messages`.

It is a process of its own because what it runs is somebody else's compiler on a generated program: that may
crash, hang or take all memory, and takes nobody with it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import msgspec
import numpy as np

from hespas.estimators.compiled.measuring import Job, Machine, Timing

__all__ = ["TOOLCHAINS", "Array", "Slope", "Toolchain", "clock_mhz", "main", "serve", "slope_of", "timing_of"]

_LONGEST = 4000
_NUMPY_NAMES: Mapping[str, str] = MappingProxyType(
    {"i1": "bool", "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
    | {f"i{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)}
    | {f"ui{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)}
    | {"complex<f32>": "complex64", "complex<f64>": "complex128"}
)


def serve(toolchain: Toolchain, requests: BinaryIO, answers: BinaryIO) -> None:
    """Say who measures, then answer job by job until the input ends."""
    _say(answers, toolchain.machine())
    empty: dict[str, Slope] = {}
    for line in requests:
        job = msgspec.json.decode(line, type=Job)
        try:
            answer = _measured(toolchain, job, empty)
        except Exception as error:
            # Whatever a compiler raises is its verdict on this program, and the next may be sound.
            answer = Timing(fault=_text(error))
        _say(answers, answer)


def _measured(toolchain: Toolchain, job: Job, empty: dict[str, Slope]) -> Timing:
    if job.baseline not in empty:
        run = _turning(toolchain, job.baseline, job.baseline_arguments, looped=job.looped)
        empty[job.baseline] = slope_of(run, job.repeats)
    work = slope_of(_turning(toolchain, job.program, job.arguments, looped=job.looped), job.repeats)
    return timing_of(work, empty[job.baseline])


def _turning(
    toolchain: Toolchain, program: str, types: Sequence[tuple[str, tuple[int, ...]]], *, looped: bool
) -> Callable[[int], object]:
    """A function that runs a program so many turns: in its own loop, or called as often."""
    values = _arguments(types)
    if looped:
        return toolchain.compile(program, values, counted=True)
    call = toolchain.compile(program, values, counted=False)

    def run(turns: int) -> None:
        for _ in range(turns):
            call(1)

    return run


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
    """The process: measures with the toolchain that its first argument names, on as many devices at once as
    its second says.
    """
    name, devices = sys.argv[1], int(sys.argv[2])
    # Libraries write to standard output what they like: the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        toolchain = TOOLCHAINS[name](devices)
        toolchain.machine()
    except Exception as error:
        # A compiler that is installed and does not start is told as what it says itself.
        _say(answers, Machine(compiler=name, platform="", device="", flags="", fault=_text(error)))
        return 0
    serve(toolchain, sys.stdin.buffer, answers)
    return 0


# --- How long one turn of a loop takes: medians of differences between a long loop and a short one.


_SAMPLE_NS = 10e6
_MOST_TURNS = 1 << 20
_TICK_NS = 1.0


class Slope(NamedTuple):
    """Nanoseconds of one turn, sample by sample, and how many turns a sample had."""

    samples_ns: list[float]
    turns: int


def slope_of(run: Callable[[int], object], repeats: int) -> Slope:
    """Time ``run(turns)``, which returns when done; the first runs warm up."""
    run(1)
    turns = 2
    while (spent_ns := _spent_ns(run, turns)) < _SAMPLE_NS / 2 and turns < _MOST_TURNS:
        turns = min(turns * max(2, min(16, int(_SAMPLE_NS / max(spent_ns, 1.0)))), _MOST_TURNS)
    samples = [(_spent_ns(run, turns) - _spent_ns(run, 1)) / (turns - 1) for _ in range(repeats)]
    return Slope(samples, turns)


def _spent_ns(run: Callable[[int], object], turns: int) -> float:
    start = perf_counter_ns()
    run(turns)
    return float(perf_counter_ns() - start)


def timing_of(work: Slope, empty: Slope) -> Timing:
    """One turn's work without the loop around it: median, and the 5th and 95th percentile of samples."""
    loop_ns = max(median(empty.samples_ns), 0.0)
    samples = [sample - loop_ns for sample in work.samples_ns]
    low, high = (
        (quantiles(samples, n=20)[place] for place in (0, -1)) if len(samples) > 1 else (samples[0],) * 2
    )
    # What the clock cannot tell from nothing still took a tick.
    duration = max(median(samples), _TICK_NS)
    return Timing(
        duration_ns=duration,
        low_ns=min(max(low, 0.0), duration),
        high_ns=max(high, duration),
        turns=work.turns,
        samples=len(samples),
        clock_mhz=clock_mhz(),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def clock_mhz() -> float:
    """The mean frequency of the processors that Linux tells of, 0 where nobody does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return 0.0
    return sum(clocks) / len(clocks) if clocks else 0.0


# --- The compilers, as the measuring process sees them: untyped packages behind one typed protocol.


Array = np.ndarray[Any, np.dtype[Any]]


class Toolchain(Protocol):
    """A compiler and the device it compiles for."""

    def machine(self) -> Machine:
        """Who measures."""
        ...

    def compile(self, program: str, arguments: Sequence[Array], *, counted: bool) -> Callable[[int], object]:
        """A function that runs the program so many turns and returns when it is done; not ``counted``: the
        program takes no number of turns, and is run once.
        """
        ...


def _processor() -> str:
    """The processor's name and how many of its threads may be used."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {threads} threads"


class _Xla:
    """XLA through jaxlib, on JAX's default device; or on the first of them at once, each a replica: those of
    a CPU are threads that share it.
    """

    def __init__(self, devices: int) -> None:
        if devices > 1:
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
            os.environ["XLA_FLAGS"] = flags.strip()
        self.jax: Any = import_module("jax")
        self.jax.config.update("jax_enable_x64", True)
        self.client: Any = import_module("jaxlib.xla_client")
        found: Sequence[Any] = self.jax.devices()
        if len(found) < devices:
            raise ValueError(f"JAX has {len(found)} devices here, not {devices}")
        self.devices = found[:devices]
        replicas = self.jax.sharding.Mesh(np.array(self.devices), ("replica",))
        self.everywhere: Any = self.jax.sharding.NamedSharding(replicas, self.jax.sharding.PartitionSpec())

    def machine(self) -> Machine:
        """JAX's device; a CPU by its own name."""
        device = self.devices[0]
        return Machine(
            compiler=f"jaxlib {version('jaxlib')}",
            platform=str(device.platform),
            device=_processor() if device.platform == "cpu" else str(device.device_kind),
            flags=os.environ.get("XLA_FLAGS", ""),
            devices=len(self.devices),
        )

    def compile(self, program: str, arguments: Sequence[Array], *, counted: bool) -> Callable[[int], object]:
        """One executable for all devices; arguments are put on each once."""
        xla, count = self.client, len(self.devices)
        options = xla.CompileOptions()
        options.num_replicas = count
        options.device_assignment = xla.DeviceAssignment.create(
            np.array([[each.id] for each in self.devices], np.int32)
        )
        listed = xla.DeviceList(tuple(self.devices))
        loaded = self.devices[0].client.compile_and_load(program.encode(), listed, options)
        buffers = [self.jax.device_put(each, self.everywhere) for each in arguments]
        counts: dict[int, Any] = {}

        def run(turns: int) -> object:
            if counted and turns not in counts:
                counts[turns] = self.jax.device_put(np.int32(turns), self.everywhere)
            given = [counts[turns], *buffers] if counted else buffers
            results = loaded.execute_sharded(given).disassemble_into_single_device_arrays()
            return self.jax.block_until_ready(results)

        return run


class _Iree:
    """IREE's own compiler and runtime, on the CPU."""

    def __init__(self, devices: int) -> None:
        if devices != 1:
            raise ValueError(f"iree measures on one device, not on {devices}")
        self.compiler: Any = import_module("iree.compiler")
        self.runtime: Any = import_module("iree.runtime")

    def machine(self) -> Machine:
        """The processor."""
        return Machine(
            compiler=f"iree {version('iree-base-compiler')}",
            platform="local-task",
            device=_processor(),
            flags="llvm-cpu host",
        )

    def compile(self, program: str, arguments: Sequence[Array], *, counted: bool) -> Callable[[int], object]:
        """One module of the virtual machine."""
        runtime = self.runtime
        made = self.compiler.compile_str(
            program,
            input_type="stablehlo",
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
        config = runtime.Config("local-task")
        module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, made), config)
        buffers = [runtime.asdevicearray(config.device, each) for each in arguments]

        def run(turns: int) -> object:
            results: Any = module.main(*([np.int32(turns)] if counted else []), *buffers)
            parts: Sequence[Any] = (results,) if hasattr(results, "to_host") else results
            # The whole waits for one: to fetch a result.
            return cast("object", parts[0].to_host())

        return run


TOOLCHAINS: Mapping[str, Callable[[int], Toolchain]] = MappingProxyType({"xla": _Xla, "iree": _Iree})
