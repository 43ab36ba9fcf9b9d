"""Programs of a few nodes and recordings of a few events, given by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan

import numpy as np

from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    HostOps,
    MeasuredComms,
    NodeKind,
    OpClass,
    OpGraph,
    Profile,
    RegionKind,
    dtype,
)
from hespas.graph.columns import StringTableBuilder
from hespas.graph.groups import StridedGroups

F32 = dtype("f32")


@dataclass(slots=True)
class Program:
    """Builder of a graph; nodes are numbered in the order in which they are added."""

    builder: GraphBuilder = field(default_factory=lambda: GraphBuilder("program"))

    def add(
        self,
        name: str,
        op: str = "",
        op_class: OpClass = OpClass.CONTRACTION,
        *deps: int,
        framework: str = "",
        source: str = "",
        takes: Sequence[Sequence[int]] = (),
        makes: Sequence[Sequence[int]] = (),
        flops: float = 100.0,
        moved: float = 10.0,
        region: int = -1,
        duration_ns: float = nan,
    ) -> int:
        b = self.builder
        node = b.add_node(
            name_id=b.strings.add(name),
            op_id=b.strings.add(op or name),
            op_class=op_class,
            kind=NodeKind.COLLECTIVE if op_class is OpClass.COLLECTIVE else NodeKind.COMPUTE,
            data_deps=deps,
            operands=[b.types.add(F32, tuple(shape)) for shape in takes],
            results=[b.types.add(F32, tuple(shape)) for shape in makes],
            flops=flops,
            transcendentals=0.0,
            bytes_read=moved,
            bytes_written=0.0,
            region=region,
        )
        b.set(
            node,
            framework_id=b.strings.add(framework),
            source_id=b.strings.add(source),
            duration_ns=duration_ns,
        )
        if op_class is OpClass.COLLECTIVE:
            everyone = b.group_set(StridedGroups.all_ranks(2))
            b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=everyone, comm_bytes=moved)
        return node

    def loop(self, trips: float) -> int:
        return self.builder.add_region(RegionKind.LOOP_BODY, trips=trips, label="loop")

    def build(self) -> OpGraph:
        return self.builder.build()


@dataclass(slots=True)
class Recording:
    """Builder of a profile; an event starts at the end of the previous one, or at ``at``."""

    name: str = "recording"
    strings: StringTableBuilder = field(default_factory=StringTableBuilder)
    rows: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    times: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    comms: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    host: HostOps | None = None
    end_ns: float = 0.0

    def event(
        self,
        op: str,
        duration_ns: float = 10.0,
        *,
        at: float = nan,
        module: str = "",
        kernel: str = "",
        shapes: str = "",
        dtypes: str = "",
        run: int = -1,
        rank: int = 0,
        stream: int = 0,
        host: int = -1,
        collective: int = -1,
    ) -> None:
        start = self.end_ns if np.isnan(at) else at
        self.end_ns = start + duration_ns
        texts = (self.strings.add(text) for text in (op, module, kernel, shapes, dtypes))
        self.rows.append((*texts, run, rank, stream, host))
        self.times.append((start, duration_ns))
        if collective >= 0:
            self.comms.append((len(self.rows) - 1, collective))

    def build(
        self, attachments: Mapping[str, bytes] | None = None, devices: tuple[str, ...] = ("H100-SXM",)
    ) -> Profile:
        columns = np.array(self.rows, np.int32).reshape(-1, 9).T
        times = np.array(self.times, np.float64).reshape(-1, 2)
        return Profile.of(
            self.name,
            devices,
            self.strings.build(),
            start_ns=times[:, 0],
            duration_ns=times[:, 1],
            op_id=columns[0],
            module_id=columns[1],
            kernel_id=columns[2],
            shapes_id=columns[3],
            dtype_id=columns[4],
            run=columns[5],
            rank=columns[6],
            stream=columns[7].astype(np.int64),
            host_event=columns[8],
            comms=self._comms(),
            host=self.host,
            attachments=attachments,
        )

    def _comms(self) -> MeasuredComms:
        group = self.strings.add("world")
        count = len(self.comms)
        rows, unknown = np.full(count, group, np.int32), np.full(count, nan)
        return MeasuredComms(
            event=np.array([event for event, _ in self.comms], np.int32),
            kind_id=rows,
            operand_bytes=unknown,
            result_bytes=unknown,
            group_id=rows,
            ranks_id=rows * 0,
            group_size=rows * 0 + 2,
            sequence=np.array([number for _, number in self.comms], np.int64),
        )
