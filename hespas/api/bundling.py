"""Profiler traces of several ranks as one archive for Perfetto, on a common clock."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import msgspec

from hespas.api.arguments import checked
from hespas.api.documents import Document, Result, findings
from hespas.api.io import check_once, profiles_by_file
from hespas.api.simulation_job import aligned
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.files.streams import open_input
from hespas.graph import Diagnostics, Profile
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.hints import OUTPUT, Option
from hespas.measurements.consistency import check_job, facts_of
from hespas.report import Column, Table, table_from_rows
from hespas.report.texts import counted

__all__ = ["Bundle", "BundleDocument", "BundledTrace", "bundle"]

_MANIFEST = "perfetto_manifest.json"
_GZIP = b"\x1f\x8b"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of the files in an archive, so that equal traces make equal archives."""


class BundledTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Trace in an archive. ``offset_ns`` places its clock on the clock of the first trace."""

    file: str
    machine: str
    events: Count
    offset_ns: Figure


class BundleDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas bundle --json``."""

    schema: Literal["hespas.bundle/1"] = "hespas.bundle/1"
    archive: str
    size_bytes: Count
    traces: list[BundledTrace]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bundle(Result):
    """Archive of the traces of a job, with the offset of each."""

    inputs: tuple[str, ...]
    archive: str
    size_bytes: int
    traces: tuple[BundledTrace, ...]
    diagnostics: Diagnostics

    def headline(self) -> str:
        """Return the summary line: the number of traces and the archive."""
        return f"{counted(len(self.traces), 'trace')} -> {self.archive}"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.bundle/1``."""
        return document_bytes(
            BundleDocument(
                inputs=list(self.inputs),
                diagnostics=findings(self.diagnostics),
                archive=self.archive,
                size_bytes=self.size_bytes,
                traces=list(self.traces),
            )
        )

    def table(self) -> Table:
        """Return the result as a table with one row per trace."""
        header = (
            Column("file", kind="code"),
            Column("machine", kind="code"),
            Column("events", kind="count"),
            Column("offset_ns", "offset", "time"),
        )
        return table_from_rows(header, map(msgspec.structs.astuple, self.traces))


_Traces = Annotated[
    Sequence[str | Path],
    Option(
        "PyTorch profiler traces, one per rank, or folders of them.", metavar="TRACE...", is_argument=True
    ),
]
_Archive = Annotated[
    str | Path,
    Option(
        "Write the archive to FILE.zip.",
        flag="out",
        metavar="FILE.zip",
        panel=OUTPUT,
        access="writes",
        opens=(".zip",),
    ),
]


@checked()
def bundle(
    traces: _Traces,
    archive: _Archive,
    *,
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
) -> Bundle:
    """Pack the profiler traces of the ranks of a job into one archive, which the Perfetto UI opens as one
    timeline with a machine per rank.

    The archive has the traces as they are, and a manifest with the offsets of their clocks
    (https://perfetto.dev/docs/reference/perfetto-manifest). Offsets are chosen so that ranks end their common
    collectives together; a trace without common collectives starts with the first one. Traces that are not
    of different ranks of one job are reported (``PR010`` to ``PR013``). Raises ``UnsupportedError`` for other
    kinds of profiles, ``UsageError`` for fewer than two traces, a trace that is given twice, and an archive
    that is not a ``.zip`` file.

    Examples:
        >>> folder = "samples/rescale/gloo2"
        >>> hespas.bundle([f"{folder}/kineto.0.json.gz", f"{folder}/kineto.1.json.gz"], "job.zip")
        <Bundle: 2 traces -> job.zip>
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    target = Path(archive)
    if target.suffix != ".zip":
        raise UsageError("is not a .zip file", path=str(archive), hint="name the archive, such as job.zip")
    check_destination(target, overwrite=overwrite)
    recordings = [pair for source in traces for pair in profiles_by_file(source, diagnostics=sink)]
    if len(recordings) < 2:
        raise UsageError(
            f"{counted(len(recordings), 'trace')}: an archive joins several",
            hint="name the traces of several ranks",
        )
    for file, profile in recordings:
        if profile.metadata.get("format") != "kineto":
            raise UnsupportedError(
                "is not a trace of PyTorch's profiler",
                path=str(file),
                hint="write one timeline of all ranks instead: hespas-convert FOLDER all.pftrace",
            )
    check_once([file for file, _ in recordings])
    if len(traces) > 1:  # the traces of one folder are already checked
        check_job([facts_of(profile, str(file)) for file, profile in recordings], sink, str(archive))
    origins = [float(profile.metadata["first_event_ns"]) for _, profile in recordings]
    moved = [
        _first_ns(later) - _first_ns(profile)
        for later, (_, profile) in zip(
            aligned([profile for _, profile in recordings]), recordings, strict=True
        )
    ]
    rows = [
        BundledTrace(
            # the number keeps equal names of two folders apart
            file=f"{number:05d}-{file.name.removesuffix('.gz')}",
            machine=_machine(number, profile),
            events=len(profile) + len(profile.host),
            offset_ns=round((moved[number] - origins[number]) - (moved[0] - origins[0])),
        )
        for number, (file, profile) in enumerate(recordings)
    ]

    def fill(temporary: Path) -> None:
        with ZipFile(temporary, "w") as zipped:
            zipped.writestr(_entry(_MANIFEST), _manifest(rows), ZIP_DEFLATED)
            for row, (file, _) in zip(rows, recordings, strict=True):
                with open_input(file) as source, zipped.open(_entry(row.file), "w") as member:
                    is_compressed = source.read(2) == _GZIP
                    source.seek(0)
                    # Perfetto applies no offset to a trace that is compressed inside the archive.
                    with gzip.open(source) if is_compressed else nullcontext(source) as content:
                        shutil.copyfileobj(content, member)

    size = write_atomically(target, fill, overwrite=overwrite, directory=False)
    return Bundle(
        inputs=tuple(map(str, traces)),
        archive=str(archive),
        size_bytes=size,
        traces=tuple(rows),
        diagnostics=sink,
    )


def _entry(name: str) -> ZipInfo:
    entry = ZipInfo(name, _EPOCH)
    entry.compress_type = ZIP_DEFLATED
    return entry


def _first_ns(profile: Profile) -> float:
    """Return the first time of a profile; the differences of two profiles are those of all their times."""
    times = [column for column in (profile.start_ns, profile.host.start_ns) if len(column)]
    return float(times[0][0]) if times else 0.0


def _machine(number: int, profile: Profile) -> str:
    rank = int(profile.rank.min()) if len(profile) else -1
    return f"rank {rank}" if rank >= 0 else f"trace {number}"


def _manifest(rows: Sequence[BundledTrace]) -> str:
    """Return the manifest: a machine per trace, and the offset of each trace to the first one."""
    files: list[dict[str, object]] = []
    for row in rows:
        entry: dict[str, object] = {"path": row.file, "machine": {"name": row.machine}}
        if files:
            entry["clocks"] = {"sync_to": {"file": rows[0].file}, "offset_ns": int(row.offset_ns)}
        files.append(entry)
    return json.dumps({"perfetto_manifest": {"version": 1, "files": files}}, indent=1)
