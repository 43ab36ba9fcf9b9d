"""The only module of this format that touches jaxlib: private extension modules behind typed protocols.

jaxlib ships MLIR's Python bindings as untyped, private API, so the minor version is pinned, every name is
probed when it is first needed, and the protocols below say what of it is used. Errors of the parser come
out as :class:`ParseFailure`; nothing is printed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, Protocol, cast

from hespas.converters.stablehlo.mlir import Location, Module, place_of
from hespas.graph.errors import HespasError, MissingExtraError

__all__ = ["PINNED", "Bindings", "ParseFailure", "load_bindings"]

PINNED = "jaxlib>=0.10,<0.11"
_TESTED = ("0", "10")
_NOWHERE = frozenset({'loc("-":0:0)', "loc(unknown)"})
"""Where faults of bytecode itself are: in no operation."""

_POSITION = r'loc\("[^"]*":(\d+):(\d+)\)'


class _Diagnostic(Protocol):
    """What MLIR tells about an error."""

    @property
    def location(self) -> Location: ...

    @property
    def message(self) -> str: ...

    @property
    def notes(self) -> Sequence[_Diagnostic]: ...


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

    def context(self) -> object:
        """A context with every dialect StableHLO programs use. Errors go to ``parse``, never to stderr."""
        registry = self.ir.DialectRegistry()
        self.extension.register_dialects(registry)
        context = self.ir.Context()
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        self.mhlo.register_mhlo_dialect(context)
        for dialect in self.dialects:
            dialect.register_dialect(context)
        # Operations of other dialects are read too, and reported as unknown.
        context.allow_unregistered_dialects = True
        # MLIR's verifier works in threads, where a diagnostic waits for the interpreter that waits for it.
        context.enable_multithreading(False)
        return cast("object", context)

    def parse(self, program: str | bytes, *, quantised: bool = False) -> Module:
        """Parse text or bytecode. Raises :class:`ParseFailure`.

        ``quantised``: the program has types of the ``quant`` dialect. jaxlib does not register it; a pass
        that depends on it, run on nothing, loads it.
        """

        def build(context: object) -> object:
            if quantised:
                empty = self.ir.Module.parse("module {}", context)
                self._run("vhlo-legalize-to-stablehlo", empty, context)
            return cast("object", self.ir.Module.parse(program, context))

        return self._caught(build)

    def parse_artifact(self, data: bytes) -> Module:
        """Read a VHLO portable artifact and upgrade it. Raises :class:`ParseFailure`."""
        return self._caught(lambda context: self.stablehlo.deserialize_portable_artifact(context, data))

    def parse_vhlo_text(self, program: str) -> Module:
        """Parse ``vhlo`` text and turn it into StableHLO. Raises :class:`ParseFailure`."""

        def convert(context: object) -> object:
            module = self.ir.Module.parse(program, context)
            version = self.stablehlo.get_current_version()
            self._run(f"vhlo-to-version{{target={version}}},vhlo-legalize-to-stablehlo", module, context)
            return cast("object", module)

        return self._caught(convert)

    def refined(self, module: Module, arguments: Sequence[str]) -> Module:
        """The module with ``arguments`` as types of its entry, and all others as they follow from those.
        Raises :class:`ParseFailure` where they do not.
        """
        program, types = self.bytecode(module), ",".join(arguments)

        def refine(context: object) -> object:
            made = self.ir.Module.parse(program, context)
            passes = (
                f"stablehlo-refine-arguments{{types={types}}},stablehlo-refine-shapes,"
                "func.func(stablehlo-canonicalize-dynamism),canonicalize"
            )
            self._run(passes, made, context)
            return cast("object", made)

        return self._caught(refine)

    def _run(self, passes: str, module: Module, context: object) -> None:
        """Run passes over a module in place."""
        self.stablehlo.register_stablehlo_passes()
        self.passmanager.PassManager.parse(f"builtin.module({passes})", context).run(module.operation)

    def _caught(self, build: Callable[[object], object]) -> Module:
        """Run a parser in a new context and collect what it says. A ``MemoryError`` passes."""
        context = self.context()
        said: list[ParseFailure] = []

        def listen(diagnostic: _Diagnostic) -> bool:
            said.append(_failure(diagnostic))
            return True

        # Our handler replaces MLIR's own, which prints to stderr. It must get errors too: the bindings
        # abort the process when they put a message with bytes of a damaged file into an exception.
        settings = cast("_Context", context)
        settings.emit_error_diagnostics = True
        handler = settings.attach_diagnostic_handler(listen)
        try:
            module = build(context)
        except (self.ir.MLIRError, ValueError, RuntimeError, IndexError, OverflowError) as error:
            raise _first(said, str(error) or type(error).__name__) from None
        finally:
            handler.detach()
            # What is raised holds this frame, and the handler, out of sight of the garbage collector, holds
            # what is raised: without this every refused program would stay in memory with its context.
            del handler
        return cast("Module", module)

    def bytecode(self, module: Module) -> bytes:
        """The module as MLIR bytecode."""
        sink = io.BytesIO()
        cast("_BytecodeWriter", module.operation).write_bytecode(sink)
        return sink.getvalue()

    def text(self, module: Module, *, locations: bool, generic: bool = False) -> str:
        """The module as text."""
        writer = cast("_TextWriter", module.operation)
        return writer.get_asm(enable_debug_info=locations, print_generic_op_form=generic)

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


class _Handler(Protocol):
    def detach(self) -> None: ...


class _Context(Protocol):
    emit_error_diagnostics: bool

    def attach_diagnostic_handler(self, callback: Callable[[_Diagnostic], bool], /) -> _Handler: ...


class _BytecodeWriter(Protocol):
    def write_bytecode(self, sink: io.BytesIO, /) -> None: ...


class _TextWriter(Protocol):
    def get_asm(self, *, enable_debug_info: bool, print_generic_op_form: bool) -> str: ...


def _failure(diagnostic: _Diagnostic) -> ParseFailure:
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


def _first(said: list[ParseFailure], otherwise: str) -> ParseFailure:
    """The finding to report: the first with a position."""
    located = [failure for failure in said if failure.line]
    return (located or said or [ParseFailure(otherwise)])[0]


def _probe(name: str) -> ModuleType:
    return import_module(name)


@cache
def load_bindings() -> Bindings:
    """Import jaxlib's bindings. Raises ``MissingExtraError`` where jaxlib is absent, too old or too new."""
    try:
        version = str(_probe("jaxlib.version").__version__)
    except ImportError as error:
        raise _missing(f"jaxlib is not installed; {PINNED} is needed") from error
    if tuple(version.split(".")[:2]) != _TESTED:
        raise _missing(f"jaxlib {version} is installed; its private bindings are tested with {PINNED} only")
    try:
        # The extension modules, not `jaxlib.mlir.dialects`: those make a Python class for every operation,
        # which takes longer than parsing a small program.
        stablehlo = _probe("jaxlib.mlir._mlir_libs._stablehlo")
        sdy = _probe("jaxlib.mlir._mlir_libs._sdy")
        chlo = _probe("jaxlib.mlir._mlir_libs._chlo")
        return Bindings(
            ir=_probe("jaxlib.mlir.ir"),
            stablehlo=stablehlo,
            mhlo=_probe("jaxlib.mlir._mlir_libs._mlirHlo"),
            sdy=sdy,
            passmanager=_probe("jaxlib.mlir.passmanager"),
            chlo=chlo,
            dialects=(chlo, sdy, stablehlo, _probe("jaxlib.mlir._mlir_libs._sdyMpmd")),
            extension=_probe("jaxlib.mlir._mlir_libs._jax_mlir_ext"),
        )
    except (ImportError, AttributeError) as error:
        raise _missing(f"jaxlib {version} lacks a binding ({error}); {PINNED} is needed") from error


def _missing(detail: str) -> HespasError:
    return MissingExtraError("reading StableHLO", "stablehlo", detail=detail)
