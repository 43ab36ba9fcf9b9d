"""Failed cases, ended processes, full folders and folders of other sweeps."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import hespas
from benchmarks.ground_truth import capture as sweep
from benchmarks.ground_truth.capture import capture, layouts
from benchmarks.ground_truth.cases import Case, Work, split_of
from benchmarks.ground_truth.machine import Clocks, Machine, clocks_under
from benchmarks.ground_truth.measure import Measured
from benchmarks.ground_truth.records import Manifest
from benchmarks.ground_truth.store import MARK, Store
from benchmarks.ground_truth.supervise import supervise
from benchmarks.ground_truth.times import busy_ns, without_host_names
from hespas.graph import Profile
from hespas.graph.errors import FormatError, UsageError
from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[2]
HERE = Machine(
    hardware="H100-SXM", kind="NVIDIA H100", backend="gpu", devices=1, host="a host", versions={"jax": "1"},
    flags={}, driver={},
)  # fmt: skip
HEAD = "HloModule m, entry_computation_layout={(f32[8,16]{0,1:T(8,128)}, s32[])->(f32[8]{0}, pred[2,3]{1,0})}"


def work() -> Work:
    return Work(function=abs, arguments=())


def case(number: int) -> Case:
    columns: dict[str, str | int] = {
        "kind": "vector",
        "op": "add",
        "dtype": "f32",
        "rows": number,
        "columns": 8,
    }
    return Case(family="elementwise", name=f"add-{number}", build=work, columns=columns)


CASES = [case(number) for number in range(1, 5)]


def measured(name: str, *_: object) -> Measured:
    if name == "add-2":
        raise RuntimeError("RESOURCE_EXHAUSTED:\n  out of memory")
    return Measured(
        stablehlo=b"module", hlo=HEAD.encode(), xplane=bytes(range(256)), device_ns=[2e3, 1e3, 6e3],
        wall_ns=[9e3, 9e3, 9e3], clocks=Clocks("nvidia-smi", 1980.0, 2619.0, 300.0, 40.0), sets=5,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "measure", measured)


def opened(
    folder: Path, machine: Machine = HERE, *, resume: bool = False, most_bytes: int = 1 << 20
) -> Store:
    store = Store(folder, machine, repeats=3, command="this test", most_bytes=most_bytes)
    store.open(resume=resume)
    return store


def quiet(_: str) -> None:
    """Say nothing."""


def names(said: list[str]) -> list[str]:
    return [line.split()[1].rstrip(":") for line in said]


def test_a_bad_case_is_told_and_the_others_are_captured(tmp_path: Path) -> None:
    said: list[str] = []
    store = opened(tmp_path / "s")
    assert capture(CASES, store, said.append) == 0
    assert names(said) == [each.name for each in CASES]
    faults = {name: record.fault for name, record in store.records.items() if record.fault}
    assert faults == {"add-2": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    document = msgspec.json.decode((tmp_path / "s" / "manifest.json").read_bytes(), type=Manifest)
    assert [each.fault for each in document.cases] == ["", faults["add-2"], "", ""]
    rows = (tmp_path / "s" / "operations.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    assert not (tmp_path / "s" / MARK).exists()


def test_going_on_runs_what_is_missing_and_bad_ones_only_when_asked(tmp_path: Path) -> None:
    capture(CASES[:2], opened(tmp_path), quiet)
    said: list[str] = []
    capture(CASES, opened(tmp_path, resume=True), said.append)
    assert names(said) == ["add-3", "add-4"]
    said.clear()
    capture(CASES, opened(tmp_path, resume=True), said.append, retry=True)
    assert names(said) == ["add-2"]
    said.clear()
    (tmp_path / "cases" / "elementwise" / "add-3.hlo.txt.gz").unlink()
    capture(CASES, opened(tmp_path, resume=True), said.append)
    assert names(said) == ["add-3"], "what lost a file is captured again"


def test_no_case_begins_when_the_time_is_up(tmp_path: Path) -> None:
    assert capture(CASES, opened(tmp_path), quiet, deadline=time.time() - 1) == 4


def test_a_case_that_ended_the_process_is_a_bad_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    capture(CASES[:1], store, quiet)
    (tmp_path / MARK).write_text("elementwise add-3")
    again = opened(tmp_path, resume=True)
    assert again.records["add-3"].fault == "the process ended while it ran"
    assert (again.records["add-3"].family, list(again.records)) == ("elementwise", ["add-1", "add-3"])


def test_an_interruption_leaves_no_mark_and_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Measured:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture(CASES, opened(tmp_path), quiet)
    assert opened(tmp_path, resume=True).records == {}


def test_files_beyond_the_bound_are_left_out_and_the_row_stays(tmp_path: Path) -> None:
    store = opened(tmp_path, most_bytes=60)
    capture(CASES[:1], store, quiet)
    record = store.records["add-1"]
    assert set(record.files) == {"stablehlo"}
    assert set(record.left_out) == {"hlo", "xplane"}
    assert store.bytes_used() <= 60
    assert "add-1" in (tmp_path / "operations.csv").read_text()


@pytest.mark.parametrize(
    "machine",
    [
        msgspec.structs.replace(HERE, hardware="H200-SXM"),
        msgspec.structs.replace(HERE, versions={"jax": "2"}),
    ],
)
def test_sweeps_of_two_machines_are_not_mixed(tmp_path: Path, machine: Machine) -> None:
    opened(tmp_path)
    with pytest.raises(UsageError, match=r"of another kind: (hardware|versions)"):
        opened(tmp_path, machine, resume=True)


def test_folders_of_others_and_damaged_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="other files"):
        opened(tmp_path, resume=True)
    opened(tmp_path / "s")
    with pytest.raises(UsageError, match="holds a sweep"):
        opened(tmp_path / "s")
    (tmp_path / "s" / "manifest.json").write_text('{"schema": 1')
    with pytest.raises(FormatError, match="not the document of a sweep"):
        opened(tmp_path / "s", resume=True)
    with pytest.raises(UsageError, match="cannot be made"):
        opened(tmp_path / "mine.txt" / "s")


def test_rows_hold_median_deviation_and_clocks(tmp_path: Path) -> None:
    capture(CASES[:1], opened(tmp_path), quiet)
    head, row = (line.split(",") for line in (tmp_path / "operations.csv").read_text().splitlines()[:2])
    assert head[:8] == ["hardware", "family", "case", "kind", "op", "dtype", "variant", "split"]
    assert row[head.index("case")] == "add-1"
    text = (tmp_path / "operations.csv").read_text().splitlines()[1]
    assert text.endswith(",2.0,2.645751,2.0,1.0,6.0,9.0,9.0,9.0,5,1980.0,2619.0,300.0")


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "child.py"
    path.write_text(f"import os, sys, time\nmark = {str(tmp_path / MARK)!r}\n{body}")
    return [sys.executable, str(path)]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "time.sleep(60)", "os._exit(134)"])
def test_a_process_that_a_case_ends_or_holds_is_started_again(tmp_path: Path, end: str) -> None:
    body = f"if '--again' in sys.argv:\n    os.unlink(mark); sys.exit(1)\nopen(mark, 'w').close()\n{end}\n"
    said: list[str] = []
    assert supervise(script(tmp_path, body), tmp_path, said.append, case_limit_s=3) == 1
    assert len(said) == 1
    assert "going on without the case" in said[0]


def test_an_old_mark_does_not_end_the_process_that_comes_to_bury_it(tmp_path: Path) -> None:
    mark = tmp_path / MARK
    mark.write_text("elementwise add-1")
    os.utime(mark, (1e9, 1e9))
    said: list[str] = []
    body = "time.sleep(0.5)\nos.unlink(mark)\nsys.exit(0)\n"
    assert supervise(script(tmp_path, body), tmp_path, said.append, case_limit_s=SAFETY_S) == 0
    assert said == []


def test_a_process_that_ends_without_a_case_is_not_started_again(tmp_path: Path) -> None:
    assert supervise(script(tmp_path, "os._exit(9)"), tmp_path, quiet, case_limit_s=5) == 9


def test_one_shape_is_in_one_split_whatever_its_element_type() -> None:
    splits = {split_of(case(number).columns) for number in range(1, 60)}
    assert splits == {"calib", "devval"}
    assert split_of({}) == ""
    for number in range(1, 60):
        columns = dict(case(number).columns)
        assert split_of(columns | {"dtype": "bf16", "variant": "other"}) == split_of(columns)


def test_layouts_are_read_from_the_head_of_a_program() -> None:
    assert layouts(HEAD + ", num_partitions=1\n\nENTRY") == (
        "f32[8,16] s32[] -> f32[8] pred[2,3]",
        "1,8 - -> 1 3,1",
    )
    assert layouts("HloModule other") == ("", "")


def test_kernels_side_by_side_count_once() -> None:
    profile = hespas.read(ROOT / "fixtures" / "profiles" / "h100_streams.xplane.pb")
    assert isinstance(profile, Profile)
    assert busy_ns(profile) == pytest.approx([4900.0, 4901.007])
    empty = np.zeros(0, np.float64)
    nothing = Profile.of("none", (), profile.strings, start_ns=empty, duration_ns=empty)
    assert busy_ns(nothing) == []


def test_names_of_hosts_are_cut_out_of_a_trace() -> None:
    space = (ROOT / "fixtures" / "profiles" / "h100_streams.xplane.pb").read_bytes()
    assert b"worker-0" in space
    cut = without_host_names(space)
    assert b"worker-0" not in cut
    assert len(space) - len(cut) == len(b"worker-0") + 2
    assert without_host_names(cut) == cut
    for damaged in (space[:-1], b"\x08\x01", b"\xff" * 12):
        with pytest.raises(FormatError, match="not an XSpace"):
            without_host_names(damaged)


def smi(folder: Path, body: str) -> Callable[[pytest.MonkeyPatch], None]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return lambda patch: patch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo '1980, 2619, [N/A], 41'", Clocks("nvidia-smi", 1980.0, 2619.0, None, 41.0)),
        ("exit 9", Clocks()),
        ("echo no devices were found", Clocks()),
    ],
)
def test_clocks_of_a_gpu_are_read_while_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: Clocks
) -> None:
    smi(tmp_path, body)(monkeypatch)
    turns: list[float] = []

    def turn() -> None:
        time.sleep(0.001)
        turns.append(time.time())

    assert clocks_under("gpu", turn) == expected
    assert turns
