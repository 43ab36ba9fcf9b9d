"""Event records of Kineto traces: categories, and the fields of ``args`` for each kind of event.

Source: https://github.com/pytorch/kineto, ``libkineto/src/output_json.cpp``. Other fields are skipped.
Categories are a table because other back ends add their own.
"""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType

import msgspec
from msgspec import field

__all__ = [
    "EVENT_KINDS",
    "DeviceArgs",
    "HostArgs",
    "JsonNumber",
    "KinetoEventKind",
    "KinetoHeader",
    "LaunchArgs",
    "MemoryArgs",
    "SyncArgs",
    "category_of",
]

_ABSENT = msgspec.Raw(b"")
JsonNumber = int | float | str | None
"""A number in a trace. Writers use integers, floats or strings."""


class KinetoEventKind(IntEnum):
    """Kinds of trace events that the reader distinguishes."""

    DEVICE = 0
    """Work on a device: kernels, copies and fills."""
    LAUNCH = 1
    """A call of the runtime or the driver API."""
    HOST = 2
    """An operation on the host."""
    ANNOTATION = 3
    """A named range, such as ``ProfilerStep#3`` or ``gloo:all_reduce``."""
    SYNC = 4
    """A wait of a stream or of the host for device work. Recorded only if the profiler option is on."""
    FUNCTION = 5
    """A Python function or a module of the model (``with_stack``)."""
    ALLOCATION = 6
    """An allocation or release of memory (``profile_memory``): an instant event named ``[memory]``."""


EVENT_KINDS: MappingProxyType[str, KinetoEventKind] = MappingProxyType(
    {
        **dict.fromkeys(
            [
                "kernel",
                "gpu_memcpy",
                "gpu_memset",
                "concurrent_kernel",
                "mtia_ccp_events",
                "hpu_op",
                "xpu_op",
            ],
            KinetoEventKind.DEVICE,
        ),
        **dict.fromkeys(
            [
                "cuda_runtime",
                "cuda_driver",
                "hip_runtime",
                "hip_driver",
                "xpu_runtime",
                "xpu_driver",
                "mtia_runtime",
                "privateuse1_runtime",
                "privateuse1_driver",
                "runtime",
                "driver",
            ],
            KinetoEventKind.LAUNCH,
        ),
        "cpu_op": KinetoEventKind.HOST,
        "user_annotation": KinetoEventKind.ANNOTATION,
        "cuda_sync": KinetoEventKind.SYNC,
        "python_function": KinetoEventKind.FUNCTION,
        "cpu_instant_event": KinetoEventKind.ALLOCATION,
    }
)
"""Kind of each category. Events of other categories are counted and skipped."""
_OLD_CATEGORIES = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
}
"""Category names of the profiler in PyTorch 1.8 to 1.10 (in lower case) and the current names."""
_STEP = "ProfilerStep#"


def category_of(category: str, name: str) -> str:
    """Return the current name of an event category, which old profilers spell differently.

    Old profilers recorded steps in the category of operators; ``name``, the name of the event, distinguishes
    them.
    """
    if category in EVENT_KINDS or not category:
        return category
    lower = category.lower()
    current = _OLD_CATEGORIES.get(lower, lower)
    if current == "cpu_op" and name.startswith(_STEP):
        return "user_annotation"
    return current if current in EVENT_KINDS else category


class DeviceArgs(msgspec.Struct, gc=False):
    """Arguments of device work in a Kineto trace. ``grid`` and ``block`` are lists of three numbers; the last
    fields describe collectives.
    """

    correlation: JsonNumber = None
    external_id: JsonNumber = field(default=None, name="External id")
    first_external_id: JsonNumber = field(default=None, name="external id")
    graph_node: JsonNumber = field(default=None, name="graph node id")
    stream: JsonNumber = None
    device: JsonNumber = None
    bytes: JsonNumber = None
    grid: msgspec.Raw = _ABSENT
    block: msgspec.Raw = _ABSENT
    collective: str | None = field(default=None, name="Collective name")
    in_elements: JsonNumber = field(default=None, name="In msg nelems")
    out_elements: JsonNumber = field(default=None, name="Out msg nelems")
    dtype: str | None = None
    group_size: JsonNumber = field(default=None, name="Group size")
    group_name: str | None = field(default=None, name="Process Group Name")
    group_ranks: str | list[int] | None = field(default=None, name="Process Group Ranks")
    sequence: JsonNumber = field(default=None, name="Seq")
    in_split: str | list[int] | None = field(default=None, name="In split size")
    out_split: str | list[int] | None = field(default=None, name="Out split size")
    source: JsonNumber = field(default=None, name="Src Rank")
    target: JsonNumber = field(default=None, name="Dst Rank")


class LaunchArgs(msgspec.Struct, gc=False):
    """Arguments of a launch call in a Kineto trace. HIP also records the kernel name."""

    correlation: JsonNumber = None
    external_id: JsonNumber = field(default=None, name="External id")
    first_external_id: JsonNumber = field(default=None, name="external id")
    kernel: JsonNumber = None


class MemoryArgs(msgspec.Struct, gc=False):
    """Arguments of an allocation (``bytes`` > 0) or a release of memory in a Kineto trace. Totals belong to
    the device's allocator.
    """

    bytes: JsonNumber = field(default=None, name="Bytes")
    allocated: JsonNumber = field(default=None, name="Total Allocated")
    reserved: JsonNumber = field(default=None, name="Total Reserved")
    device_type: JsonNumber = field(default=None, name="Device Type")
    device: JsonNumber = field(default=None, name="Device Id")


class SyncArgs(msgspec.Struct, gc=False):
    """Arguments of a wait in a Kineto trace: ``stream`` waits for a CUDA event that was recorded on
    ``wait_on_stream``. ``record`` is the correlation id of the call that recorded it.
    """

    correlation: JsonNumber = None
    device: JsonNumber = None
    stream: JsonNumber = None
    wait_on_stream: JsonNumber = None
    record: JsonNumber = field(default=None, name="wait_on_cuda_event_record_corr_id")


class HostArgs(msgspec.Struct, gc=False):
    """Arguments of a host operation in a Kineto trace. Shapes and values stay JSON texts, so that equal texts
    are stored once.
    """

    external_id: JsonNumber = field(default=None, name="External id")
    record_id: JsonNumber = field(default=None, name="Record function id")
    sequence: JsonNumber = field(default=None, name="Sequence number")
    forward_thread: JsonNumber = field(default=None, name="Fwd thread id")
    dims: msgspec.Raw = field(default=_ABSENT, name="Input Dims")
    types: msgspec.Raw = field(default=_ABSENT, name="Input type")
    strides: msgspec.Raw = field(default=_ABSENT, name="Input Strides")
    concrete: msgspec.Raw = field(default=_ABSENT, name="Concrete Inputs")
    flops: msgspec.Raw = field(default=_ABSENT, name="kernel_flop")
    gigabytes: msgspec.Raw = field(default=_ABSENT, name="kernel_num_gb")


class _DeviceProperties(msgspec.Struct, gc=False):
    id: JsonNumber = None
    name: str = ""
    total_memory: JsonNumber = field(default=None, name="totalGlobalMem")
    major: JsonNumber = field(default=None, name="computeMajor")
    minor: JsonNumber = field(default=None, name="computeMinor")
    processors: JsonNumber = field(default=None, name="numSms")


class _DistributedInfo(msgspec.Struct, gc=False):
    backend: str = ""
    rank: JsonNumber = None
    world_size: JsonNumber = None
    groups: msgspec.Raw = field(default=_ABSENT, name="pg_config")


class KinetoHeader(msgspec.Struct, gc=False):
    """Header of a trace: the fields around the list of events."""

    schema_version: JsonNumber = field(default=None, name="schemaVersion")
    devices: list[_DeviceProperties] = field(default_factory=list[_DeviceProperties], name="deviceProperties")
    distributed: _DistributedInfo | None = field(default=None, name="distributedInfo")
    base_time_ns: JsonNumber = field(default=None, name="baseTimeNanoseconds")
    cuda_runtime_version: JsonNumber = None
    cuda_driver_version: JsonNumber = None
    cupti_version: JsonNumber = None
    hip_runtime_version: JsonNumber = None
    hip_driver_version: JsonNumber = None
    nccl_version: str | None = None
