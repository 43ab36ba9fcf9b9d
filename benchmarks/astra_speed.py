"""CPU seconds of simulator mode astra: ``python -m benchmarks.astra_speed``.

The benchmark generates five jobs: a ring all-reduce of 1,024 ranks; a Llama-7B-like step of about 1,300 nodes
per rank (32 layers, tensor parallel by 8, gradients reduced between the replicas) on 256 ranks and more; the
same with congestion; a ring of 256 ranks that start at different times; and a pipeline of different stages on
64 ranks with 16 microbatches. The first two run as commands on folders of traces; the time of the same
command on two ranks (interpreter and imports) is subtracted. They also run in this process. Exits with 1 if a
job exceeds its bound: 0.2 s (ring), 1 s (Llama), 1.5 s (different starts) and 2 s (pipeline) of CPU.
ASTRA-sim 518bd51 takes 15.8 s and 29 s of CPU for the first two (the cost of its event list is linear in its
length).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import hespas
from benchmarks.process import run
from hespas.api import simulate
from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    Resource,
    StridedGroups,
    Workload,
)

__all__ = ["llama_like", "main", "ring_all_reduce"]

_TENSOR = 8
_LAYERS = 32
_BOUNDS_S = {"ring": 0.2, "llama": 1.0, "skewed": 1.5, "pipeline": 2.0}
_RUNS = 7


def _node(builder: GraphBuilder, kind: NodeKind, deps: list[int], micros: int = 0) -> int:
    name = builder.strings.add("compute" if kind is NodeKind.COMPUTE else "collective")
    node = builder.add_node(
        name_id=name, op_id=name, kind=kind, data_deps=deps, flops=0.0, transcendentals=0.0, bytes_read=0.0,
        bytes_written=0.0, op_class=OpClass.ELEMENTWISE if kind is NodeKind.COMPUTE else OpClass.COLLECTIVE,
    )  # fmt: skip
    builder.set(node, resource=int(Resource.DEVICE))
    if micros:
        builder.set(node, duration_ns=1000.0 * micros)
    return node


def _reduced(builder: GraphBuilder, size: int, groups: GroupSet | None, deps: list[int]) -> int:
    node = _node(builder, NodeKind.COLLECTIVE, deps)
    row = builder.group_set(groups) if groups is not None else -1
    builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=row, comm_bytes=size)
    return node


def _job(builder: GraphBuilder, ranks: int) -> Workload:
    return Workload(
        name="job", classes=(builder.build(),), rank_class=np.zeros(ranks, np.int32),
    )  # fmt: skip


def ring_all_reduce(ranks: int, size: int = 1 << 20) -> Workload:
    """Return a job with one all-reduce of all ranks; ``size`` is in bytes."""
    builder = GraphBuilder("all_reduce")
    _reduced(builder, size, None, [])
    return _job(builder, ranks)


def llama_like(ranks: int) -> Workload:
    """Return a step of 32 layers, forward (17 nodes per layer) and backward (23). Each pass of a layer has
    two all-reduces of activations over 8 ranks; backward also starts an all-reduce of the layer's gradients
    over the replicas, which overlaps the rest of the pass.
    """
    builder = GraphBuilder("llama")
    tensor = StridedGroups(((ranks // _TENSOR, _TENSOR),), ((_TENSOR, 1),))
    data = StridedGroups(((_TENSOR, 1),), ((ranks // _TENSOR, _TENSOR),))
    last: list[int] = []
    for computations in (15, 20):
        for layer in range(_LAYERS):
            for half in range(2):
                for step in range(computations // 2 + half * (computations % 2)):
                    last = [_node(builder, NodeKind.COMPUTE, last, 20 + (7 * layer + step) % 40)]
                last = [_reduced(builder, 1 << 24, tensor, last)]
            if computations == 20:
                _reduced(builder, 50_593_792, data, last)
    return _job(builder, ranks)


def skewed_ring(ranks: int) -> Workload:
    """Return a job with one all-reduce of ranks that start at different times."""
    builders = [GraphBuilder(f"rank {rank}") for rank in range(ranks)]
    for rank, builder in enumerate(builders):
        _reduced(builder, 1 << 20, None, [_node(builder, NodeKind.COMPUTE, [], rank % 7 + 1)])
    classes = tuple(builder.build() for builder in builders)
    return Workload(name="job", classes=classes, rank_class=np.arange(ranks, dtype=np.int32))


def pipeline(folder: Path, microbatches: int = 16) -> Workload:
    """Generate and read a Llama-3-8B step on 64 ranks (4 replicas, tensor parallel by 4, 4 stages, a norm of
    all gradients at the end) with times on H100.
    """
    hespas_command = str(Path(sys.executable).with_name("hespas"))
    layout = ["--dp", "4", "--tp", "4", "--pp", "4", "--global-batch", str(4 * microbatches)]
    run(
        [
            hespas_command,
            "generate",
            "llm",
            "llama-3-8b",
            *layout,
            "--hardware",
            "H100-SXM",
            "--out",
            str(folder),
        ]
    )
    read = hespas.read(folder)
    assert isinstance(read, Workload)
    return read


def _system(folder: Path, topology: list[str], npus: list[int], chunks: int = 1) -> list[str]:
    """Write the system and network files. Return the options of the command that name them."""
    implementations = {
        f"{kind}-implementation": ["ring"] * len(npus)
        for kind in ("all-reduce", "all-gather", "reduce-scatter")
    }
    system: dict[str, object] = {
        "preferred-dataset-splits": 4,
        "local-mem-bw": 1600,
        "active-chunks-per-dimension": chunks,
    }
    system |= implementations
    (folder / "system.json").write_text(json.dumps(system))
    lists = {
        "topology": topology,
        "npus_count": [str(each) for each in npus],
        "bandwidth": ["400.0", "50.0"][: len(npus)],
        "latency": ["500.0", "1000.0"][: len(npus)],
    }
    text = "".join(f"{key}: [{', '.join(each)}]\n" for key, each in lists.items())
    (folder / "network.yml").write_text(text)
    files = ["--system-config", str(folder / "system.json"), "--network-config", str(folder / "network.yml")]
    return ["--mode", "astra", *files]


def _command(workload: Workload, folder: Path, topology: list[str], npus: list[int]) -> list[str]:
    folder.mkdir()
    hespas.write(workload, folder / "traces", format="chakra")
    options = _system(folder, topology, npus)
    hespas_command = str(Path(sys.executable).with_name("hespas"))
    return [hespas_command, "simulate", str(folder / "traces"), *options, "--quiet"]


def _beyond(command: list[str], start: list[str]) -> float:
    """Return the median difference of CPU seconds between ``command`` and ``start``, which run in turn."""
    pairs = [(run(command), run(start)) for _ in range(_RUNS)]
    return statistics.median(
        each.user_s + each.system_s - other.user_s - other.system_s for each, other in pairs
    )


def _value(
    workload: Workload, folder: Path, topology: list[str], npus: list[int], *, congested: int = 0
) -> float:
    """Return CPU seconds of the simulation alone, without reading. ``congested`` is the number of active
    chunks per dimension of a simulation with congestion (0: without congestion).
    """
    folder.mkdir()
    hespas.write(workload, folder / "traces", format="chakra")
    read = hespas.read(folder / "traces")
    assert isinstance(read, Workload)
    _system(folder, topology, npus, congested or 1)
    start = time.process_time()
    simulate(
        read, mode="astra", system_config=folder / "system.json", network_config=folder / "network.yml",
        backend="aware" if congested else "unaware",
    )  # fmt: skip
    return time.process_time() - start


def main() -> int:
    """Measure and print. Return 1 if a bound is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--many", type=int, default=4096, help="ranks of the largest Llama job (default: %(default)s)"
    )
    many: int = parser.parse_args().many
    missed = False
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        start = _command(ring_all_reduce(2), folder / "start", ["Ring"], [2])
        for name, workload, topology, npus in (
            ("ring", ring_all_reduce(1024), ["Ring"], [1024]),
            ("llama", llama_like(256), ["Switch", "Switch"], [8, 32]),
        ):
            spent_s = _beyond(_command(workload, folder / name, topology, npus), start)
            alone_s = _value(workload, folder / f"{name}-value", topology, npus)
            nodes = sum(map(len, workload.classes))
            print(
                f"{name}: {workload.num_ranks:,} ranks of {nodes:,} nodes each: command {spent_s:.2f} s "
                f"CPU more than on two ranks, simulation alone {alone_s:.3f} s"
            )
            missed |= spent_s > _BOUNDS_S[name]
        for name, workload, topology, npus in (
            ("skewed", skewed_ring(256), ["Ring"], [256]),
            ("pipeline", pipeline(folder / "llama-3-8b"), ["FullyConnected", "Switch"], [4, 16]),
        ):
            alone_s = _value(workload, folder / name, topology, npus)
            print(f"{name}: {workload.num_ranks:,} ranks: simulation alone {alone_s:.3f} s CPU")
            missed |= alone_s > _BOUNDS_S[name]
        alone_s = _value(llama_like(many), folder / "many", ["Switch"] * 2, [8, many // 8])
        print(f"llama: {many:,} ranks: simulation alone {alone_s:.3f} s CPU")
        for name, workload, wire, chunks in (
            ("ring", ring_all_reduce(256), "Ring", 1),
            ("ring, 2 chunks at once", ring_all_reduce(256), "Ring", 2),
            ("llama", llama_like(256), "Switch", 1),
        ):
            aware_s = _value(workload, folder / f"aware {name}", [wire], [256], congested=chunks)
            nodes = 256 * sum(map(len, workload.classes))
            ratio = f"{aware_s / nodes * 1e6:,.1f} us per node"
            print(f"{name}, with congestion: 256 ranks: {aware_s:.3f} s CPU, {ratio}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
