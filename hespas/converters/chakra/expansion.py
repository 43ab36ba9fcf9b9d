"""One encoded trace for all ranks of a class, patched for each: only bytes of groups and peers differ.

Where a patched byte stands is found by encoding the class twice, with values that have nothing in common
but their width. Ranks whose values have other widths get another encoding, of which a few are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.chakra.from_graph import Lowered, Lowering, Variables
from hespas.converters.chakra.wire import Bytes, EtColumns, Longs
from hespas.converters.chakra.wire.encode import encode_metadata, encode_node_chunks
from hespas.files.wire import encode_varint
from hespas.graph import OpGraph
from hespas.graph.errors import InvariantError
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["ClassWriter", "Template", "encoded"]

_PATCHABLE = (AttributeField.INT32, AttributeField.INT64, AttributeField.UINT32, AttributeField.UINT64)
_KEPT_BYTES = 64 << 20


def encoded(parts: Iterable[EtColumns]) -> Iterator[Bytes]:
    """Yield a trace piece by piece: the metadata, then the nodes of each part."""
    for number, columns in enumerate(parts):
        if not number:
            yield np.frombuffer(encode_metadata(columns), np.uint8)
        for piece in encode_node_chunks(columns):
            yield np.frombuffer(piece, np.uint8)


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


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """An encoded trace, the places of its bytes that differ between ranks, and for each of them which byte of
    the spelled values of a rank stands there.
    """

    data: Bytes
    places: Longs
    source: Longs

    def patched(self, spelled: Bytes) -> Iterator[Bytes]:
        """The traces of ranks, a row of ``spelled`` each; one is valid until the next is asked for. Others
        may patch the template meanwhile.
        """
        data, values = self.data.copy(), spelled[:, self.source]
        for row in values:
            data[self.places] = row
            yield data

    def distinct(self, spelled: Bytes) -> Bytes:
        """What of the spelled values stands in the trace: equal rows are equal traces."""
        return spelled[:, np.unique(self.source)]


@dataclass(slots=True, eq=False)
class ClassWriter:
    """Encodes the ranks of one class that run the same nodes; ``found`` counts, once encoded, the nodes that
    are not said exactly.
    """

    graph: OpGraph
    found: dict[str, int] = field(default_factory=dict[str, int])
    _templates: dict[tuple[int, ...], Template] = field(default_factory=dict[tuple[int, ...], Template])

    def pieces(self, variables: Variables) -> Iterator[Bytes]:
        """One rank's file, encoded piece by piece."""
        return encoded(self._columns(variables))

    def _columns(self, variables: Variables) -> Iterator[EtColumns]:
        found = Counter[str]()
        for lowered in Lowering(self.graph).parts(variables):
            found.update(lowered.inexact)
            yield lowered.columns
        self.found = dict(found)

    def template(self, variables: Variables, widths: tuple[int, ...]) -> Template | None:
        """The template of ranks whose values have these widths, as those of one of them have. None where a
        variable is of a type whose bytes are not its own: each rank is then encoded.
        """
        template = self._templates.get(widths)
        if template is None:
            template = self._made(variables)
            if template is not None:
                self._keep(widths, template)
        return template

    def _keep(self, widths: tuple[int, ...], template: Template) -> None:
        held = sum(len(known.data) for known in self._templates.values())
        while self._templates and held + len(template.data) > _KEPT_BYTES:
            oldest = next(iter(self._templates))
            held -= len(self._templates.pop(oldest).data)
        self._templates[widths] = template

    def _made(self, variables: Variables) -> Template | None:
        """Encode what depends on the rank twice and compare."""
        lowering, found = Lowering(self.graph), Counter[str]()
        one, two = _placeholders(variables, 1), _placeholders(variables, 2)
        data = bytearray()
        places, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for nodes in lowering.ranges():
            first = lowering.part(nodes, one)
            if not _is_patchable(first):
                return None
            found.update(first.inexact)
            start = len(data)
            if not start:
                data += encode_metadata(first.columns)
                start = len(data)
            for piece in encode_node_chunks(first.columns):
                data += piece
            varied = first.slot[first.slot >= 0]
            if len(varied):
                other = b"".join(encode_node_chunks(lowering.part(nodes, two).columns))
                places.append(_differences(data, start, other))
                slots.append(varied)
        self.found = dict(found)
        place, slot = np.concatenate(places), np.concatenate(slots)
        return Template(np.frombuffer(data, np.uint8), place, _sources(len(place), slot, variables.values()))


def _differences(data: bytearray, start: int, other: bytes) -> Longs:
    """Return the places from ``start`` on where data differ from another encoding of the same nodes."""
    if len(data) - start != len(other):
        raise InvariantError("two encodings of one class have different lengths")
    return start + np.flatnonzero(np.frombuffer(data, np.uint8)[start:] != np.frombuffer(other, np.uint8))


def _is_patchable(lowered: Lowered) -> bool:
    rows = lowered.slot >= 0
    field_of = lowered.columns.attrs.field[rows]
    return bool((np.isin(field_of, _PATCHABLE) | (field_of == AttributeField.STRING)).all())


def _sources(count: int, slots: Longs, values: Sequence[bytes | int]) -> Longs:
    """Which byte of the values, written behind each other, each of ``count`` differing bytes is; these stand
    in the order of ``slots``.
    """
    widths = np.array([len(_wire(value)) for value in values])
    taken = widths[slots]
    if int(taken.sum()) != count:
        raise InvariantError("two encodings of one class differ in more than its variables")
    starts = (np.cumsum(widths) - widths)[slots]
    before = np.cumsum(taken) - taken
    return np.repeat(starts - before, taken) + np.arange(count)
