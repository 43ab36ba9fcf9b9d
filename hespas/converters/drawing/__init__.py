"""Drawings of graphs, write-only: Graphviz DOT (https://graphviz.org/doc/info/lang.html) and GraphML
(http://graphml.graphdrawing.org/specification.html). Importing this module is cheap.
"""

from __future__ import annotations

from hespas.converters.format import Format, lazily

__all__ = ["FORMAT_DOT", "FORMAT_GRAPHML"]

_LOSSES = {"": ("metadata", "attachments", "extra", "contractions")}


FORMAT_DOT = Format(
    name="dot",
    title="Graphviz drawing",
    suffixes=(".dot", ".gv"),
    specification="https://graphviz.org/doc/info/lang.html",
    write=lazily("hespas.converters.drawing.picture:write_dot"),
    losses=_LOSSES,
)
FORMAT_GRAPHML = Format(
    name="graphml",
    title="GraphML drawing",
    suffixes=(".graphml",),
    specification="http://graphml.graphdrawing.org/specification.html",
    write=lazily("hespas.converters.drawing.picture:write_graphml"),
    losses=_LOSSES,
)
