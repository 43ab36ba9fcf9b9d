"""Fast reading of rank files that differ only in process groups and message peers.

After one file was decoded, the byte positions of these values in it are known. Another file of the same
length whose other bytes are equal has the same columns except for these values, and need not be decoded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.contract import AttributeFacts
from hespas.converters.chakra.peers import Groups, PeerRows, RankPeers
from hespas.converters.chakra.wire import Bools, EtColumns, Longs
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.streams import open_regular
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.tables import NodeType

__all__ = ["DecodedFile", "FileTemplates"]

_MOST, _MOST_BYTES = 64, 1 << 24
_NAME = re.compile(rb"\n\x07pg_name\xea\x01([\x00-\x7f])", re.DOTALL)
"""Name of the attribute, tag of its text, length of the text."""
_NUMBER = {
    name: re.compile(rb"\n\x08" + name.encode() + rb"(?:[\x18-\x78]|[\x80-\xff][\x01\x02])"
                     rb"([\x80-\xff]*[\x00-\x7f])", re.DOTALL)
    for name in ("comm_src", "comm_dst")
}  # fmt: skip
"""Name of the attribute, tag of its number, the number as a varint."""

_Span = tuple[int, int]


@dataclass(slots=True, eq=False)
class DecodedFile:
    """Decoded trace file and the ranks whose files equal it except for process groups and message peers.
    ``ranks`` are the groups and peers of each of these ranks, starting with the rank of the file. ``rows``
    are the attribute rows that state them in the file.
    """

    columns: EtColumns
    facts: AttributeFacts
    rows: PeerRows
    ranks: list[RankPeers]
    faults: Faults
    renumbered: int = 0
    """Number of ranks whose node ids start at another number than in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class _ValueSpans:
    """Byte spans of values in a file. ``places[i]`` is the number of the node with span ``i``, counted among
    the collectives (for process groups) or among the messages (for peers).
    """

    spans: tuple[_Span, ...] = ()
    places: Longs = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class _FileTemplate:
    """Decoded file with which other files of the same class are compared. ``names`` are the spans of process
    group names, ``others`` the spans of message peers, and ``own`` the spans of the rank of the file.
    ``peers`` has the decoded values. ``fixed`` marks the bytes outside of all these spans.
    """

    key: bytes
    data: NDArray[np.uint8]
    fixed: Bools
    peers: RankPeers
    names: _ValueSpans
    others: _ValueSpans
    own: _ValueSpans

    def values_of(self, data: bytes, rank: int, groups: Groups) -> RankPeers | None:
        """Return the process groups and message peers of another file (of rank ``rank``) if all other bytes
        of that file equal the template. Otherwise return None.
        """
        theirs = np.frombuffer(data, np.uint8)
        if ((theirs != self.data) & self.fixed).any():
            return None
        names = [data[start:stop].decode("utf-8", "replace") for start, stop in self.names.spans]
        ids = {name: groups.find(name) for name in set(names)}
        others = [_number(data[start:stop]) for start, stop in self.others.spans]
        own = {_number(data[start:stop]) for start, stop in self.own.spans}
        if min(ids.values(), default=1) < 1 or not own <= {rank}:
            return None
        if not all(0 <= number < MAX_DEVICES for number in others):
            return None
        named = self.peers.groups.replaced(self.names.places, [ids[name] for name in names])
        return RankPeers(rank, named, self.peers.peers.replaced(self.others.places, others))


@dataclass(slots=True, eq=False)
class FileTemplates:
    """Templates of the decoded files of a job, by file length. A new file that fits a template need not be
    decoded.
    """

    _by_length: dict[int, list[_FileTemplate]] = field(default_factory=dict[int, list[_FileTemplate]])
    _count: int = 0

    def find(self, path: Path, rank: int, groups: Groups) -> tuple[bytes, RankPeers] | None:
        """Return the class key of a file, and its process groups and message peers. Return None if no
        template fits, so that the file must be decoded.
        """
        if not self._count:
            return None
        data = _content(path)
        for template in self._by_length.get(len(data), ()):
            values = template.values_of(data, rank, groups)
            if values is not None:
                return template.key, values
        return None

    def add(self, path: Path, key: bytes, decoded: DecodedFile) -> None:
        """Add a template for a decoded file, if the spans of its values can be found in its bytes."""
        if self._count >= _MOST:
            return
        data = _content(path)
        made = _template(data, key, decoded) if data else None
        if made is not None:
            self._by_length.setdefault(len(data), []).append(made)
            self._count += 1


def _content(path: Path) -> bytes:
    """Return the bytes of a file; empty if it is too large for a template."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            return stream.read(size) if size <= _MOST_BYTES else b""
    except (OSError, FormatError):  # reported when the file is decoded
        return b""


def _template(data: bytes, key: bytes, decoded: DecodedFile) -> _FileTemplate | None:
    """Return the template of a decoded file; None if a search in its bytes does not find exactly the decoded
    values.
    """
    facts, rows, peers = decoded.facts, decoded.rows, decoded.ranks[0]
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
    return _FileTemplate(
        key, np.frombuffer(data, np.uint8), fixed, peers, _values(group_names), _values(others), _values(own)
    )


def _values(pairs: Sequence[tuple[_Span, int]]) -> _ValueSpans:
    return _ValueSpans(
        tuple(span for span, _ in pairs), np.fromiter((node for _, node in pairs), np.int64, len(pairs))
    )


def _names(data: bytes, facts: AttributeFacts) -> dict[int, _Span] | None:
    """Return the byte span of each process group name in the file, by attribute row. Return None if the bytes
    there are not the decoded names.
    """
    group_names = facts.texts("pg_name")
    spans = [(match.end(), match.end() + match[1][0]) for match in _NAME.finditer(data)]
    if not len(group_names.row) == len(facts.rows("pg_name")) == len(spans):
        return None
    if [data[start:stop] for start, stop in spans] != list(facts.values(group_names)):
        return None
    return dict(zip(group_names.row.tolist(), spans, strict=True))


def _numbers(data: bytes, facts: AttributeFacts, name: str) -> dict[int, _Span] | None:
    """Return the byte span of each value of the numeric attribute ``name`` in the file, by attribute row.
    Return None if the bytes there are not the decoded numbers.
    """
    numbers = facts.integers(name)
    spans = [match.span(1) for match in _NUMBER[name].finditer(data)]
    if not len(numbers.row) == len(facts.rows(name)) == len(spans):
        return None
    if [_number(data[start:stop]) for start, stop in spans] != numbers.value.tolist():
        return None
    return dict(zip(numbers.row.tolist(), spans, strict=True))


def _number(varint: bytes) -> int:
    """Return the number that the bytes of one varint encode, -1 if they are malformed."""
    *more, last = varint
    if last > 0x7F or any(byte < 0x80 for byte in more):
        return -1
    return sum((byte & 0x7F) << 7 * index for index, byte in enumerate(varint))
