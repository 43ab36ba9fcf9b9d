"""Kernels that frameworks run one by one: effects of strides, odd rows and few rows on time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators.calibrated import Calibrated
from hespas.estimators.forms import form_time_ns, machine_of
from hespas.estimators.kernels import KERNELS
from hespas.graph import Diagnostics
from hespas.hardware import load_device
from hespas.hardware.kernel_shares import COMMON_FLOOR_NS, common_fits
from hespas.hardware.library import fits_of_user
from hespas.operations import SCATTERED, STRIDED, Labels, Operations, build, canonical_op

H100 = load_device("H100-SXM")
START = {each.name: each.start for each in KERNELS.parameters}


def kernels(
    kind: str, op: str, rows: float, columns: float, *, strided: float = 0.0, scheme: str = "bf16"
) -> Operations:
    made = build.elementwise(
        kind,
        Labels.constant(scheme, 1),
        op=Labels.constant(op, 1),
        rows=np.array([rows]),
        columns=np.array([columns]),
        passes=np.full(1, 2.0),
        flops_per_element=np.ones(1),
    )
    return replace(made, dims={**made.dims, STRIDED: np.full(1, strided)})


def time_ns(ops: Operations) -> float:
    return float(form_time_ns(KERNELS, START, ops, machine_of(H100, ops.kind[0], ops.scheme[0]))[0])


def test_elements_that_are_walked_take_what_their_addresses_do_whatever_their_type() -> None:
    dense = time_ns(kernels("vector", "add", 25088, 768))
    walked = time_ns(kernels("vector", "add", 25088, 768, strided=1.0))
    lanes = machine_of(H100, "vector", "bf16").lane_flops_per_ns
    assert walked > 1.3 * dense
    assert walked > 25088 * 768 * START["walked"] / lanes


@pytest.mark.parametrize(("kind", "op"), [("move", "cat"), ("gather", "index_select"), ("vector", "copy")])
def test_what_gathers_concatenates_or_converts_walks(kind: str, op: str) -> None:
    assert time_ns(kernels(kind, op, 8944, 1024)) > 1.2 * time_ns(kernels("move", "copy", 8944, 1024))


@pytest.mark.parametrize(("columns", "is_faster"), [(1024, True), (1023, False)])
def test_whole_rows_that_an_index_selects_are_read_in_vectors(columns: float, is_faster: bool) -> None:
    rows, elements = (
        time_ns(replace(kernels("gather", op, 8944, columns), flops=np.zeros(1)))
        for op in ("row_gather", "gather")
    )
    assert (rows < 0.8 * elements) == is_faster


@pytest.mark.parametrize(
    ("kind", "op", "count"),
    [("normalization", "native_layer_norm_backward", 2), ("reduction", "asynchronous_complete_cumsum", 3)],
)
def test_operations_of_several_kernels_start_each(kind: str, op: str, count: int) -> None:
    columns = KERNELS.columns(kernels(kind, op, 1, 128), machine_of(H100, kind, "bf16"))
    assert columns["starts"].tolist() == [count]


def test_a_check_of_indices_starts_a_group_for_each_bag() -> None:
    check, total = (time_ns(kernels("reduction", op, 1e6, 2)) for op in ("bounds_check_indices", "sum"))
    started = 1e6 / machine_of(H100, "reduction", "bf16").units * START["row_ns"] * 0.3
    assert check - total == pytest.approx(started, rel=0.1)


def test_shortening_floats_has_a_kernel_of_vectors() -> None:
    f32 = time_ns(kernels("vector", "copy", 8944, 1024, scheme="f32"))
    assert f32 == pytest.approx(time_ns(kernels("vector", "relu", 8944, 1024, scheme="f32")))


def test_arithmetic_counts_in_fusions_alone() -> None:
    """Peaks count two FLOPs of a fused multiplication and addition: without these it takes twice as long."""
    lanes = machine_of(H100, "vector", "bf16").lane_flops_per_ns
    elements = 25088 * 4096
    for op, inner in (("add", 0.0), ("fusion", 2.0)):
        light = kernels("vector", op, 25088, 4096)
        heavy = replace(light, flops=np.full(1, 400.0 * elements))
        roots = replace(light, transcendentals=np.full(1, 50.0 * elements))
        expected = inner * 400 * elements / lanes
        assert time_ns(heavy) - time_ns(light) == pytest.approx(expected, rel=0.4)
        assert time_ns(roots) == pytest.approx(time_ns(heavy), rel=0.05)


def test_rows_that_no_vector_divides_are_walked_twice() -> None:
    even = time_ns(kernels("normalization", "softmax", 301152, 3136))
    odd = time_ns(kernels("normalization", "softmax", 301152, 3137))
    assert odd > 1.5 * even


def test_one_unit_reads_a_long_row() -> None:
    few = time_ns(kernels("reduction", "argmax", 15, 151936, scheme="f32"))
    many = time_ns(kernels("reduction", "argmax", 15 * 1000, 151.936, scheme="f32"))
    assert few > 3 * many


def test_devices_of_recorded_vendors_answer_for_kernels_and_a_users_own_fits_come_first() -> None:
    ops = kernels("vector", "gelu", 18816, 4096)
    unknown = replace(load_device("L40S"), own_fits=(), fits_of="")
    assert common_fits(unknown)
    assert not common_fits(load_device("TPU-v4"))
    said = Calibrated().predict(ops, unknown).duration_ns[0]
    assert 0.5 < said * 864 / (18816 * 4096 * 4) < 4
    [mine] = [fit for fit in common_fits(H100) if (fit.kind, fit.op) == ("vector", "gelu")]
    starts = {"t0_ns": 9e5}
    slow = replace(
        mine,
        parameters=tuple(replace(each, value=starts.get(each.name, each.value)) for each in mine.parameters),
    )
    own = replace(unknown, own_fits=(slow,))
    assert fits_of_user(own) == (slow,)
    assert Calibrated().predict(ops, own).duration_ns[0] > 9e5


def of_bandwidth(name: str, ops: Operations) -> float:
    device = load_device(name)
    return float(
        ops.bytes_moved[0]
        / Calibrated().predict(ops, device).duration_ns[0]
        / (device.main_memory.bandwidth_bytes_per_s / 1e9)
    )


@pytest.mark.parametrize("name", ["P4", "T4", "P100-PCIe-16GB"])
def test_what_a_devices_own_table_reached_comes_before_what_others_have_in_common(name: str) -> None:
    """The table: memory at 0.77 to 0.79 of the data sheet; and some 25 us of a host in every time."""
    device = load_device(name)
    [mine] = [fit for fit in device.fits if (fit.kind, fit.op) == ("vector", "add")]
    large = kernels("vector", "add", 25088, 4096, scheme="f32_full")
    assert of_bandwidth(name, large) == pytest.approx(mine.value("memory"), rel=0.05)
    small = kernels("vector", "add", 1, 64, scheme="f32_full")
    assert mine.value("t0_ns") > 20e3
    assert Calibrated().predict(small, device).duration_ns[0] < 6e3
    found = Diagnostics()
    Calibrated().predict(small, device, found)
    assert "calibrated.event-times" not in found.counts()


def test_a_table_of_few_operations_speaks_of_these_alone() -> None:
    """The A100-SXM-80GB sums at 0.86 of the data sheet; it rotates and gates at half of it."""
    assert of_bandwidth("A100-SXM-80GB", kernels("vector", "add", 25088, 4096, scheme="f16")) < 0.88
    assert of_bandwidth("A100-SXM-80GB", kernels("vector", "tanh", 25088, 4096, scheme="f16")) > 0.7


def test_recordings_of_the_device_itself_come_before_its_table() -> None:
    ops = kernels("vector", "add", 25088, 4096, scheme="f32_full")
    [recorded] = [fit for fit in common_fits(H100) if (fit.kind, fit.op) == ("vector", "add")]
    machine = machine_of(H100, "vector", "f32_full")
    values = {each.name: each.value for each in recorded.parameters}
    said = Calibrated().predict(ops, H100).duration_ns
    assert said == pytest.approx(form_time_ns(KERNELS, values, ops, machine), rel=1e-6)


def test_fits_that_ship_are_nobodys_own() -> None:
    for name in (H100.name, "mine"):
        assert fits_of_user(replace(H100, name=name, own_fits=H100.fits, fits_of="")) == ()


def test_a_running_sum_of_a_whole_tensor_is_cut_into_parts() -> None:
    whole = time_ns(kernels("reduction", "cumsum", 1, 1e6, scheme="i32"))
    row = time_ns(kernels("reduction", "sum", 1, 1e6, scheme="i32"))
    assert row > 3 * whole


def test_starts_of_a_vendors_file_go_with_the_shortest_kernel_that_a_device_states() -> None:
    ops = kernels("vector", "gelu", 1, 64)
    unknown = replace(load_device("L40S"), own_fits=(), fits_of="")
    slow = replace(unknown, launch_overhead_ns=2 * unknown.launch_overhead_ns)
    short, long = (float(Calibrated().predict(ops, each).duration_ns[0]) for each in (unknown, slow))
    assert long == pytest.approx(2 * short, rel=0.1)
    unstated = replace(unknown, launch_overhead_ns=np.nan)
    typical = replace(unknown, launch_overhead_ns=COMMON_FLOOR_NS)
    assert repr(common_fits(unstated)) == repr(common_fits(typical))  # NaN differs from NaN


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("H100-SXM", ""),
        ("H200-SXM", "recordings of another device of its family (Hopper): H100-SXM"),
        ("L40S", "recordings of another family: A100-SXM-40GB, H100-SXM"),
    ],
)
def test_kernels_of_an_unrecorded_device_say_so_and_have_a_wider_interval(name: str, words: str) -> None:
    diagnostics = Diagnostics()
    ops = kernels("vector", "gelu", 18816, 4096)
    said = Calibrated().predict(ops, load_device(name), diagnostics)
    told = [each.message for each in diagnostics if each.code == "calibrated.unseen-device"]
    assert told == ([f"based on {words}"] if words else [])
    ours = Calibrated().predict(ops, H100)
    assert said.low_ns[0] < said.duration_ns[0] < said.high_ns[0]
    assert (said.high_ns[0] / said.low_ns[0] > 1.2 * ours.high_ns[0] / ours.low_ns[0]) == bool(words)


def test_elements_read_across_rows_take_a_line_of_the_cache_each() -> None:
    for name, line in (("H100-SXM", 64.0), ("MI300X", 128.0)):
        machine = machine_of(load_device(name), "move", "bf16")
        near = kernels("move", "copy", 6144, 3137, strided=1.0)
        apart = replace(near, dims={**near.dims, SCATTERED: np.full(1, 6144.0 * 3137)})
        lines_ns = 6144 * 3137 * line / (machine.bytes_per_ns * machine.cache_rate)
        [before], [after] = (form_time_ns(KERNELS, START, each, machine) for each in (near, apart))
        assert lines_ns < after < before + lines_ns


def test_a_batch_norm_in_training_reads_channels_twice_with_a_unit_each() -> None:
    def norm(channels: float, flops: float) -> Operations:
        made = kernels("normalization", "native_batch_norm", channels, 2.0**26 / channels)
        return replace(made, flops=np.full(1, flops * 2.0**26))

    layer = time_ns(kernels("normalization", "native_layer_norm", 2.0**16, 1024))
    assert time_ns(norm(1024, 4.0)) < 1.5 * time_ns(kernels("vector", "add", 2.0**16, 1024, strided=1.0))
    assert time_ns(norm(1024, 8.0)) > 1.2 * layer
    # Few channels leave most units idle.
    assert time_ns(norm(8, 8.0)) > 2 * time_ns(norm(1024, 8.0))


def test_lookups_that_sum_rows_take_the_time_of_all_rows() -> None:
    bags = kernels("gather", "embedding_bag", 65536, 64, scheme="f32")
    single = time_ns(bags)
    hundred = time_ns(replace(bags, flops=np.full(1, 99.0 * 65536 * 64)))
    lanes = machine_of(H100, "gather", "f32").lane_flops_per_ns
    assert single < 0.3 * hundred
    assert hundred == pytest.approx(100 * 65536 * 64 * START["element"] / lanes, rel=0.05)


def test_positions_of_a_window_take_time_in_poolings_alone() -> None:
    lanes = machine_of(H100, "pooling", "bf16").lane_flops_per_ns
    taps = 100.0 * 200704 * 256
    for op, per_tap in (("avg_pool2d", 20.0), ("upsample_nearest2d", 0.0)):
        plain = kernels("pooling", op, 200704, 256)
        longer = replace(plain, flops=np.full(1, taps))
        assert time_ns(longer) - time_ns(plain) == pytest.approx(per_tap * taps / lanes, rel=0.2)


def test_updates_of_tables_start_a_group_for_each_row_that_they_sum() -> None:
    """A gradient step of fbgemm sorts and sums rows one by one, in 22 kernels."""
    name = "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>"
    update, lookup = (kernels("gather", op, 65536, 64, scheme="f32") for op in (canonical_op(name), "lookup"))
    summed = np.full(1, 15.0 * 65536 * 64)
    times = [time_ns(replace(each, flops=summed)) for each in (update, lookup)]
    started = 16 * 65536 / machine_of(H100, "gather", "f32").units * START["row_ns"] * 0.3
    assert times[0] - times[1] == pytest.approx(started + 21 * START["t0_ns"], rel=0.1)


def test_updates_of_tables_read_gradients_again_that_the_cache_does_not_hold() -> None:
    name = canonical_op("torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>")
    machine = machine_of(H100, "gather", "f32")
    lookups, length = 2.0**24, 64.0
    for bags, misses in ((2.0**16, 0.0), (2.0**20, 1 - machine.cache_bytes / (2.0**20 * 64 * 4))):
        update = kernels("gather", name, bags, length, scheme="f32")
        columns = KERNELS.columns(replace(update, flops=np.full(1, lookups * length)), machine)
        again = max(4 * lookups * length * misses - 4 * bags * length, 0.0)
        assert columns["memory_ns"][0] == pytest.approx(
            (update.bytes_moved[0] + again) / machine.bytes_per_ns
        )


def gradient_of_table(rows: float, indices: float) -> float:
    made = kernels("gather", "embedding_dense_backward", rows, 64, scheme="f32")
    return time_ns(replace(made, flops=np.full(1, indices * 64)))


def test_a_gradient_of_few_indices_is_a_fill_and_one_kernel() -> None:
    copy = kernels("gather", "lookup", 1024, 64, scheme="f32")
    plain = time_ns(replace(copy, flops=np.full(1, 3072.0 * 64)))
    assert gradient_of_table(1024, 3072) == pytest.approx(plain + START["t0_ns"], rel=1e-6)
    assert gradient_of_table(1024, 3073) > plain + 10 * START["t0_ns"]


def test_rows_of_a_table_without_an_index_start_no_group() -> None:
    large = kernels("gather", "lookup", 2.0**20, 64, scheme="f32")
    plain = time_ns(replace(large, flops=np.full(1, 4096.0 * 64)))
    started = 2 * 4096 / machine_of(H100, "gather", "f32").units * START["row_ns"] * 0.3
    assert gradient_of_table(2.0**20, 4096) - plain <= (started + 11 * START["t0_ns"]) * 1.001


@pytest.mark.parametrize("op", ["embedding_bag", "_embedding_bag_forward_only"])
def test_longer_sums_never_take_less(op: str) -> None:
    bags = kernels("gather", op, 65536, 64, scheme="f32")
    lengths = (1.0, 1.01, 1.5, 2.0, 2.01, 3.0, 10.0)
    times = [time_ns(replace(bags, flops=np.full(1, (each - 1) * 65536 * 64))) for each in lengths]
    assert times == sorted(times)


def test_short_rows_start_a_group_each_unless_a_softmax_shares_it() -> None:
    norm, softmax = (time_ns(kernels("normalization", op, 491520, 128)) for op in ("rmsnorm", "softmax"))
    assert norm > 1.3 * softmax
