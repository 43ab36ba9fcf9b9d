"""Parsed HLO module: shapes, computations as columns, and the state of their lowering to a graph.

Shapes are ``bf16[4,128]{1,0:T(8,128)(2,1)S(1)}``, tuples, ``token[]`` and bounded extents ``<=n``; grammar in
``xla/hlo/parser`` of openxla/xla. The layout (order, tiling, memory space, element size) is stored as text.
Sizes in bytes refer to the logical shape, without the padding of tiles.
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


_MAX_TUPLE_DEPTH = 64
_MAX_TUPLE_VALUES = 1 << 17
"""Maximum number of arrays and tuples in a tuple; shared elements let it double with every level."""
_MAX_ELEMENTS = 1 << 62
_MAX_DIMS = 4096
_MAX_DIGITS = 19
_SHOWN_CHARACTERS = 120
_LEAF = re.compile(r"([a-z][a-z0-9]*)\s*\[([^\]]*)\](?:\s*\{([^{}]*)\})?")


_SPACE = re.compile(r"S\((\d{1,3})\)")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Array shape: element type (None if unknown) and its text, extents, and the text of the layout without
    braces.
    """

    dtype: DType | None
    element: str
    dims: tuple[int, ...]
    bounded: bool = False
    layout: str = ""

    @property
    def is_on_chip(self) -> bool:
        """True if a tiled layout is in on-chip memory: any space but main memory (0) and host memory (5)."""
        space = _SPACE.search(self.layout)
        return space is not None and space[1] not in {"0", "5"}


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Shape of an array (``elements`` is None) or of a tuple. A tuple does not list its arrays, because
    tuples may contain one shape many times.

    ``values`` counts the arrays and tuples in a shape, including itself. The constructor raises
    ``UnsupportedError`` beyond the limits on values and nesting. Hashing is O(1), and so is the comparison of
    different shapes and of identical objects.
    """

    array: ArrayShape | None
    elements: tuple[Shape, ...] | None = None
    values: int = field(init=False)
    depth: int = field(init=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Count the arrays in the shape, and reject shapes beyond the limits."""
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
        """Return all arrays of the shape, in order. O(values) per call; no recursion."""
        arrays: list[ArrayShape] = []
        pending: list[Shape] = [self]
        while pending:
            part = pending.pop()
            if part.array is not None:
                arrays.append(part.array)
            pending.extend(reversed(part.elements or ()))
        return tuple(arrays)

    def element(self, index: int) -> Shape:
        """Return one element of a tuple. Raises ``IndexError``."""
        if self.elements is None or not 0 <= index < len(self.elements):
            raise IndexError(index)
        return self.elements[index]


_EMPTY_TUPLE = Shape(None, ())


def _array(match: re.Match[str]) -> ArrayShape:
    element, inner, layout = match[1], match[2], match[3] or ""
    dims: list[int] = []
    any_bounded = False
    elements = 1
    if inner.count(",") >= _MAX_DIMS:
        raise ValueError(f"expected at most {_MAX_DIMS:,} extents, found {match[0][:60]!r}")
    for part in inner.split(",") if inner.strip() else ():
        bounded = part.lstrip().startswith("<=")
        digits = part.strip().removeprefix("<=")
        is_dynamic = digits == "?"
        if not is_dynamic and not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
            raise ValueError(f"expected an extent, found {part.strip()[:40]!r}")
        dims.append(DYNAMIC if is_dynamic else int(digits))
        any_bounded |= bounded and not is_dynamic
        elements *= max(dims[-1], 1)
        if elements > _MAX_ELEMENTS:
            raise ValueError(f"expected a shape of at most 2**62 elements, found {match[0][:60]!r}")
    return ArrayShape(find_dtype(element), element, tuple(dims), any_bounded, layout.strip())


def parse_shape(text: str) -> Shape:
    """Parse a shape such as ``f32[2,3]{1,0}``. Raises ``ValueError`` with the expected text, and
    ``UnsupportedError`` for a tuple beyond the limits. No recursion.
    """
    clean = strip_comments(text)
    stack: list[list[Shape]] = [[]]
    cursor, end = 0, len(clean)
    while cursor < end:
        character = clean[cursor]
        if character in " \t\r\n,":
            cursor += 1
        elif character == "(":
            stack.append([])
            cursor += 1
        elif character == ")":
            if len(stack) < 2:
                raise ValueError("expected a shape, found ')'")
            parts = stack.pop()
            stack[-1].append(Shape(None, tuple(parts)))
            cursor += 1
        elif clean.startswith("b(", cursor):  # a buffer with one array
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
    """Format a shape for a message, without layouts; long shapes are cut. No recursion."""
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
            for position, element in enumerate(reversed(part.elements or ())):
                pending += [", ", element] if position else [element]
            pending.append("(")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class ShapeTable:
    """Table of the distinct shapes of a module. Each distinct text is parsed once."""

    __slots__ = ("_made", "rows", "shapes")

    def __init__(self) -> None:
        """Start with an empty table. ``rows`` maps each text to its row."""
        self.rows: dict[str, int] = {}
        self._made: dict[Shape, int] = {}
        self.shapes: list[Shape] = []

    def row(self, text: str) -> int:
        """Return the row of a text. Raises ``ValueError``."""
        row = self.rows.get(text)
        if row is None:
            self.shapes.append(parse_shape(text))
            row = self.rows[text] = len(self.shapes) - 1
        return row

    def add(self, shape: Shape) -> int:
        """Add an inferred shape, which has no text; return its row."""
        row = self._made.get(shape)
        if row is None:
            self.shapes.append(shape)
            row = self._made[shape] = len(self.shapes) - 1
        return row


@dataclass(slots=True, eq=False)
class Computation:
    """One computation of a module. The lists have one entry per instruction, in text order.

    ``shapes`` are indices into the module's shapes, and ``operands`` instruction numbers of the same
    computation. ``parameters`` maps the number of each parameter to its instruction. ``payloads`` has the
    number of a parameter or the text of a short constant (else ``""``). ``attributes`` has the values as
    written, and ``positions`` the offset of each instruction in the text. ``root`` is an instruction number.
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
    """Stack frames in the header of a module. They give the source position of an instruction, which refers
    to them by ``stack_frame_id``.
    """

    files: dict[int, str] = field(default_factory=dict[int, str])
    functions: dict[int, str] = field(default_factory=dict[int, str])
    locations: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    frames: dict[int, int] = field(default_factory=dict[int, int])

    def source(self, frame: int) -> str:
        """Return ``file:line`` of a frame's innermost location, ``""`` if it is not in the tables."""
        file, line = self.locations.get(self.frames.get(frame, -1), (-1, 0))
        name = self.files.get(file, "")
        return f"{name}:{line}" if name else ""

    def stated(self, metadata: Mapping[str, str]) -> str:
        """Return ``file:line`` from the metadata of an instruction, directly or through its stack frame;
        ``""`` if unknown.
        """
        source, line = metadata.get("source_file", ""), metadata.get("source_line", "")
        if source:
            return f"{source}:{line}" if line else source
        frame = metadata.get("stack_frame_id", "")
        return self.source(int(frame)) if frame.isdigit() and len(frame) < 19 else ""


@dataclass(frozen=True, slots=True, eq=False)
class HloModule:
    """Parsed module. ``attributes`` has the attributes of the header line as text. ``marked`` is True if the
    text marks the entry computation with ``ENTRY``; otherwise the last computation is the entry.
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
        """Number of instructions in all computations."""
        return sum(len(computation) for computation in self.computations.values())

    def shape_of(self, computation: Computation, index: int) -> Shape:
        """Return the result shape of one instruction."""
        return self.shapes[computation.shapes[index]]

    def line_of(self, computation: Computation, index: int) -> int:
        """Return the text line of one instruction."""
        return self.source.line(computation.positions[index])


@dataclass(frozen=True, slots=True)
class LoweredValue:
    """Result of an instruction in the graph: the node that produces it, and for a tuple the values of its
    elements if known.
    """

    node: int
    parts: tuple[LoweredValue, ...] | None = None

    def part(self, index: int) -> LoweredValue:
        """Return the value of one element of a tuple. If the elements are not known, it is the node of the
        whole tuple.
        """
        if self.parts is None or not 0 <= index < len(self.parts):
            return LoweredValue(self.node)
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class Gate:
    """Decision of a loop or branch, made by ``node``, for which the nodes of the body wait.

    ``first`` is the number of the first node of the body. Nodes that depend on another node of the body need
    no edge from the decision. The nodes that have such an edge are listed in ``waiting``. ``outer`` is the
    gate of the enclosing loop or branch.
    """

    node: int
    first: int
    outer: Gate | None
    waiting: list[int] = field(default_factory=list[int])

    def control(self, node: int, deps: list[int], control: list[int]) -> list[int]:
        """Return the control dependencies of a new node: ``control``, and the decision of the branch or loop
        if the node depends on no other node of the body. O(gates).
        """
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
    """State of lowering one computation.

    ``arguments`` are the values of the computation's parameters (empty for the entry, whose parameters are
    nodes). ``nodes`` has the node of each instruction lowered so far, and ``parts`` the elements of tuples.
    ``state`` has the numbers of parameters that hold the state of an enclosing loop. ``readers`` lists
    (element, node) for the nodes that read that state (element -1: all of it). ``async_results`` maps an
    asynchronous start to the last node of its computation, and ``issues`` maps it to the dependencies of the
    start itself.
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
        """Return the value of an instruction that is already lowered."""
        return LoweredValue(self.nodes[index], self.parts.get(index))

    def number_of(self, name: str) -> int:
        """Return the number of the instruction with this name, -1 for none. The index by name is built on
        first use.
        """
        if self.numbers is None:
            self.numbers = {text: index for index, text in enumerate(self.computation.names)}
        return self.numbers.get(name, -1)
