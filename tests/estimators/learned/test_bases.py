"""Bases of learned models: forms of a device and its reference devices, and times beyond the fitted sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from hespas.estimators.forms import FORMS, form_time_ns, machine_of
from hespas.estimators.learned.bases import (
    Base,
    BaseIndex,
    FittedDevice,
    ReferenceDevices,
    combined_ns,
    device_distance,
    nearest_devices,
)
from hespas.estimators.learned.extrapolation import expected_deviation, octaves_beyond, references_of
from hespas.estimators.learned.rising import halved, raised
from hespas.estimators.learned.serialization import load_model, shipped_folder
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import load_device
from hespas.operations import Labels, Operations, build

H100, T4 = load_device("H100-SXM"), load_device("T4")
STREAMS = FORMS["streams"]
NAMES = {"streams": tuple(each.name for each in STREAMS.parameters)}


def additions(rows: FloatArray, variant: str = "lib") -> Operations:
    return build.elementwise(
        "vector",
        Labels.constant("f32", len(rows)),
        op=Labels.constant("add", len(rows)),
        rows=rows,
        columns=np.full(len(rows), 1024.0),
        flops_per_element=np.ones(len(rows)),
        passes=np.full(len(rows), 3.0),
        variant=Labels.constant(variant, len(rows)),
    )


def a_base(hardware: str, *, op: str = "add", variant: str = "lib", start_ns: float = 2000.0) -> Base:
    values: Mapping[str, float] = {each.name: each.start for each in STREAMS.parameters} | {"t0_ns": start_ns}
    parameters = tuple(values[name] for name in NAMES["streams"])
    return Base(
        hardware=hardware,
        kind="vector",
        op=op,
        scheme="f32",
        variant=variant,
        form="streams",
        parameters=parameters,
        asymptote=0.25,
    )


def test_a_device_answers_by_its_own_form() -> None:
    index = BaseIndex([a_base("H100-SXM"), a_base("T4", start_ns=9000.0)], NAMES)
    ops = additions(np.array([1.0, 4096.0]))
    logs, ends = index.log_times(ops, H100, ["H100-SXM"])
    values = {each.name: each.start for each in STREAMS.parameters} | {"t0_ns": 2000.0}
    assert np.exp(logs) == pytest.approx(
        form_time_ns(STREAMS, values, ops, machine_of(H100, "vector", "f32"))
    )
    assert ends.tolist() == [0.25, 0.25]


def test_relatives_answer_with_their_parameters_on_the_rates_of_the_device() -> None:
    index = BaseIndex([a_base("H100-SXM", start_ns=1000.0), a_base("A100-SXM-80GB", start_ns=4000.0)], NAMES)
    logs, _ = index.log_times(additions(np.array([1.0])), T4, ["H100-SXM", "A100-SXM-80GB"])
    assert float(np.exp(logs[0])) == pytest.approx(2000, rel=0.05), "the geometric mean of the starts"


def test_the_launches_of_another_host_do_not_count() -> None:
    index = BaseIndex([a_base("T4", variant="pytorch events", start_ns=30e3)], NAMES)
    ops = additions(np.array([1.0]), "pytorch events")
    timed, kernel = (
        float(np.exp(index.log_times(ops, H100, ["T4"], as_timed=each)[0][0])) for each in (True, False)
    )
    assert timed > 30e3
    assert kernel < 4e3


def test_a_class_without_a_form_goes_by_its_kind_then_by_another_variant() -> None:
    index = BaseIndex([a_base("T4", op="*"), a_base("H100-SXM", variant="other")], NAMES)
    labels = ("vector", "mul", "f32", "lib")
    assert index.find("T4", labels) is not None
    found = index.find("H100-SXM", labels)
    assert found is not None
    assert found.variant == "other"
    assert index.find("P4", labels) is None
    assert np.isnan(index.log_times(additions(np.array([1.0])), T4, ["P4"])[0]).all()
    assert combined_ns(np.array([np.nan, np.log(4.0)]), np.array([9.0, 9.0]), 0.5) == pytest.approx([9, 6])


SEEN = [
    FittedDevice(name=name, arch=load_device(name).architecture, kind=load_device(name).kind, rows=1)
    for name in ("H100-SXM", "H200-SXM", "B200-SXM", "A100-SXM-80GB", "L40S", "MI300X", "TPU-v4")
]


def references(name: str, kind: str = "matmul", without: tuple[str, ...] = ()) -> ReferenceDevices | None:
    among = {each.name for each in SEEN} - set(without)
    return nearest_devices(load_device(name), SEEN, among, kind, "bf16")


def test_devices_with_the_same_kernels_and_rates_stand_in_whatever_their_family() -> None:
    for name, nearest in (
        ("H100-PCIe", "H100-SXM"),
        ("GH200-144GB", "H200-SXM"),
        ("B300-SXM", "B200-SXM"),  # another family than the B200
        ("RTX-PRO-6000-Server", "L40S"),  # of the B200's family
        ("L4", "L40S"),
        ("A100-PCIe-40GB", "A100-SXM-80GB"),
        ("MI325X", "MI300X"),
        ("TPU-v5p", "TPU-v4"),
    ):
        found = references(name)
        assert found is not None
        assert found.names[0] == nearest
        assert sum(found.weights) == pytest.approx(1)
        assert list(found.weights) == sorted(found.weights, reverse=True)
        assert str(found).startswith(f"{nearest} {found.weights[0]:.1f}")
    assert references("TPU-v5e", without=("TPU-v4",)) is None


def test_distance_grows_with_differences_and_depends_on_the_kind() -> None:
    h800, h100, pcie, b60 = (
        load_device(name) for name in ("H800-SXM", "H100-SXM", "H100-PCIe", "Arc-Pro-B60")
    )
    apart = [device_distance(h100, other, "matmul", "bf16") for other in (h100, h800, pcie, b60)]
    assert apart[:2] == [0, 0]
    assert 0 < apart[2] < apart[3]
    assert device_distance(b60, h100, "matmul", "bf16") == pytest.approx(apart[3])
    h20 = load_device("H20")  # its matrix units are slow, its vector units are not
    assert device_distance(h20, h100, "vector", "f32") < device_distance(h20, h100, "matmul", "bf16") / 2
    far, near = references("Arc-Pro-B60"), references("H800-SXM")
    assert far is not None
    assert near is not None
    assert far.distance > near.distance
    assert expected_deviation(far) > expected_deviation(near)


def test_a_device_of_the_user_stands_in_with_an_unknown_distance() -> None:
    own = FittedDevice(name="my-gpu", arch="mine", kind="gpu", rows=1)
    found = nearest_devices(load_device("H800-SXM"), [own, *SEEN], ["my-gpu", "H100-SXM"], "matmul", "bf16")
    assert found is not None
    assert found.names == ("H100-SXM",)
    alone = nearest_devices(load_device("H800-SXM"), [own, *SEEN], ["my-gpu"], "matmul", "bf16")
    assert alone is not None
    assert (alone.names, alone.weights) == (("my-gpu",), (1.0,))


def test_how_far_sizes_lie_beyond_those_of_a_fit() -> None:
    reach = {"rows": (4.0, 1024.0)}
    ops = additions(np.array([1.0, 4.0, 1000.0, 2048.0, 4096.0]))
    assert octaves_beyond(reach, ops).tolist() == [2, 0, 0, 1, 2]
    assert octaves_beyond({"m": (1.0, 2.0)}, additions(np.array([1.0]))).tolist() == [0.0]


@pytest.mark.parametrize("by", [{"m": 2}, {"n": 4}, {"k": 2}, {"batch": 2}, {"m": 2, "k": 2}])
def test_half_a_matmul_is_the_matmul_of_half_the_size(by: dict[str, int]) -> None:
    sizes = {"batch": 8.0, "m": 64.0, "n": 256.0, "k": 1024.0}

    def made(sizes: Mapping[str, float]) -> Operations:
        batch, m, n, k = (np.array([sizes[name]]) for name in ("batch", "m", "n", "k"))
        return build.matmuls(Labels.constant("bf16", 1), batch=batch, m=m, n=n, k=k)

    half = halved("product", made(sizes), by)
    divided = {name: size / by.get(name, 1) for name, size in sizes.items()}
    expected = made(divided)
    assert half.flops == pytest.approx(expected.flops)
    assert half.bytes_moved == pytest.approx(expected.bytes_moved)
    assert {name: float(half.dim(name)[0]) for name in sizes} == divided


@pytest.mark.parametrize("window", [0.0, 100.0])
def test_half_a_prompt_is_the_prompt_of_half_the_length(window: float) -> None:
    def made(length: float) -> Operations:
        one = np.ones(1)
        return build.attention_context(
            Labels.constant("bf16", 1),
            batch=2 * one,
            length=length * one,
            heads=8 * one,
            kv_heads=2 * one,
            head_dim=128 * one,
            window=window * one,
            kv_bytes=2 * one,
        )

    half, expected = halved("attention", made(1024.0), {"q_len": 2}), made(512.0)
    assert half.dim("kv_len") == expected.dim("kv_len")
    assert half.bytes_moved == pytest.approx(expected.bytes_moved)
    assert half.flops == pytest.approx(expected.flops, rel=0.12), "the first rows of a window are shorter"


def test_times_are_raised_to_those_of_halves_but_not_far() -> None:
    ops = additions(np.array([64.0, 63.0, 64.0, 64.0]))
    ops = halved("stream", ops, {"columns": 1024})  # columns of 1: rows alone can be halved
    times = np.array([[100.0, 100.0, 100.0, 100.0], [90.0] * 4, [120.0] * 4])
    of_half = np.array([110.0, 110.0, 90.0, 400.0])

    def predict(halves: Operations, of: IntArray, at_most: FloatArray) -> FloatArray:
        assert len(halves) == len(of) == len(at_most)
        assert (halves.dim("rows") % 1 == 0).all()
        return np.where(halves.dim("rows") == 32, of_half[of], np.nan)

    found = raised("stream", ops, times, predict, measured=True)
    assert found[0] == pytest.approx([105.6, 100, 100, 100]), "odd sizes and measured steps stay"
    assert found[1:, 0] == pytest.approx([95.04, 126.72]), "intervals move with them"


def test_devices_that_ran_another_library_are_references_at_a_greater_distance() -> None:
    card = load_model(shipped_folder() / "gemm-fp8-block.json").card
    cell = next(cell for cell in card.cells if "H100-SXM" in cell.rows)
    assert "B200-SXM" not in cell.rows
    chosen = references_of(card, cell, load_device("H100-SXM"), ["H100-SXM", "H200-SXM"])
    assert chosen is not None
    assert set(chosen.names) == {"B200-SXM", "GB200", "L40S"}
    for name, variant in zip(chosen.names, chosen.variants, strict=True):
        assert any(name in other.rows for other in card.cells if other.variant == variant)
        assert (variant == cell.variant) == (name == "L40S")
    among = [*chosen.names]
    nearer = nearest_devices(load_device("H100-SXM"), card.devices, among, "matmul", "fp8_block")
    assert nearer is not None
    weights = dict(zip(nearer.names, nearer.weights, strict=True))
    after = dict(zip(chosen.names, chosen.weights, strict=True))
    ratio = after["B200-SXM"] / after["L40S"] / (weights["B200-SXM"] / weights["L40S"])
    assert ratio == pytest.approx(np.exp(-1))


def test_versions_of_a_library_count_as_one_library() -> None:
    card = load_model(shipped_folder() / "gemm-bf16.json").card
    cell = next(cell for cell in card.cells if "L40S" in cell.rows)
    chosen = references_of(card, cell, load_device("L40S"), ["L40S"])
    assert chosen is not None
    assert chosen.names[0] == "A100-SXM-80GB"
    assert chosen.variants[0] != cell.variant
    assert chosen.nearest == device_distance(
        load_device("L40S"), load_device("A100-SXM-80GB"), "matmul", "bf16"
    )
