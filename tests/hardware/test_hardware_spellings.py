"""Every name that the measured tables, profiles and published figures use for a device loads one."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hespas.hardware import load_device

_DATA = Path(__file__).parents[2].parent / "shared" / "data"
_COLUMNS = ("hardware", "system", "gpu", "node")

SPELLINGS = {
    "8xTPUv3": "TPU-v3",
    "A100": "A100-SXM-80GB",
    "A100_40GB_4GPU": "A100-SXM-40GB",
    "A100_PCIe_40GB": "A100-PCIe-40GB",
    "A100_PCIe_80GB": "A100-PCIe-80GB",
    "A100_SXM_40GB": "A100-SXM-40GB",
    "A100_SXM_80GB": "A100-SXM-80GB",
    "A40_48GB": "A40",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X VF": "MI300X",
    "AMD MI300X": "MI300X",
    "AMD MI350X": "MI350X",
    "AMD_Instinct_MI100": "MI100",
    "AMD_Instinct_MI210": "MI210",
    "AMD_Instinct_MI250": "MI250-GCD",
    "B200": "B200-SXM",
    "B200_180GB": "B200-SXM",
    "H100": "H100-SXM",
    "H100_80GB": "H100-SXM",
    "H100_80GB_4GPU": "H100-SXM",
    "H200": "H200-SXM",
    "H200_141GB": "H200-SXM",
    "MI300X": "MI300X",
    "NVIDIA A100-PG509-200": "A100-SXM-40GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA_A100-PCIE-40GB": "A100-PCIe-40GB",
    "NVIDIA_A100-SXM4-40GB": "A100-SXM-40GB",
    "NVIDIA_A100_80GB_PCIe": "A100-PCIe-80GB",
    "NVIDIA_H100_80GB_HBM3": "H100-SXM",
    "NVIDIA_L4": "L4",
    "TPUv3": "TPU-v3",
    "Tesla V100-SXM2-32GB": "V100-SXM2-32GB",
    "Tesla_P100-PCIE-16GB": "P100-PCIe-16GB",
    "Tesla_P4": "P4",
    "Tesla_T4": "T4",
    "Tesla_V100-PCIE-32GB": "V100-PCIe-32GB",
    "V100_32GB": "V100-SXM2-32GB",
    "a100": "A100-SXM-80GB",
    "a100_dgx": "A100-SXM-80GB",
    "a100_pairwise_nvlink": "A100-PCIe-80GB",
    "a100_sxm": "A100-SXM-80GB",
    "a40": "A40",
    "b200_sxm": "B200-SXM",
    "b300_sxm": "B300-SXM",
    "b60": "Arc-Pro-B60",
    "gb200": "GB200",
    "gb300": "GB300",
    "h100": "H100-SXM",
    "h100_dgx": "H100-SXM",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "mi308x": "MI308X",
    "mi355x": "MI355X",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
    "tpu_v4": "TPU-v4",
}

# Not devices: stacked memories nobody builds yet, "whatever runs the program", lists in words.
_NOT_DEVICES = re.compile(r"MI300X3D.*|profiling|data sheets.*|.*\(inferred\)")
_NOT_READ = {"hespas_network_systems.csv"}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_loads(spelling: str) -> None:
    assert load_device(spelling).name == SPELLINGS[spelling]


@pytest.mark.skipif(not _DATA.is_dir(), reason="the measured tables are not on this machine")
def test_no_table_names_a_device_that_is_not_listed() -> None:
    found = {name for path in _tables() for name in _names(path)}
    assert len(found) > 40
    assert not {name for name in found if not _NOT_DEVICES.fullmatch(name)} - set(SPELLINGS)


def _tables() -> Iterator[Path]:
    """The text tables; a manifest among them lists the devices of the binary ones."""
    for folder in ("groundtruth", "published", "profiles"):
        for path in sorted((_DATA / folder).iterdir()):
            if path.name.endswith((".csv", ".csv.gz")) and path.name not in _NOT_READ:
                yield path


def _names(path: Path) -> set[str]:
    """The values of the columns that name devices; lists in one cell are separated by ``;``."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    rows = csv.DictReader(text.splitlines())
    cells = {row[name] for row in rows for name in _COLUMNS if row.get(name)}
    return {name for cell in cells for name in cell.split(";") if name}
