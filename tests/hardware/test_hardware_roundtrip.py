"""Device files: written, read back, and rules of writing."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph.columns import DTYPES
from hespas.graph.errors import OutputError
from hespas.hardware import (
    Device,
    Efficiency,
    FigureSource,
    Link,
    Memory,
    Peak,
    SystolicArray,
    device_names,
    device_to_toml,
    load_device,
    write_device,
)

_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
_notes = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_rates = st.floats(1e-60, 1e60)
_unknown_rates = st.one_of(_rates, st.just(nan))
_counts = st.integers(1, 2**63 - 1)
_unknown_counts = st.one_of(_counts, st.just(-1))
_dtypes = st.sampled_from([entry.name for entry in DTYPES])


def _peak_with_energy(energy: tuple[float, str], **columns: Any) -> Peak:
    return Peak(energy_pj_per_flop=energy[0], energy_source=energy[1], **columns)


def _memory_with_energy(energy: tuple[float, str], **columns: Any) -> Memory:
    return Memory(energy_pj_per_byte=energy[0], energy_source=energy[1], **columns)


@st.composite
def _devices(draw: st.DrawFn) -> Device:
    keys = draw(st.lists(_texts, min_size=1, max_size=3, unique=True))
    source = st.sampled_from(keys)
    energy = st.one_of(st.tuples(_unknown_rates, source), st.just((nan, "")))
    peaks = st.builds(
        _peak_with_energy,
        energy,
        unit=st.sampled_from(["matrix", "vector"]),
        dtype=_dtypes,
        flops_per_s=_rates,
        density=st.sampled_from(["dense", "sparse"]),
        source=source,
        accumulator=st.one_of(_dtypes, st.just("")),
        note=_notes,
    )
    caches = st.builds(
        _memory_with_energy,
        energy,
        level=st.sampled_from(["cache", "scratchpad"]),
        name=_texts,
        capacity_bytes=_unknown_counts,
        bandwidth_bytes_per_s=_unknown_rates,
        source=source,
        note=_notes,
    )
    links = st.builds(
        Link,
        name=_texts,
        kind=st.sampled_from(["scale_up", "scale_out", "pcie"]),
        bandwidth_bytes_per_s=_rates,
        latency_ns=st.one_of(_unknown_rates, st.just(0.0)),
        topology=st.sampled_from(["switch", "ring", "fully_connected", "torus2d", "torus3d"]),
        links_per_device=_unknown_counts,
        devices_per_domain=_unknown_counts,
        source=source,
        latency_source=source,
        note=_notes,
    )
    efficiencies = st.builds(
        Efficiency,
        op_class=_texts,
        dtype=st.one_of(_dtypes, st.just("*")),
        compute=_unknown_rates,
        memory=_unknown_rates,
        t0_ns=st.one_of(_unknown_rates, st.just(0.0)),
        provenance=_texts,
        samples=_unknown_counts,
        mape=_unknown_rates,
    )
    systolic = st.builds(
        SystolicArray,
        rows=_counts,
        columns=_counts,
        arrays=_counts,
        clock_hz=_unknown_rates,
        dataflow=st.sampled_from(["os", "ws", "is"]),
        source=source,
    )
    rate = Peak(unit="vector", dtype="f32", flops_per_s=1e9, density="dense", source=keys[0], note="here")
    dram = Memory(
        level="main", name="\0main", capacity_bytes=1, bandwidth_bytes_per_s=draw(_rates), source=keys[0]
    )
    tdp_w, tdp_source = draw(energy)
    clock_hz = draw(st.one_of(st.none(), st.floats(1e7, 1e11)))
    return Device(
        name=draw(_texts),
        vendor=draw(_texts),
        family=draw(_texts),
        kind=draw(st.sampled_from(["gpu", "tpu", "cpu"])),
        description=draw(_texts),
        aliases=tuple(draw(st.lists(_texts, max_size=3))),
        units=draw(_unknown_counts),
        unit_name=draw(_texts),
        launch_overhead_ns=draw(_unknown_rates),
        launch_overhead_source=keys[0],
        subbyte_storage=draw(st.sampled_from(["packed", "byte"])),
        sources=tuple(FigureSource(key=key, text=draw(_texts)) for key in keys),
        peaks=(
            rate,
            *draw(
                st.lists(
                    peaks.filter(lambda p: (p.unit, p.dtype, p.accumulator) != ("vector", "f32", "")),
                    max_size=4,
                    unique_by=lambda p: (p.unit, p.dtype, p.accumulator, p.density),
                )
            ),
        ),
        memories=(dram, *draw(st.lists(caches, max_size=2, unique_by=lambda m: m.name))),
        links=tuple(draw(st.lists(links, max_size=3, unique_by=lambda k: (k.kind, k.name)))),
        efficiencies=tuple(
            draw(st.lists(efficiencies, max_size=3, unique_by=lambda e: (e.op_class, e.dtype)))
        ),
        systolic=draw(st.one_of(st.none(), systolic)),
        tdp_w=tdp_w,
        tdp_source=tdp_source,
        boost_clock_hz=nan if clock_hz is None else clock_hz,
        boost_clock_source="" if clock_hz is None else keys[0],
    )


@given(device=_devices())
@settings(max_examples=60)
def test_any_device_survives_its_file(tmp_path_factory: pytest.TempPathFactory, device: Device) -> None:
    path = tmp_path_factory.mktemp("device") / "any.toml"
    write_device(device, path)
    # Compared as text: nan differs from itself, and repr shows every bit of a float.
    assert repr(load_device(path)) == repr(device)


@pytest.mark.parametrize("name", device_names())
def test_shipped_devices_survive_being_written(tmp_path: Path, name: str) -> None:
    device = load_device(name)
    path = write_device(device, tmp_path / "copy.toml")
    assert repr(load_device(path)) == repr(device)
    assert path.read_text("utf-8") == device_to_toml(device)


def test_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("precious", "utf-8")
    with pytest.raises(OutputError, match="exists already") as caught:
        write_device(load_device("L4"), path)
    assert caught.value.path == str(path)
    assert path.read_text("utf-8") == "precious"
    write_device(load_device("L4"), path, overwrite=True)
    assert load_device(path).name == "L4"
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_device(load_device("L4"), tmp_path / "new.toml")
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        write_device(load_device("L4"), tmp_path / "absent" / "new.toml")


def test_most_specific_efficiency_wins() -> None:
    def fit(op_class: str, dtype: str) -> Efficiency:
        return Efficiency(
            op_class=op_class, dtype=dtype, compute=0.5, memory=0.5, t0_ns=1.0, provenance="here"
        )

    rows = (fit("*", "*"), fit("*", "f16"), fit("contraction", "*"), fit("contraction", "bf16"))
    device = replace(load_device("L4"), efficiencies=rows)
    assert device.efficiency("contraction", "bf16") is rows[3]
    assert device.efficiency("contraction", "f16") is rows[2]
    assert device.efficiency("elementwise", "f16") is rows[1]
    assert device.efficiency("elementwise", "f32") is rows[0]
    assert load_device("L4").efficiency("elementwise", "f32") is None


def test_single_link_of_a_torus() -> None:
    ici = load_device("TPU-v4").link("scale_up")
    assert ici is not None
    assert ici.link_bandwidth_bytes_per_s == 50e9
    assert load_device("TPU-v4").link("pcie") is None


def test_unknown_source_key_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        load_device("L4").source_text("nowhere")
