"""Programs with quantised types as programs of floats, which XLA runs.

jaxlib's XLA has no types of the ``quant`` dialect. A value of a quantised type becomes a float on the grid of
that type: each operation with a quantised result computes in floats, and its result is rounded to the grid.
Noise on the result of a contraction is therefore added before the rounding, as in front of a converter from
analog to digital. Arguments and results of the program are floats too.
"""

from __future__ import annotations

import re
from math import isnan
from typing import TYPE_CHECKING, Any, cast

from hespas.converters.stablehlo.mlir import Bindings, MlirModule, MlirOperation, quoted
from hespas.graph.errors import UnsupportedError
from hespas.graph.quantised import QUANTISED, QuantisedType, parse_quantised

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["without_quantised_types"]

_ATTRIBUTE = "hespas.quantised"
_FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(.*)>")
_CONSTANT = re.compile(
    r'^(\s*)(%[\w#]+) = ("stablehlo\.constant"\(\) .*?: (tensor<[^<>]*>).*) : \(\) -> (tensor<.*>)$',
    re.MULTILINE,
)


def without_quantised_types(module: MlirModule, bindings: Bindings) -> MlirModule:
    """Return a program of floats that does the same as a program with quantised types. Raises
    ``UnsupportedError`` for quantised types that are not uniform, or have no static shape.
    """
    context: Any = cast("Any", module).context
    operations: list[MlirOperation] = []

    def visit(operation: MlirOperation) -> object:
        operations.append(operation)
        return bindings.ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    with context:
        for operation in operations:
            attributes = cast("Any", operation.attributes)
            types = [str(result.type) for result in operation.results]
            if operation.name == "func.func":
                types = [str(argument.type) for argument in operation.regions[0].blocks[0].arguments]
            if any(QUANTISED in text for text in types):
                if operation.name == "stablehlo.bitcast_convert":
                    raise UnsupportedError("bitcast_convert to a quantised type", hint="use uniform_quantize")
                marks = [text.replace(QUANTISED, "") if QUANTISED in text else "" for text in types]
                attributes[_ATTRIBUTE] = bindings.ir.ArrayAttr.get(
                    [bindings.ir.StringAttr.get(mark) for mark in marks]
                )
    text = bindings.text(module, locations=False, generic=True)
    text = _CONSTANT.sub(_converted_constant, text)
    text = "".join(_with_expressed_types(text))
    for name in ("uniform_quantize", "uniform_dequantize"):
        text = text.replace(f'"stablehlo.{name}"', '"stablehlo.convert"')
    made = bindings.parse(text)
    _round_results(made, bindings)
    return made


def _converted_constant(match: re.Match[str]) -> str:
    """Return the lines of a quantised constant: its stored integers, and their conversion to the type."""
    indent, name, constant, storage, kind = match.groups()
    if QUANTISED not in kind:
        return match[0]
    mark = re.search(r" \{" + re.escape(_ATTRIBUTE) + r" = .*\}$", constant)
    attributes = mark[0].replace(_ATTRIBUTE, f"{_ATTRIBUTE}_stored") if mark else ""
    plain = constant[: mark.start()] if mark else constant
    stored = f"{name}_stored"
    return (
        f"{indent}{stored} = {plain} : () -> {storage}\n"
        f'{indent}{name} = "stablehlo.convert"({stored}){attributes} : ({storage}) -> {kind}'
    )


def _with_expressed_types(text: str) -> Iterator[str]:
    """Yield the parts of a text with the expressed type in place of each quantised type."""
    start = 0
    while (begin := text.find(QUANTISED, start)) >= 0:
        yield text[start:begin]
        end, depth = text.index("<", begin), 0
        while True:
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        yield _type_of(text[begin:end]).expressed
        start = end
    yield text[start:]


def _type_of(text: str) -> QuantisedType:
    """Decode a quantised type of integers with one scale, or one for each index of a dimension."""
    quantised = parse_quantised(text)
    is_usable = quantised is not None and quantised.kind == "uniform" and not quantised.is_blockwise
    if quantised is None or not is_usable or isnan(quantised.low) or quantised.expressed not in _FLOATS:
        raise UnsupportedError(
            f"the quantised type {quoted(text)}", hint="use types with one scale, or one for each channel"
        )
    return quantised


def _round_results(module: MlirModule, bindings: Bindings) -> None:
    """Insert calls that round values to the grids of their quantised types, or that scale stored integers."""
    ir: Any = bindings.ir
    helpers: dict[tuple[str, bool], str] = {}
    marked: list[tuple[Any, Any, bool]] = []

    def visit(operation: MlirOperation) -> object:
        attributes: Any = operation.attributes
        for name, is_stored in ((_ATTRIBUTE, False), (f"{_ATTRIBUTE}_stored", True)):
            if name in attributes:
                marked.append((operation, attributes[name], is_stored))
                del attributes[name]
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    with cast("Any", module).context, ir.Location.unknown():
        for operation, marks, is_stored in marked:
            is_function = operation.name == "func.func"
            block = operation.regions[0].blocks[0] if is_function else None
            values = list(operation.results) if block is None else list(block.arguments)
            for value, mark in zip(values, marks, strict=True):
                if not mark.value:
                    continue
                name = helpers.setdefault((mark.value, is_stored), f"hespas_quantised_{len(helpers)}")
                readers = [(use.owner, use.operand_number) for use in value.uses]
                point = (
                    ir.InsertionPoint.at_block_begin(block)
                    if block is not None
                    else ir.InsertionPoint.after(operation)
                )
                with point:
                    made = ir.Operation.create(
                        "func.call",
                        results=[value.type],
                        operands=[value],
                        attributes={"callee": ir.FlatSymbolRefAttr.get(name)},
                    )
                for reader, position in readers:
                    reader.operands[position] = made.results[0]
        texts = [_helper(name, mark, is_stored=is_stored) for (mark, is_stored), name in helpers.items()]
        functions = ir.Module.parse("\n".join(texts))
        for view in functions.body.operations:
            cast("Any", module.body).append(view.operation.clone())


def _helper(name: str, mark: str, *, is_stored: bool) -> str:
    """Return a function that rounds a tensor to a grid; with ``is_stored``, that converts stored integers to
    their values.
    """
    match = _TENSOR.fullmatch(mark)
    if match is None:
        raise UnsupportedError(
            f"a value of type {quoted(mark)}", hint="state symbolic dimensions with `dims`"
        )
    grid = _type_of(QUANTISED + match[2])
    kind = f"tensor<{match[1]}{grid.expressed}>"

    def spread(variable: str, numbers: Sequence[float]) -> str:
        """Return a constant tensor of numbers along the axis of the grid."""
        if not grid.axes:
            return f"%{variable} = stablehlo.constant dense<{numbers[0]!r}> : {kind}"
        vector = f"tensor<{len(numbers)}x{grid.expressed}>"
        return f"""%{variable}_axis = stablehlo.constant dense<{list(numbers)!r}> : {vector}
  %{variable} = stablehlo.broadcast_in_dim %{variable}_axis, dims = [{grid.axes[0]}] : ({vector}) -> {kind}"""

    scalar = f"tensor<{grid.expressed}>"
    rounding = f"""
  %ratio = stablehlo.divide %value, %scale : {kind}
  %whole = stablehlo.round_nearest_even %ratio : {kind}
  %moved = stablehlo.add %whole, %zero : {kind}
  %low = stablehlo.constant dense<{float(grid.low)!r}> : {scalar}
  %high = stablehlo.constant dense<{float(grid.high)!r}> : {scalar}
  %bounded = stablehlo.clamp %low, %moved, %high : ({scalar}, {kind}, {scalar}) -> {kind}"""
    return f"""
func.func private @{name}(%value: {kind}) -> {kind} {{
  {spread("scale", grid.scales)}
  {spread("zero", [float(zero) for zero in grid.zero_points])}{"" if is_stored else rounding}
  %centred = stablehlo.subtract {"%value" if is_stored else "%bounded"}, %zero : {kind}
  %result = stablehlo.multiply %centred, %scale : {kind}
  return %result : {kind}
}}
"""
