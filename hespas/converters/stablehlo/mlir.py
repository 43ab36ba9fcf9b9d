"""MLIR as this format uses it: protocols over untyped objects of jaxlib's bindings, and those bindings.

The members are MLIR's own (https://mlir.llvm.org/docs/Bindings/Python/), so they bear no docstrings here.
"""
# ruff: noqa: D102

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from hespas.graph.columns import IntArray
from hespas.graph.errors import HespasError, MissingExtraError

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._mlir import ir
    from jaxlib.mlir._mlir_libs._mlir.ir import Context

__all__ = [
    "MAX_QUOTE",
    "PINNED",
    "Attribute",
    "Bindings",
    "Block",
    "Location",
    "Module",
    "Operation",
    "Operations",
    "ParseFailure",
    "Region",
    "Type",
    "Use",
    "Value",
    "View",
    "argument_block",
    "defining_op",
    "enum_name",
    "int_array",
    "int_of",
    "int_tuple",
    "is_true",
    "load_bindings",
    "members_of",
    "place_of",
    "quoted",
    "short_name",
    "splat_int",
    "string_in",
    "terminator",
    "text_of",
    "unescaped",
]


Attribute: TypeAlias = "ir.Attribute"
Location: TypeAlias = "ir.Location"
Type: TypeAlias = "ir.Type"


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
    def owner(self) -> View: ...

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
    def attributes(self) -> ir.OpAttributeMap: ...

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

    def write_bytecode(self, sink: io.BytesIO, /) -> None: ...

    def get_asm(self, *, enable_debug_info: bool, print_generic_op_form: bool) -> str: ...


class Module(Protocol):
    """A parsed program; it must outlive everything taken from it."""

    @property
    def operation(self) -> Operation: ...

    @property
    def body(self) -> Block: ...


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


# Text of the input as messages may show it: cut, and without characters that steer a terminal.

MAX_QUOTE = 120
_IN_INPUT = re.compile(r'loc\("-":(\d+):(\d+)\)')
"""A place in a text that was parsed from memory."""


def quoted(text: str, limit: int = MAX_QUOTE) -> str:
    """At most ``limit`` characters, control and other unprintable ones escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)


def place_of(location: str) -> str:
    """A printed MLIR location as a position: line and column of the input, or what it says, cut."""
    found = _IN_INPUT.fullmatch(location)
    return f"line {found[1]}:{found[2]}" if found else quoted(location)


# Typed values of MLIR attributes: what the bindings leave untyped gets its type here.

_MAX_ELEMENTS = 1 << 24


def int_of(operation: Operation, name: str, default: int = 0) -> int:
    """An integer attribute."""
    attribute = operation.attributes.get(name)
    return default if attribute is None else int(cast("ir.IntegerAttr", attribute).value)


def text_of(operation: Operation, name: str) -> str:
    """A string attribute, or a symbol reference without its ``@``; ``""`` where absent."""
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
    return tuple(cast("ir.DenseI64ArrayAttr", attribute))


def int_array(attribute: Attribute) -> IntArray:
    """Dense elements with their shape; blobs (hex) and splats decode alike.

    Raises ``ValueError`` for a splat of over 2**24 elements, which a short text can state.
    """
    count = len(cast("ir.DenseElementsAttr", attribute)) if hasattr(attribute, "is_splat") else 0
    if count > _MAX_ELEMENTS:
        raise ValueError(f"an attribute has {count:,} elements (limit {_MAX_ELEMENTS:,})")
    return np.array(attribute).astype(np.int64, copy=False)


def members_of(operation: Operation, name: str) -> list[Attribute]:
    """The members of an array attribute, empty where absent."""
    attribute = operation.attributes.get(name)
    return [] if attribute is None else list(cast("ir.ArrayAttr", attribute))


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
    elements = cast("ir.DenseElementsAttr", attribute)
    if not elements.is_splat:
        return None
    value = getattr(elements.get_splat_value(), "value", None)
    return value if isinstance(value, int) else None


_ESCAPED = re.compile(rb'\\(?:([0-9A-Fa-f]{2})|([nt"\\]))')
_PLAIN = {b"n": b"\n", b"t": b"\t"}


def unescaped(content: bytes) -> bytes:
    """The bytes that stand between the quotes of a literal."""
    return _ESCAPED.sub(
        lambda found: bytes.fromhex(found[1].decode()) if found[1] else _PLAIN.get(found[2], found[2]),
        content,
    )


_DIALECTS = ("stablehlo.", "mhlo.")


def short_name(op_name: str) -> str:
    """An operation of StableHLO or MHLO without its dialect, ``""`` for any other."""
    return op_name.partition(".")[2] if op_name.startswith(_DIALECTS) else ""


# --- the only place of this format that touches jaxlib
#
# jaxlib ships MLIR's Python bindings as private API, so the minor version is pinned, and every name is probed
# when it is first needed. Errors of the parser come out as :class:`ParseFailure`; nothing is printed.


PINNED = "jaxlib>=0.10.2,<0.11"
_TESTED = ("0", "10")
_NOWHERE = frozenset({'loc("-":0:0)', "loc(unknown)"})
"""Where faults of bytecode itself are: in no operation."""

_POSITION = r'loc\("[^"]*":(\d+):(\d+)\)'


class ParseFailure(Exception):  # noqa: N818 - the reader turns it into a FormatError that knows the file
    """The parser refused the input. ``line`` and ``column`` count from 1; 0 where MLIR does not know: then
    ``place`` is what it says instead, if anything.

    ``is_verdict``: it was read, and an operation in it is not valid.
    """

    def __init__(
        self, message: str, line: int = 0, column: int = 0, *, place: str = "", is_verdict: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column
        self.place = place
        self.is_verdict = is_verdict


class Bindings(NamedTuple):
    """The modules of jaxlib in use. Attribute look-ups on them are untyped; callers cast what comes out."""

    ir: ModuleType
    stablehlo: ModuleType
    mhlo: ModuleType
    sdy: ModuleType
    chlo: ModuleType
    passmanager: ModuleType
    dialects: tuple[ModuleType, ...]
    extension: ModuleType

    def context(self) -> Context:
        """A context with every dialect StableHLO programs use. Errors go to ``parse``, never to stderr."""
        registry = self.ir.DialectRegistry()
        self.extension.register_dialects(registry)
        context: Context = self.ir.Context()
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        self.mhlo.register_mhlo_dialect(context)
        for dialect in self.dialects:
            dialect.register_dialect(context)
        # Operations of other dialects are read too, and reported as unknown.
        context.allow_unregistered_dialects = True
        # MLIR's verifier works in threads, where a diagnostic waits for the interpreter that waits for it.
        context.enable_multithreading(False)
        return context

    def parse(self, program: str | bytes, *, quantised: bool = False) -> Module:
        """Parse text or bytecode. Raises :class:`ParseFailure`.

        ``quantised``: the program has types of the ``quant`` dialect. jaxlib does not register it; a pass
        that depends on it, run on nothing, loads it.
        """

        def build(context: Context) -> Module:
            if quantised:
                empty = self.ir.Module.parse("module {}", context)
                self._run("vhlo-legalize-to-stablehlo", empty, context)
            module: Module = self.ir.Module.parse(program, context)
            return module

        return self._caught(build)

    def parse_artifact(self, data: bytes) -> Module:
        """Read a VHLO portable artifact and upgrade it. Raises :class:`ParseFailure`."""
        return self._caught(lambda context: self.stablehlo.deserialize_portable_artifact(context, data))

    def parse_vhlo_text(self, program: str) -> Module:
        """Parse ``vhlo`` text and turn it into StableHLO. Raises :class:`ParseFailure`."""

        def convert(context: Context) -> Module:
            module: Module = self.ir.Module.parse(program, context)
            version = self.stablehlo.get_current_version()
            self._run(f"vhlo-to-version{{target={version}}},vhlo-legalize-to-stablehlo", module, context)
            return module

        return self._caught(convert)

    def refined(self, module: Module, arguments: Sequence[str]) -> Module:
        """The module with ``arguments`` as types of its entry, and all others as they follow from those.
        Raises :class:`ParseFailure` where they do not.
        """
        program, types = self.bytecode(module), ",".join(arguments)

        def refine(context: Context) -> Module:
            made: Module = self.ir.Module.parse(program, context)
            passes = (
                f"stablehlo-refine-arguments{{types={types}}},stablehlo-refine-shapes,"
                "func.func(stablehlo-canonicalize-dynamism),canonicalize"
            )
            self._run(passes, made, context)
            return made

        return self._caught(refine)

    def _run(self, passes: str, module: Module, context: Context) -> None:
        """Run passes over a module in place."""
        self.stablehlo.register_stablehlo_passes()
        self.passmanager.PassManager.parse(f"builtin.module({passes})", context).run(module.operation)

    def _caught(self, build: Callable[[Context], Module]) -> Module:
        """Run a parser in a new context and collect what it says. A ``MemoryError`` passes."""
        context = self.context()
        failures: list[ParseFailure] = []

        def listen(diagnostic: ir.Diagnostic) -> bool:
            failures.append(_failure(diagnostic))
            return True

        # Our handler replaces MLIR's own, which prints to stderr. It must get errors too: the bindings
        # abort the process when they put a message with bytes of a damaged file into an exception.
        context.emit_error_diagnostics = True
        handler = cast("ir.DiagnosticHandler", context.attach_diagnostic_handler(listen))
        try:
            return build(context)
        except (self.ir.MLIRError, ValueError, RuntimeError, IndexError, OverflowError) as error:
            raise _first(failures, str(error) or type(error).__name__) from None
        finally:
            handler.detach()
            # What is raised holds this frame, and the handler, out of sight of the garbage collector, holds
            # what is raised: without this every refused program would stay in memory with its context.
            del handler

    def bytecode(self, module: Module) -> bytes:
        """The module as MLIR bytecode."""
        sink = io.BytesIO()
        module.operation.write_bytecode(sink)
        return sink.getvalue()

    def text(self, module: Module, *, locations: bool, generic: bool = False) -> str:
        """The module as text."""
        return module.operation.get_asm(enable_debug_info=locations, print_generic_op_form=generic)

    def artifact(self, module: Module, version: str) -> bytes:
        """The module as VHLO portable artifact (empty ``version``: the newest). Turns ``module`` into VHLO.

        Operations of dialects that have no versions stay as they are. Raises ``ValueError`` where an
        operation does not exist in ``version``.
        """
        target = version or cast("str", self.stablehlo.get_current_version())
        return cast("bytes", self.stablehlo.serialize_portable_artifact(module, target, True))

    def newest_version(self) -> str:
        """The version of StableHLO whose portable artifacts are read at most."""
        return cast("str", self.stablehlo.get_current_version())

    def dialect_of(self, op_name: str) -> ModuleType:
        """The module with the attribute classes of an operation's dialect."""
        return self.mhlo if op_name.startswith("mhlo.") else self.stablehlo


def _failure(diagnostic: ir.Diagnostic) -> ParseFailure:
    try:
        position, message = str(diagnostic.location), diagnostic.message.strip()
    except (RuntimeError, UnicodeDecodeError):
        return ParseFailure("the parser's message quotes bytes that are no text")
    found = re.search(_POSITION, position)
    line, column = (int(found[1]), int(found[2])) if found else (0, 0)
    is_verdict = position not in _NOWHERE
    return ParseFailure(
        message, line, column, place=place_of(position) if is_verdict else "", is_verdict=is_verdict
    )


def _first(failures: list[ParseFailure], otherwise: str) -> ParseFailure:
    """The finding to report: the first with a position."""
    located = [failure for failure in failures if failure.line]
    return (located or failures or [ParseFailure(otherwise)])[0]


@cache
def load_bindings() -> Bindings:
    """Import jaxlib's bindings. Raises ``MissingExtraError`` where jaxlib is absent, too old or too new."""
    try:
        version = str(import_module("jaxlib.version").__version__)
    except ImportError as error:
        raise _missing(f"jaxlib is not installed; {PINNED} is needed") from error
    if tuple(version.split(".")[:2]) != _TESTED:
        raise _missing(f"jaxlib {version} is installed; its private bindings are tested with {PINNED} only")
    try:
        # The extension modules, not `jaxlib.mlir.dialects`: those make a Python class for every operation,
        # which takes longer than parsing a small program.
        stablehlo = import_module("jaxlib.mlir._mlir_libs._stablehlo")
        sdy = import_module("jaxlib.mlir._mlir_libs._sdy")
        chlo = import_module("jaxlib.mlir._mlir_libs._chlo")
        return Bindings(
            ir=import_module("jaxlib.mlir.ir"),
            stablehlo=stablehlo,
            mhlo=import_module("jaxlib.mlir._mlir_libs._mlirHlo"),
            sdy=sdy,
            passmanager=import_module("jaxlib.mlir.passmanager"),
            chlo=chlo,
            dialects=(chlo, sdy, stablehlo, import_module("jaxlib.mlir._mlir_libs._sdyMpmd")),
            extension=import_module("jaxlib.mlir._mlir_libs._jax_mlir_ext"),
        )
    except (ImportError, AttributeError) as error:
        raise _missing(f"jaxlib {version} lacks a binding ({error}); {PINNED} is needed") from error


def _missing(detail: str) -> HespasError:
    return MissingExtraError("reading StableHLO", "stablehlo", detail=detail)
