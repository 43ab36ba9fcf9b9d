"""HLO shapes: ``bf16[4,128]{1,0:T(8,128)(2,1)S(1)}``, tuples of them, ``token[]``, bounded extents ``<=n``.

Grammar: ``xla/hlo/parser`` of openxla/xla. What stands in a layout (order, tiling, memory space, element
size) is kept as text; bytes are those of the logical shape, so padding by tiles is not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hespas.converters.hlo.scan import strip_comments
from hespas.graph import DYNAMIC, DType, find_dtype
from hespas.graph.errors import UnsupportedError

__all__ = [
    "EMPTY_TUPLE",
    "MAX_TUPLE_DEPTH",
    "MAX_TUPLE_VALUES",
    "ArrayShape",
    "Shape",
    "ShapeTable",
    "parse_shape",
    "shown_shape",
]

MAX_TUPLE_DEPTH = 64
MAX_TUPLE_VALUES = 1 << 17
"""Arrays and tuples in a tuple: one within another, each named twice, doubles with every level."""
_MAX_ELEMENTS = 1 << 62
_MAX_DIMS = 4096
_MAX_DIGITS = 19
_SHOWN_CHARACTERS = 120
_LEAF = re.compile(r"([a-z][a-z0-9]*)\s*\[([^\]]*)\](?:\s*\{([^{}]*)\})?")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array: element type (None where unknown), its spelling, extents, layout text without braces."""

    dtype: DType | None
    element: str
    dims: tuple[int, ...]
    bounded: bool = False
    layout: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """An array (``elements`` is None) or a tuple, which keeps no list of its arrays: tuples share elements,
    and a short text can name each many times.

    ``values`` counts the arrays and tuples in it, itself among them. Making one raises ``UnsupportedError``
    where that is past the limit or tuples are nested too deep. Hashing takes O(1), so does comparing what
    differs or is the same object.
    """

    array: ArrayShape | None
    elements: tuple[Shape, ...] | None = None
    values: int = field(init=False)
    depth: int = field(init=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Count, and refuse what is too large to be walked through."""
        parts = self.elements
        values = 1 if parts is None else 1 + sum([part.values for part in parts])
        depth = 0 if parts is None else 1 + max([part.depth for part in parts], default=0)
        hint = "check the tuple types of the program"
        if values > MAX_TUPLE_VALUES:
            raise UnsupportedError(f"a tuple of {values:,} values (limit {MAX_TUPLE_VALUES:,})", hint=hint)
        if depth > MAX_TUPLE_DEPTH:
            raise UnsupportedError(f"tuples nested more than {MAX_TUPLE_DEPTH} deep", hint=hint)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "_hash", hash((self.array, parts)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Shape) or (self._hash, self.values) != (other._hash, other.values):
            return False
        return self.array == other.array and self.elements == other.elements

    @property
    def leaves(self) -> tuple[ArrayShape, ...]:
        """All arrays in order, made anew. O(values); no recursion."""
        found: list[ArrayShape] = []
        pending: list[Shape] = [self]
        while pending:
            part = pending.pop()
            if part.array is not None:
                found.append(part.array)
            pending.extend(reversed(part.elements or ()))
        return tuple(found)

    def element(self, index: int) -> Shape:
        """One element of a tuple. Raises ``IndexError`` where there is none."""
        if self.elements is None or not 0 <= index < len(self.elements):
            raise IndexError(index)
        return self.elements[index]


EMPTY_TUPLE = Shape(None, ())


def _extent(text: str) -> tuple[int, bool]:
    """One extent and whether it is an upper bound. Raises ``ValueError``."""
    bounded = text.startswith("<=")
    digits = text[2:] if bounded else text
    if digits == "?":
        return DYNAMIC, False
    if not digits.isascii() or not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ValueError(f"expected an extent, found {text[:40]!r}")
    return int(digits), bounded


def _array(match: re.Match[str]) -> ArrayShape:
    element, inner, layout = match[1], match[2], match[3] or ""
    dims: list[int] = []
    any_bounded = False
    elements = 1
    if inner.count(",") >= _MAX_DIMS:
        raise ValueError(f"expected at most {_MAX_DIMS:,} extents, found {match[0][:60]!r}")
    for part in inner.split(",") if inner.strip() else ():
        extent, bounded = _extent(part.strip())
        dims.append(extent)
        any_bounded |= bounded
        elements *= max(extent, 1)
        if elements > _MAX_ELEMENTS:
            raise ValueError(f"expected a shape of at most 2**62 elements, found {match[0][:60]!r}")
    return ArrayShape(find_dtype(element), element, tuple(dims), any_bounded, layout.strip())


def parse_shape(text: str) -> Shape:
    """One shape from its text. Raises ``ValueError`` naming what was expected, ``UnsupportedError`` for a
    tuple past the limits. No recursion.
    """
    clean = strip_comments(text)
    stack: list[list[Shape]] = [[]]
    cursor, end = 0, len(clean)
    while cursor < end:
        found = clean[cursor]
        if found in " \t\r\n,":
            cursor += 1
        elif found == "(":
            stack.append([])
            cursor += 1
        elif found == ")":
            if len(stack) < 2:
                raise ValueError("expected a shape, found ')'")
            parts = stack.pop()
            stack[-1].append(Shape(None, tuple(parts)))
            cursor += 1
        elif clean.startswith("b(", cursor):  # a buffer: one array that lives in a named place
            cursor += 1
        else:
            match = _LEAF.match(clean, cursor)
            if match is None:
                raise ValueError(
                    f"expected a shape such as f32[2,3]{{1,0}}, found {clean[cursor : cursor + 40]!r}"
                )
            stack[-1].append(Shape(_array(match)))
            cursor = match.end()
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"expected one shape, found {text[:60]!r}")
    return stack[0][0]


def shown_shape(shape: Shape) -> str:
    """A shape for a message, without layouts, its start where it is long. No recursion."""
    text, pending = "", list[Shape | str]([shape])
    while pending and len(text) <= _SHOWN_CHARACTERS:
        part = pending.pop()
        if isinstance(part, str):
            text += part
        elif part.array is not None:
            leaf = part.array
            sizes = ("?" if extent == DYNAMIC else str(extent) for extent in leaf.dims)
            text += f"{leaf.element}[{','.join(sizes)}]"
        else:
            pending.append(")")
            for place, element in enumerate(reversed(part.elements or ())):
                pending += [", ", element] if place else [element]
            pending.append("(")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class ShapeTable:
    """Shapes by their text: each spelling is parsed once, however many instructions have it."""

    __slots__ = ("_made", "rows", "shapes")

    def __init__(self) -> None:
        """Start empty. ``rows``: the row of each spelling so far."""
        self.rows: dict[str, int] = {}
        self._made: dict[Shape, int] = {}
        self.shapes: list[Shape] = []

    def row(self, text: str) -> int:
        """The row of a spelling, new or old. Raises ``ValueError``."""
        row = self.rows.get(text)
        if row is None:
            self.shapes.append(parse_shape(text))
            row = self.rows[text] = len(self.shapes) - 1
        return row

    def add(self, shape: Shape) -> int:
        """The row of a shape that no text states."""
        row = self._made.get(shape)
        if row is None:
            self.shapes.append(shape)
            row = self._made[shape] = len(self.shapes) - 1
        return row
