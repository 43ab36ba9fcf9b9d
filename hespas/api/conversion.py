"""Conversion between formats: read, rescale or partition, lower, write, and account for the differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hespas.api.arguments import (
    Captures,
    ChosenEstimator,
    ChosenGranularity,
    MissingPolicy,
    checked,
    hardware_option,
)
from hespas.api.conversion_account import AccountedWrite, EventAccount
from hespas.api.documents import (
    STANDARD_STREAM,
    Document,
    Result,
    check_streams,
    findings,
    spooled_input,
)
from hespas.api.io import (
    WriteSharding,
    as_workload,
    check_sharding,
    check_version,
    read,
    with_capture,
)
from hespas.api.lowering import (
    STEP_ESTIMATOR,
    ConversionAccount,
    Lowering,
    MergedOps,
    rank_totals,
    step_estimator,
)
from hespas.api.secrecy import (
    ObfuscationKey,
    ObfuscationLevel,
    ReportsVisible,
    RevealingKey,
    Secrecy,
)
from hespas.converters import (
    Format,
    ReadOptions,
    Value,
    WriteOptions,
    find_format,
    format_for_output,
    format_names,
    is_flat,
    load_format,
)
from hespas.converters.format import (
    CommGroups,
    DefaultDtype,
    DimsOrNone,
    Jobs,
    NumDevices,
    NumReplicas,
    Recover,
    SourceFormat,
    UnitOfRunTimes,
)
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.files.streams import read_bytes
from hespas.generators.obfuscate import VisibleFact
from hespas.graph import Diagnostics, Profile, Renamed, Workload
from hespas.graph.deprecation import renamed_arguments
from hespas.graph.errors import (
    FormatError,
    HespasError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
)
from hespas.graph.hints import INPUT, OUTPUT, Option, OptionsOf
from hespas.graph.progress import Progress
from hespas.graph.quantised import report_overflows
from hespas.report import Column, Table, table_from_rows

__all__ = ["Conversion", "ConversionDocument", "Rescaling", "conversion_document", "convert"]

_VIEWER_FORMAT = "chrome-trace"
"""Format of trace viewers: files that are already of this kind are copied, not rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion(Result):
    """Result of a conversion. ``value`` is the written workload or profile, ``bytes_written`` the size of all
    its files. ``conservation`` is the conservation account of a workload, ``events`` the account of a
    profile. ``captures`` lists the traces of graph captures that were read too. ``visible`` lists what an
    obfuscated workload still shows, if a report was requested.
    """

    source: str
    destination: str
    source_format: str
    target_format: str
    value: Value
    bytes_written: Count
    conservation: ConversionAccount | None
    events: EventAccount | None = None
    hardware: str = ""
    estimator: str = ""
    captures: tuple[str, ...] = ()
    visible: tuple[VisibleFact, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def headline(self) -> str:
        """Return the summary line: source, destination, their formats and the size."""
        formats = f"{self.source_format} -> {self.destination} ({self.target_format})"
        return f"{self.source}, {formats}, {self.bytes_written:,} bytes"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--log-json`` writes, of schema ``hespas.convert/1``."""
        return document_bytes(conversion_document(self))

    def table(self) -> Table:
        """Return the result as a table with one row per figure of the account: before, after."""
        account = self.conservation or self.events
        before = {} if account is None else asdict(account.before)
        after = {} if account is None else asdict(account.after)
        header = (Column("figure"), *(Column(name, kind="number") for name in ("before", "after")))
        return table_from_rows(header, [(name, figure, after[name]) for name, figure in before.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaling:
    """Options for rescaling a trace. ``sizes`` are the new sizes of axes (``dp=512`` or a mapping). ``mesh``
    names the axes of the trace, outermost first. ``others`` are traces of the same program, each with another
    size of one axis.
    """

    sizes: Mapping[str, int] | str
    mesh: str = ""
    others: Sequence[str | Path | Workload] = ()


def _ranks_of(text: str) -> range:
    """Parse the ranks of an option: ``5``, or ``2-7`` with both ends."""
    first, dash, last = text.partition("-")
    if not all(part.isascii() and part.isdigit() for part in ([first, last] if dash else [first])):
        raise UsageError(f"invalid `ranks` {text!r}: expected N or A-B", hint="`ranks=0` or `ranks=0-7`")
    low, high = int(first), int(last or first)
    if high < low:
        raise UsageError(f"`ranks` {text!r} ends before it starts", hint=f"`ranks={high}-{low}`")
    return range(low, high + 1)


_Source = Annotated[
    str | Path | Value,
    Option(
        "Input file, folder of NAME.{rank}.et files, or - for stdin.",
        metavar="SRC",
        is_argument=True,
        is_text=True,
        is_required=False,
        access="stream",
    ),
]
_Destination = Annotated[
    str | Path,
    Option(
        "Output file, folder, or - for stdout.",
        metavar="DST",
        is_argument=True,
        is_text=True,
        is_required=False,
        access="writes",
        opens=(".pftrace", ".perfetto-trace", ".perfetto"),
    ),
]
_TargetFormat = Annotated[
    str | None,
    Option(
        "Write DST in this format (default: by suffix).",
        flag="to",
        metavar="FORMAT",
        panel=OUTPUT,
        completes="formats",
    ),
]
_SourceVersion = Annotated[
    str,
    Option(
        "Set the version of SRC's format, for files that do not state it.",
        flag="from-version",
        metavar="VERSION",
        panel=INPUT,
    ),
]
_TargetVersion = Annotated[
    str,
    Option(
        "Write this version of DST's format (see `list_formats`).",
        flag="to-version",
        metavar="VERSION",
        panel=OUTPUT,
    ),
]
_Hardware = Annotated[str | None, hardware_option("Estimate the durations of operations on this device.")]
_Ranks = Annotated[
    range | None,
    Option("Write only this rank, or this range of ranks.", metavar="N|A-B", panel=OUTPUT, parse=_ranks_of),
]
_Rescale = Annotated[
    Rescaling | Mapping[str, int] | str | None,
    Option(
        "Rescale the job to these mesh sizes, if the result is provably exact.",
        metavar="AXIS=N,...",
        panel=OUTPUT,
    ),
]
_Mesh = Annotated[
    Mapping[str, int] | str | None,
    Option(
        "Partition a program with shardings over this mesh; with `rescale`: the mesh of SRC.",
        metavar="AXIS=N,...",
        panel=OUTPUT,
    ),
]
_Parts = Annotated[WriteSharding | None, OptionsOf()]


@renamed_arguments(missing="on_unknown")
@checked()
def convert(
    source: _Source,
    destination: _Destination,
    *,
    source_format: SourceFormat = None,
    target_format: _TargetFormat = None,
    source_version: _SourceVersion = "",
    target_version: _TargetVersion = "",
    recover: Recover = False,
    hardware: _Hardware = None,
    estimator: ChosenEstimator = STEP_ESTIMATOR,
    ranks: _Ranks = None,
    num_devices: NumDevices = None,
    num_replicas: NumReplicas = None,
    default_dtype: DefaultDtype = "",
    dims: DimsOrNone = None,
    comm_groups: CommGroups = None,
    capture: Captures = None,
    run_time_unit: UnitOfRunTimes = "",
    rescale: _Rescale = None,
    mesh: _Mesh = None,
    granularity: ChosenGranularity = None,
    on_unknown: MissingPolicy = "warn",
    overwrite: bool = False,
    jobs: Jobs = 2,
    parts: _Parts = None,
    obfuscate: ObfuscationKey = None,
    obfuscate_level: ObfuscationLevel = "names",
    report: ReportsVisible = False,
    reveal: RevealingKey = None,
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> Conversion:
    """Convert ``source``, a path or a value, to ``destination``; ``-`` is standard input or output.

    With ``hardware``, operations get the times of ``estimator``. ``dims``, ``capture`` and ``recover`` are as
    in ``read``. ``parts`` writes a large job in parts. ``obfuscate`` hides the names, and with
    ``obfuscate_level`` also shapes and layers, and ``report`` lists what stays visible; ``reveal`` restores
    the names. A PyTorch profile that is converted to ``.json`` is
    copied without damaged events. Raises what ``read`` and ``write`` raise.

    Examples:
        >>> hespas.convert("samples/mlp.mlir", "mlp.et", hardware="H100-SXM")
        <Conversion: samples/mlp.mlir, stablehlo -> mlp.et (chakra), 1,574 bytes>
    """
    sink = Diagnostics() if diagnostics is None else diagnostics
    path = str(destination)
    name = source.name if isinstance(source, Workload | Profile) else str(source)
    reading = ReadOptions(
        version=source_version,
        num_devices=num_devices,
        num_replicas=num_replicas,
        recover=recover,
        default_dtype=default_dtype,
        dims=dims or {},
        comm_groups=comm_groups,
        run_time_unit=run_time_unit,
        progress=progress,
    )
    reading = with_capture(reading, capture)
    secrecy = Secrecy.of(obfuscate, obfuscate_level, reveal, report=report, destination=path)
    if not (capture or rescale or mesh or secrecy):
        copied = _clean_copy(name, path, (source_format, target_format), reading, sink, overwrite=overwrite)
        if copied is not None:
            return copied
    writing = (parts or WriteSharding()).options(ranks, target_version, jobs, progress)
    target = _checked_target(
        name, path, target_format, writing, hardware=hardware, estimator=estimator, overwrite=overwrite
    )
    lowering = Lowering(
        granularity=granularity, on_unknown=on_unknown, hardware=hardware, estimator=estimator, target=target
    )
    with ExitStack() as stack:
        as_graph = bool(rescale or mesh) or not _target_format(path, target_format, profile=True).profiles
        origin, value = _open_source(
            source, source_format, reading, sink, stack, workload=as_graph, mesh=mesh
        )
        account: ConversionAccount | None = None
        if isinstance(value, Workload):
            for graph in value.classes:
                report_overflows(graph, sink)
            value, with_rescaling = _rescaled(value, rescale, reading, sink)
            estimator = step_estimator(value, hardware, estimator) if hardware else ""
            lowering = replace(lowering, folds=not is_flat(value.metadata, origin))
            value, account = lowering.run(value, _ranks_to_write(value, ranks), sink)
            account = with_rescaling(account)
        hidden: tuple[MergedOps, ...] = ()
        if secrecy:
            value, hidden = secrecy.applied(value, sink)
            if account and isinstance(value, Workload):
                sizes = value.sizes_within(_ranks_to_write(value, ranks))
                after = rank_totals(value.classes, sizes)
                account = replace(account, after=after, dropped=(*account.dropped, *hidden))
        target = _target_format(path, target_format, profile=isinstance(value, Profile))
        job = AccountedWrite(value, account, target, writing, sink)
        size = job.put(destination, stack, overwrite=overwrite)
    done = _conversion_of(job, name, path, origin, size)
    if hidden and done.events:
        done = replace(done, events=replace(done.events, dropped=(*hidden, *done.events.dropped)))
    if secrecy:
        done = replace(done, visible=secrecy.visible(value))
    used = estimator if hardware else ""
    captures = tuple(map(str, reading.capture))
    return replace(done, hardware=hardware or "", estimator=used, captures=captures)


def _clean_copy(
    source: str,
    destination: str,
    formats: tuple[str | None, str | None],
    reading: ReadOptions,
    diagnostics: Diagnostics,
    *,
    overwrite: bool,
) -> Conversion | None:
    """Copy the intact events of a file, with an account that compares both files. This is done only for a
    copy to the same format, or to the format of trace viewers if both paths have the suffix of that format.
    Return None for any other conversion.
    """
    path, target_path, target = Path(source), Path(destination), formats[1]
    if STANDARD_STREAM in (source, destination) or not path.is_file():
        return None
    suffixes = target_path.suffixes
    if target is None and (".chrome" in suffixes or not suffixes):
        return None
    wanted = target or _target_format(destination, None, profile=True).name
    if wanted != _VIEWER_FORMAT and (target is None or load_format(target).copy is None):
        return None
    origin = find_format(path, formats[0])
    copy = origin.copy
    if copy is None or (target is not None and wanted != origin.name):
        return None
    value = read(source, format=origin.name, options=reading, diagnostics=diagnostics)
    job = AccountedWrite(value, None, origin, WriteOptions(), diagnostics)

    def fill(temporary: Path) -> None:
        copy(path, temporary, reading, WriteOptions(name=target_path.name), diagnostics)
        job.verify(temporary)

    check_destination(target_path, overwrite=overwrite)
    size = write_atomically(target_path, fill, overwrite=overwrite, directory=False)
    return _conversion_of(job, source, destination, origin, size)


def _conversion_of(
    job: AccountedWrite, source: str, destination: str, origin: Format, size: int
) -> Conversion:
    return Conversion(
        source=source,
        destination=destination,
        source_format=origin.name,
        target_format=job.target.name,
        value=job.value,
        bytes_written=size,
        conservation=job.account,
        events=job.events,
        diagnostics=job.diagnostics,
    )


def _checked_target(
    source: str,
    destination: str,
    name: str | None,
    options: WriteOptions,
    *,
    hardware: str | None,
    estimator: str,
    overwrite: bool,
) -> Format:
    """Return the target format. Raise errors for an impossible format, version or path, and for an unknown
    device or estimator, before the source is read (which may take long).
    """
    target = _target_format(destination, name)
    check_version(options.version, target.write_versions, target.name, "`target_version`")
    check_sharding(options, target)
    check_streams(source, destination)
    if destination != STANDARD_STREAM:  # other shares may exist already
        check_destination(Path(destination), overwrite=overwrite or options.shard is not None)
    if hardware is not None:
        from hespas.estimators import load_estimator
        from hespas.hardware import load_device

        load_device(hardware)
        if estimator != STEP_ESTIMATOR:
            load_estimator(estimator)
    elif estimator != STEP_ESTIMATOR:
        raise UsageError(
            "`estimator` requires `hardware`: without it, no durations are estimated",
            hint="add `hardware=NAME`, or leave `estimator` out",
        )
    return target


def _target_format(destination: str, name: str | None, *, profile: bool | None = None) -> Format:
    """Return the format to write, from the option or the suffix. If ``destination`` is an existing folder or
    ends with a slash, it gets one trace per rank.
    """
    folder = destination.endswith(("/", os.sep)) or Path(destination).is_dir()
    return format_for_output(Path(destination), name or ("chakra" if folder else None), profile=profile)


def _open_source(
    source: str | Path | Value,
    name: str | None,
    reading: ReadOptions,
    diagnostics: Diagnostics,
    stack: ExitStack,
    *,
    workload: bool,
    mesh: Mapping[str, int] | str | None,
) -> tuple[Format, Value]:
    """Return the format of the source and its value, as a ``workload`` if requested. A value that was read
    before has the format of its file. With a ``mesh``, a StableHLO program is partitioned over it. Errors
    name ``source`` until ``stack`` closes.
    """
    if isinstance(source, Workload | Profile):
        if mesh:
            raise UsageError(
                "`mesh` partitions only program files, and the source is a workload or profile in memory",
                hint="name the file, or leave `mesh` out",
            )
        read_from = name or source.metadata.get("format", "")
        origin = load_format(read_from if read_from in format_names() else "op-graph")
        return origin, as_workload(source, diagnostics) if workload else source
    path = Path(source)
    if str(source) == STANDARD_STREAM:  # copied to a file, because formats are sniffed from the content

        def check(head: Path) -> None:
            with _errors_named(STANDARD_STREAM, head):
                find_format(head, name)

        path = spooled_input(stack, check)
    stack.enter_context(_errors_named(str(source), path))
    if mesh:
        from hespas.captures.partition import capture_program
        from hespas.graph.mesh import Mesh

        origin = find_format(path, name, workload=True)
        if origin.name != "stablehlo" or path.is_dir():
            raise UsageError(
                f"format {origin.name!r} has no shardings to partition by",
                path=str(source),
                hint="leave `mesh` out: it is for one StableHLO program, or goes with `rescale`",
            )
        data = read_bytes(path, ReadOptions().max_bytes)
        program = capture_program(data, str(source), mesh=Mesh.of(mesh), diagnostics=diagnostics)
        return origin, program.workload
    origin = find_format(path, name, workload=workload)
    renamed = Renamed(diagnostics, str(path), str(source))
    value = read(path, format=origin.name, options=reading, diagnostics=renamed)
    return origin, as_workload(value, diagnostics) if workload else value


@contextmanager
def _errors_named(name: str, path: Path) -> Generator[None]:
    """Replace ``path`` in errors by the name of the input that users know."""
    try:
        yield
    except HespasError as error:
        lacks_path = isinstance(error, FormatError | UnsupportedError) and not isinstance(
            error, MissingExtraError
        )
        if error.path == str(path) or (error.path is None and lacks_path):
            error.path = name
        raise


def _rescaled(
    workload: Workload,
    rescale: Rescaling | Mapping[str, int] | str | None,
    reading: ReadOptions,
    diagnostics: Diagnostics,
) -> tuple[Workload, Callable[[ConversionAccount], ConversionAccount]]:
    """Return the rescaled workload, and a function that adds the differences in operations and traffic to the
    conservation account. Raises the errors of the rescaling pass and of ``read``.
    """
    if not rescale:
        return workload, lambda account: account
    from hespas.generators.rescale import Rescale, parse_sizes  # most conversions keep their ranks

    rescaling = rescale if isinstance(rescale, Rescaling) else Rescaling(sizes=rescale)
    sizes = parse_sizes(rescaling.sizes) if isinstance(rescaling.sizes, str) else dict(rescaling.sizes)
    others = tuple(
        other
        if isinstance(other, Workload)
        else as_workload(read(other, options=replace(reading, num_devices=None)), diagnostics)
        for other in rescaling.others
    )
    own = Diagnostics()
    scaled = Rescale(sizes=sizes, mesh=rescaling.mesh, others=others)(workload, own)
    diagnostics.extend(own)
    before = rank_totals(workload.classes, workload.class_sizes)
    after = rank_totals(scaled.classes, scaled.class_sizes)
    added = MergedOps("rescale.ranks", "run on ranks that the trace does not have", before.ops - after.ops)
    saved = before.bytes_moved / workload.num_available * scaled.num_available - after.bytes_moved
    message = "operations of a rank have other shapes, FLOPs or bytes"
    changed = MergedOps("rescale.work", message, own.counts().get("rescale.work", 0), saved)
    rescaled_ops = tuple(row for row in (added, changed) if row.count)
    return scaled, lambda account: replace(account, before=before, dropped=(*rescaled_ops, *account.dropped))


def _ranks_to_write(workload: Workload, ranks: range | None) -> range:
    """Return the ranks to write. Raises ``UsageError`` for ranks that the job or the input does not have."""
    if ranks is None:
        return range(workload.num_ranks)
    if ranks.start < 0 or ranks.stop > workload.num_ranks or not len(ranks):
        raise UsageError(
            f"`ranks={ranks.start}-{ranks.stop - 1}` is outside the job's ranks 0-{workload.num_ranks - 1}",
            hint="give the number of ranks with `num_devices` if the program does not state it",
        )
    available = sum(workload.sizes_within(ranks))
    if available < len(ranks):
        raise UsageError(
            f"`ranks={ranks.start}-{ranks.stop - 1}`: the input lacks {len(ranks) - available} of them; "
            f"it holds {workload.num_available} of the job's {workload.num_ranks} ranks (the first is "
            f"rank {int(workload.present[0])})",
            hint="choose ranks of the input, or give the traces of all ranks",
        )
    return ranks


class _InOut(msgspec.Struct, frozen=True, rename={"before": "in", "after": "out"}):
    before: Figure
    after: Figure


class _ConservationDocument(msgspec.Struct, frozen=True, kw_only=True):
    events_in: Figure
    events_out: Figure
    device_time_ns_in: Figure
    device_time_ns_out: Figure
    flops: _InOut
    bytes: _InOut
    totals_in: dict[str, Figure]
    totals_out: dict[str, Figure]
    dropped: tuple[MergedOps, ...]


class ConversionDocument(Document, frozen=True, kw_only=True):
    """JSON document that ``hespas-convert --log-json`` writes."""

    schema: Literal["hespas.convert/1"] = "hespas.convert/1"
    output: str
    source_format: str
    target_format: str
    hardware: str
    estimator: str
    bytes_written: Count
    num_ranks: Count | UnsetType = UNSET
    rank_classes: Count | UnsetType = UNSET
    conservation: _ConservationDocument | UnsetType = UNSET
    visible: tuple[VisibleFact, ...] | UnsetType = UNSET


def conversion_document(done: Conversion) -> msgspec.Struct:
    """Return the document of a conversion: ``hespas.convert/1``."""
    account = done.conservation or done.events
    conservation: _ConservationDocument | UnsetType = UNSET
    if account is not None:
        before, after = asdict(account.before), asdict(account.after)
        count = "ops" if done.conservation else "events"
        conservation = _ConservationDocument(
            events_in=before[count],
            events_out=after[count],
            device_time_ns_in=before["device_time_ns"],
            device_time_ns_out=after["device_time_ns"],
            flops=_InOut(before.get("flops", nan), after.get("flops", nan)),
            bytes=_InOut(before["bytes_moved"], after["bytes_moved"]),
            totals_in=before,
            totals_out=after,
            dropped=account.dropped,
        )
    return ConversionDocument(
        inputs=[done.source, *done.captures],
        diagnostics=findings(done.diagnostics),
        output=done.destination,
        source_format=done.source_format,
        target_format=done.target_format,
        hardware=done.hardware,
        estimator=done.estimator,
        bytes_written=done.bytes_written,
        num_ranks=done.conservation.num_ranks if done.conservation else UNSET,
        rank_classes=done.conservation.rank_classes if done.conservation else UNSET,
        conservation=conservation,
        visible=done.visible or UNSET,
    )
