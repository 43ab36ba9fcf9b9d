"""What was measured (`Profile`), what a model says (`Estimate`), what happens (`Timeline`)."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray, SmallIntArray, StringTable
from hespas.graph.errors import InvariantError

__all__ = ["Estimate", "HostOps", "Profile", "Timeline"]


def _same_length(owner: str, rows: int, columns: Mapping[str, Sized]) -> None:
    for name, column in columns.items():
        if len(column) != rows:
            raise InvariantError(f"{owner}: column {name} does not have {rows} rows")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostOps:
    """Operations on the host as columns of shape ``(operations,)``; rows of the profile's ``strings``.

    ``parent`` is the operation that encloses each (-1: none); ``thread_row`` names process and thread.
    ``shapes_row``, ``dtype_row``, ``strides_row`` and ``values_row`` describe the inputs as JSON texts.
    ``sequence`` joins forward and backward (-1: none).
    """

    name_row: SmallIntArray
    thread_row: SmallIntArray
    parent: SmallIntArray
    start_ns: FloatArray
    duration_ns: FloatArray
    sequence: IntArray
    shapes_row: SmallIntArray
    dtype_row: SmallIntArray
    strides_row: SmallIntArray
    values_row: SmallIntArray

    def __post_init__(self) -> None:
        """Check that all columns have one row per operation."""
        names = "name_row thread_row parent duration_ns sequence shapes_row dtype_row strides_row values_row"
        _same_length("HostOps", len(self), {name: getattr(self, name) for name in names.split()})

    def __len__(self) -> int:
        return len(self.start_ns)

    @classmethod
    def empty(cls) -> HostOps:
        """Nothing is known of the host."""
        rows, times = np.empty(0, np.int32), np.empty(0, np.float64)
        return cls(
            name_row=rows,
            thread_row=rows,
            parent=rows,
            start_ns=times,
            duration_ns=times,
            sequence=np.empty(0, np.int64),
            shapes_row=rows,
            dtype_row=rows,
            strides_row=rows,
            values_row=rows,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Profile:
    """Device events as columns of shape ``(events,)``; ``*_row`` columns are rows of ``strings``.

    ``op_row`` is the key an event is matched by (``hlo_op``, op name); ``kernel_row`` the kernel;
    ``host_event`` the row of ``host`` that caused this one (-1 unknown); ``shapes_row`` the operand shapes
    as text; ``dtype_row`` the element types. ``repeats`` says over how many runs a row was aggregated,
    ``spread_ns`` is the standard deviation between them (NaN for one run).
    """

    name: str
    device: str
    strings: StringTable
    op_row: SmallIntArray
    kernel_row: SmallIntArray
    category_row: SmallIntArray
    shapes_row: SmallIntArray
    dtype_row: SmallIntArray
    rank: SmallIntArray
    stream: IntArray
    start_ns: FloatArray
    duration_ns: FloatArray
    host_event: SmallIntArray
    repeats: SmallIntArray
    spread_ns: FloatArray
    host: HostOps = field(default_factory=HostOps.empty)
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Check that all columns have one row per event."""
        names = (
            "op_row kernel_row category_row shapes_row dtype_row rank stream duration_ns host_event repeats "
            "spread_ns"
        )
        _same_length("Profile", len(self), {name: getattr(self, name) for name in names.split()})

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """What a model says of each node of one graph; columns of shape ``(nodes,)``.

    ``duration_ns`` is the time of one execution (NaN where no estimator covers the node; 0 only for nodes
    that cost nothing); ``low_ns`` and ``high_ns`` bound it (NaN: no interval). ``said_by`` indexes
    ``estimators`` (-1: nobody). ``bound`` indexes ``bounds``: what limits the node.
    """

    hardware: str
    estimators: tuple[str, ...]
    bounds: tuple[str, ...]
    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    said_by: NDArray[np.int8]
    bound: NDArray[np.int8]

    def __post_init__(self) -> None:
        """Check that all columns have one row per node."""
        names = ("low_ns", "high_ns", "said_by", "bound")
        _same_length("Estimate", len(self), {name: getattr(self, name) for name in names})

    def __len__(self) -> int:
        return len(self.duration_ns)

    @property
    def coverage(self) -> float:
        """Share of nodes with a duration, 0..1; 1 for a graph without nodes."""
        return float(np.mean(~np.isnan(self.duration_ns))) if len(self) else 1.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timeline:
    """When each node of each rank ran; columns of shape ``(spans,)``.

    ``resource`` indexes ``resources`` (``compute``, ``communication``, ``copy``). ``critical`` marks the
    spans on the critical path. ``finish_ns`` and ``exposed_comm_ns`` have shape ``(ranks,)``.
    """

    resources: tuple[str, ...]
    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    start_ns: FloatArray
    end_ns: FloatArray
    critical: NDArray[np.bool_]
    finish_ns: FloatArray
    exposed_comm_ns: FloatArray

    def __post_init__(self) -> None:
        """Check that all columns have one row per span."""
        names = ("node", "rank", "resource", "end_ns", "critical")
        _same_length("Timeline", len(self), {name: getattr(self, name) for name in names})

    def __len__(self) -> int:
        return len(self.start_ns)
