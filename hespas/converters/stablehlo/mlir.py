"""MLIR for this format: protocols over the untyped objects of jaxlib's bindings, and the bindings.

No other module of the format imports jaxlib. jaxlib ships MLIR's Python bindings as private API, so the minor
version is pinned and every name is probed on first use. Errors of the parser become :class:`ParseFailure`;
nothing is printed. The members of the protocols are MLIR's own (https://mlir.llvm.org/docs/Bindings/Python/)
and have no docstrings here.
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
    "Bindings",
    "MlirAttribute",
    "MlirBlock",
    "MlirLocation",
    "MlirModule",
    "MlirOperation",
    "MlirOperations",
    "MlirRegion",
    "MlirType",
    "MlirUse",
    "MlirValue",
    "MlirView",
    "ParseFailure",
    "argument_block",
    "check_installation",
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

MlirAttribute: TypeAlias = "ir.Attribute"
MlirLocation: TypeAlias = "ir.Location"
MlirType: TypeAlias = "ir.Type"


class MlirUse(Protocol):
    """Protocol of one use of an MLIR value: the operation that reads the value."""

    @property
    def owner(self) -> MlirView: ...


class MlirValue(Protocol):
    """Protocol of an MLIR SSA value; ``hash`` is stable while the module lives."""

    @property
    def type(self) -> MlirType: ...

    @property
    def owner(self) -> MlirView | MlirBlock: ...

    @property
    def uses(self) -> Iterator[MlirUse]: ...

    def __hash__(self) -> int: ...


class MlirRegion(Protocol):
    """Protocol of an MLIR region: the blocks inside an operation."""

    @property
    def blocks(self) -> Sequence[MlirBlock]: ...


class MlirOperations(Protocol):
    """Protocol of the operations of an MLIR block, in order."""

    def __iter__(self) -> Iterator[MlirView]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> MlirView: ...


class MlirBlock(Protocol):
    """Protocol of an MLIR block of a region. Iterating ``operations`` yields views."""

    @property
    def owner(self) -> MlirView: ...

    @property
    def arguments(self) -> Sequence[MlirValue]: ...

    @property
    def operations(self) -> MlirOperations: ...

    def __hash__(self) -> int: ...


class MlirView(Protocol):
    """Protocol of an MLIR operation as an object of the Python class of its dialect. ``operation`` is the
    same operation without dialect.
    """

    @property
    def operation(self) -> MlirOperation: ...


class MlirOperation(MlirView, Protocol):
    """Protocol of an MLIR operation, independent of its dialect."""

    @property
    def name(self) -> str: ...

    @property
    def operands(self) -> Sequence[MlirValue]: ...

    @property
    def results(self) -> Sequence[MlirValue]: ...

    @property
    def attributes(self) -> ir.OpAttributeMap: ...

    @property
    def regions(self) -> Sequence[MlirRegion]: ...

    @property
    def location(self) -> MlirLocation: ...

    @location.setter
    def location(self, location: MlirLocation, /) -> None: ...

    @property
    def block(self) -> MlirBlock: ...

    @property
    def parent(self) -> MlirView | None: ...

    def is_before_in_block(self, other: MlirOperation, /) -> bool: ...

    def walk(self, callback: Callable[[MlirOperation], object], /) -> None: ...

    def write_bytecode(self, sink: io.BytesIO, /) -> None: ...

    def get_asm(self, *, enable_debug_info: bool, print_generic_op_form: bool) -> str: ...


class MlirModule(Protocol):
    """Protocol of a parsed MLIR program. It must outlive all operations and values taken from it."""

    @property
    def operation(self) -> MlirOperation: ...

    @property
    def body(self) -> MlirBlock: ...


def defining_op(value: MlirValue) -> MlirOperation | None:
    """Return the operation that produces a value, None for a block argument."""
    owner = value.owner
    return cast("MlirView", owner).operation if hasattr(owner, "operation") else None


def argument_block(value: MlirValue) -> MlirBlock:
    """Return the block of a block argument."""
    return cast("MlirBlock", value.owner)


def terminator(block: MlirBlock) -> MlirOperation | None:
    """Return the last operation of a block."""
    count = len(block.operations)
    return block.operations[count - 1].operation if count else None


MAX_QUOTE = 120
_IN_INPUT = re.compile(r'loc\("-":(\d+):(\d+)\)')
"""Location in a text that was parsed from memory."""


def quoted(text: str, limit: int = MAX_QUOTE) -> str:
    """Return a text from the input for a message: at most ``limit`` characters, unprintable ones escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in cut)


def place_of(location: str) -> str:
    """Convert a printed MLIR location to a position for messages: line and column of the input, or the
    shortened text.
    """
    match = _IN_INPUT.fullmatch(location)
    return f"line {match[1]}:{match[2]}" if match else quoted(location)


_MAX_ELEMENTS = 1 << 24


def int_of(operation: MlirOperation, name: str, default: int = 0) -> int:
    """Return an integer attribute."""
    attribute = operation.attributes.get(name)
    return default if attribute is None else int(cast("ir.IntegerAttr", attribute).value)


def text_of(operation: MlirOperation, name: str) -> str:
    """Return a string attribute, or a symbol reference without its ``@``; ``""`` if absent."""
    attribute = operation.attributes.get(name)
    return "" if attribute is None else string_in(attribute)


def string_in(attribute: MlirAttribute) -> str:
    """Return the text of a string or symbol attribute, or any other attribute as MLIR prints it.

    Bytes that are not UTF-8, as in the configurations of GPU kernels, become ``\\xff``.
    """
    content = getattr(attribute, "value_bytes", None)
    if isinstance(content, bytes):
        return content.decode("utf-8", "backslashreplace")
    try:
        value = getattr(attribute, "value", None)
    except (RuntimeError, UnicodeDecodeError):
        printed = str(attribute).removeprefix("@").removeprefix('"').removesuffix('"').encode()
        return unescaped(printed).decode("utf-8", "backslashreplace")
    return value if isinstance(value, str) else str(attribute)


def is_true(operation: MlirOperation, name: str, *, default: bool = False) -> bool:
    """Return a boolean attribute, or True for a unit attribute."""
    attribute = operation.attributes.get(name)
    return default if attribute is None else bool(getattr(attribute, "value", True))


def int_tuple(operation: MlirOperation, name: str) -> tuple[int, ...]:
    """Return a dense integer array (or elements) attribute, flattened; empty if absent."""
    attribute = operation.attributes.get(name)
    if attribute is None:
        return ()
    if hasattr(attribute, "is_splat"):
        return tuple(int_array(attribute).reshape(-1).tolist())
    return tuple(cast("ir.DenseI64ArrayAttr", attribute))


def int_array(attribute: MlirAttribute) -> IntArray:
    """Return the elements of a dense attribute as an array with their shape. The attribute may be a list, a
    blob (hex), or a splat (one value for all elements).

    Raises ``ValueError`` for a splat of over 2**24 elements, which a short text can state.
    """
    count = len(cast("ir.DenseElementsAttr", attribute)) if hasattr(attribute, "is_splat") else 0
    if count > _MAX_ELEMENTS:
        raise ValueError(f"an attribute has {count:,} elements (limit {_MAX_ELEMENTS:,})")
    return np.array(attribute).astype(np.int64, copy=False)


def members_of(operation: MlirOperation, name: str) -> list[MlirAttribute]:
    """Return the members of an array attribute, empty if absent."""
    attribute = operation.attributes.get(name)
    return [] if attribute is None else list(cast("ir.ArrayAttr", attribute))


def enum_name(attribute: MlirAttribute | None, kind: str, *dialects: ModuleType) -> str:
    """Return the name of an enum attribute of one of several dialects, ``""`` if absent."""
    if attribute is None:
        return ""
    for dialect in dialects:
        decoder = getattr(dialect, kind)
        if decoder.isinstance(attribute):
            return str(decoder(attribute).value)
    return ""


def splat_int(attribute: MlirAttribute | None) -> int | None:
    """Return the value of an integer constant with equal elements, None for anything else."""
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
    """Return the bytes of a literal from the escaped text between its quotes."""
    return _ESCAPED.sub(
        lambda match: bytes.fromhex(match[1].decode()) if match[1] else _PLAIN.get(match[2], match[2]),
        content,
    )


_DIALECTS = ("stablehlo.", "mhlo.")


def short_name(op_name: str) -> str:
    """Return the name of a StableHLO or MHLO operation without its dialect, ``""`` for other dialects."""
    return op_name.partition(".")[2] if op_name.startswith(_DIALECTS) else ""


PINNED = "jaxlib>=0.10.2,<0.11"
_TESTED = ("0", "10")
_NOWHERE = frozenset({'loc("-":0:0)', "loc(unknown)"})
"""Locations of errors in bytecode itself, outside of any operation."""

_POSITION = r'loc\("[^"]*":(\d+):(\d+)\)'


class ParseFailure(Exception):  # noqa: N818 - the reader converts it to a FormatError with the path
    """Error that MLIR's parser reports about its input.

    ``line`` and ``column`` count from 1; they are 0 if MLIR does not report them. ``place`` is then the
    location as MLIR prints it (empty: none). ``is_verdict`` is True if the input was parsed but contains an
    invalid operation.
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
    """Python modules of jaxlib's MLIR bindings. They are untyped; callers cast what they look up."""

    ir: ModuleType
    stablehlo: ModuleType
    mhlo: ModuleType
    sdy: ModuleType
    chlo: ModuleType
    passmanager: ModuleType
    dialects: tuple[ModuleType, ...]
    extension: ModuleType

    def context(self) -> Context:
        """Return a context with every dialect of StableHLO programs.

        Errors go to ``parse``, never to stderr.
        """
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

    def parse(self, program: str | bytes, *, quantised: bool = False) -> MlirModule:
        """Parse a program in text or bytecode. Raises :class:`ParseFailure`.

        Set ``quantised`` for a program with types of the ``quant`` dialect.
        """

        def build(context: Context) -> MlirModule:
            if quantised:
                self._load_quantised(context)
            module: MlirModule = self.ir.Module.parse(program, context)
            return module

        return self._caught(build)

    def parse_artifact(self, data: bytes, *, quantised: bool = False) -> MlirModule:
        """Read a VHLO portable artifact and upgrade it. Raises :class:`ParseFailure`.

        Set ``quantised`` for types of the ``quant`` dialect: VHLO has no types with scales per block.
        """

        def build(context: Context) -> MlirModule:
            if quantised:
                self._load_quantised(context)
            module: MlirModule = self.stablehlo.deserialize_portable_artifact(context, data)
            return module

        return self._caught(build)

    def _load_quantised(self, context: Context) -> None:
        """Load the ``quant`` dialect, which jaxlib does not register, by running a pass that depends on it on
        an empty module.
        """
        self._run("vhlo-legalize-to-stablehlo", self.ir.Module.parse("module {}", context), context)

    def parse_vhlo_text(self, program: str) -> MlirModule:
        """Parse ``vhlo`` text and convert it to StableHLO. Raises :class:`ParseFailure`."""

        def convert(context: Context) -> MlirModule:
            module: MlirModule = self.ir.Module.parse(program, context)
            version = self.stablehlo.get_current_version()
            self._run(f"vhlo-to-version{{target={version}}},vhlo-legalize-to-stablehlo", module, context)
            return module

        return self._caught(convert)

    def refined(self, module: MlirModule, arguments: Sequence[str]) -> MlirModule:
        """Return the module with the types ``arguments`` for the arguments of its entry function. All other
        types are inferred from them.

        Raises :class:`ParseFailure` if the other types cannot be inferred.
        """
        program, types = self.bytecode(module), ",".join(arguments)

        def refine(context: Context) -> MlirModule:
            made: MlirModule = self.ir.Module.parse(program, context)
            passes = (
                f"stablehlo-refine-arguments{{types={types}}},stablehlo-refine-shapes,"
                "func.func(stablehlo-canonicalize-dynamism),canonicalize"
            )
            self._run(passes, made, context)
            return made

        return self._caught(refine)

    def _run(self, passes: str, module: MlirModule, context: Context) -> None:
        """Run passes over a module in place."""
        self.stablehlo.register_stablehlo_passes()
        self.passmanager.PassManager.parse(f"builtin.module({passes})", context).run(module.operation)

    def _caught(self, build: Callable[[Context], MlirModule]) -> MlirModule:
        """Call ``build``, which parses a module, in a new MLIR context. Errors that MLIR reports become a
        :class:`ParseFailure`; a ``MemoryError`` is raised unchanged.
        """
        context = self.context()
        failures: list[ParseFailure] = []

        def listen(diagnostic: ir.Diagnostic) -> bool:
            failures.append(_parse_failure(diagnostic))
            return True

        # Our handler replaces MLIR's own, which prints to stderr. It must get errors too: the bindings
        # abort the process when they put a message with bytes of a damaged file into an exception.
        context.emit_error_diagnostics = True
        handler = cast("ir.DiagnosticHandler", context.attach_diagnostic_handler(listen))
        try:
            return build(context)
        except (self.ir.MLIRError, ValueError, RuntimeError, IndexError, OverflowError) as error:
            located = [failure for failure in failures if failure.line]
            raise (located or failures or [ParseFailure(str(error) or type(error).__name__)])[0] from None
        finally:
            handler.detach()
            # What is raised holds this frame, and the handler, out of sight of the garbage collector, holds
            # what is raised: without this every refused program would stay in memory with its context.
            del handler

    def bytecode(self, module: MlirModule) -> bytes:
        """Return the module as MLIR bytecode."""
        sink = io.BytesIO()
        module.operation.write_bytecode(sink)
        return sink.getvalue()

    def text(self, module: MlirModule, *, locations: bool, generic: bool = False) -> str:
        """Return the module as text."""
        return module.operation.get_asm(enable_debug_info=locations, print_generic_op_form=generic)

    def artifact(self, module: MlirModule, version: str) -> bytes:
        """Convert ``module`` to VHLO, StableHLO with versioned operations, and return it as a portable
        artifact. An empty ``version`` means the newest version.

        Operations of dialects without versions stay unchanged. Raises ``ValueError`` if an operation does not
        exist in ``version``.
        """
        target = version or cast("str", self.stablehlo.get_current_version())
        return cast("bytes", self.stablehlo.serialize_portable_artifact(module, target, True))

    def newest_version(self) -> str:
        """Return the newest version of StableHLO whose portable artifacts can be read."""
        return cast("str", self.stablehlo.get_current_version())

    def dialect_of(self, op_name: str) -> ModuleType:
        """Return the module with the attribute classes of an operation's dialect."""
        return self.mhlo if op_name.startswith("mhlo.") else self.stablehlo


def _parse_failure(diagnostic: ir.Diagnostic) -> ParseFailure:
    try:
        position, message = str(diagnostic.location), diagnostic.message.strip()
    except (RuntimeError, UnicodeDecodeError):
        return ParseFailure("the parser's message quotes bytes that are not text")
    match = re.search(_POSITION, position)
    line, column = (int(match[1]), int(match[2])) if match else (0, 0)
    is_verdict = position not in _NOWHERE
    return ParseFailure(
        message, line, column, place=place_of(position) if is_verdict else "", is_verdict=is_verdict
    )


@cache
def load_bindings() -> Bindings:
    """Import jaxlib's bindings. Raises ``MissingExtraError`` if jaxlib is absent, too old or too new."""
    version = check_installation()
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


def check_installation() -> str:
    """Return the version of jaxlib without loading its bindings. Raises ``MissingExtraError`` as
    :func:`load_bindings` does.
    """
    try:
        version = str(import_module("jaxlib.version").__version__)
    except ImportError as error:
        raise _missing(f"jaxlib is not installed; {PINNED} is needed") from error
    if tuple(version.split(".")[:2]) != _TESTED:
        raise _missing(f"jaxlib {version} is installed; its private bindings are tested with {PINNED} only")
    return version


def _missing(detail: str) -> HespasError:
    return MissingExtraError("reading StableHLO", "stablehlo", detail=detail)
