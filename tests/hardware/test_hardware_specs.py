"""Shipped figures compared with an independent table of data-sheet peaks (not in the repository)."""

from __future__ import annotations

import csv
from math import isclose
from pathlib import Path

import pytest

from hespas.hardware import Device, load_device, peak_for

_TABLE = Path(__file__).parents[2].parent / "shared" / "data" / "groundtruth" / "hardware_specs.csv"

_ROWS = {
    "a100_sxm": "A100-SXM-80GB",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "b200_sxm": "B200-SXM",
    "gb200": "GB200",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "mi355x": "MI355X",
    "tpu_v4": "TPU-v4",
    "a100": "A100-SXM-80GB",
    "h100": "H100-SXM",
    "Tesla_V100-PCIE-32GB": "V100-PCIe-32GB",
    "NVIDIA_A100-PCIE-40GB": "A100-PCIe-40GB",
    "NVIDIA_A100_80GB_PCIe": "A100-PCIe-80GB",
    "NVIDIA_A100-SXM4-40GB": "A100-SXM-40GB",
    "NVIDIA_H100_80GB_HBM3": "H100-SXM",
    "NVIDIA_L4": "L4",
    "b300_sxm": "B300-SXM",
    "gb300": "GB300",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
    "b60": "Arc-Pro-B60",
    "a40": "A40",
    "AMD_Instinct_MI210": "MI210",
    "AMD_Instinct_MI250": "MI250-GCD",
    "AMD_Instinct_MI100": "MI100",
    "Tesla_P4": "P4",
    "Tesla_T4": "T4",
    "Tesla_P100-PCIE-16GB": "P100-PCIe-16GB",
}

# Two tables of the same data sheet differ by rounding (312 or 311.9 TFLOP/s); beyond that a reason is needed.
_ROUNDING = 0.005
_EXCEPTIONS = {
    ("NVIDIA_H100_80GB_HBM3", "mem_bw_GBs"): (0.03, "the row has a figure of its own; data sheet 3,350"),
    ("NVIDIA_L4", "fp32_tflops"): (0.04, "the row counts 60 SMs (the full AD104 chip); the card has 58"),
    ("NVIDIA_L4", "sm_cu_count"): (0.04, "the row counts 60 SMs (the full AD104 chip); the card has 58"),
    ("b300_sxm", "mem_bw_GBs"): (0.04, "the row has the chip's limit; data sheet of HGX B300 7,700"),
    ("rtx_pro_6000_server", "mem_bw_GBs"): (0.11, "the row has the Workstation Edition's; Server 1,597"),
    ("b60", "intra_node_GBs_per_dir"): (0.12, "the row has what is reached over PCIe 5 x8, 32 GB/s"),
    ("AMD_Instinct_MI210", "fp32_tflops"): (0.51, "the row has the matrix rate; vector 22.6"),
    ("AMD_Instinct_MI250", "fp32_tflops"): (0.51, "the row has the matrix rate; vector 22.6"),
    ("AMD_Instinct_MI100", "fp32_tflops"): (0.51, "the row has the matrix rate; vector 23.1"),
    ("AMD_Instinct_MI210", "l2_MB"): (0.51, "the row counts two dies; the card has one"),
    ("AMD_Instinct_MI250", "l2_MB"): (0.51, "the row counts both dies, all else is of one"),
    ("h200_sxm", "l2_MB"): (0.21, "the CUDA runtime reports 60 MB"),
    ("Tesla_P4", "fp32_tflops"): (0.04, "the row has a higher clock; data sheet 5.5"),
    ("Tesla_P4", "sm_cu_count"): (0.51, "the row counts halves; GP104 has 20 SMs of 128 lanes"),
    ("Tesla_T4", "fp32_tflops"): (0.006, "data sheet 8.1"),
    ("Tesla_P100-PCIE-16GB", "fp32_tflops"): (0.03, "the row has a higher clock; data sheet 9.3"),
}  # fmt: skip


def _figures(device: Device) -> dict[str, float]:
    """The table's columns as our files state them, in the table's units."""
    caches = {memory.capacity_bytes / 2**20 for memory in device.memories if memory.level != "main"}
    link = device.link("scale_up") or device.link("pcie")
    return {
        "bf16_fp16_dense_tflops": peak_for(device, "matrix", "f16").flops_per_s / 1e12,
        "fp8_int8_dense_tflops": peak_for(device, "matrix", "f8E4M3FN").flops_per_s / 1e12,
        "fp4_dense_tflops": peak_for(device, "matrix", "f4E2M1FN").flops_per_s / 1e12,
        "mem_bw_GBs": device.main_memory.bandwidth_bytes_per_s / 1e9,
        "sm_cu_count": float(device.units),
        "l2_MB": max(caches, default=0.0),
        "intra_node_GBs_per_dir": link.bandwidth_bytes_per_s / 1e9 if link else 0.0,
        "fp32_tflops": peak_for(device, "vector", "f32").flops_per_s / 1e12,
    }


@pytest.mark.skipif(not _TABLE.is_file(), reason="the table of data-sheet peaks is not on this machine")
@pytest.mark.parametrize("row_name", _ROWS)
def test_figures_agree_with_the_table(row_name: str) -> None:
    with _TABLE.open(newline="") as stream:
        rows = {row["hardware"]: row for row in csv.DictReader(stream)}
    ours = _figures(load_device(_ROWS[row_name]))
    compared = 0
    for column, figure in ours.items():
        if not rows[row_name][column]:
            continue
        tolerance = _EXCEPTIONS.get((row_name, column), (_ROUNDING, ""))[0]
        expected = float(rows[row_name][column])
        assert isclose(figure, expected, rel_tol=tolerance), f"{column}: {figure} is not {expected}"
        compared += 1
    assert compared >= 2


@pytest.mark.skipif(not _TABLE.is_file(), reason="the table of data-sheet peaks is not on this machine")
@pytest.mark.parametrize("row_name", _ROWS)
def test_rows_resolve_as_aliases(row_name: str) -> None:
    assert load_device(row_name).name == _ROWS[row_name]


def test_a100_figures_by_hand() -> None:
    """Independent of any table: the A100 data sheet's dense column."""
    device = load_device("A100-SXM-40GB")
    rates = {(p.unit, p.dtype): p.flops_per_s / 1e12 for p in device.peaks}
    assert rates["matrix", "f64"] == 19.5
    assert rates["matrix", "tf32"] == 156
    assert rates["matrix", "bf16"] == rates["matrix", "f16"] == 312
    assert rates["matrix", "i8"] == 624
    assert rates["vector", "f64"] == 9.7
    assert rates["vector", "f32"] == 19.5
    assert device.main_memory.bandwidth_bytes_per_s == 1555e9
