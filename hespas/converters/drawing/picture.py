"""What both drawings show of a graph: nodes with a label, a colour and a shape, edges by kind, regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hespas.converters.format import Value, WriteOptions
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, OpGraph, RegionKind, Workload
from hespas.graph.errors import UnsupportedError

__all__ = [
    "CARRIED",
    "CONTROL",
    "DATA",
    "MAX_DEPTH",
    "MAX_NODES",
    "Edge",
    "Picture",
    "fill_of",
    "pictures",
    "shape_of",
    "type_text",
]

MAX_NODES = 20_000
"""Layout programs take minutes and viewers give up beyond this."""

MAX_DEPTH = 32
"""Graphviz takes memory with the square of the nesting of clusters: deeper regions are drawn in the last."""

DATA, CONTROL, CARRIED = "data", "control", "carried"

_WHITE_INK, _BLACK_INK = "#ffffff", "#000000"
_FILLS: dict[OpClass, tuple[str, str]] = {
    # Paul Tol's bright and light schemes: told apart with any colour vision (personal.sron.nl/~pault).
    OpClass.CONTRACTION: ("#4477aa", _WHITE_INK),
    OpClass.CONVOLUTION: ("#4477aa", _WHITE_INK),
    OpClass.ATTENTION: ("#4477aa", _WHITE_INK),
    OpClass.FUSION: ("#77aadd", _BLACK_INK),
    OpClass.COLLECTIVE: ("#aa3377", _WHITE_INK),
    OpClass.P2P: ("#aa3377", _WHITE_INK),
    OpClass.ELEMENTWISE: ("#bbcc33", _BLACK_INK),
    OpClass.TRANSCENDENTAL: ("#aaaa00", _BLACK_INK),
    OpClass.QUANTIZE: ("#bbcc33", _BLACK_INK),
    OpClass.REDUCTION: ("#44bb99", _BLACK_INK),
    OpClass.NORMALIZATION: ("#44bb99", _BLACK_INK),
    OpClass.WINDOW: ("#44bb99", _BLACK_INK),
    OpClass.SORT: ("#44bb99", _BLACK_INK),
    OpClass.MOVE: ("#eedd88", _BLACK_INK),
    OpClass.SLICE: ("#eedd88", _BLACK_INK),
    OpClass.UPDATE: ("#eedd88", _BLACK_INK),
    OpClass.GATHER: ("#eedd88", _BLACK_INK),
    OpClass.SCATTER: ("#eedd88", _BLACK_INK),
    OpClass.BROADCAST: ("#eedd88", _BLACK_INK),
    OpClass.MEMORY: ("#ee8866", _BLACK_INK),
    OpClass.HOST: ("#ffaabb", _BLACK_INK),
    OpClass.CUSTOM: ("#ffaabb", _BLACK_INK),
    OpClass.UNKNOWN: ("#ffaabb", _BLACK_INK),
}
_OTHER = ("#dddddd", _BLACK_INK)
_SHAPES: dict[NodeKind, str] = {
    NodeKind.COLLECTIVE: "hexagon",
    NodeKind.SEND: "cds",
    NodeKind.RECV: "cds",
    NodeKind.PERMUTE: "cds",
    NodeKind.MEM_LOAD: "cylinder",
    NodeKind.MEM_STORE: "cylinder",
    NodeKind.METADATA: "note",
    NodeKind.INVALID: "octagon",
}


@dataclass(frozen=True, slots=True)
class Edge:
    """``source`` comes before ``target``; ``kind`` is data, control or carried (into the next trip)."""

    source: int
    target: int
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The drawing of one rank class."""

    index: int
    graph: OpGraph
    title: str

    def label(self, node: int) -> list[str]:
        """What stands in a node, line by line."""
        graph = self.graph
        name, operation = graph.node_name(node), graph.op_name(node)
        lines = [operation or NodeKind(int(graph.kind[node])).name.lower()]
        if name and name != operation:
            lines.append(name)
        results = [type_text(graph, int(row)) for row in graph.results.row(node)[:2]]
        if results:
            lines.append(", ".join(results) + (" ..." if len(graph.results.row(node)) > 2 else ""))
        lines += _costs(graph, node)
        return lines

    def region_label(self, region: int) -> str:
        """What stands over a cluster."""
        regions = self.graph.regions
        kind = RegionKind(int(regions.kind[region])).name.lower().replace("_", " ")
        text = self.graph.strings[int(regions.label[region])]
        trips = float(regions.trips[region])
        if kind not in {"loop body", "branch"} and trips == 1:
            return f"{kind} {text}".strip()
        told = "unknown trips" if np.isnan(trips) else f"{trips:,.0f} trip{'' if trips == 1 else 's'}"
        return f"{kind} {text}: {told}" if text else f"{kind}: {told}"

    def depths(self) -> list[int]:
        """How many regions stand around each region."""
        found: list[int] = []
        parents: list[int] = self.graph.regions.parent.tolist()
        for parent in parents:  # a parent is always a smaller row
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    def edges(self) -> Iterator[Edge]:
        """All edges, by target; carried ones last."""
        graph = self.graph
        for deps, kind in ((graph.data_deps, DATA), (graph.control_deps, CONTROL)):
            sources: list[int] = deps.values.tolist()
            targets: list[int] = deps.row_ids.tolist()
            for source, target in zip(sources, targets, strict=True):
                yield Edge(source, target, kind)
        producers: list[int] = graph.regions.carried_producer.tolist()
        consumers: list[int] = graph.regions.carried_consumer.tolist()
        for source, target in zip(producers, consumers, strict=True):
            yield Edge(source, target, CARRIED)

    def collective_text(self, node: int) -> str:
        """Kind, bytes and groups of a collective; empty for other nodes."""
        table = self.graph.collectives
        row = int(np.searchsorted(table.node, node))
        if row >= len(table) or int(table.node[row]) != node:
            return ""
        kind = CollectiveKind(int(table.kind[row])).name.lower()
        size = float(table.comm_bytes[row])
        told = "unknown bytes" if np.isnan(size) else f"{size:,.0f} B"
        which = int(table.group_set[row])
        if which < 0:
            return f"{kind} of {told} by all ranks"
        groups = self.graph.group_sets[which]
        return f"{kind} of {told} in {groups.num_groups:,} groups of {groups.group_size:,}"


def type_text(graph: OpGraph, row: int) -> str:
    """A tensor type for people: ``bf16[16x?x128]``."""
    element = graph.types.dtype_of(row)
    extents = "x".join("?" if extent < 0 else str(extent) for extent in graph.types.shape(row))
    name = element.name if element else "?"
    return f"{name}[{extents}]"


def _costs(graph: OpGraph, node: int) -> list[str]:
    lines: list[str] = []
    duration_ns, flops = float(graph.duration_ns[node]), float(graph.flops[node])
    if duration_ns > 0:
        lines.append(f"{duration_ns / 1e3:,.3f} us")
    if flops > 0:
        lines.append(f"{flops:,.0f} FLOP")
    return lines


def fill_of(op_class: OpClass) -> tuple[str, str]:
    """Fill and ink of a class."""
    return _FILLS.get(op_class, _OTHER)


def shape_of(kind: NodeKind) -> str:
    """The Graphviz shape of a kind of node."""
    return _SHAPES.get(kind, "box")


def pictures(value: Value, options: WriteOptions, diagnostics: Diagnostics) -> list[Picture]:
    """One picture per rank class that ``options.ranks`` touches.

    Raises ``UnsupportedError`` for a profile, which is no graph, and for more nodes than can be drawn.
    """
    if not isinstance(value, Workload):
        raise UnsupportedError("a profile is no graph to draw", hint="hespas view shows what it holds")
    ranks = range(value.num_ranks) if options.ranks is None else options.ranks
    chosen = [row for row, size in enumerate(value.sizes_within(ranks)) if size]
    found = [_picture(value, index) for index in chosen]
    total = sum(len(picture.graph) for picture in found)
    if total > MAX_NODES:
        raise UnsupportedError(
            f"{total:,} operations are too many to draw (limit {MAX_NODES:,})",
            hint="merge them with --granularity region, or pick one rank with --ranks",
        )
    for picture in found:
        graph = picture.graph
        diagnostics.info(
            "drawing.left-out", graph.name, "attributes of the format are not drawn", count=len(graph.extra)
        )
        diagnostics.info(
            "drawing.contractions",
            graph.name,
            "sizes of contractions are not drawn",
            count=len(graph.contractions),
        )
    return found


def _picture(value: Workload, index: int) -> Picture:
    graph, ranks = value.classes[index], value.ranks_of(index)
    first, last = int(ranks[0]), int(ranks[-1])
    told = f"rank {first}" if len(ranks) == 1 else f"{len(ranks):,} ranks, {first} to {last}"
    return Picture(index, graph, f"{graph.name or value.name} ({told})")
