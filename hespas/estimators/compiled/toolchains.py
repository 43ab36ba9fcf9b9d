"""The compilers, as the measuring process sees them: untyped packages behind one typed protocol."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np

from hespas.estimators.compiled.messages import Machine

__all__ = ["TOOLCHAINS", "Array", "Toolchain"]

Array = np.ndarray[Any, np.dtype[Any]]


class Toolchain(Protocol):
    """A compiler and the device it compiles for."""

    def machine(self) -> Machine:
        """Who measures."""
        ...

    def compile(self, program: str, arguments: Sequence[Array]) -> Callable[[int], object]:
        """A function that runs the program so many turns and returns when it is done."""
        ...


def _processor() -> str:
    """The processor's name and how many of its threads may be used."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {threads} threads"


class _Xla:
    """XLA through jaxlib, on JAX's default device."""

    def __init__(self) -> None:
        self.jax: Any = import_module("jax")
        self.jax.config.update("jax_enable_x64", True)
        self.client: Any = import_module("jaxlib.xla_client")
        self.device: Any = self.jax.devices()[0]

    def machine(self) -> Machine:
        """JAX's device; a CPU by its own name."""
        is_cpu = self.device.platform == "cpu"
        return Machine(
            compiler=f"jaxlib {version('jaxlib')}",
            platform=str(self.device.platform),
            device=_processor() if is_cpu else str(self.device.device_kind),
            flags=os.environ.get("XLA_FLAGS", ""),
        )

    def compile(self, program: str, arguments: Sequence[Array]) -> Callable[[int], object]:
        """One executable; arguments are put on the device once."""
        backend, xla = self.device.client, self.client
        loaded = backend.compile_and_load(
            program.encode(), xla.DeviceList((self.device,)), xla.CompileOptions()
        )
        buffers = [self.jax.device_put(each, self.device) for each in arguments]
        counts: dict[int, Any] = {}

        def run(turns: int) -> object:
            count = counts.get(turns)
            if count is None:
                count = counts[turns] = self.jax.device_put(np.int32(turns), self.device)
            results = loaded.execute_sharded([count, *buffers]).disassemble_into_single_device_arrays()
            return self.jax.block_until_ready(results)

        return run


class _Iree:
    """IREE's own compiler and runtime, on the CPU."""

    def __init__(self) -> None:
        self.compiler: Any = import_module("iree.compiler")
        self.runtime: Any = import_module("iree.runtime")

    def machine(self) -> Machine:
        """The processor."""
        return Machine(
            compiler=f"iree {version('iree-base-compiler')}",
            platform="local-task",
            device=_processor(),
            flags="llvm-cpu host",
        )

    def compile(self, program: str, arguments: Sequence[Array]) -> Callable[[int], object]:
        """One module of the virtual machine."""
        runtime = self.runtime
        made = self.compiler.compile_str(
            program,
            input_type="stablehlo",
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
        config = runtime.Config("local-task")
        module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, made), config)
        buffers = [runtime.asdevicearray(config.device, each) for each in arguments]

        def run(turns: int) -> object:
            results: Any = module.main(np.int32(turns), *buffers)
            parts: Sequence[Any] = (results,) if hasattr(results, "to_host") else results
            # The whole waits for one: to fetch a result.
            return cast("object", parts[0].to_host())

        return run


TOOLCHAINS: Mapping[str, Callable[[], Toolchain]] = MappingProxyType({"xla": _Xla, "iree": _Iree})
