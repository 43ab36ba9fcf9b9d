"""What Kineto says of an event in ``args``, by kind of event; anything else there is skipped.

Source: https://github.com/pytorch/kineto, ``libkineto/src/output_json.cpp``. Categories are data: other
back ends bring their own.
"""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec import field

from hespas.converters.format import HEAD_BYTES, Head
from hespas.files.streams import first_bytes

__all__ = [
    "KINDS",
    "DeviceArgs",
    "Header",
    "HostArgs",
    "Kind",
    "LaunchArgs",
    "MemoryArgs",
    "Number",
    "SyncArgs",
    "category_of",
    "is_execution_trace",
    "is_profile",
    "job_name",
    "rank_in_name",
    "score_execution_trace",
    "score_folder",
    "score_profile",
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
    FUNCTION = 5
    """A function of Python, or a module of the model (``with_stack``)."""
    ALLOCATION = 6
    """Memory that was taken or given back (``profile_memory``): a moment, named ``[memory]``."""


KINDS: MappingProxyType[str, Kind] = MappingProxyType(
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
            Kind.DEVICE,
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
            Kind.LAUNCH,
        ),
        "cpu_op": Kind.HOST,
        "user_annotation": Kind.ANNOTATION,
        "cuda_sync": Kind.SYNC,
        "python_function": Kind.FUNCTION,
        "cpu_instant_event": Kind.ALLOCATION,
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


class DeviceArgs(msgspec.Struct, gc=False):
    """Of work on a device; ``grid`` and ``block`` are three numbers each, the last ones of collectives."""

    correlation: Number = None
    external_id: Number = field(default=None, name="External id")
    first_external_id: Number = field(default=None, name="external id")
    graph_node: Number = field(default=None, name="graph node id")
    stream: Number = None
    device: Number = None
    bytes: Number = None
    grid: msgspec.Raw = _ABSENT
    block: msgspec.Raw = _ABSENT
    collective: str | None = field(default=None, name="Collective name")
    in_elements: Number = field(default=None, name="In msg nelems")
    out_elements: Number = field(default=None, name="Out msg nelems")
    dtype: str | None = None
    group_size: Number = field(default=None, name="Group size")
    group_name: str | None = field(default=None, name="Process Group Name")
    group_ranks: str | list[int] | None = field(default=None, name="Process Group Ranks")
    sequence: Number = field(default=None, name="Seq")
    in_split: str | list[int] | None = field(default=None, name="In split size")
    out_split: str | list[int] | None = field(default=None, name="Out split size")
    source: Number = field(default=None, name="Src Rank")
    target: Number = field(default=None, name="Dst Rank")


class LaunchArgs(msgspec.Struct, gc=False):
    """Of a call that launches; HIP's state the kernel."""

    correlation: Number = None
    external_id: Number = field(default=None, name="External id")
    first_external_id: Number = field(default=None, name="external id")
    kernel: Number = None


class MemoryArgs(msgspec.Struct, gc=False):
    """Of memory that was taken (``bytes`` > 0) or given back; totals are those of the device's allocator."""

    bytes: Number = field(default=None, name="Bytes")
    allocated: Number = field(default=None, name="Total Allocated")
    reserved: Number = field(default=None, name="Total Reserved")
    device_type: Number = field(default=None, name="Device Type")
    device: Number = field(default=None, name="Device Id")


class SyncArgs(msgspec.Struct, gc=False):
    """Of a wait: ``stream`` waits for what the call ``record`` marked on ``wait_on_stream``."""

    correlation: Number = None
    device: Number = None
    stream: Number = None
    wait_on_stream: Number = None
    record: Number = field(default=None, name="wait_on_cuda_event_record_corr_id")


class HostArgs(msgspec.Struct, gc=False):
    """Of an operation on the host. Shapes and values stay text: equal ones are kept once."""

    external_id: Number = field(default=None, name="External id")
    record_id: Number = field(default=None, name="Record function id")
    sequence: Number = field(default=None, name="Sequence number")
    forward_thread: Number = field(default=None, name="Fwd thread id")
    dims: msgspec.Raw = field(default=_ABSENT, name="Input Dims")
    types: msgspec.Raw = field(default=_ABSENT, name="Input type")
    strides: msgspec.Raw = field(default=_ABSENT, name="Input Strides")
    concrete: msgspec.Raw = field(default=_ABSENT, name="Concrete Inputs")
    flops: msgspec.Raw = field(default=_ABSENT, name="kernel_flop")
    gigabytes: msgspec.Raw = field(default=_ABSENT, name="kernel_num_gb")


class _Device(msgspec.Struct, gc=False):
    id: Number = None
    name: str = ""
    total_memory: Number = field(default=None, name="totalGlobalMem")
    major: Number = field(default=None, name="computeMajor")
    minor: Number = field(default=None, name="computeMinor")
    processors: Number = field(default=None, name="numSms")


class _Distributed(msgspec.Struct, gc=False):
    backend: str = ""
    rank: Number = None
    world_size: Number = None
    groups: msgspec.Raw = field(default=_ABSENT, name="pg_config")


class Header(msgspec.Struct, gc=False):
    """Of the whole trace."""

    schema_version: Number = field(default=None, name="schemaVersion")
    devices: list[_Device] = field(default_factory=list[_Device], name="deviceProperties")
    distributed: _Distributed | None = field(default=None, name="distributedInfo")
    base_time_ns: Number = field(default=None, name="baseTimeNanoseconds")
    cuda_runtime_version: Number = None
    cuda_driver_version: Number = None
    cupti_version: Number = None
    hip_runtime_version: Number = None
    hip_driver_version: Number = None
    nccl_version: str | None = None


# --- Telling PyTorch's files by their first bytes: profiles, execution traces, and folders of both.

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[\s*\{[^{}]*"ph"\s*:')
_SIGNS = (b'"schemaVersion"', b'"deviceProperties"', b'"cat": "cpu_op"', b'"trace_id"', b'"distributedInfo"')
_SCHEMA = re.compile(rb'"schema"\s*:\s*"1\.\d{1,2}\.\d{1,2}[^"]{0,40}"')
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
_NODE_FIELDS = (b'"rf_id"', b'"ctrl_deps"', b'"op_schema"', b'"fw_parent"')
_CERTAIN, _DIRECTORY, _LIKELY, _NO = 95, 92, 60, 0
_MOST_LOOKED_AT = 64


def _text(data: bytes) -> bytes:
    return data.removeprefix(b"\xef\xbb\xbf").lstrip()


def score_profile(head: Head) -> int:
    """By the fields that only this profiler writes; any other Chrome trace is less likely one."""
    if head.is_directory or _text(head.data)[:1] not in (b"{", b"["):
        return _NO
    signs = sum(sign in head.data for sign in _SIGNS)
    if _EVENTS.search(head.data):
        return _CERTAIN if signs else _LIKELY
    return _LIKELY if signs > 1 else _NO


def is_profile(data: bytes) -> bool:
    """Whether a file starts like a profile."""
    return _text(data)[:1] == b"{" and any(sign in data for sign in _SIGNS) and not is_execution_trace(data)


def is_execution_trace(data: bytes) -> bool:
    """Whether a file starts like an execution trace."""
    if _text(data)[:1] != b"{":
        return False
    fields = sum(each in data for each in _NODE_FIELDS)
    return bool(_NODES.search(data)) and (fields > 1 or _SCHEMA.search(data) is not None)


def score_execution_trace(head: Head) -> int:
    """By its schema and the fields of its nodes."""
    if head.is_directory or not is_execution_trace(head.data):
        return _NO
    return _CERTAIN if _SCHEMA.search(head.data) else _LIKELY


def score_folder(head: Head) -> int:
    """Whether a file right in the folder is one of PyTorch's, or every sub-folder with JSON has one: a job
    in folders, one a rank or a run, and no collection in which PyTorch's files lie beside others.
    """
    if not head.is_directory:
        return _NO
    folders: list[bool] = []
    for name in head.names[:_MOST_LOOKED_AT]:
        entry = head.path / name
        try:
            inner = sorted(entry.iterdir())[:4] if entry.is_dir() else None
        except OSError:
            continue
        if inner is None:
            if _is_ours(entry):
                return _DIRECTORY
        elif any(".json" in path.suffixes for path in inner):
            folders.append(any(_is_ours(path) for path in inner))
    return _DIRECTORY if folders and all(folders) else _NO


def _is_ours(path: Path) -> bool:
    data = first_bytes(path, HEAD_BYTES) if ".json" in path.suffixes else b""
    return is_profile(data) or is_execution_trace(data)


# What file names say: the rank, and which of several jobs a file is of.

_WORDED = re.compile(r"(?:rank|worker|gpu|device)[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$", re.IGNORECASE)
_NUMBER = re.compile(r"(?:^|[-_.])(\d{1,6})(?=$|[-_.])")
_DOTTED = re.compile(r"\.(\d{1,6})(?=$|\.)")
_KINDS = re.compile(
    r"(?:et[-_]host|execution[-_]trace|kineto|pytorch[-_]et|host[-_]et|(?<![a-z])(?:et|eg)(?![a-z]))",
    re.IGNORECASE,
)


def rank_in_name(name: str, *, alone: bool = False) -> int:
    """The rank a file name states, -1 where none: behind ``rank`` or ``worker``, else its last number. Of a
    file ``alone`` only one between dots counts: ``run_2024`` was recorded in that year, or is a run.
    """
    stem = _SUFFIXES.sub("", name)
    worded = _WORDED.search(stem)
    if worded:
        return int(worded[1])
    numbers = (_DOTTED if alone else _NUMBER).findall(stem)
    return int(numbers[-1]) if numbers else -1


def job_name(name: str) -> str:
    """A name for the job: without rank, suffixes, and the words that tell the two kinds of file apart."""
    stem = _KINDS.sub("", _WORDED.sub("", _SUFFIXES.sub("", name)))
    cleaned = re.sub(r"([-_.])[-_.]+", r"\1", stem).strip("-_. ")
    return cleaned or "trace"
