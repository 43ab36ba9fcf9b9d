"""Measuring the CPU this runs on: what NumPy and its BLAS reach, not what a data sheet promises.

Matrix rates use the threads that BLAS chooses. Vector and cache figures are one thread's, times the usable
cores. Every figure is the median of several repeats of at least ``sample_ns`` each; the note has the spread.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware.devices import Device, Memory, Peak
from hespas.hardware.typed_toml import Source

__all__ = ["CpuProbe", "Sample", "cpu_name", "measure_cpu"]

_FLOAT_TYPES: tuple[tuple[str, type[np.floating]], ...] = (("f64", np.float64), ("f32", np.float32))
_VECTOR_TYPES: tuple[tuple[str, type[np.number]], ...] = (*_FLOAT_TYPES, ("i32", np.int32))
_MAX_LOOPS = 1 << 24
_STEADY = 0.2
_DEFAULT_L2_BYTES = 512 * 1024
_CPUINFO = Path("/proc/cpuinfo")
_CORES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuProbe:
    """How to measure.

    ``gemm_extent`` is the side of the square matrices; ``copy_bytes`` the size of the buffer copied through
    main memory (take several times the last-level cache); ``threads`` 0 means all usable cores.
    """

    gemm_extent: int = 2048
    copy_bytes: int = 256 << 20
    repeats: int = 7
    sample_ns: int = 20_000_000
    threads: int = 0

    def __post_init__(self) -> None:
        if min(self.gemm_extent, self.copy_bytes // 64, self.repeats, self.sample_ns) < 1 or self.threads < 0:
            raise UsageError(f"nothing to measure with {self}", hint="every size and count must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Time of one call: median over ``repeats``, and (slowest - fastest) / median."""

    median_ns: float
    spread: float
    repeats: int


@dataclass(frozen=True, slots=True)
class _Machine:
    model: str
    cores: int
    l2_bytes: int
    l3_bytes: int
    memory_bytes: int
    library: str


@dataclass(frozen=True, slots=True)
class _Bench:
    plan: CpuProbe
    machine: _Machine
    clock: Callable[[], int]

    spreads: list[float] = field(default_factory=list[float])

    def sample(self, call: Callable[[], object]) -> Sample:
        """Time ``call`` in loops long enough that the clock's step and the loop itself do not matter."""
        call()  # first touch of the pages, start of the thread pools
        target_ns, loops = self.plan.sample_ns, 1
        while (elapsed := self._elapsed(call, loops)) < target_ns and loops < _MAX_LOOPS:
            # Aim past the target, at most tenfold at a time: the first readings are the noisiest.
            growth = min(max(target_ns * 5 // 4 // max(elapsed, 1), 2), 10)
            loops = min(loops * growth, _MAX_LOOPS)
        times = [self._elapsed(call, loops) / loops for _ in range(self.plan.repeats)]
        middle = median(times)
        if middle <= 0:
            raise UsageError("the clock stood still while measuring", hint="raise sample_ns")
        spread = (max(times) - min(times)) / middle
        self.spreads.append(spread)
        return Sample(median_ns=middle, spread=spread, repeats=self.plan.repeats)

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
    """This machine as a device, in about ten seconds with the default probe; nothing is written.

    ``name`` defaults to ``cpu-`` and the processor's name. ``clock`` returns nanoseconds.
    Peak memory: three square float64 matrices plus twice ``copy_bytes``. ``diagnostics`` hears of figures
    that repeats do not agree on: something else runs on the machine.
    """
    plan = probe or CpuProbe()
    machine = _machine(plan.threads)
    bench = _Bench(plan, machine, clock)
    overhead = _call_overhead(bench)
    peaks = (
        *(_gemm_peak(bench, dtype, element) for dtype, element in _FLOAT_TYPES),
        *(_vector_peak(bench, dtype, element, overhead) for dtype, element in _VECTOR_TYPES),
    )
    memories = (_main_memory(bench), _cache(bench, overhead), *_last_level(machine))
    unsteady = [spread for spread in bench.spreads if spread > _STEADY]
    if unsteady and diagnostics is not None:
        diagnostics.warning(
            "hardware.unsteady",
            "",
            f"{len(unsteady)} of {len(bench.spreads)} figures differ by more than {_STEADY:.0%} between "
            f"repeats (the worst by {max(unsteady):.0%}): measure again when nothing else runs",
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
        sources=(Source(key="measured", text=_provenance(plan, machine)),),
        peaks=peaks,
        memories=memories,
    )


def cpu_name() -> str:
    """What this machine is called as a device where nobody names it: ``cpu-`` and the processor's name."""
    return f"cpu-{_slug(_cpu_model())}"


def _call_overhead(bench: _Bench) -> Sample:
    """Time of a NumPy call that has next to nothing to do."""
    one = np.ones(1, np.float32)
    out = np.empty(1, np.float32)
    return bench.sample(lambda: np.multiply(one, one, out=out))


def _gemm_peak(bench: _Bench, dtype: str, element: type[np.floating]) -> Peak:
    extent = bench.plan.gemm_extent
    left, right, out = (np.full((extent, extent), 0.5, element) for _ in range(3))
    sample = bench.sample(lambda: np.matmul(left, right, out=out))
    note = f"{extent} x {extent} x {extent} product, {_spread(sample)}"
    return _peak("matrix", dtype, 2.0 * extent**3 / sample.median_ns * 1e9, note)


def _vector_peak(bench: _Bench, dtype: str, element: type[np.number], overhead: Sample) -> Peak:
    """One multiply per element on three arrays that together fill half of the L2 cache."""
    machine = bench.machine
    elements = max(machine.l2_bytes // 2 // 3 // np.dtype(element).itemsize, 1)
    left, right, out = (np.ones(elements, element) for _ in range(3))
    sample = bench.sample(lambda: np.multiply(left, right, out=out))
    rate = elements / _net(sample, overhead) * 1e9 * machine.cores
    note = f"one thread on {elements} elements in L2 times {machine.cores} cores, {_spread(sample)}"
    return _peak("vector", dtype, rate, note)


def _main_memory(bench: _Bench) -> Memory:
    """All threads copy their slice at once; bytes read plus bytes written."""
    machine = bench.machine
    source = np.ones(bench.plan.copy_bytes // 8, np.float64)
    target = np.empty_like(source)
    pairs = list(zip(_slices(target, machine.cores), _slices(source, machine.cores), strict=True))
    with ThreadPoolExecutor(machine.cores) as pool:
        sample = bench.sample(lambda: list(pool.map(_copy, pairs)))
    note = f"copy of {source.nbytes} bytes by {machine.cores} threads, read plus write, {_spread(sample)}"
    return Memory(
        level="main",
        name="DRAM",
        capacity_bytes=machine.memory_bytes,
        bandwidth_bytes_per_s=2 * source.nbytes / sample.median_ns * 1e9,
        source="measured",
        note=note,
    )


def _cache(bench: _Bench, overhead: Sample) -> Memory:
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


def _last_level(machine: _Machine) -> Iterator[Memory]:
    """The L3 caches of all cores together, where the system tells of any: a working set that fits them never
    reaches the memory. Other programs and other guests use them, too, so a bandwidth measured is theirs.
    """
    if machine.l3_bytes > 0:
        yield Memory(
            level="cache",
            name="L3",
            capacity_bytes=machine.l3_bytes,
            bandwidth_bytes_per_s=nan,
            source="measured",
            note="size as the system tells it",
        )


def _net(sample: Sample, overhead: Sample) -> float:
    """Time without the call itself, unless that is all there is (a probe too small to tell)."""
    net_ns = sample.median_ns - overhead.median_ns
    return net_ns if net_ns > 0.1 * sample.median_ns else sample.median_ns


def _peak(unit: Literal["matrix", "vector"], dtype: str, flops_per_s: float, note: str) -> Peak:
    return Peak(
        unit=unit, dtype=dtype, flops_per_s=flops_per_s, density="dense", source="measured", note=note
    )


def _spread(sample: Sample) -> str:
    return f"median of {sample.repeats}, spread {sample.spread:.1%}"


def _copy(pair: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    target, source = pair
    np.copyto(target, source)


def _slices(array: NDArray[np.float64], parts: int) -> Iterator[NDArray[np.float64]]:
    bounds = [array.size * part // parts for part in range(parts + 1)]
    return (array[start:end] for start, end in pairwise(bounds))


def _machine(threads: int) -> _Machine:
    cores = threads or len(_usable_cores())
    return _Machine(
        model=_cpu_model(),
        cores=cores,
        l2_bytes=_l2_bytes(),
        l3_bytes=_l3_bytes(cores),
        memory_bytes=_memory_bytes(),
        library=f"NumPy {np.__version__} with {_blas()}",
    )


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_model() -> str:
    """The processor's own name; on systems that do not tell, its architecture."""
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text("utf-8", "replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


def _l2_bytes() -> int:
    """One core's L2 cache; where the system does not tell, half a MiB, which any server core has."""
    return next(iter(_caches("cpu0", "2").values()), 0) or _DEFAULT_L2_BYTES


def _l3_bytes(cores: int) -> int:
    """All L3 caches of so many usable cores, each once however many share it; 0 where none is told."""
    found: dict[str, int] = {}
    for number in _usable_cores()[:cores]:
        found |= _caches(f"cpu{number}", "3")
    return sum(found.values())


def _caches(core: str, level: str) -> dict[str, int]:
    """Bytes of one core's caches of a level (0: not told), by the cores that share each."""
    found: dict[str, int] = {}
    for entry in sorted((_CORES / core / "cache").glob("index*")):
        if _told(entry / "level") == level and _told(entry / "type") != "Instruction":
            digits = _told(entry / "size")
            number, scale = digits.rstrip("KM"), {"K": 1 << 10, "M": 1 << 20}.get(digits[-1:], 1)
            found[_told(entry / "shared_cpu_list")] = int(number) * scale if number.isdigit() else 0
    return found


def _told(path: Path) -> str:
    return path.read_text("utf-8", "replace").strip() if path.is_file() else ""


def _memory_bytes() -> int:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return -1
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * page if pages > 0 and page > 0 else -1


def _blas() -> str:
    """The BLAS NumPy was built with, as it tells; its release is what moves the matrix rate."""
    config = cast("dict[str, dict[str, dict[str, object]]]", np.show_config(mode="dicts"))
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'an unnamed BLAS')} {blas.get('version', '')}".strip()


def _provenance(plan: CpuProbe, machine: _Machine) -> str:
    date = datetime.now(UTC).date().isoformat()
    return (
        f"measured {date} on {machine.model}, {machine.cores} cores, {machine.library}, "
        f"{platform.system()} {platform.machine()}; medians of {plan.repeats} repeats"
    )


def _slug(text: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in text.casefold()).split()
    return "-".join(words)
