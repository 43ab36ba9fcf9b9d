"""Hespas's own file formats for op graphs, specified in ``hespas/schemas/op_graph.schema.json`` and
:mod:`.arrow_layout`.

``op-graph`` is readable JSON with a schema. ``op-graph-arrow`` is an Arrow IPC file for millions of nodes,
whose buffers become the columns of the graph. Both preserve every column of every rank class exactly.
"""

from __future__ import annotations

from codecs import BOM_UTF8

from hespas.converters.format import Format, Head, lazily

__all__ = ["FORMAT", "FORMAT_ARROW"]


def _sniff_json(head: Head) -> int:
    """Return the confidence that an input is an op graph in JSON. It is 100 for a document with the schema
    name, 60 for an object with the keys ``nodes``, ``op`` and ``deps``, else 0.
    """
    data = head.data.removeprefix(BOM_UTF8).lstrip()
    if not data.startswith(b"{"):
        return 0
    if b'"hespas.op-graph/' in data:
        return 100
    return 60 if b'"nodes"' in data and b'"op"' in data and b'"deps"' in data else 0


def _sniff_arrow(head: Head) -> int:
    if not head.data.startswith(b"ARROW1\x00\x00"):
        return 0
    return 100 if b"hespas.op-graph-arrow/" in head.data else 10


FORMAT = Format(
    name="op-graph",
    title="Hespas op graph, JSON",
    suffixes=(".json", ".opgraph.json"),
    specification="hespas/schemas/op_graph.schema.json",
    sniff=_sniff_json,
    read=lazily("hespas.converters.op_graph.json_reader:read_json"),
    write=lazily("hespas.converters.op_graph.json_writer:write_json"),
)

FORMAT_ARROW = Format(
    name="op-graph-arrow",
    title="Hespas op graph, Arrow IPC",
    suffixes=(".arrow", ".opgraph"),
    specification="hespas/converters/op_graph/arrow_layout.py",
    sniff=_sniff_arrow,
    never_json=True,
    read=lazily("hespas.converters.op_graph.arrow:read_arrow"),
    write=lazily("hespas.converters.op_graph.arrow:write_arrow"),
)
