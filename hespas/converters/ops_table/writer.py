"""Writes a profile as a table, a chunk of rows at a time; layout in :mod:`.layout`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import Value, WriteOptions
from hespas.converters.ops_table.arrow_binding import (
    Arrow,
    ArrowArray,
    ArrowSchema,
    ArrowType,
    Rows,
    load_arrow,
    load_csv,
    load_parquet,
)
from hespas.converters.ops_table.layout import COLUMNS, SCHEMA_ID, Kind
from hespas.files.documents import inert
from hespas.files.streams import open_output
from hespas.graph import Diagnostics, OpClass, Profile, StringTable
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray
from hespas.graph.errors import OutputError, UsageError

__all__ = ["write_ops_table"]

_BREAK = re.compile(r"\s*\n\s*")
_CHUNK_ROWS = 1 << 15
_CLASSES = tuple("" if member is OpClass.UNKNOWN else member.name.lower() for member in OpClass)
_HALF_PAIR = re.compile(rb"\xed[\xa0-\xbf]")


def write_ops_table(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write the device events of a profile: Parquet where the name says so, else CSV (``.gz``: gzipped).

    Raises ``UsageError`` for what is no profile, ``OutputError`` where the disk refuses. ``diagnostics`` name
    what is known of the events and has no column.
    """
    name = options.name or path.name
    if not isinstance(value, Profile):
        raise UsageError(
            "a table of measured operations holds a profile, not a workload", path=name,
            hint="hespas estimate SOURCE --hardware NAME --out FILE.csv tables what an estimate says",
        )  # fmt: skip
    if name.endswith(".parquet.gz"):
        raise UsageError("Parquet is compressed inside", path=name, hint="drop .gz")
    _report(value, diagnostics, name)
    arrow = load_arrow()
    schema = _schema(arrow)
    try:
        with open_output(path, packed=name.endswith(".gz")) as stream:
            if name.endswith(".parquet"):
                with load_parquet().ParquetWriter(stream, schema) as rows:
                    _write(value, arrow, rows, options, _utf8)
            else:
                with load_csv().CSVWriter(stream, schema) as rows:
                    _write(value, arrow, rows, options, _cell)
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except arrow.ArrowException as error:
        raise OutputError(f"cannot be written: {error}", path=str(path)) from error


def _schema(arrow: Arrow) -> ArrowSchema:
    types: dict[Kind, ArrowType] = {
        Kind.TEXT: arrow.string(),
        Kind.WHOLE: arrow.int64(),
        Kind.NUMBER: arrow.float64(),
    }
    fields = [arrow.field(name, types[kind]) for name, kind in COLUMNS.items()]
    return arrow.schema(fields, metadata={"schema": SCHEMA_ID})


def _write(
    profile: Profile, arrow: Arrow, rows: Rows, options: WriteOptions, spell: Callable[[str], str]
) -> None:
    total, schema = len(profile), _schema(arrow)
    for start in range(0, total, _CHUNK_ROWS):
        part = slice(start, min(start + _CHUNK_ROWS, total))
        columns = _columns(profile, arrow, part, spell)
        arrays = [columns[name] for name in COLUMNS]
        rows.write_batch(arrow.RecordBatch.from_arrays(arrays, schema=schema))
        if options.progress:
            options.progress(part.stop, total)


def _columns(
    profile: Profile, arrow: Arrow, part: slice, spell: Callable[[str], str]
) -> dict[str, ArrowArray]:
    def inputs(text: str) -> str:
        return spell(_on_one_line(text))

    strings, devices = profile.strings, (*profile.devices, "")
    device = profile.device_index[part].astype(np.int64)
    device[(device < 0) | (device >= len(profile.devices))] = len(profile.devices)
    return {
        "hardware": _texts(arrow, devices, device, spell),
        "op": _texts(arrow, strings, profile.op_row[part], spell),
        "op_class": _texts(arrow, _CLASSES, profile.op_class[part], spell),
        "kernel": _texts(arrow, strings, profile.kernel_row[part], spell),
        "rank": _whole(arrow, profile.rank[part]),
        "stream": _whole(arrow, profile.stream[part]),
        "start_ns": _numbers(arrow, profile.start_ns[part]),
        "duration_ns": _numbers(arrow, profile.duration_ns[part]),
        "dtype": _texts(arrow, strings, profile.dtype_row[part], inputs),
        "shapes": _texts(arrow, strings, profile.shapes_row[part], inputs),
        "strides": _texts(arrow, strings, _of_host(profile, profile.host.strides_row, part), inputs),
        "values": _texts(arrow, strings, _of_host(profile, profile.host.values_row, part), inputs),
        "operation": _whole(arrow, np.where(_is_linked(profile, part), profile.host_event[part], -1)),
    }


def _is_linked(profile: Profile, part: slice) -> BoolArray:
    event = profile.host_event[part]
    linked: BoolArray = (event >= 0) & (event < len(profile.host))
    return linked


def _of_host(profile: Profile, column: SmallIntArray, part: slice) -> SmallIntArray:
    """A column of host operations by event; row 0, the empty text, for none."""
    if not len(column):
        return np.zeros(len(profile.host_event[part]), np.int32)
    linked = _is_linked(profile, part)
    event: SmallIntArray = np.where(linked, profile.host_event[part], 0).astype(np.int32)
    return np.where(linked, column[event], 0).astype(np.int32)


def _utf8(text: str) -> str:
    """A text that UTF-8 can hold: halves of surrogate pairs are replaced."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _texts(
    arrow: Arrow,
    texts: StringTable | tuple[str, ...],
    rows: NDArray[np.integer],
    spell: Callable[[str], str],
) -> ArrowArray:
    used, place = np.unique(rows, return_inverse=True)
    listed: list[int] = used.tolist()
    known = [spell(texts[row]) for row in listed]
    return arrow.array(known, arrow.string()).take(arrow.array(place.reshape(-1)))


def _cell(text: str) -> str:
    """A text as a CSV holds it: none that a spreadsheet would calculate."""
    return inert(_utf8(text))


def _on_one_line(text: str) -> str:
    """A JSON list on one line: no text in it has a line break of its own."""
    return _BREAK.sub(" ", text) if "\n" in text and text.startswith("[") else text


def _whole(arrow: Arrow, column: NDArray[np.integer]) -> ArrowArray:
    """-1 is unknown and left empty."""
    return arrow.array(column.astype(np.int64), arrow.int64(), mask=column < 0)


def _numbers(arrow: Arrow, column: FloatArray) -> ArrowArray:
    return arrow.array(np.ascontiguousarray(column, np.float64), arrow.float64(), mask=np.isnan(column))


def _report(profile: Profile, diagnostics: Diagnostics, name: str) -> None:
    """Say what has no column."""
    left_out = {
        "module": int((profile.module_row > 0).sum()),
        "category": int((profile.category_row > 0).sum()),
        "run": int((profile.run >= 0).sum()),
        "bytes moved": int((~np.isnan(profile.bytes_moved)).sum()),
        "repeats": int((profile.repeats > 1).sum()),
        "communication": len(profile.comms),
    }
    for what, count in left_out.items():
        message = f"events whose {what} is known; the table has no column for it"
        diagnostics.info("ops-table.no-column", name, message, count=count)
    diagnostics.info(
        "ops-table.no-place", name, f"a table has no place for: {', '.join(profile.attachments)}",
        count=len(profile.attachments),
    )  # fmt: skip
    diagnostics.info(
        "ops-table.host-operations", name,
        "operations of the host: times, threads, what is around them, and those that caused no event have no "
        "place in a table",
        count=len(profile.host),
    )  # fmt: skip
    halves = len(_HALF_PAIR.findall(bytes(profile.strings.buffer)))
    diagnostics.warning(
        "ops-table.invalid-text", name, "halves of surrogate pairs are no text and are replaced", count=halves
    )
