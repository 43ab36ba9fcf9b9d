"""ASTRA-sim's configuration files and the rules that need them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from hespas.converters.chakra.contract import Tag
from hespas.graph import CollectiveKind, ExtraTable, NodeKind, OpClass, StridedGroups, Workload
from hespas.graph.errors import FormatError
from hespas.simulator.astra.configuration import (
    Backend,
    read_memory_config,
    read_network_config,
    read_system_config,
)
from hespas.validators.checker import CheckOptions, check_workload
from tests.validators.checker.small_jobs import Steps

Json = dict[str, int | float | str | list[str]]

SYSTEM: Json = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 4,
    "local-mem-bw": 1600,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["ring"],
    "reduce-scatter-implementation": ["ring"],
    "all-to-all-implementation": ["direct"],
}

RANKS = 8

AS_STATED = ExtraTable(
    node=np.array([-1], np.int32),
    key=np.zeros(1, np.int32),
    tag=np.array([Tag.AS_STATED], np.int16),
    offsets=np.zeros(2, np.int64),
    values=b"",
)
"""What a graph has that was read from another tool's trace."""


def network_text(topology: str = "Ring", npus: str = "8", *, dimensions: int = 1) -> str:
    def line(key: str, value: str) -> str:
        return f"{key}: [{', '.join([value] * dimensions)}]\n"

    return (
        line("topology", topology)
        + line("npus_count", npus)
        + line("bandwidth", "50.0")
        + line("latency", "500")
    )


def job(
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE, size: float = 65_536, *, groups: int = 0
) -> Workload:
    steps = Steps(RANKS)
    members = StridedGroups.from_mesh((RANKS // groups, groups), (1,)) if groups else None
    steps.coll(steps.compute(), kind=kind, size=size, groups=members)
    return Workload.spmd(steps.build(), RANKS)


Check = Callable[..., dict[str, str]]


@pytest.fixture
def found(tmp_path: Path) -> Check:
    """Code -> first finding of a job against a system, with changes to its files."""

    def check(
        workload: Workload,
        changes: Json | None = None,
        *,
        drop: tuple[str, ...] = (),
        network: str | None = None,
        memory: str | None = None,
        backend: Backend | None = None,
    ) -> dict[str, str]:
        values = {key: value for key, value in (SYSTEM | (changes or {})).items() if key not in drop}
        (tmp_path / "system.json").write_text(json.dumps(values))
        (tmp_path / "network.yml").write_text(network or network_text())
        (tmp_path / "memory.json").write_text(json.dumps({"memory-type": memory or "NO_MEMORY_EXPANSION"}))
        options = CheckOptions(
            system_config=tmp_path / "system.json",
            network_config=tmp_path / "network.yml",
            memory_config=tmp_path / "memory.json" if memory else None,
            backend=backend,
        )
        result = check_workload(workload, "astra-sim", options)
        first: dict[str, str] = {}
        for violation in result.violations:
            first.setdefault(violation.code, f"{violation.severity.value}: {violation.message}")
        return first

    return check


def test_fitting_configuration_passes(found: Check) -> None:
    assert found(job()) == {}


def test_et013_splits(found: Check) -> None:
    assert found(job(CollectiveKind.ALL_GATHER, 3))["ET013"].startswith("error")
    assert found(job(CollectiveKind.ALL_GATHER, 4)) == {}
    assert found(job(size=31))["ET013"].startswith("warning")
    assert found(job(size=32)) == {}


@pytest.mark.parametrize(("npus", "word"), [("16", "ASTRA-sim exits"), ("4", "ignores the rest")])
def test_et022_ranks_of_the_network(found: Check, npus: str, word: str) -> None:
    assert word in found(job(), network=network_text(npus=npus))["ET022"]


def test_et024_roofline(found: Check) -> None:
    roofline: Json = {"roofline-enabled": 1, "peak-perf": 312}

    def compute(flops: float, moved: float, *, foreign: bool = False) -> Workload:
        steps = Steps()
        b = steps.builder
        node = b.add_node(
            name_id=0, op_id=0, op_class=OpClass.CUSTOM, flops=flops, bytes_read=moved, bytes_written=0
        )
        steps.coll(node)
        graph = steps.build()
        return Workload.spmd(replace(graph, extra=AS_STATED) if foreign else graph, RANKS)

    assert found(compute(1, 1), roofline) == {}
    assert "num_ops" in found(compute(nan, 1), roofline)["ET024"]
    assert "tensor_size" in found(compute(1, nan), roofline)["ET024"]
    for counted in ((0, 1), (1, 0), (0, 0)):  # written as 1, and what was counted beside it
        assert found(compute(*counted), roofline) == {}
    assert "num_ops" in found(compute(0, 1, foreign=True), roofline)["ET024"]
    assert "tensor_size" in found(compute(1, 0, foreign=True), roofline)["ET024"]
    assert "ET024" not in found(compute(0, 0, foreign=True))
    assert "ET026" in found(compute(1, 1), {"roofline-enabled": 1})


@pytest.mark.parametrize("name", ["halvingDoubling", "oneHalvingDoubling", "doubleBinaryTree"])
def test_et025_powers_of_two(found: Check, name: str) -> None:
    steps = Steps(6)
    steps.coll(steps.compute())
    six = Workload.spmd(steps.build(), 6)
    changes: Json = {"all-reduce-implementation": [name]}
    assert "power of two" in found(six, changes, network=network_text(npus="6"))["ET025"]
    assert found(job(), changes) == {}
    assert found(six, {"all-reduce-implementation": ["direct3"]}, network=network_text(npus="6")) == {}


def test_et025_what_algorithms_are_made_for(found: Check) -> None:
    gather: Json = {"all-gather-implementation": ["doubleBinaryTree"]}
    assert "runs an all-reduce instead" in found(job(CollectiveKind.ALL_GATHER), gather)["ET025"]
    swap: Json = {"all-to-all-implementation": ["halvingDoubling"]}
    assert "not implemented" in found(job(CollectiveKind.ALL_TO_ALL), swap)["ET025"]
    assert found(job(), swap) == {}, "unused implementations do not matter"


def test_et025_groups(found: Check) -> None:
    tree: Json = {"all-reduce-implementation": ["doubleBinaryTree"]}
    assert "sub-group" in found(job(groups=4), tree)["ET025"]
    two: Json = {"all-reduce-implementation": ["halvingDoubling", "ring"]}
    assert "ET025" not in found(job(groups=4), two, network=network_text(npus="4", dimensions=2))


def test_et026_system_is_complete(found: Check) -> None:
    assert "preferred-dataset-splits" in found(job(), drop=("preferred-dataset-splits",))["ET026"]
    assert "local-mem-bw" in found(job(), drop=("local-mem-bw",))["ET026"]
    assert "all-reduce-implementation" in found(job(), drop=("all-reduce-implementation",))["ET026"]
    assert found(job(), drop=("all-to-all-implementation",)) == {}
    custom: Json = {"all-reduce-implementation-custom": ["x"]}
    assert found(job(), custom, drop=("all-reduce-implementation",)) == {}
    assert "unknown algorithm" in found(job(), {"all-reduce-implementation": ["star"]})["ET026"]
    grid = network_text(npus="4", dimensions=2)
    assert "1 entries, the network 2" in found(job(), network=grid)["ET026"]
    assert "ET026" not in found(job(), {"all-reduce-implementation": ["oneRing"]}, network=grid)


def test_et027_remote_memory(found: Check) -> None:
    def load(moved: float) -> Workload:
        steps = Steps()
        b = steps.builder
        node = b.add_node(
            name_id=0, op_id=0, op_class=OpClass.MEMORY, kind=NodeKind.MEM_LOAD, bytes_read=moved,
            bytes_written=0, flops=0,
        )  # fmt: skip
        steps.coll(steps.compute(node))
        return Workload.spmd(steps.build(), RANKS)

    assert found(load(64), memory="MEMORY_POOL") == {}
    assert "NO_MEMORY_EXPANSION" in found(load(64), memory="NO_MEMORY_EXPANSION")["ET027"]
    assert "tensor_size" in found(load(nan), memory="MEMORY_POOL")["ET027"]
    assert found(load(64)) == {}


def test_et031_groups_on_one_dimension(found: Check) -> None:
    assert found(job(groups=4))["ET031"].startswith("warning")
    grid: Json = {"all-reduce-implementation": ["ring", "ring"]}
    assert (
        found(
            job(groups=4),
            grid,
            network="""topology: [Ring, Ring]
npus_count: [4, 2]
bandwidth: [1, 1]
latency: [1, 1]
""",
        )
        == {}
    )


def test_et032_backends(found: Check) -> None:
    grid = "topology: [Ring, Ring]\nnpus_count: [4, 2]\nbandwidth: [1, 1]\nlatency: [1, 1]\n"
    two: Json = {"all-reduce-implementation": ["ring", "ring"]}
    assert found(job(), two, network=grid, backend="aware")["ET032"].startswith("warning")
    assert found(job(), two, network=grid, backend="unaware") == {}
    assert found(job(), backend="aware") == {}
    five: Json = {"all-reduce-implementation": ["oneRing"]}
    many = network_text(npus="2", dimensions=5)
    steps = Steps()
    node = steps.coll(steps.compute())
    assert "involved_dim" in found(Workload.spmd(steps.build(), 32), five, network=many)["ET032"]
    steps = Steps()
    node = steps.coll(steps.compute())
    steps.builder.add_extra(node, "involved_dim", 28, b"\x0a\x05\x01\x01\x01\x01\x01")
    assert "ET032" not in found(Workload.spmd(steps.build(), 32), five, network=many)


# Loaders


def test_network_file(tmp_path: Path) -> None:
    file = tmp_path / "network.yml"
    file.write_text(
        '# two levels\ntopology: [ "Ring", Switch ]  # innermost first\n\n'
        "npus_count: [ 4, 2 ]\nbandwidth: [ 400.0, 50 ]\nlatency: [ 936.25, 1e3 ]\n"
    )
    network = read_network_config(file)
    assert network.topology == ("Ring", "Switch")
    assert network.npus == (4, 2)
    assert network.bandwidth_gib_per_s == (400.0, 50.0)
    assert network.latency_ns == (936.25, 1000.0)
    assert network.num_ranks == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "topology: Ring\n",
        "topology:\n  - Ring\n",
        network_text() + "topology: [Ring]\n",
        network_text("Mesh"),
        network_text(npus="0"),
        network_text(npus="4.5"),
        network_text(npus="-4"),
        network_text().replace("50.0", "fast"),
        network_text().replace("50.0", "nan"),
        network_text().replace("[8]", "[8, 2]"),
        network_text().replace("[8]", "[]"),
        network_text().replace("[8]", "[[8]]"),
        "x: !!python/object [a]\n",
    ],
)
def test_network_file_refuses_everything_else(tmp_path: Path, text: str) -> None:
    file = tmp_path / "network.yml"
    file.write_text(text)
    with pytest.raises(FormatError, match=r"network\.yml"):
        read_network_config(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"preferred-dataset-splits": 0},
        {"preferred-dataset-splits": 2.5},
        {"preferred-dataset-splits": True},
        {"local-mem-bw": -1},
        {"local-mem-bw": "fast"},
        {"roofline-enabled": 2},
        {"scheduling-policy": "RANDOM"},
        {"all-reduce-implementation": "ring"},
        {"all-reduce-implementation": [1]},
    ],
)
def test_system_file_refuses_wrong_values(tmp_path: Path, changes: Json) -> None:
    file = tmp_path / "system.json"
    file.write_text(json.dumps(SYSTEM | changes))
    with pytest.raises(FormatError) as caught:
        read_system_config(file)
    assert next(iter(changes)) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_system_file_that_is_no_object(tmp_path: Path, text: str) -> None:
    file = tmp_path / "system.json"
    file.write_text(text)
    with pytest.raises(FormatError, match=r"system\.json"):
        read_system_config(file)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file"):
        read_memory_config(tmp_path / "none.json")
    file = tmp_path / "memory.json"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="UTF-8"):
        read_memory_config(file)


def test_memory_file(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    file.write_text('{"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-latency": 1}')
    assert read_memory_config(file).has_remote_memory
    file.write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
    assert not read_memory_config(file).has_remote_memory
    file.write_text('{"memory-type": "TAPE"}')
    with pytest.raises(FormatError, match="memory-type"):
        read_memory_config(file)


HUGE = "9" * 5000
DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"local-mem-bw": 1' + b"0" * 400 + b"}", "local-mem-bw is 1000"),
        (f'{{"local-mem-bw": {HUGE}}}'.encode(), "Exceeds the limit"),
        (b'{"local-mem-bw": NaN}', "local-mem-bw is nan"),
        (b'{"peak-perf": 1e999}', "peak-perf is inf"),
        (
            b'{"preferred-dataset-splits": 18446744073709551616}',
            "preferred-dataset-splits is 18446744073709551616",
        ),
        (b'{"preferred-dataset-splits": true}', "preferred-dataset-splits is True"),
        (b'{"scheduling-policy": ["LIFO"]}', "scheduling-policy is"),
        (b'{"all-reduce-implementation": [1]}', "all-reduce-implementation is"),
        (b'{"boost-mode": 0, "boost-mode": 1}', "duplicate key 'boost-mode'"),
        (DEEP.encode(), "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "expected one JSON object"),
        (b"", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": "\x00"}', "not JSON"),
    ],
    ids=range(16),
)
def test_a_damaged_configuration_is_refused_with_a_remedy(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "system.json"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_system_config(path)
    assert message in caught.value.message
    assert (caught.value.path, bool(caught.value.hint)) == (str(path), True)
    assert len(str(caught.value)) < 1200


READERS = (read_system_config, read_memory_config, read_network_config)


@pytest.mark.parametrize("read", READERS)
def test_a_configuration_that_is_no_file_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for place in (
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "dangling",
        tmp_path / "loop",
        tmp_path / ("n" * 300),
    ):
        with pytest.raises(FormatError) as caught:
            read(place)
        assert caught.value.hint


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(SYSTEM).encode())
    assert read_system_config(tmp_path / "s.json").dataset_splits == 4
    (tmp_path / "n.yml").write_bytes(b"\xef\xbb\xbf" + network_text().encode())
    assert read_network_config(tmp_path / "n.yml").num_ranks == 8
