"""Measuring process: reads jobs, one per line, and writes a line with the timing of each; see
:mod:`.measuring`.

It is a separate process because it runs an external compiler on a generated program, which may crash, hang or
use all memory. The time of one iteration of a loop is the median of differences between a long loop and a
short one. Compilers are untyped packages behind one typed protocol.
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

from hespas.estimators.compiled.measuring import MeasuringMachine, Timing, TimingJob

__all__ = [
    "TOOLCHAINS",
    "LoopTimes",
    "NumpyArray",
    "Toolchain",
    "clock_mhz",
    "main",
    "serve",
    "time_loop",
    "timing_of",
]

_LONGEST = 4000
_NUMPY_NAMES: Mapping[str, str] = MappingProxyType(
    {"i1": "bool", "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
    | {f"i{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)}
    | {f"ui{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)}
    | {"complex<f32>": "complex64", "complex<f64>": "complex128"}
)


def serve(toolchain: Toolchain, requests: BinaryIO, answers: BinaryIO) -> None:
    """Run the measuring process: write the description of the machine to ``answers``, then read jobs from
    ``requests`` and write the timing of each until the input ends.
    """
    _send(answers, toolchain.machine())
    empty: dict[str, LoopTimes] = {}
    for line in requests:
        job = msgspec.json.decode(line, type=TimingJob)
        try:
            if job.baseline not in empty:
                run = _runner(toolchain, job.baseline, job.baseline_arguments, looped=job.looped)
                empty[job.baseline] = time_loop(run, job.repeats)
            run = _runner(toolchain, job.program, job.arguments, looped=job.looped)
            answer = timing_of(time_loop(run, job.repeats), empty[job.baseline])
        except Exception as error:
            # Any exception of a compiler is a failure of this program only.
            answer = Timing(fault=_text(error))
        _send(answers, answer)


def _runner(
    toolchain: Toolchain, program: str, types: Sequence[tuple[str, tuple[int, ...]]], *, looped: bool
) -> Callable[[int], object]:
    """Compile a program and return a function that runs it ``n`` times: by the loop in the program if
    ``looped``, else by repeated calls.
    """
    values = _arguments(types)
    if looped:
        return toolchain.compile(program, values, counted=True)
    call = toolchain.compile(program, values, counted=False)

    def run(turns: int) -> None:
        for _ in range(turns):
            call(1)

    return run


def _arguments(types: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """Return random arrays of the given types. Floats are between 0.5 and 1.5 and one-byte types are 0 or 1,
    so that no denormal slows an operation down.
    """
    rng = np.random.default_rng(7)
    arrays: list[np.ndarray[Any, np.dtype[Any]]] = []
    for name, shape in types:
        numpy_name = _NUMPY_NAMES.get(name, f"float8_{name[2:].lower()}")
        try:
            dtype: np.dtype[Any] = np.dtype(numpy_name)
        except TypeError:
            dtype = np.dtype(getattr(import_module("ml_dtypes"), numpy_name))
        values = rng.integers(0, 2, shape) if dtype.itemsize == 1 else rng.random(shape) + 0.5
        arrays.append(np.asarray(values, dtype))
    return arrays


def _text(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _send(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


def main() -> int:
    """Run the measuring process. The first command line argument is the toolchain, the second the number of
    devices to run at once.
    """
    name, devices = sys.argv[1], int(sys.argv[2])
    # Libraries may write to standard output: the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        toolchain = TOOLCHAINS[name](devices)
        toolchain.machine()
    except Exception as error:
        # A compiler that is installed and does not start is reported with its own message.
        _send(answers, MeasuringMachine(compiler=name, platform="", device="", flags="", fault=_text(error)))
        return 0
    serve(toolchain, sys.stdin.buffer, answers)
    return 0


_SAMPLE_NS = 10e6
_MOST_TURNS = 1 << 20
_TICK_NS = 1.0


class LoopTimes(NamedTuple):
    """Samples of a timed loop: the time of one iteration [ns] in each sample, and the number of iterations
    per sample.
    """

    samples_ns: list[float]
    turns: int


def time_loop(run: Callable[[int], object], repeats: int) -> LoopTimes:
    """Time the loop ``run(turns)``, which blocks until its iterations are done. The first runs warm up and
    are not timed.
    """
    run(1)
    turns = 2
    while (spent_ns := _spent_ns(run, turns)) < _SAMPLE_NS / 2 and turns < _MOST_TURNS:
        turns = min(turns * max(2, min(16, int(_SAMPLE_NS / max(spent_ns, 1.0)))), _MOST_TURNS)
    samples = [(_spent_ns(run, turns) - _spent_ns(run, 1)) / (turns - 1) for _ in range(repeats)]
    return LoopTimes(samples, turns)


def _spent_ns(run: Callable[[int], object], turns: int) -> float:
    start = perf_counter_ns()
    run(turns)
    return float(perf_counter_ns() - start)


def timing_of(work: LoopTimes, empty: LoopTimes) -> Timing:
    """Return the time of one iteration of ``work`` without the time of an ``empty`` iteration. Times are the
    median and the 5th and 95th percentile of the samples.
    """
    loop_ns = max(median(empty.samples_ns), 0.0)
    samples = [sample - loop_ns for sample in work.samples_ns]
    low, high = (quantiles(samples, n=20)[end] for end in (0, -1)) if len(samples) > 1 else (samples[0],) * 2
    # A time below the resolution of the clock counts as one tick.
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
    """Return the mean clock frequency [MHz] of the processors that Linux reports; 0 without a report."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return 0.0
    return sum(clocks) / len(clocks) if clocks else 0.0


NumpyArray = np.ndarray[Any, np.dtype[Any]]


class Toolchain(Protocol):
    """Interface of a compiler and the device for which it compiles, as the measuring process uses them."""

    def machine(self) -> MeasuringMachine:
        """Return a description of the machine that measures."""
        ...

    def compile(
        self, program: str, arguments: Sequence[NumpyArray], *, counted: bool
    ) -> Callable[[int], object]:
        """Return a function that runs the program a number of times and blocks until it is done. A program
        that is not ``counted`` has no iteration argument and runs once per call.
        """
        ...


def _processor() -> str:
    """Return the processor's name and the number of its usable threads."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {threads} threads"


class _XlaToolchain:
    """Toolchain of XLA through jaxlib. It runs on JAX's default device, or on the first devices at once with
    one replica each. The devices of a CPU are threads that share its cores.
    """

    def __init__(self, devices: int) -> None:
        if devices > 1:
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
            os.environ["XLA_FLAGS"] = flags.strip()
        self.jax: Any = import_module("jax")
        self.jax.config.update("jax_enable_x64", True)
        self.client: Any = import_module("jaxlib.xla_client")
        available: Sequence[Any] = self.jax.devices()
        if len(available) < devices:
            raise ValueError(f"JAX has {len(available)} devices here, not {devices}")
        self.devices = available[:devices]
        replicas = self.jax.sharding.Mesh(np.array(self.devices), ("replica",))
        self.everywhere: Any = self.jax.sharding.NamedSharding(replicas, self.jax.sharding.PartitionSpec())

    def machine(self) -> MeasuringMachine:
        """Return JAX's device with its name; for a CPU, the name of the processor."""
        device = self.devices[0]
        return MeasuringMachine(
            compiler=f"jaxlib {version('jaxlib')}",
            platform=str(device.platform),
            device=_processor() if device.platform == "cpu" else str(device.device_kind),
            flags=os.environ.get("XLA_FLAGS", ""),
            devices=len(self.devices),
        )

    def compile(
        self, program: str, arguments: Sequence[NumpyArray], *, counted: bool
    ) -> Callable[[int], object]:
        """Compile one executable for all devices. Arguments are transferred to each device once."""
        xla, count = self.client, len(self.devices)
        options = xla.CompileOptions()
        options.num_replicas = count
        options.device_assignment = xla.DeviceAssignment.create(
            np.array([[device.id] for device in self.devices], np.int32)
        )
        listed = xla.DeviceList(tuple(self.devices))
        loaded = self.devices[0].client.compile_and_load(program.encode(), listed, options)
        buffers = [self.jax.device_put(argument, self.everywhere) for argument in arguments]
        counts: dict[int, Any] = {}

        def run(turns: int) -> object:
            if counted and turns not in counts:
                counts[turns] = self.jax.device_put(np.int32(turns), self.everywhere)
            given = [counts[turns], *buffers] if counted else buffers
            results = loaded.execute_sharded(given).disassemble_into_single_device_arrays()
            return self.jax.block_until_ready(results)

        return run


class _IreeToolchain:
    """Toolchain of IREE: its own compiler and runtime, on the CPU."""

    def __init__(self, devices: int) -> None:
        if devices != 1:
            raise ValueError(f"iree measures on one device, not on {devices}")
        self.compiler: Any = import_module("iree.compiler")
        self.runtime: Any = import_module("iree.runtime")

    def machine(self) -> MeasuringMachine:
        """Return the description of this processor."""
        return MeasuringMachine(
            compiler=f"iree {version('iree-base-compiler')}",
            platform="local-task",
            device=_processor(),
            flags="llvm-cpu host",
        )

    def compile(
        self, program: str, arguments: Sequence[NumpyArray], *, counted: bool
    ) -> Callable[[int], object]:
        """Compile the program to an IREE VM module and return a function that runs it."""
        runtime = self.runtime
        made = self.compiler.compile_str(
            program,
            input_type="stablehlo",
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
        config = runtime.Config("local-task")
        module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, made), config)
        buffers = [runtime.asdevicearray(config.device, argument) for argument in arguments]

        def run(turns: int) -> object:
            results: Any = module.main(*([np.int32(turns)] if counted else []), *buffers)
            parts: Sequence[Any] = (results,) if hasattr(results, "to_host") else results
            # Fetching one result waits for the whole program.
            return cast("object", parts[0].to_host())

        return run


TOOLCHAINS: Mapping[str, Callable[[int], Toolchain]] = MappingProxyType(
    {"xla": _XlaToolchain, "iree": _IreeToolchain}
)
