"""Insertion of Gaussian noise into a StableHLO program, at its contractions.

Calls are inlined, and loops with a known trip count unrolled, so that each ``dot_general``, ``dot`` and
``convolution`` of the entry function is a site of its own. Contractions in other loops and in branches get no
noise; their number is reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isnan, prod, tau
from typing import Any, NamedTuple, cast

from hespas.converters.stablehlo.mlir import (
    Bindings,
    MlirBlock,
    MlirModule,
    MlirOperation,
    MlirValue,
    quoted,
    terminator,
    text_of,
)
from hespas.converters.stablehlo.trips import TripCounter
from hespas.graph.errors import UnsupportedError
from hespas.validators.noise import NoiseKind

__all__ = [
    "EntryFunction",
    "NoiseSite",
    "inlined_entry",
    "insert_noise",
    "return_sites",
]

_CONTRACTIONS = frozenset(f"stablehlo.{name}" for name in ("dot_general", "dot", "convolution"))
_ROUNDING = frozenset(f"stablehlo.round_nearest_{name}" for name in ("even", "afz"))
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in ("add", "subtract", "multiply", "divide", "clamp", "maximum", "minimum", "convert", "reshape")
)
"""Operations between a contraction and the rounding of its result that keep the number of elements."""
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(f16|bf16|f32|f64|f8\w+|u?i\d+|i\d+)>")
_CALLS = frozenset({"func.call", "call"})
_MOST_INLINED = 1_000_000
_MOST_UNROLLED = 5_000
"""Operations of unrolled loops. XLA compiled 180 to 290 per CPU second, in chains of small products."""
_RANGES = {f"{sign}i{bits}": (bits, not sign) for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)}
_NAME_IN_LOCATION = re.compile(r'"([^"]*/[^"]*|[A-Za-z_][^"]*)"(?!:)')
_LONGEST_NAME = 60


class NoiseSite(NamedTuple):
    """Contraction that can get noise. ``weight`` and ``activations`` are the numbers of its operands that
    hold weights (-1: none) and activations.
    """

    operation: MlirOperation
    name: str
    weight: int
    activations: tuple[int, ...]


class EntryFunction(NamedTuple):
    """Entry function of a module whose calls are inlined and whose loops are unrolled. ``nested`` is the
    number of contractions in the remaining loops and in branches.
    """

    module: MlirModule
    function: MlirOperation
    nested: int

    @property
    def block(self) -> MlirBlock:
        """Return the block of the function."""
        return self.function.regions[0].blocks[0]

    def argument_types(self) -> list[str]:
        """Return the types of the arguments as MLIR prints them."""
        return [str(argument.type) for argument in self.block.arguments]

    def sites(self, data_arguments: Collection[int]) -> list[NoiseSite]:
        """Return the contractions of the function, in order. Operands that do not depend on the arguments
        ``data_arguments`` are weights.
        """
        tainted: set[MlirValue] = {
            value for number, value in enumerate(self.block.arguments) if number in data_arguments
        }
        sites: list[NoiseSite] = []
        for view in self.block.operations:
            operation = view.operation
            if any(operand in tainted for operand in _all_operands(operation)):
                tainted.update(operation.results)
            if operation.name not in _CONTRACTIONS or _tensor(operation.results[0]) is None:
                continue
            active = tuple(row for row in (0, 1) if operation.operands[row] in tainted)
            weight = next((row for row in (1, 0) if row not in active), -1) if active else -1
            name = _site_name(operation, len(sites) + 1)
            sites.append(NoiseSite(operation, name, weight, active))
        return sites

    def parameter_arguments(self) -> set[int]:
        """Return the numbers of the arguments that reach the right operand of a contraction, and not a left
        operand, without another contraction between.
        """
        reached: dict[MlirValue, set[int]] = {
            value: {number} for number, value in enumerate(self.block.arguments)
        }
        left, right = set[int](), set[int]()
        for view in self.block.operations:
            operation = view.operation
            sources = [reached.get(operand, set[int]()) for operand in _all_operands(operation)]
            if operation.name in _CONTRACTIONS:
                left |= sources[0]
                right |= sources[1]
            else:
                reached.update(dict.fromkeys(operation.results, set[int]().union(*sources)))
        return right - left


def inlined_entry(module: MlirModule, bindings: Bindings) -> EntryFunction:
    """Inline all calls outside of branches, unroll loops with contractions and a known trip count, and return
    the entry function. Raises ``UnsupportedError`` if a function has several blocks, calls itself, or if the
    program becomes too large. Loops that would add too many operations remain.
    """
    functions = {
        text_of(view.operation, "sym_name"): view.operation
        for view in module.body.operations
        if view.operation.name == "func.func"
    }
    entry = functions.get("main") or next(iter(functions.values()), None)
    if entry is None or any(len(function.regions[0].blocks) != 1 for function in functions.values()):
        raise UnsupportedError(
            "the program has no entry function, or a function with several blocks",
            hint="export the function with jax.export",
        )
    block = entry.regions[0].blocks[0]
    bodies = {name: function.regions[0].blocks[0] for name, function in functions.items()}
    counter = TripCounter(bindings, bodies.get, dict)
    with cast("Any", module).context:
        added, unrolled, position = 0, 0, 0
        while position < len(block.operations):
            operation = block.operations[position].operation
            body, trips = bodies.get(text_of(operation, "callee")) if operation.name in _CALLS else None, 1
            if operation.name == "stablehlo.while":
                known = counter.trips(operation)
                size, contractions = _size(operation, bodies)
                if contractions and not isnan(known) and unrolled + known * size <= _MOST_UNROLLED:
                    body, trips = operation.regions[1].blocks[0], int(known)
                    unrolled += trips * size
            if body is None:
                position += 1
                continue
            added += _inline(operation, body, trips, bindings)
            if added > _MOST_INLINED:
                raise UnsupportedError(
                    f"the program has more than {_MOST_INLINED:,} operations after calls are inlined",
                    hint="remove recursive functions",
                )
    nested = 0
    for view in list(block.operations):
        if text_of(view.operation, "call_target_name") == "shape_assertion":
            cast("Any", view.operation).erase()  # XLA has no such call, and the shapes are known
        else:
            nested += _size(view.operation, bodies)[1]
    return EntryFunction(module, entry, nested)


def _size(operation: MlirOperation, bodies: Mapping[str, MlirBlock]) -> tuple[int, int]:
    """Return the numbers of operations and of contractions in the regions of an operation and in the
    functions that they call. Each function is counted once.
    """
    size, contractions, called = 0, 0, list[str]()
    waiting = [operation]
    while waiting:
        for inner in _inside(waiting.pop()):
            size += 1
            contractions += inner.name in _CONTRACTIONS
            name = text_of(inner, "callee") if inner.name in _CALLS else ""
            if name in bodies and name not in called:
                called.append(name)
                waiting.append(bodies[name].owner.operation)
    return size, contractions


def _inline(operation: MlirOperation, body: MlirBlock, times: int, bindings: Bindings) -> int:
    """Replace a call or a loop by ``times`` copies of the operations of its function or body, each on the
    results of the copy before. Return the number of operations.
    """
    ir: Any = bindings.ir
    passed: list[MlirValue] = list(operation.operands)
    count = 0
    for _ in range(times):
        values: dict[MlirValue, MlirValue] = dict(zip(body.arguments, passed, strict=True))
        for view in list(body.operations)[:-1]:
            with ir.InsertionPoint(operation):
                copy: Any = cast("Any", view.operation).clone()
            for inner in _with_inside(copy.operation):
                count += 1
                for row, operand in enumerate(inner.operands):
                    if operand in values:
                        cast("Any", inner.operands)[row] = values[operand]
            values.update(zip(view.operation.results, copy.operation.results, strict=True))
        returned = cast("MlirOperation", terminator(body)).operands
        passed = [values.get(value, value) for value in returned]
    for result, value in zip(operation.results, passed, strict=True):
        cast("Any", result).replace_all_uses_with(value)
    cast("Any", operation).erase()
    return count


def _with_inside(operation: MlirOperation) -> Iterator[MlirOperation]:
    yield operation
    yield from _inside(operation)


def _inside(operation: MlirOperation) -> Iterator[MlirOperation]:
    """Yield the operations in the regions of an operation."""
    waiting = [operation]
    while waiting:
        for region in waiting.pop().regions:
            for block in region.blocks:
                for view in block.operations:
                    yield view.operation
                    waiting.append(view.operation)


def _all_operands(operation: MlirOperation) -> Iterator[MlirValue]:
    yield from operation.operands
    for inner in _inside(operation):
        yield from inner.operands


def _site_name(operation: MlirOperation, number: int) -> str:
    """Return the number of a contraction, its operation, and the last names of its source location."""
    short = operation.name.partition(".")[2]
    location = _NAME_IN_LOCATION.search(str(operation.location))
    path = [part for part in location[1].split("/") if part] if location else []
    label = "/".join(part for part in path[-2:] if not part.startswith(("jit(", "jit_")))
    shape = "x".join(map(str, cast("Any", operation.results[0].type).shape))
    return quoted(f"{number} {label or short} ({shape})", _LONGEST_NAME)


def _tensor(value: MlirValue) -> tuple[str, str] | None:
    """Return the extents (``4x8x``) and the element type of a tensor that noise can be added to, None for
    any other type.
    """
    match = _TENSOR.fullmatch(str(value.type))
    return None if match is None else (match[1], match[2])


def return_sites(
    entry: EntryFunction, sites: Sequence[NoiseSite], bindings: Bindings
) -> list[tuple[int, int, int, int]]:
    """Let the entry function return the values at the sites too. Return the numbers of the results with the
    left operand, the right operand, the result, and the operand of the rounding that follows (-1: none
    follows) of each site.
    """
    values: list[MlirValue] = list(cast("MlirOperation", terminator(entry.block)).operands)
    rows: list[tuple[int, int, int, int]] = []
    for site in sites:
        rounded = _rounded(site.operation.results[0])
        listed = [*site.operation.operands, site.operation.results[0], *([rounded] if rounded else [])]
        start = len(values)
        values += listed
        rows.append((start, start + 1, start + 2, start + 3 if rounded else -1))
    ir: Any = bindings.ir
    old: Any = terminator(entry.block)
    function: Any = entry.function
    with function.context, ir.InsertionPoint(old), old.location:
        ir.Operation.create("func.return", operands=values)
    old.erase()
    _set_type(entry, bindings)
    return rows


def _rounded(result: MlirValue) -> MlirValue | None:
    """Return the value that is rounded after a contraction, with only elementwise operations between."""
    value = result
    for _ in range(16):
        readers = [use.owner.operation for use in value.uses]
        for reader in readers:
            if reader.name in _ROUNDING:
                return value
        following = next((reader for reader in readers if reader.name in _ELEMENTWISE), None)
        if following is None:
            return None
        value = following.results[0]
    return None


def _set_type(entry: EntryFunction, bindings: Bindings) -> None:
    """Set the type of the entry function to its arguments and returned values, without their attributes."""
    ir: Any = bindings.ir
    attributes: Any = entry.function.attributes
    arguments = [argument.type for argument in entry.block.arguments]
    results = [value.type for value in cast("Any", terminator(entry.block)).operands]
    with cast("Any", entry.function).context:
        attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, results))
    for name in ("arg_attrs", "res_attrs"):
        if name in attributes:
            del attributes[name]


def insert_noise(
    entry: EntryFunction, sites: Sequence[NoiseSite], kinds: Sequence[NoiseKind], bindings: Bindings
) -> None:
    """Add noise of ``kinds`` to each site. The function gets three more arguments: ``tensor<Nxf32>`` with the
    standard deviation of the noise for each kind and site (a row of all sites per kind), and the seeds of the
    noise on weights, and on activations and results (``tensor<ui64>``).
    """
    ir: Any = bindings.ir
    function: Any = entry.function
    block: Any = entry.block
    count = len(kinds) * len(sites)
    helpers: dict[tuple[str, str], str] = {}
    with function.context, ir.Location.unknown():
        amounts_type = ir.Type.parse(f"tensor<{count}xf32>")
        number_type = ir.Type.parse("tensor<ui64>")
        location = ir.Location.unknown()
        amounts = block.add_argument(amounts_type, location)
        device_seed, batch_seed = (block.add_argument(number_type, location) for _ in range(2))

        def noisy(value: Any, row: int, seed: Any) -> Any:
            """Insert the noise of a row of ``amounts`` at the insertion point."""
            extents, element = cast("tuple[str, str]", _tensor(value))
            name = helpers.setdefault((extents, element), f"hespas_noise_{len(helpers)}")
            constant = ir.Operation.create(
                "stablehlo.constant",
                results=[number_type],
                attributes={"value": ir.Attribute.parse(f"dense<{row}> : tensor<ui64>")},
            )
            return ir.Operation.create(
                "func.call",
                results=[value.type],
                operands=[value, amounts, seed, constant.results[0]],
                attributes={"callee": ir.FlatSymbolRefAttr.get(name)},
            )

        for kind_number, kind in enumerate(kinds):
            for number, site in enumerate(sites):
                row, operation = kind_number * len(sites) + number, cast("Any", site.operation)
                operands = {"mac": (), "weight": (site.weight,), "activation": site.activations}[kind]
                for operand in operands:
                    if operand >= 0 and _tensor(operation.operands[operand]) is not None:
                        seed = device_seed if kind == "weight" else batch_seed
                        with ir.InsertionPoint(operation):
                            made = noisy(operation.operands[operand], row, seed)
                        operation.operands[operand] = made.results[0]
                if kind == "mac":
                    result = operation.results[0]
                    readers = [(use.owner, use.operand_number) for use in result.uses]
                    with ir.InsertionPoint.after(operation):
                        made = noisy(result, row, batch_seed)
                    for reader, position in readers:
                        reader.operands[position] = made.results[0]
        texts = [_helper(name, *kind, count) for kind, name in helpers.items()]
        made = ir.Module.parse("\n".join(texts))
        for view in made.body.operations:
            cast("Any", entry.module.body).append(view.operation.clone())
    _set_type(entry, bindings)


def _helper(name: str, extents: str, element: str, count: int) -> str:
    """Return a function that adds noise to a tensor: Box-Muller on the bits of a counter-based generator,
    whose key is the seed and whose counter starts at the row of the amounts. Sums of integers are rounded.
    """
    elements = prod(map(int, extents.split("x")[:-1])) if extents else 1
    kind, flat, bits = f"tensor<{extents}{element}>", f"tensor<{elements}xf32>", f"tensor<{elements}xui32>"
    scalar = "f64" if element in {"f64", "i32", "ui32", "i64", "ui64"} else "f32"
    wide, both = f"tensor<{extents}{scalar}>", f"tensor<{2 * elements}xui32>"
    rounding, last = "", "%sum"
    if element in _RANGES:
        width, is_signed = _RANGES[element]
        low = -(2 ** (width - 1)) if is_signed else 0
        high = 2 ** (width - is_signed) - (1024 if width == 64 else 1)  # f64 has 53 bits
        rounding, last = (
            f"""
  %low = stablehlo.constant dense<{float(low)!r}> : tensor<{scalar}>
  %high = stablehlo.constant dense<{float(high)!r}> : tensor<{scalar}>
  %whole = stablehlo.round_nearest_even %sum : {wide}
  %bounded = stablehlo.clamp %low, %whole, %high :
    (tensor<{scalar}>, {wide}, tensor<{scalar}>) -> {wide}""",
            "%bounded",
        )
    return f"""
func.func private @{name}(%value: {kind}, %amounts: tensor<{count}xf32>, %seed: tensor<ui64>,
                          %row: tensor<ui64>) -> {kind} {{
  %shift = stablehlo.constant dense<32> : tensor<ui64>
  %start = stablehlo.shift_left %row, %shift : tensor<ui64>
  %key = stablehlo.reshape %seed : (tensor<ui64>) -> tensor<1xui64>
  %counter = stablehlo.reshape %start : (tensor<ui64>) -> tensor<1xui64>
  %state = stablehlo.concatenate %key, %counter, dim = 0 :
    (tensor<1xui64>, tensor<1xui64>) -> tensor<2xui64>
  %next, %bits = stablehlo.rng_bit_generator %state, algorithm = THREE_FRY :
    (tensor<2xui64>) -> (tensor<2xui64>, {both})
  %first = stablehlo.slice %bits [0:{elements}] : ({both}) -> {bits}
  %second = stablehlo.slice %bits [{elements}:{2 * elements}] : ({both}) -> {bits}
  %eight = stablehlo.constant dense<8> : {bits}
  %first_bits = stablehlo.shift_right_logical %first, %eight : {bits}
  %second_bits = stablehlo.shift_right_logical %second, %eight : {bits}
  %first_whole = stablehlo.convert %first_bits : ({bits}) -> {flat}
  %second_whole = stablehlo.convert %second_bits : ({bits}) -> {flat}
  %step = stablehlo.constant dense<{2.0**-24!r}> : {flat}
  %half = stablehlo.constant dense<{2.0**-25!r}> : {flat}
  %turn = stablehlo.constant dense<{tau * 2.0**-24!r}> : {flat}
  %minus_two = stablehlo.constant dense<-2.0> : {flat}
  %scaled = stablehlo.multiply %first_whole, %step : {flat}
  %uniform = stablehlo.add %scaled, %half : {flat}
  %log = stablehlo.log %uniform : {flat}
  %square = stablehlo.multiply %log, %minus_two : {flat}
  %radius = stablehlo.sqrt %square : {flat}
  %angle = stablehlo.multiply %second_whole, %turn : {flat}
  %cosine = stablehlo.cosine %angle : {flat}
  %normal = stablehlo.multiply %radius, %cosine : {flat}
  %chosen = stablehlo.dynamic_slice %amounts, %row, sizes = [1] :
    (tensor<{count}xf32>, tensor<ui64>) -> tensor<1xf32>
  %scalar = stablehlo.reshape %chosen : (tensor<1xf32>) -> tensor<f32>
  %amount = stablehlo.broadcast_in_dim %scalar, dims = [] : (tensor<f32>) -> {flat}
  %flat_noise = stablehlo.multiply %normal, %amount : {flat}
  %noise = stablehlo.reshape %flat_noise : ({flat}) -> tensor<{extents}f32>
  %wide_value = stablehlo.convert %value : ({kind}) -> {wide}
  %wide_noise = stablehlo.convert %noise : (tensor<{extents}f32>) -> {wide}
  %sum = stablehlo.add %wide_value, %wide_noise : {wide}{rounding}
  %result = stablehlo.convert {last} : ({wide}) -> {kind}
  return %result : {kind}
}}
"""
