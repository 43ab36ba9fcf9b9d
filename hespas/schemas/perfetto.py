"""Field numbers and enumerations of Perfetto's traces. Facts only, no logic.

Source: https://github.com/google/perfetto at commit ec5d16b14b743ba6063d720956d6d6af6610fd72, in
``protos/perfetto``: ``trace/{trace,trace_packet,trace_packet_defaults,clock_snapshot}.proto``,
``trace/interned_data/interned_data.proto``, ``trace/gpu/{gpu_interned_data,gpu_render_stage_event}.proto``,
``trace/track_event/{track_event,track_descriptor,debug_annotation,process_descriptor,
thread_descriptor}.proto``, ``trace/system_info/gpu_info.proto``, ``common/{builtin_clock,
trace_attributes}.proto``.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

__all__ = [
    "AnnotationField",
    "AttributeField",
    "BuiltinClock",
    "ChildOrdering",
    "ClockField",
    "ClockSnapshotField",
    "ComputeKernelField",
    "DescriptorField",
    "EventType",
    "ExtraDataField",
    "GpuField",
    "GpuInfoField",
    "InternedDataField",
    "InternedField",
    "LegacyField",
    "PacketField",
    "ProcessField",
    "SequenceFlag",
    "SpecificationField",
    "SpecificationsField",
    "StageField",
    "ThreadField",
    "TraceField",
    "TrackEventField",
]


TraceField = IntEnum("TraceField", {"PACKET": 1})
"""``Trace``."""


class PacketField(IntEnum):
    """Field numbers of Perfetto's ``TracePacket``, and of ``TracePacketDefaults``, which has the same
    numbers.
    """

    CLOCK_SNAPSHOT = 6
    TIMESTAMP = 8
    TRUSTED_PACKET_SEQUENCE_ID = 10
    TRACK_EVENT = 11
    INTERNED_DATA = 12
    SEQUENCE_FLAGS = 13
    INCREMENTAL_STATE_CLEARED = 41
    PREVIOUS_PACKET_DROPPED = 42
    PROCESS_DESCRIPTOR = 43
    THREAD_DESCRIPTOR = 44
    COMPRESSED_PACKETS = 50
    GPU_RENDER_STAGE_EVENT = 53
    TIMESTAMP_CLOCK_ID = 58
    TRACE_PACKET_DEFAULTS = 59
    TRACK_DESCRIPTOR = 60
    TRACE_ATTRIBUTES = 126
    GPU_INFO = 128
    ZSTD_COMPRESSED_PACKETS = 133


SequenceFlag = IntFlag("SequenceFlag", {"INCREMENTAL_STATE_CLEARED": 1, "NEEDS_INCREMENTAL_STATE": 2})
"""``TracePacket.SequenceFlags``."""


class BuiltinClock(IntEnum):
    """Numbers of Perfetto's ``BuiltinClock``: clocks 1..63; 64..127 are local to one packet sequence."""

    REALTIME = 1
    MONOTONIC = 3
    BOOTTIME = 6
    TRACE_FILE = 11
    LAST = 63
    LAST_OF_SEQUENCE = 127


ClockSnapshotField = IntEnum("ClockSnapshotField", {"CLOCKS": 1, "PRIMARY_TRACE_CLOCK": 2})
"""``ClockSnapshot``."""


class ClockField(IntEnum):
    """Field numbers of Perfetto's ``ClockSnapshot.Clock``."""

    CLOCK_ID = 1
    TIMESTAMP = 2
    IS_INCREMENTAL = 3
    UNIT_MULTIPLIER_NS = 4


class InternedDataField(IntEnum):
    """Field numbers of Perfetto's ``InternedData``; 1000 is of ``GpuInternedData``."""

    EVENT_CATEGORIES = 1
    EVENT_NAMES = 2
    DEBUG_ANNOTATION_NAMES = 3
    GPU_SPECIFICATIONS = 24
    DEBUG_ANNOTATION_STRING_VALUES = 29
    COMPUTE_KERNELS = 1000


InternedField = IntEnum("InternedField", {"IID": 1, "NAME": 2})
"""First fields of all interned messages: ``EventName``, ``EventCategory``, ``InternedString``, ..."""
ComputeKernelField = IntEnum("ComputeKernelField", {"DEMANGLED_NAME": 3})
"""``InternedComputeKernel``, in addition to :class:`InternedField`."""


class DescriptorField(IntEnum):
    """Field numbers of Perfetto's ``TrackDescriptor``."""

    UUID = 1
    NAME = 2
    PROCESS = 3
    THREAD = 4
    PARENT_UUID = 5
    COUNTER = 8
    STATIC_NAME = 10
    CHILD_ORDERING = 11
    SIBLING_ORDER_RANK = 12
    ATRACE_NAME = 13


class ChildOrdering(IntEnum):
    """Values of Perfetto's ``TrackDescriptor.ChildTracksOrdering``."""

    EXPLICIT = 3
    """By ``sibling_order_rank``."""


ProcessField = IntEnum("ProcessField", {"PID": 1, "PROCESS_NAME": 6})
"""``ProcessDescriptor``."""
ThreadField = IntEnum("ThreadField", {"PID": 1, "TID": 2, "THREAD_NAME": 5, "REFERENCE_TIMESTAMP_US": 6})
"""``ThreadDescriptor``."""


class EventType(IntEnum):
    """Values of Perfetto's ``TrackEvent.Type``."""

    UNSPECIFIED = 0
    SLICE_BEGIN = 1
    SLICE_END = 2
    INSTANT = 3
    COUNTER = 4


class TrackEventField(IntEnum):
    """Field numbers of Perfetto's ``TrackEvent``, and of ``TrackEventDefaults``, which has the same
    numbers.
    """

    TIMESTAMP_DELTA_US = 1
    CATEGORY_IIDS = 3
    DEBUG_ANNOTATIONS = 4
    LEGACY_EVENT = 6
    TYPE = 9
    NAME_IID = 10
    TRACK_UUID = 11
    TIMESTAMP_ABSOLUTE_US = 16
    CATEGORIES = 22
    NAME = 23
    FLOW_IDS_OLD = 36
    TERMINATING_FLOW_IDS_OLD = 42
    FLOW_IDS = 47
    TERMINATING_FLOW_IDS = 48


LegacyField = IntEnum("LegacyField", {"NAME_IID": 1, "PHASE": 2, "DURATION_US": 3})
"""``TrackEvent.LegacyEvent``."""


class AnnotationField(IntEnum):
    """Field numbers of Perfetto's ``DebugAnnotation``."""

    NAME_IID = 1
    BOOL_VALUE = 2
    UINT_VALUE = 3
    INT_VALUE = 4
    DOUBLE_VALUE = 5
    STRING_VALUE = 6
    NAME = 10
    STRING_VALUE_IID = 17


class StageField(IntEnum):
    """Field numbers of Perfetto's ``GpuRenderStageEvent``."""

    EVENT_ID = 1
    DURATION = 2
    HW_QUEUE_ID = 3
    STAGE_ID = 4
    EXTRA_DATA = 6
    SPECIFICATIONS = 7
    GPU_ID = 11
    HW_QUEUE_IID = 13
    STAGE_IID = 14
    NAME = 17
    KERNEL_IID = 19
    NAME_IID = 20


ExtraDataField = IntEnum("ExtraDataField", {"NAME": 1, "VALUE": 2})
"""``GpuRenderStageEvent.ExtraData``."""
SpecificationsField = IntEnum("SpecificationsField", {"HW_QUEUE": 2, "STAGE": 3})
"""``GpuRenderStageEvent.Specifications``, of traces before queues and stages were interned."""
SpecificationField = IntEnum("SpecificationField", {"NAME": 1})
"""``GpuRenderStageEvent.Specifications.Description``."""
GpuInfoField = IntEnum("GpuInfoField", {"GPUS": 1})
"""``GpuInfo``."""
GpuField = IntEnum("GpuField", {"NAME": 1})
"""``GpuInfo.Gpu``."""
AttributeField = IntEnum("AttributeField", {"KEY": 1, "LONG_VALUE": 2, "STRING_VALUE": 3})
"""``TraceAttributes`` (its one field is 1) and ``TraceAttributes.Attribute``."""
