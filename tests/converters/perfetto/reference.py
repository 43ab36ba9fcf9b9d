"""Perfetto's messages as classes of the protobuf library, declared here by hand and independently of the
package's tables (https://github.com/google/perfetto, ``protos/perfetto``).
"""

from __future__ import annotations

from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["Trace", "trace"]

_MESSAGES: dict[str, str] = {
    "Trace": "repeated TracePacket packet 1",
    "TracePacket": (
        "uint64 timestamp 8; uint32 timestamp_clock_id 58; TrackEvent track_event 11;"
        "TrackDescriptor track_descriptor 60; ClockSnapshot clock_snapshot 6; InternedData interned_data 12;"
        "uint32 trusted_packet_sequence_id 10; uint32 sequence_flags 13; bool incremental_state_cleared 41;"
        "uint32 previous_packet_dropped 42; GpuRenderStageEvent gpu_render_stage_event 53;"
        "TracePacketDefaults trace_packet_defaults 59; TraceAttributes trace_attributes 126;"
        "GpuInfo gpu_info 128; bytes compressed_packets 50; bytes zstd_compressed_packets 133;"
        "ThreadDescriptor thread_descriptor 44"
    ),
    "TracePacketDefaults": "uint32 timestamp_clock_id 58; TrackEventDefaults track_event_defaults 11",
    "TrackEventDefaults": "uint64 track_uuid 11",
    "TrackEvent": (
        "repeated uint64 category_iids 3; repeated string categories 22; uint64 name_iid 10; string name 23;"
        "int32 type 9; uint64 track_uuid 11; repeated fixed64 flow_ids 47;"
        "repeated fixed64 terminating_flow_ids 48; repeated DebugAnnotation debug_annotations 4;"
        "int64 timestamp_delta_us 1; int64 timestamp_absolute_us 16; LegacyEvent legacy_event 6;"
        "int64 counter_value 30"
    ),
    "LegacyEvent": "uint64 name_iid 1; int32 phase 2; int64 duration_us 3",
    "DebugAnnotation": (
        "uint64 name_iid 1; string name 10; bool bool_value 2; uint64 uint_value 3; int64 int_value 4;"
        "double double_value 5; string string_value 6; uint64 string_value_iid 17"
    ),
    "TrackDescriptor": (
        "uint64 uuid 1; uint64 parent_uuid 5; string name 2; string static_name 10;"
        "ProcessDescriptor process 3; ThreadDescriptor thread 4; int32 child_ordering 11;"
        "int32 sibling_order_rank 12"
    ),
    "ProcessDescriptor": "int32 pid 1; string process_name 6",
    "ThreadDescriptor": "int32 pid 1; int32 tid 2; string thread_name 5; int64 reference_timestamp_us 6",
    "InternedData": (
        "repeated Interned event_categories 1; repeated Interned event_names 2;"
        "repeated Interned debug_annotation_names 3; repeated Interned gpu_specifications 24;"
        "repeated InternedBytes debug_annotation_string_values 29; repeated Kernel compute_kernels 1000"
    ),
    "Interned": "uint64 iid 1; string name 2",
    "InternedBytes": "uint64 iid 1; bytes str 2",
    "Kernel": "uint64 iid 1; string name 2; string demangled_name 3",
    "ClockSnapshot": "repeated Clock clocks 1; int32 primary_trace_clock 2",
    "Clock": "uint32 clock_id 1; uint64 timestamp 2; bool is_incremental 3; uint64 unit_multiplier_ns 4",
    "GpuRenderStageEvent": (
        "uint64 event_id 1; uint64 duration 2; uint64 hw_queue_iid 13; uint64 stage_iid 14; int32 gpu_id 11;"
        "string name 17; uint64 name_iid 20; uint64 kernel_iid 19; int32 hw_queue_id 3; int32 stage_id 4;"
        "Specifications specifications 7; repeated ExtraData extra_data 6"
    ),
    "ExtraData": "string name 1; string value 2",
    "Specifications": "repeated Description hw_queue 2; repeated Description stage 3",
    "Description": "string name 1; string description 2",
    "TraceAttributes": "repeated Attribute attribute 1",
    "Attribute": "string key 1; int64 long_value 2; string string_value 3",
    "GpuInfo": "repeated Gpu gpus 1",
    "Gpu": "string name 1; string vendor 2",
}


def _declared() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="reference.proto", package="reference", syntax="proto2")
    for name, listed in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for entry in map(str.strip, listed.split(";")):
            kind, label, number = entry.removeprefix("repeated ").split()
            added = message.field.add(name=label, number=int(number))
            repeated = entry.startswith("repeated ")
            added.label = added.LABEL_REPEATED if repeated else added.LABEL_OPTIONAL
            if kind in _MESSAGES:
                added.type, added.type_name = added.TYPE_MESSAGE, f".reference.{kind}"
            else:
                added.type = added.Type.Value(f"TYPE_{kind.upper()}")
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    make: Any = message_factory.GetMessageClass
    return make(pool.FindMessageTypeByName("reference.Trace"))


Trace: Any = _declared()


def trace(*packets: dict[str, Any]) -> bytes:
    """A serialised trace; nested messages are dictionaries."""
    built = Trace()
    for packet in packets:
        _fill(built.packet.add(), packet)
    return bytes(built.SerializeToString())


def _fill(message: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        listed: list[Any] = [*value] if isinstance(value, list) else []
        if isinstance(value, dict):
            getattr(message, name).SetInParent()
            _fill(getattr(message, name), cast("dict[str, Any]", value))
        elif listed and isinstance(listed[0], dict):
            for each in listed:
                _fill(getattr(message, name).add(), each)
        elif listed:
            getattr(message, name).extend(listed)
        else:
            setattr(message, name, value)
