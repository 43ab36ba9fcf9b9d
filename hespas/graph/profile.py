"""Measurements on devices, and the activity of the host at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, TypedDict, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import (
    ColumnTable,
    FloatArray,
    IntArray,
    SmallIntArray,
    StringTable,
    check_lengths,
    dtypes_of,
)
from hespas.graph.deprecation import renamed_fields
from hespas.graph.errors import clipped, short_repr

__all__ = [
    "CAPTURED_THREAD",
    "CompilerCosts",
    "HostOps",
    "HostRanges",
    "MeasuredComms",
    "MeasuredMemory",
    "OptionalEventColumns",
    "Profile",
    "StepRanges",
]


CAPTURED_THREAD = "graph capture"
"""Thread name of host operations that were captured in a CUDA or HIP graph."""


@renamed_fields(
    name_row="name_id",
    thread_row="thread_id",
    shapes_row="shapes_id",
    dtype_row="dtype_id",
    strides_row="strides_id",
    values_row="values_id",
)
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostOps(ColumnTable):
    """Operations on the host; columns of shape ``(operations,)``. Columns in ``_id`` are rows of the
    profile's ``strings``.

    ``parent`` is the row of the enclosing operation (-1: none). ``thread_id`` names process and thread.
    ``shapes_id``, ``dtype_id``, ``strides_id`` and ``values_id`` describe the inputs as JSON texts.
    ``sequence`` is equal for a forward operation and its backward operations (-1: none). Operations of a
    captured graph that was replayed have the thread :data:`CAPTURED_THREAD` and duration 0.
    """

    name_id: SmallIntArray
    thread_id: SmallIntArray
    parent: SmallIntArray
    start_ns: FloatArray
    duration_ns: FloatArray
    sequence: IntArray
    shapes_id: SmallIntArray
    dtype_id: SmallIntArray
    strides_id: SmallIntArray
    values_id: SmallIntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompilerCosts(ColumnTable):
    """Costs that a compiler reports for its kernels; columns of shape ``(kernels,)``.

    ``op`` is the row in the profile's host operations. ``flops`` counts only matmuls and convolutions.
    ``bytes_moved`` is the traffic of the kernel (NaN unknown).
    """

    op: SmallIntArray
    flops: FloatArray
    bytes_moved: FloatArray


@renamed_fields(kind_row="kind_id", group_row="group_id", ranks_row="ranks_id")
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasuredComms(ColumnTable):
    """Properties of communication events; columns of shape ``(communications,)``. Columns in ``_id`` are rows
    of the profile's ``strings`` (0: unknown).

    ``event`` is the row in the profile. ``kind_id`` is the operation as the library names it (``allreduce``),
    ``group_id`` the process group, ``ranks_id`` its members as a JSON list. ``operand_bytes`` and
    ``result_bytes`` are per rank (NaN unknown). ``sequence`` counts the operations of a group (-1 unknown).
    ``group_size`` is -1 if unknown.
    """

    event: SmallIntArray
    kind_id: SmallIntArray
    operand_bytes: FloatArray
    result_bytes: FloatArray
    group_id: SmallIntArray
    ranks_id: SmallIntArray
    group_size: SmallIntArray
    sequence: IntArray


@renamed_fields(name_row="name_id", thread_row="thread_id")
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostRanges(ColumnTable):
    """Time ranges on the host that are not operations; columns of shape ``(ranges,)``.

    Columns in ``_id`` are rows of the profile's ``strings``. Threads have the same names as in
    :class:`HostOps`.
    """

    name_id: SmallIntArray
    thread_id: SmallIntArray
    start_ns: FloatArray
    duration_ns: FloatArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepRanges(ColumnTable):
    """Time ranges of training steps on the host (``ProfilerStep#N``), as columns of shape ``(ranges,)``.

    ``number`` is the number of the step, equal to :attr:`Profile.run` of its events. Several threads and
    processes may report a range of one step.
    """

    number: IntArray
    start_ns: FloatArray
    duration_ns: FloatArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasuredMemory(ColumnTable):
    """Allocations and releases of memory; columns of shape ``(changes,)``.

    ``allocated_bytes`` and ``reserved_bytes`` are the totals of the allocator of ``device`` (-1: the host)
    after each change (NaN unknown).
    """

    time_ns: FloatArray
    device: SmallIntArray
    change_bytes: FloatArray
    allocated_bytes: FloatArray
    reserved_bytes: FloatArray


class OptionalEventColumns(TypedDict, total=False):
    """Columns of :class:`Profile` that a profiler may not record."""

    op_id: NDArray[np.integer]
    module_id: NDArray[np.integer]
    kernel_id: NDArray[np.integer]
    category_id: NDArray[np.integer]
    shapes_id: NDArray[np.integer]
    dtype_id: NDArray[np.integer]
    op_class: NDArray[np.integer]
    device_index: NDArray[np.integer]
    rank: NDArray[np.integer]
    stream: NDArray[np.integer]
    run: NDArray[np.integer]
    bytes_moved: FloatArray
    host_event: NDArray[np.integer]
    launch_start_ns: FloatArray
    launch_end_ns: FloatArray
    launch_thread_id: NDArray[np.integer]
    grid_id: NDArray[np.integer]
    batch_id: NDArray[np.integer]
    repeats: NDArray[np.integer]
    spread_ns: FloatArray


_UNKNOWN: dict[str, tuple[type[np.generic], float]] = {
    **dict.fromkeys(("op_id", "module_id", "kernel_id", "category_id", "shapes_id"), (np.int32, 0)),
    **dict.fromkeys(
        ("dtype_id", "launch_thread_id", "grid_id", "batch_id", "device_index", "rank"), (np.int32, 0)
    ),
    **dict.fromkeys(("run", "host_event"), (np.int32, -1)),
    **dict.fromkeys(("bytes_moved", "launch_start_ns", "launch_end_ns", "spread_ns"), (np.float64, nan)),
    "op_class": (np.int8, 0),
    "stream": (np.int64, -1),
    "repeats": (np.int32, 1),
}
"""Type of each optional column, and its value for unknown."""


@renamed_fields(
    op_row="op_id",
    module_row="module_id",
    kernel_row="kernel_id",
    category_row="category_id",
    shapes_row="shapes_id",
    dtype_row="dtype_id",
    launch_thread_row="launch_thread_id",
    grid_row="grid_id",
    batch_row="batch_id",
)
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Profile:
    """Device events as columns of shape ``(events,)``. Columns in ``_id`` are rows of ``strings``; row 0 is
    the empty text and means unknown. :meth:`of` fills in columns that a source omits.

    * Keys: ``op_id`` is the operation (``hlo_op``, op name), by which events are matched to program nodes.
      ``module_id`` is the program that defines this key. ``kernel_id`` is the kernel, ``category_id`` the
      profiler's own class of the event. ``op_class`` is the :class:`OpClass` code if the source has it.
    * Launch: ``host_event`` is the row in ``host`` of the operation that caused the event (-1 unknown).
      ``launch_start_ns`` and ``launch_end_ns`` are the times of the runtime call that enqueued the event (NaN
      unknown), on the thread ``launch_thread_id``. ``grid_id`` is the text ``[[x, y, z],[x, y, z]]`` of
      launched blocks, and threads per block.
    * Inputs: ``shapes_id`` has the operand shapes and ``dtype_id`` the element types, as text. ``batch_id``
      is the program's text about the batch of its step (``execute_32_context_0(...)``).
    * Runs: ``run`` is the number of the run of the step or module (-1 unknown). ``repeats`` is the number of
      runs that a row aggregates, ``spread_ns`` the standard deviation between them (NaN for one run).
    * Others: ``device_index`` is an index in ``devices``. ``bytes_moved`` is the profiler's number of bytes
      copied or accessed (NaN unknown).

    ``ranges`` are Python functions and user annotations around host operations. ``waits`` are calls in which
    the host waits for a device. ``steps`` are the ranges of steps on the host. ``attachments`` are whole
    documents of the source: ``hlo/NAME`` is the HLO proto of module NAME.
    """

    name: str
    devices: tuple[str, ...]
    strings: StringTable
    op_id: SmallIntArray
    module_id: SmallIntArray
    kernel_id: SmallIntArray
    category_id: SmallIntArray
    shapes_id: SmallIntArray
    dtype_id: SmallIntArray
    op_class: NDArray[np.int8]
    device_index: SmallIntArray
    rank: SmallIntArray
    stream: IntArray
    run: SmallIntArray
    start_ns: FloatArray
    duration_ns: FloatArray
    bytes_moved: FloatArray
    host_event: SmallIntArray
    launch_start_ns: FloatArray
    launch_end_ns: FloatArray
    launch_thread_id: SmallIntArray
    grid_id: SmallIntArray
    batch_id: SmallIntArray
    repeats: SmallIntArray
    spread_ns: FloatArray
    comms: MeasuredComms = field(default_factory=MeasuredComms.empty)
    host: HostOps = field(default_factory=HostOps.empty)
    stated: CompilerCosts = field(default_factory=CompilerCosts.empty)
    ranges: HostRanges = field(default_factory=HostRanges.empty)
    waits: HostRanges = field(default_factory=HostRanges.empty)
    steps: StepRanges = field(default_factory=StepRanges.empty)
    memory: MeasuredMemory = field(default_factory=MeasuredMemory.empty)
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    attachments: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def __post_init__(self) -> None:
        """Check that all columns have one row per event."""
        check_lengths("Profile", len(self), {name: getattr(self, name) for name in dtypes_of(Profile)})

    def __len__(self) -> int:
        return len(self.start_ns)

    def __repr__(self) -> str:
        device, ranks = clipped(self.device) or "an unnamed device", len(np.unique(self.rank))
        count = "1 rank" if ranks == 1 else f"{ranks:,} ranks"
        return short_repr(self, self.name, f"{len(self):,} events of {count} on {device}")

    @property
    def device(self) -> str:
        """The device if there is exactly one, else the empty text."""
        return self.devices[0] if len(self.devices) == 1 else ""

    def shifted(self, by_ns: float) -> Profile:
        """Return the profile with ``by_ns`` added to all times."""
        return replace(
            self,
            start_ns=self.start_ns + by_ns,
            launch_start_ns=self.launch_start_ns + by_ns,
            launch_end_ns=self.launch_end_ns + by_ns,
            host=replace(self.host, start_ns=self.host.start_ns + by_ns),
            ranges=replace(self.ranges, start_ns=self.ranges.start_ns + by_ns),
            waits=replace(self.waits, start_ns=self.waits.start_ns + by_ns),
            steps=replace(self.steps, start_ns=self.steps.start_ns + by_ns),
            memory=replace(self.memory, time_ns=self.memory.time_ns + by_ns),
        )

    @classmethod
    def of(
        cls,
        name: str,
        devices: tuple[str, ...],
        strings: StringTable,
        *,
        start_ns: FloatArray | IntArray,
        duration_ns: FloatArray | IntArray,
        comms: MeasuredComms | None = None,
        host: HostOps | None = None,
        stated: CompilerCosts | None = None,
        ranges: HostRanges | None = None,
        waits: HostRanges | None = None,
        steps: StepRanges | None = None,
        memory: MeasuredMemory | None = None,
        metadata: Mapping[str, str] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        **event_columns: Unpack[OptionalEventColumns],
    ) -> Profile:
        """Return a profile of the columns that a source has, cast to their types; the others are unknown."""
        count = len(start_ns)
        blank = {key: np.full(count, key[1], key[0]) for key in set(_UNKNOWN.values())}
        given = cast("Mapping[str, NDArray[Any]]", event_columns)
        columns: dict[str, Any] = {
            name: given[name].astype(key[0], copy=False) if name in given else blank[key]
            for name, key in _UNKNOWN.items()
        }
        return cls(
            name=name,
            devices=devices,
            strings=strings,
            start_ns=start_ns.astype(np.float64, copy=False),
            duration_ns=duration_ns.astype(np.float64, copy=False),
            comms=comms or MeasuredComms.empty(),
            host=host or HostOps.empty(),
            stated=stated or CompilerCosts.empty(),
            ranges=ranges or HostRanges.empty(),
            waits=waits or HostRanges.empty(),
            steps=steps or StepRanges.empty(),
            memory=memory or MeasuredMemory.empty(),
            metadata=metadata or {},
            attachments=attachments or {},
            **columns,
        )
