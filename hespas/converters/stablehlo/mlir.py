"""MLIR's object model as this format uses it: protocols over the bindings' untyped objects.

The members are MLIR's own (https://mlir.llvm.org/docs/Bindings/Python/), so they bear no docstrings here.
"""
# ruff: noqa: D102

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Protocol, cast

import numpy as np

from hespas.costs import Cost, canonical_name, cost_of, find_rule, unknown_cost
from hespas.costs import Operation as CostInput
from hespas.graph.columns import IntArray

__all__ = [
    "Attribute",
    "Attributes",
    "Block",
    "Location",
    "Module",
    "Operation",
    "Operations",
    "Region",
    "Type",
    "Use",
    "Value",
    "View",
    "argument_block",
    "defining_op",
    "enum_name",
    "excerpt",
    "has_rule",
    "int_array",
    "int_of",
    "int_tuple",
    "is_true",
    "members_of",
    "misnamed_op_place",
    "place_of",
    "price",
    "quoted",
    "short_name",
    "shortened",
    "splat_int",
    "string_in",
    "symbol_of",
    "table_name",
    "terminator",
    "text_of",
    "undecodable_place",
    "unescaped",
]


class Attribute(Protocol):
    """An uniqued attribute: hashable, equal when identical."""

    def __hash__(self) -> int: ...


class Type(Protocol):
    """An uniqued type."""

    def __hash__(self) -> int: ...


class Location(Protocol):
    """A source location; ``str`` prints it in MLIR syntax."""

    def __hash__(self) -> int: ...


class Attributes(Protocol):
    """The attributes of an operation, inherent ones included."""

    def get(self, name: str, default: Attribute | None = None, /) -> Attribute | None: ...

    def __contains__(self, name: str, /) -> bool: ...


class Use(Protocol):
    """One use of a value."""

    @property
    def owner(self) -> View: ...


class Value(Protocol):
    """An SSA value; ``hash`` is stable while the module lives."""

    @property
    def type(self) -> Type: ...

    @property
    def owner(self) -> View | Block: ...

    @property
    def uses(self) -> Iterator[Use]: ...

    def __hash__(self) -> int: ...


class Region(Protocol):
    """A region of an operation."""

    @property
    def blocks(self) -> Sequence[Block]: ...


class Operations(Protocol):
    """The operations of a block in order."""

    def __iter__(self) -> Iterator[View]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> View: ...


class Block(Protocol):
    """A block of a region. Iterating ``operations`` yields views."""

    @property
    def arguments(self) -> Sequence[Value]: ...

    @property
    def operations(self) -> Operations: ...

    def __hash__(self) -> int: ...


class View(Protocol):
    """An operation as its dialect sees it, around the operation itself."""

    @property
    def operation(self) -> Operation: ...


class Operation(View, Protocol):
    """An operation."""

    @property
    def name(self) -> str: ...

    @property
    def operands(self) -> Sequence[Value]: ...

    @property
    def results(self) -> Sequence[Value]: ...

    @property
    def attributes(self) -> Attributes: ...

    @property
    def regions(self) -> Sequence[Region]: ...

    @property
    def location(self) -> Location: ...

    @property
    def block(self) -> Block: ...

    @property
    def parent(self) -> View | None: ...

    def is_before_in_block(self, other: Operation, /) -> bool: ...

    def walk(self, callback: Callable[[Operation], object], /) -> None: ...


def defining_op(value: Value) -> Operation | None:
    """The operation that makes a value, None for a block argument."""
    owner = value.owner
    return cast("View", owner).operation if hasattr(owner, "operation") else None


def argument_block(value: Value) -> Block:
    """The block that a block argument belongs to."""
    return cast("Block", value.owner)


def terminator(block: Block) -> Operation | None:
    """The last operation of a block."""
    count = len(block.operations)
    return block.operations[count - 1].operation if count else None


class Module(Protocol):
    """A parsed program; it must outlive everything taken from it."""

    @property
    def operation(self) -> Operation: ...

    @property
    def body(self) -> Block: ...


# Text of the input as messages may show it: cut, and without characters that steer a terminal.

_MAX_QUOTE = 120
_MAX_MESSAGE = 600
_BEFORE = 40
"""Characters of a long line that are shown in front of the fault."""

_IN_INPUT = re.compile(r'loc\("-":(\d+):(\d+)\)')
"""A place in a text that was parsed from memory."""

_LONG_WORD = re.compile(rf"\S{{{_MAX_QUOTE + 1},}}")


def quoted(text: str, limit: int = _MAX_QUOTE) -> str:
    """At most ``limit`` characters, control and other unprintable ones escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)


def shortened(message: str) -> str:
    """A parser's message, its overlong words (names from the input) cut."""
    return quoted(_LONG_WORD.sub(lambda word: quoted(word[0]), " ".join(message.split())), _MAX_MESSAGE)


def excerpt(line: str, column: int) -> str:
    """A line of the input, a long one from shortly before its ``column``, which counts from 1."""
    stripped = line.strip()
    if len(stripped) <= _MAX_QUOTE:
        return quoted(stripped)
    start = max(0, column - 1 - _BEFORE)
    return ("..." if start else "") + quoted(line[start:].strip(), _MAX_QUOTE - 3)


def place_of(location: str) -> str:
    """A printed MLIR location as a position: line and column of the input, or what it says, cut."""
    found = _IN_INPUT.fullmatch(location)
    return f"line {found[1]}:{found[2]}" if found else quoted(location)


# Typed values of MLIR attributes: what the bindings leave untyped gets its type here.

_MAX_ELEMENTS = 1 << 24


class _Valued(Protocol):
    @property
    def value(self) -> int | str | bool: ...


class _Elements(Protocol):
    @property
    def is_splat(self) -> bool: ...

    def get_splat_value(self) -> _Valued: ...

    def __len__(self) -> int: ...


def _value(operation: Operation, name: str) -> int | str | bool | None:
    attribute = operation.attributes.get(name)
    return None if attribute is None else cast("_Valued", attribute).value


def int_of(operation: Operation, name: str, default: int = 0) -> int:
    """An integer attribute."""
    value = _value(operation, name)
    return default if value is None else int(value)


def text_of(operation: Operation, name: str) -> str:
    """A string attribute, ``""`` where absent; a dictionary is printed."""
    attribute = operation.attributes.get(name)
    if attribute is None:
        return ""
    return string_in(attribute)


def symbol_of(operation: Operation, name: str) -> str:
    """A symbol reference or string attribute without its ``@``, ``""`` where absent."""
    attribute = operation.attributes.get(name)
    return "" if attribute is None else string_in(attribute)


def string_in(attribute: Attribute) -> str:
    """What a string or a symbol says, anything else as MLIR prints it. Bytes that are no UTF-8, as in the
    configurations of GPU kernels, become ``\\xff``.
    """
    content = getattr(attribute, "value_bytes", None)
    if isinstance(content, bytes):
        return content.decode("utf-8", "backslashreplace")
    try:
        value = getattr(attribute, "value", None)
    except (RuntimeError, UnicodeDecodeError):
        return _unescaped(str(attribute))
    return value if isinstance(value, str) else str(attribute)


def _unescaped(symbol: str) -> str:
    """The name of a symbol that MLIR prints as ``@"..."``, with bytes as hexadecimal digits."""
    printed = symbol.removeprefix("@").removeprefix('"').removesuffix('"').encode()
    return unescaped(printed).decode("utf-8", "backslashreplace")


def is_true(operation: Operation, name: str, *, default: bool = False) -> bool:
    """A boolean attribute, or the presence of a unit attribute."""
    attribute = operation.attributes.get(name)
    return default if attribute is None else bool(getattr(attribute, "value", True))


def int_tuple(operation: Operation, name: str) -> tuple[int, ...]:
    """A dense integer array (or elements) attribute flattened, empty where absent."""
    attribute = operation.attributes.get(name)
    if attribute is None:
        return ()
    if hasattr(attribute, "is_splat"):
        return tuple(int_array(attribute).reshape(-1).tolist())
    return tuple(cast("Sequence[int]", attribute))


def int_array(attribute: Attribute) -> IntArray:
    """Dense elements with their shape; blobs (hex) and splats decode alike.

    Raises ``ValueError`` for a splat of over 2**24 elements, which a short text can state.
    """
    count = len(cast("_Elements", attribute)) if hasattr(attribute, "is_splat") else 0
    if count > _MAX_ELEMENTS:
        raise ValueError(f"an attribute has {count:,} elements (limit {_MAX_ELEMENTS:,})")
    return np.array(attribute).astype(np.int64, copy=False)


def members_of(operation: Operation, name: str) -> list[Attribute]:
    """The members of an array attribute, empty where absent."""
    attribute = operation.attributes.get(name)
    return [] if attribute is None else list(cast("Iterable[Attribute]", attribute))


def enum_name(attribute: Attribute | None, kind: str, *dialects: ModuleType) -> str:
    """The name of an enum attribute such as ``PrecisionAttr`` of one of several dialects, ``""`` where
    absent.
    """
    if attribute is None:
        return ""
    for dialect in dialects:
        decoder = getattr(dialect, kind)
        if decoder.isinstance(attribute):
            return str(decoder(attribute).value)
    return ""


def splat_int(attribute: Attribute | None) -> int | None:
    """The one value of an integer constant whose elements are all equal, None for anything else."""
    if attribute is None or not hasattr(attribute, "is_splat"):
        return None
    elements = cast("_Elements", attribute)
    if not elements.is_splat:
        return None
    value = getattr(elements.get_splat_value(), "value", None)
    return value if isinstance(value, int) else None


# String literals of MLIR text: any bytes, where jaxlib's bindings only read UTF-8.

_ESCAPED = re.compile(rb'\\(?:([0-9A-Fa-f]{2})|([nt"\\]))')
_PLAIN = {b"n": b"\n", b"t": b"\t"}
_HIGH = re.compile(rb"\\[89A-Fa-f][0-9A-Fa-f]")
_LITERAL = re.compile(rb'"([^"\\\n]*(?:\\.[^"\\\n]*)*)"|//[^\n]*')
_OPERANDS = re.compile(rb"(?:\s|//[^\n]*\n)*\(")
_BEFORE_OTHERS = re.compile(rb"(?:[(\[<,]|(?<![\w!#%@$.-])at)\s*\Z|@\Z")
"""What stands before names of locations, types and symbols, which parentheses may follow as well."""

_LOOK_BACK = 64
_NEWLINE = b"\n"


def unescaped(content: bytes) -> bytes:
    """The bytes that stand between the quotes of a literal."""
    return _ESCAPED.sub(
        lambda found: bytes.fromhex(found[1].decode()) if found[1] else _PLAIN.get(found[2], found[2]),
        content,
    )


def undecodable_place(text: bytes) -> str:
    """Line and column of the first literal that is no UTF-8, ``""`` where all are."""
    first = next(_undecodable(text), None)
    return "" if first is None else _place(text, first.start())


def misnamed_op_place(text: bytes) -> str:
    """Line and column of the first operation whose name is no UTF-8, ``""`` where there is none."""
    for found in _undecodable(text):
        before = text[max(0, found.start() - _LOOK_BACK) : found.start()]
        if _OPERANDS.match(text, found.end()) and not _BEFORE_OTHERS.search(before):
            return _place(text, found.start())
    return ""


def _undecodable(text: bytes) -> Iterator[re.Match[bytes]]:
    """The literals at fault. No literal spans lines, and few lines have such bytes at all."""
    high = _HIGH.search(text)
    while high is not None:
        start = text.rfind(_NEWLINE, 0, high.start()) + 1
        end = text.find(_NEWLINE, high.end())
        end = len(text) if end < 0 else end
        for found in _LITERAL.finditer(text, start, end):
            if found[1] is not None and _HIGH.search(found[1]) and not _is_text(unescaped(found[1])):
                yield found
        high = _HIGH.search(text, end)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _place(text: bytes, start: int) -> str:
    line = text.count(_NEWLINE, 0, start) + 1
    return f"line {line}:{start - text.rfind(_NEWLINE, 0, start)}"


# Operation names as the cost table spells them.
#
# An operation that bears a name of the table but no dialect is none of StableHLO's: it may stand in a
# program, and nothing is known of it.

_DIALECTS = ("stablehlo.", "mhlo.")


def table_name(op_name: str) -> str:
    """The name in the cost table (any name where the table has none), ``""`` without a dialect."""
    return canonical_name(op_name) if "." in op_name else ""


def short_name(op_name: str) -> str:
    """An operation of StableHLO or MHLO without its dialect, ``""`` for any other."""
    return op_name.partition(".")[2] if op_name.startswith(_DIALECTS) else ""


def has_rule(op_name: str) -> bool:
    """Whether the cost table has the operation."""
    return "." in op_name and find_rule(op_name) is not None


def price(op_name: str, described: CostInput) -> Cost:
    """The cost of one operation: of class UNKNOWN where the table does not have it."""
    return cost_of(op_name, described) if "." in op_name else unknown_cost(described)
