"""Utilisation of training kernels in data files: sources, devices and faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hespas.graph.errors import FormatError
from hespas.hardware import device_names, load_device
from hespas.hardware.kernel_shares import TRAINING_FOLDER, CommonShares, read_training_shares, training_shares

FILES = sorted(TRAINING_FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_has_a_source_and_is_a_share(path: Path) -> None:
    found = read_training_shares(path)
    assert found.name == path.stem
    keys = {row.source for row in found.attention} | {row.source for row in found.products}
    if isinstance(found, CommonShares):
        keys |= {found.power.source, found.apart.source, found.experts.source}
        assert max(found.experts.sorting, found.experts.scans) <= 1
    assert keys == set(found.sources)
    assert all(found.sources.values())
    assert all(row.backward <= row.forward <= 1 for row in found.attention)
    assert all(row.sustained <= 1 for row in found.products)
    assert found.library == "measured" or found.attention_of(found.library)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("A100-SXM-80GB", "ampere"),
        ("H200-SXM", "hopper"),
        ("GB300", "blackwell"),
        ("L40S", "nvidia"),
        ("TPU-v6e", "tpu"),
        ("MI300X", "common"),
    ],
)
def test_a_device_has_the_file_of_its_family(device: str, name: str) -> None:
    assert training_shares(load_device(device)).name == name


def test_every_device_has_one() -> None:
    assert all(training_shares(load_device(name)) for name in device_names())


@pytest.mark.parametrize(
    ("name", "old", "new", "position"),
    [
        ("common", 'source = "clock"', 'source = "nobody"', "power.source"),
        ("ampere", 'library = "cudnn", forward', 'library = "flash1", forward', "attention[2]"),
        ("ampere", "backward = 0.32,", "", "attention[0].backward"),
        ("common", "exponent = 0.5", "exponent = -1", "power.exponent"),
    ],
)
def test_faults_name_the_key(name: str, old: str, new: str, position: str, tmp_path: Path) -> None:
    text = (TRAINING_FOLDER / f"{name}.toml").read_text("utf-8")
    assert old in text
    path = tmp_path / f"{name}.toml"
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(FormatError) as caught:
        read_training_shares(path)
    assert caught.value.position == position


def test_an_architecture_decides_and_not_the_name_of_a_family() -> None:
    server, workstation = load_device("B200-SXM"), load_device("RTX-PRO-6000-Server")
    assert server.family == workstation.family
    assert training_shares(server).covers(server)
    assert not training_shares(workstation).covers(workstation)
    assert training_shares(workstation).name == "nvidia"
    unnamed = replace(server, arch="")  # files of Hespas 0.1.0 state no architecture
    assert training_shares(unnamed) == training_shares(server)
