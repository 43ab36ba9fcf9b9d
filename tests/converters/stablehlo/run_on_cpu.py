"""Program that runs StableHLO on XLA:CPU in a new process, because jax fixes the number of devices on import.

``python run_on_cpu.py DEVICES < jobs.json``: a JSON list of files; the answer is a JSON list with, for each,
a digest of every output of every device, or why it does not run, and what XLA counts and keeps.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["main"]

_KEPT = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|dot|convolution)(?:\.\d+)?\("
)
_PARAMETER = re.compile(r"(\w+)\[([\d,]*)\]")
_DTYPES = {
    "pred": "bool",
    "s2": "int2",
    "s4": "int4",
    "s8": "int8",
    "s16": "int16",
    "s32": "int32",
    "s64": "int64",
    "u4": "uint4",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f8e8m0fnu": "float8_e8m0fnu",
    "f4e2m1fn": "float4_e2m1fn",
}


class _Runner:
    """The CPU client with ``devices`` devices."""

    def __init__(self, devices: int) -> None:
        self.jax: ModuleType = import_module("jax")
        self.numpy: ModuleType = import_module("numpy")
        self.api: ModuleType = import_module("jaxlib._jax")
        self.dtypes: ModuleType = import_module("ml_dtypes")
        self.sharding: ModuleType = import_module("jax.sharding")
        import_module("jax.lax.linalg")  # registers the LAPACK calls
        import_module("jaxlib.lapack").prepare_lapack_call("potrf_ffi", self.numpy.dtype("float32"))
        self.jax.config.update("jax_enable_x64", True)
        self.devices = self.jax.devices("cpu")[:devices]

    def run(self, text: str) -> dict[str, object]:
        """One program. Sharded ones run as partitions, others as replicas."""
        try:
            return self._run(text)
        except self.jax.errors.JaxRuntimeError as error:
            return {"error": str(error).splitlines()[0][:200]}

    def _run(self, text: str) -> dict[str, object]:
        executable = self._compiled(text)
        optimised = str(executable.hlo_modules()[0].to_string())
        results = executable.execute_sharded(self._arguments(optimised))
        outputs = results.disassemble_into_single_device_arrays()
        return {
            "outputs": [[self._digest(array) for array in arrays] for arrays in outputs],
            "flops": float(executable.cost_analysis().get("flops", 0.0)),
            "kept": dict(Counter(_KEPT.findall(optimised))),
        }

    def _compiled(self, text: str) -> Any:
        if "sdy.manual_computation" in text or "sdy.sharding" in text:
            try:
                return self._compile(text, partitions=True)
            except self.jax.errors.JaxRuntimeError:
                pass  # a device's share already: every device is a replica
        return self._compile(text, partitions=False)

    def _compile(self, text: str, *, partitions: bool) -> Any:
        count = len(self.devices)
        options = self.api.CompileOptions()
        build = options.executable_build_options
        for target in (options, build):
            target.num_replicas = 1 if partitions else count
            target.num_partitions = count if partitions else 1
        build.use_spmd_partitioning = build.use_shardy_partitioner = partitions
        shape = (1, count) if partitions else (count, 1)
        assignment = self.api.DeviceAssignment.create(self.numpy.arange(count).reshape(shape))
        options.device_assignment = build.device_assignment = assignment
        devices = self.api.DeviceList(tuple(self.devices))
        return self.devices[0].client.compile_and_load(text, devices, options)

    def _arguments(self, optimised: str) -> list[Any]:
        """Numbers from a seed, the same on every device; small, so that nothing overflows."""
        header = optimised.split("entry_computation_layout={(", 1)[1].split(")->", 1)[0]
        random = self.numpy.random.default_rng(0)
        mesh = self.sharding.Mesh(self.numpy.array(self.devices), ("x",))
        everywhere = self.sharding.NamedSharding(mesh, self.sharding.PartitionSpec())
        made: list[Any] = []
        for kind, extents in _PARAMETER.findall(re.sub(r"/\*.*?\*/", "", header)):
            shape = tuple(int(extent) for extent in extents.split(",") if extent)
            name = _DTYPES[kind]
            values = random.integers(0, 2, shape) if "int" in name or name == "bool" else random.random(shape)
            source = self.dtypes if hasattr(self.dtypes, name) else self.numpy
            made.append(
                self.jax.device_put(self.numpy.asarray(values).astype(getattr(source, name)), everywhere)
            )
        return made

    def _digest(self, array: Any) -> str:
        content = self.numpy.asarray(array)
        return hashlib.sha256(content.tobytes()).hexdigest()[:16] + f" {content.dtype}{content.shape}"


def main() -> None:
    """Answer the job on standard input."""
    devices = int(sys.argv[1])
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    runner = _Runner(devices)
    answers: list[dict[str, object]] = []
    for name in json.load(sys.stdin):
        data = Path(name).read_bytes()
        answers.append(runner.run((gzip.decompress(data) if name.endswith(".gz") else data).decode()))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
