"""Files of ranks that are equal up to process groups and message peers, told by their bytes.

Of a file that was decoded, the places of those values are known. Another file of the same length that differs
at these places only has the same columns but for them, and is not decoded again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import AttributeFacts
from hespas.converters.chakra.peers import Groups, PeerRows, RankPeers
from hespas.converters.chakra.wire import Bools, EtColumns, Longs
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.streams import open_regular
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.tables import NodeType

__all__ = ["Decoded", "Templates"]

_MOST, _MOST_BYTES = 64, 1 << 24
_NAME = re.compile(rb"\n\x07pg_name\xea\x01([\x00-\x7f])", re.DOTALL)
"""The attribute's name, the tag of its text, the length of that."""
_NUMBER = {
    name: re.compile(rb"\n\x08" + name.encode() + rb"(?:[\x18-\x78]|[\x80-\xff][\x01\x02])"
                     rb"([\x80-\xff]*[\x00-\x7f])", re.DOTALL)
    for name in ("comm_src", "comm_dst")
}  # fmt: skip
"""The attribute's name, the tag of its number, the number as a varint."""

_Span = tuple[int, int]


class Decoded(NamedTuple):
    """A file: its columns, and what its class leaves open."""

    columns: EtColumns
    facts: AttributeFacts
    peers: RankPeers
    rows: PeerRows


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Where values stand in a file, and which node of those that have such a value states each."""

    spans: tuple[_Span, ...] = ()
    places: Longs = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class _Template:
    """``peers`` are the values of the file; ``names`` those by collective, ``others`` those by message,
    ``own`` the numbers of the rank itself. ``fixed`` are bytes that no value takes.
    """

    key: bytes
    data: NDArray[np.uint8]
    fixed: Bools
    peers: RankPeers
    names: _Values
    others: _Values
    own: _Values

    def values_of(self, data: bytes, rank: int, ids: _Ids) -> RankPeers | None:
        """The values of a file that is equal up to them, None where it is not."""
        theirs = np.frombuffer(data, np.uint8)
        if ((theirs != self.data) & self.fixed).any():
            return None
        named = [ids.of(data[start:stop]) for start, stop in self.names.spans]
        others = [_number(data[start:stop]) for start, stop in self.others.spans]
        own = {_number(data[start:stop]) for start, stop in self.own.spans}
        if min(named, default=1) < 1 or not own <= {rank}:
            return None
        if not all(0 <= number < MAX_DEVICES for number in others):
            return None
        groups = self.peers.groups.replaced(self.names.places, named)
        return RankPeers(rank, groups, self.peers.peers.replaced(self.others.places, others))


@dataclass(slots=True, eq=False)
class _Ids:
    groups: Groups
    _found: dict[bytes, int] = field(default_factory=dict[bytes, int])

    def of(self, text: bytes) -> int:
        """The number of a group, 0 and less for none."""
        found = self._found.get(text)
        if found is None:
            try:
                found = self.groups.find(text.decode())
            except UnicodeDecodeError:
                found = -1
            self._found[text] = found
        return found


@dataclass(slots=True, eq=False)
class Templates:
    """Files of a job that were decoded, by their lengths."""

    _by_length: dict[int, list[_Template]] = field(default_factory=dict[int, list[_Template]])
    _ids: _Ids | None = None
    _count: int = 0

    def find(self, path: Path, rank: int, groups: Groups) -> tuple[bytes, RankPeers] | None:
        """The class of a file and its values, None where it has to be decoded."""
        if not self._count:
            return None
        data = _content(path)
        if self._ids is None or self._ids.groups is not groups:
            self._ids = _Ids(groups)
        for template in self._by_length.get(len(data), ()):
            found = template.values_of(data, rank, self._ids)
            if found is not None:
                return template.key, found
        return None

    def add(self, path: Path, key: bytes, decoded: Decoded) -> None:
        """Keep a file that was decoded, if its values are found in its bytes."""
        if self._count >= _MOST:
            return
        data = _content(path)
        made = _template(data, key, decoded) if data else None
        if made is not None:
            self._by_length.setdefault(len(data), []).append(made)
            self._count += 1


def _content(path: Path) -> bytes:
    """The bytes of a file, nothing of a large one."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            return stream.read(size) if size <= _MOST_BYTES else b""
    except (OSError, FormatError):  # told where it is decoded
        return b""


def _template(data: bytes, key: bytes, decoded: Decoded) -> _Template | None:
    """A file as a template; None where its bytes do not show the values that were decoded."""
    facts, rows, peers = decoded.facts, decoded.rows, decoded.peers
    names = _names(data, facts)
    sources, targets = _numbers(data, facts, "comm_src"), _numbers(data, facts, "comm_dst")
    if names is None or sources is None or targets is None:
        return None
    kinds = decoded.columns.type
    sends, receives = kinds == NodeType.COMM_SEND, kinds == NodeType.COMM_RECV
    collective, message = np.cumsum(kinds == NodeType.COMM_COLL) - 1, np.cumsum(sends | receives) - 1
    named, peer_rows = set(rows.group.tolist()), set(rows.peer.tolist())
    group_names = [(span, int(collective[facts.owner[row]])) for row, span in names.items() if row in named]
    others: list[tuple[_Span, int]] = []
    own: list[tuple[_Span, int]] = []
    for spans, is_far in ((sources, receives), (targets, sends)):
        for row, span in spans.items():
            node = facts.owner[row]
            if row in peer_rows:
                (others if is_far[node] else own).append((span, int(message[node])))
    fixed = np.ones(len(data), np.bool_)
    for (start, stop), _ in (*group_names, *others, *own):
        fixed[start:stop] = False
    return _Template(
        key, np.frombuffer(data, np.uint8), fixed, peers, _values(group_names), _values(others), _values(own)
    )


def _values(found: Sequence[tuple[_Span, int]]) -> _Values:
    return _Values(
        tuple(span for span, _ in found), np.fromiter((place for _, place in found), np.int64, len(found))
    )


def _names(data: bytes, facts: AttributeFacts) -> dict[int, _Span] | None:
    """Attribute row -> where the name of its process group stands; None where bytes and rows disagree."""
    stated = facts.texts("pg_name")
    spans = [(match.end(), match.end() + match[1][0]) for match in _NAME.finditer(data)]
    if not len(stated.row) == len(facts.rows("pg_name")) == len(spans):
        return None
    if [data[start:stop] for start, stop in spans] != list(facts.values(stated)):
        return None
    return dict(zip(stated.row.tolist(), spans, strict=True))


def _numbers(data: bytes, facts: AttributeFacts, name: str) -> dict[int, _Span] | None:
    """Attribute row -> where its number stands; None where bytes and rows disagree."""
    stated = facts.integers(name)
    spans = [match.span(1) for match in _NUMBER[name].finditer(data)]
    if not len(stated.row) == len(facts.rows(name)) == len(spans):
        return None
    if [_number(data[start:stop]) for start, stop in spans] != stated.value.tolist():
        return None
    return dict(zip(stated.row.tolist(), spans, strict=True))


def _number(varint: bytes) -> int:
    """A whole varint as a number, -1 for none."""
    *more, last = varint
    if last > 0x7F or any(byte < 0x80 for byte in more):
        return -1
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))
