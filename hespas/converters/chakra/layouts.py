"""Which attributes a node had, in which order and of which type: kept where a writer would choose otherwise.

A trace made by this project needs none of this. One made by another tool may lack ``is_cpu_op``, order its
attributes differently or use other integer types; its distinct layouts are kept once each as rows of the
file, and each such node refers to one, so that the trace is written again as it was.
"""

from __future__ import annotations

from typing import NamedTuple

from hespas.converters.chakra.spans import Longs

__all__ = ["Layout", "Layouts", "decode_layout", "encode_layout"]

Layout = tuple[tuple[str, int], ...]
"""Name and field number of each attribute of a node, in order."""


class Layouts(NamedTuple):
    """Distinct layouts, and which of them (``choice[i]``) node ``node[i]`` has."""

    layouts: tuple[Layout, ...]
    node: Longs
    choice: Longs


def encode_layout(layout: Layout) -> bytes:
    """A layout as bytes: field number, length of the name in four bytes, name; repeated."""
    parts = [
        bytes([field]) + len(name.encode()).to_bytes(4, "little") + name.encode() for name, field in layout
    ]
    return b"".join(parts)


def decode_layout(data: bytes) -> Layout:
    """The inverse of :func:`encode_layout`."""
    layout: list[tuple[str, int]] = []
    at = 0
    while at + 5 <= len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        layout.append((data[at + 5 : end].decode(), data[at]))
        at = end
    return tuple(layout)
