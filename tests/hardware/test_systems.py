"""System files: consistent with their devices, sized for the job, with reported faults."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import load_device, load_system, read_system, system_names, system_to_toml

GOOD = """\
name = "test"
description = "a system for tests"
device = "H100-SXM"
dimensions = [
  { name = "inside", topology = "fully_connected", size = 4, bandwidth_bytes_per_s = 3e11, latency_ns = 1.0, \
links_per_device = 3, source = "here", latency_source = "here" },
  { name = "outside", topology = "switch", size = -1, bandwidth_bytes_per_s = 5e10, latency_ns = 2.0, \
links_per_device = 1, source = "here", latency_source = "here", down_bandwidth_bytes_per_s = 2e10 },
]
[sources]
here = "this test"
"""


OWN_NETWORK = ("p4de", "p5")
"""Systems of a cloud, whose network differs from the ports that the device usually has."""


@pytest.mark.parametrize("name", system_names())
def test_a_shipped_system_agrees_with_the_links_of_its_device(name: str) -> None:
    system = load_system(name)
    for each in system.dimensions:
        assert system.source_text(each.source)
        assert system.source_text(each.latency_source)
    if not system.device:
        return
    device = load_device(system.device)
    inside = device.link("scale_up") or device.link("pcie")
    assert inside is not None
    rings = [each for each in system.dimensions if each.topology == "ring"]
    inner = rings or [system.dimensions[0]]
    assert sum(each.bandwidth_bytes_per_s for each in inner) == inside.bandwidth_bytes_per_s
    assert {each.latency_ns for each in inner} == {inside.latency_ns}
    assert sum(each.links_per_device for each in inner) == inside.links_per_device
    if not rings and inside.kind == "scale_up":
        assert system.shape[0] == inside.devices_per_domain
    out = device.link("scale_out")
    for each in system.dimensions[1:] if not rings and name not in OWN_NETWORK else ():
        assert out is not None
        assert (each.bandwidth_bytes_per_s, each.latency_ns) == (out.bandwidth_bytes_per_s, out.latency_ns)


@pytest.mark.parametrize("name", system_names())
def test_a_system_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    system = load_system(name)
    path = tmp_path / "again.toml"
    path.write_text(system_to_toml(system), "utf-8")
    assert repr(read_system(path)) == repr(system)  # unknown figures are NaN, which equals nothing
    half = system.sized(8)
    path.write_text(system_to_toml(half), "utf-8")
    assert load_system(path).sized(8).shape == half.shape


@pytest.mark.parametrize(
    ("name", "devices", "shape"),
    [
        ("dgx-h100", 4, (4, 1)),
        ("dgx-h100", 8, (8, 1)),
        ("DGX_H100_IB", 64, (8, 8)),
        ("dgx-h100", 32_768, (8, 4096)),
        ("dgx-h100", 12, (8, 2)),
        ("dgx-h100-roce", 24_576, (8, 384, 8)),
        ("gb200-nvl72", 64, (64, 1)),
        ("gb300-nvl72", 144, (72, 2)),
        ("tpu-v4", 16, (2, 2, 4)),
        ("tpu-v4", 32, (2, 4, 4)),
        ("tpu-v4", 192, (4, 4, 12)),  # whole cubes of 4x4x4 close; 4x6x8 would not
        ("tpu-v5p", 1024, (8, 8, 16)),
        ("tpu-v5e", 8, (2, 4)),
        ("tpu-v6e", 256, (16, 16)),
        ("ironwood", 9216, (16, 24, 24)),
    ],
)
def test_sizes_follow_the_job(name: str, devices: int, shape: tuple[int, ...]) -> None:
    sized = load_system(name).sized(devices)
    assert (sized.shape, sized.devices) == (shape, devices)


@given(st.sampled_from(system_names()), st.integers(1, 300))
def test_a_sized_system_holds_its_devices(name: str, devices: int) -> None:
    system = load_system(name)
    try:
        sized = system.sized(devices)
    except UsageError:
        assert system.most > 0
        return
    assert prod(sized.shape[:-1]) * (sized.shape[-1] - 1) < devices <= prod(sized.shape)
    if system.placement == "even":
        assert prod(sized.shape) == devices


def test_a_slice_of_tpus_closes_where_the_vendor_says_so() -> None:
    assert [each.is_closed(32) for each in load_system("tpu-v4").sized(32).dimensions] == [False] * 3
    assert [each.is_closed(64) for each in load_system("tpu-v4").sized(64).dimensions] == [True] * 3
    assert [each.is_closed(128) for each in load_system("tpu-v5e").sized(128).dimensions] == [False, True]


def test_a_shape_is_taken_as_it_is_stated() -> None:
    tpu = load_system("tpu-v5p")
    assert tpu.sized((8, 4, 4)).devices == 128
    assert tpu.sized((8,)).shape == (8, 1, 1)
    with pytest.raises(UsageError, match="at most 16 devices by ICI y, not 32"):
        load_system("tpu-v5e").sized((4, 32))
    with pytest.raises(UsageError, match="is not a shape of"):
        tpu.sized((2, 2, 2, 2))
    with pytest.raises(UsageError, match="1 to 6,144 devices, not 8,192"):
        tpu.sized((16, 16, 32))
    with pytest.raises(UsageError, match="no slice of 34 devices"):
        load_system("tpu-v5e").sized(34)
    with pytest.raises(UsageError, match="1 to 8 devices, not 16"):
        load_system("pcie").sized(16)


def test_both_directions_of_a_link_may_differ(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(GOOD, "utf-8")
    inside, outside = load_system(tmp_path / "s.toml").dimensions
    assert inside.received_bytes_per_s == inside.bandwidth_bytes_per_s
    assert inside.link_bytes_per_s == 1e11
    assert (outside.bandwidth_bytes_per_s, outside.received_bytes_per_s) == (5e10, 2e10)


@pytest.mark.parametrize(
    ("was", "now", "position", "message"),
    [
        ("size = 4", "size = 0", "dimensions[0].size", "positive whole number or -1"),
        ("size = 4", "size = -1", "dimensions[0].size", "only the outermost"),
        ("size = 4", 'size = "any"', "dimensions[0].size", "expected a whole number"),
        ('"switch"', '"star"', "dimensions[1].topology", "one of ring, fully_connected, switch"),
        ("3e11", "-3e11", "dimensions[0].bandwidth_bytes_per_s", "positive number"),
        (
            "links_per_device = 3",
            "links_per_device = -1",
            "dimensions[0].links_per_device",
            "number of links",
        ),
        ('latency_source = "here" }', 'latency_source = "x" }', "dimensions[0].latency_source", "not a key"),
        ("H100-SXM", "H1000", "device", "no device"),
        ("outside", "inside", "dimensions[1]", "stated already"),
        ("size = 4", "size = 4, closes_at = 4", "dimensions[0].closes_source", "go together"),
        ("size = 4", "size = 4, oversubscription = 2.0", "dimensions[0].oversubscription_source", "together"),
        ("size = 4", "size = 4, oversubscription = 0.5", "dimensions[0].oversubscription", "1 or more"),
        (
            "size = 4",
            'size = 4, reduction = "NVLS", reduction_source = "here"',
            "dimensions[0].reduction_share",
            "share",
        ),
        ("size = 4", "sise = 4", "dimensions[0].sise", "unknown key"),
        ("size = 4, ", "", "dimensions[0].size", "missing key"),
    ],
)
def test_faults_name_the_key(was: str, now: str, position: str, message: str, tmp_path: Path) -> None:
    assert was in GOOD
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace(was, now, 1), "utf-8")
    with pytest.raises(FormatError, match=message) as caught:
        load_system(path)
    assert (caught.value.path, caught.value.position) == (str(path), position)
    assert caught.value.hint


def test_an_unknown_name_is_told_its_neighbours() -> None:
    with pytest.raises(UsageError, match="no system 'dgx-h10'") as caught:
        load_system("dgx-h10")
    assert "dgx-h100" in str(caught.value.hint)
    with pytest.raises(FormatError, match="cannot be read"):
        load_system("nowhere.toml")
