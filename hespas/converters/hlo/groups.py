"""The spellings of ``replica_groups`` in HLO text -> groups of ids as written (not yet global device ids).

``{{0,1},{2,3}}``, ``{}``, ``[4,2]<=[8]``, ``[4,2]<=[2,4]T(1,0)``, ``mesh['a'=2,'b'=4] {'a'}`` with sub-axes
``'a':(1)2`` and ``device_ids=([4,2]T(1,0))`` or a list, and ``@mesh {'a'}`` for a mesh named in the header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from hespas.converters.hlo.attributes import int_rows, integer, rows_array
from hespas.converters.replica_groups import dense_groups, mesh_groups
from hespas.graph import ExplicitGroups, GroupSet, StridedGroups
from hespas.graph.columns import IntArray

__all__ = ["Mesh", "header_meshes", "parse_groups"]

Mesh = dict[str, int]
"""Axis name -> extent, in order."""

_IOTA = re.compile(r"\[([\d,\s]+)\]\s*<=\s*\[([\d,\s]+)\]\s*(?:T\(([\d,\s]+)\))?")
_MESH = re.compile(r"(?:@?mesh\s*\[([^\]]*)\]|@([\w.\-]+)(?:\s*\[([^\]]*)\])?)\s*")
_DEVICE_IDS = re.compile(r",\s*device_ids\s*=\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*")
_DEVICE_IOTA = re.compile(r"\[([\d,\s]+)\]\s*(?:T\(([\d,\s]+)\))?")
_AXIS = re.compile(r"""\s*['"]?([^'"=,\s]+)['"]?\s*=\s*(\d{1,18})\s*,?""")
_AXIS_REFERENCE = re.compile(r"""\s*['"]?([^'":,\s{}]+)['"]?(?:\s*:\s*\((\d{1,18})\)(\d{1,18}))?\s*,?""")
_HEADER_MESH = re.compile(r"([\w.\-]+)(?:\s*=\s*#sdy\.mesh<\[([^\]<]*)\])?")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(integer(part) for part in text.split(","))


def _axes(text: str) -> Mesh:
    """``'a'=2,'b'=4`` -> extents by name."""
    axes: Mesh = {}
    position = 0
    while position < len(text):
        match = _AXIS.match(text, position)
        if match is None or match[1] in axes:
            raise ValueError(f"expected mesh axes such as 'a'=2,'b'=4, found {text[:60]!r}")
        axes[match[1]] = int(match[2])
        position = match.end()
    return axes


def header_meshes(header: Mapping[str, str]) -> dict[str, Mesh]:
    """The meshes a module's header names (``xla.sdy.meshes`` of its frontend attributes)."""
    text = header.get("frontend_attributes", "").replace('\\"', '"')
    return {match[1]: _axes(match[2]) for match in _HEADER_MESH.finditer(text) if match[2] is not None}


def parse_groups(text: str | None, num_devices: int, meshes: Mapping[str, Mesh]) -> GroupSet | None:
    """The groups as written; None for an absent or empty list (everybody).

    ``num_devices`` bounds what a symbolic spelling may list. Raises ``ValueError`` naming what was expected.
    """
    if text is None:
        return None
    if text.startswith("["):
        return _iota(text, num_devices)
    if text.startswith(("mesh", "@")):
        return _mesh(text, num_devices, meshes)
    rows = int_rows(text)
    if not rows or rows == [[]]:
        return None
    dense = rows_array(rows)
    return ExplicitGroups.from_rows(rows) if dense is None else dense_groups(dense)


def _iota(text: str, num_devices: int) -> GroupSet:
    match = _IOTA.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected groups such as [4,2]<=[2,4]T(1,0), found {text[:60]!r}")
    tile, dims = _numbers(match[1]), _numbers(match[2])
    if len(tile) != 2 or min(*tile, *dims) < 1:
        raise ValueError(f"expected [groups,size] of positive numbers, found {text[:60]!r}")
    _bound(prod(tile), num_devices)
    return StridedGroups.from_iota(tile[0], tile[1], dims, _numbers(match[3]) if match[3] else None)


def _bound(named: int, num_devices: int) -> None:
    if named > num_devices:
        raise ValueError(f"expected groups over at most {num_devices} devices, found {named:,}")


def _mesh(text: str, num_devices: int, meshes: Mapping[str, Mesh]) -> GroupSet:
    match = _MESH.match(text)
    if match is None:
        raise ValueError(f"expected groups such as mesh['a'=2,'b'=4] {{'a'}}, found {text[:60]!r}")
    inline = match[1] if match[1] is not None else match[3]
    if inline is None and match[2] not in meshes:
        raise ValueError(f"expected a mesh the header names, found @{match[2][:60]}")
    axes = meshes[match[2]] if inline is None else _axes(inline)
    _bound(prod(axes.values()), num_devices)
    listed = _DEVICE_IDS.match(text, match.end())
    ids = _device_ids(listed[1], num_devices) if listed else None
    rest = text[(listed or match).end() :].strip()
    chosen = _references(rest, axes)
    return mesh_groups(tuple(axes.values()), chosen, ids)


def _references(text: str, axes: Mesh) -> list[tuple[int, int, int]]:
    """``{'a', 'b':(1)2}`` -> (axis, pre-size, size) in the order written."""
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError(f"expected the axes of a group such as {{'a'}}, found {text[:60]!r}")
    order = list(axes)
    inner, position = text[1:-1].rstrip(), 0
    found: list[tuple[int, int, int]] = []
    while position < len(inner):
        match = _AXIS_REFERENCE.match(inner, position)
        if match is None or match[1] not in axes:
            raise ValueError(f"expected axes of the mesh {order}, found {text[:60]!r}")
        whole = (1, axes[match[1]])
        pre, size = (int(match[2]), int(match[3])) if match[2] else whole
        found.append((order.index(match[1]), pre, size))
        position = match.end()
    return found


def _device_ids(text: str, num_devices: int) -> IntArray:
    """``[4,4]T(1,0)`` or ``0,2,1,3``: the devices of a mesh in its row-major order."""
    match = _DEVICE_IOTA.fullmatch(text.strip())
    if match is None:
        return np.array(_numbers(text), np.int64)
    dims = _numbers(match[1])
    _bound(prod(dims), num_devices)
    ids = np.arange(prod(dims), dtype=np.int64).reshape(dims)
    order = _numbers(match[2]) if match[2] else tuple(range(len(dims)))
    if sorted(order) != list(range(len(dims))):
        raise ValueError(f"expected T(...) as a permutation of {len(dims)} dimensions, found {text[:60]!r}")
    return ids.transpose(order).reshape(-1)
