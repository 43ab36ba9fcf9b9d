"""Measurement of this machine's CPU through NumPy and its BLAS.

Matrix rates use the threads that BLAS chooses. Vector and cache figures are measured on one thread and
multiplied by the usable cores. Every figure is the median of several repeats of at least ``sample_ns`` each;
its note has the spread.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median, pstdev
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware.devices import Device, Memory, Peak
from hespas.hardware.typed_toml import FigureSource

__all__ = [
    "CpuProbe",
    "TimedLoops",
    "TimedSample",
    "cpu_name",
    "measure_cpu",
    "median_time",
    "warn_unsteady",
]

TimedLoops = Callable[[int], float]
"""Function that runs a call a number of times, and returns the time of all runs [ns]."""

_FLOAT_TYPES: tuple[tuple[str, type[np.floating]], ...] = (("f64", np.float64), ("f32", np.float32))
_VECTOR_TYPES: tuple[tuple[str, type[np.number]], ...] = (*_FLOAT_TYPES, ("i32", np.int32))
_MAX_LOOPS = 1 << 24
_STEADY = 0.2
_DEFAULT_L2_BYTES = 512 * 1024
"""L2 cache of a core if the system does not report it: the least of any server CPU."""
_CPUINFO = Path("/proc/cpuinfo")
_CORES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuProbe:
    """Parameters of a measurement of this machine.

    ``gemm_extent`` is the number of rows and columns of the square matrices. ``copy_bytes`` is the size of
    the buffer copied through main memory (use several times the last-level cache). ``threads`` is the number
    of threads (0: all usable cores).
    """

    gemm_extent: int = 2048
    copy_bytes: int = 256 << 20
    repeats: int = 7
    sample_ns: int = 20_000_000
    threads: int = 0

    def __post_init__(self) -> None:
        if min(self.gemm_extent, self.copy_bytes // 64, self.repeats, self.sample_ns) < 1 or self.threads < 0:
            raise UsageError(
                f"invalid settings of the measurement: {self}", hint="use sizes and counts above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSample:
    """Time of one call [ns]: the median over ``repeats``, the spread (slowest - fastest) / median, and the
    standard deviation (NaN: unknown).
    """

    median_ns: float
    spread: float
    repeats: int
    std_ns: float = nan


def median_time(timed: TimedLoops, *, sample_ns: int, repeats: int) -> TimedSample:
    """Return the time of one call from ``repeats`` loops. Each loop lasts at least ``sample_ns``, to hide the
    resolution of the clock and the cost of the loop.

    Raises ``UsageError`` if the clock does not advance.
    """
    loops = 1
    while (elapsed := timed(loops)) < sample_ns and loops < _MAX_LOOPS:
        # Exceed the target, by at most a factor of ten: the first readings are the noisiest.
        growth = min(max(sample_ns * 5 // 4 // max(int(elapsed), 1), 2), 10)
        loops = min(loops * growth, _MAX_LOOPS)
    times = [timed(loops) / loops for _ in range(repeats)]
    middle = median(times)
    if middle <= 0:
        raise UsageError("the measured time is 0: the clock is too coarse", hint="use a larger sample_ns")
    spread = (max(times) - min(times)) / middle
    return TimedSample(median_ns=middle, spread=spread, repeats=repeats, std_ns=pstdev(times))


@dataclass(frozen=True, slots=True)
class _HostMachine:
    model: str
    cores: int
    l2_bytes: int
    l3_bytes: int
    memory_bytes: int
    library: str


@dataclass(frozen=True, slots=True)
class _Bench:
    plan: CpuProbe
    machine: _HostMachine
    clock: Callable[[], int]

    spreads: list[float] = field(default_factory=list[float])

    def sample(self, call: Callable[[], object]) -> TimedSample:
        """Time ``call``, after a first call that is not timed."""
        call()  # first touch of the pages, start of the thread pools
        plan = self.plan
        sample = median_time(
            lambda loops: self._elapsed(call, loops), sample_ns=plan.sample_ns, repeats=plan.repeats
        )
        self.spreads.append(sample.spread)
        return sample

    def _elapsed(self, call: Callable[[], object], loops: int) -> int:
        start = self.clock()
        for _ in range(loops):
            call()
        return self.clock() - start


def measure_cpu(
    probe: CpuProbe | None = None,
    *,
    name: str = "",
    clock: Callable[[], int] = time.perf_counter_ns,
    diagnostics: Diagnostics | None = None,
) -> Device:
    """Return this machine as a device, in about ten seconds with the default probe; no file is written.

    ``name`` defaults to ``cpu-`` and the processor's name. ``clock`` returns nanoseconds. Peak memory: three
    square float64 matrices plus twice ``copy_bytes``. ``diagnostics`` gets a warning if repeats differ,
    because another process runs.
    """
    plan = probe or CpuProbe()
    machine = _machine(plan.threads)
    bench = _Bench(plan, machine, clock)
    overhead = _call_overhead(bench)
    peaks = (
        *(_gemm_peak(bench, dtype, element) for dtype, element in _FLOAT_TYPES),
        *(_vector_peak(bench, dtype, element, overhead) for dtype, element in _VECTOR_TYPES),
    )
    last_level = [
        # A working set that fits the L3 caches never reaches the memory. Other processes and guests share
        # them, so their bandwidth is not measured.
        Memory(
            level="cache",
            name="L3",
            capacity_bytes=machine.l3_bytes,
            bandwidth_bytes_per_s=nan,
            source="measured",
            note="size as reported by the system",
        )
    ] * (machine.l3_bytes > 0)
    memories = (_main_memory(bench), _cache(bench, overhead), *last_level)
    if diagnostics is not None:
        warn_unsteady(bench.spreads, diagnostics)
    provenance = (
        f"measured {datetime.now(UTC).date().isoformat()} on {machine.model}, {machine.cores} cores, "
        f"{machine.library}, {platform.system()} {platform.machine()}; medians of {plan.repeats} repeats"
    )
    return Device(
        name=name or cpu_name(),
        vendor=_slug(machine.model).partition("-")[0] or "unknown",
        family=machine.model,
        kind="cpu",
        description=f"{machine.model}, {machine.cores} cores, as measured through NumPy",
        aliases=(),
        units=machine.cores,
        unit_name="core",
        launch_overhead_ns=overhead.median_ns,
        launch_overhead_source="measured",
        subbyte_storage="packed",
        sources=(FigureSource(key="measured", text=provenance),),
        peaks=peaks,
        memories=memories,
    )


def warn_unsteady(spreads: Sequence[float], diagnostics: Diagnostics, location: str = "") -> None:
    """Warn (``hardware.unsteady``) if repeats of a figure differ by more than 20 %. ``spreads`` has the
    spread of each figure.
    """
    unsteady = [spread for spread in spreads if spread > _STEADY]
    if unsteady:
        diagnostics.warning(
            "hardware.unsteady",
            location,
            f"{len(unsteady)} of {len(spreads)} figures differ by more than {_STEADY:.0%} between "
            f"repeats (the worst by {max(unsteady):.0%}): measure again on an idle machine",
        )


def cpu_name() -> str:
    """Return the default device name of this machine: ``cpu-`` and the processor's name."""
    return f"cpu-{_slug(_cpu_model())}"


def _call_overhead(bench: _Bench) -> TimedSample:
    """Return the time of a NumPy call that does almost no work, as measured."""
    one, out = np.ones(1, np.float32), np.empty(1, np.float32)
    return bench.sample(lambda: np.multiply(one, one, out=out))


def _gemm_peak(bench: _Bench, dtype: str, element: type[np.floating]) -> Peak:
    extent = bench.plan.gemm_extent
    left, right, out = (np.full((extent, extent), 0.5, element) for _ in range(3))
    sample = bench.sample(lambda: np.matmul(left, right, out=out))
    note = f"{extent} x {extent} x {extent} product, {_spread(sample)}"
    return _peak("matrix", dtype, 2.0 * extent**3 / sample.median_ns * 1e9, note)


def _vector_peak(bench: _Bench, dtype: str, element: type[np.number], overhead: TimedSample) -> Peak:
    """Return the measured rate of one multiply per element, on three arrays that together fill half of the L2
    cache.
    """
    machine = bench.machine
    elements = max(machine.l2_bytes // 2 // 3 // np.dtype(element).itemsize, 1)
    left, right, out = (np.ones(elements, element) for _ in range(3))
    sample = bench.sample(lambda: np.multiply(left, right, out=out))
    rate = elements / _net(sample, overhead) * 1e9 * machine.cores
    note = f"one thread on {elements} elements in L2 times {machine.cores} cores, {_spread(sample)}"
    return _peak("vector", dtype, rate, note)


def _main_memory(bench: _Bench) -> Memory:
    """Return the bandwidth of the main memory, measured by concurrent copies by all threads; bytes read and
    bytes written both count.
    """
    machine = bench.machine
    source = np.ones(bench.plan.copy_bytes // 8, np.float64)
    target = np.empty_like(source)
    targets, sources = _slices(target, machine.cores), _slices(source, machine.cores)
    with ThreadPoolExecutor(machine.cores) as pool:
        sample = bench.sample(lambda: list(pool.map(np.copyto, targets, sources)))
    note = f"copy of {source.nbytes} bytes by {machine.cores} threads, read plus write, {_spread(sample)}"
    return Memory(
        level="main",
        name="DRAM",
        capacity_bytes=machine.memory_bytes,
        bandwidth_bytes_per_s=2 * source.nbytes / sample.median_ns * 1e9,
        source="measured",
        note=note,
    )


def _cache(bench: _Bench, overhead: TimedSample) -> Memory:
    machine = bench.machine
    source = np.ones(max(machine.l2_bytes // 4 // 8, 1), np.float64)
    target = np.empty_like(source)
    sample = bench.sample(lambda: np.copyto(target, source))
    note = f"copy of {source.nbytes} bytes by one thread times {machine.cores} cores, {_spread(sample)}"
    return Memory(
        level="cache",
        name="L2",
        capacity_bytes=machine.l2_bytes * machine.cores,
        bandwidth_bytes_per_s=2 * source.nbytes / _net(sample, overhead) * 1e9 * machine.cores,
        source="measured",
        note=note,
    )


def _net(sample: TimedSample, overhead: TimedSample) -> float:
    """Return the time of a call without the overhead of calling NumPy. If the overhead dominates, because the
    measured work is too small, return the whole time.
    """
    net_ns = sample.median_ns - overhead.median_ns
    return net_ns if net_ns > 0.1 * sample.median_ns else sample.median_ns


def _peak(unit: Literal["matrix", "vector"], dtype: str, flops_per_s: float, note: str) -> Peak:
    return Peak(
        unit=unit, dtype=dtype, flops_per_s=flops_per_s, density="dense", source="measured", note=note
    )


def _spread(sample: TimedSample) -> str:
    return f"median of {sample.repeats}, spread {sample.spread:.1%}"


def _slices(array: NDArray[np.float64], parts: int) -> Iterator[NDArray[np.float64]]:
    bounds = [array.size * part // parts for part in range(parts + 1)]
    return (array[start:end] for start, end in pairwise(bounds))


def _machine(threads: int) -> _HostMachine:
    cores = threads or len(_usable_cores())
    pages, page = -1, -1
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    config = cast("dict[str, dict[str, dict[str, object]]]", np.show_config(mode="dicts"))
    blas = config.get("Build Dependencies", {}).get("blas", {})
    name = blas.get("name", "an unnamed BLAS")
    # Shared caches count once.
    caches: dict[str, int] = {}
    for number in _usable_cores()[:cores]:
        caches |= _caches(f"cpu{number}", "3")
    return _HostMachine(
        model=_cpu_model(),
        cores=cores,
        l2_bytes=_l2_bytes(),
        l3_bytes=sum(caches.values()),
        memory_bytes=pages * page if pages > 0 and page > 0 else -1,
        library=f"NumPy {np.__version__} with {name} {blas.get('version', '')}".strip(),
    )


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_model() -> str:
    """Return the processor's name, or its architecture if the system does not report a name."""
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text("utf-8", "replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


def _l2_bytes() -> int:
    """Return the bytes of one core's L2 cache, or a default if the system does not report it."""
    return next(iter(_caches("cpu0", "2").values()), 0) or _DEFAULT_L2_BYTES


def _caches(core: str, level: str) -> dict[str, int]:
    """Return the bytes of one core's caches of a level (0: unknown), by the list of cores that share each
    cache.
    """
    sizes: dict[str, int] = {}
    for entry in sorted((_CORES / core / "cache").glob("index*")):
        if _file_text(entry / "level") == level and _file_text(entry / "type") != "Instruction":
            digits = _file_text(entry / "size")
            number, scale = digits.rstrip("KM"), {"K": 1 << 10, "M": 1 << 20}.get(digits[-1:], 1)
            sizes[_file_text(entry / "shared_cpu_list")] = int(number) * scale if number.isdigit() else 0
    return sizes


def _file_text(path: Path) -> str:
    return path.read_text("utf-8", "replace").strip() if path.is_file() else ""


def _slug(text: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in text.casefold()).split()
    return "-".join(words)
