"""Files of many ranks in one folder, patched and written by several threads; equal files are written once.

Ranks with byte-identical traces share one file (hard links) if the file system supports links, and get copies
otherwise. In a folder left by an interrupted run, complete files are not written again.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from hespas.converters.chakra.expansion import TraceTemplate
from hespas.converters.chakra.forms import TraceForm
from hespas.converters.chakra.job_traces import RankBatch, RankTraces, TraceAccount
from hespas.converters.chakra.wire import Bytes, Longs
from hespas.files.partial import file_names
from hespas.files.streams import PackedInput, damage_errors, open_input, open_output
from hespas.graph.errors import FormatError, InvariantError, OutputError

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["RankFolder", "write_ranks"]

_RANKS_AT_ONCE, _BYTES_AT_ONCE = 64, 16 << 20
"""Ranks, and bytes, that a thread processes together."""
_WAITING_PER_THREAD = 2
_NO_LINK = frozenset({errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSYS})
_PART = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFolder:
    """Folder of rank files ``NAME.{rank}SUFFIX``. ``resumes`` states that the folder may contain complete
    files of an interrupted run, and that other processes may write the same files. Each file is then written
    under a temporary name and renamed. With ``syncs`` each file is flushed to disk.
    """

    path: Path
    name: str
    form: TraceForm
    packed: bool
    resumes: bool = False
    syncs: bool = False

    def file(self, rank: int) -> str:
        """Return the path of a rank's file."""
        return f"{self.path}/{self.name}.{rank}{self.form.suffix}{'.gz' if self.packed else ''}"

    def put(self, rank: int, data: Bytes) -> None:
        """Write one rank's file unless it exists."""
        self.put_pieces(rank, lambda: [data])

    def put_pieces(self, rank: int, pieces: Callable[[], Iterable[Bytes]]) -> None:
        """Write one rank's file from the pieces of its binary form unless it exists; ``pieces`` may be called
        again.
        """
        path = self.file(rank)
        if not self.resumes:
            self._write(path, self.form.content(pieces()))
        elif not self._holds(path, self.form.content(pieces())):
            temporary = self._part(rank)
            self._write(temporary, self.form.content(pieces()))
            Path(temporary).replace(path)

    def link(self, first: int, ranks: Iterable[int]) -> None:
        """Make the file of rank ``first`` available under the names of all ``ranks``, whose traces are equal,
        by hard links. Copy the file if the file system allows no more links.
        """
        source = self.file(first)
        for rank in ranks:
            path = self.file(rank)
            if self.resumes:
                with suppress(OSError):
                    if Path(source).samefile(path):
                        continue
            target = self._part(rank) if self.resumes else path
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                shutil.copyfile(source, target)
                source = path if error.errno == errno.EMLINK else source
            if self.resumes:
                Path(target).replace(path)

    def remove_others(self, names: Set[str], ranks: Longs) -> None:
        """Remove everything from the folder except the files of ``ranks`` and the files called ``names``.
        This includes partial files of a killed writer. Raise :class:`InvariantError` if a rank has no file.
        """
        wanted = {Path(self.file(rank)).name for rank in ranks.tolist()}
        existing = set(file_names(self.path))
        if not wanted <= existing:
            raise InvariantError(f"{len(wanted - existing)} files of ranks were not written")
        for name in existing - wanted - names:
            (self.path / name).unlink(missing_ok=True)

    def _part(self, rank: int) -> str:
        """Return the temporary name under which the file of a rank is written."""
        return f"{self.path}/.{rank}-{os.getpid():x}-{os.urandom(4).hex()}{_PART}"

    def _write(self, path: str, pieces: Iterable[Bytes]) -> None:
        if self.packed:
            with open_output(Path(path), packed=True) as stream:
                for piece in pieces:
                    stream.write(piece.data)
        else:
            # A raw descriptor avoids stream buffers: a piece is usually the whole file.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                for piece in pieces:
                    rest = piece.data
                    while rest:
                        rest = rest[os.write(handle, rest) :]
            finally:
                os.close(handle)
        if self.syncs:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _holds(self, path: str, pieces: Iterable[Bytes]) -> bool:
        """Return True if a file has exactly these bytes."""
        try:
            with open_input(Path(path)) as raw:
                stream = PackedInput(raw, Path(path)) if self.packed else raw
                same = all(_read(stream, len(piece)) == piece.tobytes() for piece in pieces)
                return same and not stream.read(1)
        except FormatError:
            return False
        except damage_errors():
            return False


def _read(stream: BinaryIO | PackedInput, size: int) -> bytes:
    """Read ``size`` bytes, fewer at the end of the stream."""
    parts: list[bytes] = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_ranks(
    job: RankTraces,
    ranks: Longs,
    folder: RankFolder,
    *,
    jobs: int = 1,
    progress: Callable[[int], None] | None = None,
) -> TraceAccount:
    """Write the files of ascending ``ranks`` with ``jobs`` threads. ``progress`` is called with the number of
    finished files.

    One template is encoded per class, pattern of idle nodes and encoded widths. For each rank, the template
    is patched and written. Memory: the templates of one class, and some files per thread. Raises
    :class:`OutputError` if the system refuses to write.
    """
    account = TraceAccount()
    equal = _EqualTraces()
    try:
        with _WriterThreads(jobs, progress) as threads:
            for batch in job.batches(ranks):
                for write in _tasks(batch, folder, equal):
                    threads.run(write)
                account.add(batch.runs, len(batch.ranks))
        for first, others in equal.links.items():
            folder.link(first, others)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            path=str(folder.path),
            hint="free some space or choose another destination",
        ) from error
    if progress and equal.links:
        progress(len(ranks))
    return account


_Values = tuple[bytes, tuple[int, ...], bytes]


@dataclass(slots=True, eq=False)
class _EqualTraces:
    """Ranks whose trace equals the trace of an earlier rank, so that they share one file. ``links`` maps that
    earlier rank to these ranks.
    """

    links: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _of_class: int = -1
    _first: dict[_Values, int] = field(default_factory=dict["_Values", int])

    def first_of_each(self, batch: RankBatch, template: TraceTemplate, spelled: Bytes) -> Longs:
        """Return the rows of ``spelled`` (one per rank of the batch) whose trace no earlier rank of the class
        has. Add the ranks of all other rows to ``links``.
        """
        if batch.runs.of_class != self._of_class:
            self._of_class = batch.runs.of_class
            self._first.clear()
        rows = template.distinct(spelled)
        fresh: list[int] = []
        for row, rank in enumerate(batch.ranks.tolist()):
            first = self._first.setdefault((batch.runs.pattern, batch.widths, rows[row].tobytes()), rank)
            if first == rank:
                fresh.append(row)
            else:
                self.links.setdefault(first, []).append(rank)
        return np.array(fresh, np.int64)


_Write = Callable[[], int]
"""Function that writes some files and returns their number."""


def _tasks(batch: RankBatch, folder: RankFolder, equal: _EqualTraces) -> Iterator[_Write]:
    """Yield tasks that write the files of a batch. Each task is executed by one thread and writes several
    files. Traces that cannot be made from a template are encoded and written by this function.
    """
    writer, values = batch.runs.writer, batch.values
    template = None
    if len(batch.ranks) > 1:
        template = writer.template(values.variables(0), batch.widths)
    if template is None:
        for row, rank in enumerate(batch.ranks.tolist()):
            variables = values.variables(row)
            folder.put_pieces(rank, partial(writer.pieces, variables))
            yield lambda: 1  # the file has been encoded and written here, not by a thread
        return
    spelled = values.spelled(batch.widths)
    rows = equal.first_of_each(batch, template, spelled)
    step = max(1, min(_RANKS_AT_ONCE, _BYTES_AT_ONCE // max(1, len(template.data))))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        yield partial(_write_patched, template, spelled[some], batch.ranks[some].tolist(), folder)


def _write_patched(template: TraceTemplate, spelled: Bytes, ranks: list[int], folder: RankFolder) -> int:
    """Write the files of some ranks: insert the encoded variables of each rank into a template."""
    for rank, data in zip(ranks, template.patched(spelled), strict=True):
        folder.put(rank, data)
    return len(ranks)


class _WriterThreads:
    """Executor of write tasks, in ``jobs`` threads or without threads. It reports the number of finished
    files.
    """

    def __init__(self, jobs: int, progress: Callable[[int], None] | None) -> None:
        self._files, self._progress = 0, progress
        self._waiting: deque[Future[int]] = deque()
        self._limit = jobs * _WAITING_PER_THREAD
        self._pool: ThreadPoolExecutor | None = None
        if jobs > 1:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(jobs)

    def run(self, write: _Write) -> None:
        """Execute a task now, or as soon as a thread is free."""
        if self._pool is None:
            self._done(write())
            return
        self._waiting.append(self._pool.submit(write))
        if len(self._waiting) > self._limit:
            self._done(self._waiting.popleft().result())

    def _done(self, files: int) -> None:
        self._files += files
        if self._progress:
            self._progress(self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                self._done(future.result())
