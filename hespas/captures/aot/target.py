"""Targets of ahead-of-time compilation as they are written: ``tpu:v5p:8x8x8``, ``gpu:h100:8``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Literal

from hespas.graph.errors import UsageError, clipped

__all__ = ["GPUS", "TPUS", "Gpu", "Target", "Tpu"]


@dataclass(frozen=True, slots=True)
class Tpu:
    """A generation of TPUs: ``topology`` is what libtpu calls it, ``device`` the file of the chip, ``limits``
    the chips of a whole pod along each axis, ``devices_per_chip`` what JAX counts.
    """

    topology: str
    device: str
    limits: tuple[int, ...]
    devices_per_chip: int = 1
    chip_config: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU: the file of the device, compute capability, GPUs of a host."""

    device: str
    capability: tuple[int, int]
    per_host: int = 8


TPUS: dict[str, Tpu] = {
    "v2": Tpu("v2", "", (16, 16), 2),
    "v3": Tpu("v3", "TPU-v3", (32, 32), 2),
    "v4": Tpu("v4", "TPU-v4", (16, 16, 16), chip_config="megacore"),
    "v5e": Tpu("v5e", "TPU-v5e", (16, 16)),
    "v5p": Tpu("v5p", "TPU-v5p", (16, 20, 28)),
    "v6e": Tpu("v6e", "TPU-v6e", (16, 16)),
    "v7x": Tpu("tpu7x", "TPU-v7x", (16, 16, 36), 2),
}
"""Name -> generation. Pods as Google Cloud's documentation has them; v4 runs its two cores as one device."""

GPUS: dict[str, Gpu] = {
    "a100": Gpu("A100-SXM-80GB", (8, 0)),
    "h100": Gpu("H100-SXM", (9, 0)),
    "h200": Gpu("H200-SXM", (9, 0)),
    "b200": Gpu("B200-SXM", (10, 0)),
    "b300": Gpu("B300-SXM", (10, 3)),
    "gb200": Gpu("GB200", (10, 0), per_host=4),
}
"""Name -> kind. Hosts as NVIDIA builds them: HGX boards of eight, compute trays of four."""

_MAX_GPUS = 1 << 16
_EXAMPLE = "for example tpu:v5p:8x8x8 or gpu:h100:8"
_HOST_CHIPS = (2, 2)
"""Chips of a host along the first two axes; a larger slice is whole hosts."""
_ALIASES = {"tpu7x": "v7x"}


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for: ``platform``, ``name`` of the device there, and ``shape``: chips of a TPU slice
    along each axis, or the one number of GPUs. Made by :meth:`of`.
    """

    platform: Literal["tpu", "gpu"]
    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.platform}:{self.name}:{'x'.join(map(str, self.shape))}"

    @classmethod
    def of(cls, text: str | Target) -> Target:
        """From ``tpu:NAME:AxB[xC]`` or ``gpu:NAME:N``. Raises ``UsageError`` saying what is accepted."""
        if isinstance(text, Target):
            return text
        platform, _, rest = text.strip().lower().partition(":")
        name, _, size = rest.partition(":")
        name = _ALIASES.get(name, name)
        if platform == "tpu":
            return cls("tpu", name, _slice_shape(text, name, size))
        if platform == "gpu":
            return cls("gpu", name, (_gpu_count(text, name, size),))
        raise UsageError(f"target {clipped(repr(text))}: there is tpu and gpu", hint=f"write {_EXAMPLE}")

    @property
    def num_devices(self) -> int:
        """Devices as JAX counts them: of a TPU v3 or v7x chip two."""
        per_chip = TPUS[self.name].devices_per_chip if self.platform == "tpu" else 1
        return prod(self.shape) * per_chip

    @property
    def device(self) -> str:
        """The name of the device's file, empty where there is none."""
        return TPUS[self.name].device if self.platform == "tpu" else GPUS[self.name].device

    @property
    def extra(self) -> str:
        """The extra of this package that brings the compiler."""
        return f"jax-{self.platform}"

    @property
    def chips_of_host(self) -> tuple[int, ...]:
        """Of a TPU slice smaller than a host: the chips that there are along three axes; else empty."""
        if self.platform == "gpu" or prod(self.shape) >= prod(_HOST_CHIPS):
            return ()
        return (*self.shape, 1, 1)[:3]

    @property
    def topology(self) -> str:
        """What the compiler calls the devices: ``v5p:8x8x8``; of GPUs partitions x hosts x devices."""
        if self.platform == "tpu":
            return f"{TPUS[self.name].topology}:{'x'.join(map(str, self.shape))}"
        count, per_host = self.shape[0], GPUS[self.name].per_host
        return f"1x1x{count}" if count <= per_host else f"1x{count // per_host}x{per_host}"


def _numbers(size: str) -> tuple[int, ...]:
    """``2x4`` -> (2, 4), empty where it is none."""
    return (
        tuple(map(int, size.split("x"))) if re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*", size) else ()
    )


def _slice_shape(text: str, name: str, size: str) -> tuple[int, ...]:
    generation = TPUS.get(name)
    if generation is None:
        pods = ", ".join(f"{each} (up to {_by(TPUS[each].limits)})" for each in TPUS)
        raise UsageError(
            f"target {clipped(repr(text))}: no TPU is called {clipped(repr(name))}",
            hint=f"there are {pods}: for example tpu:v5p:8x8x8",
        )
    shape, limits = _numbers(size), generation.limits
    axes = "AxBxC" if len(limits) == 3 else "AxB"
    fitting = len(shape) == len(limits) and all(
        own <= most for own, most in zip(sorted(shape), sorted(limits), strict=True)
    )
    whole = prod(shape) < prod(_HOST_CHIPS) or all(
        own % chips == 0 for own, chips in zip(shape, _HOST_CHIPS, strict=False)
    )
    if not fitting or not whole:
        raise UsageError(
            f"target {clipped(repr(text))}: a slice of {name} is {axes} chips up to "
            f"{_by(limits)}, beyond one host whole ones of {_by(_HOST_CHIPS)} along the first two axes",
            hint=f"for example tpu:{name}:{'2x2x2' if len(limits) == 3 else '2x4'}",
        )
    return shape


def _gpu_count(text: str, name: str, size: str) -> int:
    kind = GPUS.get(name)
    if kind is None:
        raise UsageError(
            f"target {clipped(repr(text))}: no GPU that can be compiled for is called {clipped(repr(name))}",
            hint=f"there are {', '.join(GPUS)}: for example gpu:h100:8",
        )
    shape = _numbers(size)
    count = shape[0] if len(shape) == 1 else 0
    if not 0 < count <= _MAX_GPUS or (count > kind.per_host and count % kind.per_host):
        raise UsageError(
            f"target {clipped(repr(text))}: expected a number of GPUs, 1 to {kind.per_host} or "
            f"whole hosts of {kind.per_host} up to {_MAX_GPUS:,}",
            hint=f"for example gpu:{name}:{4 * kind.per_host}",
        )
    return count


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
