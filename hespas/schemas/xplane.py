"""XSpace, the format of XLA's profiler: field numbers, and names of planes, lines and stats.

Sources: ``xla/tsl/profiler/protobuf/xplane.proto`` and ``xla/tsl/profiler/utils/xplane_schema.cc`` of
https://github.com/openxla/xla. Strings are bytes here, because some producers write invalid UTF-8.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "ASYNC_LINES",
    "CPU_PLANE",
    "DERIVED_LINES",
    "DERIVED_OF",
    "DEVICE_PREFIX",
    "ENVIRONMENT_PLANE",
    "GPU_PREFIX",
    "HOST_PREFIX",
    "METADATA_PLANE",
    "MODULE_LINES",
    "OP_LINES",
    "PLANE_PREFIXES",
    "STREAM_PREFIX",
    "TPU_PREFIX",
    "EventMetadataField",
    "LineField",
    "MapField",
    "PlaneField",
    "SpaceField",
    "StatField",
    "StatMetadataField",
    "XEventField",
]


SpaceField = IntEnum("SpaceField", {"PLANES": 1, "ERRORS": 2, "WARNINGS": 3, "HOSTNAMES": 4})
"""XSpace."""


class PlaneField(IntEnum):
    """Field numbers of ``XPlane``; the two metadata fields are maps from an int64."""

    ID = 1
    NAME = 2
    LINES = 3
    EVENT_METADATA = 4
    STAT_METADATA = 5
    STATS = 6


MapField = IntEnum("MapField", {"KEY": 1, "VALUE": 2})
"""An entry of a map."""


class LineField(IntEnum):
    """Field numbers of ``XLine``; times of events count from ``TIMESTAMP_NS``."""

    ID = 1
    NAME = 2
    TIMESTAMP_NS = 3
    EVENTS = 4
    DURATION_PS = 9
    DISPLAY_ID = 10
    DISPLAY_NAME = 11


class XEventField(IntEnum):
    """Field numbers of ``XEvent``; either ``OFFSET_PS`` or ``OCCURRENCES`` is set."""

    METADATA_ID = 1
    OFFSET_PS = 2
    DURATION_PS = 3
    STATS = 4
    OCCURRENCES = 5


class EventMetadataField(IntEnum):
    """Field numbers of ``XEventMetadata``."""

    ID = 1
    NAME = 2
    METADATA = 3
    DISPLAY_NAME = 4
    STATS = 5


StatMetadataField = IntEnum("StatMetadataField", {"ID": 1, "NAME": 2})
"""XStatMetadata."""


class StatField(IntEnum):
    """Field numbers of ``XStat``; one of the values is set. ``REF`` is the id of a stat metadata whose name
    is the text.
    """

    METADATA_ID = 1
    DOUBLE = 2
    UINT64 = 3
    INT64 = 4
    TEXT = 5
    BYTES = 6
    REF = 7


CPU_PLANE = "/host:CPU"
"""Host threads; XLA's CPU back end runs its operations on them."""
METADATA_PLANE = "/host:metadata"
ENVIRONMENT_PLANE = "Task Environment"
HOST_PREFIX, DEVICE_PREFIX = "/host:", "/device:"
GPU_PREFIX, TPU_PREFIX = "/device:GPU:", "/device:TPU:"

PLANE_PREFIXES = (
    HOST_PREFIX,
    DEVICE_PREFIX,
    "/virtualdevice:",
    "#Chip",
    ENVIRONMENT_PLANE,
    "Host CPUs",
    "Syscalls",
)
"""Prefixes of plane names."""

STREAM_PREFIX = "Stream #"
"""Prefix of the name of a GPU stream: ``Stream #13(Kernel,Memset)``."""
OP_LINES = frozenset({"XLA Ops", "Sparse Core Ops"})
"""Operations as executed; a loop or call encloses its operations."""
ASYNC_LINES = frozenset({"Async XLA Ops"})
"""Transfers that overlap with the operations and with each other."""
MODULE_LINES = frozenset({"XLA Modules", "Sparse Core Modules"})
"""Runs of whole programs."""
DERIVED_LINES = MODULE_LINES | frozenset(
    {
        "Steps",
        "Sparse Core Steps",
        "Framework Name Scope",
        "Framework Ops",
        "TensorFlow Name Scope",
        "TensorFlow Ops",
        "Host Offload Ops",
        "Launch Stats",
        "Source code",
        "TraceMe",
        "XLA TraceMe",
        "_counters_",
        "Tensor Core Sync Flag",
        "Sparse Core Syncs",
    }
)
"""Lines of a device plane that repeat the time of its operations by step, scope or program."""
DERIVED_OF = " - from #"
"""Suffix of a line name derived from one stream: ``XLA Ops - from #13``."""
