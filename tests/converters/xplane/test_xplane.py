"""Traces of XLA's profiler: no device time is lost or counted twice, and each event has its operation."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fixtures.make.xspace import Event, Line, Plane, Value, encode_space
from hespas.converters import load_format, sniff
from hespas.converters.format import ReadOptions
from hespas.converters.xplane import FORMAT, FORMAT_JSON
from hespas.graph import Diagnostics, Profile, Workload

ROOT = Path(__file__).parents[3]
PROFILES = ROOT / "fixtures" / "profiles"
DATA = ROOT.parent / "shared" / "data"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")
LLAMA1 = DATA / "workloads" / "llama1.xplane.pb"
LLAMA4 = DATA / "workloads" / "llama_n4.xplane.pb"
MI300X = DATA / "profiles" / "mi300x_jax_conv3d.xplane.pb"
TPU = PROFILES / "tpu_v4_megacore.xplane.pb"
TPU_JSON = PROFILES / "tpu_v4_megacore.trace.json.gz"
GPU = PROFILES / "h100_streams.xplane.pb"


def read(path: Path, options: ReadOptions | None = None) -> tuple[Profile, Diagnostics]:
    diagnostics = Diagnostics()
    reader = FORMAT_JSON.read if ".json" in path.name else FORMAT.read
    assert reader is not None
    profile = reader(path, options or ReadOptions(), diagnostics)
    assert isinstance(profile, Profile)
    return profile, diagnostics


def total_ps(profile: Profile) -> int:
    return int(np.rint(profile.duration_ns * 1000).astype(np.int64).sum())


def texts(profile: Profile, column: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[str]:
    return [profile.strings[row] for row in column.tolist()]


def by_op(profile: Profile) -> dict[str, float]:
    """Time of each operation."""
    found: dict[str, float] = {}
    for name, duration in zip(texts(profile, profile.op_id), profile.duration_ns.tolist(), strict=True):
        found[name] = found.get(name, 0.0) + duration
    return found


# --- recorded traces


@absent
def test_every_operation_of_every_run_of_a_cpu_step_is_there() -> None:
    profile, diagnostics = read(LLAMA1)
    assert len(profile) == 1025
    ops = texts(profile, profile.op_id)
    assert len(set(ops)) == 205
    pairs = set(zip(ops, profile.run.tolist(), strict=True))
    assert len(pairs) == 1025, "each operation once in each of 5 runs"
    assert sorted(set(profile.run.tolist())) == [0, 1, 2, 3, 4]
    assert set(texts(profile, profile.module_id)) == {"jit_step"}
    assert set(texts(profile, profile.category_id)) == {"thunk"}
    assert profile.devices == ("CPU",)
    assert total_ps(profile) == 2_233_647_236_000
    assert len(profile.host) == 7017 - 1025
    assert set(diagnostics.counts()) == {"xplane.device-time"}


@absent
def test_each_device_of_a_partitioned_step_has_its_own_events() -> None:
    profile, _ = read(LLAMA4)
    assert np.bincount(profile.rank).tolist() == [771] * 4
    assert total_ps(profile) == 2_603_253_437_000
    assert np.bincount(profile.run).tolist() == [1028] * 3
    kinds = {profile.strings[row] for row in profile.comms.kind_id.tolist()}
    assert kinds == {"all-gather", "all-reduce"}
    assert len(profile.comms) == 4 * 3 * 35, "23 all-gathers and 12 all-reduces of 4 devices in 3 runs"


_OTHER_READER = """
import sys
from jax.profiler import ProfileData
expected_ps, events = 0, 0
for plane in ProfileData.from_file(sys.argv[1]).planes:
    for line in plane.lines:
        for event in line.events:
            is_work = plane.name.startswith("/device:") or any(key == "hlo_op" for key, _ in event.stats)
            expected_ps += round(event.duration_ns * 1000) if is_work else 0
            events += 1
print([expected_ps, events])
"""


@absent
@pytest.mark.parametrize("path", [LLAMA1, LLAMA4, MI300X], ids=lambda path: path.name)
def test_time_agrees_with_another_reader(path: Path) -> None:
    pytest.importorskip("jax")
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_READER, str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode == -signal.SIGABRT:  # as that of jaxlib 0.10.2 on Python 3.13
        pytest.skip("JAX's reader aborts here")
    assert done.returncode == 0, done.stderr
    expected_ps, events = json.loads(done.stdout)
    profile, _ = read(path)
    assert total_ps(profile) == expected_ps
    assert len(profile) + len(profile.host) == events


@absent
def test_kernels_and_copies_of_a_gpu() -> None:
    profile, diagnostics = read(MI300X)
    assert profile.devices == ("AMD Instinct MI300X",)
    kernels = profile.rank == 7
    assert int(kernels.sum()) == 25
    assert round(float(profile.duration_ns[kernels].sum()), 3) == 3_586_493.0
    assert set(texts(profile, profile.category_id[~kernels])) == {"memcpy"}
    assert profile.bytes_moved[~kernels].tolist() == [655_360.0] * 53
    names = set(zip(texts(profile, profile.kernel_id), texts(profile, profile.op_id), strict=True))
    assert ("Im3d2Col", "cudnn-conv.1.0") in names
    assert np.bincount(profile.run[kernels]).tolist() == [5] * 5
    assert bool((profile.host_event >= 0).all())
    assert diagnostics.counts()["xplane.no-op"] == 53
    assert {name for name in profile.attachments if "normal" in name} == {
        "hlo/jit__normal(9)",
        "hlo/jit__normal(11)",
    }


@absent
@pytest.mark.parametrize("path", [LLAMA1, LLAMA4, MI300X], ids=lambda path: path.name)
def test_the_programs_in_the_file_are_hlo_that_holds_the_operations(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("jaxlib")
    profile, _ = read(path)
    hlo = load_format("hlo")
    assert hlo.read is not None
    for module in {name for name in texts(profile, profile.module_id) if name}:
        file = tmp_path / "module.pb"
        file.write_bytes(profile.attachments[f"hlo/{module}"])
        assert sniff(file).name == "hlo"
        assert isinstance(hlo.read(file, ReadOptions(), Diagnostics()), Workload)
        ops = {name for name in texts(profile, profile.op_id) if name}
        assert not {name for name in ops if name.encode() not in profile.attachments[f"hlo/{module}"]}


@absent
@pytest.mark.parametrize("path", [LLAMA1, LLAMA4, MI300X], ids=lambda path: path.name)
def test_nothing_names_the_machine(path: Path) -> None:
    profile, _ = read(path)
    assert not [value for value in profile.metadata.values() if "/" in value or "vultr" in value]


# --- written traces: TPU


def test_two_cores_of_a_megacore_are_one_device() -> None:
    profile, diagnostics = read(TPU)
    assert profile.devices == ("TPU v4",)
    assert set(profile.rank.tolist()) == {0}
    ops = by_op(profile)
    assert ops["dot.3"] == pytest.approx(6 * 1200.25), "the slower core counts"
    assert ops["copy.1"] == 2 * 700
    assert ops["all-reduce.2"] == 2 * 2000
    assert ops["while.7"] == pytest.approx(2 * 3 * 100), "what its body leaves"
    assert total_ps(profile) == 2 * 7_500_000 + 6 * 250
    assert set(profile.run.tolist()) == {0, 1}
    dots = np.array([name == "dot.3" for name in texts(profile, profile.op_id)])
    assert profile.bytes_moved[dots].tolist() == [2 * 98_304.0] * 6
    assert diagnostics.counts()["xplane.merged-cores"] == 18
    assert "xplane.lone-core" not in diagnostics.counts()


def test_cores_that_nothing_calls_a_megacore_are_two_devices_and_it_is_told() -> None:
    profile, diagnostics = read(TPU_JSON)
    assert set(profile.rank.tolist()) == {0, 1}
    assert diagnostics.counts()["jax-trace.megacore-not-stated"] == 1
    merged, told = read(TPU_JSON, ReadOptions(num_devices=1))
    assert set(merged.rank.tolist()) == {0}
    assert "jax-trace.megacore-not-stated" not in told.counts()


@pytest.mark.parametrize(
    ("first", "second", "ranks", "told"), [(1, 1, 1, 0), (1, None, 2, 1), (1, 0, 2, 0), (0, 0, 2, 0)]
)
def test_events_that_use_the_megacore_say_so_where_planes_do_not(
    first: int, second: int | None, ranks: int, told: int, tmp_path: Path
) -> None:
    """A trace.json.gz has no facts of planes, but events may state what they use."""
    document = json.loads(gzip.decompress(TPU_JSON.read_bytes()))
    stated = {1: first, 2: second}
    for event in document["traceEvents"]:
        uses = stated.get(event.get("pid"))
        if event.get("ph") == "X" and uses is not None and event.get("tid") == 3:
            event["args"]["uses_megacore"] = str(uses)
    path = tmp_path / "t.trace.json"
    path.write_text(json.dumps(document))
    profile, diagnostics = read(path)
    assert len(set(profile.rank.tolist())) == ranks
    assert diagnostics.counts().get("jax-trace.megacore-not-stated", 0) == told
    if ranks == 1:
        assert total_ps(profile) == total_ps(read(TPU)[0])


def test_operations_around_others_are_wrappers_and_transfers_beside_them_do_not_count() -> None:
    profile, diagnostics = read(TPU)
    categories = dict(zip(texts(profile, profile.op_id), texts(profile, profile.category_id), strict=True))
    assert categories == {
        "copy.1": "XLA Ops",
        "dot.3": "XLA Ops",
        "tanh.4": "XLA Ops",
        "all-reduce.2": "XLA Ops",
        "while.7": "wrapper",
    }
    assert set(texts(profile, profile.module_id)) == {"jit_train_step"}
    assert np.bincount(profile.run).tolist() == [9, 9]
    assert diagnostics.counts()["xplane.other-lines"] == 10
    assert [profile.strings[row] for row in profile.comms.kind_id.tolist()] == ["all-reduce"] * 2


def test_facts_about_operations_are_attached() -> None:
    profile, _ = read(TPU)
    facts = json.loads(profile.attachments["op-facts.json"])
    dot = facts["modules"]["jit_train_step"]["dot.3"]
    assert dot["tf_op"] == "jit(train_step)/jit(main)/while/body/dot_general:"
    assert dot["hlo_category"] == "convolution fusion"
    assert dot["model_flops"] == 2 * 2_097_152
    assert dot["long_name"].startswith("%dot.3 = f32[128,128]{1,0} dot(")
    assert profile.metadata["libtpu_version"] == "0.0.30"


def test_the_json_of_the_same_trace_agrees(tmp_path: Path) -> None:
    merged, _ = read(TPU)
    profile, diagnostics = read(TPU_JSON)
    assert sorted(set(profile.rank.tolist())) == [0, 1], "it does not say that the cores work as one"
    assert total_ps(profile) == 2 * 15_000_000, "as XProf counts each core"
    assert np.bincount(profile.run).tolist() == [18, 18]
    one, _ = read(TPU_JSON, ReadOptions(num_devices=1))
    assert by_op(one) == by_op(merged)
    assert np.array_equal(one.start_ns, merged.start_ns)
    assert np.array_equal(one.bytes_moved, merged.bytes_moved, equal_nan=True)
    assert json.loads(one.attachments["op-facts.json"]) == json.loads(merged.attachments["op-facts.json"])
    assert diagnostics.counts()["jax-trace.other-lines"] == 10


# --- written traces: GPU


def test_streams_count_and_what_is_derived_of_them_does_not() -> None:
    profile, diagnostics = read(GPU)
    assert profile.devices == ("NVIDIA H100 80GB HBM3",)
    assert np.bincount(profile.rank).tolist() == [9, 9]
    per_device = 4_000_000 + 900_000 + 4_000_007 + 901_000 + 1_000_000 + 600_000 + 500_000 + 300_000 + 50_000
    assert total_ps(profile) == 2 * per_device, "kernels that run side by side count in full"
    assert diagnostics.counts()["xplane.other-lines"] == 8
    assert "xplane.wrapper" not in diagnostics.counts()


def test_programs_of_one_name_are_told_apart_and_runs_counted() -> None:
    profile, _ = read(GPU)
    rows = np.flatnonzero((profile.rank == 1) & (profile.module_id > 0))
    told = list(
        zip(
            texts(profile, profile.module_id[rows]),
            texts(profile, profile.op_id[rows]),
            profile.run[rows].tolist(),
            strict=True,
        )
    )
    assert told == [
        ("jit_fn(3)", "gemm_fusion_dot.1", 0),
        ("jit_fn(3)", "loop_add_fusion", 0),
        ("jit_fn(3)", "gemm_fusion_dot.1", 1),
        ("jit_fn(3)", "loop_add_fusion", 1),
        ("jit_fn(5)", "fusion.8", 0),
        ("jit_fn(5)", "fusion.9", 0),
        ("jit_fn(5)", "all-reduce-start.1", 0),
    ]


def test_launches_bytes_and_faults_of_a_gpu_trace() -> None:
    profile, diagnostics = read(GPU)
    first = int(profile.host_event[0])
    assert profile.strings[int(profile.host.name_id[first])] == "cuLaunchKernel"
    parent = int(profile.host.parent[first])
    assert profile.strings[int(profile.host.name_id[parent])] == "PjitFunction(fn)"
    copies = [name in ("memcpy", "memset") for name in texts(profile, profile.category_id)]
    assert profile.bytes_moved[copies].tolist() == [4096.0, 1024.0] * 2
    counts = diagnostics.counts()
    assert counts["xplane.no-launch"] == 2
    assert counts["xplane.unknown-kind"] == 1
    assert counts["xplane.profiler-message"] == 1
    assert profile.metadata["first_event_ns"] == "1700000000000000000"
    assert profile.start_ns[0] == 40_000.0


# --- written traces: what XProf counts, and no more; its own totals stand in each case


def written(tmp_path: Path, *planes: Plane) -> tuple[Profile, Diagnostics]:
    path = tmp_path / "written.xplane.pb"
    path.write_bytes(encode_space(list(planes), [], []))
    return read(path)


def gpu_kernel(name: str, offset_ps: int, duration_ps: int, correlation: int) -> Event:
    facts: dict[str, Value] = {"correlation_id": correlation, "hlo_op": name, "hlo_module": "jit_step"}
    return Event(name, offset_ps, duration_ps, {**facts, "program_id": 3, "kernel_details": "regs:32"})


def host_launch(name: str, offset_ps: int, duration_ps: int, correlation: int) -> Event:
    facts: dict[str, Value] = {"hlo_op": name, "hlo_module": "jit_step", "correlation_id": correlation}
    return Event(name, offset_ps, duration_ps, {**facts, "device_ordinal": 0, "program_id": 3})


@pytest.mark.parametrize("kernels", [True, False])
def test_beside_a_device_what_names_an_operation_on_the_host_is_its_launch(
    kernels: bool, tmp_path: Path
) -> None:
    """XProf: 7 us of kernels. The launches took 9 us, and five lines derived of the stream repeat it."""
    work = [gpu_kernel("fusion.1", 0, 4_000_000, 1), gpu_kernel("gemm.2", 5_000_000, 3_000_000, 2)]
    again = [Event(event.name, event.offset_ps, event.duration_ps) for event in work]
    derived = ("XLA Ops", "TensorFlow Ops", "TensorFlow Name Scope", "Steps", "XLA Ops - from #13")
    lines = [Line(13, "Stream #13(Compute)", 100, work)]
    lines.extend(Line(0xDEADBEEF + place, name, 100, again) for place, name in enumerate(derived))
    calls = [host_launch("fusion.1", 0, 5_000_000, 1), host_launch("gemm.2", 6_000_000, 4_000_000, 2)]
    profile, diagnostics = written(
        tmp_path,
        Plane(1, "/host:CPU", {}, [Line(7, "pool/7", 90, calls)]),
        Plane(2, "/device:GPU:0", {"core_count": 132}, lines if kernels else []),
    )
    assert total_ps(profile) == (7_000_000 if kernels else 0)
    assert texts(profile, profile.host.name_id) == ["fusion.1", "gemm.2"]
    assert profile.host_event.tolist() == ([0, 1] if kernels else [])
    assert diagnostics.counts().get("xplane.no-device-events", 0) == (0 if kernels else 1)


def test_durations_of_a_tpu_are_those_of_its_own_clock(tmp_path: Path) -> None:
    """XProf: 6.5 us, what the core says, while the file places the events by the clock of the host."""
    common: dict[str, Value] = {"program_id": 3, "symbol_id": 4, "hlo_category": "fusion"}
    clocks: list[dict[str, Value]] = [
        {"device_offset_ps": 1_000_000, "device_duration_ps": 4_000_000},
        {"device_offset_ps": 6_000_000, "device_duration_ps": 2_500_000},
    ]
    ops = [
        Event("fusion.1", 0, 4_100_000, clocks[0], "%fusion.1 = f32[8]{0} fusion()", common),
        Event("fusion.2", 5_100_000, 2_600_000, clocks[1], "%fusion.2 = f32[8]{0} fusion()", common),
    ]
    transfer = Event("copy-start.3", 0, 9_000_000, {"device_offset_ps": 0, "device_duration_ps": 9_000_000})
    lines = [Line(1, "XLA Ops", 5_000, ops), Line(2, "Async XLA Ops", 5_000, [transfer])]
    profile, diagnostics = written(tmp_path, Plane(2, "/device:TPU:0", {"has_megacore": 0}, lines))
    assert profile.duration_ns.tolist() == [4_000.0, 2_500.0]
    assert profile.start_ns.tolist() == [0.0, 5_000.0]
    assert diagnostics.counts()["xplane.other-lines"] == 1


def test_names_that_are_no_unicode_are_read(tmp_path: Path) -> None:
    calls = [Event(b"annotation \xff", 100, 200)]
    profile, _ = written(tmp_path, Plane(0, "/host:CPU", {}, [Line(1, "python", 0, calls)]))
    assert texts(profile, profile.host.name_id) == ["annotation \ufffd"]


# --- telling formats apart


@pytest.mark.parametrize(
    ("path", "name"), [(TPU, "xplane"), (GPU, "xplane"), (TPU_JSON, "jax-trace")], ids=str
)
def test_traces_are_told_by_content(path: Path, name: str, tmp_path: Path) -> None:
    nameless = tmp_path / "nameless"
    nameless.write_bytes(path.read_bytes())
    assert sniff(nameless).name == name
    nameless.write_bytes(
        gzip.compress(path.read_bytes()) if name == "xplane" else gzip.decompress(path.read_bytes())
    )
    assert sniff(nameless).name == name


@absent
def test_traces_of_others_stay_theirs() -> None:
    for path in (LLAMA1, LLAMA4, MI300X):
        assert sniff(path).name == "xplane"
    for path in sorted((DATA / "profiles").glob("*_inf.json.gz")):
        assert sniff(path).name == "kineto"
