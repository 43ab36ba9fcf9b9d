"""Writer of a profile as a table, one chunk of rows at a time; columns in :mod:`hespas.measurements`."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import Value, WriteOptions
from hespas.converters.ops_table import SCHEMA_ID
from hespas.files.documents import escape_formula
from hespas.files.streams import open_output
from hespas.graph import Diagnostics, OpClass, Profile, StringTable
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray
from hespas.graph.errors import OutputError, UsageError
from hespas.measurements import COLUMNS, ColumnKind

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["write_ops_table"]

_BREAK = re.compile(r"\s*\n\s*")
_CHUNK_ROWS = 1 << 15
_CLASSES = tuple("" if member is OpClass.UNKNOWN else member.name.lower() for member in OpClass)
_HALF_PAIR = re.compile(rb"\xed[\xa0-\xbf]")


def write_ops_table(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write the device events of a profile as Parquet (``.parquet``) or else CSV (``.gz``: gzipped).

    Raises ``UsageError`` for a value that is not a profile, and ``OutputError`` if the file cannot be
    written. ``diagnostics`` report data about events for which the table has no column.
    """
    name = options.name or path.name
    if not isinstance(value, Profile):
        raise UsageError(
            "a table of measured operations holds a profile, not a workload",
            path=name,
            hint="give the profile of one rank, or write estimates: hespas estimate SOURCE --hardware NAME "
            "--out FILE.csv",
        )
    if name.endswith(".parquet.gz"):
        raise UsageError("Parquet files are already compressed", path=name, hint="drop .gz")
    import pyarrow as pa
    from pyarrow import csv, parquet

    # Report facts for which the table has no column.
    left_out = {
        "module": int((value.module_id > 0).sum()),
        "category": int((value.category_id > 0).sum()),
        "run": int((value.run >= 0).sum()),
        "bytes moved": int((~np.isnan(value.bytes_moved)).sum()),
        "repeats": int((value.repeats > 1).sum()),
        "communication": len(value.comms),
    }
    for what, count in left_out.items():
        message = f"events whose {what} is known; the table has no column for it"
        diagnostics.info("ops-table.no-column", name, message, count=count)
    diagnostics.info(
        "ops-table.no-place",
        name,
        f"attachments are left out: {', '.join(value.attachments)}",
        count=len(value.attachments),
    )
    diagnostics.info(
        "ops-table.host-operations",
        name,
        "host operations: times, threads and parents, and operations without device events, are left out",
        count=len(value.host),
    )
    halves = len(_HALF_PAIR.findall(bytes(value.strings.buffer)))
    diagnostics.warning(
        "ops-table.invalid-text",
        name,
        "unpaired surrogates are not valid text and are replaced",
        count=halves,
    )
    schema = _schema()
    try:
        with open_output(path, packed=name.endswith(".gz")) as stream:
            if name.endswith(".parquet"):
                with parquet.ParquetWriter(stream, schema) as rows:
                    _write(value, rows, options, _utf8)
            else:
                with csv.CSVWriter(stream, schema) as rows:
                    _write(value, rows, options, lambda text: escape_formula(_utf8(text)))
    except MemoryError:  # ArrowMemoryError is an ArrowException, too
        raise
    except pa.ArrowException as error:
        raise OutputError(f"cannot be written: {error}", path=str(path)) from error


def _schema() -> pa.Schema:
    import pyarrow as pa

    types: dict[ColumnKind, pa.DataType] = {
        "text": pa.string(),
        "whole number": pa.int64(),
        "number": pa.float64(),
    }
    fields = [pa.field(name, types[kind]) for name, kind in COLUMNS.items()]
    return pa.schema(fields, metadata={"schema": SCHEMA_ID})


def _write(profile: Profile, rows: Any, options: WriteOptions, spell: Callable[[str], str]) -> None:
    """Write all chunks of the profile to ``rows``, an Arrow writer of record batches."""
    make = cast("Any", import_module("pyarrow")).RecordBatch.from_arrays
    total, schema = len(profile), _schema()
    for start in range(0, total, _CHUNK_ROWS):
        part = slice(start, min(start + _CHUNK_ROWS, total))

        def inputs(text: str) -> str:
            return spell(_BREAK.sub(" ", text) if "\n" in text and text.startswith("[") else text)

        strings, devices = profile.strings, (*profile.devices, "")
        device = profile.device_index[part].astype(np.int64)
        device[(device < 0) | (device >= len(profile.devices))] = len(profile.devices)
        columns = {
            "hardware": _texts(devices, device, spell),
            "op": _texts(strings, profile.op_id[part], spell),
            "op_class": _texts(_CLASSES, profile.op_class[part], spell),
            "kernel": _texts(strings, profile.kernel_id[part], spell),
            "rank": _whole(profile.rank[part]),
            "stream": _whole(profile.stream[part]),
            "start_ns": _numbers(profile.start_ns[part]),
            "duration_ns": _numbers(profile.duration_ns[part]),
            "dtype": _texts(strings, profile.dtype_id[part], inputs),
            "shapes": _texts(strings, profile.shapes_id[part], inputs),
            "strides": _texts(strings, _of_host(profile, profile.host.strides_id, part), inputs),
            "values": _texts(strings, _of_host(profile, profile.host.values_id, part), inputs),
            "operation": _whole(np.where(_is_linked(profile, part), profile.host_event[part], -1)),
        }
        rows.write_batch(make([columns[name] for name in COLUMNS], schema=schema))
        if options.progress:
            options.progress(part.stop, total)


def _is_linked(profile: Profile, part: slice) -> BoolArray:
    event = profile.host_event[part]
    linked: BoolArray = (event >= 0) & (event < len(profile.host))
    return linked


def _of_host(profile: Profile, column: SmallIntArray, part: slice) -> SmallIntArray:
    """Return, for each event in ``part``, the value of its host operation in ``column``. Values are rows of
    the string table. Events without an operation get row 0, the empty text.
    """
    if not len(column):
        return np.zeros(len(profile.host_event[part]), np.int32)
    linked = _is_linked(profile, part)
    event: SmallIntArray = np.where(linked, profile.host_event[part], 0).astype(np.int32)
    return np.where(linked, column[event], 0).astype(np.int32)


def _utf8(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode, in a text."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _texts(
    texts: StringTable | tuple[str, ...], rows: NDArray[np.integer], spell: Callable[[str], str]
) -> pa.Array[Any]:
    import pyarrow as pa

    used, inverse = np.unique(rows, return_inverse=True)
    listed: list[int] = used.tolist()
    return pa.array([spell(texts[row]) for row in listed], pa.string()).take(pa.array(inverse, pa.int64()))


def _whole(column: NDArray[np.integer]) -> pa.Array[Any]:
    """Convert whole numbers to an Arrow column; -1 (unknown) becomes null."""
    import pyarrow as pa

    return pa.array(column.astype(np.int64), pa.int64(), mask=column < 0)


def _numbers(column: FloatArray) -> pa.Array[Any]:
    import pyarrow as pa

    return pa.array(np.ascontiguousarray(column, np.float64), pa.float64(), mask=np.isnan(column))
