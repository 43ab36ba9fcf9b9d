"""What Kineto says of an event in ``args``, by kind of event; anything else there is skipped.

Source: https://github.com/pytorch/kineto, ``libkineto/src/output_json.cpp``. Categories are data: other
back ends bring their own.
"""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType

import msgspec

__all__ = [
    "KINDS",
    "DeviceArgs",
    "Header",
    "HostArgs",
    "Kind",
    "LaunchArgs",
    "Number",
    "SyncArgs",
    "category_of",
]

_ABSENT = msgspec.Raw(b"")
Number = int | float | str | None
"""Writers differ in how they spell a number."""


class Kind(IntEnum):
    """What an event is to us."""

    DEVICE = 0
    """Work on a device: kernels, copies and fills."""
    LAUNCH = 1
    """A call of the runtime or the driver."""
    HOST = 2
    """An operation on the host."""
    ANNOTATION = 3
    """A range that somebody named: ``ProfilerStep#3``, ``gloo:all_reduce``."""
    SYNC = 4
    """A stream, or the host, waiting for work on a device; recorded where the profiler is asked to."""


KINDS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "kernel",
                "gpu_memcpy",
                "gpu_memset",
                "concurrent_kernel",
                "mtia_ccp_events",
                "hpu_op",
                "xpu_op",
            ),
            Kind.DEVICE,
        ),
        **dict.fromkeys(
            (
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
            ),
            Kind.LAUNCH,
        ),
        "cpu_op": Kind.HOST,
        "user_annotation": Kind.ANNOTATION,
        "cuda_sync": Kind.SYNC,
    }
)
"""Category -> kind; events of other categories are counted and left out."""
_FIRST_NAMES = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
}
"""What the profiler of PyTorch 1.8 to 1.10 called categories, as ``Kernel`` and ``Memcpy``."""
_STEP = "ProfilerStep#"


def category_of(category: str, name: str) -> str:
    """The category of an event by its name of today; steps were operators once."""
    if category in KINDS or not category:
        return category
    lower = category.lower()
    known = _FIRST_NAMES.get(lower, lower)
    if known == "cpu_op" and name.startswith(_STEP):
        return "user_annotation"
    return known if known in KINDS else category


_DEVICE_NAMES = {
    "external_id": "External id",
    "first_external_id": "external id",
    "graph_node": "graph node id",
    "collective": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group_size": "Group size",
    "group_name": "Process Group Name",
    "group_ranks": "Process Group Ranks",
    "sequence": "Seq",
    "in_split": "In split size",
    "out_split": "Out split size",
    "source": "Src Rank",
    "target": "Dst Rank",
}
_HOST_NAMES = {
    "external_id": "External id",
    "record_id": "Record function id",
    "sequence": "Sequence number",
    "forward_thread": "Fwd thread id",
    "dims": "Input Dims",
    "types": "Input type",
    "strides": "Input Strides",
    "concrete": "Concrete Inputs",
}


class DeviceArgs(msgspec.Struct, gc=False, rename=_DEVICE_NAMES):
    """Of work on a device; the last ones of collectives."""

    correlation: Number = None
    external_id: Number = None
    first_external_id: Number = None
    graph_node: Number = None
    stream: Number = None
    device: Number = None
    bytes: Number = None
    collective: str | None = None
    in_elements: Number = None
    out_elements: Number = None
    dtype: str | None = None
    group_size: Number = None
    group_name: str | None = None
    group_ranks: str | list[int] | None = None
    sequence: Number = None
    in_split: str | list[int] | None = None
    out_split: str | list[int] | None = None
    source: Number = None
    target: Number = None


class LaunchArgs(
    msgspec.Struct, gc=False, rename={"external_id": "External id", "first_external_id": "external id"}
):
    """Of a call that launches."""

    correlation: Number = None
    external_id: Number = None
    first_external_id: Number = None


class SyncArgs(msgspec.Struct, gc=False):
    """Of a wait: ``stream`` waits for what the call ``record`` marked on ``wait_on_stream``."""

    correlation: Number = None
    device: Number = None
    stream: Number = None
    wait_on_stream: Number = None
    record: Number = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class HostArgs(msgspec.Struct, gc=False, rename=_HOST_NAMES):
    """Of an operation on the host. Shapes and values stay text: equal ones are kept once."""

    external_id: Number = None
    record_id: Number = None
    sequence: Number = None
    forward_thread: Number = None
    dims: msgspec.Raw = _ABSENT
    types: msgspec.Raw = _ABSENT
    strides: msgspec.Raw = _ABSENT
    concrete: msgspec.Raw = _ABSENT


class _Device(msgspec.Struct, gc=False):
    id: Number = None
    name: str = ""
    total_memory: Number = msgspec.field(default=None, name="totalGlobalMem")
    major: Number = msgspec.field(default=None, name="computeMajor")
    minor: Number = msgspec.field(default=None, name="computeMinor")
    processors: Number = msgspec.field(default=None, name="numSms")


class _Distributed(msgspec.Struct, gc=False):
    backend: str = ""
    rank: Number = None
    world_size: Number = None
    groups: msgspec.Raw = msgspec.field(default=_ABSENT, name="pg_config")


class Header(msgspec.Struct, gc=False):
    """Of the whole trace."""

    schema_version: Number = msgspec.field(default=None, name="schemaVersion")
    devices: list[_Device] = msgspec.field(default_factory=list[_Device], name="deviceProperties")
    distributed: _Distributed | None = msgspec.field(default=None, name="distributedInfo")
    base_time_ns: Number = msgspec.field(default=None, name="baseTimeNanoseconds")
    cuda_runtime_version: Number = None
    cuda_driver_version: Number = None
    cupti_version: Number = None
    hip_runtime_version: Number = None
    hip_driver_version: Number = None
    nccl_version: str | None = None
