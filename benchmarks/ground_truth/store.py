"""Folder of a sweep: packed files, a document and a table, each written atomically.

``manifest.json`` is authoritative. ``operations.csv`` is derived from it, and files that it does not name are
ignored. A mark file identifies a case that ended the process.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path

import msgspec

from benchmarks.ground_truth.machine import Machine
from benchmarks.ground_truth.records import SCHEMA, File, Manifest, Record, noise_floors
from hespas.files.output import write_atomically
from hespas.graph.errors import FormatError, UsageError

__all__ = ["MANIFEST", "MARK", "TABLE", "Store"]

MANIFEST, TABLE, MARK = "manifest.json", "operations.csv", ".running"
_METHOD = (
    "latency: union of the device events of each repeat in the xplane (its first execution is not counted), "
    "median over repeats; wall: host clock over blocked executions in turn, launch and wait included; three "
    "executions warm up; sets of random arguments take turns (argument_sets); clocks are read under load"
)
_MOST_CASE_BYTES = 192 << 10
_SUFFIXES = {"stablehlo": ".mlir.gz", "hlo": ".hlo.txt.gz", "xplane": ".xplane.pb.gz"}
_HEAD = ("hardware", "family", "case", "kind", "op", "dtype", "variant", "split")
_SIZES = (
    "batch", "m", "n", "k", "rows", "columns", "passes", "images", "in_channels", "out_channels", "kernel",
    "in_size", "out_size", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "ranks", "message_bytes",
    "ranks_per_node",
)  # fmt: skip


class Store:
    """Folder of a running sweep. ``most_bytes`` limits the total size of packed files."""

    def __init__(
        self, folder: Path, machine: Machine, *, repeats: int, command: str, most_bytes: int
    ) -> None:
        """Store the settings. Nothing is read or written before :meth:`open`."""
        self.folder = folder
        self.machine = machine
        self.repeats = repeats
        self.command = command
        self.most_bytes = most_bytes
        self.records: dict[str, Record] = {}

    def open(self, *, resume: bool) -> None:
        """Create the folder, or continue the sweep in it if ``resume``.

        Raises ``UsageError`` if the folder cannot be created, holds other files, holds a sweep without
        ``resume``, or holds a sweep of another machine; ``FormatError`` if the document is damaged.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot be made: {error.strerror}", path=str(self.folder), hint="choose another --out"
            ) from error
        path = self.folder / MANIFEST
        if not path.is_file():
            if any(self.folder.iterdir()):
                raise UsageError("holds other files", path=str(self.folder), hint="choose another --out")
        elif not resume:
            raise UsageError("holds a sweep", path=str(self.folder), hint="continue it with --resume")
        else:
            self._read_records(path)
        self._record_crash()
        self.write()

    def _read_records(self, path: Path) -> None:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (msgspec.DecodeError, OSError) as error:
            raise FormatError(f"not the document of a sweep: {error}", path=str(path)) from error
        same = ("hardware", "kind", "backend", "devices", "versions")
        changed = [name for name in same if getattr(found.machine, name) != getattr(self.machine, name)]
        if found.schema != SCHEMA or found.repeats != self.repeats or changed:
            differs = ", ".join(changed) or "schema or number of repeats"
            raise UsageError(
                f"the sweep there is of another kind: {differs}", path=str(path), hint="choose another --out"
            )
        # Cases with absent files are captured again.
        whole = (
            each for each in found.cases if all((self.folder / f.path).is_file() for f in each.files.values())
        )
        self.records = {each.name: each for each in whole}

    def _record_crash(self) -> None:
        """Record a fault for the case in a remaining mark file, because it ended the process."""
        path = self.folder / MARK
        if path.is_file():
            family, _, name = path.read_text("utf-8", "replace").partition(" ")
            if name and name not in self.records:
                self.records[name] = Record(name=name, family=family, fault="the process ended while it ran")
            path.unlink()

    @contextmanager
    def running(self, family: str, name: str) -> Generator[None]:
        """Keep a mark file while a case runs. If the process ends, the mark names the case that ended it."""
        path = self.folder / MARK
        path.write_text(f"{family} {name}", "utf-8")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def keep(self, record: Record, contents: dict[str, bytes]) -> None:
        """Save a case: its files first, then the document that names them. Files beyond the limits are left
        out.
        """
        files: dict[str, File] = {}
        left_out = dict(record.left_out)
        used = self.bytes_used()
        for kind, content in contents.items():
            packed = gzip.compress(content, 9, mtime=0)
            if len(packed) > _MOST_CASE_BYTES or used + len(packed) > self.most_bytes:
                left_out[kind] = f"{len(packed)} bytes: beyond the bound"
                continue
            used += len(packed)
            path = Path("cases") / record.family / f"{record.name}{_SUFFIXES[kind]}"
            (self.folder / path.parent).mkdir(parents=True, exist_ok=True)
            _write(self.folder / path, packed)
            files[kind] = File(path.as_posix(), len(packed), hashlib.sha256(content).hexdigest())
        self.records[record.name] = msgspec.structs.replace(record, files=files, left_out=left_out)
        self.write()

    def bytes_used(self) -> int:
        """Return the total size of packed files."""
        return sum(file.bytes for record in self.records.values() for file in record.files.values())

    def write(self) -> None:
        """Write the current document and table."""
        records = list(self.records.values())
        manifest = Manifest(
            schema=SCHEMA,
            command=self.command,
            machine=self.machine,
            method=_METHOD,
            repeats=self.repeats,
            bytes=self.bytes_used(),
            noise=noise_floors(records),
            cases=records,
        )
        _write(self.folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        _write(self.folder / TABLE, self._table(records))

    def _table(self, records: list[Record]) -> bytes:
        """Return the table of single operations: sizes, time, deviation, all repeats, clocks."""
        text = io.StringIO()
        turns = range(1, self.repeats + 1)
        titles = (
            *(*_HEAD, *_SIZES, "shapes", "strides", "latency_us", "latency_us_std"),
            *(f"device_us_{turn}" for turn in turns),
            *(f"wall_us_{turn}" for turn in turns),
            *("argument_sets", "core_mhz", "memory_mhz", "power_w"),
        )
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(titles)
        writer.writerows(self._row(record) for record in records if record.columns and record.device_ns)
        return text.getvalue().encode()

    def _row(self, record: Record) -> Iterator[str | int | float]:
        stated = {"variant": "xla", **record.columns}
        stated |= {"hardware": self.machine.hardware, "family": record.family}
        stated |= {"case": record.name, "split": record.split}
        yield from (stated.get(name, "") for name in (*_HEAD, *_SIZES))
        yield from (record.shapes, record.strides)
        for time in (record.latency_ns, record.deviation_ns, *record.device_ns, *record.wall_ns):
            yield "" if isnan(time) else round(time / 1e3, 6)
        clocks = record.clocks
        yield record.argument_sets
        yield from (
            "" if each is None else each for each in (clocks.core_mhz, clocks.memory_mhz, clocks.power_w)
        )


def _write(path: Path, content: bytes) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=True, directory=False)
