"""Shipped devices: every file loads, is plausible, has sources, and is found by common names."""

from __future__ import annotations

import subprocess
import sys
from math import isclose, isnan
from pathlib import Path

import pytest

from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import Device, device_names, find_device, library, load_device, peak_for
from hespas.hardware.devices import read_device
from hespas.hardware.library import DATA_FOLDER, index_folder

REQUIRED = {
    "A10",
    "A100-PCIe-40GB",
    "A100-PCIe-80GB",
    "A100-SXM-40GB",
    "A100-SXM-80GB",
    "A10G",
    "A40",
    "Arc-Pro-B60",
    "B100-SXM",
    "B200-SXM",
    "B300-SXM",
    "GB200",
    "GB300",
    "GH200-144GB",
    "GH200-96GB",
    "Gaudi-3",
    "H100-PCIe",
    "H100-SXM",
    "H20",
    "H200-NVL",
    "H200-SXM",
    "H800-SXM",
    "L20",
    "L4",
    "L40S",
    "MI100",
    "MI210",
    "MI250-GCD",
    "MI250X",
    "MI300X",
    "MI308X",
    "MI325X",
    "MI350X",
    "MI355X",
    "P100-PCIe-16GB",
    "P4",
    "RTX-3090",
    "RTX-4090",
    "RTX-5090",
    "RTX-PRO-6000-Server",
    "T4",
    "TPU-v3",
    "TPU-v4",
    "TPU-v5e",
    "TPU-v5p",
    "TPU-v6e",
    "TPU-v7x",
    "Trainium-2",
    "V100-PCIe-32GB",
    "V100-SXM2-32GB",
}


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return load_device(str(request.param))


def test_every_required_device_ships() -> None:
    assert set(device_names()) >= REQUIRED
    assert list(device_names()) == sorted(device_names())


@pytest.mark.parametrize("path", sorted(DATA_FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_file_is_named_after_its_device(path: Path) -> None:
    assert read_device(path).name == path.stem


def test_a_shipped_file_of_another_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "L4.toml").write_text((DATA_FOLDER / "L40S.toml").read_text("utf-8"), "utf-8")
    monkeypatch.setattr(library, "DATA_FOLDER", tmp_path)
    with pytest.raises(FormatError, match=r"'L40S' in a file named L4\.toml") as caught:
        load_device("L4")
    assert (caught.value.path, caught.value.position) == (str(tmp_path / "L4.toml"), "name")
    assert load_device(tmp_path / "L4.toml").name == "L40S"


def test_only_dense_peaks_ship(device: Device) -> None:
    assert {peak.density for peak in device.peaks} == {"dense"}
    assert "allow_sparse" not in (DATA_FOLDER / f"{device.name}.toml").read_text("utf-8")


def test_sources_resolve_and_are_all_used(device: Device) -> None:
    used = {peak.source for peak in device.peaks} | {memory.source for memory in device.memories}
    used |= {key for link in device.links for key in (link.source, link.latency_source)}
    used |= {device.launch_overhead_source}
    used |= {device.systolic.source} if device.systolic else set()
    used |= {device.tdp_source, device.boost_clock_source} | {peak.energy_source for peak in device.peaks}
    used |= {memory.energy_source for memory in device.memories}
    used -= {""}
    assert used == {source.key for source in device.sources}
    assert all(len(device.source_text(key)) > 20 for key in used)


def test_main_data_source_says_dense(device: Device) -> None:
    unit = "vector" if device.family == "Pascal" else "matrix"  # Pascal has no tensor cores
    narrow = ("f32",) if device.family == "Pascal" else ("bf16", "f16")
    keys = {peak.source for peak in device.peaks if peak.unit == unit and peak.dtype in narrow}
    assert any("dense" in device.source_text(key) for key in keys)


def test_narrower_types_are_never_slower_on_the_matrix_unit(device: Device) -> None:
    order = ("f32", "bf16", "f8E4M3FN", "f6E2M3FN", "f4E2M1FN")
    rates = [peak_for(device, "matrix", dtype).flops_per_s for dtype in order]
    if device.family == "Volta":  # no bf16 on Volta's tensor cores: only f16 and what fits in it is fast
        rates = [peak_for(device, "matrix", dtype).flops_per_s for dtype in ("f32", "f16", "f8E4M3FN")]
    assert rates == sorted(rates)


def test_matrix_unit_is_never_slower_than_the_vector_unit(device: Device) -> None:
    for dtype in ("f32", "bf16", "f16"):
        matrix = peak_for(device, "matrix", dtype).flops_per_s
        assert matrix >= peak_for(device, "vector", dtype).flops_per_s


def test_figures_lie_within_what_hardware_of_this_decade_can_be(device: Device) -> None:
    """Catches a slipped power of ten or a bit taken for a byte."""
    assert 1e11 <= device.main_memory.bandwidth_bytes_per_s <= 2e13
    assert 8 * 2**30 <= device.main_memory.capacity_bytes <= 512 * 2**30
    assert all(3e11 <= peak.flops_per_s <= 2e16 for peak in device.peaks if peak.dtype != "f64")
    assert all(1e11 <= peak.flops_per_s <= 2e14 for peak in device.peaks if peak.dtype == "f64")
    assert all(1e9 <= link.bandwidth_bytes_per_s <= 1e12 for link in device.links)
    assert all(isnan(link.latency_ns) or 100 <= link.latency_ns <= 1e5 for link in device.links)
    assert 500 <= device.launch_overhead_ns <= 10_000
    assert isnan(device.tdp_w) or 50 <= device.tdp_w <= 1500
    assert all(isnan(p.energy_pj_per_flop) or 0.01 <= p.energy_pj_per_flop <= 10 for p in device.peaks)
    assert all(isnan(m.energy_pj_per_byte) or 1 <= m.energy_pj_per_byte <= 200 for m in device.memories)


def test_links_are_listed_from_the_inside_out(device: Device) -> None:
    widths = [link.bandwidth_bytes_per_s for link in device.links if link.kind != "pcie"]
    assert widths == sorted(widths, reverse=True)
    assert device.link("pcie") is not None or device.kind == "tpu" or device.name == "Trainium-2"


def test_systolic_arrays_explain_the_bf16_peak() -> None:
    """rows x columns x arrays x 2 x clock is the data-sheet rate, to the rounding of the data sheet."""
    explained = 0
    for name in device_names():
        device = load_device(name)
        array = device.systolic
        assert (array is not None) == (device.kind in ("tpu", "accelerator"))
        if array is None or isnan(array.clock_hz):
            continue
        rate = 2.0 * array.rows * array.columns * array.arrays * array.clock_hz
        assert isclose(rate, peak_for(device, "matrix", "bf16").flops_per_s, rel_tol=0.005), name
        explained += 1
    assert explained == 6


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("A100-SXM-40GB", "A100-SXM-40GB"),
        ("a100-sxm-40gb", "A100-SXM-40GB"),
        ("A100_SXM_40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA_A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA_A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA_A100_80GB_PCIe", "A100-PCIe-80GB"),
        ("A100_PCIe_80GB", "A100-PCIe-80GB"),
        ("a100_sxm", "A100-SXM-80GB"),
        ("a100", "A100-SXM-80GB"),
        ("h100", "H100-SXM"),
        ("h100_sxm", "H100-SXM"),
        ("H100_80GB", "H100-SXM"),
        ("NVIDIA_H100_80GB_HBM3", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("h200_sxm", "H200-SXM"),
        ("H200_141GB", "H200-SXM"),
        ("b200_sxm", "B200-SXM"),
        ("B200_180GB", "B200-SXM"),
        ("NVIDIA B200", "B200-SXM"),
        ("gb200", "GB200"),
        ("NVIDIA_L4", "L4"),
        ("l40s", "L40S"),
        ("Tesla_V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("V100_32GB", "V100-SXM2-32GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("mi300x", "MI300X"),
        ("mi355x", "MI355X"),
        ("AMD_Instinct_MI250X", "MI250X"),
        ("tpu_v4", "TPU-v4"),
        ("TPUv3", "TPU-v3"),
        ("TPU v5 lite", "TPU-v5e"),
        ("TPU v6 lite", "TPU-v6e"),
        ("trillium", "TPU-v6e"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800-SXM"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L20", "L20"),
        ("AMD Instinct MI325X", "MI325X"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("rtx4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("b100", "B100-SXM"),
        ("TPU7x", "TPU-v7x"),
        ("ironwood", "TPU-v7x"),
        ("GAUDI3", "Gaudi-3"),
        ("trn2", "Trainium-2"),
    ],
)
def test_names_people_and_profilers_use(query: str, name: str) -> None:
    assert find_device(query) == name
    assert load_device(query).name == name


@pytest.mark.parametrize("query", ["V100", "a100_pcie", "TPU"])
def test_ambiguous_name_lists_what_it_could_be(query: str) -> None:
    with pytest.raises(UsageError, match="ambiguous") as caught:
        find_device(query)
    hint = str(caught.value.hint).lower().replace("-", "")
    assert hint.count(query.lower().replace("_", "")) >= 2


@pytest.mark.parametrize(
    ("query", "suggested"),
    [("H10O-SXM", "H100-SXM"), ("L40", "L40S"), ("MI300", "MI300X"), ("TPUv8", "TPU-v")],
)
def test_unknown_name_suggests_close_ones(query: str, suggested: str) -> None:
    with pytest.raises(UsageError, match=f"no device '{query}'") as caught:
        load_device(query)
    assert suggested in str(caught.value.hint)


@pytest.mark.parametrize("query", ["", "---", "gizmo"])
def test_name_like_nothing_known_lists_all(query: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_device(query)
    assert all(name in str(caught.value.hint) for name in device_names())


def test_path_is_loaded_whatever_its_name_resembles(tmp_path: Path) -> None:
    text = (DATA_FOLDER / "L4.toml").read_text("utf-8").replace('name = "L4"', 'name = "mine"', 1)
    (tmp_path / "h100.toml").write_text(text, "utf-8")
    (tmp_path / "h100").write_text(text, "utf-8")
    for path in (tmp_path / "h100", str(tmp_path / "h100.toml"), str(tmp_path / "h100")):
        assert load_device(path).name == "mine"


def test_missing_file_is_a_format_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        load_device(tmp_path / "absent.toml")
    assert caught.value.path == str(tmp_path / "absent.toml")


def test_index_has_the_aliases_that_the_files_decode_to() -> None:
    """The index reads the alias list without decoding the file: both must see the same list."""
    index = index_folder(DATA_FOLDER)
    for name in device_names():
        aliases = load_device(name).aliases
        assert len(aliases) == len(set(aliases))
        assert {index.find(alias) for alias in aliases} <= {name}
    spellings = sum(1 + len(load_device(name).aliases) for name in device_names())
    assert len(index.owner) >= spellings - 30  # several spellings of one device fold to one key


def _write_pair(folder: Path, first: str, second: str) -> None:
    (folder / "One.toml").write_text(f'name = "One"\naliases = [\n  "{first}",\n]\n', "utf-8")
    (folder / "Two.toml").write_text(f'name = "Two"\naliases = ["{second}"]\n', "utf-8")


@pytest.mark.parametrize(("first", "second"), [("shared", "SHARED"), ("uno", "one"), ("b-2", "B2")])
def test_alias_claimed_twice_names_both_files(tmp_path: Path, first: str, second: str) -> None:
    _write_pair(tmp_path, first, second)
    with pytest.raises(FormatError, match=second) as caught:
        index_folder(tmp_path)
    assert caught.value.path == str(tmp_path / "Two.toml")
    assert "One.toml" in str(caught.value)


def test_distinct_aliases_are_no_conflict(tmp_path: Path) -> None:
    _write_pair(tmp_path, "uno", "due")
    assert index_folder(tmp_path).find("DUE") == "Two"


def test_importing_and_loading_stays_light() -> None:
    """No numeric library is pulled in by reading a device; measuring is a module of its own."""
    code = (
        "import sys, hespas.hardware as h; h.load_device('h100');"
        "heavy = 'pandas', 'pyarrow', 'jax', 'jaxlib', 'hespas.hardware.measure';"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
