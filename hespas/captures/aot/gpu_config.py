"""What XLA wants to know of a GPU that is not there: ``GpuTargetConfigProto`` in protobuf's text form.

Field names: ``xla/stream_executor/device_description.proto`` of openxla/xla. Sizes and rates are those of the
device file; limits per compute capability are of the table "Technical Specifications per Compute Capability"
of NVIDIA's CUDA C++ Programming Guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from hespas.captures.aot.target import GPUS
from hespas.graph.errors import InvariantError
from hespas.hardware import Device, named_device

__all__ = ["CUDNN", "target_config"]

CUDNN = (9, 8, 0)
"""The version of cuDNN that XLA may call."""
_KIB = 1024
_FLOPS_PER_CYCLE = 2
"""Of a lane: a multiplication and an addition."""
_RESERVED_BYTES = _KIB
"""Shared memory of a block that CUDA keeps for itself from compute capability 8.0 on."""


@dataclass(frozen=True, slots=True)
class _Capability:
    """Of one SM: lanes that multiply f32, and shared memory in KiB."""

    lanes: int
    shared_kib: int


_CAPABILITIES: dict[tuple[int, int], _Capability] = {
    (8, 0): _Capability(64, 164),
    (9, 0): _Capability(128, 228),
    (10, 0): _Capability(128, 228),
    (10, 3): _Capability(128, 228),
}
_LIMITS: dict[str, int] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 48 * _KIB,
    "registers_per_core_limit": 64 * _KIB,
    "registers_per_block_limit": 64 * _KIB,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
"""Alike in all of these compute capabilities."""


def target_config(name: str) -> str:
    """The configuration of one of :data:`~hespas.captures.aot.target.GPUS`.

    The clock is the one at which all lanes make the published f32 rate.
    """
    gpu = GPUS[name]
    device, capability = named_device(gpu.device), _CAPABILITIES[gpu.capability]
    shared = capability.shared_kib * _KIB
    figures: dict[str, int | float] = {
        **_LIMITS,
        "core_count": device.units,
        "fpus_per_core": capability.lanes,
        "clock_rate_ghz": round(
            _vector_rate(device) / (device.units * capability.lanes * _FLOPS_PER_CYCLE * 1e9), 3
        ),
        "memory_bandwidth": round(device.main_memory.bandwidth_bytes_per_s),
        "device_memory_size": device.main_memory.capacity_bytes,
        "l2_cache_size": _cache_bytes(device),
        "shared_memory_per_core": shared,
        "shared_memory_per_block_optin": shared - _RESERVED_BYTES,
    }
    major, minor = gpu.capability
    # Kernels of Hopper and later use instructions of one architecture only (sm_90a).
    feature = "NONE" if major < 9 else "ACCELERATED_FEATURES"
    lines = [f"  {key}: {figure}" for key, figure in figures.items()]
    link = device.link("scale_up")
    return "\n".join(
        (
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}",
            f"  device_interconnect_info {{ active_links: {0 if link is None else link.links_per_device} }}",
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}",
            f'device_description_str: "{device.aliases[0] if device.aliases else device.name}"',
            "",
        )
    )


def _vector_rate(device: Device) -> float:
    rates = [peak.flops_per_s for peak in device.peaks if peak.unit == "vector" and peak.dtype == "f32"]
    if len(rates) != 1 or isnan(rates[0]):
        raise InvariantError(f"{device.name}: its file states no rate of f32 outside the tensor cores")
    return rates[0]


def _cache_bytes(device: Device) -> int:
    sizes = [memory.capacity_bytes for memory in device.memories if memory.level == "cache"]
    if not sizes:
        raise InvariantError(f"{device.name}: its file states no L2 cache")
    return round(sizes[-1])
