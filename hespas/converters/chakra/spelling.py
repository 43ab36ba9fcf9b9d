"""Tensor types as ``IOInfo`` text and back: shapes ``[[16, 128]]``, types ``["bf16"]``, values ``[]``.

What a type says beside its element type stands behind that: ``f32{1,0}`` has the layout ``1,0``, the extents
of ``f32<=`` are upper bounds, ``i8+64B`` takes 64 bytes more than its elements and ``i8-64B`` as many fewer.

The texts are JSON and, as Chakra's readers want them, Python literals. Texts of other tools are kept
verbatim.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isfinite, nan, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.wire import Bools, ByteRows, IoColumns, Longs, Words
from hespas.graph import (
    DTYPES,
    DYNAMIC,
    ContractionTable,
    DType,
    NodeKind,
    OpGraph,
    RaggedArray,
    StringTableBuilder,
    TensorTypes,
    TensorTypesBuilder,
    find_dtype,
)
from hespas.graph.columns import FloatArray

__all__ = [
    "LARGEST_EXTENT",
    "LARGEST_MICROS",
    "LONGEST_NS",
    "UNKNOWN",
    "Times",
    "TypeTexts",
    "carried_micros",
    "contraction_texts",
    "micros_as_ns",
    "nodes_of_odd_sizes",
    "parse_contractions",
    "parse_io",
    "type_texts",
    "whole_nanos",
]

_VALUES = b"[]"
_TYPE = re.compile(r"([A-Za-z0-9_]*(?:<f[0-9]+>)?)(?:\{(.+)\})?(<=)?(?:([+-][1-9][0-9]{0,15})B)?", re.DOTALL)
_MOST_EXTRA_BYTES = 10**16
_MAX_TEXT = 1 << 16
"""A longer text is no list of shapes of ours; it is not parsed."""


class TypeTexts(NamedTuple):
    """Shapes and types of one list of tensors."""

    shapes: bytes
    types: bytes


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class _Type(NamedTuple):
    """A tensor type beside its shape."""

    element: DType | None
    encoding: str = ""
    bounded: bool = False
    extra_bytes: int = 0

    def text(self) -> str:
        """The type as JSON text."""
        text = self.element.name if self.element else ""
        text += f"{{{self.encoding}}}" if self.encoding else ""
        text += "<=" if self.bounded else ""
        text += f"{self.extra_bytes:+}B" if self.extra_bytes else ""
        return json.dumps(text)

    @classmethod
    def parse(cls, text: str) -> _Type | None:
        """The type that a text says, None where it is not of this form or names no known element type."""
        match = _TYPE.fullmatch(text)
        if match is None:
            return None
        name, encoding, bounded, extra = match.groups()
        element = find_dtype(name) if name else None
        if name and element is None:
            return None
        return cls(element, encoding or "", bool(bounded), int(extra or 0))


def _joined(spelled: Sequence[tuple[str, str]]) -> TypeTexts:
    """The texts of a list of tensors from those of its members."""
    shapes = ", ".join([shape for shape, _ in spelled])
    names = ", ".join([name for _, name in spelled])
    return TypeTexts(f"[{shapes}]".encode(), f"[{names}]".encode())


def type_texts(graph: OpGraph, operands: RaggedArray) -> IoColumns:
    """The ``IOInfo`` of all nodes that have operands (or results)."""
    nodes = np.flatnonzero(operands.lengths)
    lists = operands.values.astype(np.int32, copy=False).tobytes()
    start: list[int] = (operands.offsets[nodes] * 4).tolist()
    end: list[int] = (operands.offsets[nodes + 1] * 4).tolist()
    keys = list(map(lists.__getitem__, map(slice, start, end)))
    distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    which = np.fromiter(map(distinct.__getitem__, keys), np.int64, len(keys))
    spelled = {row: _spelled(graph, row) for row in set(operands.values.tolist())}
    lists_of = [np.frombuffer(key, np.int32).tolist() for key in distinct]
    texts = [_joined([spelled[row] for row in rows]) for rows in lists_of]
    return IoColumns(
        nodes,
        ByteRows.from_rows([_VALUES]).take(np.zeros(len(nodes), np.int64)),
        ByteRows.from_rows([text.shapes for text in texts]).take(which),
        ByteRows.from_rows([text.types for text in texts]).take(which),
    )


def nodes_of_odd_sizes(graph: OpGraph) -> int:
    """Nodes whose tensors have a size that the texts do not bring back: one of an unknown shape, none of a
    known one, or parts of a byte.
    """
    types = graph.types
    back = np.array([_size_read(types, row) for row in range(len(types))], np.float64)
    is_odd = (types.bytes != back) & ~(np.isnan(types.bytes) & np.isnan(back))
    if not is_odd.any():
        return 0
    odd = np.zeros(len(graph), np.bool_)
    for rows in (graph.operands, graph.results):
        odd[np.repeat(np.arange(len(graph)), rows.lengths)[is_odd[rows.values]]] = True
    return int(odd.sum())


def _size_read(types: TensorTypes, row: int) -> float:
    """The size that is read where the type of ``row`` was written."""
    element, shape, size = types.dtype_of(row), types.shape(row), float(types.bytes[row])
    if element is None or DYNAMIC in shape:
        return nan
    elements = element.storage_bytes(prod(shape))
    extra = int(size - elements) if isfinite(size) else 0
    return float(elements + extra) if abs(extra) < _MOST_EXTRA_BYTES else nan


def _spelled(graph: OpGraph, row: int) -> tuple[str, str]:
    """Shape and type of one tensor type."""
    types = graph.types
    shape, element = types.shape(row), types.dtype_of(row)
    size = float(types.bytes[row])
    elements = element.storage_bytes(prod(shape)) if element and isfinite(size) else size
    extra = int(size - elements) if isfinite(size) else 0
    spelled = _Type(element, graph.strings[int(types.encoding[row])], bool(types.bounded[row]), extra)
    return _shape_text(shape), spelled.text()


def _fits(spelled: _Type, shape: Sequence[int]) -> bool:
    """Whether bytes beside the elements, or fewer than them, stand for a size that there can be."""
    if not spelled.extra_bytes:
        return True
    if spelled.element is None or DYNAMIC in shape:
        return False
    return spelled.element.storage_bytes(prod(shape)) + spelled.extra_bytes >= 0


class _Parser:
    """Texts already seen are not parsed again."""

    def __init__(self, types: TensorTypesBuilder, strings: StringTableBuilder) -> None:
        self.types = types
        self.strings = strings
        self.known: dict[tuple[bytes, bytes], tuple[int, ...] | None] = {}

    def rows(self, shapes: bytes, types: bytes) -> tuple[int, ...] | None:
        """Type rows of two texts, None where they are not ours."""
        key = (shapes, types)
        if key not in self.known:
            self.known[key] = self._parse(shapes, types)
        return self.known[key]

    def _parse(self, shapes: bytes, types: bytes) -> tuple[int, ...] | None:
        if max(len(shapes), len(types)) > _MAX_TEXT:
            return None
        import msgspec

        try:
            extents = msgspec.json.decode(shapes, type=list[list[int]])
            names = msgspec.json.decode(types, type=list[str])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        parsed = [_Type.parse(name) for name in names]
        known = [each for each in parsed if each is not None]
        negative = any(extent < -1 or extent > 1 << 62 for shape in extents for extent in shape)
        if len(known) != len(parsed) or negative or len(extents) != len(names) or not extents:
            return None
        if not all(_fits(each, shape) for each, shape in zip(known, extents, strict=True)):
            return None
        texts = [(_shape_text(shape), each.text()) for shape, each in zip(extents, known, strict=True)]
        if _joined(texts) != TypeTexts(shapes, types):
            return None
        return tuple(self._row(each, shape) for each, shape in zip(known, extents, strict=True))

    def _row(self, spelled: _Type, shape: Sequence[int]) -> int:
        return self.types.add(
            spelled.element,
            shape,
            encoding=self.strings.add(spelled.encoding),
            bounded=spelled.bounded,
            extra_bytes=spelled.extra_bytes,
        )


def parse_io(
    io: IoColumns, nodes: int, types: TensorTypesBuilder, strings: StringTableBuilder
) -> tuple[RaggedArray, Longs]:
    """Type rows per node, and which rows of ``io`` are not of this form and must be kept as they are."""
    if not len(io):
        return RaggedArray.empty(nodes), np.empty(0, np.int64)
    parser = _Parser(types, strings)
    foreign: list[int] = []
    lengths = np.zeros(nodes, np.int64)
    flat: list[int] = []
    owners: list[int] = io.node.tolist()
    for row, (owner, value, shapes, names) in enumerate(
        zip(owners, io.values, io.shapes, io.types, strict=True)
    ):
        found = parser.rows(shapes, names) if value == _VALUES else None
        if found is None:
            foreign.append(row)
            continue
        lengths[owner] = len(found)
        flat.extend(found)
    return RaggedArray.from_lengths(lengths, np.array(flat, np.int32)), np.array(foreign, np.int64)


# Matrix products and convolutions as an attribute: ``1x128x512x256 bf16*bf16>f32``, and back.
#
# Extents are batch, M, N and K; element types those of both operands and of the accumulator (``?``
# unknown). Behind them stands what does not follow from the extents: ``flops=``, ``useful=`` and
# ``products=``. A fusion that holds several has them with ``;`` between.

_UNKNOWN = "?"
LARGEST_EXTENT = 1 << 62
_FLOPS_PER_MULTIPLY_ADD = 2
_ELEMENT = r"(\?|[A-Za-z0-9_]+(?:<f\d+>)?)"
_FIGURE = r"nan|-?\d{1,400}(?:\.\d{1,400})?(?:e[+-]?\d{1,3})?"
_TEXT = re.compile(
    rf"(-?\d{{1,19}})x(-?\d{{1,19}})x(-?\d{{1,19}})x(-?\d{{1,19}}) {_ELEMENT}\*{_ELEMENT}>{_ELEMENT}"
    rf"(?: flops=({_FIGURE}))?(?: useful=({_FIGURE}))?(?: products=(\d{{1,3}}))?"
)


class _Contraction(NamedTuple):
    """One row of the table, its columns behind ``node`` in their order."""

    batch: int
    m: int
    n: int
    k: int
    flops: float
    useful_flops: float
    lhs: int
    rhs: int
    accumulator: int
    products: int

    @property
    def usual_flops(self) -> float:
        """What the extents say."""
        return float(_FLOPS_PER_MULTIPLY_ADD) * self.batch * self.m * self.n * self.k

    def text(self) -> str:
        """The row as text; left out is what the rest implies."""
        text = f"{self.batch}x{self.m}x{self.n}x{self.k} "
        text += f"{_name(self.lhs)}*{_name(self.rhs)}>{_name(self.accumulator)}"
        text += f" flops={self.flops!r}" if self.flops != self.usual_flops else ""
        text += f" useful={self.useful_flops!r}" if _differ(self.useful_flops, self.flops) else ""
        return text + (f" products={self.products}" if self.products != 1 else "")

    @classmethod
    def parse(cls, text: str) -> _Contraction | None:
        """The row that a text says, None where it is not of this form."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        batch, m, n, k = (int(part) for part in match.groups()[:4])
        lhs, rhs, accumulator = (_code(part) for part in match.groups()[4:7])
        too_large = max(abs(batch), abs(m), abs(n), abs(k)) > LARGEST_EXTENT
        if lhs is None or rhs is None or accumulator is None or too_large:
            return None
        row = cls(batch, m, n, k, 0.0, 0.0, lhs, rhs, accumulator, int(match[10] or 1))
        flops = float(match[8]) if match[8] else row.usual_flops
        useful = float(match[9]) if match[9] else flops
        return row._replace(flops=flops, useful_flops=useful)


def _differ(one: float, other: float) -> bool:
    """Whether two figures differ; unknown is the same as unknown."""
    return one != other and not (np.isnan(one) and np.isnan(other))


def _name(code: int) -> str:
    return DTYPES[code].name if code >= 0 else _UNKNOWN


def _code(name: str) -> int | None:
    if name == _UNKNOWN:
        return -1
    found = find_dtype(name)
    return found.code if found is not None and found.name == name else None


def contraction_texts(graph: OpGraph) -> tuple[Longs, list[bytes], Longs]:
    """The nodes that hold contractions, the distinct texts, and which of them each node has."""
    table = graph.contractions
    columns = [getattr(table, name).tolist() for name in table.DTYPES]
    texts: dict[int, str] = {}
    for node, *values in zip(*columns, strict=True):
        text = _Contraction(*values).text()
        texts[node] = f"{texts[node]};{text}" if node in texts else text
    distinct = {text: place for place, text in enumerate(dict.fromkeys(texts.values()))}
    which = np.array([distinct[text] for text in texts.values()], np.int64)
    return np.array(list(texts), np.int64), [text.encode() for text in distinct], which


def parse_contractions(nodes: Longs, texts: list[str], place: Longs) -> tuple[ContractionTable, Longs]:
    """The table of nodes that have ``texts[place]``, and which places of ``nodes`` are not of this form."""
    known = [_parsed(text) for text in texts]
    places: list[int] = place.tolist()
    owners: list[int] = nodes.tolist()
    rows = [known[which] for which in places]
    found = [(node, *row) for node, each in zip(owners, rows, strict=True) for row in each or ()]
    foreign = np.array([index for index, each in enumerate(rows) if each is None], np.int64)
    return ContractionTable.from_rows(found), foreign


def _parsed(text: str) -> tuple[_Contraction, ...] | None:
    """The rows of one node, None where the text would not be written again as it is."""
    rows = [_Contraction.parse(part) for part in text.split(";")]
    known = tuple(row for row in rows if row is not None)
    same = len(known) == len(rows) and ";".join(row.text() for row in known) == text
    return known if same and all(row.products <= 255 for row in known) else None


# --- Whole microseconds without losing time: the remainder is carried along each stream.
#
# Truncating every duration loses several per cent of a real trace and makes a third of its kernels 0 us long.
# Here the running time of a stream is rounded up at each node, so any sum along it is right within 1 us.

_COMMUNICATION = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
UNKNOWN = -1
LONGEST_NS = 1 << 62
"""Longer times (146 years) are stated in microseconds only."""

LARGEST_MICROS = np.uint64((1 << 63) - 1)
"""More would be a negative time to readers of signed numbers."""
_LARGEST_CAST = float((1 << 63) - 1024)
"""The largest number below 2**63 that a float holds."""


class Times(NamedTuple):
    """``nanos``: whole ns, :data:`UNKNOWN` where not known or of :data:`LONGEST_NS` and more. ``micros``:
    what ``duration_micros`` states, 0 where not known.
    """

    nanos: Longs
    micros: Words

    @classmethod
    def of(
        cls, duration_ns: FloatArray, kind: NDArray[np.integer], place: tuple[NDArray[np.integer], ...]
    ) -> Times:
        """What a trace states for durations (ns, NaN where unknown). ``place`` is resource and stream, along
        which remainders are carried: those of computations among each other, for a simulator replays their
        times alone.
        """
        resource, stream = place
        lane = (resource.astype(np.int64) * 2 + np.isin(kind, _COMMUNICATION)) * (1 << 32) + stream
        nanos = whole_nanos(duration_ns, lane)
        micros = carried_micros(nanos, lane).view(np.uint64)
        long = np.flatnonzero(duration_ns >= LONGEST_NS)
        if len(long):
            whole = np.floor(duration_ns[long] / 1e3)
            cast = np.minimum(whole, _LARGEST_CAST).astype(np.uint64)
            micros[long] = np.where(whole > _LARGEST_CAST, LARGEST_MICROS, cast)
        return cls(nanos, micros)

    def shortened(self, duration_ns: FloatArray) -> int:
        """How many long times are not those that were given."""
        long = duration_ns >= LONGEST_NS
        return int((micros_as_ns(self.micros[long]) != duration_ns[long]).sum())

    def are_exact(self, duration_ns: FloatArray) -> Bools:
        """Where ``micros`` alone tell the time, and it is not 0."""
        whole = (self.nanos % 1000 == 0) & ((self.nanos // 1000).view(np.uint64) == self.micros)
        exact: Bools = (self.nanos > 0) & (whole | (micros_as_ns(self.micros) == duration_ns))
        return exact


def micros_as_ns(micros: Words) -> FloatArray:
    """Stated microseconds in ns, as a reader takes them."""
    return micros.astype(np.float64) * 1e3


def whole_nanos(duration_ns: FloatArray, stream: NDArray[np.integer]) -> Longs:
    """Durations in whole ns, :data:`UNKNOWN` where not known or too long; a positive one is at least 1 ns.

    Fractions are carried along each stream, so that a sum of such durations is right within 1 ns.
    """
    known = (duration_ns >= 0) & (duration_ns < LONGEST_NS)
    time = np.where(known, duration_ns, 0.0)
    time[(time > 0) & (time < 1)] = 1.0
    whole = np.floor(time)
    order, begins, ends = _along(time - whole, stream)
    nanos = whole.astype(np.int64)
    nanos[order] += _half_up(ends) - _half_up(begins)
    return np.where(known, nanos, UNKNOWN)


def carried_micros(nanos: Longs, stream: NDArray[np.integer]) -> Longs:
    """Microseconds per node, in node order along each stream; 0 where the time is unknown."""
    known = np.maximum(nanos, 0)
    micros = known // 1000
    order, begins, ends = _along((known - micros * 1000).astype(np.float64), stream)
    micros[order] += (ends.astype(np.int64) + 999) // 1000 - (begins.astype(np.int64) + 999) // 1000
    return micros


def _along(rest: FloatArray, stream: NDArray[np.integer]) -> tuple[Longs, FloatArray, FloatArray]:
    """Nodes stream by stream, and the sum of what is left over before and after each; a stream begins at 0.

    Only remainders are summed, so that sums stay exact however long the times are.
    """
    order = np.argsort(stream, kind="stable")
    ordered = stream[order]
    ends = np.cumsum(rest[order])
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(order) else order
    first = ends[starts] - rest[order][starts]
    ends -= np.repeat(first, np.diff(np.append(starts, len(order))))
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1]
    begins[starts] = 0
    return order, begins, ends


def _half_up(time: FloatArray) -> Longs:
    """Rounded so that times 1 apart stay at least 1 apart, unlike ``np.rint``, which rounds half to even."""
    whole = np.floor(time)
    return whole.astype(np.int64) + (time - whole >= 0.5)
