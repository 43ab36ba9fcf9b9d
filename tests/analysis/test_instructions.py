"""Operations of compiled programs are the instructions that events name, as in XProf, with their costs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.graph import HostOps, Profile, StringTableBuilder
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
        name_row=np.full(count, name),
        thread_row=np.full(count, thread),
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
    rows = np.flatnonzero((profile.module_row > 0) & (profile.op_row > 0))
    for row in rows.tolist():
        name = strings[int(profile.op_row[row])]
        counts[name] += 1
        times[name] += float(profile.duration_ns[row])
    found = hespas.analyze(profile).found
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
        row for row in hespas.analyze(GPU).found.operations.rows() if row.operation == "cudnn-conv.1.0"
    )
    assert (row.count, row.op_class) == (10, "convolution")
    assert row.flops == 5 * 36_609_720_320
    assert row.bytes_moved > 0
    assert 0 < row.roof_share < 1


def test_a_program_without_hlo_has_names_and_no_costs() -> None:
    profile = replace(launched(read(TPU)), attachments={})
    found = hespas.analyze(profile).found
    assert {"dot.3", "tanh.4"} <= {row.operation for row in found.operations.rows()}
    assert all(np.isnan(row.flops) for row in found.operations.rows() if row.operation == "dot.3")
