"""Child process that runs a real compiler, which may crash, hang or print anything.

It reads a line of JSON (:class:`CompileJob`) and the program from standard input, and writes a line of JSON
(:class:`CompileResult`) and the optimised HLO to standard output. ``jax._src``, ``jaxlib._jax`` and the
compile-only clients of the plugins are private: only this module uses them, as they are in jax 0.10.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from hespas.converters.stablehlo.communication import read_mesh
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import parse_program
from hespas.files.processes import encode_error
from hespas.graph.errors import FormatError, HespasError, UsageError
from hespas.graph.mesh import Mesh

__all__ = ["CompileJob", "CompileResult", "environment", "main"]

_MEMORY_KINDS = ("argument", "output", "alias", "temp", "generated_code")
_COST_KEYS = ("flops", "transcendentals", "bytes accessed", "optimal_seconds")
"""Totals of the compiler's cost analysis. Its figures per operand position cannot be assigned to an
operation.
"""
_NO_CHIP = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not query a metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is locked, so other processes do not interfere
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_MAX_MESSAGE = 1500

_DeviceArray = np.ndarray[Any, np.dtype[np.object_]]


class CompileJob(msgspec.Struct, frozen=True):
    """Request of one ahead-of-time compilation: the target and the mesh.

    ``axes`` and ``mesh`` are names and sizes of the mesh axes; ``config`` is the target configuration of a
    GPU. For TPUs, ``chip_config`` selects how the cores of a chip are used. ``chips_of_host`` is the
    arrangement of the chips of a host that has fewer chips than usual.
    """

    platform: str
    topology: str
    axes: tuple[str, ...]
    mesh: tuple[int, ...]
    config: str = ""
    chip_config: str = ""
    chips_of_host: tuple[int, ...] = ()


class CompileResult(msgspec.Struct, frozen=True):
    """Result of one ahead-of-time compilation.

    If the compiler failed, ``refused`` is its message, and ``fault`` an error of Hespas. ``memory`` is in
    bytes, ``costs`` as the compiler reports them. ``notes`` report deviations from the job.
    """

    refused: str = ""
    fault: dict[str, str] = {}
    memory: dict[str, int] = {}
    costs: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    cpu_s: float = -1.0
    peak_rss_bytes: int = -1


def environment() -> dict[str, str]:
    """Return environment variables that stop the compilers from searching for a real device."""
    return dict(_NO_CHIP)


def main() -> int:
    """Read the compilation job from standard input, compile it, and write the result to standard output."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print to standard output, which carries the result
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=CompileJob)
    program = sys.stdin.buffer.read()
    try:
        result, text = _compile(job, program)
    except HespasError as error:
        result, text = CompileResult(fault=encode_error(error)), b""
    except Exception as error:  # compilers refuse a program by any exception
        result, text = CompileResult(refused=f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]), b""
    output.write(msgspec.json.encode(result) + b"\n" + text)
    output.flush()
    return 0


def _compile(job: CompileJob, program: bytes) -> tuple[CompileResult, bytes]:
    devices, notes = _devices(job)
    bindings = load_bindings()
    module: Any = parse_program(program, bindings).module
    with module.context:
        if not list(module.body.operations):
            raise FormatError(
                "the program is empty", hint="give StableHLO of the whole mesh, as lowered by jax"
            )
        wanted = dict(zip(job.axes, job.mesh, strict=True))
        mesh_ops = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
        meshes = [read_mesh(op.attributes["mesh"], bindings.sdy) for op in mesh_ops]
        sizes = [mesh.mesh.axes for mesh in meshes if mesh.mesh.names]
        if sizes and wanted not in sizes:
            raise UsageError(
                f"the mesh of the program is {Mesh.of(sizes[0])}, but the target mesh is {Mesh.of(wanted)}",
                hint="give the mesh that the program was lowered for, and a target of its size",
            )
        native = import_module("jaxlib._jax")
        attributes = module.operation.attributes

        def count_of(key: str, default: int) -> int:
            return int(attributes[key].value) if key in attributes else default

        count = devices.size
        replicas = count_of("mhlo.num_replicas", 1)
        partitions = count_of("mhlo.num_partitions", count // max(replicas, 1))
        if replicas * partitions != count:
            raise ValueError(f"the program is for {replicas * partitions} devices, the mesh has {count}")
        ids = np.array([device.id for device in devices.reshape(-1).tolist()], dtype=np.int64)
        options = native.CompileOptions()
        options.num_replicas, options.num_partitions = replicas, partitions
        options.device_assignment = native.DeviceAssignment.create(ids.reshape(replicas, partitions))
        build = options.executable_build_options
        build.use_spmd_partitioning = partitions > 1
        build.use_shardy_partitioner = "sdy.mesh" in {op.operation.name for op in module.body.operations}
        flat = tuple(devices.reshape(-1).tolist())
        executable: Any = flat[0].client.compile(module, native.DeviceList(flat), options)
    text = "\n".join(hlo_module.to_string() for hlo_module in executable.hlo_modules())
    stats = executable.get_compiled_memory_stats()
    memory = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in _MEMORY_KINDS}
    memory["peak"] = int(getattr(stats, "peak_memory_in_bytes", -1))
    analysis: dict[str, float] = {}
    with suppress(Exception):  # compilers without a cost analysis raise
        analysis = executable.cost_analysis()
    cpu_s, peak_rss_bytes = -1.0, -1
    if sys.platform != "win32":
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        peak_rss_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result = CompileResult(
        memory=memory,
        costs={key: float(analysis[key]) for key in _COST_KEYS if key in analysis},
        notes=notes,
        cpu_s=cpu_s,
        peak_rss_bytes=peak_rss_bytes,
    )
    return result, text.encode("utf-8", "surrogateescape")


def _devices(job: CompileJob) -> tuple[_DeviceArray, tuple[str, ...]]:
    """Return the devices of the target topology in the order of the mesh, and notes for the user. Neighbours
    in the mesh are neighbours in the network if JAX finds such an order of devices.
    """
    topologies = import_module("jax.experimental.topologies")
    if job.platform == "gpu":
        import_module("jax").devices()  # initialises the backends, so that the plugin can register itself
        import_module("jax_plugins.xla_cuda13")
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="target", topology=job.topology, target_config=job.config
        )
    else:
        chip: dict[str, Any] = {"chip_config_name": job.chip_config} if job.chip_config else {}
        if job.chips_of_host:
            chip["chips_per_host_bounds"] = list(job.chips_of_host)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=job.topology, **chip)
    listed = list(topology.devices)
    if len(listed) != int(np.prod(job.mesh)):
        raise ValueError(f"the topology has {len(listed)} devices, the mesh {int(np.prod(job.mesh))}")
    try:
        axes = tuple(f"axis{axis}" for axis in range(len(job.mesh)))
        return topologies.make_mesh(topology, job.mesh, axes).devices, ()
    except (AssertionError, NotImplementedError, ValueError) as error:
        devices = np.empty(len(listed), dtype=object)
        devices[:] = listed
        note = (
            f"devices are in the order of the topology, because JAX finds no better one: {str(error)[:300]}"
        )
        return devices.reshape(job.mesh), (note,)
