"""``hespas bundle``: traces of ranks in one archive for Perfetto, on a common clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

import hespas
from hespas.cli.main import app
from hespas.graph.errors import OutputError, UnsupportedError, UsageError
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto

ROOT = Path(__file__).parents[2]
_CLOCKS_US = (0.0, 5_000_000.25)
"""Clock of each rank."""


def job(folder: Path) -> list[Path]:
    """Write traces of two ranks that end an all-reduce together; rank 1 has another clock."""
    files: list[Path] = []
    for rank, clock in enumerate(_CLOCKS_US):
        begin = clock + 100 + 10 * rank
        arguments: Json = {
            "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, "Out msg nelems": 8,
            "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 1,
        }  # fmt: skip
        events = [
            host("record_param_comms", begin, 5, 1, arguments),
            launch(begin + 1, 7),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin + 5, 95 - 10 * rank, 7, arguments),
        ]
        path = folder / f"rank{rank}" / "step.json"
        path.parent.mkdir()
        write_kineto(path, events, distributedInfo={"rank": rank, "world_size": 2, "backend": "nccl"})
        files.append(path)
    packed = files[1].with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(files[1].read_bytes()))
    files[1].unlink()
    return [files[0], packed]


def manifest(archive: Path) -> list[dict[str, Any]]:
    with ZipFile(archive) as zipped:
        document = json.loads(zipped.read("perfetto_manifest.json"))
    assert document["perfetto_manifest"]["version"] == 1
    files: list[dict[str, Any]] = document["perfetto_manifest"]["files"]
    return files


def test_ranks_end_their_collective_together(tmp_path: Path) -> None:
    files = job(tmp_path)
    done = CliRunner().invoke(app, ["bundle", *map(str, files), "--out", str(tmp_path / "job.zip")])
    assert done.exit_code == 0, done.output
    first, second = manifest(tmp_path / "job.zip")
    assert [first["path"], second["path"]] == ["00000-step.json", "00001-step.json"]
    assert [first["machine"], second["machine"]] == [{"name": "rank 0"}, {"name": "rank 1"}]
    assert "clocks" not in first
    assert second["clocks"]["sync_to"] == {"file": "00000-step.json"}
    ends: list[float] = []
    with ZipFile(tmp_path / "job.zip") as zipped:
        for entry in (first, second):
            events = json.loads(zipped.read(entry["path"]))["traceEvents"]
            event = next(each for each in events if each.get("cat") == "kernel")
            offset_us = entry.get("clocks", {"offset_ns": 0})["offset_ns"] / 1e3
            ends.append(event["ts"] + event["dur"] + offset_us)
        assert zipped.read(first["path"]) == files[0].read_bytes()
        assert zipped.read(second["path"]) == gzip.decompress(files[1].read_bytes())
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)


def test_equal_traces_make_equal_archives(tmp_path: Path) -> None:
    files = job(tmp_path)
    for name in ("a.zip", "b.zip"):
        hespas.bundle(files, tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with pytest.raises(OutputError, match="exists"):
        hespas.bundle(files, tmp_path / "a.zip")


def test_traces_that_are_not_of_different_ranks(tmp_path: Path) -> None:
    files = job(tmp_path)
    with pytest.raises(UsageError, match="is given twice"):
        hespas.bundle([*files, files[0].parent], tmp_path / "job.zip")
    copy = tmp_path / "copy.json"
    copy.write_bytes(files[0].read_bytes())
    done = CliRunner().invoke(app, ["bundle", str(files[0]), str(copy), "--out", str(tmp_path / "job.zip")])
    assert done.exit_code == 0, done.output
    assert "more than one recording is of rank 0" in done.stderr
    assert "1 of 2 ranks of the job are not recorded" in done.stderr


@pytest.mark.parametrize("name", ["-", "rank0/step.json", "job.tar"])
def test_archives_have_the_suffix_zip(tmp_path: Path, name: str) -> None:
    files = job(tmp_path)
    before = files[0].read_bytes()
    with pytest.raises(UsageError, match=r"is not a \.zip file"):
        hespas.bundle(files, tmp_path / name, overwrite=True)
    assert files[0].read_bytes() == before


def test_the_archive_is_checked_before_the_traces_are_read(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="the folder does not exist"):
        hespas.bundle(["none.json", "absent.json"], tmp_path / "absent" / "job.zip")


def test_inputs_that_cannot_be_bundled(tmp_path: Path) -> None:
    files = job(tmp_path)
    with pytest.raises(UsageError, match="1 trace: an archive joins several"):
        hespas.bundle(files[:1], tmp_path / "job.zip")
    other = ROOT / "fixtures" / "profiles" / "tpu_v4_megacore.xplane.pb"
    with pytest.raises(UnsupportedError, match="is not a trace of PyTorch's profiler"):
        hespas.bundle([*files, other], tmp_path / "job.zip")
    assert not (tmp_path / "job.zip").exists()
