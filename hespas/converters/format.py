"""Definition of a file format: name, suffixes, and functions to recognise, read, write and copy files.

A new format is one module and one row in :mod:`hespas.converters.registry`. Formats of other packages
register through the entry point group ``hespas.formats``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from hespas.files.limits import limits, reading_budget, refuse_ranks
from hespas.graph import WHOLE_JOB, Diagnostics, Profile, Workload
from hespas.graph.errors import UsageError
from hespas.graph.hints import INPUT, OUTPUT, Option, PositiveInt
from hespas.graph.plugins import attribute_of
from hespas.graph.progress import Progress

__all__ = [
    "HEAD_BYTES",
    "Cluster",
    "CommGroups",
    "DefaultDtype",
    "Dims",
    "DimsOrNone",
    "Format",
    "Head",
    "Jobs",
    "NumDevices",
    "NumReplicas",
    "OnlyClasses",
    "ReadOptions",
    "Recover",
    "Resume",
    "RunTimeUnit",
    "Shard",
    "SourceFormat",
    "UnitOfRunTimes",
    "Value",
    "WriteOptions",
    "lazily",
    "warn_of_whole_job",
]

Value = Workload | Profile
"""Result of a reader and input of a writer."""

HEAD_BYTES = 65_536
_JSON = re.compile(rb"\A(?:\xef\xbb\xbf)?\s*(?:\{\s*|\[\s*\{\s*)" + rb'"[\w .$@/-]{1,100}"\s*:')
"""Object, or array of objects, with a key: no other kind of bytes starts like this."""


def lazily(target: str) -> Callable[..., Any]:
    """Return a function that imports ``module:name`` on its first call."""

    def call(*arguments: object) -> Any:
        return attribute_of(target)(*arguments)

    return call


@dataclass(frozen=True, slots=True)
class Head:
    """Start of an input, from which its format is recognised.

    ``data`` is the first 64 KiB, decompressed if gzipped (``""`` for a directory). ``suffixes`` are the
    suffixes of the file name without ``.gz`` (``(".mlir",)``). ``names`` are the file names in a directory,
    sorted, at most 1,000.
    """

    path: Path
    data: bytes
    suffixes: tuple[str, ...]
    is_directory: bool = False
    names: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        """True for the beginning of a JSON document that is an object, or a list of objects."""
        return _JSON.match(self.data) is not None


RunTimeUnit = Literal["", "us", "ns"]

_MAX_EXTENT_DIGITS = 18
_MAX_SHARD_DIGITS = 9


def _dims_of(texts: Sequence[str]) -> dict[str, int]:
    """Parse the option ``--dim``, extents of symbolic dimensions: ``b=128``."""
    dims: dict[str, int] = {}
    for text in texts:
        name, _, extent = text.partition("=")
        is_extent = extent.isascii() and extent.isdigit() and len(extent) <= _MAX_EXTENT_DIGITS
        if not name.strip() or not is_extent:
            raise UsageError(f"`dims`: {text!r}: expected NAME=N, such as b=128 or arg0.1=128")
        dims[name.strip()] = int(extent)
    return dims


def _shard_of(text: str) -> tuple[int, int]:
    """Parse the option ``--shard``: ``2/8`` is the second of eight parts of the ranks."""
    index, slash, count = text.partition("/")
    is_valid = slash and all(
        part.isascii() and part.isdigit() and len(part) <= _MAX_SHARD_DIGITS for part in (index, count)
    )
    if not is_valid:
        raise UsageError(
            f"invalid `shard` {text!r}: expected I/N", hint="give `shard=1/4` for the first of four"
        )
    return int(index), int(count)


SourceFormat = Annotated[
    str | None,
    Option(
        "Read the input as this format (default: detected).",
        flag="from",
        metavar="FORMAT",
        panel=INPUT,
        completes="formats",
    ),
]
NumDevices = Annotated[
    PositiveInt | None,
    Option("Set the number of ranks, for inputs that do not state it.", metavar="N", panel=INPUT),
]
NumReplicas = Annotated[
    PositiveInt | None,
    Option(
        "Set how many of `num_devices` are replicas, for inputs that do not state it.",
        metavar="N",
        panel=INPUT,
    ),
]
Recover = Annotated[
    bool, Option("Recover the intact part of a truncated or damaged input.", flag="recover", panel=INPUT)
]
DefaultDtype = Annotated[
    str,
    Option("Set the element type of operations that state none: bf16, f32, ...", metavar="TYPE", panel=INPUT),
]
CommGroups = Annotated[
    Path | None,
    Option(
        "Read process groups of a trace from FILE (default: comm_group.json in its folder).",
        metavar="FILE",
        panel=INPUT,
    ),
]
UnitOfRunTimes = Annotated[
    RunTimeUnit,
    Option("Set the unit of run times in traces of old schemas (default: us).", metavar="us|ns", panel=INPUT),
]
_DIMS = Option(
    "Set a symbolic dimension of a StableHLO program, by name or position (arg0.1=128); repeatable.",
    flag="dim",
    metavar="NAME=N",
    panel=INPUT,
    repeats=True,
    parse=_dims_of,
)
Dims = Annotated[Mapping[str, int], _DIMS]
DimsOrNone = Annotated[Mapping[str, int] | None, _DIMS]
Jobs = Annotated[PositiveInt, Option("Write rank files with N threads.", metavar="N", panel=OUTPUT)]
OnlyClasses = Annotated[
    bool,
    Option(
        "Write one trace per distinct rank, and rank_map.json (rank to trace).",
        flag="only-classes",
        panel=OUTPUT,
    ),
]
Shard = Annotated[
    tuple[int, int] | None,
    Option(
        "Write only share I (from 1) of N shares of the ranks, for batch jobs.",
        metavar="I/N",
        panel=OUTPUT,
        parse=_shard_of,
    ),
]
Resume = Annotated[
    bool,
    Option(
        "Continue an interrupted run of the same command; keep written files if interrupted again.",
        flag="resume",
        panel=OUTPUT,
    ),
]
Cluster = Annotated[
    str,
    Option(
        "Write with the workers of this Dask scheduler (tcp://...), which must share the folder of DST.",
        metavar="ADDRESS",
        panel=OUTPUT,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading. ``lenient`` readers record structural faults as diagnostics and continue if
    possible.

    ``num_devices`` sets the number of ranks if the input does not state it (None: as the input states).
    ``num_replicas`` is the number of replicas into which these ranks are divided; the ranks of a replica are
    its partitions. ``version`` is the version of the format if the input does not show it (empty: detect; one
    of ``Format.read_versions``). ``recover`` keeps the complete records before a truncation and other
    repairable data, and reports their number. ``comm_groups`` is the file of process groups (None: the file
    next to the input). ``default_dtype`` is the element type of computations without a stated type (empty:
    unknown). ``run_time_unit`` is the unit of times in old schemas that do not define one (empty: the
    reader's default). ``dims`` are the extents of a program's symbolic dimensions, by name or by position
    (``arg0.1``). ``capture`` are traces in which CUDA graphs were captured, or folders of such traces; they
    describe the graphs that a trace of PyTorch's profiler replays. ``locations`` includes source locations,
    which takes longer. ``max_bytes`` bounds the decompressed size. ``progress(done, total)`` is called from
    time to time on long work.
    """

    lenient: bool = False
    num_devices: NumDevices = None
    num_replicas: NumReplicas = None
    version: str = ""
    recover: Recover = False
    comm_groups: CommGroups = None
    default_dtype: DefaultDtype = ""
    run_time_unit: UnitOfRunTimes = ""
    dims: Dims = field(default_factory=dict[str, int])
    capture: tuple[Path, ...] = ()
    locations: bool = True
    max_bytes: PositiveInt = field(default_factory=lambda: limits().input_bytes)
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options for writing. ``ranks`` selects the ranks to write (None: all, in order).

    ``name`` is the first part of file names inside a directory (empty: the value's name). ``directory`` is
    True if the user named a directory. ``version`` is the version of the format to write (empty: the newest;
    one of ``Format.write_versions``). ``jobs`` is the maximum number of threads. The destination of a writer
    never exists: the caller passes a temporary name and renames it when the writer is done.

    The other options apply to formats with ``in_parts``. ``only_classes`` writes one file per rank class,
    with a map of all ranks. ``shard`` is (i, n): the ranks are divided into n contiguous shares, and share i,
    from 1, is written. ``resume`` continues in a folder of an interrupted run: the destination may exist, and
    complete files in it stay. ``cluster`` is the address of a dask scheduler whose workers write the files.
    """

    ranks: range | None = None
    name: str = ""
    directory: bool = False
    version: str = ""
    jobs: Jobs = 2
    only_classes: OnlyClasses = False
    shard: Shard = None
    resume: Resume = False
    cluster: Cluster = ""
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """File format, with its reader and writer. ``sniff`` scores the content of a file from 0 (not this
    format) to 100 (certain); None if the content cannot show the format.

    A ``never_json`` format is skipped for JSON documents, so that its code need not be loaded.

    ``read`` raises ``FormatError`` (malformed), ``UnsupportedError`` or ``MissingExtraError``. ``write`` gets
    a path that does not exist and creates a file, or a directory if ``writes_directory(value, options)``.
    ``copy`` makes an intact file of a damaged file of the same format without other changes. ``profiles`` is
    True if the format holds a ``Profile`` and not a ``Workload``. ``timed`` is False if operations of the
    format have no durations, so that none are estimated for it. ``in_parts`` is True if the writer supports
    the options of :class:`WriteOptions` for that. A ``flat`` format has no loops, branches or zero-cost
    operations: callers unroll and fold before they write. ``read_versions`` and ``write_versions`` list the
    valid versions, oldest first; empty for a format with one version.

    ``losses`` declares the data that a written file does not hold. It maps the code of a finding to columns
    (``contractions`` means all columns of that table, ``*`` any). The key ``""`` has the columns that the
    format never holds, without a finding. ``hespas-validate roundtrip`` checks writers against it. ``extra``
    names the optional dependencies of the functions. ``as_workload`` names the format that reads the same
    file as a workload, if ``read`` returns a profile. ``empty_code`` is the rule of ``hespas-validate check``
    that an empty file breaks.
    ``reads_options`` are the reading options of some formats only that this format uses (``dims``,
    ``capture``, ``comm_groups``, ``run_time_unit``); the others are refused.
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
    reads_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Wrap ``read`` in the limits of CPU time and memory that apply to every input."""
        if self.read is not None and not isinstance(self.read, _Budgeted):
            object.__setattr__(self, "read", _Budgeted(self.read))


@dataclass(frozen=True, slots=True)
class _Budgeted:
    """Reader of a format with limits on its CPU time and memory. The limits grow with the size of the input,
    see :mod:`hespas.files.limits`.
    """

    reader: Callable[[Path, ReadOptions, Diagnostics], Value]

    def __call__(self, path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
        with reading_budget(path):
            value = self.reader(path, options, diagnostics)
        if isinstance(value, Workload):
            refuse_ranks(value.num_ranks, str(path))
        return value


def warn_of_whole_job(workload: Workload, form: str, path: Path, diagnostics: Diagnostics) -> Workload:
    """Warn if a workload comes from a sharded program that was not partitioned, and return the workload.

    The reader of the program gave the same warning, but users of a converted file have not seen it. ``form``
    is the name of the format of the converted file.
    """
    parts = workload.metadata.get(WHOLE_JOB, "")
    if parts:
        diagnostics.warning(
            f"{form}.global-program",
            workload.name,
            f"the program of the workload is sharded over {parts[:20]} partitions but not partitioned: "
            "shapes and costs cover the whole job and are counted on each device",
            path=str(path),
        )
    return workload
