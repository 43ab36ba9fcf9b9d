"""Traces under a configuration of ASTRA-sim with roofline and memory tracker, as it ships for H100s."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from hespas.api import convert, read, write
from hespas.converters.chakra.readiness import is_as_stated
from hespas.graph import GraphBuilder, OpClass, Workload
from hespas.graph.equality import graphs_equal
from hespas.validators.checker import CheckOptions, check
from tests.chakra_messages import reference_messages
from tests.converters.chakra.conftest import messages_of

_FIXTURES = Path(__file__).parents[3] / "fixtures"
_BYTES_PER_NS, _FLOPS_PER_NS = 3350.0, 700_000.0
_ROOFLINE = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 1,
    "active-chunks-per-dimension": 2,
    "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["ring"],
    "reduce-scatter-implementation": ["ring"],
    "all-to-all-implementation": ["ring"],
    "local-mem-bw": 3350,
    "peak-perf": 700,
    "roofline-enabled": 1,
    "track-local-mem": 1,
}
_MESSAGE_NS = 1000


def _nodes(path: Path) -> Iterator[Any]:
    """The nodes of a file, parsed by the protobuf library, hence ``Any``."""
    _, *nodes = messages_of(path.read_bytes())
    return map(reference_messages().node.FromString, nodes)


@dataclass
class _Rank:
    """One rank: what it waits for, its two slots, and its memory tracker."""

    nodes: dict[int, Any]
    waits: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    ready: set[int] = field(default_factory=set[int])
    busy: set[str] = field(default_factory=set[str])
    delays: list[float] = field(default_factory=list[float])
    written: set[str] = field(default_factory=set[str])
    done: int = 0

    def __post_init__(self) -> None:
        for number, node in self.nodes.items():
            self.waits[number] = {*node.data_deps, *node.ctrl_deps}
        self.ready = {number for number, deps in self.waits.items() if not deps}

    def value(self, number: int, name: str) -> Any:
        for attr in self.nodes[number].attr:
            if attr.name == name:
                return getattr(attr, attr.WhichOneof("value"))
        return None

    def finish(self, number: int) -> None:
        self.done += 1
        for side in ("inputs", "outputs"):
            texts = list(self.value(number, side).values)  # the tracker throws where there is no such list
            assert len(texts) % 2 == 0
            for name, size in zip(texts[::2], texts[1::2], strict=True):
                assert int(size) > 0
                assert (name in self.written) == (side == "inputs"), "read before or written after its write"
                self.written.add(name)
        for other, deps in self.waits.items():
            if number in deps:
                deps.remove(number)
                if not deps:
                    self.ready.add(other)


class _Machine:
    """The issue rule: one computation and one communication at a time, lowest id first; receives are free."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.et"), key=lambda path: int(path.name.split(".")[-2]))
        self.ranks = [_Rank({node.id: node for node in _nodes(path)}) for path in files]
        listed = folder / "comm_group.json"
        self.groups: dict[str, list[int]] = json.loads(listed.read_bytes()) if listed.exists() else {}
        self.events: list[tuple[int, int, int, str]] = []
        self.posted: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
        self.counts: dict[tuple[object, ...], int] = defaultdict(int)

    def run(self) -> None:
        for rank in range(len(self.ranks)):
            self.issue(rank, 0)
        while self.events:
            now, rank, number, slot = heapq.heappop(self.events)
            self.ranks[rank].busy.discard(slot)
            self.ranks[rank].finish(number)
            self.issue(rank, now)

    def issue(self, rank: int, now: int) -> None:
        state = self.ranks[rank]
        for number in sorted(state.ready):
            kind = state.nodes[number].type
            slot = {4: "compute", 6: f"receive {number}"}.get(kind, "communication")
            if slot in state.busy:
                continue
            state.ready.discard(number)
            state.busy.add(slot)
            if kind == 4:
                self.compute(rank, number, now)
            else:
                self.communicate(rank, number, now, slot)

    def compute(self, rank: int, number: int, now: int) -> None:
        state = self.ranks[rank]
        flops, moved = (float(state.value(number, name) or 0) for name in ("num_ops", "tensor_size"))
        if moved == 0:  # finishes, but wakes nobody
            state.busy.discard("compute")
            state.finish(number)
            return
        rate = min(_BYTES_PER_NS * (flops / moved), _FLOPS_PER_NS)
        delay = flops / rate if rate else nan
        state.delays.append(delay)
        if not isnan(delay):
            heapq.heappush(self.events, (now + int(delay), rank, number, "compute"))

    def communicate(self, rank: int, number: int, now: int, slot: str) -> None:
        state = self.ranks[rank]
        kind = state.nodes[number].type
        if kind == 7:
            group = state.value(number, "pg_name") or ""
            members = self.groups[group] if group else range(len(self.ranks))
            assert rank in members
            count = self.counts["collective", rank, group]
            self.counts["collective", rank, group] += 1
            where: tuple[object, ...] = ("collective", group, count, state.value(number, "comm_size"))
            needed = len(members)
        else:
            ends = tuple(state.value(number, name) for name in ("comm_src", "comm_dst"))
            pair = (rank, ends[1]) if kind == 5 else (ends[0], rank)
            tag, size = state.value(number, "comm_tag"), state.value(number, "comm_size")
            count = self.counts[kind, *pair, tag, size]
            self.counts[kind, *pair, tag, size] += 1
            where, needed = ("message", *pair, tag, size, count), 2
        self.posted[where].append((rank, number))
        if len(self.posted[where]) == needed:
            for each, node in self.posted[where]:
                kind = self.ranks[each].nodes[node].type
                its = f"receive {node}" if kind == 6 else "communication"
                heapq.heappush(self.events, (now + _MESSAGE_NS, each, node, its))


def _check(path: Path, folder: Path) -> dict[str, str]:
    (folder / "system.json").write_text(json.dumps(_ROOFLINE))
    options = CheckOptions(system_config=folder / "system.json")
    return {found.code: found.message for found in check([path], "astra-sim", options).violations}


@pytest.mark.parametrize(
    "name",
    ["binary/llama_fsdp_tp_local_N8.mlirbc", "stablehlo/mlp_train.mlir", "stablehlo/pipeline_ring.mlir"],
)
def test_fixtures_run_with_roofline_and_memory_tracker(tmp_path: Path, name: str) -> None:
    convert(_FIXTURES / name, tmp_path / "out", hardware="H100")
    machine = _Machine(tmp_path / "out")
    machine.run()
    for rank in machine.ranks:
        assert rank.done == len(rank.nodes) > 5, "a node never finishes"
        assert all(delay > 0 for delay in rank.delays)
        assert rank.written
    assert not {"ET024", "ET033"} & set(_check(tmp_path / "out", tmp_path))


def _counting(flops: float, moved: float, *, useful: float = nan) -> Workload:
    builder = GraphBuilder("few")
    last = -1
    for name, counts in (("first", (flops, moved)), ("second", (2.0, 8.0))):
        last = builder.add_node(
            name_id=builder.strings.add(name),
            op_id=builder.strings.add("op"),
            op_class=OpClass.CUSTOM,
            flops=counts[0],
            bytes_read=counts[1] - counts[1] // 2,
            bytes_written=counts[1] // 2,
            transcendentals=0.0,
            data_deps=[] if last < 0 else [last],
        )
        builder.set(last, duration_ns=5000.0)
    if not isnan(useful):
        builder.set(0, useful_flops=useful)
    return Workload.spmd(builder.build(), 1)


@pytest.mark.parametrize("moved", [0.0, 1.0, 64.0, nan])
@pytest.mark.parametrize(("flops", "useful"), [(0.0, nan), (1.0, 0.0), (1.0, nan), (8.0, 4.0), (nan, nan)])
def test_counts_of_none_come_back(tmp_path: Path, flops: float, useful: float, moved: float) -> None:
    given = _counting(flops, moved, useful=useful)
    write(given, tmp_path / "few.et")
    back = read(tmp_path / "few.et")
    assert isinstance(back, Workload)
    before, after = given.classes[0], back.classes[0]
    for column in ("flops", "useful_flops", "bytes_read", "bytes_written"):
        assert getattr(after, column).tolist() == pytest.approx(getattr(before, column).tolist(), nan_ok=True)
    assert not (after.extra.node >= 0).any(), "nothing is kept beside the columns"
    write(back, tmp_path / "again.et")
    assert (tmp_path / "again.et").read_bytes() == (tmp_path / "few.et").read_bytes()
    stated = _Rank({node.id: node for node in _nodes(tmp_path / "few.et")})
    if not isnan(flops) and not isnan(moved):
        assert stated.value(0, "num_ops") == max(1, flops)
        assert stated.value(0, "tensor_size") == max(1, moved)


def _foreign(codec: Any, path: Path, *lists: dict[str, list[str]]) -> None:
    """A trace of computations in a row with these lists, as another tool writes it."""
    messages = reference_messages()
    nodes: list[bytes] = []
    for number, named in enumerate(lists):
        node = messages.node(
            id=number, name=f"n{number}", type=4, data_deps=range(max(0, number - 1), number)
        )
        node.attr.add(name="is_cpu_op").bool_val = False
        node.attr.add(name="num_ops").int64_val = 4
        node.attr.add(name="tensor_size").uint64_val = 4
        for name, texts in named.items():
            node.attr.add(name=name).string_list.values.extend(texts)
        nodes.append(node.SerializeToString())
    path.write_bytes(codec.framed(messages.metadata(version="0.0.4").SerializeToString(), *nodes))


def test_lists_of_another_tool_are_kept_and_checked(tmp_path: Path, reference: Any) -> None:
    good = {"inputs": ["w", "4"], "outputs": ["a", "4"]}
    path = tmp_path / "w.et"
    for second, said in (
        ({"inputs": ["a", "4"], "outputs": ["b", "4"]}, ""),
        ({"inputs": ["a", "4"], "outputs": ["b", "0"]}, ""),
        ({"inputs": ["a", "4"]}, "no list 'outputs'"),
        ({"inputs": ["a"], "outputs": []}, "is not a list of (name, size) pairs"),
        ({"inputs": ["a", "four"], "outputs": []}, "is not a list of (name, size) pairs"),
        ({"inputs": [], "outputs": ["a", "4"]}, "written before"),
    ):
        _foreign(reference, path, good, second)
        found = _check(path, tmp_path)
        assert said in found.get("ET033", "") if said else "ET033" not in found
        convert(path, tmp_path / "again.et", overwrite=True)
        assert (tmp_path / "again.et").read_bytes() == path.read_bytes()


def test_a_trace_without_lists_gets_none(tmp_path: Path, reference: Any) -> None:
    _foreign(reference, tmp_path / "w.et", {}, {})
    assert "no list 'inputs'" in _check(tmp_path / "w.et", tmp_path)["ET033"]
    convert(tmp_path / "w.et", tmp_path / "again.et")
    assert (tmp_path / "again.et").read_bytes() == (tmp_path / "w.et").read_bytes()
    convert(tmp_path / "w.et", tmp_path / "w.arrow")
    kept = read(tmp_path / "w.arrow")
    assert isinstance(kept, Workload)
    direct = read(tmp_path / "w.et")
    assert isinstance(direct, Workload)
    assert graphs_equal(direct.classes[0], kept.classes[0]) == []


@pytest.mark.parametrize("lists", [{"inputs": [], "outputs": []}, {"outputs": ["m", "8"]}], ids=str)
def test_a_node_of_metadata_reads_and_writes_nothing(
    lists: dict[str, list[str]], tmp_path: Path, reference: Any
) -> None:
    """A writer gives it no lists; those that it has are kept."""
    path = tmp_path / "m.et"
    convert(_FIXTURES / "op_graph" / "mlp.json", path)
    metadata, *nodes = messages_of(path.read_bytes())
    last = reference_messages().node.FromString(nodes[-1])
    last.type = 2
    del last.data_deps[:]
    kept = [attr for attr in last.attr if attr.name not in {"inputs", "outputs"}]
    del last.attr[:]
    last.attr.extend(kept)
    for name, texts in lists.items():
        last.attr.add(name=name).string_list.values.extend(texts)
    path.write_bytes(reference.framed(metadata, *nodes[:-1], last.SerializeToString()))
    convert(path, tmp_path / "again.et")
    assert (tmp_path / "again.et").read_bytes() == path.read_bytes()
    found = read(path)
    assert isinstance(found, Workload)
    assert is_as_stated(found.classes[0])
