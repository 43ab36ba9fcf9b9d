"""One encoded trace for all ranks of a class, patched for each: only bytes of groups and peers differ.

Where a patched byte stands is found by encoding the class twice, with values that have nothing in common but
their width. Ranks whose values have other widths get another encoding, of which a few are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.chakra.columns import EtColumns
from hespas.converters.chakra.encode import encode_chunks
from hespas.converters.chakra.from_graph import Lowered, Variables, from_graph
from hespas.converters.chakra.spans import Bytes, Longs
from hespas.graph import OpGraph
from hespas.graph.errors import InvariantError
from hespas.schemas.chakra.tables import AttributeField, encode_varint

__all__ = ["ClassWriter"]

_PATCHABLE = (AttributeField.INT32, AttributeField.INT64, AttributeField.UINT32, AttributeField.UINT64)
_KEPT_BYTES = 64 << 20


def _encoded(columns: EtColumns) -> Bytes:
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in encode_chunks(columns)])


def _wire(value: bytes | int) -> bytes:
    """The bytes of a variable inside the trace."""
    return value if isinstance(value, bytes) else encode_varint(value)


def _placeholder(like: bytes | int, digit: int) -> bytes | int:
    """A value as wide as another one, all of whose bytes are made of ``digit``, 1 or 2."""
    if isinstance(like, bytes):
        return str(digit).encode() * len(like)
    return sum(digit << 7 * place for place in range(len(encode_varint(like))))


def _placeholders(variables: Variables, digit: int) -> Variables:
    groups = tuple(text and str(digit).encode() * len(text) for text in variables.groups)
    number = [_placeholder(value, digit) for value in variables.values()[len(groups) :]]
    whole = [value for value in number if isinstance(value, int)]
    return Variables(groups, whole[0], tuple(whole[1::2]), tuple(whole[2::2]))


@dataclass(slots=True, eq=False)
class _Template:
    """An encoded trace and, per variable, the places of its bytes, shape ``(uses, width)``."""

    data: Bytes
    places: tuple[Longs, ...]

    def patched(self, variables: Variables) -> Bytes:
        """The trace of one rank; valid until the next call."""
        for places, value in zip(self.places, variables.values(), strict=True):
            if places.size:
                self.data[places] = np.frombuffer(_wire(value), np.uint8)
        return self.data


@dataclass(slots=True, eq=False)
class ClassWriter:
    """Encodes the ranks of one class that run the same nodes.

    ``rounded_off`` counts, once encoded, the computations that state 0 us though they take time, ``named``
    the nodes that got a name because they have nothing else, ``shortened`` those whose time is not exact.
    """

    graph: OpGraph
    rounded_off: int = 0
    named: int = 0
    shortened: int = 0
    _templates: dict[tuple[int, ...], _Template] = field(default_factory=dict[tuple[int, ...], _Template])

    def pieces(self, variables: Variables, *, alone: bool) -> Iterable[Bytes]:
        """One rank's file; valid until the next call. A rank that is ``alone`` is encoded piece by piece, the
        others are patched, which costs no pass over the nodes.
        """
        if not alone:
            return [self._patched(variables)]
        lowered = self._lowered(variables)
        return (np.frombuffer(piece, np.uint8) for piece in encode_chunks(lowered.columns))

    def _lowered(self, variables: Variables) -> Lowered:
        lowered = from_graph(self.graph, variables)
        self.rounded_off, self.named = lowered.rounded_off, lowered.named
        self.shortened = lowered.shortened
        return lowered

    def _patched(self, variables: Variables) -> Bytes:
        widths = tuple(len(_wire(value)) for value in variables.values())
        template = self._templates.get(widths)
        if template is None:
            template = self._template(variables)
            if template is None:
                return _encoded(self._lowered(variables).columns)
            self._keep(widths, template)
        return template.patched(variables)

    def _keep(self, widths: tuple[int, ...], template: _Template) -> None:
        held = sum(len(known.data) for known in self._templates.values())
        while self._templates and held + len(template.data) > _KEPT_BYTES:
            oldest = next(iter(self._templates))
            held -= len(self._templates.pop(oldest).data)
        self._templates[widths] = template

    def _template(self, variables: Variables) -> _Template | None:
        """Encode twice and compare. None where a variable is of a type whose bytes are not its own."""
        first = self._lowered(_placeholders(variables, 1))
        if not _is_patchable(first):
            return None
        data = _encoded(first.columns)
        slots = first.slot[first.slot >= 0]
        if not len(slots):
            return _Template(data, tuple(np.empty((0, 1), np.int64) for _ in variables.values()))
        other = _encoded(self._lowered(_placeholders(variables, 2)).columns)
        if len(other) != len(data):
            raise InvariantError("two encodings of one class have different lengths")
        return _Template(data, _places(np.flatnonzero(data != other), slots, variables.values()))


def _is_patchable(lowered: Lowered) -> bool:
    rows = lowered.slot >= 0
    field_of = lowered.columns.attrs.field[rows]
    return bool((np.isin(field_of, _PATCHABLE) | (field_of == AttributeField.STRING)).all())


def _places(differ: Longs, slots: Longs, values: Sequence[bytes | int]) -> tuple[Longs, ...]:
    """Distribute the differing bytes, which stand in the order of ``slots``, among the variables."""
    widths = np.array([len(_wire(value)) for value in values])
    ends = np.cumsum(widths[slots])
    if int(ends[-1]) != len(differ):
        raise InvariantError("two encodings of one class differ in more than its variables")
    places: list[Longs] = []
    for slot, width in enumerate(widths.tolist()):
        starts = (ends - widths[slots])[slots == slot]
        places.append(
            differ[starts[:, None] + np.arange(width)] if len(starts) else np.empty((0, 1), np.int64)
        )
    return tuple(places)
