"""Operations of compiled programs are the instructions that events name, as in XProf, with their costs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.graph import HostOps, Profile, StringTableBuilder
from tests.analysis.hlo_stats_space import gpu_space
from tests.analysis.raw import DATA, absent

ROOT = Path(__file__).parents[2]
TPU = ROOT / "fixtures" / "profiles" / "tpu_v4_megacore.xplane.pb"
CPU = ROOT / "fixtures" / "recorded" / "train-small.xplane.pb.gz"
GPU = DATA / "mi300x_jax_conv3d.xplane.pb"


def read(path: Path) -> Profile:
    found = hespas.read(path)
    assert isinstance(found, Profile)
    return found


def launched(profile: Profile) -> Profile:
    """The same work, each event launched by a call of the runtime: as a profile of a GPU has it."""
    strings = StringTableBuilder(profile.strings)
    name, thread = strings.add("hipLaunchKernel"), strings.add("main")
    count = len(profile)
    calls = HostOps.of(
        name_id=np.full(count, name),
        thread_id=np.full(count, thread),
        parent=np.full(count, -1),
        start_ns=profile.start_ns - 5.0,
        duration_ns=np.ones(count),
    )
    return replace(profile, strings=strings.build(), host=calls, host_event=np.arange(count, dtype=np.int32))


@pytest.mark.parametrize("path", [TPU, CPU, pytest.param(GPU, marks=absent)], ids=["tpu", "cpu", "gpu"])
def test_operations_are_the_instructions_of_the_program(path: Path) -> None:
    profile = read(path)
    profile = profile if len(profile.host) else launched(profile)
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    strings = profile.strings
    rows = np.flatnonzero((profile.module_id > 0) & (profile.op_id > 0))
    for row in rows.tolist():
        name = strings[int(profile.op_id[row])]
        counts[name] += 1
        times[name] += float(profile.duration_ns[row])
    found = hespas.analyze(profile).tables
    listed = {row.operation: row for row in found.operations.rows() if row.operation in counts}
    assert {name: row.count for name, row in listed.items()} == counts
    assert {name: row.total_ns for name, row in listed.items()} == pytest.approx(times)
    work = [row for row in found.classes.rows() if row.op_class != "collective"]
    costed = sum(row.total_ns * row.costed_share for row in work)
    assert costed >= 0.95 * sum(row.total_ns for row in work)


@absent
def test_kernels_of_one_instruction_share_its_cost() -> None:
    """Five runs of a convolution of two kernels each."""
    row = next(
        row for row in hespas.analyze(GPU).tables.operations.rows() if row.operation == "cudnn-conv.1.0"
    )
    assert (row.count, row.op_class) == (10, "convolution")
    assert row.flops == 5 * 36_609_720_320
    assert row.bytes_moved > 0
    assert 0 < row.roof_share < 1


def test_a_program_without_hlo_has_names_and_no_costs() -> None:
    profile = replace(launched(read(TPU)), attachments={})
    found = hespas.analyze(profile).tables
    assert {"dot.3", "tanh.4"} <= {row.operation for row in found.operations.rows()}
    assert all(np.isnan(row.flops) for row in found.operations.rows() if row.operation == "dot.3")


HLO_STATS = {
    ("jit_step(1)", "dot.2"): (12, 211_206.0),
    ("jit_step(2)", "dot.2"): (8, 141_604.0),
    ("jit_step(1)", "fusion.1"): (6, 24_603.0),
    ("jit_step(2)", "fusion.1"): (4, 16_802.0),
    ("jit_step(1)", "copy.1"): (6, 12_603.0),
    ("jit_step(2)", "copy.1"): (4, 8_802.0),
}
"""Occurrences and total self time [ns] by program and instruction of the file in XProf 2.24.2's hlo_stats."""


def test_programs_with_instructions_of_the_same_names_equal_hlo_stats(tmp_path: Path) -> None:
    path = tmp_path / "gpus.xplane.pb"
    path.write_bytes(gpu_space())
    rows = hespas.analyze(path).tables.operations.rows()
    listed = {(row.program, row.operation): (row.count, row.total_ns) for row in rows if row.program}
    assert listed == HLO_STATS
    assert [row.operation for row in rows if not row.program] == ["MemcpyD2D"]
    flops = {row.program: row.flops for row in rows if row.operation == "dot.2"}
    assert flops == {"jit_step(1)": 6 * 2 * 256**2 * 512, "jit_step(2)": 4 * 2 * 256**2 * 1024}
    assert not any(np.isnan(row.bytes_moved) for row in rows)


@absent
def test_operations_of_a_gpu_equal_hlo_stats() -> None:
    """Figures of XProf 2.24.2 for the same file."""
    rows = hespas.analyze(GPU).tables.operations.rows()
    listed = {row.operation: (row.count, row.total_ns) for row in rows if row.program}
    assert listed == {
        "input_transpose_fusion": (5, 1_950_960.0),
        "cudnn-conv.1.0": (10, 1_539_832.0),
        "input_transpose_fusion.1": (5, 69_261.0),
        "loop_transpose_fusion": (5, 26_440.0),
    }
