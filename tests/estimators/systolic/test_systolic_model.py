"""Systolic estimator: times on TPUs, reported assumptions, and errors."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from hespas.estimators import load_estimator
from hespas.estimators.systolic import Systolic, fold_cycles
from hespas.estimators.systolic.cycles import Array
from hespas.estimators.systolic.lines import clock_hz, read_lines
from hespas.graph import Diagnostics, GraphBuilder, NodeKind, OpClass, dtype
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import load_device
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, Operations, build

TABLES = Path(__file__).parents[3].parent / "shared" / "data" / "groundtruth"
V4, H100 = load_device("TPU-v4"), load_device("H100-SXM")
TPUS = ("TPU-v3", "TPU-v4", "TPU-v5e", "TPU-v5p", "TPU-v6e", "TPU-v7x")


def squares(*sizes: float, scheme: str = "f16", batch: float = 1) -> Operations:
    size = np.array(sizes, np.float64)
    labels = Labels.constant(scheme, len(size))
    return build.matmuls(labels, batch=np.full(len(size), batch), m=size, n=size, k=size)


def vectors(op: str, rows: float, columns: float, *, kind: str = "vector", scheme: str = "f16") -> Operations:
    return build.elementwise(
        kind,
        Labels.constant(scheme, 1),
        op=Labels.constant(op, 1),
        rows=np.array([rows]),
        columns=np.array([columns]),
        passes=np.array([3.0]),
        flops_per_element=np.ones(1),
    )


def said(model: Systolic, ops: Operations, device: str = "TPU-v4") -> tuple[FloatArray, set[str]]:
    found = Diagnostics()
    duration = model.predict(ops, load_device(device), found).duration_ns
    return duration, {each.code.removeprefix("systolic.") for each in found}


def devval(name: str) -> Measurements:
    path = TABLES / name
    if not path.exists():
        pytest.skip("the tables of measurements are not beside the checkout")
    return read_measurements(path, split="devval", hardware="TPU-v4")


def test_products_on_a_tpu_v4_within_the_promised_error() -> None:
    tested = devval("tpuv4_matmul.csv.gz")
    said = Systolic().predict(tested.ops, V4)
    size = np.abs(said.duration_ns / tested.duration_ns - 1)
    assert len(size) == 318
    assert size.mean() <= 0.075
    assert np.median(size) <= 0.06
    inside = (said.low_ns <= tested.duration_ns) & (tested.duration_ns <= said.high_ns)
    assert 0.85 <= inside.mean() <= 0.95


def test_elementwise_on_a_tpu_v4_within_the_promised_error() -> None:
    tested = devval("tpuv4_nongemm.csv.gz")
    said = Systolic().predict(tested.ops, V4)
    size = np.abs(said.duration_ns / tested.duration_ns - 1)
    vector, norm = tested.ops.kind.where("vector"), tested.ops.kind.where("normalization")
    assert size[vector].mean() <= 0.025
    assert size[norm].mean() <= 0.05
    # Without the name of the variant, one line per operation speaks for all ranks.
    bare = replace(tested.ops, variant=Labels.constant("", len(tested.ops)))
    anyhow = np.abs(Systolic().predict(bare, V4).duration_ns / tested.duration_ns - 1)
    assert anyhow[vector].mean() <= 0.025


@pytest.mark.parametrize("device", TPUS)
def test_time_rises_with_size_and_stays_below_the_peak(device: str) -> None:
    sizes = (8.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
    ops = squares(*sizes, scheme="bf16")
    duration, _ = said(Systolic(), ops, device)
    assert (np.diff(duration) > 0).all()
    assert (duration > 500).all()
    peak = next(peak for peak in load_device(device).peaks if peak.dtype == "bf16").flops_per_s
    assert (ops.flops / duration * 1e9 < peak).all()


def test_what_is_derived_is_said() -> None:
    assert said(Systolic(), squares(512))[1] == set()
    assert said(Systolic(), squares(512, scheme="bf16"))[1] == {"other-format"}
    assert said(Systolic(), squares(8192))[1] == {"beyond"}
    assert said(Systolic(), squares(512), "TPU-v5p")[1] == {"derived-line"}
    assert said(Systolic(), squares(512, scheme="bf16"), "TPU-v6e")[1] == {"untested-line"}
    assert said(Systolic(), vectors("add", 512, 512), "TPU-v6e")[1] == {"derived-line"}
    conv = replace(squares(512), kind=Labels.constant("convolution", 1))
    assert said(Systolic(), conv)[1] == {"convolution"}


def test_kernels_of_other_libraries_run_as_the_device_would() -> None:
    own, foreign = squares(512), replace(squares(512), variant=Labels.constant("TRTLLM 1.0 cublas", 1))
    duration, codes = said(Systolic(), foreign)
    assert codes == {"other-library"}
    assert duration[0] == said(Systolic(), own)[0][0]
    assert np.isnan(Systolic().predict(foreign, V4).low_ns[0])


def test_only_what_was_tested_has_an_interval() -> None:
    for ops, device, has in (
        (squares(512), "TPU-v4", True),
        (squares(512, scheme="bf16"), "TPU-v4", True),
        (squares(512, scheme="f32"), "TPU-v4", False),
        (squares(512, scheme="bf16"), "TPU-v6e", False),
        (squares(512), "TPU-v5e", False),
    ):
        found = Systolic().predict(ops, load_device(device))
        assert bool(np.isfinite(found.low_ns[0])) is has, (ops.scheme[0], device)
        if has:
            assert found.low_ns[0] < found.duration_ns[0] < found.high_ns[0]
    inside, beyond = (Systolic().predict(squares(size), V4) for size in (4096.0, 65536.0))
    assert beyond.high_ns[0] / beyond.duration_ns[0] > inside.high_ns[0] / inside.duration_ns[0]


def test_derived_lines_follow_clock_arrays_and_bandwidth() -> None:
    base, _ = said(Systolic(), squares(8192), "TPU-v4")
    other, _ = said(Systolic(), squares(8192), "TPU-v5p")
    # Long products are bound by cycles: the ratio is that of clocks (1.75 and 1.05 GHz, 8 arrays each).
    assert base[0] / other[0] == pytest.approx(1.75 / 1.05, rel=0.05)
    assert clock_hz(V4) == 1.05e9
    assert clock_hz(load_device("TPU-v6e")) == pytest.approx(918e12 / (2 * 256 * 256 * 2))
    assert np.isnan(clock_hz(H100))


def test_cycles_are_those_of_the_simulator() -> None:
    ops = squares(512, 1024)
    assert Systolic().cycles(ops, V4).tolist() == [14_303, 89_983]
    assert Systolic(array="4x8", dataflow="os").cycles(squares(9), H100).tolist() == [6 * (9 + 4 + 8 - 2) - 1]
    size = np.array([512.0])
    assert Systolic(arrays=4).cycles(squares(512), V4)[0] == fold_cycles(
        size, size / 4, size, Array(128, 128, "ws")
    )
    limited = Systolic(words_per_cycle=1.0, buffer_kb=1.0)
    assert limited.cycles(squares(512), V4)[0] > 14_303
    assert np.isnan(Systolic().cycles(vectors("add", 8, 8), V4)).all()
    assert np.isnan(Systolic().cycles(squares(512), H100)).all()


def test_another_array_changes_the_time_by_its_cycles() -> None:
    own, _ = said(Systolic(array="128x128", dataflow="ws"), squares(4096))
    assert own[0] == said(Systolic(), squares(4096))[0][0]
    half, codes = said(Systolic(arrays=4), squares(4096))
    assert codes == {"other-array"}
    assert 1.5 < half[0] / own[0] < 2.1
    larger, _ = said(Systolic(array="256x256"), squares(4096))
    assert larger[0] < own[0] / 2
    outputs, codes = said(Systolic(dataflow="os"), squares(4096))
    assert codes == {"other-array"}
    assert outputs[0] == pytest.approx(own[0], rel=0.1)


@pytest.mark.parametrize("name", ["Gaudi-3", "Trainium-2"])
def test_lines_of_a_tpu_are_not_moved_to_other_accelerators(name: str) -> None:
    assert said(Systolic(), squares(512), name)[1] == {"by-clock"}


def test_a_device_without_a_line_goes_by_its_clock() -> None:
    shape = V4.systolic
    assert shape is not None
    other = replace(
        V4,
        name="mine",
        kind="cpu",
        fits_of="",
        systolic=with_fields(shape, arrays=1, clock_hz=1e9),
        peaks=(*V4.peaks, *(with_fields(each, dtype="f16") for each in V4.peaks if each.dtype == "bf16")),
    )
    found = Diagnostics()
    duration = Systolic().predict(squares(512), other, found).duration_ns
    assert duration[0] == pytest.approx(other.launch_overhead_ns + 14_303)
    assert [each.code for each in found] == ["systolic.by-clock"]


def test_what_is_not_covered_is_unknown_and_said_why() -> None:
    for ops, device, code in (
        (squares(512), "H100-SXM", "no-array"),
        (vectors("add", 8, 8), "H100-SXM", "no-line"),
        (vectors("gather", 8, 8, kind="gather"), "TPU-v4", "other-kind"),
        (vectors("batch_norm", 8, 8, kind="normalization"), "TPU-v4", "no-line"),
        (squares(nan), "TPU-v4", "unknown-size"),
    ):
        duration, codes = said(Systolic(), ops, device)
        assert np.isnan(duration).all(), code
        assert code in codes
    assert "no-clock" in said(Systolic(array="8x8"), squares(512), "H100-SXM")[1]
    unknown, _ = said(Systolic(), squares(512, scheme=""))
    assert np.isnan(unknown).all()


def test_batches_and_formats() -> None:
    one, many = (said(Systolic(), squares(256, batch=batch))[0][0] for batch in (1, 64))
    assert 20 * one < many < 64 * one
    narrow, wide = (said(Systolic(), squares(2048, scheme=scheme))[0][0] for scheme in ("i8", "f32"))
    assert narrow < said(Systolic(), squares(2048))[0][0] < wide
    half, full = (said(Systolic(), vectors("add", 2048, 2048, scheme=s))[0][0] for s in ("bf16", "f32"))
    assert full == pytest.approx(2 * half, rel=0.05)
    # An operation that nobody measured goes by its bytes.
    assert said(Systolic(), vectors("atan2", 2048, 2048))[0][0] == pytest.approx(half, rel=0.5)


def test_a_narrow_dimension_lies_along_the_rows_of_tiles_and_fills_them() -> None:
    one, narrow, full, wide = (said(Systolic(), vectors("add", 4096, width))[0][0] for width in (5, 6, 8, 9))
    assert one == narrow == full < wide


def test_graphs_are_estimated_and_not_changed() -> None:
    b = GraphBuilder("g")
    tensor = b.types.add(dtype("bf16"), (512, 512))
    node = b.add_node(
        name_id=0,
        op_id=b.strings.add("stablehlo.dot_general"),
        op_class=OpClass.CONTRACTION,
        kind=NodeKind.COMPUTE,
        operands=[tensor, tensor],
        results=[tensor],
        flops=2 * 512.0**3,
        bytes_read=2 * 2 * 512.0**2,
        bytes_written=2 * 512.0**2,
        transcendentals=0.0,
    )
    b.add_contraction(
        node,
        batch=1,
        m=512,
        n=512,
        k=512,
        lhs=dtype("bf16").code,
        rhs=dtype("bf16").code,
        accumulator=dtype("f32").code,
        flops=2 * 512.0**3,
        useful_flops=2 * 512.0**3,
    )
    graph = b.build()
    done = load_estimator("systolic:array=128x128,dataflow=ws").estimate(graph, V4)
    assert done.estimators == ("systolic",)
    assert done.duration_ns[0] == said(Systolic(), squares(512, scheme="bf16"))[0][0]


@pytest.mark.parametrize(
    "options",
    [
        {"array": "4"},
        {"dataflow": "rs"},
        {"arrays": -1},
        {"arrays": 1 << 20},
        {"words_per_cycle": -1.0},
        {"words_per_cycle": nan},
        {"buffer_kb": 0.0},
    ],
)
def test_wrong_options(options: dict[str, str | int | float]) -> None:
    with pytest.raises(UsageError):
        replace(Systolic(), **options)  # type: ignore[arg-type] # options of several types, tried one by one


def test_shipped_lines_say_where_they_come_from() -> None:
    fits = read_lines("TPU-v4")
    assert len(fits) > 40
    for fit in fits:
        assert fit.samples > 0
        assert fit.error.mape < 0.2
        assert "SCALE-Sim" in fit.provenance
        assert fit.bands
        assert all(each.value >= 0 for each in fit.parameters)
    assert read_lines("H100-SXM") == ()
