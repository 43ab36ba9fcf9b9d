"""Measurement of a CPU: arithmetic with a controlled clock, and one real run on tiny sizes."""

from __future__ import annotations

from math import isclose, isnan
from pathlib import Path

import numpy as np
import pytest

from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware import load_device, measure, peak_for, write_device
from hespas.hardware.measure import CpuProbe, TimedSample, measure_cpu

_TINY = CpuProbe(gemm_extent=8, copy_bytes=4096, repeats=3, sample_ns=1000, threads=2)


class _SteadyClock:
    """Clock whose readings are 800 ns apart."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 800
        return self.now_ns


def test_rates_follow_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample needs 1,000 ns and each lasts 800: loops grow to the limit, so one call takes 800 / limit."""
    monkeypatch.setattr(measure, "_MAX_LOOPS", 4)
    monkeypatch.setattr(measure, "_l2_bytes", lambda: 12288)
    device = measure_cpu(_TINY, name="mine", clock=_SteadyClock())
    call_ns = 800 / 4
    assert (device.name, device.units, device.launch_overhead_ns) == ("mine", 2, call_ns)
    assert isclose(peak_for(device, "matrix", "f32").flops_per_s, 2 * 8**3 / call_ns * 1e9)
    # Half of L2 over three arrays of 4 bytes an element; nothing is left after the overhead, so it stays in.
    assert isclose(peak_for(device, "vector", "f32").flops_per_s, 512 / call_ns * 1e9 * 2)
    assert isclose(device.main_memory.bandwidth_bytes_per_s, 2 * 4096 / call_ns * 1e9)
    cache = next(memory for memory in device.memories if memory.level == "cache")
    assert isclose(cache.bandwidth_bytes_per_s, 2 * 3072 / call_ns * 1e9 * 2)
    assert cache.capacity_bytes == 2 * 12288
    assert all("spread 0.0%" in peak.note for peak in device.peaks)


def test_call_overhead_is_not_counted_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def overhead(_: object) -> TimedSample:
        return TimedSample(median_ns=50.0, spread=0.0, repeats=3)

    monkeypatch.setattr(measure, "_MAX_LOOPS", 4)
    monkeypatch.setattr(measure, "_l2_bytes", lambda: 12288)
    monkeypatch.setattr(measure, "_call_overhead", overhead)
    device = measure_cpu(_TINY, clock=_SteadyClock())
    assert device.launch_overhead_ns == 50
    assert isclose(peak_for(device, "vector", "f32").flops_per_s, 512 / (200 - 50) * 1e9 * 2)


def test_machine_is_described_by_what_the_system_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Acme  Z80 @ 4 MHz\n", "utf-8")
    for core, shared in enumerate(("0-1", "0-1", "2-3")):
        for index, (level, size) in enumerate([("1", "32K"), ("2", "6M"), ("3", "32M")]):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            told = {"level": level, "size": size, "shared_cpu_list": shared if level == "3" else str(core)}
            for name, text in told.items():
                (folder / name).write_text(f"{text}\n", "utf-8")
    monkeypatch.setattr(measure, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(measure, "_CORES", tmp_path)
    monkeypatch.setattr(measure, "_usable_cores", lambda: [0, 1, 2])
    device = measure_cpu(_TINY)
    assert (device.name, device.vendor, device.family) == ("cpu-acme-z80-4-mhz", "acme", "Acme Z80 @ 4 MHz")
    assert [memory.capacity_bytes for memory in device.memories if memory.name == "L2"] == [2 * 6 * 2**20]
    [last] = [memory for memory in device.memories if memory.name == "L3"]
    assert (last.capacity_bytes, isnan(last.bandwidth_bytes_per_s)) == (32 * 2**20, True)


def test_silent_system_still_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "_CPUINFO", tmp_path / "absent")
    monkeypatch.setattr(measure, "_CORES", tmp_path / "absent")
    device = load_device(write_device(measure_cpu(_TINY), tmp_path / "cpu.toml"))
    assert [memory.name for memory in device.memories] == ["DRAM", "L2"]


def test_real_run_makes_a_device_that_can_be_saved(tmp_path: Path) -> None:
    device = measure_cpu(_TINY)
    loaded = load_device(write_device(device, tmp_path / "cpu.toml"))
    assert repr(loaded) == repr(device)
    assert loaded.kind == "cpu"
    assert loaded.launch_overhead_ns > 0
    assert {(peak.unit, peak.dtype) for peak in loaded.peaks} == {
        ("matrix", "f64"), ("matrix", "f32"), ("vector", "f64"), ("vector", "f32"), ("vector", "i32"),
    }  # fmt: skip
    assert peak_for(loaded, "matrix", "bf16").peak.dtype == "f32"


def test_provenance_says_machine_library_and_repeats() -> None:
    device = measure_cpu(_TINY)
    text = device.source_text("measured")
    assert device.family in text
    assert f"NumPy {np.__version__}" in text
    assert "medians of 3 repeats" in text
    notes = [peak.note for peak in device.peaks] + [
        memory.note for memory in device.memories if memory.name != "L3"
    ]
    assert all("median of 3, spread" in note for note in notes)


@pytest.mark.parametrize("field", ["gemm_extent", "copy_bytes", "repeats", "sample_ns"])
def test_nothing_to_measure_is_a_usage_error(field: str) -> None:
    with pytest.raises(UsageError, match=field):
        CpuProbe(**{field: 0})


def test_stopped_clock_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MAX_LOOPS", 4)
    with pytest.raises(UsageError, match="the measured time is 0"):
        measure_cpu(_TINY, clock=lambda: 5)


def test_unsteady_figures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs ever faster lets no repeat agree with the one before."""
    monkeypatch.setattr(measure, "_MAX_LOOPS", 4)
    ticks = iter(range(10**9))
    found = Diagnostics()
    measure_cpu(_TINY, clock=lambda: next(ticks) ** 4, diagnostics=found)
    assert "hardware.unsteady" in found.counts()
    steady = Diagnostics()
    measure_cpu(_TINY, clock=_SteadyClock(), diagnostics=steady)
    assert not steady.counts()
