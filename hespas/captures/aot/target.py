"""Targets of ahead-of-time compilation (``tpu:v5p:8x8x8``, ``gpu:h100:8``), and XLA's description of the
GPUs.

XLA describes a GPU by ``GpuTargetConfigProto`` in protobuf's text form. It uses the field names of
``xla/stream_executor/device_description.proto`` of openxla/xla. Sizes and rates are from the device file;
limits per compute capability are from the table "Technical Specifications per Compute Capability" of NVIDIA's
CUDA C++ Programming Guide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isnan, prod
from typing import Literal

from hespas.graph.errors import InvariantError, UsageError, clipped
from hespas.hardware import named_device

__all__ = ["CUDNN", "GPUS", "TPUS", "GpuModel", "Target", "TpuGeneration", "target_config"]


@dataclass(frozen=True, slots=True)
class TpuGeneration:
    """TPU generation: ``topology`` is its name in libtpu, and ``device`` its hardware file. ``limits`` is the
    number of chips of a whole pod along each axis. ``devices_per_chip`` is the number of JAX devices per
    chip. ``chip_config`` selects how the cores of a chip are used (empty: the default).
    """

    topology: str
    device: str
    limits: tuple[int, ...]
    devices_per_chip: int = 1
    chip_config: str = ""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """GPU model that XLA can compile for: its device file, compute capability, and GPUs per host."""

    device: str
    capability: tuple[int, int]
    per_host: int = 8


TPUS: dict[str, TpuGeneration] = {
    "v2": TpuGeneration("v2", "", (16, 16), 2),
    "v3": TpuGeneration("v3", "TPU-v3", (32, 32), 2),
    "v4": TpuGeneration("v4", "TPU-v4", (16, 16, 16), chip_config="megacore"),
    "v5e": TpuGeneration("v5e", "TPU-v5e", (16, 16)),
    "v5p": TpuGeneration("v5p", "TPU-v5p", (16, 20, 28)),
    "v6e": TpuGeneration("v6e", "TPU-v6e", (16, 16)),
    "v7x": TpuGeneration("tpu7x", "TPU-v7x", (16, 16, 36), 2),
}
"""Generations by name. Pod sizes are from Google Cloud's documentation; v4 runs its two cores as one device.
"""

GPUS: dict[str, GpuModel] = {
    "a100": GpuModel("A100-SXM-80GB", (8, 0)),
    "h100": GpuModel("H100-SXM", (9, 0)),
    "h200": GpuModel("H200-SXM", (9, 0)),
    "b200": GpuModel("B200-SXM", (10, 0)),
    "b300": GpuModel("B300-SXM", (10, 3)),
    "gb200": GpuModel("GB200", (10, 0), per_host=4),
}
"""Models by name. Hosts as built by NVIDIA: HGX boards of eight, compute trays of four."""

CUDNN = (9, 8, 0)
"""Version of cuDNN that XLA may call."""

_MAX_GPUS = 1 << 16
_EXAMPLE = "for example tpu:v5p:8x8x8 or gpu:h100:8"
_HOST_CHIPS = (2, 2)
"""TPU chips of a host along the first two axes; a larger slice consists of whole hosts."""
_ALIASES = {"tpu7x": "v7x"}
_KIB = 1024
_FLOPS_PER_CYCLE = 2
"""FLOPs of one lane: a multiplication and an addition."""
_RESERVED_BYTES = _KIB
"""Shared memory of a block that CUDA reserves from compute capability 8.0 on."""
_SM_SIZES: dict[tuple[int, int], tuple[int, int]] = {
    (8, 0): (64, 164),
    (9, 0): (128, 228),
    (10, 0): (128, 228),
    (10, 3): (128, 228),
}
"""Compute capability -> f32 lanes of one SM, its shared memory [KiB]."""
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
"""Limits that are equal in all of these compute capabilities."""


@dataclass(frozen=True, slots=True)
class Target:
    """Compilation target. Use :meth:`of` to make one from a name.

    ``platform`` is ``tpu`` or ``gpu``, ``name`` the device. ``shape`` is the number of chips of a TPU slice
    along each axis, or the number of GPUs.
    """

    platform: Literal["tpu", "gpu"]
    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.platform}:{self.name}:{_shape_text(self.shape)}"

    @classmethod
    def of(cls, text: str | Target) -> Target:
        """Parse ``tpu:NAME:AxB[xC]`` or ``gpu:NAME:N``. Raises ``UsageError`` with the accepted values."""
        if isinstance(text, Target):
            return text
        platform, _, rest = text.strip().lower().partition(":")
        name, _, size = rest.partition(":")
        name = _ALIASES.get(name, name)
        is_size = re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*", size)
        shape = tuple(map(int, size.split("x"))) if is_size else ()
        if platform == "tpu":
            generation = TPUS.get(name)
            if generation is None:
                pods = ", ".join(f"{tpu} (up to {_shape_text(TPUS[tpu].limits)})" for tpu in TPUS)
                raise UsageError(
                    f"target {clipped(repr(text))}: unknown TPU {clipped(repr(name))}",
                    hint=f"name one of {pods}: for example tpu:v5p:8x8x8",
                )
            limits = generation.limits
            axes = "AxBxC" if len(limits) == 3 else "AxB"
            fits = len(shape) == len(limits) and all(
                size <= limit for size, limit in zip(sorted(shape), sorted(limits), strict=True)
            )
            has_whole_hosts = prod(shape) < prod(_HOST_CHIPS) or all(
                size % chips == 0 for size, chips in zip(shape, _HOST_CHIPS, strict=False)
            )
            if not fits or not has_whole_hosts:
                raise UsageError(
                    f"target {clipped(repr(text))}: a slice of {name} is {axes} chips up to "
                    f"{_shape_text(limits)}; a slice of more than one host has whole hosts of "
                    f"{_shape_text(_HOST_CHIPS)} chips along the first two axes",
                    hint=f"write a slice such as tpu:{name}:{'2x2x2' if len(limits) == 3 else '2x4'}",
                )
            return cls("tpu", name, shape)
        if platform == "gpu":
            gpu = GPUS.get(name)
            if gpu is None:
                raise UsageError(
                    f"target {clipped(repr(text))}: {clipped(repr(name))} is not a GPU that can be "
                    "compiled for",
                    hint=f"name one of {', '.join(GPUS)}: for example gpu:h100:8",
                )
            count = shape[0] if len(shape) == 1 else 0
            if not 0 < count <= _MAX_GPUS or (count > gpu.per_host and count % gpu.per_host):
                raise UsageError(
                    f"target {clipped(repr(text))}: expected a number of GPUs, 1 to {gpu.per_host} or "
                    f"whole hosts of {gpu.per_host} up to {_MAX_GPUS:,}",
                    hint=f"write a number of whole hosts, such as gpu:{name}:{4 * gpu.per_host}",
                )
            return cls("gpu", name, shape)
        raise UsageError(
            f"target {clipped(repr(text))}: expected the platform tpu or gpu", hint=f"write {_EXAMPLE}"
        )

    @property
    def num_devices(self) -> int:
        """Number of devices as counted by JAX: two per chip of TPU v3 and v7x."""
        per_chip = TPUS[self.name].devices_per_chip if self.platform == "tpu" else 1
        return prod(self.shape) * per_chip

    @property
    def device(self) -> str:
        """Name of the device file, empty without a file."""
        return TPUS[self.name].device if self.platform == "tpu" else GPUS[self.name].device

    @property
    def extra(self) -> str:
        """Name of the optional dependency group (extra) of this package that installs the compiler."""
        return f"jax-{self.platform}"

    @property
    def chips_of_host(self) -> tuple[int, ...]:
        """Return the numbers of chips of a host along three axes, if a TPU slice is smaller than a host;
        otherwise empty.
        """
        if self.platform == "gpu" or prod(self.shape) >= prod(_HOST_CHIPS):
            return ()
        return (*self.shape, 1, 1)[:3]

    @property
    def topology(self) -> str:
        """Return the topology in the compiler's notation: ``v5p:8x8x8`` for TPUs; for GPUs, partitions x
        hosts x devices.
        """
        if self.platform == "tpu":
            return f"{TPUS[self.name].topology}:{_shape_text(self.shape)}"
        count, per_host = self.shape[0], GPUS[self.name].per_host
        return f"1x1x{count}" if count <= per_host else f"1x{count // per_host}x{per_host}"


def target_config(name: str) -> str:
    """Return XLA's configuration text for one of :data:`GPUS`.

    The clock rate in it is the one at which all lanes together reach the published f32 rate.
    """
    gpu = GPUS[name]
    device = named_device(gpu.device)
    lanes, shared_kib = _SM_SIZES[gpu.capability]
    rates = [peak.flops_per_s for peak in device.peaks if peak.unit == "vector" and peak.dtype == "f32"]
    if len(rates) != 1 or isnan(rates[0]):
        raise InvariantError(f"{device.name}: its file has no f32 rate of the vector unit")
    caches = [memory.capacity_bytes for memory in device.memories if memory.level == "cache"]
    if not caches:
        raise InvariantError(f"{device.name}: its file has no L2 cache")
    figures: dict[str, int | float] = {
        **_LIMITS,
        "core_count": device.units,
        "fpus_per_core": lanes,
        "clock_rate_ghz": round(rates[0] / (device.units * lanes * _FLOPS_PER_CYCLE * 1e9), 3),
        "memory_bandwidth": round(device.main_memory.bandwidth_bytes_per_s),
        "device_memory_size": device.main_memory.capacity_bytes,
        "l2_cache_size": round(caches[-1]),
        "shared_memory_per_core": shared_kib * _KIB,
        "shared_memory_per_block_optin": shared_kib * _KIB - _RESERVED_BYTES,
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


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
