"""StableHLO programs: https://openxla.org/stablehlo/spec. jaxlib's bindings load on the first read or write.

A graph that was read from a program is written as that program, any other graph as a replay, which does the
same work in the same order (:mod:`.replay`). Several rank classes are a folder of replays (:mod:`.reader`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hespas.converters.format import Format, Head, Value, WriteOptions, lazily
from hespas.files.streams import open_input
from hespas.graph import Workload

__all__ = [
    "ATTACHMENT",
    "BYTECODE_MAGIC",
    "CLASS_MARK",
    "FORMAT",
    "OPERAND_TYPES",
    "RESULT_TYPES",
    "UNKNOWN_WORK",
    "chosen_classes",
    "class_files",
    "looks_like_text",
    "sniff",
]


def chosen_classes(workload: Workload, options: WriteOptions) -> list[int]:
    """Return the rank classes of the ranks to write, ascending."""
    ranks = options.ranks if options.ranks is not None else range(workload.num_ranks)
    return [row for row, size in enumerate(workload.sizes_within(ranks)) if size]


def _writes_directory(value: Value, options: WriteOptions) -> bool:
    """Return True if the output is a folder, because several rank classes are separate programs."""
    if not isinstance(value, Workload) or len(value.classes) == 1:
        return False
    return len(chosen_classes(value, options)) > 1


_VERSIONS = ("0.9.0", *map("1.{}.0".format, range(18)))
"""Versions of the portable artifact: the oldest that can be read, and all stable ones."""

_LOSSES = {
    "": ("attachments", "source_id"),
    "stablehlo.metadata": ("metadata",),
    "stablehlo.replay": ("*",),
    "stablehlo.replay-flops": ("flops", "useful_flops"),
    "stablehlo.replay-bytes": ("bytes_read", "bytes_written"),
    "stablehlo.comm-bytes": ("collectives", "p2p"),
    "stablehlo.reduction": ("collectives",),
    "stablehlo.durations": ("duration_ns",),
    "stablehlo.streams": ("stream", "resource"),
    "stablehlo.names": ("id", "name", "name_id", "framework_id", "regions.label"),
    "stablehlo.costs": (
        *("op_class", "rate_dtype", "flops", "useful_flops", "transcendentals", "bytes_read"),
        *("bytes_written", "contractions", "collectives", "p2p"),
    ),
    "stablehlo.trips": ("executions", "regions"),
    "stablehlo.extra": ("extra",),
    "stablehlo.communicators": ("collectives",),
    "stablehlo.attachments": ("attachments",),
}
"""Columns that a program does not keep, by the code of the writer's report."""

CLASS_MARK = "// Rank class"
"""Start of the line that identifies the rank class of a program."""

UNKNOWN_WORK = "hespas.unknown_work"
"""Attribute of a replayed operation with unknown FLOPs; its value is the name in the graph."""

OPERAND_TYPES, RESULT_TYPES = "hespas.operand_types", "hespas.result_types"
"""Attributes of a replayed operation: its quantised types in order, ``""`` for types that are not quantised.
The operation itself has the storage types, because XLA runs no others.
"""

ATTACHMENT = "stablehlo"
"""Name of the program that is attached to a graph."""

BYTECODE_MAGIC = b"ML\xefR"

_DIALECTS = (b"stablehlo.", b"func.func", b"vhlo.", b"mhlo.", b"chlo.")
_MAX_EXPORT_HEAD = 4_096
_CLASS_FILE = re.compile(r"(.*)\.(0|[1-9]\d{0,6})\.mlir")
_COMMENTS = re.compile(rb"(?:\s+|//[^\n]*(?:\n|\Z))*")
_TEXT_START = re.compile(
    rb'(?:"?(?:builtin\.)?module\b|"?func\.func\b|"?sdy\.mesh\b|"?vhlo\.|"?stablehlo\.|#[A-Za-z_][\w.$]*\s*=|![A-Za-z_]\w*\s*=|\{-#)'
)


def looks_like_text(data: bytes) -> bool:
    """Return True if the bytes start, after comments, like an MLIR program."""
    start = _COMMENTS.match(data)
    return _TEXT_START.match(data, start.end() if start else 0) is not None


def sniff(head: Head) -> int:
    """Return 100 for bytecode, 95 for text with operations, 90 for an export file, less for other MLIR text.

    Inputs are recognised by content, without jaxlib.
    """
    data = head.data
    if head.is_directory:
        # The first file of a folder that Hespas wrote is marked as the program of a rank class.
        files = class_files(head.names)
        if not files:
            return 0
        try:
            with open_input(Path(head.path) / next(iter(files.values()))) as stream:
                start = stream.read(_MAX_EXPORT_HEAD)
        except OSError:
            return 0
        return 100 if CLASS_MARK.encode() in start else 0
    if not data:
        return 0
    if data.startswith(BYTECODE_MAGIC):
        return 100
    if 0 < data.find(BYTECODE_MAGIC) <= _MAX_EXPORT_HEAD:
        return 90
    if looks_like_text(data):
        return 95 if any(name in data for name in _DIALECTS) else 60
    # A comment may fill the head, and some exporters start in the middle of a comment.
    return 70 if b"stablehlo." in data and b"func.func" in data else 0


def class_files(names: Iterable[str]) -> dict[int, str]:
    """Return the files of a folder by the number of the rank class, ascending. Return an empty dictionary
    unless all files are called ``NAME.{class}.mlir`` with the same NAME.
    """
    parsed_names = [_CLASS_FILE.fullmatch(name) for name in names if not name.startswith(".")]
    matches = [match for match in parsed_names if match is not None]
    if len(matches) < len(parsed_names) or len({match[1] for match in matches}) != 1:
        return {}
    return dict(sorted((int(match[2]), match[0]) for match in matches))


FORMAT = Format(
    name="stablehlo",
    title="StableHLO program (text, bytecode, VHLO portable artifact, jax.export file)",
    suffixes=(".mlir", ".stablehlo", ".mlirbc", ".bc", ".vhlo", ".jaxexport", ".jax_export"),
    specification="https://openxla.org/stablehlo/spec",
    sniff=sniff,
    never_json=True,
    read=lazily("hespas.converters.stablehlo.reader:read"),
    write=lazily("hespas.converters.stablehlo.write:write"),
    writes_directory=_writes_directory,
    write_versions=_VERSIONS,
    timed=False,
    losses=_LOSSES,
    extra="stablehlo",
    reads_options=("dims",),
)
