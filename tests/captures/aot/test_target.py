from __future__ import annotations

import pytest

from hespas.captures.aot.target import GPUS, TPUS, Target, target_config
from hespas.graph.errors import UsageError
from hespas.hardware import device_names, named_device


def test_a_target_is_read_as_it_is_written() -> None:
    pod = Target.of("tpu:v5p:8x8x8")
    assert pod == Target("tpu", "v5p", (8, 8, 8)) == Target.of(str(pod)) == Target.of(pod)
    assert (pod.num_devices, pod.topology, pod.device, pod.extra) == (512, "v5p:8x8x8", "TPU-v5p", "jax-tpu")
    board = Target.of(" GPU:H100:8 ")
    assert board == Target("gpu", "h100", (8,))
    assert (board.num_devices, board.topology, board.extra) == (8, "1x1x8", "jax-gpu")


def test_devices_are_counted_as_jax_counts_them() -> None:
    assert Target.of("tpu:v3:2x2").num_devices == 8
    assert Target.of("tpu:tpu7x:2x2x1") == Target.of("tpu:v7x:2x2x1")
    assert Target.of("tpu:v7x:2x2x1").num_devices == 8
    assert Target.of("tpu:v7x:2x2x1").topology == "tpu7x:2x2x1"
    assert Target.of("tpu:v4:2x2x1").num_devices == 4  # both cores are one device


def test_hosts_of_gpus_are_told_to_the_compiler() -> None:
    assert Target.of("gpu:h100:512").topology == "1x64x8"
    assert Target.of("gpu:gb200:72").topology == "1x18x4"
    assert Target.of("gpu:a100:3").topology == "1x1x3"


def test_a_slice_smaller_than_a_host_says_so() -> None:
    assert Target.of("tpu:v5e:1x1").chips_of_host == (1, 1, 1)
    assert Target.of("tpu:v5p:1x2x1").chips_of_host == (1, 2, 1)
    assert Target.of("tpu:v5e:2x2").chips_of_host == ()
    assert Target.of("gpu:h100:1").chips_of_host == ()


def test_a_slice_may_stand_on_any_side() -> None:
    assert Target.of("tpu:v5p:28x20x16").num_devices == 8960


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected the platform tpu or gpu"),
        ("h100", "expected the platform tpu or gpu"),
        ("cpu:x:8", "expected the platform tpu or gpu"),
        ("tpu:v8:2x2", "v5p (up to 16x20x28)"),
        ("tpu:v5p", "AxBxC chips up to 16x20x28"),
        ("tpu:v5p:8x8", "AxBxC chips up to 16x20x28"),
        ("tpu:v5e:2x2x2", "AxB chips up to 16x16"),
        ("tpu:v5e:32x32", "AxB chips up to 16x16"),
        ("tpu:v5e:3x3", "whole hosts of 2x2"),
        ("tpu:v5e:0x2", "AxB chips"),
        ("tpu:v5e:2x²", "AxB chips"),
        ("gpu:mi300:8", "name one of a100, h100, h200, b200, b300, gb200"),
        ("gpu:h100", "expected a number of GPUs"),
        ("gpu:h100:0", "expected a number of GPUs"),
        ("gpu:h100:12", "whole hosts of 8"),
        ("gpu:h100:2x4", "expected a number of GPUs"),
        ("gpu:h100:99999999", "expected a number of GPUs"),
    ],
)
def test_what_cannot_be_a_target_is_refused_with_what_can(text: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        Target.of(text)
    assert told in f"{refused.value} {refused.value.hint}"


def test_every_target_has_its_device_file() -> None:
    devices = {row.device for row in TPUS.values()} | {row.device for row in GPUS.values()}
    assert devices - {""} <= set(device_names())


@pytest.mark.parametrize("name", GPUS)
def test_a_configuration_states_the_figures_of_the_device_file(name: str) -> None:
    device, text = named_device(GPUS[name].device), target_config(name)
    stated = dict(
        line.strip().split(": ", 1) for line in text.splitlines() if ": " in line and "{" not in line
    )
    assert int(stated["core_count"]) == device.units
    assert int(stated["memory_bandwidth"]) == device.main_memory.bandwidth_bytes_per_s
    assert int(stated["device_memory_size"]) == device.main_memory.capacity_bytes
    major, minor = GPUS[name].capability
    assert f"major: {major} minor: {minor} " in text
    assert "dnn_version_info { major: 9 minor: 8 patch: 0 }" in text
    # All lanes at the clock make the rate that the file states.
    rate = device.units * int(stated["fpus_per_core"]) * 2e9 * float(stated["clock_rate_ghz"])
    vector = next(peak for peak in device.peaks if (peak.unit, peak.dtype) == ("vector", "f32"))
    assert rate == pytest.approx(vector.flops_per_s, rel=1e-3)  # three digits of the clock
    shared = int(stated["shared_memory_per_core"])
    assert int(stated["shared_memory_per_block_optin"]) == shared - 1024
