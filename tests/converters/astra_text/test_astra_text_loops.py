"""Random text workloads: the graph's dependencies against the simulator's loops, walked event by event.

The walk below is the loop of each policy in ``Workload.cc`` of ASTRA-sim 1.0, told once more in another way:
one clock, computations in turn, collectives beside them, and waits. The graph is timed with the same
collectives by the longest path. Both must start and end everything at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from hespas.converters import ReadOptions
from hespas.converters.astra_text import FORMAT
from hespas.graph import CollectiveKind, Diagnostics, OpGraph, Workload

_RANKS = 8
_PHASES = ("fwd", "ig", "wg")
_CYCLES_A_BYTE = {"ALLREDUCE": 2, "ALLGATHER": 3, "ALLTOALL": 5, "REDUCESCATTER": 7}
_WORDS = {
    CollectiveKind.ALL_REDUCE: "ALLREDUCE",
    CollectiveKind.ALL_GATHER: "ALLGATHER",
    CollectiveKind.ALL_TO_ALL: "ALLTOALL",
    CollectiveKind.REDUCE_SCATTER: "REDUCESCATTER",
}
_NEVER_RUN = {
    "DATA": ("fwd", "ig"),
    "HYBRID_DLRM": ("fwd", "ig"),
    "HYBRID_DLRM_ENHANCED": ("fwd", "ig"),
    "MODEL": ("wg",),
    "DISTRIBUTED_INFERENCE": ("wg",),
}
_POLICIES = (
    *_NEVER_RUN,
    "MICRO",
    "HYBRID_DATA_MODEL",
    "HYBRID_MODEL_DATA",
    "HYBRID_CUSTOMIZED",
    "HYBRID_TRANSFORMER",
    "HYBRID_TRANSFORMER_FWD_IN_BCKWD",
)
_OWN_POLICIES = ("DATA", "MODEL", "HYBRID_DATA_MODEL", "HYBRID_MODEL_DATA")


class Span(NamedTuple):
    """A computation, or a collective with the update behind it; times in cycles."""

    name: str
    start: int
    end: int


class _Layer(NamedTuple):
    name: str
    cycles: dict[str, int]
    collective: dict[str, str]
    size_bytes: dict[str, int]
    update: int
    own: str

    def text(self, *, customised: bool) -> str:
        phases = (f"{self.cycles[p]} {self.collective[p]} {self.size_bytes[p]}" for p in _PHASES)
        return " ".join((self.name, "-1", *phases, str(self.update), *([self.own] if customised else [])))


class _Job(NamedTuple):
    policy: str
    layers: list[_Layer]
    last_bottom: int
    checkpoints: list[int]
    initiates: list[int]

    def text(self) -> str:
        head = [self.policy]
        if "TRANSFORMER" in self.policy:
            head += ["model_parallel_NPU_group:", "4"]
        if self.policy.endswith("BCKWD"):
            for word, numbers in (
                ("checkpoints:", self.checkpoints),
                ("checkpoint_initiates:", self.initiates),
            ):
                head += [word, str(len(numbers)), *map(str, numbers)]
        if "DLRM" in self.policy:
            head.append(str(self.last_bottom))
        customised = self.policy == "HYBRID_CUSTOMIZED"
        lines = [layer.text(customised=customised) for layer in self.layers]
        return "\n".join((" ".join(head), str(len(lines)), *lines, ""))


def _random_job(policy: str, random: Random) -> _Job:
    count = random.randrange(1, 9)
    layers: list[_Layer] = []
    for number in range(count):
        kinds = {phase: random.choice(("NONE", *_CYCLES_A_BYTE)) for phase in _PHASES}
        if "DLRM" in policy and number and kinds["fwd"] == "ALLTOALL":
            kinds["fwd"] = "NONE"  # such a layer skips the join; it is run over no dimension
        layers.append(
            _Layer(
                f"layer{number}",
                {phase: random.randrange(50) for phase in _PHASES},
                kinds,
                {phase: 0 if kinds[phase] == "NONE" else random.choice((0, 1, 16, 100)) for phase in _PHASES},
                random.choice((0, 3, 20)),
                random.choice(_OWN_POLICIES),
            )
        )
    most = count // 2 * 2 if policy.endswith("BCKWD") else 0
    marked = sorted(random.sample(range(count), min(most, random.choice((0, 2, 4)))))
    return _Job(policy, layers, random.randrange(count), marked[::2], marked[1::2])


def _lasts(kind: str, size_bytes: int) -> int:
    return 1 + _CYCLES_A_BYTE[kind] * size_bytes


@dataclass(slots=True)
class _Walk:
    """One rank going through its loop."""

    job: _Job
    clock: int = 0
    computed: list[Span] = field(default_factory=list[Span])
    exchanged: list[Span] = field(default_factory=list[Span])
    done: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def compute(self, number: int, phase: str, name: str = "") -> None:
        layer = self.job.layers[number]
        end = self.clock + layer.cycles[phase]
        self.computed.append(Span(f"{layer.name}.{name or phase}", self.clock, end))
        self.clock = end

    def issue(self, number: int, phase: str, name: str = "") -> None:
        layer, policy = self.job.layers[number], self.job.policy
        kind, size_bytes = layer.collective[phase], layer.size_bytes[phase]
        own = layer.own if policy == "HYBRID_CUSTOMIZED" else policy
        is_embedding = "DLRM" in policy and number == 0
        if not size_bytes or (phase in _NEVER_RUN.get(own, ()) and not is_embedding):
            return
        end = self.clock + _lasts(kind, size_bytes) + layer.update
        self.exchanged.append(Span(f"{layer.name}.{name or phase}", self.clock, end))
        self.done[phase, number] = end

    def wait(self, number: int, phase: str) -> None:
        self.clock = max(self.clock, self.done.get((phase, number), 0))

    def forward(self, numbers: range, name: str = "") -> None:
        for number in numbers:
            self.compute(number, "fwd", name)
            self.issue(number, "fwd", name)
            self.wait(number, "fwd")

    def run(self) -> None:
        numbers = range(len(self.job.layers))
        policy = self.job.policy
        if policy == "MICRO":
            self.issue(0, "wg")
        elif policy == "DISTRIBUTED_INFERENCE":
            self.forward(numbers)
        elif policy in _NEVER_RUN and policy != "MODEL":
            self.weights_first(numbers, is_recommendation=policy != "DATA")
        else:
            self.forward(numbers)
            self.inputs_first(numbers, sums_first="TRANSFORMER" in policy)

    def weights_first(self, numbers: range, *, is_recommendation: bool) -> None:
        for number in numbers:
            self.compute(number, "fwd")
            if is_recommendation and self.job.layers[number].collective["fwd"] == "ALLTOALL":
                self.issue(number, "fwd")
            elif is_recommendation and number == self.job.last_bottom:
                self.wait(0, "fwd")
        for number in reversed(numbers):
            self.compute(number, "wg")
            self.issue(number, "wg")
            if number:
                self.compute(number, "ig")
            if is_recommendation and number == self.job.last_bottom + 1:
                self.issue(0, "ig")

    def inputs_first(self, numbers: range, *, sums_first: bool) -> None:
        for number in reversed(numbers):
            if number in self.job.initiates:
                start = max(layer for layer in self.job.checkpoints if layer < number)
                self.forward(range(start, number), "again")
            self.compute(number, "ig")
            if number or sums_first:
                self.issue(number, "ig")
            self.compute(number, "wg")
            self.issue(number, "wg")
            self.wait(number, "ig")


def _timed(graph: OpGraph) -> tuple[list[Span], list[Span]]:
    """Computations and collectives of a graph by its dependencies alone."""
    table = graph.collectives
    lasts = {
        int(table.node[row]): _lasts(_WORDS[CollectiveKind(table.kind[row])], int(table.comm_bytes[row]))
        for row in range(len(table))
    }
    computed: list[Span] = []
    exchanged: dict[int, Span] = {}
    ends: list[int] = []
    for node in range(len(graph)):
        needs: list[int] = [*graph.data_deps.row(node).tolist(), *graph.control_deps.row(node).tolist()]
        start = max((ends[need] for need in needs), default=0)
        name, _, last = graph.node_name(node).rpartition(".")
        ends.append(start + (lasts[node] if node in lasts else int(graph.duration_ns[node])))
        if node in lasts:
            exchanged[node] = Span(name, start, ends[node])
        elif last == "update":
            exchanged[needs[0]] = exchanged[needs[0]]._replace(end=ends[node])
        else:
            computed.append(Span(f"{name}.{last}", start, ends[node]))
    return computed, list(exchanged.values())


@pytest.mark.parametrize("policy", _POLICIES)
def test_a_graph_runs_as_the_loop_of_its_policy_does(tmp_path: Path, policy: str) -> None:
    random = Random(policy)
    assert FORMAT.read
    for _ in range(60):
        job = _random_job(policy, random)
        path = tmp_path / "job.txt"
        path.write_text(job.text())
        workload = FORMAT.read(path, ReadOptions(num_devices=_RANKS), Diagnostics())
        assert isinstance(workload, Workload)
        walk = _Walk(job)
        walk.run()
        assert _timed(workload.classes[0]) == (walk.computed, walk.exchanged), job.text()
