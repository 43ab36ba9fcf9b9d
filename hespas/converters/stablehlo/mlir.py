"""MLIR's object model as this format uses it: protocols over the bindings' untyped objects.

The members are MLIR's own (https://mlir.llvm.org/docs/Bindings/Python/), so they bear no docstrings here.
"""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

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
    "terminator",
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
