"""Node data of Model Explorer: values that it shows on the nodes of a graph.

The file is a JSON object with one entry per graph. Node ids are texts. Model Explorer accepts one value per
node in a file. Its classes are ``GraphNodeData`` and ``NodeDataResult`` of ai-edge-model-explorer.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hespas.files.documents import document_bytes

__all__ = ["node_data_bytes"]

_LOWEST, _HIGHEST = "#ffffff", "#f4743b"
"""Colours of the smallest and of the largest value of a graph. Both have enough contrast for black text."""


class _Stop(msgspec.Struct, frozen=True, rename="camel"):
    stop: float
    bg_color: str


class _Value(msgspec.Struct, frozen=True):
    value: float


class _GraphNodeData(msgspec.Struct, frozen=True):
    name: str
    results: dict[str, _Value]
    gradient: tuple[_Stop, ...] = (_Stop(0, _LOWEST), _Stop(1, _HIGHEST))


def node_data_bytes(name: str, values: Mapping[str, Mapping[int, float]]) -> bytes:
    """Return a node data file. ``name`` is its title with the unit, and ``values`` are finite values by graph
    and node.
    """
    return document_bytes(
        {
            graph: _GraphNodeData(name, {str(node): _Value(value) for node, value in sorted(rows.items())})
            for graph, rows in values.items()
        }
    )
