"""What measures: the device, its clocks under load, and the versions of everything that made the programs."""

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
    """Frequencies [MHz], power [W] and temperature [C] while the case ran; None is not known."""

    source: str = ""
    core_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Machine(msgspec.Struct, frozen=True):
    """``hardware`` is the library's name of the device where it has one, ``kind`` what JAX calls it."""

    hardware: str
    kind: str
    backend: str
    devices: int
    host: str
    versions: dict[str, str]
    flags: dict[str, str]
    driver: dict[str, str]


def machine(backend: str) -> Machine:
    """The machine this runs on. Raises ``UsageError`` where JAX has no such backend here."""
    found = str(jax.default_backend())
    if found != backend:
        raise UsageError(
            f"JAX runs on {found} here, not on {backend}", hint="install jax[cuda12] or jax[cuda13] for a GPU"
        )
    devices = jax.devices()
    kind = str(devices[0].device_kind)
    told = _smi(_STATIC) if backend == "gpu" else []
    return Machine(
        hardware=cpu_name() if backend == "cpu" else _library_name(kind),
        kind=kind,
        backend=backend,
        devices=len(devices),
        host=f"{cpu_name()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        versions={name: text for name in _PACKAGES if (text := _version(name))}
        | {"hespas": __version__, "platform": str(devices[0].client.platform_version).replace("\n", " ")},
        flags={name: os.environ[name] for name in _FLAGS if name in os.environ},
        driver=dict(zip(_STATIC, told, strict=False)),
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
    """The clocks while ``run`` is called again and again beside: an idle device shows another frequency."""
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
        told = _smi(_MOVING)
    finally:
        ended.set()
        worker.join()
    numbers = [_number(text) for text in told]
    if len(numbers) != len(_MOVING):
        return Clocks()
    return Clocks("nvidia-smi", *numbers)


def _processor() -> Clocks:
    """The mean frequency that Linux tells of; no cpufreq in most virtual machines, so from cpuinfo."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    told = [_number(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    known = [number for number in told if number is not None]
    return Clocks("cpuinfo", core_mhz=round(fmean(known), 1)) if known else Clocks()


def _smi(fields: tuple[str, ...]) -> list[str]:
    """What nvidia-smi says of the first GPU; nothing where it is not there or fails."""
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
