"""Encoded traces shared by the ranks of a class: only the bytes of process groups and message peers differ.

The positions of these bytes are found by encoding the class twice, with values that differ in every byte but
have equal widths. Ranks whose values have other widths get another encoding; a few encodings are cached. The
values of many ranks are rows of numbers in the order of :data:`.from_graph.RankVariables`: group ids become
decimal text in a trace, other numbers varints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.from_graph import RankVariables, TraceLowering
from hespas.converters.chakra.readiness import decimal_widths
from hespas.converters.chakra.wire import Bools, Bytes, EtColumns, Longs, equal_rows
from hespas.converters.chakra.wire.encode import encode_metadata, encode_nodes, varint_widths
from hespas.files.wire import encode_varint
from hespas.graph import NodeKind, OpGraph, Permutation
from hespas.graph.errors import InvariantError
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["ClassWriter", "PeerLookup", "RankValues", "TraceTemplate", "encoded", "used_slots"]

_PATCHABLE = (AttributeField.INT32, AttributeField.INT64, AttributeField.UINT32, AttributeField.UINT64)
_KEPT_BYTES = 64 << 20


def encoded(parts: Iterable[EtColumns]) -> Iterator[Bytes]:
    """Yield the bytes of a trace file piece by piece: the metadata message, then the nodes of each part."""
    for number, columns in enumerate(parts):
        if not number:
            yield encode_metadata(columns)
        yield encode_nodes(columns)


def _placeholders(variables: RankVariables, digit: int) -> RankVariables:
    """Return placeholder values with the same encoded widths as ``variables``. Every byte of their encoding
    is ``digit`` (1 or 2). Two encoded traces with different digits differ exactly where a variable is
    encoded.
    """
    return tuple(
        str(digit).encode() * len(value)
        if isinstance(value, bytes)
        else sum(digit << 7 * byte for byte in range(len(encode_varint(value))))
        for value in variables
    )


@dataclass(frozen=True, slots=True, eq=False)
class TraceTemplate:
    """Encoded trace of one rank that is patched to make the traces of other ranks. ``places`` are the byte
    positions that depend on the rank. ``source[i]`` is the index of byte ``places[i]`` in the encoded
    variables of a rank (:meth:`RankValues.spelled`).
    """

    data: Bytes
    places: Longs
    source: Longs

    def patched(self, spelled: Bytes) -> Iterator[Bytes]:
        """Yield the trace of each rank: the template with the rank's encoded variables, a row of ``spelled``,
        inserted. The yielded array is reused for the next trace. Several threads may use one template at a
        time.
        """
        data, values = self.data.copy(), spelled[:, self.source]
        for row in values:
            data[self.places] = row
            yield data

    def distinct(self, spelled: Bytes) -> Bytes:
        """Return, for each rank (row of ``spelled``), the encoded values of the variables that occur in the
        trace. Ranks with equal rows have equal traces.
        """
        return spelled[:, np.unique(self.source)]


@dataclass(slots=True, eq=False)
class ClassWriter:
    """Encoder of the traces of ranks that run the same nodes of ``graph``. ``inexact`` is filled while traces
    are encoded: it counts, by diagnostic code, the nodes whose values the trace holds only approximately.
    """

    graph: OpGraph
    inexact: dict[str, int] = field(default_factory=dict[str, int])
    _templates: dict[tuple[int, ...], TraceTemplate] = field(
        default_factory=dict[tuple[int, ...], TraceTemplate]
    )

    def pieces(self, variables: RankVariables) -> Iterator[Bytes]:
        """Yield one rank's encoded file piece by piece."""
        return encoded(self._columns(variables))

    def _columns(self, variables: RankVariables) -> Iterator[EtColumns]:
        inexact = Counter[str]()
        for lowered in TraceLowering(self.graph).parts(variables):
            inexact.update(lowered.inexact)
            yield lowered.columns
        self.inexact = dict(inexact)

    def template(self, variables: RankVariables, widths: tuple[int, ...]) -> TraceTemplate | None:
        """Return the template for ranks whose variables have the encoded ``widths`` [bytes]. ``variables``
        are the values of one of these ranks. Return None if the bytes of a variable cannot be patched, so
        that every rank must be encoded.
        """
        template = self._templates.get(widths)
        if template is None:
            template = self._made(variables)
            if template is not None:
                held = sum(len(cached.data) for cached in self._templates.values())
                while self._templates and held + len(template.data) > _KEPT_BYTES:
                    oldest = next(iter(self._templates))
                    held -= len(self._templates.pop(oldest).data)
                self._templates[widths] = template
        return template

    def _made(self, variables: RankVariables) -> TraceTemplate | None:
        """Return a template of the trace, or None if its variables cannot be patched. The trace is encoded
        with two sets of placeholder values, and the bytes that differ are the positions of variables.
        """
        lowering, inexact = TraceLowering(self.graph), Counter[str]()
        one, two = _placeholders(variables, 1), _placeholders(variables, 2)
        data = bytearray()
        places, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for nodes in lowering.ranges():
            first = lowering.part(nodes, one)
            rows = first.slot >= 0
            field_of = first.columns.attrs.field[rows]
            if not bool((np.isin(field_of, _PATCHABLE) | (field_of == AttributeField.STRING)).all()):
                return None
            inexact.update(first.inexact)
            if not data:
                data += encode_metadata(first.columns).data
            start, piece = len(data), encode_nodes(first.columns)
            data += piece.data
            varied = first.slot[rows]
            if len(varied):
                other = encode_nodes(lowering.part(nodes, two).columns)
                if len(piece) != len(other):
                    raise InvariantError("two encodings of one class have different lengths")
                places.append(start + np.flatnonzero(piece != other))
                slots.append(varied)
        self.inexact = dict(inexact)
        position, slot = np.concatenate(places), np.concatenate(slots)
        count = len(position)
        widths = np.array(
            [len(value if isinstance(value, bytes) else encode_varint(value)) for value in variables]
        )
        taken = widths[slot]
        if int(taken.sum()) != count:
            raise InvariantError("two encodings of one class differ in more than its variables")
        starts = (np.cumsum(widths) - widths)[slot]
        before = np.cumsum(taken) - taken
        source = np.repeat(starts - before, taken) + np.arange(count)
        return TraceTemplate(np.frombuffer(data, np.uint8), position, source)


_NO_TEXT = -1


@dataclass(frozen=True)
class PeerLookup:
    """Look-up of the peer of a rank in a permutation. Listed pairs are sorted once; strided permutations need
    no list.
    """

    permutation: Permutation

    @cached_property
    def _listed(self) -> tuple[tuple[Longs, Longs], tuple[Longs, Longs]]:
        pairs = np.array(self.permutation.pairs or (), np.int64).reshape(-1, 2)
        by_target = pairs[np.argsort(pairs[:, 1], kind="stable")]
        return (pairs[:, 0], pairs[:, 1]), (by_target[:, 1], by_target[:, 0])

    def peers(self, ranks: Longs, *, sends: bool) -> Longs:
        """Return the rank that each rank sends to or receives from, -1 for none. O(ranks x log pairs)."""
        if self.permutation.pairs is None:
            return self.permutation.targets_of(ranks) if sends else self.permutation.sources_of(ranks)
        sources, peers = self._listed[0 if sends else 1]
        if not len(sources):
            return np.full(len(ranks), -1, np.int64)
        position = np.minimum(np.searchsorted(sources, ranks), len(sources) - 1)
        return np.where(sources[position] == ranks, peers[position], -1)


class _UsedSlots(NamedTuple):
    """Masks of the values that may differ between ranks and that the nodes of a graph use: ``groups`` has one
    entry per group set, and ``ways`` one per permutation.
    """

    groups: Bools
    ways: Bools


def used_slots(graph: OpGraph) -> _UsedSlots:
    """Return the group sets and permutations that the graph's trace needs."""
    groups = np.zeros(len(graph.group_sets), np.bool_)
    chosen = graph.collectives.group_set
    groups[chosen[chosen >= 0]] = True
    ways = np.zeros(len(graph.permutations), np.bool_)
    messages = np.isin(graph.kind[graph.p2p.node], (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE))
    chosen = graph.p2p.permutation[messages]
    ways[chosen[chosen >= 0]] = True
    return _UsedSlots(groups, ways)


@dataclass(frozen=True, slots=True, eq=False)
class RankValues:
    """Values that differ between ranks, shape (ranks, slots). The slots have the order of
    :data:`.from_graph.RankVariables`. The first ``texts`` slots are process group ids (-1: empty text), and
    the other slots are rank numbers.
    """

    numbers: Longs
    texts: int

    @classmethod
    def of(
        cls, graph: OpGraph, ranks: Longs, ids: GroupIds, ways: dict[Permutation, PeerLookup]
    ) -> RankValues:
        """Return the rank-dependent values (group ids and peers) of the given ranks, which all run ``graph``.
        Slots that the graph does not use are 0 or an empty text.
        """
        used = used_slots(graph)
        texts = len(graph.group_sets)
        numbers = np.zeros((len(ranks), texts + 1 + 2 * len(graph.permutations)), np.int64)
        for slot, groups in enumerate(graph.group_sets):
            numbers[:, slot] = ids.numbers(groups, ranks) if used.groups[slot] else _NO_TEXT
        if used.ways.any():
            numbers[:, texts] = ranks
        for row in np.flatnonzero(used.ways).tolist():
            way = ways.setdefault(graph.permutations[row], PeerLookup(graph.permutations[row]))
            for side, sends in enumerate((True, False)):
                column = texts + 1 + 2 * row + side
                numbers[:, column] = np.maximum(way.peers(ranks, sends=sends), 0)
        return cls(numbers, texts)

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: Longs) -> RankValues:
        """Return the values of the ranks in the given rows."""
        return RankValues(self.numbers[rows], self.texts)

    def variables(self, row: int) -> RankVariables:
        """Return the values of one rank in the form that the encoder takes."""
        numbers: list[int] = self.numbers[row].tolist()
        groups = (b"" if number == _NO_TEXT else b"%d" % number for number in numbers[: self.texts])
        return (*groups, *numbers[self.texts :])

    def widths(self) -> Longs:
        """Return the number of bytes of each encoded value, shape (ranks, slots)."""
        text, number = self.numbers[:, : self.texts], self.numbers[:, self.texts :]
        of_text = np.where(text == _NO_TEXT, 0, decimal_widths(text.view(np.uint64)))
        return np.concatenate([of_text, varint_widths(number.view(np.uint64))], axis=1)

    def groups_by_widths(self) -> Iterator[tuple[tuple[int, ...], Longs]]:
        """Yield each distinct combination of encoded widths with the rows of its ranks, in order of first
        appearance.
        """
        for widths, ranks in equal_rows(self.widths()):
            yield tuple(np.frombuffer(widths, np.int64).tolist()), ranks

    def spelled(self, widths: tuple[int, ...]) -> Bytes:
        """Return the encoded values of all ranks, shape (ranks, sum of widths): decimal digits for texts,
        varints for numbers. All ranks must have the same widths.
        """
        columns: list[Longs] = []
        for slot, width in enumerate(widths):
            number = self.numbers[:, slot]
            if slot < self.texts:
                columns += [number // 10 ** (width - 1 - byte) % 10 + 48 for byte in range(width)]
            else:
                more = [0x80] * (width - 1) + [0]
                columns += [number >> 7 * byte & 0x7F | more[byte] for byte in range(width)]
        if not columns:
            return np.empty((len(self), 0), np.uint8)
        return np.stack(columns, axis=1).astype(np.uint8)
