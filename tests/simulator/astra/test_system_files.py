"""Systems in ASTRA-sim's files: read back unchanged, in ASTRA-sim's units."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from msgspec import structs

from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import System, load_device, load_system, system_names
from hespas.simulator.astra import read_memory_config, read_network_config, read_system_config
from hespas.simulator.astra.configuration import FILE_NAMES, NetworkConfig, SystemConfig, astra_sim_files
from hespas.simulator.astra.plans import Algorithm

KINDS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)


def written(system: System, folder: Path) -> tuple[SystemConfig, NetworkConfig, Diagnostics]:
    found = Diagnostics()
    for name, text in astra_sim_files(system, found).items():
        (folder / name).write_text(text, "utf-8")
    assert sorted(each.name for each in folder.iterdir()) == sorted(FILE_NAMES)
    memory, link = read_memory_config(folder / "remote_memory.json"), None
    if system.device:
        link = load_device(system.device).link("pcie")
    assert memory.has_remote_memory == (link is not None and link.bandwidth_bytes_per_s >= 1e9)
    return read_system_config(folder / "system.json"), read_network_config(folder / "network.yml"), found


@pytest.mark.parametrize("name", system_names())
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    whole = load_system(name)
    sized = whole.sized(64 if whole.most < 0 or whole.most >= 64 else 8)
    system, network, _ = written(sized, tmp_path)
    used = [each for each in sized.dimensions if each.size > 1]
    assert network.npus == tuple(each.size for each in used)
    assert network.num_ranks == sized.devices
    assert (network.unread, system.unread) == ((), ("scheduling-policy",))
    for place, each in enumerate(used):
        moved = network.bandwidth_gib_per_s[place] * 2**30
        links = 1 if each.topology == "switch" else each.links_per_device
        assert moved * links == pytest.approx(each.bandwidth_bytes_per_s, rel=1e-14)
        hops = 2 if network.topology[place] == "Switch" else 1
        assert network.latency_ns[place] * hops == each.latency_ns
    for kind in KINDS:
        names = system.implementations[kind]
        assert len(names) == len(used)
        assert all(Algorithm.named(each, "", "") for each in names)
    if sized.device:
        assert system.local_memory_gb_per_s == pytest.approx(
            load_device(sized.device).main_memory.bandwidth_bytes_per_s / 1e9
        )


def test_what_astra_sim_has_no_word_for_is_told(tmp_path: Path) -> None:
    _, network, found = written(load_system("dgx-h100-roce").sized((8, 2, 2)), tmp_path)
    assert [each.code for each in found] == [
        "system.reduction-left-out",
        "system.oversubscription-shared-out",
    ]
    assert network.bandwidth_gib_per_s[2] == pytest.approx(network.bandwidth_gib_per_s[1] / 7)
    _, _, found = written(load_system("tpu-v5e").sized(8), tmp_path)
    assert found.counts() == {"system.line-as-ring": 2}


def test_the_slower_direction_counts(tmp_path: Path) -> None:
    system = load_system("loopback").sized(4)
    slow = structs.replace(system.dimensions[0], down_bandwidth_bytes_per_s=2.0**30)
    _, network, found = written(
        replace(system, dimensions=(slow,)),
        tmp_path,
    )
    assert network.bandwidth_gib_per_s == (1.0,)
    assert found.counts() == {"system.slower-direction": 1}


def test_only_whole_systems_are_written() -> None:
    with pytest.raises(UsageError, match="has no number of devices"):
        astra_sim_files(load_system("dgx-h100"), Diagnostics())
    with pytest.raises(UsageError, match="12 devices do not fill 8x2") as caught:
        astra_sim_files(load_system("dgx-h100").sized(12), Diagnostics())
    assert caught.value.hint == "use 8 or 16 devices"
    system = load_system("loopback").sized(4)
    blank = structs.replace(system.dimensions[0], latency_ns=nan)
    with pytest.raises(UnsupportedError, match="latency of loopback is unknown"):
        astra_sim_files(
            replace(system, dimensions=(blank,)),
            Diagnostics(),
        )


def test_one_device_has_no_network() -> None:
    with pytest.raises(UsageError, match="one device of dgx-h100 has no network"):
        astra_sim_files(load_system("dgx-h100").sized(1), Diagnostics())


def test_loads_and_stores_of_a_trace_go_over_the_link_to_the_host() -> None:
    """Without a memory ASTRA-sim ends at the first node that loads or stores."""
    link = load_device("H100-SXM").link("pcie")
    assert link is not None
    files = astra_sim_files(load_system("dgx-h100").sized(8), Diagnostics())
    assert json.loads(files["remote_memory.json"]) == {
        "memory-type": "PER_NPU_MEMORY_EXPANSION",
        "remote-mem-latency": int(link.latency_ns),
        "remote-mem-bw": int(0.86 * link.bandwidth_bytes_per_s / 1e9),  # packets have headers
    }
