"""A workload as a Graphviz drawing: regions are clusters, colours classes, edges show what waits for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hespas.converters.drawing.picture import (
    CARRIED,
    CONTROL,
    MAX_DEPTH,
    Picture,
    fill_of,
    pictures,
    shape_of,
)
from hespas.converters.format import Value, WriteOptions
from hespas.graph import Diagnostics, NodeKind, OpClass

__all__ = ["quoted", "write_dot"]

_EDGE_STYLE = {CONTROL: ' [style=dashed, color="#777777"]', CARRIED: " [style=dotted, constraint=false]"}
_LONGEST_LINE = 60
_QUICK_NODES = 1_500
"""``dot`` lays out so many in some ten seconds; ``sfdp`` many more, without the order of a flow."""
_LAYOUT = "nslimit=2, nslimit1=2, mclimit=0.1"
"""How often ``dot`` tries to shorten edges: unbounded, it takes minutes for a few hundred operations."""


def write_dot(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write one file; several rank classes stand side by side in it. Raises ``UnsupportedError`` where there
    is too much to draw.
    """
    found = pictures(value, options, diagnostics)
    for picture in found:
        deep = sum(depth >= MAX_DEPTH for depth in picture.depths())
        told = f"regions nested more than {MAX_DEPTH} deep have no outline"
        diagnostics.info("drawing.depth", picture.graph.name, told, count=deep)
    total = sum(len(picture.graph) for picture in found)
    if total > _QUICK_NODES:
        diagnostics.warning(
            "drawing.layout",
            value.name,
            f"{total:,} operations take Graphviz's dot minutes: lay them out with sfdp -Goverlap=prism, "
            "or draw fewer with --granularity fused or region",
        )
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
        stream.write(f"digraph {quoted(value.name)} {{\n")
        stream.write('  node [style="filled,rounded", shape=box, fontname="sans-serif", fontsize=10];\n')
        stream.write(f'  graph [fontname="sans-serif", compound=true, {_LAYOUT}];\n')
        for picture in found:
            for line in _drawn(picture):
                stream.write(f"  {line}\n")
        stream.write("}\n")


def quoted(text: str) -> str:
    """A quoted string: quotes, backslashes and the ampersands of entities mean something in one, control
    characters nothing.
    """
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return '"' + shown.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") + '"'


def _label(lines: Sequence[str]) -> str:
    """Lines of a label, long ones cut in the middle."""
    return '"' + "\\n".join(quoted(_cut(line))[1:-1] for line in lines) + '"'


def _cut(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2 - 1
    return f"{line[:half]}\N{HORIZONTAL ELLIPSIS}{line[-half:]}"


def _drawn(picture: Picture) -> Iterator[str]:
    """A cluster of the class, with nested clusters of its regions, then the edges."""
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
    # A stack instead of recursion: regions may be nested deeply. A negative number closes that cluster.
    yield from (f"  {_node(picture, node)}" for node in members.get(-1, []))
    stack = list(reversed(children.get(-1, [])))
    while stack:
        region = stack.pop()
        if region < 0:
            yield "  }"
            continue
        if depth_of[region] >= MAX_DEPTH:
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


def _node(picture: Picture, node: int) -> str:
    graph = picture.graph
    fill, ink = fill_of(OpClass(int(graph.op_class[node])))
    tips = [f"node {int(graph.id[node])}", graph.strings[int(graph.framework_row[node])]]
    tips += [graph.strings[int(graph.source_row[node])], picture.collective_text(node)]
    parts = [
        f"label={_label(picture.label(node))}",
        f'fillcolor="{fill}"',
        f'fontcolor="{ink}"',
        f"tooltip={_label([tip for tip in tips if tip])}",
    ]
    shape = shape_of(NodeKind(int(graph.kind[node])))
    if shape != "box":
        parts.append(f"shape={shape}")
    return f"n{picture.index}_{node} [{', '.join(parts)}];"
