"""Stored models that were damaged: an error that names the file, never a time and never a crash."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.learned import Learned
from hespas.estimators.learned.stored import shipped_folder
from hespas.estimators.operations import Labels
from hespas.estimators.operations.build import matmuls
from hespas.graph.errors import FormatError
from hespas.hardware import load_device

NAME = "gemm-bf16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for suffix in (".json", ".npz"):
        shutil.copy(shipped_folder() / f"{NAME}{suffix}", tmp_path)
    return tmp_path


def ask(folder: Path) -> float:
    size = np.full(1, 1024.0)
    ops = matmuls(Labels.constant("bf16", 1), batch=np.ones(1), m=size, n=size, k=size)
    return float(Learned(models=str(folder)).predict(ops, load_device("H100-SXM")).duration_ns[0])


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    start = len(data) // 3
    return data[:start] + bytes(byte ^ 255 for byte in data[start : start + 40]) + data[start + 40 :]


def _marked(local: int, central: int, mark: bytes) -> Callable[[bytes], bytes]:
    """Every member with ``mark`` in its header at these places."""

    def change(data: bytes) -> bytes:
        found = bytearray(data)
        for start, place in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
            at = found.find(start)
            while at >= 0:
                found[at + place : at + place + len(mark)] = mark
                at = found.find(start, at + 4)
        return bytes(found)

    return change


def _stated_too_large(data: bytes) -> bytes:
    header = b"{'descr': '|i1', 'fortran_order': False, 'shape': (1000000000000, 4), }".ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            new.writestr(name, huge if name == "octaves.npy" else old.read(name))
    return result.getvalue()


def _vast_leaves(data: bytes) -> bytes:
    with np.load(io.BytesIO(data)) as arrays:
        changed = {name: arrays[name] for name in arrays.files} | {"main.scale": np.float64(1e300)}
    result = io.BytesIO()
    np.savez(result, allow_pickle=False, **changed)
    return result.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_cut, id="cut"),
        pytest.param(_flipped, id="flipped"),
        pytest.param(_marked(8, 10, b"\x63\x00"), id="unknown-compression"),
        pytest.param(_marked(6, 8, b"\x01"), id="encrypted"),
        pytest.param(_stated_too_large, id="states-terabytes"),
        pytest.param(_vast_leaves, id="vast-leaves"),
    ],
)
def test_damaged_trees_are_an_error(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    assert 0 < ask(folder) < 1e6
    (folder / "copy").mkdir()
    shutil.copy(folder / f"{NAME}.json", folder / "copy")
    trees = folder / "copy" / f"{NAME}.npz"
    trees.write_bytes(damage((folder / f"{NAME}.npz").read_bytes()))
    with pytest.raises(FormatError, match="damaged") as caught:
        ask(folder / "copy")
    assert caught.value.path == str(trees)
    assert caught.value.hint


@pytest.mark.parametrize(("key", "value"), [("family", "?"), ("codes", {}), ("intervals", [])])
def test_a_card_that_names_what_is_not_there_is_an_error(folder: Path, key: str, value: object) -> None:
    card = folder / f"{NAME}.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {key: value}))
    with pytest.raises(FormatError, match=NAME):
        ask(folder)
