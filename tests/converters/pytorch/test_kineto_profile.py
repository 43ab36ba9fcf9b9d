"""Traces of PyTorch's profiler: no device time is lost, and each event has its operation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hespas.converters import sniff
from hespas.converters.format import ReadOptions
from hespas.converters.pytorch import FORMAT_KINETO
from hespas.graph import Diagnostics, Profile
from hespas.graph.errors import FormatError

DATA = Path(__file__).parents[3].parent / "shared" / "data"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")

Event = dict[str, object]


def host(name: str, ts: float, dur: float, args: Event | None = None, *, tid: int = 1) -> Event:
    return {
        "ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur,
        "args": args or {},
    }  # fmt: skip


def launch(ts: float, correlation: int, *, tid: int = 1) -> Event:
    args = {"correlation": correlation}
    return {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": tid, "ts": ts,
        "dur": 0.5, "args": args,
    }  # fmt: skip


def kernel(name: str, ts: float, dur: float, args: Event | None = None, *, cat: str = "kernel") -> Event:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
        "args": {"stream": 7, "device": 0, **(args or {})},
    }  # fmt: skip


def write(path: Path, *events: Event, **header: object) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, **header}))
    return path


def read(path: Path) -> tuple[Profile, Diagnostics]:
    diagnostics = Diagnostics()
    assert FORMAT_KINETO.read is not None
    profile = FORMAT_KINETO.read(path, ReadOptions(), diagnostics)
    assert isinstance(profile, Profile)
    return profile, diagnostics


SHAPES: Event = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}


def test_a_kernel_belongs_to_the_innermost_operation_around_its_launch_that_has_shapes(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "t.json",
        host("aten::linear", 10, 20, {"Input Dims": [[1]]}),
        host("aten::mm", 12, 10, SHAPES),
        host("detail", 13, 5),
        host("aten::mm", 12, 10, {"Input Dims": [[9, 9]]}, tid=2),
        launch(14, 5),
        kernel("gemm", 50, 3.125, {"correlation": 5}),
    )
    profile, _ = read(path)
    assert profile.strings[int(profile.op_id[0])] == "aten::mm"
    assert profile.strings[int(profile.kernel_id[0])] == "gemm"
    assert profile.strings[int(profile.shapes_id[0])] == "[[4, 8], [8, 2]]"
    assert profile.strings[int(profile.dtype_id[0])] == '["float", "float"]'
    assert profile.duration_ns.tolist() == [3125.0]
    assert profile.start_ns.tolist() == [40_000.0]
    cause = int(profile.host_event[0])
    parent = int(profile.host.parent[cause])
    assert profile.strings[int(profile.host.name_id[parent])] == "aten::linear"


def test_a_launch_behind_the_end_of_an_inner_operation_belongs_to_the_outer_one(tmp_path: Path) -> None:
    outer = host("aten::outer", 0, 100, SHAPES)
    inner = host("aten::inner", 1, 5, SHAPES)
    profile, _ = read(
        write(tmp_path / "t.json", outer, inner, launch(50, 1), kernel("k", 60, 1, {"correlation": 1}))
    )
    assert profile.strings[int(profile.op_id[0])] == "aten::outer"


def test_external_id_stands_in_where_no_launch_is_recorded(tmp_path: Path) -> None:
    operation = host("aten::add", 0, 5, {**SHAPES, "External id": 3})
    work = kernel("k", 60, 1, {"correlation": 8, "External id": 3})
    profile, diagnostics = read(write(tmp_path / "t.json", operation, work))
    assert profile.strings[int(profile.op_id[0])] == "aten::add"
    assert diagnostics.counts()["kineto.linked-by-external-id"] == 1
    assert diagnostics.counts()["kineto.no-launch"] == 1


def test_work_that_nothing_explains_is_kept_and_reported(tmp_path: Path) -> None:
    profile, diagnostics = read(
        write(
            tmp_path / "t.json",
            kernel("k", 0, 2),
            kernel("fill", 3, 1, cat="gpu_memset"),
            kernel("c", 5, 1, cat="gpu_memcpy"),
        )
    )
    assert profile.duration_ns.tolist() == [2000.0, 1000.0, 1000.0]
    assert profile.host_event.tolist() == [-1, -1, -1]
    assert diagnostics.counts()["kineto.unlinked"] == 3
    assert ["100.0%" in entry.message for entry in diagnostics if entry.code == "kineto.unlinked"] == [True]


def test_numbers_written_as_texts_and_missing_args(tmp_path: Path) -> None:
    work = kernel("k", 0, 2)
    work["args"] = {"stream": "7", "correlation": None, "device": "x"}
    bare = kernel("k2", 5, 2)
    del bare["args"]
    profile, _ = read(write(tmp_path / "t.json", work, bare))
    assert profile.stream.tolist() == [7, -1]


def test_a_device_without_a_name_is_told_by_what_it_is(tmp_path: Path) -> None:
    devices = [{"id": 0, "name": "", "computeMajor": 9, "computeMinor": 4, "numSms": 304}]
    profile, _ = read(write(tmp_path / "t.json", kernel("k", 0, 2), deviceProperties=devices))
    assert profile.device == "AMD Instinct MI300X"


def test_devices_are_the_ones_that_events_name_however_large_their_numbers(tmp_path: Path) -> None:
    devices = [{"id": 0, "name": "first"}, {"id": 99999999999, "name": "last"}]
    events = [
        kernel("k", start, 1, {"device": device})
        for start, device in enumerate((0, 99999999999, 99999999999))
    ]
    profile, _ = read(write(tmp_path / "t.json", *events, deviceProperties=devices))
    assert profile.devices == ("first", "last")
    assert profile.device_index.tolist() == [0, 1, 1]


@pytest.mark.parametrize("world", [None, 1, 4])
def test_two_devices_of_a_process_are_neither_one_rank_nor_one_stream(
    world: int | None, tmp_path: Path
) -> None:
    """In a job each process is a rank, and its second device can only be told by its streams."""
    devices = [{"id": number, "name": "NVIDIA H100"} for number in range(4)]
    job = {} if world is None else {"distributedInfo": {"rank": 2 if world > 1 else 0, "world_size": world}}
    events = [kernel("k", start, 2, {"device": device}) for start, device in enumerate((1, 1, 3))]
    profile, diagnostics = read(write(tmp_path / "t.json", *events, deviceProperties=devices, **job))
    assert profile.device == "NVIDIA H100"
    assert profile.rank.tolist() == ([2, 2, 2] if job and world != 1 else [0, 0, 1])
    assert profile.stream.tolist() == ([7, 7, 8] if job and world != 1 else [7, 7, 7])
    assert diagnostics.counts()["kineto.several-devices"] == 2


def test_the_categories_of_the_first_profilers_are_read(tmp_path: Path) -> None:
    """PyTorch 1.8 to 1.10: ``Kernel``, ``Operator``; ids of operations under a name written small."""
    step = host("ProfilerStep#4", 0, 40)
    op = host("aten::mm", 12, 10, {**SHAPES, "External id": 3})
    call = launch(14, 5)
    later = host("aten::copy_", 30, 5, {"External id": 8})
    work = kernel("gemm", 50, 3, {"correlation": 5, "external id": 3}, cat="Kernel")
    copy = kernel("Memcpy HtoD", 60, 2, {"bytes": 64, "external id": 8}, cat="Memcpy")
    fill = kernel("Memset", 63, 1, cat="Memset")
    for event, category in ((step, "Operator"), (op, "Operator"), (later, "Operator"), (call, "Runtime")):
        event["cat"] = category
    profile, diagnostics = read(write(tmp_path / "t.json", step, op, later, call, work, copy, fill))
    assert [profile.strings[row] for row in profile.op_id.tolist()] == ["aten::mm", "aten::copy_", ""]
    assert [profile.strings[row] for row in profile.category_id.tolist()] == [
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
    ]
    assert profile.duration_ns.tolist() == [3000.0, 2000.0, 1000.0]
    assert profile.run.tolist() == [4, -1, -1]
    assert len(profile.host) == 2
    assert "kineto.other-events" not in diagnostics.counts()


def test_null_events_and_null_args_are_nothing(tmp_path: Path) -> None:
    bare = host("aten::relu", 20, 5)
    bare["args"] = None
    work = kernel("gemm", 50.5, 3.25, {"correlation": 5})
    path = write(tmp_path / "t.json", host("aten::mm", 12, 4, SHAPES), bare, launch(14, 5), work)
    document = json.loads(path.read_text())
    document["traceEvents"].insert(1, None)
    path.write_text(json.dumps(document))
    profile, _ = read(path)
    assert profile.strings[int(profile.op_id[0])] == "aten::mm"
    assert profile.duration_ns.tolist() == [3250.0]
    assert len(profile.host) == 2


@pytest.mark.parametrize("text", ["[null]", "[1, null]", '[{"ph": 3}, null]'])
def test_what_is_no_event_beside_a_null_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(f'{{"schemaVersion": 1, "traceEvents": {text}}}')
    with pytest.raises(FormatError):
        read(path)


def test_events_written_twice_count_once_and_it_is_told(tmp_path: Path) -> None:
    """Equal in time, place and ids: not two kernels of a graph, nor two of a coarse clock."""
    events = [
        host("aten::mm", 12, 10, {**SHAPES, "External id": 3}),
        launch(14, 5),
        kernel("gemm", 50, 3, {"correlation": 5}),
        kernel("node", 60, 2, {"correlation": 9, "graph node id": 1}),
        kernel("node", 60, 2, {"correlation": 9, "graph node id": 2}),
        kernel("short", 70, 0, {"correlation": 10}),
    ]
    once, quiet = read(write(tmp_path / "once.json", *events))
    twice, diagnostics = read(write(tmp_path / "twice.json", *events, *events))
    assert twice.duration_ns.sum() == once.duration_ns.sum() == 7000.0
    assert len(twice.host) == 1
    assert "kineto.repeated" not in quiet.counts()
    assert diagnostics.counts()["kineto.repeated"] == 5
    [told] = [each.message for each in diagnostics if each.code == "kineto.repeated"]
    assert told.endswith("cpu_op 1, cuda_runtime 1, kernel 3")


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="neither device events nor host operations"):
        read(write(tmp_path / "t.json"))


@pytest.mark.parametrize("damage", [{"ts": None}, {"ts": "soon"}, {"dur": "NaN"}, {"args": 5}])
def test_an_event_that_makes_no_sense_is_refused(damage: Event, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        read(write(tmp_path / "t.json", {**kernel("k", 0, 2), **damage}))


TRACES = {
    "h100_bert-small_inf": (309_437, 1.0),
    "h100_qwen1.5-0.5b_inf": (45_647_300, 0.699),
    "h100_timesformer_inf": (158_433_174, 1.0),
    "mi300x_qwen1.5-0.5b_inf": (43_062_802, 0.691),
    "mi300x_timesformer_inf": (119_852_883, 1.0),
    "mi300x_sglang_qwen3-8b_prefill": (492_811_563, 1.0),
    "a100-40_recsys_train_rank3of8": (501_567_000, 0.985),
}


@absent
@pytest.mark.parametrize("name", TRACES)
def test_device_time_of_real_traces_is_kept_to_the_nanosecond(name: str) -> None:
    import gzip

    path = DATA / "profiles" / f"{name}.json.gz"
    assert sniff(path).name == "kineto"
    events = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))["traceEvents"]
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"}
    micros = [event["dur"] for event in events if event.get("ph") == "X" and event.get("cat") in wanted]
    profile, _ = read(path)
    total_ns, linked_share = TRACES[name]
    assert len(profile) == len(micros)
    assert int(profile.duration_ns.sum()) == sum(round(dur * 1000) for dur in micros) == total_ns
    linked = profile.duration_ns[profile.host_event >= 0].sum() / profile.duration_ns.sum()
    assert linked == pytest.approx(linked_share, abs=1e-3)
    assert np.isfinite(profile.start_ns).all()


@pytest.mark.parametrize(
    ("rank", "size", "read_as", "told"),
    [
        (1 << 40, 4, 0, True),
        ("x", 4, 0, True),
        (-5, 4, 0, True),
        (2, 0, 2, True),
        (7, 4, 7, True),
        (2, "many", 2, True),
        (2, 4, 2, False),
        (2, None, 2, False),
        (None, None, 0, False),
    ],
)
def test_a_rank_that_cannot_be_is_told(
    rank: object, size: object, read_as: int, told: bool, tmp_path: Path
) -> None:
    stated = {"rank": rank, "world_size": size}
    path = write(tmp_path / "t.json", kernel("gemm", 1, 2), distributedInfo=stated)
    profile, diagnostics = read(path)
    assert profile.rank.tolist() == [read_as]
    assert diagnostics.counts().get("kineto.impossible-rank", 0) == int(told)


def test_less_than_no_time_is_no_part_of_the_device_time(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json", host("aten::mm", 0, 5, SHAPES), launch(1, 1),
        kernel("linked", 10, 30, {"correlation": 1}), kernel("lost", 50, 10), kernel("back", 70, -20),
    )  # fmt: skip
    profile, diagnostics = read(path)
    assert profile.duration_ns.tolist() == [30_000.0, 10_000.0, -20_000.0]
    told = [each.message for each in diagnostics if each.code == "kineto.unlinked"]
    assert "25.0% of the device time" in told[0]


def test_the_event_with_a_bad_time_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json", host("a", 0, 5), kernel("ok", 1, 2), kernel("gemm", 1, 2) | {"ts": None}
    )
    with pytest.raises(FormatError, match=r"'gemm' .* null is not a time") as caught:
        read(path)
    assert caught.value.position == "event 3, field 'ts'"


def test_a_duration_that_nobody_knows_counts_as_none(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json", kernel("ok", 1, 2), kernel("gemm", 1, 2) | {"dur": 18446744073709551.615}
    )
    profile, diagnostics = read(path)
    assert profile.duration_ns.tolist() == [2_000.0, 0.0]
    assert diagnostics.counts()["kineto.overflowed-duration"] == 1


@pytest.mark.parametrize("wrong", [1, 3])
def test_args_that_make_no_sense_say_of_which_event(wrong: int, tmp_path: Path) -> None:
    events = [host("aten::mm", 0, 9, SHAPES), launch(1, 5), kernel("k", 2, 5), host("aten::mm", 9, 9, SHAPES)]
    events[wrong]["args"] = [1]
    with pytest.raises(FormatError, match="malformed args of an event") as caught:
        read(write(tmp_path / "trace.json", *events))
    assert caught.value.position == f"event {wrong + 1}, field 'args'"
