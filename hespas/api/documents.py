"""Results of commands, their JSON documents, and where documents go: files, pipes or standard streams."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, Literal

import msgspec

from hespas._version import __version__
from hespas.files.documents import Figure, document_bytes
from hespas.files.limits import INPUT_BYTES_VARIABLE, limits
from hespas.files.output import check_destination, place_immediately, write_atomically
from hespas.files.streams import STANDARD_STREAM
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, OutputError, UsageError, clipped, short_repr
from hespas.report.tables import Table, write_tables

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from hespas.report.charts import Chart

__all__ = [
    "STANDARD_STREAM",
    "BasisShare",
    "Document",
    "Finding",
    "Result",
    "basis_of",
    "check_document",
    "check_streams",
    "findings",
    "is_standard_output",
    "is_stream",
    "put",
    "spooled_input",
    "spooled_output",
    "write_json",
    "write_table",
]

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 16 << 20
"""Size of the head of standard input from which the format is sniffed."""
_STANDARD_OUTPUT = frozenset({STANDARD_STREAM, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})
_DISK_FULL_HINT = "free some space or choose another destination"
_INPUT_HINT = "name a file, or pipe one in"


class Finding(msgspec.Struct, frozen=True):
    """One diagnostic in a JSON document; ``count`` is the exact number of diagnostics with this code."""

    code: str
    severity: Literal["info", "warning", "error"]
    path: str
    location: str
    message: str
    rank: int | None
    node: int | None
    count: Annotated[int, msgspec.Meta(ge=1)]


def findings(diagnostics: Diagnostics) -> list[Finding]:
    """Return the stored diagnostics in the form of JSON documents, one row each."""
    counts = diagnostics.counts()
    return [
        Finding(
            code=diagnostic.code,
            severity=diagnostic.severity.value,
            path=diagnostic.path,
            location=diagnostic.location,
            message=diagnostic.message,
            rank=diagnostic.rank,
            node=diagnostic.node,
            count=counts[diagnostic.code],
        )
        for diagnostic in diagnostics
    ]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all JSON documents have: schema, version of Hespas, inputs and diagnostics. Unknown figures
    are null.
    """

    schema: str
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[Finding]


class BasisShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of one basis of estimates (measurements of the device, of reference devices, a data sheet) in the
    time of all operations.
    """

    basis: str
    share: Figure


def basis_of(shares: Mapping[str, float]) -> list[BasisShare]:
    """Return shares of bases as rows of a document."""
    return [BasisShare(basis=name, share=share) for name, share in shares.items()]


class Result(ABC):
    """Result of a command: a summary line (``repr``), a table, and the document of ``--json``."""

    __slots__ = ()
    page_title: ClassVar[str] = "Report"

    @abstractmethod
    def headline(self) -> str:
        """Return the summary line."""

    @abstractmethod
    def to_json(self) -> bytes:
        """Return the document that the command writes with ``--json``: indented UTF-8 that ends in a
        newline.
        """

    @abstractmethod
    def table(self) -> Table:
        """Return the rows of the result as a table, from which all of its renderings come."""

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return all tables of the result by name."""
        return {"rows": self.table()}

    def charts(self) -> tuple[Chart, ...]:
        """Return the charts of the result, which its page shows with its tables; empty if it has none."""
        return ()

    def plot(self, name: str = "") -> Chart:
        """Return one of :meth:`charts` by its name (default: the first). Notebooks show it; its method
        ``write`` writes it as an SVG file. Raises ``UsageError`` without such a chart.
        """
        charts = {chart.name: chart for chart in self.charts()}
        if not charts or (name and name not in charts):
            missing = f"no chart {clipped(name)!r}" if name else "this result has no chart"
            raise UsageError(missing, hint=f"use one of: {', '.join(charts)}" if charts else "use table()")
        return charts[name or next(iter(charts))]

    def to_html(self) -> str:
        """Return a page with the summary line, the charts, the tables and the diagnostics."""
        from hespas.report.page import page_html, result_page

        diagnostics: Diagnostics | None = getattr(self, "diagnostics", None)
        page = result_page(
            self.page_title, self.headline(), self.charts(), self.tables_by_name(), diagnostics
        )
        return page_html(page)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows of :meth:`table` as a data frame; unknown values are NaN."""
        return self.table().to_pandas()

    def to_arrow(self) -> pyarrow.Table:
        """Return the rows of :meth:`table` as an Arrow table; unknown values are null."""
        return self.table().to_arrow()

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``--json`` as Python values; unknown values are None."""
        document: dict[str, Any] = json.loads(self.to_json())
        return document

    def __repr__(self) -> str:
        return short_repr(self, "", self.headline())

    def _repr_html_(self) -> str:
        """Return the summary line and the first rows of the table, for notebooks."""
        return f"<p>{escape(repr(self))}</p>{self.table().to_html()}"


def write_json(document: object, path: Path, *, overwrite: bool = False) -> None:
    """Write a document, or its JSON as ``bytes``, atomically; ``-`` is standard output. Raises
    ``OutputError`` if the file exists, without ``overwrite``.
    """
    content = document if isinstance(document, bytes) else document_bytes(document)

    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    put(path, fill, overwrite=overwrite)


def is_standard_output(path: Path | None) -> bool:
    """Return True if a path names standard output: ``-``, ``/dev/stdout``, ``/dev/fd/1`` or its ``/proc``
    path.
    """
    return str(path) in _STANDARD_OUTPUT


def is_stream(path: Path) -> bool:
    """Return True if a path is standard output, a pipe or a device, so that writing to it replaces no
    file.
    """
    if is_standard_output(path):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_document(path: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` if writing the document to ``path`` would fail. Called before any work is
    done.
    """
    if is_standard_output(path):
        if _binary_stream(sys.stdout) is None:
            raise _output_closed()
        return
    if is_stream(path):
        if not os.access(path, os.W_OK):
            raise OutputError("is not writable", path=str(path), hint="choose another destination")
        return
    if path.is_dir():
        raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
    check_destination(path, overwrite=overwrite)


def write_table(table: Table, path: Path, *, overwrite: bool = False) -> None:
    """Write a table atomically, as Parquet if the name ends in ``.parquet``, else as CSV; ``-`` is standard
    output. Raises ``OutputError`` if the file exists, without ``overwrite``.
    """

    def fill(temporary: Path) -> None:
        write_tables([table], temporary, is_parquet=path.suffix == ".parquet")

    put(path, fill, overwrite=overwrite)


def put(path: Path, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Write a document with the function ``fill``. A file is written atomically; it replaces an existing file
    only if ``overwrite`` is true. Standard output, a pipe or a device receives the document only after it is
    complete. Raises ``OutputError``.
    """
    if not is_stream(path):
        write_atomically(path, fill, overwrite=overwrite, directory=False)
        return
    with ExitStack() as stack:
        if is_standard_output(path):
            fill(stack.enter_context(spooled_output(stack)))
            return
        spool = _scratch_folder(stack) / "document"
        fill(spool)
        try:
            with spool.open("rb") as content, path.open("wb") as stream:
                shutil.copyfileobj(content, stream)
        except BrokenPipeError:
            return  # the reader closed the pipe early
        except OSError as error:
            raise OutputError(
                f"cannot be written: {error.strerror or error}", path=str(path), hint=_DISK_FULL_HINT
            ) from error


def check_streams(source: str, destination: str) -> None:
    """Raise ``UsageError`` or ``OutputError`` for a closed standard stream, before any work."""
    if source == STANDARD_STREAM and _binary_stream(sys.stdin) is None:
        raise UsageError("standard input is closed", path=source, hint=_INPUT_HINT)
    if destination == STANDARD_STREAM and _binary_stream(sys.stdout) is None:
        raise _output_closed()


def spooled_input(stack: ExitStack, check: Callable[[Path], object]) -> Path:
    """Copy standard input to a temporary file, which is deleted when ``stack`` closes. If the stream is
    longer than 16 MiB, ``check`` is called with the first 16 MiB and may raise an error for the format, so
    that an endless stream of an unknown format is refused early.

    Raises ``OutputError`` if the disk is full, ``UsageError`` if the stream is closed or cannot be read,
    ``FormatError`` if it is longer than the limit of inputs, and the errors of ``check``.
    """
    stream = _binary_stream(sys.stdin)
    if stream is None:
        raise UsageError("standard input is closed", path=STANDARD_STREAM, hint=_INPUT_HINT)
    spool = _scratch_folder(stack) / "stdin"
    limit = limits().input_bytes
    try:
        with spool.open("wb") as copy:
            copied = 0
            while chunk := stream.read(_CHUNK_BYTES):
                copy.write(chunk)
                copied += len(chunk)
                if copied > limit:
                    raise FormatError(
                        f"standard input is longer than {limit:,} bytes, the limit",
                        path=STANDARD_STREAM,
                        hint=f"if you trust it, raise the limit with {INPUT_BYTES_VARIABLE} or "
                        "`max_input_bytes`",
                    )
                if copied - len(chunk) < _HEAD_BYTES <= copied:
                    copy.flush()
                    check(spool)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise _disk_full(error, spool.parent) from error
        raise UsageError(
            f"standard input cannot be read: {error.strerror or error}",
            path=STANDARD_STREAM,
            hint=_INPUT_HINT,
        ) from error
    return spool


@contextmanager
def spooled_output(stack: ExitStack) -> Generator[Path]:
    """Yield a temporary file to write to, and copy it to standard output when the block ends. Raises
    ``OutputError``.
    """
    spool = _scratch_folder(stack) / "standard.output"
    try:
        with place_immediately():
            yield spool
    except OutputError as error:
        if error.path == str(spool):  # users do not know the temporary file
            error.path, error.hint = STANDARD_STREAM, _temporary_hint(spool.parent)
        raise
    stream = _binary_stream(sys.stdout)
    if stream is None:
        raise _output_closed()
    with spool.open("rb") as content:
        try:
            shutil.copyfileobj(content, stream)
            stream.flush()
        except BrokenPipeError:
            return  # the reader closed the pipe early
        except OSError as error:
            raise OutputError(
                f"standard output cannot be written: {error.strerror or error}",
                path=STANDARD_STREAM,
                hint=_DISK_FULL_HINT,
            ) from error


def _binary_stream(stream: object) -> BinaryIO | None:
    """Return the binary stream under a text stream; None if it was closed before the program started."""
    binary: BinaryIO | None = getattr(stream, "buffer", None)
    return binary


def _scratch_folder(stack: ExitStack) -> Path:
    """Return a new temporary folder, which is deleted when ``stack`` closes."""
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hespas-")))
    except OSError as error:
        raise _disk_full(error, Path(os.environ.get("TMPDIR", "/tmp"))) from error  # only named in the hint


def _disk_full(error: OSError, folder: Path) -> OutputError:
    return OutputError(
        f"no temporary file can be written: {error.strerror or error}",
        path=STANDARD_STREAM,
        hint=_temporary_hint(folder),
    )


def _temporary_hint(folder: Path) -> str:
    return f"free some space in {folder.parent}, or set TMPDIR to another folder"


def _output_closed() -> OutputError:
    return OutputError(
        "standard output is closed", path=STANDARD_STREAM, hint="name a file, or pipe it somewhere"
    )
