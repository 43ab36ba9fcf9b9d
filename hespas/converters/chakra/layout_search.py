"""Finding the nodes of a trace that a writer would write otherwise, and the distinct layouts they have."""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.columns import AttributeColumns
from hespas.converters.chakra.contract import ATTRIBUTES
from hespas.converters.chakra.facts import is_canonical
from hespas.converters.chakra.layouts import Layout, Layouts
from hespas.converters.chakra.spans import Bools, Longs, Words

__all__ = ["find_layouts"]

_RANK = {name: rank for rank, name in enumerate(ATTRIBUTES)}
_EXTRA_RANK = len(_RANK)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _unusual(attrs: AttributeColumns, owner: Longs, modelled: Bools, always: Bools) -> Bools:
    """Nodes whose attributes a writer would not write just so."""
    rank_of_key = np.array([_RANK.get(name, _EXTRA_RANK) for name in attrs.keys] or [0])
    rank = np.where(modelled, rank_of_key[attrs.key], _EXTRA_RANK)
    unusual = always.copy()
    flag = rank_of_key[attrs.key] == _RANK["is_cpu_op"]
    unusual[owner[flag & modelled]] = False
    unusual[owner[modelled & ~is_canonical(attrs)]] = True
    falls = (owner[1:] == owner[:-1]) & (rank[1:] < rank[:-1])
    unusual[owner[1:][falls]] = True
    return unusual


def find_layouts(attrs: AttributeColumns, modelled: Bools, *, flagged: Bools, forced: Bools) -> Layouts:
    """The layouts worth keeping. ``modelled`` marks rows whose value went into a column of the graph;
    ``flagged`` the nodes for which a writer states ``is_cpu_op``; ``forced`` are kept in any case.
    """
    owner = attrs.owner
    nodes = np.flatnonzero(_unusual(attrs, owner, modelled, flagged) | forced)
    if not len(nodes):
        return Layouts((), nodes, nodes)
    representative, index = _distinct(attrs, nodes)
    names = attrs.keys
    layouts: list[Layout] = []
    for node in representative.tolist():
        rows = slice(int(attrs.offsets[node]), int(attrs.offsets[node + 1]))
        keys: list[int] = attrs.key[rows].tolist()
        fields: list[int] = attrs.field[rows].tolist()
        layouts.append(tuple((names[key], field) for key, field in zip(keys, fields, strict=True)))
    return Layouts(tuple(layouts), nodes, index)


def _distinct(attrs: AttributeColumns, nodes: Longs) -> tuple[Longs, Longs]:
    """One node of each distinct sequence of (name, type), and which of them each of ``nodes`` follows."""
    code = attrs.key.astype(np.uint64) * np.uint64(64) + attrs.field
    start, length = attrs.offsets[nodes], attrs.offsets[nodes + 1] - attrs.offsets[nodes]
    own = _hashes(code, start, length)
    _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    first, inverse = _by_appearance(first, inverse)
    # Equal hashes must be equal sequences; what is not (an attack on the hash) gets a layout of its own.
    model = first[inverse]
    same = length == length[model]
    flat = np.repeat(start - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))
    shift = np.repeat(start[model] - start, length)
    agree = code[np.minimum(flat + shift, len(code) - 1)] == code[flat] if len(code) else flat > 0
    wrong = np.repeat(np.arange(len(nodes)), length)[~agree]
    same[wrong] = False
    strangers = np.flatnonzero(~same)
    index = inverse.astype(np.int64)
    index[strangers] = len(first) + np.arange(len(strangers))
    return np.concatenate([nodes[first], nodes[strangers]]), index


def _by_appearance(first: Longs, inverse: Longs) -> tuple[Longs, Longs]:
    """Number the distinct rows as they come, not by their hashes, which depend on how names are numbered."""
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[inverse]


def _hashes(code: Words, start: Longs, length: Longs) -> Words:
    """A hash of each slice of ``code``: a polynomial in an odd number, modulo 2**64."""
    total = np.zeros(len(start), np.uint64)
    for place in range(int(length.max()) if len(length) else 0):
        rows = np.flatnonzero(length > place)
        if len(rows) < _FEW:
            return _rest(code, start, length, total, place)
        total[rows] = total[rows] * _ODD + code[start[rows] + place] + np.uint64(1)
    return total


_FEW = 16
"""Below so many long rows, the rest of each is hashed by itself."""


def _rest(code: Words, start: Longs, length: Longs, total: Words, place: int) -> Words:
    from hashlib import blake2b

    for row in np.flatnonzero(length > place).tolist():
        tail = code[start[row] + place : start[row] + length[row]].tobytes()
        total[row] ^= np.frombuffer(blake2b(tail, digest_size=8).digest(), np.uint64)[0]
    return total
