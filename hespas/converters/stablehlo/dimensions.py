"""Substitution of numbers for the symbolic dimensions of a program, and inference of all other shapes.

Symbolic dimensions are ``?`` extents of arguments. ``jax.export`` names them in the messages of its shape
assertions: ``args[0].shape = (b, s, 64)``. A dimension without a name is identified by position: dimension 1
of argument 0 is ``arg0.1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from hespas.converters.stablehlo.mlir import Bindings, MlirBlock, MlirModule, ParseFailure, quoted, text_of
from hespas.converters.stablehlo.module import read_header
from hespas.converters.stablehlo.program import shortened
from hespas.graph.errors import UnsupportedError, UsageError

__all__ = ["with_dims"]

_TENSOR = re.compile(r"tensor<((?:(?:\?|\d+)x)+)(\w[^,<>]*)>")
"""Ranked type without bounds or another encoding; dimensions with bounds are not symbols."""

_SPECIFICATION = re.compile(r"\.shape = \(([^()]*(?:\([^()]*\)[^()]*)*)\)")

_TERM = re.compile(r"\s*([+-]?)\s*((?:[A-Za-z_]\w*|\d{1,18})(?:\s*\*\s*(?:[A-Za-z_]\w*|\d{1,18}))*)\s*")

_NAME = re.compile(r"[A-Za-z_]\w*(?!\w*\()")
"""Name of a dimension, not of a function such as ``max(b, 4)``."""

_BETWEEN = re.compile(r",(?![^()]*\))")

_MOST_EXTENT = 1 << 62

_MOST_LISTED = 12


class _SymbolicDimension(NamedTuple):
    """Dimension ``?`` of an argument. ``expression`` is the expression that the program states for its
    extent, such as ``2*b`` (empty: none).
    """

    argument: int
    dim: int
    expression: str

    @property
    def place(self) -> str:
        """Name of the dimension by position: ``arg0.1``."""
        return f"arg{self.argument}.{self.dim}"


def with_dims(module: MlirModule, dims: Mapping[str, int], bindings: Bindings) -> MlirModule:
    """Return the module with a number for each symbolic dimension of its arguments, taken from ``dims``.

    Raises ``UsageError`` if ``dims`` has an unknown dimension or lacks one, ``UnsupportedError`` if the
    shapes cannot be inferred from ``dims``.
    """
    header = read_header(module, bindings, "")
    block = header.body(header.entry)
    types = [] if block is None else [str(argument.type) for argument in block.arguments]
    # Dimensions have expressions if the specifications match the arguments.
    specifications = [] if block is None else _specifications(block)
    shapes = {number: _extents_of(text) for number, text in enumerate(types)}
    dynamic = {number: shape for number, shape in shapes.items() if "?" in shape}
    named = dict(zip(dynamic, specifications, strict=False))
    names_fit = len(specifications) == len(dynamic) and all(
        len(named[number]) == len(shape)
        and all((extent == "?") != part.isdigit() for extent, part in zip(shape, named[number], strict=True))
        for number, shape in dynamic.items()
    )
    dimensions = [
        _SymbolicDimension(number, dim, named[number][dim] if names_fit else "")
        for number, shape in dynamic.items()
        for dim, extent in enumerate(shape)
        if extent == "?"
    ]
    names = list(
        dict.fromkeys(name for dimension in dimensions for name in _NAME.findall(dimension.expression))
    )
    positions = [dimension.place for dimension in dimensions]
    if not dimensions:
        raise UsageError("the program's arguments have no symbolic dimensions", hint="leave `dims` out")
    for name in dims:
        if name not in names and name not in positions:
            listed_names = [*names, *positions][:_MOST_LISTED]
            raise UsageError(
                f"`dims={quoted(name, 60)}`: the program has no such dimension",
                hint=f"bind one of its dimensions: {', '.join(listed_names)}",
            )
    extents = {(dimension.argument, dimension.dim): _extent(dimension, dims) for dimension in dimensions}
    bound_types: list[str] = []
    for number, text in enumerate(types):
        tensor = _TENSOR.fullmatch(text)
        if tensor is not None:
            shape = [str(extents.get((number, dim), size)) for dim, size in enumerate(_extents_of(text))]
            bound_types.append(f"tensor<{'x'.join(shape)}x{tensor[2]}>")
        else:
            bound_types.append(text)
    try:
        return bindings.refined(module, bound_types)
    except ParseFailure as error:
        raise UnsupportedError(
            f"the program's shapes cannot be inferred from these extents: {shortened(error.message)}",
            position=error.place or None,
            hint="check the extents against the program's constraints, or export it again with fixed shapes",
        ) from error


def _specifications(block: MlirBlock) -> list[list[str]]:
    """Return the shapes of the arguments with symbolic dimensions, from the shape assertions that
    ``jax.export`` writes. A shape is a list of expressions, one per dimension.
    """
    for view in block.operations:
        op = view.operation
        if op.name == "stablehlo.custom_call" and "error_message" in op.attributes:
            _, _, specification = text_of(op, "error_message").partition("shapes specifications: ")
            shapes = _SPECIFICATION.findall(specification.partition("Obtained dimension variables")[0])
            if shapes:
                return [[part.strip() for part in _BETWEEN.split(shape) if part.strip()] for shape in shapes]
    return []


def _extents_of(text: str) -> list[str]:
    match = _TENSOR.fullmatch(text)
    return match[1].split("x")[:-1] if match else []


def _extent(dimension: _SymbolicDimension, dims: Mapping[str, int]) -> int:
    """Return the extent of a symbolic dimension. Raises ``UsageError`` if ``dims`` does not determine it, or
    if it is out of range.
    """
    position, expression = dimension.place, dimension.expression
    if position in dims:
        return dims[position]
    lacking = [name for name in _NAME.findall(expression) if name not in dims]
    if lacking or not expression:
        name = lacking[0] if lacking else position
        also = f" ({position} is {quoted(expression, 60)})" if expression and expression != name else ""
        raise UsageError(
            f"dimension {quoted(name, 60)} is not bound{also}", hint=f"bind all of them: add `dims={name}=N`"
        )
    extent = _evaluated(expression, dims)
    if extent is None:
        raise UsageError(
            f"{position} is {quoted(expression, 60)}, which cannot be evaluated",
            hint=f"bind it: `dims={position}=N`",
        )
    if not 0 <= extent < _MOST_EXTENT:
        raise UsageError(
            f"extent {position} is {quoted(expression, 60)} = {extent:,}, expected 0 to {_MOST_EXTENT - 1:,}",
            hint="choose other values in `dims`",
        )
    return extent


def _evaluated(expression: str, dims: Mapping[str, int]) -> int | None:
    """Return the value of a sum of products of names and numbers, such as ``2*b+1``; None for any other
    expression.
    """
    if "(" in expression:
        return None
    total, position = 0, 0
    while position < len(expression):
        term = _TERM.match(expression, position)
        if term is None or (position and not term[1]):
            return None
        factors = (part.strip() for part in term[2].split("*"))
        value = prod(int(part) if part.isdigit() else dims[part] for part in factors)
        total += -value if term[1] == "-" else value
        position = term.end()
    return total
