"""The main job: read, rewrite, estimate, write, and account for everything that went in and came out."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hespas.api.arguments import checked
from hespas.api.event_account import EventConservation, event_account
from hespas.api.io import (
    STANDARD_STREAM,
    Document,
    Result,
    as_workload,
    check_streams,
    check_version,
    findings,
    read,
    spooled_input,
    spooled_output,
    with_capture,
    write,
)
from hespas.api.parts import Parts, check_parts
from hespas.api.preparation import (
    STEP_ESTIMATOR,
    Conservation,
    Dropped,
    Granularity,
    Missing,
    Preparation,
    rank_totals,
    step_estimator,
)
from hespas.api.rescaling import Rescaling, rescaled
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
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.files.streams import read_bytes
from hespas.graph import Diagnostics, Profile, Renamed, Workload
from hespas.graph.errors import (
    FormatError,
    HespasError,
    InvariantError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
)
from hespas.graph.hints import PositiveInt
from hespas.graph.passes import Totals

if TYPE_CHECKING:
    import pandas

__all__ = ["Conversion", "ConversionDocument", "conversion_document", "convert"]

_NOT_SUMMED = frozenset({"metadata", "attachments", "extra", "name_row", "source_row", "framework_row"})
"""Columns that no account sums."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion(Result):
    """What a conversion did. ``value`` is what was written; ``bytes_written`` counts all its files.
    ``conservation`` is the account of a workload, ``events`` that of a profile. ``captures`` were read too.
    """

    source: str
    destination: str
    source_format: str
    target_format: str
    value: Value
    bytes_written: Count
    conservation: Conservation | None
    events: EventConservation | None = None
    hardware: str = ""
    estimator: str = ""
    captures: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def headline(self) -> str:
        """What became what."""
        formats = f"{self.source_format} -> {self.destination} ({self.target_format})"
        return f"{self.source}, {formats}, {self.bytes_written:,} bytes"

    def to_json(self) -> bytes:
        """The document of ``--log-json``: ``hespas.convert/1``."""
        return document_bytes(conversion_document(self))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per figure that a conversion conserves: before, after."""
        import pandas as pd

        account = self.conservation or self.events
        if account is None:
            return pd.DataFrame(columns=["figure", "before", "after"])
        before, after = asdict(account.before), asdict(account.after)
        rows = [(name, figure, after[name]) for name, figure in before.items()]
        return pd.DataFrame(rows, columns=["figure", "before", "after"])


@checked()
def convert(
    source: str | Path | Value,
    destination: str | Path,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    source_version: str = "",
    target_version: str = "",
    recover: bool = False,
    hardware: str | None = None,
    estimator: str = STEP_ESTIMATOR,
    ranks: range | None = None,
    num_devices: PositiveInt | None = None,
    num_replicas: PositiveInt | None = None,
    dims: Mapping[str, int] | None = None,
    capture: str | Path | Sequence[str | Path] | None = None,
    rescale: Rescaling | Mapping[str, int] | str | None = None,
    mesh: Mapping[str, int] | str | None = None,
    granularity: Granularity | None = None,
    missing: Missing = "warn",
    overwrite: bool = False,
    jobs: PositiveInt = 1,
    parts: Parts | None = None,
    progress: Callable[[int, int], None] | None = None,
    diagnostics: Diagnostics | None = None,
) -> Conversion:
    """Convert ``source``, a path or a value, to ``destination``; ``-`` is standard input or output.

    With ``hardware``, operations take the time that ``estimator`` gives. ``granularity`` merges operations
    (default: those of an unoptimised program that gets times or becomes a trace); ``missing`` is for unknown
    times and trip counts; ``dims``, ``capture`` and ``recover`` are as in ``read``; ``rescale`` (``dp=512``)
    makes axes longer;
    ``mesh`` (``data=64,model=8``) partitions a StableHLO program with shardings; ``parts`` is for big jobs. A
    PyTorch profile that goes to ``.json`` is copied clean. Raises what ``read`` and ``write`` do.
    """
    found = Diagnostics() if diagnostics is None else diagnostics
    name = source.name if isinstance(source, Workload | Profile) else str(source)
    said = _reading(source_version, num_devices, num_replicas, dims, capture)
    said = replace(said, recover=recover, progress=progress)
    if not (capture or rescale or mesh) and (
        copied := _copied(name, str(destination), source_format, target_format)
    ):
        return _clean_copy(copied, name, str(destination), said, found, overwrite=overwrite)
    writing = (parts or Parts()).options(ranks, target_version, jobs, progress)
    target = _target(name, str(destination), target_format, writing, overwrite=overwrite)
    preparation = _preparation(granularity, missing, hardware, estimator, target)
    with ExitStack() as stack:
        into = partial(_format_of, str(destination), target_format)
        needs_workload = bool(rescale or mesh) or not into(profile=True).profiles
        origin, value = _opened(source, source_format, said, found, stack, workload=needs_workload, mesh=mesh)
        value, accounted = rescaled(value, rescale, said, found)
        if hardware and isinstance(value, Workload):
            estimator = step_estimator(value, hardware, estimator)
        value, conservation = _prepared(value, origin, preparation, ranks, found)
        target = into(profile=isinstance(value, Profile))
        account = _Account(value, accounted(conservation), target, writing, found)
        size = account.put(destination, stack, overwrite=overwrite)
    done = account.conversion(name, str(destination), origin, size)
    captures = tuple(map(str, said.capture))
    return replace(done, hardware=hardware or "", estimator=estimator if hardware else "", captures=captures)


_VIEWED = "chrome-trace"
"""The format of viewers: what is already of its kind is not rewritten for them."""


def _copied(source: str, destination: str, name: str | None, target: str | None) -> Format | None:
    """The format of a file that is to be copied clean, None for any other job: its own is asked for, or that
    of viewers by a suffix that both have.
    """
    path = Path(source)
    if STANDARD_STREAM in (source, destination) or not path.is_file():
        return None
    if target is None and (".chrome" in Path(destination).suffixes or not Path(destination).suffixes):
        return None
    wanted = target or _format_of(destination, None, profile=True).name
    if wanted != _VIEWED and (target is None or load_format(target).copy is None):
        return None
    origin = find_format(path, name)
    return origin if origin.copy and (wanted == origin.name or target is None) else None


def _clean_copy(
    form: Format, source: str, destination: str, reading: ReadOptions, found: Diagnostics, *, overwrite: bool
) -> Conversion:
    """Copy what is whole of a file; the account compares what is read of both."""
    value = read(source, format=form.name, options=reading, diagnostics=found)
    place = Path(destination)
    account = _Account(value, None, form, WriteOptions(), found)
    copy = form.copy
    if copy is None:
        raise InvariantError(f"format {form.name} was chosen for copying and cannot copy")

    def fill(temporary: Path) -> None:
        copy(Path(source), temporary, reading, WriteOptions(name=place.name), found)
        account.take(temporary)

    check_destination(place, overwrite=overwrite)
    size = write_atomically(place, fill, overwrite=overwrite, directory=False)
    return account.conversion(source, destination, form, size)


def _reading(
    version: str,
    num_devices: int | None,
    num_replicas: int | None,
    dims: Mapping[str, int] | None,
    capture: str | Path | Sequence[str | Path] | None,
) -> ReadOptions:
    """How to read the source; what it is said to be where nobody says it here stands in the defaults."""
    said = ReadOptions(version=version, num_devices=num_devices, num_replicas=num_replicas)
    said = with_capture(said, capture)
    return said if dims is None else replace(said, dims=dims)


def _prepared(
    value: Value, origin: Format, preparation: Preparation, ranks: range | None, found: Diagnostics
) -> tuple[Value, Conservation | None]:
    """A workload made ready for its destination, with its account; a profile as it is."""
    if not isinstance(value, Workload):
        return value, None
    if is_flat(value.metadata, origin):
        preparation = replace(preparation, folds=False)
    return preparation.run(value, _chosen_ranks(value, ranks), found)


def _target(source: str, destination: str, name: str | None, how: WriteOptions, *, overwrite: bool) -> Format:
    """The format to write. Finds before a long read where that, its version or the destination cannot be."""
    target = _format_of(destination, name)
    check_version(how.version, target.write_versions, target.name, "`target_version`")
    check_parts(how, target)
    check_streams(source, destination)
    if destination != STANDARD_STREAM:  # a share may find others there
        check_destination(Path(destination), overwrite=overwrite or how.shard is not None)
    return target


def _format_of(destination: str, name: str | None, *, profile: bool | None = None) -> Format:
    """The format to write. What is named as a folder, or is one, takes a trace per rank."""
    folder = destination.endswith(("/", os.sep)) or Path(destination).is_dir()
    return format_for_output(Path(destination), name or ("chakra" if folder else None), profile=profile)


def _preparation(
    granularity: Granularity | None,
    missing: Missing,
    hardware: str | None,
    estimator: str,
    target: Format,
) -> Preparation:
    """How a workload is made ready. Finds an unknown device or estimator before a long read."""
    if hardware is not None:
        from hespas.estimators import load_estimator
        from hespas.hardware import load_device

        load_device(hardware)
        if estimator != STEP_ESTIMATOR:
            load_estimator(estimator)
    return Preparation(
        granularity=granularity, missing=missing, hardware=hardware, estimator=estimator, target=target
    )


def _opened(
    source: str | Path | Value,
    name: str | None,
    reading: ReadOptions,
    found: Diagnostics,
    stack: ExitStack,
    *,
    workload: bool,
    mesh: Mapping[str, int] | str | None,
) -> tuple[Format, Value]:
    """The format of the source, or the one that makes a ``workload`` of it; and what is read. A value is of
    the format that it was read from. With a ``mesh``, a program is partitioned over it.
    """
    if mesh:
        return _partitioned(source, name, mesh, found, stack)
    if isinstance(source, Workload | Profile):
        stated = name or source.metadata.get("format", "")
        origin, value = load_format(stated if stated in format_names() else "op-graph"), source
    else:
        path = _spooled(source, name, stack)
        origin = find_format(path, name, workload=workload)
        value = _read_named(str(source), path, origin.name, reading, found)
    return origin, as_workload(value, found) if workload else value


def _partitioned(
    source: str | Path | Value,
    name: str | None,
    mesh: Mapping[str, int] | str,
    found: Diagnostics,
    stack: ExitStack,
) -> tuple[Format, Value]:
    """The workload of a StableHLO program that is sharded over a mesh, and the format it was read in."""
    from hespas.captures.mesh import Mesh
    from hespas.captures.partition import capture_program

    if isinstance(source, Workload | Profile):
        raise UsageError("a value is no program with shardings", hint="name the file, or leave `mesh` out")
    path = _spooled(source, name, stack)
    origin = find_format(path, name, workload=True)
    if origin.name != "stablehlo" or path.is_dir():
        raise UsageError(
            f"format {origin.name!r} has no shardings to partition by",
            path=str(source),
            hint="leave `mesh` out: it is for one StableHLO program, or goes with `rescale`",
        )
    data = read_bytes(path, ReadOptions().max_bytes)
    return origin, capture_program(data, str(source), mesh=Mesh.of(mesh), diagnostics=found).workload


def _spooled(source: str | Path, name: str | None, stack: ExitStack) -> Path:
    """The path to read: standard input is copied to a file first, since formats are told by content.
    Errors that pass the stack name ``source``.
    """
    if str(source) != STANDARD_STREAM:
        stack.enter_context(_named(str(source), Path(source)))
        return Path(source)

    def check(beginning: Path) -> None:
        with _named(str(source), beginning):
            find_format(beginning, name)

    spool = spooled_input(stack, check)
    stack.enter_context(_named(str(source), spool))
    return spool


def _read_named(
    name: str, path: Path, format_name: str, options: ReadOptions, diagnostics: Diagnostics
) -> Value:
    """Read ``path``; findings are told of ``name``."""
    findings = Renamed(diagnostics, str(path), name)
    return read(path, format=format_name, options=options, diagnostics=findings)


@contextmanager
def _named(name: str, path: Path) -> Generator[None]:
    """Errors say which input they are about, under the name that users know."""
    try:
        yield
    except HespasError as error:
        lacks_path = isinstance(error, FormatError | UnsupportedError) and not isinstance(
            error, MissingExtraError
        )
        if error.path == str(path) or (error.path is None and lacks_path):
            error.path = name
        raise


def _chosen_ranks(workload: Workload, ranks: range | None) -> range:
    """The ranks to write. Raises ``UsageError`` for ranks that the job does not have, or are not here."""
    if ranks is None:
        return range(workload.num_ranks)
    if ranks.start < 0 or ranks.stop > workload.num_ranks or not len(ranks):
        raise UsageError(
            f"`ranks={ranks.start}-{ranks.stop - 1}` is outside the job's ranks 0-{workload.num_ranks - 1}",
            hint="`num_devices` states the number of ranks where the program does not",
        )
    here = sum(workload.sizes_within(ranks))
    if here < len(ranks):
        raise UsageError(
            f"`ranks={ranks.start}-{ranks.stop - 1}`: the input lacks {len(ranks) - here} of them; "
            f"it holds {workload.num_available} of the job's {workload.num_ranks} ranks (the first is "
            f"rank {int(workload.present[0])})",
            hint="choose among these, or give the whole set",
        )
    return ranks


class _Account:
    """What went in and what came out, taken from what was written before it replaces anything."""

    def __init__(
        self,
        value: Value,
        conservation: Conservation | None,
        target: Format,
        options: WriteOptions,
        found: Diagnostics,
    ) -> None:
        self.conservation = conservation
        self.events: EventConservation | None = None
        self._value, self._target, self._options, self._found = value, target, options, found
        self._noted = found.counts()

    def put(self, destination: str | Path, stack: ExitStack, *, overwrite: bool) -> int:
        """Write to the destination, or to a file that goes to standard output when it is finished; the bytes
        written. Raises what ``write`` does.
        """
        put = partial(
            write,
            self._value,
            format=self._target.name,
            overwrite=overwrite,
            options=self._options,
            diagnostics=self._found,
            check=self.take,
        )
        if str(destination) != STANDARD_STREAM:
            return put(str(destination))
        with spooled_output(stack) as spool:
            return put(str(spool))

    def take(self, written: Path) -> None:
        """Raise ``UnsupportedError`` where what was written cannot be read again."""
        told = self._told()
        try:
            self.events = event_account(self._value, written, self._target, told, self._found)
            sums = _as_written(self.conservation, written, self._target, self._options.ranks, told)
        except (FormatError, UnsupportedError) as error:
            raise UnsupportedError(
                f"format {self._target.name!r} cannot hold this so that it is read again: {error.message}",
                hint="choose another format: see hespas-convert --list-formats",
            ) from error
        self.conservation = _with_losses(sums, told, self._found)

    def conversion(self, source: str, destination: str, origin: Format, size: int) -> Conversion:
        """What was done, once it is written."""
        return Conversion(
            source=source,
            destination=destination,
            source_format=origin.name,
            target_format=self._target.name,
            value=self._value,
            bytes_written=size,
            conservation=self.conservation,
            events=self.events,
            diagnostics=self._found,
        )

    def _told(self) -> dict[str, int]:
        """How many findings of each code the writer added."""
        counts = ((code, count - self._noted.get(code, 0)) for code, count in self._found.counts().items())
        return {code: count for code, count in counts if count > 0}


def _as_written(
    conservation: Conservation | None,
    place: Path,
    target: Format,
    ranks: range | None,
    told: Mapping[str, int],
) -> Conservation | None:
    """The account with the sums of the file where its writer told that they are others. A trace holds what
    its writer is given but for what it reports.
    """
    differs = any(code in told and not set(columns) <= _NOT_SUMMED for code, columns in target.losses.items())
    if conservation is None or target.flat or target.read is None or not differs:
        return conservation
    again = read(place, format=target.name, options=ReadOptions(locations=False, comm_groups=None, dims={}))
    if not isinstance(again, Workload):  # events have no such sums
        return conservation
    return replace(conservation, after=_sums_written(again, ranks, conservation.num_ranks))


def _with_losses(
    conservation: Conservation | None, told: Mapping[str, int], found: Diagnostics
) -> Conservation | None:
    """The account with what the writer reported: it happened after the sums were taken."""
    if conservation is None:
        return None
    examples = {diagnostic.code: diagnostic.message for diagnostic in found}
    dropped = tuple(Dropped(code, examples.get(code, ""), count) for code, count in told.items())
    return replace(conservation, dropped=(*conservation.dropped, *dropped))


def _sums_written(again: Workload, ranks: range | None, written: int) -> Totals:
    """The sums over the ``written`` ranks of a file that was read again."""
    if len(again.classes) == 1:  # a program of all ranks need not say how many these are
        return rank_totals(again.classes, [written])
    return rank_totals(again.classes, again.sizes_within(ranks or range(again.num_ranks)))


# --- The document


class _InOut(msgspec.Struct, frozen=True, rename={"before": "in", "after": "out"}):
    before: Figure
    after: Figure


class _Conservation(msgspec.Struct, frozen=True, kw_only=True):
    events_in: Figure
    events_out: Figure
    device_time_ns_in: Figure
    device_time_ns_out: Figure
    flops: _InOut
    bytes: _InOut
    totals_in: dict[str, Figure]
    totals_out: dict[str, Figure]
    dropped: tuple[Dropped, ...]


class ConversionDocument(Document, frozen=True, kw_only=True):
    """What hespas-convert --log-json writes."""

    schema: Literal["hespas.convert/1"] = "hespas.convert/1"
    output: str
    source_format: str
    target_format: str
    hardware: str
    estimator: str
    bytes_written: Count
    num_ranks: Count | UnsetType = UNSET
    rank_classes: Count | UnsetType = UNSET
    conservation: _Conservation | UnsetType = UNSET


def conversion_document(done: Conversion) -> msgspec.Struct:
    """What a conversion did: ``hespas.convert/1``."""
    account = done.conservation
    return ConversionDocument(
        inputs=[done.source, *done.captures],
        diagnostics=findings(done.diagnostics),
        output=done.destination,
        source_format=done.source_format,
        target_format=done.target_format,
        hardware=done.hardware,
        estimator=done.estimator,
        bytes_written=done.bytes_written,
        num_ranks=account.num_ranks if account else UNSET,
        rank_classes=account.rank_classes if account else UNSET,
        conservation=_conservation(done),
    )


def _conservation(done: Conversion) -> _Conservation | UnsetType:
    """The account of a workload or of a profile."""
    account = done.conservation or done.events
    if account is None:
        return UNSET
    before, after = asdict(account.before), asdict(account.after)
    count = "ops" if done.conservation else "events"
    return _Conservation(
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
