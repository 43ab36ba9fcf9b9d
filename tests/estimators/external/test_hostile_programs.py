"""Programs that write without end or leave children or huge files, and damaged saved results."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.external import adapter
from hespas.estimators.external.adapter import CommandError, read_answer, run_command
from hespas.estimators.external.programs import Cocossim
from hespas.hardware import load_device
from hespas.operations import Labels
from hespas.operations.build import matmuls
from tests.limits import SAFETY_S

SHELL = "/bin/sh"


def test_a_program_that_writes_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_MOST_WRITTEN_BYTES", 1 << 16)
    with pytest.raises(CommandError, match="wrote more than"):
        run_command([SHELL, "-c", "while :; do echo 0123456789abcdef; done"], tmp_path, SAFETY_S)


def test_what_a_program_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    run_command([SHELL, "-c", "sleep 300 & echo $! > child"], tmp_path, SAFETY_S)
    child = int((tmp_path / "child").read_text())
    for _ in range(int(SAFETY_S / 0.01)):
        if not _runs(child):
            return
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(child, 9)
    pytest.fail("the child of an ended program still runs")


def _runs(process: int) -> bool:
    """Return True if a process runs. A zombie does not."""
    status = Path(f"/proc/{process}/stat")
    try:
        os.kill(process, 0)
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_an_answer_of_any_size_is_not_read(tmp_path: Path) -> None:
    answer = tmp_path / "results.txt"
    assert read_answer(answer) == b""
    answer.write_bytes(b"Time: 1 us")
    assert read_answer(answer) == b"Time: 1 us"
    with answer.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CommandError, match="larger than 16 MiB"):
        read_answer(answer)


@pytest.mark.parametrize("kept", ['{"duration_ns": -5.0}', '{"cycles": 0}', "{", '{"duration_ns": 1e999}'])
def test_a_kept_result_without_a_time_is_asked_again(tmp_path: Path, kept: str) -> None:
    program = tmp_path / "perf_model"
    program.write_text(f"#!{SHELL}\necho 'Time: 12.5 us'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    model = Cocossim(command=str(program), cache=str(tmp_path / "kept"))
    one = np.ones(1)
    ops = matmuls(Labels.constant("bf16", 1), batch=one, m=128 * one, n=128 * one, k=128 * one)
    device = load_device("TPU-v4")
    assert model.predict(ops, device).duration_ns.tolist() == [12500.0]
    (result,) = (tmp_path / "kept").rglob("*.json")
    result.write_text(kept)
    assert model.predict(ops, device).duration_ns.tolist() == [12500.0]
