"""HLO text -> :class:`~hespas.converters.hlo.module.HloModule`. Needs no XLA and no jaxlib.

Grammar: https://github.com/openxla/xla/blob/main/xla/hlo/parser/hlo_parser.cc. Read are the long and the
short printer style: names with and without ``%``, operands with and without shapes, ``ROOT`` or the last
instruction, computations with and without a signature, any blanks and comments. One pass, linear in the text.
"""

from __future__ import annotations

import re

from hespas.converters.hlo.attributes import CALLEE_KEYS
from hespas.converters.hlo.attributes import names as listed_names
from hespas.converters.hlo.module import Computation, FrameTable, HloModule
from hespas.converters.hlo.operands import NUM_OPERANDS
from hespas.converters.hlo.scan import COMMENT, Source, shown, unquote
from hespas.converters.hlo.shapes import ShapeTable

__all__ = ["parse_module"]

_MODULE = re.compile(r"HloModule(?![\w.\-])[ \t]*+([^\s,]*+)")
_ATTRIBUTE = re.compile(r"\s*+,\s*+([A-Za-z_][\w.\-]*+)\s*+=[ \t]*+")
_SIGNATURE = re.compile(r"(ENTRY(?![\w.\-]))?\s*+%?+([\w.\-]*+)")
_HEAD = re.compile(r"(ROOT\s++)?%?+([\w.\-]++)\s*+=\s*+")
_SHAPE = re.compile(r"[a-z][a-z0-9]*+\s*+\[[^\]]*+\](?:[ \t]*+\{[^{}=%]*+\})?+")
_OPCODE = re.compile(r"\s*+([a-z][a-z0-9\-]*+)\s*+(?=\()")
_OPERAND_NAME = re.compile(r"\s*+%?+([\w.\-]++)\s*+")
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)(?![\w.\-])")
_TABLE_ROW = re.compile(r'\s*+(\d++)\s*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|\{[^{}]*+\})')
_FIELD = re.compile(r"(\w++)=(\d++)")
_DEVICE_IDS = re.compile(r"\s*+,\s*+(?=device_ids\s*+=)")
_PAYLOAD_CHARACTERS = 64
_MAX_PARAMETER_DIGITS = 7
_PARAMETER_HINT = "number the parameters of a computation 0, 1, 2, ..."
_OPERANDS_HINT = "was an operand lost? dump the module again"
_INLINE_HINT = "print the module with default options: bodies written inside attributes cannot be read back"


def parse_module(source: Source) -> HloModule:
    """Parse a whole module. Raises ``FormatError`` with line and column. O(text)."""
    return _Parser(source).module()


def _strip_comments(text: str) -> str:
    return COMMENT.sub("", text) if "/" in text else text


class _Parser:
    """One parse. ``text`` is walked by offsets; nothing is copied but names and attribute values."""

    __slots__ = ("computations", "entry", "frames", "shapes", "source", "text")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.text = source.text
        self.shapes = ShapeTable()
        self.frames = FrameTable()
        self.computations: dict[str, Computation] = {}
        self.entry: Computation | None = None

    def module(self) -> HloModule:
        source = self.source
        position = source.skip_space(0)
        match = _MODULE.match(self.text, position)
        if match is None:
            raise source.error(position, "'HloModule'")
        attributes: dict[str, str] = {}
        position = source.skip_space(self._attributes(match.end(), attributes))
        while position < len(self.text):
            table = _TABLE.match(self.text, position)
            position = self._table(table) if table else self._computation(position)
            position = source.skip_space(position)
        if self.entry is None:
            raise source.error(position, "an ENTRY computation")
        return HloModule(
            match[1], source, attributes, self.computations, self.entry, self.shapes.shapes, self.frames
        )

    def _attributes(self, position: int, into: dict[str, str]) -> int:
        """Read ``, key=value`` pairs and return where they end."""
        text, source = self.text, self.source
        while True:
            match = _ATTRIBUTE.match(text, position)
            if match is None:
                return position
            start = match.end()
            end = source.skip_value(start)
            if text.startswith(("mesh", "@"), start):  # the one value with a comma of its own
                more = _DEVICE_IDS.match(text, end)
                end = source.skip_value(more.end()) if more else end
            value = text[start:end].rstrip()
            if not value:
                raise source.error(start, f"a value for {shown(match[1])}", _INLINE_HINT)
            if value.startswith("{") and match[1] in CALLEE_KEYS:
                self._check_names(start, value)
            into[match[1]] = value
            position = source.skip_space(end) if text.startswith("/", end) else end

    def _check_names(self, start: int, value: str) -> None:
        """A list of computations is one, so that whoever follows it later can rely on that."""
        try:
            listed_names(value)
        except ValueError as error:
            expected = str(error).removeprefix("expected ").partition(", found")[0]
            raise self.source.error(start, expected) from error

    def _table(self, table: re.Match[str]) -> int:
        """One of the header's stack frame tables."""
        position = table.end()
        while row := _TABLE_ROW.match(self.text, position):
            position = row.end()
            self._table_row(table[1], row)
        return position

    def _table_row(self, table: str, row: re.Match[str]) -> None:
        number, value = _number(row[1]), row[2]
        if table == "FileNames":
            self.frames.files[number] = unquote(value)
            return
        if table == "FunctionNames":
            self.frames.functions[number] = unquote(value)
            return
        fields = {name: _number(digits) for name, digits in _FIELD.findall(value)}
        if table == "FileLocations":
            self.frames.locations[number] = (fields.get("file_name_id", -1), fields.get("line", 0))
        else:
            self.frames.frames[number] = fields.get("file_location_id", -1)

    def _computation(self, position: int) -> int:
        """``[ENTRY] name [(parameters) -> shape] { instructions }[, attributes]``."""
        text, source = self.text, self.source
        match = _SIGNATURE.match(text, position)
        if match is None or not (match[1] or match[2]):
            raise source.error(position, "a computation")
        name = match[2] or f"computation.{len(self.computations)}"
        cursor = source.skip_space(match.end())
        if text.startswith("(", cursor):
            cursor = source.skip_space(source.skip_group(cursor))
            if not text.startswith("->", cursor):
                raise source.error(cursor, "'->' and the result shape")
            cursor = source.skip_space(self._shape_end(source.skip_space(cursor + 2)))
        if not text.startswith("{", cursor):
            raise source.error(cursor, f"'{{' to open the computation {shown(name)}")
        if name in self.computations:
            raise source.error(position, f"a name no other computation has, not {shown(name)} again")
        computation = Computation(name, position)
        cursor = self._body(computation, cursor + 1)
        attributes: dict[str, str] = {}
        cursor = self._attributes(cursor, attributes)
        computation.thread = unquote(attributes.get("execution_thread", ""))
        self.computations[name] = computation
        if match[1] and self.entry is not None:
            raise source.error(position, f"one ENTRY computation, which {shown(self.entry.name)} is already")
        if match[1]:
            self.entry = computation
        return cursor

    def _body(self, computation: Computation, position: int) -> int:
        """Instructions up to the closing brace; the last one is the root where none says ``ROOT``."""
        text, source = self.text, self.source
        numbers: dict[str, int] = {}
        while True:
            position = source.skip_space(position)
            if text.startswith("}", position):
                break
            position = self._instruction(computation, numbers, position)
        if not numbers:
            raise source.error(position, f"an instruction in {shown(computation.name)}")
        if computation.root < 0:
            computation.root = len(computation) - 1
        return position + 1

    def _instruction(self, computation: Computation, numbers: dict[str, int], position: int) -> int:
        """``[ROOT] name = shape opcode(operands), attributes``."""
        text, source = self.text, self.source
        head = _HEAD.match(text, position)
        if head is None:
            raise source.error(position, "an instruction 'name = shape opcode(...)' or '}'")
        start = head.end()
        end = self._shape_end(start)
        try:
            shape = self.shapes.row(text[start:end])
        except ValueError as error:
            raise source.error(start, str(error).removeprefix("expected ")) from error
        opcode = _OPCODE.match(text, end) or _OPCODE.match(text, source.skip_space(end))
        if opcode is None:
            raise source.error(end, "an opcode and '('")
        close = source.skip_group(opcode.end())
        operands, payload = self._arguments(opcode[1], opcode.end() + 1, close - 1, numbers)
        self._check_operands(opcode, operands)
        if opcode[1] == "parameter":
            self._check_parameter(computation, payload, opcode.start(1))
        attributes: dict[str, str] = {}
        position = self._attributes(close, attributes)
        number = len(computation)
        if numbers.setdefault(head[2], number) != number:
            raise source.error(head.start(2), f"a name no other instruction has, not {shown(head[2])} again")
        if head[1] and computation.root >= 0:
            raise source.error(head.start(), f"one ROOT in {shown(computation.name)}, which has another")
        if head[1]:
            computation.root = number
        computation.names.append(head[2])
        computation.opcodes.append(opcode[1])
        computation.shapes.append(shape)
        computation.operands.append(operands)
        computation.payloads.append(payload)
        computation.attributes.append(attributes)
        computation.positions.append(head.start(2))
        return position

    def _check_operands(self, opcode: re.Match[str], operands: tuple[int, ...]) -> None:
        expected = NUM_OPERANDS.get(opcode[1])
        if expected is not None and len(operands) != expected:
            number = f"{expected} operand{'s' if expected > 1 else ''}"
            raise self.source.error(
                opcode.start(1), f"{number} of {opcode[1]}, which has {len(operands)}", _OPERANDS_HINT
            )

    def _check_parameter(self, computation: Computation, payload: str, position: int) -> None:
        """A parameter has a number, which no other parameter of the computation has."""
        if not payload.isascii() or not payload.isdigit() or len(payload) > _MAX_PARAMETER_DIGITS:
            raise self.source.error(
                position, "the number of a parameter such as parameter(0)", _PARAMETER_HINT
            )
        if payload in computation.parameters:
            raise self.source.error(
                position, f"another number, as another is parameter({payload})", _PARAMETER_HINT
            )
        computation.parameters.add(payload)

    def _shape_end(self, position: int) -> int:
        """Where the shape at ``position`` ends."""
        if self.text.startswith("(", position):
            return self.source.skip_group(position)
        if self.text.startswith("b(", position):
            return self.source.skip_group(position + 1)
        match = _SHAPE.match(self.text, position)
        if match is None:
            raise self.source.error(position, "a shape such as f32[2,3]{1,0}")
        return match.end()

    def _arguments(
        self, opcode: str, start: int, end: int, numbers: dict[str, int]
    ) -> tuple[tuple[int, ...], str]:
        """What stands between the parentheses: operand numbers, or a parameter's or constant's text."""
        if opcode in {"constant", "parameter"}:
            payload = self.text[start : min(end, start + _PAYLOAD_CHARACTERS)] if end > start else ""
            return (), payload.strip() if end - start <= _PAYLOAD_CHARACTERS else ""
        inner = self.text[start:end]
        if not inner or inner.isspace():
            return (), ""
        if "(" in inner or "[" in inner or "{" in inner:
            names = self._typed_operands(start, end)
        else:
            names = [part.split()[-1] if part.strip() else "" for part in _strip_comments(inner).split(",")]
        operands: list[int] = []
        for name in names:
            number = numbers.get(name.lstrip("%"))
            if number is None:
                raise self.source.error(start, f"operands defined above; {shown(name)} is not")
            operands.append(number)
        return tuple(operands), ""

    def _typed_operands(self, start: int, end: int) -> list[str]:
        """The names in ``f32[2]{0} %a, (f32[], s32[]) %b``; an operand may also stand without its shape."""
        source, text = self.source, self.text
        names: list[str] = []
        position = source.skip_space(start)
        while position < end:
            if text[position] == "(" or _SHAPE.match(text, position):
                position = source.skip_space(self._shape_end(position))
            match = _OPERAND_NAME.match(text, position, end)
            if match is None:
                raise source.error(position, "the name of an operand")
            names.append(match[1])
            position = source.skip_space(match.end())
            if position < end and text[position] != ",":
                raise source.error(position, "',' or ')' after an operand")
            position = source.skip_space(position + 1)
        return names


def _number(digits: str) -> int:
    """A table's number; -1 where it is too long to be one."""
    return int(digits) if len(digits) <= 18 else -1
