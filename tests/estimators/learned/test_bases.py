"""Bases of learned models: forms of a device and its reference devices, and times beyond the fitted sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from hespas.estimators.forms import FORMS, form_time_ns, machine_of
from hespas.estimators.learned.bases import Base, BaseIndex, FittedDevice, combined_ns, nearest_devices
from hespas.estimators.learned.inference import octaves_beyond
from hespas.estimators.learned.rising import halved, raised
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


def test_the_nearest_relatives_stand_in() -> None:
    seen = [
        FittedDevice(name=name, vendor=device.vendor, family=device.family, kind=device.kind, rows=1)
        for name in ("H100-SXM", "H200-SXM", "A100-SXM-80GB", "MI300X", "TPU-v4")
        if (device := load_device(name))
    ]
    every = {each.name for each in seen}
    assert nearest_devices(load_device("H100-PCIe"), seen, every) == ("family", ("H100-SXM", "H200-SXM"))
    assert nearest_devices(load_device("L40S"), seen, every) == (
        "vendor",
        ("H100-SXM", "H200-SXM", "A100-SXM-80GB"),
    )
    found = nearest_devices(load_device("Arc-Pro-B60"), seen, every)
    assert found is not None
    assert (found.nearness, len(found.names)) == ("kind", 4)
    assert nearest_devices(load_device("TPU-v5e"), seen, every - {"TPU-v4"}) is None


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
