"""Reading of any input and writing of any output: format selection, options, atomic and sharded writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hespas._version import __version__
from hespas.api.arguments import checked
from hespas.converters import (
    Format,
    ReadOptions,
    Value,
    WriteOptions,
    find_format,
    format_for_output,
    is_recognised,
    note_unread_files,
    refuse_unused_options,
)
from hespas.converters.format import Cluster, OnlyClasses, Resume, Shard
from hespas.files.output import check_destination, write_atomically
from hespas.files.partial import OutputShare
from hespas.graph import Diagnostics, Profile, Workload, find_dtype
from hespas.graph.equality import content_key
from hespas.graph.errors import InvariantError, UnsupportedError, UsageError
from hespas.graph.passes import with_default_dtype
from hespas.graph.progress import Progress
from hespas.measurements.consistency import RecordingFacts, check_job, check_recording, facts_of

__all__ = [
    "WriteSharding",
    "as_workload",
    "check_once",
    "check_sharding",
    "check_version",
    "opened_program",
    "profiles_by_file",
    "read",
    "read_profiles",
    "with_capture",
    "write",
]


@checked()
def read(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
    workload: bool = False,
    capture: str | Path | Sequence[str | Path] | None = None,
) -> Value:
    """Read a file, or a folder with one file per rank. The format is detected unless ``format`` names it.

    If ``workload`` is true, a profile is converted to a workload: its device events, in their order and with
    their times. ``capture`` is one or more traces of graph captures that a trace of PyTorch's profiler
    replays, or folders of such traces.

    Raises ``FormatError`` for unreadable or malformed input, ``UnsupportedError`` for features that this
    version does not support, ``UsageError`` for an unknown format name.

    Examples:
        >>> hespas.read("samples/pipeline_2x2").num_ranks
        4
    """
    source = Path(path)
    chosen = find_format(source, format, workload=workload)
    if chosen.read is None:
        raise InvariantError(f"format {chosen.name} was chosen for reading and cannot read")
    settings = with_capture(options or ReadOptions(), capture)
    check_version(settings.version, chosen.read_versions, chosen.name, "`source_version`")
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    note_unread_files(source, chosen, diagnostics)
    dtype_name = settings.default_dtype
    dtype = find_dtype(dtype_name) if dtype_name else None
    if dtype_name and dtype is None:
        raise UsageError(
            f"unknown element type {dtype_name!r}", hint="write bf16, f16, f32, f8E4M3FN, i8, ..."
        )
    refuse_unused_options(settings, chosen, source)
    value = chosen.read(source, settings, diagnostics)
    if isinstance(value, Profile):
        check_recording(value, diagnostics, str(source))
    if workload:
        value = as_workload(value, diagnostics)
    if dtype is None or not isinstance(value, Workload):
        return value
    typed = [with_default_dtype(graph, dtype.code) for graph in value.classes]
    message = f"operations without an element type are assumed to compute in {dtype.name}, as requested"
    diagnostics.info("read.default-dtype", str(path), message, count=sum(count for _, count in typed))
    return replace(value, classes=tuple(graph for graph, _ in typed))


def with_capture(options: ReadOptions, capture: str | Path | Sequence[str | Path] | None) -> ReadOptions:
    """Return the read options with the given traces of CUDA graph captures; None keeps the traces in
    ``options``.
    """
    if capture is None:
        return options
    paths = [capture] if isinstance(capture, str | Path) else capture
    return replace(options, capture=tuple(map(Path, paths)))


def as_workload(value: Value, diagnostics: Diagnostics) -> Workload:
    """Return a workload: a workload unchanged, a profile converted (:mod:`hespas.converters.measured_ops`).

    Raises ``UnsupportedError`` for a profile without times of device events.
    """
    if isinstance(value, Workload):
        return value
    from hespas.converters.measured_ops.workload import measured_workload  # most commands read no profile

    return measured_workload(value, diagnostics)


def opened_program(
    source: str | Path | Value,
    format_name: str | None,
    options: ReadOptions | None,
    diagnostics: Diagnostics,
) -> tuple[str, Workload]:
    """Return the name and the workload of a command's source: a path, a workload or a profile. Profiles are
    converted by :func:`as_workload`.
    """
    if isinstance(source, Workload | Profile):
        return source.name, as_workload(source, diagnostics)
    value = read(source, format=format_name, options=options, diagnostics=diagnostics, workload=True)
    return str(source), as_workload(value, diagnostics)


@checked()
def read_profiles(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
) -> list[Profile]:
    """Read the measured profiles of a file, or of a folder with one per rank, in order of the ranks.

    A folder of PyTorch traces gives one profile per profiler trace, although :func:`read` reads it as one
    workload. Traces of graph captures in the folder are joined with the traces that replay them. Raises the
    errors of :func:`read`, and ``UsageError`` for a program.
    """
    found = profiles_by_file(path, format=format, options=options, diagnostics=diagnostics)
    return [profile for _, profile in found]


def check_once(paths: Sequence[Path]) -> None:
    """Raise ``UsageError`` for an input that is given twice, because its repeats would look like measurements
    without noise.
    """
    seen: set[tuple[int, int]] = set()
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # the reader reports it
            continue
        if (status.st_dev, status.st_ino) in seen:
            raise UsageError("is given twice", path=str(path), hint="give each recording once")
        seen.add((status.st_dev, status.st_ino))


def profiles_by_file(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
) -> list[tuple[Path, Profile]]:
    """Read the profiles of :func:`read_profiles`, each with its file."""
    source = Path(path)
    origin = find_format(source, format)
    files = [source]
    if source.is_dir():
        entries = sorted([*source.glob("*"), *source.glob("*/*")])
        rank_files = [entry for entry in entries if entry.is_file() and is_recognised(entry)]
        files = [file for file in rank_files if find_format(file, None).as_workload == origin.name] or files
    captures: dict[Path, tuple[Path, ...]] = {}
    if origin.name == "pytorch" and len(files) > 1:
        from hespas.converters.pytorch.folder import profiles_in

        captures_of = profiles_in(source, options or ReadOptions())
        captures = captures_of if any(captures_of.values()) else {}
    found: list[tuple[Path, Profile]] = []
    facts: list[RecordingFacts] = []
    for file in files:
        if captures and file not in captures:
            continue
        chosen = format if file == source else None
        own_captures = (*(options.capture if options else ()), *captures.get(file, ()))
        value = read(file, format=chosen, options=options, diagnostics=diagnostics, capture=own_captures)
        if not isinstance(value, Profile):
            raise UsageError(
                "expected a measured profile, and this is a program",
                path=str(file),
                hint="simulate the program, or give a trace of a run",
            )
        found.append((file, value))
        facts.append(facts_of(value, str(file)))
    if diagnostics is not None:
        check_job(facts, diagnostics, str(source))
    return sorted(found, key=lambda pair: int(pair[1].rank.min()) if len(pair[1]) else 0)


@checked()
def write(
    value: Value,
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    overwrite: bool = False,
    options: WriteOptions | None = None,
    diagnostics: Diagnostics | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Write a value atomically and return the number of bytes written. The suffix selects the format unless
    ``format`` names it.

    ``check`` is called with the path of the new files before they replace anything; if it raises, the
    destination stays unchanged. Raises ``OutputError`` if the destination exists (without ``overwrite``) or
    cannot be written, ``UnsupportedError`` if the format cannot express the value.

    Examples:
        >>> workload = hespas.read("samples/mlp.mlir")
        >>> hespas.write(workload, "mlp.json")  # bytes
        14365
    """
    destination = Path(path)
    chosen = format_for_output(destination, format, profile=isinstance(value, Profile))
    writer = chosen.write
    if writer is None:
        raise InvariantError(f"format {chosen.name} was chosen for writing and cannot write")
    settings = options or WriteOptions()
    check_sharding(settings, chosen)
    check_destination(destination, overwrite=overwrite or settings.shard is not None)
    if isinstance(value, Profile) and chosen.profiles and not len(value):
        raise UnsupportedError(
            f"the recording has no device events, and format {chosen.name!r} stores only device events",
            hint="record device activity too; hespas view SOURCE shows the contents",
        )
    check_version(settings.version, chosen.write_versions, chosen.name, "`target_version`")
    # a closing slash, an existing folder and a name without a suffix mean a folder
    is_folder = str(path).endswith("/") or destination.is_dir() or not destination.suffix
    settings = replace(
        settings, name=settings.name or destination.name, directory=settings.directory or is_folder
    )
    sink = diagnostics if diagnostics is not None else Diagnostics()
    key, share = _placement(value, chosen, settings)

    def fill(temporary: Path) -> None:
        writer(value, temporary, settings, sink)
        if check is not None:
            check(temporary)

    directory = chosen.writes_directory(value, settings)
    return write_atomically(destination, fill, overwrite=overwrite, directory=directory, key=key, share=share)


def check_version(version: str, versions: tuple[str, ...], name: str, option: str) -> None:
    """Raise ``UsageError`` for a version that a format does not have; the hint lists its versions."""
    if not version or version in versions:
        return
    hint = f"one of: {', '.join(versions)}" if versions else "leave it out: the format has one version"
    raise UsageError(f"{option} {version}: format {name!r} has no such version", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSharding:
    """Options for writing the files of a large job in parts: fields of
    :class:`hespas.converters.WriteOptions`.
    """

    only_classes: OnlyClasses = False
    shard: Shard = None
    resume: Resume = False
    cluster: Cluster = ""

    def options(
        self,
        ranks: range | None = None,
        version: str = "",
        jobs: int = 1,
        progress: Progress | None = None,
    ) -> WriteOptions:
        """Return all write options."""
        return WriteOptions(
            ranks=ranks,
            version=version,
            jobs=jobs,
            only_classes=self.only_classes,
            shard=self.shard,
            resume=self.resume,
            cluster=self.cluster,
            progress=progress,
        )


def check_sharding(options: WriteOptions, chosen: Format) -> None:
    """Raise ``UsageError`` for sharding options that a format does not support or that contradict each
    other.
    """
    set_options = {
        "only_classes": options.only_classes,
        "shard": options.shard is not None,
        "resume": options.resume,
        "cluster": bool(options.cluster),
    }
    given = [name for name, is_set in set_options.items() if is_set]
    if given and not chosen.in_parts:
        raise UsageError(
            f"`{given[0]}` requires a format with one file per rank, and {chosen.name!r} has none",
            hint="leave it out, or write chakra traces",
        )
    if options.only_classes and (options.shard or options.cluster or options.ranks is not None):
        raise UsageError(
            "`only_classes` writes one file per rank class for all ranks: it cannot be combined with "
            "`ranks`, `shard` or `cluster`",
            hint="leave the others out",
        )
    if options.shard is not None:
        number, shares = options.shard
        if not 1 <= number <= shares:
            raise UsageError(
                f"`shard={number}/{shares}`: shares are counted from 1 to {max(shares, 1)}",
                hint="write the first of four shares as 1/4, and the last as 4/4",
            )


class _Placement(NamedTuple):
    """Options for placing the files of a job in its folder. ``key`` identifies files that an interrupted run
    has finished, which are reused (empty: none). ``share`` is the part of the job to write (None: all).
    """

    key: str = ""
    share: OutputShare | None = None


def _placement(value: Value, chosen: Format, options: WriteOptions) -> _Placement:
    """Return the placement of the files. Raises ``UsageError`` for more shares than ranks. O(bytes of the
    value).
    """
    if not isinstance(value, Workload) or not (options.resume or options.shard):
        return _Placement()
    from hespas.converters.chakra.writer import chosen_ranks, rank_file_name, share_of

    ranks = chosen_ranks(value, options)
    if not chosen.writes_directory(value, options):
        if options.shard is None:
            return _Placement()
        raise UsageError(
            "`shard` divides a job of several ranks, and this output is the file of one rank",
            path=options.name,
            hint="leave `shard` out",
        )
    name = rank_file_name(value, options)
    settings = (name, options.name, options.version, options.only_classes)
    key = content_key(__version__, chosen.name, value, list(ranks), *settings)
    resume_key = key if options.resume else ""
    if options.shard is None:
        return _Placement(resume_key)
    number, shares = options.shard
    if shares > len(ranks):
        raise UsageError(
            f"{shares:,} shares of {len(ranks):,} ranks: some would be empty",
            path=options.name,
            hint=f"use `shard` with at most {len(ranks):,} shares",
        )
    ranks_of_shares = [ranks[share_of(len(ranks), index, shares)] for index in range(1, shares + 1)]
    spans = tuple((int(share_ranks[0]), int(share_ranks[-1])) for share_ranks in ranks_of_shares)
    return _Placement(resume_key, OutputShare(number, spans, name, key))
