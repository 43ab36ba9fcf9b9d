"""Device work of an export: kernels, copies, fills, and CUDA graphs that were recorded as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from hespas.converters.gpu_trace.database import MISSING, Database
from hespas.converters.gpu_trace.nesting import match_pairs
from hespas.converters.gpu_trace.trace import DeviceWork, listed
from hespas.converters.nsys.strings import Strings
from hespas.graph import Diagnostics, OpClass
from hespas.graph.columns import IntArray

__all__ = ["read_work"]

_COMMON = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
_COPIES: MappingProxyType[int, tuple[str, OpClass]] = MappingProxyType(
    {
        1: ("HtoD", OpClass.MEMORY),
        2: ("DtoH", OpClass.MEMORY),
        3: ("HtoA", OpClass.MEMORY),
        4: ("AtoH", OpClass.MEMORY),
        5: ("AtoA", OpClass.MOVE),
        6: ("AtoD", OpClass.MOVE),
        7: ("DtoA", OpClass.MOVE),
        8: ("DtoD", OpClass.MOVE),
        9: ("HtoH", OpClass.MEMORY),
        10: ("PtoP", OpClass.MOVE),
        11: ("UVM HtoD", OpClass.MEMORY),
        12: ("UVM DtoH", OpClass.MEMORY),
        13: ("UVM DtoD", OpClass.MOVE),
    }
)
"""``copyKind`` (table ``ENUM_CUDA_MEMCPY_OPER``) -> as Kineto calls it, and whether the host takes part."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    database: Database
    strings: Strings
    gpus: _Gpus
    diagnostics: Diagnostics

    def part(
        self, table: str, category: str, further: tuple[str, ...]
    ) -> tuple[DeviceWork, dict[str, IntArray]]:
        """The work of one table without names, and the further columns. What has no times is left out."""
        columns = self.database.read(table, (*_COMMON, *further)).integers
        known = (columns["start"] != MISSING) & (columns["end"] != MISSING)
        told = f"rows of {table} have no start or no end and are left out"
        lost = len(known) - int(known.sum())
        self.diagnostics.error("nsys.event-without-time", self.database.path, told, count=lost)
        columns = {name: column[known] for name, column in columns.items()}
        count = int(known.sum())
        nothing = np.zeros(count, np.int64)
        process = np.where(columns["globalPid"] == MISSING, -1, columns["globalPid"] >> 24)
        gpu, device = self.gpus.of(process, columns["deviceId"])
        bytes_moved = columns.get("bytes", np.full(count, -1, np.int64))
        return DeviceWork(
            process=process,
            gpu=gpu,
            device=device,
            stream=_or_unknown(columns["streamId"]),
            start_ns=columns["start"],
            end_ns=columns["end"],
            name_row=nothing,
            category_row=np.full(count, self.strings.builder.add(category), np.int64),
            bytes_moved=_or_unknown(bytes_moved),
            correlation=_or_unknown(columns["correlationId"]),
            node=_or_unknown(columns["graphNodeId"]),
            range_row=nothing,
            op_class=nothing.copy(),
        ), columns

    def kernels(self) -> DeviceWork:
        names = ("demangledName", "shortName", "mangledName")
        part, columns = self.part("CUPTI_ACTIVITY_KIND_KERNEL", "kernel", names)
        row = np.zeros(len(part), np.int64)
        for name in names:
            row = np.where(row > 0, row, self.strings.rows(columns[name]))
        return replace(part, name_row=row)

    def copies(self) -> DeviceWork:
        further = ("bytes", "copyKind", "srcKind", "dstKind")
        part, columns = self.part("CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy", further)
        labels = _labels(self.database, "ENUM_CUDA_MEM_KIND")
        operations = _labels(self.database, "ENUM_CUDA_MEMCPY_OPER")
        triples = np.stack([columns[name] for name in further[1:]])
        distinct, codes = np.unique(triples, axis=1, return_inverse=True)
        rows: list[int] = []
        classes: list[int] = []
        for kind, source, target in zip(*(listed(each) for each in distinct), strict=True):
            short, op_class = _COPIES.get(kind, (operations.get(kind, "unknown"), OpClass.UNKNOWN))
            between = f" ({labels[source]} -> {labels[target]})" if {source, target} <= labels.keys() else ""
            rows.append(self.strings.builder.add(f"Memcpy {short}{between}"))
            classes.append(op_class)
        return replace(part, name_row=_picked(rows, codes), op_class=_picked(classes, codes))

    def fills(self) -> DeviceWork:
        part, _ = self.part("CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset", ("bytes",))
        row = self.strings.builder.add("Memset")
        return replace(part, name_row=np.full(len(part), row, np.int64))

    def decompressions(self) -> DeviceWork:
        part, columns = self.part(
            "CUPTI_ACTIVITY_KIND_MEM_DECOMPRESS", "gpu_mem_decompress", ("sourceBytes",)
        )
        row = self.strings.builder.add("MemDecompress")
        moved = _or_unknown(columns["sourceBytes"])
        return replace(part, name_row=np.full(len(part), row, np.int64), bytes_moved=moved)

    def graphs(self, others: DeviceWork) -> DeviceWork:
        """Graphs recorded as a whole. Where their nodes were recorded too, those are the work."""
        part, columns = self.part("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "cuda_graph", ("graphId",))
        wanted = (part.process, part.correlation)
        covered = match_pairs((others.process, others.correlation), wanted) >= 0
        told = "CUDA graphs whose nodes are recorded too are left out: their time is that of the nodes"
        self.diagnostics.info(
            "nsys.graph-of-recorded-nodes", self.database.path, told, count=int(covered.sum())
        )
        numbers, codes = np.unique(columns["graphId"], return_inverse=True)
        rows = [self.strings.builder.add(f"CUDA graph {max(number, 0)}") for number in listed(numbers)]
        return replace(part, name_row=_picked(rows, codes)).taken(np.flatnonzero(~covered))


def read_work(
    database: Database, strings: Strings, diagnostics: Diagnostics
) -> tuple[DeviceWork, tuple[str, ...]]:
    """All device work by start, and the names of the devices. O(n log n)."""
    gpus = _Gpus(database)
    reader = _Reader(database, strings, gpus, diagnostics)
    nodes = DeviceWork.joined((reader.kernels(), reader.copies(), reader.fills(), reader.decompressions()))
    return DeviceWork.joined((nodes, reader.graphs(nodes))), tuple(gpus.names)


class _Gpus:
    """Which GPU a process means by a device number, and its name. ``names`` holds each name once."""

    def __init__(self, database: Database) -> None:
        gpus = database.read("TARGET_INFO_GPU", ("id", "cuDevice"), ("name",))
        texts = [text.decode("utf-8", "replace") for text in gpus.distinct]
        numbers, own, places = (listed(each) for each in (*gpus.integers.values(), gpus.texts["name"]))
        labels = [texts[place] if place >= 0 else "" for place in places]
        self._name = dict(zip(numbers, labels, strict=True))
        self._by_number = {number: gpu for number, gpu in zip(own, numbers, strict=True) if number >= 0}
        seen = database.read("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId")).integers
        pids, devices, ids = (listed(column) for column in seen.values())
        self._seen = {
            (pid, number): gpu for pid, number, gpu in zip(pids, devices, ids, strict=True) if gpu >= 0
        }
        self.names: dict[str, int] = {}

    def of(self, process: IntArray, number: IntArray) -> tuple[IntArray, IntArray]:
        """The GPU of each event (-1: unknown), and the place of its name."""
        pairs, codes = np.unique(np.stack((process, number)), axis=1, return_inverse=True)
        owners, devices = listed(pairs[0]), listed(pairs[1])
        found = [self._one(owner & 0xFFFFFF, each) for owner, each in zip(owners, devices, strict=True)]
        return _picked([gpu for gpu, _ in found], codes), _picked([place for _, place in found], codes)

    def _one(self, pid: int, number: int) -> tuple[int, int]:
        gpu = self._seen.get((pid, number))
        if gpu is None:
            gpu = self._by_number.get(number, number if number >= 0 else -1)
        return gpu, self.names.setdefault(self._name.get(gpu, ""), len(self.names))


def _labels(database: Database, table: str) -> dict[int, str]:
    """A table of numbers and what they mean."""
    found = database.read(table, ("id",), ("label",))
    texts = [text.decode("utf-8", "replace") for text in found.distinct]
    pairs = zip(listed(found.integers["id"]), listed(found.texts["label"]), strict=True)
    return {number: texts[place] for number, place in pairs if place >= 0}


def _or_unknown(column: IntArray) -> IntArray:
    return np.maximum(column, -1)


def _picked(values: list[int], codes: IntArray) -> IntArray:
    return np.array(values, np.int64)[codes.reshape(-1)] if values else np.zeros(0, np.int64)
