"""What rocprofv3's JSON says, as far as it is read here; anything else is skipped.

Source: https://github.com/ROCm/rocprofiler-sdk, ``source/lib/output/generateJSON.cpp`` and
``source/include/rocprofiler-sdk/cxx/serialization``. Times are nanoseconds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = [
    "AgentRecord",
    "Api",
    "Copy",
    "Correlation",
    "Counted",
    "Dispatch",
    "DispatchInfo",
    "Entry",
    "Handle",
    "Kind",
    "Process",
    "Symbol",
]

_NOTHING = msgspec.Raw(b"[]")
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class Handle(msgspec.Struct, gc=False):
    """A number of the runtime; 64 bits, without sign."""

    handle: int = -1


class Correlation(msgspec.Struct, gc=False):
    """Joins work to the call that enqueued it. ``external`` is the number of a text, or a set of facts."""

    internal: int = -1
    external: int | msgspec.UnsetType | dict[str, int] = msgspec.UNSET


class DispatchInfo(msgspec.Struct, gc=False):
    """What a kernel runs on."""

    kernel_id: int
    agent_id: Handle = msgspec.field(default_factory=Handle)
    queue_id: Handle = msgspec.field(default_factory=Handle)


class Dispatch(msgspec.Struct, gc=False):
    """A kernel."""

    start_timestamp: _Time
    end_timestamp: _Time
    dispatch_info: DispatchInfo
    correlation_id: Correlation = msgspec.field(default_factory=Correlation)
    stream_id: Handle = msgspec.field(default_factory=Handle)
    thread_id: int = -1


class Counted(msgspec.Struct, gc=False):
    """A kernel whose counters were read; recorded so where nothing else is."""

    dispatch_data: Dispatch


class Copy(msgspec.Struct, gc=False):
    """A copy."""

    start_timestamp: _Time
    end_timestamp: _Time
    kind: int = -1
    operation: int = -1
    bytes: int = -1
    src_agent_id: Handle = msgspec.field(default_factory=Handle)
    dst_agent_id: Handle = msgspec.field(default_factory=Handle)
    correlation_id: Correlation = msgspec.field(default_factory=Correlation)
    stream_id: Handle = msgspec.field(default_factory=Handle)


class Api(msgspec.Struct, gc=False):
    """A call or a range on the host."""

    start_timestamp: _Time
    end_timestamp: _Time
    kind: int = -1
    operation: int = -1
    thread_id: int = -1
    correlation_id: Correlation = msgspec.field(default_factory=Correlation)


class AgentRecord(msgspec.Struct, gc=False):
    """A CPU (type 1) or a GPU (type 2)."""

    id: Handle
    type: int = 0
    name: str = ""
    product_name: str = ""
    node_id: int = -1
    logical_node_type_id: int = -1


class Symbol(msgspec.Struct, gc=False):
    """A kernel's names."""

    kernel_id: int
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""


class Kind(msgspec.Struct, gc=False):
    """The name of a kind of record, and of its operations."""

    kind: str
    operations: list[str] = msgspec.field(default_factory=list[str])


class Entry(msgspec.Struct, gc=False):
    """A text by number."""

    key: int
    value: str = ""


class _External(msgspec.Struct):
    external: msgspec.Raw = _NOTHING


class _Strings(msgspec.Struct):
    buffer_records: msgspec.Raw = _NOTHING
    marker_api: msgspec.Raw = _NOTHING
    correlation_id: _External = msgspec.field(default_factory=_External)


class _Buffers(msgspec.Struct):
    kernel_dispatch: msgspec.Raw = _NOTHING
    memory_copy: msgspec.Raw = _NOTHING
    hip_api: msgspec.Raw = _NOTHING
    hsa_api: msgspec.Raw = _NOTHING
    marker_api: msgspec.Raw = _NOTHING
    rccl_api: msgspec.Raw = _NOTHING


class _Callbacks(msgspec.Struct):
    counter_collection: msgspec.Raw = _NOTHING


class _Metadata(msgspec.Struct):
    pid: int = 0


class Process(msgspec.Struct):
    """One process. Lists stay text until they are read piece by piece."""

    buffer_records: _Buffers
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: msgspec.Raw = _NOTHING
    strings: _Strings = msgspec.field(default_factory=_Strings)
    kernel_symbols: msgspec.Raw = _NOTHING
    callback_records: _Callbacks = msgspec.field(default_factory=_Callbacks)
