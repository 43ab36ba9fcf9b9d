"""Writes an op graph as JSON: header and tables indented, one node a line, streamed chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np

from hespas import __version__
from hespas.converters.format import Value, WriteOptions
from hespas.converters.op_graph.document import (
    SCHEMA_ID,
    Extra,
    GroupSpec,
    Node,
    PermutationSpec,
    Region,
    TensorType,
)
from hespas.converters.op_graph.json_chunks import NodeSpeller, type_spellings
from hespas.converters.op_graph.legality import oversized_type
from hespas.converters.op_graph.ranks import encode_ranks
from hespas.converters.op_graph.spelling import (
    default_type_bytes,
    escape_text,
    spell_groups,
    spell_number,
    spell_permutation,
    spell_type,
)
from hespas.graph import Diagnostics, OpGraph, RegionKind, Workload
from hespas.graph.errors import OutputError, UnsupportedError, UsageError

__all__ = ["check_writable", "write_json"]

_ENCODER = msgspec.json.Encoder()
_REGIONS = {member.value: member.name.lower() for member in RegionKind}

_Entry = (
    int
    | str
    | GroupSpec
    | TensorType
    | PermutationSpec
    | Region
    | Extra
    | Node
    | dict[str, str]
    | tuple[int, int]
    | tuple[int, int, int]
)


def check_writable(value: Value, path: Path, options: WriteOptions) -> Workload:
    """The workload to write. Raises ``UsageError`` for a profile, or where only some ranks are asked for, and
    ``UnsupportedError`` for a type that our readers refuse.
    """
    if not isinstance(value, Workload):
        raise UsageError(
            "an op graph holds a workload, not a profile", path=str(path), hint="choose another --to"
        )
    if options.ranks is not None and options.ranks != range(value.num_ranks):
        raise UsageError(
            "an op graph holds all ranks in one file: groups and peers refer to them",
            path=str(path),
            hint="drop --ranks; rank classes make a file of 65,536 ranks as small as one of 8",
        )
    for graph in value.classes:
        row = oversized_type(graph.types)
        if row >= 0:
            types = graph.types
            shown = spell_type(int(types.dtype[row]), types.shape(row), bool(types.bounded[row]))
            raise UnsupportedError(
                f"{graph.name}: a tensor of more than 2**63 elements: {shown}", hint="correct the shape"
            )
    return value


def write_json(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a workload; memory is one chunk of nodes. A name that ends in ``.gz`` is compressed.

    Raises as :func:`check_writable` does, and ``OutputError`` where the disk refuses.
    """
    del diagnostics  # nothing is lost: every column has a field
    workload = check_writable(value, path, options)
    try:
        with ExitStack() as stack:
            stream: BinaryIO = stack.enter_context(path.open("wb"))
            if options.name.endswith(".gz"):
                stream = stack.enter_context(_packed(stream))
            _Writer(stream, options.progress).workload(workload)
    except OSError as error:
        raise OutputError(error.strerror or str(error), path=str(path), hint="check the disk") from error


def _packed(raw: BinaryIO) -> BinaryIO:
    """A gzip stream into ``raw`` without name and time: equal graphs are equal files."""
    import gzip

    return cast("BinaryIO", gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0))


class _Writer:
    """Emits the document's brackets, commas and indents; values are msgspec's."""

    def __init__(self, stream: BinaryIO, progress: Callable[[int, int], None] | None) -> None:
        self._stream = stream
        self._progress = progress
        self._done, self._total = 0, 0

    def workload(self, workload: Workload) -> None:
        self._total = sum(map(len, workload.classes))
        metadata = {escape_text(key): escape_text(text) for key, text in workload.metadata.items()}
        self._stream.write(b"{\n")
        self._field(2, "schema", SCHEMA_ID)
        self._field(2, "hespas_version", __version__)
        self._field(2, "name", escape_text(workload.name))
        self._field(2, "num_ranks", workload.num_ranks)
        self._field(2, "metadata", metadata)
        self._list(2, "rank_class", encode_ranks(workload.rank_class))
        self._stream.write(b'  "rank_classes": [')
        for index, graph in enumerate(workload.classes):
            self._stream.write(b",\n    {\n" if index else b"\n    {\n")
            self._graph(graph)
            self._stream.write(b"    }")
        self._stream.write(b"\n  ]\n}\n")

    def _graph(self, graph: OpGraph) -> None:
        speller = NodeSpeller(graph)
        self._field(6, "name", escape_text(graph.name))
        self._list(6, "types", _types(graph))
        self._list(6, "group_sets", [spell_groups(groups) for groups in graph.group_sets])
        self._list(6, "permutations", [spell_permutation(entry) for entry in graph.permutations])
        self._list(6, "regions", _regions(graph))
        self._list(6, "carried", _carried(graph, speller))
        self._list(6, "extra", speller.extras(-1, 0)[0])
        self._attachments(graph)
        if speller.by_position:
            self._field(6, "deps_by", "position")
        self._nodes(speller)

    def _field(self, indent: int, name: str, value: _Entry) -> None:
        self._stream.write(b'%*s"%s": %s,\n' % (indent, b"", name.encode(), _ENCODER.encode(value)))

    def _list(self, indent: int, name: str, items: Sequence[_Entry]) -> None:
        """One item a line; nothing where there is none."""
        if not items:
            return
        self._stream.write(b'%*s"%s": [\n' % (indent, b"", name.encode()))
        self._items(indent + 2, items)
        self._stream.write(b"\n%*s],\n" % (indent, b""))

    def _items(self, indent: int, items: Iterable[_Entry]) -> None:
        pad = b" " * indent
        self._stream.write(b",\n".join(pad + _ENCODER.encode(item) for item in items))

    def _attachments(self, graph: OpGraph) -> None:
        if not graph.attachments:
            return
        self._stream.write(b'      "attachments": {')
        for index, (name, content) in enumerate(graph.attachments.items()):
            key = _ENCODER.encode(escape_text(name))
            self._stream.write(b",\n        " if index else b"\n        ")
            self._stream.write(key + b": " + _ENCODER.encode(content))
        self._stream.write(b"\n      },\n")

    def _nodes(self, speller: NodeSpeller) -> None:
        self._stream.write(b'      "nodes": [')
        for index, chunk in enumerate(speller.chunks()):
            self._stream.write(b",\n" if index else b"\n")
            self._items(8, chunk)
            self._done += len(chunk)
            if self._progress:
                self._progress(self._done, self._total)
        self._stream.write(b"\n      ]\n")


def _types(graph: OpGraph) -> list[str | TensorType]:
    types = graph.types
    entries: list[str | TensorType] = []
    for row, reference in enumerate(type_spellings(graph)):
        spelling = reference.partition("#")[0]
        size, encoding = float(types.bytes[row]), graph.strings[int(types.encoding[row])]
        expected = default_type_bytes(int(types.dtype[row]), types.shape(row))
        same = size == expected or bool(np.isnan(size) and np.isnan(expected))
        if same and not encoding:
            entries.append(spelling)
            continue
        stated = msgspec.UNSET if same else spell_number(size)
        entries.append(TensorType(type=spelling, encoding=escape_text(encoding), bytes=stated))
    return entries


def _regions(graph: OpGraph) -> list[Region]:
    regions = graph.regions
    return [
        Region(
            kind=_REGIONS[int(regions.kind[row])],
            parent=int(regions.parent[row]),
            trips=spell_number(float(regions.trips[row])),
            label=escape_text(graph.strings[int(regions.label[row])]),
        )
        for row in range(len(regions))
    ]


def _carried(graph: OpGraph, speller: NodeSpeller) -> list[tuple[int, int, int]]:
    regions = graph.regions
    producers = speller.identity(regions.carried_producer)
    consumers = speller.identity(regions.carried_consumer)
    return list(zip(regions.carried_region.tolist(), producers, consumers, strict=True))
