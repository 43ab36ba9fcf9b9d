"""Graphs to look at: Graphviz DOT (https://graphviz.org/doc/info/lang.html) and GraphML
(http://graphml.graphdrawing.org/specification.html). Written, not read. Importing this module is cheap.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, Value, WriteOptions
from hespas.graph import Diagnostics

__all__ = ["FORMAT_DOT", "FORMAT_GRAPHML"]

_LOSSES = {"": ("metadata", "attachments", "extra", "contractions")}


def _write_dot(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    from hespas.converters.drawing.dot import write_dot

    write_dot(value, path, options, diagnostics)


def _write_graphml(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    from hespas.converters.drawing.graphml import write_graphml

    write_graphml(value, path, options, diagnostics)


FORMAT_DOT = Format(
    name="dot",
    title="Graphviz drawing",
    suffixes=(".dot", ".gv"),
    specification="https://graphviz.org/doc/info/lang.html",
    write=_write_dot,
    losses=_LOSSES,
)
FORMAT_GRAPHML = Format(
    name="graphml",
    title="GraphML drawing",
    suffixes=(".graphml",),
    specification="http://graphml.graphdrawing.org/specification.html",
    write=_write_graphml,
    losses=_LOSSES,
)
