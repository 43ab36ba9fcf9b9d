"""What a format is: a name, suffixes, and up to three functions. Adding a format is one module and one row.

The row goes into :mod:`hespas.converters.registry`. Formats of other packages register through the entry
point group ``hespas.formats``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hespas.files.budget import reading_budget, refuse_ranks
from hespas.files.streams import limits
from hespas.graph import WHOLE_JOB, Diagnostics, Profile, Workload
from hespas.graph.hints import PositiveInt
from hespas.graph.plugins import attribute_of

__all__ = [
    "HEAD_BYTES",
    "Format",
    "Head",
    "ReadOptions",
    "RunTimeUnit",
    "Value",
    "WriteOptions",
    "assuming",
    "lazily",
    "warn_of_whole_job",
]

Value = Workload | Profile
"""What a reader makes and a writer takes."""

HEAD_BYTES = 65_536
_JSON = re.compile(rb"\A(?:\xef\xbb\xbf)?\s*(?:\{\s*|\[\s*\{\s*)" + rb'"[\w .$@/-]{1,100}"\s*:')
"""An object, or an array of objects, with a key: no bytes of another kind begin so."""


def lazily(target: str) -> Callable[..., Any]:
    """The function that ``module:name`` names; its module is imported when it is called."""

    def call(*arguments: object) -> Any:
        return attribute_of(target)(*arguments)

    return call


@dataclass(frozen=True, slots=True)
class Head:
    """The start of an input, enough to tell its format.

    ``data`` is the first 64 KiB after transparent gunzip (``""`` for a directory); ``suffixes`` are those of
    the name without ``.gz`` (``(".mlir",)``); ``names`` are a directory's file names, sorted, at most 1,000.
    """

    path: Path
    data: bytes
    suffixes: tuple[str, ...]
    is_directory: bool = False
    names: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        """Whether this is surely a JSON document with objects."""
        return _JSON.match(self.data) is not None


RunTimeUnit = Literal["", "us", "ns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assumptions:
    """What inputs do not say themselves; see :class:`ReadOptions`."""

    default_dtype: str = ""
    comm_groups: Path | None = None
    run_time_unit: RunTimeUnit = ""
    dims: Mapping[str, int] = field(default_factory=dict[str, int])


_NOTHING = _Assumptions()
_ASSUMED: ContextVar[_Assumptions] = ContextVar("assumed", default=_NOTHING)


@contextmanager
def assuming(
    *,
    default_dtype: str | None = None,
    comm_groups: Path | None = None,
    run_time_unit: RunTimeUnit | None = None,
    dims: Mapping[str, int] | None = None,
) -> Generator[None]:
    """Make these the defaults of :class:`ReadOptions` within the block; None leaves one as it was."""
    before = _ASSUMED.get()
    token = _ASSUMED.set(
        _Assumptions(
            default_dtype=before.default_dtype if default_dtype is None else default_dtype,
            comm_groups=comm_groups or before.comm_groups,
            run_time_unit=before.run_time_unit if run_time_unit is None else run_time_unit,
            dims=before.dims if dims is None else dims,
        )
    )
    try:
        yield
    finally:
        _ASSUMED.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read. ``lenient`` readers record structural faults as diagnostics and go on where they can.

    ``num_devices`` states the number of ranks where the input does not (None: as the input says), and
    ``num_replicas`` how many of them are replicas, the others being partitions of each.
    ``version`` names the version of the format where the input cannot tell (empty: as it tells itself; one of
    ``Format.read_versions``). ``recover`` keeps the whole records before a cut, and what else can be
    repaired, and reports how many.
    ``comm_groups`` is the file that lists the process groups (None: the one beside the input).
    ``default_dtype`` is the element type of computations that state none (empty: it stays unknown).
    ``run_time_unit`` is that of times for which an old schema names none (empty: as the reader takes them).
    ``dims`` are the extents of a program's symbolic dimensions, by name or by place (``arg0.1``).
    ``capture`` are traces of the capture of the graphs that a trace of PyTorch's profiler replays, or folders
    of such.
    ``locations`` keeps source locations, at a cost. ``max_bytes`` bounds the decompressed size.
    ``progress(done, total)`` is called now and then on long work.
    """

    lenient: bool = False
    num_devices: PositiveInt | None = None
    num_replicas: PositiveInt | None = None
    version: str = ""
    recover: bool = False
    comm_groups: Path | None = field(default_factory=lambda: _ASSUMED.get().comm_groups)
    default_dtype: str = field(default_factory=lambda: _ASSUMED.get().default_dtype)
    run_time_unit: RunTimeUnit = field(default_factory=lambda: _ASSUMED.get().run_time_unit)
    dims: Mapping[str, int] = field(default_factory=lambda: _ASSUMED.get().dims)
    capture: tuple[Path, ...] = ()
    locations: bool = True
    max_bytes: PositiveInt = field(default_factory=lambda: limits().input_bytes)
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How to write. ``ranks`` selects which ranks to write (None: all, in order).

    ``name`` is the first part of file names inside a directory (empty: the value's name). ``directory`` says
    that the user named a directory. ``version`` is the version of the format to write (empty: the newest; one
    of ``Format.write_versions``). ``jobs`` bounds threads. The destination given to a writer never
    exists: the caller passes a temporary name and renames it when the writer is done.

    The others are of formats that write ``in_parts``. ``only_classes`` writes one file per class of ranks,
    with a map of all ranks. ``shard`` is (i, n): the i-th, from 1, of n contiguous shares of the ranks.
    ``resume`` goes on in a folder that an interrupted run has left: the destination may exist, and what is
    whole in it stays. ``cluster`` is the address of a dask scheduler whose workers write the files.
    """

    ranks: range | None = None
    name: str = ""
    directory: bool = False
    version: str = ""
    jobs: PositiveInt = 1
    only_classes: bool = False
    shard: tuple[int, int] | None = None
    resume: bool = False
    cluster: str = ""
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. ``sniff`` scores 0 (no) .. 100 (certain) by content; None where content cannot tell.
    One that is ``never_json`` is not asked about documents of JSON, so that its code need not be loaded.

    ``read`` raises ``FormatError`` (malformed), ``UnsupportedError`` or ``MissingExtraError``. ``write`` gets
    a path that does not exist and creates a file, or a directory where ``writes_directory(value, options)``.
    ``copy`` makes a clean file of a damaged one of the same format, in which nothing else is changed.
    ``profiles`` says that what is written is a ``Profile`` and not a ``Workload``.
    In a format that is not ``timed`` operations have no durations, so that nobody estimates them for it.
    One that writes ``in_parts`` takes the options of :class:`WriteOptions` for that.
    A ``flat`` format knows no loops, branches or free operations: callers unroll and fold before they write.
    ``read_versions`` and ``write_versions`` list what can be named as version, oldest first; empty where a
    format has one. ``losses`` declares what a written file does not keep: a finding's code -> the columns it
    speaks of (``contractions`` stands for all columns of that table, ``*`` for any); under ``""`` stands what
    the format never holds, without a finding. ``hespas-validate roundtrip`` holds writers to it. ``extra``
    names the optional dependencies its functions need. ``as_workload`` names the format that makes a workload
    of such a file, where ``read`` gives a profile. ``empty_code`` is the rule of
    ``hespas-validate check`` that an empty file breaks.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    specification: str
    sniff: Callable[[Head], int] | None = None
    read: Callable[[Path, ReadOptions, Diagnostics], Value] | None = None
    write: Callable[[Value, Path, WriteOptions, Diagnostics], None] | None = None
    copy: Callable[[Path, Path, ReadOptions, WriteOptions, Diagnostics], None] | None = None
    writes_directory: Callable[[Value, WriteOptions], bool] = field(default=lambda value, options: False)
    never_json: bool = False
    profiles: bool = False
    flat: bool = False
    in_parts: bool = False
    timed: bool = True
    read_versions: tuple[str, ...] = ()
    write_versions: tuple[str, ...] = ()
    losses: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    extra: str = ""
    as_workload: str = ""
    empty_code: str = ""

    def __post_init__(self) -> None:
        """Give the reader its budget."""
        if self.read is not None and not isinstance(self.read, _Budgeted):
            object.__setattr__(self, "read", _Budgeted(self.read))


@dataclass(frozen=True, slots=True)
class _Budgeted:
    """A reader with the budget of every input: see :mod:`hespas.files.budget`."""

    reader: Callable[[Path, ReadOptions, Diagnostics], Value]

    def __call__(self, path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
        with reading_budget(path):
            value = self.reader(path, options, diagnostics)
        if isinstance(value, Workload):
            refuse_ranks(value.num_ranks, str(path))
        return value


def warn_of_whole_job(workload: Workload, form: str, path: Path, diagnostics: Diagnostics) -> Workload:
    """The workload, with the warning of its first reader again: who reads it here has not seen that.
    ``form`` is what it is now.
    """
    parts = workload.metadata.get(WHOLE_JOB, "")
    if parts:
        diagnostics.warning(
            f"{form}.global-program",
            workload.name,
            f"it was made of a program that is sharded over {parts[:20]} partitions but not partitioned: "
            "shapes and costs are those of the whole job, counted on each device",
            path=str(path),
        )
    return workload
