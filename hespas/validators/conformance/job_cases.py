"""Cases of whole jobs: collectives, messages, groups, configurations of ASTRA-sim, memory and random jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hespas.converters import WriteOptions, load_format
from hespas.generators.random_dag import RandomJob
from hespas.graph import Diagnostics
from hespas.schemas.chakra.tables import NodeType
from hespas.simulator.astra.configuration import Backend
from hespas.validators.conformance.case import (
    GROUP_FILE,
    PREFIX,
    ConfiguredCases,
    counts_of_file,
    network_text,
    system_text,
)
from hespas.validators.conformance.trace_cases import step
from hespas.validators.conformance.traces import TraceNode, Typed, Value, collective, compute, message

__all__ = [
    "add_algorithms",
    "add_collectives",
    "add_configurations",
    "add_groups",
    "add_memory",
    "add_messages",
    "add_random_jobs",
    "add_roofline",
]

_SIMULATED = ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL")
_OTHERS = ("REDUCE", "GATHER", "SCATTER", "REDUCE_SCATTER_BLOCK", "BARRIER")
_GRID = {"1": [0, 1], "2": [2, 3]}


def _before(comm: TraceNode, *more: TraceNode) -> list[TraceNode]:
    """Return a rank with a computation before some communication."""
    return [compute(1), comm, *more]


def add_collectives(kit: ConfiguredCases) -> None:
    """Add each kind of collective, sizes at the limits, and collectives that lack something."""
    for kind in _SIMULATED:
        nodes = _before(collective(2, 1, kind=kind, size=1 << 18), compute(3, 2))
        about = f"{kind} over all ranks of a switch."
        kit.add(f"collectives/{kind.lower()}", about, [nodes] * 4, profile="astra-sim")
    replay = [compute(1), replace(collective(2, 1, kind="BROADCAST"), micros=40), compute(3, 2)]
    about = "BROADCAST, for which ASTRA-sim replays the recorded duration."
    kit.add("collectives/broadcast", about, [replay] * 4, "ET011", check="warn", profile="astra-sim")
    for kind in _OTHERS:
        nodes = _before(collective(2, 1, kind=kind), compute(3, 2))
        kit.add(f"collectives/{kind.lower()}", f"{kind}, which a trace may have.", [nodes] * 2, run="skip")
    nodes = _before(collective(2, 1, kind="GATHER"), compute(3, 2))
    about = "GATHER, for which ASTRA-sim has no algorithm."
    kit.add("collectives/gather-run", about, [nodes] * 2, "ET011", profile="astra-sim")
    for name, size in (("odd-size", 1_000_003), ("64-gib", 1 << 36)):
        kit.add(f"collectives/{name}", f"An all-reduce of {size:,} bytes.", [step(size)] * 2)
    good = collective(2, 1)
    broken: Mapping[str, tuple[str, TraceNode, str]] = {
        "no-type": ("A collective without comm_type.", good.without("comm_type"), "ET011"),
        "no-size": ("A collective without comm_size.", good.without("comm_size"), "ET011"),
        "unknown-type": ("A collective of type 77.", good.with_attrs(comm_type=77), "ET011"),
        "zero-size": ("A collective of 0 bytes.", good.with_attrs(comm_size=0), "ET012"),
        "negative-size": ("A collective of -8 bytes.", good.with_attrs(comm_size=-8), "ET011"),
    }
    for name, (about, node, rule) in broken.items():
        # ASTRA-sim raises a size of 0 to its least size
        kit.add(
            f"collectives/{name}", about, [_before(node)] * 2, rule,
            run="skip" if rule == "ET012" else "fail",
            read="either" if name == "negative-size" else "accept",
            counts=[None, None] if name == "negative-size" else None,
        )  # fmt: skip


def add_messages(kit: ConfiguredCases) -> None:
    """Add sends and receives that match, and pairs in which one property differs."""
    send, receive = (message(kind, 2, 1, source=0, target=1) for kind in ("SEND", "RECV"))
    wrapped = [node.with_attrs(comm_tag=500_000_001) for node in (send, receive)]
    empty = [node.with_attrs(comm_size=0) for node in (send, receive)]
    untagged = [node.without("comm_tag") for node in (send, receive)]
    unsized = [node.without("comm_size") for node in (send, receive)]
    bare = [send.without("comm_src"), receive.without("comm_dst")]
    pairs: Mapping[str, tuple[str, TraceNode, TraceNode, str]] = {
        "pair": ("A message from rank 0 to rank 1.", send, receive, ""),
        "no-source": ("Messages without the number of the own rank.", bare[0], bare[1], ""),
        "size-differs": ("A receive of another size.", send, receive.with_attrs(comm_size=4097), "ET015"),
        "tag-differs": ("A receive with another tag.", send, receive.with_attrs(comm_tag=2), "ET015"),
        "source-differs": ("A receive of the own message.", send, receive.with_attrs(comm_src=1), "ET014"),
        "no-tag": ("Messages without a tag.", untagged[0], untagged[1], "ET014"),
        "no-peer": ("A send without its peer.", send.without("comm_dst"), receive, "ET014"),
        "no-size": ("Messages without a size.", unsized[0], unsized[1], "ET014"),
        "outside": ("A send to rank 9 of 2.", send.with_attrs(comm_dst=9), receive, "ET014"),
        "other-source": ("A send of another rank.", send.with_attrs(comm_src=1), receive, "ET014"),
        "zero-size": ("Messages of 0 bytes.", empty[0], empty[1], "ET012"),
    }
    for name, (about, first, second, rule) in pairs.items():
        kit.add(f"messages/{name}", about, [_before(first), _before(second)], *([rule] if rule else []))
    about = "A tag above ASTRA-sim's modulus."
    kit.add("messages/large-tag", about, [_before(node) for node in wrapped], "ET036", check="warn")
    about = "A message that is never received."
    kit.add("messages/no-receive", about, [_before(send), [compute(1)]], "ET015", run="skip")
    about = "A receive of a message that is never sent."
    kit.add("messages/no-send", about, [[compute(1)], _before(receive)], "ET015")
    ring = [
        [
            compute(1, micros=2 + rank),
            message("SEND", 2, 1, source=rank, target=(rank + 1) % 4, size=65536, tag=7),
            message("RECV", 3, 1, source=(rank - 1) % 4, target=rank, size=65536, tag=7),
            compute(4, 3),
        ]
        for rank in range(4)
    ]
    kit.add("messages/ring", "Each rank sends to the next, as in a permute.", ring, profile="astra-sim")
    pipeline: list[list[TraceNode]] = [[] for _ in range(4)]
    for batch in range(3):
        for rank, nodes in enumerate(pipeline):
            number, last = 10 * batch, [nodes[-1].id] if nodes else []
            if rank:
                nodes.append(message("RECV", number + 1, *last, source=rank - 1, target=rank, tag=batch))
                last = [number + 1]
            nodes.append(compute(number + 2, *last, micros=10))
            if rank < 3:
                nodes.append(message("SEND", number + 3, number + 2, source=rank, target=rank + 1, tag=batch))
    kit.add("messages/pipeline", "Three microbatches through four stages.", pipeline, profile="astra-sim")
    waits = [
        [
            message("RECV", 1, source=1 - rank, target=rank),
            message("SEND", 2, 1, source=rank, target=1 - rank),
        ]
        for rank in range(2)
    ]
    kit.add("messages/deadlock", "Two ranks that both receive before they send.", waits, "ET021")


def _in_group(name: str, number: int = 2) -> TraceNode:
    return collective(number, number - 1, size=1 << 16, pg_name=name)


def add_groups(kit: ConfiguredCases) -> None:
    """Add process groups: legal ones, illegal ones, and orders that deadlock."""
    flat = partial(kit.add, profile="astra-sim")
    add = partial(flat, system=system_text(algorithm=["ring", "ring"]), network=_two_dimensions(4))
    grid = [_before(_in_group("1" if rank < 2 else "2")) for rank in range(4)]
    columns = [_before(_in_group(str(1 + rank % 2))) for rank in range(4)]
    three = [_before(_in_group("1")) if rank != 1 else [compute(1)] for rank in range(4)]
    both = [_before(_in_group("1" if rank < 2 else "2"), collective(3, 2)) for rank in range(4)]
    add("groups/rows", "Two groups of neighbouring ranks.", grid, groups=_GRID)
    add("groups/columns", "Two groups with stride 2.", columns, groups={"1": [0, 2], "2": [1, 3]})
    about = "Groups whose members are in descending order."
    add("groups/reordered", about, grid, groups={"1": [1, 0], "2": [3, 2]})
    add("groups/three-of-four", "A group of three ranks.", three, groups={"1": [0, 3, 2]})
    add("groups/group-and-world", "A group collective, then one over all ranks.", both, groups=_GRID)
    for name, text in (("no-name", ""), ("zero-name", "0")):
        world = [_before(_in_group(text))] * 4
        add(f"groups/{name}", f"pg_name {text!r}, which is the group of all ranks.", world, groups=_GRID)
    about = "Two groups with one collective on a 1-D network."
    flat("groups/one-dimension", about, grid, "ET031", groups=_GRID, check="warn")
    named, unknown, first, large = ([_before(_in_group(name))] * 4 for name in ("dp", "7", "1", "3000"))
    alone = [_before(_in_group("1")) if rank == 0 else [compute(1)] for rank in range(4)]
    add("groups/text-name", "A group that is named by text.", named, "ET018", groups={"dp": [0, 1, 2, 3]})
    add("groups/unknown-name", "A group that the file does not list.", unknown, "ET018", groups=_GRID)
    add("groups/malformed-file", "A file of groups that is cut off.", grid, "ET019", groups='{"1": [0, 1')
    about = "A group with a rank that the job does not have."
    add("groups/outside", about, grid, "ET019", groups={"1": [0, 1, 9], "2": [2, 3]})
    about = "A group that lists a rank twice."
    add("groups/repeated-rank", about, grid, "ET019", groups={"1": [0, 1, 1], "2": [2, 3]})
    add("groups/not-member", "A collective of ranks outside of its group.", first, "ET019", groups=_GRID)
    about = "A group of one rank, which never finishes in ASTRA-sim."
    add("groups/one-rank", about, alone, "ET019", groups={"1": [0]})
    add("groups/no-ranks", "A group without ranks.", alone, "ET019", groups={"1": []})
    about = "A group id above the range of stream ids."
    add("groups/large-id", about, large, "ET028", groups={"3000": [0, 1, 2, 3]}, check="warn")
    kinds = [[compute(1), collective(2, 1, kind="ALL_REDUCE" if rank else "ALL_GATHER")] for rank in range(2)]
    sizes = [[compute(1), collective(2, 1, size=(1 << 20) + 4096 * rank)] for rank in range(2)]
    fewer = [[compute(1), collective(2, 1), *([collective(3, 2)] if rank else [])] for rank in range(2)]
    orders = [
        [compute(1), *(collective(number, number - 1, kind=kind) for number, kind in enumerate(pair, 2))]
        for pair in (_SIMULATED[:2], _SIMULATED[1::-1])
    ]
    flat("groups/kinds-differ", "Ranks that call different collectives.", kinds, "ET020")
    flat("groups/sizes-differ", "Ranks that call a collective with different sizes.", sizes, "ET020")
    flat("groups/call-missing", "A rank that calls one collective less.", fewer, "ET020")
    flat("groups/orders-differ", "Ranks that call two collectives in different orders.", orders, "ET020")
    inverted = [
        [compute(1), *(_in_group(name, number) for number, name in enumerate(names, 2))]
        for names in ("12", "21", "1", "2")
    ]
    about = "Two ranks that call two groups in opposite orders."
    add("groups/inverted-orders", about, inverted, "ET021", groups={"1": [0, 1, 2], "2": [0, 1, 3]})
    uneven = [
        _before(_in_group("1"), collective(3, 2)) if rank < 2 else _before(collective(2, 1))
        for rank in range(4)
    ]
    about = "Ranks with different numbers of streams before a collective of all ranks."
    add("groups/uneven-streams", about, uneven, "ET029", groups={"1": [0, 1]})


def add_configurations(kit: ConfiguredCases) -> None:
    """Add jobs that the given configuration of ASTRA-sim cannot run."""
    add = partial(kit.add, profile="astra-sim")
    usual = [step()] * 2
    tiny = _before(collective(2, 1, kind="ALL_GATHER", size=3))
    about = "An all-gather of 3 bytes in 4 splits."
    add("configuration/gather-below-splits", about, [tiny] * 2, "ET013")
    about = "An all-reduce of fewer bytes than splits x ranks."
    add("configuration/padded", about, [step(5)] * 2, "ET013", check="warn")
    halving, tree = system_text(algorithm="halvingDoubling"), system_text(algorithm="doubleBinaryTree")
    about = "Halving-doubling over 3 ranks."
    add("configuration/halving-of-three", about, [step()] * 3, "ET025", system=halving)
    all_to_all = [_before(collective(2, 1, kind="ALL_TO_ALL"))] * 2
    about = "An all-to-all by halving-doubling."
    add("configuration/halving-all-to-all", about, all_to_all, "ET025", system=halving)
    add("configuration/tree-of-six", "A double binary tree over 6 ranks.", [step()] * 6, "ET025", system=tree)
    splits, algorithm, unknown, tracked = (
        system_text(preferred_dataset_splits=None), system_text(all_reduce_implementation=None),
        system_text(algorithm="zigzag"), system_text(track_local_mem=1),
    )  # fmt: skip
    add("configuration/no-splits", "No preferred-dataset-splits.", usual, "ET026", system=splits)
    about = "No algorithm for a collective of the job."
    add("configuration/no-algorithm", about, usual, "ET026", system=algorithm)
    about = "An algorithm that ASTRA-sim does not have."
    add("configuration/unknown-algorithm", about, usual, "ET026", system=unknown)
    load = [compute(1), TraceNode(id=2, type=NodeType.MEM_LOAD, data=(1,), attrs={"tensor_size": 4096})]
    add("configuration/no-remote-memory", "A load without remote memory.", [load] * 2, "ET027")
    about = "The memory tracker without lists of tensors."
    add("configuration/no-tensor-lists", about, usual, "ET033", system=tracked)
    ends = [
        [compute(1), message("SEND", 2, 1, source=0, target=1)],
        [compute(1, is_cpu_op=Typed("bool", True)), message("RECV", 2, 1, source=0, target=1)],
    ]
    about = "A rank with a CPU operation that ends with a receive."
    add("configuration/ends-with-receive", about, ends, "ET034")
    about, rings = "The congestion-aware backend on two dimensions.", system_text(algorithm=["ring", "ring"])
    add(
        "configuration/aware-2-d", about, [step()] * 4, "ET032", backend="aware",
        system=rings, network=_two_dimensions(4),
    )  # fmt: skip
    about, ring = "The congestion-aware backend on a ring of 2.", network_text(2, "Ring")
    add("configuration/aware-ring-of-two", about, usual, "ET032", backend="aware", network=ring)


def _timed(number: int, *data: int, flops: int | None, size: int | None) -> TraceNode:
    attrs: dict[str, Value] = {"num_ops": flops} if flops is not None else {}
    attrs |= {"tensor_size": size} if size is not None else {}
    return compute(number, *data, micros=1, **attrs)


def add_roofline(kit: ConfiguredCases) -> None:
    """Add jobs in roofline mode: both bounds, and missing or zero counts."""
    system = system_text(roofline_enabled=1, peak_perf=900)

    def add(name: str, about: str, *rules: str, flops: int | None, size: int | None) -> None:
        nodes = [_timed(1, flops=flops, size=size), collective(2, 1), _timed(3, 2, flops=10**9, size=10**6)]
        kit.add(f"roofline/{name}", about, [nodes] * 2, *rules, profile="astra-sim", system=system)

    add("compute-bound", "A computation at the peak rate.", flops=10**12, size=10**6)
    add("memory-bound", "A computation at the memory bandwidth.", flops=10**6, size=10**9)
    add("instant", "A first computation of 1 FLOP, which takes 0 ns.", "ET035", flops=1, size=1)
    add("no-flops", "A computation without num_ops.", "ET024", flops=None, size=4096)
    add("no-bytes", "A computation without tensor_size.", "ET024", flops=4096, size=None)
    add("zero-flops", "A computation of 0 FLOPs, which never finishes.", "ET024", flops=0, size=4096)
    add("zero-bytes", "A computation of 0 bytes, after which nothing starts.", "ET024", flops=4096, size=0)
    host = [replace(step()[0].with_attrs(is_cpu_op=Typed("bool", True)), micros=7), *step()[1:2]]
    about = "A computation on the CPU, which takes its recorded duration."
    kit.add("roofline/cpu", about, [host] * 2, "ET017", check="warn", profile="astra-sim", system=system)


def add_memory(kit: ConfiguredCases) -> None:
    """Add loads and stores with each kind of remote memory, and lists of tensors."""
    figures = '"remote-mem-latency": 1000, "remote-mem-bw": 50'
    texts = {
        "per-npu": f'{{"memory-type": "PER_NPU_MEMORY_EXPANSION", {figures}}}\n',
        "per-node": f'{{"memory-type": "PER_NODE_MEMORY_EXPANSION", {figures}, "num-nodes": 2, '
        '"num-npus-per-node": 2}\n',
        "pool": f'{{"memory-type": "MEMORY_POOL", {figures}}}\n',
    }
    attrs: Mapping[str, Value] = {"tensor_size": 1 << 20}
    load = TraceNode(id=2, name="load", type=NodeType.MEM_LOAD, data=(1,), attrs=attrs)
    store = TraceNode(id=4, name="store", type=NodeType.MEM_STORE, data=(3,), attrs=attrs)
    nodes = [compute(1), load, compute(3, 2), store]
    for name, text in texts.items():
        about = f"Loads and stores of 1 MiB with memory {name}."
        kit.add(f"memory/{name}", about, [nodes] * 4, profile="astra-sim", memory=text)
    add = partial(kit.add, profile="astra-sim", memory=texts["per-npu"])
    unsized, empty = load.without("tensor_size"), load.with_attrs(tensor_size=0)
    add("memory/no-size", "A load without tensor_size.", [[compute(1), unsized]] * 2, "ET027")
    add("memory/zero-size", "A load of 0 bytes.", [[compute(1), empty]] * 2, "ET027", check="warn")
    written = {number: f"tensor_{number}" for number in range(1, 5)}
    listed = [
        node.with_attrs(
            inputs=[text for dep in node.data for text in (written[dep], "4096")],
            outputs=[written[node.id], "4096"],
        )
        for node in step()
    ]
    about = "Lists of tensors for ASTRA-sim's memory tracker."
    tracked = system_text(track_local_mem=1)
    kit.add("memory/tracked", about, [listed] * 2, profile="astra-sim", system=tracked)


def add_algorithms(kit: ConfiguredCases) -> None:
    """Add collectives by each algorithm of ASTRA-sim, on each topology and backend."""
    rows: list[tuple[str, str, str, Backend]] = [
        *(("ring", "Ring", kind, "unaware") for kind in _SIMULATED),
        *(("direct", "FullyConnected", kind, "unaware") for kind in ("ALL_REDUCE", "ALL_TO_ALL")),
        *(("halvingDoubling", "Switch", kind, "unaware") for kind in ("ALL_REDUCE", "ALL_GATHER")),
        ("doubleBinaryTree", "Ring", "ALL_REDUCE", "unaware"),
        ("ring", "Ring", "ALL_REDUCE", "aware"),
        ("direct", "Switch", "ALL_REDUCE", "aware"),
    ]
    for algorithm, topology, kind, backend in rows:
        nodes = _before(collective(2, 1, kind=kind, size=3 << 18))
        name = f"{kind.lower()}-{algorithm}-{topology}-{backend}".lower().replace("_", "-")
        kit.add(
            f"algorithms/{name}", f"{kind} by {algorithm} on {topology} ({backend}).", [nodes] * 8,
            profile="astra-sim", backend=backend, system=system_text(algorithm=algorithm),
            network=network_text(8, topology),
        )  # fmt: skip


_BREAKS = {
    "cycle": "ET007", "sizes": "ET020", "missing-receive": "ET015", "missing-collective": "ET020",
    "order": "ET020",
}  # fmt: skip
"""Violations that ``RandomJob`` makes, and the rule that reports each."""


def add_random_jobs(kit: ConfiguredCases, random: Random, *, valid: int) -> None:
    """Add random valid jobs, and two with each violation. Nodes have random durations."""
    wanted = [""] * valid + list(_BREAKS)
    for number, broken in enumerate(wanted):
        settings = RandomJob(
            ranks=random.choice((4, 8)), nodes=random.randrange(20, 60), seed=random.randrange(1 << 16),
            classes=random.choice((1, 2)) if broken in {"", "cycle"} else 2, broken=broken,
        )  # fmt: skip
        contents, groups = _written(settings)
        about = f"Random job of {settings.ranks} ranks" + (f" with the fault {broken}." if broken else ".")
        kit.add(
            f"random/{number:02}{'-' if broken else ''}{broken}", about, contents,
            *([_BREAKS[broken]] if broken else []), groups=groups,
            # ASTRA-sim ends a send that is never received
            profile="chakra" if broken == "missing-receive" else "astra-sim",
            run="skip" if broken == "missing-receive" else None,
            counts=[counts_of_file(content) for content in contents],
            system=system_text(algorithm=["ring", "ring"]), network=_two_dimensions(settings.ranks),
        )  # fmt: skip


def _two_dimensions(ranks: int) -> str:
    return (
        f"topology: [Ring, Switch]\nnpus_count: [2, {ranks // 2}]\nbandwidth: [200.0, 50.0]\n"
        "latency: [50.0, 500.0]\n"
    )


def _written(settings: RandomJob) -> tuple[list[bytes], str | None]:
    """Return the trace of each rank of a random job, and its file of process groups."""
    entry = load_format("chakra")
    assert entry.write is not None
    with TemporaryDirectory(prefix="hespas-conformance-") as scratch:
        folder = Path(scratch) / PREFIX
        entry.write(settings.workload(), folder, WriteOptions(name=PREFIX, jobs=1), Diagnostics())
        files = [folder / f"{PREFIX}.{rank}.et" for rank in range(settings.ranks)]
        groups = folder / GROUP_FILE
        text = groups.read_text(encoding="utf-8") if groups.exists() else None
        return [file.read_bytes() for file in files], text
