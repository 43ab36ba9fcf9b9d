"""Drawings of a graph as Graphviz DOT and as GraphML: labelled nodes, edges by kind, and regions.

In DOT, regions are clusters, colours are operation classes, and edges are dependencies. GraphML has every
column of a node as typed data, edges with their kind, and regions by label; yEd, Gephi and networkx read it.
A GraphML file has one ``graph`` element; the rank class of a node is one of its data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from hespas.converters.format import Value, WriteOptions
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    NodeKind,
    OpClass,
    OpGraph,
    RegionKind,
    Resource,
    Workload,
)
from hespas.graph.errors import UnsupportedError

__all__ = ["MAX_NODES", "fill_of", "quoted", "write_dot", "write_graphml"]

MAX_NODES = 20_000
"""Maximum number of nodes; beyond it layout programs take minutes and viewers fail."""

_MAX_DEPTH = 32
"""Maximum nesting of clusters, because the memory of Graphviz grows with its square. Deeper regions are drawn
without an outline in the last cluster.
"""

_DATA, _CONTROL, _CARRIED = "data", "control", "carried"

_COLOURS: dict[str, tuple[OpClass, ...]] = {
    # Paul Tol's bright and light schemes, which are safe for colour-blind readers (personal.sron.nl/~pault).
    "#4477aa": (OpClass.CONTRACTION, OpClass.CONVOLUTION, OpClass.ATTENTION),
    "#77aadd": (OpClass.FUSION,),
    "#aa3377": (OpClass.COLLECTIVE, OpClass.P2P),
    "#bbcc33": (OpClass.ELEMENTWISE, OpClass.QUANTIZE),
    "#aaaa00": (OpClass.TRANSCENDENTAL,),
    "#44bb99": (OpClass.REDUCTION, OpClass.NORMALIZATION, OpClass.WINDOW, OpClass.SORT),
    "#eedd88": (
        *(OpClass.MOVE, OpClass.SLICE, OpClass.UPDATE),
        *(OpClass.GATHER, OpClass.SCATTER, OpClass.BROADCAST),
    ),
    "#ee8866": (OpClass.MEMORY,),
    "#ffaabb": (OpClass.HOST, OpClass.CUSTOM, OpClass.UNKNOWN),
}
_FILLS = {op_class: colour for colour, classes in _COLOURS.items() for op_class in classes}
_DARK = frozenset({"#4477aa", "#aa3377"})
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
class _Edge:
    """Edge of the drawing from node ``source`` to ``target``; ``kind`` is data, control or carried (into the
    next iteration).
    """

    source: int
    target: int
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class _Picture:
    """Drawing of one rank class: its nodes, clusters and edges as text."""

    index: int
    graph: OpGraph
    title: str

    def label(self, node: int) -> list[str]:
        """Return the label of a node, line by line."""
        graph = self.graph
        name, operation = graph.node_name(node), graph.op_name(node)
        lines = [operation or NodeKind(int(graph.kind[node])).name.lower()]
        if name and name != operation:
            lines.append(name)
        results = [_type_text(graph, int(row)) for row in graph.results.row(node)[:2]]
        if results:
            lines.append(", ".join(results) + (" ..." if len(graph.results.row(node)) > 2 else ""))
        duration_ns, flops = float(graph.duration_ns[node]), float(graph.flops[node])
        if duration_ns > 0:
            lines.append(f"{duration_ns / 1e3:,.3f} us")
        if flops > 0:
            lines.append(f"{flops:,.0f} FLOP")
        return lines

    def region_label(self, region: int) -> str:
        """Return the label of the cluster that is drawn for a region."""
        regions = self.graph.regions
        kind = RegionKind(int(regions.kind[region])).name.lower().replace("_", " ")
        text = self.graph.strings[int(regions.label[region])]
        trips = float(regions.trips[region])
        if kind not in {"loop body", "branch"} and trips == 1:
            return f"{kind} {text}".strip()
        count = "unknown trips" if np.isnan(trips) else f"{trips:,.0f} trip{'' if trips == 1 else 's'}"
        return f"{kind} {text}: {count}" if text else f"{kind}: {count}"

    def depths(self) -> list[int]:
        """Return the nesting depth of each region, from 0."""
        depths: list[int] = []
        parents: list[int] = self.graph.regions.parent.tolist()
        for parent in parents:  # a parent is always a smaller row
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def edges(self) -> Iterator[_Edge]:
        """Yield all edges by target; carried edges last."""
        graph = self.graph
        for deps, kind in ((graph.data_deps, _DATA), (graph.control_deps, _CONTROL)):
            sources: list[int] = deps.values.tolist()
            targets: list[int] = deps.row_ids.tolist()
            for source, target in zip(sources, targets, strict=True):
                yield _Edge(source, target, kind)
        producers: list[int] = graph.regions.carried_producer.tolist()
        consumers: list[int] = graph.regions.carried_consumer.tolist()
        for source, target in zip(producers, consumers, strict=True):
            yield _Edge(source, target, _CARRIED)

    def collective_text(self, node: int) -> str:
        """Return kind, bytes and groups of a collective; empty for other nodes."""
        table = self.graph.collectives
        row = int(np.searchsorted(table.node, node))
        if row >= len(table) or int(table.node[row]) != node:
            return ""
        kind = CollectiveKind(int(table.kind[row])).name.lower()
        size = float(table.comm_bytes[row])
        text = "unknown bytes" if np.isnan(size) else f"{size:,.0f} B"
        which = int(table.group_set[row])
        if which < 0:
            return f"{kind} of {text} by all ranks"
        groups = self.graph.group_sets[which]
        return f"{kind} of {text} in {groups.num_groups:,} groups of {groups.group_size:,}"


def _type_text(graph: OpGraph, row: int) -> str:
    """Format a tensor type: ``bf16[16x?x128]``."""
    element = graph.types.dtype_of(row)
    extents = "x".join("?" if extent < 0 else str(extent) for extent in graph.types.shape(row))
    name = element.name if element else "?"
    return f"{name}[{extents}]"


def fill_of(op_class: OpClass) -> tuple[str, str]:
    """Return the fill colour and the text colour of an operation class."""
    fill = _FILLS.get(op_class, "#dddddd")
    return fill, "#ffffff" if fill in _DARK else "#000000"


def _pictures(value: Value, options: WriteOptions, diagnostics: Diagnostics) -> list[_Picture]:
    """Return one picture for each rank class that has a rank in ``options.ranks``.

    Raises ``UnsupportedError`` for a profile, and for a graph with more nodes than can be drawn.
    """
    if not isinstance(value, Workload):
        raise UnsupportedError(
            "a profile cannot be drawn as a graph", hint="use hespas view to show its contents"
        )
    ranks = range(value.num_ranks) if options.ranks is None else options.ranks
    chosen = [row for row, size in enumerate(value.sizes_within(ranks)) if size]
    pictures: list[_Picture] = []
    for index in chosen:
        members = value.ranks_of(index)
        first, last = int(members[0]), int(members[-1])
        text = f"rank {first}" if len(members) == 1 else f"{len(members):,} ranks, {first} to {last}"
        graph = value.classes[index]
        pictures.append(_Picture(index, graph, f"{graph.name or value.name} ({text})"))
    total = sum(len(picture.graph) for picture in pictures)
    if total > MAX_NODES:
        raise UnsupportedError(
            f"{total:,} operations are too many to draw (limit {MAX_NODES:,})",
            hint="merge them with `granularity=region`, or pick one rank with `ranks`",
        )
    for graph in (picture.graph for picture in pictures):
        findings = diagnostics.about(graph.name, "drawing")
        findings.info("left-out", "attributes of the format are not drawn", len(graph.extra))
        findings.info(
            "contractions", "sizes of matmuls and convolutions are not drawn", len(graph.contractions)
        )
    return pictures


_EDGE_STYLE = {_CONTROL: ' [style=dashed, color="#777777"]', _CARRIED: " [style=dotted, constraint=false]"}
_LONGEST_LINE = 60
_QUICK_NODES = 1_500
"""Number of nodes that ``dot`` lays out in about ten seconds. ``sfdp`` is faster but ignores the direction of
edges.
"""
_LAYOUT = "nslimit=2, nslimit1=2, mclimit=0.1"
"""Limits on the iterations of ``dot``; without them it takes minutes for a few hundred operations."""


def write_dot(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a DOT file with all rank classes. Raises ``UnsupportedError`` for too many nodes."""
    pictures = _pictures(value, options, diagnostics)
    for picture in pictures:
        deep = sum(depth >= _MAX_DEPTH for depth in picture.depths())
        text = f"regions nested more than {_MAX_DEPTH} deep have no outline"
        diagnostics.info("drawing.depth", picture.graph.name, text, count=deep)
    total = sum(len(picture.graph) for picture in pictures)
    if total > _QUICK_NODES:
        diagnostics.warning(
            "drawing.layout",
            value.name,
            f"Graphviz's dot takes minutes for {total:,} operations: use sfdp -Goverlap=prism, "
            "or draw fewer with `granularity=fused` or region",
        )
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
        stream.write(f"digraph {quoted(value.name)} {{\n")
        stream.write('  node [style="filled,rounded", shape=box, fontname="sans-serif", fontsize=10];\n')
        stream.write(f'  graph [fontname="sans-serif", compound=true, {_LAYOUT}];\n')
        for picture in pictures:
            for line in _dot_lines(picture):
                stream.write(f"  {line}\n")
        stream.write("}\n")


def quoted(text: str) -> str:
    """Quote a string for DOT: escape quotes, backslashes and ampersands, and replace control characters."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return '"' + shown.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") + '"'


def _label(lines: Sequence[str]) -> str:
    """Quote the lines of a label; long lines are cut in the middle."""
    return '"' + "\\n".join(quoted(_cut(line))[1:-1] for line in lines) + '"'


def _cut(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2 - 1
    return f"{line[:half]}\N{HORIZONTAL ELLIPSIS}{line[-half:]}"


def _dot_lines(picture: _Picture) -> Iterator[str]:
    """Yield a cluster of the class with nested clusters of its regions, then the edges."""
    graph = picture.graph
    children: dict[int, list[int]] = {}
    parents: list[int] = graph.regions.parent.tolist()
    for region, parent in enumerate(parents):
        children.setdefault(parent, []).append(region)
    depth_of = picture.depths()
    members: dict[int, list[int]] = {}
    regions: list[int] = graph.region.tolist()
    for node, region in enumerate(regions):
        members.setdefault(region, []).append(node)
    yield f"subgraph cluster_{picture.index} {{"
    yield f"  label={quoted(picture.title)};"
    # Use a stack, not recursion, because regions may be nested deeply. A negative number closes a cluster.
    yield from (f"  {_node(picture, node)}" for node in members.get(-1, []))
    stack = list(reversed(children.get(-1, [])))
    while stack:
        region = stack.pop()
        if region < 0:
            yield "  }"
            continue
        if depth_of[region] >= _MAX_DEPTH:
            yield from (f"    {_node(picture, node)}" for node in members.get(region, []))
            stack += reversed(children.get(region, []))
            continue
        yield f"  subgraph cluster_{picture.index}_{region} {{"
        yield f"    label={quoted(_cut(picture.region_label(region)))}; style=rounded;"
        yield from (f"    {_node(picture, node)}" for node in members.get(region, []))
        stack.append(-1)
        stack += reversed(children.get(region, []))
    yield "}"
    for edge in picture.edges():
        style = _EDGE_STYLE.get(edge.kind, "")
        yield f"n{picture.index}_{edge.source} -> n{picture.index}_{edge.target}{style};"


def _node(picture: _Picture, node: int) -> str:
    graph = picture.graph
    fill, ink = fill_of(OpClass(int(graph.op_class[node])))
    tips = [f"node {int(graph.id[node])}", graph.strings[int(graph.framework_id[node])]]
    tips += [graph.strings[int(graph.source_id[node])], picture.collective_text(node)]
    parts = [
        f"label={_label(picture.label(node))}",
        f'fillcolor="{fill}"',
        f'fontcolor="{ink}"',
        f"tooltip={_label([tip for tip in tips if tip])}",
    ]
    shape = _SHAPES.get(NodeKind(int(graph.kind[node])))
    if shape:
        parts.append(f"shape={shape}")
    return f"n{picture.index}_{node} [{', '.join(parts)}];"


_FIGURES = (
    "flops",
    "useful_flops",
    "transcendentals",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "executions",
)
_KEYS = {
    **dict.fromkeys(
        ["label", "class", "ranks", "id", "name", "op", "op_class", "kind", "resource", "stream", "region"],
        "string",
    ),
    **dict.fromkeys(("class", "stream"), "int"),
    **dict.fromkeys(_FIGURES, "double"),
    **dict.fromkeys(["collective", "operands", "results", "framework_op", "source", "colour"], "string"),
}
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def write_graphml(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a GraphML file with all rank classes. Raises ``UnsupportedError`` for too many nodes."""
    pictures = _pictures(value, options, diagnostics)
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write('<?xml version="1.0" encoding="UTF-8"?>\n')
        stream.write('<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n')
        for name, kind in _KEYS.items():
            stream.write(f'<key id="{name}" for="node" attr.name="{name}" attr.type="{kind}"/>\n')
        stream.write('<key id="edge" for="edge" attr.name="kind" attr.type="string"/>\n')
        stream.write(f'<graph id={quoteattr(_legal(value.name))} edgedefault="directed">\n')
        for picture in pictures:
            stream.writelines(_elements(picture))
        stream.write("</graph>\n</graphml>\n")


def _legal(text: str) -> str:
    """Replace the characters that XML 1.0 cannot represent."""
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)


def _elements(picture: _Picture) -> Iterator[str]:
    graph = picture.graph
    for node in range(len(graph)):
        yield f'<node id="n{picture.index}_{node}">\n'
        for key, text in _data(picture, node):
            if text:
                yield f'<data key="{key}">{escape(_legal(text))}</data>\n'
        yield "</node>\n"
    for edge in picture.edges():
        ends = f'source="n{picture.index}_{edge.source}" target="n{picture.index}_{edge.target}"'
        yield f'<edge {ends}><data key="edge">{edge.kind}</data></edge>\n'


def _data(picture: _Picture, node: int) -> Iterator[tuple[str, str]]:
    graph = picture.graph
    op_class = OpClass(int(graph.op_class[node]))
    yield "label", "\n".join(picture.label(node))
    yield "class", str(picture.index)
    yield "ranks", picture.title
    yield "id", str(int(graph.id[node]))
    yield "name", graph.node_name(node)
    yield "op", graph.op_name(node)
    yield "op_class", op_class.name.lower()
    yield "kind", NodeKind(int(graph.kind[node])).name.lower()
    yield "resource", Resource(int(graph.resource[node])).name.lower()
    yield "stream", str(int(graph.stream[node])) if graph.stream[node] >= 0 else ""
    region = int(graph.region[node])
    yield "region", f"{region}: {picture.region_label(region)}" if region >= 0 else ""
    for name in _FIGURES:
        figure = float(getattr(graph, name)[node])
        yield name, "" if isnan(figure) else repr(figure)
    yield "collective", picture.collective_text(node)
    for name, sides in (("operands", graph.operands), ("results", graph.results)):
        yield name, " ".join(_type_text(graph, int(row)) for row in sides.row(node))
    yield "framework_op", graph.strings[int(graph.framework_id[node])]
    yield "source", graph.strings[int(graph.source_id[node])]
    yield "colour", fill_of(op_class)[0]
