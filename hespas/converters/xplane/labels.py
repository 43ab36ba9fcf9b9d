"""What a device event is called: its operation, its kernel, its category, and the bytes it moved."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hespas.converters.xplane.collect import DeviceTable
from hespas.converters.xplane.lines import ABSENT, Line, LineKind
from hespas.converters.xplane.texts import Texts
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["Labels", "collective_kinds", "labels_of"]

_INSTRUCTION = re.compile(r"%?([\w.\-]+) = ")
_BYTES = re.compile(r"\b(?:num_bytes|size|bytes):(\d{1,18})\b")
_COLLECTIVE = re.compile(
    r"%?(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(-start|-done)?(\.\d+|\.clone)*"
)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Columns of a profile; rows are rows of the string table."""

    op_row: IntArray
    kernel_row: IntArray
    category_row: IntArray
    bytes_moved: FloatArray


def labels_of(device: DeviceTable, lines: tuple[Line, ...], strings: Texts) -> Labels:
    """Name every device event.

    An operation is what ``hlo_op`` says, else, on a line of operations or transfers, the name of the event or
    of the instruction whose text that is. The category is the name of the line for those, ``kernel``,
    ``memcpy`` or ``memset`` on streams, ``thunk`` on a host thread, and ``wrapper`` for what encloses others.
    """
    stats = device.stats
    of_op_line = np.array([line.kind is LineKind.OPS for line in lines], np.bool_)[device.line]
    short = _mapped(device.name_row, lambda row: strings.add(_instruction(strings[row])))
    named = np.where(of_op_line, short, 0)
    op_row = np.where(
        stats["hlo_op"] > 0,
        _mapped(stats["hlo_op"], lambda row: strings.add(strings[row].lstrip("%"))),
        named,
    )
    kernel_row = np.where(of_op_line, short, device.name_row)
    details = np.where(stats["memcpy_details"] > 0, stats["memcpy_details"], stats["memset_details"])
    return Labels(op_row, kernel_row, _categories(device, lines, strings), _bytes(stats, details, strings))


def _mapped(rows: IntArray, convert: Callable[[int], int]) -> IntArray:
    """A function of rows, applied once to each."""
    unique, inverse = np.unique(rows, return_inverse=True)
    return np.array([convert(row) for row in unique.tolist()], np.int64)[inverse]


def _instruction(text: str) -> str:
    """``fusion.1`` of ``%fusion.1 = f32[8]{0} fusion(...)``; other names stay."""
    found = _INSTRUCTION.match(text[:4096])
    return found[1] if found else text.lstrip("%")


def _category(line: Line) -> str:
    match line.kind:
        case LineKind.HOST:
            return "thunk"
        case LineKind.STREAM:
            return "kernel"
        case _:
            return line.name


def _categories(device: DeviceTable, lines: tuple[Line, ...], strings: Texts) -> IntArray:
    of_line = [strings.add(_category(line)) for line in lines]
    category = np.array(of_line, np.int64)[device.line]
    on_stream = np.array([line.kind is LineKind.STREAM for line in lines], np.bool_)[device.line]
    for name, text in (("memcpy_details", "memcpy"), ("memset_details", "memset")):
        category[on_stream & (device.stats[name] > 0)] = strings.add(text)
    category[device.is_wrapper] = strings.add("wrapper")
    return category


def _bytes(stats: dict[str, IntArray], details: IntArray, strings: Texts) -> FloatArray:
    """Bytes that a copy moved, else those that an operation says it touches."""
    moved = np.full(len(details), np.nan)
    for name in ("bytes_accessed", "bytes_transferred"):
        known = (stats[name] != ABSENT) & (stats[name] >= 0)
        moved[known] = stats[name][known]
    rows, inverse = np.unique(details, return_inverse=True)
    sizes = np.array([_copied(strings[row]) for row in rows.tolist()], np.float64)[inverse]
    return np.where(np.isnan(sizes), moved, sizes)


def _copied(details: str) -> float:
    """The size in ``kind:Unknown size:655360 dest:2 async:1``, NaN where there is none."""
    found = _BYTES.search(details[:1024])
    return float(found[1]) if found else np.nan


def collective_kinds(op_row: IntArray, strings: Texts) -> IntArray:
    """The string row of the collective that each operation is by its name (``all-reduce``), 0 for others."""

    def kind(row: int) -> int:
        found = _COLLECTIVE.fullmatch(strings[row])
        return strings.add(found[1]) if found else 0

    return _mapped(op_row, kind)
