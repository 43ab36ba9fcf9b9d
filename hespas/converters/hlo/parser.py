"""Parser of HLO text to :class:`~hespas.converters.hlo.module.HloModule`, without XLA and jaxlib.

Grammar: https://github.com/openxla/xla/blob/main/xla/hlo/parser/hlo_parser.cc. The parser accepts the long
and the short printer style and the variants that XLA accepts: names with and without ``%``, operands with and
without shapes or as nested operations, results without shapes if the operands determine them, ``ROOT`` or the
last instruction, ``ENTRY`` or the last computation, computations with and without a signature or inside an
attribute, an optional header, any blanks and comments. One pass, linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import TypeVar

from hespas.converters.hlo.attributes import CALLEE_KEYS
from hespas.converters.hlo.attributes import names as listed_names
from hespas.converters.hlo.inference import same_extents
from hespas.converters.hlo.inference_calls import Inference
from hespas.converters.hlo.module import Computation, FrameTable, HloModule, Shape, ShapeTable, shown_shape
from hespas.converters.hlo.scan import (
    TRUNCATED_HINT,
    HloText,
    begins_headerless,
    shown,
    strip_comments,
    unquote,
)
from hespas.graph.errors import UnsupportedError

__all__ = ["parse_module"]

_Read = TypeVar("_Read")

_MODULE = re.compile(r"HloModule(?![\w.\-])[ \t]*([^\s,]*)")
_ATTRIBUTE = re.compile(r"\s*,\s*([A-Za-z_][\w.\-]*)\s*=\s*|\s*(?:,\s*)?(?=/[*/])")
_NAMED_VALUE = re.compile(r"([A-Za-z_][\w.\-]*)\s*=\s*")
_ENTRY = re.compile(r"ENTRY(?![\w.\-])")
_NAME = re.compile(r"%?([\w.\-]*)")
_HEAD = re.compile(r"(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_SHAPE = re.compile(r"[a-z][a-z0-9]*\s*\[[^\]]*\](?:[ \t]*\{[^{}=%]*\})?")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\s*(?=\()")
_OPERAND_NAME = re.compile(r"\s*%?([\w.\-]+)\s*")
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)(?![\w.\-])")
_TABLE_ROW = re.compile(r'\s*(\d+)\s*("[^"\\]*(?:\\.[^"\\]*)*"|\{[^{}]*\})')
_DEVICE_IDS = re.compile(r"\s*,\s*(?=device_ids\s*=)")
_PRINTED = "entry_computation_layout"
_PAYLOAD_CHARACTERS = 64
_MAX_PARAMETER_DIGITS = 7
_PARAMETER_HINT = "number the parameters of a computation 0, 1, 2, ..."
_SHAPE_HINT = "state the shape of the result in front of the operation"
_REPEATED_HINT = "dump the module again; a shape may have been edited"
_OPERANDS_HINT = "dump the module again; an operand may be lost"
_MAX_NESTED = 50
"""Maximum nesting of operands in operands and computations in attributes; tools write one level."""


def parse_module(source: HloText) -> HloModule:
    """Parse a module. Raises ``FormatError`` with line and column, ``UnsupportedError`` for a tuple beyond
    the limits. O(text).
    """
    return _HloParser(source).module()


class _HloParser:
    """State of parsing one HLO text. Methods take and return offsets into ``text``; only names and attribute
    values are copied.
    """

    __slots__ = (
        "computations",
        "depth",
        "entry",
        "frames",
        "inference",
        "reserved",
        "shapes",
        "source",
        "text",
    )

    def __init__(self, source: HloText) -> None:
        self.source = source
        self.text = source.text
        self.shapes = ShapeTable()
        self.frames = FrameTable()
        self.computations: dict[str, Computation] = {}
        self.entry: Computation | None = None
        self.inference = Inference(self.computations, self.shapes.shapes)
        self.depth = 0
        self.reserved: dict[str, None] = {}

    def module(self) -> HloModule:
        source = self.source
        position = source.skip_space(0)
        match = _MODULE.match(self.text, position)
        if match is None and not begins_headerless(self.text, position):
            raise source.error(position, "'HloModule'")
        attributes: dict[str, str] = {}
        if match is not None:
            position = source.skip_space(self._attributes(match.end(), attributes))
        last: Computation | None = None
        while position < len(self.text):
            table = _TABLE.match(self.text, position)
            if table:
                position = table.end()
                while row := _TABLE_ROW.match(self.text, position):
                    position = row.end()
                    self._table_row(table[1], row)
            else:
                last, position = self._computation(position)
            position = source.skip_space(position)
        entry = self.entry or last  # without ENTRY, XLA uses the last computation
        if entry is None:
            raise source.error(position, "a computation")
        if self.entry is None and _PRINTED in attributes:  # a printer of it prints ENTRY: the text is cut off
            raise source.error(position, "an ENTRY computation", TRUNCATED_HINT)
        name = f"module_{entry.name}" if match is None else match[1]
        shapes, marked = self.shapes.shapes, self.entry is not None
        return HloModule(name, source, attributes, self.computations, entry, shapes, self.frames, marked)

    def _attributes(self, position: int, into: dict[str, str]) -> int:
        """Read ``, key=value`` pairs into ``into`` and return the offset after them."""
        text, source = self.text, self.source
        while True:
            match = _ATTRIBUTE.match(text, position)
            if match is not None and match[1] is None:
                # Read an attribute with a comment before or after the comma.
                comma = self.source.skip_space(position)
                if not self.text.startswith(",", comma):
                    match = None
                else:
                    match = _NAMED_VALUE.match(self.text, self.source.skip_space(comma + 1))
            if match is None:
                return position
            start = source.skip_space(match.end())
            if match[1] in CALLEE_KEYS and text.startswith("{", start) and self._is_body(start):
                position, into[match[1]] = self._bodies(start)
                continue
            end = source.skip_value(start)
            if text.startswith(("mesh", "@"), start):  # the only value that contains a comma
                more = _DEVICE_IDS.match(text, end)
                end = source.skip_value(more.end()) if more else end
            if match[1] == "literal" and _SHAPE.fullmatch(text, start, end):  # the literal follows its shape
                end = source.skip_value(source.skip_space(end))
            value = text[start:end].rstrip()
            if not value:
                raise source.error(match.start(1), f"a value for {shown(match[1])}")
            if value.startswith("{") and match[1] in CALLEE_KEYS:
                try:
                    listed_names(value)
                except ValueError as error:
                    expected = str(error).removeprefix("expected ").partition(", found")[0]
                    raise source.error(start, expected) from error
            into[match[1]] = value
            position = source.skip_space(end) if text.startswith("/", end) else end

    def _is_body(self, start: int) -> bool:
        """Return True if the brace at ``start`` opens an inline computation or a list of computations."""
        inner = self.source.skip_space(start + 1)
        if self.text.startswith("{", inner):
            inner = self.source.skip_space(inner + 1)
        return _HEAD.match(self.text, inner) is not None

    def _bodies(self, start: int) -> tuple[int, str]:
        """Parse the computations that are written inside an attribute. Return the offset after them, and
        their names as the text of the attribute. Computations without a name get a generated one.
        """
        source = self.source
        inner = source.skip_space(start + 1)
        if not self.text.startswith("{", inner):
            return self._nested(start, self._inner_body)
        names: list[str] = []
        while True:
            if self.text.startswith("{", inner):
                inner, name = self._nested(inner, self._inner_body)
            else:
                named = _OPERAND_NAME.match(self.text, inner)
                if named is None:
                    raise source.error(inner, "a computation")
                inner, name = named.end(), named[1]
            names.append(name)
            inner = source.skip_space(inner)
            if self.text.startswith("}", inner):
                return inner + 1, f"{{{', '.join(names)}}}"
            if not self.text.startswith(",", inner):
                raise source.error(inner, "',' or '}' after a computation")
            inner = source.skip_space(inner + 1)

    def _inner_body(self, position: int) -> tuple[int, str]:
        """Parse ``{ instructions }`` of a computation without a name. Return the offset after it and a
        generated name.
        """
        computation = Computation(self._unused("_", self.reserved), position)
        self.reserved[computation.name] = None
        end = self._body(computation, position + 1)
        self.computations[computation.name] = computation
        return end, computation.name

    def _nested(self, position: int, read: Callable[[int], tuple[int, _Read]]) -> tuple[int, _Read]:
        """Call ``read`` to parse an operand or body inside another one. Raises ``FormatError`` if they nest
        too deep.
        """
        if self.depth >= _MAX_NESTED:
            raise self.source.error(position, f"operands and bodies nested at most {_MAX_NESTED} deep")
        self.depth += 1
        result = read(position)
        self.depth -= 1
        return result

    @staticmethod
    def _unused(name: str, names: Mapping[str, object]) -> str:
        """Return a generated name that is not in ``names``."""
        if name not in names:
            return name
        number = len(names)
        while f"{name}.{number}" in names:
            number += 1
        return f"{name}.{number}"

    def _table_row(self, table: str, row: re.Match[str]) -> None:
        number, value = _number(row[1]), row[2]
        if table == "FileNames":
            self.frames.files[number] = unquote(value)
            return
        if table == "FunctionNames":
            self.frames.functions[number] = unquote(value)
            return
        parts = (part.partition("=") for part in value[1:-1].split())
        fields = {name: _number(digits) for name, _, digits in parts}
        if table == "FileLocations":
            self.frames.locations[number] = (fields.get("file_name_id", -1), fields.get("line", 0))
        else:
            self.frames.frames[number] = fields.get("file_location_id", -1)

    def _computation(self, position: int) -> tuple[Computation, int]:
        """Parse ``[ENTRY] name [(parameters) -> shape] { instructions }[, attributes]``."""
        text, source = self.text, self.source
        entry = _ENTRY.match(text, position)
        named = _NAME.match(text, source.skip_space(entry.end()) if entry else position)
        if named is None or not (entry or named[1]):
            raise source.error(position, "a computation")
        name = named[1] or f"computation.{len(self.computations)}"
        cursor = source.skip_space(named.end())
        signature = (0, 0)
        if text.startswith("(", cursor):
            cursor = source.skip_space(source.skip_group(cursor))
            if not text.startswith("->", cursor):
                raise source.error(cursor, "'->' and the result shape")
            cursor = source.skip_space(cursor + 2)
            signature = (cursor, self._shape_end(cursor))
            cursor = source.skip_space(signature[1])
        if not text.startswith("{", cursor):
            raise source.error(cursor, f"'{{' to open the computation {shown(name)}")
        if name in self.reserved:
            raise source.error(position, f"a unique name: computation {shown(name)} exists already")
        self.reserved[name] = None
        computation = Computation(name, position)
        cursor = self._body(computation, cursor + 1)
        if signature[1]:
            root = self.shapes.shapes[computation.shapes[computation.root]]
            self._check_stated(signature, root, f"{shown(name)} to make")
        attributes: dict[str, str] = {}
        cursor = self._attributes(cursor, attributes)
        computation.thread = unquote(attributes.get("execution_thread", ""))
        self.computations[name] = computation
        if entry and self.entry is not None:
            raise source.error(
                position, f"one ENTRY computation: {shown(self.entry.name)} is marked ENTRY already"
            )
        if entry:
            self.entry = computation
        return computation, cursor

    def _body(self, computation: Computation, position: int) -> int:
        """Parse instructions up to the closing brace; without a ``ROOT`` the last one is the root."""
        text, source = self.text, self.source
        numbers: dict[str, int] = {}
        while True:
            position = source.skip_space(position)
            if text.startswith("}", position):
                break
            # ``[ROOT] name = [shape] opcode(operands), attributes``.
            head = _HEAD.match(self.text, position)
            if head is None:
                raise self.source.error(position, "an instruction 'name = shape opcode(...)' or '}'")
            start = head.end()
            if self.text.startswith("/", start):
                start = self.source.skip_space(start)
            number, end = self._operation(computation, numbers, start, head[2], head.start(2))
            if head[1] and computation.root >= 0:
                raise self.source.error(
                    head.start(), f"one ROOT in {shown(computation.name)}, which has another"
                )
            if head[1]:
                computation.root = number
            position = end
        if not numbers:
            raise source.error(position, f"an instruction in {shown(computation.name)}")
        if computation.root < 0:
            computation.root = len(computation) - 1
        return position + 1

    def _operation(
        self,
        computation: Computation,
        numbers: dict[str, int],
        start: int,
        name: str,
        named_at: int,
    ) -> tuple[int, int]:
        """Parse the text after ``name =``, or a nested operand, which has no name and no attributes. Add the
        instruction, and return its number and the offset after it.
        """
        text, source = self.text, self.source
        shape = _SHAPE.match(text, start)
        end, row = start if shape is None else shape.end(), -1
        if shape is None and (text.startswith("b(", start) or _OPCODE.match(text, start) is None):
            end = self._shape_end(start)
        if end > start:  # the result has a shape
            row = self.shapes.rows.get(text[start:end], -1)
            row = self._shape_row(start, end) if row < 0 else row
        opcode = _OPCODE.match(text, end) or _OPCODE.match(text, source.skip_space(end))
        if opcode is None:
            raise source.error(end, "an opcode and '('")
        close = source.skip_group(opcode.end())
        operands, payload = self._arguments(computation, opcode, close - 1, numbers)
        what = opcode[1]
        if _NUM_OPERANDS.get(what, len(operands)) != len(operands):
            expected = _NUM_OPERANDS[opcode[1]]
            wanted = f"{expected} operand{'s' if expected > 1 else ''}"
            wrong_count = self.source.error(
                opcode.start(1), f"{wanted} of {opcode[1]}, which has {len(operands)}", _OPERANDS_HINT
            )
            raise wrong_count
        if what == "parameter":
            position = opcode.start(1)
            if not payload.isascii() or not payload.isdigit() or len(payload) > _MAX_PARAMETER_DIGITS:
                raise source.error(
                    position, "the number of a parameter such as parameter(0)", _PARAMETER_HINT
                )
            if payload in computation.parameters:
                raise source.error(
                    position,
                    f"a unique parameter number: parameter({payload}) exists already",
                    _PARAMETER_HINT,
                )
            computation.parameters[payload] = len(computation)
        attributes: dict[str, str] = {}
        literal = opcode.end() + 1, close - 1
        if name:
            close = self._attributes(close, attributes)
        else:
            name = self._unused(f"{what}.anon", numbers)
        if row < 0:
            row = self._inferred(computation, opcode, operands, attributes)
        elif what == "constant":
            self._check_literal(row, *literal)
        number = len(computation)
        if numbers.setdefault(name, number) != number:
            raise source.error(named_at, f"a unique name: instruction {shown(name)} exists already")
        computation.names.append(name)
        computation.opcodes.append(what)
        computation.shapes.append(row)
        computation.operands.append(operands)
        computation.payloads.append(payload)
        computation.attributes.append(attributes)
        computation.positions.append(named_at)
        return number, close

    def _shape_row(self, start: int, end: int) -> int:
        try:
            return self.shapes.row(self.text[start:end])
        except ValueError as error:
            raise self.source.error(start, str(error).removeprefix("expected ")) from error
        except UnsupportedError as error:
            error.path, error.position = self.source.path, self.source.place(start)
            raise

    def _inferred(
        self,
        computation: Computation,
        opcode: re.Match[str],
        operands: tuple[int, ...],
        attributes: Mapping[str, str],
    ) -> int:
        """Infer the result shape of an operation whose text omits it, from its operands. Return the row of
        the shape.
        """
        shapes = self.shapes.shapes
        given = tuple([shapes[computation.shapes[operand]] for operand in operands])
        try:
            made = self.inference.result(opcode[1], given, attributes)
        except (ValueError, IndexError) as error:
            what = str(error).removeprefix("expected ") if isinstance(error, ValueError) else "operands"
            raise self.source.error(opcode.start(1), what, _SHAPE_HINT) from error
        except UnsupportedError as error:
            error.path, error.position = self.source.path, self.source.place(opcode.start(1))
            raise
        if made is None:
            raise self.source.error(opcode.start(1), "a shape such as f32[2,3]{1,0}", _SHAPE_HINT)
        return self.shapes.add(made)

    def _check_stated(self, stated: tuple[int, int], made: Shape, what: str) -> None:
        """Check that a shape which the text repeats, such as the shape of an operand, equals the shape
        ``made``.
        """
        row = self._shape_row(*stated)
        repeated = self.shapes.shapes[row]
        if repeated is not made and not same_extents(made, repeated):
            raise self.source.error(stated[0], f"{what} {shown_shape(made)}", _REPEATED_HINT)

    def _check_literal(self, row: int, start: int, end: int) -> None:
        """Check that a constant has one value, or as many as its shape has elements. O(literal)."""
        shape, find = self.shapes.shapes[row], self.text.find
        leaf = shape.array
        if leaf is None or not leaf.dims:
            return
        elements = prod(leaf.dims)
        if elements < 1 or any(find(mark, start, end) >= 0 for mark in ("...", "/", '"', "(")):
            return
        count = self.text.count(",", start, end) + 1
        if count != elements and (count > 1 or find("{", start, end) >= 0):
            raise self.source.error(start, f"{elements:,} values for {shown_shape(shape)}, not {count:,}")

    def _shape_end(self, position: int) -> int:
        """Return the offset after the shape at ``position``."""
        if self.text.startswith("(", position):
            return self.source.skip_group(position)
        if self.text.startswith("b(", position):
            return self.source.skip_group(position + 1)
        match = _SHAPE.match(self.text, position)
        if match is None:
            raise self.source.error(position, "a shape such as f32[2,3]{1,0}")
        return match.end()

    def _arguments(
        self, computation: Computation, opcode: re.Match[str], end: int, numbers: dict[str, int]
    ) -> tuple[tuple[int, ...], str]:
        """Parse the text in parentheses after an opcode. Return operand numbers, or the text of a parameter
        or constant.
        """
        start = opcode.end() + 1
        if opcode[1] in {"constant", "parameter"}:
            payload = self.text[start : min(end, start + _PAYLOAD_CHARACTERS)] if end > start else ""
            return (), payload.strip() if end - start <= _PAYLOAD_CHARACTERS else ""
        inner = self.text[start:end]
        if not inner or inner.isspace():
            return (), ""
        if "(" in inner or "[" in inner or "{" in inner:
            return self._typed_operands(computation, start, end, numbers), ""
        operands: list[int] = []
        for part in strip_comments(inner).split(","):
            number = numbers.get(part.lstrip(" %"))
            if number is None:  # other blanks, or the name of a type in front
                name = part.split()[-1].lstrip("%") if part.strip() else ""
                number = self._operand(name, start, numbers)
            operands.append(number)
        return tuple(operands), ""

    def _operand(self, name: str, position: int, numbers: dict[str, int]) -> int:
        number = numbers.get(name)
        if number is None:
            raise self.source.error(position, f"operands defined above; {shown(name)} is not")
        return number

    def _typed_operands(
        self, computation: Computation, start: int, end: int, numbers: dict[str, int]
    ) -> tuple[int, ...]:
        """Parse operands such as ``f32[2]{0} %a, (f32[], s32[]) %b``; a shape may be missing, and a nested
        operation may replace a name.
        """
        source, text, shapes = self.source, self.text, self.shapes.shapes

        def operation(at: int) -> tuple[int, int]:
            number, after = self._operation(computation, numbers, at, "", at)
            return after, number

        operands: list[int] = []
        position = source.skip_space(start)
        while position < end:
            shape_span = (position, position)
            if text.startswith(("(", "b("), position) or _SHAPE.match(text, position):
                shape_span = (position, self._shape_end(position))
                position = source.skip_space(shape_span[1])
            if _OPCODE.match(text, position, end):
                position, number = self._nested(shape_span[0], operation)
            else:
                match = _OPERAND_NAME.match(text, position, end)
                if match is None:
                    raise source.error(position, "the name of an operand")
                number, position = self._operand(match[1], start, numbers), match.end()
                if shape_span[1] > shape_span[0]:
                    self._check_stated(shape_span, shapes[computation.shapes[number]], "an operand of shape")
            operands.append(number)
            position = source.skip_space(position)
            if position < end and text[position] != ",":
                raise source.error(position, "',' or ')' after an operand")
            position = source.skip_space(position + 1)
        return tuple(operands)


def _number(digits: str) -> int:
    """Parse a number in a stack frame table. Return -1 for other texts and for more than 18 digits."""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else -1


_UNARY = """
abs acos acosh asin asinh atan atanh bitcast bitcast-convert broadcast cbrt ceil cholesky convert copy cosine
cosh count-leading-zeros erf exponential exponential-minus-one fft floor get-dimension-size
get-tuple-element imag is-finite log log-plus-one logistic negate not popcnt real reduce-precision reshape
reverse round-nearest-afz round-nearest-even rsqrt sign sine sinh slice sqrt tan tanh transpose while
"""
_BINARY = """
add add-dependency and atan2 compare complex convolution divide gather maximum minimum multiply or pad power
remainder set-dimension-size shift-left shift-right-arithmetic shift-right-logical stochastic-convert subtract
triangular-solve xor
"""
_TERNARY = "clamp select select-and-scatter"

_NUM_OPERANDS: dict[str, int] = {
    **dict.fromkeys(_UNARY.split(), 1),
    **dict.fromkeys(_BINARY.split(), 2),
    **dict.fromkeys(_TERNARY.split(), 3),
}
"""Number of operands by opcode (https://openxla.org/xla/operation_semantics). Opcodes with several printed
forms (``dot`` with sparsity, variadic ``reduce`` and ``sort``) are left out.
"""
