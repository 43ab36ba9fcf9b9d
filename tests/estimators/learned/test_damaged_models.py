"""Damaged model files: an error that names the file, never an estimate or a crash."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hespas.estimators.learned import Learned
from hespas.estimators.learned.serialization import shipped_folder
from hespas.graph.errors import FormatError
from hespas.hardware import load_device
from hespas.operations import Labels
from hespas.operations.build import matmuls

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
        changed: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    changed["main.scale"] = np.float64(1e300)
    result = io.BytesIO()
    np.savez(result, **changed)
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
    assert caught.value.position
    assert caught.value.hint


@pytest.mark.parametrize(("key", "value"), [("family", "?"), ("codes", {}), ("intervals", [])])
def test_a_card_that_names_what_is_not_there_is_an_error(folder: Path, key: str, value: object) -> None:
    card = folder / f"{NAME}.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {key: value}))
    with pytest.raises(FormatError, match=NAME):
        ask(folder)


def _in_front(start: bytes) -> Callable[[bytes], bytes]:
    return lambda data: start + data


def _with(**changed: object) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | changed).encode()


@pytest.mark.parametrize(
    ("change", "position"),
    [
        pytest.param(_in_front(b'{"x":' + b"[" * 100_000), "the whole card", id="nested"),
        pytest.param(_in_front(b'{"schema":"\xff",'), "line 1, byte 11", id="not-utf-8"),
        pytest.param(_in_front(b"["), "$", id="list"),
        pytest.param(_cut, "byte ", id="cut"),
        pytest.param(_in_front(b"\xef\xbb\xbf"), "byte 0", id="byte-order-mark"),
        pytest.param(_with(name="../../elsewhere"), "$.name", id="name-of-a-path"),
        pytest.param(_with(overhead_ns=1e300), "$.overhead_ns", id="endless-start"),
        pytest.param(_with(columns=["m"] * 300), "$.columns", id="columns-twice"),
        pytest.param(_with(support=[]), "$.support", id="no-support"),
        pytest.param(_with(codes={"variant": {"": 1e308}}), "$.codes.variant", id="vast-code"),
        pytest.param(_with(cells=[{"kind": 1}]), "$.cells[0].kind", id="cell-of-another-type"),
        pytest.param(_with(intervals=[]), "$.intervals", id="no-interval"),
        pytest.param(_with(schema="hespas.learned/9"), "$.schema", id="later"),
    ],
)
def test_a_card_that_is_none_is_told_with_its_place(
    folder: Path, change: Callable[[bytes], bytes], position: str
) -> None:
    card = folder / f"{NAME}.json"
    card.write_bytes(change(card.read_bytes()))
    with pytest.raises(FormatError) as caught:
        ask(folder)
    assert caught.value.path == str(card)
    assert (caught.value.position or "").startswith(position)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("main.column", np.array([1], np.object_)),
        ("main.edges", np.full(4, np.nan, np.float32)),
        ("main.node_offsets", np.array([0, -5], np.int32)),
        ("main.last", np.zeros((2, 2), np.uint8)),
        ("main.scale", np.float64(np.inf)),
        ("octaves", np.zeros(3)),
        ("octaves", np.zeros(((1 << 17) + 1, 4), np.int8)),
        ("main.leaf_offsets", np.arange(4098, dtype=np.int32)),
        ("elsewhere", np.zeros(3)),
    ],
)
def test_an_array_that_is_none_of_trees_is_told_by_name(folder: Path, name: str, value: object) -> None:
    """Objects are refused by their header: nothing is unpickled."""
    path = folder / f"{NAME}.npz"
    with np.load(path) as arrays:
        changed = {each: arrays[each] for each in arrays.files}
    with zipfile.ZipFile(path, "w") as archive:
        for each, array in (changed | {name: np.asarray(value)}).items():
            with archive.open(f"{each}.npy", "w") as file:
                np.save(file, array)
    with pytest.raises(FormatError, match="the trees are damaged") as caught:
        ask(folder)
    assert name.partition(".")[0] in (caught.value.position or "")
    assert caught.value.hint
