"""Options of ``hespas-convert`` for large jobs: shares, classes, interrupted runs, clusters."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hespas
from hespas.cli import convert, validate
from hespas.graph import Workload

PIPELINE = Path(__file__).parents[2] / "fixtures" / "chakra" / "pipeline_2x2"
MLP = Path(__file__).parents[2] / "fixtures" / "op_graph" / "mlp.json"


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that 40 ranks run."""
    read = hespas.read(MLP)
    assert isinstance(read, Workload)
    path = tmp_path_factory.mktemp("source") / "mlp.arrow"
    hespas.write(Workload.spmd(read.classes[0], 40), path)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(convert.app, [str(each) for each in arguments])


def tree(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def test_shares_make_the_folder_that_one_command_makes(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert run(PIPELINE, tmp_path / "one" / "job").exit_code == 0
    for share in ("2/3", "1/3", "3/3"):
        done = run(PIPELINE, tmp_path / "two" / "job", "--shard", share, "--jobs", "3")
        assert done.exit_code == 0, done.output
    assert tree(tmp_path / "two" / "job") == tree(tmp_path / "one" / "job")
    again = run(PIPELINE, tmp_path / "two" / "job", "--shard", "1/3")
    assert again.exit_code == 2
    assert "already contains share 1 of 3" in again.stderr
    assert "--overwrite" in again.stderr


def test_a_folder_that_lacks_shares_is_not_read(tmp_path: Path) -> None:
    assert run(PIPELINE, tmp_path / "job", "--shard", "2/2").exit_code == 0
    done = run(tmp_path / "job", tmp_path / "other")
    assert done.exit_code == 3
    assert "the share of ranks 0-1 has not been written yet" in done.stderr
    assert "--shard" in done.stderr


def test_classes_are_checked_and_become_all_files_again(mlp: Path, tmp_path: Path) -> None:
    done = run(mlp, tmp_path / "mlp", "--only-classes", "--hardware", "H100-SXM")
    assert done.exit_code == 0, done.output
    assert sorted(tree(tmp_path / "mlp")) == ["mlp.0.et", "rank_map.json"]
    assert json.loads((tmp_path / "mlp" / "rank_map.json").read_bytes())["representative"] == [0] * 40
    checked = CliRunner().invoke(validate.app, ["check", str(tmp_path / "mlp"), "--profile", "astra-sim"])
    assert checked.exit_code == 0, checked.output
    done = run(tmp_path / "mlp", tmp_path / "all" / "mlp")
    assert done.exit_code == 2, "the folder above is not there"
    (tmp_path / "all").mkdir()
    assert run(tmp_path / "mlp", tmp_path / "all" / "mlp").exit_code == 0
    files = tree(tmp_path / "all" / "mlp")
    assert len(files) == 40
    assert set(files.values()) == {(tmp_path / "mlp" / "mlp.0.et").read_bytes()}


def test_a_killed_run_is_resumed(mlp: Path, tmp_path: Path) -> None:
    """The process ends in the middle, without a chance to tidy up."""
    program = (
        "import os, sys, hespas.api as api; "
        "stop = lambda done, total: total == 40 and done > 0 and os.kill(os.getpid(), 9); "
        "api.convert(sys.argv[1], sys.argv[2], parts=api.Parts(resume=True), progress=stop)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, str(mlp), str(tmp_path / "mlp")], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (kept,) = tmp_path.iterdir()
    assert kept.name.endswith(".kept.partial")
    first = (kept / "mlp.0.et").stat().st_ino
    done = run(mlp, tmp_path / "mlp", "--resume")
    assert done.exit_code == 0, done.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["mlp"]
    assert (tmp_path / "mlp" / "mlp.0.et").stat().st_ino == first
    assert len(tree(tmp_path / "mlp")) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shard", "half"), "invalid --shard 'half': expected I/N"),
        (("--shard", "0/2"), "--shard 0/2: shares are counted from 1 to 2"),
        (("--shard", "1/5"), "5 shares of 4 ranks"),
        (("--only-classes", "--ranks", "0-1"), "it cannot be combined with --ranks"),
        (("--resume", "--to", "op-graph"), "--resume requires a format with one file per rank"),
    ],
)
def test_wrong_usage_is_told_in_the_words_of_the_command(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = run(PIPELINE, tmp_path / "job", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_spec("distributed") is not None, reason="distributed is installed")
def test_the_extra_for_clusters_is_named(tmp_path: Path) -> None:
    done = run(PIPELINE, tmp_path / "job", "--cluster", "tcp://127.0.0.1:1")
    assert done.exit_code == 4
    assert "pip install 'hespas[cluster]'" in done.stderr
