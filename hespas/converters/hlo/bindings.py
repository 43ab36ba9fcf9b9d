"""The one place that touches jaxlib's HLO bindings, to print a serialised ``HloModuleProto`` as text.

``jaxlib._hlo`` is private API; the calls below exist in the range that the ``stablehlo`` extra pins. HLO text
is read without jaxlib.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol, cast

from hespas.graph.errors import FormatError, MissingExtraError

__all__ = ["TESTED_JAXLIB", "proto_to_text"]

_STDERR = 2
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
    """
    parse = _module_class().from_serialized_hlo_module_proto
    try:
        with _silence():
            return parse(data).to_string()
    except (RuntimeError, ValueError) as error:  # XlaRuntimeError is a RuntimeError
        reason = str(error).splitlines()[0][:200] if str(error) else "not a HloModuleProto"
        raise FormatError(
            f"expected a serialised HloModuleProto: {reason}",
            path=path,
            position=f"within {len(data):,} bytes",
            hint="copy the file again, or dump the module as text (--xla_dump_hlo_as_text)",
        ) from error
