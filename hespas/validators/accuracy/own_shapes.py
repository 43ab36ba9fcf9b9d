"""Tables of operations, which state the shapes of each: as traces of a host have them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from hespas.graph import HostOps, Profile
from hespas.graph.columns import SmallIntArray, StringTable, StringTableBuilder

__all__ = ["with_own_shapes"]


def with_own_shapes(profile: Profile) -> Profile:
    """A table of operations, which states name and shapes of each: as many host operations, one for each."""
    nothing = np.zeros(len(profile), np.int32)
    strings, dtype_row = _listed_dtypes(profile)
    host = HostOps(
        name_row=profile.op_row,
        thread_row=nothing,
        parent=nothing - 1,
        start_ns=profile.start_ns,
        duration_ns=profile.duration_ns,
        sequence=np.full(len(profile), -1, np.int64),
        shapes_row=profile.shapes_row,
        dtype_row=dtype_row,
        strides_row=nothing,
        values_row=nothing,
    )
    events = np.arange(len(profile), dtype=np.int32)
    return replace(profile, strings=strings, host=host, host_event=events)


def _listed_dtypes(profile: Profile) -> tuple[StringTable, SmallIntArray]:
    """One element type per operand, as traces list them: tables state one for all."""
    strings = StringTableBuilder(profile.strings)
    pairs = profile.dtype_row.astype(np.int64) << 32 | profile.shapes_row
    distinct, place = np.unique(pairs, return_inverse=True)
    rows: list[int] = []
    for pair in distinct.tolist():
        row, shapes = pair >> 32, profile.strings[pair & 0xFFFFFFFF]
        dtype = profile.strings[row]
        if dtype and not dtype.startswith("["):
            try:
                operands = msgspec.json.decode(shapes, type=list[msgspec.Raw])
            except (msgspec.DecodeError, RecursionError):
                operands = []  # no list of shapes: no cost either
            row = strings.add(msgspec.json.encode([dtype] * len(operands)).decode())
        rows.append(row)
    return strings.build(), np.array(rows, np.int32)[place]
