"""Recordings of several devices, and of a device other than the named one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.errors import UsageError
from hespas.hardware import load_device, write_device
from hespas.validators.accuracy import Accuracy, accuracy
from tests.validators.accuracy.small_profiles import Program, Recording

OTHER = "accuracy.other-device"


def _recording(devices: Sequence[str], places: Sequence[int]) -> Profile:
    """One product per place, which takes 1 us more than the one before it."""
    recording = Recording()
    for number in range(len(places)):
        recording.event("aten::mm", 5000.0 + 1000 * number, shapes="[[128,64],[64,32]]", dtypes="float32")
    return replace(recording.build(devices=tuple(devices)), device_index=np.array(places, np.int32))


def _compared(profile: Profile, *hardware: str) -> tuple[Accuracy, Diagnostics]:
    found = Diagnostics()
    return accuracy([profile], hardware, diagnostics=found), found


def _measured(done: Accuracy) -> dict[str, list[float]]:
    return {each.hardware: each.measured_ns.tolist() for each in done.cases}


def test_each_event_is_compared_with_its_own_device() -> None:
    profile = _recording(["NVIDIA A100-SXM4-80GB", "MI300X"], [1, 0, 1])
    done, found = _compared(profile, "A100-SXM-80GB", "MI300X")
    assert _measured(done) == {"A100-SXM-80GB": [6000.0], "MI300X": [5000.0, 7000.0]}
    assert {each.source for each in done.cases} == {"recording on A100-SXM-80GB", "recording on MI300X"}
    assert (done.noise["MI300X"].n, done.noise["A100-SXM-80GB"].n) == (2, 0)
    assert OTHER not in found.counts()


def test_events_of_devices_that_are_not_named_are_left_out() -> None:
    profile = _recording(["A100-SXM-80GB", "MI300X", "abacus"], [0, 1, 0, 2, -1])
    done, found = _compared(profile, "H100-SXM", "A100-SXM-80GB")
    assert _measured(done) == {"A100-SXM-80GB": [5000.0, 7000.0, 9000.0]}, "without a name: of the only one"
    assert found.counts()[OTHER] == 2
    assert any("MI300X, abacus, which is not" in each.message for each in found)


def test_without_a_name_an_event_may_be_of_any_device() -> None:
    profile = _recording(["A100-SXM-80GB", "MI300X"], [0, 1, -1])
    done, found = _compared(profile, "A100-SXM-80GB", "MI300X")
    assert _measured(done) == {"A100-SXM-80GB": [5000.0], "MI300X": [6000.0]}
    assert found.counts()[OTHER] == 1
    assert any("an unnamed device" in each.message for each in found)


def test_several_devices_are_not_taken_for_a_third() -> None:
    with pytest.raises(UsageError, match="measured on A100-SXM-80GB, MI300X: which `hardware`"):
        _compared(_recording(["A100-SXM-80GB", "MI300X"], [0, 1]), "H100-SXM")


def test_another_device_than_the_one_named_is_told() -> None:
    profile = _recording(["NVIDIA H100 80GB HBM3"], [0])
    done, found = _compared(profile, "A100-SXM-80GB")
    assert _measured(done) == {"A100-SXM-80GB": [5000.0]}
    [told] = [each.message for each in found if each.code == OTHER]
    assert told == "recorded on H100-SXM, but compared with estimates for A100-SXM-80GB"


@pytest.mark.parametrize("devices", [("abacus",), ("abacus", ""), (), ("",)])
def test_names_nobody_knows_are_taken_for_the_device_that_is_named_and_it_is_told(
    devices: tuple[str, ...],
) -> None:
    done, found = _compared(_recording(devices, list(range(len(devices) or 1))), "H100-SXM")
    assert list(_measured(done)) == ["H100-SXM"]
    told = [each.message for each in found if each.code == OTHER]
    stated = "recorded on abacus, but compared with estimates for H100-SXM, which has no such alias"
    assert told == ([stated] if "abacus" in devices else [])


@pytest.mark.parametrize(("name", "told"), [("CPU", 0), ("NVIDIA H100 80GB HBM3", 1), ("abacus", 1)])
def test_any_cpu_may_be_the_one_a_user_describes(name: str, told: int, tmp_path: Path) -> None:
    mine = replace(load_device("H100-SXM"), name="my laptop", aliases=())
    path = write_device(mine, tmp_path / "mine.toml")
    _, found = _compared(_recording([name], [0]), str(path))
    assert found.counts().get(OTHER, 0) == told


@pytest.mark.parametrize(("stated", "told"), [("NVIDIA H100 80GB HBM3", 0), ("AMD Instinct MI300X", 1)])
def test_a_graph_with_times_says_what_it_was_measured_on(stated: str, told: int) -> None:
    made = Program()
    made.add("a", "dot", takes=[(8, 8), (8, 8)], duration_ns=50.0)
    workload = Workload(
        name="w", classes=(made.build(),), rank_class=np.array([0], np.int32), metadata={"device": stated}
    )
    found = Diagnostics()
    done = accuracy([workload], ["H100-SXM"], diagnostics=found)
    assert [each.hardware for each in done.cases] == ["H100-SXM"]
    assert found.counts().get(OTHER, 0) == told


def test_a_file_may_say_what_recordings_call_its_device(tmp_path: Path) -> None:
    mine = replace(load_device("H100-SXM"), name="mine", aliases=("Abacus 9",))
    path = write_device(mine, tmp_path / "mine.toml")
    done, found = _compared(_recording(["abacus 9", "MI300X"], [0, 1]), str(path), "MI300X")
    assert _measured(done) == {"mine": [5000.0], "MI300X": [6000.0]}
    assert OTHER not in found.counts()


def test_graphs_with_times_of_one_name_are_told_apart() -> None:
    made = Program()
    made.add("a", "dot", takes=[(8, 8), (8, 8)], duration_ns=50.0)
    graph = made.build()
    workload = Workload(name="two", classes=(graph, graph), rank_class=np.array([0, 1], np.int32))
    done = accuracy([workload], ["H100-SXM"])
    names = [each.source for each in done.cases]
    assert len(set(names)) == 2, names
    assert len({(run.source, run.estimator, run.basis) for run in done.end_to_end}) == len(done.end_to_end)
    with pytest.raises(UsageError, match="an unnamed device"):
        accuracy([workload], ["H100-SXM", "MI300X"])
