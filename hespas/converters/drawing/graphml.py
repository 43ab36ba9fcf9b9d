"""A workload as GraphML: every column of a node as typed data, edges with their kind, regions by label.

yEd, Gephi and networkx read it. One ``graph`` element per file; the class of a node is one of its data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from hespas.converters.drawing.picture import Picture, fill_of, pictures, type_text
from hespas.converters.format import Value, WriteOptions
from hespas.graph import Diagnostics, NodeKind, OpClass, OpGraph, Resource

__all__ = ["write_graphml"]

_KEYS = {
    "label": "string",
    "class": "int",
    "ranks": "string",
    "id": "string",
    "name": "string",
    "op": "string",
    "op_class": "string",
    "kind": "string",
    "resource": "string",
    "stream": "int",
    "region": "string",
    "flops": "double",
    "useful_flops": "double",
    "transcendentals": "double",
    "bytes_read": "double",
    "bytes_written": "double",
    "duration_ns": "double",
    "multiplicity": "double",
    "collective": "string",
    "operands": "string",
    "results": "string",
    "framework_op": "string",
    "source": "string",
    "colour": "string",
}
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_FIGURES = (
    "flops",
    "useful_flops",
    "transcendentals",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "multiplicity",
)


def write_graphml(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write one file. Raises ``UnsupportedError`` where there is too much to draw."""
    found = pictures(value, options, diagnostics)
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write('<?xml version="1.0" encoding="UTF-8"?>\n')
        stream.write('<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n')
        for name, kind in _KEYS.items():
            stream.write(f'<key id="{name}" for="node" attr.name="{name}" attr.type="{kind}"/>\n')
        stream.write('<key id="edge" for="edge" attr.name="kind" attr.type="string"/>\n')
        stream.write(f'<graph id={_attribute(value.name)} edgedefault="directed">\n')
        for picture in found:
            for line in _elements(picture):
                stream.write(line)
        stream.write("</graph>\n</graphml>\n")


def _legal(text: str) -> str:
    """XML 1.0 has no way to write some characters."""
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)


def _attribute(text: str) -> str:
    return quoteattr(_legal(text))


def _elements(picture: Picture) -> Iterator[str]:
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


def _data(picture: Picture, node: int) -> Iterator[tuple[str, str]]:
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
    yield "operands", _types(graph, node, operands=True)
    yield "results", _types(graph, node, operands=False)
    yield "framework_op", graph.strings[int(graph.framework_row[node])]
    yield "source", graph.strings[int(graph.source_row[node])]
    yield "colour", fill_of(op_class)[0]


def _types(graph: OpGraph, node: int, *, operands: bool) -> str:
    rows: list[int] = (graph.operands if operands else graph.results).row(node).tolist()
    return " ".join(type_text(graph, row) for row in rows)
