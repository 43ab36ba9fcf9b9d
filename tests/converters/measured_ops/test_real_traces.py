"""Real traces: every nanosecond in a node, linked events have costs, and none is faster than its device."""

from __future__ import annotations

import ast
import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.converters.registry import load_format
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics, OpClass, Profile
from hespas.hardware import load_device
from tests.converters.pytorch.traces import unpack

DATA = Path(__file__).parents[3].parent / "shared" / "data" / "profiles"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")

# Trace -> least share of device time with a known cost, and its unlinked share, which the window cut off.
COVERAGE = {
    "h100_bert-small_inf": (1.0, 0.0),
    "h100_timesformer_inf": (1.0, 0.0),
    "h100_qwen1.5-0.5b_inf": (0.698, 0.302),
    "mi300x_timesformer_inf": (1.0, 0.0),
    "mi300x_qwen1.5-0.5b_inf": (0.690, 0.310),
    "mi300x_sglang_qwen3-8b_prefill": (0.9999, 0.0001),
    "a100-40_recsys_train_rank3of8": (0.42, 0.016),
}


def read(path: Path) -> Profile:
    load = load_format("kineto").read
    assert load is not None
    profile = load(path, ReadOptions(), Diagnostics())
    assert isinstance(profile, Profile)
    return profile


def costed(name: str) -> tuple[Profile, CostedOps]:
    profile = read(DATA / f"{name}.json.gz")
    return profile, costed_ops(profile, Diagnostics())


# Replay and capture -> least share of device time with a known cost; a peer's are 0.990 and 0.966.
REPLAYS = {
    ("mi300x_sglang_qwen3-8b_decode.replay", "mi300x_sglang_qwen3-8b_decode.capture_bs32"): 0.998,
    (
        "mi300x_vllm_prefilldecode_piecewise.replay",
        "mi300x_vllm_prefilldecode_piecewise.capture",
    ): 0.999,
}


@pytest.mark.parametrize("pair", REPLAYS)
def test_replays_are_costed_by_their_captures(pair: tuple[str, str]) -> None:
    replay, capture = (DATA / "graph_replay" / f"{name}.json.gz" for name in pair)
    load = load_format("kineto").read
    assert load is not None
    profile = load(replay, ReadOptions(capture=(capture,)), Diagnostics())
    assert isinstance(profile, Profile)
    found = costed_ops(profile, Diagnostics())
    assert found.busy_ns.sum() == profile.duration_ns.sum()
    assert found.coverage >= REPLAYS[pair]


@pytest.mark.parametrize("pair", REPLAYS)
def test_products_are_those_of_the_peer(pair: tuple[str, str]) -> None:
    """Matrix products of replays, in extents and number. Of experts the peer takes the hidden size for the
    inner one (3,072); the weights that the capture looks at have 2,944, and launches 46 x 287 blocks of 128.
    """
    replay, capture = (DATA / "graph_replay" / f"{name}.json.gz" for name in pair)
    load = load_format("kineto").read
    assert load is not None
    profile = load(replay, ReadOptions(capture=(capture,)), Diagnostics())
    assert isinstance(profile, Profile)
    graph = costed_ops(profile, Diagnostics()).graph
    rows, table = graph.contractions, replay.with_name(f"{pair[0].removesuffix('.replay')}.peer_summary.csv")
    plain = graph.op_class[rows.node] == OpClass.CONTRACTION
    experts = plain & (np.bincount(rows.node, minlength=len(graph))[rows.node] > 1)
    extents = np.stack((rows.m, rows.n, rows.k), axis=1)
    products = [
        (*each, flops)
        for each, flops in zip(
            extents[plain & ~experts].tolist(), graph.flops[rows.node[plain & ~experts]].tolist(), strict=True
        )
    ]
    wanted = Counter[tuple[float, ...]]()
    with table.open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["category"] == "GEMM":
                stated = ast.literal_eval(row["perf_params"])
                flops = round(float(row["gflop_per_call"]) * 1e9)
                wanted[stated["M"], stated["N"], stated["K"], flops] += int(row["operation_count"])
    assert Counter(tuple(each) for each in products) == wanted
    found = {tuple(each) for each in extents[experts].tolist()}
    assert found == ({(32768, 5888, 3072), (32768, 3072, 2944)} if "vllm" in pair[0] else set())


def assert_conserved(profile: Profile, found: CostedOps) -> None:
    assert len(found.node) == len(profile)
    assert found.busy_ns.sum() == profile.duration_ns.sum()
    by_node = np.bincount(found.node, profile.duration_ns, len(found.graph))
    assert by_node.tolist() == found.busy_ns.tolist()
    assert found.graph.duration_ns.sum() == profile.duration_ns.sum()  # no trace here overlaps within an op


@pytest.mark.parametrize("name", COVERAGE)
def test_device_time_is_conserved_and_costed(name: str) -> None:
    profile, found = costed(name)
    assert_conserved(profile, found)
    least, unlinked = COVERAGE[name]
    assert found.coverage >= least
    alone = found.host_op < 0
    assert found.busy_ns[alone].sum() <= unlinked * profile.duration_ns.sum()


def test_device_time_of_eight_ranks_is_conserved(tmp_path: Path) -> None:
    unpack(DATA / "v100_dlrm_train_8rank_kineto.tar.gz", tmp_path)
    paths = sorted(tmp_path.rglob("*.json"))
    assert len(paths) == 8
    for path in paths:
        profile = read(path)
        found = costed_ops(profile)
        assert_conserved(profile, found)
        assert len(found.graph.collectives) == 8


@pytest.mark.parametrize("name", [name for name in COVERAGE if not name.startswith("a100")])
def test_nothing_is_faster_than_the_roofline(name: str) -> None:
    """By the peaks of the data sheet, without launch overhead. What fits the cache might be; nothing is."""
    profile, found = costed(name)
    device = load_device(profile.device)
    estimate = Roofline().estimate(found.graph, device)
    bound_ns = estimate.duration_ns - device.launch_overhead_ns
    on_device = found.graph.op_class != int(OpClass.HOST)
    rows = np.flatnonzero(on_device & (found.graph.duration_ns < 0.97 * bound_ns))
    assert [found.graph.op_name(int(row)) for row in rows] == []


def test_what_is_faster_than_the_roofline_on_a100_fits_twice_its_cache() -> None:
    """Of a trace with a clock of whole microseconds: inputs come from the cache, which holds 40 MiB."""
    profile, found = costed("a100-40_recsys_train_rank3of8")
    device = load_device(profile.device)
    bound_ns = Roofline().estimate(found.graph, device).duration_ns - device.launch_overhead_ns
    too_fast = found.graph.duration_ns < 0.97 * bound_ns
    too_fast &= found.graph.op_class != int(OpClass.HOST)
    assert 0 < int(too_fast.sum()) < 0.03 * len(found.graph)
    assert found.graph.bytes_moved[too_fast].max() <= 77e6


def row_of(found: CostedOps, op: str, *shapes: tuple[int, ...]) -> int:
    """The first node of an operation with these operands."""
    graph = found.graph
    for node in range(len(graph)):
        operands = tuple(graph.types.shape(int(row)) for row in graph.operands.row(node))
        if graph.op_name(node) == op and operands == shapes:
            return node
    raise AssertionError(f"no {op} {shapes}")


def test_rows_of_timesformer_on_h100() -> None:
    _, found = costed("h100_timesformer_inf")
    graph = found.graph
    addmm = row_of(found, "aten::addmm", (2304,), (25088, 768), (768, 2304))
    assert graph.flops[addmm] == 2 * 25088 * 2304 * 768 + 25088 * 2304
    assert graph.bytes_moved[addmm] == 2 * (2304 + 25088 * 768 + 768 * 2304 + 25088 * 2304)
    bmm = row_of(found, "aten::bmm", (37632, 8, 64), (37632, 64, 8))
    assert graph.flops[bmm] == 2 * 37632 * 8 * 8 * 64
    assert graph.bytes_moved[bmm] == 2 * 37632 * (8 * 64 + 64 * 8 + 8 * 8)
    conv = row_of(found, "aten::cudnn_convolution", (128, 3, 224, 224), (768, 3, 16, 16))
    assert graph.flops[conv] == 2 * 128 * 14 * 14 * 768 * 3 * 16 * 16
    assert int((found.node == conv).sum()) == 6  # four kernels and two fills
    cat = row_of(found, "aten::cat", (8, 1, 768), (8, 3136, 768))
    assert graph.bytes_moved[cat] == 2 * 2 * 8 * 3137 * 768
    norm = row_of(found, "aten::native_layer_norm", (3136, 8, 768), (768,), (768,))
    assert graph.bytes_moved[norm] == 2 * (2 * 3136 * 8 * 768 + 2 * 768) + 2 * 4 * 3136 * 8


def test_rows_of_qwen_and_sglang_on_mi300x() -> None:
    _, found = costed("mi300x_qwen1.5-0.5b_inf")
    graph = found.graph
    mm = row_of(found, "aten::mm", (8944, 1024), (1024, 2816))
    assert (graph.flops[mm], graph.bytes_moved[mm]) == (
        2 * 8944 * 1024 * 2816,
        2 * (8944 * 1024 + 1024 * 2816 + 8944 * 2816),
    )
    sdpa = row_of(found, "aten::_flash_attention_forward", *[(16, 559, 16, 64)] * 3)
    assert int((found.node == sdpa).sum()) == 2  # the kernel, and the fill of its random state inside it
    assert graph.useful_flops[sdpa] == 16 * 16 * (559 * 560 // 2) * (4 * 64 + 4)
    _, found = costed("mi300x_sglang_qwen3-8b_prefill")
    norm = row_of(found, "aiter::rmsnorm", (122880, 128), (128,))
    assert found.graph.bytes_moved[norm] == 2 * (2 * 122880 * 128 + 128)
