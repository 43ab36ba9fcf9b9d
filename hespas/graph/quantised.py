"""Quantised element types, and bounds of the sums that integer products form in their accumulators.

A graph holds a quantised type as MLIR prints it, in the encoding of its tensor type. The type
``!quant.uniform<i8<-127:127>:f32:1, {0.1:3,0.2}>`` stores i8 from -127 to 127 for f32, with a scale and a
zero point for each index of dimension 1. Each distinct type is stored once, and all formats that hold
encodings hold it unchanged. :func:`parse_quantised` decodes it.

https://mlir.llvm.org/docs/Dialects/QuantDialect/
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, nan
from typing import NamedTuple

import numpy as np

from hespas.graph.columns import DTYPES, DYNAMIC, DType, DTypeKind, IntArray, find_dtype
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.opgraph import ACCUMULATOR_BITS, OpGraph

__all__ = [
    "OVERFLOW",
    "QUANTISED",
    "AccumulatorSum",
    "QuantisedType",
    "accumulator_sums",
    "parse_quantised",
    "report_overflows",
]

OVERFLOW = "GR008"
"""Code of sums that may overflow, in diagnostics and as a rule of ``hespas-validate check``."""

QUANTISED = "!quant."
"""Start of the text of a quantised type."""

_STORED = re.compile(r"!quant\.(uniform|any)<(\w{1,32})(?:<([^<>:]{1,40}):([^<>:]{1,40})>)?")
_EXPRESSED = re.compile(r":(\w{1,32})")
_AXIS = re.compile(r":(\d{1,18}), ")
_BLOCKS = re.compile(r":\{((?:\d{1,18}:\d{1,18}(?:, ?(?=\d)|(?=\})))*)\}, ")
_CALIBRATED = re.compile(r"!quant\.calibrated<(\w{1,32})<([^<>:]{1,40}):([^<>:]{1,40})>>")
_SCALES = re.compile(r"[-+.0-9eE:,{}]+")
_MISPLACED = re.compile(r"\{(?<=[^{,]\{)|\}(?=[^},])")
_NUMBERS = str.maketrans("", "", "-+.0123456789eE:")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_INTEGER = re.compile(r"(u?)i?([0-9]{1,4})")
_MOST_BITS = 64
_MOST_DIMENSIONS = 64
_MOST_DIGITS = 64
"""Limits of types: bits of an integer, dimensions of a tensor, characters of a scale with its zero point."""


@dataclass(frozen=True, slots=True)
class QuantisedType:
    """Quantised element type. A stored number ``q`` stands for ``scale * (q - zero_point)``.

    ``kind`` is ``uniform``, ``any`` (scales are not stated) or ``calibrated`` (not quantised yet, with the
    range of its values). ``storage`` and ``expressed`` are the names of the types that are stored and meant,
    empty if not stated. ``low`` and ``high`` are the least and the largest stored number (NaN: not stated for
    a float); of a calibrated type, of its values. ``axes`` and ``block_sizes`` are the dimensions with
    several scales and the number of elements that share one: none for one scale, ``(1,)`` and ``(1,)`` for a
    scale for each index of dimension 1. ``scales`` and ``zero_points`` are in row-major order of ``grid``,
    the number of scales along each axis.
    """

    kind: str
    storage: str
    expressed: str
    low: float
    high: float
    axes: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()

    @property
    def dtype(self) -> DType | None:
        """Return the element type in memory, None if it has no code. A calibrated type is not stored as
        integers yet, but as the type that it expresses.
        """
        return find_dtype(self.storage or self.expressed)

    @property
    def expressed_dtype(self) -> DType | None:
        """Return the type of the represented numbers, None if unknown."""
        return find_dtype(self.expressed)

    @property
    def is_blockwise(self) -> bool:
        """Return True for a sub-channel type, which has a scale for each block of elements."""
        return len(self.axes) > 1 or any(size != 1 for size in self.block_sizes)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of scales, which have the expressed type, and zero points, which have the storage
        type. They count even if a program does not store them.
        """
        expressed, storage, pairs = self.expressed_dtype, find_dtype(self.storage), len(self.scales)
        if expressed is None or storage is None:
            return 0
        return expressed.storage_bytes(pairs) + storage.storage_bytes(pairs)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of this shape has as many indices, or blocks, as there are scales."""
        if any(axis >= len(shape) for axis in self.axes):
            return False
        is_full = len(self.grid) != len(self.axes)  # an extent for each dimension of the tensor
        if is_full and len(self.grid) != len(shape):
            return False
        counts = [self.grid[axis] for axis in self.axes] if is_full else self.grid
        return all(
            shape[axis] in (DYNAMIC, size * count)
            for axis, size, count in zip(self.axes, self.block_sizes, counts, strict=True)
        )

    @property
    def steps(self) -> tuple[float, float]:
        """Return the least and the largest number of scales in the value of an element: the stored range
        without the zero points.
        """
        points = self.zero_points or (0,)
        return self.low - max(points), self.high - min(points)

    def __str__(self) -> str:
        """Return the type as text that MLIR parses."""
        if self.kind == "calibrated":
            return f"!quant.calibrated<{self.expressed}<{_number(self.low)}:{_number(self.high)}>>"
        is_integer = _integer_range(self.storage) is not None
        least, most = _integer_range(self.storage) or (nan, nan)
        text = f"!quant.{self.kind}<{self.storage}"
        if (self.low, self.high) != (least, most) and self.low == self.low:
            bounds = (int(self.low), int(self.high)) if is_integer else (self.low, self.high)
            text += "<{:.17g}:{:.17g}>".format(*bounds)
        text += f":{self.expressed}" if self.expressed else ""
        if self.kind == "any":
            return f"{text}>"
        pairs = [
            _number(scale) + (f":{zero_point}" if zero_point else "")
            for scale, zero_point in zip(self.scales, self.zero_points, strict=True)
        ]
        if not self.axes:
            return f"{text}, {pairs[0]}>"
        if not self.is_blockwise:
            return f"{text}:{self.axes[0]}, {{{','.join(pairs)}}}>"
        for extent in reversed(self.grid):
            rows = [pairs[start : start + extent] for start in range(0, len(pairs), extent)]
            pairs = [f"{{{', '.join(row)}}}" for row in rows]
        sizes = ", ".join(f"{axis}:{size}" for axis, size in zip(self.axes, self.block_sizes, strict=True))
        return f"{text}:{{{sizes}}}, {pairs[0]}>"


def _number(value: float) -> str:
    """Return a float as MLIR reads it: with a point."""
    text = repr(float(value))
    return text if "." in text else text.replace("e", ".0e") if "e" in text else f"{text}.0"


def _integer_range(storage: str) -> tuple[int, int] | None:
    """Return the least and the largest number that an integer storage type holds. None for floats and for
    integers wider than 64 bits.
    """
    match = _INTEGER.fullmatch(storage)
    bits = 0 if match is None else int(match[2])
    if match is None or not 1 <= bits <= _MOST_BITS:
        return None
    return (0, 2**bits - 1) if match[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@lru_cache(maxsize=4096)
def parse_quantised(encoding: str) -> QuantisedType | None:
    """Decode the quantised type at the start of an encoding, as MLIR prints it. O(characters).

    Return None for any other text, and for types that MLIR refuses: with a storage type that has no code, an
    empty range or one beyond the storage type, or scales that are not finite and above 0.
    """
    calibrated = _CALIBRATED.match(encoding)
    if calibrated is not None:
        values = _range("", calibrated[2], calibrated[3])
        return None if values is None else QuantisedType("calibrated", "", calibrated[1], *values)
    head = _STORED.match(encoding)
    bounds = None if head is None else _range(head[2], head[3], head[4])
    if head is None or bounds is None or find_dtype(head[2]) is None:
        return None
    kind, storage, (low, high) = head[1], head[2], bounds
    least, most = _integer_range(storage) or (nan, nan)
    at, expressed = head.end(), ""
    if match := _EXPRESSED.match(encoding, at):
        at, expressed = match.end(), match[1]
    if kind == "any":
        return QuantisedType(kind, storage, expressed, low, high) if encoding.startswith(">", at) else None
    axes: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    if match := _AXIS.match(encoding, at):
        at, axes, sizes = match.end(), (int(match[1]),), (1,)
    elif match := _BLOCKS.match(encoding, at):
        pairs = [pair.partition(":") for pair in match[1].split(",") if pair]
        at, axes = match.end(), tuple(int(axis) for axis, _, _ in pairs)
        sizes = tuple(int(size) for _, _, size in pairs)
    elif encoding.startswith(", ", at):
        at += 2
    else:
        return None
    end = encoding.find(">", at)
    parts = _scales(encoding[at:end].replace(", ", ",")) if end >= 0 else None
    if parts is None or len(set(axes)) != len(axes) or 0 in sizes:
        return None
    grid, scales, points = parts
    if len(axes) > 1 or sizes not in {(), (1,)}:
        # MLIR stores scales of blocks in the expressed type and zero points in the storage type. It prints as
        # many digits as distinguish its values, and zero points of unsigned types as signed numbers.
        scales = _rounded(scales, expressed)
        points = tuple(point % (int(most) + 1) for point in points) if least == 0 else points
    is_grid = len(grid) > max(axes) or len(grid) == len(axes) if axes else len(scales) == 1
    column = np.array(scales)
    if not is_grid or not (np.isfinite(column) & (column > 0)).all():
        return None
    grid = grid if axes else ()
    return QuantisedType(kind, storage, expressed, low, high, axes, sizes, grid, scales, points)


def _range(storage: str, low: str | None, high: str | None) -> tuple[float, float] | None:
    """Return the ends of a range of stored numbers, or of values (``storage`` is empty). If none is stated,
    it is the range of an integer storage type, or NaN. None for a range that MLIR refuses.
    """
    whole = _integer_range(storage)
    if low is None or high is None:
        return whole or (nan, nan)
    ends = _float(low), _float(high)
    is_rising = ends[0] < ends[1] or (not storage and ends[0] == ends[1])
    is_stored = whole is None or (
        whole[0] <= ends[0] and ends[1] <= whole[1] and all(isinstance(end, int) for end in ends)
    )
    return ends if is_rising and is_stored and isfinite(ends[0]) and isfinite(ends[1]) else None


def _float(text: str) -> float:
    """Return the number in a text, an integer as ``int``; NaN for other texts."""
    try:
        return int(text) if _WHOLE.fullmatch(text) else float(text)
    except ValueError:
        return nan


def _scales(nested: str) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]] | None:
    """Return the extents of nested lists such as ``{{1.0:3,2.0},{3.0,4.0}}``, their scales and their zero
    points. None for other texts, and for lists of unequal lengths.
    """
    if not _SCALES.fullmatch(nested) or _MISPLACED.search(nested):
        return None
    brackets = nested.translate(_NUMBERS)
    depth = len(brackets) - len(brackets.lstrip("{"))
    if depth > _MOST_DIMENSIONS:
        return None
    extents: list[int] = []
    whole, count = "", 1
    for level in range(1, depth + 1):
        # the first list of each level ends at the first run of as many closing brackets
        end = brackets.find("}" * level)
        before, count = count, brackets.count(",", 0, max(end, 0)) + 1
        extents.append(count // before)
        whole = "{" + ",".join([whole] * extents[-1]) + "}"
    entries = nested.replace("{", "").replace("}", "").split(",")
    if whole != brackets or max(map(len, entries)) > _MOST_DIGITS:
        return None
    points = [0] * len(entries)
    if ":" in nested:
        texts = [entry.partition(":")[2] for entry in entries]
        entries = [entry.partition(":")[0] for entry in entries]
        value = {text: int(text) for text in set(texts) if _WHOLE.fullmatch(text)} | {"": 0}
        if not value.keys() >= set(texts) or len(texts) - texts.count("") != nested.count(":"):
            return None
        points = [value[text] for text in texts]
    try:
        return tuple(reversed(extents)), tuple(map(float, entries)), tuple(points)
    except ValueError:
        return None


@np.errstate(over="ignore")
def _rounded(scales: Sequence[float], expressed: str) -> tuple[float, ...]:
    """Return scales in the precision of the expressed type; infinity for scales above its range."""
    single = np.array(scales, np.float32)
    if expressed == "f16":
        return tuple(np.array(scales, np.float16).astype(np.float64).tolist())
    if expressed == "bf16":  # the upper half of an f32, rounded to even
        bits = single.view(np.uint32)
        single = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return tuple(scales) if expressed == "f64" else tuple(single.astype(np.float64).tolist())


class AccumulatorSum(NamedTuple):
    """Bounds of the sums that an integer matrix product or convolution forms in its accumulator.

    ``nodes`` are the nodes of equal products, ``depth`` is the number of products in a sum, and ``lhs`` and
    ``rhs`` are the ranges of the factors: stored numbers less zero points. ``low`` and ``high`` are the least
    and the largest possible sum. ``bits`` is the width of the accumulator, which is signed or not.
    """

    nodes: IntArray
    depth: int
    lhs: tuple[float, float]
    rhs: tuple[float, float]
    low: float
    high: float
    bits: int
    is_signed: bool

    @property
    def limits(self) -> tuple[int, int]:
        """Return the least and the largest number that the accumulator holds."""
        return (
            (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.is_signed else (0, 2**self.bits - 1)
        )

    @property
    def fits(self) -> bool:
        """Return True if no sum can overflow."""
        low, high = self.limits
        return low <= self.low and self.high <= high

    @property
    def bits_needed(self) -> int:
        """Return the width of the narrowest accumulator of this signedness that holds all sums."""
        magnitudes = (int(self.high), int(-self.low - 1) if self.low < 0 else 0)
        return max(number.bit_length() for number in magnitudes) + (self.is_signed or self.low < 0)

    @property
    def safe_depth(self) -> int:
        """Return the largest number of products whose sum always fits; 0 if one may overflow."""
        low, high = self.limits
        depths = [self.depth]
        if self.high > 0:
            depths.append(int(high * self.depth // self.high))
        if self.low < 0:
            depths.append(int(low * self.depth // self.low))
        return max(min(depths), 0)

    @property
    def overflow_text(self) -> str:
        """Return the description of an overflow for messages, with fixes."""
        left, right = (f"{low:,.0f}..{high:,.0f}" for low, high in (self.lhs, self.rhs))
        low, high = self.limits
        shorter = f", or sums of at most {self.safe_depth:,} products" if self.safe_depth else ""
        return (
            f"a sum of {self.depth:,} products of {left} and {right} can be {self.low:,.0f} to "
            f"{self.high:,.0f}, but its {self.bits}-bit accumulator holds {low:,} to {high:,}: use "
            f"{self.bits_needed} bits{shorter}"
        )


_MOST_PLAIN_BITS = 8
"""Width of integers without a quantised type whose products are checked. Wider ones are mostly counts and
indices, far below the range of their type.
"""


def accumulator_sums(graph: OpGraph) -> list[AccumulatorSum]:
    """Return the bounds of the sums of all products of quantised or narrow integers in a graph, one entry for
    equal products.

    A sum of K products of ``a`` and ``b`` lies between K times the least and K times the largest of the
    products of the ends of both ranges. The ranges come from the quantised types of the operands, else from
    the element types. The accumulator has the bits that the node's attribute ``accumulator_bits`` states,
    else those of the accumulator type (by the StableHLO specification at least 32 for quantised operands).
    Products of unknown depth, and products and accumulators that are not integers, are left out. O(products).
    """
    table = graph.contractions
    stated = _stated_bits(graph)
    rows_of_node = np.bincount(table.node, minlength=len(graph))
    operands = graph.operands
    first = np.full((2, len(table)), -1, np.int64)
    is_single = (rows_of_node[table.node] == 1) & (operands.lengths[table.node] >= 2)
    for side in (0, 1):
        first[side, is_single] = operands.values[operands.offsets[table.node[is_single]] + side]
    key = np.stack(
        [
            *(column.astype(np.int64) for column in (table.lhs, table.rhs, table.accumulator, table.k)),
            *first,
            stated[table.node],
        ]
    )
    distinct, which = np.unique(key, axis=1, return_inverse=True)
    which = which.reshape(-1)
    sums: list[AccumulatorSum] = []
    keys: list[list[int]] = distinct.T.tolist()
    for number, (lhs, rhs, accumulator, depth, *types, bits) in enumerate(keys):
        ranges = [_factor_range(graph, *side) for side in zip((lhs, rhs), types, strict=True)]
        left, right = ranges
        kind = DTYPES[accumulator].kind if accumulator >= 0 else DTypeKind.OPAQUE
        is_unsigned = kind is DTypeKind.UNSIGNED and bits < 0
        if left is None or right is None or depth <= 0:
            continue
        if bits < 0 and kind not in _INTEGERS:
            continue
        products = [a * b * depth for a in left for b in right]
        sums.append(
            AccumulatorSum(
                nodes=np.unique(table.node[which == number]).astype(np.int64),
                depth=depth,
                lhs=left,
                rhs=right,
                low=min(products),
                high=max(products),
                bits=bits if bits >= 0 else DTYPES[accumulator].bits,
                is_signed=not is_unsigned,
            )
        )
    return sums


def report_overflows(graph: OpGraph, diagnostics: Diagnostics) -> None:
    """Report the products of a graph whose sums may overflow their accumulator."""
    for bound in accumulator_sums(graph):
        if not bound.fits:
            node = int(bound.nodes[0])
            where = f"{graph.name}: node {int(graph.id[node])} ({graph.node_name(node)})"
            diagnostics.warning(OVERFLOW, where, bound.overflow_text, count=len(bound.nodes))


_INTEGERS = (DTypeKind.SIGNED, DTypeKind.UNSIGNED)


def _stated_bits(graph: OpGraph) -> IntArray:
    """Return the accumulator bits that attributes of nodes state, shape ``(nodes,)``; -1 without one."""
    bits = np.full(len(graph), -1, np.int64)
    extra = graph.extra
    names = [row for row in np.unique(extra.key).tolist() if graph.strings[row] == ACCUMULATOR_BITS]
    for row in np.flatnonzero(np.isin(extra.key, names) & (extra.node >= 0)).tolist():
        text = bytes(extra.value(row))
        if text.isdigit() and len(text) < 6 and int(text) > 0:
            bits[int(extra.node[row])] = int(text)
    return bits


def _factor_range(graph: OpGraph, code: int, type_row: int) -> tuple[float, float] | None:
    """Return the range of one factor of integer products: of the quantised type of an operand, else of a
    narrow element type. None for wide integers and for floats.
    """
    element = DTYPES[code] if code >= 0 else None
    if element is None or element.kind not in _INTEGERS:
        return None
    if type_row >= 0 and graph.types.dtype_of(type_row) == element:
        quantised = parse_quantised(graph.strings[int(graph.types.encoding[type_row])])
        if quantised is not None and quantised.kind != "calibrated":
            return quantised.steps
    if element.bits > _MOST_PLAIN_BITS:
        return None
    return _integer_range(element.name) or None
