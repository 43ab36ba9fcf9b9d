"""An HLO module as this package holds it between text and graph: columns per computation, no object per
op.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hespas.converters.hlo.scan import HloText, strip_comments
from hespas.graph import DYNAMIC, DType, find_dtype
from hespas.graph.errors import UnsupportedError

__all__ = [
    "ArrayShape",
    "Computation",
    "FrameTable",
    "Gate",
    "HloModule",
    "LoweredValue",
    "LoweringFrame",
    "Shape",
    "ShapeTable",
    "parse_shape",
    "shown_shape",
]


# --- Shapes: ``bf16[4,128]{1,0:T(8,128)(2,1)S(1)}``, tuples of them, ``token[]``, bounded extents ``<=n``.
#
# Grammar: ``xla/hlo/parser`` of openxla/xla. What stands in a layout (order, tiling, memory space, element
# size) is kept as text; bytes are those of the logical shape, so padding by tiles is not counted.

_MAX_TUPLE_DEPTH = 64
_MAX_TUPLE_VALUES = 1 << 17
"""Arrays and tuples in a tuple: one within another, each named twice, doubles with every level."""
_MAX_ELEMENTS = 1 << 62
_MAX_DIMS = 4096
_MAX_DIGITS = 19
_SHOWN_CHARACTERS = 120
_LEAF = re.compile(r"([a-z][a-z0-9]*)\s*\[([^\]]*)\](?:\s*\{([^{}]*)\})?")


_SPACE = re.compile(r"S\((\d{1,3})\)")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array: element type (None where unknown), its spelling, extents, layout text without braces."""

    dtype: DType | None
    element: str
    dims: tuple[int, ...]
    bounded: bool = False
    layout: str = ""

    @property
    def is_on_chip(self) -> bool:
        """Whether a layout in tiles puts it into a memory of the chip itself: any space but main memory (0)
        and the host's (5).
        """
        space = _SPACE.search(self.layout)
        return space is not None and space[1] not in {"0", "5"}


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
        if values > _MAX_TUPLE_VALUES:
            raise UnsupportedError(f"a tuple of {values:,} values (limit {_MAX_TUPLE_VALUES:,})", hint=hint)
        if depth > _MAX_TUPLE_DEPTH:
            raise UnsupportedError(f"tuples nested more than {_MAX_TUPLE_DEPTH} deep", hint=hint)
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


_EMPTY_TUPLE = Shape(None, ())


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


@dataclass(slots=True, eq=False)
class Computation:
    """One computation; the lists have one entry per instruction, in text order.

    ``shapes`` are rows of the module's shapes; ``operands`` instruction numbers of the same computation;
    ``parameters`` lead from a parameter's number to its instruction; ``payloads`` are the number of a
    parameter and the text of a short constant (else ``""``); ``attributes`` the values as written;
    ``positions`` offsets into the text. ``root`` is an instruction number.
    """

    name: str
    position: int
    thread: str = ""
    parameters: dict[str, int] = field(default_factory=dict[str, int])
    root: int = -1
    names: list[str] = field(default_factory=list[str])
    opcodes: list[str] = field(default_factory=list[str])
    shapes: list[int] = field(default_factory=list[int])
    operands: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    payloads: list[str] = field(default_factory=list[str])
    attributes: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    positions: list[int] = field(default_factory=list[int])

    def __len__(self) -> int:
        return len(self.opcodes)


@dataclass(slots=True, eq=False)
class FrameTable:
    """The header's stack frame tables: where an instruction's ``stack_frame_id`` leads."""

    files: dict[int, str] = field(default_factory=dict[int, str])
    functions: dict[int, str] = field(default_factory=dict[int, str])
    locations: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    frames: dict[int, int] = field(default_factory=dict[int, int])

    def source(self, frame: int) -> str:
        """``file:line`` of a frame's innermost location, ``""`` where a table does not have it."""
        file, line = self.locations.get(self.frames.get(frame, -1), (-1, 0))
        name = self.files.get(file, "")
        return f"{name}:{line}" if name else ""

    def stated(self, metadata: Mapping[str, str]) -> str:
        """``file:line`` that the metadata of an instruction state, or that of their frame; ``""`` unknown."""
        source, line = metadata.get("source_file", ""), metadata.get("source_line", "")
        if source:
            return f"{source}:{line}" if line else source
        frame = metadata.get("stack_frame_id", "")
        return self.source(int(frame)) if frame.isdigit() and len(frame) < 19 else ""


@dataclass(frozen=True, slots=True, eq=False)
class HloModule:
    """A parsed module. ``attributes`` are those of the header line, as written; ``marked`` says that the text
    names its entry, which is the last computation otherwise.
    """

    name: str
    source: HloText
    attributes: Mapping[str, str]
    computations: Mapping[str, Computation]
    entry: Computation
    shapes: list[Shape]
    frames: FrameTable
    marked: bool = True

    @property
    def num_instructions(self) -> int:
        """Instructions of all computations."""
        return sum(len(computation) for computation in self.computations.values())

    def shape_of(self, computation: Computation, index: int) -> Shape:
        """The result shape of one instruction."""
        return self.shapes[computation.shapes[index]]

    def line_of(self, computation: Computation, index: int) -> int:
        """The text line of one instruction."""
        return self.source.line(computation.positions[index])


# --- Values of a computation while it is written out: which node makes them, per element of a tuple.


@dataclass(frozen=True, slots=True)
class LoweredValue:
    """``node`` makes the value as a whole; ``parts`` are the elements of a tuple where they are known
    apart.
    """

    node: int
    parts: tuple[LoweredValue, ...] | None = None

    def part(self, index: int) -> LoweredValue:
        """One element: its own maker, else the maker of the whole."""
        if self.parts is None or not 0 <= index < len(self.parts):
            return LoweredValue(self.node)
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class Gate:
    """What nodes wait for that start something in a loop body or branch: ``node`` decides whether it runs.

    Those are the nodes without a dependency on ``first`` or a later node; they are noted in ``waiting``.
    ``outer`` is the gate around this one.
    """

    node: int
    first: int
    outer: Gate | None
    waiting: list[int] = field(default_factory=list[int])

    def control(self, node: int, deps: list[int], control: list[int]) -> list[int]:
        """The control dependencies of a new node that has these already. O(gates)."""
        last = max([*deps, *control], default=-1)
        gate: Gate | None = self
        while gate is not None and last < gate.first:
            gate.waiting.append(node)
            if gate.node not in deps and gate.node not in control:
                control = [*control, gate.node]
            last = max(last, gate.node)
            gate = gate.outer
        return control


@dataclass(slots=True, eq=False)
class LoweringFrame:
    """One run-through of a computation.

    ``arguments`` are the values of its parameters (empty for the entry, whose parameters are nodes);
    ``nodes`` has the maker of each instruction reached so far, ``parts`` the elements of the few that are
    tuples. ``state`` are the numbers of parameters that hold the state of an enclosing loop, and ``readers``
    lists (element, node) of the nodes that read it (-1: all of it). ``async_results`` leads from an
    asynchronous start to the last node of what it called, ``issues`` to the nodes that it waits for itself.
    """

    computation: Computation
    region: int
    depth: int
    arguments: tuple[LoweredValue, ...] = ()
    state: frozenset[int] = frozenset()
    nodes: list[int] = field(default_factory=list[int])
    parts: dict[int, tuple[LoweredValue, ...]] = field(default_factory=dict[int, tuple[LoweredValue, ...]])
    readers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    async_results: dict[int, int] = field(default_factory=dict[int, int])
    issues: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    numbers: dict[str, int] | None = None

    def value(self, index: int) -> LoweredValue:
        """The value of an instruction that stands above."""
        return LoweredValue(self.nodes[index], self.parts.get(index))

    def number_of(self, name: str) -> int:
        """The instruction of a name, -1 for none. The index is built on first use."""
        if self.numbers is None:
            self.numbers = {text: place for place, text in enumerate(self.computation.names)}
        return self.numbers.get(name, -1)
