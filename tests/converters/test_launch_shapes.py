"""Numbers of blocks and threads of launches: as in the file, counted in blocks for every profiler."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hespas
from fixtures.make import rocprof
from fixtures.make.nsys_export import FULL
from hespas.converters.launch_shapes import shape_text
from hespas.graph import Profile

PROFILES = Path(__file__).parents[2] / "fixtures" / "profiles"
KINETO = PROFILES / "ffn_train_rank0of2.pt.trace.json.gz"


def shapes_of(path: Path) -> list[tuple[str, str]]:
    """Kernel and shape of each event."""
    profile = hespas.read(path)
    assert isinstance(profile, Profile)
    rows = zip(profile.kernel_id.tolist(), profile.grid_id.tolist(), strict=True)
    return [(profile.strings[kernel], profile.strings[grid]) for kernel, grid in rows]


def rewritten(place: Path, grid: object, block: object, call: str) -> Path:
    """The recording of Kineto with other launches."""
    trace = json.loads(gzip.decompress(KINETO.read_bytes()))
    for each in trace["traceEvents"]:
        if each.get("cat") == "kernel":
            each["args"] |= {"grid": grid, "block": block}
        elif each.get("name") == "cudaLaunchKernel":
            each["name"] = call
    path = place / "rank0.pt.trace.json"
    path.write_text(json.dumps(trace))
    return path


def test_kineto() -> None:
    found = shapes_of(KINETO)
    kernels = {shape for name, shape in found if not name.startswith("Mem")}
    assert kernels - {""} == {"[[256,1,1],[384,1,1]]"}
    assert {shape for name, shape in found if name.startswith("Mem")} <= {""}


def test_a_grid_of_threads_is_counted_in_blocks(tmp_path: Path) -> None:
    path = rewritten(tmp_path, [71680, 1, 1], [256, 1, 1], "hipExtModuleLaunchKernel")
    assert "[[280,1,1],[256,1,1]]" in {shape for _, shape in shapes_of(path)}
    path = rewritten(tmp_path, [71680, 1, 1], [256, 1, 1], "hipModuleLaunchKernel")
    assert {shape for _, shape in shapes_of(path)} <= {"", "[[71680,1,1],[256,1,1]]"}


@pytest.mark.parametrize(
    "grid", [None, [], [1, 2], [0, 1, 1], [-1, 1, 1], ["8", 1, 1], {"x": 1}, 1 << 70, [1 << 40] * 3]
)
def test_launches_that_make_no_sense_are_unknown(tmp_path: Path, grid: object) -> None:
    path = rewritten(tmp_path, grid, [128, 1, 1], "cudaLaunchKernel")
    assert {shape for _, shape in shapes_of(path)} == {""}


def test_nsys(tmp_path: Path) -> None:
    path = tmp_path / "export.sqlite"
    path.write_bytes(gzip.decompress(FULL.read_bytes()))
    with closing(sqlite3.connect(path)) as connection:
        told = connection.execute(
            "SELECT gridX, gridY, gridZ, blockX, blockY, blockZ FROM CUPTI_ACTIVITY_KIND_KERNEL"
        ).fetchall()
    found = [shape for _, shape in shapes_of(path) if shape]
    assert sorted(found) == sorted(shape_text(each[:3], each[3:]) for each in told)


def test_rocprofv3_and_rocpd_count_threads(tmp_path: Path) -> None:
    found = {shape for _, shape in shapes_of(PROFILES / "rocprofv3_two_processes.json")}
    assert found == {"", "[[4,1,1],[256,1,1]]"}  # 1,024 threads
    path = tmp_path / "results.db"
    path.write_bytes(gzip.decompress(rocprof.DATABASE.read_bytes()))
    assert {shape for _, shape in shapes_of(path)} == {""}
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'rocpd_kernel_dispatch%'"
        for (table,) in connection.execute(query).fetchall():
            for axis, (threads, group) in {"x": (1000, 256), "y": (6, 2), "z": (1, 1)}.items():
                for column, value in (("grid_size", threads), ("workgroup_size", group)):
                    connection.execute(f'ALTER TABLE "{table}" ADD COLUMN {column}_{axis} INTEGER')
                    connection.execute(f'UPDATE "{table}" SET {column}_{axis} = {value}')
        connection.commit()
    assert {shape for _, shape in shapes_of(path)} == {"", "[[4,3,1],[256,2,1]]"}


def test_xplane() -> None:
    assert {shape for _, shape in shapes_of(PROFILES / "h100_streams.xplane.pb")} == {
        "",
        "[[8,1,1],[128,1,1]]",
    }


@given(st.lists(st.integers(-9, 1 << 40), max_size=4), st.lists(st.integers(-9, 1 << 40), max_size=4))
def test_any_extents(grid: list[int], block: list[int]) -> None:
    whole, threads = shape_text(grid, block), shape_text(grid, block, in_threads=True)
    assert bool(whole) == bool(threads)
    if whole:
        assert json.loads(whole) == [grid, block]
        assert json.loads(threads)[0] == [-(-all_ // own) for all_, own in zip(grid, block, strict=True)]
