"""The one place that touches jaxlib's HLO bindings, to print a serialised ``HloModuleProto`` as text.

``jaxlib._hlo`` is private API; the calls below exist in the range that the ``stablehlo`` extra pins. HLO text
is read without jaxlib.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol, cast

from hespas.files.sandbox import ParserFailedError, parser_memory, parser_time, run_contained
from hespas.files.wire import BYTES, VARINT, fields
from hespas.graph.errors import FormatError, MissingExtraError

__all__ = ["TESTED_JAXLIB", "largest_local_id", "print_text", "proto_to_text"]

_STDERR = 2
_XLA_RAISES = (RuntimeError, ValueError, IndexError, OverflowError)
"""What its exceptions become: XlaRuntimeError is a RuntimeError, the others are those of the C++ library."""
_REFUSED = b"\0"
_FEW_IDS = 1 << 20
"""Local ids that any module may have; beyond them, no more than it has bytes."""
TESTED_JAXLIB = "jaxlib>=0.10,<0.11"


class _Module(Protocol):
    def to_string(self) -> str:
        """The module in XLA's text format."""
        ...


class _ModuleClass(Protocol):
    def from_serialized_hlo_module_proto(self, data: bytes) -> _Module:
        """Parse a serialised ``HloModuleProto``."""
        ...


def _module_class() -> _ModuleClass:
    try:
        return cast("_ModuleClass", import_module("jaxlib._hlo").HloModule)
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            "reading a serialised HloModuleProto", "stablehlo", detail=f"tested with {TESTED_JAXLIB}: {error}"
        ) from error


@contextmanager
def _silence() -> Generator[None]:
    """Keep what XLA logs of a damaged proto off the terminal: it writes to file descriptor 2 itself."""
    try:
        kept = os.dup(_STDERR)
    except OSError:  # closed: nothing is written anywhere
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


def proto_to_text(data: bytes, path: str) -> str:
    """The text of a serialised module. Raises ``FormatError`` where the bytes are none, ``MissingExtraError``
    without a fitting jaxlib.

    XLA ends the process on some damaged modules, so a child process does it: its end is a message here.
    """
    _module_class()
    _check_ids(data, path)
    try:
        text = run_contained(f"{__name__}:print_text", data, "XLA")
    except ParserFailedError as error:
        raise _no_module(data, path, f"it {error}") from None
    if text.startswith(_REFUSED):
        raise _no_module(data, path, text.removeprefix(_REFUSED).decode("utf-8", "replace"))
    return text.decode("utf-8", "surrogateescape")


def print_text(data: bytes, parser_bytes: int) -> bytes:
    """In the child: the text of a serialised module; why there is none, behind a NUL, which no text begins
    with.
    """
    parse = _module_class().from_serialized_hlo_module_proto
    try:
        with _silence(), parser_memory(parser_bytes), parser_time(len(data)):
            text = parse(data).to_string()
    except _XLA_RAISES as error:
        reason = str(error).splitlines()[0][:200] if str(error) else "not a HloModuleProto"
        return _REFUSED + reason.encode("utf-8", "replace")
    return text.encode("utf-8", "surrogateescape")


def _check_ids(data: bytes, path: str) -> None:
    """Refuse ids that XLA would reserve far more memory for than the module can need."""
    try:
        largest = largest_local_id(data)
    except ValueError as error:
        raise _no_module(data, path, str(error)) from error
    if largest > _FEW_IDS + len(data):
        raise _no_module(data, path, f"an instruction has number {largest:,} in its computation")


def _no_module(data: bytes, path: str, reason: str) -> FormatError:
    return FormatError(
        f"expected a serialised HloModuleProto: {reason}",
        path=path,
        position=f"within {len(data):,} bytes",
        hint="copy the file again, or dump the module as text (--xla_dump_hlo_as_text)",
    )


# A look at a serialised ``HloModuleProto`` before XLA gets it.
#
# XLA allocates a slot for every number up to the largest local id of an instruction (the low 32 bits of
# ``HloInstructionProto.id``), so one damaged byte can ask for gigabytes. Field numbers are those of xla's
# ``service/hlo.proto``: ``HloModuleProto.computations`` 3, ``HloComputationProto.instructions`` 2,
# ``HloInstructionProto.id`` 35.

_COMPUTATIONS = 3
_INSTRUCTIONS = 2
_ID = 35


def largest_local_id(data: bytes) -> int:
    """The largest local id of any instruction; -1 where there is none. Raises ``ValueError`` for bytes that
    are no protobuf message. O(fields of all instructions).
    """
    largest = -1
    for start, end in _messages(data, 0, len(data), _COMPUTATIONS):
        for first, last in _messages(data, start, end, _INSTRUCTIONS):
            largest = max(largest, _local_id(data, first, last))
    return largest


def _messages(data: bytes, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where the messages of one field begin and end."""
    for number, wire, first, last in fields(data, start, end):
        if number == wanted and wire == BYTES:
            yield first, last


def _local_id(data: bytes, start: int, end: int) -> int:
    ids = (
        value & 0xFFFFFFFF
        for number, wire, value, _ in fields(data, start, end)
        if number == _ID and wire == VARINT
    )
    return max(ids, default=-1)
