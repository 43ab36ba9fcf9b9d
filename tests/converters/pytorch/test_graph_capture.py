"""Replays of captured graphs: the captured operation of each kernel, and reports of the others."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import hespas
from fixtures.make import graph_capture
from fixtures.make.graph_capture import DECODE, PIECEWISE, Replayed, decode, piecewise
from hespas.api import read, read_profiles
from hespas.cli import convert, validate
from hespas.converters.measured_ops.build import costed_ops
from hespas.converters.pytorch.captured import function_name, kernel_symbols
from hespas.graph import Diagnostics, OpGraph, Profile, Workload
from hespas.graph.errors import FormatError, UsageError
from tests.converters.pytorch.traces import DATA, Json, annotation, call, host, kernel, write_kineto

DECODED = DECODE / "decode_mi300x.replay.json.gz"
FOR_8, FOR_16 = (DECODE / f"decode_mi300x.capture_bs{size}.json.gz" for size in (8, 16))
PIECES = PIECEWISE / "piecewise_h100.replay.json.gz"
REAL = DATA / "profiles" / "graph_replay"
real = pytest.mark.skipif(not REAL.is_dir(), reason="../shared/data/profiles/graph_replay is not here")


def _profile(path: Path, *captures: Path, diagnostics: Diagnostics | None = None) -> Profile:
    found = read(path, capture=captures, diagnostics=diagnostics)
    assert isinstance(found, Profile)
    return found


def _told(profile: Profile) -> list[tuple[str, int, str, str]]:
    """Kernel, time, operation and shapes of each event."""
    text = profile.strings
    columns = (profile.kernel_id, profile.duration_ns, profile.op_id, profile.shapes_id)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(text[name], int(time), text[op], text[shapes]) for name, time, op, shapes in rows]


def _expected(events: list[Replayed]) -> list[tuple[str, int, str, str]]:
    return [
        (each.kernel, each.duration_ns, each.operator, _text(each.shapes) if each.shapes else "")
        for each in events
    ]


def _text(shapes: tuple[tuple[int, ...], ...]) -> str:
    return json.dumps([list(shape) for shape in shapes])


def test_the_recordings_are_what_their_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capture, "DECODE", tmp_path / DECODE.name)
    monkeypatch.setattr(graph_capture, "PIECEWISE", tmp_path / PIECEWISE.name)
    graph_capture.main()
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json*"))
    assert len(made) == 6
    for path in made:
        ours, theirs = ((folder / path).read_bytes() for folder in (tmp_path, DECODE.parent))
        if path.suffix == ".gz":
            ours, theirs = gzip.decompress(ours), gzip.decompress(theirs)
        assert ours == theirs


def test_kernels_of_hip_are_told_by_names_mangled_or_not() -> None:
    found = Diagnostics()
    profile = _profile(DECODED, FOR_8, FOR_16, diagnostics=found)
    assert _told(profile) == _expected(decode())
    graphs = "20 of 21"  # the kernel that nobody captured
    facts = profile.metadata
    assert f"{facts['captured_events']} of {facts['replayed_events']}" == graphs
    assert int(facts["replayed_ns"]) == sum(each.duration_ns for each in decode() if each.replayed)
    assert facts["captured_by_order_events"] == "0"
    counts = found.counts()
    assert (counts["kineto.captured"], counts["kineto.not-captured"]) == (20, 1)
    (missed,) = [each for each in found if each.code == "kineto.not-captured"]
    assert "_ZN5probe5countEPj 1 x, 1,500 ns" in missed.message
    (unused,) = [each for each in found if each.code == "kineto.capture-unused"]
    assert FOR_8.name in unused.message


def test_a_capture_of_another_size_is_not_forced() -> None:
    """The tile of two products differs: they stay apart, the rest of the graph fits."""
    profile = _profile(DECODED, FOR_8)
    left = [name for name, _, op, _ in _told(profile) if not op]
    assert len(left) == 5
    assert sum("MT32x16x256" in name for name in left) == 4


def test_kernels_of_cuda_are_told_by_what_a_warm_up_ran_and_by_order() -> None:
    found = Diagnostics()
    profile = _profile(PIECES, PIECEWISE / "capture_traces", diagnostics=found)
    assert _told(profile) == _expected(piecewise())
    assert profile.metadata["captured_by_order_events"] == "2"
    assert found.counts()["kineto.captured-by-order"] == 2
    (said,) = [each for each in found if each.code == "kineto.captured"]
    assert "8 graph launches replay 4 of the 4 graphs captured in graph_capture_rank_0" in said.message


def test_every_replay_has_operations_of_its_own() -> None:
    """Costs of two replays are not those of one."""
    costed = costed_ops(_profile(DECODED, FOR_16))
    products = [op for op in _names(costed.graph) if op == "aten::mm"]
    assert len(products) == 8
    product = 2.0 * 16 * 512 * 2048
    assert np.nansum(costed.graph.flops[np.array(_names(costed.graph)) == "aten::mm"]) == 8 * product
    assert costed.busy_ns.sum() == sum(each.duration_ns for each in decode())


def _names(graph: OpGraph) -> list[str]:
    return [graph.strings[row] for row in graph.op_id.tolist()]


def test_captured_operations_stand_in_those_around_them_and_take_no_time() -> None:
    """Modules are among those; other calls of Python are not."""
    profile = _profile(DECODED, FOR_16)
    names = {profile.strings[row] for row in profile.host.name_id.tolist()}
    assert "nn.Module: Decoder_0" in names
    assert "model.py(7): forward" not in names
    host_ops, text = profile.host, profile.strings
    for op in np.unique(profile.host_event[profile.host_event >= 0]).tolist():
        name, parent = text[int(host_ops.name_id[op])], int(host_ops.parent[op])
        if name == "aten::mm":
            assert text[int(host_ops.name_id[parent])] == "aten::linear"
            outer = int(host_ops.parent[parent])
            assert text[int(host_ops.name_id[outer])] == "nn.Module: Decoder_0"
            assert host_ops.parent[outer] == -1
        if text[int(host_ops.thread_id[op])] == "graph capture":
            assert host_ops.duration_ns[op] == 0
            assert 0 <= host_ops.start_ns[op] < profile.start_ns.max()


def test_without_a_capture_it_is_said_what_one_would_add() -> None:
    found = Diagnostics()
    profile = _profile(DECODED, diagnostics=found)
    assert found.counts()["kineto.replayed"] == 21
    assert [op for _, _, op, _ in _told(profile) if op] == ["aten::argmax"] * 2


def test_a_recording_of_capture_and_replay_is_joined_with_itself(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "t.json", [*_captured(["a", "b"]), *_replayed(["a", "b"], 500)])
    assert [op for _, _, op, _ in _told(_profile(path))] == ["op a", "op b"]


def _captured(names: list[str], *, stated: bool = True, start_us: float = 0) -> list[Json]:
    """A capture of one kernel in each of some operations."""
    events: list[Json] = [call("hipStreamBeginCapture", start_us + 1)]
    for place, name in enumerate(names):
        at = start_us + 10 * place + 5
        events.append(host(f"op {name}", at, 8, args={"Input Dims": [[2, place]], "Input type": ["float"]}))
        launch = call("hipLaunchKernel", at + 2, 1, 10_000 + place)
        launch["args"] = {"correlation": 10_000 + place, **({"kernel": name} if stated else {})}
        events.append(launch)
    return [*events, call("hipStreamEndCapture", start_us + 10 * len(names) + 5)]


def _replayed(names: list[str], start_us: float = 0, *, correlation: int = 7, stream: int = 7) -> list[Json]:
    launch = call("hipGraphLaunch", start_us, 1, correlation)
    ran = [
        kernel(name, start_us + 2 + place, 0.5, correlation, stream=stream)
        for place, name in enumerate(names)
    ]
    return [launch, *ran]


def _joined(tmp_path: Path, replay: list[Json], *captures: list[Json]) -> tuple[Profile, Diagnostics]:
    found = Diagnostics()
    paths = [write_kineto(tmp_path / f"c{place}.json", each) for place, each in enumerate(captures)]
    path = write_kineto(tmp_path / "r.json", replay)
    return _profile(path, *paths, diagnostics=found), found


def _ops(profile: Profile) -> list[str]:
    return [op for _, _, op, _ in _told(profile)]


@settings(max_examples=60)
@given(
    names=st.lists(st.sampled_from("abcde"), min_size=12, max_size=40),
    inserted=st.lists(st.integers(0, 40), max_size=3),
    dropped=st.lists(st.integers(0, 40), max_size=2),
)
def test_what_aligns_has_its_own_name_in_order(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], inserted: list[int], dropped: list[int]
) -> None:
    """Insertions and gaps cost their own links and no other's."""
    ran = [name for place, name in enumerate(names) if place not in dropped]
    for place in inserted:
        ran.insert(min(place, len(ran)), "nobody's")
    profile, found = _joined(tmp_path_factory.mktemp("t"), _replayed(ran), _captured(names))
    ops = _ops(profile)
    assert all(op in {f"op {name}", ""} for op, name in zip(ops, ran, strict=True))
    assert sum(op != "" for op in ops) == sum(name != "nobody's" for name in ran)
    places = [
        int(json.loads(shapes)[0][1]) for _, _, op, shapes in _told(profile) if op
    ]  # the place of each in the capture
    assert places == sorted(set(places))
    assert found.counts().get("kineto.not-captured", 0) == sum(name == "nobody's" for name in ran)
    assert profile.duration_ns.sum() == 500 * len(ran)


def test_without_names_only_as_many_launches_are_aligned(tmp_path: Path) -> None:
    capture = _captured(list("abcd"), stated=False)
    same, found = _joined(tmp_path, _replayed(list("wxyz")), capture)
    assert _ops(same) == ["op a", "op b", "op c", "op d"]
    assert found.counts()["kineto.captured-by-order"] == 4
    more, found = _joined(tmp_path, _replayed(list("vwxyz")), capture)
    assert _ops(more) == [""] * 5
    assert found.counts()["kineto.not-captured"] == 5


def test_streams_share_the_launches_of_a_graph(tmp_path: Path) -> None:
    capture = _captured(list("axbyc"))
    replay = _replayed(list("abc")) + _replayed(list("xy"), 1.5, stream=8)[1:]
    profile, found = _joined(tmp_path, replay, capture)
    assert sorted(_ops(profile)) == ["op a", "op b", "op c", "op x", "op y"]
    assert all(op == f"op {name}" for name, _, op, _ in _told(profile))
    assert "kineto.captured-several-streams" not in found.counts()
    twice = _replayed(list("abc")) + _replayed(list("xa"), 1.5, stream=8)[1:]
    _, found = _joined(tmp_path, twice, _captured(list("axbac")))
    assert found.counts()["kineto.captured-several-streams"] == 2


def test_streams_are_told_apart_by_the_nodes_of_the_graph(tmp_path: Path) -> None:
    """Equal kernels on two streams: the nodes are numbered as they were captured."""
    replay = _replayed(list("aa")) + _replayed(list("aa"), 1.5, stream=8)[1:]
    for event, node in zip([each for each in replay if each["cat"] == "kernel"], (1, 4, 2, 3), strict=True):
        event["args"] = {**_args(event), "graph node id": node}
    profile, _ = _joined(tmp_path, replay, _captured(list("aaaa")))
    places = [json.loads(shapes)[0][1] for _, _, _, shapes in _told(profile)]
    assert places == [0, 3, 1, 2]


def _args(event: Json) -> Json:
    return cast("Json", event["args"])


def _note(name: str) -> Json:
    return annotation(name, 0, 400)


def test_several_captures_that_fit_alike_are_a_choice_for_nobody(tmp_path: Path) -> None:
    """Unless the range around the launch states the size, as those around the captures do."""
    names = list("abc")
    two: list[list[Json]] = []
    for size in (4, 8):
        events = _captured(names)
        for event in events:
            if event["cat"] == "cpu_op":
                event["args"] = {**_args(event), "Input Dims": [[size, 2]]}
        two.append([_note(f"capture_{size}_FULL"), *events])
    profile, found = _joined(tmp_path, _replayed(names), *two)
    assert _ops(profile) == [""] * 3
    assert found.counts()["kineto.capture-ambiguous"] == 3
    said = [_note("step[DECODE bs=8]"), *_replayed(names, 5)]
    profile, found = _joined(tmp_path, said, *two)
    assert [shapes for _, _, _, shapes in _told(profile)] == ["[[8, 2]]"] * 3


def test_equal_layers_are_replayed_in_the_order_of_their_capture(tmp_path: Path) -> None:
    """Three graphs of the same kernels: each replay is of the next of them."""
    capture = [_note("capture_4_PIECEWISE")]
    for layer in range(3):
        events = _captured(list("ab"), start_us=100 * layer)
        for event in events:
            event["args"] = {**_args(event), **({"External id": layer} if event["cat"] == "cpu_op" else {})}
            if event["cat"] == "cpu_op":
                event["name"] = f"{event['name']} of layer {layer}"
        capture += events
    steps = [_replayed(list("ab"), 50 * place, correlation=20 + place) for place in range(6)]
    profile, _ = _joined(tmp_path, [event for step in steps for event in step], capture)
    expected = [f"op {name} of layer {layer}" for layer in (0, 1, 2, 0, 1, 2) for name in "ab"]
    assert _ops(profile) == expected


def test_a_captured_collective_has_its_size_and_group(tmp_path: Path) -> None:
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    capture = _captured([name])
    facts: Json = {
        "Input Dims": [[[64]], [], [], [], [], [], []],
        "Input type": ["TensorList", "", "", "", "", "", "Scalar"],
        "Concrete Inputs": ["", "", "", "", "", "", "-1"],
    }
    capture[1] = host("c10d::allreduce_", 5, 8, args=facts)
    profile, _ = _joined(tmp_path, _replayed([name]), capture)
    assert _ops(profile) == ["c10d::allreduce_"]
    assert profile.strings[int(profile.comms.kind_id[0])].lower() == "allreduce"
    record = _captured([name])
    tensors: Json = {
        "Input Dims": [[64], [], [], [], [], [], [], [], []],
        "Input type": ["c10::BFloat16", "Scalar", "", "", "", "", "", "", ""],
    }
    values = ["", "7", '["0", "default_pg"]', "0", "allreduce", "[]", "[]", "0", "1", "2"]
    record[1] = host("record_param_comms", 5, 8, args={**tensors, "Concrete Inputs": values})
    profile, _ = _joined(tmp_path, _replayed([name]), record)
    assert profile.comms.operand_bytes.tolist() == [128.0]


def test_a_replay_that_began_before_the_window_is_aligned_from_its_end(tmp_path: Path) -> None:
    names = list("abcdefghijklmnop")
    profile, _ = _joined(tmp_path, _replayed(names[6:])[1:], _captured(names))
    assert _ops(profile) == [f"op {name}" for name in names[6:]]


def test_what_fits_nothing_keeps_its_links(tmp_path: Path) -> None:
    replay = [host("around", 0, 20), *_replayed(list("xyz"), 5)]
    profile, found = _joined(tmp_path, replay, _captured(list("abc")))
    assert _ops(profile) == ["around"] * 3
    assert found.counts()["kineto.capture-unused"] == 1


# Files, folders, commands.


def test_a_folder_of_replay_and_captures_is_recognised(tmp_path: Path) -> None:
    for source, replay in ((DECODE, DECODED), (PIECEWISE, PIECES)):
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        found = Diagnostics()
        workload = read(folder, diagnostics=found)
        assert isinstance(workload, Workload)
        (graph,) = workload.classes
        events = decode() if source is DECODE else piecewise()
        assert np.nansum(graph.duration_ns) >= sum(each.duration_ns for each in events)
        assert found.counts()["kineto.captured"] == sum(
            each.replayed and each.operator != "" for each in events
        )
        assert _names(graph).count("aten::mm") == [op for _, _, op, _ in _expected(events)].count("aten::mm")
        assert replay.name not in {path.name for path in folder.rglob("*capture*")}


def test_profiles_of_a_folder_are_those_of_runs() -> None:
    for source, events in ((DECODE, decode()), (PIECEWISE, piecewise())):
        (profile,) = read_profiles(source)
        assert _told(profile) == _expected(events)


def test_commands_take_captures(tmp_path: Path) -> None:
    document = tmp_path / "a.json"
    arguments = ["accuracy", "--measured", str(DECODED), "--capture", str(FOR_16), "--hardware", "MI300X"]
    done = CliRunner().invoke(validate.app, [*arguments, "--json", str(document)])
    assert done.exit_code == 0, done.output
    assert "not-captured" in done.stderr
    assert str(FOR_16) in json.dumps(json.loads(document.read_bytes())["inputs"])
    target = tmp_path / "t.csv"
    log = tmp_path / "log.json"
    arguments = [str(DECODED), str(target), "--capture", str(DECODE), "--log-json", str(log)]
    done = CliRunner().invoke(convert.app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(log.read_bytes())["inputs"] == [str(DECODED), str(DECODE)]
    assert target.read_text().count("aten::silu") == 4


def test_a_capture_of_what_replays_nothing_is_refused(tmp_path: Path) -> None:
    profile = DECODE.parents[1] / "profiles" / "h100_streams.xplane.pb"
    with pytest.raises(UsageError, match="replays no captured graphs"):
        read(profile, capture=FOR_8)
    arguments = [str(profile), str(tmp_path / "x.csv"), "--capture", str(FOR_8)]
    assert CliRunner().invoke(convert.app, arguments).exit_code == 2
    with pytest.raises(UsageError, match="requires the trace of the replay"):
        hespas.accuracy(read(DECODED), hardware="MI300X", capture=FOR_8)
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(UsageError, match="no trace of a capture"):
        read(DECODED, capture=empty)


def test_details_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    shutil.copytree(PIECEWISE, tmp_path / "p")
    (tmp_path / "p" / "capture_traces" / "execution_details.json").write_text('{"file": 1}')
    with pytest.raises(FormatError, match="malformed list of captures"):
        read(tmp_path / "p" / PIECES.name, capture=tmp_path / "p" / "capture_traces")


# Names.


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("_Z6kernelPf", "kernel"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256EEEvPT0_", "aiter::add_rmsnorm_quant_kernel"),
        ("void aiter::add_rmsnorm_quant_kernel<__bf16, 256>(__bf16*)", "aiter::add_rmsnorm_quant_kernel"),
        ("_ZN2at6native12_GLOBAL__N_16kernelIiEEvT_", "at::native::kernel"),
        ("void at::native::(anonymous namespace)::kernel<int>(int)", "at::native::kernel"),
        ("_ZN7cutlass6KernelINS_4gemm6kernelEEEvT_", "cutlass::Kernel"),
        ("_ZSt4sortIPiEvT_S1_", "std::sort"),
        ("triton_poi_fused_0", "triton_poi_fused_0"),
        ("_Z", ""),
        ("", ""),
    ],
)
def test_the_name_of_a_function(name: str, function: str) -> None:
    assert "::".join(function_name(name)) == function


@given(st.text(max_size=40), st.text(alphabet="_ZN0123456789aEILS", max_size=40))
def test_any_text_has_a_name(text: str, mangled: str) -> None:
    assert all(function_name(text))
    assert all(function_name(f"_Z{mangled}"))


def test_two_spellings_of_one_kind_are_two_kernels() -> None:
    ours, theirs = kernel_symbols(
        ["void k<4>(int)", "_Z1hIiEvT_"], ["void k<8>(int)", "void h<int>(int)", ""]
    )
    assert ours["void k<4>(int)"] not in theirs.values()
    assert ours["_Z1hIiEvT_"] == theirs["void h<int>(int)"]
    assert theirs[""] == -1


# Real pairs.


@real
@pytest.mark.parametrize(
    ("name", "capture", "launches", "events", "replayed_ns"),
    [
        ("mi300x_sglang_qwen3-8b_decode", "capture_bs32", 1, 544, 9_656_404),
        ("mi300x_vllm_prefilldecode_piecewise", "capture", 25, 361, 149_919_755),
    ],
)
def test_real_replays_are_linked(
    name: str, capture: str, launches: int, events: int, replayed_ns: int
) -> None:
    found = Diagnostics()
    profile = _profile(REAL / f"{name}.replay.json.gz", REAL / f"{name}.{capture}.json.gz", diagnostics=found)
    assert profile.metadata["graph_launches"] == str(launches)
    assert profile.metadata["captured_events"] == profile.metadata["replayed_events"] == str(events)
    assert profile.metadata["captured_ns"] == profile.metadata["replayed_ns"] == str(replayed_ns)
    assert profile.metadata["captured_by_order_events"] == "0"
    linked = profile.duration_ns[profile.host_event >= 0].sum() / profile.duration_ns.sum()
    assert linked > 0.998
    raw = json.loads(gzip.decompress((REAL / f"{name}.replay.json.gz").read_bytes()))["traceEvents"]
    on_device = [each for each in raw if each.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    assert len(profile) == len(on_device)
    assert profile.duration_ns.sum() == sum(round(each["dur"] * 1000) for each in on_device)
    follow = f"{launches} graph launches replay {launches} of the {launches} graphs"
    assert any(each.code == "kineto.captured" and follow in each.message for each in found)
