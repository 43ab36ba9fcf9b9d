"""The main job: read, rewrite, estimate, write, and account for everything that went in and came out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hespas.api.io import check_version, read, write
from hespas.api.preparation import Conservation, Dropped, Granularity, Missing, Preparation
from hespas.converters import (
    Format,
    ReadOptions,
    Value,
    WriteOptions,
    find_format,
    format_for_output,
    is_flat,
)
from hespas.converters.output import check_destination
from hespas.graph import Diagnostics, Workload
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import FormatError, HespasError, MissingExtraError, UnsupportedError, UsageError

__all__ = ["Conversion", "convert"]

_STANDARD_STREAM = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did. ``value`` is what was written; ``bytes_written`` counts all its files."""

    source: str
    destination: str
    source_format: str
    target_format: str
    value: Value
    bytes_written: int
    conservation: Conservation | None
    hardware: str = ""
    estimator: str = ""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    source_version: str = "",
    target_version: str = "",
    recover: bool = False,
    hardware: str | None = None,
    estimator: str = "roofline",
    ranks: range | None = None,
    num_devices: int | None = None,
    granularity: Granularity | None = None,
    missing: Missing = "warn",
    overwrite: bool = False,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
    diagnostics: Diagnostics | None = None,
) -> Conversion:
    """Convert ``source`` to ``destination``; ``-`` is standard input or output.

    With ``hardware``, operations get the time that ``estimator`` gives them there. ``granularity`` merges
    operations. ``missing`` says what to do about those whose time or trip count nobody knows. ``..._version``
    names the version of a format to read or write; ``recover`` keeps the whole records before a cut. Findings
    go to ``diagnostics`` also where an error ends it. Raises what :func:`hespas.api.read` and
    :func:`hespas.api.write` raise; nothing is written then.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    target = format_for_output(Path(str(destination)), target_format)
    check_version(target_version, target.write_versions, target.name, "--to-version")
    _check_request(destination, hardware, estimator, overwrite=overwrite)
    reading = ReadOptions(num_devices=num_devices, version=source_version, recover=recover, progress=progress)
    writing = WriteOptions(ranks=ranks, version=target_version, jobs=jobs, progress=progress)
    preparation = Preparation(
        granularity=granularity, missing=missing, hardware=hardware, estimator=estimator, flat=target.flat
    )
    with ExitStack() as stack:
        path = _spooled(source, stack)
        origin = find_format(path, source_format)
        value = _read_named(str(source), path, origin.name, reading, found)
        value, conservation = _prepared(value, origin, preparation, ranks, found)
        noted = found.counts()
        with _placed(destination, stack) as place:
            written = write(
                value, place, format=target.name, overwrite=overwrite, options=writing, diagnostics=found
            )
    return Conversion(
        source=str(source),
        destination=str(destination),
        source_format=origin.name,
        target_format=target.name,
        value=value,
        bytes_written=written,
        conservation=_with_writer_losses(conservation, noted, found),
        hardware=hardware or "",
        estimator=estimator if hardware else "",
        diagnostics=found,
    )


def _prepared(
    value: Value, origin: Format, preparation: Preparation, ranks: range | None, found: Diagnostics
) -> tuple[Value, Conservation | None]:
    """A workload made ready for its destination, with its account; a profile as it is."""
    if not isinstance(value, Workload):
        return value, None
    if is_flat(value.metadata, origin):
        preparation = replace(preparation, folds=False)
    return preparation.run(value, _chosen_ranks(value, ranks), found)


def _check_request(destination: str | Path, hardware: str | None, estimator: str, *, overwrite: bool) -> None:
    """Find what cannot work before a long read: a bad destination, an unknown device or estimator."""
    if str(destination) != _STANDARD_STREAM:
        check_destination(Path(destination), overwrite=overwrite)
    if hardware is None:
        return
    from hespas.estimators import load_estimator
    from hespas.hardware import load_device

    load_device(hardware)
    load_estimator(estimator)


def _scratch(stack: ExitStack) -> Path:
    """A folder that goes when the conversion ends."""
    import tempfile

    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hespas-")))


def _spooled(source: str | Path, stack: ExitStack) -> Path:
    """The path to read: standard input is copied to a file first, since formats are told by content.
    Errors that pass the stack name ``source``.
    """
    if str(source) != _STANDARD_STREAM:
        stack.enter_context(_named(str(source), Path(source)))
        return Path(source)
    import shutil
    import sys

    spool = _scratch(stack) / "stdin"
    with spool.open("wb") as stream:
        shutil.copyfileobj(sys.stdin.buffer, stream)
    stack.enter_context(_named(str(source), spool))
    return spool


class _Findings(Diagnostics):
    """What a reader finds in ``path``, told of ``name``: users know no copy of standard input."""

    __slots__ = ("_name", "_path")

    def __init__(self, path: str, name: str, *, keep: int) -> None:
        super().__init__(keep)
        self._path, self._name = path, name

    def add(
        self,
        code: str,
        severity: Severity,
        location: str,
        message: str,
        *,
        path: str = "",
        rank: int | None = None,
        node: int | None = None,
        count: int = 1,
    ) -> None:
        """Record findings under the name that users know."""
        location, path = (text.replace(self._path, self._name) for text in (location, path))
        super().add(code, severity, location, message, path=path, rank=rank, node=node, count=count)


def _read_named(
    name: str, path: Path, format_name: str, options: ReadOptions, diagnostics: Diagnostics
) -> Value:
    """Read ``path``; findings are told of ``name``, also where an error ends the reading."""
    findings = _Findings(str(path), name, keep=diagnostics.keep)
    try:
        return read(path, format=format_name, options=options, diagnostics=findings)
    finally:
        diagnostics.extend(findings)


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


@contextmanager
def _placed(destination: str | Path, stack: ExitStack) -> Generator[str]:
    """Where to write: the destination, or a file that goes to standard output when it is finished."""
    if str(destination) != _STANDARD_STREAM:
        yield str(destination)
        return
    spool = _scratch(stack) / "standard.output"
    yield str(spool)
    import shutil
    import sys

    with spool.open("rb") as stream:
        shutil.copyfileobj(stream, sys.stdout.buffer)


def _chosen_ranks(workload: Workload, ranks: range | None) -> range:
    """The ranks to write. Raises ``UsageError`` for ranks the job does not have."""
    if ranks is None:
        return range(workload.num_ranks)
    if ranks.start < 0 or ranks.stop > workload.num_ranks or not len(ranks):
        raise UsageError(
            f"--ranks {ranks.start}-{ranks.stop - 1} is outside the job's ranks 0-{workload.num_ranks - 1}",
            hint="--num-devices states the number of ranks where the program does not",
        )
    return ranks


def _with_writer_losses(
    conservation: Conservation | None, noted: dict[str, int], found: Diagnostics
) -> Conservation | None:
    """The account with what the writer reported: it happened after the sums were taken."""
    if conservation is None:
        return None
    examples = {diagnostic.code: diagnostic.message for diagnostic in found}
    told = tuple(
        Dropped(code, examples.get(code, ""), count - noted.get(code, 0))
        for code, count in found.counts().items()
        if count > noted.get(code, 0)
    )
    return replace(conservation, dropped=(*conservation.dropped, *told))
