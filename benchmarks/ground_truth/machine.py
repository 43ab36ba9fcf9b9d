"""Description of the measured machine: device, clocks under load, and software versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from threading import Event, Thread

import msgspec

from fixtures.make.untyped import jax
from hespas._version import __version__
from hespas.graph.errors import UsageError
from hespas.hardware import find_device
from hespas.hardware.measure import cpu_name

__all__ = ["Clocks", "Machine", "clocks_under", "machine"]

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "numpy",
    "ml_dtypes",
)
_FLAGS = (
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "CUDA_VISIBLE_DEVICES",
)
_STATIC = (
    "name", "driver_version", "vbios_version", "persistence_mode", "power.limit", "clocks.max.sm",
    "clocks.max.mem", "clocks.applications.graphics",
)  # fmt: skip
_MOVING = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_LOAD_S = 0.15
_PATIENCE_S = 20.0


class Clocks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Frequencies [MHz], power [W] and temperature [C] during a case; None if unknown."""

    source: str = ""
    core_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Machine(msgspec.Struct, frozen=True):
    """The machine. ``hardware`` is the device name in the hardware library if it has one, ``kind`` the name
    in JAX.
    """

    hardware: str
    kind: str
    backend: str
    devices: int
    host: str
    versions: dict[str, str]
    flags: dict[str, str]
    driver: dict[str, str]


def machine(backend: str) -> Machine:
    """Return the description of this machine. Raises ``UsageError`` if JAX runs on another backend."""
    found = str(jax.default_backend())
    if found != backend:
        raise UsageError(
            f"JAX runs on backend {found}, expected {backend}",
            hint="install jax[cuda12] or jax[cuda13] for a GPU",
        )
    devices = jax.devices()
    kind = str(devices[0].device_kind)
    values = _smi(_STATIC) if backend == "gpu" else []
    return Machine(
        hardware=cpu_name() if backend == "cpu" else _library_name(kind),
        kind=kind,
        backend=backend,
        devices=len(devices),
        host=f"{cpu_name()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        versions={name: text for name in _PACKAGES if (text := _version(name))}
        | {"hespas": __version__, "platform": str(devices[0].client.platform_version).replace("\n", " ")},
        flags={name: os.environ[name] for name in _FLAGS if name in os.environ},
        driver=dict(zip(_STATIC, values, strict=False)),
    )


def _library_name(kind: str) -> str:
    try:
        return find_device(kind)
    except UsageError:
        return kind


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def clocks_under(backend: str, run: Callable[[], object]) -> Clocks:
    """Return the clocks under load: another thread calls ``run`` repeatedly, because idle devices lower their
    clocks.
    """
    ended = Event()

    def load() -> None:
        while not ended.is_set():
            run()

    if backend != "gpu":
        return _processor()
    worker = Thread(target=load)
    worker.start()
    try:
        ended.wait(_LOAD_S)
        values = _smi(_MOVING)
    finally:
        ended.set()
        worker.join()
    numbers = [_number(text) for text in values]
    if len(numbers) != len(_MOVING):
        return Clocks()
    return Clocks("nvidia-smi", *numbers)


def _processor() -> Clocks:
    """Return the mean frequency from /proc/cpuinfo, because most virtual machines lack cpufreq."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    numbers = [_number(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    known = [number for number in numbers if number is not None]
    return Clocks("cpuinfo", core_mhz=round(fmean(known), 1)) if known else Clocks()


def _smi(fields: tuple[str, ...]) -> list[str]:
    """Return fields of the first GPU from nvidia-smi; empty if it is absent or fails."""
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [part.strip() for part in done.stdout.strip().split(",")]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
